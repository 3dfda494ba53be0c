"""Alone and Pooled: what federation is measured against."""

from stripes import ROUNDS, clients, four, network, play, same

from uefl.algorithms import Alone, FedAvg, Pooled
from uefl.engines import Serial
from uefl.federation import Silo, concatenated


def test_a_silo_alone_is_a_federation_of_one():
    alone = Alone(**ROUNDS)
    engine = clients(alone)
    server, records = play(alone, engine)
    assert server.state == {}
    for silo in four():
        single = FedAvg(**ROUNDS)
        one, theirs = play(single, clients(single, [silo]))
        mine = {n: t for n, t in engine.memory[silo.name].items() if not n.startswith("optimizer.")}
        assert same(mine, one.state)
        assert records[-1]["silos"][silo.name]["accuracy"] == theirs[-1]["silos"][silo.name]["accuracy"]
        assert records[-1]["silos"][silo.name]["entropy"] == theirs[-1]["silos"][silo.name]["entropy"]


def test_silos_alone_send_and_receive_nothing():
    alone = Alone(**ROUNDS)
    _, records = play(alone, clients(alone))
    assert {(r["bytes_up"], r["bytes_down"]) for r in records} == {(0, 0)}


def test_the_pool_is_ordinary_training_on_all_data_and_silos_only_measure():
    method, single = Pooled(**ROUNDS), FedAvg(**ROUNDS)
    server, records = play(method, clients(method))
    train = concatenated([s.train for s in four()])
    pool = [Silo("pooled", train, four()[0].validation, four()[0].test)]
    one, _ = play(single, Serial(pool, network(single)))
    assert same(server.state, one.state)
    for record in records:
        assert record["who"] == ["pooled"]
        assert [n for n, mine in record["silos"].items() if "accuracy" in mine] == ["ada", "bob", "cyd", "dan"]
