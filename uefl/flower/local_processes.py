"""Run a whole federation on this machine: coordinator and nodes as real processes, which all end with the block."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from random import SystemRandom
from uuid import uuid4

from uefl.core.errors import ResumableError

# An outgoing connection could take a higher port before the coordinator listens at it; Ray takes lower ones.
PORTS = range(20000, 32768, 2)
PROCESS_MARKER = "UEFL_PROCESS_MARKER"  # environment variable of all started processes: some leave our process group


class LocalFederation:
    """The processes of a federation that `write_deployment` wrote for 127.0.0.1."""

    def __init__(self, folder: Path, *ports: int) -> None:
        self.folder, self.ports, self.token = folder, ports, uuid4().hex
        self.coordinator, self.logs = folder / "coordinator", folder / "logs"
        self.logs.mkdir(exist_ok=True)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start_coordinator(self) -> None:
        """Start guard and SuperLink of the coordinator and wait until both listen."""
        self.start_script("coordinator", self.coordinator / "serve.sh")
        end = time.monotonic() + 120
        while not all(map(_is_listening, self.ports)):
            if self.processes["coordinator"].poll() is not None or time.monotonic() > end:
                raise ResumableError(f"the coordinator did not start: {self.read_log('coordinator')[-2000:]}")
            time.sleep(0.2)

    def register_keys(self) -> str:
        """Register the keys of all silos."""
        return self.run_script(self.coordinator / "register.sh")

    def start_node(self, silo: str, **environment: str) -> None:
        """Start a silo's node."""
        self.start_script(silo, self.folder / "silos" / silo / "node.sh", environment)

    def start_script(self, name: str, script: Path, environment: Mapping[str, str] = {}) -> None:
        """Start a script and append its output to the log of this name."""
        with (self.logs / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [str(script)], stdout=log, stderr=log, env=self._make_environment(environment), start_new_session=True
            )

    def run_script(self, script: Path, timeout: float = 120) -> str:
        """Run a script to its end and return its output."""
        completed = subprocess.run(
            [str(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self._make_environment({}),
            timeout=timeout,
            check=False,
        )
        return completed.stdout

    def stream_run_output(self) -> Iterator[str]:
        """Start the run and yield its output line by line."""
        self.start_script("run", self.coordinator / "run.sh")
        process, log = self.processes["run"], self.logs / "run.log"
        with log.open() as file:
            while True:
                has_ended, line = process.poll() is not None, file.readline()
                if line:
                    yield line.rstrip("\n")
                elif has_ended:
                    return
                else:
                    time.sleep(0.3)

    def read_log(self, name: str) -> str:
        """Return the output of a process so far."""
        return (self.logs / f"{name}.log").read_text(errors="replace")

    def kill_process(self, name: str) -> None:
        """Send SIGKILL to a process and all its descendants."""
        process = self.processes.pop(name)
        for pid in [process.pid, *self._list_descendants(process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def close(self) -> None:
        """End all processes: SIGTERM first, SIGKILL after ten seconds."""
        for process in self.processes.values():
            process.terminate()
        end = time.monotonic() + 10
        while time.monotonic() < end and any(p.poll() is None for p in self.processes.values()):
            time.sleep(0.1)
        while remaining := self.list_process_ids():  # repeated: a process may start another while it ends
            for pid in remaining:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        for process in self.processes.values():
            process.wait()

    def list_process_ids(self) -> list[int]:
        """Return the ids of all processes with our marker, also of orphans."""
        return list_marked_processes(PROCESS_MARKER, self.token)

    def _list_descendants(self, root: int) -> list[int]:
        parents: dict[int, int] = {}
        for pid in self.list_process_ids():
            with suppress(OSError):
                parents[pid] = int((Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[1])
        tree = {root}
        while children := {pid for pid, parent in parents.items() if parent in tree} - tree:
            tree |= children
        return sorted(tree - {root})

    def _make_environment(self, extra_variables: Mapping[str, str]) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        return {**os.environ, "PATH": path, PROCESS_MARKER: self.token, "PYTHONUNBUFFERED": "1", **extra_variables}


@contextmanager
def open_local_federation(folder: Path, port: int, superlink_port: int | None = None) -> Iterator[LocalFederation]:
    """Open the processes of a federation at these ports; none of them outlives the block."""
    federation = LocalFederation(folder, port, superlink_port or port + 1)
    try:
        yield federation
    finally:
        federation.close()


def list_marked_processes(variable: str, value: str) -> list[int]:
    """Return the ids of all processes with this environment variable: those of a tree, also after its root ended."""
    marker, process_ids = f"{variable}={value}".encode(), []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                if marker in (folder / "environ").read_bytes().split(b"\0"):
                    process_ids.append(int(folder.name))
    return process_ids


def find_free_port() -> int:
    """Return a port at which no process listens, nor at the next one, which a coordinator needs too."""
    while True:
        port = SystemRandom().choice(PORTS)
        with socket.socket() as probe, socket.socket() as next_probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            next_probe.bind(("127.0.0.1", port + 1))
            return port


def _is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
