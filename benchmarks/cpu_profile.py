"""CPU time by kind of operation, compared with the rate that one core reaches in a large matrix product."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.harness import OURS, Measurement, measure_seconds

OPERATION_KINDS = {  # kind: parts of operation names; the first kind that matches counts
    "convolutions": ("convolution", "conv2d"),
    "products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"),
    "pooling": ("max_pool",),
    "norms": ("batch_norm", "layer_norm"),
    "all other operations": ("",),
}


def profile_operations(work: Callable[[], object], quantity: str, *, rounds_per_call: int = 1) -> Iterator[Measurement]:
    """Profile `work` by kind of operation, with the rate of convolutions and products; the rest is Python."""
    with FlopCounterMode(display=False) as counter:
        work()
    flops = dict.fromkeys(OPERATION_KINDS, 0)
    for operation, count in counter.get_flop_counts()["Global"].items():
        flops[classify_operation(str(operation).replace("aten.", "aten::"))] += count
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:  # it measures wall time
        start = time.perf_counter()
        work()
        total = time.perf_counter() - start
    seconds = dict.fromkeys(OPERATION_KINDS, 0.0)
    for event in profiler.key_averages():
        seconds[classify_operation(event.key)] += event.self_cpu_time_total / 1e6
    for kind, spent in {**seconds, "Python": total - sum(seconds.values())}.items():
        rate = f", {flops[kind] / spent / 1e9:.0f} GFLOP/s" if flops.get(kind) else ""
        note = f"{100 * spent / total:.0f} %{rate}"
        yield Measurement(OURS, f"{quantity}: {kind}", "s", [spent / rounds_per_call], note)
    yield Measurement("this core", "a product of 1024 x 1024 matrices", "GFLOP/s", measure_matmul())


def classify_operation(operation: str) -> str:
    """Return the kind of an operation."""
    return next(kind for kind, parts in OPERATION_KINDS.items() if any(part in operation for part in parts))


def measure_matmul(repeats: int = 5) -> list[float]:
    """Measure GFLOP/s of a product larger than any in these networks."""
    a = torch.ones(1024, 1024)
    a @ a
    return [2 * 1024**3 / measure_seconds(lambda: a @ a) / 1e9 for _ in range(repeats)]
