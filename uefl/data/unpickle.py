"""Pickles read without trust: bytes, text, numbers, lists, dicts and byte arrays, and nothing that runs code."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np

from uefl.errors import InputError


class _Array:
    """Stands in for numpy's array while its parts arrive: numpy's own set-up never sees what the file says."""

    def __init__(self, *_: object) -> None:
        self.value = np.empty(0, np.uint8)

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, fortran, raw = state
        if not isinstance(kind, _Kind) or kind.code not in ("u1", "uint8", "|u1"):
            raise pickle.UnpicklingError("an array that does not hold bytes")
        if isinstance(raw, str):
            raw = raw.encode("latin-1")
        self.value = np.frombuffer(raw, np.uint8).reshape(shape, order="F" if fortran else "C")


class _Kind:
    """Stands in for numpy's dtype."""

    def __init__(self, code: Any = "", *_: object) -> None:
        self.code = code.decode("latin-1") if isinstance(code, bytes) else code

    def __setstate__(self, state: Any) -> None:
        """Byte order, which bytes do not have."""


def _encoded(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes in old protocols."""
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"encoding {encoding!r}")
    return text.encode("latin-1")


ADMITTED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Kind,
    ("_codecs", "encode"): _encoded,
}


# The unpickler in C can be made to allocate gigabytes by one forged memo index; the one in Python keeps a dict.
class _Unpickler(pickle._Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ADMITTED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return ADMITTED[module, name]


def unpickled(data: bytes, where: str) -> dict[str, Any]:
    """The dictionary in a pickle, its keys as text."""
    try:
        found = _Unpickler(io.BytesIO(data), encoding="bytes").load()
        if not isinstance(found, dict):
            raise pickle.UnpicklingError("it holds no dictionary")
        return {_text(key): v.value if isinstance(v, _Array) else v for key, v in found.items()}
    except Exception as e:  # forged opcodes raise whatever they lead to
        line = " ".join(str(e).split()) or type(e).__name__
        raise InputError(f"{where}: refused or damaged pickle ({line})") from e


def _text(key: Any) -> str:
    return key.decode("latin-1") if isinstance(key, bytes) else str(key)
