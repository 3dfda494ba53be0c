"""What every method owes: order, seeds, test data, one silo, the budget. Algorithms on tiny silos, end to end."""

import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from stripes import LOCAL, ROUNDS, WORDS, clients, encoder, four, network, play, same, short, silo
from torch import nn

from uefl.algorithms import ALGORITHMS, UEFL, Book, FedAvg, VQFedAvg
from uefl.engines import Serial
from uefl.federation import Part, batches
from uefl.local import Local
from uefl.noise import key, permutation

EAGER = Book(words=6, segments=2, warm_up=1, gamma=0.0, errors=0)  # all but the surest silo are extended
METHODS = {name: short(kind) for name, kind in ALGORITHMS.items()} | {
    "uefl": UEFL(**ROUNDS, codebook=EAGER),
    "vq-fedavg": VQFedAvg(**ROUNDS, codebook=replace(EAGER, extend=False)),
}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_learns_something_and_records_every_round_once(name):
    local = METHODS[name].suited(replace(LOCAL, epochs=3, rate=1e-2))
    method = replace(METHODS[name], rounds=6, local=local)
    _, records = play(method, clients(method))
    assert [r["round"] for r in records] == list(range(1, method.budget + 1))
    accuracy = [mine["accuracy"] for mine in records[-1]["silos"].values() if "accuracy" in mine]
    assert len(accuracy) == 4
    assert sum(accuracy) / 4 > 0.5  # chance is a third


@pytest.mark.parametrize("name", METHODS)
def test_the_same_seed_gives_the_same_bits_and_another_gives_others(name):
    method = METHODS[name]
    (one, first), (again, second), (other, _) = (play(method, clients(method, seed=s)) for s in (3, 3, 4))
    if name == "alone":
        assert [r["silos"]["ada"]["entropy"] for r in first] == [r["silos"]["ada"]["entropy"] for r in second]
        return
    assert same(one.state, again.state)
    assert torch.equal(one.access, again.access)
    assert not any(torch.equal(one.state[n], other.state[n]) for n in one.state if n.endswith("weight"))


def test_the_global_generator_decides_nothing():
    method, states = METHODS["uefl"], []
    for seed in (1, 2):
        engine = clients(method)
        torch.manual_seed(seed)
        states.append(play(method, engine)[0].state)
    assert same(*states)


def test_batches_are_in_an_order_of_the_engines_seed():
    method = FedAvg(**ROUNDS)
    net = network(method, dropout=0.0)
    one, other = (play(method, Serial(four(), net, seed=s), 1)[0].state["classifier.1.weight"] for s in (0, 1))
    assert not torch.allclose(one, other, atol=1e-4)


def test_dropout_draws_anew_for_every_seed_silo_round_and_step():
    method, drawn = FedAvg(**ROUNDS), []
    for seed in (0, 1):
        engine = Serial(four(), network(method), seed=seed)
        layer = engine.net.classifier[0]
        layer.register_forward_hook(
            lambda m, _x, y: drawn.append(m.key.item()) if m.training and y.dim() == 2 else None
        )
        play(method, engine, 2)
    assert len(drawn) == 2 * 2 * sum(math.ceil(len(s.train.y) / 8) - (len(s.train.y) % 8 == 1) for s in four())
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("name", METHODS)
def test_the_order_in_which_silos_are_given_changes_nothing(name):
    method = METHODS[name]
    (one, first), (other, second) = (play(method, clients(method, s)) for s in (four(), four()[::-1]))
    assert same(one.state, other.state)
    assert torch.equal(one.access, other.access)
    for a, b in zip(first, second):
        assert {n: m.get("entropy") for n, m in a["silos"].items()} == {
            n: m.get("entropy") for n, m in b["silos"].items()
        }


def other_test_data(silos, change):
    return [replace(s, test=change(s.test)) for s in silos]


CHANGES = {
    "labels": lambda t: Part(t.x, t.y.roll(1)),
    "images": lambda t: Part(t.x.flip(0) * -3, t.y),
    "all": lambda t: Part(t.x[:4] * 2, t.y[:4].flip(0)),
}


@pytest.mark.parametrize(("name", "changed"), [*((n, "all") for n in METHODS), ("uefl", "labels"), ("uefl", "images")])
def test_test_data_decide_nothing(name, changed):
    change = CHANGES[changed]
    method = METHODS[name]
    (one, seen), (other, also) = (play(method, clients(method, s)) for s in (four(), other_test_data(four(), change)))
    assert same(one.state, other.state)
    assert torch.equal(one.access, other.access)
    assert one.iteration == other.iteration
    if name == "alone":  # its weights are not in the state; what they say of the validation part is
        assert [r["silos"]["ada"]["validation"] for r in seen] == [r["silos"]["ada"]["validation"] for r in also]
    assert seen[-1]["silos"]["ada"]["nll"] != also[-1]["silos"]["ada"]["nll"]


def ordinary(net, part, method, *, rounds, book):
    """Plain PyTorch, written out: no engine, no broadcast, no mean."""
    net.train()
    for round_ in range(1, rounds + 1):
        optimizer = torch.optim.Adam(net.parameters(), method.local.rate)
        for epoch in range(method.local.epochs):
            order = permutation(key(0, "ada", round_, epoch, "order"), len(part.y))
            for cut in batches(len(part.y), method.local.batch):
                x, y = part.x[order[cut]].double(), part.y[order[cut]]
                z = net.encoder(x).flatten(2).transpose(1, 2)
                z = F.layer_norm(z, (8,))
                code = 0.0
                if book:
                    flat = z.reshape(-1, 4)
                    c = net.codebook.words[torch.cdist(flat, net.codebook.words).argmin(1)].reshape(z.shape)
                    code = 0.25 * ((c.detach() - z) ** 2).mean() + 1.0 * ((c - z.detach()) ** 2).mean()
                    z = z + (c - z).detach()
                hidden = F.gelu(F.linear(z.flatten(1), net.classifier[1].weight, net.classifier[1].bias))
                logits = F.linear(hidden, net.classifier[4].weight, net.classifier[4].bias)
                optimizer.zero_grad()
                (F.cross_entropy(logits, y) + code).backward()
                optimizer.step()
    return net.state_dict()


@pytest.mark.parametrize(
    "book", [None, Book(words=6, segments=2, first="gaussian", extend=False)], ids=["plain", "book"]
)
def test_one_silo_is_ordinary_training(book):
    method = FedAvg(**{**ROUNDS, "local": replace(LOCAL, epochs=2)}, codebook=book)
    engine = clients(method, four()[:1], dtype=torch.float64, dropout=0.0)
    server = method.start(engine)
    net = copy.deepcopy(network(method, dropout=0.0)).double()
    if book:
        net.codebook.words.data = server.state[WORDS].clone()
    server, _ = play(method, engine, server=server)
    for name, tensor in ordinary(net, four()[0].train, method, rounds=method.budget, book=book).items():
        assert torch.allclose(server.state[name], tensor, rtol=0, atol=1e-9), name


def apart(method):
    """What each silo replies in an engine of its own, and its size."""
    for one in four():
        engine = clients(method, [one], dtype=torch.float64)
        (reply,) = engine.fit(method, method.say(engine, method.start(engine))._replace(round=1))
        yield len(one.train.y), reply.tensors


@pytest.mark.parametrize("weights", ["size", "equal"])
def test_a_round_is_the_mean_of_silos_that_train_apart(weights):
    method = FedAvg(**ROUNDS, weights=weights)
    whole, _ = play(method, clients(method, dtype=torch.float64), 1)
    each = [(n if weights == "size" else 1, tensors) for n, tensors in apart(method)]
    for name, tensor in whole.state.items():
        if tensor.is_floating_point():
            mean = sum(n * tensors[name] for n, tensors in each) / sum(n for n, _ in each)
            assert torch.allclose(tensor, mean, atol=1e-12), name


def test_a_threshold_of_infinity_is_a_static_book():
    endless, static = UEFL(**ROUNDS, codebook=replace(EAGER, gamma=math.inf)), METHODS["vq-fedavg"]
    (one, records), (other, _) = play(endless, clients(endless)), play(static, clients(static))
    assert same(one.state, other.state)
    assert torch.equal(one.access, other.access)
    assert one.access.shape[1] == 6
    assert not any(mine["uncertain"] for r in records for mine in r["silos"].values())
    assert play(METHODS["uefl"], clients(METHODS["uefl"]))[0].access.shape[1] > 6


def test_a_client_leaves_the_broadcast_as_it_found_it():
    method = replace(METHODS["uefl"], norms="average")
    engine = clients(method)
    server, _ = play(method, engine, 2)
    before = {n: t.clone() for n, t in server.state.items()}
    say = method.say(engine, server)._replace(round=server.round + 1)
    trained = list(engine.fit(method, say))
    asked = list(engine.ask(method, "measure", say, ("test",)))
    assert len(trained) == len(asked) == 4
    assert same(server.state, before)
    assert not same(
        {n: t for n, t in trained[0].tensors.items() if n != WORDS}, {n: t for n, t in before.items() if n != WORDS}
    )


def test_a_reply_does_not_change_when_the_next_silo_trains():
    method = METHODS["uefl"]
    engine = clients(method)
    server, _ = play(method, engine, 2)
    replies = engine.fit(method, method.say(engine, server)._replace(round=3))
    first = next(replies)
    before = {n: t.clone() for n, t in first.tensors.items()}
    list(replies)
    assert same(first.tensors, before)


class Foreign(nn.Sequential):
    """A user's encoder with a dropout layer of torch's."""

    def __init__(self):
        super().__init__(encoder(), nn.Dropout(0.2))


def test_an_encoder_with_torchs_dropout_is_as_reproducible_as_ours():
    method = METHODS["uefl"]
    torch.manual_seed(1)
    one, first = play(method, clients(method, body=Foreign))
    torch.manual_seed(2)
    again, second = play(method, clients(method, four()[::-1], body=Foreign))
    assert same(one.state, again.state)
    assert [r["silos"]["ada"]["entropy"] for r in first] == [r["silos"]["ada"]["entropy"] for r in second]
    other, _ = play(method, Serial(four(), network(method, body=Foreign), seed=9))
    assert not same(one.state, other.state)


def test_participation_draws_so_many_silos_anew_and_only_they_move_the_model():
    method = FedAvg(**{**ROUNDS, "rounds": 12}, participation=2)
    engine = clients(method)
    server = method.start(engine)
    who = [method.takes_part(engine, server.but(round=r)) for r in range(40)]
    assert all(len(set(w)) == 2 for w in who)
    assert set().union(*who) == {"ada", "bob", "cyd", "dan"}
    assert len(set(who)) == 6  # every pair
    first = who[0]
    among = [s for s in four() if s.name in first]
    one, _ = play(method, engine, 1)
    alone = FedAvg(**ROUNDS)
    two, _ = play(alone, clients(alone, among), 1)
    assert same(one.state, two.state)
    _, records = play(method, clients(method))
    assert [r["round"] for r in records] == list(range(1, method.budget + 1))
    assert all("accuracy" in mine for r in records for mine in r["silos"].values())  # all measure, some train
    assert [tuple(r["who"]) for r in records] == who[: method.budget]


def test_norms_that_stay_local_are_never_sent_and_differ_between_silos():
    method = FedAvg(**ROUNDS, norms="local")
    engine = clients(method)
    server, _ = play(method, engine)
    assert not [n for n in server.state if "running" in n or "tracked" in n]
    reply = next(iter(engine.fit(method, method.say(engine, server))))
    assert set(reply.tensors) == set(server.state)
    means = [engine.memory[name]["encoder.1.running_mean"] for name in server.silos]
    assert not any(torch.equal(means[0], other) for other in means[1:])


def test_norms_that_are_skipped_never_move():
    method = FedAvg(**ROUNDS, norms="skip")
    engine = clients(method)
    server, _ = play(method, engine)
    assert torch.equal(server.state["encoder.1.running_mean"], torch.zeros(8))
    assert torch.equal(server.state["encoder.1.running_var"], torch.ones(8))
    assert not torch.equal(server.state["encoder.1.weight"], torch.ones(8))
    moved, _ = play(FedAvg(**ROUNDS), clients(method))
    assert not torch.equal(moved.state["encoder.1.running_mean"], torch.zeros(8))


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
def test_optimiser_state_stays_with_the_silo_where_asked(optimizer):
    """One silo that keeps it over three rounds trains as if in one round of three times the epochs."""
    fields = {"optimizer": optimizer, "rate": 1e-2, "batch": 40, "epochs": 1, "weight_decay": 0.01}
    kept, fresh = (FedAvg(**{**ROUNDS, "local": Local(**fields, fresh=f)}) for f in (False, True))
    long = FedAvg(**{**ROUNDS, "local": Local(**{**fields, "epochs": 3})})
    runs = {}
    for name, method, rounds in (("kept", kept, 3), ("fresh", fresh, 3), ("long", long, 1)):  # one batch an epoch
        runs[name] = play(method, clients(method, four()[:1], dtype=torch.float64, dropout=0.0), rounds)[0].state
    weight = "classifier.1.weight"
    assert torch.allclose(runs["kept"][weight], runs["long"][weight], atol=1e-12)
    assert not torch.allclose(runs["fresh"][weight], runs["long"][weight], atol=1e-6)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_optimiser_state_survives_an_extension(optimizer):
    method = UEFL(**{**ROUNDS, "local": replace(LOCAL, fresh=False, optimizer=optimizer)}, codebook=EAGER)
    engine = clients(method)
    server, _ = play(method, engine)
    assert server.access.shape[1] > 6
    assert any(n.startswith("optimizer.") and n.endswith("classifier.1.weight") for n in engine.memory["ada"])


def test_silos_with_one_name_are_refused():
    with pytest.raises(ValueError, match="different names"):
        clients(FedAvg(), [silo("ada", 8, 0), silo("ada", 8, 1)])


# --- the budget ---------------------------------------------------------------------------------------------------


def judged(records):
    return [r["round"] for r in records if r.get("judged")]


@pytest.mark.parametrize("warm_up", [0, 1, 2])
def test_the_warm_up_is_inside_the_budget_and_ends_come_after_each_iteration(warm_up):
    method = UEFL(**{**ROUNDS, "iterations": 3}, codebook=replace(EAGER, warm_up=warm_up))
    server, records = play(method, clients(method))
    assert method.budget == 3 + 2 * 2
    assert server.round == 7
    assert judged(records) == [3, 5]  # not after the last round: nobody would train the words
    words = [r["silos"]["ada"]["words"] for r in records]
    assert words[:3] == [0] * warm_up + [6] * (3 - warm_up)


def test_a_settled_run_trains_on_to_the_end_of_the_budget():
    method = UEFL(**{**ROUNDS, "iterations": 4}, codebook=replace(EAGER, gamma=math.inf))
    engine = clients(method)
    server, records = play(method, engine, 3)
    assert server.settled
    later, more = play(method, engine, server=server)
    assert later.round == method.budget == 9
    assert judged(records + more) == [3]
    assert not torch.equal(later.state["classifier.1.weight"], server.state["classifier.1.weight"])


def test_one_iteration_never_extends():
    method = UEFL(**{**ROUNDS, "iterations": 1}, codebook=EAGER)
    server, records = play(method, clients(method))
    assert server.round == method.rounds
    assert server.access.shape[1] == 6
    assert judged(records) == []


def test_no_extra_rounds_never_extend():
    method = UEFL(**{**ROUNDS, "extra_rounds": 0, "iterations": 5}, codebook=EAGER)
    server, _ = play(method, clients(method))
    assert server.round == 3
    assert server.access.shape[1] == 6


def test_the_rate_falls_over_the_whole_budget():
    method = UEFL(**{**ROUNDS, "local": replace(LOCAL, schedule="cosine")}, codebook=EAGER)
    engine = clients(method)
    server, rates = method.start(engine), []
    while server.round < method.budget:
        rates.append(method.say(engine, server).rate)
        server = method.step(engine, server)
    expected = [0.003 * 0.5 * (1 + math.cos(math.pi * r / 5)) for r in range(5)]
    assert rates == pytest.approx(expected)
