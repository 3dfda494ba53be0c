"""Clients in one tensor: weights of several silos are stacked, and one pass trains or measures them all.

Silos are stacked while they hold equally many words and keep tensors of the same shapes. Batches are never padded: at
each place of an epoch, silos whose batches are equally long go together. On CUDA a step is captured as a graph and then
replayed. A stack of one silo needs no `vmap`: that is how networks run that fill a device on their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_map

from uefl.engines.arena import Arena
from uefl.engines.compiling import Compiler
from uefl.engines.mapping import Mapping
from uefl.engines.resident import Resident
from uefl.engines.serial import WORDS, Serial, foreign, indices, laid_out, still_true
from uefl.engines.stack import Stack, rows, spoken, stacked, to_host
from uefl.engines.stacking import length, most_together, size_of
from uefl.engines.watched import watched
from uefl.errors import InputError
from uefl.federation import (
    Batch,
    Broadcast,
    Method,
    Model,
    Part,
    Reply,
    Silo,
    Split,
    State,
    batches,
    gathered,
    is_words,
    size_in_bytes,
)
from uefl.noise import TRITON, Noise, key, permutations


class Stacked(Serial):
    """Clients in one process, several at a time. `chunk`: the most silos of a stack; 0: as many as pay."""

    def __init__(
        self,
        silos: Sequence[Silo],
        net: nn.Module,
        *,
        chunk: int = 0,
        captured: bool = True,
        compiled: bool = False,
        **others: Any,
    ) -> None:
        super().__init__(silos, net, **others)
        if foreign(self.net):
            raise InputError("engine=stacked needs uefl's Dropout in the network, not torch's: use engine=serial")
        self.chunk = chunk
        self.captured = captured and self.device.type == "cuda"  # steps as CUDA graphs
        self._data = Resident(self.silos)
        self._layers = [name for name, m in self.net.named_modules() if isinstance(m, Noise)]
        self._learn = {n for n, p in self.net.named_parameters() if p.requires_grad}
        self._size = size_of(self.net, next(iter(self.silos.values())).test.x.shape[1:])
        self._arenas: dict[Any, Arena] = {}
        self._compiler = Compiler(self.net, self._learn, self._noises, self._precise) if compiled else None

    def fit(self, method: Method, say: Broadcast, *, measure: bool = True) -> Iterator[Reply]:
        used = set()
        for seen in self._stacks(method, say, method.local.batch):
            started, names = time.perf_counter(), seen.names
            before = self._measured_all(method, seen, say.round - 1, "received ", method.splits) if measure else {}
            self.watch(spoken(names), "train" if len(names) > 1 else "trains")
            sign, arena = self._arena(method, say, seen)
            used.add(sign)
            steps = self._train_all(method, arena, say)
            self.net.eval()
            extra, kept = self._finished(method, arena.stack, steps, say.rate)
            after = self._measured_all(method, arena.stack, say.round, "local ", method.local_splits) if measure else {}
            mine = {n: t.detach().clone() for n, t in arena.stack.own.items()}
            stays = set(method.keeps(self.net))
            rest = {n: t.clone() for n, t in {**arena.stack.kept, **arena.saved()}.items()}
            seconds = (time.perf_counter() - started) / len(names)
            for i, name in enumerate(names):
                tensors = {n: t[i] for n, t in mine.items() if n not in stays}
                self.memory[name] = {
                    **{n: t[i] for n, t in rest.items()},
                    **kept[i],
                    **{n: mine[n][i] for n in stays},
                }
                if not method.local.fresh:
                    self.memory[name][WORDS] = indices(say.access[say.silos.index(name)])
                yield Reply(
                    who=name,
                    size=len(self.silos[name].train.y),
                    tensors=tensors,
                    answers={**before.get(name, {}), **after.get(name, {})},
                    extra=extra[i],
                    received_bytes=self._received_bytes(seen, i) + size_in_bytes(say.sent),
                    sent_bytes=size_in_bytes(tensors) + size_in_bytes(extra[i]),
                    seconds=seconds,
                )
        self._arenas = {sign: arena for sign, arena in self._arenas.items() if sign in used}  # words come, places go

    def ask(self, method: Method, task: str, say: Broadcast, on: Sequence[Split]) -> Iterator[Reply]:
        if getattr(getattr(method, task), "whole", False):
            yield from super().ask(method, task, say, on)
            return
        for seen in self._stacks(method, say, method.local.evaluation_batch):
            started = time.perf_counter()
            self.watch(spoken(seen.names), task)
            found = self._answers_all(method, task, seen, say.round, on)
            seconds = (time.perf_counter() - started) / len(seen.names)
            for i, name in enumerate(seen.names):
                yield Reply(
                    who=name,
                    size=len(self.silos[name].train.y),
                    answers=found[name],
                    received_bytes=self._received_bytes(seen, i) + size_in_bytes(say.sent),
                    sent_bytes=sum(size_in_bytes(answer) for answer in found[name].values()),
                    seconds=seconds,
                )

    # --- who goes with whom ---------------------------------------------------------------------------------------

    def _stacks(self, method: Method, say: Broadcast, batch: int) -> Iterator[Stack]:
        """This round's silos in stacks: of one shape, the largest silos first, no more at a time than pay."""
        stays = list(method.keeps(self.net))
        said = {n: self._placed_tensor(t) for n, t in say.state.items() if not is_words(n)}
        sent = {n: laid_out(t.to(self.device)) for n, t in say.sent.items()}
        alike: dict[Any, list[tuple[str, State, State, State]]] = {}
        for name in sorted(say.who, key=lambda name: (-len(self.silos[name].train.y), name)):
            row = say.access[say.silos.index(name)]
            words = {n: self._placed_tensor(t) for n, t in gathered(say.state, row).items() if is_words(n)}
            kept = still_true(self.memory.get(name) or self._first(method, name), row)
            own = {n: kept.get(n, self.initial[n]) for n in stays}
            rest = {n: t for n, t in kept.items() if n not in own}
            shape = tuple(sorted((n, tuple(t.shape)) for n, t in {**words, **rest}.items()))
            alike.setdefault(shape, []).append((name, words, own, rest))
        most = self.chunk or most_together(self._size, batch, self.device.type)
        for group in alike.values():
            size = -(-len(group) // -(-len(group) // most))  # as few stacks as can be, all of about one size
            for start in range(0, len(group), size):
                names, words_, own_, rest_ = zip(*group[start : start + size])
                words = stacked(words_)
                shared = {n: t for n, t in said.items() if n not in stays}
                yield Stack(names, {**words, **stacked(own_)}, shared, words, said, stacked(rest_), sent)

    def _placed_tensor(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, self.dtype) if tensor.is_floating_point() else tensor.to(self.device)

    def _received_bytes(self, seen: Stack, i: int) -> int:
        return size_in_bytes(seen.said) + size_in_bytes({n: t[i] for n, t in seen.received.items()})

    def _arena(self, method: Method, say: Broadcast, seen: Stack) -> tuple[Any, Arena]:
        """A place for this stack in training; one of the same shape is used again."""
        updates = method.updates(say)
        learns = [tuple((n, u.rate(n)) for n in sorted(self._learn) if u.learns(n)) for u in updates]
        shapes = [tuple((n, t.shape) for n, t in ts.items()) for ts in (seen.own, seen.shared, seen.kept, seen.sent)]
        sign = (len(seen.names), method.local, *learns, *shapes)
        if sign not in self._arenas:
            self._arenas[sign] = Arena(seen, self._learn, method.local, updates)
        self._arenas[sign].fill(seen, updates, say.rate)
        return sign, self._arenas[sign]

    # --- training -------------------------------------------------------------------------------------------------

    def _train_all(self, method: Method, arena: Arena, say: Broadcast) -> list[int]:
        """Local training of a stack, the largest silos first; returns each one's number of steps."""
        local, names = method.local, arena.stack.names
        sizes = [len(self.silos[name].train.y) for name in names]
        cuts = [list(batches(n, local.batch)) for n in sizes]
        self.net.train()
        for epoch in range(local.epochs):
            drawn = [key(self.seed, name, say.round, epoch, "order") for name in names]
            order = permutations(self._there(drawn), sizes) + self._there(self._data.starts("train", names))[:, None]
            steps = [[epoch * len(mine) + place for mine in cuts] for place in range(len(cuts[0]))]
            keys = [[key(self.seed, n, say.round, s, "train") for n, s in zip(names, now)] for now in steps]
            steps_there, keys_there = self._there(steps), self._there(keys)
            for place in range(len(cuts[0])):
                lengths = [length(mine, place) for mine in cuts]
                for size, group in groupby(range(len(names)), lengths.__getitem__):
                    if size:
                        where = list(group)
                        some = slice(where[0], where[-1] + 1)
                        first = cuts[0][place].start
                        index = order[some, first : first + size]
                        self._step(method, arena, some, epoch, index, keys_there[place, some], steps_there[place, some])
        return [local.epochs * len(mine) for mine in cuts]

    def _step(
        self, method: Method, arena: Arena, some: slice, epoch: int, index: Tensor, keys: Tensor, steps: Tensor
    ) -> None:
        """One step of the silos `some`, plainly or, on CUDA, as a captured graph."""

        def step(index: Tensor, keys: Tensor, steps: Tensor) -> None:
            self._descend(method, arena, some, epoch, index, keys, steps)

        if not self.captured:
            step(index, keys, steps)
            return
        sign = (some.start, some.stop, index.shape[1], epoch if arena.timely else 0)
        arena.step(sign, step, index, keys, steps)

    def _descend(
        self, method: Method, arena: Arena, some: slice, epoch: int, index: Tensor, keys: Tensor, steps: Tensor
    ) -> None:
        x, y = self._data.batch("train", index)
        part = arena.stack.at(some)
        for update, descent in zip(arena.updates, arena.descents):

            def loss(model: Model, x: Tensor, y: Tensor, step: Tensor, loss: Any = update.loss) -> Tensor:
                with self._precise():
                    found: Tensor = loss(model, watched(Batch(x, y, step, epoch), partial(arena.timely.add, loss)))
                return found

            def adjusted(model: Model, gradients: State) -> State:
                changed = method.adjust(model, gradients)
                return dict(zip(changed, method.local.clipped(list(changed.values()))))

            def total(own: State, part: Stack = part, loss: Any = loss) -> Tensor:
                found: Tensor = self._over(part._replace(own=own), keys, loss, x, y, steps).sum()
                return found

            gradients: State | None = None
            if self._compiler:
                plainly = partial(total, part.own)
                gradients = self._compiler.gradients(arena, update, keys, steps, Batch(x, y, 0, epoch), plainly)
            if gradients is None:
                moving = {n: part.own[n].detach().requires_grad_() for n in descent.params}
                found = torch.autograd.grad(total({**part.own, **moving}), list(moving.values()), allow_unused=True)
                gradients = {n: g for n, g in zip(moving, found) if g is not None}
            with torch.no_grad():
                descent.step(self._over(part, keys, adjusted, gradients), some, arena.rate)

    def _finished(self, method: Method, stack: Stack, steps: list[int], rate: float) -> tuple[list[State], list[State]]:
        """What each silo sends beside its weights, and what it keeps; silos of one size together."""
        extra: list[State] = [{} for _ in stack.names]
        kept: list[State] = [{} for _ in stack.names]
        sizes = [len(self.silos[name].train.y) for name in stack.names]
        for n, group in groupby(range(len(sizes)), sizes.__getitem__):
            where = list(group)
            some = stack.at(rows(where))
            starts = self._there(self._data.starts("train", some.names))
            index = starts[:, None] + torch.arange(n, device=self.device)

            def finish(model: Model, x: Tensor, y: Tensor, steps: int = steps[where[0]]) -> tuple[State, State]:
                return method.finish(model, Part(x, y), steps=steps, rate=rate)

            with torch.no_grad():
                sends, keeps = self._over(some, starts, finish, *self._data.batch("train", index))
            for i, at in enumerate(where):
                extra[at], kept[at] = ({n: t[i] for n, t in found.items()} for found in (sends, keeps))
        return extra, kept

    # --- measuring and other questions ------------------------------------------------------------------------------

    def _measured_all(
        self, method: Method, stack: Stack, round_: int, prefix: str, on: Sequence[Split]
    ) -> dict[str, dict[str, State]]:
        self.watch(spoken(stack.names), "measure" if len(stack.names) > 1 else "measures")
        found = self._answers_all(method, "measure", stack, round_, on)
        return {name: {prefix + split: a for split, a in mine.items()} for name, mine in found.items()}

    def _answers_all(
        self, method: Method, task: str, stack: Stack, round_: int, on: Sequence[Split]
    ) -> dict[str, dict[str, State]]:
        """Sums over batches of each silo; measurements come to the host, together, since records read every number."""
        answers: dict[str, dict[str, State]] = {name: {} for name in stack.names}
        self.net.eval()
        for split in on:
            cuts = [list(batches(len(self.silos[n].part(split).y), method.local.evaluation_batch)) for n in stack.names]
            for i in range(max(map(len, cuts))):
                alike: dict[int, list[int]] = {}
                for at, mine in enumerate(cuts):
                    alike.setdefault(length(mine, i), []).append(at)
                for size, everyone in alike.items():
                    most = self.chunk or most_together(self._size, max(size, 1), self.device.type)
                    for where in (everyone[k : k + most] for k in range(0, len(everyone) if size else 0, most)):
                        sums = self._sums(method, task, stack.at(rows(where)), round_, i, split, size)
                        sums = to_host(sums) if task == "measure" else sums
                        for j, at in enumerate(where):
                            mine_, new = answers[stack.names[at]], {n: t[j] for n, t in sums.items()}
                            old = mine_.get(split)
                            mine_[split] = {n: old[n] + t for n, t in new.items()} if old else new
        return answers

    def _sums(self, method: Method, task: str, some: Stack, round_: int, i: int, split: Split, size: int) -> State:
        starts = self._there([s + i * method.local.evaluation_batch for s in self._data.starts(split, some.names)])
        x, y = self._data.batch(split, starts[:, None] + torch.arange(size, device=self.device))
        keys = self._there([key(self.seed, name, round_, i, task, split) for name in some.names])

        def answer(model: Model, x: Tensor, y: Tensor) -> State:
            with self._precise():
                found: State = getattr(method, task)(model, Batch(x, y, i))
            return found

        with torch.no_grad():
            sums: State = self._over(some, keys, answer, x, y)
        return sums

    # --- the seam to torch ------------------------------------------------------------------------------------------

    def _over(self, stack: Stack, keys: Tensor, do: Callable[..., Any], *inputs: Any) -> Any:
        """Do it for every silo of a stack at once, each with a model of its own tensors and draws of its own."""

        def one(own: State, received: State, kept: State, key: Tensor, *inputs: Any) -> Any:
            tensors = {**stack.shared, **own}
            model = Model(
                self.net,
                {n: t for n, t in tensors.items() if n in self._learn},
                sent=stack.sent,
                received={**stack.said, **received},
                kept=kept,
                buffers={n: t for n, t in tensors.items() if n not in self._learn}
                | {f"{layer}.key": key for layer in self._layers},
                bound=False,
            )
            return do(model, *inputs)

        given = (stack.own, stack.received, stack.kept, keys, *inputs)
        if len(stack.names) > 1:
            with Mapping(convolve=TRITON and self.multiply != "exact"):
                return vmap(one)(*given)
        return tree_map(lambda t: t.unsqueeze(0), one(*tree_map(lambda t: t.squeeze(0), given)))

    def _there(self, numbers: Any) -> Tensor:
        """Numbers on the device, from pinned memory: the host neither waits nor overwrites what is on its way."""
        here = torch.tensor(numbers, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        return here.to(self.device, non_blocking=True)
