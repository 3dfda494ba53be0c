"""Uncertainty: a plain evaluation and 20 dropout passes together, beside a plain evaluation alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.frame import Figure, Options, settle, take_turns
from benchmarks.images import digits
from benchmarks.nets import batch, placed, release, vgg16
from uefl.noise import sampling

PASSES = 20


def run(o: Options) -> Iterator[Figure]:
    settle(o)
    images = digits(o.data)
    nets = {"release's MNIST net": (release(tiny=o.tiny), 1024 if o.cuda else 64)}
    if not o.tiny:
        nets["VGG16"] = (vgg16(), 1024 if o.cuda else 64)
    for name, (net, n) in nets.items():
        net = placed(net.with_codebook(4, 256), o.device).eval()
        x, _ = batch(images, 8 if o.tiny else n, net.shape, o.device)

        def passes(net=net, x=x) -> object:  # type: ignore[no-untyped-def]
            return net.examine(x, PASSES)

        def plain(net=net, x=x) -> object:  # type: ignore[no-untyped-def]
            return net(x)

        def whole(net=net, x=x) -> object:  # type: ignore[no-untyped-def]
            with sampling(net):
                return [net(x) for _ in range(PASSES)]

        with torch.no_grad():
            found = take_turns({"uefl": passes, "plain evaluation": plain}, o, times=10 if o.cuda else 3)
            found |= take_turns({"20 whole passes": whole}, o)
        for who, values in found.items():
            base = sum(found["plain evaluation"]) / o.repeats
            note = f"{sum(values) / o.repeats / base:.3f} plain evaluations"
            yield Figure(who, f"{name}, {len(x)} images", "s" if o.cuda else "CPU s", values, note)
