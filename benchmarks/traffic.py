"""Bytes that a silo receives and sends per round, for every method, from the records of short runs of the demo."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.digits import load_digits, make_silos, take_cyclic
from benchmarks.harness import Measurement, Options
from uefl.algorithms import METHODS
from uefl.algorithms.extensible_codebook import ExtensibleCodebook
from uefl.core.federation import Silo
from uefl.engines.serial import SerialEngine
from uefl.experiment.recipes import make_experiment
from uefl.experiment.records import Record

NUM_SILOS, TRAIN_PER_SILO, TEST_PER_SILO, VALIDATION_PER_SILO = 3, 40, 8, 8
NUM_PUBLIC = 100  # images that all silos share, for methods that need them
TINY_METHODS = ("fedavg", "uefl", "fccl")
ORDINARY_ROUND = 3
ROUND_LABELS = {
    2: "round 2: initial codebook",
    ORDINARY_ROUND: "an ordinary round",
    4: "round 4: extension",
    5: "the round after the extension",
}


def run(options: Options) -> Iterator[Measurement]:
    """Measure the bytes of selected rounds; without a codebook all rounds are alike."""
    digits = load_digits(options.data)
    public = take_cyclic(digits, len(digits.y) - NUM_PUBLIC, NUM_PUBLIC).x
    silos = make_silos(digits, NUM_SILOS, TRAIN_PER_SILO, TEST_PER_SILO, VALIDATION_PER_SILO)
    for method in TINY_METHODS if options.tiny else METHODS:
        needs_public = METHODS[method].needs_public_images
        own = [replace(silo, public=public) for silo in silos] if needs_public else silos
        records, has_codebook = run_tiny(method, own, options.device)
        for round_number, label in ROUND_LABELS.items():
            if has_codebook or round_number == ORDINARY_ROUND:
                record = records[round_number - 1]
                num_codewords = max(silo["num_codewords"] for silo in record["silos"].values())
                note = f"at most {num_codewords} codewords" if has_codebook else ""
                note += f"{NUM_PUBLIC} public images" if needs_public else ""
                for direction in ("down", "up"):
                    num_bytes = record[f"bytes_{direction}"] / NUM_SILOS
                    yield Measurement(method, f"{label}, {direction}", "B", [num_bytes], note)


def run_tiny(method_name: str, silos: Sequence[Silo], device: str) -> tuple[list[Record], bool]:
    """Run a few rounds; return their records, and whether the method has a codebook."""
    experiment = make_experiment(method_name, "mnist5k")
    method = experiment.method.without_own_models()  # as in earlier records
    # Every silo but the least uncertain one gets codewords after round 4.
    codebook = None
    if method.codebook:
        codebook = ExtensibleCodebook(extend=method.codebook.extend, gamma=0.0, min_standard_errors=0.0)
    local = replace(method.local, epochs=1)
    method = replace(method, rounds=4, extra_rounds=2, iterations=2, mc_samples=2, local=local, codebook=codebook)
    net = replace(experiment, method=method).build_network((1, 28, 28), 10)
    clients = SerialEngine(list(method.prepare_silos(silos)), net, device=device)
    server, records = method.initialize_server(clients), list[Record]()
    while server.round < method.total_rounds:
        server = method.step(clients, server)
        records += server.completed_records
    return records, codebook is not None
