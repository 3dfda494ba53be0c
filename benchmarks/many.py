"""100 small clients on a GPU: whole rounds (training, average, evaluation, 20 dropout passes) beside an eager loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.eager import Eager
from benchmarks.frame import Figure, Options, seconds
from benchmarks.gpu import Ours, rounds, step_flops
from benchmarks.images import digits, silos
from uefl.algorithms import FedAvg
from uefl.federation import Part, Silo
from uefl.local import Local
from uefl.models.net import Net


def network() -> Net:
    """FedCR's network for CIFAR: two 5x5 convolutions of 64 filters, 1600-1024-1024-10."""
    body = nn.Sequential(
        *(nn.Conv2d(3, 64, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(1600, 1024), nn.ReLU()),
    )
    torch.manual_seed(0)
    return Net(body, 10, (3, 32, 32), hidden=1024, normalise="none")


def coloured(silo: Silo) -> Silo:
    """Digits at the size of CIFAR: 3 x 32 x 32."""

    def changed(part: Part) -> Part:
        return Part(F.pad(part.x, (2, 2, 2, 2)).repeat(1, 3, 1, 1), part.y)

    return Silo(silo.name, changed(silo.train), changed(silo.validation), changed(silo.test))


def run(o: Options) -> Iterator[Figure]:
    count, train, test = (4, 96, 32) if o.tiny else (100, 480, 96)
    local = Local(optimizer="sgd", momentum=0.0, rate=0.01, batch=48, epochs=1)
    method = FedAvg(rounds=50, iterations=1, local=local, watch_local=False)
    where, net = [coloured(s) for s in silos(digits(o.data), count, train, test)], network()
    kinds: tuple[Any, ...] = ("exact",) if o.device == "cpu" else ("bf16", "tf32")
    names = {"bf16": "uefl", "tf32": "uefl, tf32", "exact": "uefl"}
    ours = {names[kind]: Ours(method, net, where, o.device, multiply=kind) for kind in kinds}
    peer = Eager(net, where, local, method.passes, o.device)
    steps = train // local.batch
    yield from rounds(ours, peer, steps * count, o)
    if o.cuda:
        yield from floor(net, peer, count * local.batch, count, steps, o)


def floor(net: Net, peer: Eager, images: int, count: int, steps: int, o: Options) -> Iterator[Figure]:
    """The least a round's training can take: the larger of its operations and its bytes, by this device's own rates."""
    product, copy = rates(o)
    weights = 4 * count * sum(p.numel() for p in net.parameters())
    from uefl.engines.stacking import size_of

    activations = 2 * images * size_of(net.to(o.device), (3, 32, 32)).total
    # Weights: read forward and backward, gradients written and read, weights read and written. Activations: written
    # and read in both directions, in half precision.
    moved = 6 * weights + 4 * activations
    flops = step_flops(peer) * count
    least = max(flops / product, moved / copy) * steps
    what = "operations" if flops / product > moved / copy else "bytes"
    note = f"{what}: {moved / 1e9:.1f} GB, {flops / 1e9:.0f} GFLOP a step"
    yield Figure("floor", "training alone", "s", [least], note)


def rates(o: Options) -> tuple[float, float]:
    """Operations and bytes a second that the device was seen to do, on large products and copies."""
    a = torch.randn(8192, 8192, device=o.device, dtype=torch.bfloat16)
    b: Tensor = torch.empty(2**28, device=o.device)
    c = torch.empty_like(b)

    def best(work: Any, times: int = 20) -> float:
        work()
        return min(seconds(lambda: [work() for _ in range(times)], o.device) / times for _ in range(3))

    return 2 * 8192**3 / best(lambda: a @ a), 2 * b.numel() * 4 / best(lambda: c.copy_(b))
