"""The format of messages: the tensors of a record travel as one Flower array, everything else as one JSON text.

Flower transfers every array with separate requests, at the SuperLink, the node and the app. One array for each tensor
of a network would take longer than most training, so they travel together, in the format of a safetensors file.
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

from uefl.core.errors import InputError
from uefl.core.federation import Tensors

PAYLOAD_RECORD = "uefl"
ARRAY_FORMAT = "safetensors"
SEPARATOR = "|"  # between the name of an answer and the name of its tensor


def pack_content(payload: Mapping[str, Any], **records: Mapping[str, Tensor]) -> RecordDict:
    """Return the content of a message. The JSON payload holds settings and counts, never data."""
    arrays = {name: _make_array_record(tensors) for name, tensors in records.items() if tensors}
    return RecordDict({PAYLOAD_RECORD: ConfigRecord({"json": json.dumps(payload)}), **arrays})


def make_message(
    payload: Mapping[str, Any],
    node_id: int,
    message_type: Literal["query", "train", "evaluate"],
    *,
    ttl: float,
    **records: Mapping[str, Tensor],
) -> Message:
    """Return a message to a node; Flower drops it after `ttl` seconds."""
    content, group_id = pack_content(payload, **records), str(payload.get("round", ""))
    return Message(content, node_id, message_type, ttl=max(ttl, 1.0), group_id=group_id)


def read_payload(message: Message) -> dict[str, Any]:
    """Return the JSON payload of a message from an untrusted sender."""
    try:
        text = message.content.config_records[PAYLOAD_RECORD]["json"]
        payload = json.loads(text)  # type: ignore[arg-type]
    except (KeyError, TypeError, ValueError) as e:
        raise InputError("the message has no readable payload") from e
    if not isinstance(payload, dict):
        raise InputError("the message has no readable payload")
    return payload


def read_reply_payload(message: Message) -> dict[str, Any]:
    """Return the JSON payload of a reply; raise an `InputError` if the node failed."""
    if message.has_error():
        lines = (message.error.reason or "no reason given").strip().splitlines()
        raise InputError(f"missing: the node failed (code {message.error.code}: {lines[-1]})")
    return read_payload(message)


def read_tensors(message: Message, record: str) -> Tensors:
    """Return the tensors of one record of a message, or none if the message has no such record."""
    arrays = message.content.array_records.get(record)
    try:
        tensors = load(arrays[ARRAY_FORMAT].data) if arrays else {}
    except (KeyError, TypeError, ValueError, SafetensorError) as e:
        raise InputError(f"record {record} cannot be read ({e})") from e
    return {n: tensors[n] for n in sorted(tensors)}  # sums have the same bits only in a fixed order


def cast_to_half(tensors: Tensors) -> Tensors:
    """Return the tensors with floats in half precision: half the bytes, three digits."""
    return {n: t.half() if t.dtype in (torch.float32, torch.float64) else t for n, t in tensors.items()}


def cast_from_half(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    """Return the tensors with half precision converted to the precision of computations."""
    return {n: t.to(dtype) if t.dtype == torch.float16 else t for n, t in tensors.items()}


def flatten_answers(answers: Mapping[str, Tensors]) -> Tensors:
    """Return answers as the tensors of one record."""
    return {f"{name}{SEPARATOR}{n}": t for name, answer in answers.items() for n, t in answer.items()}


def unflatten_answers(tensors: Tensors) -> dict[str, Tensors]:
    """Return the tensors of one record as answers by name."""
    answers: dict[str, Tensors] = {}
    for full_name, tensor in tensors.items():
        name, _, tensor_name = full_name.partition(SEPARATOR)
        answers.setdefault(name, {})[tensor_name] = tensor
    return answers


def _make_array_record(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    data = save({name: tensor.detach().cpu().contiguous().numpy() for name, tensor in tensors.items()})
    return ArrayRecord({ARRAY_FORMAT: Array("uint8", (len(data),), ARRAY_FORMAT, data)})
