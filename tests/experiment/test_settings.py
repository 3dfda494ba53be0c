"""`field=value` from the command line: typed and checked; a mistake is answered in one line."""

import json
import math
from dataclasses import dataclass, replace

import pytest

from uefl.algorithms.extensible_codebook import ExtensibleCodebook
from uefl.algorithms.fedavg import FedAvg
from uefl.algorithms.uefl import UEFL
from uefl.core.errors import InputError
from uefl.core.field_rules import setting
from uefl.experiment.experiment import Experiment
from uefl.experiment.recipes import make_experiment
from uefl.experiment.settings import (
    describe_type,
    format_value,
    get_help_text,
    has_setting,
    iterate_settings,
    override_settings,
    to_dict,
)

BASE = Experiment(method=UEFL())


def test_a_nested_field_is_found_by_its_name():
    changed = override_settings(BASE, ["gamma=0.5", "lr=1e-2", "seed=7", "hidden_size=32", "optimizer=sgd"])
    assert changed.method.codebook.gamma == 0.5
    assert changed.method.local.lr == 0.01
    assert changed.seed == 7
    assert changed.model.hidden_size == 32
    assert changed.method.local.optimizer == "sgd"
    assert BASE.seed == 0


def test_fields_that_depend_on_each_other_may_come_in_any_order():
    for assignments in (["rounds=2", "warmup_rounds=1"], ["warmup_rounds=1", "rounds=2"]):
        assert override_settings(BASE, assignments).method.rounds == 2
    with pytest.raises(InputError, match="warmup_rounds=3 must be less than rounds=2"):
        override_settings(BASE, ["rounds=2", "warmup_rounds=3"])


def test_the_path_to_a_field_may_be_given():
    assert override_settings(BASE, ["method.codebook.num_codewords=8"]).method.codebook.num_codewords == 8
    assert override_settings(BASE, ["codebook.num_codewords=9"]).method.codebook.num_codewords == 9


def test_values_may_hold_an_equals_sign():
    assert override_settings(BASE, ["pretrained_weights=a=b"]).model.pretrained_weights == "a=b"


@pytest.mark.parametrize("text", ["inf", "1e3", "0"])
def test_numbers_are_numbers(text):
    assert override_settings(BASE, [f"gamma={text}"]).method.codebook.gamma == float(text)


@pytest.mark.parametrize(("text", "value"), [("true", True), ("No", False), ("1", True), ("0", False)])
def test_booleans_have_their_usual_spellings(text, value):
    assert override_settings(BASE, [f"evaluate_train={text}"]).method.evaluate_train is value


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("gama=0.2", "unknown field 'gama' (did you mean 'gamma'?); known: "),
        ("gamma=much", "gamma=much is not a number"),
        ("num_codewords=2.5", "num_codewords=2.5 is not a whole number"),
        ("evaluate_train=perhaps", "evaluate_train=perhaps; allowed: true, false"),
        ("extend=true", "extend=true; allowed: none, uncertain, all, random, validated"),
        ("extend=false", "extend=false; allowed: none, uncertain, all, random, validated"),
        ("uncertainty_test=t", "uncertainty_test=t; allowed: none, standard_errors, permutation"),
        ("uncertainty_level=0", "uncertainty_level=0.0 must be greater than 0 and less than 1"),
        ("uncertainty_level=1", "uncertainty_level=1.0 must be greater than 0 and less than 1"),
        ("extension_scope=all", "extension_scope=all; allowed: silo, group, alike"),
        ("gamma", "'gamma' is not of the form field=value"),
        ("=3", "'=3' is not of the form field=value"),
        ("gamma=-1", "gamma=-1.0 must be at least 0"),
        ("gate_value=0", "gate_value=0.0 must be greater than 0 and at most 1"),
        ("codeword_gradient=both", "codeword_gradient=both; allowed: code, task"),
        ("min_examples=0", "min_examples=0 must be at least 1"),
        ("gamma=nan", "gamma=nan is not a number"),
        ("lr=inf", "lr=inf must be greater than 0 and finite"),
        (
            "num_codewords=-1",
            "num_codewords=-1 must be at least 0 and at most 65536; 0 means a choice by the number of features",
        ),
        ("segments=-1", "segments=-1 must be at least 0; 0 means a choice by the encoder's output"),
        ("warmup_rounds=14", "warmup_rounds=14 must be less than rounds=14"),
        ("dropout=1", "dropout=1.0 must be at least 0 and less than 1"),
        ("rounds=", "rounds= is not a whole number"),
    ],
)
def test_a_wrong_assignment_is_answered_in_one_line(assignment, message):
    with pytest.raises(InputError) as raised:
        override_settings(BASE, [assignment])
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


@dataclass(frozen=True)
class Half:
    size: int = 1
    shade: str = "gray"


@dataclass(frozen=True)
class Both:
    left: Half = Half()
    right: Half = Half(2)


def test_an_ambiguous_name_needs_a_path():
    with pytest.raises(InputError, match=r"field 'size' is ambiguous; use one of: left\.size, right\.size$"):
        override_settings(Both(), ["size=3"])
    assert override_settings(Both(), ["right.size=3"]) == Both(right=Half(3))


def test_a_group_of_settings_is_on_or_none():
    """FedAvg has no codebook; a text in its place would only fail much later."""
    with pytest.raises(InputError, match="codebook"):
        override_settings(FedAvg(), ["codebook=yes"])
    assert override_settings(FedAvg(), ["codebook=on"]).codebook == ExtensibleCodebook()
    assert override_settings(FedAvg(), ["codebook=none"]).codebook is None


def test_every_setting_accepts_its_printed_value():
    """Each field can be set by its path to the value that `uefl list` prints."""
    for path, value in iterate_settings(BASE):
        assert override_settings(BASE, [f"{'.'.join(path)}={format_value(value)}"]) == BASE, path


def test_a_setting_can_be_looked_up():
    assert has_setting(BASE, "gamma")
    assert has_setting(BASE, "codebook.gamma")
    assert not has_setting(Experiment(method=FedAvg()), "gamma")


def test_dictionaries_are_json_and_differ_between_experiments():
    assert json.loads(json.dumps(to_dict(BASE)))["method"]["codebook"]["num_codewords"] == 256
    assert to_dict(override_settings(BASE, ["gamma=0.3"])) != to_dict(BASE)


def test_every_setting_that_changes_a_result_changes_the_run_id():
    ids = {BASE.run_id("x"), BASE.run_id("y"), Experiment(method=FedAvg()).run_id("x")}
    ids |= {
        override_settings(BASE, [a]).run_id("x")
        for a in ("gamma=0.3", "seed=1", "lr=0.5", "hidden_size=9", "precision=float64")
    }
    assert len(ids) == 8
    assert override_settings(BASE, [f"gamma={BASE.method.codebook.gamma}"]).run_id("x") == BASE.run_id("x")


def test_settings_that_change_no_result_do_not_change_the_run_id():
    for assignment in ("path=elsewhere", "strict=true"):
        assert override_settings(BASE, [assignment]).run_id("x") == BASE.run_id("x")
    assert "path" not in to_dict(BASE, for_run_id=True)["data"]


def test_settings_that_were_added_later_keep_the_run_id_of_earlier_runs():
    """A run that an earlier version has started or finished is found by the same command."""
    method = to_dict(BASE, for_run_id=True)["method"]
    assert not {"eval_clients", "evaluate_last"} & method.keys()
    assert "restart_rounds" not in method["local"]
    plain = replace(BASE, method=FedAvg())
    for assignment in ("eval_clients=3", "evaluate_last=5", "restart_rounds=2"):
        assert override_settings(plain, [assignment]).run_id("x") != plain.run_id("x")


def test_a_stored_experiment_is_restored_and_checked():
    config = json.loads(json.dumps(BASE.to_config()))
    assert Experiment.from_config(config) == BASE
    with pytest.raises(InputError, match="unknown field of Experiment 'sed'"):
        Experiment.from_config({**config, "sed": 1})
    with pytest.raises(InputError, match="seed='1' is not of type int"):
        Experiment.from_config({**config, "seed": "1"})


def test_a_subclass_inherits_help_texts():
    @dataclass(frozen=True, kw_only=True)
    class Base:
        size: int = setting(1, "Size in pixels.", at_least=1)

    @dataclass(frozen=True, kw_only=True)
    class Derived(Base):
        size: int = 2
        shade: str = "gray"

    assert get_help_text(Derived, "size") == "Size in pixels."
    assert get_help_text(Derived, "shade") == ""
    assert describe_type(Base, "size") == "whole number ≥ 1"


def test_infinity_is_part_of_the_run_id():
    assert override_settings(BASE, ["gamma=inf"]).method.codebook.gamma == math.inf
    assert override_settings(BASE, ["gamma=inf"]).run_id("x") != BASE.run_id("x")


def test_a_setting_per_column_takes_the_column_as_a_further_name() -> None:
    experiment = make_experiment("fedavg", "heart")
    changed = override_settings(
        experiment, ["missing.chol=0,-9", "missing.age=0", "levels.my col=a, b", "missing.trestbps="]
    )
    assert changed.data.table.missing == ("chol=0,-9", "age=0")
    assert changed.data.table.levels[-1] == "my col=a, b"
    assert override_settings(experiment, ["table.missing=age=1"]).data.table.missing == ("age=1",)
    with pytest.raises(InputError, match=r"unknown field 'levls\.chol'"):
        override_settings(experiment, ["levls.chol=1"])
