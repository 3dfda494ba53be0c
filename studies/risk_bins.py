"""How wrong is AUGRC from a histogram? Trained models of all kinds, beside the exact value from sorted examples.

`python -m studies.risk_bins run RUN …` predicts the test examples of finished runs of `rotated-sixteen` of
studies/rivals, and appends a record per run to results/risk-bins.jsonl: the mean entropy, and AUGRC exactly, from the
present histogram, and from the earlier one, of which the first records of docs/rivals.md are.
`python -m studies.risk_bins table` prints the largest errors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.progress import track
from torch import Tensor

import uefl
from studies.rivals.setups import SETUPS
from uefl.core.federation import Silo
from uefl.core.selective_risk import augrc, count_outcomes
from uefl.experiment.records import append_records, read_records
from uefl.experiment.run_folder import RunFolder

SETUP = "rotated-sixteen"  # of studies.rivals
RECORDS = Path("results/risk-bins.jsonl")
EARLIER_BINS, SMALLEST_SHARE = 1024, 1e-4  # entropies below this share of log C were in one bin
ENTROPIES = (0.0, 0.01, 0.02, 0.03, 0.05, 0.1, math.inf)  # limits of the table's rows
app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)


def count_in_earlier_bins(entropy: Tensor, is_correct: Tensor, num_classes: int) -> Tensor:
    """Count examples as the earlier histogram did: bins equal in the logit of the entropy's share of log C."""
    share = (entropy.double() / math.log(num_classes)).clamp(0, 1)
    logit = (share + SMALLEST_SHARE).log() - (1 - share + SMALLEST_SHARE).log()
    largest = math.log((1 + SMALLEST_SHARE) / SMALLEST_SHARE)
    bins = ((logit / largest + 1) / 2 * EARLIER_BINS).long().clamp(0, EARLIER_BINS - 1)
    return count_by_bin(bins, is_correct, EARLIER_BINS)


def count_by_bin(bins: Tensor, is_correct: Tensor, num_bins: int) -> Tensor:
    """Count errors and correct answers by bin: [2, num_bins]."""
    return torch.stack([bins[is_correct == k].bincount(minlength=num_bins) for k in (False, True)])


def count_exactly(entropy: Tensor, is_correct: Tensor) -> Tensor:
    """Count with a bin for every value of the entropy."""
    values, bins = np.unique(entropy.numpy(), return_inverse=True)
    return count_by_bin(torch.from_numpy(bins), is_correct, len(values))


def measure_run(folder: Path, silos: Sequence[Silo], device: str = "cpu") -> dict[str, Any]:
    """Predict the test examples of all silos of a run, and compute the means over silos."""
    by_silo = []
    for silo in silos:
        model = uefl.load(folder, silo=silo.name, device=device)
        predictions = model.predict(silo.test.x)
        entropy = torch.from_numpy(predictions.uncertainty.entropy)
        is_correct = torch.from_numpy(predictions.labels == np.asarray(silo.test.y))
        counts = {
            "exact": count_exactly(entropy, is_correct),
            "present": count_outcomes(entropy, is_correct, model.num_classes),
            "earlier": count_in_earlier_bins(entropy, is_correct, model.num_classes),
        }
        by_silo.append({"entropy": float(entropy.mean()), **{name: augrc(c) for name, c in counts.items()}})
    return {name: mean(values[name] for values in by_silo) for name in by_silo[0]}


def render_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Render by mean entropy the exact AUGRC and the largest errors, in percent as in docs/rivals.md."""
    head = ["mE", "runs", "AUGRC, exact", "largest error of the earlier bins", "largest error of the present bins"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for low, high in itertools.pairwise(ENTROPIES):
        chosen = [r for r in records if low <= r["entropy"] < high]
        if chosen:
            errors = [max(100 * abs(r[bins] - r["exact"]) for r in chosen) for bins in ("earlier", "present")]
            limits = f"{low:g} to {high:g}" if high < math.inf else f"above {low:g}"
            exact = 100 * mean(r["exact"] for r in chosen)
            lines.append(f"| {limits} | {len(chosen)} | {exact:.3f} | {errors[0]:.4f} | {errors[1]:.4f} |")
    return "\n".join(lines)


@app.command()
def run(
    folders: Annotated[list[Path], typer.Argument(help="Run folders, such as runs/rivals/*.")],
    records: Annotated[Path, typer.Option(help="File of the records, one for each process.")] = RECORDS,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    max_seed: Annotated[int, typer.Option(help="Leave out larger seeds; 0: none.")] = 0,
) -> None:
    """Measure the runs of the setup that have no record yet."""
    torch.set_num_threads(1)
    known = {record.get("run") for record in read_records(records)}
    data, silos = SETUPS[SETUP].data, dict[int, list[Silo]]()  # by seed: rows of a table have the same test examples
    for folder in track(folders):
        if folder.name in known:
            continue
        experiment = RunFolder(folder).read_header()["experiment"]
        method, seed = experiment["name"], experiment["seed"]
        if seed not in SETUPS[SETUP].seeds or (max_seed and seed > max_seed):
            continue
        if seed not in silos:
            silos[seed] = data.load(seed)[0]
        record = {"run": folder.name, "method": method, "seed": seed}
        append_records(records, [{**record, **measure_run(folder, silos[seed], device)}])


@app.command()
def table() -> None:
    """Print the table."""
    typer.echo(render_table(read_records(RECORDS)))


if __name__ == "__main__":
    app()
