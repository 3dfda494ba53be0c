"""Read untrusted pickles: bytes, text, numbers, lists, dicts and byte arrays, and nothing that runs code."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np

from uefl.core.errors import InputError


class _ArrayPlaceholder:
    """Replace numpy's array while unpickling, so that numpy never processes values from the file."""

    def __init__(self, *_: object) -> None:
        self.value = np.empty(0, np.uint8)

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran_order, raw = state
        if not isinstance(dtype, _DtypePlaceholder) or dtype.code not in ("u1", "uint8", "|u1"):
            raise pickle.UnpicklingError("an array of another type than uint8")
        if isinstance(raw, str):
            raw = raw.encode("latin-1")
        self.value = np.frombuffer(raw, np.uint8).reshape(shape, order="F" if fortran_order else "C")


class _DtypePlaceholder:
    """Replace numpy's dtype while unpickling."""

    def __init__(self, code: Any = "", *_: object) -> None:
        self.code = code.decode("latin-1") if isinstance(code, bytes) else code

    def __setstate__(self, state: Any) -> None:
        """Ignore the byte order, which single bytes do not have."""


def _encode_latin1(text: str, encoding: str) -> bytes:
    """Encode text as Python 3 does for bytes in old protocols."""
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"encoding {encoding!r}")
    return text.encode("latin-1")


ALLOWED_GLOBALS: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _ArrayPlaceholder,
    ("numpy._core.multiarray", "_reconstruct"): _ArrayPlaceholder,
    ("numpy", "ndarray"): _ArrayPlaceholder,
    ("numpy", "dtype"): _DtypePlaceholder,
    ("_codecs", "encode"): _encode_latin1,
}


# One forged memo index makes the C unpickler allocate gigabytes; the Python unpickler uses a dict.
class _Unpickler(pickle._Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED_GLOBALS:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}")
        return ALLOWED_GLOBALS[module, name]


def unpickle_dict(data: bytes, display_path: str) -> dict[str, Any]:
    """Return the dictionary in a pickle with its keys as text."""
    try:
        content = _Unpickler(io.BytesIO(data), encoding="bytes").load()
        if not isinstance(content, dict):
            raise pickle.UnpicklingError("it contains no dictionary")
        return {_decode_key(key): v.value if isinstance(v, _ArrayPlaceholder) else v for key, v in content.items()}
    except Exception as e:  # forged opcodes can raise any exception
        reason = " ".join(str(e).split()) or type(e).__name__
        raise InputError(f"{display_path}: unsafe or damaged pickle ({reason})") from e


def _decode_key(key: Any) -> str:
    return key.decode("latin-1") if isinstance(key, bytes) else str(key)
