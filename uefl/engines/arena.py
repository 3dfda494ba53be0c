"""Places in memory that stay where they are from round to round, so that a captured step finds its tensors again."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from uefl.engines.descent import Descent
from uefl.engines.serial import OPTIMIZER
from uefl.engines.stack import Stack, like_stack
from uefl.federation import State, Update
from uefl.local import Local


class Arena:
    """One stack in training: its tensors, its optimisers, and the steps captured on them."""

    def __init__(self, seen: Stack, learn: Collection[str], local: Local, updates: Sequence[Update]) -> None:
        m = len(seen.names)
        each = {**seen.shared, **{n: t[0] for n, t in seen.own.items()}}
        own = {n: like_stack(t, m) for n, t in each.items()}
        kept = {n: torch.empty_like(t) for n, t in seen.kept.items() if not n.startswith(OPTIMIZER)}
        received, said, sent = (empty(tensors) for tensors in (seen.received, seen.said, seen.sent))
        self.stack = Stack(seen.names, own, {}, received, said, kept, sent)
        self.updates, self.fresh = updates, local.fresh
        self.descents = []
        for update in updates:
            moving = {n: own[n] for n in own if n in learn and update.learns(n)}
            self.descents.append(Descent(local, moving, {n: update.rate(n) for n in moving}))
        like = next(t for t in own.values() if t.is_floating_point())
        self.rate = like.new_zeros(())
        self.steps: dict[Any, Captured] = {}
        self.losses: dict[Any, Callable[..., Tensor]] = {}  # compiled
        self.bound: State = {}  # the network's own tensors, for compiled code
        # Losses that ran at least once, those of them that read the epoch, and those that no compiler can do.
        self.known: set[Any] = set()
        self.timely: set[Any] = set()
        self.beyond: set[Any] = set()
        self.pool: Any = None  # memory of all captured steps: they leave nothing behind but what they wrote in place

    def fill(self, seen: Stack, updates: Sequence[Update], rate: float) -> None:
        """Another chunk of silos, or the next round of the same: everything is copied in."""
        mine = self.stack = self.stack._replace(names=seen.names)
        with torch.no_grad():
            for n, place in mine.own.items():
                place.copy_(seen.own[n] if n in seen.own else seen.shared[n])  # the latter to every silo
            for places, tensors in ((mine.received, seen.received), (mine.said, seen.said), (mine.sent, seen.sent)):
                for n, place in places.items():
                    place.copy_(tensors[n])
            for n, place in mine.kept.items():
                place.copy_(seen.kept[n])
            self.rate.fill_(rate)
            for i, descent in enumerate(self.descents):
                descent.clear()
                for n in descent.params if not self.fresh else ():
                    pairs = [
                        (ts[n], seen.kept.get(f"{OPTIMIZER}{i}.{entry}.{n}")) for entry, ts in descent.state.items()
                    ]
                    # Where words came or went, their optimiser starts afresh as a whole.
                    if all(t is not None and t.shape == place.shape for place, t in pairs):
                        for place, t in pairs:
                            place.copy_(t)  # type: ignore[arg-type]
        # A bound method stays equal from round to round; a loss made anew may have anything of this round in it.
        if [u.loss for u in updates] != [u.loss for u in self.updates]:
            for gone in (self.steps, self.losses, self.known, self.timely, self.beyond):
                gone.clear()
            self.pool = None  # a pool without steps is gone
        self.updates = updates

    def step(self, sign: Any, do: Callable[..., None], *inputs: Tensor) -> None:
        """Do a step, from its second time on as captured."""
        if sign not in self.steps:
            self.pool = self.pool or torch.cuda.graph_pool_handle()
            self.steps[sign] = Captured(do, inputs, self.pool)
        self.steps[sign](*inputs)

    def saved(self) -> State:
        """The optimisers' state, as silos keep it."""
        return {
            f"{OPTIMIZER}{i}.{entry}.{n}": t
            for i, descent in enumerate(self.descents)
            for entry, tensors in descent.state.items()
            for n, t in tensors.items()
            if not self.fresh
        }


class Captured:
    """A step as a CUDA graph. The first call runs it plainly, which also warms libraries up; the second captures it."""

    def __init__(self, step: Callable[..., None], inputs: Sequence[Tensor], pool: Any) -> None:
        self.step, self.inputs, self.pool = step, [t.clone() for t in inputs], pool
        self.graph: torch.cuda.CUDAGraph | Literal[False] | None = None  # not yet, or never
        self.calls = 0

    def __call__(self, *inputs: Tensor) -> None:
        for place, tensor in zip(self.inputs, inputs):
            place.copy_(tensor)
        self.calls += 1
        if self.calls == 1:
            self.step(*self.inputs)
            return
        if self.graph is None:
            self.graph = self._captured()
        if self.graph:
            self.graph.replay()
        else:
            self.step(*self.inputs)

    def _captured(self) -> torch.cuda.CUDAGraph | Literal[False]:
        """The step as a graph, none of it done yet; not everything can be captured, such as a copy from the host."""
        graph = torch.cuda.CUDAGraph()
        try:
            with uncollected(), torch.cuda.graph(graph, pool=self.pool):
                self.step(*self.inputs)
        except RuntimeError:
            torch.cuda.synchronize()
            return False
        return graph


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection: it may come upon another engine's graph, and to free that would break the capture."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def empty(tensors: State) -> State:
    return {n: torch.empty_like(t) for n, t in tensors.items()}
