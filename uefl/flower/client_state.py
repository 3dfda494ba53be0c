"""Store a silo's client state between rounds: one file per round in the silo's state folder, written atomically.

A round counts only after the server's next message confirms it. A silo therefore keeps two files: one of the last
accepted round and one of the current round. A repeated round starts from the same client state as the first attempt.
After the last round, the silo also keeps its copy of the model.
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import quote

from safetensors import SafetensorError

from uefl.core.errors import InputError
from uefl.core.federation import Tensors
from uefl.experiment.checkpoint import load_tensors, save_tensors
from uefl.experiment.files import PRIVATE_FILE_MODE, make_private_folder
from uefl.experiment.held_out import save_held_out
from uefl.experiment.run_folder import RunFolder
from uefl.experiment.silo_models import SiloModels


class ClientStateStore:
    """The client-state files of one silo in one run."""

    def __init__(self, folder: Path, run_id: str, silo_name: str) -> None:
        if not re.fullmatch(r"[0-9a-f]{1,64}", run_id):  # sent by the server, and part of a path here
            raise InputError(f"run id {run_id!r} is not a hexadecimal number")
        self.folder = folder / run_id / f"silo-{quote(silo_name, safe='')}"

    def read(self, accepted_round: int) -> tuple[Tensors, str]:
        """Return the client state of the last accepted round (0: none yet), and a note if it is lost."""
        if not accepted_round:
            return {}, ""
        try:
            return load_tensors(self._get_path(accepted_round))[0], ""
        except (OSError, SafetensorError, KeyError, ValueError):
            return {}, (
                f"the client state of round {accepted_round} is lost; training starts from the initial client state"
            )

    @property
    def model_path(self) -> Path:
        """The silo's copy of the final model."""
        return self.folder / RunFolder.MODEL_FILE

    def write_model(self, models: SiloModels) -> None:
        """Write the silo's copy of the final model, which stays at the silo."""
        self._make_folders()
        held_out_path = self.folder / RunFolder.HELD_OUT_FILE
        if models.held_out:
            save_held_out(held_out_path, models, models.held_out)
            held_out_path.chmod(PRIVATE_FILE_MODE)
        models.save(self.model_path)
        self.model_path.chmod(PRIVATE_FILE_MODE)

    def write(self, client_state: Tensors, round_number: int, accepted_round: int) -> None:
        """Write this round's file and delete older ones except the accepted one; a late process keeps newer files."""
        self._make_folders()
        save_tensors(self._get_path(round_number), client_state, {"round": round_number})
        self._get_path(round_number).chmod(PRIVATE_FILE_MODE)
        for path in self.folder.glob("round-*.safetensors"):
            stored_round = int(path.stem.removeprefix("round-"))
            if stored_round < round_number and stored_round != accepted_round:
                path.unlink(missing_ok=True)

    def _make_folders(self) -> None:
        for folder in (self.folder.parent.parent, self.folder.parent, self.folder):
            make_private_folder(folder)

    def _get_path(self, round_number: int) -> Path:
        return self.folder / f"round-{round_number}.safetensors"
