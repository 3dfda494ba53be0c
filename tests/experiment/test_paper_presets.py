"""The paper's presets: every value is in the table of docs/presets.md, with its place in the paper or as ours."""

import re
from pathlib import Path

import pytest

from uefl.algorithms import METHODS
from uefl.algorithms.uefl import UEFL
from uefl.core.errors import InputError
from uefl.data import SOURCES
from uefl.data.config import DataConfig
from uefl.experiment.experiment import Experiment
from uefl.experiment.paper_presets import COMMON, ROWS, RowKey
from uefl.experiment.parsing import parse_experiments
from uefl.experiment.settings import format_value, iterate_settings
from uefl.models import ENCODERS

PAGE = Path(__file__).parents[2] / "docs" / "presets.md"
T1 = [key for key in ROWS if key.partitioner == "domains"]


def make_preset(key: RowKey, method: str = "uefl", *assignments: str):
    num_silos = [f"num_silos={key.num_silos}"] if key.num_silos else []
    arguments = [method, key.dataset, f"partitioner={key.partitioner}", *num_silos, *assignments]
    return parse_experiments(arguments, [], "paper")[method]


def read_table() -> dict[str, dict[str, tuple[str, str]]]:
    """Return value and place by row and setting, as the page states them."""
    lines = re.findall(r"^\| `((?:model|method|data)\.[\w.]+)` \| (.+?) \| (.*?) ?\| (.+) \|$", PAGE.read_text(), re.M)
    keys = [str(key) for key in ROWS]
    stated: dict[str, dict[str, tuple[str, str]]] = {key: {} for key in keys}
    for setting, rows, value, place in lines:
        named = keys if rows == "all" else rows.split(", ")
        if rows == "others":
            named = [key for key in keys if setting not in stated[key]]
        for key in named:
            assert key in stated, f"{setting}: the page names an unknown row {key}"
            assert setting not in stated[key], f"{setting} of {key} has two lines"
            stated[key][setting] = (value.strip(), place)
    return stated


@pytest.mark.parametrize("key", ROWS, ids=str)
def test_every_setting_of_a_row_is_stated_with_its_value_and_place(key: RowKey) -> None:
    stated = read_table()[str(key)]
    assert set(stated) == {*COMMON, *ROWS[key]}
    values = {".".join(path): format_value(value) for path, value in iterate_settings(make_preset(key))}
    assert {setting: value for setting, (value, _) in stated.items()} == {
        setting: values[setting] for setting in stated
    }
    places = r"(ours|Set-up|section \d|Eq\. \d|Algorithm 1|T\d+|Fig\. \d|appendix)"
    assert all(re.match(places, place) for _, place in stated.values())


@pytest.mark.parametrize("key", ROWS, ids=str)
def test_a_setting_that_is_not_stated_has_its_usual_value(key: RowKey) -> None:
    stated, usual = read_table()[str(key)], dict(iterate_settings(Experiment(method=UEFL(), data=DataConfig())))
    identity = {"data.name", "data.partitioner", "data.group", "model.width", "model.depth"}  # named by row and encoder
    unstated = {
        ".".join(path): (format_value(value), format_value(usual.get(path, value)))
        for path, value in iterate_settings(make_preset(key))
        if ".".join(path) not in {*stated, *identity}
    }
    assert {name: values for name, values in unstated.items() if values[0] != values[1]} == {}


@pytest.mark.parametrize("key", ROWS, ids=str)
def test_every_method_has_every_row(key: RowKey) -> None:
    for method in METHODS:
        experiment = make_preset(key, method)
        assert experiment.model.encoder in ENCODERS
        assert experiment.method.total_rounds == make_preset(key).method.total_rounds


def list_commands() -> list[list[str]]:
    """List the commands of the page; settings that it names beside a table become a command on that table's data."""
    commands = []
    for cell in re.findall(r"^\| T\d.*? \| (.+) \|$", PAGE.read_text(), re.M):
        spans = re.findall(r"`([^`]+)`", cell)
        commands += [span.removesuffix(" --preset paper").split()[2:] for span in spans if span.endswith("paper")]
        names = [span for span in spans if span in SOURCES or span in METHODS] or ["mnist"]
        dataset = next((name for name in names if name in SOURCES), "mnist")
        for span in spans:
            if all("=" in word for word in span.split()):
                methods = [name for name in names if name in METHODS] or ["uefl"]
                commands += [[method, dataset, *span.split()] for method in methods]
    return commands


@pytest.mark.parametrize("arguments", list_commands(), ids=" ".join)
def test_every_command_of_the_page_has_valid_settings(arguments: list[str]) -> None:
    assert parse_experiments(arguments, [], "paper")


@pytest.mark.parametrize(("table", "dataset", "num_codewords"), [("T11", "cifar10", 256), ("T16", "cifar100", 512)])
def test_two_doublings_end_with_the_codewords_of_their_table(table: str, dataset: str, num_codewords: int) -> None:
    (settings,) = re.findall(
        rf"^\| {table}.*?`((?:\S+=\S+ )*extension_growth=double iterations=\d)`", PAGE.read_text(), re.M
    )
    method = parse_experiments(["uefl", dataset, *settings.split()], [], "paper")["uefl"].method
    assert method.codebook is not None
    assert method.codebook.num_codewords * 2 ** (method.iterations - 1) == num_codewords


def test_values_of_one_table_are_not_mixed_with_those_of_another() -> None:
    values = {key.dataset: make_preset(key).method.codebook for key in T1}
    assert {name: (c.num_codewords, c.gamma, c.segments) for name, c in values.items() if c} == {
        "mnist": (32, 0.3, 1),
        "fmnist": (64, 0.1, 1),
        "gtsrb": (64, 0.1, 1),
        "cifar10": (64, 0.2, 1),
        "cifar100": (64, 0.1, 1),
    }


def test_color_networks_and_those_of_a_left_out_domain_start_from_official_weights() -> None:
    for key in ROWS:
        model = make_preset(key).model
        needs_weights = model.encoder in ("vgg16-bn", "resnet18")
        assert model.pretrained_weights == ("imagenet" if needs_weights else "")
        assert not model.frozen_batch_norm or model.pretrained_weights


def test_fifty_silos_have_the_participation_of_their_own_table() -> None:
    leave_out = make_preset(RowKey("mnist", "leave-one-domain-out"))
    fifty = make_preset(RowKey("mnist", "leave-one-domain-out", "50"))
    assert (leave_out.method.clients_per_round, fifty.method.clients_per_round) == (0, 5)
    assert (leave_out.data.num_silos, fifty.data.num_silos) == ((), (50,))


def test_baselines_have_the_settings_of_their_authors_commands() -> None:
    hundred = RowKey("cifar100", "dirichlet-fedcr")
    assert [make_preset(hundred, m).method.local.lr for m in ("fedavg", "fedsr", "fedcr")] == [0.01, 0.005, 0.05]
    assert make_preset(hundred, "fedcr", "beta=0.5").method.code_size == 512
    assert make_preset(RowKey("pacs", "leave-one-domain-out"), "fediir").method.penalty_weight == 1e-3


def test_data_that_the_paper_does_not_use_are_an_input_error() -> None:
    with pytest.raises(InputError, match=r"no experiment on mnist5k/domains \(--preset paper\); it has: mnist/domains"):
        parse_experiments(["uefl", "mnist5k"], [], "paper")
    with pytest.raises(InputError, match="no experiment on gtsrb/quantity"):
        parse_experiments(["uefl", "gtsrb", "partitioner=quantity"], [], "paper")


def test_missing_weights_are_one_line_that_says_how_to_get_them(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("UEFL_DATA", str(tmp_path))
    monkeypatch.setattr("uefl.models.torchvision_weights.BASE_URL", f"file://{tmp_path}/none/")
    with pytest.raises(InputError) as error:
        make_preset(RowKey("cifar10", "domains")).build_network((3, 32, 32), 10)
    assert "\n" not in str(error.value)
    assert re.search(
        r"cannot download .*vgg16_bn-6c64b313\.pth .*; save that file as .*vgg16_bn-6c64b313\.pth", str(error.value)
    )


def test_frozen_statistics_without_weights_are_an_input_error() -> None:
    with pytest.raises(InputError, match="frozen_batch_norm=true keeps the statistics of pretrained weights"):
        make_preset(RowKey("pacs", "leave-one-domain-out"), "uefl", "pretrained_weights=")
