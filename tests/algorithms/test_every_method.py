"""Laws that every method obeys."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from federations import BOOK, OTHERS, WITH_CODEBOOK, accuracy, method, network, run, same, silos

from uefl.aggregate import flaw
from uefl.algorithms import ALGORITHMS
from uefl.checkpoint import load_checkpoint, save_checkpoint
from uefl.engines.serial import Serial
from uefl.errors import InputError
from uefl.experiment import Architecture
from uefl.federation import Part
from uefl.recipes import recipe

VARIANTS = [(name, {}) for name in OTHERS] + [
    ("fedbr", {"pseudo": "mixture"}),
    ("distrans", {"offsets": "mean"}),
    *((name, {"codebook": True}) for name in WITH_CODEBOOK),
]
NAMED = [f"{name} {' '.join(map(str, more.values()))}".strip() for name, more in VARIANTS]
every = pytest.mark.parametrize(("name", "more"), VARIANTS, ids=NAMED)


@every
@pytest.mark.parametrize("participation", [0, 2])
def test_a_resumed_run_ends_in_the_same_bits(name, more, participation, tmp_path: Path):
    of = method(name, participation=participation, **more)
    whole = run(of)
    half = run(of, rounds=2)
    save_checkpoint(tmp_path / "checkpoint", half.server, half.clients.memory)
    server, kept = load_checkpoint(tmp_path / "checkpoint", "cpu")
    clients = Serial(silos(), network(of))
    clients.memory = kept
    while server.round < of.budget:
        server = of.step(clients, server)
    assert same(server.state, whole.server.state)
    assert same(server.memory, whole.server.memory)
    assert all(same(kept.get(who, {}), mine) for who, mine in whole.clients.memory.items())


@every
def test_the_order_of_silos_changes_nothing(name, more):
    of = method(name, participation=2, **more)
    assert same(run(of).server.state, run(of, silos()[::-1]).server.state)


@every
def test_what_a_silo_keeps_never_travels(name, more):
    of = method(name, **more)
    done = run(of)
    stays = set(of.keeps(done.clients.net))
    assert not stays & done.clients.down
    assert not stays & done.clients.up
    assert not stays & set(done.server.state)
    assert all(stays <= set(mine) for mine in done.clients.memory.values())


@every
def test_it_learns(name, more):
    of = method(name, rounds=5, passes=1, **more)
    rate = 0.05 if of.local.optimizer == "sgd" else 0.01
    done = run(replace(of, local=replace(of.local, epochs=3, rate=rate)))
    assert accuracy(done.records[-1]) > 0.75  # chance is a third
    assert not any("refused" in s for r in done.records for s in r["silos"].values())


@every
def test_uncertainty_is_measured_and_bytes_are_counted(name, more):
    for record in run(method(name, **more)).records:
        assert all(0 < s["entropy"] < 2 for s in record["silos"].values())
        assert record["bytes_up"] > 0 < record["bytes_down"]


@pytest.mark.parametrize("name", OTHERS)
def test_sampled_predictions_differ(name):
    done = run(method(name), rounds=1)
    net = done.clients.net.eval()
    with torch.no_grad():
        a, b = net.examine(silos()[0].test.x, 2).samples
    assert not torch.equal(a, b)


@pytest.mark.parametrize("norms", ["local", "skip"])
@pytest.mark.parametrize("name", OTHERS)
def test_batch_norm_is_a_switch(name, norms):
    done = run(method(name, norms=norms), rounds=2)
    moved = [n for n in done.server.state if n.endswith("running_mean")]
    if norms == "local":
        assert not moved
        assert not any(n.endswith("running_mean") for n in done.clients.up)
    else:
        assert all(torch.equal(done.server.state[n], done.clients.initial[n]) for n in moved)


@pytest.mark.parametrize("name", OTHERS)
def test_colour_images_and_encoders_that_end_in_a_vector(name):
    shape = (3, 16, 16)
    of = method(name, rounds=1, iterations=1)
    for encoder in ("gn-conv", "dirt"):
        run(of, silos((12, 12), shape), model=Architecture(encoder=encoder, hidden=8))


@pytest.mark.parametrize("name", OTHERS)
def test_an_ensemble_trains_or_is_refused_in_one_line(name):
    model = Architecture(width=4, depth=1, hidden=8, members=2)
    if name in ("fedprox", "scaffold", "fedbn"):
        run(method(name), rounds=1, model=model)
    else:
        with pytest.raises(InputError, match="members=1") as refusal:
            network(method(name), model)
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", OTHERS)
def test_a_codebook_is_taken_or_refused_in_one_line(name):
    if name in WITH_CODEBOOK:
        assert run(method(name, codebook=True)).server.access.shape[1] > BOOK.words  # it was extended
    else:
        with pytest.raises(InputError, match="takes no codebook") as refusal:
            method(name, codebook=True)
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", [*OTHERS, "alone"])
def test_a_silo_without_training_data_is_measured_or_refused_in_one_line(name):
    *others, last = silos()
    none = Part(last.train.x[:0], last.train.y[:0])
    target = [*others, replace(last, train=none, validation=none)]
    if name in ("fedbn", "fedcr", "alone"):
        with pytest.raises(InputError, match="silo 2 has no training images"):
            run(method(name), target)
    else:
        done = run(method(name), target)
        assert "accuracy" in done.records[-1]["silos"]["silo 2"]
        assert "silo 2" not in done.clients.memory


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_method_says_in_one_line_what_it_does(name):
    assert len((ALGORITHMS[name].__doc__ or "").splitlines()[0]) > 20
    assert all(f.kw_only for f in fields(ALGORITHMS[name]))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("fedprox", {"mu": -1.0}),
        ("fedsr", {"l2r": float("nan")}),
        ("fedsr", {"draws": 0}),
        ("fediir", {"decay": 1.0}),
        ("fedcr", {"blend": 1.5}),
        ("vhl", {"each": 0}),
        ("vhl", {"temperature": 0.0}),
        ("fedbr", {"mixed": 0}),
        ("fedbr", {"tau": -1.0}),
        ("distrans", {"blend": -0.1}),
    ],
)
def test_a_value_that_makes_no_sense_is_named(name, wrong):
    (field,) = wrong
    with pytest.raises(InputError, match=field):
        ALGORITHMS[name](**wrong)


@pytest.mark.parametrize("data", ["mnist5k", "cifar10", "pacs", "mnist"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_method_has_a_recipe_for_every_data_set(name, data):
    assert recipe(name, data, "paper").method.budget == recipe("fedavg", data, "paper").method.budget


def test_training_accuracy_is_recorded_where_asked():
    record = run(method("fedavg", watch_train=True)).records[-1]
    assert all(0 <= s["train"]["accuracy"] <= 1 for s in record["silos"].values())


def test_leaving_out_the_local_models_measurements_changes_nothing_else():
    done, less = (run(method("fedavg", watch_local=watch)) for watch in (True, False))
    assert all(torch.equal(t, less.server.state[n]) for n, t in done.server.state.items())
    for one, other in zip(done.records, less.records, strict=True):
        for name, mine in one["silos"].items():
            assert "local_accuracy" not in other["silos"][name]
            assert mine["accuracy"] == other["silos"][name]["accuracy"]


@pytest.mark.parametrize("name", ["scaffold", "fedcr"])
def test_a_reply_whose_extras_are_not_finite_is_refused(name):
    done = run(method(name), rounds=1)
    reply, server = done.clients.replies[0], done.server
    bad = {n: torch.full_like(t, float("nan")) for n, t in reply.extra.items()}
    assert "not finite" in flaw(reply._replace(extra=bad), server.state, server.access[0])
    assert flaw(reply, server.state, server.access[0]) == ""


@pytest.mark.parametrize("name", ["scaffold", "distrans"])
def test_a_silo_that_lost_what_it_kept_starts_afresh(name):
    of = method(name)
    done = run(of, rounds=2)
    done.clients.memory["silo 0"] = {}
    server = of.step(done.clients, done.server)
    assert done.clients.memory["silo 0"]
    assert not any("refused" in s for s in server.records[-1]["silos"].values())
