"""Records of which older ones lie compressed beside the file, as `….jsonl.gz`: `python -m studies.archive FILE.jsonl`.

Trials of the hospitals have a record per fold and setting, tens of megabytes in all. Studies append to the plain file
and read both, the compressed records first.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Annotated

import typer

from uefl.experiment import records
from uefl.experiment.files import write_bytes

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def get_archive(path: Path) -> Path:
    """Return the file of the compressed records that belong to a file of records."""
    return path.with_name(f"{path.name}.gz")


def read_records(path: Path) -> list[records.Record]:
    """Return the compressed records, then those of the file."""
    archive = get_archive(path)
    lines = gzip.decompress(archive.read_bytes()).splitlines() if archive.exists() else []
    return [*map(json.loads, lines), *records.read_records(path)]


@app.command()
def archive_records(path: Annotated[Path, typer.Argument(help="File of records, one JSON object per line.")]) -> None:
    """Move all records of a file into the compressed file beside it."""
    lines = "".join(json.dumps(record, sort_keys=True) + "\n" for record in read_records(path))
    write_bytes(get_archive(path), gzip.compress(lines.encode(), mtime=0))  # the same bytes at any time
    path.write_text("")
    typer.echo(f"{len(lines.splitlines())} records in {get_archive(path)}")


if __name__ == "__main__":
    app()
