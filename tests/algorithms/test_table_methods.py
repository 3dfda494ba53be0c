"""Every method trains on a table, or names in one line why it cannot."""

from dataclasses import replace

import pytest

from uefl.algorithms import METHODS
from uefl.core.errors import InputError
from uefl.engines.serial import SerialEngine
from uefl.experiment.recipes import make_experiment
from uefl.experiment.rounds import iterate_rounds


@pytest.mark.parametrize("name", METHODS)
def test_a_method_trains_on_heart_disease(name: str) -> None:
    experiment = make_experiment(name, "heart")
    local = replace(experiment.method.local, epochs=1, batch_size=64)
    method = replace(experiment.method, rounds=3, iterations=1, mc_samples=2, local=local)
    if name == "fccl":
        with pytest.raises(InputError, match="needs images, but heart is a table"):
            experiment.data.load(0)
        return
    silos, images = experiment.data.load(0)
    silos = list(method.prepare_silos(silos))
    experiment = replace(experiment, method=method)
    if name == "vhl":
        with pytest.raises(InputError, match="VHL makes virtual images and cannot train on a table"):
            experiment.build_network(tuple(silos[0].test.x.shape[1:]), len(images.classes))
        return
    net = experiment.build_network(tuple(silos[0].test.x.shape[1:]), len(images.classes))
    *_, server = iterate_rounds(method, SerialEngine(silos, net))
    assert server.completed_records[-1]["all_silos"]["auroc"] > 0.5
