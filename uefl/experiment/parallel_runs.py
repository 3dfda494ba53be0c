"""Run several experiments in parallel: a process takes one run after another, on CUDA one method with all its seeds."""

from __future__ import annotations

import multiprocessing as mp
import os
import queue
import signal
import threading
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import torch

from uefl.core.errors import InputError, ResumableError
from uefl.engines.processes.worker_pool import blocking_interrupts, count_cores, divide_cores
from uefl.experiment.experiment import Experiment
from uefl.experiment.grouped_runs import group_runs, run_group
from uefl.experiment.run import Event

MAX_CUDA_WORKERS = 4  # more processes compete for one GPU: each has its own context, and kernels take turns


def choose_workers(workers: int, num_runs: int, device: str) -> int:
    """Return the number of parallel processes; 0 chooses one per core, on CUDA at most a few."""
    if workers < 0:
        raise InputError(f"workers={workers} must be at least 0")
    if workers:
        return workers
    limit = MAX_CUDA_WORKERS if device.startswith("cuda") else num_runs
    return max(1, min(num_runs, count_cores(), limit))


class RunSettings(NamedTuple):
    """How a parallel process runs what it receives."""

    device: str
    engine: str
    num_workers: int  # processes of a run with the engine `processes`
    threads: int


class Worker(NamedTuple):
    """A process, and the end of the pipe through which it receives runs."""

    process: Any
    tasks: Any


def run_in_parallel(
    experiments: Mapping[str, Experiment],
    root: Path,
    *,
    workers: int,
    device: str = "cpu",
    engine: str = "auto",
    num_workers: int = 0,
    on_event: Callable[[str, Event], None],
) -> dict[str, Path]:
    """Run all experiments and return their folders. The first error stops the others, which can be resumed.

    Each run may use its share of the cores, or `num_workers` processes of its own.
    """
    context = mp.get_context("spawn")  # a forked process would inherit locks of threads that do not exist in it
    events: Any = context.Queue()
    on_cuda = device.startswith("cuda")
    groups = group_runs(experiments) if on_cuda else [{n: e} for n, e in experiments.items()]
    waiting, running = [(next(iter(group)), group) for group in groups], dict[str, Worker]()
    idle: list[Worker] = []  # processes are reused: importing torch takes as long as some runs
    folders: dict[str, Path] = {}
    num_workers = num_workers or divide_cores(min(workers, len(groups)) or 1)
    settings = RunSettings(device, engine, num_workers, torch.get_num_threads())
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                name, group = waiting.pop(0)
                idle = [worker for worker in idle if worker.process.is_alive()]
                running[name] = idle.pop() if idle else _start_worker(context, root, settings, events)
                running[name].tasks.send((name, group))
            name, event = _next_event(events, running)
            if event["kind"] == "failed":
                raise event["error_class"](event["message"])
            if event["kind"] == "done":
                folders |= event["folders"]
                idle.append(running.pop(name))
            else:
                on_event(name, event)
    finally:
        processes = [worker.process for worker in (*running.values(), *idle)]
        for process in processes:  # all before the first is waited for, which a second Ctrl-C may interrupt
            process.terminate()
        for process in processes:
            process.join()
    return {name: folders[name] for name in experiments}


def _start_worker(context: Any, root: Path, settings: RunSettings, events: Any) -> Worker:
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run_worker, args=(receiver, root, settings, events))
    with blocking_interrupts():  # which would end the process with a traceback while it imports
        process.start()
    receiver.close()  # the process has the other copy
    return Worker(process, sender)


def _next_event(events: Any, running: Mapping[str, Worker]) -> tuple[str, Event]:
    """Wait for the next event; a process that ended without one counts as failed."""
    while True:
        try:
            event: tuple[str, Event] = events.get(timeout=1.0)
            return event
        except queue.Empty:
            for name, (process, _) in running.items():
                if process.exitcode is not None and events.empty():
                    return name, _make_failure(
                        f"the process of {name} ended with exit code {process.exitcode}; run the same command again to "
                        "resume",
                        ResumableError,
                    )


def _run_worker(tasks: Any, root: Path, settings: RunSettings, events: Any) -> None:
    """Run what the parent sends, until it terminates this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent receives Ctrl-C and terminates this process
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(settings.threads)

    def send_event(name: str, event: Event) -> None:
        events.put((name, event))

    while True:
        try:
            first_name, group = tasks.recv()
        except EOFError:
            return  # the parent has died
        try:
            folders = run_group(
                *(group, root),
                device=settings.device,
                engine=settings.engine,
                num_workers=settings.num_workers,
                on_event=send_event,
            )
            events.put((first_name, {"kind": "done", "folders": folders}))
        except (InputError, ResumableError) as e:
            events.put((first_name, _make_failure(str(e), type(e))))
        except Exception:  # the parent reports every failure
            events.put((first_name, _make_failure(f"{', '.join(group)}: {traceback.format_exc()}")))


def _end_with_parent() -> None:
    """End this process when its parent has died; its workers follow, and the last checkpoint is complete."""
    parent = mp.parent_process()
    assert parent, "this process was started by run_in_parallel"
    wait([parent.sentinel])
    os._exit(1)


def _make_failure(message: str, error_class: type[Exception] = RuntimeError) -> Event:
    return {"kind": "failed", "message": message, "error_class": error_class}
