"""The last contact of every silo, which the guard writes and `uefl deploy status` reads."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import NamedTuple

from uefl.experiment.files import write_text

log = logging.getLogger("uefl")
CONTACTS_FILE = "contacts.json"
WRITE_SECONDS = 5.0  # nodes poll each second, so not every request is written


class Contact(NamedTuple):
    """Time and address of the last request of a silo."""

    time: float
    address: str


class ContactFile:
    """Keep the contacts in memory, and write them to a file from time to time."""

    def __init__(self, folder: Path) -> None:
        self._path, self._contacts, self._written = folder / CONTACTS_FILE, read_contacts(folder), 0.0

    def add(self, silo: str, address: str) -> None:
        """Store that a silo sent a request."""
        is_new, now = silo not in self._contacts, time.time()
        self._contacts[silo] = Contact(now, address)
        if is_new or now - self._written > WRITE_SECONDS:
            self._written = now
            try:
                write_text(self._path, json.dumps(self._contacts))
            except OSError as e:  # such as a full disk; requests are forwarded all the same
                log.error("guard: cannot write %s: %s", self._path, (e.strerror or str(e)).lower())


def read_contacts(folder: Path) -> dict[str, Contact]:
    """Return the contacts in the folder of a coordinator; none if no guard has run."""
    try:
        return {silo: Contact(*values) for silo, values in json.loads((folder / CONTACTS_FILE).read_text()).items()}
    except (OSError, ValueError, TypeError):
        return {}
