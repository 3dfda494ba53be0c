"""Parse the arguments of `uefl run` and `uefl compare`, such as `fedavg uefl mnist gamma=0.2`, into experiments.

Names are checked before anything heavy is imported, so that a typing error is reported at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from uefl.algorithms import METHODS
from uefl.core.errors import InputError
from uefl.data import PARTITIONERS, SOURCES
from uefl.experiment.settings import find_assigned_paths, has_setting, override_settings
from uefl.models import check_encoder

if TYPE_CHECKING:
    from uefl.experiment.experiment import Experiment

DEFAULT_DATASET = "mnist5k"


def parse_experiments(arguments: Sequence[str], default_methods: Sequence[str], preset: str) -> dict[str, Experiment]:
    """Return one experiment per method, by name, each with the `field=value` assignments that apply to it.

    `default_methods` are used where the arguments name no method.
    """
    assignments = [a for a in arguments if "=" in a]
    methods, dataset = _parse_names([a for a in arguments if "=" not in a])
    # These four determine the defaults of other settings.
    partitioner, encoder, codebook, num_silos = (
        get_assigned_value(assignments, n) for n in ("partitioner", "encoder", "codebook", "num_silos")
    )
    if partitioner:
        PARTITIONERS.check_name(partitioner)
    if encoder:
        check_encoder(encoder)
    from uefl.experiment.recipes import choose_group_rounds, make_experiment

    experiments = {
        name: make_experiment(
            name,
            dataset,
            preset,
            partitioner,
            encoder=encoder,
            with_codebook=codebook == "on",
            num_silos=num_silos,
        )
        for name in methods or default_methods
    }
    rest = [a for a in assignments if a != "codebook=on"]
    changed = {name: _override(e, _select_applicable(e, rest, experiments)) for name, e in experiments.items()}
    if preset != "default" or any(a.partition("=")[0].endswith("group_rounds") for a in assignments):
        return changed
    return {name: choose_group_rounds(e) for name, e in changed.items()}  # by the assigned iterations


def _override(experiment: Experiment, assignments: Sequence[str]) -> Experiment:
    """Change settings; one that has no effect, such as of another partitioner, is an error."""
    changed = override_settings(experiment, assignments)
    paths = find_assigned_paths(experiment, assignments)
    changed.data.check_used(path[1:] for path in paths if path[0] == "data")
    optimizer = changed.method.local.optimizer
    if ("method", "local", "momentum") in paths and optimizer != "sgd":
        raise InputError(f"momentum has no effect with optimizer={optimizer}; it is used by sgd")
    return changed


def parse_seeds(text: str) -> list[int]:
    """Parse a comma-separated list of seeds."""
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"seeds='{text}' is not a list of whole numbers such as 0,1,2") from None
    if repeated := [seed for seed in dict.fromkeys(seeds) if seeds.count(seed) > 1]:
        raise InputError(f"seeds='{text}' names seed {repeated[0]} more than once")
    return seeds


def get_assigned_value(assignments: Sequence[str], name: str) -> str:
    """Return the text that `name=text` assigns, or an empty text."""
    return next((a.removeprefix(f"{name}=") for a in assignments if a.startswith(f"{name}=")), "")


def reject_path(name: str) -> None:
    """Raise an error that says how to write a path that was given in place of a data set."""
    if Path(name).exists():
        kind = "table" if Path(name).suffix == ".csv" else "folder"
        raise InputError(f"'{name}' is a path; for data of your own, write: {kind} path={name}")


def _parse_names(names: Sequence[str]) -> tuple[list[str], str]:
    """Return methods and data set; without a data set, the embedded one."""
    for name in names:
        if not (name in METHODS or name in SOURCES):
            reject_path(name)
            raise InputError(
                f"'{name}' is neither a method ({', '.join(METHODS)}), nor a data set ({', '.join(SOURCES)}), "
                "nor field=value"
            )
    datasets = [n for n in names if n in SOURCES] or [DEFAULT_DATASET]
    if len(datasets) > 1:
        raise InputError(f"choose one data set, not {', '.join(datasets)}")
    return list(dict.fromkeys(n for n in names if n in METHODS)), datasets[0]


def _select_applicable(
    experiment: Experiment, assignments: Sequence[str], experiments: dict[str, Experiment]
) -> list[str]:
    """Return the assignments to settings of this method, and those to settings of no method, which are errors."""

    def applies(name: str) -> bool:
        return has_setting(experiment, name) or not any(has_setting(e, name) for e in experiments.values())

    return [a for a in assignments if applies(a.partition("=")[0])]
