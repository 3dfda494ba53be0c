"""Clients across a network: `fit` and `ask` become one Flower message per silo. Algorithms do not know."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from uefl.errors import InputError, Stopped
from uefl.federation import Broadcast, Method, Reply, Split, State, gathered, size_in_bytes
from uefl.flower.census import Census, Fact
from uefl.flower.reading import Reader, Stranger
from uefl.flower.wire import halved, letter
from uefl.settings import plain

if TYPE_CHECKING:
    from flwr.app import Message

ACCEPTED = "accepted"  # in `memory`: the last round of which what a silo kept counts
Order = dict[str, Any]


class Flower:
    """Clients behind a Flower grid: in this process, simulated on Ray, or deployed.

    `memory` is part of the checkpoint, as in every engine. What silos keep stays with them, so it holds only the number
    of the round that counts.
    """

    def __init__(
        self,
        census: Census,
        net: nn.Module,
        *,
        facts: Sequence[Fact],
        run: str,
        seed: int,
        classes: Sequence[str],
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        half: bool = False,
        watch: Callable[[str, str], None] = lambda _silo, _doing: None,
    ) -> None:
        self.census, self.seed, self.half, self.watch = census, seed, half, watch
        self.net, self.device = net.to(dtype), torch.device("cpu")
        self.memory: dict[str, State] = {}
        self._facts = {fact.silo: fact for fact in sorted(facts)}
        self._about = {"run": run, "shape": list(shape), "classes": list(classes), "half": half}
        self._reader = Reader(net, tuple(shape), dtype=dtype, half=half)

    @property
    def facts(self) -> list[Fact]:
        """What the silos of this run say of themselves."""
        return list(self._facts.values())

    @property
    def sizes(self) -> Mapping[str, int]:
        return {name: fact.size for name, fact in self._facts.items()}

    @property
    def domains(self) -> Mapping[str, str]:
        return {name: fact.domain for name, fact in self._facts.items()}

    def begin(self) -> State:
        return {name: t.clone() for name, t in self.net.state_dict().items()}

    def fit(self, method: Method, say: Broadcast, *, measure: bool = True) -> Iterator[Reply]:
        found = self._exchange(method, say, {"measure": measure})
        for reply, keeps in found:
            if keeps:
                self.memory[reply.who] = {ACCEPTED: torch.tensor(say.round)}
        yield from (reply for reply, _ in found)

    def ask(self, method: Method, task: str, say: Broadcast, on: Sequence[Split]) -> Iterator[Reply]:
        yield from (reply for reply, _ in self._exchange(method, say, {"task": task, "on": list(on)}))

    def _exchange(self, method: Method, say: Broadcast, order: Order) -> list[tuple[Reply, bool]]:
        """One message per silo; who fails is asked again while the quorum is not met. Replies in the order of names."""
        if plain(method) != self.census.experiment["method"]:
            raise InputError("the method is not the experiment's: silos would run another one")
        patience = self.census.patience
        need = patience.enough(len(self._facts))
        need = need if len(say.who) >= need else 0  # a question to a few only may stay without an answer
        found: dict[str, tuple[Reply, bool]] = {}
        for _ in range(1 + patience.retries):
            left = [name for name in sorted(say.who) if name not in found or found[name][0].refused]
            for name, message in self._sent(say, order, left):
                found[name] = self._read(message, method, narrowed(say, name), order)
            good = sum(not reply.refused for reply, _ in found.values())
            if good >= need:
                return [found[name] for name in sorted(found)]
        why = "; ".join(f"{name}: {reply.refused}" for name, (reply, _) in sorted(found.items()) if reply.refused)
        raise Stopped(
            f"round {say.round}: {good} of {len(say.who)} silos answered well, {need} are needed, "
            f"asked {1 + patience.retries} times ({why}); the run can be resumed"
        )

    def _sent(self, say: Broadcast, order: Order, names: Sequence[str]) -> Iterator[tuple[str, Message | str]]:
        """Send, and collect what comes back before the deadline: a message, or why there is none."""
        grid, patience = self.census.grid, self.census.patience
        nodes, waiting = self.census.present(names), dict[str, str]()
        for name in names:
            message = [self._message(narrowed(say, name), order, nodes[name])] if name in nodes else []
            sent = [number for number in (grid.push_messages(message) if message else ()) if number]
            if sent:
                waiting[sent[0]] = name
                self.watch(name, order.get("task", "trains"))
            else:
                yield name, "missing: its node is not there"
        end = time.monotonic() + patience.deadline
        while waiting and time.monotonic() < end:
            for reply in grid.pull_messages(list(waiting)):
                name = waiting.pop(reply.metadata.reply_to_message_id)
                self.watch(name, "answered")
                yield name, reply
            time.sleep(patience.poll if waiting else 0)
        for name in waiting.values():
            yield name, f"missing: no answer within {patience.deadline:g} s"

    def _message(self, say: Broadcast, order: Order, node: int) -> Message:
        (name,) = say.silos
        accepted = int(self.memory[name][ACCEPTED]) if name in self.memory else 0
        told = {"silo": name, "round": say.round, "rate": say.rate, "accepted": accepted}
        return letter(
            {**told, **self._about, **order, "experiment": self.census.experiment},
            node,
            "evaluate" if "task" in order else "train",
            life=self.census.patience.deadline,
            state=self._small(say.state),
            sent=self._small(say.sent),
        )

    def _small(self, state: State) -> State:
        return halved(state) if self.half else state

    def _read(self, message: Message | str, method: Method, say: Broadcast, order: Order) -> tuple[Reply, bool]:
        """A reply that may be used, or one that says why not."""
        (name,) = say.silos
        if isinstance(message, str):
            return Reply(name, self.sizes[name], refused=message), False
        down = size_in_bytes(self._small(say.state)) + size_in_bytes(self._small(say.sent))
        try:
            reply, keeps = self._reader.read(message, method, say, task=order.get("task", ""), size=self.sizes[name])
        except InputError as e:
            if isinstance(e, Stranger):
                self.census.doubt(name)
            return Reply(name, self.sizes[name], received_bytes=down, refused=str(e)), False
        return reply._replace(received_bytes=down), keeps


def narrowed(say: Broadcast, name: str) -> Broadcast:
    """What one silo is told: shared weights and the words of its own row, nothing else."""
    row = say.access[say.silos.index(name)]
    access = torch.ones(1, int(row.sum()), dtype=torch.bool)
    return say._replace(state=gathered(say.state, row), silos=(name,), access=access, who=(name,))
