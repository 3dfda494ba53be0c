"""Write docs/methods.md from the records alone, with the hand-written notes of notes.md between the tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

from studies.methods.runner import POOLED_METRICS, QUALITY_METRICS, RunRecord, StudyRun, list_lr_search, select_lr
from studies.methods.setups import FEDAVG, SEEDS, SETUPS, Setup
from uefl.algorithms import METHODS
from uefl.core.metrics import METRICS
from uefl.experiment.experiment import RESULTS_VERSION, Precision
from uefl.experiment.records import DEFAULT_AGGREGATION

NOTES = Path(__file__).with_name("notes.md")


class Exchange(NamedTuple):
    """What a method exchanges, as text; the bytes are measured."""

    up: str = "model"
    down: str = "model"
    client_state: str = "nothing"
    dropout: str = "as the paper's"  # where the samples of mE come from
    measured: bool = True  # whether the bytes were measured


EXCHANGES: dict[str, Exchange] = {  # every method of the registry
    "fedavg": Exchange(),
    "fedprox": Exchange(),
    "scaffold": Exchange("model, change of its control variate", "model, mean control variate", "control variate"),
    "fedbn": Exchange("model without batch norm", "the same", "batch norm"),
    "fedper": Exchange("encoder", "encoder", "classifier", "added"),
    "fine-tuning": Exchange("model", "model; at the end, once more", "model, after the last round", "added"),
    "ditto": Exchange(client_state="its own model", dropout="added"),
    "ifca": Exchange("its model; before, k losses", "k models, its model", "nothing", "added"),
    "fedsr": Exchange(client_state="class priors", dropout="added"),
    "fediir": Exchange("model; before, a gradient of the head", "model, mean gradient; before, model", dropout="added"),
    "fedcr": Exchange("body, class statistics", "body, class priors", "head", "added"),
    "vhl": Exchange("model", "model, virtual images", dropout="added"),
    "fedbr": Exchange("model, projection", "model, projection, pseudo-images", dropout="added"),
    "distrans": Exchange("model without offset", "the same", "offset", "added"),
    "pmfl": Exchange("query gradient of the shared rows", "shared rows", "the other rows", "added"),
    "fccl": Exchange("logits of public images", "mean logits", "everything", "added"),
    "vq-fedavg": Exchange("model, its codewords", "the same"),
    "uefl": Exchange("model, its codewords", "the same"),
    "local-only": Exchange("nothing", "nothing", "everything"),
    "centralized": Exchange("all its images, once", "model at the end", "nothing", measured=False),
}
QUALITY_LABELS = (*QUALITY_METRICS, *POOLED_METRICS)
QUALITY_DIGITS = {m.column: m.digits for m in METRICS if m.column in QUALITY_LABELS}
CODEBOOK_PAIRS = {  # rows of one table without and with a codebook
    "rotated": {
        FEDAVG: "UEFL",
        "FedProx": "FedProx with codebook",
        "FedBN": "FedBN with codebook",
        "FedSR": "FedSR with codebook",
    },
    "rotated-sgd": {FEDAVG: "UEFL", "SCAFFOLD": "SCAFFOLD with codebook"},
    "rotated-personal": {"FedPer": "FedPer with codebook", "Fine-tuning": "Fine-tuning with codebook"},
}


def render_page(
    run_records: Sequence[RunRecord], timings: Sequence[RunRecord], half_precision: Sequence[RunRecord] = ()
) -> str:
    """Render the whole page; the last records are those of the same study in bfloat16."""
    notes, run_records = split_sections(NOTES.read_text()), choose_versions(run_records)
    parts = [notes[""]]
    for name in SETUPS:
        parts += [
            f"## {SETUPS[name].title}",
            notes.get(name, ""),
            describe_protocol(name, run_records),
            render_table(name, run_records, timings),
        ]
        parts += [describe_lr_search(name, run_records), describe_neural_collapse(name, run_records)]
    parts += ["## With and without a codebook", notes.get("codebook", ""), render_codebook_table(run_records)]
    if half_precision:
        table = render_precision_table(run_records, choose_versions(half_precision))
        parts += ["## In half precision", notes.get("half precision", ""), table]
    return "\n\n".join(part for part in parts if part) + "\n"


def split_sections(text: str) -> dict[str, str]:
    """Split the notes by their headings `## <setup>`; the text above the first heading opens the page."""
    first, *rest = text.split("\n## ")
    return {"": first.strip(), **{part.partition("\n")[0].strip(): part.partition("\n")[2].strip() for part in rest}}


def choose_versions(run_records: Sequence[RunRecord]) -> list[RunRecord]:
    """Return for every setup the records of one results version, as those of the present version.

    It is the version with most runs and, of equal ones, the newest: a table never mixes two versions, and says which it
    has. The notes name what has changed since.
    """
    if all("version_when_run" in record for record in run_records):
        return list(run_records)  # they are chosen already
    chosen: list[RunRecord] = []
    for name in dict.fromkeys(record["setup"] for record in run_records):
        own = [record for record in run_records if record["setup"] == name]
        runs: dict[int, set[tuple[str, int]]] = {record["results_version"]: set() for record in own}
        for record in own:
            runs[record["results_version"]].add((record["method"], record["seed"]))
        best = max(runs, key=lambda version: (len(runs[version]), version))
        chosen += [
            {**record, "results_version": RESULTS_VERSION, "version_when_run": record.get("version_when_run", best)}
            for record in own
            if record["results_version"] == best
        ]
    return chosen


def find_runs(
    name: str, method: str, run_records: Sequence[RunRecord], precision: Precision = "auto"
) -> dict[int, RunRecord]:
    """Find the finished runs of a row, by seed."""
    run_records = choose_versions(run_records)
    lr = select_lr(name, run_records, precision)
    if lr is None:
        return {}
    runs = [StudyRun(name, method, seed, SETUPS[name].make_experiment(method, lr, seed, precision)) for seed in SEEDS]
    return {run.seed: record for run in runs for record in run.find_records(run_records)}


def find_common_seeds(*rows: Mapping[int, RunRecord]) -> list[int]:
    """Find the seeds that all rows have."""
    return [seed for seed in SEEDS if all(seed in row for row in rows)]


def format_incomplete(seeds: Sequence[int]) -> str:
    """Mark results of fewer seeds than all."""
    return "" if len(seeds) == len(SEEDS) else f" (incomplete: {len(seeds)} of {len(SEEDS)} seeds)"


# --- one setup ----------------------------------------------------------------------------------------------------


def describe_protocol(name: str, run_records: Sequence[RunRecord]) -> str:
    """Describe what is the same for all methods of a setup."""
    setup, lr = SETUPS[name], select_lr(name, run_records)
    local, method = setup.local, setup.make_experiment(FEDAVG, setup.learning_rates[0], 0).method
    clients = f"{method.clients_per_round} silos per round, " if method.clients_per_round else ""
    optimizer = f"SGD with momentum {local.momentum:g}" if local.optimizer == "sgd" else "Adam"
    epochs = f"{local.epochs} local epoch{'s' if local.epochs > 1 else ''}"
    return (
        f"Setup `{name}`: {method.total_rounds} rounds, {clients}{epochs} of batch size {local.batch_size}, "
        f"{optimizer}, learning rate {f'{lr:g}' if lr else 'not selected yet'}; encoder "
        f"`{setup.model.encoder}`{f', width {setup.model.width}' if setup.model.width else ''}, hidden layer "
        f"{setup.model.hidden_size}, layer norm: {'yes' if setup.model.feature_norm == 'layer' else 'no'}. Accuracy: "
        f"{'mean of the last 5 rounds' if setup.summary_level == DEFAULT_AGGREGATION else 'last round'}."
        f"{_describe_version(name, run_records)}"
    )


def _describe_version(name: str, run_records: Sequence[RunRecord]) -> str:
    """Say which results version the records of a setup have."""
    versions = {r["version_when_run"] for r in run_records if r["setup"] == name and "version_when_run" in r}
    return f" Results version {versions.pop()}." if len(versions) == 1 else ""


def render_table(name: str, run_records: Sequence[RunRecord], timings: Sequence[RunRecord]) -> str:
    """Render the table of a setup."""
    setup = SETUPS[name]
    devices = list(dict.fromkeys(timing["device"] for timing in timings if timing["setup"] == name))
    fedavg_runs = find_runs(name, FEDAVG, run_records)
    levels = [record[setup.summary_level] for record in fedavg_runs.values()]
    quality = [label for label in QUALITY_LABELS if levels and all(label in level for level in levels)]
    head = ["method", "mA, %", "− FedAvg", "mE", *quality, "dropout", "up", "down", "stays at the silo"]
    head += [f"time per round, {device}" for device in devices] + ["paper"]
    rows = [head, ["---"] * len(head)]
    for method, variant in setup.methods.items():
        runs, exchange = find_runs(name, method, run_records), _describe_exchange(setup, method)
        costs = {device: _find_timing(name, method, device, timings) for device in devices}
        fedavg_costs = {device: _find_timing(name, FEDAVG, device, timings) for device in devices}
        rows.append(
            [
                method,
                *_format_results(setup, runs, fedavg_runs, quality),
                exchange.dropout,
                f"{exchange.up}{_format_bytes(runs, 'bytes_up', costs) if exchange.measured else ''}",
                f"{exchange.down}{_format_bytes(runs, 'bytes_down', costs) if exchange.measured else ''}",
                exchange.client_state,
                *(_format_ratio(costs[device], fedavg_costs[device]) for device in devices),
                variant.paper_result or "–",
            ]
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _describe_exchange(setup: Setup, method: str) -> Exchange:
    row = setup.methods[method]
    exchange, built = EXCHANGES[row.method], METHODS[row.method](**{"local": setup.local, **row.method_fields})
    if built.codebook and "codewords" not in exchange.up:
        down = exchange.down if exchange.down == "the same" else f"{exchange.down}, its codewords"
        exchange = exchange._replace(up=f"{exchange.up}, its codewords", down=down)
    if row.method_fields.get("offsets") == "average":
        exchange = exchange._replace(up="model, offset", client_state="nothing")
    if row.method_fields.get("server_update") == "average":
        exchange = exchange._replace(up="shared rows")
    if row.model.get("ensemble_size", 1) > 1:
        exchange = exchange._replace(up="5 models", down="5 models", dropout="none: 5 members")
    if row.model.get("dropout") == 0.0:
        exchange = exchange._replace(dropout="none: one prediction")
    return exchange


def _format_results(
    setup: Setup, runs: Mapping[int, RunRecord], fedavg_runs: Mapping[int, RunRecord], quality: Sequence[str]
) -> list[str]:
    seeds = find_common_seeds(runs, fedavg_runs)
    if len(seeds) < 2:
        return [format_incomplete(seeds).strip(), "", "", *("" for _ in quality)]
    accuracy, entropy = ({s: runs[s][setup.summary_level][m] for s in seeds} for m in ("mA", "mE"))
    others = [[runs[s][setup.summary_level].get(label, math.nan) for s in seeds] for label in quality]
    gains = [100 * (accuracy[s] - fedavg_runs[s][setup.summary_level]["mA"]) for s in seeds]
    return [
        _format_mean_std([100 * a for a in accuracy.values()], 2) + format_incomplete(seeds),
        "" if runs == fedavg_runs else _format_mean_std(gains, 2, sign=True),
        _format_mean_std(list(entropy.values()), 3),
        *(_format_mean_std(values, QUALITY_DIGITS[label]) for label, values in zip(quality, others)),
    ]


def _format_mean_std(values: Sequence[float], digits: int, *, sign: bool = False) -> str:
    """Format mean ± standard deviation over seeds."""
    return f"{mean(values):{'+' if sign else ''}.{digits}f} ± {stdev(values):.{digits}f}"


def _format_bytes(runs: Mapping[int, RunRecord], key: str, timings: Mapping[str, RunRecord | None]) -> str:
    """Format the measured bytes of one silo in one round: its training message in the runs, and its queries."""
    if not runs or not mean(record[key] for record in runs.values()):
        return ""
    costs = [timing["round"] for timing in timings.values() if timing]
    queries = costs[0][f"{key}_with_queries"] - costs[0][key] if costs else 0
    return f" ({(mean(record[key] for record in runs.values()) + queries) / 1e6:.2f} MB)"


def _find_timing(name: str, method: str, device: str, timings: Sequence[RunRecord]) -> RunRecord | None:
    matches = [t for t in timings if (t["setup"], t["method"], t["device"]) == (name, method, device)]
    return matches[-1] if matches else None  # the newest counts


def _format_ratio(cost: RunRecord | None, baseline: RunRecord | None) -> str:
    if not cost or not baseline:
        return "–"
    return f"× {cost['round']['seconds'] / baseline['round']['seconds']:.2f}"


def describe_lr_search(name: str, run_records: Sequence[RunRecord]) -> str:
    """Describe the validation accuracies that selected the learning rate."""
    search = [(run, record) for run in list_lr_search([name]) for record in run.find_records(run_records)]
    if not search:
        return ""
    accuracies = [f"{run.experiment.method.local.lr:g}: {100 * r['validation_accuracy']:.2f} %" for run, r in search]
    return f"Validation accuracy of FedAvg, seed 0, by learning rate: {', '.join(accuracies)}."


def describe_neural_collapse(name: str, run_records: Sequence[RunRecord]) -> str:
    """Describe when training error was zero, where it was measured."""
    lines = []
    for method in SETUPS[name].methods:
        for seed, record in find_runs(name, method, run_records).items():
            if "train_accuracy" in record:
                zero, final = record["zero_error"], f"{100 * record['train_accuracy']:.2f} %"
                when = (
                    f"zero error in round {zero['round']}, mA then {100 * zero['mA']:.2f} %"
                    if zero
                    else "never zero error"
                )
                lines.append(f"{method}, seed {seed}: {when}; training accuracy at the end {final}.")
    return "\n".join(lines)


# --- the codebook in other methods --------------------------------------------------------------------------------


def render_codebook_table(run_records: Sequence[RunRecord]) -> str:
    """Render every method that supports a codebook, without and with it."""
    head = ["method", "setup", "mA without, %", "mA with, %", "difference", "mE without", "mE with", "difference"]
    rows = [head, ["---"] * len(head)]
    for name, pairs in CODEBOOK_PAIRS.items():
        for method, method_with_codebook in pairs.items():
            baseline, with_codebook = (find_runs(name, row, run_records) for row in (method, method_with_codebook))
            level = SETUPS[name].summary_level
            seeds = find_common_seeds(baseline, with_codebook)
            cells = [format_incomplete(seeds).strip(), *[""] * 5]
            if len(seeds) > 1:
                cells = [
                    *_format_pair(baseline, with_codebook, seeds, level, "mA", 100, 2),
                    *_format_pair(baseline, with_codebook, seeds, level, "mE", 1, 3),
                ]
                cells[0] += format_incomplete(seeds)
            label = f"{method} (with: UEFL)" if method_with_codebook == "UEFL" else method
            rows.append([label, f"`{name}`", *cells])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _format_pair(
    baseline: Mapping[int, RunRecord],
    with_codebook: Mapping[int, RunRecord],
    seeds: Sequence[int],
    level: str,
    metric: str,
    scale: float,
    digits: int,
) -> list[str]:
    a, b = ([scale * row[seed][level][metric] for seed in seeds] for row in (baseline, with_codebook))
    return [
        _format_mean_std(a, digits),
        _format_mean_std(b, digits),
        _format_mean_std([y - x for x, y in zip(a, b)], digits, sign=True),
    ]


# --- another precision ----------------------------------------------------------------------------------------------


def render_precision_table(run_records: Sequence[RunRecord], half_precision: Sequence[RunRecord]) -> str:
    """Render for every setup how much accuracy in bfloat16 differs from that in the tables."""
    head = ["setup", "rows", "learning rate", "mA in bf16 − mA, points, mean of rows", "largest difference of a row"]
    rows = [[*head, "its standard deviation over seeds, in the table"]]
    rows.append(["---"] * len(rows[0]))
    for name in SETUPS:
        differences: dict[str, float] = {}
        for method in SETUPS[name].methods:
            full, half = find_runs(name, method, run_records), find_runs(name, method, half_precision, "bf16")
            if len(find_common_seeds(full, half)) == len(SEEDS):
                differences[method] = mean(_read_accuracies(name, half)) - mean(_read_accuracies(name, full))
        if differences:
            largest = max(differences, key=lambda method: abs(differences[method]))
            deviation = stdev(_read_accuracies(name, find_runs(name, largest, run_records)))
            rates = [select_lr(name, run_records), select_lr(name, half_precision, "bf16")]
            rows.append(
                [
                    f"`{name}`",
                    f"{len(differences)} of {len(SETUPS[name].methods)}",
                    "the same" if rates[0] == rates[1] else f"{rates[1]:g} instead of {rates[0]:g}",
                    f"{mean(differences.values()):+.2f}",
                    f"{differences[largest]:+.2f} ({largest})",
                    f"{deviation:.2f}",
                ]
            )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _read_accuracies(name: str, runs: Mapping[int, RunRecord]) -> list[float]:
    return [100 * runs[seed][SETUPS[name].summary_level]["mA"] for seed in SEEDS]
