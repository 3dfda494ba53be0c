"""A second machine for tests: a network namespace with its own address, connected to this one by a pair of devices."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from privileged import require_root


class OtherMachine(NamedTuple):
    """A namespace: the address of this machine as seen from it, and its own address."""

    name: str
    host_address: str
    address: str

    def wrap(self, *command: str) -> list[str]:
        """Return the command that runs another one in the namespace."""
        return [find_ip(), "netns", "exec", self.name, *command]


def find_ip() -> str:
    program = shutil.which("ip", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    assert program, "this test needs the program `ip`: install iproute2"
    return program


def call_ip(*arguments: str, check: bool = True) -> None:
    subprocess.run([find_ip(), *arguments], check=check, capture_output=not check)


@contextmanager
def open_other_machine() -> Iterator[OtherMachine]:
    """Create a namespace for the block; only root may do that."""
    require_root("network namespaces")
    number = os.getpid() % 250
    machine = OtherMachine(f"uefl-{os.getpid()}", f"10.213.{number}.1", f"10.213.{number}.2")
    outside, inside = f"ueflo{os.getpid()}", f"uefli{os.getpid()}"
    call_ip("netns", "add", machine.name)
    try:
        call_ip("link", "add", outside, "type", "veth", "peer", "name", inside, "netns", machine.name)
        call_ip("address", "add", f"{machine.host_address}/30", "dev", outside)
        call_ip("link", "set", outside, "up")
        call_ip("-n", machine.name, "address", "add", f"{machine.address}/30", "dev", inside)
        call_ip("-n", machine.name, "link", "set", inside, "up")
        call_ip("-n", machine.name, "link", "set", "lo", "up")
        yield machine
    finally:
        call_ip("link", "del", outside, check=False)
        call_ip("netns", "del", machine.name, check=False)
