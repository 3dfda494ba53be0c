"""The migration of earlier records: names and rounds change, results do not, and a second run changes nothing.

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
    ROUNDS,
    RUN_KEYS,
    SETTING_NAMES,
    include_group_rounds,
    list_record_files,
    migrate_files,
    migrate_groups,
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


@pytest.mark.records
@pytest.mark.parametrize("path", list_record_files(ROOT), ids=lambda path: path.name)
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


# Of early 0.2, with 8, 4, 3, 6 and 5 rounds in groups after all others: rounds, extra_rounds, iterations, group_rounds.
GROUP_ROUNDS = {
    (14, 8, 2, 8): (14, 8, 3, 8),
    (5, 3, 2, 4): (5, 7, 2, 4),
    (6, 3, 2, 3): (6, 3, 3, 3),
    (3, 3, 2, 6): (3, 3, 4, 6),
    (10, 5, 2, 5): (10, 5, 3, 5),
    (14, 8, 3, 0): (14, 8, 3, 0),
}


@pytest.mark.parametrize(("old", "new"), GROUP_ROUNDS.items())
def test_rounds_in_groups_become_the_last_ones_and_decisions_stay(old, new):
    rounds, extra_rounds, iterations, group_rounds = old
    migrated = include_group_rounds(dict(zip(ROUNDS, old)))
    assert tuple(migrated.values()) == new
    assert include_group_rounds(migrated) == migrated
    method = METHODS["uefl"](**migrated)
    assert method.shared_rounds == rounds + (iterations - 1) * extra_rounds
    assert method.total_rounds == method.shared_rounds + group_rounds
    ends = {r.rounds + i * r.extra_rounds for r in [method] for i in range(method.iterations)}
    assert {end for end in ends if end < method.shared_rounds} == {
        rounds + i * extra_rounds for i in range(iterations - 1)
    }


def test_a_record_and_its_arguments_name_all_rounds():
    settings = {"method.group_rounds": 8, "method.iterations": 2, "seed": 1}
    record = migrate_groups({"settings": settings, "total_rounds": 22})
    assert record == {"settings": {"method.group_rounds": 8, "seed": 1}, "total_rounds": 30}
    assert migrate_groups(record) == record
    plain = {"settings": {"method.group_rounds": 0, "method.iterations": 2}, "total_rounds": 22}
    assert migrate_groups(plain) == plain
    old = "uefl mnist5k iterations=2 rounds=5 extra_rounds=3 group_rounds=4 seed=80"
    new = old.replace("extra_rounds=3", "extra_rounds=7")
    assert [migrate_groups({"arguments": text})["arguments"] for text in (old, new)] == [new, new]
    (earlier,) = migrate_groups({"arguments": "uefl heart fine_tuning_epochs=5 seed=80 fold=1/5"}).values()
    assert earlier == "uefl heart fine_tuning_epochs=5 group_rounds=0 seed=80 fold=1/5"
    assert migrate_groups({"arguments": earlier}) == {"arguments": earlier}
    assert migrate_groups({"arguments": "fedavg heart seed=80"}) == {"arguments": "fedavg heart seed=80"}


def test_a_record_that_names_no_rounds_has_the_defaults():
    assert {path[-1]: value for path, value in iterate_settings(METHODS["uefl"]()) if path[-1] in ROUNDS} == ROUNDS
