"""Single silos by compiled code: for networks that fill a device on their own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from uefl.engines.arena import Arena
from uefl.engines.fusible import FUSION, fusible
from uefl.federation import Batch, Model, State, Update
from uefl.noise import Noise

BACKEND: Any = "inductor"  # torch's own
SHAPES = 4096  # torch stops compiling after 8 shapes, of all federations in a process
LIMITS = ("recompile_limit", "accumulated_recompile_limit", "cache_size_limit", "accumulated_cache_size_limit")


class Compiler:
    """Gradients by `torch.compile`, where it can; in double the same numbers as without."""

    def __init__(
        self,
        net: nn.Module,
        learn: Collection[str],
        noises: Sequence[Noise],
        precise: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self.net, self.learn, self.noises, self.precise = net, learn, noises, precise
        fusible(net)

    def gradients(
        self, arena: Arena, update: Update, keys: Tensor, step: Tensor, batch: Batch, plainly: Callable[[], Tensor]
    ) -> State | None:
        """Gradients of one update of a stack of one silo; none, if that is to be done plainly."""
        if len(arena.stack.names) > 1 or update.loss in arena.beyond:
            return None
        before = {} if capturing() else {n: t.clone() for n, t in arena.stack.own.items() if n not in self.learn}
        if update.loss not in arena.known:  # does it read the epoch? Compiled code could not see that change
            arena.known.add(update.loss)
            plainly()
            restore(arena, before)
        self._bind(arena)
        for layer in self.noises:
            layer.key.copy_(keys[0])
        sign = (update.loss, batch.epoch if update.loss in arena.timely else 0)
        if sign not in arena.losses:
            arena.losses[sign] = self._compiled(arena, update, batch.epoch)
        moving = {n: p for n, p in self.net.named_parameters() if n in self.learn and update.learns(n)}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the compiler's hints to its developers
                loss = arena.losses[sign](batch.x[0], batch.y[0], step[0])
                found = torch.autograd.grad(loss, list(moving.values()), allow_unused=True)
        except Exception:  # if the loss itself is at fault, it will say so again when it is done plainly
            restore(arena, before)
            arena.beyond.add(update.loss)
            return None
        return {n: g.unsqueeze(0) for n, g in zip(moving, found) if g is not None}

    def _bind(self, arena: Arena) -> None:
        """Bind the network itself to the stack's memory: its own tensors are what a compiler sees best.

        Always the same ones for an arena: compiled code, and losses that read `model.params`, know them by identity.
        """
        for n, t in arena.stack.own.items():
            owner, _, leaf = n.rpartition(".")
            module = self.net.get_submodule(owner)
            places: Any = module._parameters if leaf in module._parameters else module._buffers
            if n not in arena.bound:
                arena.bound[n] = nn.Parameter(t[0], n in self.learn) if places is module._parameters else t[0]
            places[leaf] = arena.bound[n]

    def _compiled(self, arena: Arena, update: Update, epoch: int) -> Callable[..., Tensor]:
        import torch._dynamo as dynamo  # a second of time: only who compiles pays it
        import torch._inductor as inductor

        stack = arena.stack
        received = {**stack.said, **{n: t[0] for n, t in stack.received.items()}}
        kept = {n: t[0] for n, t in stack.kept.items()}
        params: State = {n: p for n, p in self.net.named_parameters() if n in self.learn}
        model = Model(self.net, params, sent=stack.sent, received=received, kept=kept)

        def loss(x: Tensor, y: Tensor, step: Tensor) -> Tensor:
            with self.precise():
                found: Tensor = update.loss(model, Batch(x, y, step, epoch))
            return found

        for name in LIMITS:
            if hasattr(dynamo.config, name):
                setattr(dynamo.config, name, max(getattr(dynamo.config, name), SHAPES))
        # No kernel is chosen by a race, so that the next run gives the same bits; older compilers have no such option.
        wanted: dict[str, Any] = {"deterministic": True, **FUSION}
        options = {n: value for n, value in wanted.items() if BACKEND == "inductor" and n in inductor.list_options()}
        compiled: Callable[..., Tensor] = torch.compile(loss, dynamic=False, backend=BACKEND, options=options or None)
        return compiled


def restore(arena: Arena, before: State) -> None:
    """What a forward pass moved: the statistics of batch norm."""
    for n, t in before.items():
        arena.stack.own[n].copy_(t)


def capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
