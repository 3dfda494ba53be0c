"""The server's side of a reply: nothing that a silo sends is used before it is known to be what was asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from flwr.app import Message
from torch import Tensor, nn

from uefl.aggregate import flaw
from uefl.engines.serial import Serial
from uefl.errors import InputError
from uefl.federation import Broadcast, Method, Part, Reply, Silo, State, is_words, size_in_bytes
from uefl.flower.wire import halved, said, tensors, unflat, whole


class Stranger(InputError):
    """A node answers under another name than it was asked by."""


class Reader:
    """Reads replies. To know what an answer looks like, it asks itself the same with one blank image."""

    def __init__(self, net: nn.Module, shape: tuple[int, ...], *, dtype: torch.dtype, half: bool) -> None:
        blank = Part(torch.zeros(1, *shape), torch.zeros(1, dtype=torch.int64))
        self.serial = Serial([Silo("blank", blank, blank, blank)], net, dtype=dtype)
        self.dtype, self.half = dtype, half
        self._known: dict[tuple[Any, ...], State] = {}

    def read(self, message: Message, method: Method, say: Broadcast, *, task: str, size: int) -> tuple[Reply, bool]:
        """The reply to `say`, which was for one silo, and whether the silo kept something; or InputError says why not.

        `task` is what was asked; training was, if it is nothing. `size` is what the silo said at the start.
        """
        told = said(message)
        (name,) = say.silos
        if told.get("silo") != name:
            raise Stranger(f"its node calls itself {told.get('silo')!r} now")
        if told.get("refused"):
            raise InputError(str(told["refused"])[:500])
        parts = {kind: tensors(message, kind) for kind in ("tensors", "extra", "answers")}
        up = sum(size_in_bytes(parts[kind]) for kind in (("answers",) if task else ("tensors", "extra")))
        count, seconds = numbers(told)
        reply = Reply(name, count, parts["tensors"], unflat(parts["answers"]), parts["extra"], 0, up, seconds)
        why = self._odd(reply, method, say, task) if task else self._flawed(reply, say) or self._odd(reply, method, say)
        if count != size:  # its weight in the mean
            why = why or f"it says {count} examples, at the start it said {size}"
        if why:
            raise InputError(why)
        reply = reply._replace(tensors=whole(reply.tensors, self.dtype), extra=whole(reply.extra, self.dtype))
        return reply._replace(note=str(told.get("note", ""))[:500]), bool(told.get("keeps"))

    def _flawed(self, reply: Reply, say: Broadcast) -> str:
        expected = halved(say.state) if self.half else say.state
        wrong = [n for n, t in reply.tensors.items() if n in expected and t.dtype != expected[n].dtype]
        if wrong:
            return f"{wrong[0]} is {reply.tensors[wrong[0]].dtype}, expected {expected[wrong[0]].dtype}"
        return flaw(reply, say.state, say.access[0])

    def _odd(self, reply: Reply, method: Method, say: Broadcast, task: str = "measure") -> str:
        """What is wrong with measurements and extras."""
        for state in (reply.extra, *reply.answers.values()):
            for name, tensor in state.items():
                if tensor.is_complex() or not bool(torch.isfinite(tensor).all()):
                    return f"{name} is not finite"
        if getattr(getattr(method, task), "whole", False):
            return ""  # how many centroids a silo finds is its own business; the book looks at their width
        expected = self._like(method, say, task) if reply.answers else {}
        for answer in reply.answers.values():
            if shapes(answer) != shapes(expected):
                odd = sorted({n for n, _ in shapes(answer).items() ^ shapes(expected).items()})
                return f"answer {odd[0]} is not as expected"
        return ""

    def _like(self, method: Method, say: Broadcast, task: str) -> State:
        words = tuple(len(t) for n, t in say.state.items() if is_words(n))
        known = (task, words)
        if known not in self._known:
            blank = replace_who(say, "blank")
            self.serial.memory.clear()
            (reply,) = self.serial.ask(method, task, blank, ("test",))
            self._known[known] = reply.answers["test"]
        return self._known[known]


def numbers(told: Mapping[str, Any]) -> tuple[int, float]:
    """How many examples a silo trained with, and for how long."""
    try:
        count, seconds = int(told["size"]), float(told["seconds"])
    except (KeyError, TypeError, ValueError, OverflowError):
        raise InputError("it does not say how many examples it has") from None
    return count, seconds if math.isfinite(seconds) else 0.0


def replace_who(say: Broadcast, name: str) -> Broadcast:
    """The same, said to another."""
    return say._replace(silos=(name,), who=(name,))


def shapes(state: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """What tensors look like, their values apart."""
    return {name: tuple(tensor.shape) for name, tensor in state.items()}
