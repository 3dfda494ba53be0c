"""Registries import an entry only when it is looked up."""

import subprocess
import sys

import pytest

from uefl.algorithms import METHODS
from uefl.core.errors import InputError
from uefl.core.registry import Entry, Registry


def test_names_and_descriptions_import_nothing():
    registry = Registry("thing", {"a": Entry("no.such.module:A", "one line")})
    assert list(registry) == ["a"]
    assert "a" in registry
    assert registry.describe("a") == "one line"
    with pytest.raises(ModuleNotFoundError):
        registry["a"]


def test_unknown_name_is_reported_with_the_known_ones():
    with pytest.raises(InputError, match="unknown method 'fedagv'; known: uefl, fedavg"):
        METHODS["fedagv"]


def test_every_method_is_found_by_its_class():
    for name in METHODS:
        assert METHODS.find_name(METHODS[name]) == name


def test_entries_of_other_packages_are_added_and_replace_nothing(monkeypatch):
    class EntryPoint:
        def __init__(self, name):
            self.name, self.value = name, "fractions:Fraction"

    monkeypatch.setattr("uefl.core.registry.entry_points", lambda **_: [EntryPoint("other"), EntryPoint("uefl")])
    registry = Registry("method", {"uefl": Entry("uefl.algorithms.uefl:UEFL", "")}, group="uefl.methods")
    assert set(registry) == {"uefl", "other"}
    assert registry["other"].__name__ == "Fraction"
    assert registry["uefl"].__name__ == "UEFL"


def test_listing_methods_does_not_import_torch():
    code = "import sys; from uefl.algorithms import METHODS; list(METHODS); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
