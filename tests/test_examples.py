"""Every example runs as a user would run it."""

import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from stripes import clients, play, short

from uefl.engines import Stacked

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_runs(example: Path) -> None:
    done = subprocess.run([sys.executable, "-W", "error", str(example)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout


def test_a_method_of_ones_own_agrees_on_every_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process; tests/flower has it on Flower."""
    monkeypatch.setattr("uefl.engines.compiling.BACKEND", "aot_eager")
    torch._dynamo.reset()
    (example,) = (path for path in EXAMPLES if path.stem == "your_algorithm")
    method = short(runpy.run_path(str(example))["Momentum"])
    expected, _ = play(method, clients(method, dtype=torch.float64))
    for engine in (Stacked, partial(Stacked, chunk=1, compiled=True)):
        found, _ = play(method, clients(method, dtype=torch.float64, engine=engine))  # type: ignore[arg-type]
        for name, tensor in expected.state.items():
            torch.testing.assert_close(found.state[name], tensor, rtol=1e-9, atol=1e-9)
