"""Runs: killed and resumed to the same bits, found again, never overwritten, one process at a time."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tiny import TINY

from uefl import records
from uefl.commands.words import spoken
from uefl.errors import InputError
from uefl.loading import load_model
from uefl.run import CHECKPOINT, FIGURE, HEADER, MODEL, RECORDS, SUMMARY, only_process, run

COMMAND = [sys.executable, "-m", "uefl.cli", "run", "uefl", *TINY]


def started(out: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*COMMAND, "--out", str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def finished(out: Path) -> Path:
    process = started(out)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors.decode()
    (folder,) = out.glob("uefl-*")
    return folder


def killed(out: Path, moment: str) -> None:
    """Start the run and kill -9 it once a file has grown: while it writes, or a little later."""
    process = started(out)
    before = {f: f.stat().st_mtime_ns for f in out.glob(f"*/{moment}")}
    while process.poll() is None:
        if any(before.get(f) != f.stat().st_mtime_ns for f in out.glob(f"*/{moment}")):
            break
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()


def without_times(lines: list[records.Record]) -> list[records.Record]:
    for record in lines:
        for level in (record, *record["silos"].values()):
            for name in ("seconds", "kmeans_seconds"):
                level.pop(name, None)
    return lines


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished(tmp_path_factory.mktemp("whole"))


def test_a_run_killed_several_times_ends_with_the_same_bits(whole: Path, tmp_path: Path) -> None:
    for moment in (HEADER, RECORDS, CHECKPOINT, CHECKPOINT):
        killed(tmp_path, moment)
    folder = finished(tmp_path)
    assert folder.name == whole.name
    assert (folder / MODEL).read_bytes() == (whole / MODEL).read_bytes()
    ours, theirs = (without_times(records.read(f / RECORDS)) for f in (folder, whole))
    assert ours == theirs


def test_a_run_folder_holds_everything_that_is_promised(whole: Path) -> None:
    assert {f.name for f in whole.iterdir()} == {HEADER, RECORDS, MODEL, SUMMARY, FIGURE, ".lock"}
    lines = records.read(whole / RECORDS)
    assert [r["round"] for r in lines] == [1, 2, 3, 4, 5]
    promised = {
        "accuracy",
        "entropy",
        "perplexity",
        "code_loss",
        "local_accuracy",
        "local_entropy",
        "words",
        "uncertain",
    }
    for record in lines:
        assert all(promised <= set(mine) for mine in record["silos"].values())
        assert record["bytes_up"] > 0
        assert record["bytes_down"] > 0
    summary = json.loads((whole / SUMMARY).read_text())
    assert {"mA", "mE", "mP", "domains", "silos"} <= set(summary["mean of last 5"])
    assert summary["extensions"][0]["new_words"], "the tiny run must extend, or the tests above prove less"


def test_a_finished_run_is_found_and_nothing_in_it_changes(whole: Path) -> None:
    before = {f.name: f.stat().st_mtime_ns for f in whole.iterdir()}
    events: list[str] = []
    (experiment,) = spoken(TINY, ["uefl"], "default").values()
    assert run(experiment, whole.parent, listen=lambda e: events.append(e["kind"])) == whole
    assert events == ["load", "found"]
    assert {f.name: f.stat().st_mtime_ns for f in whole.iterdir()} == before


def test_two_processes_never_work_in_one_folder(tmp_path: Path) -> None:
    with only_process(tmp_path), pytest.raises(InputError, match="another process"), only_process(tmp_path):
        pass


def test_a_run_goes_on_only_under_what_it_began_with(tmp_path: Path) -> None:
    killed(tmp_path, CHECKPOINT)
    (header,) = tmp_path.glob(f"*/{HEADER}")
    changed = {**json.loads(header.read_text()), "torch": "1.0"}
    header.write_text(json.dumps(changed))
    (experiment,) = spoken(TINY, ["uefl"], "default").values()
    with pytest.raises(InputError, match=r"begun with torch 1\.0"):
        run(experiment, tmp_path)


def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / RECORDS
    records.append(path, [{"round": 1}, {"round": 2}])
    path.write_text(path.read_text()[:-4])
    assert records.read(path) == [{"round": 1}]


def test_the_saved_model_predicts_what_the_run_measured(whole: Path) -> None:
    (experiment,) = spoken(TINY, ["uefl"], "default").values()
    silos, _ = experiment.data.load(0)
    last = json.loads((whole / SUMMARY).read_text())["last"]["silos"]
    for silo in silos:
        net = load_model(whole / MODEL, silo.name)
        with torch.no_grad():
            guess = net(silo.test.x).logits[0].argmax(-1)
        assert (guess == silo.test.y).double().mean().item() == pytest.approx(last[silo.name]["accuracy"])
    with pytest.raises(InputError, match="unknown silo 'nobody'; known: D1-1"):
        load_model(whole / MODEL, "nobody")


@pytest.mark.real
def test_kills_at_any_moment(whole: Path, tmp_path: Path) -> None:
    """Twenty kills spread over the life of a run, from the first import to the last file."""
    for i in range(20):
        process = started(tmp_path)
        time.sleep(1.5 + 0.37 * i)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    assert (finished(tmp_path) / MODEL).read_bytes() == (whole / MODEL).read_bytes()
