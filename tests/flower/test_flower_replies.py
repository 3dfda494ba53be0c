"""A poisoned reply is refused and named, and the round goes on with the others."""

import json
import math

import numpy as np
import pytest
import torch
from federating import driven, experiment, flower, in_process
from flwr.app import Array, ConfigRecord, Message, RecordDict

from uefl.flower.wire import BODY, body, packed, tensors


def record(arrays):
    """A record as a silo would send it."""
    return packed({}, changed={n: torch.as_tensor(a) for n, a in arrays.items()})["changed"]


def forged(kind, changes, told=None):
    """Silo D2-1 changes tensors of its replies to training."""

    def tamper(sent, reply):
        order = body(sent)
        if order.get("silo") != "D2-1" or "measure" not in order:
            return reply
        content = RecordDict(dict(reply.content))
        content[kind] = record(changes({n: t.numpy() for n, t in tensors(reply, kind).items()}))
        content[BODY] = ConfigRecord({"json": json.dumps({**body(reply), **(told or {})})})
        return Message(content, reply_to=sent)

    return tamper


def first(state, value):
    name = next(n for n, a in state.items() if a.dtype.kind == "f" and a.size)
    return {**state, name: value(state[name])}


POISON = {
    "NaN": (lambda s: first(s, lambda a: a * math.nan), None, "not finite"),
    "Inf": (lambda s: first(s, lambda a: a + math.inf), None, "not finite"),
    "wrong shape": (lambda s: first(s, lambda a: a[:1]), None, "shape"),
    "missing key": (lambda s: dict(list(s.items())[1:]), None, "missing"),
    "extra key": (lambda s: {**s, "strange": np.zeros(1)}, None, "not expected"),
    "wrong kind": (lambda s: first(s, lambda a: a.astype(np.complex64)), None, "expected torch.float64"),
    "no examples": (lambda s: s, {"size": 0}, "not a positive number"),
    "negative count": (lambda s: s, {"size": -5}, "not a positive number"),
    "huge count": (lambda s: s, {"size": 10**400}, "at the start it said"),
    "no count": (lambda s: s, {"size": None}, "how many"),
    "another name": (lambda s: s, {"silo": "D1-1"}, "calls itself"),
    "more words": (
        lambda s: {n: np.concatenate([a, a]) if n.endswith("words") else a for n, a in s.items()},
        None,
        "shape",
    ),
}


@pytest.mark.parametrize("kind", POISON)
def test_a_poisoned_reply_is_refused_and_named(kind, tmp_path):
    changes, told, why = POISON[kind]
    what = experiment("vq-fedavg", rounds=2, iterations=1)
    grid = in_process(tmp_path)
    grid.tamper = forged("tensors", changes, told)
    server, records = driven(flower(grid, what), what)
    for record in records if kind != "more words" else records[1:]:  # there are no words before the first book
        assert why in record["silos"]["D2-1"]["refused"]
        assert "refused" not in record["silos"]["D1-1"]
    assert all(bool(torch.isfinite(t).all()) for t in server.state.values())


@pytest.mark.parametrize(
    "changes",
    [
        lambda s: {n: a * math.nan for n, a in s.items()},
        lambda s: first(s, lambda a: a * math.nan),
        lambda s: dict(list(s.items())[1:]),
        lambda s: {n: np.zeros(7) for n in s},
    ],
    ids=["NaN", "one NaN", "missing", "wrong shape"],
)
def test_poisoned_measurements_are_refused_too(changes, tmp_path):
    what = experiment("fedavg", rounds=2, iterations=1)
    grid = in_process(tmp_path)
    grid.tamper = forged("answers", changes)
    _, records = driven(flower(grid, what), what)
    assert all("refused" in record["silos"]["D2-1"] for record in records)


def test_bytes_that_are_no_tensor_are_refused(tmp_path):
    what = experiment("fedavg", rounds=1, iterations=1)
    grid = in_process(tmp_path)

    def tamper(sent, reply):
        if body(sent).get("silo") == "D2-1" and "tensors" in reply.content:
            (name,) = reply.content["tensors"]
            reply.content["tensors"][name] = Array("uint8", (15,), name, b"no array at all")
        return reply

    grid.tamper = tamper
    _, records = driven(flower(grid, what), what)
    assert "cannot be read" in records[0]["silos"]["D2-1"]["refused"]


@pytest.mark.parametrize("value", [math.nan, 1e400])
def test_poisoned_centroids_never_become_words(value, tmp_path):
    what = experiment("uefl")
    grid = in_process(tmp_path)

    def tamper(sent, reply):
        if body(sent).get("task") == "centroids" and body(sent)["silo"] == "D2-1":
            state = {n: t.numpy() * value for n, t in tensors(reply, "answers").items()}
            reply.content["answers"] = record(state)
        return reply

    grid.tamper = tamper
    server, _ = driven(flower(grid, what), what)
    assert all(bool(torch.isfinite(t).all()) for t in server.state.values())


def test_centroids_of_the_wrong_width_never_become_words(tmp_path):
    what = experiment("uefl")
    grid = in_process(tmp_path)

    def tamper(sent, reply):
        if body(sent).get("task") == "centroids" and body(sent)["silo"] == "D2-1":
            state = {n: t.numpy()[..., :1] for n, t in tensors(reply, "answers").items()}
            reply.content["answers"] = record(state)
        return reply

    grid.tamper = tamper
    driven(flower(grid, what), what)
