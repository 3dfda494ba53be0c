"""What identifies a run: the settings, the seed and every example of every silo."""

from dataclasses import replace

import pytest
import torch
from harness import MLP_MODEL, have_equal_bits, make_striped_silos

from uefl.core.federation import Examples
from uefl.experiment.experiment import Experiment, fingerprint_silos


@pytest.mark.parametrize("split", ["train", "validation", "test"])
@pytest.mark.parametrize("part", ["x", "y"])
def test_fingerprint_changes_with_any_image_or_label(split, part):
    silo, *others = make_striped_silos()
    examples = {"x": silo.examples(split).x.clone(), "y": silo.examples(split).y.clone()}
    examples[part][-1] += 1
    changed = [replace(silo, **{split: Examples(**examples)}), *others]
    assert fingerprint_silos(changed) != fingerprint_silos([silo, *others])


def test_fingerprint_changes_with_names_and_domains_but_not_with_the_order_of_silos():
    silos = make_striped_silos()
    assert fingerprint_silos(silos[::-1]) == fingerprint_silos(silos)
    assert fingerprint_silos([replace(silos[0], name="eve"), *silos[1:]]) != fingerprint_silos(silos)
    assert fingerprint_silos([replace(silos[0], domain="other"), *silos[1:]]) != fingerprint_silos(silos)


def test_initial_weights_depend_on_the_seed_alone():
    states = []
    for seed, global_seed in ((0, 1), (0, 2), (1, 1)):
        torch.manual_seed(global_seed)
        states.append(Experiment(model=MLP_MODEL, seed=seed).build_network((1, 8, 8), 3).state_dict())
    assert have_equal_bits(states[0], states[1])
    assert not any(torch.equal(states[0][n], states[2][n]) for n in states[0] if n.endswith("weight"))
