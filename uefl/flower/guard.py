"""The guard: the only process of the coordinator that other machines reach.

Flower's SuperLink serves the interfaces for operators, apps and nodes at one port, and only the last one checks a key.
Therefore it listens at 127.0.0.1 only, and the guard listens at the public address. A connection needs a certificate
that the federation's authority issued to a silo. A request is forwarded if its path is one of a node, if the key in its
header is that of the certificate, and if the key is registered.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import socket
import ssl
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import h11
import httpx
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key

from uefl.core.errors import InputError
from uefl.core.untrusted_text import escape_text
from uefl.flower.certificates import load_public_key
from uefl.flower.connection_errors import GUARD_HEADER
from uefl.flower.contacts import ContactFile
from uefl.flower.fleet_connection import find_forged_sender

log = logging.getLogger("uefl")

# What the loop of `uefl/flower/node.py` requests. It never requests an app, and keys are registered at the coordinator.
ALLOWED_TARGETS = frozenset(
    f"/v1/fleet/{name}".encode()
    for name in (
        "activate-node",
        "deactivate-node",
        "send-node-heartbeat",
        "pull-messages",
        "push-messages",
        "get-run",
        "pull-object",
        "push-object",
        "confirm-message-received",
    )
)
KEY_HEADER = b"flwr-public-key"
FORWARDED_HEADERS = frozenset(
    (
        b"content-type",
        b"accept",
        KEY_HEADER,
        b"flwr-signature",
        b"flwr-timestamp",
        b"flwr-package-name",
        b"flwr-package-version",
        b"flwr-component-name",
    )
)
RETURNED_HEADERS = ("content-type", "flwr-version-incompatibility-message")
MAX_BODY_BYTES = 32 << 20  # Flower sends arrays in parts of 5 MiB
MAX_CONNECTIONS = 256
HANDSHAKE_SECONDS, IDLE_SECONDS, UPSTREAM_SECONDS = 10.0, 120.0, 60.0
READ_BYTES = 1 << 16


class Refusal(Exception):
    """A request that is not forwarded: the status and one line of text."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Answer(NamedTuple):
    """An answer to a request."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass
class KeyFolder:
    """The registered keys, one file <silo>.pub each; changes count from the next request on."""

    folder: Path
    _version: tuple[tuple[str, int], ...] = ()
    _silos: dict[bytes, str] = field(default_factory=dict)

    def find_silo(self, key: bytes) -> str | None:
        """Return the name of the silo with this key, or nothing if the key is not registered."""
        files = sorted(self.folder.glob("*.pub"))
        version = tuple((file.name, file.stat().st_mtime_ns) for file in files)
        if version != self._version:
            self._silos, self._version = _read_keys(files), version
        return self._silos.get(key)

    @property
    def silos(self) -> list[str]:
        """The names of the silos whose keys were readable."""
        return list(self._silos.values())


def _read_keys(files: list[Path]) -> dict[bytes, str]:
    keys: dict[bytes, str] = {}
    for file in files:
        try:
            keys[encode_key(load_public_key(file))] = file.stem
        except InputError as e:
            log.error("guard: %s", e)
    return keys


def encode_key(key: ec.EllipticCurvePublicKey) -> bytes:
    """Return a public key in the form in which keys are compared."""
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def read_certificate_key(certificate: bytes | None) -> bytes:
    """Return the public key of a certificate."""
    key = x509.load_der_x509_certificate(certificate or b"").public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError("the certificate has no ECDSA key")
    return encode_key(key)


def read_header_key(headers: list[tuple[bytes, bytes]]) -> bytes:
    """Return the public key that a request names."""
    values = [value for name, value in headers if name == KEY_HEADER]
    if len(values) != 1:
        raise Refusal(401, "the request has no node key")
    try:
        key = load_pem_public_key(base64.b64decode(values[0], validate=True))
    except (ValueError, binascii.Error) as e:
        raise Refusal(401, "the node key of the request cannot be read") from e
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise Refusal(401, "the node key of the request is not an ECDSA key")
    return encode_key(key)


def check_request(request: h11.Request, certificate_key: bytes, keys: KeyFolder) -> str:
    """Return the silo of a request; refuse it unless it is one of a registered node to the interface for nodes."""
    silo = keys.find_silo(certificate_key)
    if silo is None:
        raise Refusal(403, "the key of the certificate is not registered")
    if request.method != b"POST" or request.target not in ALLOWED_TARGETS:
        raise Refusal(403, "this path is not served")
    if read_header_key(list(request.headers)) != certificate_key:
        raise Refusal(403, "the node key is not that of the certificate")
    return silo


class Guard:
    """Accept connections of silos and forward their requests to the SuperLink."""

    def __init__(self, folder: Path, tls: ssl.SSLContext, upstream: httpx.AsyncClient) -> None:
        self._keys, self._contacts = KeyFolder(folder / "keys"), ContactFile(folder)
        self._tls, self._upstream = tls, upstream
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, listener: socket.socket) -> None:
        """Accept connections until cancelled, which ends open connections too."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                self._start_connection(*await loop.sock_accept(listener))
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start_connection(self, connection: socket.socket, peer: tuple[str, int]) -> None:
        if len(self._tasks) >= MAX_CONNECTIONS:
            log.warning("guard: %s rejected: more than %d connections", peer[0], MAX_CONNECTIONS)
            connection.close()
            return
        task = asyncio.create_task(self._handle_connection(connection, peer[0]))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _handle_connection(self, connection: socket.socket, peer: str) -> None:
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=self._tls, ssl_handshake_timeout=HANDSHAKE_SECONDS
            )
        except OSError as e:  # a failed handshake, or a connection that ended
            log.warning("guard: %s rejected, its TLS handshake failed: %s", peer, e)
            return
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        try:
            key = read_certificate_key(transport.get_extra_info("ssl_object").getpeercert(binary_form=True))
            await self._handle_requests(Exchange(reader, writer), key, peer)
        except (OSError, TimeoutError, h11.ProtocolError, ValueError) as e:
            log.warning("guard: connection of %s ended: %s", peer, escape_text(e) or type(e).__name__)
        finally:
            transport.abort()

    async def _handle_requests(self, exchange: Exchange, key: bytes, peer: str) -> None:
        while (request := await exchange.read_request()) is not None:
            try:
                self._contacts.add(check_request(request, key, self._keys), peer)
                answer = await self._forward(request, await exchange.read_body())
            except Refusal as e:
                silo = self._keys.find_silo(key) or "an unregistered key"
                line = escape_text(f"{request.method.decode()} {request.target.decode('latin-1')}", 200)
                log.warning("guard: %s (%s) rejected: %s: %s", peer, silo, line, e)
                await exchange.send(Answer(e.status, {GUARD_HEADER: "rejected"}, f"{e}\n".encode()), is_last=True)
                return
            await exchange.send(answer)
            if not exchange.start_next():
                return

    async def _forward(self, request: h11.Request, body: bytes) -> Answer:
        target = request.target.decode()
        try:
            if error := find_forged_sender(target, body):
                raise Refusal(403, error)
        except Refusal:
            raise
        except Exception as e:  # protobuf's own errors for bytes that are no request
            raise Refusal(400, "the request cannot be read") from e
        headers = [(name, value) for name, value in request.headers if name in FORWARDED_HEADERS]
        try:
            response = await self._upstream.post(
                target, content=body, headers=[*headers, (b"accept-encoding", b"identity")]
            )
        except httpx.HTTPError as e:
            log.error("guard: the SuperLink does not answer: %s", str(e) or type(e).__name__)
            return Answer(503, {GUARD_HEADER: "no SuperLink"}, b"the SuperLink does not answer\n")
        returned = {name: response.headers[name] for name in RETURNED_HEADERS if name in response.headers}
        return Answer(response.status_code, returned, response.content)


class Exchange:
    """The HTTP side of a connection, with bounds on sizes and times."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer, self._http = reader, writer, h11.Connection(h11.SERVER)

    async def read_request(self) -> h11.Request | None:
        """Return the next request, or nothing at the end of the connection."""
        event = await self._next_event()
        return event if isinstance(event, h11.Request) else None

    async def read_body(self) -> bytes:
        """Return the body of the request."""
        body = bytearray()
        while isinstance(event := await self._next_event(), h11.Data):
            body += event.data
            if len(body) > MAX_BODY_BYTES:
                raise Refusal(413, f"the request has more than {MAX_BODY_BYTES} bytes")
        return bytes(body)

    async def send(self, answer: Answer, *, is_last: bool = False) -> None:
        """Send an answer."""
        headers = [*answer.headers.items(), ("content-length", str(len(answer.body)))]
        if is_last:
            headers.append(("connection", "close"))
        parts = (
            self._http.send(h11.Response(status_code=answer.status, headers=headers)),
            self._http.send(h11.Data(data=answer.body)),
            self._http.send(h11.EndOfMessage()),
        )
        self._writer.write(b"".join(part or b"" for part in parts))
        async with asyncio.timeout(IDLE_SECONDS):
            await self._writer.drain()
        if is_last:
            self._writer.close()
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(HANDSHAKE_SECONDS):
                    await self._writer.wait_closed()

    def start_next(self) -> bool:
        """Prepare for another request; return whether the client may send one."""
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
            return True
        return False

    async def _next_event(self) -> object:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            async with asyncio.timeout(IDLE_SECONDS):
                self._http.receive_data(await self._reader.read(READ_BYTES))
        return event


async def run_guard(listener: socket.socket, folder: Path, tls: ssl.SSLContext, superlink_port: int) -> None:
    """Forward the requests of the silos registered in this folder to the SuperLink at 127.0.0.1."""
    listener.setblocking(False)
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    async with httpx.AsyncClient(
        base_url=f"https://127.0.0.1:{superlink_port}", verify=context, timeout=UPSTREAM_SECONDS, trust_env=False
    ) as upstream:
        await Guard(folder, tls, upstream).serve(listener)


def open_listener(host: str, port: int) -> socket.socket:
    """Return a socket that listens at this address."""
    try:
        return socket.create_server((host, port), backlog=MAX_CONNECTIONS)
    except OSError as e:
        raise InputError(f"cannot listen at {host}:{port}: {e.strerror}; choose another port or stop its user") from e
