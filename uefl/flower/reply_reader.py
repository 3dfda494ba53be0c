"""Read and check replies at the server: nothing that a silo sends is used before it matches what was requested."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

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
from uefl.core.untrusted_text import escape_text
from uefl.engines.serial import SerialEngine
from uefl.flower.wire import (
    cast_from_half,
    cast_to_half,
    read_reply_payload,
    read_tensors,
    reject_unreadable,
    unflatten_answers,
)

MAX_WEIGHT = 1e12  # largest absolute value of a trained weight
MAX_VALUE = 1e24  # largest absolute value of an extra tensor or of a sum over examples
SPARE_BYTES = 1 << 26  # of a record, beyond four times the bytes of the model

ReplyScreen = Callable[[Reply, Broadcast], str]
"""A further check of a valid reply at the coordinator: it returns what is wrong, or an empty string."""


class IdentityMismatch(InputError):
    """A node replies under another silo name than the one it was addressed by."""


class ReplyRequest(NamedTuple):
    """What a silo was asked for; its reply may contain nothing else."""

    num_examples: int  # training examples that the silo registered
    max_examples: int  # equal to the registered number, unless a silo's data may change
    task: str = ""  # the queried task, or "" for training
    splits: Sequence[str] = ()  # of the task, or of the evaluation of the received model
    local_splits: Sequence[str] = ()  # of the evaluation after local training


class ReplyReader:
    """Read replies. The expected shapes of an answer come from the same task on blank images."""

    def __init__(
        self,
        net: nn.Module,
        image_shape: tuple[int, ...],
        *,
        dtype: torch.dtype,
        half_precision: bool,
        screens: Sequence[ReplyScreen] = (),
    ) -> None:
        blank = Examples(torch.zeros(1, *image_shape), torch.zeros(1, dtype=torch.int64))
        self.reference_engine = SerialEngine([Silo("blank", blank, blank, blank)], net, dtype=dtype)
        self.dtype, self.half_precision, self.screens = dtype, half_precision, tuple(screens)
        self._expected_answers: dict[tuple[Any, ...], Tensors] = {}

    def read_reply(
        self, message: Message, method: Method, broadcast: Broadcast, request: ReplyRequest
    ) -> tuple[Reply, bool]:
        """Return one silo's reply, and whether the silo stored client state; raise an `InputError` if it is invalid."""
        with reject_unreadable():
            payload = read_reply_payload(message)
            (name,) = broadcast.silo_names
            if payload.get("silo") != name:
                raise IdentityMismatch(f"the node now identifies itself as silo {payload.get('silo')!r}")
            if payload.get("rejected"):
                raise InputError(str(payload["rejected"]))
            reply = parse_reply(message, payload, name, request.task, max_bytes=compute_max_bytes(broadcast))
            if error := self._find_error(reply, method, broadcast, request):
                raise InputError(error)
            tensors, extras = (cast_from_half(tensors, self.dtype) for tensors in (reply.tensors, reply.extras))
            return reply._replace(tensors=tensors, extras=extras), bool(payload.get("has_client_state"))

    def _find_error(self, reply: Reply, method: Method, broadcast: Broadcast, request: ReplyRequest) -> str:
        """Return the first thing that is wrong with a reply, or an empty string."""
        return (
            ("" if request.task else self._find_tensor_error(reply, broadcast))
            or find_count_error(reply.num_examples, request)
            or find_split_error(reply, request)
            or self._find_answer_error(reply, method, broadcast, request.task or "evaluate")
            or next(filter(None, (screen(reply, broadcast) for screen in self.screens)), "")
        )

    def _find_tensor_error(self, reply: Reply, broadcast: Broadcast) -> str:
        expected = cast_to_half(broadcast.model_state) if self.half_precision else broadcast.model_state
        for name, tensor in reply.tensors.items():
            if name in expected and tensor.dtype != expected[name].dtype:
                return f"{name} is {tensor.dtype}, expected {expected[name].dtype}"
        error = find_reply_error(reply, {} if broadcast.is_personal else broadcast.model_state, broadcast.access[0])
        return error or find_value_error(reply.tensors, MAX_WEIGHT)

    def _find_answer_error(self, reply: Reply, method: Method, broadcast: Broadcast, task: str) -> str:
        """Return what is wrong with metric sums, answers and extras."""
        evaluations = (reply.answers, reply.evaluations.received, reply.evaluations.local)
        answers = [(split, answer) for by_split in evaluations for split, answer in by_split.items()]
        for tensors in (reply.extras, *(answer for _, answer in answers)):
            if error := find_value_error(tensors, MAX_VALUE):
                return error
        if not answers:
            return ""
        expected, client_task = self._compute_expected_answer(method, broadcast, task), method.client_tasks[task]
        for split, answer in answers:
            if not client_task.needs_full_split and (
                wrong := get_shapes(answer).items() ^ get_shapes(expected).items()
            ):
                return f"answer {min(name for name, _ in wrong)} is missing, unexpected or of the wrong shape"
            if error := find_sum_error(split, answer, reply.num_examples):
                return error
            if error := client_task.find_error(answer, expected, reply.num_examples):
                return error
        return ""

    def _compute_expected_answer(self, method: Method, broadcast: Broadcast, task: str) -> Tensors:
        key = (task, *(len(t) for n, t in broadcast.model_state.items() if is_codeword_tensor(n)))
        if key not in self._expected_answers:
            self.reference_engine.client_states.clear()
            client_task = method.client_tasks[task]
            self._repeat_blank_image(client_task.num_blank_images)
            extras = {n: t for n, t in broadcast.extras.items() if n not in client_task.selecting_extras}
            blank = readdress_broadcast(broadcast, "blank")._replace(extras=extras)
            (reply,) = self.reference_engine.query(method, task, blank, ("test",))
            self._expected_answers[key] = reply.answers["test"]
        return self._expected_answers[key]

    def _repeat_blank_image(self, count: int) -> None:
        silo = self.reference_engine.silos["blank"]
        test = Examples(*(tensor[:1].expand(count, *tensor.shape[1:]) for tensor in silo.test))
        self.reference_engine.silos["blank"] = replace(silo, test=test)


def parse_reply(message: Message, payload: Mapping[str, Any], silo_name: str, task: str, *, max_bytes: int) -> Reply:
    """Return the reply as the silo sent it; only weights, extras and answers to a query count as sent bytes."""
    names = ("answers",) if task else ("tensors", "extras", "received", "local")
    records = {record: read_tensors(message, record, max_bytes) for record in names}
    num_examples, seconds = parse_size_and_seconds(payload)
    return Reply(
        silo_name,
        num_examples,
        tensors=records.get("tensors", {}),
        evaluations=Evaluations(*(unflatten_answers(records.get(record, {})) for record in ("received", "local"))),
        answers=unflatten_answers(records.get("answers", {})),
        extras=records.get("extras", {}),
        sent_bytes=sum(size_in_bytes(records[record]) for record in (("answers",) if task else ("tensors", "extras"))),
        seconds=seconds,
        note=escape_text(payload.get("note", "")),
    )


def parse_size_and_seconds(payload: Mapping[str, Any]) -> tuple[int, float]:
    """Return the number of training examples and the seconds of work that a reply reports."""
    try:
        num_examples, seconds = int(payload["num_examples"]), float(payload["seconds"])
    except (KeyError, TypeError, ValueError, OverflowError):
        raise InputError("the reply contains no valid number of examples or seconds") from None
    return num_examples, seconds if math.isfinite(seconds) else 0.0


def compute_max_bytes(broadcast: Broadcast) -> int:
    """Return the bytes that a record of a reply may have: some multiple of what the silo received."""
    codeword_bytes = sum(8 * t.shape[-1] for n, t in broadcast.model_state.items() if is_codeword_tensor(n))
    num_new_codewords = int(broadcast.extras.get("num_codewords", torch.tensor(0)))
    return SPARE_BYTES + 4 * size_in_bytes(broadcast.model_state) + 2 * num_new_codewords * codeword_bytes


def find_count_error(num_examples: int, request: ReplyRequest) -> str:
    """Return why a number of training examples, which is the weight in the average, is not accepted."""
    lowest = 1 if request.max_examples > request.num_examples else request.num_examples
    if lowest <= num_examples <= request.max_examples:
        return ""
    allowed = "" if lowest == request.max_examples else f"; at most {request.max_examples} are accepted"
    return f"the reply reports {num_examples} examples, but the silo registered {request.num_examples}{allowed}"


def find_split_error(reply: Reply, request: ReplyRequest) -> str:
    """Return which answer was not requested; a silo leaves out splits without examples."""
    received_splits = () if request.task else request.splits
    for by_split, splits in (
        (reply.answers, request.splits if request.task else ()),
        (reply.evaluations.received, received_splits),
        (reply.evaluations.local, request.local_splits),
    ):
        if unexpected := by_split.keys() - set(splits):
            return f"split {min(unexpected)} was not requested"
    return ""


def find_value_error(tensors: Mapping[str, Tensor], limit: float) -> str:
    """Return which tensor has a value that is not finite or implausibly large."""
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            return f"{name} is not finite"
        if tensor.is_floating_point() and tensor.numel() and float(tensor.double().abs().max()) > limit:
            return f"{name} has a value above {limit:g}"
    return ""


def find_sum_error(split: str, answer: Tensors, num_examples: int) -> str:
    """Return what is wrong with the number of examples in an answer, by which sums are divided."""
    if "num_examples" not in answer:
        return ""
    count = float(answer["num_examples"])
    if count < 1 or (split == "train" and count != num_examples):
        return f"the answer for {split} is a sum over {count:g} examples"
    return ""


def readdress_broadcast(broadcast: Broadcast, silo_name: str) -> Broadcast:
    """Return the broadcast addressed to another silo."""
    return broadcast._replace(silo_names=(silo_name,), participants=(silo_name,))


def get_shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tensors, by name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
