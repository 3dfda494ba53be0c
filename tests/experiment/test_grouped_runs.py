"""Seeds in one stack have folders of their own, and resume like single runs."""

from __future__ import annotations

import gc
import json
import math
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import TINY_SETTINGS, TINY_SETTINGS_NO_CODEBOOK

from uefl.algorithms.fedavg import FedAvg
from uefl.core.errors import ResumableError
from uefl.engines.stacked.seed_stack import SeedStack, SeedStackEngine, SharedLocks
from uefl.engines.stacked.stacked_engine import StackedEngine
from uefl.experiment import device_memory, grouped_runs
from uefl.experiment.checkpoint import read_round
from uefl.experiment.experiment import Experiment
from uefl.experiment.grouped_runs import choose_num_stacks, group_runs, run_group
from uefl.experiment.parsing import parse_experiments
from uefl.experiment.run import Event, PreparedRun, prepare_run, run
from uefl.experiment.run_folder import RunFolder


@pytest.fixture(scope="module")
def experiments() -> dict[str, Experiment]:
    runs = {}
    for seed in (3, 4):
        (experiment,) = parse_experiments(
            ["uefl", *TINY_SETTINGS, f"seed={seed}", "precision=float64"], [], "default"
        ).values()
        runs[f"seed {seed}"] = experiment
    return runs


def ignore(_name: str, _event: Event) -> None: ...


def read_accuracies(folder: Path) -> list[float]:
    summary: dict[str, Any] = RunFolder(folder).read_summary()
    silos = summary["last"]["silos"].values()
    return [silo[metric] for silo in silos for metric in ("accuracy", "entropy", "num_codewords")]


@pytest.mark.parametrize(
    ("settings", "num_seeds", "device", "num_stacks"),
    [
        ([], 10, "cuda", 2),
        ([], 3, "cuda", 1),  # few seeds
        ([], 10, "cpu", 1),
        (["width=512", "batch_size=2048"], 10, "cuda", 1),  # fills the device
    ],
)
def test_two_stacks_run_at_the_same_time_only_where_this_pays(settings, num_seeds, device, num_stacks):
    def prepare(method: str) -> PreparedRun:
        (experiment,) = parse_experiments([method, "train_per_silo=20", *settings], [], "default").values()
        return prepare_run(experiment, device="cpu", engine="stacked", on_event=lambda _: None)

    first = prepare("fedavg")
    assert choose_num_stacks({f"seed {i}": first for i in range(num_seeds)}, device) == num_stacks
    grows = prepare("uefl")
    assert choose_num_stacks({f"seed {i}": grows for i in range(num_seeds)}, device) == 1


def test_seeds_end_as_alone_also_after_an_interruption(experiments, tmp_path):
    def stop_in_round_two(name: str, event: Event) -> None:
        if name == "seed 4" and event["kind"] == "round" and event["record"]["round"] == 2:
            raise ResumableError("stopped by the test")

    with pytest.raises(ResumableError):
        run_group(experiments, tmp_path / "stack", engine="stacked", on_event=stop_in_round_two)
    checkpoints = list((tmp_path / "stack").glob("*/checkpoint*"))
    assert checkpoints, "an interrupted run keeps its checkpoint"
    folders = run_group(experiments, tmp_path / "stack", engine="stacked", on_event=ignore)
    for name, folder in folders.items():
        alone = run(experiments[name], tmp_path / "alone", engine="serial")
        assert folder.name == alone.name
        pairs = zip(read_accuracies(folder), read_accuracies(alone), strict=True)
        assert all(math.isclose(one, other, rel_tol=1e-9) for one, other in pairs)
        rounds = [json.loads(line)["round"] for line in RunFolder(folder).records_path.read_text().splitlines()]
        assert rounds == list(range(1, experiments[name].method.total_rounds + 1))
    finished: list[str] = []
    run_group(
        experiments,
        tmp_path / "stack",
        engine="stacked",
        on_event=lambda name, event: finished.append(name) if event["kind"] == "finished" else None,
    )
    assert sorted(finished) == sorted(experiments)


@pytest.mark.parametrize("stopped", ["seed 3", "seed 5"])
def test_a_resumed_stack_ends_with_the_same_bits(stopped, tmp_path):
    """In float32, in which a seed's bits depend on the silos that train beside it."""
    seeds = {}
    for seed in (3, 4, 5):
        settings = ["fedavg", *TINY_SETTINGS_NO_CODEBOOK, f"seed={seed}"]
        (seeds[f"seed {seed}"],) = parse_experiments(settings, [], "default").values()

    def stop_in_round_two(name: str, event: Event) -> None:
        if name == stopped and event["kind"] == "round" and event["record"]["round"] == 2:
            raise ResumableError("stopped by the test")

    starts: list[int] = []

    def listen(_name: str, event: Event) -> None:
        if event["kind"] == "start":
            starts.append(event["round"])

    whole = run_group(seeds, tmp_path / "whole", engine="stacked", on_event=ignore)
    with pytest.raises(ResumableError):
        run_group(seeds, tmp_path / "resumed", engine="stacked", on_event=stop_in_round_two)
    rounds = [read_round(path) for path in (tmp_path / "resumed").glob(f"*/{RunFolder.CHECKPOINT_FILE}")]
    assert sorted(rounds) == [2, 3, 3], "the seeds that did not stop are one round ahead"
    resumed = run_group(seeds, tmp_path / "resumed", engine="stacked", on_event=listen)
    assert starts == [2, 2, 2]
    for name, folder in whole.items():
        assert RunFolder(folder).model_path.read_bytes() == RunFolder(resumed[name]).model_path.read_bytes()


def test_seeds_that_are_further_apart_lose_no_rounds(tmp_path):
    seeds = {}
    for seed in (3, 4):
        settings = ["fedavg", *TINY_SETTINGS_NO_CODEBOOK, f"seed={seed}"]
        (seeds[f"seed {seed}"],) = parse_experiments(settings, [], "default").values()

    def stop_in_round_three(_name: str, event: Event) -> None:
        if event["kind"] == "round" and event["record"]["round"] == 3:
            raise ResumableError("stopped by the test")

    starts: dict[str, int] = {}

    def listen(name: str, event: Event) -> None:
        if event["kind"] == "start":
            starts[name] = event["round"]

    with pytest.raises(ResumableError):
        run(seeds["seed 3"], tmp_path, engine="stacked", on_event=partial(stop_in_round_three, "seed 3"))
    run_group(seeds, tmp_path, engine="stacked", on_event=listen)
    assert starts == {"seed 3": 3, "seed 4": 0}


def test_seeds_in_two_stacks_resume_and_end_as_alone(tmp_path, monkeypatch):
    """On a CPU as on a GPU: an error in the second stack stops both."""
    seeds = {}
    for seed in range(4):
        settings = ["fedavg", *TINY_SETTINGS_NO_CODEBOOK, f"seed={seed}", "precision=float64"]
        (seeds[f"seed {seed}"],) = parse_experiments(settings, [], "default").values()
    sizes: list[int] = []
    locks: list[SharedLocks] = []

    class Stack(SeedStack):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            locks.append(settings["locks"])

        def run(self, runs: Sequence[Callable[[], None]]) -> None:
            sizes.append(len(runs))
            super().run(runs)

    def stop_in_round_two(name: str, event: Event) -> None:
        if name == "seed 3" and event["kind"] == "round" and event["record"]["round"] == 2:
            raise ResumableError("stopped by the test")

    monkeypatch.setattr(grouped_runs, "SeedStack", Stack)
    monkeypatch.setattr(grouped_runs, "choose_num_stacks", lambda _runs, _device: 2)
    with pytest.raises(ResumableError):
        run_group(seeds, tmp_path / "stacks", engine="stacked", on_event=stop_in_round_two)
    assert len(locks) == 2
    assert locks[0].turn is locks[1].turn, "servers of both stacks take turns"
    folders = run_group(seeds, tmp_path / "stacks", engine="stacked", on_event=ignore)
    assert sizes == [2, 2, 2, 2]
    for name, folder in folders.items():
        alone = run(seeds[name], tmp_path / "alone", engine="serial")
        assert folder.name == alone.name
        pairs = zip(read_accuracies(folder), read_accuracies(alone), strict=True)
        assert all(math.isclose(one, other, rel_tol=1e-9) for one, other in pairs)


def test_memory_of_a_device_is_given_back_when_the_stacks_are_gone(experiments, tmp_path, monkeypatch):
    stacks, alive = weakref.WeakSet(), []

    class Stack(SeedStack):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            stacks.add(self)

    def free(device: str) -> None:
        gc.collect()
        alive.append((device, len(stacks)))

    monkeypatch.setattr(grouped_runs, "SeedStack", Stack)
    monkeypatch.setattr(device_memory, "free_cached_memory", free)
    run_group(experiments, tmp_path, engine="stacked", on_event=ignore)
    assert alive == [("cpu", 0)]


def limit_memory(monkeypatch: pytest.MonkeyPatch, most_silos: int) -> None:
    """From the second round on, let a server's memory end while engines hold stacks of more than so many silos."""
    engines: weakref.WeakSet[StackedEngine] = weakref.WeakSet()
    initialize, update = StackedEngine.__init__, FedAvg.update_method_state

    def count_engine(engine: StackedEngine, *args: Any, **settings: Any) -> None:
        initialize(engine, *args, **settings)
        engines.add(engine)

    def update_method_state(method: FedAvg, server: Any, replies: Any) -> Any:
        if server.round > 1 and sum(engine.max_stack_size or len(engine.silos) for engine in engines) > most_silos:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return update(method, server, replies)

    monkeypatch.setattr(StackedEngine, "__init__", count_engine)
    monkeypatch.setattr(FedAvg, "update_method_state", update_method_state)


@pytest.mark.parametrize(
    ("most_silos", "sizes"), [(9, ["1 at a time"]), (1, ["1 at a time", "one silo at a time", "one silo at a time"])]
)
def test_runs_that_do_not_fit_into_memory_continue_in_smaller_parts(
    most_silos, sizes, experiments, tmp_path, monkeypatch
):
    """Memory may end outside of a stack's steps, as in a server's average: nine silos of each of two seeds."""
    together, events = run_group(experiments, tmp_path / "all", engine="stacked", on_event=ignore), list[Event]()
    limit_memory(monkeypatch, most_silos)
    in_parts = run_group(
        experiments, tmp_path / "parts", engine="stacked", on_event=lambda _name, event: events.append(event)
    )
    for name in experiments:
        assert read_accuracies(in_parts[name]) == pytest.approx(read_accuracies(together[name]), abs=1e-9)
    warnings = [event["message"] for event in events if event["kind"] == "warning"]
    assert [message.rpartition(" with ")[2].rstrip(".") for message in warnings] == sizes
    assert "2 of the runs at a time do not fit into the memory of cpu" in warnings[0]
    assert [event["round"] for event in events if event["kind"] == "start"][2:] == [1] * (len(sizes) + 1)


def test_a_run_that_does_not_fit_into_memory_continues_silo_by_silo(experiments, tmp_path, monkeypatch):
    experiment, events = experiments["seed 3"], list[Event]()
    usual = run(experiment, tmp_path / "usual", engine="stacked")
    limit_memory(monkeypatch, most_silos=1)
    folder = run(experiment, tmp_path / "little", engine="stacked", on_event=events.append)
    assert read_accuracies(folder) == pytest.approx(read_accuracies(usual), abs=1e-9)
    assert sum(event["kind"] == "plan" for event in events) == 1
    assert [e["message"] for e in events if e["kind"] == "warning"] == [
        "the run does not fit into the memory of cpu; it continues with one silo at a time."
    ]


@pytest.mark.parametrize("num_runs", [1, 2])
def test_a_run_that_never_fits_into_memory_ends_with_the_error_of_the_device(
    num_runs, experiments, tmp_path, monkeypatch
):
    limit_memory(monkeypatch, most_silos=0)
    runs = dict(list(experiments.items())[:num_runs])
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):  # one line of the command line
        run_group(runs, tmp_path, engine="stacked", on_event=ignore)


def test_seeds_with_their_own_public_images_end_in_one_stack_as_alone(tmp_path, monkeypatch):
    sizes, words = [], ["fccl", *TINY_SETTINGS_NO_CODEBOOK, "public_images=30", "precision=float64"]
    make_engine = SeedStackEngine.__init__

    def count_seeds(engine: SeedStackEngine, members: Sequence[Any], *args: Any, **settings: Any) -> None:
        sizes.append(len(members))
        make_engine(engine, members, *args, **settings)

    monkeypatch.setattr(SeedStackEngine, "__init__", count_seeds)
    runs = {}
    for seed in (3, 4):
        (runs[f"seed {seed}"],) = parse_experiments([*words, f"seed={seed}"], [], "default").values()
    public = [run_.data.load(run_.seed)[0][0].public for run_ in runs.values()]
    assert not torch.equal(*public)
    folders = run_group(runs, tmp_path / "stack", engine="stacked", on_event=ignore)
    assert sizes == [2]
    for name, folder in folders.items():
        alone = run(runs[name], tmp_path / "alone", engine="serial")
        pairs = zip(read_accuracies(folder), read_accuracies(alone), strict=True)
        assert all(math.isclose(one, other, rel_tol=1e-9) for one, other in pairs)


def test_runs_of_a_group_differ_in_their_seed_alone(experiments):
    (fedavg,) = parse_experiments(["fedavg", *TINY_SETTINGS_NO_CODEBOOK, "seed=3"], [], "default").values()
    groups = group_runs({"a": experiments["seed 3"], "b": fedavg, "c": experiments["seed 4"]})
    assert [list(group) for group in groups] == [["a", "c"], ["b"]]


def test_folds_end_in_stacks_as_alone_also_with_other_columns(tmp_path):
    settings = ["train_per_silo=60", "width=8", "hidden_size=8", "rounds=2", "iterations=1", "mc_samples=3"]
    folds = {}
    for fold in ("1/3", "2/3", "3/3"):
        (folds[fold],) = parse_experiments(
            ["fedavg", "heart", f"fold={fold}", *settings, "precision=float64"], [], "default"
        ).values()
    assert [list(group) for group in group_runs(folds)] == [["1/3", "2/3", "3/3"]]
    folders = run_group(folds, tmp_path / "stack", engine="stacked", on_event=ignore)
    shapes = [RunFolder(folder).read_header()["input_shape"] for folder in folders.values()]
    assert shapes[0] == shapes[2] != shapes[1], "one fold has a column more, and needs a stack of its own"
    assert read_accuracies(folders["1/3"]) != read_accuracies(folders["2/3"])
    for name, folder in folders.items():
        alone = run(folds[name], tmp_path / "alone", engine="serial")
        pairs = zip(read_accuracies(folder), read_accuracies(alone), strict=True)
        assert all(math.isclose(one, other, rel_tol=1e-9) for one, other in pairs)
