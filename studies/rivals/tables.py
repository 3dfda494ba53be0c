"""Parts of the tables of docs/rivals.md: columns, rows by seed and fold, gains with their intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import mean, stdev
from typing import NamedTuple

from studies.methods.runner import RunRecord, StudyRun
from studies.rivals.statistics import compare_folds, compare_seeds
from studies.rivals.trials import UEFL, Setup
from uefl.core.paired_difference import Difference

MARGIN_POINTS, MARGIN_NLL = 0.3, 2.0  # what "not below" allows: points of accuracy, percent of NLL
MIN_ENTROPY = 0.03  # mE of a run below which AUGRC from the earlier histogram may be wrong
SMALL_SILO = "Switzerland"  # a hospital that has few patients without heart disease
Part = tuple[int, int]  # seed and fold
Compare = Callable[[Sequence[float], Sequence[float]], Difference]


class Column(NamedTuple):
    """A mean over silos in the table."""

    title: str
    metric: str
    scale: float = 1.0
    digits: int = 3


COLUMNS = (
    Column("mA, %", "accuracy", 100, 2),
    Column("mE", "entropy"),
    Column("NLL", "nll"),
    Column("NLL, scaled", "nll_scaled"),
    Column("Brier", "brier"),
    Column("ECE", "ece"),
    Column("AUGRC", "augrc", 100, 2),
    Column("AUROC", "auroc"),
)

POOLED_COLUMNS = (  # of the test examples of all silos together
    Column("ECE", "ece"),
    *(Column(f"error of the most certain {p} %, %", f"risk_at_{p}", 100, 2) for p in (50, 80, 90)),
    Column("error of all, %", "risk_at_100", 100, 2),
)


def identify_record(record: RunRecord) -> tuple[str, int, str]:
    """Return the row, the seed and the fold of a record."""
    return record["method"], record["seed"], record["settings"].get("data.fold", "")


def identify_run(run: StudyRun) -> tuple[str, int, str]:
    """Return the row, the seed and the fold of a run."""
    return run.method, run.seed, run.experiment.data.fold


def find_part(run: StudyRun) -> Part:
    """Return the seed and the fold of a run; 0 is no fold."""
    return run.seed, int(run.experiment.data.fold.partition("/")[0] or 0)


def get_comparison(setup: Setup) -> Compare:
    """Return the comparison of two rows of a setup, paired by seed or by fold."""
    return partial(compare_folds, test_to_train=1 / (setup.folds - 1)) if setup.folds else compare_seeds


def mean_over_silos(record: RunRecord, metric: str) -> float:
    """Return the mean of a metric over the silos that have it."""
    values = [silo[metric] for silo in record["silos"].values() if metric in silo]
    return mean(values) if values else float("nan")


def find_accuracy_gain(
    rows: Mapping[str, Mapping[Part, RunRecord]], method: str, parts: Sequence[Part], compare: Compare
) -> Difference:
    """Return UEFL's gain in mean accuracy, in points."""
    return compare(*([100 * mean_over_silos(rows[m][p], "accuracy") for p in parts] for m in (UEFL, method)))


def find_nll_gain(
    rows: Mapping[str, Mapping[Part, RunRecord]],
    method: str,
    parts: Sequence[Part],
    compare: Compare,
    metric: str = "nll",
) -> Difference:
    """Return by how much UEFL's NLL is lower, in percent of the other method's mean."""
    theirs, ours = ([mean_over_silos(rows[m][p], metric) for p in parts] for m in (method, UEFL))
    center = mean(theirs)
    return compare([100 * x / center for x in theirs], [100 * x / center for x in ours])


def select_fedavg_row(setup: Setup, rows: Mapping[str, Mapping[Part, RunRecord]]) -> str:
    """Return the form of FedAvg with the lowest validation NLL."""
    return min(setup.fedavg_rows, key=lambda row: mean(r["validation_nll"] for r in rows[row].values()))


def format_gain(gain: Difference, margin: float, digits: int) -> str:
    """Format a gain with its interval and the verdict."""
    verdict = "undecided"
    if gain.low > 0:
        verdict = "**ahead**"
    elif gain.high < 0:
        verdict = "**below**"
    elif gain.low > -margin:
        verdict = "not below"
    return f"{gain.mean:+.{digits}f} [{gain.low:+.{digits}f}, {gain.high:+.{digits}f}] {verdict}"


def format_cell(records: Sequence[RunRecord], column: Column) -> str:
    """Format the mean of a metric over silos and runs; AUGRC that the earlier histogram may have wrong is left out.

    So is the AUROC of a hospital that has few patients of one class.
    """
    if (
        column.metric == "augrc"
        and is_from_earlier_bins(records)
        and min(mean_over_silos(record, "entropy") for record in records) < MIN_ENTROPY
    ):
        return "–"
    if column.metric == "auroc":
        records = [{**r, "silos": {n: silo for n, silo in r["silos"].items() if n != SMALL_SILO}} for r in records]
    return format_mean([column.scale * mean_over_silos(record, column.metric) for record in records], column)


def is_from_earlier_bins(records: Sequence[RunRecord]) -> bool:
    """Return whether some records may be of the earlier histogram; those with metrics of all silos together are not."""
    return not all("all_silos" in record for record in records)


def format_mean(values: Sequence[float], column: Column) -> str:
    """Format the mean over seeds or folds with its standard deviation."""
    return f"{mean(values):.{column.digits}f} ± {stdev(values):.{column.digits}f}"


def format_table(lines: Sequence[Sequence[str]]) -> str:
    """Format a table in Markdown; the first line is its head."""
    head, *rest = lines
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *rest])
