"""The Flower engine gives the same results as the serial engine."""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from small_federation import (
    QUICK_POLICY,
    drop_seconds,
    make_experiment,
    make_flower_engine,
    make_grid,
    make_serial_engine,
    max_difference,
    run_rounds,
)

from uefl.algorithms import METHODS
from uefl.algorithms.extensible_codebook import Extend
from uefl.core.federation import Broadcast
from uefl.core.label_prior import LOG_PRIOR
from uefl.core.registry import Entry
from uefl.data.config import DataConfig
from uefl.experiment.loading import load
from uefl.experiment.run_folder import RunFolder
from uefl.flower.connect import connect
from uefl.flower.node_data import load_data_once
from uefl.flower.wire import read_payload, read_tensors

EXAMPLES_FOLDER = Path(__file__).parents[2] / "examples"


def run_both_engines(experiment, tmp_path):
    """Return state and records of the serial engine, then of the Flower engine."""
    serial = run_rounds(make_serial_engine(experiment), experiment)
    return *serial, *run_rounds(make_flower_engine(make_grid(tmp_path), experiment), experiment)


@pytest.mark.parametrize("name", [name for name in METHODS if not METHODS[name].network_unsupported_reason])
def test_three_rounds_and_an_extension_agree(name, tmp_path):
    serial, serial_records, flower, flower_records = run_both_engines(make_experiment(name), tmp_path)
    assert torch.equal(serial.access, flower.access)
    assert max_difference(serial, flower) < 1e-9
    assert all((serial.method_state[n] - t).abs().max() < 1e-9 for n, t in flower.method_state.items())
    assert [drop_seconds(r) for r in serial_records] == [drop_seconds(r) for r in flower_records]
    if name == "uefl":
        assert flower.access.shape[1] > 8, "the codebook was not extended"


def test_a_sample_of_lazy_silos_measures_alike(tmp_path):
    experiment = make_experiment("fedavg", clients_per_round=2, eval_clients=1)
    experiment = replace(experiment, data=replace(experiment.data, lazy=True))
    serial, serial_records, flower, flower_records = run_both_engines(experiment, tmp_path)
    assert max_difference(serial, flower) < 1e-9
    assert [drop_seconds(r) for r in serial_records] == [drop_seconds(r) for r in flower_records]
    assert [(r["num_evaluated"], r["num_silos"]) for r in flower_records] == [(1, 3)] * 3


@pytest.mark.parametrize("extend", [extend for extend in get_args(Extend) if extend != "uncertain"])
def test_every_choice_of_receivers_agrees_over_three_iterations(extend, tmp_path):
    """From the second decision on, silos also evaluate the model without their own codewords."""
    codebook = replace(make_experiment().method.codebook, extend=extend)
    experiment = make_experiment(codebook=codebook, iterations=3)
    serial, serial_records, flower, flower_records = run_both_engines(experiment, tmp_path)
    assert torch.equal(serial.access, flower.access)
    assert max_difference(serial, flower) < 1e-9
    assert [drop_seconds(r) for r in serial_records] == [drop_seconds(r) for r in flower_records]
    assert [r["round"] for r in flower_records if "decision" in r] == [2, 3]


def test_a_method_of_a_user_agrees(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES_FOLDER))
    monkeypatch.setattr(METHODS, "_loaded", {})
    monkeypatch.setitem(METHODS._entries, "momentum", Entry("your_algorithm:Momentum", "FedAvg with server momentum"))
    serial, _, flower, _ = run_both_engines(make_experiment("momentum"), tmp_path)
    assert max_difference(serial, flower) < 1e-9


@pytest.mark.parametrize(("name", "batch_norm"), [("fedavg", "local"), ("uefl", "personal")])
def test_batch_norm_that_stays_at_the_silo_agrees(name, batch_norm, tmp_path):
    serial, _, flower, _ = run_both_engines(make_experiment(name, batch_norm=batch_norm), tmp_path)
    assert max_difference(serial, flower) < 1e-9


def test_options_of_the_codebook_agree(tmp_path):
    options = {"codeword_gradient": "task", "gate": "learned", "num_codewords": 0, "segments": 0}
    codebook = replace(make_experiment("uefl").method.codebook, **options)
    serial, _, flower, _ = run_both_engines(make_experiment("uefl", codebook=codebook), tmp_path)
    assert "codebook.gate_logits" in serial.model_state
    assert torch.equal(serial.access, flower.access)
    assert max_difference(serial, flower) < 1e-9


def test_logit_adjustment_agrees_and_its_prior_is_in_no_message(tmp_path):
    experiment, replies = make_experiment("fedavg", logit_adjustment="local"), []
    serial, serial_records = run_rounds(make_serial_engine(experiment), experiment)
    grid = make_grid(tmp_path)
    grid.tamper = lambda _message, reply: replies.append(reply) or reply
    flower, flower_records = run_rounds(make_flower_engine(grid, experiment), experiment)
    assert max_difference(serial, flower) < 1e-9
    assert [drop_seconds(r) for r in serial_records] == [drop_seconds(r) for r in flower_records]
    for message in (*grid.sent_messages, *replies):
        assert not any(LOG_PRIOR in read_tensors(message, r) for r in ("model_state", "extras", "tensors"))
        assert LOG_PRIOR not in str(read_payload(message))
    for silo in load_data_once(experiment.data, experiment.seed)[0]:
        (path,) = tmp_path.rglob(f"silo-{silo.name}/{RunFolder.MODEL_FILE}")
        predictions, recorded = load(path).predict(silo.test.x), flower_records[-1]["silos"][silo.name]
        assert predictions.uncertainty.entropy.mean() == pytest.approx(recorded["entropy"])


def test_stored_optimizer_state_agrees(tmp_path):
    local = replace(make_experiment("fedavg").method.local, reset_optimizer=False)
    serial, _, flower, _ = run_both_engines(make_experiment("fedavg", local=local), tmp_path)
    assert max_difference(serial, flower) < 1e-9


def test_half_precision_halves_the_bytes_and_changes_the_model_little(tmp_path):
    experiment = replace(make_experiment("fedavg", rounds=1, iterations=1), precision="float32")
    (full, full_records), (half, half_records) = (
        run_rounds(
            connect(make_grid(tmp_path), experiment, num_silos=3, policy=QUICK_POLICY, half_precision=half_precision),
            experiment,
        )
        for half_precision in (False, True)
    )
    for key in ("bytes_up", "bytes_down"):
        assert half_records[0][key] < 0.55 * full_records[0][key]  # integer counters keep their size
    assert 0 < max_difference(full, half) < 1e-2  # half precision rounds by 2⁻¹¹, and training carries that on


def test_a_broadcast_of_another_method_is_not_sent(tmp_path):
    clients = make_flower_engine(make_grid(tmp_path), make_experiment("fedavg"))
    other_method = make_experiment("fedavg", mc_samples=4).method
    access = torch.ones(3, 0, dtype=torch.bool)
    broadcast = Broadcast(1, clients.initial_model_state(), tuple(clients.num_examples), access, participants=("D1-1",))
    with pytest.raises(ValueError, match="the method differs"):
        list(clients.fit(other_method, broadcast))


def test_metrics_of_a_target_silo_agree(tmp_path):
    data = DataConfig(
        train_per_silo=24,
        image_size=14,
        partitioner="leave-one-domain-out",
        num_silos=(),
        shifts=("rotate:0", "rotate:60", "rotate:120"),
        target="rotate:120",
    )
    experiment = replace(make_experiment("uefl"), data=data)
    serial, serial_records, flower, flower_records = run_both_engines(experiment, tmp_path)
    assert max_difference(serial, flower) < 1e-9
    assert [drop_seconds(r) for r in serial_records] == [drop_seconds(r) for r in flower_records]
    (target_name,) = [name for name, n in make_serial_engine(experiment).num_examples.items() if not n]
    assert set(flower_records[-1]["silos"][target_name]["target_metrics"]) == {"shared", "all", "least_uncertain"}
