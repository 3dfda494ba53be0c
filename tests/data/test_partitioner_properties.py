"""Any combination of settings gives a valid partition or an error."""

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_images import make_synthetic_images

from uefl.core.errors import InputError
from uefl.data import PARTITIONERS
from uefl.data.config import DataConfig

SHIFTS = ("none", "rotate:0", "rotate:-50", "noise:5", "blur:1+contrast:2")
SETTINGS = {
    "train_per_silo": st.integers(0, 60),
    "test_per_silo": st.integers(0, 30),
    "test_fraction": st.floats(0, 0.99),
    "test_label_distribution": st.sampled_from(["silo", "global"]),
    "validation_fraction": st.floats(0, 0.99),
    "alpha": st.floats(1e-9, 1e9),
    "classes_per_silo": st.integers(1, 12),
    "pool_splits": st.booleans(),
}


@st.composite
def draw_settings(draw: st.DrawFn) -> dict[str, Any]:
    """Draw settings that mostly fit together, so that most of them give a partition."""
    partitioner = draw(st.sampled_from(sorted(PARTITIONERS)))
    shifts = tuple(draw(st.lists(st.sampled_from(SHIFTS), min_size=1, max_size=4, unique=True)))
    silos_per_domain = st.lists(st.integers(1, 5), min_size=len(shifts), max_size=len(shifts)).map(tuple)
    values = {name: draw(strategy) for name, strategy in SETTINGS.items()}
    values |= {"partitioner": partitioner, "shifts": shifts}
    if partitioner.startswith("leave-one-domain-out"):
        natural_domains = partitioner == "leave-one-domain-out" and draw(st.booleans())
        values |= {"shifts": () if natural_domains else shifts, "num_silos": draw(st.sampled_from([(), (9,)]))}
        values |= {"target": draw(st.sampled_from(("art", "sketch") if natural_domains else shifts))}
    elif partitioner == "natural":
        values |= {"shifts": shifts[:1], "num_silos": ()}
    else:
        values |= {"num_silos": draw(silos_per_domain)}
    if partitioner == "domains" and draw(st.booleans()):
        values |= {"train_sizes": tuple(range(20, 20 + sum(values["num_silos"])))}
    return values


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    values=draw_settings(),
    count=st.integers(1, 1500),
    num_classes=st.integers(1, 10),
    test_fraction=st.sampled_from([0.0, 0.2]),
)
def test_any_settings_give_a_valid_partition_or_an_error(
    values: dict[str, Any], count: int, num_classes: int, test_fraction: float
) -> None:
    images = make_synthetic_images(count, num_classes, test_fraction=test_fraction)
    try:
        partitions = DataConfig(**values).make_partitions(images, 0)
    except InputError:
        return
    indices = torch.cat([split for p in partitions for split in (p.train, p.validation, p.test)])
    assert len({p.silo.name for p in partitions}) == len(partitions)
    for p in partitions:
        is_target = p.silo.name.endswith("-held-out")
        assert (len(p.train) == 0 < len(p.test)) if is_target else len(p.train) > 0
    if values["partitioner"] != "leave-one-domain-out-paired":
        assert len(indices.unique()) == len(indices)
