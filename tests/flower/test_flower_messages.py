"""Contents of messages: a silo receives its own codewords only, and nothing about other silos."""

import json

import pytest
import torch
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from small_federation import SILOS, make_experiment, make_flower_engine, make_grid, make_serial_engine, run_rounds

from uefl import __version__
from uefl.core.federation import is_codeword_tensor
from uefl.flower import wire
from uefl.flower.wire import VERSIONS, WIRE_VERSION, read_payload, read_tensors


def test_a_silo_receives_only_its_own_rows_of_codewords(tmp_path):
    experiment, grid = make_experiment("uefl"), make_grid(tmp_path)
    clients, method = make_flower_engine(grid, experiment), experiment.method
    server = method.initialize_server(clients)
    num_checked = 0
    while server.round < method.total_rounds:
        before, grid.sent_messages = server, []
        server = method.step(clients, server)
        for message in grid.sent_messages:
            payload = read_payload(message)
            if "silo" not in payload or before.access.shape != server.access.shape:
                continue  # a step that extends the codebook sends two codebooks; the other steps are enough
            row = before.access[SILOS.index(payload["silo"])]
            for name, codewords in read_tensors(message, "model_state").items():
                if is_codeword_tensor(name) and "task" not in payload:
                    assert torch.equal(codewords, before.model_state[name][row])
                    num_checked += bool(row.any() and not row.all())
    assert num_checked, "no silo had codewords of its own, so the test checked nothing"


def test_codewords_of_other_silos_are_in_no_message_to_a_silo(tmp_path):
    experiment, grid = make_experiment("uefl", rounds=2, extra_rounds=1, iterations=3), make_grid(tmp_path)
    server, _ = run_rounds(make_flower_engine(grid, experiment), experiment)
    final_codewords = next(t for n, t in server.model_state.items() if is_codeword_tensor(n))
    for message in grid.sent_messages:
        payload = read_payload(message)
        if payload.get("round") != experiment.method.total_rounds or "task" not in payload:
            continue  # only the last query has the final codewords
        row = server.access[SILOS.index(payload["silo"])]
        tensors = read_tensors(message, "model_state")
        received = torch.cat([t for n, t in tensors.items() if is_codeword_tensor(n)])
        assert len(received) == int(row.sum())
        assert not (received[:, None] == final_codewords[~row][None]).all(-1).any()


def test_there_is_one_message_per_silo_and_round(tmp_path):
    experiment, grid = make_experiment("fedavg", rounds=3, iterations=1), make_grid(tmp_path)
    run_rounds(make_flower_engine(grid, experiment), experiment)
    payloads = [read_payload(message) for message in grid.sent_messages]
    trained = [(p["silo"], p["round"]) for p in payloads if "evaluate" in p]
    assert sorted(trained) == [(name, t) for name in SILOS for t in (1, 2, 3)]
    assert sum("task" in p for p in payloads) == 3, "the last model is evaluated once more"
    assert sum("silo" not in p for p in payloads) == 3, "every node registers once"


def test_client_state_is_never_sent(tmp_path):
    experiment = make_experiment("local-only")
    grid, replies = make_grid(tmp_path), []
    grid.tamper = lambda _message, reply: replies.append(reply) or reply
    run_rounds(make_flower_engine(grid, experiment), experiment)
    for message in (*grid.sent_messages, *replies):
        assert not read_tensors(message, "model_state")
        assert not read_tensors(message, "tensors")


def test_own_models_are_in_no_message(tmp_path):
    for name in ("ditto", "fine-tuning"):
        experiment, grid, replies = make_experiment(name), make_grid(tmp_path / name), []
        grid.tamper = lambda message, reply, replies=replies: replies.append((message, reply)) or reply
        run_rounds(make_flower_engine(grid, experiment), experiment)
        assert not any(n.startswith("personal.") for m in grid.sent_messages for n in read_tensors(m, "model_state"))
        assert not any(n.startswith("personal.") for _, reply in replies for n in read_tensors(reply, "tensors"))
        personal = [reply for message, reply in replies if read_payload(message).get("is_personal")]
        assert len(personal) == (3 if name == "fine-tuning" else 0)
        assert not any(read_tensors(reply, record) for reply in personal for record in ("tensors", "extras"))


def list_records(message) -> set[str]:
    """Return the names of the records of tensors, wherever they travel in a message."""
    packed = {n.removeprefix(wire.PACKED_PREFIX) for n in message.content.config_records[wire.PAYLOAD_RECORD]}
    return (packed - {"json"}) | set(message.content.array_records)


@pytest.mark.parametrize(("num_values", "is_packed"), [(10, True), (wire.MAX_PACKED_BYTES // 4, False)])
def test_a_small_message_is_one_record_and_reads_like_a_large_one(num_values, is_packed, tmp_path):
    make_grid(tmp_path)  # a message needs the identity of a run
    tensors = {"a": torch.arange(num_values, dtype=torch.float32), "b": torch.tensor(True)}
    message = wire.make_message({"round": 1}, 90, "train", ttl=60, model_state=tensors, extras={"c": torch.ones(2)})
    assert list_records(message) == {"model_state", "extras"}
    assert bool(message.content.array_records) != is_packed
    assert (len(get_all_nested_objects(message)) == 3) == is_packed, "Flower transfers every part with a request"
    assert read_payload(message)["round"] == 1
    for name, tensor in read_tensors(message, "model_state").items():
        assert torch.equal(tensor, tensors[name])
    assert torch.equal(read_tensors(message, "extras")["c"], torch.ones(2))
    assert wire.count_bytes(message.content) > 4 * num_values
    assert not read_tensors(message, "answers")


def test_a_message_has_no_images_and_no_name_of_another_silo(tmp_path):
    experiment, grid = make_experiment("uefl"), make_grid(tmp_path)
    run_rounds(make_flower_engine(grid, experiment), experiment)
    for message in grid.sent_messages:
        payload = read_payload(message)
        text = json.dumps(payload)
        assert not [name for name in SILOS if name in text and name != payload.get("silo")]
        assert list_records(message) <= {"model_state", "extras"}


def test_bytes_are_counted_as_in_the_serial_engine(tmp_path):
    experiment = make_experiment("uefl")
    _, serial_records = run_rounds(make_serial_engine(experiment), experiment)
    _, flower_records = run_rounds(make_flower_engine(make_grid(tmp_path), experiment), experiment)
    serial_bytes, flower_bytes = (
        [(r["bytes_up"], r["bytes_down"]) for r in records] for records in (serial_records, flower_records)
    )
    assert serial_bytes == flower_bytes


def forge_versions(reply, **versions):
    """Return a reply that names other versions."""
    payload = {**read_payload(reply), VERSIONS: {"uefl": __version__, "wire": WIRE_VERSION, **versions}}
    reply.content[wire.PAYLOAD_RECORD]["json"] = json.dumps(payload)
    return reply


def test_every_message_and_reply_names_both_versions(tmp_path):
    experiment, grid, replies = make_experiment("uefl"), make_grid(tmp_path), []
    grid.tamper = lambda _message, reply: replies.append(reply) or reply
    run_rounds(make_flower_engine(grid, experiment), experiment)
    for message in (*grid.sent_messages, *replies):
        assert read_payload(message)[VERSIONS] == {"uefl": __version__, "wire": WIRE_VERSION}


@pytest.mark.parametrize("versions", [{"uefl": "0.1.7"}, {"wire": 99}, {"uefl": "\x1b[31m"}])
def test_a_silo_of_another_version_is_rejected_by_name_at_the_coordinator(versions, tmp_path):
    grid, events = make_grid(tmp_path), []

    def tamper(message, reply):
        return forge_versions(reply, **versions) if message.metadata.dst_node_id == 89 else reply

    grid.tamper = tamper
    experiment = make_experiment("fedavg")
    engine = make_flower_engine(grid, experiment, on_silo_event=lambda _silo, activity: events.append(activity))
    assert list(engine.num_examples) == ["D1-1", "D3-1"]
    (line,) = [event for event in events if event.startswith("silo D2-1 runs uefl ")]
    assert f"but the coordinator runs uefl {__version__} (wire {WIRE_VERSION}); install the same version" in line
    assert "\x1b" not in line


def test_a_coordinator_of_another_version_is_rejected_by_name_at_the_silo(tmp_path):
    grid = make_grid(tmp_path)
    message = wire.make_message({"experiment": {}, VERSIONS: {"uefl": "0.3.0", "wire": 2}}, 90, "query", ttl=60)
    (reply,) = grid.send_and_receive([message])
    expected = f"the coordinator runs uefl 0.3.0 (wire 2), but this silo runs uefl {__version__} (wire {WIRE_VERSION});"
    assert read_payload(reply)["rejected"].startswith(expected)


def test_a_message_without_versions_is_rejected(tmp_path):
    message = wire.make_message({"experiment": {}, VERSIONS: None}, 90, "query", ttl=60)
    (reply,) = make_grid(tmp_path).send_and_receive([message])
    assert "runs uefl unknown (wire unknown)" in read_payload(reply)["rejected"]
