"""A Flower grid inside this process: the same messages and client app as elsewhere, without Ray or a network."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any
from uuid import uuid4

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

CLIENT_APP_RAISED = 2


class InProcessGrid(Grid):
    """Nodes with their own configuration that reply at once. Tests inspect `sent_messages` and set `tamper`."""

    def __init__(self, app: ClientApp, nodes: Mapping[int, Mapping[str, Any]]) -> None:
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
        self.app, self.nodes = app, {node_id: dict(config) for node_id, config in nodes.items()}
        self.registrations: dict[int, tuple[str, bytes]] = {}
        self.sent_messages: list[Message] = []
        self.tamper: Callable[[Message, Message], Message | None] = lambda _message, reply: reply  # None: no reply
        self._replies: dict[str, Message] = {}

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def get_nodes(self) -> Iterable[NodeInfo]:
        """Return nodes; those in `registrations` have a registered name and key, as in a deployment."""
        names_and_keys = {node_id: self.registrations.get(node_id, ("", b"random")) for node_id in self.nodes}
        return [NodeInfo(node_id=node_id, name=name, public_key=key) for node_id, (name, key) in names_and_keys.items()]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        message_ids = []
        for message in messages:
            message_id = str(uuid4())
            message.metadata.__dict__["_message_id"] = message_id
            self.sent_messages.append(message)
            reply = self.tamper(message, self._run_client_app(message))
            if reply is not None:
                self._replies[message_id] = reply
            message_ids.append(message_id)
        return message_ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._replies.pop(message_id) for message_id in message_ids if message_id in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        del timeout
        return self.pull_messages(self.push_messages(messages))

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def set_run(self, run: Run) -> None:
        self._run = run

    @property
    def run(self) -> Run:
        return self._run

    def _run_client_app(self, message: Message) -> Message:
        node_id = message.metadata.dst_node_id
        config = self.nodes[node_id]
        context = Context(run_id=1, node_id=node_id, node_config=config, state=RecordDict(), run_config={})
        try:
            return self.app(message, context)
        except Exception as e:
            return Message(Error(CLIENT_APP_RAISED, repr(e)), reply_to=message)
