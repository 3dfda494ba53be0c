"""The codebook's share of a training step of the release's MNIST net: 64, 256 and 1024 words, four segments."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn
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
    with torch.no_grad():
        z = net.encode(x)
    z.requires_grad_()
    up = torch.randn_like(z)

    def step(half: bool) -> Callable[[], object]:
        optimizer = adam(net, o)

        def work() -> None:
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=half):
                loss = cross_entropy(net(x).logits[0], y)
            loss.backward()
            optimizer.step()

        return captured(work) if o.cuda else work

    def book(words: int, half: bool) -> Callable[[], object]:
        codebook = Codebook(z.shape[-1], 4, words).to(o.device)
        own = adam(codebook, o)

        def work() -> None:
            # What the book adds to a step: its forward pass, its losses, its gradients, its update.
            own.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=half):
                coded = codebook(z)
                loss = (coded.z * up).sum() + 0.25 * coded.commitment + coded.codeword
            loss.backward()
            own.step()

        return captured(work) if o.cuda else work

    for name, half in {"in TF32": False, "in bf16": True}.items() if o.cuda else (("", False),):
        contenders = {"step without book": step(half)} | {f"book of {words}": book(words, half) for words in WORDS}
        found = take_turns(contenders, o, times=10)
        base = sorted(found["step without book"])[o.repeats // 2]
        for who, values in found.items():
            share = sorted(values)[o.repeats // 2] / base
            note = "" if who.startswith("step") else f"{100 * share:.2f} % of a step"
            figure = f"a step of {n} images {name}".strip()
            yield Figure(who, figure, "s" if o.cuda else "CPU s", values, note)


def adam(net: nn.Module, o: Options) -> torch.optim.Adam:
    return torch.optim.Adam(net.parameters(), 1e-4, fused=o.cuda, capturable=o.cuda)


def captured(work: Callable[[], object]) -> Callable[[], object]:
    """A step as a CUDA graph, as the engine runs it."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()

    def replay(_alive: object = work) -> None:  # what the step uses must not go before its graph
        graph.replay()

    return replay
