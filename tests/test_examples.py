"""Every example runs as a user would run it."""

import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from harness import make_clients, make_short_method, run_rounds

from uefl.engines.stacked.stacked_engine import StackedEngine

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_runs(example: Path) -> None:
    done = subprocess.run([sys.executable, "-W", "error", str(example)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout


def test_a_method_of_a_user_agrees_on_every_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engines of one process; tests/flower has the same test on Flower."""
    monkeypatch.setattr("uefl.engines.stacked.compiler.COMPILE_BACKEND", "aot_eager")
    torch._dynamo.reset()
    (example,) = (path for path in EXAMPLES if path.stem == "your_algorithm")
    method = make_short_method(runpy.run_path(str(example))["Momentum"])
    expected, _ = run_rounds(method, make_clients(method, dtype=torch.float64))
    for engine in (StackedEngine, partial(StackedEngine, max_stack_size=1, use_compiler=True)):
        server, _ = run_rounds(method, make_clients(method, dtype=torch.float64, engine=engine))  # type: ignore[arg-type]
        for name, tensor in expected.model_state.items():
            torch.testing.assert_close(server.model_state[name], tensor, rtol=1e-9, atol=1e-9)
