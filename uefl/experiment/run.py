"""Run an experiment in its folder: rounds, records and checkpoints, then model, figure and summary.

A run folder is never overwritten. A finished run is found again; an unfinished one is resumed from its last checkpoint
and ends with the same bits as a run without interruption.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from uefl import __version__
from uefl.algorithms.requirements import require_enough_silos
from uefl.core.codebook_size import CodebookSize
from uefl.core.errors import InputError, unknown_value_error
from uefl.core.federation import Broadcast, Clients, Method, ServerState, Silo, Tensors
from uefl.core.processor import describe_processor
from uefl.data.images import Images
from uefl.data.input_format import describe_source
from uefl.data.quality import collect_warnings
from uefl.engines import ENGINE_NAMES, ENGINES, IN_PROCESS_ENGINES, SAME_BITS_ENGINES
from uefl.engines.choosing import check_device, choose_engine
from uefl.engines.processes.worker_pool import choose_num_workers
from uefl.engines.serial import SerialEngine
from uefl.experiment import records
from uefl.experiment.chance import compute_chance_accuracy
from uefl.experiment.checkpoint import load_checkpoint, read_round, save_checkpoint
from uefl.experiment.device_memory import free_cached_memory, try_within_memory
from uefl.experiment.experiment import DTYPES, RESULTS_VERSION, Experiment, fingerprint_silos
from uefl.experiment.files import ensure_writable_folder, explain_disk_errors, explain_write_errors, write_text
from uefl.experiment.held_out import collect_held_out, save_held_out
from uefl.experiment.idle_settings import describe_idle_settings
from uefl.experiment.plan import make_plan
from uefl.experiment.round_writer import RoundWriter
from uefl.experiment.rounds import iterate_rounds
from uefl.experiment.run_folder import RESULTS_VERSION_KEY, RunFolder
from uefl.experiment.silo_models import Description, SiloModels, collect_facts, count_labels, gather_personal_tensors

Event = dict[str, Any]
Listener = Callable[[Event], None]


class Engine(Clients, Protocol):
    """Clients whose states are part of the checkpoint."""

    client_states: dict[str, Tensors]
    device: torch.device

    def get_personal_tensors(self, method: Method, broadcast: Broadcast) -> dict[str, Tensors]:
        """Return by silo the tensors of its own that predictions use; empty if they stay at the silos."""


class RunContext(NamedTuple):
    """Data, engine and device of a run."""

    fingerprint: str  # hash of the data
    domains: dict[str, str]  # by silo
    class_names: tuple[str, ...]
    input_shape: tuple[int, ...]
    engine: str = "serial"
    device: str = "cpu"
    table: str = ""  # of a table: its format as JSON, which predictions need
    label_counts: dict[str, list[int]] = {}  # training examples per class, by silo; empty if only the silos know them
    chance_accuracy: float = 0.0  # 0: not known here
    silos: tuple[Silo, ...] = ()  # with their calibration examples; empty if only the silos have them
    codebook_size: CodebookSize | None = None  # None: without a codebook, or if only the silos have the data


class PreparedRun(NamedTuple):
    """A run before its first round: silos, network and what the header needs."""

    experiment: Experiment
    context: RunContext
    silos: list[Silo]
    net: nn.Module


def run(
    experiment: Experiment,
    root: Path,
    *,
    device: str = "cpu",
    engine: str = "auto",
    num_workers: int = 0,
    on_event: Listener = lambda _: None,
) -> Path:
    """Run an experiment, resume it, or find it finished; return its folder.

    `num_workers` is for `engine=processes`; 0 takes one per core.
    """
    prepared = prepare_run(experiment, device=device, engine=engine, num_workers=num_workers, on_event=on_event)
    engine = prepared.context.engine

    def open_clients(**engine_settings: Any) -> AbstractContextManager[Engine]:
        make_clients = _import_engine(engine)
        if engine not in IN_PROCESS_ENGINES:
            folder, run_id = root.resolve() / "state", prepared.experiment.run_id(prepared.context.fingerprint)
            clients: AbstractContextManager[Engine] = make_clients(
                prepared.experiment,
                len(prepared.silos),
                state_folder=folder,
                run_id=run_id,
                on_silo_event=make_engine_listeners(on_event)["on_progress"],
            )
            return clients
        settings = {**make_engine_settings(prepared), **make_engine_listeners(on_event), **engine_settings}
        if engine == "processes":
            settings["num_workers"] = choose_num_workers(num_workers, len(prepared.silos))
        if not engine_settings:  # else a second attempt, whose plan is the same
            plan = make_plan(
                *(prepared.experiment.method, prepared.net, prepared.silos, device),
                num_parallel=settings.get("num_workers", 1),
            )
            on_event({"kind": "plan", **asdict(plan)})
        return releasing(make_clients(prepared.silos, prepared.net, seed=prepared.experiment.seed, **settings))

    run_once = partial(run_with_clients, prepared.experiment, root, prepared.context, on_event=on_event)
    if engine == "stacked":
        if folder := try_within_memory(partial(run_once, open_clients), device):
            return folder
        message = f"the run does not fit into the memory of {device}; it continues with one silo at a time."
        on_event({"kind": "warning", "message": message})
        open_clients = partial(open_clients, max_stack_size=1)
    try:
        return run_once(open_clients)
    finally:
        free_cached_memory(device)


def prepare_run(
    experiment: Experiment,
    *,
    device: str,
    engine: str,
    on_event: Listener,
    images: Images | None = None,
    num_workers: int = 0,
) -> PreparedRun:
    """Load the data, unless their images are given, build the network and choose the engine."""
    if engine not in ENGINE_NAMES:
        raise unknown_value_error("engine", engine, ENGINE_NAMES)
    check_device(device)
    experiment = experiment.resolve_precision(device)
    if engine in ENGINES and engine not in IN_PROCESS_ENGINES:
        require_network_support(experiment)
    on_event({"kind": "load", "data": experiment.data.name})
    silos, images = experiment.data.load(experiment.seed, images)
    for message in collect_warnings(silos, images):
        on_event({"kind": "warning", "about": "data", "message": message})
    method = experiment.method
    silos = list(method.prepare_silos(require_enough_silos(silos, method.clients_per_round)))
    input_shape = tuple(silos[0].test.x.shape[1:])
    net = experiment.build_network(input_shape, len(images.classes))
    for message in describe_idle_settings(method, net, silos):
        on_event({"kind": "warning", "about": "settings", "message": message})
    engine = choose_engine(
        *(engine, device, net, silos, method.local, method.total_rounds),
        clients_per_round=method.clients_per_round,
        num_workers=num_workers,
    )
    domains = {silo.name: silo.domain for silo in silos}
    counts = {silo.name: count_labels(silo.own_labels, len(images.classes)) for silo in silos}
    context = RunContext(
        fingerprint=fingerprint_silos(silos),
        domains=domains,
        class_names=images.classes,
        input_shape=input_shape,
        engine=engine,
        device=device,
        table=images.table.to_json() if images.table else "",
        label_counts=counts if engine in IN_PROCESS_ENGINES else {},
        silos=tuple(silos) if engine in IN_PROCESS_ENGINES else (),
        chance_accuracy=compute_chance_accuracy(silos),
        codebook_size=method.codebook_hooks.choose_size(net, [len(silo.train.y) for silo in silos]),
    )
    return PreparedRun(experiment, context, silos, net)


def make_engine_settings(prepared: PreparedRun) -> dict[str, Any]:
    """Return device and precision of an engine in this process."""
    experiment = prepared.experiment
    return {
        "device": prepared.context.device,
        "dtype": DTYPES[experiment.precision],
        "matmul_precision": experiment.matmul_precision,
    }


def make_engine_listeners(on_event: Listener) -> dict[str, Callable[..., None]]:
    """Return functions that pass the messages of an engine on as events."""

    def on_progress(silo_name: str, activity: str) -> None:
        on_event({"kind": "silo", "silo": silo_name, "activity": activity})

    def on_warning(message: str) -> None:
        on_event({"kind": "warning", "message": message})

    return {"on_progress": on_progress, "on_warning": on_warning}


@contextmanager
def releasing(engine: SerialEngine) -> Iterator[SerialEngine]:
    """Give the engine's device memory back when the run ends."""
    try:
        yield engine
    finally:
        engine.release()


def _import_engine(name: str) -> Callable[..., Any]:
    try:
        make_clients: Callable[..., Any] = ENGINES[name]
    except ImportError:  # Flower is an optional dependency
        raise InputError(f"engine={name} needs {name.title()}: install uefl with its extra `{name}`") from None
    return make_clients


def require_network_support(experiment: Experiment) -> Experiment:
    """Return the experiment, or raise an error if its method needs data of several silos in one place."""
    if reason := experiment.method.network_unsupported_reason:
        raise InputError(f"{experiment.method_name} cannot run on Flower: {reason}; use engine=serial")
    return experiment


def run_with_clients(
    experiment: Experiment,
    root: Path,
    context: RunContext,
    open_clients: Callable[[], AbstractContextManager[Engine]],
    on_event: Listener = lambda _: None,
    *,
    writer: RoundWriter | None = None,
    max_round: int | None = None,
) -> Path:
    """Run, resume or find an experiment with any clients; they are opened only if rounds remain.

    A run is resumed after `max_round` at the latest.
    """
    folder, writer = (
        RunFolder(ensure_writable_folder(find_run_path(experiment, root, context))),
        writer or RoundWriter(),
    )
    # The supervisor of a deployed run resumes it by its exit code; elsewhere, a user has to free the disk.
    explain_errors = explain_disk_errors if context.engine == "flower" else explain_write_errors
    with explain_errors(root), folder.lock():
        if folder.is_finished or _recover_summary(folder):
            folder.read_records()  # or an error that they or the summary are damaged
            engine = folder.read_header()["engine"]
            on_event({"kind": "finished", "folder": str(folder.path), "engine": engine})
            return folder.path
        is_new = not folder.has_header
        _write_header(folder, experiment, context)
        try:
            opened = open_clients()
        except InputError:
            if is_new:  # invalid settings leave no folder that looks like an unfinished run
                folder.remove_header()
            raise
        with opened as clients:
            server = run_rounds(experiment, clients, folder, on_event, writer, max_round)
            write_results(folder, experiment, server, clients, context, writer)
    return folder.path


def find_run_path(experiment: Experiment, root: Path, context: RunContext) -> Path:
    """Return the folder of a run."""
    return root / f"{experiment.method_name}-{experiment.data.name}-{experiment.run_id(context.fingerprint)}"


def run_rounds(
    experiment: Experiment,
    clients: Engine,
    folder: RunFolder,
    on_event: Listener,
    writer: RoundWriter,
    max_round: int | None = None,
) -> ServerState:
    """Run the remaining rounds; after each, write its records and then the checkpoint that follows them."""
    method, resumed = experiment.method, _resume(clients, folder, on_event, max_round)
    next_record = resumed.open_record.get("round", resumed.round + 1) if resumed else 1
    earlier = records.read_first_records(folder.records_path, next_record - 1)
    write_text(folder.records_path, "".join(json.dumps(record, sort_keys=True) + "\n" for record in earlier))
    round_number, server, header = resumed.round if resumed else 0, resumed, folder.read_header()
    on_event(
        {
            "kind": "start",
            "total_rounds": method.total_rounds,
            "round": round_number,
            "records": earlier,
            "header": header,
        }
    )
    started = time.monotonic()
    with writer:
        for server in iterate_rounds(method, clients, resumed):
            if server.round == round_number + 1 and server.open_record:  # its metrics come with the next round
                on_event({"kind": "trained", "round": server.round, "seconds": time.monotonic() - started})
            for record in server.completed_records:
                on_event({"kind": "round", "record": record})
                if "warning" in record:
                    on_event({"kind": "warning", "message": f"round {record['round']}: {record['warning']}"})
            writer.wait()
            writer.submit(partial(records.append_records, folder.records_path, server.completed_records))
            save_checkpoint(folder.checkpoint_path, server, clients.client_states, writer.submit)
    assert server is not None, "a method has at least one round"
    return server


def _resume(clients: Engine, folder: RunFolder, on_event: Listener, max_round: int | None = None) -> ServerState | None:
    """Load the last checkpoint, or the one before it if the last is damaged or too late; None if there is none."""
    errors: list[str] = []
    for path in filter(Path.exists, folder.checkpoint_paths):
        if max_round is not None and read_round(path) > max_round:
            continue
        try:
            server, clients.client_states = load_checkpoint(path, clients.device)
        except InputError as e:
            errors.append(str(e))
            continue
        if errors:
            message = f"{errors[0]}; resuming from the checkpoint before it, after round {server.round}"
            on_event({"kind": "warning", "message": message})
        return server
    if errors:
        raise InputError(
            f"{'; '.join(errors)}; there is no other checkpoint: restore it, or move {folder.path} away to start again"
        )
    return None


def _recover_summary(folder: RunFolder) -> bool:
    """Write a lost summary of a finished run again; return whether the run is finished."""
    if not (folder.has_header and folder.model_path.exists()) or any(map(Path.exists, folder.checkpoint_paths)):
        return False
    header = folder.read_header()
    run_records = records.read_first_records(folder.records_path, header["total_rounds"])
    folder.write_summary(
        {"seed": header["experiment"]["seed"], **records.summarize_records(run_records, header["domains"])}
    )
    return True


def _write_header(folder: RunFolder, experiment: Experiment, context: RunContext) -> None:
    """Write settings, versions and data of a new run; for a resumed run, check that nothing fixed has changed."""
    if folder.has_header:
        check_environment(folder, context)
        return
    folder.write_header(
        {
            **describe_environment(context),
            "uefl": __version__,
            "python": platform.python_version(),
            "processor": describe_processor(),
            "fingerprint": context.fingerprint,
            "experiment": experiment.to_config(),
            "total_rounds": experiment.method.total_rounds,
            "domains": context.domains,
            "class_names": list(context.class_names),
            "input_shape": list(context.input_shape),
            "table": context.table,
            "chance_accuracy": context.chance_accuracy,
            "codebook_size": context.codebook_size and context.codebook_size._asdict(),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
    )


def describe_environment(context: RunContext) -> dict[str, Any]:
    """Return what a header stores about where a run is computed, all of which must be equal when it is resumed."""
    device = context.device
    return {
        "engine": context.engine,
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        RESULTS_VERSION_KEY: RESULTS_VERSION,
    }


def check_environment(folder: RunFolder, context: RunContext) -> None:
    """Raise an `InputError` if a run would be resumed otherwise than it was started."""
    header = folder.read_header()
    for name, value in describe_environment(context).items():
        has_same_bits = name == "engine" and {header[name], value} <= set(SAME_BITS_ENGINES)
        if header[name] != value and not has_same_bits:
            raise InputError(
                f"{folder.path} was started with {name} {header[name]}, but {name} is now {value}; "
                "resume it as it was started, or choose another folder with --out"
            )


def write_results(
    folder: RunFolder,
    experiment: Experiment,
    server: ServerState,
    clients: Engine,
    context: RunContext,
    writer: RoundWriter,
) -> None:
    """Write model and figure, and last the summary, which marks the run as finished; the server's state is kept."""
    from uefl.experiment.figures import draw_curves, write_image  # matplotlib is slow to import, and only needed here

    run_records = records.read_records(folder.records_path)
    summary = {"seed": experiment.seed, **records.summarize_records(run_records, context.domains)}
    models = _collect_models(experiment, server, clients, context, run_records[-1])
    held_out = collect_held_out(models, context.silos, context.device)
    figure = draw_curves({f"{experiment.method_name} on {experiment.data.name}": run_records})

    def write() -> None:
        if held_out:
            save_held_out(folder.held_out_path, models, held_out)
        models.save(folder.model_path)
        write_image(figure, folder.figure_path)
        folder.write_summary(summary)
        folder.checkpoint_path.replace(folder.server_path)
        folder.get_previous_path(folder.checkpoint_path).unlink(missing_ok=True)

    writer.submit(write)
    writer.wait()


def _collect_models(
    experiment: Experiment, server: ServerState, clients: Engine, context: RunContext, last_record: records.Record
) -> SiloModels:
    """Return the models of all silos with what predictions need."""
    config = experiment.to_config()
    description = Description(
        method_name=config["name"],
        method=config["method"],
        model=config["model"],
        network={},
        input_format=describe_source(experiment.data, context.input_shape, context.table),
        class_names=context.class_names,
        silo_names=server.silo_names,
        silos=collect_facts(server.silo_names, clients.num_examples, context.label_counts, last_record),
        seed=experiment.seed,
        round=server.round,
        precision=experiment.precision,
        origin={
            "uefl": __version__,
            RESULTS_VERSION_KEY: RESULTS_VERSION,
            "data": config["data"],
            "domains": context.domains,
            "fingerprint": context.fingerprint,
        },
    )
    personal_tensors = gather_personal_tensors(experiment.method, clients, server)
    return SiloModels(description, server.model_state, server.access, personal_tensors)
