"""`uefl deploy doctor`: check a deployment from the side of the coordinator or of a silo, without changing anything."""

from __future__ import annotations

import base64
import re
import socket
import ssl
import stat
from collections.abc import Iterator
from http.client import HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import NamedTuple

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from uefl.core.errors import InputError
from uefl.core.untrusted_text import escape_text
from uefl.flower.certificates import describe_expiry, load_client_context, load_node_key, load_server_context
from uefl.flower.connection_errors import GUARD_HEADER
from uefl.flower.guard import KEY_HEADER, KeyFolder

TIMEOUT_SECONDS = 10
NODE_PATH = "/v1/fleet/get-run"
CLOSED_PATHS = ("/v1/control/list-runs", "/v1/runtime/pull-messages", "/v1/fleet/register-node", "/docs", "/health")
SECRET_FILES = ("key", "server.key", "superlink.db", "state/audit.jsonl")


class Check(NamedTuple):
    """One fact about a deployment, and whether it is as it should be."""

    is_passed: bool
    text: str


def examine_folder(folder: Path) -> Iterator[Check]:
    """Yield the checks of the folder of a coordinator or of a silo."""
    if (folder / "server.key").exists():
        sides = examine_coordinator(folder)
    elif (folder / "key").exists():
        sides = examine_silo(folder)
    else:
        raise InputError(f"{folder}: neither the folder of a coordinator (server.key) nor of a silo (key)")
    yield from examine_files(folder)
    yield from sides


def examine_files(folder: Path) -> Iterator[Check]:
    """Yield whether secrets are readable by their owner only, and whether certificates are valid for a while."""
    for path in (folder, *(folder / name for name in SECRET_FILES)):
        if path.exists() and stat.S_IMODE(path.stat().st_mode) & 0o077:
            yield Check(False, f"{path} is readable by other users; chmod go= {path}")
    lines = list(describe_expiry(folder))
    yield from (Check(False, line) for line in lines)
    if not lines:
        yield Check(True, "certificates are valid for more than 30 days")


def examine_coordinator(folder: Path) -> Iterator[Check]:
    """Yield whether the SuperLink is hidden, the guard closed, and every key readable."""
    load_server_context(folder)
    port, superlink_port = read_ports(folder / "serve.sh")
    keys = KeyFolder(folder / "keys")
    keys.find_silo(b"")
    yield Check(bool(keys.silos), f"registered silos: {', '.join(sorted(keys.silos)) or 'none'}")
    addresses = list_listening_addresses(superlink_port)
    if not addresses:
        yield Check(False, f"the SuperLink does not listen at 127.0.0.1:{superlink_port}; start serve.sh")
    for address in addresses:
        is_hidden = address == "127.0.0.1"
        remedy = "" if is_hidden else "; only the guard may be reachable from other machines"
        yield Check(is_hidden, f"the SuperLink listens at {address}:{superlink_port}{remedy}")
    yield examine_without_certificate("127.0.0.1", port)


def examine_silo(folder: Path) -> Iterator[Check]:
    """Yield whether the coordinator admits this silo, and whether it refuses everything else."""
    host, port = read_coordinator(folder / "node.sh")
    tls = load_client_context(folder)
    key = load_node_key(folder / "key").public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    headers = {KEY_HEADER.decode(): base64.b64encode(key).decode()}
    try:
        response, text = send_request(host, port, tls, NODE_PATH, headers)
    except (OSError, HTTPException) as e:
        yield Check(False, f"coordinator {host}:{port} cannot be reached: {escape_text(e)}")
        return
    is_admitted = GUARD_HEADER not in response.headers
    yield Check(is_admitted, f"coordinator {host}:{port} {'admits this silo' if is_admitted else 'says: ' + text}")
    for path in CLOSED_PATHS:
        response, _ = send_request(host, port, tls, path, headers)
        is_closed = GUARD_HEADER in response.headers and response.status == 403
        yield Check(is_closed, f"coordinator {host}:{port} {'refuses' if is_closed else 'SERVES'} {path}")
    yield examine_without_certificate(host, port)


def examine_without_certificate(host: str, port: int) -> Check:
    """Return whether a caller without a certificate, who does not verify the other side either, is rejected."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        response, _ = send_request(host, port, context, NODE_PATH, {})
    except ssl.SSLError:
        return Check(True, f"{host}:{port} rejects a caller without a certificate")
    except ConnectionResetError:
        return Check(True, f"{host}:{port} rejects a caller without a certificate")
    except (OSError, HTTPException) as e:
        return Check(False, f"{host}:{port} cannot be reached: {escape_text(e)}; start serve.sh")
    return Check(False, f"{host}:{port} answers a caller without a certificate (status {response.status})")


def send_request(
    host: str, port: int, tls: ssl.SSLContext, path: str, headers: dict[str, str]
) -> tuple[HTTPResponse, str]:
    """Send an empty request and return the response with the first line of its text."""
    connection = HTTPSConnection(host, port, context=tls, timeout=TIMEOUT_SECONDS)
    try:
        connection.request("POST", path, b"", {"content-type": "application/protobuf", **headers})
        response = connection.getresponse()
        return response, escape_text(response.read(300).decode(errors="replace").strip())
    finally:
        connection.close()


def list_listening_addresses(port: int) -> list[str]:
    """Return the local addresses at which a process listens at this port."""
    addresses = []
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            local, state = (line.split()[i] for i in (1, 3))
            address, port_text = local.split(":")
            if state == "0A" and int(port_text, 16) == port:
                addresses.append(_format_address(address, family))
    return addresses


def _format_address(text: str, family: socket.AddressFamily) -> str:
    words = [bytes.fromhex(text[i : i + 8])[::-1] for i in range(0, len(text), 8)]  # 32-bit words of this machine
    return socket.inet_ntop(family, b"".join(words))


def read_ports(script: Path) -> tuple[int, int]:
    """Return the ports of guard and SuperLink from the script that starts them."""
    match = re.search(r"--port (\d+) --superlink-port (\d+)", _read_script(script))
    if match is None:
        raise InputError(f"{script}: no --port and --superlink-port")
    return int(match[1]), int(match[2])


def read_coordinator(script: Path) -> tuple[str, int]:
    """Return host and port of the coordinator from the script that starts a node."""
    match = re.search(r"--coordinator (\S+):(\d+)", _read_script(script))
    if match is None:
        raise InputError(f"{script}: no --coordinator host:port")
    return match[1], int(match[2])


def _read_script(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as e:
        raise InputError(f"{path}: {e.strerror}") from e
