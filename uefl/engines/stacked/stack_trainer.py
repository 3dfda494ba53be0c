"""The local training of a stack.

Batches are never padded: at each position of an epoch, silos with batches of equal length run a step together. On CUDA
a step is captured as a graph and then replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from uefl.core import noise_addresses as addresses
from uefl.core.federation import (
    Batch,
    Broadcast,
    ClientModel,
    Examples,
    Method,
    Phase,
    Tensors,
    Update,
    iterate_batch_slices,
)
from uefl.core.noise import batched_permutations
from uefl.engines.stacked.capture_lock import CAPTURE_LOCK
from uefl.engines.stacked.client_stack import ClientStack, to_slice
from uefl.engines.stacked.compiler import Compiler
from uefl.engines.stacked.device_buffers import DeviceBuffers
from uefl.engines.stacked.device_data import PUBLIC, DeviceData
from uefl.engines.stacked.silo_mapper import SiloMapper
from uefl.engines.stacked.stack_size import batch_length


class NoiseKeys(NamedTuple):
    """The functions of an engine that return the noise keys of its silos."""

    derive: Callable[..., int]  # of a silo's name and an address
    derive_order: Callable[[Phase, str, int, int], int]  # of the order of a silo's examples, in a round and an epoch


class StackTrainer:
    """Train the silos of stacks, whose tensors are in buffers."""

    def __init__(
        self,
        data: DeviceData,
        mapper: SiloMapper,
        compiler: Compiler | None,
        autocast: Callable[[], AbstractContextManager[object]],
        *,
        use_cuda_graphs: bool,
    ) -> None:
        self.data, self.mapper, self.compiler, self.autocast = data, mapper, compiler, autocast
        self.use_cuda_graphs = use_cuda_graphs

    def train(self, method: Method, buffers: DeviceBuffers, broadcast: Broadcast, keys: NoiseKeys) -> list[int]:
        """Train a stack, sorted by silo size, and return the number of steps of each silo."""
        num_steps, first = [0] * len(buffers.stack.silo_names), 0
        for phase in method.make_phases(broadcast):
            updates = slice(first, first + len(phase.updates))
            steps = self._run_phase(method, buffers, broadcast, keys, phase, updates)
            num_steps, first = [n + s for n, s in zip(num_steps, steps)], updates.stop
        return num_steps

    def finish(
        self, method: Method, stack: ClientStack, num_steps: list[int], lr: float
    ) -> tuple[list[Tensors], list[Tensors]]:
        """Return each silo's extras and client state; silos of equal size run together."""
        extras: list[Tensors] = [{} for _ in stack.silo_names]
        client_states: list[Tensors] = [{} for _ in stack.silo_names]
        sizes = self.data.sizes("train", stack.silo_names)
        for size, group in groupby(range(len(sizes)), sizes.__getitem__):
            rows = list(group)
            selected = stack.select(to_slice(rows))
            offsets = self.data.to_device(self.data.offsets("train", selected.silo_names))
            examples = self.data.gather_batch("train", offsets[:, None] + torch.arange(size, device=self.data.device))

            def finish(
                model: ClientModel, x: Tensor, y: Tensor, num_steps: int = num_steps[rows[0]]
            ) -> tuple[Tensors, Tensors]:
                return method.finish_training(model, Examples(x, y), num_steps=num_steps, lr=lr)

            with CAPTURE_LOCK.work(), torch.no_grad():  # a method may compute gradients here
                results = self.mapper.call_for_silos(selected, offsets, finish, *examples)
            for i, row in enumerate(rows):
                extras[row], client_states[row] = ({n: t[i] for n, t in tensors.items()} for tensors in results)
        return extras, client_states

    def _run_phase(
        self,
        method: Method,
        buffers: DeviceBuffers,
        broadcast: Broadcast,
        noise_keys: NoiseKeys,
        phase: Phase,
        updates: slice,
    ) -> list[int]:
        """Run one phase of the local training, whose updates are these of the buffers."""
        names, split = buffers.stack.silo_names, PUBLIC if phase.is_public else "train"
        purpose = addresses.PUBLIC_STEP if phase.is_public else addresses.TRAINING_STEP
        sizes = list(map(phase.count_examples, self.data.sizes(split, names)))
        batch_slices = [list(iterate_batch_slices(n, method.local.batch_size)) for n in sizes]
        positions = range(len(batch_slices[0]))
        for epoch in range(phase.epochs):
            order_keys = [noise_keys.derive_order(phase, name, broadcast.round, epoch) for name in names]
            steps = [[epoch * len(slices) + position for slices in batch_slices] for position in positions]
            keys = [[noise_keys.derive(n, broadcast.round, s, purpose) for n, s in zip(names, row)] for row in steps]
            numbers = self.data.to_device([order_keys, self.data.offsets(split, names), *steps, *keys])  # in one copy
            order = batched_permutations(numbers[0], sizes) + numbers[1][:, None]
            device_steps, device_keys = numbers[2 : 2 + len(positions)], numbers[2 + len(positions) :]
            for position in positions:
                lengths = [batch_length(slices, position) for slices in batch_slices]
                for length, group in groupby(range(len(names)), lengths.__getitem__):
                    if length:
                        rows = list(group)
                        clients = slice(rows[0], rows[-1] + 1)
                        start = batch_slices[0][position].start
                        indices = order[clients, start : start + length]
                        inputs = (indices, device_keys[position, clients], device_steps[position, clients])
                        self._run_step(method, buffers, clients, split, updates, epoch, *inputs)
        return [0 if phase.is_public else phase.epochs * len(slices) for slices in batch_slices]

    def _run_step(
        self,
        method: Method,
        buffers: DeviceBuffers,
        clients: slice,
        split: str,
        updates: slice,
        epoch: int,
        indices: Tensor,
        keys: Tensor,
        steps: Tensor,
    ) -> None:
        """Run one step of some clients of the stack, on CUDA as a captured graph."""

        def step(indices: Tensor, keys: Tensor, steps: Tensor) -> None:
            self._apply_updates(method, buffers, clients, split, updates, epoch, indices, keys, steps)

        if not self.use_cuda_graphs:
            with CAPTURE_LOCK.work():
                step(indices, keys, steps)
            return
        # A graph replays the epoch it was captured in.
        captured_epoch = epoch if any(update.per_epoch for update in buffers.updates[updates]) else 0
        signature = (clients.start, clients.stop, updates.start, indices.shape[1], captured_epoch)
        buffers.run_step(signature, step, indices, keys, steps)

    def _apply_updates(
        self,
        method: Method,
        buffers: DeviceBuffers,
        clients: slice,
        split: str,
        updates: slice,
        epoch: int,
        indices: Tensor,
        keys: Tensor,
        steps: Tensor,
    ) -> None:
        x, y = self.data.gather_batch(split, indices)
        stack = buffers.stack.select(clients)

        def adjust(model: ClientModel, gradients: Tensors) -> Tensors:
            adjusted = method.adjust_gradients(model, gradients)
            return dict(zip(adjusted, method.local.clip_gradients(list(adjusted.values()))))

        for update, optimizer in zip(buffers.updates[updates], buffers.optimizers[updates]):
            batch = Batch(x, y, steps, epoch if update.per_epoch else 0)
            gradients: Tensors | None = None
            if self.compiler:
                gradients = self.compiler.compute_gradients(buffers, update, keys, batch)
            if gradients is None:
                gradients = self._compute_gradients(stack, update, optimizer.params, keys, batch)
            with torch.no_grad():
                optimizer.step(self.mapper.call_for_silos(stack, keys, adjust, gradients), clients, buffers.lr)

    def _compute_gradients(
        self, stack: ClientStack, update: Update, params: Collection[str], keys: Tensor, batch: Batch
    ) -> Tensors:
        """Return the gradients of an update; the sum of all losses has the gradient of each silo's loss."""

        def compute_loss(model: ClientModel, x: Tensor, y: Tensor, step: Tensor) -> Tensor:
            with self.autocast():
                loss: Tensor = update.loss(model, Batch(x, y, step, batch.epoch))
            return loss

        trained = {n: stack.client_tensors[n].detach().requires_grad_() for n in params}
        stack = stack._replace(client_tensors={**stack.client_tensors, **trained})
        losses = self.mapper.call_for_silos(stack, keys, compute_loss, batch.x, batch.y, batch.step)
        gradients = torch.autograd.grad(losses.sum(), list(trained.values()), allow_unused=True)
        return {n: g for n, g in zip(trained, gradients) if g is not None}
