"""The hashes of final tensors: what they depend on, and what a comparison reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from studies import final_tensors
from uefl.data import PARTITIONERS

COMMITTED = Path(__file__).parents[2] / "results" / "final-tensors.json"


def test_a_hash_depends_on_type_shape_and_values_but_not_on_order():
    a, b = torch.arange(6.0), torch.ones(2, 3)
    assert final_tensors.hash_tensors([a, b]) == final_tensors.hash_tensors([b, a])
    others = ([a, b.double()], [a.reshape(2, 3), b], [a + 1, b], [a])
    assert len({final_tensors.hash_tensors(tensors) for tensors in ([a, b], *others)}) == 5


@pytest.mark.records
def test_the_committed_file_has_every_label():
    labels = [f"silos of {name}" for name in PARTITIONERS if name != "natural"]
    assert set(json.loads(COMMITTED.read_text())) == {*labels, *final_tensors.list_runs()}


def test_check_names_each_label_that_differs(tmp_path, monkeypatch):
    app = typer.Typer()
    app.command()(final_tensors.main)
    monkeypatch.setattr(final_tensors, "hash_all", lambda: iter({"a": "1", "b": "2", "c": "3"}.items()))
    same, other = tmp_path / "same.json", tmp_path / "other.json"
    assert CliRunner().invoke(app, ["--out", str(same)]).exit_code == 0
    assert CliRunner().invoke(app, ["--check", str(same)]).exit_code == 0
    other.write_text(json.dumps({"a": "1", "b": "9", "d": "4"}))
    result = CliRunner().invoke(app, ["--check", str(other)])
    assert result.exit_code == 1
    assert [line for line in result.output.splitlines() if line.startswith("differs")] == [
        "differs: b",
        "differs: d",
        "differs: c",
    ]
