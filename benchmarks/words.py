"""The codebook's share of a training step of the release's MNIST net: 64, 256 and 1024 words, four segments."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import cross_entropy

from benchmarks.frame import Figure, Options, settle, take_turns
from benchmarks.images import digits
from benchmarks.nets import batch, placed, release
from uefl.codebook import Codebook

WORDS = (64, 256, 1024)


def run(o: Options) -> Iterator[Figure]:
    settle(o)
    n = 4 if o.tiny else 1024 if o.cuda else 32
    net = placed(release(tiny=o.tiny), o.device).train()
    x, y = batch(digits(o.data), n, net.shape, o.device)
    params = list(net.parameters())
    optimizer = torch.optim.Adam(params, 1e-4)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(net(x).logits[0], y).backward()
        optimizer.step()

    with torch.no_grad():
        z = net.encode(x)
    z.requires_grad_()
    up = torch.randn_like(z)

    def book(words: int) -> object:
        codebook = Codebook(z.shape[-1], 4, words).to(o.device)
        own = torch.optim.Adam(codebook.parameters(), 1e-4)

        def work() -> None:
            # What the book adds to a step: its forward pass, its losses, its gradients, its update.
            own.zero_grad()
            coded = codebook(z)
            ((coded.z * up).sum() + 0.25 * coded.commitment + coded.codeword).backward()
            own.step()

        return work

    contenders = {"step without book": step} | {f"book of {words}": book(words) for words in WORDS}
    found = take_turns(contenders, o, times=10)  # type: ignore[arg-type]
    base = sorted(found["step without book"])[o.repeats // 2]
    for who, values in found.items():
        share = sorted(values)[o.repeats // 2] / base
        note = "" if who.startswith("step") else f"{100 * share:.2f} % of a step"
        yield Figure(who, f"a step of {n} images", "s" if o.cuda else "CPU s", values, note)
