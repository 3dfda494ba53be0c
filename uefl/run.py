"""The one loop that drives every method: step, record, checkpoint, until the budget is spent; then summary and picture.

A run folder is never overwritten. A finished run is shown, an unfinished one goes on where its last checkpoint stands,
to the same bits as if nothing had happened.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from uefl import __version__, records
from uefl.checkpoint import load_checkpoint, save_checkpoint, save_tensors, write_text
from uefl.engines import Serial
from uefl.errors import InputError
from uefl.experiment import DTYPES, RESULTS, Experiment, fingerprint
from uefl.federation import Server

Event = dict[str, Any]
Listener = Callable[[Event], None]
HEADER, RECORDS, CHECKPOINT = "run.json", "records.jsonl", "checkpoint.safetensors"
MODEL, SUMMARY, FIGURE = "model.safetensors", "summary.json", "figure.png"
SAME = ("engine", "device", "threads", "torch", "results")  # what must not change under a run that goes on


def run(experiment: Experiment, root: Path, *, device: str = "cpu", listen: Listener = lambda _: None) -> Path:
    """Run an experiment, or go on with it, or find it done; returns its folder."""
    listen({"kind": "load", "data": experiment.data.name})
    silos, images = experiment.data.load(experiment.seed)
    silos = list(experiment.method.prepare(silos))
    mark = fingerprint(silos)
    folder = root / f"{experiment.name}-{experiment.data.name}-{experiment.id(mark)}"
    folder.mkdir(parents=True, exist_ok=True)
    with only_process(folder):
        if (folder / SUMMARY).exists():
            listen({"kind": "found", "folder": str(folder)})
            return folder
        domains = {s.name: s.domain for s in silos}
        shape = tuple(images.x.shape[1:]) if not experiment.data.size else tuple(silos[0].test.x.shape[1:])
        _header(folder, experiment, device, mark, domains, images.classes, shape)
        clients = Serial(
            silos,
            experiment.network(shape, len(images.classes)),
            seed=experiment.seed,
            device=device,
            dtype=DTYPES[experiment.precision],
            watch=lambda silo, doing: listen({"kind": "silo", "silo": silo, "doing": doing}),
        )
        server = _loop(experiment, clients, folder, listen)
        _finish(folder, server, clients, domains)
    return folder


def _loop(experiment: Experiment, clients: Serial, folder: Path, listen: Listener) -> Server:
    method, server = experiment.method, _resumed(clients, folder)
    lines = folder / RECORDS
    known = [r for r in records.read(lines) if server and r["round"] < server.pending.get("round", server.round + 1)]
    write_text(lines, "".join(json.dumps(r, sort_keys=True) + "\n" for r in known))
    listen({"kind": "start", "budget": method.budget, "round": server.round if server else 0, "records": known})
    server = server or method.start(clients)
    while server.round < method.budget:
        server = method.step(clients, server)
        for record in server.records:
            listen({"kind": "round", "record": record})
        records.append(lines, server.records)
        server = server.but(records=())
        save_checkpoint(folder / CHECKPOINT, server, clients.memory)
    return server


def _resumed(clients: Serial, folder: Path) -> Server | None:
    if not (folder / CHECKPOINT).exists():
        return None
    server, clients.memory = load_checkpoint(folder / CHECKPOINT, clients.device)
    return server


def _header(
    folder: Path,
    experiment: Experiment,
    device: str,
    mark: str,
    domains: dict[str, str],
    classes: tuple[str, ...],
    shape: tuple[int, ...],
) -> None:
    """Write what the run is and what it runs on; a run that goes on must find the same."""
    here: dict[str, Any] = {
        "engine": "serial",
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "results": RESULTS,
    }
    path = folder / HEADER
    if path.exists():
        before = json.loads(path.read_text())
        for name in SAME:
            if before[name] != here[name]:
                raise InputError(
                    f"{folder} was begun with {name} {before[name]}, here it is {here[name]}; "
                    "go on there, or name another folder with --out"
                )
        return
    header = {
        **here,
        "uefl": __version__,
        "python": platform.python_version(),
        "fingerprint": mark,
        "experiment": experiment.config(),
        "budget": experiment.method.budget,
        "domains": domains,
        "classes": list(classes),
        "shape": list(shape),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    write_text(path, json.dumps(header, indent=1) + "\n")


def _finish(folder: Path, server: Server, clients: Serial, domains: dict[str, str]) -> None:
    """Model, picture, and last of all the summary, whose presence says that the run is done."""
    header = json.loads((folder / HEADER).read_text())
    tensors = {**{f"state/{n}": t for n, t in server.state.items()}, "access": server.access}
    tensors |= {f"kept/{silo}/{n}": t for silo, mine in clients.memory.items() for n, t in mine.items()}
    about = {name: header[name] for name in ("experiment", "classes", "shape", "domains", "fingerprint", "results")}
    save_tensors(folder / MODEL, tensors, {"silos": list(server.silos), **about})
    lines = records.read(folder / RECORDS)
    from uefl.figure import curves  # matplotlib is slow to import, and only needed here

    title = f"{header['experiment']['name']} on {header['experiment']['data']['name']}"
    curves({title: lines}, folder / FIGURE)
    summary = {"seed": header["experiment"]["seed"], **records.summarise(lines, domains)}
    write_text(folder / SUMMARY, json.dumps(summary, indent=1) + "\n")
    (folder / CHECKPOINT).unlink()


@contextmanager
def only_process(folder: Path) -> Iterator[None]:
    """One process per run: the lock goes with the process, however it ends."""
    file = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise InputError(f"another process is at work in {folder}") from None
    try:
        yield
    finally:
        os.close(file)
