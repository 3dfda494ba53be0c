"""Silos that are late, gone, back again, or have lost what they kept."""

import shutil
from dataclasses import replace

import pytest
import torch
from federating import QUICK, SILOS, driven, experiment, flower, furthest, in_process

from uefl.checkpoint import load_checkpoint, save_checkpoint
from uefl.errors import Stopped
from uefl.flower.client import client_app
from uefl.flower.demo import digits
from uefl.flower.grid import InProcess
from uefl.flower.kept import Kept
from uefl.flower.wire import body


def late(name, rounds):
    """This silo's answers to training come too late in these rounds."""

    def tamper(sent, reply):
        order = body(sent)
        return None if order.get("silo") == name and "measure" in order and order["round"] in rounds else reply

    return tamper


def test_a_straggler_is_missing_for_one_round_only(tmp_path):
    what = experiment("fedavg", rounds=3, iterations=1)
    grid = in_process(tmp_path)
    grid.tamper = late("D2-1", {2})
    _, records = driven(flower(grid, what), what)
    refused = [record["silos"]["D2-1"].get("refused", "") for record in records]
    assert refused == ["", "missing: no answer within 0.2 s", ""]


def test_what_a_late_silo_kept_does_not_count(tmp_path):
    """The silo did train in round 2, but nobody accepted it: in round 3 it starts from what it kept in round 1."""
    what = experiment("alone", rounds=3, iterations=1)
    grid = in_process(tmp_path)
    grid.tamper = late("D2-1", {2})
    driven(flower(grid, what), what)
    accepted = {(o["silo"], o["round"]): o["accepted"] for o in map(body, grid.sent) if "measure" in o}
    assert [accepted["D2-1", t] for t in (1, 2, 3)] == [0, 1, 1]
    assert [accepted["D1-1", t] for t in (1, 2, 3)] == [0, 1, 2]


def test_a_process_that_is_late_leaves_newer_files_alone(tmp_path):
    kept = Kept(tmp_path, "ab", "D2-1")
    for round_, accepted in ((1, 0), (3, 1), (2, 1)):  # round 2 ends after round 3
        kept.write({"x": torch.tensor(round_)}, round_, accepted)
    assert kept.read(3) == ({"x": torch.tensor(3)}, "")
    kept.write({"x": torch.tensor(4)}, 4, 3)
    assert len(list(kept.folder.iterdir())) == 2


def test_words_of_a_missing_silo_stay_as_they_were(tmp_path):
    what = experiment("uefl", rounds=2, extra_rounds=2, iterations=2)
    grid = in_process(tmp_path)
    clients, method = flower(grid, what), what.method
    server = method.start(clients)
    while server.round < 3:
        server = method.step(clients, server).but(records=())
    mine = [k for k in range(3) if server.access[k].sum() > server.access.sum(1).min()]
    name = server.silos[mine[0]]
    own = server.access[mine[0]] & (server.access.sum(0) == 1)
    assert own.any(), "nobody has words of its own"
    before = server.state["codebook.words"][own]
    grid.tamper = late(name, {4})
    server = method.step(clients, server)
    assert torch.equal(server.state["codebook.words"][own], before)


def test_a_node_that_comes_back_under_another_number_is_the_same_silo(tmp_path):
    what = experiment("alone", rounds=3, iterations=1)
    grid = in_process(tmp_path)
    clients, method = flower(grid, what), what.method
    server = method.step(clients, method.start(clients))
    config = grid.nodes.pop(89)
    server = method.step(clients, server.but(records=()))
    assert server.pending["silos"]["D2-1"]["refused"] == "missing: its node is not there"
    grid.nodes[17] = config
    server = method.step(clients, server.but(records=()))
    assert "refused" not in server.records[-1]["silos"]["D2-1"]
    assert "note" not in server.records[-1]["silos"]["D2-1"], "what it kept is still there"


def test_a_silo_that_lost_what_it_kept_starts_afresh_and_says_so(tmp_path):
    what = experiment("alone", rounds=3, iterations=1)
    grid = in_process(tmp_path)
    clients, method = flower(grid, what), what.method
    server = method.step(clients, method.start(clients))
    (lost,) = tmp_path.glob("*/silo-D2-1")
    shutil.rmtree(lost)
    server = method.step(clients, server.but(records=()))
    assert server.pending["silos"]["D2-1"]["note"] == "what it kept in round 1 is lost, started afresh"
    assert "note" not in server.pending["silos"]["D1-1"]


def test_below_the_quorum_a_round_is_retried_and_then_the_run_stops(tmp_path):
    what = experiment("fedavg", rounds=2, iterations=1)
    grid = in_process(tmp_path)
    clients = flower(grid, what, patience=replace(QUICK, quorum=3, retries=2))
    grid.tamper = late("D2-1", {1, 2})
    with pytest.raises(Stopped, match=r"2 of 3 silos .* 3 are needed, asked 3 times .*D2-1: missing.*resumed"):
        driven(clients, what)
    tried = [o["silo"] for o in map(body, grid.sent) if "measure" in o]
    assert [tried.count(name) for name in SILOS] == [1, 3, 1], "only the silo that failed is asked again"


def test_a_retry_that_succeeds_leaves_no_trace(tmp_path):
    what = experiment("uefl")
    here, _ = driven(flower(in_process(tmp_path / "a"), what), what)
    grid, tries = in_process(tmp_path / "b"), []

    def once(sent, reply):
        order = body(sent)
        if order.get("silo") == "D2-1" and "measure" in order and order["round"] not in tries:
            tries.append(order["round"])
            return None
        return reply

    grid.tamper = once
    there, _ = driven(flower(grid, what, patience=replace(QUICK, quorum=3)), what)
    assert furthest(here, there) == 0


@pytest.mark.parametrize("name", ["uefl", "alone"])
def test_a_stopped_run_resumes_to_the_same_result(name, tmp_path):
    what = experiment(name)
    whole, _ = driven(flower(in_process(tmp_path / "a"), what), what)
    clients, method = flower(in_process(tmp_path / "b"), what), what.method
    server = method.step(clients, method.start(clients)).but(records=())
    save_checkpoint(tmp_path / "c.safetensors", server, clients.memory)
    method.step(clients, server)  # a round that silos trained in and the server lost
    clients = flower(in_process(tmp_path / "b"), what)
    server, clients.memory = load_checkpoint(tmp_path / "c.safetensors", "cpu")
    server, records = driven(clients, what, server)
    assert furthest(whole, server) == 0
    assert not [mine for r in records for mine in r["silos"].values() if "note" in mine]


def test_too_few_silos_at_the_start_are_an_error(tmp_path):
    grid = in_process(tmp_path)
    grid.nodes = {90: {"partition-id": 0}}
    with pytest.raises(Stopped, match=r"1 of 3 silos are there .* 2 are needed"):
        flower(grid, experiment("fedavg"))


def test_a_silo_that_cannot_take_part_says_why_and_the_others_go_on(tmp_path):
    what, heard = experiment("fedavg", rounds=1, iterations=1), []
    grid = in_process(tmp_path)
    grid.nodes[88] = {"partition-id": 7}
    clients = flower(grid, what, hear=lambda _silo, doing: heard.append(doing))
    _, records = driven(clients, what)
    assert sorted(records[0]["silos"]) == ["D1-1", "D2-1"]
    assert any("node 7 has no silo" in line for line in heard)


def test_silos_whose_folders_cannot_be_read_say_why(tmp_path):
    what, heard = experiment("fedavg"), []
    digits(tmp_path / "good", "rotate:0", 0, count=20)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken" / "0").mkdir(parents=True)
    (tmp_path / "broken" / "0" / "0.png").write_bytes(b"no image")
    places = {"north": "good", "south": "good", "gone": "gone", "empty": "empty", "broken": "broken"}
    nodes = {i: {"silo": silo, "data": str(tmp_path / at)} for i, (silo, at) in enumerate(places.items())}
    grid = InProcess(client_app(state=tmp_path), nodes)
    what = replace(what, data=replace(what.data, name="folder"))
    clients = flower(grid, what, hear=lambda _silo, doing: heard.append(doing))
    assert list(clients.sizes) == ["north", "south"]
    for silo in ("gone", "empty", "broken"):
        assert [line for line in heard if line.startswith(f"silo {silo} cannot take part: ")]


def test_a_second_node_of_the_same_name_is_turned_away(tmp_path):
    heard = []
    grid = in_process(tmp_path)
    grid.nodes[88] = dict(grid.nodes[90])
    flower(grid, experiment("fedavg"), hear=lambda _silo, doing: heard.append(doing))
    assert any("a second node calls itself so" in line for line in heard)
