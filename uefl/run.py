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
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from uefl import __version__, records
from uefl.checkpoint import load_checkpoint, made, save_checkpoint, save_tensors, write_text
from uefl.data.concerns import concerns
from uefl.engines import IN_PROCESS, chosen
from uefl.errors import InputError, unknown
from uefl.experiment import DTYPES, RESULTS, Experiment, fingerprint
from uefl.federation import Clients, Server, State

Event = dict[str, Any]
Listener = Callable[[Event], None]
ENGINES = ("auto", *IN_PROCESS, "flower")
LOCK = ".lock"
HEADER, RECORDS, CHECKPOINT = "run.json", "records.jsonl", "checkpoint.safetensors"
MODEL, SUMMARY, FIGURE = "model.safetensors", "summary.json", "figure.png"
SAME = ("engine", "device", "threads", "torch", "results")  # what must not change under a run that goes on


class Engine(Clients, Protocol):
    """Clients whose memory is part of the checkpoint."""

    memory: dict[str, State]
    device: torch.device


class Setting(NamedTuple):
    """What a run knows of its data and its place before anyone trains."""

    mark: str  # fingerprint of the data
    domains: dict[str, str]
    classes: tuple[str, ...]
    shape: tuple[int, ...]
    engine: str = "serial"
    device: str = "cpu"


def run(
    experiment: Experiment,
    root: Path,
    *,
    device: str = "cpu",
    engine: str = "auto",
    listen: Listener = lambda _: None,
) -> Path:
    """Run an experiment, or go on with it, or find it done; returns its folder."""
    if engine not in ENGINES:
        raise unknown("engine", engine, ENGINES)
    experiment = experiment.on(device)
    if engine == "flower":
        networked(experiment)
    listen({"kind": "load", "data": experiment.data.name})
    silos, images = experiment.data.load(experiment.seed)
    for line in concerns(silos, images):
        listen({"kind": "warning", "line": line})
    silos = list(experiment.method.prepare(silos))
    domains = {s.name: s.domain for s in silos}
    shape = tuple(images.x.shape[1:]) if not experiment.data.size else tuple(silos[0].test.x.shape[1:])
    net, method = experiment.network(shape, len(images.classes)), experiment.method
    engine = chosen(engine, device, net, silos, method.local, method.budget)
    setting = Setting(fingerprint(silos), domains, images.classes, shape, engine, device)

    def watch(silo: str, doing: str) -> None:
        listen({"kind": "silo", "silo": silo, "doing": doing})

    def clients() -> AbstractContextManager[Engine]:
        if engine == "flower":
            try:  # an extra: only who asks for it needs Flower
                from uefl.flower.simulation import simulated
            except ImportError:
                raise InputError("engine=flower needs Flower: pip install 'uefl[flower]'") from None
            return simulated(
                experiment, len(silos), state=root.resolve() / "state", run=experiment.id(setting.mark), hear=watch
            )
        fields: dict[str, Any] = {"dtype": DTYPES[experiment.precision], "multiply": experiment.multiply}
        place = IN_PROCESS[engine](silos, net, seed=experiment.seed, device=device, watch=watch, **fields)
        return nullcontext(place)

    return drive(experiment, root, setting, clients, listen)


def networked(experiment: Experiment) -> Experiment:
    """The experiment, if its data may stay with the silos."""
    if why := experiment.method.no_network:
        raise InputError(f"{experiment.name} cannot run on Flower: {why}; engine=serial runs it")
    return experiment


def drive(
    experiment: Experiment,
    root: Path,
    setting: Setting,
    clients: Callable[[], AbstractContextManager[Engine]],
    listen: Listener = lambda _: None,
) -> Path:
    """The same with any clients, which are called only if there is something left to do."""
    folder = root / f"{experiment.name}-{experiment.data.name}-{experiment.id(setting.mark)}"
    with only_process(made(folder)):
        if (folder / SUMMARY).exists():
            engine = json.loads((folder / HEADER).read_text())["engine"]
            listen({"kind": "found", "folder": str(folder), "engine": engine})
            return folder
        begun = (folder / HEADER).exists()
        _header(folder, experiment, setting)
        try:
            place = clients()
        except InputError:
            if not begun:  # refused before anything was done: no folder shall look like an unfinished run
                for name in (HEADER, LOCK):
                    (folder / name).unlink()
                folder.rmdir()
            raise
        with place as running:
            server = _loop(experiment, running, folder, listen)
            _finish(folder, server, running, setting.domains)
    return folder


def _loop(experiment: Experiment, clients: Engine, folder: Path, listen: Listener) -> Server:
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


def _resumed(clients: Engine, folder: Path) -> Server | None:
    if not (folder / CHECKPOINT).exists():
        return None
    server, clients.memory = load_checkpoint(folder / CHECKPOINT, clients.device)
    return server


def _header(folder: Path, experiment: Experiment, setting: Setting) -> None:
    """Write what the run is and what it runs on; a run that goes on must find the same."""
    device = setting.device
    here: dict[str, Any] = {
        "engine": setting.engine,
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
        "fingerprint": setting.mark,
        "experiment": experiment.config(),
        "budget": experiment.method.budget,
        "domains": setting.domains,
        "classes": list(setting.classes),
        "shape": list(setting.shape),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    write_text(path, json.dumps(header, indent=1) + "\n")


def _finish(folder: Path, server: Server, clients: Engine, domains: dict[str, str]) -> None:
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
    file = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise InputError(f"another process is at work in {folder}") from None
    try:
        yield
    finally:
        os.close(file)
