"""The list of breakages fits the code: every text occurs once, every test exists, and none needs Flower."""

import subprocess
import sys

import pytest
from harness import import_or_skip

mutants = import_or_skip("mutants.breakages", reason="mutants/ is not part of the package")
BREAKAGES = mutants.read_breakages()


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda breakage: breakage.name)
def test_every_breakage_fits_the_code_and_changes_it(breakage):
    assert mutants.find_mismatch(breakage) == ""
    assert breakage.new != breakage.old
    source = (mutants.ROOT / breakage.file).read_text()
    compile(source.replace(breakage.old, breakage.new), breakage.file, "exec")
    assert breakage.tests
    assert breakage.reason
    assert not any("tests/flower" in test for test in breakage.tests)


def test_every_test_of_a_breakage_exists():
    tests = sorted({test for breakage in BREAKAGES for test in breakage.tests})
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", "--collect-only", *tests]
    result = subprocess.run(command, cwd=mutants.ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_floor_of_methods_engines_and_runs_has_breakages():
    floors = {breakage.file.split("/")[1] for breakage in BREAKAGES}
    assert floors >= {path.stem for path in mutants.LISTS} == {"algorithms", "core", "data", "engines", "experiment"}
    assert len({(breakage.file, breakage.old, breakage.new) for breakage in BREAKAGES}) == len(BREAKAGES)
