"""Processes that wait for work, and how they start and end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from uefl.core.errors import InputError
from uefl.engines.processes.channel import TASK_SLOTS, Channel, Slot
from uefl.engines.processes.shared_tensors import Parcel

# A new interpreter: a forked one would inherit locks of threads that do not exist in it, and a process that
# `multiprocessing` spawns would run the user's script again.
_START = (
    "import sys; sys.path[:] = sys.argv[2:]; from uefl.engines.processes.worker_process import main; "
    "main(int(sys.argv[1]))"
)
_CGROUP_LIMIT = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds per period, and the period
_END_SECONDS = 5.0  # until a process that should end is killed


def can_start_processes() -> bool:
    """Return whether this system can send memory from process to process; Windows cannot."""
    return hasattr(socket, "send_fds") and hasattr(socket, "AF_UNIX")


def count_cores() -> int:
    """Return the cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if _CGROUP_LIMIT.exists():
        quota, _, period = _CGROUP_LIMIT.read_text().partition(" ")
        if quota.isdecimal():
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def divide_cores(num_runs: int) -> int:
    """Return how many processes, of as many threads as this one has, each of several parallel runs may use."""
    return max(1, count_cores() // (num_runs * torch.get_num_threads()))


def choose_num_workers(num_workers: int, num_silos: int) -> int:
    """Return the number of worker processes, at most one per silo; 0 takes one per core."""
    if num_workers < 0:
        raise InputError(f"workers={num_workers} must be at least 0")
    return max(1, min(num_silos, num_workers or divide_cores(1)))


@contextmanager
def blocking_interrupts() -> Iterator[None]:
    """Keep Ctrl-C from processes that start within this context; this process receives it at the end of the context."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class WorkerHandle:
    """A worker process as its parent sees it."""

    def __init__(self) -> None:
        own, other = socket.socketpair()
        self.channel = Channel(own)
        search_path = [entry or os.getcwd() for entry in sys.path]
        command = [sys.executable, "-c", _START, str(other.fileno()), *search_path]
        try:
            with blocking_interrupts():  # which would end the process with a traceback while it imports
                self.process = subprocess.Popen(command, pass_fds=[other.fileno()], stdin=subprocess.DEVNULL)
        except OSError:
            own.close()
            raise
        finally:
            other.close()
        self.is_ready = False  # it has imported what it needs
        self.tasks: dict[str, Slot] = {}  # by silo: the task that it runs, and the next one
        self.data: Parcel | None = None  # the last that it received
        self.broadcast: Parcel | None = None

    def add_task(self, silo_name: str) -> None:
        """Reserve shared memory that no other task of this process has, nor an answer that has not been read."""
        self.tasks[silo_name] = next(slot for slot in TASK_SLOTS if slot not in self.tasks.values())

    def end(self) -> int:
        """Close the connection, wait until the process has ended, and return its exit code."""
        self.channel.close()
        try:
            return self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


class WorkerPool:
    """Worker processes. They start when they are needed, and a closed pool starts again."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.workers: list[WorkerHandle] = []

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the processes that are missing."""
        while len(self.workers) < self.num_workers:
            self.workers.append(WorkerHandle())

    def receive(self, *, block: bool) -> Iterator[tuple[WorkerHandle, Any]]:
        """Yield messages that have arrived, with copies of their tensors; None for a process that has ended."""
        owners = {worker.channel.connection: worker for worker in self.workers}
        for connection in wait(list(owners), None if block else 0):
            worker = owners[connection]  # type: ignore[index]
            try:
                message = worker.channel.receive()
            except (EOFError, OSError):
                yield worker, None
            else:
                yield worker, message.parcel.unpack(copy=True)

    def remove(self, worker: WorkerHandle) -> int:
        """Remove a process that has ended, and return its exit code."""
        self.workers.remove(worker)
        return worker.end()

    def close(self) -> None:
        """End all processes."""
        for worker in self.workers:
            worker.channel.close()  # all of them end at the same time
        while self.workers:
            self.workers.pop().end()
