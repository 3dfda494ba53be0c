"""Figures show what records hold: every silo's accuracy, the last decision with its threshold, and reliability."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness import make_clients, make_method, run_rounds
from matplotlib.figure import Figure
from matplotlib.image import imread

from uefl.core.metrics import RISK_COVERAGES
from uefl.experiment import figures
from uefl.experiment.figures import draw_curves, plot_curves, plot_silos


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Collect the figures that are written."""
    written: list[Figure] = []
    write = figures._write_figure
    monkeypatch.setattr(figures, "_write_figure", lambda f, path: (written.append(f), write(f, path)))
    return written


def run_records(name: str, **fields: Any) -> list[dict[str, Any]]:
    method = make_method(name, **fields)
    return run_rounds(method, make_clients(method))[1]


def test_bars_decision_and_reliability_are_those_of_the_records(drawn: list[Figure], tmp_path: Path) -> None:
    runs = {"fedavg": run_records("fedavg"), "uefl": run_records("uefl", codebook=True)}
    plot_silos(runs, tmp_path / "silos.png")
    assert (tmp_path / "silos.png").read_bytes().startswith(b"\x89PNG")
    bars, decision, reliability, risk = drawn[0].axes
    silos = ("ada", "bob", "cyd", "dan")
    accuracy = [records[-1]["silos"][silo]["accuracy"] for records in runs.values() for silo in silos]
    assert [bar.get_height() for bar in bars.patches] == pytest.approx(accuracy)
    last = [record for record in runs["uefl"] if record.get("has_decision")][-1]
    thresholds = [line.get_ydata()[0] for line in decision.lines if line.get_linestyle() == "--"]
    assert thresholds == [pytest.approx(last["decision"]["threshold"])]
    centers = [line.get_ydata()[0] for line in decision.lines if line.get_marker() in ("o", "D")]
    assert centers == pytest.approx([last["silos"][silo]["validation"]["entropy"] for silo in silos])
    assert [line.get_label() for line in reliability.lines[:2]] == ["fedavg", "uefl"]
    pooled = [records[-1]["all_silos"] for records in runs.values()]
    assert [line.get_ydata().tolist() for line in risk.lines] == [
        [metrics[f"risk_at_{percent}"] for percent in RISK_COVERAGES] for metrics in pooled
    ]
    assert [line.get_xdata().tolist() for line in risk.lines] == [[*RISK_COVERAGES]] * 2
    assert bars.get_xlim() == decision.get_xlim(), "a silo stands at the same place in both"
    uncertain = [line.get_marker() == "D" for line in decision.lines if line.get_marker() in ("o", "D")]
    assert uncertain == [last["silos"][silo]["is_uncertain"] for silo in silos]


def read_error_bars(figure: Figure) -> list[float]:
    """Return half the length of every error bar of the decision."""
    bars = [bar for container in figure.axes[1].containers for bar in container.lines[2]]
    return [(high - low) / 2 for bar in bars for (_, low), (_, high) in bar.get_segments()]


def test_error_bars_are_those_of_the_decisions_own_entropies(drawn: list[Figure], tmp_path: Path) -> None:
    """From the second decision on, e_k is that of the shared codewords alone, which the other metrics are not."""
    method = make_method("uefl", codebook=True, iterations=3)
    method = replace(method, codebook=replace(method.codebook, uncertainty_test="permutation"))
    records = run_rounds(method, make_clients(method))[1]
    last = [record for record in records if record.get("has_decision")][-1]
    decided, validation = last["decision"]["silos"], {n: s["validation"] for n, s in last["silos"].items()}
    assert any(decided[name]["entropy"] != validation[name]["entropy"] for name in decided)
    plot_silos({"uefl": records}, tmp_path / "silos.png")
    assert read_error_bars(drawn[0]) == pytest.approx([decided[name]["standard_error"] for name in sorted(decided)])
    for entry in decided.values():
        del entry["standard_error"]
    plot_silos({"uefl": records}, tmp_path / "silos.png")
    assert read_error_bars(drawn[1]) == [], "the errors of an earlier record are unknown"
    del last["decision"]["silos"]
    plot_silos({"uefl": records}, tmp_path / "silos.png")
    errors = [(v["entropy_variance"] / v["num_examples"]) ** 0.5 for _, v in sorted(validation.items())]
    assert read_error_bars(drawn[2]) == pytest.approx(errors), "a record without e_k shows the entropy it has"


def test_curves_do_not_depend_on_those_that_were_drawn_before(tmp_path: Path) -> None:
    runs = {"fedavg": run_records("fedavg"), "uefl": run_records("uefl", codebook=True)}
    cases = ({"fedavg": runs["fedavg"]}, runs, {"only two rounds": runs["fedavg"][:2]})

    def draw_with_new_axes(case: dict[str, list[dict[str, Any]]]) -> Any:
        figures._make_curve_canvas.cache_clear()
        return draw_curves(case)

    alone = [draw_with_new_axes(case) for case in cases]
    assert not (alone[0] == alone[2]).all()
    figures._make_curve_canvas.cache_clear()
    for i in (1, 0, 2, 1):
        assert (draw_curves(cases[i]) == alone[i]).all()
    plot_curves(cases[0], tmp_path / "curves.png")
    assert (imread(tmp_path / "curves.png") * 255 == alone[0]).all(), "the file has these pixels"


def test_a_figure_of_several_folds_says_so(drawn: list[Figure], tmp_path: Path) -> None:
    plot_silos({"fedavg": run_records("fedavg")}, tmp_path / "silos.png", title="5 folds")
    assert drawn[0].get_suptitle() == "5 folds"


def test_reliability_counts_the_test_examples_of_all_silos() -> None:
    record = run_records("fedavg")[-1]
    counts, confidence, correct = record["reliability"]
    silos = record["silos"].values()
    assert sum(counts) == sum(silo["num_examples"] for silo in silos) == record["all_silos"]["num_examples"]
    assert sum(correct) == pytest.approx(sum(silo["accuracy_sampled"] * silo["num_examples"] for silo in silos))
    assert all(c <= n for n, c in zip(counts, confidence))


def test_without_a_codebook_the_figure_says_that_nothing_was_decided(drawn: list[Figure], tmp_path: Path) -> None:
    plot_silos({"fedavg": run_records("fedavg")}, tmp_path / "silos.png")
    assert [text.get_text() for text in drawn[0].axes[1].texts] == ["no method decided on codewords"]
