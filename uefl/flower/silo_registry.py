"""Find silos by name. Node ids change at every start of a node; a silo is identified by the name that it reports.

A node that was registered with a name and a key can report only that name, and the name stays bound to that key.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol, get_args

from flwr.app import Message
from flwr.serverapp import Grid

from uefl.core.errors import InputError, ResumableError, unknown_value_error
from uefl.core.field_rules import check_ranges, setting
from uefl.core.untrusted_text import is_plain_text
from uefl.data.table_format import ColumnSums, TableFormat, parse_sums
from uefl.flower.pull_replies import ReplyPuller
from uefl.flower.wire import make_message, read_reply_payload, reject_unreadable

MAX_NAME_LENGTH = 200  # characters of a silo, domain or class
MAX_PIXELS = 2**28  # numbers of one image
DataChanges = Literal["accept", "freeze"]
MAX_DATA_GROWTH = 2  # a silo may report this multiple of the examples it registered
MAX_EXAMPLES = 2**40  # a silo that reports more is rejected
SiloListener = Callable[[str, str], None]  # receives a silo's name ("" for a rejected node) and what happens


@dataclass(frozen=True, kw_only=True)
class RoundPolicy:
    """How long the server waits for silos, and how many valid replies a round requires."""

    connect_timeout: float = setting(120.0, "Seconds until all silos must be connected.", at_least=0)
    reply_timeout: float = setting(
        3600.0, "Seconds until a reply must arrive, and the lifetime of a message.", at_least=0
    )
    grace: float = setting(60.0, "Seconds that a round waits for further replies after the quorum is met.", at_least=0)
    quorum: int = setting(
        0, "Minimum number of valid replies per round; 0 means more than half of the silos.", at_least=0
    )
    retries: int = setting(2, "Number of further attempts at failed silos while the quorum is not met.", at_least=0)
    data_changes: DataChanges = setting(
        "accept", "Whether a silo may take part after the number of its training examples has changed."
    )
    poll_interval: float = setting(0.1, "Seconds between two requests to the grid.", at_least=0)

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.data_changes not in get_args(DataChanges):
            raise unknown_value_error("data_changes", self.data_changes, get_args(DataChanges))

    def compute_max_examples(self, num_registered: int) -> int:
        """Return the most training examples that a silo may report after it registered this number."""
        return num_registered * (MAX_DATA_GROWTH if self.data_changes == "accept" else 1)

    def compute_quorum(self, num_silos: int) -> int:
        """Return the number of valid replies required of this number of silos."""
        return min(self.quorum or num_silos // 2 + 1, num_silos)


class SiloInfo(NamedTuple):
    """What a silo reports of itself when it registers."""

    name: str
    domain: str
    num_examples: int
    image_shape: tuple[int, ...]
    classes: tuple[str, ...]
    key: str = ""  # hash of the public key that the name is bound to; empty without authentication
    table: str = ""  # of a table: its format before scaling, as JSON
    column_sums: ColumnSums | None = None  # of a table: sums over the silo's training rows


class RegisteredNode(Protocol):
    """What Flower reports of a node."""

    @property
    def node_id(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def public_key(self) -> bytes: ...


class NodeIdentity(NamedTuple):
    """Name and key with which the coordinator's operator registered a node; empty without authentication."""

    name: str = ""
    key: str = ""


class SiloRegistry:
    """Silos by name, with the node at which each is connected."""

    def __init__(
        self,
        grid: Grid,
        experiment: Mapping[str, Any],
        policy: RoundPolicy,
        on_silo_event: SiloListener = lambda _silo, _activity: None,
    ) -> None:
        self.grid, self.experiment, self.policy, self.on_silo_event = grid, dict(experiment), policy, on_silo_event
        self.puller, self._query_puller = ReplyPuller(grid), ReplyPuller(grid)
        self.silo_infos: dict[str, SiloInfo] = {}
        self.node_ids: dict[str, int] = {}  # by silo name
        self.rejected_nodes: dict[int, str] = {}  # reasons, by node id
        self._announced: dict[int, str] = {}  # last reason that the listener received, by node id
        self._pending_queries: dict[str, int] = {}  # node ids, by message id
        self._identities: dict[int, NodeIdentity] = {}  # by node id

    def wait_for_silos(self, num_silos: int, known_silos: Sequence[SiloInfo] = ()) -> list[SiloInfo]:
        """Wait for a number of silos, or for those of a resumed run; after the timeout a quorum is enough."""
        self.silo_infos = {info.name: info for info in known_silos}
        expected_names, num_silos = set(self.silo_infos), len(known_silos) or num_silos

        def list_connected() -> list[str]:
            return sorted(name for name in self.node_ids if name in expected_names or not expected_names)

        self._poll_until(lambda: len(list_connected()) + len(self.rejected_nodes) >= num_silos)
        connected, quorum = list_connected(), self.policy.compute_quorum(num_silos)
        if len(connected) < max(quorum, 1):
            reasons = "".join(f"; {reason}" for reason in self.rejected_nodes.values())
            raise ResumableError(
                f"only {len(connected)} of {num_silos} silos connected within {self.policy.connect_timeout:.0f} s; "
                f"{quorum} are required{reasons}"
            )
        return [self.silo_infos[name] for name in (sorted(expected_names) or connected)]

    def find_nodes(self, silo_names: Sequence[str]) -> dict[str, int]:
        """Return the nodes of those silos that are connected; wait only while they are fewer than the quorum."""
        for node_id in self.rejected_nodes:  # the reason may be gone: its folder may be readable by now
            self._query_node(node_id)
        self.rejected_nodes.clear()
        quorum = self.policy.compute_quorum(len(silo_names))
        self._poll_until(lambda: sum(name in self.node_ids for name in silo_names) >= quorum)
        return {name: self.node_ids[name] for name in silo_names if name in self.node_ids}

    def forget_node(self, silo_name: str) -> None:
        """Remove a silo's node, so that the node must register again before the next message."""
        self.node_ids.pop(silo_name, None)

    def _poll_until(self, is_done: Callable[[], bool]) -> None:
        end = time.monotonic() + self.policy.connect_timeout
        while True:
            self._refresh_nodes()
            if is_done() or time.monotonic() > end:
                return
            time.sleep(self.policy.poll_interval)

    def _refresh_nodes(self) -> None:
        """Query new nodes, remove disconnected ones, and register those whose replies arrived."""
        self._identities = {node.node_id: identify_node(node) for node in self.grid.get_nodes()}
        connected = set(self._identities)
        self.node_ids = {name: node for name, node in self.node_ids.items() if node in connected}
        self._pending_queries = {query: node for query, node in self._pending_queries.items() if node in connected}
        self.rejected_nodes = {node: reason for node, reason in self.rejected_nodes.items() if node in connected}
        for node_id in connected - {*self.node_ids.values(), *self._pending_queries.values(), *self.rejected_nodes}:
            self._query_node(node_id)
        for message_id, reply in self._query_puller.pull_replies(list(self._pending_queries)):
            self._register_reply(self._pending_queries.pop(message_id), reply)

    def _query_node(self, node_id: int) -> None:
        message = make_message({"experiment": self.experiment}, node_id, "query", ttl=self.policy.connect_timeout)
        for message_id in self.grid.push_messages([message]):
            if message_id:
                self._pending_queries[message_id] = node_id

    def _register_reply(self, node_id: int, reply: Message | str) -> None:
        try:
            with reject_unreadable():
                info = self._bind_key(parse_silo_info(reply), self._identities.get(node_id, NodeIdentity()))
                if info.name in self.node_ids:
                    raise InputError(f"silo name {info.name} is already used by another node")
        except InputError as e:
            self.rejected_nodes[node_id] = str(e)
            if self._announced.get(node_id) != str(e):  # a rejected node is asked again in every round
                self.on_silo_event("", str(e))
            self._announced[node_id] = str(e)
            return
        first = self.silo_infos.get(info.name, info)  # a silo that reconnects keeps its first registration
        self.silo_infos[info.name] = first._replace(key=info.key)
        self.node_ids[info.name] = node_id
        self.on_silo_event(info.name, "connected")

    def _bind_key(self, info: SiloInfo, identity: NodeIdentity) -> SiloInfo:
        """Return the silo with the key of its node; raise an `InputError` if name and key belong to other silos."""
        if identity.name and identity.name != info.name:
            raise InputError(
                f"the node that is registered as silo {identity.name} presents itself as silo {info.name}; "
                'correct silo="…" in its node configuration'
            )
        bound_key = self.silo_infos[info.name].key if info.name in self.silo_infos else ""
        if bound_key and bound_key != identity.key:
            raise InputError(
                f"a node presents itself as silo {info.name}, but its key is {identity.key or 'not registered'} and "
                f"this silo is bound to key {bound_key}"
            )
        return info._replace(key=identity.key)


def identify_node(node: RegisteredNode) -> NodeIdentity:
    """Return name and key of a node. Without a registered name, as in simulations, keys change at every start."""
    if not node.name:
        return NodeIdentity()
    return NodeIdentity(node.name, hashlib.sha256(node.public_key).hexdigest()[:16])


def parse_silo_info(reply: Message | str) -> SiloInfo:
    """Return what a silo reports of itself; every value is bounded, because networks and records are built from it."""
    if isinstance(reply, str):
        raise InputError(f"a node sent no silo information: {reply}")
    payload = read_reply_payload(reply)
    if payload.get("rejected"):
        raise InputError(f"silo {payload.get('silo') or '?'} cannot take part: {payload['rejected']}")
    try:
        image_shape, classes = tuple(map(int, payload["image_shape"])), tuple(map(str, payload["classes"]))
        name, domain, num_examples = str(payload["silo"]), str(payload["domain"]), int(payload["num_examples"])
    except (KeyError, TypeError, ValueError, OverflowError) as e:
        raise InputError(f"a node sent incomplete silo information: {e}") from e
    if not name:
        raise InputError("a node sent incomplete silo information: no silo name")
    for text in (name, domain, *classes):
        if not is_plain_text(text, MAX_NAME_LENGTH):
            raise InputError(f"silo {name} sent a name that is too long or has unusual characters: {text[:200]}")
    if not classes or len(set(classes)) < len(classes):
        raise InputError(f"silo {name} has no classes, or two of the same name")
    if not 1 <= len(image_shape) <= 4 or min(image_shape) < 1 or math.prod(image_shape) > MAX_PIXELS:
        raise InputError(f"silo {name} reported an invalid shape of images: {image_shape}")
    if not 0 <= num_examples < MAX_EXAMPLES:
        raise InputError(f"silo {name} reported an invalid number of examples: {num_examples}")
    info = SiloInfo(name, domain, num_examples, image_shape, classes)
    return _parse_table(info, payload) if payload.get("table") else info


def _parse_table(info: SiloInfo, payload: Mapping[str, Any]) -> SiloInfo:
    """Return the silo with the format and the sums of its table."""
    table = TableFormat.from_json(str(payload["table"]))
    for word in (word for column in table.columns for word in (column.name, *column.levels, *column.missing)):
        if not is_plain_text(word, MAX_NAME_LENGTH):
            raise InputError(f"silo {info.name} has a column or level that is too long or has unusual characters")
    if info.image_shape != (len(table.columns),):
        raise InputError(f"silo {info.name} has a table of {len(table.columns)} columns, not {info.image_shape}")
    sums = parse_sums(payload.get("column_sums"), len(table.columns))
    if sums.num_rows != info.num_examples:
        raise InputError(f"silo {info.name} sent sums of {sums.num_rows} rows, but has {info.num_examples}")
    return info._replace(table=replace(table, classes=()).to_json(), column_sums=sums)
