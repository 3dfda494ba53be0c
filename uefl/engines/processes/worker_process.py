"""A worker process: it holds views of all silos, and runs the clients that its parent names, one after another."""

from __future__ import annotations

import os
import pickle
import queue
import signal
import socket
import threading
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from uefl.core.federation import Broadcast, Examples, Method, Silo, Tensors
from uefl.engines.processes.channel import TASK_SLOTS, Channel, Message, Slot
from uefl.engines.serial import SerialEngine, ignore_progress


class TorchSettings(NamedTuple):
    """Settings of a process on which the bits of a result depend."""

    num_threads: int
    default_dtype: torch.dtype
    deterministic: bool
    warn_only: bool
    matmul_precision: str

    @classmethod
    def read(cls) -> TorchSettings:
        """Return the settings of this process."""
        return cls(
            torch.get_num_threads(),
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.get_float32_matmul_precision(),
        )

    def apply(self) -> None:
        """Give this process the same settings."""
        torch.set_num_threads(self.num_threads)
        torch.set_default_dtype(self.default_dtype)
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.warn_only)
        torch.set_float32_matmul_precision(self.matmul_precision)


class EngineParts(NamedTuple):
    """What a worker needs to run any silo of an engine."""

    silos: dict[str, Silo]  # as the parent's engine has them: type and memory layout are final; lazy ones come later
    public: Examples
    net: nn.Module
    initial_tensors: Tensors
    seed: int
    dtype: torch.dtype


class Work(NamedTuple):
    """What the server asks of its silos: a round of training, or a query."""

    settings: TorchSettings
    method: Method
    broadcast: Broadcast
    call: str  # `fit` or `query`
    arguments: dict[str, Any]
    shows_progress: bool  # else a worker sends none: each message interrupts the parent, which shares its cores


class WorkerEngine(SerialEngine):
    """The serial engine on tensors of its parent."""

    def __init__(self, parts: EngineParts, channel: Channel) -> None:
        super().__init__(
            list(parts.silos.values()),
            parts.net,
            seed=parts.seed,
            dtype=parts.dtype,
            on_warning=lambda message: channel.send(("warning", message)),
        )
        self.public, self.initial_tensors, self._shared_silos = parts.public, parts.initial_tensors, parts.silos
        self._channel = channel

    def _move_to_device(self, silo: Silo) -> Silo:
        return silo  # a copy would not be shared

    def _collect_public_examples(self, silos: Sequence[Silo]) -> Examples:
        del silos
        return Examples(torch.empty(0), torch.empty(0))  # those of the parent are shared

    def run_silo(self, work: Work, name: str, client_state: Tensors, lazy_silo: Silo | None) -> tuple[Any, Tensors]:
        """Return a silo's reply and its new client state; a lazy silo comes with the task."""
        if lazy_silo:  # for this task alone: its memory is used again
            self.silos = {**self._shared_silos, name: lazy_silo}
        self.client_states = {name: client_state} if client_state else {}
        self.on_progress = self._send_progress if work.shows_progress else ignore_progress
        broadcast = work.broadcast._replace(participants=(name,))
        if work.call == "fit":
            replies = self.fit(work.method, broadcast, **work.arguments)
        else:
            replies = self.query(work.method, broadcast=broadcast, **work.arguments)
        return next(iter(replies)), self.client_states.get(name, {})

    def _send_progress(self, silo_name: str, activity: str) -> None:
        self._channel.send(("progress", silo_name, activity))


class Worker:
    """Answer messages: of each kind the last one counts."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.engine: WorkerEngine | None = None
        self.work: Work | None = None
        self.errors: dict[Slot, str] = {}  # of messages that could not be unpacked here

    def handle(self, message: Message) -> None:
        """Load what a message brings; run and answer a task."""
        if message.slot in TASK_SLOTS:  # the answer to the task before may not have been read
            self.channel.send(self._answer(*message.parcel.unpack()), message.slot)
            return
        self.errors.pop(message.slot, None)
        try:
            value = message.parcel.unpack()
            if message.slot == Slot.DATA:
                self.engine = WorkerEngine(value, self.channel)
            else:
                self.work = value
                self.work.settings.apply()
        except Exception as e:  # of any kind: classes of users may fail in any way
            self.errors[message.slot] = describe_error(e)

    def _answer(self, name: str, client_state: Tensors, lazy_silo: Silo | None) -> tuple[Any, ...]:
        if self.errors:
            return "unloadable", name, next(iter(self.errors.values()))
        assert self.engine, "silos are sent first"
        assert self.work, "a broadcast is sent before its tasks"
        try:
            reply, new_state = self.engine.run_silo(self.work, name, client_state, lazy_silo)
        except Exception as e:  # the parent raises it in the order of silos
            return "failed", name, make_picklable(e), traceback.format_exc()
        return "reply", name, reply, new_state


def make_picklable(error: Exception) -> Exception:
    """Return the error, or one with its message if it cannot be sent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # errors of users may have any content
        return RuntimeError(describe_error(error))
    return error


def describe_error(error: Exception) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def main(handle: int) -> None:
    """Run tasks until the parent closes its end or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent receives Ctrl-C and ends this process
    channel, inbox = Channel(socket.socket(fileno=handle)), queue.SimpleQueue[Message]()

    def read() -> None:
        try:
            while True:
                inbox.put(channel.receive())
        except (EOFError, OSError):
            os._exit(0)  # at once, also amid a task

    threading.Thread(target=read, daemon=True).start()
    worker = Worker(channel)
    try:
        channel.send(("ready",))
        while True:
            worker.handle(inbox.get())
    except ConnectionError:  # an answer may notice the closed end before the thread above does
        os._exit(0)
