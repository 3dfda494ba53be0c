"""A lock that keeps captures of CUDA graphs apart from the other work of threads on the same device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class CaptureLock:
    """One thread captures, or any number of threads do what a capture does not allow beside it.

    A thread that waits to capture comes before those that begin other work.
    """

    def __init__(self) -> None:
        self._has_changed = threading.Condition()
        self._num_working = 0
        self._num_waiting_to_capture = 0
        self._is_capturing = False

    @property
    def is_capturing(self) -> bool:
        return self._is_capturing

    @property
    def excludes_captures(self) -> bool:
        """Whether a thread is at work, so that no other one can begin a capture."""
        return self._num_working > 0 or self._is_capturing

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Wait until no other thread is at work, and let none begin."""
        with self._has_changed:
            self._num_waiting_to_capture += 1
            try:
                self._has_changed.wait_for(lambda: not self.excludes_captures)
                self._is_capturing = True
            finally:
                self._num_waiting_to_capture -= 1
                self._has_changed.notify_all()  # after Ctrl-C, no capture follows that would do so
        try:
            yield
        finally:
            with self._has_changed:
                self._is_capturing = False
                self._has_changed.notify_all()

    @contextmanager
    def work(self) -> Iterator[None]:
        """Wait until no thread captures, and let none begin a capture. Must not be nested."""
        with self._has_changed:
            self._has_changed.wait_for(lambda: not self._is_capturing and not self._num_waiting_to_capture)
            self._num_working += 1
        try:
            yield
        finally:
            with self._has_changed:
                self._num_working -= 1
                self._has_changed.notify_all()


# One for all engines: to free the graphs of another one would break a capture. So would its gradients: torch computes
# those of all engines in one thread, whose cuDNN would wait in the other queue for the one that is captured.
CAPTURE_LOCK = CaptureLock()
