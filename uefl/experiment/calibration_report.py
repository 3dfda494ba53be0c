"""The table and the sentences in which a calibration is shown."""

from __future__ import annotations

from collections.abc import Mapping

from rich.markup import escape
from rich.table import Table

from uefl.core.abstention import ALL_ANSWERS, DELTA, NO_ANSWER
from uefl.core.conformal import ALL_CLASSES
from uefl.experiment.calibration import SiloCalibration
from uefl.experiment.held_out import MIN_TEMPERATURE_EXAMPLES


def make_calibration_table(calibrations: Mapping[str, SiloCalibration]) -> Table:
    """Return a table with one row per silo."""
    table = Table(title="Calibration, silo by silo")
    table.add_column("silo")
    headings = ("n", "T", "set: p ≥", "set size", "answer: p >", "abstains")
    for heading in headings:
        table.add_column(heading, justify="right")
    for name, found in calibrations.items():
        table.add_row(
            escape(name),
            str(found.num_examples),
            f"{found.temperature:.2f}",
            "all" if found.set_threshold == ALL_CLASSES else f"{1 - found.set_threshold:.3g}",
            f"{found.mean_set_size:.2f}",
            _describe_answers(found),
            f"{found.share_abstained:.0%}",
        )
    return table


def _describe_answers(found: SiloCalibration) -> str:
    if found.answer_threshold == NO_ANSWER:
        return "never"
    return "always" if found.answer_threshold == ALL_ANSWERS else f"{1 - found.answer_threshold:.3g}"


def _format_share(share: float) -> str:
    """Return a share in percent that is not rounded to all or nothing: 0.995 is 99.5%."""
    return f"{share * 100:.10g}%"


def explain_calibration(calibrations: Mapping[str, SiloCalibration]) -> list[str]:
    """Return what is guaranteed and what is not, one sentence per line."""
    first = next(iter(calibrations.values()))
    lines = []
    if first.pooling:
        lines.append(
            f"pooling={first.pooling}: the scores of other silos count as up to {first.pooling} examples. No coverage "
            "is guaranteed per silo: it holds only as far as the scores of silos are alike."
        )
    else:
        lines.append(
            f"A prediction set has the true class of at least {_format_share(first.coverage)} of the silo's new "
            "examples, on average over calibrations, if they are drawn as the calibration examples were. A set may be "
            "empty."
        )
    if any(found.risk and found.answer_threshold != NO_ANSWER for found in calibrations.values()):
        lines.append(
            f"At most {_format_share(first.risk)} of the answers are wrong, with a confidence of {1 - DELTA:.0%}, "
            "under the same condition and if less certain answers are not better."
        )
    lines.append(
        "n: calibration examples, on which the mean set size in classes and the share of abstaining are counted; "
        f"T: temperature, 1 for a silo with fewer than {MIN_TEMPERATURE_EXAMPLES} validation examples; p: probability "
        "of a class at this temperature."
    )
    lines += [f"silo {name}: {note}" for name, found in calibrations.items() for note in found.notes]
    return lines
