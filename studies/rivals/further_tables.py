"""Further tables of docs/rivals.md: AUROC of every silo, what each method costs, and codewords for other silos."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import mean

from studies.methods.runner import RunRecord
from studies.rivals.runner import RECEIVER_ROW, Choice, list_receiver_runs, list_table_parts, make_run
from studies.rivals.setups import SETUPS
from studies.rivals.starts import count_starts
from studies.rivals.tables import (
    COLUMNS,
    MARGIN_NLL,
    MARGIN_POINTS,
    Part,
    find_accuracy_gain,
    find_nll_gain,
    find_part,
    format_gain,
    format_mean,
    format_table,
    get_comparison,
    identify_record,
    identify_run,
    mean_over_silos,
)
from studies.rivals.trials import FEDAVG, UEFL, Setup

SMALL_SILO = "Switzerland"  # a hospital that has few patients without heart disease


def render_aurocs(setup: Setup, rows: Mapping[str, Mapping[Part, RunRecord]]) -> str:
    """Render the AUROC of every silo with its 95 % interval over folds, and UEFL's gain over FedAvg there."""
    compare = get_comparison(setup)

    def collect(method: str, silo: str) -> dict[Part, float]:
        return {p: r["silos"][silo]["auroc"] for p, r in rows[method].items() if "auroc" in r["silos"][silo]}

    silos = [name for name in next(iter(rows[UEFL].values()))["silos"] if len(collect(UEFL, name)) > 1]
    if not silos:
        return ""
    lines = [["AUROC by silo", *silos]]
    for method in rows:
        values = [list(collect(method, silo).values()) for silo in silos]
        means = [compare(v, [0.0] * len(v)) for v in values]
        lines.append([method, *(f"{m.mean:.3f} [{m.low:.3f}, {min(m.high, 1.0):.3f}]" for m in means)])
    pairs = [(collect(UEFL, silo), collect(FEDAVG, silo)) for silo in silos]
    gains = [compare([own[p] for p in own], [theirs[p] for p in own]) for own, theirs in pairs]
    lines.append(["UEFL − FedAvg", *(f"{g.mean:+.3f} [{g.low:+.3f}, {g.high:+.3f}]" for g in gains)])
    note = ""
    if SMALL_SILO in silos:
        count = len(collect(UEFL, SMALL_SILO))
        note = (
            f"\n\n{SMALL_SILO} has 8 patients without heart disease, and some folds have none of them ({count} of "
            f"{len(rows[UEFL])} folds count): its AUROC is reported, not judged."
        )
    return format_table(lines) + note


def render_costs(name: str, rows: Mapping[str, Mapping[Part, RunRecord]], times: Sequence[RunRecord]) -> str:
    """Render what each method costs: codewords, values of a silo's own, bytes, and seconds on every device."""
    own = {(r["method"], r["device"]): r["round"] for r in times if r["setup"] == name}  # the newest record counts
    devices = list(dict.fromkeys(device for _, device in own))
    head = ["cost", "codewords of the silo with most", "own parameters", "MB per round and silo"]
    head += [f"s per round, {device} (× FedAvg)" for device in devices]
    lines = [head]
    for method, records in rows.items():
        costs = [own.get((method, device)) for device in devices]
        parameters = next((f"{c['own_parameters']}" for c in costs if c), "–")
        codewords = mean(r["num_codewords"][1] for r in records.values())
        starts = count_starts(records)
        megabytes = starts * (
            next((count_megabytes(c) for c in costs if c), None)
            or mean((r["bytes_up"] + r["bytes_down"]) / 1e6 for r in records.values())
        )
        cells = [method, f"{codewords:.0f}", parameters, f"{megabytes:.2f}"]
        for device, cost in zip(devices, costs, strict=True):
            reference = own.get((FEDAVG, device))
            if cost is None or reference is None:
                cells.append("–")
            else:
                seconds = starts * cost["seconds"]
                cells.append(f"{seconds:.3f} ({seconds / reference['seconds']:.2f})")
        lines.append(cells)
    return format_table(lines)


def count_megabytes(cost: RunRecord) -> float:
    """Return the megabytes of one silo in a timed round, in both directions, with all queries of the server."""
    return float(cost["bytes_up_with_queries"] + cost["bytes_down_with_queries"]) / 1e6


def render_receivers(
    name: str, choice: Choice | None, trials: Sequence[RunRecord], results: Sequence[RunRecord]
) -> str:
    """Render UEFL with codewords for other silos than its own choice, and the gain of that choice."""
    setup, columns = SETUPS[name], [c for c in COLUMNS if c.metric in ("accuracy", "nll")]
    rows = find_receiver_rows(name, choice, trials, results) if choice else {}
    if len(rows) < 2 or not choice:  # no other silos were compared
        return ""
    own = setup.rows[UEFL].trials[choice.trials[UEFL]].method["codebook"].extend
    head = ["silos that get codewords", *(c.title for c in columns), f"gain of `{own}` in mA, points", "in NLL, %"]
    lines = [head]
    for extend, records in rows.items():
        cells = [format_mean([c.scale * mean_over_silos(r, c.metric) for r in records.values()], c) for c in columns]
        pair = {UEFL: rows[own], extend: records}
        gains = [
            find(pair, extend, sorted(records), get_comparison(setup)) for find in (find_accuracy_gain, find_nll_gain)
        ]
        texts = (
            ["", ""]
            if extend == own
            else [format_gain(gains[0], MARGIN_POINTS, 2), format_gain(gains[1], MARGIN_NLL, 1)]
        )
        lines.append([f"`{extend}`", *cells, *texts])
    label = setup.rows[UEFL].trials[choice.trials[UEFL]].label
    table = format_table(lines)
    return f"UEFL ({label}) with codewords for other silos (`extend`):\n\n{table}"


def find_receiver_rows(
    name: str, choice: Choice, trials: Sequence[RunRecord], results: Sequence[RunRecord]
) -> dict[str, dict[Part, RunRecord]]:
    """Return by value of `extend` the records of UEFL, or nothing until all have run."""
    setup, number = SETUPS[name], choice.trials[UEFL]
    trial, recorded = setup.rows[UEFL].trials[number], trials if setup.folds else results
    own_row = f"{UEFL}: {trial.label}" if setup.folds else UEFL
    own = [
        make_run(name, UEFL, number, choice.schedule, seed, fold=fold, row=own_row)
        for seed, fold in list_table_parts(setup)
    ]
    pairs = [(trial.method["codebook"].extend, run, recorded) for run in own]
    pairs += [(run.method.removeprefix(RECEIVER_ROW), run, results) for run in list_receiver_runs(name, choice)]
    rows = defaultdict[str, dict[Part, RunRecord]](dict)
    for extend, run, records in pairs:
        matches = [r for r in records if identify_record(r) == identify_run(run) and r["setup"] == name]
        if not matches:
            return {}
        rows[extend][find_part(run)] = matches[-1]
    return dict(rows)
