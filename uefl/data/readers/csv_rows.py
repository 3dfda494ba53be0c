"""Read the rows of a CSV file as text: separators, stray lines and other habits of spreadsheets."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from uefl.core.errors import InputError
from uefl.data.readers.context import ReadContext

SEPARATORS = (",", ";", "\t")
NUM_HEADER_LINES = 20  # lines in which the names of the columns are searched
WORKBOOK_START = b"PK\x03\x04"  # an .xlsx file is a zip archive
NUM_LISTED = 12  # names of columns in an error


class CsvRow(NamedTuple):
    """A row and the line of the file in which it ends."""

    line: int
    cells: dict[str, str]  # by column


class CsvTable(NamedTuple):
    """Columns and rows of a CSV file."""

    path: Path | str  # for messages
    columns: tuple[str, ...]
    rows: list[CsvRow]


def read_csv(path: Path, required: Sequence[str], context: ReadContext) -> CsvTable:
    """Read a CSV file, or the only one in a folder; its header is the first line that names the required columns."""
    path = find_csv_file(path)
    try:
        data = path.read_bytes()
    except OSError as e:
        raise InputError(f"{path}: {e.strerror}") from e
    return parse_csv(path, data, required, context)


def parse_csv(path: Path | str, data: bytes, required: Sequence[str], context: ReadContext) -> CsvTable:
    """Parse the bytes of a CSV file, which may be a member of an archive; its path is for messages."""
    text = _decode_text(path, data)
    if not text.strip():
        raise InputError(f"{path}: the file is empty; it needs the columns {', '.join(required)}")
    position, separator = _find_header(path, text, required)
    all_rows = _parse_rows(path, text, separator)
    header_line, header = all_rows[position]
    if position:
        before = (
            "1 line stands before it; remove it" if position == 1 else f"{position} lines stand before it; remove them"
        )
        context.skip_or_raise(f"{path}: line {header_line} names the columns, but {before}")
    names = tuple(name.strip() for name in header)
    _reject_repeated_names(path, names)
    if num_unnamed := names.count(""):
        noun = "column" if num_unnamed == 1 else "columns"
        context.note_counts[f"{noun} without a name ignored"] += num_unnamed
    columns = tuple(name for name in names if name)
    rows = []
    for line, cells in all_rows[position + 1 :]:
        if error := _find_row_error(cells, names):
            context.skip_or_raise(f"{path}: line {line}: {error}")
        else:
            rows.append(CsvRow(line, {name: cell for name, cell in zip(names, cells) if name}))
    if not rows:
        raise InputError(f"{path}: no rows below the names of the columns")
    return CsvTable(path, columns, rows)


def find_csv_file(path: Path) -> Path:
    """Return a file, or the only CSV file in a folder."""
    if not path.is_dir():
        return path
    files = sorted(file for file in path.iterdir() if file.suffix.lower() == ".csv")
    if len(files) != 1:
        raise InputError(f"{path}: the folder of a table must contain one CSV file, but it contains {len(files)}")
    return files[0]


def _decode_text(path: Path | str, data: bytes) -> str:
    if data.startswith(WORKBOOK_START):
        raise InputError(f"{path}: an Excel workbook or zip archive; save the sheet as CSV in UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise InputError(f"{path}: not a CSV file in UTF-8 ({e.reason} at byte {e.start})") from e


def _find_header(path: Path | str, text: str, required: Sequence[str]) -> tuple[int, str]:
    """Return the position of the header among the non-empty rows, and the separator with which it names all columns."""
    heads = {separator: _parse_rows(path, text, separator, NUM_HEADER_LINES) for separator in SEPARATORS}
    for position in range(NUM_HEADER_LINES):
        for separator, rows in heads.items():
            if position < len(rows) and {cell.strip() for cell in rows[position][1]} >= set(required):
                return position, separator
    _, first = max((rows[0] for rows in heads.values() if rows), key=lambda row: len(row[1]))
    names = [cell.strip() for cell in first]
    missing = next(name for name in required if name not in names)
    more = f" and {len(names) - NUM_LISTED} more" if len(names) > NUM_LISTED else ""
    raise InputError(f"{path}: no column '{missing}'; the columns are {', '.join(names[:NUM_LISTED])}{more}")


def _parse_rows(path: Path | str, text: str, separator: str, limit: int | None = None) -> list[tuple[int, list[str]]]:
    """Return line numbers and cells of rows that are not empty."""
    reader, rows = csv.reader(io.StringIO(text, newline=""), delimiter=separator), []
    try:
        for cells in reader:
            if any(cell.strip() for cell in cells):
                rows.append((reader.line_num, cells))
            if limit is not None and len(rows) >= limit:
                break
    except csv.Error as e:
        raise InputError(f"{path}: line {reader.line_num}: not a CSV file ({e})") from e
    return rows


def _reject_repeated_names(path: Path | str, names: Iterable[str]) -> None:
    repeated = [name for name, count in Counter(names).items() if name and count > 1]
    if repeated:
        raise InputError(f"{path}: two columns are named '{repeated[0]}'")


def _find_row_error(cells: Sequence[str], names: Sequence[str]) -> str:
    """Return what is wrong with a row, or an empty string."""
    if len(cells) != len(names):
        return f"{len(cells)} cells, but there are {len(names)} columns"
    if tuple(cell.strip() for cell in cells) == tuple(names):
        return "repeats the names of the columns"
    return ""


def check_one_silo(path: Path, table: CsvTable, silo_column: str) -> None:
    """Refuse the table of one silo whose column names several; a table without this column is accepted."""
    names = sorted({row.cells.get(silo_column, "").strip() for row in table.rows} - {""})
    if len(names) > 1:
        listed = ", ".join(names[:NUM_LISTED]) + (", …" if len(names) > NUM_LISTED else "")
        raise InputError(
            f"{path}: column '{silo_column}' names {len(names)} silos ({listed}); the file of a silo has the rows of "
            "one"
        )
