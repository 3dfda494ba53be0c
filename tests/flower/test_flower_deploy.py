"""The files that `uefl deploy init` writes, and one small deployment over TLS with real processes."""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from rich.console import Console
from typer.testing import CliRunner

from uefl.cli.main import app
from uefl.core.errors import InputError
from uefl.flower import certificates
from uefl.flower.coordinator import CoordinatorOptions, make_superlink_command
from uefl.flower.demo import start_processes, write_digits, write_run_settings
from uefl.flower.deployment import check_run_config, write_deployment
from uefl.flower.local_processes import find_free_port, open_local_federation
from uefl.flower.server import parse_run_config

SMALL_SETTINGS = (
    "rounds=1 extra_rounds=0 iterations=1 width=2 hidden_size=8 mc_samples=2 local.batch_size=20 local.epochs=1"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_deployment(tmp_path / "f", ["north", "south"], address="coordinator.example", federation_name="test")


def test_every_silo_gets_its_own_folder_and_no_other_key(folder):
    for silo in ("north", "south"):
        silo_folder = folder / "silos" / silo
        assert sorted(p.name for p in silo_folder.iterdir()) == [
            "ca.crt",
            "data",
            "key",
            "node.crt",
            "node.sh",
            "state",
            "uefl-node.service",
        ]
        other = "south" if silo == "north" else "north"
        assert other not in (silo_folder / "node.sh").read_text()
    assert not list((folder / "coordinator").rglob("key"))
    assert not (folder / "coordinator" / "ca.key").exists()


def test_private_keys_are_readable_by_their_owner_only_and_match_the_public_ones(folder):
    for path in (folder / "authority/ca.key", folder / "coordinator/server.key", folder / "silos/north/key"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    private = load_ssh_private_key((folder / "silos/north/key").read_bytes(), None)
    public = load_ssh_public_key((folder / "coordinator/keys/north.pub").read_bytes())
    assert private.public_key() == public


def test_the_certificate_is_valid_for_the_coordinator_and_signed_by_the_authority(folder):
    ca = x509.load_pem_x509_certificate((folder / "authority/ca.crt").read_bytes())
    server = x509.load_pem_x509_certificate((folder / "coordinator/server.crt").read_bytes())
    server.verify_directly_issued_by(ca)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "coordinator.example" in names.get_values_for_type(x509.DNSName)


def test_scripts_are_valid_shell_and_disable_telemetry(folder):
    for script in folder.rglob("*.sh"):
        if "app" not in script.parts:
            subprocess.run(["bash", "-n", script], check=True)
            assert os.access(script, os.X_OK)
            for line in ("FLWR_TELEMETRY_ENABLED=0", "FLWR_DISABLE_UPDATE_CHECK=1"):
                assert line in script.read_text()
    options = CoordinatorOptions(folder / "coordinator", "0.0.0.0", 8443, 8444)
    assert "--disable-runtime-dependency-installation" in make_superlink_command(options)


def test_systemd_units_start_the_scripts_in_their_folder(folder, tmp_path):
    for unit in folder.rglob("*.service"):
        home = f"/opt/uefl/{unit.parent.name}"
        text = unit.read_text()
        (start,) = re.findall("^ExecStart=(.*)$", text, re.MULTILINE)
        assert Path(start).parent == Path(home)
        assert os.access(unit.with_name(Path(start).name), os.X_OK)
        if shutil.which("systemd-analyze"):
            (tmp_path / unit.name).write_text(text.replace(home, str(unit.parent)))
            command = ["systemd-analyze", "verify", "--man=no", tmp_path / unit.name]
            completed = subprocess.run(command, capture_output=True)
            assert (completed.returncode, completed.stderr) == (0, b"")


def test_scripts_use_programs_and_files_that_exist(folder):
    programs = Path(sys.executable).parent
    for script in [*folder.glob("coordinator/*.sh"), *folder.glob("silos/*/*.sh")]:
        text = script.read_text()
        for name in re.findall(r"^ *(?:exec )?(flwr|flower-[a-z]+|uefl|python3) ", text, re.MULTILINE):
            assert (programs / name).exists()
        for file in re.findall(r"ca\.crt|server\.crt|server\.key|federation\.toml|(?<=private-key )key", text):
            assert script.with_name(file).exists()


def test_the_run_configuration_overrides_only_settings_of_the_app(folder):
    defaults = tomllib.loads((folder / "coordinator/app/pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    run_config = tomllib.loads((folder / "coordinator/federation.toml").read_text())
    assert run_config.keys() <= defaults.keys()
    assert all(type(defaults[name]) is type(value) for name, value in run_config.items())
    assert list(parse_run_config({**defaults, **run_config})) == ["uefl"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('method = "centralized"', "centralized cannot run on Flower"),
        ('settings = "gama=1"', "unknown field 'gama' (did you mean 'gamma'?)"),
        ('settings = "fedavg"', "choose one method, not uefl, fedavg"),
        ("rounds = 3", "unknown setting 'rounds'; known: method"),
        ("connect_timeout = 60", "connect_timeout=60 has the wrong type; expected a value such as 120.0"),
        ("connect_timeout =", "federation.toml: Invalid value"),
        ('image_shape = "28x28"', "image_shape=28x28 must be channels,height,width, such as 1,28,28"),
        ('classes = "cat,cat"', "classes=cat,cat must be different names, separated by commas"),
        ("grace = -1.0", "grace=-1.0"),
        ("retries = -1", "retries=-1"),
        ("quorum = 3", "quorum=3 must be at most num_silos=2"),
        ("num_silos = 0", "num_silos=0 must be at least 1"),
        ('data_changes = "never"', "unknown data_changes 'never'; known: accept, freeze"),
    ],
)
def test_an_error_in_the_run_configuration_is_found_before_anything_starts(line, reason, folder):
    path = edit_config(folder, line)
    with pytest.raises(InputError) as error:
        check_run_config(path)
    assert reason in str(error.value)


def test_the_check_names_an_expired_certificate(tmp_path, monkeypatch):
    monkeypatch.setattr(certificates, "VALID_DAYS", -1 / 48)  # half an hour ago
    coordinator = write_deployment(tmp_path / "f", ["north"], address="127.0.0.1") / "coordinator"
    for options in ((), ("--certificates-only",)):
        result = CliRunner().invoke(app, ["deploy", "check", str(coordinator / "federation.toml"), *options])
        assert isinstance(result.exception, InputError)
        assert re.match(r"ca\.crt expired on .*; the coordinator's operator runs", str(result.exception))


def test_the_run_script_reports_an_error_in_one_line_and_exits_with_code_2(folder):
    script = edit_config(folder, 'method = "centralized"').with_name("run.sh")
    search_path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": search_path}
    completed = subprocess.run([script], capture_output=True, text=True, env=env, timeout=300)
    assert completed.returncode == 2
    reason = "it needs all data in one place; use engine=serial"
    assert completed.stderr == f"uefl: centralized cannot run on Flower: {reason}\n"


def edit_config(folder: Path, line: str) -> Path:
    """Replace one line of the run configuration; return its path."""
    path = folder / "coordinator" / "federation.toml"
    other_lines = [old for old in path.read_text().splitlines() if old.split(" ")[0] != line.split(" ")[0]]
    path.write_text("\n".join([*other_lines, line]) + "\n")
    return path


@pytest.mark.parametrize(
    ("silos", "fields"),
    [
        (["a", "a"], {}),
        ([], {}),
        (["../a"], {}),
        (["a b"], {}),
        (["a"], {"port": 0}),
        (["a"], {"port": 65535}),
        (["a"], {"port": 8443, "superlink_port": 8443}),
        (["a"], {"address": "$(reboot)"}),
        (["coordinator"], {}),
        (["a"], {"federation_name": 'x"y'}),
    ],
)
def test_harmful_names_are_rejected(silos, fields, tmp_path):
    with pytest.raises(InputError):
        write_deployment(tmp_path / "f", silos, **{"address": "127.0.0.1", **fields})


def test_existing_files_are_never_overwritten(folder):
    with pytest.raises(InputError, match="not empty"):
        write_deployment(folder, ["north"], address="127.0.0.1")


def test_the_command_prints_the_next_steps(tmp_path):
    result = CliRunner().invoke(app, ["deploy", "init", str(tmp_path / "f"), "a", "b", "--address", "127.0.0.1"])
    assert result.exit_code == 0
    assert "serve.sh" in result.output
    assert "ca.key" in result.output


def test_two_silos_federate_over_tls(tmp_path):
    port = find_free_port()
    folder = write_deployment(tmp_path / "f", ["north", "south"], address="127.0.0.1", port=port)
    for i, silo in enumerate(("north", "south")):
        write_digits(folder / "silos" / silo / "data", f"rotate:{90 * i}", i, num_images=60)
    write_run_settings(folder, SMALL_SETTINGS, method="fedavg")
    with open_local_federation(folder, port) as processes:
        start_processes(processes, ["north", "south"], Console(quiet=True))
        output = "\n".join(processes.stream_run_output())
    (records,) = folder.glob("coordinator/runs/*/records.jsonl")
    (record,) = map(json.loads, records.read_text().splitlines())
    assert record["participants"] == ["north", "south"], output
    assert all("rejected" not in silo and silo["num_examples"] for silo in record["silos"].values())
    assert not processes.list_process_ids(), "a process is still running"
