"""Predict image files or the rows of tables, and write one row for each, as CSV or as JSON lines."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
from torch import Tensor

from uefl.core.errors import InputError, unknown_value_error
from uefl.core.federation import iterate_batch_slices
from uefl.data.input_format import InputFormat
from uefl.data.readers.context import ReadContext
from uefl.data.readers.table import parse_table
from uefl.data.readers.unlabeled_files import UnlabeledFile
from uefl.data.table_format import TableFormat
from uefl.experiment.files import make_temporary_path, replace_file
from uefl.experiment.trained_model import Predictions, TrainedModel

FORMATS = ("csv", "jsonl")
OTHER_FORMATS = (".xlsx", ".xls", ".ods", ".parquet")  # a CSV file of such a name cannot be opened by its program
COLUMNS = ("file", "label", "probability", "predictive_entropy", "mutual_information")
SET_SEPARATOR = "|"  # of classes in CSV, since their names may contain spaces
NUM_PROBES = 256  # inputs by which a silo is chosen
Row = dict[str, Any]


class TableInputs(NamedTuple):
    """Rows of tables as a model takes them, with file and line of each."""

    names: list[str]
    x: Tensor
    silo_values: list[str]  # what each row has in the column that names silos, or empty texts

    @property
    def probes(self) -> Tensor:
        """Some rows, evenly spaced, by which a silo is chosen."""
        return self.x[:: -(-len(self.x) // NUM_PROBES)]


def predict_files(
    model: TrainedModel,
    files: Sequence[UnlabeledFile],
    context: ReadContext,
    *,
    mc_samples: int | None = None,
    seed: int | None = None,
) -> Iterator[Row]:
    """Yield one row per file; `context` collects a line for each file that cannot be used."""
    names: list[str] = []
    pixels: list[Tensor] = []
    index = 0
    for i, file in enumerate(context.track_progress(files, "predicting", len(files)), 1):
        decoded = decode_file(file, model.input_format, context)
        if decoded is not None:
            names.append(file.name)
            pixels.append(decoded)
        if names and (len(names) == model.batch_size or i == len(files)):
            inputs = model.input_format.convert(torch.stack(pixels))
            yield from make_rows(names, model.predict_batch(inputs, index, mc_samples, seed))
            names, pixels, index = [], [], index + 1


def predict_table_rows(
    model: TrainedModel, rows: TableInputs, context: ReadContext, *, mc_samples: int | None, seed: int | None
) -> Iterator[Row]:
    """Yield one row per row of a table."""
    slices = list(iterate_batch_slices(len(rows.x), model.batch_size))
    for i, s in enumerate(context.track_progress(slices, "predicting", len(slices))):
        yield from make_rows(rows.names[s], model.predict_batch(rows.x[s], i, mc_samples, seed))


def read_table_inputs(
    files: Sequence[UnlabeledFile], input_format: InputFormat, context: ReadContext, silo_column: str = ""
) -> TableInputs:
    """Read CSV files in the format of the training rows; `context` collects a line for each bad row and bad file."""
    table, names, silo_values, pieces, errors = TableFormat.from_json(input_format.table), [], [], [], []
    for file in context.track_progress(files, "reading", len(files)):
        try:
            rows = parse_table(file.name, file.read(), table, silo_column)
        except InputError as e:
            errors.append(str(e))
            continue
        names += [f"{file.name}:{line}" for line in rows.lines]
        silo_values += rows.silo_values
        pieces.append(rows.x)
        context.skipped_messages += rows.skipped
    if not pieces:
        several = f"none of the {len(errors)} tables is usable; the first: " if len(errors) > 1 else ""
        raise InputError(f"{several}{errors[0]}")
    context.skipped_messages += errors
    return TableInputs(names, input_format.convert(torch.cat(pieces)), silo_values)


def decode_file(file: UnlabeledFile, input_format: InputFormat, context: ReadContext) -> Tensor | None:
    """Return the pixels of a file, or None if it is skipped with a line that names it."""
    try:
        data = file.read()  # its error names the file
    except InputError as e:
        context.skip_or_raise(str(e))
        return None
    try:
        return input_format.decode_file(data)
    except InputError as e:
        context.skip_or_raise(f"{file.name}: {e}")
        return None


def decode_probes(files: Sequence[UnlabeledFile], input_format: InputFormat) -> Tensor:
    """Return some of the files, evenly spaced, as inputs of a model; files that cannot be used are left out."""
    context = ReadContext(skip_bad=True)
    step = -(-len(files) // NUM_PROBES)
    decoded = [decode_file(file, input_format, context) for file in files[::step]]
    pixels = [p for p in decoded if p is not None]
    if not pixels:
        raise InputError(f"none of the {len(decoded)} images is usable; the first: {context.skipped_messages[0]}")
    return input_format.convert(torch.stack(pixels))


def make_rows(names: Sequence[str], predictions: Predictions) -> Iterator[Row]:
    """Yield the rows of one batch."""
    entropy, information = predictions.uncertainty
    values = zip(names, predictions.names, predictions.confidence, entropy, information, strict=True)
    for i, (name, label, *numbers) in enumerate(values):
        row = dict(zip(COLUMNS, (name, label, *(float(f"{number:.6g}") for number in numbers)), strict=True))
        if predictions.sets is not None and predictions.abstain is not None:
            row["prediction_set"] = [predictions.classes[c] for c in predictions.sets[i]]
            row["abstain"] = bool(predictions.abstain[i])
        yield row


def choose_format(name: str, out: Path | None) -> str:
    """Return the format by its name or, without one, by the suffix of the file; CSV by default."""
    if name and name not in FORMATS:
        raise unknown_value_error("format", name, FORMATS)
    if out is not None and out.suffix.lower() in OTHER_FORMATS:
        raise InputError(f"out={out}: {out.suffix} cannot be written; choose a name that ends in .csv or .jsonl")
    return name or ("jsonl" if out is not None and out.suffix.lower() in (".jsonl", ".ndjson", ".json") else "csv")


def write_rows(rows: Iterator[Row], file: TextIO, format_name: str) -> int:
    """Write rows as they come, and return their number."""
    writer, count = None, 0
    for row in rows:
        if format_name == "jsonl":
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        else:
            if writer is None:
                writer = csv.DictWriter(file, list(row), lineterminator="\n")
                writer.writeheader()
            lists = {name: SET_SEPARATOR.join(v) if isinstance(v, list) else v for name, v in row.items()}
            writer.writerow(lists)
        count += 1
    return count


@contextmanager
def open_output(path: Path) -> Iterator[TextIO]:
    """Open a new file that appears when it is complete; an existing one is never overwritten."""
    if path.exists():
        raise InputError(f"{path} exists; choose another file with --out")
    temporary = make_temporary_path(path)
    try:
        with temporary.open("w", encoding="utf-8", newline="") as file:
            yield file
        replace_file(temporary, path)
    except OSError as e:
        raise InputError(f"cannot write {path}: {(e.strerror or str(e)).lower()}") from None
    finally:
        temporary.unlink(missing_ok=True)
