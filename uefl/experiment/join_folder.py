"""The run folder of a silo that joined: a new one that names its parent, which is never changed."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from uefl.core.errors import InputError
from uefl.core.federation import ServerState, Silo, Tensors
from uefl.data.config import DataConfig
from uefl.data.own_silo import adapt_to_own_table, align_labels, declare_columns, make_own_silo, scale_table
from uefl.data.table_format import TableFormat
from uefl.engines import ENGINES
from uefl.experiment.calibration import read_calibrations, write_calibrations
from uefl.experiment.checkpoint import load_checkpoint, save_checkpoint
from uefl.experiment.experiment import RESULTS_VERSION, Experiment, fingerprint_silos
from uefl.experiment.files import ensure_writable_folder, explain_write_errors, write_text
from uefl.experiment.held_out import save_held_out
from uefl.experiment.join_choice import OnProgress
from uefl.experiment.join_report import is_uncertain
from uefl.experiment.joining import JoinResult, JoinSettings, OwnParts, extend_access, join_silo
from uefl.experiment.loading import open_models
from uefl.experiment.records import Record, summarize_records
from uefl.experiment.round_writer import RoundWriter
from uefl.experiment.run import (
    Listener,
    PreparedRun,
    check_environment,
    describe_environment,
    make_engine_listeners,
    make_engine_settings,
    prepare_run,
    releasing,
    run_rounds,
    write_results,
)
from uefl.experiment.run_folder import JOINED, PARENT, RESULTS_VERSION_KEY, RunFolder
from uefl.experiment.silo_choice import AUTO
from uefl.experiment.silo_models import SiloModels, compute_model_checksum, count_labels

MAX_NAME_LENGTH = 64  # figures have the name in that of their file
POOLED_ENTRIES = ("all_silos", "reliability")  # of a record; they would lack the new silo


@dataclass(frozen=True)
class Parent:
    """A finished run that a silo joins."""

    folder: RunFolder
    header: dict[str, Any]
    models: SiloModels

    @property
    def experiment(self) -> Experiment:
        """The experiment of the run."""
        return Experiment.from_config(self.header["experiment"])

    def identify(self) -> list[Any]:
        """Return what the run is, wherever its folder lies: experiment, data, silos and the content of its model."""
        values = (self.header["experiment"], self.header["fingerprint"], self.models.description.silo_names)
        return [*values, compute_model_checksum(self.models)]


def open_parent(path: Path) -> Parent:
    """Read a finished run; a model file alone, or an unfinished run, is an `InputError`."""
    folder = RunFolder(path)
    if not folder.has_header:
        raise InputError(f"{path} is not a run folder: it has no {folder.HEADER_FILE}; in Python, use uefl.join")
    header = folder.read_header()
    if not folder.is_finished:
        raise InputError(f"{path} is unfinished; run the original command again, then join")
    folder.read_records()  # damage is noticed here, before any training
    return Parent(folder, header, open_models(path))


def load_newcomer(parent: Parent, path: Path, name: str) -> Silo:
    """Read a silo's own folder, archive, manifest or table with the data settings of the run."""
    description, config = parent.models.description, parent.experiment.data
    if not path.exists():
        raise InputError(f"{path}: no such file or folder")
    if description.input_format.table:
        own_config = _describe_own_table(config, path, TableFormat.from_json(description.input_format.table))
    else:
        size = description.input_format.shape[-1] if config.image_size or config.name != "folder" else 0
        own_config = replace(config, name="folder", image_size=size)
    own_config = replace(
        own_config,
        path=str(path),
        partitioner="natural",
        shifts=(),
        num_silos=(),
        train_sizes=(),
        target="",
        train_per_silo=0,
        test_per_silo=0,
        public_images=0,
        num_classes=0,
    )
    images = own_config.read_images(is_one_silo=True)
    if not images.table:
        images = replace(images, mean=description.input_format.mean, std=description.input_format.std)
    own = make_own_silo(own_config, images, name, parent.experiment.seed)
    return scale_table(own, align_labels(own, description.class_names), description.input_format.table)


def _describe_own_table(config: DataConfig, path: Path, table: TableFormat) -> DataConfig:
    config = adapt_to_own_table(replace(config, name="table"), path)
    return replace(config, table=declare_columns(config.table, table))


def name_newcomer(path: Path, settings: JoinSettings) -> JoinSettings:
    """Return the settings with a name: that of the folder or file, without one."""
    path = path.resolve()
    name = settings.name or (path.name if path.is_dir() else path.stem)
    if not name.strip() or not name.isprintable() or len(name) > MAX_NAME_LENGTH or name == AUTO:
        raise InputError(
            f"name={name[:MAX_NAME_LENGTH]!r}; choose a name= of 1 to {MAX_NAME_LENGTH} printable characters, but not "
            f"'{AUTO}', which lets `uefl predict` choose a silo"
        )
    return replace(settings, name=name)


def join_run(
    parent: Parent,
    silo: Silo,
    path: Path,
    settings: JoinSettings,
    out: Path,
    *,
    device: str = "cpu",
    on_progress: OnProgress = lambda _activity, _done, _total: None,
    on_event: Listener = lambda _: None,
) -> tuple[Path, JoinResult | None]:
    """Let a silo join a run; return the new run folder, and the result unless the folder was finished before."""
    folder = RunFolder(ensure_writable_folder(out / _make_name(parent, silo, settings)))
    with explain_write_errors(out), folder.lock():
        if folder.is_finished:
            return folder.path, None
        try:
            if settings.others == "train":
                return folder.path, train_all(parent, silo, path, settings, folder, device, on_event)
            result = join_silo(parent.models, silo, settings, device=device, on_progress=on_progress)
        except BaseException:
            if not folder.has_header:  # no folder that looks like a run
                with suppress(OSError):
                    folder.remove_header()
            raise
        _write_fixed(folder, parent, silo, path, settings, result)
    return folder.path, result


def read_evaluations(folder: Path) -> dict[str, dict[str, float]]:
    """Return the newcomer's evaluations that its run folder stores, by column of the table."""
    run = RunFolder(folder)
    entry = run.read_header()[JOINED][-1]
    evaluations: dict[str, dict[str, float]] = dict(entry["evaluations"])
    if entry["settings"]["others"] == "train":
        rounds = [record["silos"].get(entry["silo"], {}) for record in run.read_records()]
        if evaluated := [metrics for metrics in rounds if "accuracy" in metrics]:
            evaluations["after further rounds"] = evaluated[-1]
    return evaluations


def list_evaluations(result: JoinResult, settings: JoinSettings) -> dict[str, Any]:
    """Return the evaluations of the new silo as the table shows them."""
    columns = {"shared model": result.shared, "own parts, untrained": result.before}
    return columns if settings.others == "train" else {**columns, "own parts, trained": result.after}


# --- others=fixed -----------------------------------------------------------------------------------------------------


def _write_fixed(
    folder: RunFolder, parent: Parent, silo: Silo, path: Path, settings: JoinSettings, result: JoinResult
) -> None:
    """Write the files of the new run."""
    if parent.folder.server_path.exists():
        server, client_states = load_checkpoint(parent.folder.server_path, "cpu")
        server = parent.experiment.method.resume_server(server)
        server, client_states = add_to_server(server, client_states, silo.name, result.own)
        save_checkpoint(folder.server_path, server, client_states)
    row = result.models.access[result.models.description.silo_names.index(silo.name)]
    evaluation = {
        **result.after,
        "num_codewords": int(row.sum()),
        "is_uncertain": is_uncertain(parent.models, silo.name, result.shared),
    }
    header = make_header(parent, make_entry(silo, path, settings, result), silo.domain)
    write_joined(folder, parent, result.models, header, evaluation)


def write_joined(
    folder: RunFolder, parent: Parent, models: SiloModels, header: dict[str, Any], evaluation: Mapping[str, Any]
) -> None:
    """Write model, records, figure and header of the new run; the summary, which marks it as finished, comes last."""
    silo_name = header[JOINED][-1]["silo"]
    if models.held_out:
        save_held_out(folder.held_out_path, models, models.held_out)
    models.save(folder.model_path)
    if calibrations := read_calibrations(parent.folder.calibration_path, parent.models):
        write_calibrations(folder.calibration_path, models, calibrations)  # the models of the other silos are as before
    run_records = _add_to_last_record(parent.folder.read_records(), silo_name, evaluation, models.access.shape[1])
    write_text(folder.records_path, "".join(json.dumps(record, sort_keys=True) + "\n" for record in run_records))
    from uefl.experiment.figures import plot_curves  # matplotlib is slow to import

    plot_curves({f"{silo_name} joins {parent.folder.path.name}": run_records}, folder.figure_path)
    folder.write_header(header)
    folder.write_summary({"seed": parent.experiment.seed, **summarize_records(run_records, header["domains"])})


def _add_to_last_record(
    run_records: list[Record], silo_name: str, evaluation: Mapping[str, Any], total_codewords: int
) -> list[Record]:
    """Return the records of the run with the new silo in the last one; what the other silos have there stays."""
    last = {n: v for n, v in run_records[-1].items() if n not in POOLED_ENTRIES}
    silos = dict(sorted({**last["silos"], silo_name: {**evaluation, "joined": True}}.items()))
    return [*run_records[:-1], {**last, "silos": silos, "total_codewords": total_codewords}]


# --- others=train -----------------------------------------------------------------------------------------------------


def train_all(
    parent: Parent,
    silo: Silo,
    path: Path,
    settings: JoinSettings,
    folder: RunFolder,
    device: str,
    on_event: Listener,
) -> JoinResult:
    """Run further rounds with all silos: the finished run is continued with one more silo, in a new folder."""
    if settings.head in ("own", "new") or "own" in (settings.gate, settings.batch_norm):
        raise InputError(
            "others=train trains what the method trains; a head, gate or batch_norm of its own needs others=fixed"
        )
    prepared = _prepare_others(parent, silo, settings, device, on_event)
    result = join_silo(parent.models, silo, replace(settings, epochs=0), device=device)
    if folder.has_header:
        check_environment(folder, prepared.context)
    else:
        server, client_states = load_checkpoint(parent.folder.server_path, "cpu")
        server = parent.experiment.method.resume_server(server)
        server, client_states = add_to_server(server, client_states, silo.name, result.own)
        resume = partial(prepared.experiment.method.resume_client_state, prepared.net)
        client_states = {name: resume(state) for name, state in client_states.items()}
        parent_records = parent.folder.read_records()
        write_text(folder.records_path, "".join(json.dumps(r, sort_keys=True) + "\n" for r in parent_records))
        save_checkpoint(folder.checkpoint_path, server, client_states)
        folder.write_header(make_header(parent, make_entry(silo, path, settings, result), silo.domain, prepared))
    make_clients = ENGINES[prepared.context.engine]
    engine_settings = {**make_engine_settings(prepared), **make_engine_listeners(on_event)}
    clients = make_clients(prepared.silos, prepared.net, seed=prepared.experiment.seed, **engine_settings)
    with releasing(clients):
        server = run_rounds(prepared.experiment, clients, folder, on_event, RoundWriter())
        write_results(folder, prepared.experiment, server, clients, prepared.context, RoundWriter())
    return result


def _prepare_others(parent: Parent, silo: Silo, settings: JoinSettings, device: str, on_event: Listener) -> PreparedRun:
    """Load the data of the run's silos, and return the run with the new silo and more rounds."""
    if parent.header["engine"] == "flower":
        raise InputError("others=train needs the data of all silos, which stay at the silos of a run over Flower")
    if not parent.folder.server_path.exists():
        raise InputError(f"others=train needs {parent.folder.server_path}, which is missing")
    earlier = parent.header.get(JOINED, [])
    if lost := [entry["silo"] for entry in earlier if _has_further_parts(entry)]:
        raise InputError(
            f"others=train: {lost[0]} joined with a classifier, gate or batch norm of its own, which further rounds "
            f"would drop; use others=fixed, or let {lost[0]} join again with head=shared"
        )
    experiment = parent.experiment
    prepared = prepare_run(experiment, device=device, engine="auto", on_event=on_event)
    joined = [load_newcomer(parent, Path(entry["path"]), entry["silo"]) for entry in earlier]
    expected = [parent.header["fingerprint"], *(entry["fingerprint"] for entry in earlier)]
    if [fingerprint_silos(prepared.silos), *(fingerprint_silos([s]) for s in joined)] != expected:
        raise InputError(
            f"others=train: the data of {parent.folder.path} have changed since its training; restore them, "
            "or use others=fixed"
        )
    silos = [*prepared.silos, *joined, silo]
    method = experiment.method.add_rounds(settings.rounds)
    num_classes = len(prepared.context.class_names)
    context = prepared.context._replace(
        silos=tuple(silos),
        domains={s.name: s.domain for s in silos},
        label_counts={s.name: count_labels(s.train.y, num_classes) for s in silos},
    )
    return prepared._replace(
        experiment=replace(prepared.experiment, method=method), context=context, silos=list(method.prepare_silos(silos))
    )


def _has_further_parts(entry: Mapping[str, Any]) -> bool:
    """Return whether a silo that joined has parts of its own that its method gives to no silo."""
    settings = entry["settings"]
    head = entry.get("head", settings["head"])  # earlier versions chose nothing
    return head in ("own", "new") or "own" in (entry.get("gate"), settings["batch_norm"])


# --- both -------------------------------------------------------------------------------------------------------------


def add_to_server(
    server: ServerState, client_states: dict[str, Tensors], silo_name: str, own: OwnParts
) -> tuple[ServerState, dict[str, Tensors]]:
    """Return the last state of a run with one more silo; every tensor that was there keeps its bits."""
    num_new = next((len(rows) for rows in own.codewords.values()), 0)
    model_state = {
        n: torch.cat([t, own.codewords[n].to(t)]) if n in own.codewords else t for n, t in server.model_state.items()
    }
    own_state = {silo_name: own.tensors} if own.tensors else {}
    server = server.replace(
        silo_names=tuple(sorted((*server.silo_names, silo_name))),
        access=extend_access(server.access, server.silo_names, silo_name, num_new),
        model_state=model_state,
        is_codebook_final=True,
    )
    return server, {**client_states, **own_state}


def _make_name(parent: Parent, silo: Silo, settings: JoinSettings) -> str:
    """Return the name of the new folder: a hash of parent, settings and the new silo's data."""
    values = [RESULTS_VERSION, parent.identify(), asdict(settings), fingerprint_silos([silo])]
    run_id = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]
    return f"{parent.header['experiment']['name']}-{parent.header['experiment']['data']['name']}-{run_id}"


def make_entry(silo: Silo, path: Path, settings: JoinSettings, result: JoinResult) -> dict[str, Any]:
    """Return what the header stores about a silo that joined."""
    evaluations = {
        column: {n: v for n, v in evaluation.items() if isinstance(v, float)}
        for column, evaluation in list_evaluations(result, settings).items()
    }
    return {
        "silo": silo.name,
        "path": str(path.resolve()),
        "fingerprint": fingerprint_silos([silo]),
        "settings": asdict(settings),
        "lr": result.lr,
        "head": result.trial.plan.head,
        "gate": result.trial.plan.gate,
        "own_tensors": list(result.own_names),
        "evaluations": evaluations,
    }


def make_header(
    parent: Parent, entry: Mapping[str, Any], domain: str, prepared: PreparedRun | None = None
) -> dict[str, Any]:
    """Return the header of the new run: that of its parent, and what joined."""
    domains = {**parent.header["domains"], entry["silo"]: domain or entry["silo"]}
    changes: dict[str, Any] = {
        PARENT: parent.folder.path.resolve().name,
        JOINED: [*parent.header.get(JOINED, []), dict(entry)],
        "domains": dict(sorted(domains.items())),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        RESULTS_VERSION_KEY: RESULTS_VERSION,
    }
    if prepared is not None:
        changes |= {
            **describe_environment(prepared.context),
            "experiment": prepared.experiment.to_config(),
            "total_rounds": prepared.experiment.method.total_rounds,
        }
    return {**parent.header, **changes}
