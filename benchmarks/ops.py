"""Where a CPU's time goes, by kind of operation, beside what the core reaches in a large matrix product."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.frame import US, Figure, seconds

OPS = {  # what an operation's name says it does; the first that fits
    "convolutions": ("convolution", "conv2d"),
    "products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"),
    "pooling": ("max_pool",),
    "norms": ("batch_norm", "layer_norm"),
    "all other operations": ("",),
}


def shares(work: Callable[[], object], figure: str, *, per: int = 1) -> Iterator[Figure]:
    """Ours by kind, and the rate of a kind that multiplies; the rest is Python. `per` rounds in one call of `work`."""
    with FlopCounterMode(display=False) as counter:
        work()
    flops = dict.fromkeys(OPS, 0)
    for op, count in counter.get_flop_counts()["Global"].items():
        flops[kind_of(str(op).replace("aten.", "aten::"))] += count
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:  # its clock is the wall's
        started = time.perf_counter()
        work()
        spent = time.perf_counter() - started
    kinds = dict.fromkeys(OPS, 0.0)
    for event in seen.key_averages():
        kinds[kind_of(event.key)] += event.self_cpu_time_total / 1e6
    for kind, busy in {**kinds, "Python": spent - sum(kinds.values())}.items():
        rate = f", {flops[kind] / busy / 1e9:.0f} GFLOP/s" if flops.get(kind) else ""
        yield Figure(US, f"{figure}: {kind}", "s", [busy / per], f"{100 * busy / spent:.0f} %{rate}")
    yield Figure("this core", "a product of 1024 x 1024 matrices", "GFLOP/s", product())


def kind_of(op: str) -> str:
    return next(kind for kind, names in OPS.items() if any(name in op for name in names))


def product(times: int = 5) -> list[float]:
    """GFLOP/s of a product larger than any that these networks have."""
    a = torch.ones(1024, 1024)
    a @ a
    return [2 * 1024**3 / seconds(lambda: a @ a) / 1e9 for _ in range(times)]
