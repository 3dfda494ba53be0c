"""Settings are declared with their range and help text; a value outside its range is an error of one line."""

from dataclasses import dataclass, fields

import pytest

from uefl.core.errors import InputError
from uefl.core.field_rules import check_ranges, setting


@dataclass(frozen=True)
class Oven:
    degrees: float = setting(180.0, "Temperature in degrees Celsius.", at_least=30, at_most=300)
    share: float = setting(0.1, "Share of the time.", at_least=0, below=1)
    trays: tuple[int, ...] = setting((1, 2), "Trays per level.", at_least=1)
    name: str = setting("oven", "Any text.")

    def __post_init__(self) -> None:
        check_ranges(self)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"degrees": 20}, "degrees=20 must be at least 30 and at most 300"),
        ({"degrees": 301}, "degrees=301 must be at least 30 and at most 300"),
        ({"degrees": float("nan")}, "degrees=nan must be at least 30 and at most 300"),
        ({"share": 1}, "share=1 must be at least 0 and less than 1"),
        ({"trays": (1, 0)}, r"trays=\(1, 0\) must be at least 1"),
    ],
)
def test_value_outside_its_range_is_named_with_the_range(change, message):
    with pytest.raises(InputError, match=message):
        Oven(**change)


def test_values_on_the_bounds_are_accepted():
    assert Oven(degrees=30, share=0, trays=()).degrees == 30


def test_help_text_is_stored_with_the_field():
    assert next(f for f in fields(Oven) if f.name == "degrees").metadata["help"] == "Temperature in degrees Celsius."


def test_unknown_bound_is_a_programming_error():
    with pytest.raises(TypeError, match="unknown bounds: atleast"):
        setting(1, "A number.", atleast=0)
