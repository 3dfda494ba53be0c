"""A comparison over seeds runs all methods, prints one table and one verdict, and saves picture and records."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from harness import TINY_SETTINGS, TINY_SETTINGS_NO_CODEBOOK, call_cli
from rich.console import Console

from uefl.core.metrics import RISK_COVERAGES
from uefl.experiment.repeats import Comparison, compare_repeats, merge_repeats
from uefl.experiment.repeats_table import compute_pooled_ece, format_repeats_table, make_repeats_table
from uefl.experiment.run_folder import RunFolder

TINY = Comparison(
    title="Tiny digits",
    arguments={"fedavg": " ".join(["fedavg", *TINY_SETTINGS_NO_CODEBOOK]), "uefl": " ".join(["uefl", *TINY_SETTINGS])},
    repeats=["seed=3", "seed=4"],
    unit="seeds",
)


def make_record(name: str, seed: int, nll: float) -> dict[str, object]:
    silos = {silo: {"nll": nll + i, "accuracy": 0.5} for i, silo in enumerate(("ada", "[bob]"))}
    quality = {"nll_scaled": nll, "entropy": 0.2 + 0.1 * seed, "brier": 0.25, "augrc": 0.01 * (seed + 1)}
    # 500 predictions with a confidence of .75, of which 350, 375 and 400 are correct, and 10 with one of .2, all wrong.
    reliability = [[500.0, 10.0], [375.0, 2.0], [350.0 + 25 * seed, 0.0]]
    means = {"nll": nll + 0.5, "accuracy": 0.5, **quality}
    return {"name": name, "repeat": f"seed={seed}", **means, "silos": silos, "reliability": reliability}


RECORDS = [make_record(n, seed, nll + 0.1 * seed) for n, nll in (("fedavg", 0.2), ("uefl", 0.1)) for seed in range(3)]


def show(comparison: Comparison, out: Path) -> str:
    console = Console(width=80, highlight=False, force_terminal=False)
    with console.capture() as output:
        compare_repeats(comparison, out, 1, console)
    return output.get()


def test_a_comparison_ends_with_one_table_one_verdict_and_a_picture(tmp_path: Path) -> None:
    text = show(TINY, tmp_path)
    lines = text.splitlines()
    assert text.count("finished, ") == 4
    assert "fedavg, seed=4: finished, 4 of 4 runs after " in text
    assert text.count("┏") == 1
    assert all(f"│ {silo} " in text for silo in ("D1-1", "D3-3", "mean over silos", "accuracy"))
    verdicts = [line for line in lines if line.endswith("95 % intervals over 2 seeds.")]
    assert len(verdicts) == 1
    assert sum(line.startswith("uefl found ") for line in lines) == 1
    (folder,) = tmp_path.glob("compare-*")
    assert lines[-2:] == [f"picture: {folder / 'silos.png'}", f"records: {folder / 'repeats.jsonl'}"]
    assert (folder / "silos.png").read_bytes().startswith(b"\x89PNG")
    saved = (folder / "verdict.md").read_text()
    assert verdicts[0] in saved
    assert f"uefl run {TINY.arguments['uefl']} seed=3\n" in saved
    records = [json.loads(line) for line in (folder / "repeats.jsonl").read_text().splitlines()]
    for record in records:
        last = RunFolder(tmp_path / record["run"]).read_summary()["last"]
        assert (record["nll"], record["accuracy"]) == (last["mNLL"], last["mA"])
        assert (record["entropy"], record["brier"], record["augrc"]) == (last["mE"], last["mBrier"], last["mAUGRC"])
        assert record["all_silos"] == last["all_silos"]
        assert record["processor"] == RunFolder(tmp_path / record["run"]).read_header()["processor"]
        scaled = [silo["nll_scaled"] for silo in last["silos"].values()]
        assert record["nll_scaled"] == pytest.approx(sum(scaled) / len(scaled))
    assert call_cli("show", str(folder)).stdout.strip() == saved.strip()
    # Repeating the command finds the runs and says the same.
    again = show(TINY, tmp_path).splitlines()
    assert again[-2:] == lines[-2:]
    assert verdicts[0] in again


def test_the_table_has_every_silo_and_the_paired_difference() -> None:
    console = Console(width=80, highlight=False, force_terminal=False)
    with console.capture() as output:
        console.print(make_repeats_table(RECORDS, "uefl"))
    rows = [" ".join(line.split()) for line in output.get().splitlines()]
    assert "│ ada │ 0.300 │ 0.200 │" in rows
    assert "│ [bob] │ 1.300 │ 1.200 │" in rows
    assert "│ mean over silos │ 0.800 │ 0.700 │" in rows
    assert "│ accuracy │ 50.0% │ 50.0% │" in rows
    assert "│ NLL, scaled │ 0.300 │ 0.200 │" in rows
    assert "│ entropy │ 0.300 │ 0.300 │" in rows
    assert "│ Brier │ 0.250 │ 0.250 │" in rows
    assert "│ AUGRC │ 0.0200 │ 0.0200 │" in rows
    assert "│ ECE, all test examples │ 0.037 │ 0.037 │" in rows  # (|−25| + 2 + 0 + 2 + 25 + 2) / 510 / 3
    assert "│ NLL, uefl minus this │ −0.100 │ – │" in rows


def test_the_markdown_table_has_means_deviations_and_differences() -> None:
    quality = "0.300 | 0.250 | 0.037 | 0.0200"
    assert format_repeats_table(RECORDS, "uefl").splitlines() == [
        "| method | NLL | accuracy | NLL, scaled | entropy | Brier | ECE, all test examples | AUGRC "
        "| NLL, uefl minus this (95 % interval) |",
        "|---|---|---|---|---|---|---|---|---|",
        f"| fedavg | 0.800 ± 0.100 | 0.500 ± 0.000 | 0.300 | {quality} | −0.100 (−0.100 to −0.100) |",
        f"| uefl | 0.700 ± 0.100 | 0.500 ± 0.000 | 0.200 | {quality} | – |",
    ]


def make_folds(seed: int, correct: Sequence[float]) -> list[dict[str, object]]:
    folds = []
    for i, count in enumerate(correct, 1):
        own = {"repeat": f"seed={seed} fold={i}/{len(correct)}", "reliability": [[255.0], [200.0], [count]]}
        folds.append(make_record("uefl", seed, 0.1) | own)
    return folds


def test_the_calibration_error_is_that_of_all_folds_of_a_seed_and_a_mean_over_seeds() -> None:
    folds = make_folds(0, [190, 220])  # |410 − 400| / 510
    assert compute_pooled_ece(folds) == pytest.approx(10 / 510)
    assert compute_pooled_ece([*folds, *make_folds(1, [180, 190])]) == pytest.approx((10 / 510 + 30 / 510) / 2)


def test_the_calibration_error_of_too_few_examples_is_left_out() -> None:
    assert math.isnan(compute_pooled_ece(make_folds(0, [190])))  # 255 examples; the metric needs 500
    rows = format_repeats_table(make_folds(0, [190]), "uefl").splitlines()
    assert rows[2] == "| uefl | 0.600 | 0.500 | 0.100 | 0.200 | 0.250 | – | 0.0100 | – |"


def test_the_picture_of_repeats_has_means_and_all_test_examples() -> None:
    def make_last(accuracy: float, n: int) -> dict[str, Any]:
        risks = {f"risk_at_{percent}": accuracy / 10 for percent in RISK_COVERAGES}
        silos = {"ada": {"accuracy": accuracy, "x": 1}}
        return {"round": 2, "silos": silos, "all_silos": risks, "reliability": [[n, 0], [n, 0], [1, 0]]}

    merged = merge_repeats([[{"round": 1}, make_last(0.5, 10)], [{"round": 1}, make_last(0.7, 30)]])
    assert merged[1]["all_silos"] == pytest.approx({f"risk_at_{percent}": 0.06 for percent in RISK_COVERAGES})
    assert merged[0] == {"round": 1}
    assert merged[1]["silos"] == {"ada": {"accuracy": pytest.approx(0.6), "x": 1}}
    assert merged[1]["reliability"] == [[40, 0], [40, 0], [2, 0]]


def test_long_runs_start_first_and_every_run_has_the_settings_of_its_row() -> None:
    experiments = TINY.make_experiments()
    assert list(experiments) == [(name, seed) for name in ("uefl", "fedavg") for seed in TINY.repeats]
    assert [e.seed for e in experiments.values()] == [3, 4, 3, 4]
    assert [e.method_name for e in experiments.values()] == ["uefl", "uefl", "fedavg", "fedavg"]
