"""The audit log of a silo: one JSON line per message, in the silo's state folder, readable by its owner only."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from uefl.core.untrusted_text import escape_text
from uefl.experiment.files import PRIVATE_FILE_MODE, make_private_folder

AUDIT_FILE = "audit.jsonl"


def _format_time() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@dataclass
class AuditEntry:
    """What a silo was asked, what it sent, and whether it accepted the message."""

    time: str = field(default_factory=_format_time)
    silo: str = ""
    task: str = ""  # registration, training, or the queried client task
    run_id: str = ""
    round: int | None = None
    method: str = ""
    settings_hash: str = ""  # of the experiment; the line of a registration has the settings themselves
    settings: dict[str, Any] | None = None
    num_codewords: int = 0  # received codewords
    requested_codewords: int = 0  # codewords that the silo was asked to compute
    bytes_in: int = 0
    bytes_out: int = 0
    accepted: bool = False
    reason: str = ""  # why the message was rejected

    def describe_settings(self, payload: dict[str, Any]) -> None:
        """Store what the payload of a message asks for; its values have not been checked."""
        experiment, round_number = payload.get("experiment"), payload.get("round")
        settings = experiment if isinstance(experiment, dict) else {}
        self.method = escape_text(settings.get("name", ""), 100)
        self.run_id = escape_text(payload.get("run_id", ""), 100)
        self.round = round_number if isinstance(round_number, int) else None
        self.settings_hash = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
        self.settings = settings if self.task == "registration" else None


def append_audit_entry(state_folder: Path, entry: AuditEntry) -> None:
    """Append one line to the audit log in a single write, which several processes may do at once."""
    make_private_folder(state_folder)
    line = json.dumps({name: value for name, value in asdict(entry).items() if value is not None}) + "\n"
    file = os.open(state_folder / AUDIT_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, PRIVATE_FILE_MODE)
    try:
        os.fchmod(file, PRIVATE_FILE_MODE)  # an earlier file may have another mode
        content, end = line.encode(), os.fstat(file).st_size
        if os.write(file, content) < len(content):  # the disk is full; a part of a line would damage the next one
            os.ftruncate(file, end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(file)
