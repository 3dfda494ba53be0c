"""The preset `default`: UEFL trains groups of alike silos in its last iteration, in as many rounds as others have."""

import pytest

from uefl.experiment.recipes import make_experiment


@pytest.mark.parametrize("dataset", ["mnist5k", "heart", "table", "folder", "mnist", "cifar10", "pacs"])
def test_with_the_default_preset_uefls_last_iteration_trains_groups_in_as_many_rounds_as_fedavg(dataset: str) -> None:
    methods = {name: make_experiment(name, dataset).method for name in ("uefl", "fedavg", "fine-tuning")}
    uefl = methods["uefl"]
    assert uefl.total_rounds - uefl.shared_rounds == uefl.extra_rounds > 0
    assert uefl.shared_rounds > uefl.rounds, "the first iteration ends with a decision"
    assert uefl.codebook.alike_rule == "halves"
    assert {method.total_rounds for method in methods.values()} == {uefl.total_rounds}
    assert methods["fedavg"].shared_rounds == uefl.total_rounds


def test_the_paper_has_no_groups() -> None:
    method = make_experiment("uefl", "mnist", "paper").method
    assert method.shared_rounds == method.total_rounds
    assert not method.has_own_models
