"""Silos that reply late, disconnect, reconnect, or lose their client state."""

import re
import shutil
import time
from dataclasses import replace

import pytest
import torch
from in_process_grid import InProcessGrid
from small_federation import (
    QUICK_POLICY,
    SILOS,
    make_experiment,
    make_flower_engine,
    make_grid,
    max_difference,
    run_rounds,
)

from uefl.core.errors import InputError, ResumableError
from uefl.experiment.checkpoint import load_checkpoint, save_checkpoint
from uefl.flower.client import make_client_app
from uefl.flower.client_state import ClientStateStore
from uefl.flower.demo import write_digits
from uefl.flower.silo_registry import RoundPolicy
from uefl.flower.wire import read_payload


def delay_replies(name, rounds):
    """Return a tamper function: this silo's replies to training arrive too late in these rounds."""

    def tamper(message, reply):
        payload = read_payload(message)
        is_late = payload.get("silo") == name and "evaluate" in payload and payload["round"] in rounds
        return None if is_late else reply

    return tamper


def test_a_straggler_is_missing_for_one_round_only(tmp_path):
    experiment, grid = make_experiment("fedavg", rounds=3, iterations=1), make_grid(tmp_path)
    grid.tamper = delay_replies("D2-1", {2})
    _, records = run_rounds(make_flower_engine(grid, experiment), experiment)
    reasons = [record["silos"]["D2-1"].get("rejected", "") for record in records]
    assert reasons == ["", "missing: no reply within 0.2 s", ""]


def test_after_the_quorum_a_round_waits_only_for_the_grace(tmp_path):
    experiment, grid = make_experiment("fedavg", rounds=2, iterations=1), make_grid(tmp_path)
    grid.tamper = delay_replies("D2-1", {1, 2})
    policy, started = replace(QUICK_POLICY, reply_timeout=300, grace=0.3), time.monotonic()
    _, records = run_rounds(make_flower_engine(grid, experiment, policy=policy), experiment)
    assert time.monotonic() - started < 100, "the round waited for the timeout"
    for record in records:
        assert record["silos"]["D2-1"]["rejected"] == "missing: no reply within 0.3 s after the quorum was met"
        assert "rejected" not in record["silos"]["D3-1"]


def test_without_a_quorum_a_round_waits_for_the_timeout(tmp_path):
    experiment, grid = make_experiment("fedavg", rounds=1, iterations=1), make_grid(tmp_path)
    grid.tamper = delay_replies("D2-1", {1})
    policy = replace(QUICK_POLICY, reply_timeout=0.5, grace=0.0, quorum=3, retries=0)
    with pytest.raises(ResumableError, match=r"D2-1: missing: no reply within 0\.5 s\)"):
        run_rounds(make_flower_engine(grid, experiment, policy=policy), experiment)


def test_a_query_to_fewer_silos_than_the_quorum_does_not_wait_for_the_timeout(tmp_path):
    experiment, grid = make_experiment("fedavg", rounds=2, iterations=1), make_grid(tmp_path)
    policy, broadcasts = replace(QUICK_POLICY, reply_timeout=300, grace=0.3), []
    engine, method = make_flower_engine(grid, experiment, policy=policy), experiment.method
    fit = engine.fit
    engine.fit = lambda method, broadcast, **options: broadcasts.append(broadcast) or fit(method, broadcast, **options)
    method.run_round(engine, method.initialize_server(engine))
    grid.tamper = lambda _message, _reply: None
    broadcast, started = broadcasts[0]._replace(participants=("D2-1",)), time.monotonic()
    (reply,) = engine.query(method, "evaluate", broadcast, ("test",))
    assert time.monotonic() - started < 100, "the query waited for the timeout"
    assert re.fullmatch(r"missing: no reply within [0-9.]+ s", reply.rejected)


def test_the_client_state_of_a_late_silo_does_not_count(tmp_path):
    """The silo trained in round 2, but its reply was not accepted: round 3 starts from its state of round 1."""
    experiment, grid = make_experiment("local-only", rounds=3, iterations=1), make_grid(tmp_path)
    grid.tamper = delay_replies("D2-1", {2})
    run_rounds(make_flower_engine(grid, experiment), experiment)
    payloads = [payload for payload in map(read_payload, grid.sent_messages) if "evaluate" in payload]
    accepted_rounds = {(p["silo"], p["round"]): p["accepted_round"] for p in payloads}
    assert [accepted_rounds["D2-1", t] for t in (1, 2, 3)] == [0, 1, 1]
    assert [accepted_rounds["D1-1", t] for t in (1, 2, 3)] == [0, 1, 2]


def test_a_late_process_does_not_delete_newer_files(tmp_path):
    store = ClientStateStore(tmp_path, "ab", "D2-1")
    for round_number, accepted_round in ((1, 0), (3, 1), (2, 1)):  # round 2 ends after round 3
        store.write({"x": torch.tensor(round_number)}, round_number, accepted_round)
    assert store.read(3) == ({"x": torch.tensor(3)}, "")
    store.write({"x": torch.tensor(4)}, 4, 3)
    assert len(list(store.folder.iterdir())) == 2


def test_codewords_of_a_missing_silo_do_not_change(tmp_path):
    experiment, grid = make_experiment("uefl", rounds=2, extra_rounds=2, iterations=2), make_grid(tmp_path)
    clients, method = make_flower_engine(grid, experiment), experiment.method
    server = method.initialize_server(clients)
    while server.round < 3:
        server = method.step(clients, server)
    k = next(k for k in range(3) if server.access[k].sum() > server.access.sum(1).min())
    own_rows = server.access[k] & (server.access.sum(0) == 1)
    assert own_rows.any(), "no silo has codewords of its own"
    before = server.model_state["codebook.codewords"][own_rows]
    grid.tamper = delay_replies(server.silo_names[k], {4})
    server = method.step(clients, server)
    assert torch.equal(server.model_state["codebook.codewords"][own_rows], before)


def test_a_node_that_reconnects_with_another_id_is_the_same_silo(tmp_path):
    experiment, grid = make_experiment("local-only", rounds=3, iterations=1), make_grid(tmp_path)
    clients, method = make_flower_engine(grid, experiment), experiment.method
    server = method.step(clients, method.initialize_server(clients))
    config = grid.nodes.pop(89)
    server = method.step(clients, server)
    assert server.open_record["silos"]["D2-1"]["rejected"] == "missing: the node is not connected"
    grid.nodes[17] = config
    server = method.step(clients, server)
    assert "rejected" not in server.completed_records[-1]["silos"]["D2-1"]
    assert "note" not in server.completed_records[-1]["silos"]["D2-1"], "its client state is still available"


def test_a_silo_that_lost_its_client_state_starts_over_and_reports_it(tmp_path):
    experiment, grid = make_experiment("local-only", rounds=3, iterations=1), make_grid(tmp_path)
    clients, method = make_flower_engine(grid, experiment), experiment.method
    server = method.step(clients, method.initialize_server(clients))
    (lost_folder,) = tmp_path.glob("*/silo-D2-1")
    shutil.rmtree(lost_folder)
    silos = method.step(clients, server).open_record["silos"]
    assert silos["D2-1"]["note"].startswith("the client state of round 1 is lost; training starts from the initial")
    assert "note" not in silos["D1-1"]


def test_below_the_quorum_a_round_is_retried_and_then_the_run_stops(tmp_path):
    experiment, grid = make_experiment("fedavg", rounds=2, iterations=1), make_grid(tmp_path)
    clients = make_flower_engine(grid, experiment, policy=replace(QUICK_POLICY, quorum=3, retries=2))
    grid.tamper = delay_replies("D2-1", {1, 2})
    message = r"2 of 3 silos .* in 3 attempts; 3 are required \(D2-1: missing.*\); run the same command again to resume"
    with pytest.raises(ResumableError, match=message):
        run_rounds(clients, experiment)
    addressed = [payload["silo"] for payload in map(read_payload, grid.sent_messages) if "evaluate" in payload]
    assert [addressed.count(name) for name in SILOS] == [1, 3, 1], "only the failed silo receives the message again"


def test_a_successful_retry_does_not_change_the_result(tmp_path):
    experiment = make_experiment("uefl")
    expected, _ = run_rounds(make_flower_engine(make_grid(tmp_path / "a"), experiment), experiment)
    grid, failed_rounds = make_grid(tmp_path / "b"), []

    def fail_once_per_round(message, reply):
        payload = read_payload(message)
        is_first = "evaluate" in payload and payload["round"] not in failed_rounds
        if payload.get("silo") == "D2-1" and is_first:
            failed_rounds.append(payload["round"])
            return None
        return reply

    grid.tamper = fail_once_per_round
    clients = make_flower_engine(grid, experiment, policy=replace(QUICK_POLICY, quorum=3))
    assert max_difference(expected, run_rounds(clients, experiment)[0]) == 0


@pytest.mark.parametrize("name", ["uefl", "local-only"])
def test_a_stopped_run_resumes_to_the_same_result(name, tmp_path):
    experiment = make_experiment(name)
    uninterrupted, _ = run_rounds(make_flower_engine(make_grid(tmp_path / "a"), experiment), experiment)
    clients, method = make_flower_engine(make_grid(tmp_path / "b"), experiment), experiment.method
    server = method.step(clients, method.initialize_server(clients))
    save_checkpoint(tmp_path / "c.safetensors", server, clients.client_states)
    method.step(clients, server)  # a round in which silos trained and whose result the server lost
    clients = make_flower_engine(make_grid(tmp_path / "b"), experiment)
    server, clients.client_states = load_checkpoint(tmp_path / "c.safetensors", "cpu")
    resumed, records = run_rounds(clients, experiment, server)
    assert max_difference(uninterrupted, resumed) == 0
    assert not [silo for record in records for silo in record["silos"].values() if "note" in silo]


def test_too_few_silos_at_the_start_are_an_error(tmp_path):
    grid = make_grid(tmp_path)
    grid.nodes = {90: {"partition-id": 0}}
    with pytest.raises(ResumableError, match=r"only 1 of 3 silos connected within 0 s; 2 are required"):
        make_flower_engine(grid, make_experiment("fedavg"))


def test_a_silo_that_cannot_take_part_reports_why_and_the_others_continue(tmp_path):
    experiment, grid, events = make_experiment("fedavg", rounds=1, iterations=1), make_grid(tmp_path), []
    grid.nodes[88] = {"partition-id": 7}
    clients = make_flower_engine(grid, experiment, on_silo_event=lambda _silo, activity: events.append(activity))
    _, records = run_rounds(clients, experiment)
    assert sorted(records[0]["silos"]) == ["D1-1", "D2-1"]
    assert any("node 7 has no silo" in event for event in events)


def test_silos_whose_folders_cannot_be_read_report_why(tmp_path):
    experiment, events = make_experiment("fedavg"), []
    experiment = replace(experiment, data=replace(experiment.data, name="folder"))
    write_digits(tmp_path / "good", "rotate:0", 0, num_images=20)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken" / "0").mkdir(parents=True)
    (tmp_path / "broken" / "0" / "0.png").write_bytes(b"no image")
    folders = {"north": "good", "south": "good", "absent": "absent", "empty": "empty", "broken": "broken"}
    nodes = {i: {"silo": s, "data_path": str(tmp_path / folder)} for i, (s, folder) in enumerate(folders.items())}
    grid = InProcessGrid(make_client_app(state_folder=tmp_path), nodes)
    clients = make_flower_engine(grid, experiment, on_silo_event=lambda _silo, activity: events.append(activity))
    assert list(clients.num_examples) == ["north", "south"]
    for silo in ("absent", "empty", "broken"):
        assert [event for event in events if event.startswith(f"silo {silo} cannot take part: ")]


def test_a_second_node_with_the_same_silo_name_is_rejected(tmp_path):
    grid, events = make_grid(tmp_path), []
    grid.nodes[88] = dict(grid.nodes[90])
    make_flower_engine(grid, make_experiment("fedavg"), on_silo_event=lambda _silo, activity: events.append(activity))
    assert any("silo name D1-1 is already used by another node" in event for event in events)


@pytest.mark.parametrize("field", ["connect_timeout", "reply_timeout", "grace", "quorum", "retries"])
def test_a_negative_value_in_the_round_policy_is_an_error(field):
    with pytest.raises(InputError, match=f"{field}=-1 must be at least 0"):
        RoundPolicy(**{field: -1})
