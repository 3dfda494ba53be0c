"""Break a copy of the package on purpose, once per breakage, and check that the named tests fail.

The tests must pass on the unbroken package first. The exit code is 1 if a breakage survives, does not fit the code any
more, or stops its tests in another way than by a failed test.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import groupby
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mutants.breakages import ROOT, Breakage, apply_breakage, find_mismatch, read_breakages

COPIED = ("uefl", "tests", "pyproject.toml")  # all that the named tests need
TIMEOUT = 300  # seconds for the tests of one breakage
KILLED, SURVIVED, MISMATCH, INVALID = "killed", "SURVIVED", "DOES NOT APPLY", "INVALID"
Job = TypeVar("Job")


class Outcome(NamedTuple):
    """What happened to one breakage, or to the tests of one file on the unbroken package."""

    name: str
    status: str
    detail: str  # one line
    output: str = ""  # of pytest
    seconds: float = 0.0


def main() -> int:
    options, console = parse_options(), Console(highlight=False, soft_wrap=True)
    breakages = [b for b in read_breakages() if not options.only or b.name in options.only]
    if options.list:
        for breakage in breakages:
            console.print(escape(f"{breakage.name}: {breakage.reason} ({breakage.file})"))
        return 0
    started = time.perf_counter()
    mismatches = {b.name: error for b in breakages if (error := find_mismatch(b))}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, make_progress(console) as progress:
        copies = [copy_tree(Path(folder) / str(i)) for i in range(options.workers)]
        applicable = [b for b in breakages if b.name not in mismatches]
        failures = [o for o in run_jobs(check_unbroken, group_by_file(applicable), copies, progress) if o.status]
        for failure in failures:
            console.print(f"{failure.name} fails without any breakage:\n{escape(failure.output)}")
        if failures:
            return 1
        outcomes = [Outcome(name, MISMATCH, error) for name, error in mismatches.items()]
        outcomes += run_jobs(run_breakage, applicable, copies, progress)
    for outcome in outcomes:
        if outcome.status != KILLED:
            console.print(f"\n[bold]{outcome.name}: {outcome.status}[/bold], {escape(outcome.detail)}")
            console.print(escape(outcome.output[-3000:]))
    counts = Counter(outcome.status for outcome in outcomes)
    summary = ", ".join(f"{count} {status.lower()}" for status, count in counts.items())
    console.print(f"{len(outcomes)} breakages: {summary}; {time.perf_counter() - started:.0f} s")
    return 0 if set(counts) <= {KILLED} else 1


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m mutants", description=__doc__)
    names = {breakage.name for breakage in read_breakages()}
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="breakages to run; default: all")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="parallel runs; default: all cores")
    parser.add_argument("--list", action="store_true", help="print the breakages and run nothing")
    options = parser.parse_args()
    if unknown := set(options.only) - names:
        parser.error(f"unknown breakage {', '.join(sorted(unknown))}; --list prints all names")
    if options.workers < 1:
        parser.error(f"workers={options.workers} must be at least 1")
    return options


def make_progress(console: Console) -> Progress:
    bar = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*bar, console=console)


def copy_tree(target: Path) -> Path:
    """Copy what the tests need, with the times of files and without caches."""
    target.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, target / name)
    return target


def group_by_file(breakages: Iterable[Breakage]) -> list[list[str]]:
    """Return all named tests, one group per file."""
    tests = sorted({test for breakage in breakages for test in breakage.tests})
    return [list(group) for _, group in groupby(tests, key=lambda test: test.partition("::")[0])]


def run_jobs(
    run: Callable[[Job, Path], Outcome], jobs: Sequence[Job], copies: Sequence[Path], progress: Progress
) -> Iterator[Outcome]:
    """Run jobs in parallel, each in a free copy of the tree, and print each outcome that has a status."""
    free: SimpleQueue[Path] = SimpleQueue()
    for copy in copies:
        free.put(copy)

    def run_in_copy(job: Job) -> Outcome:
        copy, started = free.get(), time.perf_counter()
        try:
            return run(job, copy)._replace(seconds=time.perf_counter() - started)
        finally:
            free.put(copy)

    bar = progress.add_task("tests on the unbroken package" if run is check_unbroken else "breakages", total=len(jobs))
    pool = ThreadPoolExecutor(len(copies))
    try:
        for future in as_completed([pool.submit(run_in_copy, job) for job in jobs]):
            outcome = future.result()
            progress.advance(bar)
            if outcome.status:
                line = f"{outcome.status:8} {outcome.name} ({outcome.seconds:.0f} s): {outcome.detail}"
                progress.console.print(escape(line))
            yield outcome
    finally:
        pool.shutdown(cancel_futures=True)


def check_unbroken(tests: Sequence[str], copy: Path) -> Outcome:
    """Run tests on the unbroken package; no status means that all passed."""
    code, output = run_pytest(tests, copy, write_bytecode=True)
    return Outcome(tests[0].partition("::")[0], "FAILED" if code else "", f"exit code {code}", output)


def run_breakage(breakage: Breakage, copy: Path) -> Outcome:
    """Apply a breakage and run its tests."""
    with apply_breakage(breakage, copy):
        code, output = run_pytest(breakage.tests, copy)
    if code == 1:
        failed = re.search(r"^FAILED \S*::(.*)$", output, re.M)
        return Outcome(breakage.name, KILLED if failed else INVALID, failed[1] if failed else "a fixture fails", output)
    if code == 0:
        return Outcome(breakage.name, SURVIVED, breakage.reason, output)
    detail = f"no result after {TIMEOUT} s" if code is None else f"the tests do not run (exit code {code} of pytest)"
    return Outcome(breakage.name, INVALID, detail, output)


def run_pytest(tests: Sequence[str], copy: Path, *, write_bytecode: bool = False) -> tuple[int | None, str]:
    """Run tests in a copy of the tree; return the exit code, None after too long, and what pytest printed.

    Broken code writes no bytecode, so that nothing of it stays in a cache.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:xdist", "-p", "no:cacheprovider", "--tb=short", *tests]
    environment = {
        **os.environ,
        "PYTHONPATH": str(copy),  # before the installed package
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "COLUMNS": "200",
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    if not write_bytecode:
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
    try:
        result = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired as e:
        return None, str(e.stdout or "")
    return result.returncode, result.stdout + result.stderr


if __name__ == "__main__":
    sys.exit(main())
