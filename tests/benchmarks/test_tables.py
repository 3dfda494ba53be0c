"""Tables of the benchmarks follow from the last records, and the text quotes no ratio that they do not have."""

import json
import re

import pytest

from benchmarks import tables
from benchmarks.harness import ROOT
from benchmarks.tables import PAGES, QUOTING_PAGES, find_unsupported_ratios, read_last_run, render_run, update_page


def make_record(contender, value, date="2026-01-02T00:00:00", **more):
    record = {"benchmark": "speed", "contender": contender, "quantity": "a round", "value": value, "unit": "s"}
    record |= {"repeats": [value, value + 1], "note": "", "device": "AMD", "load": [1.0], "torch": "2.0"}
    return {**record, "date": date, "command": "python -m benchmarks speed", **more}


@pytest.fixture
def records(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RECORDS", tmp_path)

    def write(*rows):
        (tmp_path / "speed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    return write


def test_a_table_shows_the_last_run_of_its_device_with_versions_and_ratios(records):
    newer = {"date": "2026-02-02T00:00:00"}
    records(
        make_record("uefl", 2.0),
        make_record("peer", 8.0),
        make_record("uefl", 4.0, **newer, versions={"pfl": "0.6"}),
        make_record("peer", 6.0, **newer, versions={"pfl": "0.6"}),
        make_record("uefl", 1.0, date="2026-03-03", device="NVIDIA H200"),
    )
    text = render_run("speed", "cpu")
    assert "torch 2.0, pfl 0.6" in text
    assert "| a round | peer | 6 | 6 – 7 | s | 1.5x |  |" in text
    assert "| 8 |" not in text
    assert [r["value"] for r in read_last_run("speed", "gpu")] == [1.0]


@pytest.mark.parametrize(
    ("fields", "versions"),
    [
        ({}, "load 1.0 after; torch 2.0, pfl 0.6;"),
        ({"recorded_in": "9a8b7c6d5e"}, "load 1.0 after; recorded in 9a8b7c6d5e, torch 2.0, pfl 0.6;"),
        ({"load_before": [0.1, 0.5, 0.5]}, "load 0.1 before and 1.0 after; torch 2.0, pfl 0.6;"),
        ({"uefl": "0.2.0", "commit": ""}, "load 1.0 after; uefl 0.2.0, torch 2.0, pfl 0.6;"),
        ({"uefl": "0.2.0", "commit": "1a2b3c4d5e"}, "load 1.0 after; uefl 0.2.0 1a2b3c4d5e, torch 2.0, pfl 0.6;"),
    ],
)
def test_a_table_names_load_and_versions_where_its_record_does(fields, versions, records):
    records(make_record("uefl", 2.0, versions={"pfl": "0.6"}, **fields))
    assert versions in render_run("speed", "cpu")


def test_a_quoted_ratio_must_be_one_of_the_last_run(records):
    records(make_record("uefl", 2.0), make_record("peer", 5.0))
    assert find_unsupported_ratios("- `speed`: the peer needs 2.5x the time, 2.5\n  times as fast\n") == []
    assert find_unsupported_ratios("- `speed`: 2.50x, 0.4x\n") == []
    assert find_unsupported_ratios("- `speed`: 2.4x\n- `speed`: 3 times as\n  fast\n") == [
        "speed on cpu: 2.4",
        "speed on cpu: 3",
    ]
    assert find_unsupported_ratios("On an NVIDIA H200:\n\n- `speed`: 2.5x\n") == ["speed on gpu: 2.5"]


def test_a_ratio_in_the_text_between_tables_must_be_one_of_theirs(records):
    records(make_record("uefl", 2.0), make_record("peer", 5.0), make_record("uefl", 1.0, device="NVIDIA H200"))
    table = "<!-- table speed cpu -->\n| 9x |\n<!-- end -->\n"
    of_gpu = table.replace("cpu", "gpu")
    assert find_unsupported_ratios(f"It is 2.5 times as fast:\n\n{table}\nSo 2.5x.\n\n{of_gpu}") == []
    text = f"{table}\nNow 2.6 times\nas fast.\n\n{of_gpu}\nAlso 2.5x.\n"
    assert find_unsupported_ratios(text) == ["speed on cpu or speed on gpu: 2.6", "speed on gpu: 2.5"]


@pytest.mark.parametrize(
    ("text", "unsupported"),
    [
        ("It takes 2.5 times with 100 clients.", []),
        ("It takes 2.6 times with 100 clients.", ["2.6"]),
        ("Peers need 2.5 and 9.1 times.", ["9.1"]),
        ("Peers need 3.24, 2.5, and 1.6 times.", ["3.24", "1.6"]),
        ("An earlier run had 4.0\ntimes. Now it is 4.0 times.", ["4.0"]),
        ("The record before had 4.1 times.", ["4.1"]),
        ("Once 7 times (a temporary script, no record). Now 7 times.", ["7"]),
        ("It costs 7 times ([log](docs/log.md#entry)).\n- Now 7 times.", ["7"]),
        ("It was started 3 days ago with 9 silos x 2000 and 5x5 filters.", []),
    ],
)
def test_ratios_of_several_forms_are_found(text, unsupported, records):
    rows = [make_record("uefl", 1.0), make_record("peer", 4.0)]
    newer = {"date": "2026-02-02T00:00:00"}
    records(*rows, make_record("uefl", 2.0, **newer), make_record("peer", 5.0, **newer))
    table = "<!-- table speed cpu -->\n<!-- end -->\n"
    assert find_unsupported_ratios(f"{table}{text}") == [f"speed on cpu: {ratio}" for ratio in unsupported]


def test_a_page_without_tables_may_quote_every_benchmark(records):
    records(make_record("uefl", 2.0), make_record("peer", 5.0))
    assert find_unsupported_ratios("- `momentum` is 2.5 times as fast.\n- Another is 3 times as fast.") == [
        "any benchmark: 3"
    ]


def test_ratios_of_seed_stacks_are_those_over_one_seed(tmp_path, records):
    records(make_record("one seed", 2.0), make_record("10 seeds together", 5.84))
    (tmp_path / "speed.jsonl").rename(tmp_path / "seed-stack.jsonl")
    assert find_unsupported_ratios("- `seed-stack`: 2.92 times, 2.87 times\n") == ["seed-stack on cpu: 2.87"]


def test_a_changed_figure_in_a_table_is_written_anew():
    page = PAGES[0].read_text()
    begin = page.index("<!-- table kmeans cpu -->")
    assert update_page(page[:begin] + page[begin:].replace("scikit-learn", "another", 1)) == update_page(page)


@pytest.mark.records
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_have_the_tables_of_the_last_records(page):
    assert update_page(page.read_text()) == page.read_text(), "run: python -m benchmarks.tables"


@pytest.mark.records
@pytest.mark.parametrize("page", QUOTING_PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages_quote_only_ratios_of_the_last_records(page):
    assert find_unsupported_ratios(page.read_text()) == []


@pytest.mark.records
@pytest.mark.parametrize("page", ["docs/speed.md", "docs/data.md"])
def test_pages_state_the_memory_per_client_of_the_last_record(page):
    records = [r for r in read_last_run("ten-thousand-clients", "cpu") if r["contender"] == "uefl"]
    few, many = (
        next(r["value"] for r in records if r["quantity"] == f"{count} clients: resident memory amid the first round")
        for count in (100, 10_000)
    )
    low, high = map(int, re.search(r"(\d+) to (\d+) KB", (ROOT / page).read_text()).groups())
    assert low <= (many - few) * 1024 / 9900 <= high


@pytest.mark.records
def test_every_record_is_shown():
    page = PAGES[0].read_text()
    for path in tables.RECORDS.glob("*.jsonl"):
        for kind in ("cpu", "gpu"):
            name = "trees" if path.stem == "trees" else f"{path.stem} {kind}"
            assert f"<!-- table {name} -->" in page or not read_last_run(path.stem, kind)


@pytest.mark.records
def test_every_record_names_the_commit_of_the_code_or_the_one_that_added_it():
    for path in tables.RECORDS.glob("*.jsonl"):
        for record in map(json.loads, path.read_text().splitlines()):
            assert re.fullmatch("[0-9a-f]{10}(-dirty)?", record.get("commit") or record.get("recorded_in", "")), path
