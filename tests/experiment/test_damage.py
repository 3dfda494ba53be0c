"""A full disk, a read-only folder and damaged files: one line, exit code 2, and nothing that is complete is lost."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import call_cli, call_with_mistake, list_photo_names, write_photos

from uefl.experiment.run_folder import RunFolder

TINY = ["depth=1", "width=4", "hidden_size=16", "rounds=6", "iterations=1", "epochs=1", "batch_size=4", "mc_samples=2"]
needs_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can mount a disk")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"path={write_photos(tmp_path_factory.mktemp('photos'), list_photo_names(('north', 'south')))}"


@pytest.fixture(autouse=True)
def _isolate_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UEFL_DATA", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, photos: str) -> RunFolder:
    return RunFolder(run_to_end(photos, tmp_path_factory.mktemp("whole")))


def make_command(photos: str, out: Path) -> list[str]:
    return ["run", "fedavg", "folder", photos, *TINY, "--out", str(out)]


def run_to_end(photos: str, out: Path) -> Path:
    answer = call_cli(*make_command(photos, out))
    assert answer.code == 0, answer.stderr
    (folder,) = out.glob("fedavg-*")
    return folder


def stop_after_round(photos: str, out: Path, round_number: int, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """Run until the checkpoint of a round is written, and stop as Ctrl-C does."""
    from uefl.experiment import run

    save = run.save_checkpoint

    def save_and_stop(path: Path, server: object, *rest: object) -> None:
        save(path, server, *rest)  # type: ignore[arg-type]
        if server.round == round_number:  # type: ignore[attr-defined]
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run, "save_checkpoint", save_and_stop)
        answer = call_cli(*make_command(photos, out))
    assert answer.code == 130
    assert answer.stderr == "uefl: stopped; the same command resumes after the last completed round\n"
    (folder,) = out.glob("fedavg-*")
    return RunFolder(folder)


def damage(path: Path, kind: str) -> None:
    contents = path.read_bytes()
    if kind == "truncated":
        path.write_bytes(contents[: len(contents) // 2])
    elif kind == "empty":
        path.write_bytes(b"")
    else:  # one bit of the last tensor
        path.write_bytes(contents[:-1] + bytes([contents[-1] ^ 1]))


@pytest.mark.parametrize("kind", ["truncated", "empty", "one bit"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before_and_ends_with_the_same_bits(
    kind: str, photos: str, whole: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = stop_after_round(photos, tmp_path, 4, monkeypatch)
    assert all(path.exists() for path in folder.checkpoint_paths), "the last two checkpoints are kept"
    damage(folder.checkpoint_path, kind)
    answer = call_cli(*make_command(photos, tmp_path))
    assert answer.code == 0, answer.stderr
    assert f"warning: {folder.checkpoint_path} is damaged (" in answer.stdout
    assert "; resuming from the checkpoint before it, after round 3\n" in answer.stdout
    assert folder.model_path.read_bytes() == whole.model_path.read_bytes()
    assert not any(path.exists() for path in folder.checkpoint_paths)


def test_two_damaged_checkpoints_are_one_line_and_nothing_is_overwritten(
    photos: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = stop_after_round(photos, tmp_path, 3, monkeypatch)
    for path in folder.checkpoint_paths:
        damage(path, "one bit")
    before = {path.name: path.read_bytes() for path in folder.path.iterdir() if path.name != folder.LOCK_FILE}
    message = call_with_mistake(*make_command(photos, tmp_path))
    assert message.startswith(f"{folder.checkpoint_path} is damaged (its checksum does not match); ")
    assert message.endswith(f"; there is no other checkpoint: restore it, or move {folder.path} away to start again")
    assert before == {path.name: path.read_bytes() for path in folder.path.iterdir() if path.name != folder.LOCK_FILE}


@pytest.mark.parametrize(
    ("name", "kind", "reason"),
    [
        (RunFolder.HEADER_FILE, "truncated", "is damaged ("),
        (RunFolder.HEADER_FILE, "empty", "is damaged (Expecting value"),
        (RunFolder.RECORDS_FILE, "truncated", "is damaged (it must have one line for each of 2 rounds); restore it"),
        (RunFolder.RECORDS_FILE, "bad line", "is damaged in line 1 (Expecting"),
    ],
)
def test_a_damaged_file_of_an_unfinished_run_is_one_line_and_the_repaired_run_resumes(
    name: str, kind: str, reason: str, photos: str, whole: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = stop_after_round(photos, tmp_path, 3, monkeypatch)
    path = folder.path / name
    contents = path.read_bytes()
    if kind == "bad line":
        path.write_bytes(b"{" + contents)
    else:
        damage(path, kind)
    assert reason in call_with_mistake(*make_command(photos, tmp_path))
    path.write_bytes(contents)
    assert run_to_end(photos, tmp_path) == folder.path
    assert folder.model_path.read_bytes() == whole.model_path.read_bytes()


def test_a_lost_summary_is_written_again_from_the_records(photos: str, tmp_path: Path) -> None:
    folder = RunFolder(run_to_end(photos, tmp_path))
    summary, model = folder.summary_path.read_bytes(), folder.model_path.stat().st_mtime_ns
    folder.summary_path.write_text("{")
    message = call_with_mistake(*make_command(photos, tmp_path))
    assert message.startswith(f"{folder.summary_path} is damaged (")
    assert message.endswith("; delete it and run again, which writes it anew")
    folder.summary_path.unlink()
    assert "already finished" in call_cli(*make_command(photos, tmp_path)).stdout
    assert (folder.summary_path.read_bytes(), folder.model_path.stat().st_mtime_ns) == (summary, model)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("truncated", "is damaged (it has 3 complete lines, but the run finished with 6); "),
        ("missing", "is missing, though the run is finished; "),
        ("changed", "is damaged (it has changed since the run finished); "),
        ("bad line", "is damaged in line 1 (Expecting"),
    ],
)
def test_damaged_records_of_a_finished_run_are_noticed(kind: str, reason: str, whole: RunFolder, photos: str) -> None:
    path, contents = whole.records_path, whole.records_path.read_bytes()
    command, root = make_command(photos, whole.path.parent), whole.path.parent
    try:
        if kind == "missing":
            path.unlink()
        elif kind == "truncated":
            path.write_bytes(b"\n".join(contents.split(b"\n")[:3]) + b'\n{"round": 4')
        elif kind == "changed":
            path.write_bytes(contents.replace(b'"round": 1,', b'"round": 2,', 1))
        else:
            path.write_bytes(b"{" + contents)
        message = f"{path} {reason}"
        for arguments in (command, ["show", str(whole.path)]):
            assert call_with_mistake(*arguments).startswith(message)
        several = call_cli("show", *map(str, root.iterdir()), str(root))
        assert (several.code, message in several.stdout) == (0, True), several.stderr
    finally:
        path.write_bytes(contents)
    assert "already finished" in call_cli(*command).stdout


def test_show_prints_finished_runs_and_the_state_of_the_others(
    photos: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = stop_after_round(photos, tmp_path, 3, monkeypatch)
    (tmp_path / "notes").mkdir()
    finished = call_cli("run", "fedavg", "folder", photos, *TINY, "seed=1", "--out", str(tmp_path))
    assert finished.code == 0, finished.stderr
    answer = call_cli("show", *map(str, tmp_path.iterdir()))
    assert answer.code == 0, answer.stderr
    assert "Test examples, mean of last 5 rounds" in answer.stdout
    state = f"{folder.path}: 2 of 6 rounds recorded, unfinished; run the original command again to resume it"
    assert state in answer.stdout
    assert call_cli("show", str(folder.path)).stdout == f"{state}\n"
    with folder.lock():
        assert call_cli("show", str(folder.path)).stdout == f"{folder.path}: 2 of 6 rounds recorded, running\n"
    folder.header_path.write_text("{")
    answer = call_cli("show", *map(str, tmp_path.iterdir()))
    assert f"{folder.header_path} is damaged (" in answer.stdout
    assert "Test examples, mean of last 5 rounds" in answer.stdout


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mount.returncode:
        pytest.skip(f"root may not mount here: {mount.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@needs_root
def test_a_full_disk_is_one_line_and_the_run_resumes_once_there_is_space(
    disk: Path, photos: str, whole: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = stop_after_round(photos, disk, 3, monkeypatch)
    status = os.statvfs(disk)
    filler = disk / "filler"
    filler.write_bytes(bytes(status.f_bavail * status.f_frsize))
    message = call_with_mistake(*make_command(photos, disk))
    assert message == (
        f"cannot write to {disk}: no space left on device; completed rounds are kept, "
        "and the same command resumes after them"
    )
    assert all(path.exists() for path in folder.checkpoint_paths)
    assert not list(folder.path.glob(".*.*.*")), "no temporary file stays on a full disk"
    filler.unlink()
    assert run_to_end(photos, disk) == folder.path
    assert folder.model_path.read_bytes() == whole.model_path.read_bytes()


@needs_root
def test_a_read_only_disk_is_one_line(
    disk: Path, photos: str, whole: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = stop_after_round(photos, disk, 3, monkeypatch)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    message = call_with_mistake(*make_command(photos, disk))
    assert message.startswith(f"cannot write to {folder.path}: ")
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    assert RunFolder(run_to_end(photos, disk)).model_path.read_bytes() == whole.model_path.read_bytes()


def test_ctrl_c_names_the_way_to_resume(photos: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "uefl.cli.main", *make_command(photos, tmp_path), "seed=2"]
    command[command.index("rounds=6")] = "rounds=5000"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            while process.poll() is None and not list(tmp_path.glob(f"*/{RunFolder.CHECKPOINT_FILE}")):
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=120)
        finally:
            process.kill()  # a process that is left behind would fail another test
    assert (process.returncode, errors.strip()) == (
        130,
        "uefl: stopped; the same command resumes after the last completed round",
    )
