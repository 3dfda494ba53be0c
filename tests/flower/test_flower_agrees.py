"""The Flower engine tells the same story as the serial one."""

import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from federating import QUICK, driven, experiment, flower, furthest, in_process, serial, timeless

from uefl.algorithms import ALGORITHMS
from uefl.data import Data
from uefl.federation import Broadcast
from uefl.flower.connect import connect


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "pooled"])  # whose silos do not train
def test_three_rounds_and_an_extension_agree(name, tmp_path):
    what = experiment(name)
    here, records = driven(serial(what), what)
    there, same = driven(flower(in_process(tmp_path), what), what)
    assert torch.equal(here.access, there.access)
    assert furthest(here, there) < 1e-9
    assert [timeless(r) for r in records] == [timeless(r) for r in same]
    if name == "uefl":
        assert there.access.shape[1] > 8, "the extension did not take place"


def test_a_method_of_ones_own_agrees(tmp_path, monkeypatch):
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "your_algorithm.py"))
    monkeypatch.setitem(ALGORITHMS, "momentum", example["Momentum"])
    what = experiment("momentum")
    here, _ = driven(serial(what), what)
    there, _ = driven(flower(in_process(tmp_path), what), what)
    assert furthest(here, there) < 1e-9


def test_kept_norm_statistics_agree(tmp_path):
    what = experiment("fedavg", norms="local")
    here, _ = driven(serial(what), what)
    there, _ = driven(flower(in_process(tmp_path), what), what)
    assert furthest(here, there) < 1e-9


def test_kept_optimiser_state_agrees(tmp_path):
    base = experiment("fedavg").method.local
    what = experiment("fedavg", local=replace(base, fresh=False))
    here, _ = driven(serial(what), what)
    there, _ = driven(flower(in_process(tmp_path), what), what)
    assert furthest(here, there) < 1e-9


def test_half_precision_halves_the_bytes_and_keeps_the_model_close(tmp_path):
    what = replace(experiment("fedavg", rounds=1, iterations=1), precision="float32")
    full, records = driven(connect(in_process(tmp_path), what, silos=3, patience=QUICK), what)
    half, fewer = driven(connect(in_process(tmp_path), what, silos=3, patience=QUICK, half=True), what)
    for way in ("bytes_up", "bytes_down"):
        assert fewer[0][way] < 0.55 * records[0][way]  # counters and measurements stay as they are
    assert 0 < furthest(full, half) < 1e-2


def test_a_model_of_another_method_is_not_sent(tmp_path):
    clients = flower(in_process(tmp_path), experiment("fedavg"))
    other = experiment("fedavg", passes=4).method
    say = Broadcast(1, clients.begin(), tuple(clients.sizes), torch.ones(3, 0, dtype=torch.bool), who=("D1-1",))
    with pytest.raises(ValueError, match="another"):
        list(clients.fit(other, say))


def test_readings_of_a_held_out_silo_agree(tmp_path):
    shifts = ("rotate:0", "rotate:60", "rotate:120")
    held = Data(train=24, size=14, cut="held-out", silos=(), shifts=shifts, target="rotate:120")
    what = replace(experiment("uefl"), data=held)
    here, records = driven(serial(what), what)
    there, same = driven(flower(in_process(tmp_path), what), what)
    assert furthest(here, there) < 1e-9
    assert [timeless(r) for r in records] == [timeless(r) for r in same]
    assert set(same[-1]["silos"]["D3-held-out"]["readings"]) == {"shared", "all", "least_uncertain"}
