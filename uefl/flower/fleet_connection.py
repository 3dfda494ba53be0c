"""The connection of a node to the Fleet API: the only module that imports modules of Flower that are not public.

Flower's own node loop sleeps 3 s between polls, starts a process per message and runs the app that the coordinator
sends. This connection transfers messages only. `uefl/flower/node.py` decides what runs.
"""

from __future__ import annotations

import hashlib
import ssl
import tomllib
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar, cast

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Error, Message
from flwr.app.message import remove_content_from_message
from flwr.cli.build import build_fab_from_disk
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, ErrorCode
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.control_pb2 import ListNodesRequest, UnregisterNodeRequest
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.proto.run_pb2 import GetRunRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.serverapp import Grid
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.error import FlowerError
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree, push_objects
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.retry import RetryInvoker
from flwr.superlink.grid.http_grid import HttpGrid
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from uefl.core.errors import InputError

FLOWER_VERSION = "1.41"  # the version whose modules this file imports
MAX_MESSAGE_BYTES = 1 << 31  # bound on what a node holds in memory for one message
MAX_MESSAGE_OBJECTS = 100_000
HEARTBEAT_SECONDS = HEARTBEAT_DEFAULT_INTERVAL * 0.6  # two may be missed before the coordinator counts a node as gone

Request = TypeVar("Request")
Response = TypeVar("Response")


class Retrier(Protocol):
    """Repeat a request until it succeeds or must not be repeated."""

    def invoke(self, send: Callable[[], httpx.Response]) -> httpx.Response: ...


class RunEndedError(Exception):
    """The run of a message is no longer running, so nothing more is sent for it."""


class AppIdentity(NamedTuple):
    """What identifies the app of a run: publisher and name, version, and the hash of its bundle."""

    name: str
    version: str
    hash: str


class Envelope(NamedTuple):
    """A message that waits at the coordinator: its metadata, and the ids of its parts."""

    header: Message
    object_tree: ObjectTree

    @property
    def run_id(self) -> int:
        return self.header.metadata.run_id


class Parcel(NamedTuple):
    """A message with its content, and the number of bytes that were transferred for it."""

    message: Message
    num_bytes: int


def require_flower_version() -> None:
    """Reject another version of Flower, because this file uses modules that change without notice."""
    installed = version("flwr")
    if installed.split(".")[:2] != FLOWER_VERSION.split("."):
        raise InputError(f"flwr {installed} is installed, but uefl needs {FLOWER_VERSION}; install its extra `flower`")


def identify_app(folder: Path) -> AppIdentity:
    """Return the identity that a run of the app in this folder has."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    name = f"{project['tool']['flwr']['app']['publisher']}/{project['project']['name']}"
    with warnings.catch_warnings(category=DeprecationWarning, action="ignore"):  # Flower's own use of pathspec
        bundle = build_fab_from_disk(folder)
    return AppIdentity(name, project["project"]["version"], hashlib.sha256(bundle).hexdigest())


def make_error_reply(message: Message, reason: str) -> Message:
    """Return a reply without content, which the coordinator records as a rejection."""
    return Message(Error(code=ErrorCode.INVALID_FAB, reason=reason), reply_to=message)


def read_flower_error(response: httpx.Response) -> str:
    """Return code and text of an error of the SuperLink, or an empty text."""
    error = FlowerError.from_json(response.text)
    return "" if error is None else f"{error.code}: {error.message}"


def find_forged_sender(target: str, body: bytes) -> str:
    """Return why a push of replies is rejected: a node sends replies in its own name only."""
    if target != "/v1/fleet/push-messages":
        return ""
    request = PushMessagesRequest.FromString(body)
    senders = {message.metadata.src_node_id for message in request.messages_list}
    return "" if senders <= {request.node.node_id} else "the reply has another node as its sender"


def unregister_key(superlink_port: int, ca: Path, key: ec.EllipticCurvePublicKey) -> bool:
    """Delete a key from the list of the SuperLink at 127.0.0.1; return whether the list had it."""
    client = ControlHttpClient(
        f"https://127.0.0.1:{superlink_port}",
        interceptors=(RuntimeVersionHttpInterceptor("flwr CLI"),),
        verify=ssl.create_default_context(cafile=str(ca)),
    )
    try:
        nodes = client.ListNodes(ListNodesRequest()).nodes_info
        node_ids = [n.node_id for n in nodes if n.public_key == public_key_to_bytes(key) and not n.unregistered_at]
        for node_id in node_ids:
            client.UnregisterNode(UnregisterNodeRequest(node_id=node_id))
    finally:
        client.close()
    return bool(node_ids)


class FleetConnection:
    """Send and receive the messages of one node. Every method raises `httpx.HTTPError` if the coordinator fails."""

    def __init__(
        self, address: str, tls: ssl.SSLContext, key: ec.EllipticCurvePrivateKey, retrier: Retrier | None = None
    ) -> None:
        self._client = FleetHttpClient(
            f"https://{address}",
            interceptors=(RuntimeVersionHttpInterceptor("SuperNode"), NodeAuthHttpInterceptor(key, key.public_key())),
            verify=tls,
            retry_invoker=cast(RetryInvoker | None, retrier),
        )
        self._public_key = public_key_to_bytes(key.public_key())
        self._node = Node()

    @property
    def node_id(self) -> int:
        return self._node.node_id

    def activate(self) -> None:
        """Tell the coordinator that this node is ready."""
        request = ActivateNodeRequest(public_key=self._public_key, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
        self._node = Node(node_id=self._client.ActivateNode(request).node_id)

    def deactivate(self) -> None:
        """Tell the coordinator that this node leaves."""
        self._client.DeactivateNode(DeactivateNodeRequest(node_id=self.node_id))

    def send_heartbeat(self) -> bool:
        """Tell the coordinator that this node is alive; return whether it is still registered."""
        request = SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
        return self._client.SendNodeHeartbeat(request).success

    def poll(self) -> Envelope | None:
        """Return the next message without its content, or nothing."""
        response = self._client.PullMessages(PullMessagesRequest(node=self._node))
        if not response.messages_list:
            return None
        return Envelope(message_from_proto(response.messages_list[0]), response.message_object_trees[0])

    def identify_run(self, run_id: int) -> AppIdentity:
        """Return the identity of a run's app. The app itself is never requested."""
        run = _call_in_run(self._client.GetRun, GetRunRequest(node=self._node, run_id=run_id)).run
        return AppIdentity(run.fab_id, run.fab_version, run.fab_hash)

    def receive(self, envelope: Envelope) -> Parcel:
        """Transfer the content of a message."""
        pull = make_pull_object_fn_protobuf(
            lambda request: _call_in_run(self._client.PullObject, request), self._node, envelope.run_id
        )
        confirm = make_confirm_message_received_fn_protobuf(
            lambda request: _call_in_run(self._client.ConfirmMessageReceived, request), self._node, envelope.run_id
        )
        return _receive_parts(envelope.object_tree, pull, confirm)

    def send(self, reply: Message, seconds: float) -> int:
        """Transfer a reply that took this time to compute; return the number of bytes."""
        reply.metadata.__dict__["_message_id"] = reply.object_id
        counter, run_id = _ByteCounter(), reply.metadata.run_id
        with no_object_id_recompute():
            request = PushMessagesRequest(
                node=self._node,
                messages_list=[message_to_proto(remove_content_from_message(reply) if reply.has_content() else reply)],
                message_object_trees=[get_object_tree(reply)],
                clientapp_runtime_list=[seconds],
            )
            response = _call_in_run(self._client.PushMessages, request)
            push = make_push_object_fn_protobuf(
                lambda request: _call_in_run(self._client.PushObject, request), self._node, run_id, response.session_id
            )
            push_objects(
                get_all_nested_objects(reply),
                lambda object_id, content: push(object_id, counter.add(content)),
                object_ids_to_push=set(response.objects_to_push),
            )
        return counter.num_bytes

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


def pull_reply(grid: Grid, message_id: str) -> list[Message]:
    """Return the reply to a message in a list that is empty until there is one.

    Flower's own method waits a second whenever a node is still uploading its reply, and its bytes have no bound.
    """
    if not isinstance(grid, HttpGrid):
        return list(grid.pull_messages([message_id]))
    client, run_id = grid._runtime_client, grid.run.run_id
    response = client.PullMessages(PullAppMessagesRequest(message_ids=[message_id]))
    pull = make_pull_object_fn_protobuf(client.PullObject, grid.node, run_id)
    confirm = make_confirm_message_received_fn_protobuf(client.ConfirmMessageReceived, grid.node, run_id)
    return [_receive_parts(tree, pull, confirm).message for tree in response.message_object_trees]


def _receive_parts(tree: ObjectTree, pull: Callable[[str], bytes], confirm: Callable[[str], None]) -> Parcel:
    """Transfer the parts of a message, of which both number and bytes are bounded."""
    counter = _ByteCounter()
    if sum(1 for _ in iterate_object_tree(tree)) > MAX_MESSAGE_OBJECTS:
        raise InputError(f"the message has more than {MAX_MESSAGE_OBJECTS} parts")
    message = pull_and_inflate_object_from_tree(
        tree,
        lambda object_id: counter.add(pull(object_id)),
        confirm,
        return_type=Message,
        initial_backoff=0.05,
        backoff_cap=1,
        max_time=600,
    )
    message.metadata.__dict__["_message_id"] = tree.object_id  # the content does not contain it
    return Parcel(message, counter.num_bytes)


class _ByteCounter:
    """Count the bytes of a message, and stop at the bound."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def add(self, content: bytes) -> bytes:
        self.num_bytes += len(content)
        if self.num_bytes > MAX_MESSAGE_BYTES:
            raise InputError(f"the message has more than {MAX_MESSAGE_BYTES} bytes")
        return content


def _call_in_run(call: Callable[[Request], Response], request: Request) -> Response:
    """Call the coordinator; an ended run is an error of its own, because nothing needs a remedy."""
    try:
        return call(request)
    except httpx.HTTPStatusError as e:
        if e.response.status_code == httpx.codes.FORBIDDEN and read_flower_error(e.response):
            raise RunEndedError("the run has ended") from e
        raise
