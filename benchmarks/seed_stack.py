"""Ten seeds of nine small silos: one run alone beside all ten together, whole runs with their folders.

Seeds of UEFL share one stack, those of FedAvg two. UEFL is the preset, with and without local fine-tuning and group
rounds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.harness import Measurement, Options, measure_interleaved
from uefl.experiment.experiment import Experiment
from uefl.experiment.grouped_runs import run_group
from uefl.experiment.parsing import parse_experiments

SEEDS = tuple(range(100, 110))
TINY = ["train_per_silo=40", "test_per_silo=20", "width=4", "hidden_size=16", "rounds=3", "iterations=1"]


def run(options: Options) -> Iterator[Measurement]:
    """Measure the wall time of FedAvg and UEFL on the nine silos of the embedded digits, data and folders included."""
    seeds = SEEDS[:2] if options.tiny else SEEDS
    experiments = parse_experiments(["fedavg", "uefl", *(TINY if options.tiny else ())], [], "default")
    preset = experiments["uefl"]
    experiments["uefl"] = replace(preset, method=preset.method.without_own_models())  # as in earlier records
    experiments["uefl with groups and fine-tuning"] = preset
    for method, experiment in experiments.items():
        rows = {"one seed": seeds[:1], f"{len(seeds)} seeds together": seeds}
        # Loads libraries and compiles kernels, those of own codewords too, which a machine does once for each shape.
        length = {"rounds": 3, "iterations": 1} if options.tiny else {"rounds": 3, "extra_rounds": 2, "iterations": 2}
        short = replace(experiment, method=replace(experiment.method, **length))
        for row in rows.values():
            run_in_new_folder(short, row, options.device)
        contenders = {n: partial(run_in_new_folder, experiment, row, options.device) for n, row in rows.items()}
        seconds = measure_interleaved(contenders, options, warm_up=False)
        for contender, values in seconds.items():
            yield Measurement(contender, f"{method}, whole run", options.time_unit, values)


def run_in_new_folder(experiment: Experiment, seeds: tuple[int, ...], device: str) -> None:
    """Run these seeds from their data to their summaries."""
    runs = {f"seed {seed}": replace(experiment, seed=seed) for seed in seeds}
    with tempfile.TemporaryDirectory() as folder:
        run_group(runs, Path(folder), device=device, on_event=lambda _name, _event: None)
