"""Compressed records are read before those of the plain file, and archiving loses none."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from studies.archive import app, get_archive, read_records
from uefl.experiment.records import append_records


def archive(path: Path) -> str:
    result = CliRunner().invoke(app, [str(path)])
    assert result.exit_code == 0, result.output
    return result.output


def test_records_are_the_same_before_and_after_archiving(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    assert read_records(path) == []
    first, second = [{"seed": i, "nll": 0.1 / 3, "silo": "Zürich"} for i in (1, 2)], [{"seed": 3}]
    append_records(path, first)
    assert archive(path).startswith("2 records in ")
    assert path.read_text() == ""
    append_records(path, second)
    assert read_records(path) == [*first, *second]
    assert archive(path).startswith("3 records in ")
    assert read_records(path) == [*first, *second]


def test_archives_of_equal_records_have_equal_bytes(tmp_path: Path) -> None:
    paths = [tmp_path / name / "trials.jsonl" for name in ("one", "other")]
    for path in paths:
        path.parent.mkdir()
        path.write_text(json.dumps({"seed": 1}) + "\n")
        archive(path)
    assert get_archive(paths[0]).read_bytes() == get_archive(paths[1]).read_bytes()
