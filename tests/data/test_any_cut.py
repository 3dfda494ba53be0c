"""Whatever one asks for is cut lawfully or refused, never half of it."""

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_images import synthetic

from uefl.data import CUTS, Data
from uefl.errors import InputError

SHIFTS = ("none", "rotate:0", "rotate:-50", "noise:5", "blur:1+contrast:2")
NUMBERS = {
    "train": st.integers(0, 60),
    "test": st.integers(0, 30),
    "test_part": st.floats(0, 0.99),
    "test_labels": st.sampled_from(["own", "all"]),
    "validation": st.floats(0, 0.99),
    "alpha": st.floats(1e-9, 1e9),
    "labels": st.integers(1, 12),
    "merge": st.booleans(),
}


@st.composite
def asked(draw: st.DrawFn) -> dict[str, Any]:
    """Fields that mostly fit together, so that most of them are cut."""
    cut = draw(st.sampled_from(sorted(CUTS)))
    shifts = tuple(draw(st.lists(st.sampled_from(SHIFTS), min_size=1, max_size=4, unique=True)))
    each = st.lists(st.integers(1, 5), min_size=len(shifts), max_size=len(shifts)).map(tuple)
    fields = {"cut": cut, "shifts": shifts, **{name: draw(number) for name, number in NUMBERS.items()}}
    if cut in ("held-out", "ghifary"):
        own = cut == "held-out" and draw(st.booleans())
        fields |= {"shifts": () if own else shifts, "silos": draw(st.sampled_from([(), (9,)]))}
        fields |= {"target": draw(st.sampled_from(("art", "sketch") if own else shifts))}
    elif cut == "given":
        fields |= {"shifts": shifts[:1], "silos": ()}
    else:
        fields |= {"silos": draw(each)}
    if cut == "domains" and draw(st.booleans()):
        fields |= {"sizes": tuple(range(20, 20 + sum(fields["silos"])))}
    return fields


@settings(max_examples=400, deadline=None, derandomize=True)
@given(fields=asked(), n=st.integers(1, 1500), classes=st.integers(1, 10), test=st.sampled_from([0.0, 0.2]))
def test_whatever_one_asks_for_is_cut_lawfully_or_refused(
    fields: dict[str, Any], n: int, classes: int, test: float
) -> None:
    try:
        shares = Data(**fields).shares(synthetic(n, classes, test=test), 0)
    except InputError:
        return
    everything = torch.cat([at for s in shares for at in (s.train, s.validation, s.test)])
    assert len({s.owner.name for s in shares}) == len(shares)
    for s in shares:
        tests_only = s.owner.name.endswith("-held-out")
        assert (len(s.train) == len(s.validation) == 0 < len(s.test)) if tests_only else len(s.train) > 0
    if fields["cut"] != "ghifary":
        assert len(everything.unique()) == len(everything)
