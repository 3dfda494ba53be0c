"""A newly registered silo joins a finished run over Flower: its parts stay at its site, and nothing else changes."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from in_process_grid import InProcessGrid
from rich.console import Console
from test_flower_server import make_run_config, run_server_app
from typer.testing import CliRunner

from uefl.cli.main import app
from uefl.core.errors import InputError
from uefl.experiment.join_folder import load_newcomer, open_parent
from uefl.experiment.joining import JoinSettings, join_silo
from uefl.experiment.loading import load, open_models
from uefl.experiment.run_folder import RunFolder
from uefl.flower.client import make_client_app
from uefl.flower.demo import start_processes, write_digits, write_run_settings
from uefl.flower.deployment import check_run_config, write_deployment
from uefl.flower.join_client import JOIN_TASK
from uefl.flower.join_server import parse_join_reply
from uefl.flower.local_processes import find_free_port, open_local_federation
from uefl.flower.run_result import read_result
from uefl.flower.wire import count_bytes, pack_content, read_payload

SETTINGS = (
    "image_size=14 width=2 hidden_size=8 mc_samples=2 local.batch_size=12 local.epochs=1 rounds=3 iterations=1 "
    "warmup_rounds=1 num_codewords=8 min_examples=2 calibration_fraction=0.2"
)
SHIFTS = {"north": "rotate:0", "south": "rotate:-50", "east": "rotate:90"}


def make_grid(
    folder: Path, silos: list[str], sizes: Mapping[str, int] | None = None, num_images: int = 60
) -> InProcessGrid:
    """Nodes with folders of their own, as in a deployment."""
    nodes = {}
    for i, silo in enumerate(silos):
        write_digits(folder / silo / "data", SHIFTS[silo], i, num_images=(sizes or {}).get(silo, num_images))
        paths = {"data_path": str(folder / silo / "data"), "state_path": str(folder / silo / "state")}
        nodes[10 + i] = {"silo": silo, **paths}
    return InProcessGrid(make_client_app(), nodes)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of two silos, and a grid to which a third has been added."""
    folder = tmp_path_factory.mktemp("join")
    grid = make_grid(folder, ["north", "south", "east"])
    east = grid.nodes.pop(12)
    root = folder / "runs"
    fields = {"out": str(root), "data": "folder", "settings": SETTINGS, "num_silos": 2, "connect_timeout": 2.0}
    run_server_app(grid, make_run_config(**fields))
    run = Path(read_result(root).folder)
    grid.nodes[12] = east
    return (
        folder,
        run,
        grid,
        make_run_config(**fields, join=run.name, join_silo="east", join_settings="epochs=2 head=new"),
    )


def hash_tree(folder: Path) -> dict[str, str]:
    files = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.name not in (".lock", "audit.jsonl")]
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def test_a_new_silo_joins_and_nothing_of_the_others_changes(finished):
    folder, run, grid, run_config = finished
    before = [hash_tree(path) for path in (run, folder / "north/state", folder / "south/state")]
    grid.sent_messages.clear()
    replies = []
    grid.tamper = lambda message, reply: (replies.append((message, reply)), reply)[1]
    run_server_app(grid, run_config)
    grid.tamper = lambda _message, reply: reply
    assert [hash_tree(path) for path in (run, folder / "north/state", folder / "south/state")] == before

    child = RunFolder(Path(read_result(run.parent).folder))
    header = child.read_header()
    assert (header["parent"], header["joined"][-1]["silo"]) == (run.name, "east")
    assert "east" in child.read_summary()["last"]["silos"]
    assert hash_tree(child.path)["model.safetensors"] == before[0]["model.safetensors"], "its parts stay at the silo"

    ((message, reply),) = [pair for pair in replies if read_payload(pair[0]).get("task") == JOIN_TASK]
    assert message.metadata.dst_node_id == 12
    assert not reply.content.array_records, "no tensor leaves the silo"
    assert count_bytes(reply.content) < 30_000
    sent = read_payload(reply)
    assert "label" not in json.dumps(sent)
    assert set(sent) <= {
        *("silo", "domain", "num_examples", "seconds", "num_codewords", "lr", "head", "gate"),
        *("own_tensors", "evaluations", "versions"),
    }


def test_the_automatic_number_of_codewords_counts_the_other_silos_as_in_one_process(tmp_path):
    """The two silos of the run have ten times the images of the third, whose size alone gives another number."""
    folder, root = tmp_path, tmp_path / "runs"
    grid = make_grid(folder, ["north", "south", "east"], {"east": 60}, num_images=600)
    east = grid.nodes.pop(12)
    settings = SETTINGS.replace("num_codewords=8", "num_codewords=0")
    fields = {"out": str(root), "data": "folder", "settings": settings, "num_silos": 2, "connect_timeout": 2.0}
    run_server_app(grid, make_run_config(**fields))
    run = Path(read_result(root).folder)
    grid.nodes[12] = east
    run_server_app(grid, make_run_config(**fields, join=run.name, join_silo="east", join_settings="epochs=1"))
    child = RunFolder(Path(read_result(root).folder))
    models, parent = open_models(run), open_parent(run)
    silo = load_newcomer(parent, folder / "east/data", "east")
    expected = join_silo(models, silo, JoinSettings(epochs=0)).num_codewords
    alone = join_silo(models, silo, JoinSettings(epochs=0), other_sizes=[]).num_codewords
    shared = int(models.access.all(0).sum())
    assert child.read_summary()["last"]["silos"]["east"]["num_codewords"] == shared + expected
    assert expected != alone


def test_the_silo_s_own_copy_predicts_and_has_only_shared_codewords_and_its_own(finished):
    folder, run, grid, run_config = finished
    run_server_app(grid, run_config)
    (copy,) = (folder / "east/state").rglob("model.safetensors")
    models, shared = open_models(copy), open_models(run)
    assert models.description.owner == "east"
    assert list(models.held_out) == ["east"], "the silo can be calibrated at its site"
    assert sum(models.description.silos["east"].label_counts) == models.description.silos["east"].num_examples
    (name,) = [n for n in shared.model_state if n.endswith("codewords")]
    num_shared = int(shared.access.all(0).sum())
    assert num_shared
    assert (models.model_state[name][:num_shared] == shared.model_state[name][shared.access.all(0)]).all()
    assert len(models.model_state[name]) > num_shared
    others = {n: t for n, t in models.model_state.items() if n != name}
    assert all((t == shared.model_state[n]).all() for n, t in others.items())
    assert set(models.held_out) == {"east"}, "its calibration part is measured and stays at the silo"
    assert not list(run.parent.rglob(RunFolder.HELD_OUT_FILE))
    (image, *_) = sorted((folder / "east/data").rglob("*.png"))
    assert load(copy).input_format.decode_file(image.read_bytes()).shape == (1, 14, 14)


def test_own_models_of_the_run_change_nothing_for_a_newcomer(tmp_path):
    """The coordinator has the shared model alone, which predicts without a silo."""
    entries = []
    for epochs in (0, 2):
        folder, root = tmp_path / str(epochs), tmp_path / str(epochs) / "runs"
        grid = make_grid(folder, ["north", "south", "east"])
        east = grid.nodes.pop(12)
        fields = {"out": str(root), "data": "folder", "num_silos": 2, "connect_timeout": 2.0}
        fields["settings"] = f"{SETTINGS} fine_tuning_epochs={epochs}"
        run_server_app(grid, make_run_config(**fields))
        run = Path(read_result(root).folder)
        grid.nodes[12] = east
        run_server_app(grid, make_run_config(**fields, join=run.name, join_silo="east", join_settings="epochs=2"))
        entries.append(RunFolder(Path(read_result(root).folder)).read_header()["joined"][-1])
        models = open_models(run)
        assert models.build().silo_name == ""
        if epochs:
            with pytest.raises(InputError, match=r"of silo north stayed at the silo; use the copy that the silo wrote"):
                models.build("north")
        copies = {path.parent.name: load(path) for path in folder.rglob("state/**/model.safetensors")}
        assert sorted(copies) == ["silo-east", "silo-north", "silo-south"]
    assert entries[0] == entries[1]
    assert "the silos of the run have" in entries[0]["uncertainty"]


def test_mistakes_end_with_one_line_and_exit_code_2(finished):
    _, run, grid, run_config = finished
    for changes, reason in (
        ({"join_silo": "north"}, "silo north is in"),
        ({"join_silo": ""}, "join needs join_silo"),
        ({"join_settings": "others=train"}, "the other silos are fixed"),
        ({"join_settings": "epoch=1"}, "unknown field 'epoch'"),
        ({"join": "nowhere"}, "is not a run folder"),
    ):
        with pytest.raises(InputError, match=reason):
            run_server_app(grid, {**run_config, **changes})
        assert read_result(run.parent).exit_code == 2


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("num_codewords", 10**9, "invalid number of codewords"),
        ("evaluations", {"shared": {"accuracy": 2.0, "nll": 1, "entropy": 1, "num_examples": 1}}, "cannot be"),
        ("evaluations", {"shared": {"accuracy": 0.5}}, "lacks nll"),
        ("evaluations", {}, "sent no evaluation"),
        ("domain", "\x1b[31m", "unusual characters"),
        ("silo", "west", "identifies itself"),
        ("head", "best", "unknown kind of classifier"),
        ("gate", "\x1b[31m", "unknown kind of classifier or gate"),
    ],
)
def test_a_reply_with_impossible_values_is_rejected(field, value, reason):
    metrics = {"accuracy": 0.5, "nll": 1.0, "entropy": 1.0, "num_examples": 9.0}
    payload = {
        "silo": "east",
        "domain": "east",
        "num_codewords": 3,
        "lr": 0.1,
        "head": "own",
        "gate": "run",
        "own_tensors": [],
        "evaluations": dict.fromkeys(("shared", "untrained", "trained"), metrics),
    }
    assert parse_join_reply(FakeReply(payload), "east")["num_codewords"] == 3
    with pytest.raises(InputError, match=reason):
        parse_join_reply(FakeReply({**payload, field: value}), "east")


class FakeReply:
    """A message with this payload, as a silo packs it."""

    def __init__(self, payload):
        self.content = pack_content(payload)

    def has_error(self):
        return False


@pytest.mark.real
def test_a_newly_registered_silo_joins_a_finished_run_over_tls(tmp_path):
    port, silos = find_free_port(), ["north", "south"]
    folder = write_deployment(tmp_path / "f", silos, address="127.0.0.1", port=port)
    for i, silo in enumerate(silos):
        write_digits(folder / "silos" / silo / "data", SHIFTS[silo], i, num_images=60)
    write_run_settings(folder, SETTINGS)
    with open_local_federation(folder, port) as processes:
        start_processes(processes, silos, Console(quiet=True))
        first = "\n".join(processes.stream_run_output())
        run = folder / "coordinator" / read_result(folder / "coordinator/runs").folder
        before = hash_tree(run)
        assert "model.safetensors" in before, first
        assert CliRunner().invoke(app, ["deploy", "add-silo", str(folder), "east"]).exit_code == 0
        write_digits(folder / "silos/east/data", SHIFTS["east"], 2, num_images=60)
        processes.register_keys()
        processes.start_node("east")
        write_run_settings(folder, SETTINGS, join=run.name, join_silo="east", join_settings="epochs=2 head=new")
        check_run_config(folder / "coordinator/federation.toml")
        output = "\n".join(processes.stream_run_output())
    result = read_result(folder / "coordinator/runs")
    assert result.status == "finished", first + output
    assert "own parts, trained" in output
    child = folder / "coordinator" / result.folder
    assert child != run
    assert hash_tree(run) == before
    assert RunFolder(child).read_header()["parent"] == run.name
    (copy,) = (folder / "silos/east/state").rglob("model.safetensors")
    assert open_models(copy).description.owner == "east"
    assert not processes.list_process_ids(), "a process is still running"
