"""The settings that say what the columns of a table mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from uefl.core.errors import InputError
from uefl.core.field_rules import setting

ABOVE = "above:"  # prefix of a threshold in `positive`


@dataclass(frozen=True, kw_only=True)
class TableConfig:
    """What the columns of a table mean; kinds and levels that are not declared are guessed from the rows."""

    label: str = setting("", "Column with the class of a row.")
    positive: tuple[str, ...] = setting(
        (), "Label values of the positive class, such as 1,2,3 or above:0; empty: every label is a class."
    )
    silo: str = setting("", "Column with the silo of a row; empty: a partitioner makes the silos.")
    split: str = setting("", "Column with train or test; empty: the split is drawn by the seed.")
    ignore: tuple[str, ...] = setting((), "Columns that are not used.")
    numeric: tuple[str, ...] = setting((), "Columns with numbers; empty: guessed.")
    categorical: tuple[str, ...] = setting((), "Columns with categories, also categories that are numbers.")
    boolean: tuple[str, ...] = setting((), "Columns with true or false, yes or no, 1 or 0.")
    missing: tuple[str, ...] = setting(
        (), "Values that mean missing, per column: missing.chol=0,-9 (beside empty cells, NA, NaN, null and ?).",
        per_column=True,
    )  # fmt: skip
    levels: tuple[str, ...] = setting(
        (), "Categories per column: levels.thal=normal,fixed; needed on Flower, else the union of all silos.",
        per_column=True,
    )  # fmt: skip
    scale: tuple[str, ...] = setting(
        (), "Mean and deviation per numeric column: scale.age=54,9; else from sums that the silos send.",
        per_column=True,
    )  # fmt: skip
    decimal_comma: bool = setting(False, "Read 2,5 as the number 2.5.")

    def __post_init__(self) -> None:
        declared = [*self.numeric, *self.categorical, *self.boolean, *self.ignore]
        for name in declared:
            if declared.count(name) > 1:
                raise InputError(f"column '{name}' stands twice in numeric, categorical, boolean and ignore")
        for name, texts in parse_column_values("scale", self.scale).items():
            parse_scale(name, texts)
        parse_column_values("missing", self.missing)
        parse_column_values("levels", self.levels)
        self.threshold  # noqa: B018, raises an error for an invalid number

    @property
    def threshold(self) -> float | None:
        """The number above which a label is positive, if `positive` is such a rule."""
        if not any(text.startswith(ABOVE) for text in self.positive):
            return None
        try:
            (text,) = self.positive
            return float(text.removeprefix(ABOVE))
        except ValueError:
            raise InputError(
                f"positive={','.join(self.positive)} must be label values, or above:<number>, such as above:0"
            ) from None

    @property
    def column_names(self) -> dict[str, str]:
        """Every column that a setting names, with the setting."""
        named = {self.label: "label", self.silo: "silo", self.split: "split"}
        for setting_name in ("ignore", "numeric", "categorical", "boolean"):
            named |= dict.fromkeys(getattr(self, setting_name), setting_name)
        for setting_name in ("missing", "levels", "scale"):
            named |= dict.fromkeys(parse_column_values(setting_name, getattr(self, setting_name)), setting_name)
        return {name: setting_name for name, setting_name in named.items() if name}


def parse_column_values(setting_name: str, entries: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the values of each column from entries such as `chol=0,-9`."""
    values: dict[str, tuple[str, ...]] = {}
    for entry in entries:
        column, sign, text = entry.partition("=")
        if not sign or not column or column in values:
            raise InputError(f"{setting_name}={entry} must give each column once: {setting_name}.<column>=<value>")
        values[column] = tuple(part.strip() for part in text.split(","))
    return values


def parse_scale(column: str, texts: Sequence[str]) -> tuple[float, float]:
    """Return mean and deviation of a column."""
    try:
        mean, std = (float(text) for text in texts)
    except ValueError:
        mean, std = 0.0, 0.0
    if not (abs(mean) < float("inf") and 0 < std < float("inf")):
        raise InputError(f"scale.{column}={','.join(texts)} must be mean,deviation, such as 54,9")
    return mean, std
