"""Every example runs as a user would run it."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_runs(example: Path) -> None:
    done = subprocess.run([sys.executable, "-W", "error", str(example)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout
