"""The lock of captures: one thread captures alone; threads that do not capture do not wait for each other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from uefl.engines.stacked.capture_lock import CaptureLock

SECONDS = 10.0  # until a thread that should have continued counts as stuck
HELD_SECONDS = 60.0  # until a lock is released if a test has failed


class Holder(threading.Thread):
    """A thread that holds the lock until it is told to release it."""

    def __init__(self, hold: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__(daemon=True)
        self.hold, self.has_begun, self.may_end = hold, threading.Event(), threading.Event()
        self.start()

    def run(self) -> None:
        with self.hold():
            self.has_begun.set()
            self.may_end.wait(HELD_SECONDS)

    def waits(self) -> bool:
        return not self.has_begun.wait(0.05)

    def end(self) -> None:
        self.may_end.set()
        self.join(SECONDS)


class InterruptedCondition(threading.Condition):
    """A condition whose first wait ends by Ctrl-C as soon as a second thread waits."""

    def __init__(self) -> None:
        super().__init__()
        self.num_waits, self.is_waited_for = 0, threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.num_waits += 1
        self.is_waited_for.set()
        if self.num_waits > 1:
            return super().wait(timeout)
        while self.num_waits < 2:
            super().wait(0.01)
        raise KeyboardInterrupt


def test_threads_that_do_not_capture_work_at_the_same_time() -> None:
    lock = CaptureLock()
    holders = [Holder(lock.work) for _ in range(3)]
    assert all(holder.has_begun.wait(SECONDS) for holder in holders)
    assert lock.excludes_captures
    assert not lock.is_capturing
    for holder in holders:
        holder.end()
    assert not lock.excludes_captures


def test_a_capture_waits_for_work_and_work_waits_for_a_capture() -> None:
    lock = CaptureLock()
    first = Holder(lock.work)
    assert first.has_begun.wait(SECONDS)
    capture = Holder(lock.capture)
    assert capture.waits()
    first.end()
    assert capture.has_begun.wait(SECONDS)
    assert lock.is_capturing
    later = Holder(lock.work)
    assert later.waits()
    capture.end()
    assert later.has_begun.wait(SECONDS)
    later.end()


def test_one_thread_captures_at_a_time() -> None:
    lock = CaptureLock()
    first = Holder(lock.capture)
    assert first.has_begun.wait(SECONDS)
    second = Holder(lock.capture)
    assert second.waits()
    first.end()
    assert second.has_begun.wait(SECONDS)
    second.end()


def test_a_thread_that_waits_to_capture_comes_before_new_work() -> None:
    """Else two stacks that evaluate in turns could keep a third from its capture."""
    lock = CaptureLock()
    first = Holder(lock.work)
    assert first.has_begun.wait(SECONDS)
    capture = Holder(lock.capture)
    assert capture.waits()
    later = Holder(lock.work)
    assert later.waits()
    first.end()
    assert capture.has_begun.wait(SECONDS)
    assert later.waits()
    capture.end()
    assert later.has_begun.wait(SECONDS)
    later.end()


def test_a_thread_that_is_interrupted_before_its_capture_lets_others_work() -> None:
    lock, condition = CaptureLock(), InterruptedCondition()
    lock._has_changed = condition

    def capture() -> None:
        with pytest.raises(KeyboardInterrupt), lock.capture():
            pass

    first = Holder(lock.work)
    assert first.has_begun.wait(SECONDS)
    interrupted = threading.Thread(target=capture, daemon=True)
    interrupted.start()
    assert condition.is_waited_for.wait(SECONDS)
    later = Holder(lock.work)
    assert later.has_begun.wait(SECONDS)
    for thread in (first, later):
        thread.end()
    interrupted.join(SECONDS)
    assert not lock.excludes_captures


@pytest.mark.parametrize("name", ["capture", "work"])
def test_an_error_releases_the_lock(name: str) -> None:
    lock = CaptureLock()
    with pytest.raises(RuntimeError, match="failed"), getattr(lock, name)():
        raise RuntimeError("failed")
    assert not lock.excludes_captures
