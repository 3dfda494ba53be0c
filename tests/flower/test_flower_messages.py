"""What is in the messages: a silo's own words and no others, and nothing of other silos."""

import json

import torch
from federating import SILOS, driven, experiment, flower, in_process, serial

from uefl.federation import is_words
from uefl.flower.wire import body, tensors


def test_a_silo_receives_only_its_own_rows_of_words(tmp_path):
    what = experiment("uefl")
    grid = in_process(tmp_path)
    clients, method = flower(grid, what), what.method
    server = method.start(clients)
    seen = 0
    while server.round < method.budget:
        before, grid.sent = server, []
        server = method.step(clients, server).but(records=())
        for message in grid.sent:
            told = body(message)
            if "silo" not in told or before.access.shape != server.access.shape:
                continue  # a step that grows the book sends two books; the steps around it tell enough
            row = before.access[SILOS.index(told["silo"])]
            for name, words in tensors(message, "state").items():
                if is_words(name) and "task" not in told:
                    assert torch.equal(words, before.state[name][row])
                    seen += bool(row.any() and not row.all())
    assert seen, "no silo had words of its own, the test saw nothing"


def test_words_of_others_are_nowhere_in_a_silos_messages(tmp_path):
    what = experiment("uefl", rounds=2, extra_rounds=1, iterations=3)
    grid = in_process(tmp_path)
    server, _ = driven(flower(grid, what), what)
    final = next(t for n, t in server.state.items() if is_words(n))
    for message in grid.sent:
        told = body(message)
        if told.get("round") != what.method.budget or "task" not in told:
            continue  # the last question, with the final words
        row = server.access[SILOS.index(told["silo"])]
        sent = torch.cat([t for n, t in tensors(message, "state").items() if is_words(n)])
        strangers = final[~row]
        assert len(sent) == int(row.sum())
        assert not (sent[:, None] == strangers[None]).all(-1).any()


def test_there_is_one_message_per_silo_and_round(tmp_path):
    what = experiment("fedavg", rounds=3, iterations=1)
    grid = in_process(tmp_path)
    driven(flower(grid, what), what)
    orders = [body(message) for message in grid.sent]
    trained = [(o["silo"], o["round"]) for o in orders if "measure" in o]
    assert sorted(trained) == [(name, t) for name in SILOS for t in (1, 2, 3)]
    assert sum("task" in o for o in orders) == 3, "the last model is measured once more"
    assert sum("silo" not in o for o in orders) == 3, "every node is asked once who it is"


def test_what_a_silo_keeps_is_never_sent(tmp_path):
    what = experiment("alone")
    grid, replies = in_process(tmp_path), []
    grid.tamper = lambda _sent, reply: replies.append(reply) or reply
    driven(flower(grid, what), what)
    for message in (*grid.sent, *replies):
        assert not tensors(message, "state")
        assert not tensors(message, "tensors")


def test_a_message_has_no_images_and_no_other_silos_name(tmp_path):
    what = experiment("uefl")
    grid = in_process(tmp_path)
    driven(flower(grid, what), what)
    for message in grid.sent:
        told = body(message)
        text = json.dumps(told)
        assert not [name for name in SILOS if name in text and name != told.get("silo")]
        assert set(message.content.array_records) <= {"state", "sent"}


def test_bytes_are_counted_as_in_the_serial_engine(tmp_path):
    what = experiment("uefl")
    _, here = driven(serial(what), what)
    _, there = driven(flower(in_process(tmp_path), what), what)
    assert [(r["bytes_up"], r["bytes_down"]) for r in here] == [(r["bytes_up"], r["bytes_down"]) for r in there]
