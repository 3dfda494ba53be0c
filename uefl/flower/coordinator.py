"""`uefl deploy serve`: the processes of a coordinator, which end together.

The SuperLink of Flower listens at 127.0.0.1 only. The guard listens at the public address and forwards to it.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import re
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from uefl.core.errors import InputError, ResumableError
from uefl.flower.certificates import describe_expiry, load_server_context
from uefl.flower.fleet_connection import require_flower_version
from uefl.flower.guard import open_listener, run_guard
from uefl.flower.local_processes import list_marked_processes

log = logging.getLogger("uefl")
STOP_SECONDS = 10
PROCESS_MARKER = "UEFL_COORDINATOR_MARKER"  # environment variable of all processes that the SuperLink starts
_ANSI_CODE = re.compile(r"\x1b\[[0-9;]*m")


class CoordinatorOptions(NamedTuple):
    """The folder of a coordinator, the public address of its guard, and the port of its SuperLink at 127.0.0.1."""

    folder: Path
    host: str
    port: int
    superlink_port: int


def run_coordinator(options: CoordinatorOptions) -> None:
    """Run guard and SuperLink until SIGTERM, or until the SuperLink ends."""
    require_flower_version()
    os.umask(0o077)  # the database of the SuperLink contains messages
    for line in describe_expiry(options.folder):
        log.warning(line)
    asyncio.run(_run_processes(options))


def make_superlink_command(options: CoordinatorOptions) -> list[str]:
    """Return the command of the SuperLink."""
    program = shutil.which("flower-superlink", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        raise InputError("flower-superlink is not in the PATH; install uefl with its extra `flower`")
    folder = options.folder
    return [
        *(program, "--host", "127.0.0.1", "--port", str(options.superlink_port)),
        *("--ssl-ca-certfile", str(folder / "ca.crt"), "--ssl-certfile", str(folder / "server.crt")),
        *("--ssl-keyfile", str(folder / "server.key"), "--enable-supernode-auth"),
        *("--database", str(folder / "superlink.db"), "--disable-runtime-dependency-installation"),
    ]


async def _run_processes(options: CoordinatorOptions) -> None:
    folder, token = options.folder, uuid4().hex
    command, tls = make_superlink_command(options), load_server_context(folder)
    with open_listener(options.host, options.port) as listener:
        superlink = await _start_superlink(command, token)
        guard = asyncio.create_task(run_guard(listener, folder, tls, options.superlink_port))
        end, is_stopped = asyncio.create_task(_log_output(superlink)), asyncio.Event()
        stop = asyncio.create_task(is_stopped.wait())
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, is_stopped.set)
        log.info("guard listens at %s:%d, the SuperLink at 127.0.0.1:%d", *options[1:])
        try:
            await asyncio.wait({guard, end, stop}, return_when=asyncio.FIRST_COMPLETED)
            if guard.done():
                guard.result()  # raises what ended it
        finally:
            guard.cancel()
            await asyncio.wait({guard})
            await _stop_superlink(superlink, token)
    if not is_stopped.is_set():
        raise ResumableError(f"the SuperLink ended with code {superlink.returncode}; see its lines above")
    log.info("guard and SuperLink have stopped")


async def _start_superlink(command: list[str], token: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, PROCESS_MARKER: token},
        start_new_session=True,  # a Ctrl-C reaches the guard, which ends the SuperLink
        preexec_fn=_end_with_parent,
        limit=1 << 20,
    )


async def _log_output(superlink: asyncio.subprocess.Process) -> None:
    """Write the lines of the SuperLink with time stamps, until it ends."""
    assert superlink.stdout is not None
    reading = asyncio.create_task(_log_lines(superlink.stdout))
    await superlink.wait()
    reading.cancel()  # processes that it started may still hold the other end


async def _log_lines(stream: asyncio.StreamReader) -> None:
    while True:
        try:
            line = await stream.readline()
        except ValueError:  # longer than the limit
            continue
        if not line:
            return
        log.info("%s", _ANSI_CODE.sub("", line.decode(errors="replace")).rstrip())


async def _stop_superlink(superlink: asyncio.subprocess.Process, token: str) -> None:
    """End the SuperLink and everything it started, also what left its session."""
    with suppress(ProcessLookupError):
        superlink.terminate()
    with suppress(TimeoutError):
        async with asyncio.timeout(STOP_SECONDS):
            await superlink.wait()
    for _ in range(20):  # repeated: a process may start another while it ends
        remaining = list_marked_processes(PROCESS_MARKER, token)
        for pid in remaining:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not remaining:
            return
        await asyncio.sleep(0.1)


def _end_with_parent() -> None:
    """Let the kernel end this process when its parent is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
