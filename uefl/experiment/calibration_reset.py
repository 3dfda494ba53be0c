"""Remove calibrations from the folder of a run, so that its models predict as before them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from uefl.core.errors import InputError
from uefl.experiment.calibration import SiloCalibration, read_calibrations, write_calibrations
from uefl.experiment.files import keep_old_version
from uefl.experiment.held_out import CALIBRATION_PART, LABELED_FILES, HeldOut, read_held_out, save_held_out
from uefl.experiment.run_folder import RunFolder
from uefl.experiment.silo_models import SiloModels


class Removal(NamedTuple):
    """What was removed, by silo, and under which names the files before it are kept."""

    calibrations: dict[str, SiloCalibration]
    examples: dict[str, HeldOut]  # of labeled files; those of a calibration part belong to the run
    restored: dict[str, HeldOut]  # examples of the calibration part that labeled files had replaced
    kept_names: list[str]

    def describe(self) -> Iterator[str]:
        """Yield one line per silo, and where to find the files before."""
        for name in sorted({*self.calibrations, *self.examples}):
            yield f"removed from {name}: {', '.join(self._list_parts(name))}"
        for name, own in self.restored.items():
            yield f"restored for {name}: {len(own.labels)} examples, {own.source}"
        yield f"the files before are kept as {', '.join(self.kept_names)}"

    def _list_parts(self, silo_name: str) -> Iterator[str]:
        if found := self.calibrations.get(silo_name):
            yield f"calibration with coverage={found.coverage:g} risk={found.risk:g} pooling={found.pooling}"
        if own := self.examples.get(silo_name):
            yield f"what its model predicts for {len(own.labels)} examples, {own.source}"


def remove_calibrations(folder: RunFolder, models: SiloModels, silo_name: str = "") -> Removal:
    """Remove the calibration of a silo, or of all, with what was stored of labeled files; old files get a new name."""
    old = read_calibrations(folder.calibration_path, models)
    calibrations = {name: found for name, found in old.items() if silo_name in ("", name)}
    examples = {
        name: own for name, own in models.held_out.items() if silo_name in ("", name) and own.source == LABELED_FILES
    }
    if not calibrations and not examples:
        raise _make_nothing_error(folder, models, silo_name)
    restored = _find_calibration_parts(folder.held_out_path, models, examples)
    kept_names = []
    if calibrations:
        left = {name: found for name, found in old.items() if name not in calibrations}
        write = partial(write_calibrations, folder.calibration_path, models, left)
        kept_names.append(_replace_or_remove(folder.calibration_path, write if left else None))
    if examples:
        held_out = {name: own for name, own in models.held_out.items() if name not in examples} | restored
        save = partial(save_held_out, folder.held_out_path, models, held_out)
        kept_names.append(_replace_or_remove(folder.held_out_path, save if held_out else None))
    return Removal(calibrations, examples, restored, kept_names)


def _replace_or_remove(path: Path, write: Callable[[], None] | None) -> str:
    """Keep a file under a new name, which is returned; then write the rest, or remove the file if nothing is left."""
    kept = keep_old_version(path)
    if write is None:
        path.unlink()
    else:
        write()
    return kept.name


def _find_calibration_parts(path: Path, models: SiloModels, examples: Mapping[str, HeldOut]) -> dict[str, HeldOut]:
    """Return the examples of the run's own calibration part that labeled files of these silos replaced."""
    found: dict[str, HeldOut] = {}
    for kept in sorted(path.parent.glob(f"{path.stem}-*{path.suffix}")) if examples else ():
        for name, own in read_held_out(kept, models).items():
            if name in examples and own.source == CALIBRATION_PART:
                found[name] = own  # the same in every file: a run has one calibration part
    return found


def _make_nothing_error(folder: RunFolder, models: SiloModels, silo_name: str) -> InputError:
    silos = models.description.silos.items()
    if any(facts.thresholds is not None for name, facts in silos if silo_name in ("", name)):
        return InputError(
            f"the calibration is part of {folder.model_path}, a copy of a calibrated model; remove it from the run, "
            "then save the copy again"
        )
    owner = f"silo {silo_name} of {folder.path}" if silo_name else str(folder.path)
    return InputError(f"{owner} has no calibration to remove")
