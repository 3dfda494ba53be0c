"""What travels: named tensors as one Flower array a record, everything else as one piece of JSON.

Flower moves every array with requests of its own, at the SuperLink, the node and the app. A network's fifty tensors as
fifty arrays cost more than most training, so they travel together, in the form of a safetensors file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from safetensors import SafetensorError
from safetensors.numpy import save
from safetensors.torch import load
from torch import Tensor

from uefl.errors import InputError
from uefl.federation import State

BODY = "uefl"
FORM = "safetensors"
SEPARATOR = "|"  # between the name of an answer and that of its tensor


def packed(body: Mapping[str, Any], **tensors: Mapping[str, Tensor]) -> RecordDict:
    """A message's content. The JSON holds settings and counts, never data."""
    records = {name: _record(state) for name, state in tensors.items() if state}
    return RecordDict({BODY: ConfigRecord({"json": json.dumps(body)}), **records})


def letter(
    told: Mapping[str, Any],
    node: int,
    kind: Literal["query", "train", "evaluate"],
    *,
    life: float,
    **tensors: Mapping[str, Tensor],
) -> Message:
    """A message to a node; nobody answers it after its life is over."""
    return Message(packed(told, **tensors), node, kind, ttl=max(life, 1.0), group_id=str(told.get("round", "")))


def body(message: Message) -> dict[str, Any]:
    """The JSON of a message, from somebody who may not wish us well."""
    try:
        text = message.content.config_records[BODY]["json"]
        found = json.loads(text)  # type: ignore[arg-type]
    except (KeyError, TypeError, ValueError) as e:
        raise InputError("message without a readable body") from e
    if not isinstance(found, dict):
        raise InputError("message without a readable body")
    return found


def said(message: Message) -> dict[str, Any]:
    """The JSON of a reply; a node that failed has none."""
    if message.has_error():
        lines = (message.error.reason or "no reason given").strip().splitlines()
        raise InputError(f"missing: its node failed (code {message.error.code}: {lines[-1]})")
    return body(message)


def tensors(message: Message, name: str) -> State:
    """The named tensors of a message; none if it has no such record."""
    found = message.content.array_records.get(name)
    try:
        state = load(found[FORM].data) if found else {}
    except (KeyError, TypeError, ValueError, SafetensorError) as e:
        raise InputError(f"{name}: a tensor cannot be read ({e})") from e
    return {n: state[n] for n in sorted(state)}  # they come in any order, and the same bits need the same one


def halved(state: State) -> State:
    """In half precision, if asked for: half the bytes, three digits."""
    return {n: t.half() if t.dtype in (torch.float32, torch.float64) else t for n, t in state.items()}


def whole(state: State, dtype: torch.dtype) -> State:
    """Half precision back to the precision we compute in."""
    return {n: t.to(dtype) if t.dtype == torch.float16 else t for n, t in state.items()}


def flat(answers: Mapping[str, State]) -> State:
    """Answers by name as one record of tensors."""
    return {f"{name}{SEPARATOR}{n}": t for name, answer in answers.items() for n, t in answer.items()}


def unflat(tensors: State) -> dict[str, State]:
    """Answers by name, again."""
    answers: dict[str, State] = {}
    for full, tensor in tensors.items():
        name, _, inner = full.partition(SEPARATOR)
        answers.setdefault(name, {})[inner] = tensor
    return answers


def _record(state: Mapping[str, Tensor]) -> ArrayRecord:
    data = save({name: tensor.detach().cpu().contiguous().numpy() for name, tensor in state.items()})
    return ArrayRecord({FORM: Array("uint8", (len(data),), FORM, data)})
