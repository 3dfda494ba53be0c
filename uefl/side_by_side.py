"""Several runs at once, one process each, as many at a time as there are cores to spare."""

from __future__ import annotations

import multiprocessing as mp
import os
import queue
import signal
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from uefl.errors import InputError
from uefl.experiment import Experiment
from uefl.run import Event, run


def side_by_side(
    experiments: Mapping[str, Experiment],
    root: Path,
    *,
    workers: int,
    device: str = "cpu",
    engine: str = "auto",
    hear: Callable[[str, Event], None],
) -> dict[str, Path]:
    """Run all; returns each one's folder. The first error stops the others, whose progress is kept."""
    context = mp.get_context("spawn")  # a forked torch inherits locks of threads that are not there
    messages: Any = context.Queue()
    waiting, running = list(experiments.items()), dict[str, Any]()
    folders: dict[str, Path] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                name, experiment = waiting.pop(0)
                place = (device, engine, torch.get_num_threads())
                process = context.Process(target=_work, args=(name, experiment, root, place, messages))
                process.start()
                running[name] = process
            name, event = _next(messages, running)
            if event["kind"] == "failed":
                raise InputError(event["line"]) if event["input"] else RuntimeError(event["line"])
            if event["kind"] == "done":
                folders[name] = Path(event["folder"])
                running.pop(name).join()
            else:
                hear(name, event)
    finally:
        for process in running.values():
            process.terminate()
            process.join()
    return {name: folders[name] for name in experiments}


def _next(messages: Any, running: Mapping[str, Any]) -> tuple[str, Event]:
    """The next event; a process that died without a word is one too."""
    while True:
        try:
            found: tuple[str, Event] = messages.get(timeout=1.0)
            return found
        except queue.Empty:
            for name, process in running.items():
                if process.exitcode is not None and messages.empty():
                    line = f"the process of {name} ended with code {process.exitcode}; run again to go on"
                    return name, {"kind": "failed", "line": line, "input": False}


def _work(name: str, experiment: Experiment, root: Path, place: tuple[str, str, int], messages: Any) -> None:
    device, engine, threads = place
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C and ends us
    torch.set_num_threads(threads)
    parent = os.getppid()

    def listen(event: Event) -> None:
        if os.getppid() != parent:
            os._exit(1)  # nobody is left to hear: the checkpoint stands
        messages.put((name, event))

    try:
        folder = run(experiment, root, device=device, engine=engine, listen=listen)
        messages.put((name, {"kind": "done", "folder": str(folder)}))
    except InputError as e:
        messages.put((name, {"kind": "failed", "line": str(e), "input": True}))
    except Exception:  # the parent must hear of every failure
        messages.put((name, {"kind": "failed", "line": f"{name}: {traceback.format_exc()}", "input": False}))
