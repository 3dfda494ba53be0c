"""Captured steps in several threads, on a simulated device: captures and the end of graphs exclude each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from harness import make_clients, make_short_method, run_rounds

from uefl.algorithms import METHODS
from uefl.algorithms.fedavg import FedAvg
from uefl.core.federation import Update
from uefl.core.local import LocalTraining
from uefl.engines.stacked.capture_lock import CAPTURE_LOCK
from uefl.engines.stacked.client_stack import ClientStack
from uefl.engines.stacked.device_buffers import CapturedStep, DeviceBuffers
from uefl.engines.stacked.stacked_engine import StackedEngine


class SimulatedDevice:
    """The queue that a thread uses. As in torch, it stays that of a capture which cannot be ended."""

    def __init__(self) -> None:
        self.queue, self.synchronized_alone = "usual", list[bool]()

    @contextmanager
    def stream(self, queue: str) -> Iterator[None]:
        before, self.queue = self.queue, queue
        try:
            yield
        finally:
            self.queue = before

    @contextmanager
    def graph(self, _graph: Any, **_settings: Any) -> Iterator[None]:
        self.queue = "capture"
        try:
            yield
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    def synchronize(self) -> None:
        self.synchronized_alone.append(CAPTURE_LOCK.is_capturing)


def test_a_step_that_cannot_be_captured_runs_in_the_queue_of_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    device, queues = SimulatedDevice(), []
    for name in ("stream", "graph", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, getattr(device, name))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: device.queue)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda: "usual")

    def step(_x: torch.Tensor) -> None:
        queues.append(device.queue)
        assert CAPTURE_LOCK.excludes_captures, "a thread that captures must not meet another one's gradients"
        if device.queue == "capture":
            raise RuntimeError("operation not permitted when stream is capturing")

    captured = CapturedStep(step, [torch.zeros(2)], graph_pool=None)
    for _ in range(3):
        captured(torch.ones(2))
    assert queues == ["usual", "capture", "usual", "usual"], "run, then capture, which fails, and run again"
    assert device.synchronized_alone == [True], "no other thread may capture meanwhile"
    assert not CAPTURE_LOCK.excludes_captures


@pytest.mark.parametrize("name", ["fedavg", "fediir", "pmfl"])  # of losses, in a task, after training
def test_gradients_are_computed_while_no_other_thread_captures(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch computes the gradients of all threads in one, and cuDNN fails there if it changes to another queue."""
    alone: list[bool] = []
    compute_gradients = torch.autograd.grad

    def record(*args: Any, **kwargs: Any) -> Any:
        alone.append(CAPTURE_LOCK.excludes_captures)
        return compute_gradients(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", record)
    method = make_short_method(METHODS[name])
    run_rounds(method, make_clients(method, engine=StackedEngine), 1)
    assert alone
    assert all(alone)


def test_graphs_are_freed_while_no_other_thread_captures() -> None:
    class Graph:
        def __del__(self) -> None:
            freed_alone.append(CAPTURE_LOCK.excludes_captures)

    freed_alone: list[bool] = []
    stack = ClientStack(("ada",), {"weight": torch.zeros(1, 3)}, {}, {}, {}, {}, {}, {}, {})
    updates = [[Update(lambda *_: torch.zeros(()))] for _ in range(2)]  # of two functions
    buffers = DeviceBuffers(stack, ["weight"], LocalTraining(), updates[0])
    buffers.captured_steps["first"] = Graph()  # type: ignore[assignment]
    buffers.copy_stack(stack, updates[0], lr=0.1)
    assert freed_alone == []
    buffers.copy_stack(stack, updates[1], lr=0.1)
    assert freed_alone == [True]


def test_cached_memory_is_freed_while_no_other_thread_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """During a capture, torch keeps the memory that is cached."""
    freed_alone: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed_alone.append(CAPTURE_LOCK.excludes_captures))
    clients = make_clients(make_short_method(FedAvg), engine=StackedEngine)
    clients.device = torch.device("cuda")
    clients.release()
    assert freed_alone == [True]
