"""The loop of a silo: it runs the installed app only, and explains every failed connection."""

import asyncio
import json
import logging
import re
import threading
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from uefl.core.errors import InputError
from uefl.flower import certificates, fleet_connection
from uefl.flower.certificates import describe_expiry, load_client_context, load_node_key, load_server_context
from uefl.flower.client_audit import AUDIT_FILE
from uefl.flower.connection_errors import explain_error
from uefl.flower.demo import start_processes, write_digits, write_run_settings
from uefl.flower.deployment import find_flower_app, write_deployment
from uefl.flower.fleet_connection import AppIdentity, FleetConnection, identify_app, require_flower_version
from uefl.flower.guard import open_listener, run_guard
from uefl.flower.local_processes import find_free_port, open_local_federation
from uefl.flower.node import LoggingRetrier, find_identity_error

FOREIGN_APP = """
from pathlib import Path
Path({marker!r}).write_text("foreign code ran")
from uefl.flower.client import make_client_app
app = make_client_app()
"""


def test_silos_reject_a_run_with_another_app_by_name_and_never_load_it(tmp_path):
    port, silos, marker = find_free_port(), ["north", "south"], tmp_path / "marker"
    folder = write_deployment(tmp_path / "f", silos, address="127.0.0.1", port=port)
    for i, silo in enumerate(silos):
        write_digits(folder / "silos" / silo / "data", "rotate:0", i, num_images=20)
    write_run_settings(folder, "rounds=1 iterations=1", method="fedavg")
    (folder / "coordinator/app/uefl_app/client_app.py").write_text(FOREIGN_APP.format(marker=str(marker)))
    with open_local_federation(folder, port) as processes:
        start_processes(processes, silos, Console(quiet=True))
        output = "\n".join(processes.stream_run_output())
    installed = identify_app(find_flower_app())
    reason = f"app uefl/uefl-app {installed.version} has hash [0-9a-f]{{16}}, installed is {installed.hash[:16]}"
    for silo in silos:
        assert re.search(f"run [0-9]+ rejected: {reason}", processes.read_log(silo))
        entry = json.loads((folder / "silos" / silo / "state" / AUDIT_FILE).read_text().splitlines()[0])
        assert not entry["accepted"]
        assert re.match(reason, entry["reason"])
    assert not marker.exists(), "a silo ran code of the coordinator"
    assert not list(folder.glob("coordinator/runs/*/records.jsonl")), output
    assert re.search(reason, output), output


@pytest.mark.parametrize(
    ("app", "reason"),
    [
        (AppIdentity("uefl/uefl-app", "1", "aa"), ""),
        (AppIdentity("uefl/uefl-app", "2", "aa"), "app uefl/uefl-app 2 is not the installed uefl/uefl-app 1; "),
        (AppIdentity("evil/app", "1", "aa"), "app evil/app 1 is not the installed uefl/uefl-app 1; "),
        (AppIdentity("uefl/uefl-app", "1", "bb"), "app uefl/uefl-app 1 has hash bb, installed is aa; "),
    ],
)
def test_another_app_is_rejected_by_name(app, reason):
    error = find_identity_error(app, AppIdentity("uefl/uefl-app", "1", "aa"))
    assert error.startswith(reason)
    assert bool(error) == bool(reason)


def test_the_app_of_a_coordinator_has_the_identity_of_the_installed_one(tmp_path):
    folder = write_deployment(tmp_path / "f", ["north"], address="127.0.0.1")
    assert identify_app(folder / "coordinator/app") == identify_app(find_flower_app())


def test_another_version_of_flower_is_rejected_in_one_line(monkeypatch):
    require_flower_version()
    monkeypatch.setattr(fleet_connection, "version", lambda _: "1.42.0")
    with pytest.raises(InputError, match=r"^flwr 1\.42\.0 is installed, but uefl needs 1\.41; install its extra"):
        require_flower_version()


def test_only_one_module_imports_modules_of_flower_that_are_not_public():
    public = {"flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.simulation"}
    for path in Path(fleet_connection.__file__).parents[1].rglob("*.py"):
        if "app" not in path.parts and path.name != "fleet_connection.py":
            modules = re.findall(r"^\s*(?:from|import) (flwr[\w.]*)", path.read_text(), re.MULTILINE)
            assert set(modules) <= public, path


@contextmanager
def open_guard(coordinator: Path, port: int):
    """Run the guard of a coordinator in this process; no SuperLink runs behind it."""
    loop, listener = asyncio.new_event_loop(), open_listener("127.0.0.1", port)
    task = loop.create_task(run_guard(listener, coordinator, load_server_context(coordinator), find_free_port()))

    def run():
        with listener:
            loop.run_until_complete(asyncio.wait({task}))
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()


def explain_connection(silo: Path, address: str) -> str:
    """Return the line that a silo writes when it connects to this address."""
    connection = FleetConnection(address, load_client_context(silo), load_node_key(silo / "key"))
    try:
        connection.activate()
    except httpx.HTTPError as e:
        return explain_error(e, address)
    finally:
        connection.close()
    return "connected"


def test_a_silo_explains_why_it_cannot_connect(tmp_path, monkeypatch):
    port = find_free_port()
    address = f"127.0.0.1:{port}"
    folder = write_deployment(tmp_path / "f", ["north", "south"], address="127.0.0.1", port=port)
    other = write_deployment(tmp_path / "other", ["north"], address="127.0.0.1", port=port)
    (folder / "coordinator/keys/south.pub").unlink()
    north, south = folder / "silos/north", folder / "silos/south"
    assert explain_connection(north, address) == (
        f"coordinator {address}: connection refused; start serve.sh there, or check address, port and firewall"
    )
    with open_guard(folder / "coordinator", port):
        assert "its SuperLink does not run; see the log of serve.sh" in explain_connection(north, address)
        assert explain_connection(south, address).endswith(
            "it rejected this silo: the key of the certificate is not registered; "
            "its operator adds this silo's key to keys/ and runs register.sh"
        )
        assert "was not issued by the authority in ca.crt; get ca.crt" in explain_connection(
            other / "silos/north", address
        )
        monkeypatch.setattr(certificates, "VALID_DAYS", -1 / 48)  # half an hour ago
        authority = certificates.load_authority(folder / "authority")
        certificates.issue_node_certificate(
            north / "node.crt", "north", folder / "coordinator/keys/north.pub", *authority
        )
        assert "it closed the connection, as it does for a certificate" in explain_connection(north, address)
        assert [line for line in describe_expiry(north) if line.startswith("node.crt expired on ")]
    server_key = load_server_key(folder / "coordinator/server.key")
    certificates.issue_server_certificate(folder / "coordinator/server.crt", ["127.0.0.1"], server_key, *authority)
    with open_guard(folder / "coordinator", port):
        assert "its certificate has expired; its operator runs `uefl deploy renew`" in explain_connection(
            south, address
        )
    assert "the name cannot be resolved" in explain_connection(south, "no-such-host.invalid:1")


def load_server_key(path: Path):
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    return load_pem_private_key(path.read_bytes(), None).public_key()


def test_an_expiry_is_announced_30_days_ahead(tmp_path, monkeypatch):
    monkeypatch.setattr(certificates, "VALID_DAYS", 29)
    folder = write_deployment(tmp_path / "f", ["north"], address="127.0.0.1")
    assert [line.split(" expires on ")[0] for line in describe_expiry(folder / "silos/north")] == ["ca.crt", "node.crt"]
    monkeypatch.setattr(certificates, "VALID_DAYS", 31)
    folder = write_deployment(tmp_path / "g", ["north"], address="127.0.0.1")
    assert not list(describe_expiry(folder / "coordinator"))


def test_a_certificate_of_another_authority_is_found_before_connecting(tmp_path):
    folder = write_deployment(tmp_path / "f", ["north"], address="127.0.0.1")
    other = write_deployment(tmp_path / "other", ["north"], address="127.0.0.1")
    (folder / "silos/north/ca.crt").write_bytes((other / "authority/ca.crt").read_bytes())
    with pytest.raises(InputError, match=r"node\.crt: not issued by ca\.crt; get both from"):
        load_client_context(folder / "silos/north")


def test_failed_requests_are_repeated_with_growing_delays_and_a_line_each(caplog):
    delays, failures = [], [httpx.ConnectError("[Errno 111] Connection refused")] * 4

    def send():
        if failures:
            raise failures.pop()
        return httpx.Response(200)

    with caplog.at_level(logging.INFO, "uefl"):
        LoggingRetrier("fl.example:8443", wait=delays.append).invoke(send)
    assert [round(delay) for delay in delays] == pytest.approx([1, 2, 4, 8], abs=2)  # delays have a random part
    assert delays == sorted(delays)
    lines = [record.getMessage() for record in caplog.records]
    assert all("coordinator fl.example:8443: connection refused; start serve.sh there" in line for line in lines[:4])
    assert lines[-1] == "coordinator fl.example:8443: connected again"
