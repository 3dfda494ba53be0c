"""Measure what a round costs: every method of a setup alone on the machine, a few rounds each, interleaved.

Three silos of four batches; network, batch size and local epochs are those of the setup. A round is training, its
queries, and averaging, without evaluation. Unlike the duration of runs that share a device, these times compare: on a
CPU they are CPU seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from studies.methods.runner import RunRecord
from studies.methods.setups import SETUPS
from uefl.core.federation import Broadcast, Examples, Method, Reply, ServerState, Silo
from uefl.engines.serial import SerialEngine
from uefl.experiment import records
from uefl.experiment.experiment import RESULTS_VERSION, Experiment

NUM_SILOS, BATCHES_PER_SILO, NUM_REPEATS = 3, 4, 3


class TrainingOnlySerial(SerialEngine):
    """A serial engine whose clients train and do not evaluate."""

    def fit(self, method: Method, broadcast: Broadcast, *, evaluate: bool = True) -> Iterator[Reply]:
        """Train without evaluation."""
        del evaluate
        return super().fit(method, broadcast, evaluate=False)


class TimedMethod:
    """A federation of one method; every call runs one round and times it."""

    def __init__(self, experiment: Experiment, silos: Sequence[Silo], num_classes: int, device: str) -> None:
        self.method = replace(experiment.method, clients_per_round=0)
        net = experiment.build_network(tuple(silos[0].train.x.shape[1:]), num_classes)
        self.clients = TrainingOnlySerial(self.method.prepare_silos(silos), net, device=device)
        self.server = self.method.initialize_server(self.clients)
        codebook = self.method.codebook
        for _ in range(max(codebook.warmup_rounds if codebook else 1, 1)):  # warm caches, and make the codebook
            self.server = self.method.step(self.clients, self.server)
        self.server = self.prepare_server(self.server)
        self.seconds: list[float] = []

    def prepare_server(self, server: ServerState) -> ServerState:
        """Return the server's state before the first timed round."""
        return server

    def __call__(self) -> None:
        before: ServerState = self.server.replace(open_record={}, completed_records=())
        self._synchronize()
        clock = time.perf_counter if self.clients.device.type == "cuda" else time.process_time
        start = clock()
        self.server = self.method.run_round(self.clients, before)
        self._synchronize()
        self.seconds.append(clock() - start)

    def _synchronize(self) -> None:
        if self.clients.device.type == "cuda":
            torch.cuda.synchronize()

    def summarize_costs(self) -> dict[str, Any]:
        """Return the seconds of a round, and the bytes of one silo in it: training message, and with all queries."""
        record = self.server.open_record
        messages = [silo for silo in record["silos"].values() if "bytes_up" in silo]
        num_messages = len(messages)
        return {
            "seconds": median(self.seconds),
            "bytes_up": sum(m["bytes_up"] for m in messages) / num_messages,
            "bytes_down": sum(m["bytes_down"] for m in messages) / num_messages,
            "bytes_up_with_queries": record["bytes_up"] / num_messages,
            "bytes_down_with_queries": record["bytes_down"] / num_messages,
        }


def select_silos(silos: Sequence[Silo], train_per_silo: int) -> list[Silo]:
    """Select silos with this many training images each; images are repeated where a silo has fewer."""
    trained = [s for s in silos if len(s.train.y)][:NUM_SILOS]
    indices = [torch.arange(train_per_silo) % len(s.train.y) for s in trained]
    return [replace(s, train=Examples(s.train.x[i], s.train.y[i])) for s, i in zip(trained, indices)]


def time_methods(
    setup_names: Sequence[str], methods: Sequence[str], device: str, path: Path, report: Callable[[str], None]
) -> None:
    """Time the methods of setups, and append one record per method."""
    for name in setup_names:
        setup = SETUPS[name]
        rows = [row for row in setup.methods if not methods or row in methods]
        all_silos, images = setup.data.load(0)
        silos, num_classes = select_silos(all_silos, setup.local.batch_size * BATCHES_PER_SILO), len(images.classes)
        timed = {
            row: TimedMethod(setup.make_experiment(row, setup.learning_rates[1], 0), silos, num_classes, device)
            for row in rows
        }
        for _ in range(NUM_REPEATS):
            for run_timed_round in timed.values():  # interleaved: other load on the machine affects all alike
                run_timed_round()
        for row, method in timed.items():
            records.append_records(path, [_make_record(name, row, method, device)])
            report(f"{name}, {row}: {method.summarize_costs()['seconds']:.3f} s per round")


def _make_record(name: str, row: str, timed: TimedMethod, device: str) -> RunRecord:
    return {"setup": name, "method": row, "round": timed.summarize_costs(), **describe_environment(device)}


def describe_environment(device: str) -> RunRecord:
    """Return what a time depends on beside the method."""
    device_name = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    return {
        "device": device_name,
        "torch": torch.__version__,
        "engine": "serial",
        "results_version": RESULTS_VERSION,
    }
