"""A poisoned reply is rejected with a reason, and the round continues with the other silos."""

import json
import math

import numpy as np
import pytest
import torch
from flwr.app import Array, ConfigRecord, Message, RecordDict
from small_federation import make_experiment, make_flower_engine, make_grid, run_rounds

from uefl.core.federation import is_codeword_tensor
from uefl.flower.wire import PAYLOAD_RECORD, pack_content, read_payload, read_tensors


def make_array_record(arrays):
    """Return a record as a silo would send it."""
    return pack_content({}, changed={n: torch.as_tensor(a) for n, a in arrays.items()})["changed"]


def forge_replies(record, changes, payload_changes=None):
    """Return a tamper function: silo D2-1 changes a record and the payload of its replies to training."""

    def tamper(message, reply):
        payload = read_payload(message)
        if payload.get("silo") != "D2-1" or "evaluate" not in payload:
            return reply
        content = RecordDict(dict(reply.content))
        content[record] = make_array_record(changes({n: t.numpy() for n, t in read_tensors(reply, record).items()}))
        content[PAYLOAD_RECORD] = ConfigRecord({"json": json.dumps({**read_payload(reply), **(payload_changes or {})})})
        return Message(content, reply_to=message)

    return tamper


def change_first_tensor(tensors, change):
    name = next(n for n, a in tensors.items() if a.dtype.kind == "f" and a.size)
    return {**tensors, name: change(tensors[name])}


POISONED_REPLIES = {
    "NaN": (lambda s: change_first_tensor(s, lambda a: a * math.nan), None, "not finite"),
    "Inf": (lambda s: change_first_tensor(s, lambda a: a + math.inf), None, "not finite"),
    "wrong shape": (lambda s: change_first_tensor(s, lambda a: a[:1]), None, "shape"),
    "missing key": (lambda s: dict(list(s.items())[1:]), None, "missing"),
    "extra key": (lambda s: {**s, "strange": np.zeros(1)}, None, "not expected"),
    "wrong type": (lambda s: change_first_tensor(s, lambda a: a.astype(np.complex64)), None, "no message may contain"),
    "no examples": (lambda s: s, {"num_examples": 0}, "not a positive number"),
    "negative count": (lambda s: s, {"num_examples": -5}, "not a positive number"),
    "huge count": (lambda s: s, {"num_examples": 10**400}, "but the silo registered"),
    "no count": (lambda s: s, {"num_examples": None}, "no valid number of examples"),
    "another name": (lambda s: s, {"silo": "D1-1"}, "now identifies itself as silo 'D1-1'"),
    "more codewords": (
        lambda s: {n: np.concatenate([a, a]) if is_codeword_tensor(n) else a for n, a in s.items()},
        None,
        "shape",
    ),
}


@pytest.mark.parametrize("kind", POISONED_REPLIES)
def test_a_poisoned_reply_is_rejected_with_a_reason(kind, tmp_path):
    changes, payload_changes, reason = POISONED_REPLIES[kind]
    experiment, grid = make_experiment("vq-fedavg", rounds=2, iterations=1), make_grid(tmp_path)
    grid.tamper = forge_replies("tensors", changes, payload_changes)
    server, records = run_rounds(make_flower_engine(grid, experiment), experiment)
    for record in records if kind != "more codewords" else records[1:]:  # the first round has no codewords yet
        assert reason in record["silos"]["D2-1"]["rejected"]
        assert "rejected" not in record["silos"]["D1-1"]
    assert all(bool(torch.isfinite(t).all()) for t in server.model_state.values())


@pytest.mark.parametrize("record", ["received", "local"])
@pytest.mark.parametrize(
    "changes",
    [
        lambda s: {n: a * math.nan for n, a in s.items()},
        lambda s: change_first_tensor(s, lambda a: a * math.nan),
        lambda s: dict(list(s.items())[1:]),
        lambda s: {n: np.zeros(7) for n in s},
    ],
    ids=["NaN", "one NaN", "missing", "wrong shape"],
)
def test_poisoned_evaluations_are_rejected_too(changes, record, tmp_path):
    experiment, grid = make_experiment("fedavg", rounds=2, iterations=1), make_grid(tmp_path)
    grid.tamper = forge_replies(record, changes)
    _, records = run_rounds(make_flower_engine(grid, experiment), experiment)
    assert all("rejected" in record["silos"]["D2-1"] for record in records)


def test_bytes_that_are_no_tensor_are_rejected(tmp_path):
    experiment, grid = make_experiment("fedavg", rounds=1, iterations=1), make_grid(tmp_path)

    def tamper(message, reply):
        if read_payload(message).get("silo") == "D2-1" and "tensors" in reply.content:
            (name,) = reply.content["tensors"]
            reply.content["tensors"][name] = Array("uint8", (15,), name, b"no array at all")
        return reply

    grid.tamper = tamper
    _, records = run_rounds(make_flower_engine(grid, experiment), experiment)
    assert "record tensors cannot be read" in records[0]["silos"]["D2-1"]["rejected"]


def forge_centroids(change):
    """Return a tamper function: silo D2-1 changes its centroids."""

    def tamper(message, reply):
        payload = read_payload(message)
        if payload.get("task") == "compute_centroids" and payload["silo"] == "D2-1":
            arrays = {n: change(t.numpy()) for n, t in read_tensors(reply, "answers").items()}
            reply.content["answers"] = make_array_record(arrays)
        return reply

    return tamper


def has_queried_centroids(grid):
    payloads = map(read_payload, grid.sent_messages)
    return any(p.get("task") == "compute_centroids" and p["silo"] == "D2-1" for p in payloads)


@pytest.mark.parametrize("value", [math.nan, 1e400])
def test_poisoned_centroids_never_become_codewords(value, tmp_path):
    experiment, grid = make_experiment("uefl"), make_grid(tmp_path)
    grid.tamper = forge_centroids(lambda a: a * value)
    server, _ = run_rounds(make_flower_engine(grid, experiment), experiment)
    assert has_queried_centroids(grid)
    assert all(bool(torch.isfinite(t).all()) for t in server.model_state.values())


def test_centroids_of_the_wrong_width_never_become_codewords(tmp_path):
    experiment, grid = make_experiment("uefl"), make_grid(tmp_path)
    grid.tamper = forge_centroids(lambda a: a[..., :1])
    run_rounds(make_flower_engine(grid, experiment), experiment)
    assert has_queried_centroids(grid)
