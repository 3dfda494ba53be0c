"""The client app of a silo: it rebuilds the method from name and settings, and runs the serial engine on local data.

A message names the work; the code is installed at the silo. The silo rejects unknown names with one line, which the
server shows beside the silo's name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from uefl.core.errors import InputError, unknown_value_error
from uefl.core.federation import Broadcast, Reply, Tensors, is_codeword_tensor
from uefl.core.paths import get_cache_folder
from uefl.engines.serial import SerialEngine
from uefl.experiment.experiment import DTYPES, Experiment
from uefl.flower.client_state import ClientStateStore
from uefl.flower.node_data import NodeData, NodeDataLoader, align_labels, load_node_data
from uefl.flower.wire import (
    cast_from_half,
    cast_to_half,
    check_versions,
    flatten_answers,
    pack_content,
    read_payload,
    read_tensors,
)

log = logging.getLogger("uefl")


class Request(NamedTuple):
    """One message at one silo, with the data, state folder and device that the node itself configures."""

    message: Message
    payload: dict[str, Any]
    experiment: Experiment
    node_data: NodeData
    state_folder: Path
    device: str


def make_client_app(load_data: NodeDataLoader = load_node_data, state_folder: Path | None = None) -> ClientApp:
    """Return the app of a node. `state_folder` is used if the node configuration has no `state_path`."""
    app = ClientApp()

    def make_handler(handle: Callable[[Request], RecordDict]) -> Callable[[Message, Context], Message]:
        def reply_to(message: Message, context: Context) -> Message:
            node_config = context.node_config
            silo_name = str(node_config.get("silo", ""))
            try:
                payload = read_payload(message)
                check_versions(payload, "the coordinator", "this silo")
                experiment = Experiment.from_config(payload.get("experiment", {}))
                node_data = load_data(experiment, node_config)
                silo_name = node_data.silo.name
                folder = Path(str(node_config.get("state_path", state_folder or get_cache_folder() / "state")))
                device = str(node_config.get("device", "cpu"))
                content = handle(Request(message, payload, experiment, node_data, folder, device))
            except Exception as e:  # the server receives one line; the silo's log has the traceback
                log.exception("silo %s rejected a message", silo_name or "?")
                content = pack_content({"silo": silo_name, "rejected": _format_error(e)})
            return Message(content, reply_to=message)

        return reply_to

    app.query()(make_handler(handle_registration))
    app.train()(make_handler(handle_fit))
    app.evaluate()(make_handler(handle_query))
    return app


def handle_registration(request: Request) -> RecordDict:
    """Return the silo's name, domain, counts and class names; no data."""
    silo, classes = request.node_data
    image_shape = list(silo.test.x.shape[1:])
    payload = {"silo": silo.name, "domain": silo.domain, "num_examples": len(silo.train.y)}
    return pack_content({**payload, "image_shape": image_shape, "classes": list(classes)})


def handle_fit(request: Request) -> RecordDict:
    """Evaluate and train the received model, and store the method's client state."""
    payload = request.payload
    engine, broadcast, store, note = _prepare_engine(request, payload)
    (reply,) = engine.fit(request.experiment.method, broadcast, evaluate=bool(payload["evaluate"]))
    client_state = engine.client_states[reply.silo_name]
    if client_state:
        store.write(client_state, broadcast.round, int(payload["accepted_round"]))
    return _make_reply(reply, payload, note, has_client_state=bool(client_state))


def handle_query(request: Request) -> RecordDict:
    """Run one of the method's client tasks."""
    payload, method = request.payload, request.experiment.method
    task = str(payload["task"])
    if task not in method.client_tasks:
        raise unknown_value_error(f"task of {request.experiment.method_name}", task, method.client_tasks)
    engine, broadcast, _, note = _prepare_engine(request, payload)
    (reply,) = engine.query(method, task, broadcast, payload["splits"])
    return _make_reply(reply, payload, note)


def _prepare_engine(request: Request, payload: dict[str, Any]) -> tuple[SerialEngine, Broadcast, ClientStateStore, str]:
    """Return a serial engine with this silo and its client state, the broadcast, the state's store and a note."""
    experiment, name = request.experiment, request.node_data.silo.name
    if payload["silo"] != name:
        raise InputError(f"the message is addressed to silo {payload['silo']}, but this node is silo {name}")
    silo = align_labels(request.node_data, tuple(payload["classes"]))
    image_shape, local_shape = tuple(payload["image_shape"]), tuple(silo.test.x.shape[1:])
    if local_shape != image_shape:
        raise InputError(
            f"this silo's images have shape {local_shape}, but the federation uses {image_shape}; set data.image_size"
        )
    net = experiment.build_network(image_shape, len(payload["classes"]))
    engine = SerialEngine([silo], net, seed=experiment.seed, dtype=DTYPES[experiment.precision], device=request.device)
    store = ClientStateStore(request.state_folder, str(payload["run_id"]), name)
    client_state, note = store.read(int(payload["accepted_round"]))
    engine.client_states[name] = _move_to_device(client_state, engine)
    model_state, extras = (
        _move_to_device(cast_from_half(read_tensors(request.message, record), engine.dtype), engine)
        for record in ("model_state", "extras")
    )
    num_codewords = next((len(t) for n, t in model_state.items() if is_codeword_tensor(n)), 0)
    access = torch.ones(1, num_codewords, dtype=torch.bool)  # a silo receives only codewords it may use
    broadcast = Broadcast(int(payload["round"]), model_state, (name,), access, extras, (name,), float(payload["lr"]))
    return engine, broadcast, store, note


def _move_to_device(tensors: Tensors, engine: SerialEngine) -> Tensors:
    return {n: t.to(engine.device) for n, t in tensors.items()}


def _make_reply(reply: Reply, payload: dict[str, Any], note: str, *, has_client_state: bool = False) -> RecordDict:
    reply_payload = {
        "silo": reply.silo_name,
        "num_examples": reply.num_examples,
        "seconds": reply.seconds,
        "note": note,
        "has_client_state": has_client_state,
    }
    compress = cast_to_half if payload["half_precision"] else dict
    sums = {"answers": reply.answers, "received": reply.evaluations.received, "local": reply.evaluations.local}
    return pack_content(
        reply_payload,
        tensors=compress(reply.tensors),
        extras=compress(reply.extras),
        **{record: flatten_answers(by_split) for record, by_split in sums.items()},
    )


def _format_error(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, InputError) else f"{type(error).__name__}: {text}"
