"""The engine whose clients are reached over Flower: `fit` and `query` send one message to each silo."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from uefl.core.errors import InputError, ResumableError
from uefl.core.federation import (
    Broadcast,
    Method,
    Reply,
    Split,
    Tensors,
    find_row,
    gather_accessible_rows,
    size_in_bytes,
)
from uefl.experiment.settings import to_dict
from uefl.flower.poll_delay import PollDelay
from uefl.flower.reply_reader import IdentityMismatch, ReplyReader, ReplyRequest
from uefl.flower.silo_registry import SiloInfo, SiloRegistry
from uefl.flower.wire import cast_to_half, make_message

if TYPE_CHECKING:
    from flwr.app import Message

ACCEPTED_ROUND = "accepted_round"  # key in `client_states` and in messages: the last round whose client state counts
Payload = dict[str, Any]

# Seconds by which a message outlives its timeout: Flower answers an expired one with an error, as for a failed node.
EXPIRY_MARGIN = 5.0


class FlowerEngine:
    """Clients behind a Flower grid: in this process, simulated on Ray, or deployed.

    `client_states` is part of the checkpoint, as in every engine. Client state itself stays at the silos, so
    `client_states` holds only the number of the last accepted round.
    """

    def __init__(
        self,
        registry: SiloRegistry,
        net: nn.Module,
        *,
        silo_infos: Sequence[SiloInfo],
        run_id: str,
        seed: int,
        class_names: Sequence[str],
        image_shape: Sequence[int],
        table: str = "",
        dtype: torch.dtype = torch.float32,
        half_precision: bool = False,
        on_progress: Callable[[str, str], None] = lambda _silo, _activity: None,
    ) -> None:
        self.registry, self.seed, self.half_precision, self.on_progress = registry, seed, half_precision, on_progress
        self.net, self.device = net.to(dtype), torch.device("cpu")
        self.client_states: dict[str, Tensors] = {}
        self._silo_infos = {info.name: info for info in sorted(silo_infos)}
        self._num_registered = {info.name: info.num_examples for info in silo_infos}
        self.image_shape, self.class_names, self.table = tuple(image_shape), tuple(class_names), table
        self._run_payload = {
            "run_id": run_id,
            "image_shape": list(image_shape),
            "classes": list(class_names),
            "half_precision": half_precision,
            **({"table": table} if table else {}),
        }
        self._slowest_reply = 0.0  # seconds from sending to the arrival of a reply
        self._reader = ReplyReader(net, tuple(image_shape), dtype=dtype, half_precision=half_precision)

    @property
    def silo_infos(self) -> list[SiloInfo]:
        """The silos of this run, with their present numbers of examples."""
        return list(self._silo_infos.values())

    @property
    def num_examples(self) -> Mapping[str, int]:
        return {name: info.num_examples for name, info in self._silo_infos.items()}

    @property
    def domains(self) -> Mapping[str, str]:
        return {name: info.domain for name, info in self._silo_infos.items()}

    def get_personal_tensors(self, method: Method, broadcast: Broadcast) -> dict[str, Tensors]:
        """Return nothing: what belongs to a silo stays there, and the silo writes its own model."""
        del method, broadcast
        return {}

    def initial_model_state(self) -> Tensors:
        return {name: t.clone() for name, t in self.net.state_dict().items()}

    def fit(self, method: Method, broadcast: Broadcast, *, evaluate: bool = True) -> Iterator[Reply]:
        personal_entry = {"is_personal": True} if broadcast.is_personal else {}
        results = self._exchange_messages(method, broadcast, {"evaluate": evaluate, **personal_entry})
        for reply, has_client_state in results:
            if not reply.rejected:
                info = self._silo_infos[reply.silo_name]
                self._silo_infos[reply.silo_name] = info._replace(num_examples=reply.num_examples)
            if has_client_state:
                self.client_states[reply.silo_name] = {ACCEPTED_ROUND: torch.tensor(broadcast.round)}
        yield from (reply for reply, _ in results)

    def query(self, method: Method, task: str, broadcast: Broadcast, splits: Sequence[Split]) -> Iterator[Reply]:
        results = self._exchange_messages(method, broadcast, {"task": task, "splits": list(splits)})
        yield from (reply for reply, _ in results)

    def _exchange_messages(self, method: Method, broadcast: Broadcast, payload: Payload) -> list[tuple[Reply, bool]]:
        """Send one message per participant, and repeat failed ones until the quorum is met; sort replies by silo."""
        if to_dict(method) != self.registry.experiment["method"]:
            raise InputError("the method differs from the one in the experiment, which the silos would run")
        policy, num_participants = self.registry.policy, len(broadcast.participants)
        quorum = policy.compute_quorum(len(self._silo_infos))
        # A query to some of the silos, such as for their centroids, may remain unanswered: nothing is averaged over it.
        is_partial_query = "splits" in payload and num_participants < len(self._silo_infos)
        quorum = 0 if is_partial_query or num_participants < quorum else quorum
        results: dict[str, tuple[Reply, bool]] = {}

        def count_valid() -> int:
            return sum(not reply.rejected for reply, _ in results.values())

        def has_quorum() -> bool:  # of a query to a few silos, more than half of them
            return count_valid() >= (quorum or policy.compute_quorum(num_participants))

        for _ in range(1 + policy.retries):
            open_names = [n for n in sorted(broadcast.participants) if n not in results or results[n][0].rejected]
            replies = self._send_and_collect(broadcast, payload, open_names, has_quorum, is_required=quorum > 0)
            for name, message in replies:
                results[name] = self._read_reply(message, method, narrow_broadcast(broadcast, name), payload)
            if count_valid() >= quorum:
                return [results[name] for name in sorted(results)]
        reasons = "; ".join(f"{n}: {reply.rejected}" for n, (reply, _) in sorted(results.items()) if reply.rejected)
        raise ResumableError(
            f"round {broadcast.round}: {count_valid()} of {num_participants} silos sent a valid reply in "
            f"{1 + policy.retries} attempts; {quorum} are required ({reasons}); run the same command again to resume"
        )

    def _send_and_collect(
        self,
        broadcast: Broadcast,
        payload: Payload,
        silo_names: Sequence[str],
        has_quorum: Callable[[], bool],
        *,
        is_required: bool,
    ) -> Iterator[tuple[str, Message | str]]:
        """Send the messages, and yield for each silo its reply, or the reason why none arrived in time."""
        grid = self.registry.grid
        node_ids, waiting = self.registry.find_nodes(silo_names), dict[str, str]()
        for name in silo_names:
            if name in node_ids:
                message = self._make_message(narrow_broadcast(broadcast, name), payload, node_ids[name])
                message_ids = [message_id for message_id in grid.push_messages([message]) if message_id]
            else:
                message_ids = []
            if message_ids:
                waiting[message_ids[0]] = name
                self.on_progress(name, payload.get("task", "training"))
            else:
                yield name, "missing: the node is not connected"
        yield from self._collect_replies(waiting, has_quorum, is_required=is_required)

    def _collect_replies(
        self, waiting: dict[str, str], has_quorum: Callable[[], bool], *, is_required: bool
    ) -> Iterator[tuple[str, Message | str]]:
        """Yield replies to messages (silo names by message id) until the timeout, or the grace after the quorum."""
        policy, started, quorum_time = self.registry.policy, time.monotonic(), math.inf
        timeout, delay = self._compute_timeout(is_required=is_required), PollDelay(policy.poll_interval)
        while waiting:
            for message_id, reply in self.registry.puller.pull_replies(list(waiting)):
                name = waiting.pop(message_id)
                self._slowest_reply = max(self._slowest_reply, time.monotonic() - started)
                self.on_progress(name, "replied")
                yield name, reply
            now = time.monotonic()
            quorum_time = min(quorum_time, now) if has_quorum() else math.inf
            if now >= min(started + timeout, quorum_time + policy.grace):
                break
            if waiting:
                delay.wait()
        limit = f"{timeout:.3g} s"
        if quorum_time + policy.grace < started + timeout:
            limit = f"{policy.grace:g} s after the quorum was met"
        for name in waiting.values():
            yield name, f"missing: no reply within {limit}"

    def _compute_timeout(self, *, is_required: bool) -> float:
        """Return how long replies are awaited; those that a run can do without, not much longer than earlier ones."""
        policy = self.registry.policy
        if is_required or not self._slowest_reply:
            return policy.reply_timeout
        return min(policy.reply_timeout, 2 * self._slowest_reply + policy.grace)

    def _make_message(self, broadcast: Broadcast, payload: Payload, node_id: int) -> Message:
        (name,) = broadcast.silo_names
        accepted_round = int(self.client_states[name][ACCEPTED_ROUND]) if name in self.client_states else 0
        silo_payload = {"silo": name, "round": broadcast.round, "lr": broadcast.lr, ACCEPTED_ROUND: accepted_round}
        return make_message(
            {**silo_payload, **self._run_payload, **payload, "experiment": self.registry.experiment},
            node_id,
            "evaluate" if "task" in payload else "train",
            ttl=self.registry.policy.reply_timeout + EXPIRY_MARGIN,
            model_state=self._compress(broadcast.model_state),
            extras=self._compress(broadcast.extras),
        )

    def _compress(self, tensors: Tensors) -> Tensors:
        return cast_to_half(tensors) if self.half_precision else tensors

    def _read_reply(
        self, message: Message | str, method: Method, broadcast: Broadcast, payload: Payload
    ) -> tuple[Reply, bool]:
        """Return the checked reply and whether the silo stored client state; `rejected` holds what is wrong."""
        (name,) = broadcast.silo_names
        if isinstance(message, str):
            return Reply(name, self._silo_infos[name].num_examples, rejected=message), False
        received_bytes = sum(size_in_bytes(self._compress(t)) for t in (broadcast.model_state, broadcast.extras))
        try:
            reply, has_client_state = self._reader.read_reply(
                message, method, broadcast, self._make_request(name, method, payload)
            )
        except InputError as e:
            if isinstance(e, IdentityMismatch):
                self.registry.forget_node(name)
            num_examples = self._silo_infos[name].num_examples
            return Reply(name, num_examples, received_bytes=received_bytes, rejected=str(e)), False
        note = self._describe_data_change(reply)
        return reply._replace(received_bytes=received_bytes, note=note), has_client_state

    def _describe_data_change(self, reply: Reply) -> str:
        """Return the note of a reply, with the change of its number of examples since the last round."""
        before = self._silo_infos[reply.silo_name].num_examples
        change = f"training examples changed from {before} to {reply.num_examples}"
        return "; ".join(filter(None, (reply.note, change if reply.num_examples != before else "")))

    def _make_request(self, name: str, method: Method, payload: Payload) -> ReplyRequest:
        num_registered = self._num_registered[name]
        max_examples = self.registry.policy.compute_max_examples(num_registered)
        if "task" in payload:
            return ReplyRequest(num_registered, max_examples, payload["task"], payload["splits"])
        splits, local_splits = (method.eval_splits, method.local_eval_splits) if payload["evaluate"] else ((), ())
        return ReplyRequest(num_registered, max_examples, "", splits, local_splits)


def narrow_broadcast(broadcast: Broadcast, silo_name: str) -> Broadcast:
    """Return what one silo receives: shared weights, and of the codewords only its own rows."""
    access_row = broadcast.access[find_row(broadcast.silo_names, silo_name)]
    return broadcast._replace(
        model_state=gather_accessible_rows(broadcast.model_state, access_row),
        silo_names=(silo_name,),
        access=torch.ones(1, int(access_row.sum()), dtype=torch.bool),
        participants=(silo_name,),
    )
