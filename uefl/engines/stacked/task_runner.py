"""Client tasks on a stack, such as the evaluation: silos with batches of equal length run together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from uefl.core import noise_addresses as addresses
from uefl.core.federation import Batch, ClientModel, ClientTask, Split, Tensors, iterate_batch_slices
from uefl.engines.stacked.capture_lock import CAPTURE_LOCK
from uefl.engines.stacked.client_stack import BatchSums, ClientStack, to_slice
from uefl.engines.stacked.device_data import DeviceData
from uefl.engines.stacked.silo_mapper import SiloMapper
from uefl.engines.stacked.stack_size import batch_length


class TaskRunner:
    """Run client tasks on the examples of a stack."""

    def __init__(
        self, data: DeviceData, mapper: SiloMapper, autocast: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self.data, self.mapper, self.autocast = data, mapper, autocast

    def run(
        self,
        task: str,
        client_task: ClientTask,
        stack: ClientStack,
        round_number: int,
        splits: Sequence[Split],
        *,
        eval_batch_size: int,
        derive_key: Callable[..., int],
        choose_stack_size: Callable[[int], int],
    ) -> list[BatchSums]:
        """Run a client task on all batches of these splits; one that needs a full split gets it as one batch.

        `choose_stack_size` returns how many silos fit into memory with batches of a length.
        """
        batch_sums: list[BatchSums] = []
        purpose = addresses.TASKS.get(task, task)
        for split in splits:
            sizes = self.data.sizes(split, stack.silo_names)
            batch_size = max(*sizes, 1) if client_task.needs_full_split else eval_batch_size
            for position, length, all_rows in iterate_equal_batches(sizes, batch_size):
                size = choose_stack_size(length)
                for rows in (all_rows[k : k + size] for k in range(0, len(all_rows), size)):
                    selected = stack.select(to_slice(rows))
                    keys = [derive_key(n, round_number, position, purpose, split) for n in selected.silo_names]
                    first = position * batch_size
                    sums = self._compute_sums(client_task, keys, selected, split, position, first, length)
                    batch_sums.append(BatchSums(split, rows, sums))
        return batch_sums

    def _compute_sums(
        self,
        client_task: ClientTask,
        noise_keys: Sequence[int],
        stack: ClientStack,
        split: Split,
        position: int,
        first: int,
        length: int,
    ) -> Tensors:
        """Run a client task on `length` examples of each silo from `first` on, its batch at this position."""
        starts = self.data.to_device([first + offset for offset in self.data.offsets(split, stack.silo_names)])
        x, y = self.data.gather_batch(split, starts[:, None] + torch.arange(length, device=self.data.device))
        keys = self.data.to_device(noise_keys)

        def compute(model: ClientModel, x: Tensor, y: Tensor, noise_key: Tensor) -> Tensors:
            with self.autocast():
                sums: Tensors = client_task.compute(model, Batch(x, y, position, noise_key=noise_key))
            return sums

        with CAPTURE_LOCK.work(), torch.no_grad():  # a task may compute gradients
            stacked_sums: Tensors = self.mapper.call_for_silos(stack, keys, compute, x, y, keys)
        return stacked_sums


def iterate_equal_batches(sizes: Sequence[int], batch_size: int) -> Iterator[tuple[int, int, list[int]]]:
    """Yield positions and lengths of batches, each with the rows of the silos that have such a batch."""
    batch_slices = [list(iterate_batch_slices(n, batch_size)) for n in sizes]
    for position in range(max(map(len, batch_slices))):
        rows_by_length: dict[int, list[int]] = {}
        for row, slices in enumerate(batch_slices):
            rows_by_length.setdefault(batch_length(slices, position), []).append(row)
        rows_by_length.pop(0, None)
        for length, rows in rows_by_length.items():
            yield position, length, rows
