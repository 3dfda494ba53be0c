"""The study of joining: the same labeled examples for every way, records that are not computed twice, and its page."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import make_striped_silo

from studies import joining, joining_page, joining_ways
from uefl.experiment.records import read_records

TINY = "rounds=2 iterations=1 local.epochs=1 mc_samples=2 warmup_rounds=1 width=8 hidden_size=8"
ROOT = Path(__file__).parents[2]
SILO = make_striped_silo("ada", 40, 3)


def select_silos(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let these silos alone join."""
    listed = joining.list_tasks
    monkeypatch.setattr(joining, "list_tasks", lambda *a: (task for task in listed(*a) if task.silo in names))


def run_tiny(out: Path, engine: str = "auto", workers: int = 1, ways: str = "") -> list[dict]:
    """Run the study of hospitals at a minimal size, and return all its records."""
    joining.run(
        "hospitals",
        seeds="0",
        dataset="mnist5k",
        device="cpu",
        engine=engine,
        workers=workers,
        settings=TINY,
        ways=ways,
        models=out.parent / "models",
        out=out,
    )
    return read_records(out)


def test_labeled_examples_are_nested_disjoint_and_never_of_the_test_split() -> None:
    small, large = (joining_ways.select_labeled(SILO, count, 0) for count in (20, 50))
    for silo, count in ((small, 20), (large, 50)):
        assert (len(silo.train.y), len(silo.validation.y)) == (count * 4 // 5, count // 5)
        assert torch.equal(silo.test.x, SILO.test.x)
    rows = {split: {tuple(x.flatten().tolist()) for x in getattr(large, split).x} for split in ("train", "validation")}
    assert not rows["train"] & rows["validation"]
    chosen = {tuple(x.flatten().tolist()) for x in torch.cat([small.train.x, small.validation.x])}
    assert chosen <= rows["train"] | rows["validation"]


def test_the_numbers_of_labels_end_with_all_that_there_are() -> None:
    assert joining.list_counts(SILO) == [25, 50, 53]  # 40 training and 13 validation examples


def test_scores_are_accuracy_and_mean_log_loss() -> None:
    scores = joining_ways.compute_scores(np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]]), np.array([0, 1, 1]))
    assert scores["accuracy"] == pytest.approx(2 / 3)
    assert scores["nll"] == pytest.approx(-(np.log(0.9) + np.log(0.8) + np.log(0.4)) / 3)


def test_ways_are_compared_in_pairs_of_silo_and_seed() -> None:
    base = {"setup": "hospitals", "dataset": "heart", "count": 25}
    records = [
        {**base, "silo": silo, "seed": seed, "way": way, "accuracy": accuracy}
        for seed in (0, 1)
        for silo in ("a", "b")
        for way, accuracy in (("join", 0.8 + 0.02 * seed), ("local-only", 0.7))
    ]
    records.append({**base, "silo": "c", "seed": 0, "way": "join", "accuracy": 0.0})  # without a partner
    assert joining_page.compare_ways(records, "join", "local-only", "25") == "25 labels: +11.0 ± 1.0 points"


def test_a_run_writes_every_way_once_and_the_page_has_them(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(joining, "COUNTS", (25,))
    select_silos(monkeypatch, "Cleveland", "Hungary")
    out = tmp_path / "joining.jsonl"
    run_tiny(out)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    ways = [way for way in joining.WAYS if way != "join, own batch norm"]  # the network of a table has none
    assert sorted(record["way"] for record in records if record["silo"] == "Hungary") == sorted(ways)
    assert {record["silo"] for record in records} == {"Cleveland", "Hungary"}
    assert all(0 <= record["accuracy"] <= 1 and record["nll"] > 0 for record in records)
    run_tiny(out)
    assert len(out.read_text().splitlines()) == len(records), "nothing is computed twice"
    joining.page(records_path=out, out=tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert all(f"| {way} |" in text for way in ways)
    assert "for **join**. Ahead of local-only" in text


def test_stacks_and_parallel_processes_measure_what_single_tasks_measure(tmp_path: Path, monkeypatch) -> None:
    """Sums have another order in a stack, so that probabilities differ by rounding, and an accuracy by one example."""
    monkeypatch.setattr(joining, "COUNTS", (60,))
    select_silos(monkeypatch, "Cleveland", "Hungary")
    ways = "join;fine-tuning;local-only;from the start"
    alone, stacked = (
        {joining.make_key(record): record for record in run_tiny(tmp_path / name / "out.jsonl", name, workers, ways)}
        for name, workers in (("serial", 1), ("stacked", 2))
    )
    assert alone.keys() == stacked.keys()
    for key, record in alone.items():
        assert stacked[key]["nll"] == pytest.approx(record["nll"], rel=1e-3), key
        assert abs(stacked[key]["accuracy"] - record["accuracy"]) * record["num_test"] < 1.5, key


def test_commands_that_divide_the_work_are_one_command() -> None:
    base = "python -m studies.joining run hospitals"
    divided = [
        (f"{base} --seeds 31,30 --ways 'join;local-only' --counts 25,50", 30),
        (f"{base} --seeds 31,30 --workers 2", 31),
        (f"{base} --seeds 7 --device cuda", 7),
    ]
    records = [{"command": command, "seed": seed} for command, seed in divided]
    assert joining_page.summarize_commands(records) == [f"`{base} --seeds 30,31`", f"`{base} --device cuda --seeds 7`"]


@pytest.mark.records
def test_the_page_is_made_from_the_records(tmp_path: Path) -> None:
    joining.page(records_path=ROOT / joining.RECORDS, out=tmp_path / "page.md")
    assert (tmp_path / "page.md").read_text() == (ROOT / joining.PAGE).read_text()
