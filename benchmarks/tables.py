"""Write the tables of benchmarks/README.md and docs/speed.md from the records: `python -m benchmarks.tables`.

A table stands between `<!-- table NAME -->` and `<!-- end -->`. It shows the last run of a benchmark on one kind of
device. `find_unsupported_ratios` finds ratios in the text around the tables, in README.md and in CHANGELOG.md that the
last runs do not have.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from benchmarks import trees_table
from benchmarks.harness import OURS, RECORDS, ROOT

Record = Mapping[str, Any]
PAGES = (ROOT / "benchmarks" / "README.md", ROOT / "docs" / "speed.md")
QUOTING_PAGES = (*PAGES, ROOT / "README.md", ROOT / "CHANGELOG.md")
REFERENCES = {"seed-stack": "one seed"}  # the contender of a benchmark that the text compares with; else ours
KINDS = {"cpu": "", "gpu": "NVIDIA"}  # how the name of a device begins
_BLOCK = re.compile(r"(<!-- table (?P<name>[\w -]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_NUMBER = r"\d+(?:\.\d+)?"
_RATIOS = re.compile(rf"(?<![\w.])((?:{_NUMBER}(?:, and |, or |, | and | or ))*{_NUMBER})(?:x\b(?! \d)| times\b)")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n\s*\n|\n(?=- )")
_WITHOUT_RECORD = re.compile(r"temporary|no record|that script|log\.md")  # a figure that says where else it is from
_OF_EARLIER_RECORD = re.compile(r"earlier (?:run|record)|records? before")
_BULLET = re.compile(r"^- `([\w-]+)`(.*?)(?=^- |^\S|\Z)", re.MULTILINE | re.DOTALL)


def read_last_run(benchmark: str, kind: str) -> list[Record]:
    """Return the records of the last run of a benchmark on a kind of device; none if it was never run there."""
    return next(reversed(read_runs(benchmark, kind)), [])


def read_runs(benchmark: str, kind: str) -> list[list[Record]]:
    """Return the records of every run of a benchmark on a kind of device, the last run last."""
    path = RECORDS / f"{benchmark}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    records = [record for record in map(json.loads, lines) if get_kind(record) == kind]
    return [[r for r in records if r["date"] == date] for date in sorted({r["date"] for r in records})]


def get_kind(record: Record) -> str:
    """Return whether a record is of a CPU or of a GPU."""
    return "gpu" if str(record["device"]).startswith(KINDS["gpu"]) else "cpu"


def list_ratios(records: Iterable[Record], reference: str = OURS) -> dict[tuple[str, str], float]:
    """Return each contender's value over that of the reference, by quantity and contender."""
    records = list(records)
    base = {r["quantity"]: r["value"] for r in records if r["contender"] == reference}
    return {
        (r["quantity"], r["contender"]): r["value"] / base[r["quantity"]]
        for r in records
        if r["contender"] != reference and base.get(r["quantity"])
    }


def render_run(benchmark: str, kind: str) -> str:
    """Render the last run of a benchmark: where and with which versions it was made, and all its values."""
    records = read_last_run(benchmark, kind)
    if not records:
        return f"No record yet: `python -m benchmarks {benchmark}` makes one."
    ratios = list_ratios(records)
    rows = []
    for r in records:
        ratio = ratios.get((r["quantity"], r["contender"]))
        span = f"{min(r['repeats']):.4g} – {max(r['repeats']):.4g}" if len(r["repeats"]) > 1 else ""
        over = f"{ratio:.3g}x" if ratio is not None else ""
        rows.append([r["quantity"], r["contender"], f"{r['value']:.4g}", span, r["unit"], over, r["note"]])
    head = ["quantity", "contender", "median", "range", "unit", f"over {OURS}", "note"]
    return f"{describe_run(records[0])}\n\n{render_table(head, rows)}"


def describe_run(record: Record) -> str:
    """Describe where a run was made, with which versions and by which command."""
    versions = {"torch": record["torch"], **record.get("versions", {})}
    if "uefl" in record:
        versions = {"uefl": f"{record['uefl']} {record['commit']}".strip(), **versions}
    elif "recorded_in" in record:  # older records do not name the version of uefl, but a commit added them
        versions = {"recorded in": record["recorded_in"], **versions}
    before = f"{record['load_before'][0]} before and " if "load_before" in record else ""
    parts = [f"{record['device']}, {record['date'][:10]}, load {before}{record['load'][0]} after"]
    parts += [", ".join(f"{name} {version}" for name, version in versions.items())]
    parts += [f"`{record['command']}`"]
    return f"{record['benchmark']} ({'; '.join(parts)}):"


def render_columns(benchmark: str, kind: str, columns: Mapping[str, str], head: str) -> str:
    """Render one row per contender and one column per quantity that begins with the given text."""
    records = read_last_run(benchmark, kind)
    if not records:
        return f"No record yet: `python -m benchmarks {benchmark}` makes one."
    rows = []
    for contender in dict.fromkeys(r["contender"] for r in records):
        own = [r for r in records if r["contender"] == contender]
        values = [next((r for r in own if str(r["quantity"]).startswith(text)), None) for text in columns]
        if all(values):
            rows.append([contender, *(format_value(r["value"]) for r in values if r)])
    return f"{describe_run(records[0])}\n\n{render_table([head, *columns.values()], rows)}"


def render_seed_stack() -> str:
    """Render the time of one seed and of ten by method, and their ratio."""
    records = read_last_run("seed-stack", "gpu")
    if not records:
        return "No record yet: `python -m benchmarks seed-stack` makes one."
    rows = []
    for quantity in dict.fromkeys(r["quantity"] for r in records):
        one, ten = (r["value"] for r in records if r["quantity"] == quantity)
        rows.append([quantity.partition(",")[0], format_value(one), format_value(ten), f"{ten / one:.2f}"])
    head = ["method", "s, one seed", "s, ten seeds", "ratio"]
    return f"{describe_run(records[0])}\n\n{render_table(head, rows)}"


def format_value(value: float) -> str:
    """Return three digits, without an exponent."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def render_table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Render a table in Markdown."""
    head = list(head)
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))


class PageTable(NamedTuple):
    """A table of a page, and the last run that it shows."""

    benchmark: str
    kind: str
    render: Callable[[], str]


def _list_tables() -> Iterator[tuple[str, PageTable]]:
    def show(render: Callable[..., str], benchmark: str, kind: str, *arguments: Any) -> PageTable:
        return PageTable(benchmark, kind, partial(render, benchmark, kind, *arguments))

    for path in sorted(RECORDS.glob("*.jsonl")):
        for kind in KINDS:
            yield f"{path.stem} {kind}", show(render_run, path.stem, kind)
    yield "ten-thousand-clients cpu", show(render_run, "ten-thousand-clients", "cpu")
    yield "trees", PageTable("trees", "", trees_table.render_table)  # of several runs
    times = {"one later round": "CPU s per round", "whole run": "CPU s per run of six rounds"}
    yield "frameworks summary", show(render_columns, "frameworks", "cpu", times, "system")
    walls = {f"{name}: one later": f"s per round, {name}" for name in ("nine silos", "100 clients")}
    yield "processes summary", show(render_columns, "processes", "cpu", walls, "system")
    for benchmark in ("many-clients", "large-network"):
        rounds = {"a whole round": "s per round"}
        yield f"{benchmark} summary", show(render_columns, benchmark, "gpu", rounds, "system")
    yield "seed-stack summary", PageTable("seed-stack", "gpu", render_seed_stack)
    starts = {
        f"{count} clients: {quantity}": f"{label}, {count} clients"
        for quantity, label in (("begin", "s to the first round"), ("one later", "CPU s per round"), ("peak", "MB"))
        for count in (100, 10_000)
    }
    memories = {
        f"{count} clients: resident memory amid the {which} round": f"MB amid the {which} round, {count} clients"
        for count in (100, 10_000)
        for which in ("first", "last")
    }
    yield "clients memory", show(render_columns, "ten-thousand-clients", "cpu", memories, "system")
    yield "clients summary", show(render_columns, "ten-thousand-clients", "cpu", starts, "system")


def update_page(text: str) -> str:
    """Return a page with every table rendered anew from the records."""
    tables = dict(_list_tables())

    def replace_block(match: re.Match[str]) -> str:
        return f"{match[1]}{tables[match['name']].render()}\n{match[3]}"

    return _BLOCK.sub(replace_block, text)


def find_unsupported_ratios(text: str) -> list[str]:
    """Return ratios such as 1.6x, `4.6 times` or `5.6 and 9.1 times` that the last runs do not have.

    A ratio is supported if a contender's value over the reference's, or its inverse, rounds to it. A bullet that begins
    with the name of a benchmark quotes its run on the kind of device that the heading or sentence above the bullet
    names. Other text quotes the runs of the tables next to it, or any last run on a page without tables. A sentence
    about an earlier record may quote any run. Figures without a record say so.
    """
    wrong = []
    plain = _BLOCK.sub("", text)
    gpu_start = plain.find("On an NVIDIA")
    for match in filter(_is_of_benchmark, _BULLET.finditer(plain)):
        is_gpu = 0 <= gpu_start < match.start() or not read_last_run(match[1], "cpu")
        wrong += _find_unsupported(match[2], [(match[1], "gpu" if is_gpu else "cpu")])
    tables, parts = dict(_list_tables()), _BLOCK.split(text)  # text, three groups of a table, text, and so on
    runs = [tables[name][:2] for name in parts[2::4]]
    for i, between in enumerate(parts[::4]):
        other = _BULLET.sub(lambda match: "" if _is_of_benchmark(match) else match[0], between)
        quoted = runs[max(i - 1, 0) : i + 1] or [table[:2] for table in tables.values()]
        wrong += _find_unsupported(other, quoted)
    return wrong


def _is_of_benchmark(bullet: re.Match[str]) -> bool:
    return (RECORDS / f"{bullet[1]}.jsonl").exists()


def _find_unsupported(text: str, runs: Sequence[tuple[str, str]]) -> list[str]:
    """Return the ratios in a text that none of the last runs of (benchmark, kind of device) has."""
    last, every = (set(_list_both_ways(runs, slice(first, None))) for first in (-1, 0))
    source = " or ".join(f"{benchmark} on {kind}" for benchmark, kind in runs) if len(runs) < 3 else "any benchmark"
    return [
        f"{source}: {quoted}"
        for sentence in _SENTENCE_END.split(text)
        if not _WITHOUT_RECORD.search(sentence)
        for ratios in _RATIOS.findall(" ".join(sentence.split()))
        for quoted in re.findall(_NUMBER, ratios)
        if not _has_ratio(every if _OF_EARLIER_RECORD.search(" ".join(sentence.split())) else last, quoted)
    ]


def _list_both_ways(runs: Iterable[tuple[str, str]], selected: slice) -> Iterator[float]:
    """Yield the ratios of the selected runs of (benchmark, kind of device), and their inverses."""
    for benchmark, kind in runs:
        for records in read_runs(benchmark, kind)[selected]:
            for ratio in list_ratios(records, REFERENCES.get(benchmark, OURS)).values():
                yield from (ratio, 1 / ratio) if ratio else (ratio,)


def _has_ratio(ratios: Iterable[float], quoted: str) -> bool:
    return any(f"{ratio:.{len(quoted.partition('.')[2])}f}" == quoted for ratio in ratios)


def main() -> None:
    """Write all tables anew, and name the ratios in the text that no longer hold."""
    for page in PAGES:
        page.write_text(update_page(page.read_text()))
    for page in QUOTING_PAGES:
        for ratio in find_unsupported_ratios(page.read_text()):
            print(f"{page.relative_to(ROOT)} quotes a ratio that the last record does not have: {ratio}")


if __name__ == "__main__":
    main()
