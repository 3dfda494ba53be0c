"""Leave every site out in turn: one run per site, one table."""

from pathlib import Path

import pytest
from harness import call_cli, call_with_mistake, list_photo_names, write_photos

from uefl.experiment.run_folder import RunFolder

SITES = ("site-a", "site-b", "site-c")
TINY = ["depth=1", "width=4", "hidden_size=16", "rounds=2", "iterations=1", "epochs=1", "batch_size=4", "mc_samples=2"]


def find_table(lines: list[str], headings: list[str]) -> tuple[int, list[list[str]]]:
    """Return the line of a table's headings and the cells below it."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    start = cells.index(headings)
    end = next(i for i in range(start, len(lines)) if not lines[i].startswith("|"))
    return start, cells[start + 2 : end]


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("UEFL_DATA", str(tmp_path / "cache"))
    path = write_photos(tmp_path / "photos", list_photo_names(SITES))
    return ["folder", f"path={path}", "partitioner=leave-one-domain-out", *TINY, "--out", str(tmp_path / "runs")]


def test_every_site_is_left_out_in_turn_and_stands_in_one_table(arguments: list[str], tmp_path: Path) -> None:
    answer = call_cli("run", "fedavg", *arguments, "target=all")
    assert answer.code == 0, answer.stderr
    assert len(list((tmp_path / "runs").glob("fedavg-folder-*"))) == 3
    lines = answer.stdout.splitlines()
    start, rows = find_table(lines, ["held out", "mA", "mE", "mAUROC", "mAUPRC", "mSens"])
    assert lines[start - 2] == "Test examples of the silo that is held out, mean of last 2 rounds:"
    assert [row[0] for row in rows] == [*SITES, "mean"]
    assert float(rows[3][1]) == pytest.approx(sum(float(row[1]) for row in rows[:3]) / 3, abs=1e-3)
    (folder,) = (tmp_path / "runs").glob("compare-*")
    assert lines[start] in call_cli("show", str(folder)).stdout
    one = call_cli("run", "fedavg", *arguments, "target=site-b")
    assert "already finished" in one.stdout, "a run with this target is the same run"
    # Columns are wider where a table of two classes has more of them, and long names are folded.
    cells = [line.split("│")[2].strip() for line in one.stdout.splitlines() if line.startswith("│ site-b")]
    assert rows[1][1] in cells


def test_all_methods_show_the_last_round_beside_a_fine_tuned_one(arguments: list[str], tmp_path: Path) -> None:
    settings = [*arguments, "feature_norm=layer", "target=all"]
    answer = call_cli("compare", "fedavg", "fine-tuning", *settings)
    assert answer.code == 0, answer.stderr
    assert "Test examples of the silo that is held out, last round:" in answer.stdout
    folders = [RunFolder(path) for path in (tmp_path / "runs").glob("fedavg-folder-*")]
    last = {f.read_header()["experiment"]["data"]["target"]: f.read_summary()["last"] for f in folders}
    _, rows = find_table(answer.stdout.splitlines(), ["held out", "mA", "mE", "mAUROC", "mAUPRC", "mSens"])
    shown = {rows[i - 1][0].strip("*"): row[2] for i, row in enumerate(rows) if row[0] == "fedavg"}
    assert {t: shown[t] for t in SITES} == {target: f"{summary['mE']:.3f}" for target, summary in last.items()}


def test_a_setting_without_effect_is_named_once_per_method(arguments: list[str]) -> None:
    settings = [*(a for a in arguments if a != "depth=1"), "target=all", "encoder=mlp", "batch_norm=not_averaged"]
    answer = call_cli("compare", "fedavg", "fedprox", *settings)
    assert answer.code == 0, answer.stderr
    lines = [line for line in answer.stdout.splitlines() if "batch_norm=not_averaged has no effect" in line]
    assert sorted(line.partition(": warning: ")[0] for line in lines) == ["fedavg", "fedavg, no layer norm", "fedprox"]


def test_a_site_that_does_not_exist_is_named_with_those_that_do(arguments: list[str]) -> None:
    message = call_with_mistake("run", "fedavg", *arguments, "target=site-x")
    assert message == "unknown target 'site-x'; known: site-a, site-b, site-c, all (`uefl run` and `compare`)"
    message = call_with_mistake("compare", "fedavg", *arguments, "target=all", "--seeds", "0,1")
    assert message == "use either target=all or --seeds 0,1, not both"


def test_the_table_of_two_classes_has_clinical_metrics_with_intervals_and_names_results_at_chance(
    tmp_path: Path,
) -> None:
    """Real patients of four hospitals: almost all of Switzerland are ill, so guessing is hard to beat there."""
    tiny = ["width=8", "hidden_size=8", "rounds=1", "iterations=1", "epochs=1", "mc_samples=2", "lr=1e-6"]
    rule = ["partitioner=leave-one-domain-out", "target=all"]
    answer = call_cli("compare", "fedavg", "fedprox", "heart", *rule, *tiny, "--out", str(tmp_path), "--workers", "1")
    assert answer.code == 0, answer.stderr
    lines, labels = answer.stdout.splitlines(), ["mAUROC", "mAUPRC", "mSens"]
    start, rows = find_table(lines, ["held out", "mA", "mE", *labels])
    assert max(map(len, lines[start : start + len(rows) + 2])) <= 80
    names, methods = (
        ["Cleveland", "Hungary", "Switzerland", "VA Long Beach"],
        ["fedavg", "fedprox", "fedavg, no layer norm"],
    )
    assert [row[0] for row in rows] == [text for name in [*names, "mean"] for text in (f"**{name}**", *methods)]
    _, intervals = find_table(lines, ["95 % intervals", *labels])
    for path in tmp_path.glob("fedprox-heart-*"):
        target = RunFolder(path).read_header()["experiment"]["data"]["target"]
        pooled, position = RunFolder(path).read_summary()["last"]["all_silos"], 4 * names.index(target) + 2
        for i, name in enumerate(("auroc", "auprc", "sensitivity")):
            assert rows[position][3 + i] == f"{pooled[name]:.3f}"
            assert intervals[position][1 + i] == f"{pooled[f'{name}_low']:.2f}–{pooled[f'{name}_high']:.2f}"
    assert "AUROC, AUPRC and sensitivity are about class 'positive'; the other class is 'negative'" in lines
    (line,) = [line for line in lines if line.startswith("fedprox, without Switzerland: mean accuracy 0.")]
    assert "not above chance level (0." in line
