"""T11 of the paper: parameters (shared and own words apart), time a step and a prediction, FedAvg beside UEFL."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.nn.functional import cross_entropy

from benchmarks.frame import Figure, Options, settle, take_turns
from benchmarks.images import digits
from benchmarks.nets import batch, placed, release, vgg16

# The paper's book for CIFAR10: 64 words for all; two extensions that double give a silo 192 of its own.
SHARED, OWN = 64, 192
PAPER = {"FedAvg": "paper: 14.991 M", "uefl": "paper: 15.491 M"}


def run(o: Options) -> Iterator[Figure]:
    settle(o)
    images, n = digits(o.data), 4 if o.tiny else 256 if o.cuda else 16
    nets = {}
    for who in ("FedAvg", "uefl"):
        net = release(tiny=True) if o.tiny else vgg16("vgg16-bn")
        if who == "uefl":
            net.with_codebook(1, SHARED + OWN)
        nets[who] = placed(net, o.device)
    for who, net in nets.items():
        yield Figure(who, "parameters", "M", [sum(p.numel() for p in net.parameters()) / 1e6], PAPER[who])
    width = nets["uefl"].width
    yield Figure("uefl", f"of them, {SHARED} shared words", "M", [SHARED * width / 1e6])
    yield Figure("uefl", f"of them, {OWN} words of one silo's own", "M", [OWN * width / 1e6])
    unit = "s" if o.cuda else "CPU s"
    shape = nets["uefl"].shape
    x, y = batch(images, n, shape, o.device)
    steps: dict[str, Callable[[], object]] = {}
    for who, net in nets.items():
        optimizer = torch.optim.Adam(net.parameters(), 1e-4)

        def step(net=net, optimizer=optimizer) -> None:  # type: ignore[no-untyped-def]
            optimizer.zero_grad()
            seen = net.train()(x)
            (cross_entropy(seen.logits[0], y) + seen.commitment + 0.25 * seen.codeword).backward()
            optimizer.step()

        steps[who] = step
    for who, values in take_turns(steps, o, times=10 if o.cuda else 3).items():
        yield Figure(who, f"a step of {n} images", unit, values)
    for net in nets.values():
        net.eval()
    for size in (1, n):
        with torch.no_grad():
            found = take_turns({w: lambda net=net, size=size: net(x[:size]) for w, net in nets.items()}, o, times=20)  # type: ignore[misc]
        for who, values in found.items():
            yield Figure(who, f"a prediction, {size} at a time", unit, [v / size for v in values])
