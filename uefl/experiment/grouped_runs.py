"""Run several seeds or folds of one experiment: with the stacked engine in one stack, otherwise one after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from uefl.engines.stacked.seed_stack import SeedStack, make_locks, run_together
from uefl.engines.stacked.stack_size import compute_stack_size, count_activations
from uefl.experiment.checkpoint import read_round
from uefl.experiment.device_memory import free_cached_memory, try_within_memory
from uefl.experiment.experiment import Experiment
from uefl.experiment.round_writer import DeferredWriter
from uefl.experiment.run import (
    Engine,
    Event,
    PreparedRun,
    find_run_path,
    make_engine_listeners,
    make_engine_settings,
    prepare_run,
    run,
    run_with_clients,
)
from uefl.experiment.run_folder import RunFolder

MIN_SEEDS_OF_TWO_STACKS = 4


def group_runs(experiments: Mapping[str, Experiment]) -> list[dict[str, Experiment]]:
    """Return groups of experiments that differ in their seed, or in the fold that they test with, alone."""
    groups: list[dict[str, Experiment]] = []
    for name, experiment in experiments.items():
        for group in groups:
            if _copy_seed_and_fold(next(iter(group.values())), experiment) == experiment:
                group[name] = experiment
                break
        else:
            groups.append({name: experiment})
    return groups


def _copy_seed_and_fold(experiment: Experiment, other: Experiment) -> Experiment:
    """Return an experiment with the seed and, if both test with a fold, the fold of another one."""
    fold = other.data.fold if experiment.data.fold and other.data.fold else experiment.data.fold
    return replace(experiment, seed=other.seed, data=replace(experiment.data, fold=fold))


def run_group(
    experiments: Mapping[str, Experiment],
    root: Path,
    *,
    device: str = "cpu",
    engine: str = "auto",
    num_workers: int = 0,
    on_event: Callable[[str, Event], None],
) -> dict[str, Path]:
    """Run experiments that differ in seed or fold alone, each in its own folder, and return the folders.

    Each run is found finished, resumed or started, as if it ran alone; then all run in one stack. `num_workers` is for
    runs with the engine `processes`.
    """
    names = list(experiments)
    if len(names) > 1 and (device.startswith("cuda") or engine == "stacked"):
        on_event(names[0], {"kind": "load", "data": experiments[names[0]].data.name})
        images = experiments[names[0]].data.read_images()
        prepare = partial(prepare_run, device=device, images=images)
        events: list[Event] = []
        first = prepare(experiments[names[0]], engine=engine, on_event=events.append)
        if first.context.engine == "stacked":
            for event in events:
                on_event(names[0], event)
            others = {n: prepare(experiments[n], engine="stacked", on_event=partial(on_event, n)) for n in names[1:]}
            runs = {names[0]: first, **others}
            folders: dict[str, Path] = {}
            for group in _group_by_shape(runs):
                folders |= _run_within_memory(group, root, on_event, device)
            return {name: folders[name] for name in names}
    return {
        name: run(
            *(experiments[name], root),
            device=device,
            engine=engine,
            num_workers=num_workers,
            on_event=partial(on_event, name),
        )
        for name in names
    }


def _group_by_shape(runs: Mapping[str, PreparedRun]) -> list[dict[str, PreparedRun]]:
    """Return groups with inputs of one shape: a table has a column for a missing value that its training rows have."""
    shapes = dict.fromkeys(run_.context.input_shape for run_ in runs.values())
    return [{n: run_ for n, run_ in runs.items() if run_.context.input_shape == shape} for shape in shapes]


def _run_within_memory(
    runs: Mapping[str, PreparedRun], root: Path, on_event: Callable[[str, Event], None], device: str
) -> dict[str, Path]:
    """Run all together or, if they do not fit into the device's memory, one half after the other."""
    run_stacks = partial(_run_in_stacks, runs, root, on_event)
    folders = try_within_memory(partial(run_stacks, choose_num_stacks(runs, device)), device)
    if folders is not None:
        return folders
    names = list(runs)
    half = -(-len(names) // 2)
    rest = f"{half} at a time" if len(names) > 1 else "one silo at a time"
    message = f"{len(names)} of the runs at a time do not fit into the memory of {device}; they continue with {rest}."
    on_event(names[0], {"kind": "warning", "message": message})
    if len(names) > 1:
        halves = [{name: runs[name] for name in part} for part in (names[:half], names[half:])]
        return {n: f for part in halves for n, f in _run_within_memory(part, root, on_event, device).items()}
    try:
        return run_stacks(1, max_stack_size=1)
    finally:
        free_cached_memory(device)


def choose_num_stacks(runs: Mapping[str, PreparedRun], device: str) -> int:
    """Return 2 where the servers' work is worth hiding: many seeds of a network that is small for the device.

    A codebook grows, and its steps would be captured again in both stacks, which takes longer than the servers.
    """
    first = next(iter(runs.values()))
    if not device.startswith("cuda") or len(runs) < MIN_SEEDS_OF_TWO_STACKS or first.experiment.method.codebook:
        return 1
    activations = count_activations(first.net, first.context.input_shape, first.silos[0].train.x.dtype)
    most = compute_stack_size(activations, first.experiment.method.local.batch_size, "cuda")
    return 2 if sum(len(run_.silos) for run_ in runs.values()) <= most else 1


def _run_in_stacks(
    runs: Mapping[str, PreparedRun],
    root: Path,
    on_event: Callable[[str, Event], None],
    num_stacks: int,
    **engine_settings: Any,
) -> dict[str, Path]:
    """Run all in one stack, or in two at the same time: the device trains one while the servers of the other work."""
    first, folders, locks = next(iter(runs)), dict[str, Path](), make_locks()
    settings = {**make_engine_settings(runs[first]), **make_engine_listeners(partial(on_event, first))}
    settings |= engine_settings
    stacks = [SeedStack(locks=locks, own_stream=i > 0, **settings) for i in range(num_stacks)]

    seeds = {name: i * num_stacks // len(runs) for i, name in enumerate(runs)}  # by name: the number of its stack
    groups = [{n: run_ for n, run_ in runs.items() if seeds[n] == i} for i in range(num_stacks)]
    max_rounds = [find_common_round(group, root) for group in groups]

    def run_seed(stack: SeedStack, name: str, prepared: PreparedRun) -> None:
        writer = DeferredWriter(stack.yield_turn)

        def open_clients() -> nullcontext[Engine]:
            seed = prepared.experiment.seed
            return nullcontext(stack.open_clients(prepared.silos, prepared.net, seed, writer.write_all))

        folders[name] = run_with_clients(
            *(prepared.experiment, root, prepared.context, open_clients, partial(on_event, name)),
            writer=writer,
            max_round=max_rounds[seeds[name]],
        )

    run_together(
        [(stack, [partial(run_seed, stack, *item) for item in group.items()]) for stack, group in zip(stacks, groups)]
    )
    return folders


def find_common_round(runs: Mapping[str, PreparedRun], root: Path) -> int | None:
    """Return the round after which all unfinished runs of a stack resume, or None if each resumes after its own.

    A seed that is one round ahead repeats it: results depend on the silos of a stack, to rounding, and in an
    uninterrupted run all seeds are in the same round. Seeds that are further apart were started at other times.
    """
    folders = [RunFolder(find_run_path(run_.experiment, root, run_.context)) for run_ in runs.values()]
    rounds = [read_round(folder.checkpoint_path) for folder in folders if not folder.is_finished]
    return min(rounds) if rounds and max(rounds) - min(rounds) == 1 else None
