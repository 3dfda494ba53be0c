"""Tables and sentences about finished runs, from their summaries and records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from uefl.algorithms.uncertainty_report import NOT_COMPARABLE
from uefl.core.metrics import (
    QUALITY_METRICS,
    TWO_CLASS_METRICS,
    Metric,
    describe_columns,
    describe_means,
    find_worst,
    select_table_metrics,
)
from uefl.experiment.chance import describe_chance, is_at_chance, mean_accuracy
from uefl.experiment.records import DEFAULT_AGGREGATION, Record, choose_aggregation, describe_rounds
from uefl.experiment.run_folder import JOINED, PARENT, RunFolder

Summary = Mapping[str, Any]  # of one aggregation over rounds
INTERVAL_NOTE = (
    "Intervals: AUROC by DeLong's variance and AUPRC by Boyd et al. on the logit scale, sensitivity by Wilson for the "
    "chosen threshold; means of their ends over the rounds of the table"
)


class Column(NamedTuple):
    """A column of a run in the table."""

    key: str  # of a silo's or domain's summary
    heading: str
    digits: int


def print_runs(runs: Mapping[str, Path], console: Console) -> None:
    """Print what happened in finished runs, their table, and what its labels mean."""
    local = {name: RunFolder(path).read_header()["experiment"]["method"]["local"] for name, path in runs.items()}
    lines = describe_joins(runs) + describe_extensions(runs) + describe_groups(runs) + describe_own_models(runs)
    lines += describe_lost_rounds(runs) + describe_chance_level(runs)
    for line in lines + describe_local_differences(local) + describe_samples(runs):
        console.print(line, soft_wrap=True, markup=False)
    aggregation = choose_aggregation(len(summary["round"]) for summary in _read_summaries(runs))
    summaries = _read_summaries(runs, aggregation)
    rounds = describe_rounds(len(summary["round"]) for summary in summaries)
    console.print(f"Test examples, {rounds}", style="italic")
    make_silo_table = partial(make_comparison_table, aggregation=aggregation)
    for group in group_runs_by_width(runs, console, make_silo_table):
        console.print(make_silo_table(group))
    two_classes = any(map(has_two_classes, summaries))
    means = describe_means(with_codebook=any(map(has_codewords, summaries)), two_classes=two_classes)
    console.print(means, soft_wrap=True)
    if any(_has_quality(summary) for summary in summaries):
        console.print(make_quality_table(runs, aggregation))
        console.print(describe_columns(), soft_wrap=True)
    if two_classes:
        make_intervals = partial(make_interval_table, aggregation=aggregation)
        for group in group_runs_by_width(runs, console, make_intervals):
            console.print(make_intervals(group))
        console.print(INTERVAL_NOTE, soft_wrap=True)
        for line in describe_positive_classes(runs):
            console.print(line, soft_wrap=True, markup=False)


def describe_positive_classes(runs: Mapping[str, Path]) -> list[str]:
    """Return a line with the class that the metrics of two classes are about, for each pair of classes in the runs."""
    pairs = dict.fromkeys(tuple(RunFolder(path).read_header()["class_names"]) for path in runs.values())
    return [
        f"AUROC, AUPRC and sensitivity are about class '{pair[1]}'; the other class is '{pair[0]}'"
        for pair in pairs
        if len(pair) == 2
    ]


def describe_local_differences(local: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a sentence with the settings of local training in which runs differ, by name of the run."""
    first = next(iter(local.values()))
    different = [field for field in first if any(settings.get(field) != first[field] for settings in local.values())]
    if not different:
        return []
    runs = "; ".join(
        f"{name}: {', '.join(f'{field}={settings.get(field)}' for field in different)}"
        for name, settings in local.items()
    )
    advice = " ".join(f"local.{field}=" for field in different)
    return [f"Local training differs between methods ({runs}). Set {advice} to train all in the same way."]


def make_comparison_table(runs: Mapping[str, Path], aggregation: str = DEFAULT_AGGREGATION) -> Table:
    """Make a table of runs side by side: per silo, per domain, and means over all silos."""
    summaries = _read_summaries(runs, aggregation)
    table = Table(title=escape(next(iter(runs))) if len(runs) == 1 else None, title_justify="left")
    table.add_column("")
    for name, summary in zip(runs, summaries):
        for column in _list_columns(summary):
            table.add_column(_make_heading(name, column.heading, runs), justify="right", no_wrap=True)
    is_sample = any("sample" in summary for summary in summaries)  # no rows of silos: each round measured others
    for domain in summaries[0]["domains"]:
        members = [name for name, silo in summaries[0]["silos"].items() if silo["domain"] == domain]
        if is_sample and members == [domain]:
            continue
        for silo_name in members if members != [domain] and not is_sample else []:  # its own domain has one row
            table.add_row(
                escape(silo_name), *_format_cells([s["silos"].get(silo_name, {}) for s in summaries], summaries)
            )
        rows = [summary["domains"].get(domain, {}) for summary in summaries]
        table.add_row(*_make_bold(domain, *_format_cells(rows, summaries)), end_section=True)
    has_codebook = any(map(has_codewords, summaries))
    two_classes = any(map(has_two_classes, summaries))
    if two_classes:
        cells = _format_cells([_find_worst_values(s) for s in summaries], summaries)
        table.add_row("worst silo", *cells, end_section=True)
    metrics = select_table_metrics(with_codebook=has_codebook, two_classes=two_classes)
    labels = ", ".join(metric.label for metric in metrics)
    title = f"{labels}; most codewords" if has_codebook else labels
    table.add_row(*_make_bold(title, *_format_cells([_mean_over_silos(s) for s in summaries], summaries)))
    return table


def _make_heading(name: str, heading: str, runs: Mapping[str, Path]) -> str:
    """Return the heading of a run's column; the title of the table names a single run."""
    return heading if len(runs) == 1 else f"{escape(name)}\n{heading}"


def group_runs_by_width(
    runs: Mapping[str, Path], console: Console, make_table: Callable[[Mapping[str, Path]], Table]
) -> list[dict[str, Path]]:
    """Divide runs into as few tables as fit the console, so that no column is cut off."""
    groups: list[dict[str, Path]] = []
    unbounded = console.options.update(width=10_000)
    for name, folder in runs.items():
        wider = {**groups[-1], name: folder} if groups else {}
        if wider and Measurement.get(console, unbounded, make_table(wider)).minimum <= console.width:
            groups[-1] = wider
        else:
            groups.append({name: folder})
    return groups


def _read_summaries(runs: Mapping[str, Path], aggregation: str = DEFAULT_AGGREGATION) -> list[Summary]:
    return [RunFolder(folder).read_summary()[aggregation] for folder in runs.values()]


def _list_columns(summary: Summary) -> list[Column]:
    has_codebook = has_codewords(summary)
    metrics = select_table_metrics(with_codebook=has_codebook, two_classes=has_two_classes(summary))
    columns = [Column(metric.name, metric.column, metric.digits) for metric in metrics]
    return columns + [Column("num_codewords", "codewords", 0)] * has_codebook


def _mean_over_silos(summary: Summary) -> dict[str, float]:
    """Return the means over silos by metric, and the largest number of codewords."""
    metrics = select_table_metrics(with_codebook=True, two_classes=has_two_classes(summary))
    means = {metric.name: summary[metric.label] for metric in metrics if metric.label in summary}
    return {**means, "num_codewords": _max_codewords(summary)}


def make_interval_table(runs: Mapping[str, Path], aggregation: str = DEFAULT_AGGREGATION) -> Table:
    """Make a table of the intervals of the metrics of two classes: per silo, worst silo, all test examples together."""
    summaries = _read_summaries(runs, aggregation)
    title = "95 % intervals" if len(runs) > 1 else f"95 % intervals, {escape(next(iter(runs)))}"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    columns = [(name, summary, m) for name, summary in zip(runs, summaries) for m in TWO_CLASS_METRICS]
    for name, _, metric in columns:
        table.add_column(_make_heading(name, metric.column, runs), justify="right", no_wrap=True)
    for silo in () if any("sample" in summary for summary in summaries) else summaries[0]["silos"]:
        table.add_row(escape(silo), *(format_interval(s["silos"].get(silo, {}), m.name) for _, s, m in columns))
    table.add_row("worst silo", *(format_interval(_find_worst_row(s, m), m.name) for _, s, m in columns))
    table.add_section()
    pooled = [format_interval(s.get("all_silos", {}), m.name) for _, s, m in columns]
    table.add_row(*_make_bold("all silos together", *pooled))
    return table


def make_quality_table(runs: Mapping[str, Path], aggregation: str = DEFAULT_AGGREGATION) -> Table:
    """Make a table of the quality of uncertainty: mean over silos, and of all test examples together."""
    table = Table(title="Quality of uncertainty", title_justify="left")
    table.add_column("")
    for metric in QUALITY_METRICS:
        table.add_column(metric.column, justify="right", no_wrap=True)
    for name, summary in zip(runs, _read_summaries(runs, aggregation)):
        means = {metric.name: summary[metric.label] for metric in QUALITY_METRICS if metric.label in summary}
        table.add_row(f"{escape(name)}, mean over silos", *_format_quality(means))
        table.add_row("all silos together", *_format_quality(summary.get("all_silos", {})), end_section=True)
    return table


def _format_quality(row: Mapping[str, float]) -> list[str]:
    return [f"{row[m.name]:.{m.digits}f}" if m.name in row else "–" for m in QUALITY_METRICS]


def _has_quality(summary: Summary) -> bool:
    return any(metric.label in summary for metric in QUALITY_METRICS)


def format_interval(row: Mapping[str, float], name: str) -> str:
    """Format the interval of a metric of two classes, or a dash if a row has none."""
    if f"{name}_low" not in row:
        return "–"
    return f"{row[f'{name}_low']:.2f}–{row[f'{name}_high']:.2f}"


def _find_worst_values(summary: Summary) -> dict[str, float]:
    """Return the worst value over silos of every metric that has a better direction."""
    metrics = select_table_metrics(with_codebook=False, two_classes=True)
    rows = {metric.name: _find_worst_row(summary, metric) for metric in metrics if metric.better}
    return {name: row[name] for name, row in rows.items() if row}


def _find_worst_row(summary: Summary, metric: Metric) -> Mapping[str, float]:
    """Return the metrics of the silo with the worst value of a metric."""
    row: Mapping[str, float] = summary["silos"].get(find_worst(summary["silos"], metric), {})
    return row


def has_two_classes(summary: Summary) -> bool:
    """Return whether a run has the metrics of two classes."""
    return any(metric.label in summary for metric in TWO_CLASS_METRICS)


def has_codewords(summary: Summary) -> bool:
    """Return whether a silo of a run has codewords."""
    return _max_codewords(summary) > 0


def _max_codewords(summary: Summary) -> float:
    return float(max(silo["num_codewords"] for silo in summary["silos"].values()))


def _format_cells(rows: Sequence[Mapping[str, float]], summaries: Sequence[Summary]) -> list[str]:
    """Format one row of the table; each run has its own columns."""
    return [
        f"{row[column.key]:.{column.digits}f}" if column.key in row else "–"
        for row, summary in zip(rows, summaries)
        for column in _list_columns(summary)
    ]


def _make_bold(*cells: str) -> list[str]:
    return [f"[bold]{escape(cell)}[/bold]" for cell in cells]


def describe_joins(runs: Mapping[str, Path]) -> list[str]:
    """Describe which silo joined which finished run, and what happened to the other silos."""
    lines = []
    for name, folder in runs.items():
        header = RunFolder(folder).read_header()
        if PARENT not in header:
            continue
        entry = header[JOINED][-1]
        is_fixed = entry["settings"]["others"] == "fixed"
        others = "nothing of the other silos changed" if is_fixed else "all silos trained further rounds"
        lines.append(f"{name}: {entry['silo']} joined {header[PARENT]}; {others}")
    return lines


def describe_extensions(runs: Mapping[str, Path]) -> list[str]:
    """Describe the decisions of runs: which silos are uncertain, and how many codewords silos received or lost."""
    lines = []
    for name, folder in runs.items():
        summary = RunFolder(folder).read_summary()
        untrained = _list_untrained_rounds(folder) if summary["extensions"] else set()
        sentences = [
            (step["round"], 1, describe_decision(step, is_untrained=step["round"] in untrained))
            for step in summary["extensions"]
        ]
        sentences += [(step["round"], 0, describe_revocation(step)) for step in summary.get("revocations", ())]
        lines += [f"{name}: {sentence}" for _, _, sentence in sorted(sentences)]
    return lines


def describe_groups(runs: Mapping[str, Path]) -> list[str]:
    """Describe which silos trained a model together after the last round."""
    lines = []
    for name, folder in runs.items():
        summary = RunFolder(folder).read_summary()
        if groups := summary.get("groups"):
            unlike = summary.get("unlike_silos", [])
            lines.append(f"{name}: after the last shared round, {describe_grouping(groups, unlike)}")
    return lines


def describe_grouping(groups: Sequence[Sequence[str]], unlike: Sequence[str]) -> str:
    """Describe groups of alike silos; those alike to no other are the last group."""
    alike = "; ".join(", ".join(group) for group in groups if list(group) != list(unlike))
    if not alike:
        return f"no two silos are alike, so all trained one model together: {', '.join(unlike)}"
    if len(groups) == 1:
        return f"all silos are alike and trained one model together: {alike}"
    others = f"; silos alike to no other, together: {', '.join(unlike)}" if unlike else ""
    return f"groups of alike silos trained one model each: {alike}{others}"


def describe_own_models(runs: Mapping[str, Path]) -> list[str]:
    """Describe what training in groups and local fine-tuning changed."""
    lines = []
    for name, folder in runs.items():
        if own := RunFolder(folder).read_summary().get("own_models"):
            count, means = own["num_silos"], describe_own_nll(own["nll"], own["shared_nll"])
            lines.append(f"{name}: after the last round, {count} {means}")
    return lines


def describe_own_nll(own: float, shared: float) -> str:
    """Describe the NLL of the silos' own models after the last round, beside that of the shared model."""
    return f"silos have models of their own: mean NLL of test examples {own:.3f}, of the shared model {shared:.3f}"


def _list_untrained_rounds(folder: Path) -> set[int]:
    """Return the rounds after which the model was at chance level."""
    header = RunFolder(folder).read_header()
    records = RunFolder(folder).read_records()
    return {record["round"] for record in records if is_at_chance(mean_accuracy(record), header)}


def describe_chance_level(runs: Mapping[str, Path]) -> list[str]:
    """Describe runs whose model has not learned."""
    lines = []
    for name, folder in runs.items():
        summary = RunFolder(folder).read_summary()[DEFAULT_AGGREGATION]
        if line := describe_chance(float(summary["mA"]), RunFolder(folder).read_header()):
            lines.append(f"{name}: {line}")
    return lines


def describe_samples(runs: Mapping[str, Path]) -> list[str]:
    """Describe runs in which only a sample of the silos measured the model."""
    lines = []
    for name, folder in runs.items():
        if sample := RunFolder(folder).read_summary()[DEFAULT_AGGREGATION].get("sample"):
            counts = " or ".join(map(str, sorted(set(sample["num_evaluated"]))))
            lines.append(
                f"{name}: metrics are of {counts} of {sample['num_silos']} silos per evaluated round, drawn anew each "
                "time (eval_clients)"
            )
    return lines


def describe_lost_rounds(runs: Mapping[str, Path]) -> list[str]:
    """Describe runs in which every reply of a round was rejected."""
    lines = []
    for name, folder in runs.items():
        records = RunFolder(folder).read_records()
        lost = [r["round"] for r in records if r["silos"] and all("rejected" in s for s in _list_replies(r))]
        if lost:
            lines.append(
                f"{name}: in {len(lost)} of {len(records)} rounds (first: round {lost[0]}) no reply could be used, "
                "so the model did not change; a smaller local.lr may help"
            )
    return lines


def _list_replies(record: Record) -> list[Record]:
    """Return the entries of the silos that replied in a round."""
    return [silo for silo in record["silos"].values() if "bytes_up" in silo] or [{}]


_MAX_LISTED_RECEIVERS = 9  # names of more would fill a screen


def describe_decision(step: Mapping[str, Any], *, is_untrained: bool = False) -> str:
    """Describe the decision at the end of an iteration: which silos are uncertain, and which received codewords."""
    result = f"after round {step['round']}, {_describe_uncertain_silos(step)}"
    if is_untrained and not (step["uncertain_silos"] or _is_incomparable(step) or _has_no_entropies(step)):
        result += (
            ", but the model is at chance level, so this has no meaning: set more rounds before the first decision"
        )
    return f"{result}; {_describe_receivers(step)}"


def _describe_uncertain_silos(step: Mapping[str, Any]) -> str:
    """Describe which silos are uncertain, and by which test."""
    decision, names = step.get("decision", {}), step["uncertain_silos"]
    if _has_no_entropies(step):
        return "no silo was compared, since none sent the entropy of validation examples"
    if _is_incomparable(step):
        return (
            "no silo is reported as uncertain: silos predict with tensors of their own, such as batch norm, so a "
            "difference of their entropies may be one of models"
        )
    test = decision.get("test", "")
    tests = {
        "permutation": f"permutation test, level {decision.get('level', 0):g}",
        "standard_errors": f"by {decision.get('min_standard_errors', 0):g} standard errors",
        "none": "threshold without a test",
    }
    test_text = f" ({tests[test]})" if test in tests else ""
    if not names:
        chance = " beyond chance" if test == "permutation" else ""
        return f"no silo is more uncertain than the least uncertain one{chance}{test_text}"
    silos = decision.get("silos", {})
    of_all = f" of {len(silos)}" if silos else ""
    verb = "silo is" if len(names) == 1 and not of_all else "silos is" if len(names) == 1 else "silos are"
    values = {n: f" (entropy {silos[n]['entropy']:.2f}, threshold {decision['threshold']:.2f})" for n in names if silos}
    listed = ", ".join(f"{name}{values.get(name, '')}" for name in names)
    return f"{len(names)}{of_all} {verb} more uncertain than the least uncertain one{test_text}: {listed}"


def _is_incomparable(step: Mapping[str, Any]) -> bool:
    """Return whether no test has compared the silos, since their models differ."""
    return bool(step.get("decision", {}).get("test") == NOT_COMPARABLE)


def _has_no_entropies(step: Mapping[str, Any]) -> bool:
    """Return whether no silo sent the entropy of validation examples."""
    return bool(step.get("decision", {}).get("silos", ...) == {})


def _describe_receivers(step: Mapping[str, Any]) -> str:
    """Describe which silos received codewords, and by which rule; `extend` decides this, and not the test."""
    new_codewords, decision = step["new_codewords"], step.get("decision", {})
    rule = f" (extend={decision['extend']})" if "extend" in decision else ""
    if not new_codewords:
        end = ": the codebook is final" if decision.get("is_codebook_final") else ""
        return f"no silo receives new codewords{rule}{end}"
    counts = " or ".join(map(str, sorted(set(new_codewords.values()))))
    subject = "1 silo receives" if len(new_codewords) == 1 else f"{len(new_codewords)} silos receive"
    each = "" if len(new_codewords) == 1 else " each"
    listed = f": {', '.join(new_codewords)}" if len(new_codewords) <= _MAX_LISTED_RECEIVERS else ""
    return f"{subject} {counts} new codewords{each}{rule}{listed}"


def describe_revocation(step: Mapping[str, Any]) -> str:
    """Describe which silos lost their new codewords after validation."""
    round_number, num_silos, revoked_codewords = step["round"], step["num_silos"], step["revoked_codewords"]
    if not revoked_codewords:
        return (
            f"after round {round_number}, no silo loses its new codewords: none of {num_silos} has a lower NLL without "
            "them"
        )
    return (
        f"after round {round_number}, {len(revoked_codewords)} of {num_silos} silos lose their new codewords, without "
        f"which validation NLL is lower: {', '.join(revoked_codewords)}"
    )
