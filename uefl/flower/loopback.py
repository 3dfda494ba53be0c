"""A whole federation on this machine: a SuperLink and SuperNodes as real processes, all gone in the end."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from uefl.errors import Stopped

MARK = "UEFL_LOOPBACK"  # in the environment of all that we start: some of it leaves our process group


class Loopback:
    """The processes of a federation that `uefl.flower.deploy.init` wrote for 127.0.0.1."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port, self.token = folder, port, uuid4().hex
        self.coordinator, self.logs = folder / "coordinator", folder / "logs"
        self.logs.mkdir(exist_ok=True)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def superlink(self) -> None:
        """Start the coordinator's SuperLink and wait until it can be reached."""
        self.start("superlink", self.coordinator / "superlink.sh")
        end = time.monotonic() + 120
        while not _listens(self.port):
            if self.processes["superlink"].poll() is not None or time.monotonic() > end:
                raise Stopped(f"the SuperLink did not start: {self.log('superlink')[-2000:]}")
            time.sleep(0.2)

    def register(self) -> str:
        """Register the keys of all silos."""
        return self.finished(self.coordinator / "register.sh")

    def supernode(self, silo: str, **environment: str) -> None:
        """Start a silo's SuperNode."""
        place = self.folder / "silos" / silo
        self.start(silo, place / "supernode.sh", {"UEFL_PORT": str(free_port()), **environment})

    def start(self, name: str, script: Path, environment: Mapping[str, str] = {}) -> None:
        """Start a script, its output in a log of this name."""
        with (self.logs / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [str(script)], stdout=log, stderr=log, env=self._environment(environment), start_new_session=True
            )

    def finished(self, script: Path, timeout: float = 120) -> str:
        """Run a script to its end, and return what it says."""
        done = subprocess.run(
            [str(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self._environment({}),
            timeout=timeout,
            check=False,
        )
        return done.stdout

    def lines(self) -> Iterator[str]:
        """Start the run and yield what it says, line by line."""
        self.start("run", self.coordinator / "run.sh")
        process, log = self.processes["run"], self.logs / "run.log"
        with log.open() as file:
            while True:
                over, line = process.poll() is not None, file.readline()
                if line:
                    yield line.rstrip("\n")
                elif over:
                    return
                else:
                    time.sleep(0.3)

    def log(self, name: str) -> str:
        """What a process has said so far."""
        return (self.logs / f"{name}.log").read_text(errors="replace")

    def kill(self, name: str) -> None:
        """Kill -9 a process and all that it started."""
        process = self.processes.pop(name)
        for pid in [process.pid, *self._family(process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def close(self) -> None:
        """End everything: politely, then for good."""
        for process in self.processes.values():
            process.terminate()
        end = time.monotonic() + 10
        while time.monotonic() < end and any(p.poll() is None for p in self.processes.values()):
            time.sleep(0.1)
        while left := self.alive():  # again and again: a process may start another while it ends
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        for process in self.processes.values():
            process.wait()

    def alive(self) -> list[int]:
        """All processes that carry our mark, whoever their parent is by now."""
        wanted, found = f"{MARK}={self.token}".encode(), []
        for place in Path("/proc").iterdir():
            if place.name.isdigit():
                with suppress(OSError):
                    if wanted in (place / "environ").read_bytes().split(b"\0"):
                        found.append(int(place.name))
        return found

    def _family(self, root: int) -> list[int]:
        parents: dict[int, int] = {}
        for pid in self.alive():
            with suppress(OSError):
                parents[pid] = int((Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[1])
        family = {root}
        while grown := {pid for pid, parent in parents.items() if parent in family} - family:
            family |= grown
        return sorted(family - {root})

    def _environment(self, more: Mapping[str, str]) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        return {**os.environ, "PATH": path, MARK: self.token, "PYTHONUNBUFFERED": "1", **more}


@contextmanager
def loopback(folder: Path, port: int) -> Iterator[Loopback]:
    """A federation's processes, none of which outlives the block."""
    if shutil.which("flower-superlink", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}") is None:
        raise Stopped("flower-superlink is not in the PATH; pip install 'uefl[flower]'")
    running = Loopback(folder, port)
    try:
        yield running
    finally:
        running.close()


def free_port() -> int:
    """A port nobody listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
