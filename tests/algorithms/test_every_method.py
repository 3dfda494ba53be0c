"""Laws that every registered method obeys, checked on the baselines with and without a codebook."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import (
    BASELINES,
    CODEBOOK_METHODS,
    SMALL_CODEBOOK,
    RunResult,
    build_model,
    compute_mean_accuracy,
    have_equal_bits,
    make_method,
    make_pattern_silos,
    run_method,
    run_rounds,
)

from uefl.algorithms import METHODS
from uefl.core.aggregate import find_reply_error
from uefl.core.errors import InputError
from uefl.core.federation import Examples
from uefl.engines.serial import SerialEngine
from uefl.experiment.checkpoint import load_checkpoint, save_checkpoint
from uefl.experiment.recipes import make_experiment
from uefl.models.model_config import ModelConfig

VARIANTS = [(name, {}) for name in BASELINES] + [
    ("fedbr", {"pseudo_data": "mixture"}),
    ("distrans", {"offsets": "average"}),
    ("pmfl", {"server_update": "average"}),
    *((name, {"codebook": True}) for name in CODEBOOK_METHODS),
]
VARIANT_IDS = [
    " ".join([name, *(f"{field}={value}" for field, value in changes.items())]) for name, changes in VARIANTS
]
every_variant = pytest.mark.parametrize(("name", "changes"), VARIANTS, ids=VARIANT_IDS)

# What the methods of the paper must and must not accept; any further method may choose, if its error is one line.
ACCEPT_ENSEMBLES, REJECT_ENSEMBLES = (
    {"fedprox", "scaffold", "fedbn", "pmfl", "fedper", "fine-tuning", "ditto", "ifca"},
    {"fedsr", "fediir", "fedcr", "vhl", "fedbr", "distrans", "fccl"},
)
ACCEPT_TARGETS, REJECT_TARGETS = (
    {"fedprox", "scaffold", "fedsr", "fediir", "vhl", "fedbr", "distrans", "fine-tuning"},
    {"fedbn", "fedcr", "pmfl", "fccl", "local-only", "fedper", "ditto", "ifca"},
)
ACCEPT_CODEBOOKS, REJECT_CODEBOOKS = (
    {"fedprox", "scaffold", "fedbn", "fedsr", "fedper", "fine-tuning"},
    {"fediir", "fedcr", "vhl", "fedbr", "distrans", "pmfl", "fccl", "ditto", "ifca"},
)


@cache
def run_once(name: str, settings: tuple[tuple[str, Any], ...]) -> RunResult:
    return run_method(make_method(name, **dict(settings)))


def get_whole_run(name: str, changes: Mapping[str, Any], clients_per_round: int = 0) -> RunResult:
    """Return a run from the first round to the last, which several tests only read."""
    return run_once(name, (*sorted(changes.items()), ("clients_per_round", clients_per_round)))


def find_input_error(run):
    """Return the message of an `InputError`, or an empty string."""
    try:
        run()
    except InputError as error:
        return str(error)
    return ""


@every_variant
@pytest.mark.parametrize("clients_per_round", [0, 2])
def test_resumed_run_ends_in_the_same_bits(name, changes, clients_per_round, tmp_path: Path):
    method = make_method(name, clients_per_round=clients_per_round, **changes)
    whole = get_whole_run(name, changes, clients_per_round)
    half = run_method(method, rounds=2)
    save_checkpoint(tmp_path / "checkpoint", half.server, half.clients.client_states)
    server, client_states = load_checkpoint(tmp_path / "checkpoint", "cpu")
    clients = SerialEngine(make_pattern_silos(), build_model(method))
    clients.client_states = client_states
    server, _ = run_rounds(method, clients, server=server)
    assert have_equal_bits(server.model_state, whole.server.model_state)
    assert have_equal_bits(server.method_state, whole.server.method_state)
    for silo_name, client_state in whole.clients.client_states.items():
        assert have_equal_bits(client_states.get(silo_name, {}), client_state)


@every_variant
def test_result_does_not_depend_on_the_order_of_silos(name, changes):
    method = make_method(name, clients_per_round=2, **changes)
    one, other = get_whole_run(name, changes, 2), run_method(method, make_pattern_silos()[::-1])
    assert have_equal_bits(one.server.model_state, other.server.model_state)


@every_variant
def test_client_state_is_never_sent(name, changes):
    method, run = make_method(name, **changes), get_whole_run(name, changes)
    local_names = set(method.client_state_names(run.clients.net))
    assert not local_names & run.clients.received_names
    assert not local_names & run.clients.sent_names
    assert not local_names & set(run.server.model_state)
    assert all(local_names <= set(client_state) for client_state in run.clients.client_states.values())


@every_variant
def test_method_learns(name, changes):
    method = make_method(name, rounds=5, mc_samples=1, **changes)
    lr = 0.05 if method.local.optimizer == "sgd" else 0.01
    run = run_method(replace(method, local=replace(method.local, epochs=3, lr=lr)))
    # Chance is a third, and 90 test images give a standard error of 0.05: 0.75 is eight of them above chance.
    assert compute_mean_accuracy(run.records[-1]) > 0.75
    assert not any("rejected" in silo for record in run.records for silo in record["silos"].values())


@every_variant
def test_records_contain_uncertainty_and_bytes(name, changes):
    for record in get_whole_run(name, changes).records:
        assert all(0 < silo["entropy"] < 2 for silo in record["silos"].values())
        assert record["bytes_up"] > 0
        assert record["bytes_down"] > 0 or (name == "fccl" and record["round"] == 1)  # it starts without weights


@pytest.mark.parametrize("name", BASELINES)
def test_sampled_predictions_differ(name):
    net = run_method(make_method(name), rounds=1).clients.net.eval()
    with torch.no_grad():
        one, other = net.predict_with_samples(make_pattern_silos()[0].test.x, 2).sampled_logits
    assert not torch.equal(one, other)


@pytest.mark.parametrize("batch_norm", ["local", "not_averaged", "personal"])
@pytest.mark.parametrize("name", [name for name in BASELINES if name != "fedbn"])  # which has one of its own
def test_every_method_supports_every_batch_norm_setting(name, batch_norm):
    run = run_method(make_method(name, batch_norm=batch_norm), rounds=2)
    statistics = [n for n in run.server.model_state if n.endswith("running_mean")]
    if batch_norm in ("local", "personal"):
        assert not statistics
        assert not any(n.endswith("running_mean") for n in run.clients.sent_names)
        is_shared = any(n.endswith("norm1.weight") for n in run.clients.sent_names)
        assert is_shared is (batch_norm == "local" and name != "fccl")  # FCCL sends no weight
    else:
        for n in statistics:
            shared = run.server.model_state[n]  # of PMFL, the first rows
            assert torch.equal(shared, run.clients.initial_tensors[n][: len(shared)])


@pytest.mark.parametrize("name", BASELINES)
def test_every_method_trains_on_color_images_and_encoders_that_return_a_vector(name):
    shape = (3, 16, 16)
    method = make_method(name, rounds=1, iterations=1)
    for encoder in ("group-norm-conv", "dirt"):
        run_method(method, make_pattern_silos((12, 12), shape), model=ModelConfig(encoder=encoder, hidden_size=8))


@pytest.mark.parametrize("name", BASELINES)
def test_ensemble_trains_or_is_an_error_of_one_line(name):
    model = ModelConfig(width=4, depth=1, hidden_size=8, ensemble_size=2)
    error = find_input_error(lambda: run_method(make_method(name), rounds=1, model=model))
    assert name not in (ACCEPT_ENSEMBLES if error else REJECT_ENSEMBLES)
    if error:
        assert "ensemble_size=1" in error
        assert "\n" not in error


@pytest.mark.parametrize("name", BASELINES)
def test_codebook_is_extended_or_is_an_error_of_one_line(name):
    if name in CODEBOOK_METHODS:
        assert name not in REJECT_CODEBOOKS
        run = run_method(make_method(name, codebook=True))
        assert run.server.access.shape[1] > SMALL_CODEBOOK.num_codewords
    else:
        assert name not in ACCEPT_CODEBOOKS
        with pytest.raises(InputError, match="takes no codebook") as error:
            make_method(name, codebook=True)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", [*BASELINES, "local-only"])
def test_silo_without_training_data_is_evaluated_or_is_an_error_of_one_line(name):
    *others, last = make_pattern_silos()
    no_examples = Examples(last.train.x[:0], last.train.y[:0])
    silos = [*others, replace(last, train=no_examples, validation=no_examples)]
    runs = []
    error = find_input_error(lambda: runs.append(run_method(make_method(name), silos)))
    assert name not in (ACCEPT_TARGETS if error else REJECT_TARGETS)
    if error:
        assert "silo 2 has no training examples" in error
        assert "\n" not in error
    else:
        (run,) = runs
        assert "accuracy" in run.records[-1]["silos"]["silo 2"]
        assert "silo 2" not in run.clients.client_states


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_docstring_and_keyword_only_settings(name):
    assert len((METHODS[name].__doc__ or "").splitlines()[0]) > 20
    assert all(field.kw_only for field in fields(METHODS[name]))


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("fedprox", "mu", -1.0),
        ("fedsr", "l2r", float("nan")),
        ("fedsr", "eval_draws", 0),
        ("fediir", "decay", 1.0),
        ("fedcr", "prior_update_rate", 1.5),
        ("vhl", "images_per_class", 0),
        ("vhl", "temperature", 0.0),
        ("fedbr", "images_per_mean", 0),
        ("fedbr", "tau", -1.0),
        ("distrans", "blend", -0.1),
        ("pmfl", "shared_fraction", 0.0),
        ("fccl", "pretrain_rounds", 0),
        ("fine-tuning", "fine_tuning_epochs", -1),
        ("ditto", "lam", -1.0),
        ("ifca", "num_models", 0),
        ("ifca", "start", -1),
    ],
)
def test_value_outside_its_range_is_named(name, field, value):
    with pytest.raises(InputError, match=f"{field}={value} must be"):
        METHODS[name](**{field: value})


@pytest.mark.parametrize("dataset", ["mnist5k", "cifar10", "pacs", "mnist"])
@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_recipe_with_equal_rounds_for_every_data_set(name, dataset):
    preset = "default" if dataset == "mnist5k" else "paper"  # the paper has no embedded digits
    method, fedavg = (make_experiment(n, dataset, preset).method for n in (name, "fedavg"))
    assert method.total_rounds == fedavg.total_rounds


@pytest.mark.parametrize("name", ["scaffold", "fedcr", "fccl"])
def test_reply_with_extras_that_are_not_finite_is_rejected(name):
    run = run_method(make_method(name), rounds=1)
    reply, server = run.clients.replies[0], run.server
    corrupt = {n: torch.full_like(t, float("nan")) for n, t in reply.extras.items()}
    assert "not finite" in find_reply_error(reply._replace(extras=corrupt), server.model_state, server.access[0])
    assert find_reply_error(reply, server.model_state, server.access[0]) == ""


@pytest.mark.parametrize("name", ["scaffold", "distrans", "pmfl", "fccl", "fedper", "ditto"])
def test_silo_that_lost_its_client_state_starts_with_a_new_one(name):
    method = make_method(name)
    run = run_method(method, rounds=2)
    run.clients.client_states["silo 0"] = {}
    server = method.step(run.clients, run.server)
    assert run.clients.client_states["silo 0"]
    assert not any("rejected" in silo for silo in server.completed_records[-1]["silos"].values())
