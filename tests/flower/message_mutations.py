"""Seeded mutations of real replies, as a silo that is broken or hostile would send them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from safetensors.torch import load, save

from uefl.flower.wire import ARRAY_FORMAT, PACKED_PREFIX, PAYLOAD_RECORD, pack_small_content

HOSTILE_TEXTS = (
    "[/red]",
    "[bold red]all silos agree[/bold red]",
    "\x1b[2J\x1b[31mround 7 finished\x1b[0m",
    "line\nuefl: round 3, reply of D1-1 rejected: forged",
    "\u202egnirts desrever\u2029\x00\ud800",
    "x" * 100_000,
)
HOSTILE_VALUES = (
    None,
    True,
    -1,
    10**400,
    1e308,
    float("nan"),
    float("inf"),
    [],
    {},
    [[]] * 3,
    {"uefl": "9.9", "wire": "x"},
    *HOSTILE_TEXTS,
)
EXOTIC_DTYPES = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.bfloat16,
    torch.uint16,
    torch.int8,
    torch.int16,
    torch.complex64,
    torch.float16,
    torch.int64,
    torch.bool,
)
HUGE_FACTORS = (float("nan"), float("inf"), 1e15, 1e30, 3e38, 1e300, -1e39)

Mutation = Callable[[RecordDict, random.Random], None]


def mutate_reply(message: Message, reply: Message, rng: random.Random) -> Message:
    """Return a copy of a reply with one to three random mutations."""
    if rng.random() < 0.02:
        return Message(Error(rng.choice((0, 2, 8)), rng.choice(HOSTILE_TEXTS)), reply_to=message)
    content = copy_content(reply.content)
    for _ in range(rng.randint(1, 3)):
        rng.choice(MUTATIONS)(content, rng)
    if rng.random() < 0.5:  # the form in which a node sends small replies
        pack_content(content, rng)
    return Message(content, reply_to=message)


def copy_content(content: RecordDict) -> RecordDict:
    arrays = {
        name: ArrayRecord({key: Array(a.dtype, a.shape, a.stype, a.data) for key, a in record.items()})
        for name, record in content.array_records.items()
    }
    return RecordDict({**{name: ConfigRecord(dict(r)) for name, r in content.config_records.items()}, **arrays})


def pack_content(content: RecordDict, rng: random.Random) -> None:
    """Move tensors into the payload record; some of them become values of another type."""
    try:
        packed = pack_small_content(content)[PAYLOAD_RECORD]
    except Exception:
        return  # mutated before
    for name in [name for name in packed if name.startswith(PACKED_PREFIX) and rng.random() < 0.1]:
        packed[name] = rng.choice(("text", 1.5, True, [1, 2], [b"a"], b"", packed[name] * 2))
    content.clear()
    content[PAYLOAD_RECORD] = packed


def flip_bytes(content: RecordDict, rng: random.Random) -> None:
    change_bytes(content, rng, lambda data: [data.__setitem__(rng.randrange(len(data)), rng.randrange(256))])


def flip_header_bytes(content: RecordDict, rng: random.Random) -> None:
    change_bytes(content, rng, lambda data: [data.__setitem__(rng.randrange(min(200, len(data))), rng.randrange(256))])


def cut_bytes(content: RecordDict, rng: random.Random) -> None:
    change_bytes(content, rng, lambda data: data.__delitem__(slice(rng.randrange(len(data)), None)))


def add_bytes(content: RecordDict, rng: random.Random) -> None:
    change_bytes(content, rng, lambda data: data.extend(rng.randbytes(rng.randrange(1, 999))))


def change_bytes(content: RecordDict, rng: random.Random, change: Callable[[bytearray], object]) -> None:
    names = sorted(content.array_records)
    if not names:
        return
    record = content.array_records[rng.choice(names)]
    data = bytearray(record[ARRAY_FORMAT].data) if ARRAY_FORMAT in record else bytearray()
    if data:
        change(data)
        record[ARRAY_FORMAT] = Array("uint8", (len(data),), ARRAY_FORMAT, bytes(data))


def remove_record(content: RecordDict, rng: random.Random) -> None:
    if content:
        del content[rng.choice(sorted(content))]


def rename_record(content: RecordDict, rng: random.Random) -> None:
    names = sorted(content.array_records)
    if names:
        name = rng.choice(names)
        record = content.array_records[name]
        del content[name]
        content[rng.choice(("tensors", "extras", "answers", "received", "local", "[/red]"))] = record


def replace_record(content: RecordDict, rng: random.Random) -> None:
    name = rng.choice(("tensors", "extras", "answers", "received", "local", PAYLOAD_RECORD))
    if name in content:
        del content[name]
    content[name] = rng.choice(
        (ConfigRecord({"json": b"x"}), ConfigRecord({"json": [1, 2]}), MetricRecord({"a": 1}), ArrayRecord({}))
    )


def replace_array(content: RecordDict, rng: random.Random) -> None:
    names = sorted(content.array_records)
    if names:
        record = content.array_records[rng.choice(names)]
        stype, data = rng.choice((ARRAY_FORMAT, "numpy.ndarray")), rng.randbytes(rng.randrange(0, 64))
        record[rng.choice((ARRAY_FORMAT, "other"))] = Array("float32", (-1, 2**40), stype, data)


def change_tensors(content: RecordDict, rng: random.Random) -> None:
    names = sorted(content.array_records)
    if not names:
        return
    record = content.array_records[rng.choice(names)]
    try:
        tensors = load(record[ARRAY_FORMAT].data)
    except Exception:
        return  # mutated before
    if not tensors:
        return
    name = rng.choice(sorted(tensors))
    tensor = tensors.pop(name)
    kind = rng.randrange(6)
    if kind == 0:
        tensors[name] = tensor.to(rng.choice(EXOTIC_DTYPES))
    elif kind == 1:
        tensors[name] = tensor.double() * rng.choice(HUGE_FACTORS)
    elif kind == 2:
        tensors[name] = (tensor.double() * rng.choice(HUGE_FACTORS)).to(tensor.dtype)
    elif kind == 3:
        tensors[rng.choice(HOSTILE_TEXTS[:4]) + name] = tensor
    elif kind == 4:
        tensors[name] = rng.choice((tensor[None], tensor.flatten()[:1], torch.zeros(0), torch.zeros(2**20)))
    # else the tensor is missing
    data = save({n: t.contiguous() for n, t in tensors.items()})
    record[ARRAY_FORMAT] = Array("uint8", (len(data),), ARRAY_FORMAT, data)


def change_payload(content: RecordDict, rng: random.Random) -> None:
    try:
        payload = dict(json.loads(content.config_records[PAYLOAD_RECORD]["json"]))
        key = rng.choice((*payload, "rejected", "new"))
    except Exception:
        return  # mutated before
    if rng.random() < 0.2:
        payload.pop(key, None)
    else:
        payload[key] = rng.choice(HOSTILE_VALUES)
    content[PAYLOAD_RECORD] = ConfigRecord({"json": json.dumps(payload)})


def replace_payload(content: RecordDict, rng: random.Random) -> None:
    texts = (
        "[" * 100_000,
        '{"a":' * 50_000 + "1" + "}" * 50_000,
        '{"silo": "' + "[" * 2_000_000,
        "9" * 5000,
        "null",
        "[]",
        '"text"',
        "{",
        "\x00",
    )
    content[PAYLOAD_RECORD] = ConfigRecord({"json": rng.choice(texts)})


MUTATIONS: tuple[Mutation, ...] = (
    flip_bytes,
    flip_header_bytes,
    cut_bytes,
    add_bytes,
    remove_record,
    rename_record,
    replace_record,
    replace_array,
    change_tensors,
    change_tensors,
    change_payload,
    change_payload,
    replace_payload,
)
