"""One broken silo must not break the others: what is refused is named in the record, and the round goes on."""

from dataclasses import replace

import pytest
import torch
from stripes import LOCAL, ROUNDS, WORDS, clients, four, play, same

from uefl.algorithms import UEFL, Book, FedAvg
from uefl.engines import Serial

EAGER = Book(words=6, segments=2, warm_up=1, gamma=0.0, errors=0)
WEIGHT = "classifier.1.weight"


class Corrupt(Serial):
    """Spoils what bob replies."""

    spoil_fit = staticmethod(lambda reply: reply)
    spoil_ask = staticmethod(lambda reply, _task: reply)

    def fit(self, method, say, *, measure=True):
        for reply in super().fit(method, say, measure=measure):
            yield self.spoil_fit(reply) if reply.who == "bob" else reply

    def ask(self, method, task, say, on):
        for reply in super().ask(method, task, say, on):
            yield self.spoil_ask(reply, task) if reply.who == "bob" else reply


def with_tensor(name, change):
    return lambda r: r._replace(tensors={**r.tensors, name: change(r.tensors[name])})


SPOILS = {
    f"{WEIGHT} is not finite": with_tensor(WEIGHT, lambda t: t * torch.nan),
    "encoder.1.running_var is not finite": with_tensor("encoder.1.running_var", lambda t: t / 0),
    f"{WORDS} is not finite": with_tensor(WORDS, lambda t: t.index_fill(0, torch.tensor([3]), torch.inf)),
    f"{WEIGHT} has shape": with_tensor(WEIGHT, lambda t: t[1:]),
    f"{WORDS} has shape": with_tensor(WORDS, lambda t: torch.cat([t, t])),
    f"tensor {WEIGHT} is missing": lambda r: r._replace(tensors={n: t for n, t in r.tensors.items() if n != WEIGHT}),
    "tensor spy is not expected": lambda r: r._replace(tensors={**r.tensors, "spy": torch.ones(1)}),
    "size 0 is not a positive number": lambda r: r._replace(size=0),
    "out of office": lambda r: r._replace(tensors={}, answers={}, refused="out of office"),
}


@pytest.mark.parametrize("why", SPOILS)
def test_a_broken_reply_is_refused_by_name_and_the_others_are_averaged_without_it(why):
    method = UEFL(**ROUNDS, codebook=replace(EAGER, warm_up=0))
    engine = clients(method, engine=Corrupt)
    start = method.start(engine)
    engine.spoil_fit = SPOILS[why]
    server = method.round(engine, start)
    assert server.pending["silos"]["bob"]["refused"].startswith(why)
    assert not [who for who, mine in server.pending["silos"].items() if "refused" in mine and who != "bob"]
    others = clients(method)
    say = method.say(others, start)._replace(round=1)
    replies = [r for r in others.fit(method, say) if r.who != "bob"]
    sizes = torch.tensor([float(r.size) for r in replies])
    mean = (torch.stack([r.tensors[WEIGHT] for r in replies]) * (sizes / sizes.sum())[:, None, None]).sum(0)
    assert torch.allclose(server.state[WEIGHT], mean, atol=1e-7)
    assert all(bool(torch.isfinite(t).all()) for t in server.state.values())


def test_a_round_without_a_good_reply_leaves_the_model_as_it_was():
    method = FedAvg(**ROUNDS)
    engine = clients(method, [s for s in four() if s.name == "bob"], engine=Corrupt)
    start = method.start(engine)
    engine.spoil_fit = SPOILS["size 0 is not a positive number"]
    server, records = play(method, engine, server=start)
    assert same(server.state, start.state)
    assert server.round == method.budget
    assert [r["round"] for r in records] == list(range(1, method.budget + 1))


def test_a_round_in_which_nobody_answers_is_still_recorded_once():
    method = FedAvg(**ROUNDS)
    engine = clients(method, [s for s in four() if s.name == "bob"], engine=Corrupt)
    engine.spoil_fit = SPOILS["out of office"]
    engine.spoil_ask = lambda r, _: r._replace(answers={}, refused="out of office")
    _, records = play(method, engine)
    assert [r["round"] for r in records] == list(range(1, method.budget + 1))
    assert all(r["silos"]["bob"]["refused"] == "out of office" for r in records)


def test_a_silo_that_diverges_is_refused_until_it_recovers():
    """No wrapper: bob's images are infinite, so his loss is, and the federation learns without him."""
    silos = [replace(s, train=s.train._replace(x=s.train.x / 0)) if s.name == "bob" else s for s in four()]
    method = FedAvg(**{**ROUNDS, "local": replace(LOCAL, epochs=2)})
    server, records = play(method, clients(method, silos))
    assert all("not finite" in r["silos"]["bob"]["refused"] for r in records)
    assert all(bool(torch.isfinite(t).all()) for t in server.state.values())
    assert [r["round"] for r in records] == list(range(1, method.budget + 1))


ANSWERS = {
    "not a number": lambda a: {n: t * torch.nan for n, t in a.items()},
    "another width": lambda a: {**a, "centroids": a["centroids"][..., :3]},
    "too many": lambda a: {n: torch.cat([t, t], 1) for n, t in a.items()},
    "none": lambda a: {n: t[:, :0] for n, t in a.items()},
    "nothing": lambda _: {},
    "negative counts": lambda a: {**a, "counts": -a["counts"]},
}


@pytest.mark.parametrize("kind", ANSWERS)
@pytest.mark.parametrize("scope", ["silo", "group"])
def test_broken_centroids_spoil_neither_the_first_book_nor_a_group(kind, scope):
    def spoil(reply, task):
        if task != "centroids":
            return reply
        return reply._replace(answers={split: ANSWERS[kind](a) for split, a in reply.answers.items()})

    method = UEFL(**ROUNDS, codebook=replace(EAGER, scope=scope))
    engine = clients(method, engine=Corrupt)
    engine.spoil_ask = spoil
    server, _ = play(method, engine)
    assert bool(torch.isfinite(server.state[WORDS]).all())
    assert server.access.shape[1] > 6  # the others were extended
    assert server.access[1].sum() == 6  # bob speaks the first book, made without him


def test_a_silo_whose_uncertainty_is_no_number_decides_nothing():
    def spoil(reply, task):
        if task != "measure":
            return reply
        return reply._replace(answers={s: {**a, "entropy": a["entropy"] * torch.nan} for s, a in reply.answers.items()})

    method = UEFL(**ROUNDS, codebook=EAGER)
    engine = clients(method, engine=Corrupt)
    engine.spoil_ask = spoil
    _, records = play(method, engine)
    flags = {who: mine["uncertain"] for who, mine in records[2]["silos"].items()}
    assert flags.pop("bob") is False
    assert sorted(flags.values()) == [False, True, True]
