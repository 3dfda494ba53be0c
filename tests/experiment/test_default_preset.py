"""The preset `default`: UEFL trains groups of alike silos in its last iteration, in as many rounds as others have."""

import pytest

from uefl.experiment.parsing import parse_experiments
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


@pytest.mark.parametrize(
    ("assignments", "group_rounds", "num_decisions"),
    [
        ([], 6, 1),
        (["extra_rounds=2"], 2, 1),
        (["iterations=5"], 6, 3),
        (["iterations=2"], 0, 1),
        (["iterations=1"], 0, 0),
        (["iterations=2", "group_rounds=3"], 3, 1),
        (["method.group_rounds=0"], 0, 2),
    ],
)
def test_groups_follow_the_assigned_iterations_and_leave_the_codebook_its_decisions(
    assignments: list[str], group_rounds: int, num_decisions: int
) -> None:
    method = parse_experiments(["uefl", *assignments], [], "default")["uefl"].method
    assert method.total_rounds - method.shared_rounds == group_rounds
    ends = [method.rounds + i * method.extra_rounds for i in range(method.iterations)]
    assert sum(end < method.shared_rounds for end in ends) == num_decisions
    others = [a for a in assignments if "group" not in a]
    assert method.total_rounds == parse_experiments(["fedavg", *others], [], "default")["fedavg"].method.total_rounds


def test_without_the_preset_groups_stay_as_they_are() -> None:
    assert parse_experiments(["uefl", "mnist", "extra_rounds=2"], [], "paper")["uefl"].method.group_rounds == 0
