"""The migration of records of version 0.1: names change, numbers do not, and a second run changes nothing.

records_0_1.jsonl holds lines as version 0.1 wrote them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from studies.migrate_records import (
    BENCHMARK_KEYS,
    BENCHMARK_NAMES,
    METHOD_SETTING_NAMES,
    ROOT,
    RUN_KEYS,
    SETTING_NAMES,
    list_record_files,
    migrate_files,
    migrate_line,
)
from uefl.algorithms import METHODS
from uefl.experiment.experiment import Experiment
from uefl.experiment.settings import iterate_settings

OLD = [json.loads(line) for line in Path(__file__).with_name("records_0_1.jsonl").read_text().splitlines()]


def list_numbers(value: Any) -> Iterator[str]:
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from list_numbers(item)
    elif isinstance(value, int | float):
        yield repr(value)


def list_keys(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from list_keys(item)
    elif isinstance(value, list):
        for item in value:
            yield from list_keys(item)


@pytest.mark.parametrize("old", OLD, ids=lambda old: old["file"])
def test_numbers_stay_and_names_change(old):
    text = json.dumps(old["line"])
    migrated = migrate_line(Path(old["file"]), text)
    assert migrated != text
    assert Counter(list_numbers(json.loads(migrated))) == Counter(list_numbers(old["line"]))
    assert migrate_line(Path(old["file"]), migrated) == migrated


@pytest.mark.parametrize("old", OLD, ids=lambda old: old["file"])
def test_no_old_key_is_left(old):
    line = json.loads(migrate_line(Path(old["file"]), json.dumps(old["line"])))
    settings = [line.pop(key, {}) for key in ("settings", "experiment")]
    assert not {*list_keys(line)} & ({*BENCHMARK_KEYS} if "benchmark" in line else {*RUN_KEYS})
    old_settings = {f"{group}.{name}" for group, names in SETTING_NAMES.items() for name in names if group}
    for path in list_keys(settings):
        assert ".".join(path.split(".")[-2:]) not in old_settings


SINCE_0_2 = (  # first written by 0.2
    *("calibration.jsonl", "drift.jsonl", "folder-defaults.jsonl", "joining.jsonl", "parity.jsonl"),
    *("rivals-search.jsonl", "rivals-trials.jsonl", "uncertainty-test.jsonl"),
)


@pytest.mark.records
@pytest.mark.parametrize(
    "path", [path for path in list_record_files(ROOT) if path.name not in SINCE_0_2], ids=lambda path: path.name
)
def test_committed_records_are_migrated(path):
    lines = path.read_text().splitlines()
    assert [migrate_line(path, line) for line in lines] == lines
    assert path.stem not in BENCHMARK_NAMES


def test_files_are_rewritten_and_renamed_once(tmp_path):
    (tmp_path / "benchmarks" / "records").mkdir(parents=True)
    (tmp_path / "results").mkdir()
    for old in OLD:
        with (tmp_path / old["file"]).open("a") as file:
            file.write(json.dumps(old["line"]) + "\n")
    assert "benchmarks/records/frameworks.jsonl" in migrate_files(tmp_path)
    names = {path.stem for path in list_record_files(tmp_path)}
    assert {"frameworks", "cost", "kmeans", "methods"} <= names
    assert not names & set(BENCHMARK_NAMES)
    assert migrate_files(tmp_path) == []


def test_every_new_setting_exists():
    known = {path[-1] for name in METHODS for path, _ in iterate_settings(Experiment(method=METHODS[name]()))}
    known |= {path[-1] for path, _ in iterate_settings(METHODS["uefl"]())}
    new = {name for group, names in SETTING_NAMES.items() if group for name in names.values()}
    new |= {name for names in METHOD_SETTING_NAMES.values() for name in names.values()}
    assert new <= known
