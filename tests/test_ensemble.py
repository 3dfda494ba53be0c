"""Deep ensembles: members that train as if alone, with words of their own, one ledger and one decision (T9)."""

from dataclasses import replace

import pytest
import torch
from stripes import LOCAL, ROUNDS, WORDS, clients, four, network, play, same

from uefl.algorithms import UEFL, Book
from uefl.engines import Serial
from uefl.models.net import Ensemble
from uefl.noise import normal

EAGER = Book(words=6, segments=2, warm_up=1, gamma=0.0, errors=0)


def member(state, m):
    prefix = f"members.{m}."
    return {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_each_member_trains_exactly_as_if_alone(optimizer):
    local = replace(LOCAL, optimizer=optimizer, weight_decay=0.01)
    method = UEFL(**{**ROUNDS, "local": local}, codebook=replace(EAGER, first="gaussian", extend=False))
    made = network(method, members=2, dropout=0.0)
    assert isinstance(made, Ensemble)
    engine = Serial(four(), made, dtype=torch.float64)
    start = method.start(engine)
    together, _ = play(method, engine, server=start)
    for m in range(2):
        single = Serial(four(), made.members[m], dtype=torch.float64)
        alone, _ = play(method, single, server=method.start(single).but(state=member(start.state, m)))
        for name, tensor in member(together.state, m).items():
            assert torch.allclose(tensor, alone.state[name], rtol=0, atol=1e-9), name
    assert not torch.allclose(member(together.state, 0)[WORDS], member(together.state, 1)[WORDS])


def test_an_ensemble_drives_the_extension_with_one_ledger_and_words_of_its_own():
    method = UEFL(**ROUNDS, codebook=EAGER)
    engine = clients(method, members=2, dropout=0.0)
    server, records = play(method, engine)
    words = [member(server.state, m)[WORDS] for m in range(2)]
    assert words[0].shape == words[1].shape == (server.access.shape[1], 4)
    assert not torch.equal(*words)
    assert server.access.shape[1] == 24
    assert sum(mine["uncertain"] for mine in records[2]["silos"].values()) == 3
    replies = list(engine.fit(method, method.say(engine, server)))
    for reply, row in zip(replies, server.access):
        assert {len(t) for n, t in reply.tensors.items() if n.endswith(WORDS)} == {int(row.sum())}


def test_the_entropy_is_that_of_the_members_mean():
    method = UEFL(**ROUNDS, codebook=EAGER)
    engine = clients(method, members=3, dropout=0.0)
    server, records = play(method, engine)
    engine._receive(method, method.say(engine, server), "ada")
    with torch.no_grad():
        p = engine.net.eval()(engine.silos["ada"].test.x).logits.softmax(-1).mean(0)
    entropy = -(p * p.log()).sum(1).mean().item()
    assert records[-1]["silos"]["ada"]["entropy"] == pytest.approx(entropy, rel=1e-5)
    assert records[-1]["silos"]["ada"]["mutual_information"] > 0


def test_a_gaussian_first_book_differs_between_members():
    method = UEFL(**ROUNDS, codebook=replace(EAGER, first="gaussian"))
    state = method.start(clients(method, members=2)).state
    assert not torch.equal(member(state, 0)[WORDS], member(state, 1)[WORDS])
    assert normal(1, (2, 6, 4)).shape == (2, 6, 4)


def test_the_same_seed_gives_the_same_ensemble():
    method = UEFL(**ROUNDS, codebook=EAGER)
    assert same(*(play(method, clients(method, members=2))[0].state for _ in range(2)))
