"""The command line: it teaches, it answers mistakes in one line, it compares."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from tiny import BARE, TINY

from uefl import UEFL, FedAvg, Local
from uefl.algorithms import ALGORITHMS
from uefl.commands.compare import PLAIN, strong
from uefl.commands.described import means, takes
from uefl.commands.listing import SETTINGS, listing
from uefl.commands.words import spoken
from uefl.errors import InputError
from uefl.recipes import recipe
from uefl.settings import leaves

MINE = """
from dataclasses import dataclass, replace
from uefl import FedAvg
from uefl.data.sources import SOURCES

@dataclass(frozen=True, kw_only=True)
class Mine(FedAvg):
    "A method of one's own."

shelf = replace(SOURCES["folder"], about="images on a shelf")
"""


def uefl(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "uefl.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **environment})


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["run", "ufl"], "'ufl' is neither a method (uefl, fedavg"),
        (["run", "uefl", "gama=1"], "unknown field 'gama' (did you mean 'gamma'?)"),
        (["run", "uefl", "gamma=x"], "gamma=x is not a number"),
        (["run", "uefl", "words=1.5"], "words=1.5 is not a whole number"),
        (["run", "uefl", "scope=all"], "scope=all; allowed: silo, group"),
        (["run", "fedavg", "gamma=1"], "unknown field 'gamma'"),
        (["run", "uefl", "fedavg"], "run takes one method"),
        (["run", "mnist", "fmnist"], "one data set at a time"),
        (["run", "segments=7"], "segments=7 does not divide"),
        (["run", "encoder=vgg17"], "unknown encoder 'vgg17'; known: residual"),
        (["run", "augment=crop"], "augment=crop: 'crop' is none of crop:<pixels>, flip"),
        (["run", "cut=round"], "unknown cut 'round'; known: domains"),
        (["run", "--preset", "best"], "unknown preset 'best'; known: default, paper"),
        (["run", "--device", "cuda:99"], "is not to be had here; allowed: cpu"),
        (["run", "precision=tf32"], "tf32 is for CUDA devices, on cpu there are float32 and float64"),
        (["run", "--threads", "0"], "threads=0 must be at least 1"),
        (["run", "--engine", "fast"], "unknown engine 'fast'; known: auto, serial, stacked, compiled, flower"),
        (["run", "pooled", "--engine", "flower"], "pooled cannot run on Flower: it needs all data in one place"),
        (["run", "--engine", "compiled"], "engine=compiled is for CUDA devices"),
        (["compare", "--seeds", "0,1", "seed=3"], "seed=3 and --seeds 0,1 do not go together"),
        (["list", "everything"], "unknown list 'everything'; known: methods"),
        (["show", "."], "is not a run folder"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(words: list[str], line: str, tmp_path: Path) -> None:
    answer = uefl(*words, *(["--out", str(tmp_path)] if words[0] == "run" else []))
    assert answer.returncode == 2
    assert answer.stderr.startswith("uefl: ")
    assert line in answer.stderr
    assert answer.stderr.count("\n") == 1
    assert not list(tmp_path.rglob("*")), "nothing may look like a run that was begun"


def test_a_place_that_cannot_be_written_to_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nowhere")):
        answer = uefl("run", "fedavg", *BARE, "--out", str(place))
        assert answer.returncode == 2
        assert answer.stderr.startswith(f"uefl: cannot write to {place}")
        assert answer.stderr.count("\n") == 1


def test_a_damaged_summary_is_named(tmp_path: Path) -> None:
    assert uefl("run", "fedavg", *BARE, "--out", str(tmp_path)).returncode == 0
    (summary,) = tmp_path.glob("*/summary.json")
    summary.write_text("{")
    answer = uefl("show", str(summary.parent))
    assert (answer.returncode, answer.stderr.count("\n")) == (2, 1)
    assert f"{summary} is damaged" in answer.stderr


def test_help_and_list_name_every_command_method_and_encoder() -> None:
    assert all(word in uefl("--help").stdout for word in ("run", "compare", "list", "show", "data"))
    everything = uefl("list").stdout
    assert all(
        word in everything for word in ("uefl", "fedavg", "vq-fedavg", "mnist5k", "folder", "held-out", "vgg16-bn")
    )
    assert "method.codebook.gamma" in uefl("list", "uefl").stdout


def test_what_an_installed_package_brings_is_known_by_its_name(tmp_path: Path) -> None:
    about = tmp_path / "mine-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[uefl.methods]\nmine = mine:Mine\n[uefl.readers]\nshelf = mine:shelf\n")
    (tmp_path / "mine.py").write_text(MINE)
    path, out = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]), str(tmp_path / "runs")
    everything = uefl("list", PYTHONPATH=path).stdout
    assert "A method of one's own." in everything
    assert "images on a shelf" in everything
    done = uefl("run", "mine", *BARE, "rounds=1", "iterations=1", "--out", out, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    said = uefl("run", "mine", "shelf", "--out", out, PYTHONPATH=path)
    assert said.returncode == 2
    assert "shelf needs a path" in said.stderr


def test_compare_says_who_was_uncertain_and_ends_with_one_table(tmp_path: Path) -> None:
    answer = uefl("compare", *TINY, "--out", str(tmp_path))
    assert answer.returncode == 0, answer.stderr
    assert "uefl: after round 3," in answer.stdout
    assert "words of their own" in answer.stdout
    assert all(word in answer.stdout for word in ("D1-1", "D3 (120°)", "mA, mE, mP", "the better by validation"))
    (picture,) = tmp_path.glob("compare-*/figure.png")
    shown = uefl("show", str(picture.parent))
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.strip() in answer.stdout
    again = uefl("compare", *TINY, "--out", str(tmp_path))
    assert again.stdout.count("finished before") == 3


def test_a_run_whose_replies_are_all_useless_says_so(tmp_path: Path) -> None:
    answer = uefl("run", "fedavg", *BARE, "local.rate=1e12", "--out", str(tmp_path))
    assert answer.returncode == 0, answer.stderr
    assert "no reply could be used" in answer.stdout
    assert "no reply could be used" not in uefl("run", "fedavg", *BARE, "--out", str(tmp_path)).stdout


def test_a_setting_reaches_every_method_that_has_it() -> None:
    experiments = spoken([*BARE, "gamma=0.5", "seed=4"], ["fedavg", "uefl"], "default")
    assert {e.seed for e in experiments.values()} == {4}
    assert experiments["uefl"].method.codebook is not None
    assert experiments["uefl"].method.codebook.gamma == 0.5
    assert experiments["uefl"].method.budget == experiments["fedavg"].method.budget


def test_fedavg_is_compared_with_and_without_layer_norm() -> None:
    experiments = strong(spoken([], ["fedavg", "uefl"], "default"))
    assert experiments["fedavg"].model.normalise == "layer"
    assert experiments[PLAIN].model.normalise == "none"
    assert PLAIN not in strong(spoken([], ["fedavg"], "default"))


def test_the_paper_preset_is_the_papers() -> None:
    (experiment,) = spoken(["mnist"], ["uefl"], "paper").values()
    book = experiment.method.codebook
    assert book is not None
    assert (book.words, book.gamma, book.segments, book.first, book.errors) == (32, 0.3, 1, "gaussian", 0)
    assert (book.commitment, experiment.model.normalise, experiment.model.width) == (1, "none", 128)
    assert (experiment.method.rounds, experiment.method.extra_rounds, experiment.method.iterations) == (40, 20, 5)


def test_a_book_goes_around_a_method_with_the_settings_that_it_has_in_uefl() -> None:
    words = ["fedprox", "uefl", "mnist5k", "codebook=on", "words=8"]
    prox, ours = spoken(words, [], "default").values()
    assert prox.method.codebook == ours.method.codebook
    assert prox.method.codebook is not None
    assert (prox.method.codebook.words, prox.method.codebook.commitment) == (8, 0.01)
    with pytest.raises(InputError, match="FedIIR takes no codebook: "):
        spoken(["fediir", "codebook=on"], [], "default")


def test_another_encoder_has_its_own_size() -> None:
    (found,) = spoken(["fediir", "mnist5k", "encoder=gn-conv"], [], "default").values()
    assert (found.model.encoder, found.model.width) == ("gn-conv", 0)
    (same,) = spoken(["fediir", "mnist5k", "encoder=residual"], [], "default").values()
    assert same.model.width == 16
    (wide,) = spoken(["fediir", "mnist5k", "encoder=lenet-fmnist", "width=9"], [], "default").values()
    assert wide.model.width == 9


@pytest.mark.parametrize("what", SETTINGS)
def test_what_the_list_of_methods_says_can_be_run(what: str) -> None:
    assert len(spoken(what.split(), [], "default")) == 1


@pytest.mark.parametrize("method", sorted(ALGORITHMS))
def test_every_setting_is_listed(method: str) -> None:
    console = Console(file=io.StringIO(), width=200)
    listing(method, console)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(".".join(path) in said for path, _ in leaves(recipe(method, "mnist5k")))


def test_a_setting_says_what_it_takes_and_means() -> None:
    assert means(UEFL, "passes") == means(FedAvg, "passes") == "Monte Carlo dropout passes T"
    assert takes(Local, "optimizer") == "adam | adamw | sgd"
    assert [takes(Local, name) for name in ("rate", "batch", "fresh")] == ["number", "whole number", "true | false"]
    assert takes(FedAvg, "codebook") == "on | none"
