"""What a round costs: every method of a set-up alone on the machine, in turns, a few rounds each.

Three silos of four batches; network, batch size and local epochs are those of the set-up. A round is training,
questions that belong to it, and averaging; nobody measures. Times of runs that share a device say little, these do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from studies.methods.running import Line
from studies.methods.set_ups import SET_UPS
from uefl import records
from uefl.engines import Serial
from uefl.experiment import RESULTS, Experiment
from uefl.federation import Broadcast, Method, Part, Reply, Server, Silo

SILOS, BATCHES, REPEATS = 3, 4, 3


class Silent(Serial):
    """Clients that train and do not measure."""

    def fit(self, method: Method, say: Broadcast, *, measure: bool = True) -> Iterator[Reply]:
        del measure
        return super().fit(method, say, measure=False)


class Timed:
    """A method at work; every call is one round."""

    def __init__(self, experiment: Experiment, silos: Sequence[Silo], classes: int, device: str) -> None:
        self.method = replace(experiment.method, participation=0)
        net = experiment.network(tuple(silos[0].train.x.shape[1:]), classes)
        self.clients = Silent(self.method.prepare(silos), net, device=device)
        self.server = self.method.start(self.clients)
        book = self.method.codebook
        for _ in range(max(book.warm_up if book else 1, 1)):  # caches are warm then, and the first book is there
            self.server = self.method.step(self.clients, self.server)
        self.seconds: list[float] = []

    def __call__(self) -> None:
        before: Server = self.server.but(pending={}, records=())
        self._wait()
        began = time.perf_counter()
        self.server = self.method.round(self.clients, before)
        self._wait()
        self.seconds.append(time.perf_counter() - began)

    def _wait(self) -> None:
        if self.clients.device.type == "cuda":
            torch.cuda.synchronize()

    def costs(self) -> dict[str, Any]:
        """Seconds of a round, and the bytes of one silo in it: its message, and with that all questions."""
        last = self.server.pending
        messages = [mine for mine in last["silos"].values() if "up" in mine]
        count = len(messages)
        return {
            "seconds": median(self.seconds),
            "up": sum(m["up"] for m in messages) / count,
            "down": sum(m["down"] for m in messages) / count,
            "up with questions": last["bytes_up"] / count,
            "down with questions": last["bytes_down"] / count,
        }


def few(silos: Sequence[Silo], size: int) -> list[Silo]:
    """Some silos with so many training images each; where one has fewer, they are repeated."""
    able = [s for s in silos if len(s.train.y)][:SILOS]
    at = [torch.arange(size) % len(s.train.y) for s in able]
    return [replace(s, train=Part(s.train.x[i], s.train.y[i])) for s, i in zip(able, at)]


def timed(names: Sequence[str], methods: Sequence[str], device: str, path: Path, say: Callable[[str], None]) -> None:
    """Time set-ups, one line a method."""
    for name in names:
        set_up = SET_UPS[name]
        rows = [row for row in set_up.methods if not methods or row in methods]
        everyone, images = set_up.data.load(0)
        silos, classes = few(everyone, set_up.local.batch * BATCHES), len(images.classes)
        going = {row: Timed(set_up.experiment(row, set_up.rates[1], 0), silos, classes, device) for row in rows}
        for _ in range(REPEATS):
            for one in going.values():  # in turns: what else the machine does meets all alike
                one()
        for row, one in going.items():
            records.append(path, [_line(name, row, one, device)])
            say(f"{name}, {row}: {one.costs()['seconds']:.3f} s a round")


def _line(name: str, row: str, one: Timed, device: str) -> Line:
    where = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    about = {"device": where, "torch": torch.__version__, "engine": "serial", "results": RESULTS}
    return {"set-up": name, "method": row, "round": one.costs(), **about}
