"""Further tables of docs/rivals.md: AUROC of every silo, what each method costs, and codewords for other silos."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import mean

from studies.methods.runner import RunRecord, StudyRun
from studies.rivals.runner import (
    ABLATION_ROW,
    RECEIVER_ROW,
    Choice,
    list_ablation_runs,
    list_receiver_runs,
    list_table_parts,
    make_run,
)
from studies.rivals.setups import SETUPS
from studies.rivals.starts import count_starts
from studies.rivals.tables import (
    COLUMNS,
    MARGIN_NLL,
    MARGIN_POINTS,
    POOLED_COLUMNS,
    SMALL_SILO,
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
    select_fedavg_row,
)
from studies.rivals.trials import FEDAVG, RATES, UEFL, Setup


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


def render_pooled(rows: Mapping[str, Mapping[Part, RunRecord]]) -> str:
    """Render the ECE and the risk-coverage curve of the test examples of all silos together, if records have them."""
    if not all("all_silos" in record for records in rows.values() for record in records.values()):
        return ""
    columns = [
        c for c in POOLED_COLUMNS if all(c.metric in r["all_silos"] for rs in rows.values() for r in rs.values())
    ]
    lines = [["test examples of all silos together", *(c.title for c in columns)]]
    for method, records in rows.items():
        values = [[c.scale * r["all_silos"][c.metric] for r in records.values()] for c in columns]
        lines.append([method, *(format_mean(v, c) for v, c in zip(values, columns, strict=True))])
    return format_table(lines)


def render_costs(name: str, rows: Mapping[str, Mapping[Part, RunRecord]], times: Sequence[RunRecord]) -> str:
    """Render what each method costs: codewords, values of a silo's own, bytes, and seconds on every device."""
    own = {(r["method"], r["device"]): r["round"] for r in times if r["setup"] == name}  # the newest record counts
    devices = sorted({device for _, device in own}, key=lambda device: (device != "cpu", device))
    fedavg_row = select_fedavg_row(SETUPS[name], rows)  # of its two forms, that of the primary comparison
    head = ["cost", "codewords of the silo with most", "own parameters", "MB per round and silo"]
    head += [f"s per round, {device} (× {fedavg_row})" for device in devices]
    lines = [head]
    for method, records in rows.items():
        if method.endswith(RATES):
            continue  # costs what it costs with its own rates
        costs = [own.get((method, device)) for device in devices]
        parameters = next((f"{c['own_parameters']}" for c in costs if c), "–")
        codewords = mean(r["num_codewords"][1] for r in records.values())
        starts = count_starts(records)
        megabytes = starts * (
            next((count_megabytes(c) for c in costs if c), None)
            or mean((r["bytes_up"] + r["bytes_down"]) / 1e6 for r in records.values())
        )
        cells = [method, f"{codewords:.0f}", parameters, f"{megabytes:.{4 if 0 < megabytes < 0.1 else 2}f}"]
        for device, cost in zip(devices, costs, strict=True):
            reference = own.get((fedavg_row, device))
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
    rows = find_receiver_rows(name, choice, trials, results) if choice else {}
    if len(rows) < 2 or not choice:  # no other silos were compared
        return ""
    trial = SETUPS[name].rows[UEFL].trials[choice.trials[UEFL]]
    table = render_variants(SETUPS[name], "silos that get codewords", rows, f"`{trial.method['codebook'].extend}`")
    return f"UEFL ({trial.label}) with codewords for other silos (`extend`):\n\n{table}"


def render_ablations(
    name: str, choice: Choice | None, trials: Sequence[RunRecord], results: Sequence[RunRecord]
) -> str:
    """Render UEFL without parts of its codebook, and the gain of the whole."""
    if not choice or not SETUPS[name].ablations:
        return ""
    runs = [(run.method.removeprefix(ABLATION_ROW), run, results) for run in list_ablation_runs(name, choice)]
    rows = find_variant_rows(name, choice, UEFL, runs, trials if SETUPS[name].folds else results)
    return render_variants(SETUPS[name], "UEFL without", rows, "UEFL") if rows else ""


def render_variants(setup: Setup, title: str, rows: Mapping[str, Mapping[Part, RunRecord]], own: str) -> str:
    """Render variants of UEFL and the gain of the first one, its own choice, over each."""
    columns = [c for c in COLUMNS if c.metric in ("accuracy", "nll")]
    lines = [[title, *(c.title for c in columns), f"gain of {own} in mA, points", "in NLL, %"]]
    first = next(iter(rows))
    for variant, records in rows.items():
        cells = [format_mean([c.scale * mean_over_silos(r, c.metric) for r in records.values()], c) for c in columns]
        gains = ["", ""]
        if variant != first:
            pair, parts, compare = {UEFL: rows[first], variant: records}, sorted(records), get_comparison(setup)
            accuracy, nll = (
                find_accuracy_gain(pair, variant, parts, compare),
                find_nll_gain(pair, variant, parts, compare),
            )
            gains = [format_gain(accuracy, MARGIN_POINTS, 2), format_gain(nll, MARGIN_NLL, 1)]
        lines.append([variant, *cells, *gains])
    return format_table(lines)


def find_receiver_rows(
    name: str, choice: Choice, trials: Sequence[RunRecord], results: Sequence[RunRecord]
) -> dict[str, dict[Part, RunRecord]]:
    """Return by value of `extend` the records of UEFL, or nothing until all have run."""
    own = SETUPS[name].rows[UEFL].trials[choice.trials[UEFL]].method["codebook"].extend
    runs = [(f"`{run.method.removeprefix(RECEIVER_ROW)}`", run, results) for run in list_receiver_runs(name, choice)]
    return find_variant_rows(name, choice, f"`{own}`", runs, trials if SETUPS[name].folds else results)


def find_variant_rows(
    name: str,
    choice: Choice,
    own_label: str,
    variants: Sequence[tuple[str, StudyRun, Sequence[RunRecord]]],
    recorded: Sequence[RunRecord],
) -> dict[str, dict[Part, RunRecord]]:
    """Return by label the records of UEFL as chosen, then of its variants, or nothing until all have run."""
    setup, number = SETUPS[name], choice.trials[UEFL]
    own_row = f"{UEFL}: {setup.rows[UEFL].trials[number].label}" if setup.folds else UEFL
    own = [
        make_run(name, UEFL, number, choice.schedule, seed, fold=fold, row=own_row)
        for seed, fold in list_table_parts(setup)
    ]
    rows = defaultdict[str, dict[Part, RunRecord]](dict)
    for label, run, records in [*((own_label, run, recorded) for run in own), *variants]:
        matches = [r for r in records if identify_record(r) == identify_run(run) and r["setup"] == name]
        if not matches:
            return {}
        rows[label][find_part(run)] = matches[-1]
    return dict(rows)
