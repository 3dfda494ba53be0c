"""The format of messages: the tensors of a record travel as one Flower array, everything else as one JSON text.

Flower transfers every record and every array with separate requests, at the SuperLink, the node and the app. One array
for each tensor of a network would take longer than most training, so they travel together, in the format of a
safetensors file. In a small message these bytes travel in the record of the JSON text, which saves further requests.

Both ends read messages of a sender that they do not trust: bytes, nesting and data types are bounded before anything
is decoded, and every message names the versions of its sender.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from safetensors.numpy import save
from safetensors.torch import load
from torch import Tensor

from uefl import __version__
from uefl.core.errors import InputError
from uefl.core.federation import Tensors
from uefl.core.untrusted_text import escape_text

WIRE_VERSION = 2  # raise it when the content of messages changes
PAYLOAD_RECORD = "uefl"
VERSIONS = "versions"  # key of the payload
ARRAY_FORMAT = "safetensors"
PACKED_PREFIX = "tensors/"  # then the name of a record: its bytes in the payload record of a small message
MAX_PACKED_BYTES = 4 << 20  # Flower splits arrays of more than 5 MiB, but no other values
SEPARATOR = "|"  # between the name of an answer and the name of its tensor
MAX_JSON_LENGTH = 1 << 20  # characters of a payload
MAX_JSON_DEPTH = 16  # nested lists and tables of a payload; an experiment needs 5
MAX_RECORD_BYTES = 1 << 34  # of one record, where no smaller limit is known
MAX_HEADER_BYTES = 1 << 23  # names and shapes of one record
ALLOWED_DTYPES = (
    torch.float16,
    torch.float32,
    torch.float64,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
)
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', re.DOTALL)


def pack_content(payload: Mapping[str, Any], **records: Mapping[str, Tensor]) -> RecordDict:
    """Return the content of a message. The JSON payload holds settings and counts, never data."""
    arrays = {name: _make_array_record(tensors) for name, tensors in records.items() if tensors}
    text = json.dumps({VERSIONS: {"uefl": __version__, "wire": WIRE_VERSION}, **payload})
    return RecordDict({PAYLOAD_RECORD: ConfigRecord({"json": text}), **arrays})


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
    return Message(pack_small_content(content), node_id, message_type, ttl=max(ttl, 1.0), group_id=group_id)


def pack_small_content(content: RecordDict) -> RecordDict:
    """Return the content of a small message as a single record, which takes Flower a quarter of the requests."""
    if count_bytes(content) > MAX_PACKED_BYTES:
        return content
    packed = {PACKED_PREFIX + name: record[ARRAY_FORMAT].data for name, record in content.array_records.items()}
    return RecordDict({PAYLOAD_RECORD: ConfigRecord({**content.config_records[PAYLOAD_RECORD], **packed})})


@contextmanager
def reject_unreadable() -> Iterator[None]:
    """Turn every exception while a message is read into an `InputError` of one safe line."""
    try:
        yield
    except InputError as e:
        raise type(e)(escape_text(e)) from e
    except Exception as e:  # the sender chooses what is decoded, so any exception is possible
        raise InputError(f"the message cannot be read ({escape_text(f'{type(e).__name__}: {e}', 200)})") from e


def read_payload(message: Message) -> dict[str, Any]:
    """Return the JSON payload of a message from an untrusted sender."""
    try:
        payload = parse_json(message.content.config_records[PAYLOAD_RECORD]["json"])
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as e:
        reason = f": {e}" if isinstance(e, InputError) else ""
        raise InputError(f"the message has no readable payload{reason}") from e
    if not isinstance(payload, dict):
        raise InputError("the message has no readable payload")
    return payload


def parse_json(text: object) -> Any:
    """Parse JSON of bounded length and depth: the parser itself would recurse as deep as the sender wants."""
    if not isinstance(text, str) or len(text) > MAX_JSON_LENGTH:
        raise InputError(f"it is no text of at most {MAX_JSON_LENGTH} characters")
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(text):
        depth += (match[0] in "[{") - (match[0] in "]}")
        if depth > MAX_JSON_DEPTH:
            raise InputError(f"it is nested deeper than {MAX_JSON_DEPTH} levels")
    return json.loads(text)


def read_reply_payload(message: Message) -> dict[str, Any]:
    """Return the JSON payload of a reply; raise an `InputError` if the node failed."""
    if message.has_error():
        lines = (message.error.reason or "no reason given").strip().splitlines()
        raise InputError(f"missing: the node failed (code {message.error.code}: {escape_text(lines[-1])})")
    payload = read_payload(message)
    check_versions(payload, f"silo {payload.get('silo') or '?'}", "the coordinator")
    return payload


def check_versions(payload: Mapping[str, Any], sender: str, receiver: str) -> None:
    """Raise an `InputError` that names both versions if the sender has another version than this installation."""
    versions = payload.get(VERSIONS)
    received = versions if isinstance(versions, dict) else {}
    if received == {"uefl": __version__, "wire": WIRE_VERSION}:
        return
    uefl_version, wire_version = (escape_text(received.get(name, "unknown"), 40) for name in ("uefl", "wire"))
    raise InputError(
        f"{sender} runs uefl {uefl_version} (wire {wire_version}), but {receiver} runs uefl {__version__} "
        f"(wire {WIRE_VERSION}); install the same version of uefl at both"
    )


def read_tensors(message: Message, record: str, max_bytes: int = MAX_RECORD_BYTES) -> Tensors:
    """Return the tensors of one record of a message, or none if the message has no such record."""
    try:
        data = _find_bytes(message.content, record)
        tensors = {} if data is None else load(_check_bytes(data, max_bytes))
    except Exception as e:  # bytes of an untrusted sender
        raise InputError(f"record {record} cannot be read ({escape_text(e, 200)})") from e
    for name, tensor in tensors.items():
        if tensor.dtype not in ALLOWED_DTYPES:
            raise InputError(f"{escape_text(name, 100)} is {tensor.dtype}, which no message may contain")
    return {n: tensors[n] for n in sorted(tensors)}  # sums have the same bits only in a fixed order


def count_bytes(content: RecordDict) -> int:
    """Return the bytes of a message's tensors and payload."""
    arrays = [array for record in content.array_records.values() for array in record.values()]
    values = [value for record in content.config_records.values() for value in record.values()]
    return sum(len(array.data) for array in arrays) + sum(len(v) for v in values if isinstance(v, str | bytes))


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


def _find_bytes(content: RecordDict, record: str) -> object:
    """Return the bytes of a record, which are in the payload record of a small message; nothing if there are none."""
    payload, arrays = content.config_records.get(PAYLOAD_RECORD), content.array_records.get(record)
    packed = payload.get(PACKED_PREFIX + record) if payload else None
    return arrays[ARRAY_FORMAT].data if packed is None and arrays else packed


def _check_bytes(data: object, max_bytes: int) -> bytes:
    """Return the bytes of a record, if neither they nor their header are too long."""
    if not isinstance(data, bytes):
        raise InputError("it is no sequence of bytes")
    if len(data) > max_bytes:
        raise InputError(f"it has {len(data)} bytes, at most {max_bytes} are allowed")
    if int.from_bytes(data[:8], "little") > MAX_HEADER_BYTES:  # the format starts with the length of its header
        raise InputError(f"its header has more than {MAX_HEADER_BYTES} bytes")
    return data
