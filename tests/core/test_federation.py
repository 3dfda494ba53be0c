"""The split of a silo's own data, and which codewords a silo receives."""

import torch

from uefl.core.federation import CODEWORDS_SUFFIX, Silo, gather_accessible_rows


def test_splits_of_a_silo_share_no_example_and_contain_all():
    x, y = torch.arange(200.0)[:, None], torch.arange(200) % 10
    silo = Silo.from_tensors("ada", x, y, test_fraction=0.2, validation_fraction=0.1)
    indices = [examples.x[:, 0].int().tolist() for examples in (silo.train, silo.validation, silo.test)]
    assert [len(part) for part in indices] == [144, 16, 40]  # 10 % of the 160 that are not test examples
    assert sorted(i for part in indices for i in part) == list(range(200))
    for examples, part in zip((silo.train, silo.validation, silo.test), indices):
        assert examples.y.tolist() == [i % 10 for i in part]


def test_split_depends_on_the_seed_and_the_name_of_the_silo():
    x, y = torch.arange(200.0)[:, None], torch.zeros(200, dtype=torch.int64)
    splits = [
        Silo.from_tensors(name, x, y, seed=seed).test.x for name, seed in (("a", 0), ("a", 0), ("a", 1), ("b", 0))
    ]
    assert torch.equal(splits[0], splits[1])
    assert not torch.equal(splits[0], splits[2])
    assert not torch.equal(splits[0], splits[3])


def test_silo_receives_all_tensors_but_only_its_own_codewords():
    model_state = {"w": torch.ones(3), f"members.0.{CODEWORDS_SUFFIX}": torch.arange(4.0)[:, None]}
    received = gather_accessible_rows(model_state, torch.tensor([True, False, False, True]))
    assert received["w"].tolist() == [1, 1, 1]
    assert received[f"members.0.{CODEWORDS_SUFFIX}"].flatten().tolist() == [0, 3]


def test_groups_of_training_examples_stay_beside_them():
    x, y, groups = torch.arange(60.0)[:, None], torch.arange(60) % 2, torch.arange(60) // 4 + 7
    silo = Silo.from_tensors("ada", x, y, groups=groups)
    assert silo.train_groups.tolist() == (silo.train.x[:, 0].long() // 4).tolist()
    assert Silo.from_tensors("ada", x, y).train_groups is None
