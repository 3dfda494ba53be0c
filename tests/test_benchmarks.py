"""Every benchmark runs at a tiny size, and its figures become records and a table. Speed is asserted nowhere."""

import importlib
import json

import pytest

pytest.importorskip("benchmarks", reason="benchmarks/ is no part of the package")
from benchmarks.__main__ import BENCHMARKS
from benchmarks.frame import Figure, Options, record, table

ALONE = sorted(set(BENCHMARKS) - {"federation", "clients"})  # these two start processes


@pytest.mark.parametrize("name", ALONE)
def test_it_runs(name):
    figures = list(importlib.import_module(BENCHMARKS[name]).run(Options(repeats=1, tiny=True)))
    assert figures
    assert all(value >= 0 for f in figures for value in f.values)


def test_a_record_has_all_values_and_says_where_they_come_from(tmp_path):
    path = tmp_path / "records.jsonl"
    record("speed", [Figure("uefl", "a round", "CPU s", [3.0, 1.0, 2.0])], Options(), path)
    (line,) = map(json.loads, path.read_text().splitlines())
    assert (line["value"], line["repeats"], line["who"]) == (2.0, [3.0, 1.0, 2.0], "uefl")
    assert {"threads", "device", "torch", "load", "date", "command"} <= set(line)


def test_the_table_sets_others_against_us():
    shown = table("speed", [Figure("uefl", "a round", "s", [2.0]), Figure("peer", "a round", "s", [5.0])])
    assert list(shown.columns[5].cells) == ["", "2.5x"]
