"""`field=value` from the command line: typed, checked, and answered in one line."""

import json
import math
from dataclasses import dataclass

import pytest

from uefl.algorithms import UEFL, Book, FedAvg
from uefl.errors import InputError
from uefl.experiment import Experiment
from uefl.settings import has, leaves, override, plain

BASE = Experiment(method=UEFL())


def test_a_field_is_found_by_its_name_anywhere_inside():
    found = override(BASE, ["gamma=0.5", "rate=1e-2", "seed=7", "hidden=32", "optimizer=sgd"])
    assert found.method.codebook.gamma == 0.5
    assert found.method.local.rate == 0.01
    assert found.seed == 7
    assert found.model.hidden == 32
    assert found.method.local.optimizer == "sgd"
    assert BASE.seed == 0


def test_fields_that_depend_on_each_other_may_come_in_any_order():
    for words in (["rounds=2", "warm_up=1"], ["warm_up=1", "rounds=2"]):
        assert override(BASE, words).method.rounds == 2
    with pytest.raises(InputError, match="warm_up=3 must be less than rounds=2"):
        override(BASE, ["rounds=2", "warm_up=3"])


def test_the_way_to_a_field_may_be_given():
    assert override(BASE, ["method.codebook.words=8"]).method.codebook.words == 8
    assert override(BASE, ["codebook.words=9"]).method.codebook.words == 9


def test_the_last_assignment_wins_and_values_may_hold_an_equals_sign():
    assert override(BASE, ["seed=1", "seed=2"]).seed == 2
    assert override(BASE, ["pretrained=a=b"]).model.pretrained == "a=b"


@pytest.mark.parametrize("text", ["inf", "1e3", "0"])
def test_numbers_are_numbers(text):
    assert override(BASE, [f"gamma={text}"]).method.codebook.gamma == float(text)


@pytest.mark.parametrize(("text", "value"), [("true", True), ("No", False), ("1", True), ("0", False)])
def test_truth_has_its_usual_words(text, value):
    assert override(BASE, [f"extend={text}"]).method.codebook.extend is value


@pytest.mark.parametrize(
    ("assignment", "says"),
    [
        ("gama=0.2", "unknown field 'gama' (did you mean 'gamma'?); known: "),
        ("gamma=much", "gamma=much is not a number"),
        ("words=2.5", "words=2.5 is not a whole number"),
        ("extend=perhaps", "extend=perhaps; allowed: true, false"),
        ("scope=all", "scope=all; allowed: silo, group"),
        ("gamma", "'gamma' is not of the form field=value"),
        ("=3", "'=3' is not of the form field=value"),
        ("gamma=-1", "gamma=-1.0 must not be negative"),
        ("gamma=nan", "gamma=nan is not a number"),
        ("rate=inf", "rate=inf must be greater than 0 and finite"),
        ("words=0", "words=0 must be at least 1"),
        ("warm_up=14", "warm_up=14 must be less than rounds=14"),
        ("dropout=1", "dropout=1.0 must be at least 0 and less than 1"),
        ("rounds=", "rounds= is not a whole number"),
    ],
)
def test_a_wrong_assignment_is_answered_in_one_line(assignment, says):
    with pytest.raises(InputError) as raised:
        override(BASE, [assignment])
    assert str(raised.value).startswith(says)
    assert "\n" not in str(raised.value)


@dataclass(frozen=True)
class Half:
    size: int = 1
    shade: str = "grey"


@dataclass(frozen=True)
class Both:
    left: Half = Half()
    right: Half = Half(2)


def test_a_name_in_two_places_must_be_told_apart():
    with pytest.raises(InputError, match=r"field 'size' is ambiguous; say one of: left\.size, right\.size$"):
        override(Both(), ["size=3"])
    assert override(Both(), ["right.size=3"]) == Both(right=Half(3))


def test_a_group_of_settings_is_not_a_text():
    """FedAvg has no codebook; a word in its place would only fail much later."""
    with pytest.raises(InputError, match="codebook"):
        override(FedAvg(), ["codebook=yes"])
    assert override(FedAvg(), ["codebook=on"]).codebook == Book()
    assert override(FedAvg(), ["codebook=none"]).codebook is None


def test_every_setting_of_every_method_takes_its_own_value_back():
    """What is shown can be typed: each field is settable, by name or by the way to it, to what it is."""
    for path, value in leaves(BASE):
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        assert override(BASE, [f"{'.'.join(path)}={text}"]) == BASE, path


def test_it_says_whether_a_setting_is_there():
    assert has(BASE, "gamma")
    assert has(BASE, "codebook.gamma")
    assert not has(Experiment(method=FedAvg()), "gamma")


def test_plain_values_are_json_and_tell_experiments_apart():
    assert json.loads(json.dumps(plain(BASE)))["method"]["codebook"]["words"] == 256
    assert plain(override(BASE, ["gamma=0.3"])) != plain(BASE)


def test_every_setting_that_changes_a_result_changes_the_id_of_the_run():
    ids = {BASE.id("x"), BASE.id("y"), Experiment(method=FedAvg()).id("x")}
    ids |= {override(BASE, [a]).id("x") for a in ("gamma=0.3", "seed=1", "rate=0.5", "hidden=9", "precision=float64")}
    assert len(ids) == 8
    assert override(BASE, [f"gamma={BASE.method.codebook.gamma}"]).id("x") == BASE.id("x")


def test_infinity_survives_the_id():
    assert override(BASE, ["gamma=inf"]).method.codebook.gamma == math.inf
    assert override(BASE, ["gamma=inf"]).id("x") != BASE.id("x")
