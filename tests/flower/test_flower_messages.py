"""Contents of messages: a silo receives its own codewords only, and nothing about other silos."""

import json

import torch
from small_federation import SILOS, make_experiment, make_flower_engine, make_grid, make_serial_engine, run_rounds

from uefl.core.federation import is_codeword_tensor
from uefl.flower.wire import read_payload, read_tensors


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


def test_a_message_has_no_images_and_no_name_of_another_silo(tmp_path):
    experiment, grid = make_experiment("uefl"), make_grid(tmp_path)
    run_rounds(make_flower_engine(grid, experiment), experiment)
    for message in grid.sent_messages:
        payload = read_payload(message)
        text = json.dumps(payload)
        assert not [name for name in SILOS if name in text and name != payload.get("silo")]
        assert set(message.content.array_records) <= {"model_state", "extras"}


def test_bytes_are_counted_as_in_the_serial_engine(tmp_path):
    experiment = make_experiment("uefl")
    _, serial_records = run_rounds(make_serial_engine(experiment), experiment)
    _, flower_records = run_rounds(make_flower_engine(make_grid(tmp_path), experiment), experiment)
    serial_bytes, flower_bytes = (
        [(r["bytes_up"], r["bytes_down"]) for r in records] for records in (serial_records, flower_records)
    )
    assert serial_bytes == flower_bytes
