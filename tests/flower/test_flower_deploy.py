"""What `uefl deploy init` writes, and one small deployment over TLS with real processes."""

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

from uefl.cli import app
from uefl.errors import InputError
from uefl.flower.demo import configured, digits, started
from uefl.flower.deploy import check, init
from uefl.flower.loopback import free_port, loopback
from uefl.flower.server import asked

SMALL = "rounds=1 extra_rounds=0 iterations=1 width=2 hidden=8 passes=2 local.batch=20 local.epochs=1"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return init(tmp_path / "f", ["north", "south"], address="coordinator.example", name="test")


def test_every_silo_gets_its_own_folder_and_no_other_key(folder):
    for silo in ("north", "south"):
        place = folder / "silos" / silo
        assert sorted(p.name for p in place.iterdir()) == [
            "ca.crt",
            "data",
            "key",
            "state",
            "supernode.sh",
            "uefl-supernode.service",
        ]
        other = "south" if silo == "north" else "north"
        assert other not in (place / "supernode.sh").read_text()
    assert not list((folder / "coordinator").rglob("key"))
    assert not (folder / "coordinator" / "ca.key").exists()


def test_private_keys_are_for_their_owner_only_and_fit_the_public_ones(folder):
    for path in (folder / "authority/ca.key", folder / "coordinator/server.key", folder / "silos/north/key"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    private = load_ssh_private_key((folder / "silos/north/key").read_bytes(), None)
    public = load_ssh_public_key((folder / "coordinator/keys/north.pub").read_bytes())
    assert private.public_key() == public


def test_the_certificate_is_for_the_coordinator_and_signed_by_the_authority(folder):
    ca = x509.load_pem_x509_certificate((folder / "authority/ca.crt").read_bytes())
    server = x509.load_pem_x509_certificate((folder / "coordinator/server.crt").read_bytes())
    server.verify_directly_issued_by(ca)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "coordinator.example" in names.get_values_for_type(x509.DNSName)


def test_scripts_are_shell_and_keep_quiet(folder):
    for script in folder.rglob("*.sh"):
        if "app" not in script.parts:
            subprocess.run(["bash", "-n", script], check=True)
            assert os.access(script, os.X_OK)
            for line in ("FLWR_TELEMETRY_ENABLED=0", "FLWR_DISABLE_UPDATE_CHECK=1"):
                assert line in script.read_text()
    assert "--disable-runtime-dependency-installation" in (folder / "coordinator/superlink.sh").read_text()


def test_units_start_the_scripts_that_lie_beside_them(folder, tmp_path):
    for unit in folder.rglob("*.service"):
        home = f"/opt/uefl/{unit.parent.name}"
        text = unit.read_text()
        (start,) = re.findall("^ExecStart=(.*)$", text, re.MULTILINE)
        assert Path(start).parent == Path(home)
        assert os.access(unit.with_name(Path(start).name), os.X_OK)
        if shutil.which("systemd-analyze"):
            (tmp_path / unit.name).write_text(text.replace(home, str(unit.parent)))
            said = subprocess.run(["systemd-analyze", "verify", "--man=no", tmp_path / unit.name], capture_output=True)
            assert (said.returncode, said.stderr) == (0, b"")


def test_scripts_name_programs_and_files_that_there_are(folder):
    programs = Path(sys.executable).parent
    for script in [*folder.glob("coordinator/*.sh"), *folder.glob("silos/*/*.sh")]:
        text = script.read_text()
        for name in re.findall(r"^ *(?:exec )?(flwr|flower-[a-z]+|uefl|python3) ", text, re.MULTILINE):
            assert (programs / name).exists()
        for file in re.findall(r"ca\.crt|server\.crt|server\.key|federation\.toml|(?<=private-key )key", text):
            assert script.with_name(file).exists()


def test_the_run_configuration_overrides_only_what_the_app_has(folder):
    known = tomllib.loads((folder / "coordinator/app/pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    told = tomllib.loads((folder / "coordinator/federation.toml").read_text())
    assert told.keys() <= known.keys()
    assert all(type(known[name]) is type(value) for name, value in told.items())
    assert list(asked({**known, **told})) == ["uefl"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('method = "pooled"', "pooled cannot run on Flower"),
        ('settings = "gama=1"', "unknown field 'gama' (did you mean 'gamma'?)"),
        ('settings = "fedavg"', "one method at a time, not uefl, fedavg"),
        ("rounds = 3", "unknown setting 'rounds'; known: method"),
        ("wait = 60", "wait=60 is not of the form 120.0"),
        ("wait =", "federation.toml: Invalid value"),
    ],
)
def test_a_mistake_in_the_configuration_is_found_before_anything_starts(line, why, folder):
    place = folder / "coordinator" / "federation.toml"
    place.write_text(changed(place, line))
    with pytest.raises(InputError) as said:
        check(place)
    assert why in str(said.value)


def test_run_says_a_mistake_in_one_line_and_exits_with_code_2(folder):
    place = folder / "coordinator" / "federation.toml"
    place.write_text(changed(place, 'method = "pooled"'))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    run, env = place.with_name("run.sh"), {**os.environ, "PATH": path}
    done = subprocess.run([run], capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "uefl: pooled cannot run on Flower: it needs all data in one place; engine=serial runs it\n"


def changed(place: Path, line: str) -> str:
    kept = [old for old in place.read_text().splitlines() if old.split(" ")[0] != line.split(" ")[0]]
    return "\n".join([*kept, line]) + "\n"


@pytest.mark.parametrize(
    ("silos", "fields"),
    [
        (["a", "a"], {}),
        ([], {}),
        (["../a"], {}),
        (["a b"], {}),
        (["a"], {"port": 0}),
        (["a"], {"address": "$(reboot)"}),
        (["a"], {"name": 'x"y'}),
    ],
)
def test_names_that_could_do_harm_are_refused(silos, fields, tmp_path):
    with pytest.raises(InputError):
        init(tmp_path / "f", silos, **{"address": "127.0.0.1", **fields})


def test_nothing_is_overwritten(folder):
    with pytest.raises(InputError, match="not empty"):
        init(folder, ["north"], address="127.0.0.1")


def test_the_command_says_what_to_do_next(tmp_path):
    said = CliRunner().invoke(app, ["deploy", "init", str(tmp_path / "f"), "a", "b", "--address", "127.0.0.1"])
    assert said.exit_code == 0
    assert "superlink.sh" in said.output
    assert "ca.key" in said.output


def test_two_silos_federate_over_tls(tmp_path):
    port = free_port()
    folder = init(tmp_path / "f", ["north", "south"], address="127.0.0.1", port=port)
    for i, silo in enumerate(("north", "south")):
        digits(folder / "silos" / silo / "data", f"rotate:{90 * i}", i, count=60)
    configured(folder, SMALL, method="fedavg")
    with loopback(folder, port) as processes:
        started(processes, ["north", "south"], Console(quiet=True))
        said = "\n".join(processes.lines())
    (records,) = folder.glob("coordinator/runs/*/records.jsonl")
    (record,) = map(json.loads, records.read_text().splitlines())
    assert record["who"] == ["north", "south"], said
    assert all("refused" not in mine and mine["count"] for mine in record["silos"].values())
    assert not processes.alive(), "something is left running"
