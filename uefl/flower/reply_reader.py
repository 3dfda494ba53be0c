"""Read and check replies at the server: nothing that a silo sends is used before it matches what was requested."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from flwr.app import Message
from torch import Tensor, nn

from uefl.core.aggregate import find_reply_error
from uefl.core.errors import InputError
from uefl.core.federation import (
    Broadcast,
    Evaluations,
    Examples,
    Method,
    Reply,
    Silo,
    Tensors,
    is_codeword_tensor,
    size_in_bytes,
)
from uefl.engines.serial import SerialEngine
from uefl.flower.wire import cast_from_half, cast_to_half, read_reply_payload, read_tensors, unflatten_answers

MAX_TEXT = 500  # characters of a silo's text that are used


class IdentityMismatch(InputError):
    """A node replies under another silo name than the one it was addressed by."""


class ReplyReader:
    """Read replies. The expected shapes of an answer come from the same task on one blank image."""

    def __init__(
        self, net: nn.Module, image_shape: tuple[int, ...], *, dtype: torch.dtype, half_precision: bool
    ) -> None:
        blank = Examples(torch.zeros(1, *image_shape), torch.zeros(1, dtype=torch.int64))
        self.reference_engine = SerialEngine([Silo("blank", blank, blank, blank)], net, dtype=dtype)
        self.dtype, self.half_precision = dtype, half_precision
        self._expected_answers: dict[tuple[Any, ...], Tensors] = {}

    def read_reply(
        self, message: Message, method: Method, broadcast: Broadcast, *, task: str, num_examples: int
    ) -> tuple[Reply, bool]:
        """Return one silo's reply, and whether the silo stored client state; raise an `InputError` if it is invalid.

        `task` is the queried task, or "" for training. `num_examples` is the number that the silo registered.
        """
        payload = read_reply_payload(message)
        (name,) = broadcast.silo_names
        if payload.get("silo") != name:
            raise IdentityMismatch(f"the node now identifies itself as silo {payload.get('silo')!r}")
        if payload.get("rejected"):
            raise InputError(str(payload["rejected"])[:MAX_TEXT])
        reply = parse_reply(message, payload, name, task)
        error = "" if task else self._find_tensor_error(reply, broadcast)
        error = error or self._find_answer_error(reply, method, broadcast, task or "evaluate")
        if not error and reply.num_examples != num_examples:  # the reply's weight in the average
            error = f"the reply reports {reply.num_examples} examples, but the silo registered {num_examples}"
        if error:
            raise InputError(error)
        reply = reply._replace(
            tensors=cast_from_half(reply.tensors, self.dtype), extras=cast_from_half(reply.extras, self.dtype)
        )
        return reply, bool(payload.get("has_client_state"))

    def _find_tensor_error(self, reply: Reply, broadcast: Broadcast) -> str:
        expected = cast_to_half(broadcast.model_state) if self.half_precision else broadcast.model_state
        for name, tensor in reply.tensors.items():
            if name in expected and tensor.dtype != expected[name].dtype:
                return f"{name} is {tensor.dtype}, expected {expected[name].dtype}"
        return find_reply_error(reply, broadcast.model_state, broadcast.access[0])

    def _find_answer_error(self, reply: Reply, method: Method, broadcast: Broadcast, task: str) -> str:
        """Return what is wrong with metric sums, answers and extras."""
        answers = [*reply.answers.values(), *reply.evaluations.received.values(), *reply.evaluations.local.values()]
        for tensors in (reply.extras, *answers):
            for name, tensor in tensors.items():
                if tensor.is_complex() or not bool(torch.isfinite(tensor).all()):
                    return f"{name} is not finite"
        if method.client_tasks[task].needs_full_split:
            return ""  # the number of centroids depends on the data; the codebook checks their width
        expected = get_shapes(self._compute_expected_answer(method, broadcast, task)) if answers else {}
        for answer in answers:
            if wrong := get_shapes(answer).items() ^ expected.items():
                return f"answer {min(name for name, _ in wrong)} is missing, unexpected or of the wrong shape"
        return ""

    def _compute_expected_answer(self, method: Method, broadcast: Broadcast, task: str) -> Tensors:
        key = (task, *(len(t) for n, t in broadcast.model_state.items() if is_codeword_tensor(n)))
        if key not in self._expected_answers:
            self.reference_engine.client_states.clear()
            (reply,) = self.reference_engine.query(method, task, readdress_broadcast(broadcast, "blank"), ("test",))
            self._expected_answers[key] = reply.answers["test"]
        return self._expected_answers[key]


def parse_reply(message: Message, payload: Mapping[str, Any], silo_name: str, task: str) -> Reply:
    """Return the reply as the silo sent it; only weights, extras and answers to a query count as sent bytes."""
    records = {
        record: read_tensors(message, record) for record in ("tensors", "extras", "answers", "received", "local")
    }
    num_examples, seconds = parse_size_and_seconds(payload)
    return Reply(
        silo_name,
        num_examples,
        tensors=records["tensors"],
        evaluations=Evaluations(unflatten_answers(records["received"]), unflatten_answers(records["local"])),
        answers=unflatten_answers(records["answers"]),
        extras=records["extras"],
        sent_bytes=sum(size_in_bytes(records[record]) for record in (("answers",) if task else ("tensors", "extras"))),
        seconds=seconds,
        note=str(payload.get("note", ""))[:MAX_TEXT],
    )


def parse_size_and_seconds(payload: Mapping[str, Any]) -> tuple[int, float]:
    """Return the number of training examples and the seconds of work that a reply reports."""
    try:
        num_examples, seconds = int(payload["num_examples"]), float(payload["seconds"])
    except (KeyError, TypeError, ValueError, OverflowError):
        raise InputError("the reply contains no valid number of examples or seconds") from None
    return num_examples, seconds if math.isfinite(seconds) else 0.0


def readdress_broadcast(broadcast: Broadcast, silo_name: str) -> Broadcast:
    """Return the broadcast addressed to another silo."""
    return broadcast._replace(silo_names=(silo_name,), participants=(silo_name,))


def get_shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tensors, by name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
