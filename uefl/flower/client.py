"""The client app of a silo: it rebuilds the method from name and settings, and runs the serial engine on local data.

A message names the work; the code is installed at the silo. The silo rejects unknown names with one line, which the
server shows beside the silo's name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from safetensors import SafetensorError

from uefl import __version__
from uefl.core.errors import unknown_value_error
from uefl.core.federation import Broadcast, Reply, Silo, Tensors, is_codeword_tensor
from uefl.core.metrics import compute_metrics
from uefl.core.paths import get_cache_folder
from uefl.core.untrusted_text import escape_text
from uefl.data.input_format import describe_source
from uefl.data.table_format import compute_sums
from uefl.engines.serial import SerialEngine
from uefl.experiment.experiment import DTYPES, RESULTS_VERSION, Experiment
from uefl.experiment.held_out import collect_held_out
from uefl.experiment.run_folder import RESULTS_VERSION_KEY
from uefl.experiment.silo_models import Description, SiloModels, collect_facts, count_labels
from uefl.flower.client_audit import AuditEntry, append_audit_entry
from uefl.flower.client_state import ClientStateStore
from uefl.flower.join_client import JOIN_TASK, handle_join
from uefl.flower.node_data import NodeConfig, NodeData, NodeDataLoader, fit_to_federation, load_node_data
from uefl.flower.silo_errors import describe_error
from uefl.flower.wire import (
    cast_from_half,
    cast_to_half,
    check_versions,
    count_bytes,
    flatten_answers,
    pack_content,
    read_payload,
    read_tensors,
)

log = logging.getLogger("uefl")


class Request(NamedTuple):
    """One message at one silo, with the state folder and device that the node itself configures."""

    payload: dict[str, Any]
    experiment: Experiment
    model_state: Tensors
    extras: Tensors
    state_folder: Path
    device: str


RequestScreen = Callable[[Request], None]
"""A rule of the silo: it raises an `InputError` for a request that the silo does not allow, before data are read."""
Handler = Callable[[Request, NodeData], RecordDict]


def make_client_app(
    load_data: NodeDataLoader = load_node_data,
    state_folder: Path | None = None,
    screens: Sequence[RequestScreen] = (),
) -> ClientApp:
    """Return the app of a node. `state_folder` is used if the node configuration has no `state_path`."""
    app, handlers = ClientApp(), {"registration": handle_registration, "training": handle_fit, "": handle_query}

    def make_message_handler(task: str) -> Callable[[Message, Context], Message]:
        def reply_to(message: Message, context: Context) -> Message:
            client = SiloClient(context.node_config, load_data, state_folder, screens)
            return Message(client.handle_message(message, task, handlers[task]), reply_to=message)

        return reply_to

    app.query()(make_message_handler("registration"))
    app.train()(make_message_handler("training"))
    app.evaluate()(make_message_handler(""))
    return app


class SiloClient:
    """The client of a silo: it checks a message, handles it, and writes one line about it to the audit log."""

    def __init__(
        self,
        node_config: NodeConfig,
        load_data: NodeDataLoader,
        state_folder: Path | None,
        screens: Sequence[RequestScreen],
    ) -> None:
        self.node_config, self.load_data, self.screens = node_config, load_data, screens
        self.state_folder = Path(str(node_config.get("state_path", state_folder or get_cache_folder() / "state")))
        self.silo_name = str(node_config.get("silo", ""))

    def handle_message(self, message: Message, task: str, handle: Handler) -> RecordDict:
        """Return the content of the reply: a result, or one line that gives the reason of a rejection."""
        entry = AuditEntry(task=task, silo=self.silo_name)
        try:
            content = self._handle_request(self._read_request(message, entry), handle)
            entry.accepted = True
        except Exception as e:  # the server receives one line; the silo's log has the traceback
            content = self._reject(e, entry)
        try:
            entry.silo, entry.bytes_out = self.silo_name, count_bytes(content)
            append_audit_entry(self.state_folder, entry)
        except OSError as e:  # nothing leaves a silo without a line in its audit log
            content = self._reject(e, entry)
        return content

    def _read_request(self, message: Message, entry: AuditEntry) -> Request:
        entry.bytes_in = count_bytes(message.content)
        payload = read_payload(message)
        entry.task = entry.task or escape_text(payload.get("task", ""), 100)
        entry.describe_settings(payload)
        check_versions(payload, "the coordinator", "this silo")
        experiment = Experiment.from_config(payload.get("experiment", {}))
        model_state, extras = (read_tensors(message, record) for record in ("model_state", "extras"))
        entry.num_codewords = count_received_codewords(model_state)
        entry.requested_codewords = int(extras["num_codewords"]) if "num_codewords" in extras else 0
        device = str(self.node_config.get("device", "cpu"))
        return Request(payload, experiment, model_state, extras, self.state_folder, device)

    def _handle_request(self, request: Request, handle: Handler) -> RecordDict:
        for screen in self.screens:
            screen(request)
        node_data = self.load_data(request.experiment, self.node_config)
        self.silo_name = node_data.silo.name
        return handle(request, node_data)

    def _reject(self, error: Exception, entry: AuditEntry) -> RecordDict:
        log.error("silo %s rejected a message", self.silo_name or "?", exc_info=error)
        entry.accepted, entry.reason = False, escape_text(f"{type(error).__name__}: {error}")
        data_path = Path(str(self.node_config.get("data_path", "")))
        reason = describe_error(error, (data_path, self.state_folder, get_cache_folder()))
        return pack_content({"silo": self.silo_name, "rejected": reason})


def handle_registration(request: Request, node_data: NodeData) -> RecordDict:
    """Return the silo's name, domain, counts and class names, and sums of a table's columns; no data."""
    del request
    silo, classes, table = node_data
    image_shape = list(silo.test.x.shape[1:])
    payload = {"silo": silo.name, "domain": silo.domain, "num_examples": len(silo.train.y)}
    if table:  # counts, sums and squares of columns, by which the federation scales its tables
        payload |= {"table": table.to_json(), "column_sums": list(compute_sums(table, silo.train.x))}
    return pack_content({**payload, "image_shape": image_shape, "classes": list(classes)})


def handle_fit(request: Request, node_data: NodeData) -> RecordDict:
    """Evaluate and train the received model, and store the method's client state."""
    payload = request.payload
    engine, broadcast, store, note = _prepare_engine(request, fit_to_federation(node_data, request.payload))
    (reply,) = engine.fit(request.experiment.method, broadcast, evaluate=bool(payload["evaluate"]))
    client_state = engine.client_states[reply.silo_name]
    if client_state:
        store.write(client_state, broadcast.round, int(payload["accepted_round"]))
    return _make_reply(reply, payload, note, has_client_state=bool(client_state))


def handle_query(request: Request, node_data: NodeData) -> RecordDict:
    """Run one of the method's client tasks."""
    payload, method = request.payload, request.experiment.method
    task = str(payload["task"])
    if task == JOIN_TASK:
        return handle_join(request, node_data)
    if task not in method.client_tasks:
        raise unknown_value_error(f"task of {request.experiment.method_name}", task, method.client_tasks)
    silo = fit_to_federation(node_data, payload)
    engine, broadcast, store, note = _prepare_engine(request, silo)
    (reply,) = engine.query(method, task, broadcast, payload["splits"])
    if task == "evaluate" and broadcast.round == method.total_rounds:  # the final model
        note = note or _store_model(request, silo, engine, broadcast, reply, store)
    return _make_reply(reply, payload, note)


def _store_model(
    request: Request, silo: Silo, engine: SerialEngine, broadcast: Broadcast, reply: Reply, store: ClientStateStore
) -> str:
    """Write this silo's copy of the final model and what a calibration needs, and return a note if that failed."""
    payload = request.payload
    if not len(silo.train.y) and store.model_path.exists():
        return ""  # later queries try the codewords of other silos at a silo without training data (D15)
    validation = reply.answers.get("validation")
    record = {"silos": {silo.name: {"validation": compute_metrics(validation)} if validation else {}}}
    label_counts = {silo.name: count_labels(silo.train.y, len(payload["classes"]))}
    config = request.experiment.to_config()
    description = Description(
        method_name=config["name"],
        method=config["method"],
        model=config["model"],
        network={},
        input_format=describe_source(
            request.experiment.data, tuple(payload["image_shape"]), str(payload.get("table", ""))
        ),
        class_names=tuple(payload["classes"]),
        silo_names=(silo.name,),
        silos=collect_facts((silo.name,), engine.num_examples, label_counts, record),
        seed=engine.seed,
        round=broadcast.round,
        precision=request.experiment.precision,
        owner=silo.name,
        origin={"uefl": __version__, RESULTS_VERSION_KEY: RESULTS_VERSION},
    )
    personal_tensors = engine.get_personal_tensors(request.experiment.method, broadcast)
    models = SiloModels(description, broadcast.model_state, broadcast.access, personal_tensors)
    models = replace(models, held_out=collect_held_out(models, [silo], request.device))
    try:
        store.write_model(models)
    except (OSError, SafetensorError) as e:
        log.error("silo %s could not write its model", silo.name, exc_info=e)
        return "the silo could not write its copy of the model"
    return ""


def _prepare_engine(request: Request, silo: Silo) -> tuple[SerialEngine, Broadcast, ClientStateStore, str]:
    """Return a serial engine with this silo and its client state, the broadcast, the state's store and a note."""
    payload, experiment, name = request.payload, request.experiment, silo.name
    net = experiment.build_network(tuple(payload["image_shape"]), len(payload["classes"]))
    experiment = experiment.resolve_precision(request.device)
    precision = {"dtype": DTYPES[experiment.precision], "matmul_precision": experiment.matmul_precision}
    engine = SerialEngine([silo], net, seed=experiment.seed, device=request.device, **precision)  # type: ignore[arg-type]
    store = ClientStateStore(request.state_folder, str(payload["run_id"]), name)
    client_state, note = store.read(int(payload["accepted_round"]))
    engine.client_states[name] = _move_to_device(client_state, engine)
    model_state, extras = (
        _move_to_device(cast_from_half(tensors, engine.dtype), engine)
        for tensors in (request.model_state, request.extras)
    )
    num_codewords = count_received_codewords(model_state)  # a silo receives only codewords it may use
    access = torch.ones(1, num_codewords, dtype=torch.bool)
    broadcast = Broadcast(
        int(payload["round"]),
        model_state,
        (name,),
        access,
        extras,
        (name,),
        float(payload["lr"]),
        is_personal=bool(payload.get("is_personal")),
    )
    return engine, broadcast, store, note


def count_received_codewords(model_state: Tensors) -> int:
    """Return the number of codewords in the tensors of a message."""
    return next((len(t) for n, t in model_state.items() if is_codeword_tensor(n)), 0)


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
