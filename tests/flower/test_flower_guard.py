"""What another machine reaches of a coordinator: attacks from a network namespace, on real processes."""

import base64
import json
import os
import shutil
import ssl
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_private_key,
)
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import Message as ProtobufMessage
from flwr.proto.message_pb2 import Metadata
from flwr.proto.node_pb2 import Node
from network_namespace import open_other_machine
from typer.testing import CliRunner

from uefl.cli.main import app
from uefl.flower.deployment import write_deployment
from uefl.flower.fleet_connection import find_forged_sender
from uefl.flower.guard import ALLOWED_TARGETS
from uefl.flower.local_processes import find_free_port, open_local_federation

ATTACKS = Path(__file__).with_name("guard_attacks.py")
ODD_PATHS = [
    "/v1/fleet/../control/list-runs",
    "/v1/fleet/%2e%2e/control/list-runs",
    "/v1/fleet/..%2fcontrol/list-runs",
    "/v1/fleet/pull-messages/../../control/list-runs",
    "//v1/control/list-runs",
    "/v1/%63ontrol/list-runs",
    "/v1/fleet/pull%2dmessages",
    "/v1/fleet/pull-messages/",
    "/v1/fleet/pull-messages?x=/v1/control/list-runs",
    "/v1/fleet/pull-messages;x",
    "/v1/fleet/pull-messages#x",
    "/V1/FLEET/PULL-MESSAGES",
    "/v1/fleet/pull-messages\\..\\..\\control",
    "http://127.0.0.1/v1/control/list-runs",
    "http://127.0.0.1/v1/fleet/pull-messages",
    "*",
    "/",
]


class Site:
    """A running coordinator, and another machine that attacks it."""

    def __init__(self, folder, processes, machine):
        self.folder, self.processes, self.machine = folder, processes, machine
        self.port, self.superlink_port = processes.ports

    def attack(self, **attack):
        return self.attack_all([attack])[0]

    def attack_all(self, attacks):
        """Run attacks on the other machine."""
        path = self.folder / "attacks.json"
        target = {"host": self.machine.host_address, "port": self.port}
        path.write_text(json.dumps([{**target, **attack} for attack in attacks]))
        completed = self.run(sys.executable, str(ATTACKS), str(path))
        return json.loads(completed.stdout)

    def run(self, *command, **variables):
        """Run a command on the other machine."""
        return subprocess.run(
            self.machine.wrap(*command),
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, **variables},
        )


def get_identity(folder, silo, *, header_silo=None):
    """Return the certificate of a silo, and the header with its key or with that of another silo."""
    silo_folder, key_file = folder / "silos" / silo, folder / f"{silo}.pem"
    key = load_ssh_private_key((silo_folder / "key").read_bytes(), None)
    key_file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    header_key = load_ssh_private_key((folder / "silos" / (header_silo or silo) / "key").read_bytes(), None)
    public = header_key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return {
        "ca": str(silo_folder / "ca.crt"),
        "certificate": str(silo_folder / "node.crt"),
        "key": str(key_file),
        "headers": {"flwr-public-key": base64.b64encode(public).decode(), "content-type": "application/protobuf"},
    }


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder, port = tmp_path_factory.mktemp("site") / "f", find_free_port()
    with open_other_machine() as machine:
        write_deployment(folder, ["north", "south", "west"], address=machine.host_address, port=port)
        (folder / "coordinator/keys/west.pub").unlink()  # has a certificate, but is not registered
        with open_local_federation(folder, port) as processes:
            processes.start_coordinator()
            processes.register_keys()
            yield Site(folder, processes, machine)


def list_superlink_paths(site):
    context = ssl.create_default_context(cafile=site.folder / "coordinator/ca.crt")
    url = f"https://127.0.0.1:{site.superlink_port}/openapi.json"
    with urllib.request.urlopen(url, context=context) as response:
        return [*json.load(response)["paths"], "/docs", "/openapi.json", "/health"]


def test_a_registered_silo_reaches_only_the_paths_of_a_node(site):
    paths, identity = list_superlink_paths(site), get_identity(site.folder, "north")
    allowed = {target.decode() for target in ALLOWED_TARGETS}
    assert allowed < set(paths)
    assert any("control" in path for path in paths)
    assert any("runtime" in path for path in paths)
    closed = [*(set(paths) - allowed), *ODD_PATHS]
    results = site.attack_all(
        [{**identity, "path": path, "method": method} for path in closed for method in ("POST", "GET")]
    )
    assert set(results) == {"403 rejected this path is not served"}
    get_results = site.attack_all([{**identity, "path": path, "method": "GET"} for path in allowed])
    assert set(get_results) == {"403 rejected this path is not served"}
    for result in site.attack_all([{**identity, "path": path} for path in allowed]):
        assert "Invalid SuperNode authentication" in result, "the SuperLink itself checks the signature"


def test_callers_without_a_registered_key_are_rejected(site):
    path, north = "/v1/fleet/pull-messages", get_identity(site.folder, "north")
    other = write_deployment(site.folder.parent / "other", ["north"], address=site.machine.host_address)
    foreign = get_identity(other, "north") | {"ca": north["ca"]}
    anonymous = {"headers": north["headers"], "path": path}
    cases = {
        "no certificate, no verification": (anonymous, "no answer"),
        "no certificate": ({**anonymous, "ca": north["ca"]}, "no answer"),
        "certificate of another authority": ({**foreign, "path": path}, "no answer"),
        "certificate of the coordinator": (
            {**north, "path": path}
            | {
                name: str(site.folder / "coordinator" / f"server.{end}")
                for name, end in (("certificate", "crt"), ("key", "key"))
            },
            "no answer",
        ),
        "unregistered key": (
            {**get_identity(site.folder, "west"), "path": path},
            "403 rejected the key of the certificate is not registered",
        ),
        "no key": ({**north, "headers": {}, "path": path}, "401 rejected the request has no node key"),
        "key of another silo": (
            {**get_identity(site.folder, "north", header_silo="south"), "path": path},
            "403 rejected the node key is not that of the certificate",
        ),
        "unreadable key": (
            {**north, "headers": {"flwr-public-key": "AAAA"}, "path": path},
            "401 rejected the node key of the request cannot be read",
        ),
        "SuperLink": ({**north, "path": path, "port": site.superlink_port}, "ConnectionRefusedError"),
        "unencrypted SuperLink": (
            {"plain_text": True, "path": "/", "port": site.superlink_port},
            "ConnectionRefusedError",
        ),
    }
    results = site.attack_all([attack for attack, _ in cases.values()])
    assert dict(zip(cases, results)) == {name: result for name, (_, result) in cases.items()}
    assert site.attack(plain_text=True, path=path) == "no answer"
    lines = site.processes.read_log("coordinator")
    for reason in ("PEER_DID_NOT_RETURN_A_CERTIFICATE", "HTTP_REQUEST", "CERTIFICATE_VERIFY_FAILED"):
        assert any(f"guard: {site.machine.address} rejected" in line and reason in line for line in lines.splitlines())
    assert f"guard: {site.machine.address} (an unregistered key) rejected: POST {path}" in lines


def test_a_foreign_app_cannot_be_started_from_another_machine(site, tmp_path):
    shutil.copytree(site.folder / "coordinator/app", tmp_path / "app")
    for name, root in (
        ("with-ca", f'root-certificates = "{site.folder}/coordinator/ca.crt"'),
        ("without", "insecure = true"),
    ):
        home = tmp_path / name
        home.mkdir()
        address = f"{site.machine.host_address}:{site.port}"
        (home / "config.toml").write_text(f'[superlink]\ndefault = "f"\n[superlink.f]\naddress = "{address}"\n{root}\n')
        program = str(Path(sys.executable).with_name("flwr"))
        completed = site.run(
            program, "run", str(tmp_path / "app"), "f", FLWR_HOME=str(home), FLWR_TELEMETRY_ENABLED="0"
        )
        assert "Successfully started" not in completed.stdout + completed.stderr
    assert "StartRun" not in site.processes.read_log("coordinator")


def test_the_doctor_confirms_it_from_both_sides(site):
    coordinator = CliRunner().invoke(app, ["deploy", "doctor", str(site.folder / "coordinator")])
    assert (coordinator.exit_code, "FAILED" in coordinator.output) == (0, False), coordinator.output
    for line in (
        f"the SuperLink listens at 127.0.0.1:{site.superlink_port}",
        "rejects a caller without a certificate",
        "registered silos: north, south",
    ):
        assert line in coordinator.output
    program = str(Path(sys.executable).with_name("uefl"))
    silo = site.run(program, "deploy", "doctor", str(site.folder / "silos/north"))
    assert silo.returncode == 0, silo.stdout + silo.stderr
    assert "admits this silo" in silo.stdout
    assert "refuses /v1/control/list-runs" in silo.stdout
    stranger = site.run(program, "deploy", "doctor", str(site.folder / "silos/west"))
    assert stranger.returncode == 1
    assert "the key of the certificate is not registered" in stranger.stdout


def test_a_registered_silo_on_another_machine_connects_and_ends_at_sigterm(site):
    command = [str(site.folder / "silos/north/node.sh")]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    node = subprocess.Popen(
        site.machine.wrap(*command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    try:
        line = next(line for line in node.stdout if "connected to" in line or "attempt" in line)
    finally:
        node.terminate()
    rest = node.communicate(timeout=300)[0]
    assert f"silo north: connected to {site.machine.host_address}:{site.port} as node" in line
    assert "silo north: stopped" in rest
    assert node.returncode == 0


def test_a_node_cannot_send_a_reply_in_the_name_of_another_node():
    def make_body(*senders):
        messages = [ProtobufMessage(metadata=Metadata(src_node_id=sender)) for sender in senders]
        return PushMessagesRequest(node=Node(node_id=7), messages_list=messages).SerializeToString()

    assert not find_forged_sender("/v1/fleet/push-messages", make_body(7))
    assert find_forged_sender("/v1/fleet/push-messages", make_body(7, 8)) == "the reply has another node as its sender"
    assert not find_forged_sender("/v1/fleet/pull-messages", b"")
