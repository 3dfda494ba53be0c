"""Leave every site out in turn: one run per site, one table."""

from pathlib import Path

import pytest
from harness import call_cli, call_with_mistake, list_photo_names, write_photos

SITES = ("site-a", "site-b", "site-c")
TINY = ["depth=1", "width=4", "hidden_size=16", "rounds=2", "iterations=1", "epochs=1", "batch_size=4", "mc_samples=2"]


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
    start = lines.index("| held out; mean of last 2 rounds | fedavg mA | fedavg mE |")
    rows = [line.strip("| ").split(" | ") for line in lines[start + 2 : start + 6]]
    assert [row[0] for row in rows] == [*SITES, "mean"]
    assert float(rows[3][1]) == pytest.approx(sum(float(row[1]) for row in rows[:3]) / 3, abs=1e-3)
    (folder,) = (tmp_path / "runs").glob("compare-*")
    assert lines[start] in call_cli("show", str(folder)).stdout
    one = call_cli("run", "fedavg", *arguments, "target=site-b")
    assert "already finished" in one.stdout, "a run with this target is the same run"
    # Columns are wider where a table of two classes has more of them, and long names are folded.
    cells = [line.split("│")[2].strip() for line in one.stdout.splitlines() if line.startswith("│ site-b")]
    assert rows[1][1] in cells


def test_a_site_that_does_not_exist_is_named_with_those_that_do(arguments: list[str]) -> None:
    message = call_with_mistake("run", "fedavg", *arguments, "target=site-x")
    assert message == "unknown target 'site-x'; known: site-a, site-b, site-c, all (`uefl run` and `compare`)"
    message = call_with_mistake("compare", "fedavg", *arguments, "target=all", "--seeds", "0,1")
    assert message == "use either target=all or --seeds 0,1, not both"
