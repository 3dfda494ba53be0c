"""Runs: killed and resumed to the same bits, found again, never overwritten, one process at a time."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import (
    SHORT_RUN,
    SMALL_CODEBOOK,
    TINY_SETTINGS,
    drop_seconds,
    have_equal_bits,
    make_clients,
    read_change_times,
)

from uefl.algorithms.fedavg import FedAvg
from uefl.algorithms.uefl import UEFL
from uefl.cli.show import show
from uefl.core.errors import InputError
from uefl.engines import ENGINES
from uefl.experiment import records
from uefl.experiment.checkpoint import load_checkpoint, load_tensors, save_checkpoint, save_tensors
from uefl.experiment.experiment import Experiment
from uefl.experiment.loading import load, open_models
from uefl.experiment.parsing import parse_experiments
from uefl.experiment.run import RunContext, run, run_with_clients
from uefl.experiment.run_folder import RunFolder

COMMAND = [sys.executable, "-m", "uefl.cli.main", "run", "uefl", *TINY_SETTINGS]


def tiny_experiment() -> Experiment:
    (experiment,) = parse_experiments(TINY_SETTINGS, ["uefl"], "default").values()
    return experiment


def start_run(out: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*COMMAND, "--out", str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def finish_run(out: Path) -> Path:
    process = start_run(out)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors.decode()
    (folder,) = out.glob("uefl-*")
    return folder


def kill_run(out: Path, file_name: str) -> None:
    """Start the run and kill it with SIGKILL once a file has changed: while it is written, or a little later."""
    process = start_run(out)
    before = read_change_times(out, f"*/{file_name}")
    while process.poll() is None:
        if read_change_times(out, f"*/{file_name}").items() - before.items():
            break
        time.sleep(0.002)
    process.kill()  # no error if the run has just ended
    process.communicate()


def run_striped_silos(root: Path, method: FedAvg | None = None, **fields: str) -> Path:
    """Run FedAvg, or another method, on four small silos in this process; fields are those of the context."""
    experiment = Experiment(method=method or FedAvg(**SHORT_RUN))
    clients = make_clients(experiment.method)
    context = RunContext("fingerprint", dict(clients.domains), ("rows", "columns", "checkers"), (1, 8, 8), **fields)
    return run_with_clients(experiment, root, context, lambda: nullcontext(clients))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return RunFolder(finish_run(tmp_path_factory.mktemp("whole")))


def test_a_run_killed_several_times_ends_with_the_same_bits(whole: RunFolder, tmp_path: Path) -> None:
    checkpoint = RunFolder.CHECKPOINT_FILE
    for file_name in (RunFolder.HEADER_FILE, RunFolder.RECORDS_FILE, checkpoint, checkpoint):
        kill_run(tmp_path, file_name)
    folder = RunFolder(finish_run(tmp_path))
    assert folder.path.name == whole.path.name
    assert folder.model_path.read_bytes() == whole.model_path.read_bytes()
    resumed, expected = ([*map(drop_seconds, records.read_records(f.records_path))] for f in (folder, whole))
    assert resumed == expected


@pytest.mark.parametrize("crash", [1, 2, 4])
def test_a_crash_between_records_and_checkpoint_duplicates_no_record(
    crash: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records of a round are on the disk, its checkpoint is not: the resumed run writes them anew."""
    calls = []

    def crash_once(*args: Any) -> None:
        calls.append(args)
        if len(calls) == crash:
            raise MemoryError
        save_checkpoint(*args)

    monkeypatch.setattr("uefl.experiment.run.save_checkpoint", crash_once)
    with pytest.raises(MemoryError):
        run_striped_silos(tmp_path)
    folder = RunFolder(run_striped_silos(tmp_path))
    run_records = records.read_records(folder.records_path)
    assert [record["round"] for record in run_records] == [1, 2, 3, 4, 5]
    assert len(calls) == 6  # one round was repeated
    assert folder.read_summary()["bytes_up"] == sum(record["bytes_up"] for record in run_records)


def crash_and_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: FedAvg, last_round: int
) -> tuple[RunFolder, RunFolder]:
    """Return the folder of a whole run, and of one that ended after a round and was resumed, of five rounds."""
    whole_run, calls = RunFolder(run_striped_silos(tmp_path / "whole", method)), []

    def crash_once(*args: Any) -> None:
        save_checkpoint(*args)
        calls.append(args)
        if len(calls) == last_round:
            raise MemoryError

    monkeypatch.setattr("uefl.experiment.run.save_checkpoint", crash_once)
    with pytest.raises(MemoryError):
        run_striped_silos(tmp_path / "resumed", method)
    resumed = RunFolder(run_striped_silos(tmp_path / "resumed", method))
    assert len(calls) == 5
    return whole_run, resumed


def test_a_resumed_run_has_the_states_of_its_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every silo has its own batch norm: a run that is resumed without these tensors ends with other weights."""
    method = FedAvg(**SHORT_RUN, batch_norm="local")
    whole_run, resumed = crash_and_resume(tmp_path, monkeypatch, method, 3)
    assert resumed.model_path.read_bytes() == whole_run.model_path.read_bytes()


@pytest.mark.parametrize("last_round", [3, 4])  # before the first group round, and between the two
def test_a_run_resumed_between_group_rounds_ends_with_the_same_bits(
    last_round: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The groups and their models, and the metrics of the shared model, are in the checkpoint."""
    method = UEFL(**SHORT_RUN, codebook=SMALL_CODEBOOK, group_rounds=2)
    whole_run, resumed = crash_and_resume(tmp_path, monkeypatch, method, last_round)
    assert resumed.model_path.read_bytes() == whole_run.model_path.read_bytes()
    assert resumed.server_path.read_bytes() == whole_run.server_path.read_bytes()
    of_resumed, of_whole = ([*map(drop_seconds, folder.read_records())] for folder in (resumed, whole_run))
    assert of_resumed == of_whole
    assert ["groups" in record for record in of_whole] == [False] * 3 + [True] * 2


@pytest.mark.parametrize("target", ["algorithms.fine_tuning.record_query_cost", "experiment.run.write_results"])
def test_a_run_that_stops_while_silos_fine_tune_or_later_ends_with_the_same_bits(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fine-tuning is repeated from the last round, or its models are found in the last checkpoint."""
    method = UEFL(**SHORT_RUN, codebook=SMALL_CODEBOOK, fine_tuning_epochs=2, group_rounds=1)
    whole_run = RunFolder(run_striped_silos(tmp_path / "whole", method))
    with monkeypatch.context() as patch:
        patch.setattr(f"uefl.{target}", raise_memory_error)
        with pytest.raises(MemoryError):
            run_striped_silos(tmp_path / "resumed", method)
    resumed = RunFolder(run_striped_silos(tmp_path / "resumed", method))
    assert resumed.model_path.read_bytes() == whole_run.model_path.read_bytes()
    assert [*map(drop_seconds, resumed.read_records())] == [*map(drop_seconds, whole_run.read_records())]


def raise_memory_error(*_: Any) -> None:
    raise MemoryError


def test_a_run_folder_contains_all_files_and_record_keys(whole: RunFolder) -> None:
    assert {f.name for f in whole.path.iterdir()} == {
        "run.json",
        "records.jsonl",
        "model.safetensors",
        "server.safetensors",
        "summary.json",
        "figure.png",
        ".lock",
    }
    run_records = records.read_records(whole.records_path)
    assert [r["round"] for r in run_records] == [1, 2, 3, 4, 5]
    keys = {
        "accuracy",
        "entropy",
        "perplexity",
        "code_loss",
        "local_accuracy",
        "local_entropy",
        "num_codewords",
        "is_uncertain",
    }
    for record in run_records:
        assert all(keys <= set(silo) for silo in record["silos"].values())
        assert record["bytes_up"] > 0
        assert record["bytes_down"] > 0
    summary = whole.read_summary()
    assert {"mA", "mE", "mP", "domains", "silos"} <= set(summary["mean of last 5"])
    assert summary["extensions"][0]["new_codewords"], "the tiny run must extend, or the tests above prove less"
    assert whole.read_header()["processor"].endswith(f", {torch.backends.cpu.get_cpu_capability()}")


def test_a_finished_run_is_found_and_nothing_in_it_changes(whole: RunFolder) -> None:
    before = {f.name: f.stat().st_mtime_ns for f in whole.path.iterdir()}
    events: list[str] = []
    assert run(tiny_experiment(), whole.path.parent, on_event=lambda e: events.append(e["kind"])) == whole.path
    assert events == ["load", "finished"]
    assert {f.name: f.stat().st_mtime_ns for f in whole.path.iterdir()} == before


def test_two_processes_never_work_in_one_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with folder.lock(), pytest.raises(InputError, match="another process"), folder.lock():
        pass


def test_a_run_is_resumed_only_with_the_versions_and_device_of_its_start(tmp_path: Path) -> None:
    kill_run(tmp_path, RunFolder.CHECKPOINT_FILE)
    (header,) = tmp_path.glob(f"*/{RunFolder.HEADER_FILE}")
    header.write_text(json.dumps({**json.loads(header.read_text()), "torch": "1.0"}))
    with pytest.raises(InputError, match=r"was started with torch 1\.0"):
        run(tiny_experiment(), tmp_path)


@pytest.mark.parametrize("field", ["engine", "device"])
def test_a_run_is_resumed_only_with_the_engine_and_device_of_its_start(
    field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("uefl.experiment.run.save_checkpoint", crash)
    with pytest.raises(MemoryError):
        run_striped_silos(tmp_path)
    with pytest.raises(InputError, match=f"was started with {field} .*, but {field} is now other"):
        run_striped_silos(tmp_path, **{field: "other"})


def downgrade(values: dict[str, Any]) -> dict[str, Any]:
    """Return a header as version 0.1 wrote it."""
    old = {name: value for name, value in values.items() if name != "results_version"}
    return {**old, "results": values["results_version"], "uefl": "0.1.0"}


def test_a_run_folder_of_version_0_1_is_rejected(whole: RunFolder, tmp_path: Path) -> None:
    old = RunFolder(Path(shutil.copytree(whole.path, tmp_path / whole.path.name)))
    old.write_header(downgrade(whole.read_header()))
    tensors, metadata = load_tensors(whole.model_path)
    save_tensors(old.model_path, tensors, downgrade(metadata))
    message = "was written by uefl 0.1, .* run again with another --out, or use uefl 0.1$"
    for attempt in (
        lambda: run(tiny_experiment(), tmp_path),
        lambda: show([old.path]),
        lambda: load(old.model_path),
    ):
        with pytest.raises(InputError, match=message):
            attempt()
    old.summary_path.unlink()  # unfinished: it is not resumed either
    with pytest.raises(InputError, match=message):
        run(tiny_experiment(), tmp_path)
    with pytest.raises(InputError, match=message):
        show([old.path])


def test_names_of_engines_and_files_of_a_run_are_known_without_torch() -> None:
    code = "import sys, uefl.engines, uefl.experiment.run_folder; print({'torch', 'rich', 'flwr'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "set()\n"


def test_an_unknown_engine_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match="unknown engine 'warp'; known: auto, serial, processes, stacked, compiled, flower"
    ):
        run(tiny_experiment(), tmp_path, engine="warp")


def test_flower_without_its_package_is_an_input_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "flwr" or name.startswith("uefl.flower")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "flwr", None)
    monkeypatch.setattr(ENGINES, "_loaded", {})
    with pytest.raises(InputError, match=r"engine=flower needs Flower: install uefl with its extra `flower`"):
        run(tiny_experiment(), tmp_path, engine="flower")
    assert not list(tmp_path.iterdir()), "no folder looks like an unfinished run"


def test_an_incomplete_last_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / RunFolder.RECORDS_FILE
    records.append_records(path, [{"round": 1}, {"round": 2}])
    path.write_text(path.read_text()[:-4])
    assert records.read_records(path) == [{"round": 1}]


def test_the_saved_model_has_the_accuracy_that_the_run_reported(whole: RunFolder) -> None:
    silos, images = tiny_experiment().data.load(0)
    last = whole.read_summary()["last"]["silos"]
    for silo in silos:
        predictions = load(whole.path, silo.name).predict(silo.test.x)
        assert (predictions.labels == silo.test.y.numpy()).mean() == pytest.approx(last[silo.name]["accuracy"])
        assert predictions.uncertainty.entropy.mean() == pytest.approx(last[silo.name]["entropy"])
        assert predictions.classes == images.classes
    with pytest.raises(InputError, match=r"^unknown silo 'D0'; known: D1-1, D1-2"):
        load(whole.model_path, "D0")


def test_pixels_are_scaled_as_in_training(whole: RunFolder) -> None:
    """The first silo's domain is not rotated, so its test examples are the data set's own pixels."""
    silos, images = tiny_experiment().data.load(0)
    model, x = load(whole.path, "D1-1"), silos[0].test.x
    pixels = (x * images.std[0] + images.mean[0]).mul(255).round().to(torch.uint8)
    assert (model.predict(pixels.numpy()).probabilities == model.predict(x).probabilities).all()


def test_a_finished_run_keeps_the_state_of_its_server(whole: RunFolder) -> None:
    server, _ = load_checkpoint(whole.server_path, "cpu")
    models = open_models(whole.path)
    assert server.round == 5
    assert have_equal_bits(server.model_state, models.model_state)
    assert torch.equal(server.access, models.access)
    assert not whole.checkpoint_path.exists()


@pytest.mark.real
def test_kills_at_any_moment(whole: RunFolder, tmp_path: Path) -> None:
    """Kill a run twenty times, from the first import to the last file."""
    for i in range(20):
        process = start_run(tmp_path)
        time.sleep(1.5 + 0.37 * i)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    assert RunFolder(finish_run(tmp_path)).model_path.read_bytes() == whole.model_path.read_bytes()
