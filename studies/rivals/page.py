"""Write docs/rivals.md from the records alone."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev

from studies.archive import read_records
from studies.methods.runner import RunRecord
from studies.rivals.further_tables import (
    render_ablations,
    render_aurocs,
    render_costs,
    render_pooled,
    render_receivers,
)
from studies.rivals.runner import (
    Choice,
    Files,
    get_choice,
    get_score_name,
    list_final_runs,
    list_rate_runs,
    list_trials,
    read_frozen,
)
from studies.rivals.setups import SETUPS
from studies.rivals.starts import choose_starts, describe_starts
from studies.rivals.statistics import adjust_holm
from studies.rivals.tables import (
    COLUMNS,
    MARGIN_NLL,
    MARGIN_POINTS,
    SMALL_SILO,
    Part,
    find_accuracy_gain,
    find_nll_gain,
    find_part,
    format_cell,
    format_gain,
    format_table,
    get_comparison,
    identify_record,
    identify_run,
    mean_over_silos,
    select_fedavg_row,
)
from studies.rivals.trial_counts import render_trial_counts
from studies.rivals.trials import FEDAVG, UEFL, Row, Schedule, Setup

NOTES = Path(__file__).with_name("notes.md")
PRIMARY, TRIAL_COUNTS = "<!-- primary comparisons -->", "<!-- numbers of trials -->"  # their places in the notes


def render_page(files: Files) -> str:
    """Render the whole page."""
    frozen, search = read_frozen(files.frozen), read_records(files.search)
    trials, results = read_records(files.trials), read_records(files.results)
    tables = {name: rows for name in SETUPS if (rows := find_rows(name, frozen, trials, results))}
    counting = {name: rows for name, rows in tables.items() if not SETUPS[name].superseded}
    superseded = {name: rows for name, rows in tables.items() if SETUPS[name].superseded}
    notes = NOTES.read_text().strip().replace(TRIAL_COUNTS, render_trial_counts(trials))
    parts = [notes.replace(PRIMARY, render_primary(counting))]
    for name, setup in SETUPS.items():
        if name in counting:
            parts += render_section(name, counting[name], files, trials, results)
        elif name not in tables and (scores := find_trial_scores(name, trials)):
            accuracies = find_trial_scores(name, trials, "validation_accuracy")
            parts += [f"## {setup.title}: trials only", describe_trials(scores, accuracies)]
    if superseded:
        parts += ["## Superseded tables", describe_superseded(superseded), render_primary(superseded)]
    for name, rows in superseded.items():
        parts += render_section(name, rows, files, trials, results)
    for name, setup in SETUPS.items():
        if scores := find_trial_scores(name, search):
            parts += [f"## {setup.title}: the search for UEFL's settings", describe_search(scores)]
    return "\n\n".join(part for part in parts if part) + "\n"


def render_section(
    name: str,
    rows: Mapping[str, Mapping[Part, RunRecord]],
    files: Files,
    trials: Sequence[RunRecord],
    results: Sequence[RunRecord],
) -> list[str]:
    """Render the table of one setup, what was chosen for it, and its further tables."""
    setup, choice = SETUPS[name], get_choice(name, files)
    return [
        f"## {setup.title}",
        describe_choice(name, read_frozen(files.frozen)),
        describe_starts(rows),
        render_table(setup, rows),
        render_domains(setup, rows),
        render_aurocs(setup, rows),
        render_pooled(rows),
        render_costs(name, rows, read_records(files.times)),
        render_receivers(name, choice, trials, results),
        render_ablations(name, choice, trials, results),
    ]


def describe_superseded(names: Iterable[str]) -> str:
    """Say why these tables do not count."""
    lines = [
        "These tables are kept for the record, and neither the first table of this page nor the README counts them:"
    ]
    return "\n".join([*lines, "", *(f"- {SETUPS[name].title}: {SETUPS[name].superseded}." for name in names)])


# --- which records --------------------------------------------------------------------------------------------------


def find_rows(
    name: str, frozen: Mapping[str, RunRecord], trials: Sequence[RunRecord], results: Sequence[RunRecord]
) -> dict[str, dict[Part, RunRecord]]:
    """Return by method the records of its fresh seeds, or of the trial that each fold chose by validation."""
    setup = SETUPS[name]
    if setup.folds:
        return find_fold_rows(name, trials)
    entry = frozen.get(setup.trials_of or name)
    if not entry:
        return {}
    choice = Choice(Schedule(**entry["schedule"]), entry["trials"])
    rows: dict[str, dict[Part, RunRecord]] = {method: {} for method in list_chosen_rows(setup, entry)}
    rates: dict[str, dict[Part, RunRecord]] = {}
    for run in [*list_final_runs(name, choice), *list_rate_runs(name, choice)]:
        matches = run.find_records(results)
        if matches:
            found = rows if run.method in rows else rates
            found.setdefault(run.method, {})[run.seed, 0] = matches[-1]
    if any(len(records) < 2 for records in rows.values()):
        return {}
    rows |= {method: records for method, records in rates.items() if len(records) == len(setup.seeds)}
    ours = {UEFL: rows.pop(UEFL)}  # the last row
    return choose_starts(name, choice, {**rows, **ours}, results)


def list_chosen_rows(setup: Setup, entry: RunRecord) -> dict[str, Row]:
    """Return the rows whose trial is frozen; one that was added to a table later may have none yet."""
    return {method: row for method, row in setup.rows.items() if method in entry["trials"]}


def find_fold_rows(name: str, trials: Sequence[RunRecord]) -> dict[str, dict[Part, RunRecord]]:
    """Return by method and fold the record of the trial with the lowest validation NLL in that fold."""
    setup = SETUPS[name]
    rows: dict[str, dict[Part, RunRecord]] = {method: {} for method in setup.rows}
    own = [record for record in trials if record["setup"] == name]
    by_identity = {identify_record(record): record for record in own}
    for run in list_trials(name, setup.schedules[0]):
        record = by_identity.get(identify_run(run))
        if record is None:
            return {}
        method, part = run.method.rpartition(": ")[0], find_part(run)
        best = rows[method].get(part)
        if best is None or record["validation_nll"] < best["validation_nll"]:
            rows[method][part] = record
    return rows


def find_trial_scores(name: str, trials: Sequence[RunRecord], score: str = "validation_nll") -> dict[str, list[float]]:
    """Return the validation NLL, or another score, of every recorded trial of a setup, by its label."""
    scores = defaultdict[str, list[float]](list)
    for record in trials:
        if record["setup"] == name:
            scores[record["method"]].append(record[score])
    return dict(scores)


def describe_trials(losses: Mapping[str, Sequence[float]], accuracies: Mapping[str, Sequence[float]]) -> str:
    """Describe the trials of a setup of which not every row has run with fresh seeds."""
    lines = ["Not every row has run with fresh seeds. The trials have these values on validation examples:", ""]
    lines += ["| trial | NLL (lower is better) | accuracy, % | runs |", "| --- | --- | --- | --- |"]
    for label, values in losses.items():
        lines.append(f"| {label} | {mean(values):.4f} | {100 * mean(accuracies[label]):.2f} | {len(values)} |")
    return "\n".join(lines)


def describe_search(scores: Mapping[str, Sequence[float]]) -> str:
    """List what was tried, the best first."""
    lines = [
        "Before the trials were fixed, these settings were tried, on seeds of their own. Labels of UEFL say what "
        "differs from the first setting in `studies/rivals/setups.py`. NLL on validation examples, lower is better:",
        "",
        "| settings | validation NLL | runs |",
        "| --- | --- | --- |",
    ]
    ranked = sorted(scores.items(), key=lambda item: mean(item[1]))
    return "\n".join([*lines, *(f"| {label} | {mean(v):.4f} | {len(v)} |" for label, v in ranked)])


# --- one table ------------------------------------------------------------------------------------------------------


def describe_choice(name: str, frozen: Mapping[str, RunRecord]) -> str:
    """Describe which schedule and trials validation chose."""
    setup = SETUPS[name]
    if all(len(row.trials) == 1 for row in setup.rows.values()):
        return "All settings are those of the preset; nothing was chosen here."
    if setup.folds:
        labels = {method: ", ".join(t.label for t in row.trials) for method, row in setup.rows.items()}
        choice = "Every fold chooses the trial of each method by its own validation patients."
        return choice + "\n\n" + "\n".join(f"- {method}: {text}" for method, text in labels.items())
    entry = frozen[setup.trials_of or name]
    lines = [f"Schedule: {entry['schedule']['schedule']}, learning rate {entry['schedule']['lr']:g}."]
    if setup.trials_of:
        lines[0] += f" Schedule and trials are those of `{setup.trials_of}`; nothing was chosen here."
    if setup.chosen_by == "accuracy_within_nll":
        lines[0] += (
            " Of the trials whose validation NLL is not above FedAvg's lowest, every method takes the one with the "
            "lowest validation error rate."
        )
    for method, row in list_chosen_rows(setup, entry).items():
        scores = entry[get_score_name(setup)][method]
        cells = [f"{re.sub(r'^1 epochs', '1 epoch', t.label)} {s:.4f}" for t, s in zip(row.trials, scores, strict=True)]
        cells[entry["trials"][method]] = f"**{cells[entry['trials'][method]]}**"
        score = "validation NLL" if setup.chosen_by == "nll" else "validation error rate"
        lines.append(f"- {method} ({score}): {', '.join(cells)}")
    return "\n".join([lines[0], "", *lines[1:]])


def render_table(setup: Setup, rows: Mapping[str, Mapping[Part, RunRecord]]) -> str:
    """Render means over seeds, and UEFL's paired gain over every other method."""
    columns = [
        c for c in COLUMNS if all(c.metric in s for r in rows[UEFL].values() for s in _select_large_silos(r).values())
    ]
    head = ["method", *(c.title for c in columns), "UEFL's gain in mA, points", "in NLL, %", "in scaled NLL, %"]
    lines = [head]
    compare = get_comparison(setup)
    for method, records in rows.items():
        cells = [format_cell(list(records.values()), c) for c in columns]
        gains = [""] * 3
        if method != UEFL:
            parts = sorted(set(records) & set(rows[UEFL]))
            gains = [
                format_gain(find_accuracy_gain(rows, method, parts, compare), MARGIN_POINTS, 2),
                format_gain(find_nll_gain(rows, method, parts, compare), MARGIN_NLL, 1),
                format_gain(find_nll_gain(rows, method, parts, compare, "nll_scaled"), MARGIN_NLL, 1),
            ]
        lines.append([method, *cells, *gains])
    return format_table(lines)


def _select_large_silos(record: RunRecord) -> Mapping[str, RunRecord]:
    """Return the silos with enough test examples of every class for all metrics."""
    silos: Mapping[str, RunRecord] = record["silos"]
    return {name: silo for name, silo in silos.items() if name != SMALL_SILO}


def render_domains(setup: Setup, rows: Mapping[str, Mapping[Part, RunRecord]]) -> str:
    """Render the accuracy of every domain, and UEFL's gain over FedAvg there."""
    domains = list(dict.fromkeys(s["domain"] for s in next(iter(rows[UEFL].values()))["silos"].values()))
    head = ["mA by domain, %", *domains]
    lines = [head]
    compare = get_comparison(setup)

    def mean_of_domain(record: RunRecord, domain: str) -> float:
        return 100.0 * mean(float(s["accuracy"]) for s in record["silos"].values() if s["domain"] == domain)

    for method, records in rows.items():
        values = {d: [mean_of_domain(r, d) for r in records.values()] for d in domains}
        lines.append([method, *(f"{mean(v):.2f} ± {stdev(v):.2f}" for v in values.values())])
    parts = sorted(set(rows[UEFL]) & set(rows[FEDAVG]))
    gains = [compare(*([mean_of_domain(rows[m][p], d) for p in parts] for m in (UEFL, FEDAVG))) for d in domains]
    lines.append(["UEFL − FedAvg", *(f"{g.mean:+.2f} [{g.low:+.2f}, {g.high:+.2f}]" for g in gains)])
    return format_table(lines)


def render_primary(tables: Mapping[str, Mapping[str, Mapping[Part, RunRecord]]]) -> str:
    """Render the primary comparisons, adjusted over the tables, and beside them that with the strongest other row."""
    if not tables:
        return "No table is complete yet."
    gains = {}
    for name, rows in tables.items():
        rival = select_fedavg_row(SETUPS[name], rows)
        parts = sorted(set(rows[UEFL]) & set(rows[rival]))
        gains[name] = find_nll_gain(rows, rival, parts, get_comparison(SETUPS[name]))
    adjusted = adjust_holm({name: gain.p_value for name, gain in gains.items()})
    lines = [
        ["data", "seeds", "UEFL's gain over FedAvg, %", "p, adjusted", "UEFL's gain over the strongest other row, %"]
    ]
    for name, gain in gains.items():
        count = (
            f"{len(tables[name][UEFL])}"
            if not SETUPS[name].folds
            else f"{len(SETUPS[name].seeds)} × {SETUPS[name].folds} folds"
        )
        rival = select_fedavg_row(SETUPS[name], tables[name])
        title = SETUPS[name].title + (f"; FedAvg in the form *{rival}*" if rival != FEDAVG else "")
        best = describe_best_rival(SETUPS[name], tables[name])
        lines.append([title, count, format_gain(gain, MARGIN_NLL, 1), f"{adjusted[name]:.2g}", best])
    return format_table(lines)


def describe_best_rival(setup: Setup, rows: Mapping[str, Mapping[Part, RunRecord]]) -> str:
    """Name the row with the lowest NLL on test examples besides UEFL, and UEFL's gain over it."""
    nll = {m: mean(mean_over_silos(r, "nll") for r in records.values()) for m, records in rows.items() if m != UEFL}
    best = min(nll, key=lambda method: nll[method])
    parts = sorted(set(rows[UEFL]) & set(rows[best]))
    return f"{best}: {format_gain(find_nll_gain(rows, best, parts, get_comparison(setup)), MARGIN_NLL, 1)}"
