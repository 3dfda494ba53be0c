"""Rewrite the committed records to the present names and settings: `python -m studies.migrate_records`.

Keys, names of settings and values, and names of files change; measured numbers do not. A second run changes nothing.
Records of version 0.1 get the names of 0.2. In those of early 0.2, rounds in groups of silos followed all others; now
they are the last ones, so a run that trained 22 rounds and then 8 in groups is one of 30 rounds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Record = dict[str, Any]
ROOT = Path(__file__).parents[1]

SINCE_0_2 = (  # files that 0.2 was the first to write, with the present names
    *("calibration.jsonl", "drift.jsonl", "folder-defaults.jsonl", "joining.jsonl", "parity.jsonl"),
    *("rivals-search.jsonl", "rivals-trials.jsonl", "uncertainty-test.jsonl"),
)

# --- runs: results/*.jsonl ----------------------------------------------------------------------------------------

RUN_KEYS = {
    "set-up": "setup",
    "results": "results_version",
    "budget": "total_rounds",
    "rounds run": "rounds_run",
    "words": "num_codewords",
    "words_total": "total_codewords",
    "new_words": "new_codewords",
    "uncertain": "uncertain_silos",
    "up": "bytes_up",
    "down": "bytes_down",
    "up with questions": "bytes_up_with_queries",
    "down with questions": "bytes_down_with_queries",
}
METHOD_NAMES = {"alone": "local-only", "pooled": "centralized"}
RUN_VALUES = {
    "setup": {
        "heldout-0": "leave-out-0",
        "heldout-75": "leave-out-75",
        "many": "hundred-clients",
        "skewed": "label-skew",
    },
    "method": {  # a row of a table of the study
        "Alone": "Local-only",
        "Pooled": "Centralized",
        "VQ-FedAvg, a book a domain": "VQ-FedAvg, one codebook per domain",
    },
    "algorithm": METHOD_NAMES,
    "stopped": {"no time left": "time limit"},
}

# --- settings of an experiment, inside the records of runs --------------------------------------------------------

SETTING_NAMES = {  # group of settings (after renaming): old name to new
    "": {"kw": "method", "book": "codebook", "normalise": "feature_norm"},  # the demo's search had no groups
    "method": {
        "participation": "clients_per_round",
        "weights": "aggregation_weights",
        "norms": "batch_norm",
        "passes": "mc_samples",
        "watch_train": "evaluate_train",
        "watch_local": "evaluate_local",
    },
    "local": {
        "rate": "lr",
        "batch": "batch_size",
        "clip": "max_grad_norm",
        "fresh": "reset_optimizer",
        "evaluation_batch": "eval_batch_size",
    },
    "codebook": {
        "words": "num_codewords",
        "first": "codebook_init",
        "warm_up": "warmup_rounds",
        "commitment": "commitment_weight",
        "codeword": "codebook_loss_weight",
        "new": "new_codeword_init",
        "reference": "threshold_reference",
        "errors": "min_standard_errors",
        "scope": "extension_scope",
        "growth": "extension_growth",
        "kept": "retention",
        "books": "initial_codebook",
    },
    "data": {
        "size": "image_size",
        "only": "num_classes",
        "cut": "partitioner",
        "silos": "num_silos",
        "train": "train_per_silo",
        "sizes": "train_sizes",
        "test": "test_per_silo",
        "test_part": "test_fraction",
        "test_labels": "test_label_distribution",
        "merge": "pool_splits",
        "validation": "validation_fraction",
        "labels": "classes_per_silo",
    },
    "model": {
        "pool": "average_pool",
        "frozen_norms": "frozen_batch_norm",
        "hidden": "hidden_size",
        "normalise": "feature_norm",
        "members": "ensemble_size",
        "pretrained": "pretrained_weights",
    },
}
METHOD_SETTING_NAMES = {  # method: old name to new, in the group `method`
    "distrans": {"offset_rate": "offset_lr_multiplier"},
    "fedbr": {"pseudo": "pseudo_data", "mixed": "images_per_mean"},
    "fedcr": {
        "dimensions": "code_size",
        "draws": "eval_draws",
        "blend": "prior_update_rate",
        "largest": "fedcr_max_grad_norm",
    },
    "fediir": {"penalty": "penalty_weight"},
    "fedsr": {"dimensions": "code_size", "draws": "eval_draws"},
    "vhl": {
        "virtual": "virtual_weight",
        "align": "align_weight",
        "contrast": "contrast_weight",
        "each": "images_per_class",
    },
}
SETTING_VALUES = {  # setting (after renaming): old value to new
    "name": METHOD_NAMES,
    "aggregation_weights": {"size": "num_examples", "equal": "uniform"},
    "batch_norm": {"skip": "not_averaged"},
    "initial_codebook": {"domain": "per_domain"},
    "offsets": {"own": "local", "mean": "average"},
    "partitioner": {
        "given": "natural",
        "held-out": "leave-one-domain-out",
        "ghifary": "leave-one-domain-out-paired",
        "classes": "pathological",
        "vhl": "dirichlet-vhl",
        "fedbr": "dirichlet-fedbr",
        "fedcr": "dirichlet-fedcr",
    },
    "test_label_distribution": {"all": "global", "own": "silo"},
    "encoder": {"gn-conv": "group-norm-conv"},
}

# Settings of the rounds of a run, with the value of a record that does not name them.
ROUNDS = {"rounds": 14, "extra_rounds": 8, "iterations": 3, "group_rounds": 0}

# --- benchmarks: benchmarks/records/*.jsonl -----------------------------------------------------------------------

BENCHMARK_NAMES = {
    "federation": "frameworks",
    "release": "authors-code",
    "passes": "mc-dropout",
    "words": "codebook",
    "clients": "client-scaling",
    "bytes": "traffic",
    "t11": "cost",
    "many": "many-clients",
    "large": "large-network",
}
BENCHMARK_KEYS = {"who": "contender", "figure": "quantity"}
CONTENDERS = {
    **METHOD_NAMES,
    "plain loop": "PyTorch loop",
    "plain loop, channels last": "PyTorch loop, channels last",
    "like the release": "authors' code",
    "20 whole passes": "20 full forward passes",
    "plain evaluation": "single evaluation",
    "step without book": "step without codebook",
    "floor": "lower bound",
    "1000 clients, 100 together": "1000 clients, 100 per stack",
}
PHRASES = {  # in contenders, quantities and notes: whole words of the old text to the new text
    r"book of": "codebook of",
    r"first book": "initial codebook",
    r"(\d+) words at most": r"at most \1 codewords",
    r"(\d+) words of one silo's own": r"\1 codewords of one silo",
    r"words": "codewords",
    r"of them, ": "of these, ",
    r"the round after it": "the round after the extension",
    r"a client and round": "per client and round",
    r"(\d+) images each": r"\1 images per client",
    r"a further round": "one later round",
    r"rounds a run": "rounds per run",
    r"GFLOP a step": "GFLOP per step",
    r"a prediction, (\d+) at a time": r"per prediction, batches of \1",
    r"inertia a point, a seed each": "inertia per point, one seed per turn",
    r"mean of seeds over scikit-learn's": "mean over seeds, relative to scikit-learn",
    r"release's MNIST net": "authors' MNIST network",
    r"plain evaluations": "single evaluations",
    r"optimiser": "optimizer",
    r"element by element": "elementwise",
}


def migrate_run(value: Any) -> Any:
    """Rename the keys and values of a run's record."""
    if isinstance(value, list):
        return [migrate_run(item) for item in value]
    if not isinstance(value, dict):
        return value
    method = _rename_value(value.get("algorithm") or value.get("name") or value.get("method"), METHOD_NAMES)
    migrated: Record = {}
    for old, item in value.items():
        key = RUN_KEYS.get(str(old), str(old))
        if key in ("settings", "experiment"):
            migrated[key] = migrate_settings(item, "", method)
        elif isinstance(item, str):
            migrated[key] = _rename_value(item, RUN_VALUES.get(key, {}))
        else:
            migrated[key] = migrate_run(item)
    return migrated


def migrate_settings(settings: Mapping[str, Any], group: str, method: str) -> Record:
    """Rename settings and their values, nested (`{"data": {"cut": ...}}`) or by path (`{"data.cut": ...}`)."""
    migrated: Record = {}
    for path, item in settings.items():
        parent, dot, old = path.rpartition(".")
        here = parent.rpartition(".")[2] if dot else group
        names = SETTING_NAMES.get(here, {}) | (METHOD_SETTING_NAMES.get(method, {}) if here == "method" else {})
        name = names.get(old, old)
        if isinstance(item, dict):
            item = migrate_settings(item, name, method)
        elif isinstance(item, str) and (name != "name" or not here):  # `data.name` is a data set's
            item = _rename_value(item, SETTING_VALUES.get(name, {}))
        migrated[parent + dot + name] = item
    return migrated


def migrate_groups(record: Record) -> Record:
    """Count rounds in groups of silos among all rounds, in the settings of a run, its arguments and its rounds."""
    settings, arguments = record.get("settings"), record.get("arguments")
    if isinstance(settings, dict) and settings.get("method.group_rounds"):
        old = {name: settings.get(f"method.{name}", value) for name, value in ROUNDS.items()}
        new = include_group_rounds(old)
        kept = {path: value for path, value in settings.items() if path.removeprefix("method.") not in ROUNDS}
        changed = {f"method.{name}": value for name, value in new.items() if value != ROUNDS[name]}
        total_rounds = new["rounds"] + (new["iterations"] - 1) * new["extra_rounds"]
        return {**record, "settings": dict(sorted({**kept, **changed}.items())), "total_rounds": total_rounds}
    if isinstance(arguments, str) and arguments.startswith("uefl "):
        return {**record, "arguments": migrate_arguments(arguments)}
    return record


def migrate_arguments(arguments: str) -> str:
    """Return arguments of `uefl run` that name their group rounds; the preset had none when they were recorded."""
    values = dict(part.split("=", 1) for part in arguments.split() if "=" in part)
    if "group_rounds" not in values:
        return arguments.replace(" seed=", " group_rounds=0 seed=")
    if values["group_rounds"] == "0":
        return arguments
    migrated = include_group_rounds({name: int(values[name]) for name in ROUNDS})
    return " ".join(
        f"{name}={migrated[name]}" if (name := part.partition("=")[0]) in migrated else part
        for part in arguments.split()
    )


def include_group_rounds(rounds: Mapping[str, int]) -> dict[str, int]:
    """Return rounds, extra_rounds, iterations and group_rounds such that the last rounds are those in groups.

    Every run in groups has had a decision on its codebook. Settings without one are those of early 0.2.
    """
    extra_rounds, iterations, group_rounds = (rounds[n] for n in ("extra_rounds", "iterations", "group_rounds"))
    if not group_rounds or group_rounds < (iterations - 1) * extra_rounds:
        return dict(rounds)
    if group_rounds % extra_rounds == 0:
        return {**rounds, "iterations": iterations + group_rounds // extra_rounds}
    assert iterations == 2, "another number of extra rounds would move the decisions"
    return {**rounds, "extra_rounds": extra_rounds + group_rounds}


def migrate_benchmark(record: Record) -> Record:
    """Rename the keys, the benchmark, the contender and the phrases of a benchmark's record."""
    migrated = {BENCHMARK_KEYS.get(key, key): value for key, value in record.items()}
    migrated["benchmark"] = _rename_value(migrated["benchmark"], BENCHMARK_NAMES)
    migrated["command"] = " ".join(_rename_value(part, BENCHMARK_NAMES) for part in migrated["command"].split(" "))
    migrated["contender"] = _rename_value(migrated["contender"], CONTENDERS)
    for key in ("contender", "quantity", "note"):
        for old, new in PHRASES.items():
            migrated[key] = re.sub(rf"(?<!\w){old}(?!\w)", new, migrated[key])
    return migrated


def migrate_line(path: Path, line: str) -> str:
    """Rewrite one line of a records file; keys stay sorted where they were."""
    record = json.loads(line)
    if path.parent.name == "records":
        migrated = migrate_benchmark(record)
    else:
        migrated = migrate_groups(record if path.name in SINCE_0_2 else migrate_run(record))
    return json.dumps(migrated, sort_keys=list(record) == sorted(record))


def list_record_files(root: Path) -> list[Path]:
    """List the committed files of records."""
    return sorted([*(root / "results").glob("*.jsonl"), *(root / "benchmarks" / "records").glob("*.jsonl")])


def migrate_files(root: Path) -> list[str]:
    """Rewrite and rename the files of records; return the names of those that changed."""
    changed = []
    for path in list_record_files(root):
        text = path.read_text()
        migrated = "".join(migrate_line(path, line) + "\n" for line in text.splitlines())
        new = path.with_stem(_rename_value(path.stem, BENCHMARK_NAMES)) if path.parent.name == "records" else path
        if migrated != text or new != path:
            path.write_text(migrated)
            path.rename(new)
            changed.append(str(new.relative_to(root)))
    return changed


def _rename_value(value: Any, names: Mapping[str, str]) -> Any:
    return names.get(value, value) if isinstance(value, str) else value


if __name__ == "__main__":
    print("\n".join(migrate_files(ROOT)) or "nothing to migrate")
