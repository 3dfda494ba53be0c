"""Several experiments in parallel: how many processes, and what a user reads when one of them ends early."""

import multiprocessing as mp
import os
import signal
import time

import pytest
from harness import TINY_SETTINGS, TINY_SETTINGS_NO_CODEBOOK, call_cli, drop_seconds
from test_process_runs import list_children

from uefl.core.errors import InputError, ResumableError
from uefl.engines.processes import worker_pool
from uefl.experiment import parallel_runs
from uefl.experiment.parallel_runs import choose_workers, run_in_parallel
from uefl.experiment.parsing import parse_experiments
from uefl.experiment.run import run
from uefl.experiment.run_folder import RunFolder


@pytest.mark.parametrize(
    ("workers", "num_runs", "device", "expected"),
    [
        (0, 50, "cpu", 16),  # one per core
        (0, 3, "cpu", 3),  # no more than runs
        (0, 50, "cuda:0", 4),  # processes compete for a GPU
        (14, 50, "cuda", 14),  # as the user sets it
    ],
)
def test_without_a_number_there_is_one_process_per_core_but_few_on_cuda(
    workers, num_runs, device, expected, monkeypatch
):
    monkeypatch.setattr(parallel_runs, "count_cores", lambda: 16)
    assert choose_workers(workers, num_runs, device) == expected


def test_a_killed_process_is_one_line_and_the_same_call_resumes(tmp_path):
    experiments = parse_experiments(["fedavg", "uefl", *TINY_SETTINGS], [], "default")

    def kill_after_a_round(_name, event):
        if event["kind"] == "round":
            for process in mp.active_children():
                os.kill(process.pid, signal.SIGKILL)

    with pytest.raises(
        ResumableError, match=r"^the process of \w+ ended with exit code -9; run the same command again"
    ):
        run_in_parallel(experiments, tmp_path, workers=1, on_event=kill_after_a_round)
    starts = []
    listen = lambda _, event: starts.append(event["round"]) if event["kind"] == "start" else None  # noqa: E731
    folders = run_in_parallel(experiments, tmp_path, workers=2, on_event=listen)
    assert max(starts) > 0, "a run resumes from its checkpoint"
    assert all(RunFolder(folder).read_summary()["rounds"] == 5 for folder in folders.values())


@pytest.mark.parametrize(
    ("cores", "workers", "num_runs", "threads", "expected"),
    [(16, 4, 4, 1, 4), (16, 8, 2, 1, 8), (16, 5, 5, 1, 3), (16, 2, 2, 4, 2), (2, 2, 2, 1, 1), (2, 3, 3, 1, 1)],
)
def test_every_run_may_use_its_share_of_the_cores(cores, workers, num_runs, threads, expected, tmp_path, monkeypatch):
    shares = []

    def start_no_worker(_context, _root, settings, _events):
        shares.append(settings.num_workers)
        raise KeyboardInterrupt

    monkeypatch.setattr(worker_pool, "count_cores", lambda: cores)
    monkeypatch.setattr(parallel_runs.torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(parallel_runs, "_start_worker", start_no_worker)
    (experiment,) = parse_experiments(["fedavg", *TINY_SETTINGS_NO_CODEBOOK], [], "default").values()
    experiments = {f"run {i}": experiment for i in range(num_runs)}
    with pytest.raises(KeyboardInterrupt):
        run_in_parallel(experiments, tmp_path, workers=workers, on_event=lambda _name, _event: None)
    assert shares == [expected]


@pytest.mark.parametrize(("workers", "expected"), [("2", 2), ("0", 16)])
def test_every_target_has_as_many_processes_as_the_user_sets(workers, expected, tmp_path, monkeypatch):
    shares = []

    def start_no_worker(_context, _root, settings, _events):
        shares.append(settings.num_workers)
        raise KeyboardInterrupt

    monkeypatch.setattr(worker_pool, "count_cores", lambda: 16)
    monkeypatch.setattr(parallel_runs, "_start_worker", start_no_worker)
    data = ["mnist5k", "partitioner=leave-one-domain-out", "target=all", "--out", str(tmp_path)]
    assert call_cli("run", "fedavg", *data, "--workers", workers).code == 130
    assert shares == [expected]


def test_parallel_runs_with_processes_of_their_own_have_the_bits_of_serial(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_pool, "count_cores", lambda: 4)
    experiments = parse_experiments(["scaffold", "uefl", "batch_norm=personal", *TINY_SETTINGS], [], "default")
    num_workers = set()

    def listen(_name, event):
        if event["kind"] == "silo":
            num_workers.update(len(list_children(process.pid)) for process in mp.active_children())

    folders = run_in_parallel(experiments, tmp_path / "processes", workers=2, engine="processes", on_event=listen)
    assert max(num_workers) == 2
    for name, experiment in experiments.items():
        spread, serial = RunFolder(folders[name]), RunFolder(run(experiment, tmp_path / "serial", engine="serial"))
        assert spread.read_header()["engine"] == "processes"
        assert spread.model_path.read_bytes() == serial.model_path.read_bytes()
        assert spread.server_path.read_bytes() == serial.server_path.read_bytes()
        assert [*map(drop_seconds, spread.read_records())] == [*map(drop_seconds, serial.read_records())]


def test_an_interrupt_at_the_start_of_a_process_is_ignored(tmp_path, capfd):
    context, settings = mp.get_context("spawn"), parallel_runs.RunSettings("cpu", "auto", 1, 1)
    events = context.Queue()
    worker = parallel_runs._start_worker(context, tmp_path, settings, events)
    for _ in range(10):
        os.kill(worker.process.pid, signal.SIGINT)
        time.sleep(0.02)
    worker.tasks.close()
    worker.process.join(120)
    assert worker.process.exitcode == 0
    assert capfd.readouterr() == ("", "")


def test_an_input_error_of_a_process_stays_one(tmp_path):
    (experiment,) = parse_experiments(["fedavg", "folder", f"path={tmp_path}/none"], [], "default").values()
    with pytest.raises(InputError, match="none"):
        run_in_parallel({"fedavg": experiment}, tmp_path, workers=1, on_event=lambda _name, _event: None)


def test_a_second_interrupt_leaves_no_run_behind(tmp_path, monkeypatch):
    """A process that is not told to end trains on, and Python waits for it before this one ends."""
    ended = []

    class FakeProcess:
        def terminate(self):
            ended.append(self)

        def join(self):
            raise KeyboardInterrupt

    class FakeTasks:
        def send(self, _task):
            pass

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(parallel_runs, "_start_worker", lambda *_: parallel_runs.Worker(FakeProcess(), FakeTasks()))
    monkeypatch.setattr(parallel_runs, "_next_event", interrupt)
    experiments = parse_experiments(["fedavg", "uefl", *TINY_SETTINGS], [], "default")
    with pytest.raises(KeyboardInterrupt):
        run_in_parallel(experiments, tmp_path, workers=2, on_event=lambda _name, _event: None)
    assert len(ended) == 2


def test_a_process_takes_one_run_after_another(tmp_path, monkeypatch):
    """Importing torch again for every run would take longer than short runs."""
    started, start_worker = [], parallel_runs._start_worker
    monkeypatch.setattr(parallel_runs, "_start_worker", lambda *a: started.append(start_worker(*a)) or started[-1])
    experiments = {
        f"seed {seed}": next(
            iter(parse_experiments(["fedavg", *TINY_SETTINGS_NO_CODEBOOK, f"seed={seed}"], [], "default").values())
        )
        for seed in range(3)
    }
    folders = run_in_parallel(experiments, tmp_path, workers=1, on_event=lambda _name, _event: None)
    assert [RunFolder(folder).read_summary()["seed"] for folder in folders.values()] == [0, 1, 2]
    assert len(started) == 1
    assert not started[0].process.is_alive(), "no process is left"


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cuda:0", [["fedavg 0", "fedavg 1", "fedavg 2"], ["uefl 0", "uefl 1", "uefl 2"]]),
        ("cpu", [["fedavg 0"], ["uefl 0"], ["fedavg 1"], ["uefl 1"], ["fedavg 2"], ["uefl 2"]]),
    ],
)
def test_on_cuda_one_process_takes_all_seeds_of_a_method(device, expected, tmp_path, monkeypatch):
    """No process starts: what each would be sent is recorded instead."""
    sent = []

    class FakeWorker:
        def __init__(self, _context, root, settings, events):
            assert settings.device == device
            self.root, self.events, self.process, self.tasks = root, events, self, self

        def send(self, task):
            name, group = task
            sent.append(list(group))
            self.events.put((name, {"kind": "done", "folders": {n: self.root / n for n in group}}))

        def is_alive(self):
            return True

        def terminate(self):
            pass

        def join(self):
            pass

    monkeypatch.setattr(parallel_runs, "_start_worker", FakeWorker)
    experiments = {
        f"{name} {seed}": experiment
        for seed in range(3)
        for name, experiment in parse_experiments(
            ["fedavg", "uefl", *TINY_SETTINGS, f"seed={seed}"], [], "default"
        ).items()
    }
    listen = lambda _name, _event: None  # noqa: E731
    folders = run_in_parallel(experiments, tmp_path, workers=2, device=device, on_event=listen)
    assert sent == expected
    assert folders == {name: tmp_path / name for name in experiments}
