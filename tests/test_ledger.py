"""The ledger of deviations covers every method of the registry, with an effect for each deviation."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from uefl.algorithms import METHODS
from uefl.algorithms.extensible_codebook import ExtensibleCodebook
from uefl.core.local import LocalTraining
from uefl.data.config import DataConfig
from uefl.models.model_config import ModelConfig

LEDGER = (Path(__file__).parents[1] / "docs" / "deviations.md").read_text()
SECTIONS = {
    name: body
    for heading, body in re.findall(r"^### (.+?)\n(.*?)(?=^##|\Z)", LEDGER, re.M | re.S)
    for name in re.findall(r"`([\w-]+)`", heading)
}


ROWS = dict(re.findall(r"^\| (D\d+) \|(.*)$", LEDGER, re.M))
CITATIONS = [
    (field.name, number)
    for owner in (*(METHODS[name] for name in METHODS), ExtensibleCodebook, LocalTraining, DataConfig, ModelConfig)
    for field in fields(owner)
    for number in re.findall(r"\bD\d+\b", field.metadata.get("help", ""))
]


def test_the_row_that_a_help_text_cites_is_about_its_setting() -> None:
    wrong = [(name, number) for name, number in CITATIONS if name not in ROWS.get(number, "")]
    assert CITATIONS
    assert not wrong


def test_every_method_of_the_registry_has_a_section_and_no_other() -> None:
    assert set(SECTIONS) == set(METHODS)


@pytest.mark.parametrize("name", sorted(SECTIONS))
def test_every_deviation_has_an_effect(name: str) -> None:
    rows = [re.split(r"(?<!\\)\|", line.strip("| ")) for line in SECTIONS[name].splitlines() if line.startswith("| ")]
    assert rows or len(SECTIONS[name].split()) > 5, "a section says something"
    assert all(len(row) == 4 and all(cell.strip() for cell in row) for row in rows)


def test_the_ledger_names_what_read_differently_from_the_originals() -> None:
    """Differences that a reading of the papers found."""
    found = {
        "fedcr": ("class statistics", "last round"),
        "fediir": ("mode of the gradient pass",),
        "fedbr": ("proxy images",),
        "distrans": ("optimizer of the offset",),
    }
    for method, questions in found.items():
        assert all(question in SECTIONS[method] for question in questions)
    assert all(text in LEDGER for text in ("| weights of silos |", "| optimizer state |"))
