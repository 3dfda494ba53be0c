"""The format of a table: one value that turns the cells of any table of this kind into features for a network.

It is all that a prediction needs beside the network, and it travels as JSON: in a model file, and over Flower.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import zip_longest
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from uefl.core.errors import InputError

Kind = Literal["numeric", "categorical", "boolean"]
MISSING_TEXTS = frozenset({"", "?", "-", ".", "na", "n/a", "#n/a", "nan", "null"})  # in lower case
BOOLEAN_WORDS = {"true": 1.0, "false": 0.0, "yes": 1.0, "no": 0.0, "t": 1.0, "f": 0.0, "y": 1.0, "n": 0.0}
BOOLEAN_TEXTS = {**BOOLEAN_WORDS, "1": 1.0, "0": 0.0, "1.0": 1.0, "0.0": 0.0}
MAX_NUMBER = 1e15  # a cell with a larger number is invalid; squares of these add up in double precision
_THOUSANDS = re.compile(
    r"[+-]?\d{1,3}(?:(?:,\d{3})+(?:\.\d+)?|(?:\.\d{3})+,\d+|(?:[ '’\u00a0\u202f]\d{3})+(?:[.,]\d+)?)"
)
_DAY = (
    r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.](?:\d{4}|\d{2})|\d{1,2}[- ][A-Za-z]{3,9}[- ](?:\d{4}|\d{2})"
)
_DATE = re.compile(rf"(?:{_DAY})(?:[T ]\d{{1,2}}:\d{{2}}(?::\d{{2}}(?:\.\d+)?)?(?:Z|[+-]\d{{2}}:?\d{{2}})?)?", re.ASCII)
MIN_RELATIVE_STD = 1e-6  # of the mean: sums of squares do not resolve a smaller deviation


@dataclass(frozen=True)
class Column:
    """A column that becomes features. A missing value becomes 0, and 1 in the column's indicator if it has one."""

    name: str
    kind: Kind
    levels: tuple[str, ...] = ()  # categories, one feature each
    missing: tuple[str, ...] = ()  # texts that mean missing, beside `MISSING_TEXTS`
    has_indicator: bool = False
    mean: float = 0.0
    std: float = 1.0
    is_scaled: bool = False  # mean and deviation are known

    @property
    def num_features(self) -> int:
        """Number of features, with the indicator."""
        return (len(self.levels) if self.kind == "categorical" else 1) + self.has_indicator

    def describe(self) -> str:
        """Return kind and levels in words."""
        return f"{self.kind} ({', '.join(self.levels)})" if self.levels else self.kind

    def is_missing(self, text: str) -> bool:
        """Return whether a cell is empty or has a value that means missing."""
        if text.lower() in MISSING_TEXTS or text in self.missing:
            return True
        number = parse_number(text) if self.missing else None
        return number is not None and any(parse_number(value) == number for value in self.missing)

    def parse_cell(self, text: str, *, decimal_comma: bool = False) -> float:
        """Return the number of a cell: a level's index, 0 or 1, or a number; NaN if missing; else an `InputError`."""
        text = text.strip()
        if self.is_missing(text):
            return math.nan
        if self.kind == "categorical":
            if text not in self.levels:
                raise InputError(f"{self.name} '{text}' is not one of its levels: {', '.join(self.levels)}")
            return float(self.levels.index(text))
        if self.kind == "boolean":
            if text.lower() not in BOOLEAN_TEXTS:
                raise InputError(f"{self.name} '{text}' is neither true nor false")
            return BOOLEAN_TEXTS[text.lower()]
        number = parse_number(text, decimal_comma=decimal_comma)
        if number is None:
            raise InputError(f"{self.name} '{text}' {describe_bad_number(self.name, text)}")
        return number

    def encode(self, values: Tensor) -> Tensor:
        """Return features [n, f] of parsed cells [n]."""
        is_missing = values.isnan()
        if self.kind == "categorical":
            features = torch.stack([values == i for i in range(len(self.levels))], 1).double()
        elif self.kind == "boolean":
            features = torch.where(is_missing, 0.0, 2 * values - 1)[:, None]
        else:
            features = torch.where(is_missing, 0.0, (values - self.mean) / self.std)[:, None]
        return torch.cat([features, is_missing[:, None].double()], 1) if self.has_indicator else features


@dataclass(frozen=True)
class TableFormat:
    """Columns, classes and label rule of a table."""

    columns: tuple[Column, ...]
    classes: tuple[str, ...] = ()
    label: str = ""
    decimal_comma: bool = False

    @property
    def num_features(self) -> int:
        """Size of the input of a network."""
        return sum(column.num_features for column in self.columns)

    def encode(self, values: Tensor) -> Tensor:
        """Return features [n, f] of parsed cells [n, columns]."""
        if unscaled := [c.name for c in self.columns if c.kind == "numeric" and not c.is_scaled]:
            raise InputError(f"the mean and deviation of column '{unscaled[0]}' are not known yet")
        columns = [column.encode(values[:, i]) for i, column in enumerate(self.columns)]
        return torch.cat(columns, 1).float()

    def parse_cells(self, cells: Sequence[str]) -> list[float]:
        """Return the numbers of one row, whose cells are in the order of the columns."""
        return [column.parse_cell(cell, decimal_comma=self.decimal_comma) for column, cell in zip(self.columns, cells)]

    def find_difference(self, other: TableFormat) -> str:
        """Return in which column another table differs before scaling, or an empty text."""
        for column, other_column in zip_longest(self.columns, other.columns):
            if column is None or other_column is None:
                return f"column '{(column or other_column).name}' exists in one of them only"
            if column.name != other_column.name:
                return f"column '{column.name}' in place of '{other_column.name}'"
            if (column.kind, column.levels) != (other_column.kind, other_column.levels):
                return f"column '{column.name}' is {column.describe()}, not {other_column.describe()}"
        return ""

    def to_json(self) -> str:
        """Return the format as text."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> TableFormat:
        """Return the format that `to_json` wrote, here or on another machine; everything is checked."""
        try:
            values = json.loads(text)
            columns = tuple(_make_column(column) for column in values.pop("columns"))
            classes = tuple(map(str, values.pop("classes")))
            return cls(columns, classes, str(values["label"]), bool(values["decimal_comma"]))
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as e:
            raise InputError(f"the format of a table is damaged: {e}") from None


def _make_column(values: Mapping[str, Any]) -> Column:
    """Return a checked column."""
    if set(values) != {field.name for field in fields(Column)}:
        raise ValueError("unknown or missing fields of a column")
    lists = {name: tuple(map(str, values[name])) for name in ("levels", "missing")}
    numbers = {name: float(values[name]) for name in ("mean", "std")}
    flags = {name: bool(values[name]) for name in ("has_indicator", "is_scaled")}
    column = Column(**{**values, **lists, **numbers, **flags, "name": str(values["name"])})
    if column.kind not in get_args(Kind) or not math.isfinite(column.mean) or not 0 < column.std < math.inf:
        raise ValueError(f"column '{column.name}' has an invalid kind, mean or deviation")
    return column


def parse_number(text: str, *, decimal_comma: bool = False) -> float | None:
    """Return a finite number of moderate size, or None."""
    if decimal_comma and "." not in text:
        text = text.replace(",", ".", 1)
    try:
        number = float(text) if "_" not in text else math.nan
    except ValueError:
        return None
    return number if abs(number) <= MAX_NUMBER else None


def has_thousands_separators(text: str) -> bool:
    """Return whether a text is a number whose thousands are separated, such as 1,234.5, 1.234,5 or 1 234."""
    return bool(_THOUSANDS.fullmatch(text))


def is_date(text: str) -> bool:
    """Return whether a text is a date, perhaps with a time."""
    return bool(_DATE.fullmatch(text))


def describe_date_remedy(column: str) -> str:
    """Return what to do with a column of dates."""
    return f"set ignore={column}, or convert it to a number, such as the days since an event"


def describe_bad_number(column: str, text: str) -> str:
    """Return what is wrong with a text that should be a number, and the remedy."""
    has_decimal_comma = parse_number(text, decimal_comma=True) is not None
    if has_thousands_separators(text):
        other = "; if it is a decimal comma, set decimal_comma=true" if has_decimal_comma else ""
        return f"separates thousands; remove the separators from the file{other}"
    if has_decimal_comma:
        return "has a decimal comma; set decimal_comma=true"
    if is_date(text):
        return f"is a date, not a number; {describe_date_remedy(column)}"
    return f"is not a number; set missing.{column}={text} if it means missing, or categorical={column}"


class ColumnSums(NamedTuple):
    """What a silo sends of its training rows so that tables can be scaled: sums over present values, per column."""

    num_rows: int
    counts: tuple[int, ...]  # values that are not missing
    sums: tuple[float, ...]  # of numeric columns; 0 for others
    squares: tuple[float, ...]


def compute_sums(table: TableFormat, values: Tensor) -> ColumnSums:
    """Return the sums of parsed cells [n, columns]."""
    is_numeric = torch.tensor([column.kind == "numeric" for column in table.columns])
    numbers = torch.where(is_numeric, values.double().nan_to_num(0.0), 0.0)
    return ColumnSums(
        len(values),
        tuple(values.isfinite().sum(0).tolist()),
        tuple(numbers.sum(0).tolist()),
        tuple(numbers.square().sum(0).tolist()),
    )


def scale_by_sums(table: TableFormat, silo_sums: Sequence[ColumnSums]) -> TableFormat:
    """Return the format with mean, deviation and indicators of all silos, from nothing but their sums."""
    columns = []
    for i, column in enumerate(table.columns):
        count = sum(sums.counts[i] for sums in silo_sums)
        has_indicator = any(sums.counts[i] < sums.num_rows for sums in silo_sums)
        column = replace(column, has_indicator=has_indicator)
        if column.kind == "numeric" and not column.is_scaled:
            mean = math.fsum(sums.sums[i] for sums in silo_sums) / max(count, 1)
            square = math.fsum(sums.squares[i] for sums in silo_sums) / max(count, 1)
            std = max(math.sqrt(max(square - mean**2, 0.0)), MIN_RELATIVE_STD * abs(mean)) or 1.0
            column = replace(column, mean=mean, std=std, is_scaled=True)
        columns.append(column)
    return replace(table, columns=tuple(columns))


def parse_sums(values: Any, num_columns: int) -> ColumnSums:
    """Return the sums that another machine sent, or raise an `InputError`; sums of real rows pass."""
    try:
        num_rows, counts, sums, squares = values
        parsed = ColumnSums(int(num_rows), tuple(map(int, counts)), tuple(map(float, sums)), tuple(map(float, squares)))
    except (TypeError, ValueError, OverflowError):
        raise InputError("the sums of a table are incomplete") from None
    for entries in parsed[1:]:
        if len(entries) != num_columns:
            raise InputError(f"the sums of a table are of {len(entries)} columns, but it has {num_columns}")
    for count, total, square in zip(*parsed[1:]):
        if not 0 <= count <= parsed.num_rows:
            raise InputError(f"a column of a table has {count} values in {parsed.num_rows} rows")
        limit = count * MAX_NUMBER
        if not (abs(total) <= limit and total**2 * (1 - 1e-6) <= count * square <= limit**2 and square >= 0):
            raise InputError("the sums of a table are not those of numbers")
    return parsed
