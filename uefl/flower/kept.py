"""What a silo keeps between rounds, in its own state folder: a file per round, written atomically.

A round counts only once the server's next message says that it was accepted, so a silo keeps two files: that of the
last accepted round and that of the round it is in. A round that is tried again then starts from where it started.
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import quote

from safetensors import SafetensorError

from uefl.checkpoint import load_tensors, save_tensors
from uefl.errors import InputError
from uefl.federation import State


class Kept:
    """The files of one silo in one run."""

    def __init__(self, folder: Path, run: str, silo: str) -> None:
        if not re.fullmatch(r"[0-9a-f]{1,64}", run):  # it comes from the server and becomes part of a path
            raise InputError(f"run id {run!r} is not a hexadecimal number")
        self.folder = folder / run / f"silo-{quote(silo, safe='')}"

    def read(self, accepted: int) -> tuple[State, str]:
        """What was kept in the last accepted round (0: nothing yet), and what to say if it is lost."""
        if not accepted:
            return {}, ""
        try:
            return load_tensors(self._file(accepted))[0], ""
        except (OSError, SafetensorError, KeyError, ValueError):
            return {}, f"what it kept in round {accepted} is lost, started afresh"

    def write(self, state: State, round_: int, accepted: int) -> None:
        """Keep this round's beside the accepted one, and nothing older; who is late leaves newer ones alone."""
        self.folder.mkdir(parents=True, exist_ok=True)
        save_tensors(self._file(round_), state, {"round": round_})
        for file in self.folder.glob("round-*.safetensors"):
            number = int(file.stem.removeprefix("round-"))
            if number < round_ and number != accepted:
                file.unlink(missing_ok=True)

    def _file(self, round_: int) -> Path:
        return self.folder / f"round-{round_}.safetensors"
