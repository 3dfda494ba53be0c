"""No reply can stop a run, enter a checkpoint or forge a line: 2000 mutated replies, and whole rounds with them."""

import json
import random
import time
from dataclasses import replace
from threading import Event

import pytest
import torch
from message_mutations import HOSTILE_TEXTS, mutate_reply
from small_federation import QUICK_POLICY, make_experiment, make_flower_engine, make_grid, run_rounds
from test_flower_replies import change_first_tensor, forge_centroids, forge_replies

from uefl.core.aggregate import find_non_finite
from uefl.core.errors import InputError, ResumableError
from uefl.core.untrusted_text import escape_text
from uefl.experiment.checkpoint import save_checkpoint
from uefl.flower.wire import MAX_JSON_DEPTH, parse_json, read_payload

NUM_MUTATIONS = 2000


def record_exchanges(engine, grid):
    """Return a list that fills with all messages, replies and arguments of the reader."""
    exchanges, replies, read = [], {}, engine._reader.read_reply
    grid.tamper = lambda message, reply: replies.setdefault(id(reply), (message, reply))[1]

    def record(reply, *arguments):
        exchanges.append((*replies[id(reply)], arguments))
        return read(reply, *arguments)

    engine._reader.read_reply = record
    return exchanges, read


def test_no_mutated_reply_raises_anything_but_an_input_error_of_one_line(tmp_path):
    experiment, grid = make_experiment("uefl"), make_grid(tmp_path)
    engine = make_flower_engine(grid, experiment)
    exchanges, read = record_exchanges(engine, grid)
    run_rounds(engine, experiment)
    kinds = {arguments[2].task: (message, reply, arguments) for message, reply, arguments in exchanges}
    assert set(kinds) == {"", "evaluate", "compute_centroids"}
    rng, reasons = random.Random(0), []
    for i in range(NUM_MUTATIONS):
        message, reply, arguments = kinds[sorted(kinds)[i % 3]]
        try:
            accepted, _ = read(mutate_reply(message, reply, rng), *arguments)
        except InputError as e:
            reasons.append(str(e))
        else:
            answers = [*accepted.answers.values(), *accepted.evaluations.received.values()]
            for tensors in (accepted.tensors, accepted.extras, *answers):
                assert not find_non_finite(tensors), f"mutation {i} was accepted"
            assert accepted.note == escape_text(accepted.note)
    assert len(reasons) > 0.7 * NUM_MUTATIONS  # some mutations change only low digits or a note
    assert [escape_text(reason) for reason in reasons] == reasons


@pytest.mark.parametrize("seed", range(3))
def test_rounds_complete_without_a_silo_that_sends_mutated_replies(seed, tmp_path):
    experiment, grid, rng = make_experiment("uefl"), make_grid(tmp_path), random.Random(seed)
    engine = make_flower_engine(grid, experiment)  # registration is honest

    def tamper(message, reply):
        return mutate_reply(message, reply, rng) if read_payload(message).get("silo") == "D2-1" else reply

    grid.tamper = tamper
    server, records = run_rounds(engine, experiment)
    assert [record["round"] for record in records] == [1, 2, 3]
    assert any("rejected" in record["silos"]["D2-1"] for record in records)
    assert not any("rejected" in record["silos"][name] for record in records for name in ("D1-1", "D3-1"))
    save_checkpoint(tmp_path / "checkpoint.safetensors", server, {})


@pytest.mark.parametrize("seed", range(3))
def test_a_federation_starts_without_a_silo_whose_registration_is_mutated(seed, tmp_path):
    grid, rng, events = make_grid(tmp_path), random.Random(seed), []
    message_types = []

    def tamper(message, reply):
        message_types.append(message.metadata.message_type)
        return mutate_reply(message, reply, rng) if message.metadata.dst_node_id == 89 else reply

    grid.tamper = tamper
    engine = make_flower_engine(grid, make_experiment("fedavg"), on_silo_event=lambda *event: events.append(event))
    assert {"D1-1", "D3-1"} <= set(engine.num_examples)
    assert all(text == escape_text(text) for event in events for text in event)


def test_replies_that_flower_itself_cannot_decode_are_rejected(tmp_path):
    """Flower decodes while it pulls: the reply of one silo must not take the replies of others with it."""
    experiment, grid = make_experiment("fedavg", rounds=2, iterations=1), make_grid(tmp_path)
    engine, pull, hostile = make_flower_engine(grid, experiment), grid.pull_messages, set()

    def remember(message, reply):
        if read_payload(message).get("silo") == "D2-1":
            hostile.add(message.metadata.message_id)
        return reply

    def pull_messages(message_ids):
        message_ids = list(message_ids)
        replies = pull(message_ids)
        if hostile & set(message_ids):
            raise KeyError("no such object")
        return replies

    grid.tamper, grid.pull_messages = remember, pull_messages
    _, records = run_rounds(engine, experiment)
    for record in records:
        assert record["silos"]["D2-1"]["rejected"] == "the reply cannot be decoded (KeyError)"
        assert "rejected" not in record["silos"]["D1-1"]


def test_a_silo_that_does_not_complete_its_upload_delays_only_the_grace(tmp_path):
    """Flower waits for the rest of an upload while it pulls, up to two hours."""
    experiment, grid = make_experiment("fedavg", rounds=2, iterations=1), make_grid(tmp_path)
    policy = replace(QUICK_POLICY, reply_timeout=300, grace=1.0)
    engine, pull, slow, is_finished = (
        make_flower_engine(grid, experiment, policy=policy),
        grid.pull_messages,
        set(),
        Event(),
    )

    def remember(message, reply):
        if read_payload(message).get("silo") == "D2-1":
            slow.add(message.metadata.message_id)
        return reply

    def pull_messages(message_ids):
        message_ids = list(message_ids)
        if slow & set(message_ids):
            is_finished.wait(600)
        return pull(message_ids)

    grid.tamper, grid.pull_messages = remember, pull_messages
    started = time.monotonic()
    try:
        _, records = run_rounds(engine, experiment)
    finally:
        is_finished.set()
    assert time.monotonic() - started < 100
    for record in records:
        assert record["silos"]["D2-1"]["rejected"] == "missing: no reply within 1 s after the quorum was met"
        assert "rejected" not in record["silos"]["D1-1"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda a: a * 1e39 if a.ndim == 2 else a, "counts has a value above 1e+24"),
        (lambda a: a * 1e9 if a.ndim == 2 else a, "the counts of centroids sum to"),
        (lambda a: -a if a.ndim == 2 else a, "a centroid has a negative count"),
        (lambda a: a * 1e20 if a.ndim == 3 else a, "a centroid has a value above 1e+12"),
    ],
    ids=["counts of 1e39", "counts of 1e9", "negative counts", "huge centroids"],
)
def test_implausible_centroids_are_rejected(change, reason, tmp_path):
    experiment, grid = make_experiment("uefl"), make_grid(tmp_path)
    engine, reasons = make_flower_engine(grid, experiment), []
    read = engine._reader.read_reply

    def record(*arguments):
        try:
            return read(*arguments)
        except InputError as e:
            reasons.append(str(e))
            raise

    engine._reader.read_reply, grid.tamper = record, forge_centroids(change)
    server, _ = run_rounds(engine, experiment)
    assert reasons
    assert all(reason in text for text in reasons)
    assert not find_non_finite(server.model_state)


def test_weights_that_would_overflow_are_rejected(tmp_path):
    experiment, grid = make_experiment("fedavg", rounds=2, iterations=1), make_grid(tmp_path)
    grid.tamper = forge_replies("tensors", lambda s: change_first_tensor(s, lambda a: a * 0 + 3e38))
    server, records = run_rounds(make_flower_engine(grid, experiment), experiment)
    assert all("has a value above 1e+12" in record["silos"]["D2-1"]["rejected"] for record in records)
    assert not find_non_finite(server.model_state)


def test_a_state_that_is_not_finite_never_replaces_a_checkpoint(tmp_path):
    experiment = make_experiment("fedavg", rounds=1, iterations=1)
    server, _ = run_rounds(make_flower_engine(make_grid(tmp_path), experiment), experiment)
    path = tmp_path / "checkpoint.safetensors"
    save_checkpoint(path, server, {})
    before, (name, tensor) = path.read_bytes(), next(iter(server.model_state.items()))
    for state in (
        {"model_state": {**server.model_state, name: tensor * torch.nan}},
        {"method_state": {"c": 1 / tensor[:0].sum()}},
    ):
        with pytest.raises(ResumableError, match="is not finite; the previous checkpoint is kept"):
            save_checkpoint(path, server.replace(**state), {})
    assert path.read_bytes() == before


def test_an_average_that_overflows_keeps_the_previous_model(tmp_path):
    """Weights of 1e308 are finite in double precision, but their weighted sum is not."""
    experiment, grid = make_experiment("fedavg", rounds=1, iterations=1), make_grid(tmp_path)
    engine = make_flower_engine(grid, experiment)
    fit, method = engine.fit, experiment.method
    server = method.initialize_server(engine)

    def overflow(*arguments, **options):
        for reply in fit(*arguments, **options):
            yield reply._replace(
                tensors={n: t * 0 + 1e308 if t.is_floating_point() else t for n, t in reply.tensors.items()}
            )

    engine.fit = overflow
    after = method.run_round(engine, server)
    assert "is not finite; the model keeps its previous values" in after.open_record["warning"]
    assert all(torch.equal(after.model_state[n], t) for n, t in server.model_state.items())


@pytest.mark.parametrize("text", HOSTILE_TEXTS)
def test_text_of_a_silo_becomes_one_plain_line(text):
    escaped = escape_text(text)
    assert escaped.isprintable()
    assert len(escaped) <= 500
    assert not set("[]\n\x1b") & set(escaped)
    assert escape_text(escaped) == escaped


def test_nesting_is_bounded_but_brackets_in_texts_are_not_nesting():
    assert parse_json(json.dumps({"note": "[" * 1000 + '\\"'}))["note"].startswith("[[")
    assert parse_json("[" * MAX_JSON_DEPTH + "]" * MAX_JSON_DEPTH) is not None
    with pytest.raises(InputError, match="nested deeper"):
        parse_json("[" * 100_000)
