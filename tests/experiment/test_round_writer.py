"""Files that are written while the next round trains: in order, and an error is never lost."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from harness import TINY_SETTINGS_NO_CODEBOOK

from uefl.core.errors import InputError
from uefl.engines.stacked.seed_stack import SeedStackStopped
from uefl.experiment import records
from uefl.experiment.grouped_runs import run_group
from uefl.experiment.parsing import parse_experiments
from uefl.experiment.round_writer import DeferredWriter
from uefl.experiment.run_folder import RunFolder


def test_files_are_written_later_but_in_order():
    written: list[int] = []
    with DeferredWriter(nullcontext) as writer:
        for i in range(5):
            writer.submit(lambda i=i: written.append(i))
        assert written == [], "nothing waits for the disk yet"
        writer.write_all()
        assert written == [0, 1, 2, 3, 4]
        writer.submit(lambda: written.append(5))
        writer.wait()
        assert written == [0, 1, 2, 3, 4, 5]
        writer.submit(lambda: written.append(6))
    assert written == [0, 1, 2, 3, 4, 5, 6], "the end writes the rest"


def test_completed_rounds_are_written_when_another_seed_stops_the_stack():
    written: list[int] = []

    def run() -> None:
        with DeferredWriter(nullcontext) as writer:
            writer.submit(lambda: written.append(0))
            raise SeedStackStopped

    with pytest.raises(SeedStackStopped):
        run()
    assert written == [0]


@pytest.mark.parametrize("waits", [True, False])
def test_a_file_after_a_failed_one_is_not_written_and_the_error_is_raised(waits):
    written: list[str] = []

    errors = [OSError(28, "No space left on device")]  # once: then the disk has room again

    def fail() -> None:
        if errors:
            raise errors.pop()

    def run() -> None:
        with DeferredWriter(nullcontext) as writer:
            writer.submit(fail)
            writer.submit(lambda: written.append("checkpoint"))
            if waits:
                writer.wait()

    with pytest.raises(OSError, match="No space left"):
        run()
    assert written == []


def test_a_full_disk_stops_a_stack_with_one_line_and_completed_rounds_stay(tmp_path, monkeypatch):
    append_records = records.append_records

    def fail_in_round_two(path, completed):
        if any(record["round"] == 2 for record in completed):
            raise OSError(28, "No space left on device")
        append_records(path, completed)

    experiments = {}
    for seed in (3, 4):
        settings = ["fedavg", *TINY_SETTINGS_NO_CODEBOOK, f"seed={seed}"]
        (experiments[f"seed {seed}"],) = parse_experiments(settings, [], "default").values()
    monkeypatch.setattr(records, "append_records", fail_in_round_two)
    with pytest.raises(InputError, match="no space left on device; completed rounds are kept"):
        run_group(experiments, tmp_path, engine="stacked", on_event=lambda _name, _event: None)
    monkeypatch.undo()
    folders = run_group(experiments, tmp_path, engine="stacked", on_event=lambda _name, _event: None)
    for folder in folders.values():
        rounds = [record["round"] for record in records.read_records(RunFolder(folder).records_path)]
        assert rounds == list(range(1, experiments["seed 3"].method.total_rounds + 1))
