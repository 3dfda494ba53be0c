"""Describe an error at a silo for the coordinator: no path and no file name leaves the silo.

Names of files and folders may identify a patient. The silo's own log has the complete text.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from uefl.core.errors import InputError
from uefl.core.untrusted_text import escape_text

SEE_LOG = "the silo's log has the details"
_ABSOLUTE_PATH = re.compile(r"(?<![\w.~-])/[^/\s'\"]+")


class SiloDataError(InputError):
    """The silo's own data cannot be read; the text names no file."""


def describe_data_error(path: Path) -> str:
    """Return why a silo's data cannot be read, in general terms."""
    if not path.exists():
        return f"the data folder of this silo does not exist; {SEE_LOG}"
    if path.is_dir() and not any(names for _, _, names in os.walk(path)):
        return f"the data folder of this silo has no files; {SEE_LOG}"
    return f"a file of this silo cannot be read; {SEE_LOG}"


def describe_error(error: Exception, local_paths: Iterable[Path] = ()) -> str:
    """Return one line for the coordinator; of an error that is not ours, only its kind."""
    if isinstance(error, OSError):
        return f"{type(error).__name__}: {(error.strerror or 'no reason given').lower()}; {SEE_LOG}"
    if not isinstance(error, InputError):
        return f"{type(error).__name__} at this silo; {SEE_LOG}"
    if not isinstance(error, SiloDataError) and names_local_path(str(error), local_paths):
        return f"a file of this silo is invalid; {SEE_LOG}"
    return escape_text(" ".join(str(error).split()) or type(error).__name__)


def names_local_path(text: str, local_paths: Iterable[Path]) -> bool:
    """Return whether a text contains a path of this machine."""
    if any(str(path) in text for path in local_paths if len(path.parts) > 1):
        return True
    return any(os.path.lexists(match) for match in _ABSOLUTE_PATH.findall(text))
