"""Change a deployment that exists: renewed certificates, added and removed silos, status and result."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
from cryptography import x509
from test_flower_node import explain_connection, open_guard
from typer.testing import CliRunner

from uefl.cli.main import app
from uefl.core.errors import InputError
from uefl.flower import certificates
from uefl.flower.certificates import describe_expiry
from uefl.flower.contacts import Contact, ContactFile, read_contacts
from uefl.flower.deployment import write_deployment
from uefl.flower.federation_status import describe_status
from uefl.flower.local_processes import find_free_port
from uefl.flower.membership import add_silo, remove_silo, renew_certificates
from uefl.flower.run_result import RunResult, write_result

ADMITTED = "its SuperLink does not run"  # what the guard answers to a silo that it admits


def invoke(*arguments: object):
    return CliRunner().invoke(app, ["deploy", *map(str, arguments)])


def test_expired_certificates_are_renewed_without_new_keys(tmp_path, monkeypatch):
    port = find_free_port()
    with monkeypatch.context() as context:
        context.setattr(certificates, "VALID_DAYS", -1 / 48)
        folder = write_deployment(tmp_path / "f", ["north"], address="127.0.0.1", port=port)
    keys = {path: path.read_bytes() for path in folder.rglob("*key*") if path.is_file()}
    with open_guard(folder / "coordinator", port):
        assert "certificate has expired" in explain_connection(folder / "silos/north", f"127.0.0.1:{port}")
    assert renew_certificates(folder) == [folder / "silos/north/node.crt", folder / "silos/north/ca.crt"]
    with open_guard(folder / "coordinator", port):
        assert ADMITTED in explain_connection(folder / "silos/north", f"127.0.0.1:{port}")
    for part in ("coordinator", "silos/north"):
        assert not list(describe_expiry(folder / part))
    assert keys == {path: path.read_bytes() for path in keys}


def test_certificates_of_both_authority_certificates_work_together(tmp_path):
    port = find_free_port()
    folder = write_deployment(tmp_path / "f", ["north"], address="127.0.0.1", port=port)
    old = {name: (folder / "silos/north" / name).read_bytes() for name in ("node.crt", "ca.crt")}
    renew_certificates(folder)
    for name, content in old.items():  # the silo has not received its new files yet
        (folder / "silos/north" / name).write_bytes(content)
    with open_guard(folder / "coordinator", port):
        assert ADMITTED in explain_connection(folder / "silos/north", f"127.0.0.1:{port}")


def test_silos_are_added_and_removed_while_the_guard_runs(tmp_path):
    port = find_free_port()
    address = f"127.0.0.1:{port}"
    folder = write_deployment(tmp_path / "f", ["north"], address="127.0.0.1", port=port)
    with open_guard(folder / "coordinator", port):
        east = add_silo(folder, "east")
        assert f"--coordinator {address} --silo east" in (east / "node.sh").read_text()
        assert ADMITTED in explain_connection(east, address)
        lines = remove_silo(folder, "east")
        assert lines[0] == f"deleted: {folder / 'coordinator/keys/east.pub'}"
        assert lines[1].startswith("east: the SuperLink does not answer, so its list keeps the key; the guard rejects")
        assert "the key of the certificate is not registered" in explain_connection(east, address)
        assert ADMITTED in explain_connection(folder / "silos/north", address)
    with pytest.raises(InputError, match="silo east is not registered; registered: north"):
        remove_silo(folder, "east")


def test_a_silo_can_create_its_own_key(tmp_path):
    folder = write_deployment(tmp_path / "f", ["north"], address="fl.example")
    certificates.create_node_key(tmp_path / "key", tmp_path / "key.pub")
    result = invoke("add-silo", folder, "east", "--public-key", tmp_path / "key.pub")
    assert result.exit_code == 0
    assert not (folder / "silos/east/key").exists()
    assert (folder / "coordinator/keys/east.pub").read_bytes() == (tmp_path / "key.pub").read_bytes()
    certificate = x509.load_pem_x509_certificate((folder / "silos/east/node.crt").read_bytes())
    assert certificate.public_key() == certificates.load_public_key(tmp_path / "key.pub")


@pytest.mark.parametrize("name", ["north", "../east", "a b"])
def test_a_name_that_exists_or_is_harmful_is_rejected(name, tmp_path):
    folder = write_deployment(tmp_path / "f", ["north"], address="127.0.0.1")
    with pytest.raises(InputError):
        add_silo(folder, name)


def test_without_the_key_of_the_authority_nothing_is_issued(tmp_path):
    folder = write_deployment(tmp_path / "f", ["north"], address="127.0.0.1")
    (folder / "authority/ca.key").unlink()
    for change in (renew_certificates, lambda folder: add_silo(folder, "east")):
        with pytest.raises(InputError, match="it may be in offline storage"):
            change(folder)


def test_the_status_shows_contacts_rounds_and_rejected_replies(tmp_path):
    coordinator = write_deployment(tmp_path / "f", ["north", "south", "west"], address="127.0.0.1") / "coordinator"
    contacts = ContactFile(coordinator)
    contacts.add("north", "10.0.0.2")
    (coordinator / "contacts.json").write_text(json.dumps({**read_contacts(coordinator), "south": Contact(1e9, "x")}))
    run = coordinator / "runs/fedavg-1"
    run.mkdir(parents=True)
    record = {"round": 2, "silos": {"north": {"accuracy": 1.0}, "south": {"rejected": "NaN\n[red]"}}}
    (run / "records.jsonl").write_text(json.dumps(record) + "\n")
    write_result(coordinator / "runs", RunResult("stopped", 3, "below the quorum"))
    lines = list(describe_status(coordinator))
    assert lines[0].startswith("silo north: online, last contact ")
    assert lines[0].endswith("from 10.0.0.2")
    assert lines[1].startswith("silo south: offline, last contact 2001-09-0")
    assert lines[2:] == [
        "silo west: never connected",
        "last run: stopped: below the quorum",
        "run folder fedavg-1: round 2, 1 rounds recorded",
        "round 2: south rejected: NaN\\n(red)",
    ]
    assert invoke("status", coordinator).output.splitlines()[2:] == lines[2:]


def test_the_status_before_the_first_run_names_no_failure(tmp_path):
    folder = write_deployment(tmp_path / "f", ["north"], address="127.0.0.1")
    assert list(describe_status(folder / "coordinator")) == ["silo north: never connected", "no run yet"]
    with pytest.raises(InputError, match=r"federation\.toml does not exist; name the coordinator's folder"):
        list(describe_status(folder))


@pytest.mark.parametrize(("status", "code"), [("finished", 0), ("failed", 1), ("failed", 2), ("stopped", 3)])
def test_the_exit_code_is_that_of_the_run(status, code, tmp_path):
    coordinator = write_deployment(tmp_path / "f", ["north"], address="127.0.0.1") / "coordinator"
    write_result(coordinator / "runs", RunResult(status, code, "why"))
    result = invoke("result", coordinator / "federation.toml", "--since", time.time() - 10)
    assert (result.exit_code, result.output) == (code, f"run {status}: why\n")
    late = invoke("result", coordinator / "federation.toml", "--since", time.time() + 10)
    assert (late.exit_code, late.output) == (
        1,
        "run failed: no server app was started; see the log of serve.sh\n",
    )


def test_folders_and_secrets_are_private_whatever_the_umask(tmp_path):
    old = os.umask(0)
    try:
        folder = write_deployment(tmp_path / "f", ["north"], address="127.0.0.1")
    finally:
        os.umask(old)
    for path in (folder, *(folder / name for name in ("authority", "coordinator", "silos/north"))):
        assert path.stat().st_mode & 0o777 == 0o700, path
    for name in ("silos/north/data", "silos/north/state"):
        assert (folder / name).stat().st_mode & 0o777 == 0o700
    for name in ("authority/ca.key", "coordinator/server.key", "silos/north/key"):
        assert (folder / name).stat().st_mode & 0o777 == 0o600
    doctor = invoke("doctor", folder / "silos/north")
    assert "readable by other users" not in doctor.output
    subprocess.run(["chmod", "644", folder / "silos/north/key"], check=True)
    assert (
        f"{folder / 'silos/north/key'} is readable by other users"
        in invoke("doctor", Path(folder, "silos/north")).output
    )
