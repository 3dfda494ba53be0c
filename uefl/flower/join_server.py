"""The coordinator's side of a silo that joins a finished run: one message with the shared model, one reply."""

from __future__ import annotations

import hashlib
import json
import math
import shlex
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid
from rich.console import Console

from uefl.algorithms.own_parts import require_joinable
from uefl.core.codebook_size import select_middle_sizes
from uefl.core.errors import InputError, ResumableError
from uefl.core.federation import gather_accessible_rows
from uefl.core.untrusted_text import is_plain_text
from uefl.experiment.experiment import RESULTS_VERSION
from uefl.experiment.files import ensure_writable_folder, explain_disk_errors
from uefl.experiment.join_choice import PartsPlan
from uefl.experiment.join_folder import Parent, make_header, open_parent, read_evaluations, write_joined
from uefl.experiment.join_report import describe_uncertainty, is_uncertain, make_join_table
from uefl.experiment.joining import JoinSettings
from uefl.experiment.run_folder import RunFolder
from uefl.experiment.settings import override_settings
from uefl.flower.join_client import JOIN_TASK, OTHER_SIZES, VALIDATION
from uefl.flower.poll_delay import PollDelay
from uefl.flower.silo_registry import MAX_NAME_LENGTH, RoundPolicy, SiloListener, SiloRegistry
from uefl.flower.wire import make_message, read_reply_payload, reject_unreadable

COLUMNS = {"shared": "shared model", "untrained": "own parts, untrained", "trained": "own parts, trained"}
REQUIRED_METRICS = ("accuracy", "nll", "entropy", "num_examples")
MAX_METRICS, MAX_CODEWORDS, EXPIRY_MARGIN = 200, 65536, 5.0


def parse_join_settings(run_config: Mapping[str, Any]) -> JoinSettings:
    """Return the settings of a join over Flower, with the name of the silo."""
    settings = override_settings(JoinSettings(), shlex.split(str(run_config["join_settings"])))
    if settings.others != "fixed" or settings.name:
        raise InputError("join_settings: over Flower the other silos are fixed, and join_silo gives the name")
    if not run_config["join_silo"]:
        raise InputError('join needs join_silo="…", the name of the registered silo that joins')
    return override_settings(settings, [f"name={run_config['join_silo']}"])


def serve_join(
    grid: Grid,
    run_config: Mapping[str, Any],
    policy: RoundPolicy,
    *,
    on_silo_event: SiloListener = lambda _silo, _activity: None,
) -> Path:
    """Let a registered silo join a finished run of this coordinator; return the new run folder."""
    root, settings = Path(str(run_config["out"])), parse_join_settings(run_config)
    parent = open_parent(root / str(run_config["join"]))
    require_joinable(parent.models.method, parent.models.description.method_name)
    if settings.name in parent.models.description.silo_names or settings.name in parent.header["domains"]:
        raise InputError(f"silo {settings.name} is in {run_config['join']} already")
    run_id = make_join_id(parent, settings)
    experiment = parent.header["experiment"]
    folder = RunFolder(ensure_writable_folder(root / f"{experiment['name']}-{experiment['data']['name']}-{run_id}"))
    with explain_disk_errors(root), folder.lock():
        if folder.is_finished:
            return folder.path
        registry = SiloRegistry(grid, experiment, policy, on_silo_event)
        reply = exchange_join(registry, parent, settings, run_id)
        _write_reply(folder, parent, settings, parse_join_reply(reply, settings.name))
    return folder.path


def make_join_id(parent: Parent, settings: JoinSettings) -> str:
    """Return the id of the new run, by which the silo stores its model; it is hexadecimal, as every run id."""
    values = [RESULTS_VERSION, parent.identify(), asdict(settings)]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def exchange_join(registry: SiloRegistry, parent: Parent, settings: JoinSettings, run_id: str) -> Message | str:
    """Send the shared model to the silo and wait for its reply."""
    name, policy, models = settings.name, registry.policy, parent.models
    nodes = registry.find_nodes([name])
    if name not in nodes:
        reasons = "".join(f"; {reason}" for reason in registry.rejected_nodes.values())
        raise ResumableError(f"silo {name} did not connect within {policy.connect_timeout:.0f} s{reasons}")
    message = make_message(
        {
            "silo": name,
            "task": JOIN_TASK,
            "run_id": run_id,
            "round": models.description.round,
            "classes": list(models.description.class_names),
            "image_shape": list(models.description.input_format.shape),
            "experiment": registry.experiment,
            "join": asdict(settings),
            OTHER_SIZES: select_middle_sizes(facts.num_examples for facts in models.description.silos.values()),
            **({"table": table} if (table := models.description.input_format.table) else {}),
        },
        nodes[name],
        "evaluate",
        ttl=policy.reply_timeout + EXPIRY_MARGIN,
        model_state=gather_accessible_rows(models.model_state, models.access.all(0)),
    )
    message_ids = [message_id for message_id in registry.grid.push_messages([message]) if message_id]
    registry.on_silo_event(name, "joining")
    end, delay = time.monotonic() + policy.reply_timeout, PollDelay(policy.poll_interval)
    while message_ids and time.monotonic() < end:
        for _, reply in registry.puller.pull_replies(message_ids):
            return reply
        delay.wait()
    raise ResumableError(f"silo {name} sent no reply within {policy.reply_timeout:g} s; run the same command again")


def parse_join_reply(reply: Message | str, silo_name: str) -> dict[str, Any]:
    """Return the checked values of a reply; every value is bounded, since records are made from it."""
    with reject_unreadable():
        if isinstance(reply, str):
            raise InputError(f"silo {silo_name}: {reply}")
        payload = read_reply_payload(reply)
        if payload.get("rejected"):
            raise InputError(f"silo {silo_name} cannot join: {payload['rejected']}")
        if payload.get("silo") != silo_name:
            raise InputError(f"the node of silo {silo_name} identifies itself as silo {payload.get('silo')!r}")
        evaluations = {str(name): parse_metrics(metrics) for name, metrics in payload["evaluations"].items()}
        if missing := [name for name in COLUMNS if name not in evaluations]:
            raise InputError(f"silo {silo_name} sent no evaluation '{missing[0]}'")
        num_codewords, lr, domain = int(payload["num_codewords"]), float(payload["lr"]), str(payload["domain"])
        own_names = [str(name) for name in payload["own_tensors"]][:MAX_METRICS]
        head, gate = str(payload["head"]), str(payload["gate"])
        if head not in ("shared", "own", "new") or gate not in ("run", "own"):
            raise InputError(f"silo {silo_name} sent an unknown kind of classifier or gate")
        if not 0 <= num_codewords <= MAX_CODEWORDS or not 0 <= lr < math.inf:
            raise InputError(f"silo {silo_name} sent an invalid number of codewords or learning rate")
        if not all(is_plain_text(text, MAX_NAME_LENGTH) for text in (domain, *own_names)):
            raise InputError(f"silo {silo_name} sent a name that is too long or has unusual characters")
        return {
            "evaluations": evaluations,
            "num_codewords": num_codewords,
            "lr": lr,
            "head": head,
            "gate": gate,
            "domain": domain,
            "own_tensors": own_names,
        }


def parse_metrics(values: Any) -> dict[str, float]:
    """Return metrics that a silo sent: a few finite numbers with plain names."""
    if not isinstance(values, dict) or len(values) > MAX_METRICS:
        raise InputError(f"an evaluation must be a table of at most {MAX_METRICS} numbers")
    metrics = {str(name): float(value) for name, value in values.items()}
    for name, value in metrics.items():
        if not is_plain_text(name, MAX_NAME_LENGTH) or not math.isfinite(value):
            raise InputError("an evaluation has an unusual name, or a number that is not finite")
    if missing := [name for name in REQUIRED_METRICS if name not in metrics]:
        raise InputError(f"an evaluation lacks {missing[0]}")
    if not 0 <= metrics["accuracy"] <= 1 or min(metrics["nll"], metrics["entropy"]) < 0:
        raise InputError("an evaluation has an accuracy, NLL or entropy that cannot be")
    return metrics


def _write_reply(folder: RunFolder, parent: Parent, settings: JoinSettings, reply: Mapping[str, Any]) -> None:
    """Write the new run; its model file is that of the parent, since the new silo's parts stay at the silo."""
    evaluations, name = reply["evaluations"], settings.name
    shared = {VALIDATION: evaluations[f"shared {VALIDATION}"]} if f"shared {VALIDATION}" in evaluations else {}
    trained = dict(evaluations["trained"])
    if f"trained {VALIDATION}" in evaluations:
        trained[VALIDATION] = evaluations[f"trained {VALIDATION}"]
    num_shared = int(parent.models.access.all(0).sum())
    evaluation = {
        **trained,
        "num_codewords": num_shared + reply["num_codewords"],
        "is_uncertain": is_uncertain(parent.models, name, shared),
    }
    entry = {
        "silo": name,
        "settings": asdict(settings),
        "lr": reply["lr"],
        "head": reply["head"],
        "gate": reply["gate"],
        "own_tensors": reply["own_tensors"],
        "evaluations": {COLUMNS[column]: evaluations[column] for column in COLUMNS},
        "uncertainty": describe_uncertainty(parent.models, name, shared),
    }
    write_joined(folder, parent, parent.models, make_header(parent, entry, reply["domain"]), evaluation)


def print_join(folder: Path, console: Console) -> None:
    """Print what the coordinator knows about the silo that joined."""
    entry = RunFolder(folder).read_header()["joined"][-1]
    console.print(entry["uncertainty"], soft_wrap=True, markup=False)
    trained = f"trained with {PartsPlan(entry['head'], entry['gate']).describe()} at learning rate {entry['lr']:g}"
    console.print(trained if entry["lr"] else "no training", soft_wrap=True, markup=False)
    console.print(make_join_table(read_evaluations(folder)))
    console.print(
        f"codewords and other parts of {entry['silo']} stay at the silo, in its folder state/; no tensor of another "
        f"silo and no shared tensor has changed\nrun folder: {folder}",
        soft_wrap=True,
        markup=False,
    )
