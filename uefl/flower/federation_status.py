"""`uefl deploy status`: what the coordinator's files tell about silos and the last run."""

from __future__ import annotations

import json
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from uefl.core.errors import InputError
from uefl.core.untrusted_text import escape_text
from uefl.experiment.run_folder import RunFolder
from uefl.flower.contacts import read_contacts
from uefl.flower.run_result import EXIT_FAILED, RESULT_FILE, RunResult, read_result

ONLINE_SECONDS = 60  # a node sends heartbeats more often than that


def describe_status(coordinator: Path) -> Iterator[str]:
    """Yield a line per silo with its last contact, and lines about the last run."""
    contacts, now = read_contacts(coordinator), time.time()
    for silo in sorted(path.stem for path in (coordinator / "keys").glob("*.pub")):
        contact = contacts.get(silo)
        if contact is None:
            yield f"silo {silo}: never connected"
        else:
            state = "online" if now - contact.time < ONLINE_SECONDS else "offline"
            yield f"silo {silo}: {state}, last contact {format_time(contact.time)} from {contact.address}"
    yield from describe_last_run(read_output_folder(coordinator / "federation.toml"))


def describe_last_run(root: Path) -> Iterator[str]:
    """Yield the result, the last round and the rejected replies of the newest run."""
    if not (root / RESULT_FILE).exists():
        yield "no run yet"
        return
    result = read_result(root)
    yield escape_text(f"last run: {result.status}{f': {result.message}' if result.message else ''}")
    files = sorted(root.glob(f"*/{RunFolder.RECORDS_FILE}"), key=lambda path: path.stat().st_mtime)
    records = [json.loads(line) for line in files[-1].read_text().splitlines()] if files else []
    if records:
        yield f"run folder {files[-1].parent.name}: round {records[-1]['round']}, {len(records)} rounds recorded"
    for record in records:
        for silo, values in record["silos"].items():
            if values.get("rejected"):
                yield escape_text(f"round {record['round']}: {silo} rejected: {values['rejected']}")


def read_result_since(root: Path, start: float) -> RunResult:
    """Return the result of the last run, unless it is older than this time."""
    path = root / RESULT_FILE
    if path.exists() and path.stat().st_mtime < start:
        return RunResult("failed", EXIT_FAILED, "no server app was started; see the log of serve.sh")
    return read_result(root)


def read_output_folder(run_config: Path) -> Path:
    """Return the folder of run folders that a run configuration names."""
    try:
        settings: dict[str, Any] = tomllib.loads(run_config.read_text())
    except FileNotFoundError:
        raise InputError(f"{run_config} does not exist; name the coordinator's folder of a federation") from None
    except (OSError, ValueError) as e:
        raise InputError(f"{run_config}: {e}") from e
    return run_config.parent / str(settings.get("out", "runs"))


def format_time(seconds: float) -> str:
    """Return a time stamp of this machine's time zone."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(seconds))
