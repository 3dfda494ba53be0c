"""When the files of a round are written: at once, or while the next round trains."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Self


class RoundWriter:
    """Write the files of a round at once."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        """End with everything written."""

    def submit(self, write: Callable[[], None]) -> None:
        """Call a function that writes a file, after those that were submitted before it."""
        write()

    def wait(self) -> None:
        """Wait until all files are written."""


class DeferredWriter(RoundWriter):
    """Write the files of a round in order, in a call of `write_all`, but before `wait` returns.

    A file after one that could not be written is not written either. A killed run resumes from complete files.
    """

    def __init__(self, waiting: Callable[[], AbstractContextManager[None]]) -> None:
        self._waiting = waiting  # entered while `wait` writes
        self._pending: list[Callable[[], None]] = []

    def __exit__(self, *_: Any) -> None:
        self.wait()

    def submit(self, write: Callable[[], None]) -> None:
        self._pending.append(write)

    def wait(self) -> None:
        if self._pending:
            with self._waiting():
                self.write_all()

    def write_all(self) -> None:
        """Write all files that wait for it, or raise the first error."""
        pending, self._pending = self._pending, []
        for write in pending:
            write()
