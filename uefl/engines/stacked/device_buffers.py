"""Tensors that keep their memory address from round to round, so that captured and compiled steps can reuse them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from uefl.core.federation import Tensors, Update
from uefl.core.local import LocalTraining
from uefl.engines.optimizer_state import OPTIMIZER_PREFIX
from uefl.engines.stacked.capture_lock import CAPTURE_LOCK
from uefl.engines.stacked.client_stack import ClientStack, allocate_stack
from uefl.engines.stacked.stacked_optimizer import StackedOptimizer


class DeviceBuffers:
    """The tensors and optimizers of one stack in training, and the steps captured on them."""

    def __init__(
        self, stack: ClientStack, trainable_names: Collection[str], local: LocalTraining, updates: Sequence[Update]
    ) -> None:
        first_client = {**stack.shared_tensors, **{n: t[0] for n, t in stack.client_tensors.items()}}
        client_tensors = {n: allocate_stack(t, len(stack.silo_names)) for n, t in first_client.items()}
        client_state = {n: t for n, t in stack.client_state.items() if not n.startswith(OPTIMIZER_PREFIX)}
        self.stack = ClientStack(
            silo_names=stack.silo_names,
            client_tensors=client_tensors,
            shared_tensors={},
            client_received=allocate_like(stack.client_received),
            shared_received=allocate_like(stack.shared_received),
            client_state=allocate_like(client_state),
            client_extras=allocate_like(stack.client_extras),
            shared_extras=allocate_like(stack.shared_extras),
            public_set=allocate_like(stack.public_set),
        )
        self.updates, self.reset_optimizer = updates, local.reset_optimizer
        self.optimizers = []
        for update in updates:
            params = {n: t for n, t in client_tensors.items() if n in trainable_names and update.is_trainable(n)}
            self.optimizers.append(StackedOptimizer(local, params, {n: update.lr_multiplier(n) for n in params}))
        self.lr = next(t for t in client_tensors.values() if t.is_floating_point()).new_zeros(())
        self.captured_steps: dict[Any, CapturedStep] = {}
        self.compiled_losses: dict[Any, Callable[..., Tensor]] = {}
        self.bound_tensors: Tensors = {}  # the network's tensors as compiled code uses them
        self.uncompilable_losses: set[Any] = set()
        self.graph_pool: Any = None  # memory shared by all captured steps; their results are written in place

    def copy_stack(self, stack: ClientStack, updates: Sequence[Update], lr: float) -> None:
        """Copy all tensors of a stack of the same shapes into the buffers."""
        self.stack = self.stack._replace(silo_names=stack.silo_names)
        # A shared tensor is copied to every silo.
        copy_tensors(self.stack.client_tensors, {**stack.shared_tensors, **stack.client_tensors})
        copy_tensors(self.stack.client_received, stack.client_received)
        copy_tensors(self.stack.shared_received, stack.shared_received)
        copy_tensors(self.stack.client_state, stack.client_state)
        copy_tensors(self.stack.client_extras, stack.client_extras)
        copy_tensors(self.stack.shared_extras, stack.shared_extras)
        copy_tensors(self.stack.public_set, stack.public_set)
        self.lr.fill_(lr)
        for i, optimizer in enumerate(self.optimizers):
            optimizer.reset()
            if not self.reset_optimizer:
                restore_optimizer(optimizer, stack.client_state, f"{OPTIMIZER_PREFIX}{i}.")
        # A bound method stays equal from round to round; a new function may hold tensors of this round.
        if [u.loss for u in updates] != [u.loss for u in self.updates]:
            with CAPTURE_LOCK.work():
                for cache in (self.captured_steps, self.compiled_losses, self.uncompilable_losses):
                    cache.clear()
            self.graph_pool = None  # torch frees a pool without graphs
        self.updates = updates

    def run_step(self, signature: Any, run: Callable[..., None], *inputs: Tensor) -> None:
        """Run a step; steps of the same signature are captured and then replayed."""
        if signature not in self.captured_steps:
            self.graph_pool = self.graph_pool or torch.cuda.graph_pool_handle()
            self.captured_steps[signature] = CapturedStep(run, inputs, self.graph_pool)
        self.captured_steps[signature](*inputs)

    def optimizer_state(self) -> Tensors:
        """Return the optimizer state as part of the client state."""
        return {
            f"{OPTIMIZER_PREFIX}{i}.{entry}.{n}": t
            for i, optimizer in enumerate(self.optimizers)
            for entry, tensors in optimizer.state.items()
            for n, t in tensors.items()
            if not self.reset_optimizer
        }


class CapturedStep:
    """A step as a CUDA graph: the first call runs it, which also initializes libraries, the second captures it."""

    def __init__(self, step: Callable[..., None], inputs: Sequence[Tensor], graph_pool: Any) -> None:
        self.step, self.inputs, self.graph_pool = step, [t.clone() for t in inputs], graph_pool
        self.graph: torch.cuda.CUDAGraph | Literal[False] | None = None  # None: not captured yet; False: cannot be
        self.calls = 0

    def __call__(self, *inputs: Tensor) -> None:
        for buffer, tensor in zip(self.inputs, inputs):
            buffer.copy_(tensor)
        self.calls += 1
        if self.calls > 1 and self.graph is None:
            self.graph = self._capture()
        if self.graph:
            self.graph.replay()
        else:
            with CAPTURE_LOCK.work():
                self.step(*self.inputs)

    def _capture(self) -> torch.cuda.CUDAGraph | Literal[False]:
        """Capture the step without running it; some operations cannot be captured, such as a copy from the host.

        Other threads may wait for their copies meanwhile, so only calls of this one can break the capture.
        """
        with CAPTURE_LOCK.capture():  # until a failed graph is freed, and the device has no capture to end
            return self._capture_alone()

    def _capture_alone(self) -> torch.cuda.CUDAGraph | Literal[False]:
        graph, out_of_memory = torch.cuda.CUDAGraph(), False
        current = torch.cuda.current_stream()
        stream = None if current == torch.cuda.default_stream() else get_capture_stream(current)
        capture = torch.cuda.graph(graph, pool=self.graph_pool, stream=stream, capture_error_mode="thread_local")
        try:
            # After a capture that failed, torch would leave this thread with the capture's queue.
            with pause_garbage_collection(), torch.cuda.stream(current), capture:
                try:
                    self.step(*self.inputs)
                except torch.OutOfMemoryError:  # ending the capture raises another error
                    out_of_memory = True
                    raise
        except RuntimeError:
            torch.cuda.synchronize()
            if not out_of_memory:
                return False
        if out_of_memory:
            raise torch.OutOfMemoryError("the captured step of a stack does not fit into the device's memory")
        return graph


@cache
def get_capture_stream(_stream: torch.cuda.Stream) -> torch.cuda.Stream:
    """Return the queue on which the steps of another queue are captured: steps of two must not share work space."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Pause garbage collection: freeing another engine's graph would break a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def allocate_like(tensors: Tensors) -> Tensors:
    return {n: torch.empty_like(t) for n, t in tensors.items()}


@torch.no_grad()
def copy_tensors(targets: Tensors, tensors: Tensors) -> None:
    """Copy the tensors of the same names into `targets`."""
    for n, target in targets.items():
        target.copy_(tensors[n])


@torch.no_grad()
def restore_optimizer(optimizer: StackedOptimizer, client_state: Tensors, prefix: str) -> None:
    """Copy optimizer state from the client state; a weight whose shape has changed starts without state."""
    for n in optimizer.params:
        pairs = [(tensors[n], client_state.get(f"{prefix}{entry}.{n}")) for entry, tensors in optimizer.state.items()]
        if all(tensor is not None and tensor.shape == target.shape for target, tensor in pairs):
            for target, tensor in pairs:
                target.copy_(tensor)  # type: ignore[arg-type]
