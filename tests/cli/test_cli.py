"""The command line: it explains itself, answers mistakes in one line, and compares methods."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from harness import TINY_SETTINGS, TINY_SETTINGS_NO_CODEBOOK, call_cli, call_with_mistake
from rich.console import Console

from uefl import UEFL, FedAvg, LocalTraining
from uefl.algorithms import METHODS
from uefl.cli.list import METHOD_VARIANTS, describe_settings, print_topic
from uefl.cli.main import app
from uefl.core.errors import InputError
from uefl.experiment.comparison import FEDAVG_NO_LAYER_NORM, add_fedavg_no_layer_norm
from uefl.experiment.parsing import parse_experiments
from uefl.experiment.recipes import make_experiment
from uefl.experiment.settings import describe_type, get_help_text, iterate_settings

PLUGIN = """
from dataclasses import dataclass
from uefl import FedAvg
from uefl.data import SOURCES

@dataclass(frozen=True, kw_only=True)
class MyMethod(FedAvg):
    "A method of another package."

my_images = SOURCES["folder"]
"""


def uefl(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "uefl.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **environment})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "ufl"], "'ufl' is neither a method (uefl, fedavg"),
        (["run", str(Path(__file__).parent)], "for data of your own, write: folder path="),
        (["run", "uefl", "gama=1"], "unknown field 'gama' (did you mean 'gamma'?)"),
        (["run", "uefl", "gamma=x"], "gamma=x is not a number"),
        (["run", "uefl", "num_codewords=1.5"], "num_codewords=1.5 is not a whole number"),
        (["run", "uefl", "extension_scope=all"], "extension_scope=all; allowed: silo, group"),
        (["run", "fedavg", "gamma=1"], "unknown field 'gamma'"),
        (["run", "uefl", "fedavg"], "`uefl run` accepts one method, not uefl, fedavg; use `uefl compare` for several"),
        (["run", "mnist", "fmnist"], "choose one data set, not mnist, fmnist"),
        (["run", "segments=7"], "segments=7 does not divide"),
        (["run", "encoder=vgg17"], "unknown encoder 'vgg17'; known: residual"),
        (["run", "augment=crop"], "augment=crop: unknown part 'crop'; known: crop:<pixels>, flip"),
        (["run", "partitioner=round"], "unknown partitioner 'round'; known: domains"),
        (["run", "--preset", "best"], "unknown preset 'best'; known: default, paper"),
        (["run", "--device", "cuda:99"], "device=cuda:99 is not available; available devices: cpu"),
        (["run", "precision=tf32"], "precision=tf32 needs a CUDA device; allowed on cpu: float32, float64"),
        (["run", "--threads", "0"], "threads=0 must be at least 1"),
        (
            ["run", "--engine", "fast"],
            "unknown engine 'fast'; known: auto, serial, processes, stacked, compiled, flower",
        ),
        (["run", "centralized", "--engine", "flower"], "centralized cannot run on Flower: it needs all data in one"),
        (
            ["run", "--engine", "compiled"],
            "engine=compiled needs a CUDA device; on cpu use auto, serial, processes or stacked",
        ),
        (["compare", "--seeds", "0,1", "seed=3"], "use either seed=3 or --seeds 0,1, not both"),
        (["list", "everything"], "unknown topic 'everything'; known: methods"),
        (["data", "show", "mnits"], "unknown data set 'mnits'; known: mnist5k"),
        (["show", "."], "is not a run folder"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments: list[str], message: str, tmp_path: Path) -> None:
    line = call_with_mistake(*arguments, *(["--out", str(tmp_path)] if arguments[0] == "run" else []))
    assert message in line
    assert not list(tmp_path.rglob("*")), "nothing may look like a run that was started"


def test_a_process_ends_with_one_line_and_exit_code_2() -> None:
    answer = uefl("run", "uefl", "gama=1")
    assert answer.returncode == 2
    assert answer.stderr == f"uefl: {call_with_mistake('run', 'uefl', 'gama=1')}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "--help",
        "--version",
        "run --help",
        "list",
        "list data",
        "rnu",
        "run --enigne serial",
        "list everything",
        "run ufl",
        "run uefl mnits",
        "run partitioner=round",
        "run encoder=vgg17",
        "data show mnits",
        "data show mnist partitioner=round",
    ],
)
def test_help_lists_and_typing_errors_do_not_import_torch(arguments: str) -> None:
    code = (
        "import sys\n"
        "from uefl.cli.main import main\n"
        f"sys.argv = ['uefl', *{arguments.split()!r}]\n"
        "try:\n    main()\n"
        "finally:\n    print('torch' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert answer.stdout.splitlines()[-1] == "False", answer.stderr
    assert "Traceback" not in answer.stderr


def test_the_version_is_printed() -> None:
    import uefl as package

    assert call_cli("--version").stdout == f"uefl {package.__version__}\n"


def test_a_new_module_in_the_package_is_a_new_command(tmp_path: Path) -> None:
    (tmp_path / "greet.py").write_text(
        "def register(app):\n    app.command()(greet)\ndef greet():\n    'Greet.'\n    print('hello')\n"
    )
    code = (
        f"import sys; import uefl.cli; uefl.cli.__path__.append({str(tmp_path)!r})\n"
        "from uefl.cli.main import main; sys.argv = ['uefl', 'greet']; main()"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert answer.stdout == "hello\n", answer.stderr


def test_an_output_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nowhere")):
        answer = call_cli("run", "fedavg", *TINY_SETTINGS_NO_CODEBOOK, "--out", str(folder))
        assert answer.code == 2
        assert answer.stderr.startswith(f"uefl: cannot write to {folder}")
        assert answer.stderr.count("\n") == 1


def test_a_damaged_summary_is_named(tmp_path: Path) -> None:
    assert call_cli("run", "fedavg", *TINY_SETTINGS_NO_CODEBOOK, "--out", str(tmp_path)).code == 0
    (summary,) = tmp_path.glob("*/summary.json")
    summary.write_text("{")
    answer = call_cli("show", str(summary.parent))
    assert (answer.code, answer.stderr.count("\n")) == (2, 1)
    assert f"{summary} is damaged" in answer.stderr


def test_help_explains_every_argument() -> None:
    commands = typer.main.get_command(app)
    for name, command in commands.commands.items():
        for found in getattr(command, "commands", {name: command}).values():
            arguments = [p for p in found.params if p.param_type_name == "argument"]
            assert all(argument.help for argument in arguments), found.name


def test_help_and_list_name_every_command_method_and_encoder() -> None:
    commands = ("demo", "run", "compare", "list", "show", "data", "deploy")
    overview = call_cli("--help").stdout
    assert all(name in overview for name in commands)
    assert all("Example" in call_cli(name, "--help").stdout for name in ("demo", "run", "compare", "list", "show"))
    everything = call_cli("list").stdout
    names = ("uefl", "fedavg", "vq-fedavg", "mnist5k", "folder", "leave-one-domain-out", "vgg16-bn", "stacked")
    assert all(name in everything for name in names)
    settings = call_cli("list", "uefl").stdout
    assert all(name in settings for name in ("method.codebook", "gamma", "method.local", "precision"))


def test_lists_without_a_terminal_fit_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer than 120 columns, the meaning of a setting stands below it; COLUMNS sets another width."""
    monkeypatch.setenv("COLUMNS", "")
    for arguments in (["list"], ["list", "data"], ["list", "uefl", "folder"], ["list", "pmfl", "gtsrb"]):
        lines = call_cli(*arguments).stdout.splitlines()
        assert 0 < max(map(len, lines)) <= 80, arguments
    lines = [line.rstrip() for line in call_cli("list", "uefl", "folder").stdout.splitlines()]
    start = lines.index("  rounds=8  (whole number ≥ 1)")
    assert lines[start + 1] == "      Communication rounds of the first iteration."
    assert "  shifts=rotate:0,rotate:-50,rotate:120  (list of text)" in call_cli("list", "uefl", "mnist").stdout
    process = uefl("list", "uefl", "folder").stdout  # a pipe, as between two programs
    assert [line.rstrip() for line in process.splitlines()] == lines
    monkeypatch.setenv("COLUMNS", "130")
    wide = call_cli("list", "uefl", "folder").stdout
    assert any(line.split()[:3] == ["rounds", "8", "whole"] for line in wide.splitlines())


def test_methods_and_readers_of_an_installed_package_are_found_by_name(tmp_path: Path) -> None:
    metadata = tmp_path / "mine-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(
        "[uefl.methods]\nmy-method = mine:MyMethod\n[uefl.readers]\nmy-images = mine:my_images\n"
    )
    (tmp_path / "mine.py").write_text(PLUGIN)
    path, out = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]), str(tmp_path / "runs")
    everything = uefl("list", PYTHONPATH=path).stdout
    assert "mine:MyMethod, from an installed package" in everything
    assert "mine:my_images, from an installed package" in everything
    settings = ["train_per_silo=40", "test_per_silo=20", "width=4", "hidden_size=16", "rounds=1", "iterations=1"]
    done = uefl("run", "my-method", *settings, "--out", out, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    answer = uefl("run", "my-method", "my-images", "--out", out, PYTHONPATH=path)
    assert answer.returncode == 2
    assert "my-images needs a path" in answer.stderr


def test_compare_names_uncertain_silos_and_ends_with_one_table(tmp_path: Path) -> None:
    answer = call_cli("compare", *TINY_SETTINGS, "--out", str(tmp_path))
    assert answer.code == 0, answer.stderr
    assert "uefl: after round 3," in answer.stdout
    assert "codewords" in answer.stdout
    assert all(text in answer.stdout for text in ("D1-1", "D3 (120°)", "mA, mE, mP", "two FedAvg variants"))
    (figure,) = tmp_path.glob("compare-*/figure.png")
    shown = call_cli("show", str(figure.parent))
    assert shown.code == 0, shown.stderr
    assert shown.stdout.strip() in answer.stdout
    again = call_cli("compare", *TINY_SETTINGS, "--out", str(tmp_path), "--workers", "1")
    assert again.stdout.count("already finished") == 4


def test_a_run_whose_replies_are_all_unusable_reports_it(tmp_path: Path) -> None:
    message = "no reply could be used"
    answer = call_cli("run", "fedavg", *TINY_SETTINGS_NO_CODEBOOK, "local.lr=1e12", "--out", str(tmp_path))
    assert answer.code == 0, answer.stderr
    assert message in answer.stdout
    assert message not in call_cli("run", "fedavg", *TINY_SETTINGS_NO_CODEBOOK, "--out", str(tmp_path)).stdout


def test_a_setting_applies_to_every_method_that_has_it() -> None:
    experiments = parse_experiments([*TINY_SETTINGS_NO_CODEBOOK, "gamma=0.5", "seed=4"], ["fedavg", "uefl"], "default")
    assert {e.seed for e in experiments.values()} == {4}
    assert experiments["uefl"].method.codebook is not None
    assert experiments["uefl"].method.codebook.gamma == 0.5
    assert experiments["uefl"].method.total_rounds == experiments["fedavg"].method.total_rounds


def test_fedavg_is_compared_with_and_without_layer_norm() -> None:
    experiments = add_fedavg_no_layer_norm(parse_experiments([], ["fedavg", "uefl"], "default"))
    assert experiments["fedavg"].model.feature_norm == "layer"
    assert experiments[FEDAVG_NO_LAYER_NORM].model.feature_norm == "none"
    assert FEDAVG_NO_LAYER_NORM not in add_fedavg_no_layer_norm(parse_experiments([], ["fedavg"], "default"))


def test_the_paper_preset_has_the_papers_values() -> None:
    (experiment,) = parse_experiments(["mnist"], ["uefl"], "paper").values()
    codebook, model, method = experiment.method.codebook, experiment.model, experiment.method
    assert codebook is not None
    assert (codebook.num_codewords, codebook.gamma, codebook.segments) == (32, 0.3, 1)
    assert (codebook.codebook_init, codebook.min_standard_errors) == ("gaussian", 0)
    assert (codebook.commitment_weight, model.feature_norm, model.width) == (1, "none", 128)
    assert (method.rounds, method.extra_rounds, method.iterations) == (40, 20, 5)


def test_another_method_takes_the_codebook_with_the_settings_of_uefl() -> None:
    arguments = ["fedprox", "uefl", "mnist5k", "codebook=on", "num_codewords=8"]
    fedprox, uefl = parse_experiments(arguments, [], "default").values()
    assert fedprox.method.codebook == uefl.method.codebook
    assert fedprox.method.codebook is not None
    assert (fedprox.method.codebook.num_codewords, fedprox.method.codebook.commitment_weight) == (8, 0.05)
    with pytest.raises(InputError, match="FedIIR takes no codebook: "):
        parse_experiments(["fediir", "codebook=on"], [], "default")


def test_another_encoder_has_its_own_default_width() -> None:
    (other,) = parse_experiments(["fediir", "mnist5k", "encoder=group-norm-conv"], [], "default").values()
    assert (other.model.encoder, other.model.width) == ("group-norm-conv", 0)
    (same,) = parse_experiments(["fediir", "mnist5k", "encoder=residual"], [], "default").values()
    assert same.model.width == 16
    (wide,) = parse_experiments(["fediir", "mnist5k", "encoder=lenet-fmnist", "width=9"], [], "default").values()
    assert wide.model.width == 9


@pytest.mark.parametrize("variant", METHOD_VARIANTS)
def test_every_listed_variant_of_a_method_can_be_run(variant: str) -> None:
    assert len(parse_experiments(variant.split(), [], "default")) == 1


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_setting_is_listed_with_its_meaning(method: str) -> None:
    console = Console(file=io.StringIO(), width=200)
    print_topic(method, console)
    output = console.file.getvalue()  # type: ignore[attr-defined]
    experiment = make_experiment(method, "mnist5k")
    groups = describe_settings(experiment)
    listed = {tuple(f"{group}.{row[0]}".strip(".").split(".")) for group, rows in groups.items() for row in rows}
    assert listed == {path for path, _ in iterate_settings(experiment)}
    for group, rows in groups.items():
        for name, _, type_text, help_text in rows:
            assert f"  {name} " in output
            assert type_text.split()[0] in output
            assert help_text, f"{group}.{name} has no help text"
            assert help_text[:60] in output


@pytest.mark.parametrize(
    ("data", "encoder", "shown"), [("cifar10", "vgg16", "0.0001"), ("folder", "residual", "natural")]
)
def test_settings_are_listed_as_they_are_for_a_method_and_a_data_set(data: str, encoder: str, shown: str) -> None:
    console = Console(file=io.StringIO(), width=200)
    print_topic("uefl", console, data)
    output = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"Settings of uefl on {data}." in output
    rows = {line.split()[0]: line.split()[1] for line in output.splitlines() if len(line.split()) > 1}
    assert (rows["encoder"], rows["name"]) == (encoder, data)
    assert shown in rows.values()


def test_a_topic_that_is_no_method_takes_no_data_set() -> None:
    with pytest.raises(InputError, match="unknown method 'methods'; known: uefl"):
        print_topic("methods", Console(file=io.StringIO()), "mnist")
    with pytest.raises(InputError, match="unknown data set 'mnits'; known: mnist5k"):
        print_topic("uefl", Console(file=io.StringIO()), "mnits")


def test_a_setting_has_a_type_and_a_help_text() -> None:
    assert "Monte Carlo" in get_help_text(FedAvg, "mc_samples")
    assert get_help_text(UEFL, "mc_samples") == get_help_text(FedAvg, "mc_samples")
    assert describe_type(LocalTraining, "optimizer") == "adam | adamw | sgd"
    assert describe_type(LocalTraining, "lr") == "number > 0"
    assert describe_type(LocalTraining, "batch_size") == "whole number ≥ 1"
    assert describe_type(LocalTraining, "reset_optimizer") == "true | false"
    assert describe_type(FedAvg, "codebook") == "on | none"
