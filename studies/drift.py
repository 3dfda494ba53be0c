"""Measure `uefl watch`: false alarms on unchanged images, and power for images that are rotated, blurred or paler.

`python -m studies.drift run` trains UEFL and FedAvg on real digits with a calibration part. It draws a reference and
new images from the held-out images of a silo, anew for every test; the new ones are unchanged, or changed after the
silo's own shift. Target, set before the first run: at most 5 % false alarms on unchanged images, up to chance.
The same test on the entropy of FedAvg's softmax outputs, without dropout and codewords, is the rival.
It appends a record with the command to results/drift.jsonl. `python -m studies.drift page` writes docs/drift-study.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from scipy.stats import binom
from torch import Tensor

from studies.after_training import (
    SETUPS,
    HeldOutPool,
    find_setup,
    list_missing,
    render_commands,
    train_in_parallel,
    train_method,
    write_record,
)
from studies.uncertainty_test import compute_interval
from uefl.core.drift import Array, compare_examples
from uefl.core.errors import unknown_value_error
from uefl.core.noise import derive_key, permutation
from uefl.data.shifts import apply_shift
from uefl.experiment.held_out import measure_examples
from uefl.experiment.parsing import parse_seeds
from uefl.experiment.records import read_records
from uefl.experiment.silo_models import SiloModels

RECORDS, PAGE = Path("results/drift.jsonl"), Path("docs/drift-study.md")
LEVEL, SIZES, NUM_REFERENCE = 0.05, (50, 200, 500), 500
UNCHANGED = "none"
CHANGES = (UNCHANGED, "rotate:10", "rotate:20", "rotate:45", "blur:1", "contrast:0.6")
TESTS = {
    "uefl": "UEFL: entropy and codewords",
    "uefl entropy": "UEFL: entropy alone",
    "fedavg softmax": "FedAvg: entropy of the softmax outputs",
}
LAW = (
    "**Law of the false alarms.** A draw splits the held-out images of a silo at random, so for any model and any"
    " images all splits are equally likely. A permutation test with p = (1 + b) / (1 + m) then has p ≤ α with a "
    "probability of at most α, equal values included, and Holm's rule keeps that for both tests together. A test "
    "of the project counts this over all splits of a small pool. Draws of one pool share images, but given the "
    "pool they are independent. So the number of alarms is at most binomial with the rate 5 %; p in the last "
    "column is its probability of at least so many alarms, and a p below 0.01 would refute the rate. The "
    "reference took part in nothing: training, K-means, the choice of codewords and the temperature read other "
    "parts. In use, the reference of a silo is the same at every look. Each look has the rate 5 %, but looks "
    "depend on each other; `--looks` bounds the chance of any alarm without independence."
)
app = typer.Typer(add_completion=False, help=__doc__)


class Values(NamedTuple):
    """What is tested of every image: entropy [N] and counts of codewords [N, V]."""

    entropy: Array
    counts: Array


def measure_pool(models: SiloModels, pool: HeldOutPool, change: str, seed: int, device: str) -> Values:
    """Measure the images of a pool after a change; FedAvg has the entropy of softmax outputs, and no codewords."""
    model = models.build(pool.silo_name, device)
    pixels = apply_shift(pool.pixels, change, seed, pool.indices)
    # Every change has draws of dropout of its own.
    measured = measure_examples(model, model.input_format.convert(pixels), 1000 * CHANGES.index(change))
    if models.description.method_name == "fedavg":
        return Values(compute_entropy(measured.probabilities), np.zeros((len(pool.y), 0)))
    return Values(measured.entropy.double().numpy(), measured.codeword_counts.double().numpy())


def compute_entropy(p: Tensor) -> Array:
    """Return the entropy of probabilities [N, C] in nats."""
    entropy: Array = -torch.special.xlogy(p.double(), p.double()).sum(1).numpy()
    return entropy


def count_alarms(reference: Values, changed: Values, size: int, repeats: int, key: int) -> tuple[int, int]:
    """Count alarms over random draws of a reference and of other images, which are changed.

    The first number is of all statistics together; the second is of entropy alone, whose p-value is the same.
    """
    n, alarms, of_entropy = min(NUM_REFERENCE, len(reference.entropy) - size), 0, 0
    for i in range(repeats):
        order = permutation(derive_key(key, i), len(reference.entropy)).numpy()
        own, new = order[:n], order[n : n + size]
        comparisons = compare_examples(
            *(reference.entropy[own], changed.entropy[new], reference.counts[own], changed.counts[new]),
            level=LEVEL,
            looks=1,
            seed=derive_key(key, i, "permutations"),
        )
        alarms += any(comparison.is_alarm for comparison in comparisons)
        of_entropy += comparisons[0].p_value <= LEVEL
    return alarms, of_entropy


class Cell(NamedTuple):
    """One silo, change and number of images: what a row or two of the record are about."""

    method: str
    silo_name: str
    change: str
    size: int
    repeats: int
    key: int


def list_rows(cell: Cell, reference: Values, changed: Values) -> list[dict[str, Any]]:
    """Return a row for each test that a method serves."""
    counts = count_alarms(reference, changed, cell.size, cell.repeats, cell.key)
    tests = ("uefl", "uefl entropy") if cell.method == "uefl" else ("fedavg softmax",)
    row = {"silo": cell.silo_name, "change": cell.change, "images": cell.size, "repeats": cell.repeats}
    return [{"test": test, **row, "alarms": alarms} for test, alarms in zip(tests, counts)]


def measure_models(
    models: SiloModels,
    pools: Sequence[HeldOutPool],
    seed: int,
    repeats: Mapping[bool, int],
    device: str,
    workers: int = 1,
) -> list[dict[str, Any]]:
    """Return a row per test, silo, change and number of images; `repeats` is by whether images are unchanged."""
    cells: list[tuple[Cell, Values, Values]] = []
    for pool in pools:
        values = {change: measure_pool(models, pool, change, seed, device) for change in CHANGES}
        print(f"  silo {pool.silo_name}: images measured", flush=True)
        for change in CHANGES:
            for size in SIZES:
                key, count = derive_key(seed, pool.silo_name, change, size), repeats[change == UNCHANGED]
                cell = Cell(models.description.method_name, pool.silo_name, change, size, count, key)
                cells.append((cell, values[UNCHANGED], values[change]))
    order = sorted(range(len(cells)), key=lambda i: -cells[i][0].repeats * (NUM_REFERENCE + cells[i][0].size))
    rows: dict[int, list[dict[str, Any]]] = {}
    if workers == 1:
        for done, i in enumerate(order, 1):
            rows[i] = list_rows(*cells[i])
            _print_progress(done, len(order))
    else:
        with ProcessPoolExecutor(min(workers, len(cells)), get_context("spawn")) as pool_of_processes:
            futures = {pool_of_processes.submit(list_rows, *cells[i]): i for i in order}
            for done, future in enumerate(as_completed(futures), 1):
                rows[futures[future]] = future.result()
                _print_progress(done, len(order))
    return [row for i in range(len(cells)) for row in rows[i]]


def _print_progress(done: int, total: int) -> None:
    if done % 20 == 0 or done == total:
        print(f"  {done} of {total} changes and numbers of images tested", flush=True)


@app.command("run")
def run_study(
    data: Annotated[str, typer.Option(help=f"One of: {', '.join(SETUPS)}.")] = "digits",
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0",
    methods: Annotated[str, typer.Option(help="uefl, fedavg, or both separated by a comma.")] = "uefl,fedavg",
    unchanged_repeats: Annotated[int, typer.Option(help="Draws of unchanged images per silo and size.")] = 100,
    changed_repeats: Annotated[int, typer.Option(help="Draws of changed images per silo, change and size.")] = 20,
    runs: Annotated[Path, typer.Option(help="Folder of trained runs.")] = Path("runs/after-training"),
    device: Annotated[str, typer.Option(help="Device of PyTorch.")] = "cpu",
    workers: Annotated[int, typer.Option(help="Parallel processes for training and for permutation tests.")] = 1,
    out: Annotated[Path, typer.Option(help="File of records.")] = RECORDS,
) -> None:
    """Train the methods and count alarms."""
    repeats = {True: unchanged_repeats, False: changed_repeats}
    setup, chosen = find_setup(data), tuple(methods.split(","))
    if unknown := [method for method in chosen if method not in ("uefl", "fedavg")]:
        raise unknown_value_error("method", unknown[0], ("uefl", "fedavg"))
    missing = list_missing(out, data, chosen, parse_seeds(seeds))
    train_in_parallel(setup, missing, runs, device, workers)
    for method, seed in missing:
        print(f"{method}, seed {seed}", flush=True)
        models, pools = train_method(setup, method, seed, runs, device)
        rows = measure_models(models, pools, seed, repeats, device, workers)
        record = {"data": data, "method": method, "seed": seed, "settings": setup.settings}
        write_record(out, "drift", {**record, "rows": rows})


@app.command()
def page(
    records: Annotated[Path, typer.Option(help="File of records.")] = RECORDS,
    out: Annotated[Path, typer.Option(help="Page to write.")] = PAGE,
) -> None:
    """Write the page from the records alone."""
    out.write_text(render_page(read_records(records)))


def render_page(records: Sequence[dict[str, Any]]) -> str:
    """Render the page."""
    parts = [
        "# Data that change, measured",
        "Generated by `python -m studies.drift page` from `results/drift.jsonl`. Share of alarms of one look at level "
        f"{LEVEL:.0%}, over silos, seeds and random draws of up to {NUM_REFERENCE} reference images and of new images. "
        "Target, set before the first run: at most 5 % false alarms on unchanged images, up to chance. Changes come "
        "after the silo's own shift: rotations in degrees, Gaussian blur in pixels, contrast as a factor.",
        LAW,
        describe_all_draws(records),
    ]
    for data, setup in SETUPS.items():
        if own := [record for record in records if record["data"] == data]:
            rows = [row for record in own for row in record["rows"]]
            parts += [f"## {setup.title}", render_false_alarms(rows), render_power(rows), render_commands(own)]
    return "\n\n".join(parts) + "\n"


def sum_alarms(rows: Sequence[dict[str, Any]], **values: Any) -> tuple[int, int]:
    """Return alarms and tests of the rows with these values."""
    own = [row for row in rows if all(row[name] == value for name, value in values.items())]
    return sum(row["alarms"] for row in own), sum(row["repeats"] for row in own)


def render_false_alarms(rows: Sequence[dict[str, Any]]) -> str:
    """Render the share of alarms on unchanged images, with the interval of Clopper and Pearson (95 %)."""
    lines = [
        "| unchanged images: test | " + " | ".join(f"{size} images" for size in SIZES) + " | all | at most 5 % |",
        "|---|" + "---|" * (len(SIZES) + 2),
    ]
    for test in TESTS:
        cells = []
        for size in (*SIZES, None):
            chosen = {"images": size} if size else {}
            alarms, total = sum_alarms(rows, test=test, change=UNCHANGED, **chosen)
            low, high = compute_interval(alarms, total)
            cells.append(f"{alarms / total:.1%} ({low:.1%} to {high:.1%})")
        p = compute_excess_probability(alarms, total)
        doubt = f"{'not refuted' if is_within_chance(alarms, total) else 'no'}, p = {p:.2f}"
        verdict = "yes" if alarms <= total * LEVEL else doubt
        lines.append(f"| {TESTS[test]} | {' | '.join(cells)} | {verdict} |")
    return "\n".join(lines)


def compute_excess_probability(alarms: int, total: int) -> float:
    """Return the probability of at least so many alarms of independent draws at a rate of 5 %."""
    return float(binom.sf(alarms - 1, total, LEVEL))


def is_within_chance(alarms: int, total: int) -> bool:
    """Return whether a rate of 5 % has so many alarms with a probability of at least 1 %."""
    return compute_excess_probability(alarms, total) >= 0.01


def describe_all_draws(records: Sequence[dict[str, Any]]) -> str:
    """Describe the false alarms of `uefl watch` over all data of the page."""
    rows = [row for record in records for row in record["rows"]]
    alarms, total = sum_alarms(rows, test="uefl", change=UNCHANGED)
    if not total:
        return "No draws of unchanged images are recorded."
    low, high = compute_interval(alarms, total)
    p = compute_excess_probability(alarms, total)
    return (
        f"**All data together:** {alarms} alarms of `uefl watch` in {total} draws of unchanged images, "
        f"{alarms / total:.1%} ({low:.1%} to {high:.1%}). At a rate of exactly 5 %, at least so many have the "
        f"probability {p:.2f}."
    )


def render_power(rows: Sequence[dict[str, Any]]) -> str:
    """Render the share of alarms on changed images."""
    lines = [
        "| share of alarms: change | images | " + " | ".join(TESTS.values()) + " |",
        "|---|---|" + "---|" * len(TESTS),
    ]
    for change in CHANGES[1:]:
        for size in SIZES:
            counts = [sum_alarms(rows, test=test, change=change, images=size) for test in TESTS]
            cells = [f"{alarms / total:.0%}" if total else "–" for alarms, total in counts]
            lines.append(f"| {change} | {size} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    app()
