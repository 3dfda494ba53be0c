"""One broken silo does not disturb the others: the record names the rejected reply, and the round continues."""

from dataclasses import replace

import pytest
import torch
from harness import (
    CODEWORDS,
    LOCAL,
    SHORT_RUN,
    SMALL_CODEBOOK,
    have_equal_bits,
    make_clients,
    make_striped_silos,
    run_rounds,
)

from uefl.algorithms.fedavg import FedAvg
from uefl.algorithms.uefl import UEFL
from uefl.core.federation import Reply
from uefl.engines.serial import SerialEngine
from uefl.engines.stacked.stacked_engine import StackedEngine

EAGER = replace(SMALL_CODEBOOK, min_examples=10)
WEIGHT = "classifier.1.weight"


class CorruptingEngine(SerialEngine):
    """Corrupts the replies of bob."""

    corrupt_fit = staticmethod(lambda reply: reply)
    corrupt_query = staticmethod(lambda reply, _task: reply)

    def fit(self, method, broadcast, *, evaluate=True):
        for reply in super().fit(method, broadcast, evaluate=evaluate):
            yield self.corrupt_fit(reply) if reply.silo_name == "bob" else reply

    def query(self, method, task, broadcast, splits):
        for reply in super().query(method, task, broadcast, splits):
            yield self.corrupt_query(reply, task) if reply.silo_name == "bob" else reply


def change_tensor(name, change):
    return lambda r: r._replace(tensors={**r.tensors, name: change(r.tensors[name])})


CORRUPTIONS = {
    f"{WEIGHT} is not finite": change_tensor(WEIGHT, lambda t: t * torch.nan),
    "encoder.1.running_var is not finite": change_tensor("encoder.1.running_var", lambda t: t / 0),
    f"{CODEWORDS} is not finite": change_tensor(CODEWORDS, lambda t: t.index_fill(0, torch.tensor([3]), torch.inf)),
    f"{WEIGHT} has shape": change_tensor(WEIGHT, lambda t: t[1:]),
    f"{CODEWORDS} has shape": change_tensor(CODEWORDS, lambda t: torch.cat([t, t])),
    f"tensor {WEIGHT} is missing": lambda r: r._replace(tensors={n: t for n, t in r.tensors.items() if n != WEIGHT}),
    "tensor spy is not expected": lambda r: r._replace(tensors={**r.tensors, "spy": torch.ones(1)}),
    "num_examples=0 is not a positive number": lambda r: r._replace(num_examples=0),
    "out of office": lambda r: Reply(r.silo_name, r.num_examples, rejected="out of office"),
}


@pytest.mark.parametrize("reason", CORRUPTIONS)
def test_a_broken_reply_is_rejected_by_name_and_the_others_are_averaged_without_it(reason):
    method = UEFL(**SHORT_RUN, codebook=replace(EAGER, warmup_rounds=0))
    engine = make_clients(method, engine=CorruptingEngine)
    start = method.initialize_server(engine)
    engine.corrupt_fit = CORRUPTIONS[reason]
    server = method.run_round(engine, start)
    silos = server.open_record["silos"]
    assert silos["bob"]["rejected"].startswith(reason)
    assert [name for name, silo in silos.items() if "rejected" in silo] == ["bob"]
    others = make_clients(method)
    broadcast = method.make_broadcast(others, start)._replace(round=1)
    replies = [r for r in others.fit(method, broadcast) if r.silo_name != "bob"]
    num_examples = torch.tensor([float(r.num_examples) for r in replies])
    weights = (num_examples / num_examples.sum())[:, None, None]
    mean = (torch.stack([r.tensors[WEIGHT] for r in replies]) * weights).sum(0)
    assert torch.allclose(server.model_state[WEIGHT], mean, atol=1e-7)
    assert all(bool(torch.isfinite(t).all()) for t in server.model_state.values())


def test_a_round_without_a_valid_reply_leaves_the_model_as_it_was():
    method = FedAvg(**SHORT_RUN)
    engine = make_clients(method, [s for s in make_striped_silos() if s.name == "bob"], engine=CorruptingEngine)
    start = method.initialize_server(engine)
    engine.corrupt_fit = CORRUPTIONS["num_examples=0 is not a positive number"]
    server, records = run_rounds(method, engine, server=start)
    assert have_equal_bits(server.model_state, start.model_state)
    assert server.round == method.total_rounds
    assert [r["round"] for r in records] == list(range(1, method.total_rounds + 1))


def test_a_round_without_any_reply_is_recorded_once():
    method = FedAvg(**SHORT_RUN)
    engine = make_clients(method, [s for s in make_striped_silos() if s.name == "bob"], engine=CorruptingEngine)
    engine.corrupt_fit = CORRUPTIONS["out of office"]
    engine.corrupt_query = lambda r, _: r._replace(answers={}, rejected="out of office")
    _, records = run_rounds(method, engine)
    assert [r["round"] for r in records] == list(range(1, method.total_rounds + 1))
    assert all(r["silos"]["bob"]["rejected"] == "out of office" for r in records)


@pytest.mark.parametrize("engine", [SerialEngine, StackedEngine])
def test_a_silo_that_diverges_is_rejected_until_it_recovers(engine):
    """Bob's images are infinite, so his loss is too, and the federation learns without him."""
    silos = [
        replace(s, train=s.train._replace(x=s.train.x / 0)) if s.name == "bob" else s for s in make_striped_silos()
    ]
    method = FedAvg(**{**SHORT_RUN, "local": replace(LOCAL, epochs=2)})
    server, records = run_rounds(method, make_clients(method, silos, engine=engine))
    assert all("not finite" in r["silos"]["bob"]["rejected"] for r in records)
    assert all("rejected" not in silo for r in records for name, silo in r["silos"].items() if name != "bob")
    assert all(bool(torch.isfinite(t).all()) for t in server.model_state.values())
    assert [r["round"] for r in records] == list(range(1, method.total_rounds + 1))


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
def test_broken_centroids_change_neither_the_initial_codebook_nor_a_group(kind, scope):
    def corrupt(reply, task):
        if task != "compute_centroids":
            return reply
        return reply._replace(answers={split: ANSWERS[kind](a) for split, a in reply.answers.items()})

    method = UEFL(**SHORT_RUN, codebook=replace(EAGER, extension_scope=scope))
    engine = make_clients(method, engine=CorruptingEngine)
    engine.corrupt_query = corrupt
    server, _ = run_rounds(method, engine)
    assert bool(torch.isfinite(server.model_state[CODEWORDS]).all())
    assert server.access.shape[1] > 6  # the others were extended
    assert server.access[1].sum() == 6  # bob has the initial codebook, made without him


def test_a_silo_whose_uncertainty_is_not_a_number_has_no_influence():
    def corrupt(reply, task):
        if task != "evaluate":
            return reply
        return reply._replace(answers={s: {**a, "entropy": a["entropy"] * torch.nan} for s, a in reply.answers.items()})

    method = UEFL(**SHORT_RUN, codebook=EAGER)
    engine = make_clients(method, engine=CorruptingEngine)
    engine.corrupt_query = corrupt
    _, records = run_rounds(method, engine)
    is_uncertain = {name: silo["is_uncertain"] for name, silo in records[2]["silos"].items()}
    assert is_uncertain.pop("bob") is False
    assert sorted(is_uncertain.values()) == [False, True, True]
