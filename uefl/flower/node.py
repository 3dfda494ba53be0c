"""`uefl deploy node`: the loop of a silo. It runs the installed client app, whatever app the coordinator sends.

The client app stays in this process, so a message costs no start of a process and no import. A run whose app differs
from the installed one is rejected before its message is read.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import httpx
from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp

from uefl.core.untrusted_text import escape_text
from uefl.flower.certificates import describe_expiry, load_client_context, load_node_key
from uefl.flower.client_audit import AuditEntry, append_audit_entry
from uefl.flower.connection_errors import GUARD_HEADER, explain_error
from uefl.flower.fleet_connection import (
    HEARTBEAT_SECONDS,
    AppIdentity,
    Envelope,
    FleetConnection,
    RunEndedError,
    identify_app,
    make_error_reply,
    require_flower_version,
)
from uefl.flower.poll_delay import PollDelay

log = logging.getLogger("uefl")
MAX_POLL_SECONDS = 1.0  # while nothing arrives
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 30.0
RETRIED_STATUS_CODES = {502, 503, 504}


class NodeOptions(NamedTuple):
    """Files and address of one silo."""

    folder: Path
    address: str
    config: Mapping[str, str]

    @property
    def silo(self) -> str:
        return self.config["silo"]


@dataclass
class LoggingRetrier:
    """Repeat requests that fail in transit, and log address, cause and remedy each time."""

    address: str
    is_enabled: bool = True
    wait: Callable[[float], None] = time.sleep

    def invoke(self, send: Callable[[], httpx.Response]) -> httpx.Response:
        delays = Backoff()
        while True:
            try:
                response = send()
            except httpx.HTTPError as e:
                if not self.is_enabled or not is_transient(e):
                    raise
                log_retry(e, self.address, delay := delays.next())
                self.wait(delay)
            else:
                if delays.num_attempts:
                    log.info("coordinator %s: connected again", self.address)
                return response


@dataclass
class Backoff:
    """Seconds until the next attempt: doubled each time, with jitter against simultaneous attempts."""

    num_attempts: int = 0

    def next(self) -> float:
        delay = min(MAX_RETRY_SECONDS, MIN_RETRY_SECONDS * 2 ** min(self.num_attempts, 10))
        self.num_attempts += 1
        return float(delay * random.uniform(0.8, 1.0))


@dataclass
class NodeLoop:
    """A connected silo: its client app, and the identity of the app that is installed."""

    connection: FleetConnection
    app: ClientApp
    installed: AppIdentity
    options: NodeOptions
    run_errors: dict[int, str] = field(default_factory=dict)

    def serve(self) -> None:
        """Answer messages one by one, without end."""
        delay = PollDelay(MAX_POLL_SECONDS)
        while True:
            envelope = self.connection.poll()
            if envelope is None:
                delay.wait()
                continue
            with suppress(RunEndedError):
                self.answer(envelope)
            delay.reset()

    def answer(self, envelope: Envelope) -> None:
        """Answer one message by the installed app, or by the reason why it is rejected."""
        start, num_received, message = time.monotonic(), 0, envelope.header
        if error := self.find_app_error(envelope.run_id):
            reply = make_error_reply(message, error)
        else:
            try:
                message, num_received = self.connection.receive(envelope)
                reply = self.app(message, self.make_context(envelope.run_id))
            except (RunEndedError, httpx.HTTPError):
                raise
            except Exception as e:
                log.exception("silo %s could not answer a message", self.options.silo)
                error = f"silo {self.options.silo} could not answer: {type(e).__name__}"
                reply = make_error_reply(message, error)
        if error:  # the client app writes the entries of the messages that reach it
            entry = AuditEntry(task=message.metadata.message_type, silo=self.options.silo, reason=error)
            try:
                append_audit_entry(Path(self.options.config["state_path"]), entry)
            except OSError:  # such as a full disk; a rejection contains no data
                log.exception("silo %s could not write its audit log", self.options.silo)
        if reply.has_content():
            from uefl.flower.wire import pack_small_content  # imports torch, as the client app does

            reply.content = pack_small_content(reply.content)
        num_sent = self.connection.send(reply, time.monotonic() - start)
        outcome = f"rejected: {error}" if error else "answered"
        kind, seconds = message.metadata.message_type, time.monotonic() - start
        log.info("%s: %s; %d bytes in, %d out, %.1f s", kind, outcome, num_received, num_sent, seconds)

    def find_app_error(self, run_id: int) -> str:
        """Return why a run is rejected: its app is not the one that is installed here."""
        if run_id not in self.run_errors:
            self.run_errors[run_id] = escape_text(
                find_identity_error(self.connection.identify_run(run_id), self.installed)
            )
            if self.run_errors[run_id]:
                log.error("run %s rejected: %s", run_id, self.run_errors[run_id])
        return self.run_errors[run_id]

    def make_context(self, run_id: int) -> Context:
        """Return the context of a message. The run configuration of the coordinator is not part of it."""
        return Context(
            run_id=run_id,
            node_id=self.connection.node_id,
            node_config=dict(self.options.config),
            state=RecordDict(),
            run_config={},
        )


def run_node(options: NodeOptions) -> None:
    """Connect a silo to the coordinator and answer its messages until SIGTERM."""
    require_flower_version()
    os.umask(0o077)  # client state and the audit log are readable by their owner only
    signal.signal(signal.SIGTERM, _exit_on_signal)
    from uefl.flower.client import make_client_app  # imports torch, so only after the check of the version
    from uefl.flower.deployment import find_flower_app

    key, tls = load_node_key(options.folder / "key"), load_client_context(options.folder)
    installed, retrier = identify_app(find_flower_app()), LoggingRetrier(options.address)
    for line in describe_expiry(options.folder):
        log.warning(line)
    log.info("silo %s: app %s %s, hash %s", options.silo, *installed)
    connection = FleetConnection(options.address, tls, key, retrier)
    node = NodeLoop(connection, make_client_app(), installed, options)
    try:
        while True:
            _connect(connection, options)
            try:
                with HeartbeatThread(connection):
                    node.serve()
            except httpx.HTTPError as e:
                log.error(explain_error(e, options.address))
                time.sleep(MIN_RETRY_SECONDS)
    finally:
        retrier.is_enabled = False
        if connection.node_id:
            with suppress(httpx.HTTPError):
                connection.deactivate()
        connection.close()
        log.info("silo %s: stopped", options.silo)


def find_identity_error(app: AppIdentity, installed: AppIdentity) -> str:
    """Return why the app of a run is not the installed one, by name; empty if it is."""
    if app == installed:
        return ""
    remedy = "install the same version of uefl at coordinator and silo, and do not edit app/"
    if app[:2] == installed[:2]:
        return f"app {app.name} {app.version} has hash {app.hash[:16]}, installed is {installed.hash[:16]}; {remedy}"
    return f"app {app.name} {app.version} is not the installed {installed.name} {installed.version}; {remedy}"


def is_transient(error: httpx.HTTPError) -> bool:
    """Return whether a request may succeed later without a new activation of the node."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code in RETRIED_STATUS_CODES or GUARD_HEADER in error.response.headers
    return isinstance(error, httpx.TransportError)


def log_retry(error: httpx.HTTPError, address: str, delay: float) -> None:
    """Log why a request failed and when it is repeated."""
    log.warning("%s; next attempt in %.0f s", explain_error(error, address), delay)


def _connect(connection: FleetConnection, options: NodeOptions) -> None:
    """Activate the node, and repeat that until the coordinator admits it."""
    delays = Backoff()
    while True:
        try:
            connection.activate()
        except httpx.HTTPStatusError as e:
            log_retry(e, options.address, delay := delays.next())
            time.sleep(delay)
        else:
            log.info("silo %s: connected to %s as node %s", options.silo, options.address, connection.node_id)
            return


class HeartbeatThread:
    """Send heartbeats beside the work, until the block ends."""

    def __init__(self, connection: FleetConnection) -> None:
        self._connection, self._stop = connection, threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> HeartbeatThread:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            with suppress(httpx.HTTPError):  # the polls of the main thread report the same failure
                self._connection.send_heartbeat()


def _exit_on_signal(_number: int, _frame: object) -> None:
    raise SystemExit(0)
