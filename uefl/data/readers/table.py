"""Read a table from a CSV file: the user's own columns, one row per example, such as a patient."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from uefl.core.errors import InputError
from uefl.core.federation import Examples
from uefl.data.images import Images
from uefl.data.quality import check_images, join_names
from uefl.data.readers.context import ReadContext, sanitize_line
from uefl.data.readers.csv_rows import CsvRow, CsvTable, check_one_silo, parse_csv, read_csv
from uefl.data.readers.labeled_files import index_known_classes, index_names
from uefl.data.readers.manifest import SPLIT_NAMES
from uefl.data.readers.silo_column import SiloColumn
from uefl.data.sources import Source
from uefl.data.table_config import TableConfig, parse_column_values, parse_scale
from uefl.data.table_format import (
    BOOLEAN_WORDS,
    Column,
    Kind,
    TableFormat,
    describe_date_remedy,
    has_thousands_separators,
    is_date,
    parse_number,
)

MAX_LEVELS = 50  # of a column whose kind is guessed; more are rather names or free text
MAX_CLASSES = 100
NEGATIVE, POSITIVE = "negative", "positive"


class TableRows(NamedTuple):
    """Rows of a table as a network receives them."""

    x: Tensor  # [n, f] features
    lines: list[int]  # line of the file in which each row ends
    skipped: list[str]  # one line per row that could not be used, and why
    silo_values: list[str]  # what each row has in the column that names silos; empty texts without such a column


def read_table(path: Path, table: TableFormat) -> TableRows:
    """Read new rows of a table in the format of the training rows, for a prediction; labels are not needed."""
    context = ReadContext(skip_bad=True)
    return _encode_rows(read_csv(path, _list_names(table), context), table, context)


def parse_table(path: str, data: bytes, table: TableFormat, silo_column: str = "") -> TableRows:
    """Parse the bytes of a table as `read_table` does; its path is for messages."""
    context = ReadContext(skip_bad=True)
    return _encode_rows(parse_csv(path, data, _list_names(table), context), table, context, silo_column)


def _list_names(table: TableFormat) -> list[str]:
    return [column.name for column in table.columns]


def _encode_rows(csv_table: CsvTable, table: TableFormat, context: ReadContext, silo_column: str = "") -> TableRows:
    values, rows = _parse_values(csv_table, csv_table.rows, table, context)
    skipped = [sanitize_line(message) for message in context.skipped_messages]
    if not rows:
        raise InputError(f"{csv_table.path}: none of the {len(csv_table.rows)} rows is usable; the first: {skipped[0]}")
    silo_values = [row.cells.get(silo_column, "").strip() for row in rows]
    return TableRows(table.encode(values), [row.line for row in rows], skipped, silo_values)


def read_labeled_table(
    path: Path,
    table: TableFormat,
    config: TableConfig,
    classes: Sequence[str],
    context: ReadContext,
    silo_column: SiloColumn,
) -> Examples:
    """Read new rows of a silo with their labels, in the format of the training; `context` collects rows without use."""
    csv_table = read_csv(path, [*(column.name for column in table.columns), config.label], context)
    if silo_column.column:
        check_own_rows(path, csv_table, silo_column)
    labeled = _select_usable_rows(csv_table, replace(config, silo="", split=""), "", context)
    values, rows = _parse_values(csv_table, labeled, table, context)
    if not rows:
        raise InputError(f"{path}: none of the {len(csv_table.rows)} rows is usable")
    names, y = _make_labels(rows, config, is_one_silo=True)
    return Examples(table.encode(values), index_known_classes(path, names, classes)[y])


def check_own_rows(path: Path, csv_table: CsvTable, silo_column: SiloColumn) -> None:
    """Refuse a table whose column names several silos, or another one; a table without this column is accepted."""
    check_one_silo(path, csv_table, silo_column.column)
    for row in csv_table.rows:
        if silo_column.is_other(value := row.cells.get(silo_column.column, "").strip()):
            raise InputError(
                f"{path}: column '{silo_column.column}' names silo {value}, not {silo_column.silo_name}; give rows of "
                f"{silo_column.silo_name}, or leave the column out if they are"
            )


def read_training_table(name: str, path: Path, context: ReadContext) -> Images:
    """Read the rows of all silos, with their labels; the cells are numbers that are not scaled yet."""
    config, group = context.table, context.group
    if not config.label:
        raise InputError(f"{name} needs the column with the class of a row: set label=<column>")
    for setting_name, column_names in (("silo", [config.silo]), ("split", [config.split]), ("ignore", config.ignore)):
        if config.label in column_names:
            raise InputError(f"{setting_name}={config.label} and label={config.label} name the same column")
    named = {**config.column_names, **({group: "group"} if group else {})}
    csv_table = read_csv(path, [config.label, *(n for n in (config.silo, config.split, group) if n)], context)
    for column, setting_name in named.items():
        if column not in csv_table.columns:
            raise InputError(
                f"{setting_name} names column '{column}', but {path} has only {', '.join(csv_table.columns)}"
            )
    rows = _select_usable_rows(csv_table, config, group, context)
    not_features = {config.label, config.silo, config.split, group, *config.ignore}
    names = [column for column in csv_table.columns if column not in not_features]
    if not names:
        raise InputError(f"{path}: no column is left as input of the network")
    columns = tuple(make_column(column, rows, config, path) for column in names)
    table = TableFormat(columns, label=config.label, decimal_comma=config.decimal_comma)
    values, rows = _parse_values(csv_table, rows, table, context)
    if not rows:
        raise InputError(f"{path}: no usable row; the first: {context.skipped_messages[0]}")
    classes, y = _make_labels(rows, config, is_one_silo=context.is_one_silo)
    warnings = tuple(sanitize_line(line) for line in _warn_row_numbers(table, values))
    images = Images(name, values, y, classes, torch.tensor([_is_test(row, config) for row in rows]))
    if config.silo:
        silos, silo_ids = index_names([row.cells[config.silo].strip() for row in rows])
        images = replace(images, silo_ids=silo_ids, silos=silos)
    if group:
        images = replace(images, group_ids=index_names([row.cells[group].strip() for row in rows])[1])
    images = check_images(images, context)
    table = replace(table, classes=images.classes)
    notes = () if context.is_one_silo else _note_positive_class(images.classes, config)
    return replace(images, table=table, warnings=(*images.warnings, *warnings), notes=(*images.notes, *notes))


def make_column(name: str, rows: Sequence[CsvRow], config: TableConfig, path: Path) -> Column:
    """Return a column as its settings declare it; its kind and levels are guessed where they do not."""
    missing = parse_column_values("missing", config.missing).get(name, ())
    levels = parse_column_values("levels", config.levels).get(name, ())
    scale = parse_column_values("scale", config.scale).get(name)
    probe = Column(name, "numeric", missing=missing)
    texts = Counter(text for row in rows if not probe.is_missing(text := row.cells[name].strip()))
    kind = _get_declared_kind(name, config) or ("categorical" if levels else _guess_kind(name, texts, path))
    if scale is not None and kind != "numeric":
        raise InputError(f"scale.{name} needs a numeric column, but {name} is {kind}")
    if kind == "categorical":
        return Column(name, kind, levels or index_names(list(texts))[0], missing)
    if levels:
        raise InputError(f"levels.{name} needs a categorical column, but {name} is {kind}")
    if scale is None:
        return Column(name, kind, missing=missing)
    mean, std = parse_scale(name, scale)
    return Column(name, kind, missing=missing, mean=mean, std=std, is_scaled=True)


def _get_declared_kind(name: str, config: TableConfig) -> Kind | None:
    kinds: tuple[Kind, ...] = ("numeric", "categorical", "boolean")
    return next((kind for kind in kinds if name in getattr(config, kind)), None)


def _guess_kind(name: str, texts: Counter[str], path: Path) -> Kind:
    """Guess by the values: words for true and false, mostly numbers, or a few categories; dates are neither."""
    num_numbers = sum(n for text, n in texts.items() if _looks_numeric(text))
    num_others = sum(texts.values()) - num_numbers
    if texts and all(text.lower() in BOOLEAN_WORDS for text in texts):
        return "boolean"
    if num_numbers >= 2 * num_others:  # also without any value; the others are reported row by row
        return "numeric"
    example = next(text for text in texts if not _looks_numeric(text))
    if (num_dates := sum(n for text, n in texts.items() if is_date(text))) > num_others / 2:
        date = next(text for text in texts if is_date(text))
        raise InputError(
            f"{path}: column '{name}' has {num_dates} dates, such as '{date}'; {describe_date_remedy(name)}"
        )
    if num_numbers and num_others:
        raise InputError(
            f"{path}: column '{name}' has {num_numbers} numbers and {num_others} texts, such as '{example}'; set "
            f"categorical={name}, numeric={name} with missing.{name}={example}, or ignore={name}"
        )
    if len(texts) > MAX_LEVELS:
        raise InputError(
            f"{path}: column '{name}' has {len(texts)} different texts, such as '{example}'; set group={name} if it "
            f"names patients, whose rows then stay together, ignore={name}, or categorical={name}"
        )
    return "categorical"


def _looks_numeric(text: str) -> bool:
    """Return whether a text is a number, perhaps with a decimal comma or separated thousands, which rows report."""
    return parse_number(text, decimal_comma=True) is not None or has_thousands_separators(text)


def _select_usable_rows(csv_table: CsvTable, config: TableConfig, group: str, context: ReadContext) -> list[CsvRow]:
    """Return the rows with a label, silo, group and split; skip or reject the others."""
    rows = []
    missing = parse_column_values("missing", config.missing).get(config.label, ())
    label = Column(config.label, "categorical", missing=missing)
    for row in csv_table.rows:
        empty = next((n for n in (config.silo, group) if n and not row.cells[n].strip()), "")
        if label.is_missing(row.cells[config.label].strip()):
            empty = config.label
        if empty:
            context.skip_or_raise(f"{csv_table.path}: line {row.line}: column '{empty}' is empty")
        elif config.split and row.cells[config.split].strip().lower() not in SPLIT_NAMES:
            split = row.cells[config.split].strip()
            context.skip_or_raise(f"{csv_table.path}: line {row.line}: split '{split}' must be train or test")
        elif config.threshold is not None and parse_number(row.cells[config.label].strip()) is None:
            text = row.cells[config.label].strip()
            context.skip_or_raise(f"{csv_table.path}: line {row.line}: label '{text}' is not a number")
        else:
            rows.append(row)
    if not rows:
        raise InputError(f"{csv_table.path}: no usable row; the first: {context.skipped_messages[0]}")
    return rows


def _parse_values(
    csv_table: CsvTable, rows: Sequence[CsvRow], table: TableFormat, context: ReadContext
) -> tuple[Tensor, list[CsvRow]]:
    """Return the numbers of all cells [n, columns], NaN where missing, and the rows they come from."""
    values, parsed = [], []
    for row in rows:
        try:
            values.append(table.parse_cells([row.cells[column.name] for column in table.columns]))
            parsed.append(row)
        except InputError as e:
            context.skip_or_raise(f"{csv_table.path}: line {row.line}: {e}")
    return torch.tensor(values, dtype=torch.float64).reshape(len(values), len(table.columns)), parsed


def _make_labels(rows: Sequence[CsvRow], config: TableConfig, *, is_one_silo: bool) -> tuple[tuple[str, ...], Tensor]:
    """Return the classes and the class of every row."""
    texts = [row.cells[config.label].strip() for row in rows]
    classes, y = index_names(texts)
    if len(classes) == 1 and not is_one_silo:
        raise InputError(
            f"label column '{config.label}' has only the value '{classes[0]}', but training needs two classes"
        )
    if config.positive:
        is_positive = torch.tensor([_is_positive(label, config) for label in classes])
        if is_one_silo:  # it has the classes of its own rows, as without `positive`
            return index_names([POSITIVE if p else NEGATIVE for p in is_positive[y].tolist()])
        _check_positive(classes, config)
        return (NEGATIVE, POSITIVE), is_positive[y].long()
    if len(classes) > MAX_CLASSES:
        raise InputError(
            f"label column '{config.label}' has {len(classes)} different values; set positive=above:<number>, or "
            "another label"
        )
    return classes, y


def _is_positive(label: str, config: TableConfig) -> bool:
    if config.threshold is not None:
        return (parse_number(label) or 0.0) > config.threshold
    return any(_is_same_label(label, text) for text in config.positive)


def _check_positive(labels: Sequence[str], config: TableConfig) -> None:
    """Raise an error if `positive` names a label that does not occur, or does not divide the labels."""
    for text in config.positive if config.threshold is None else ():
        if not any(_is_same_label(label, text) for label in labels):
            raise InputError(f"positive={text} is not a value of '{config.label}', which has {join_names(labels)}")
    is_positive = {_is_positive(label, config) for label in labels}
    if len(is_positive) == 1:
        raise InputError(
            f"positive={','.join(config.positive)} makes every row {POSITIVE if is_positive.pop() else NEGATIVE}; "
            f"'{config.label}' has {join_names(labels)}"
        )


def _is_same_label(label: str, text: str) -> bool:
    number = parse_number(text)
    return label == text or (number is not None and parse_number(label) == number)


def _is_test(row: CsvRow, config: TableConfig) -> bool:
    return bool(config.split) and SPLIT_NAMES[row.cells[config.split].strip().lower()]


def _warn_row_numbers(table: TableFormat, values: Tensor) -> list[str]:
    """Warn about columns that number the rows: they identify rows, and their order may reveal silo or label."""
    lines = []
    for i, column in enumerate(table.columns):
        numbers = values[:, i]
        is_whole = bool((numbers == numbers.round()).all())  # false if one is missing
        if column.kind == "numeric" and is_whole and len(numbers) > 20 and len(set(numbers.tolist())) == len(numbers):
            lines.append(f"column '{column.name}' has another whole number in every row; set ignore={column.name}")
        elif column.kind == "numeric" and is_whole and _names_identifier(column.name):
            lines.append(
                f"column '{column.name}' has whole numbers and the name of an identifier; set group={column.name} if "
                f"it names patients, whose rows then stay together, or ignore={column.name}"
            )
    return lines


def _names_identifier(name: str) -> bool:
    """Return whether a column is called id, such as patient_id, patientId and ID."""
    return re.search(r"(^|[_\W])id$|[a-z]I[dD]$", name if not name.isupper() else name.lower()) is not None


def _note_positive_class(classes: tuple[str, ...], config: TableConfig) -> tuple[str, ...]:
    """Name the positive class of two texts: it is the last in the order of names, perhaps not the one that is meant."""
    if len(classes) != 2 or config.positive:
        return ()
    first, last = map(parse_number, classes)
    if first is not None and last is not None and first < last:  # the sign is no part of the order: 1 stands before -1
        return ()
    other, positive = map(sanitize_line, classes)
    return (f"'{positive}' counts as the positive class of '{config.label}'; set positive={other} for the other one",)


def read_user_table(path: Path, context: ReadContext) -> Images:
    """Read the user's CSV file."""
    return read_training_table("table", path, context)


TABLE = Source(reader=read_user_table, is_table=True, path_kind="CSV file")
