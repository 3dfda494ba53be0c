"""When the files of a round are written: at once, or in a thread while the next round trains."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
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


class BackgroundWriter(RoundWriter):
    """Write the files of a round in a thread, in order; `wait` raises the error of a file that was not written.

    A file after it is not written either. A killed run resumes from the files that are complete.
    """

    def __init__(self, waiting: Callable[[], AbstractContextManager[None]]) -> None:
        self._waiting = waiting  # entered while this writer waits for the disk
        self._threads = ThreadPoolExecutor(1)
        self._pending: list[Future[None]] = []

    def __exit__(self, error_type: Any, *_: Any) -> None:
        with self._waiting():
            self._threads.shutdown()
        if error_type is None:
            self.wait()

    def submit(self, write: Callable[[], None]) -> None:
        earlier = list(self._pending)

        def write_after_earlier() -> None:
            for future in earlier:
                future.result()  # or its error
            write()

        self._pending.append(self._threads.submit(write_after_earlier))

    def wait(self) -> None:
        pending, self._pending = self._pending, []
        with self._waiting():
            for future in pending:
                future.result()
