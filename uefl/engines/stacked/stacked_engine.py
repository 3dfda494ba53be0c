"""The stacked engine: the weights of several silos are stacked, and one pass trains or evaluates them all.

Silos are stacked if they have equally many codewords and client state of the same shapes. The engine makes the stacks
and the replies; `StackTrainer` trains a stack, and `TaskRunner` runs client tasks on it. A stack of one silo runs
without `vmap`, for networks that fill a device with one silo's batch.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from uefl.core.aggregate import find_finite_rows
from uefl.core.errors import InputError
from uefl.core.federation import (
    SPLITS,
    Broadcast,
    ClientTask,
    Evaluations,
    Method,
    Reply,
    Silo,
    Split,
    Tensors,
    find_row,
    gather_accessible_rows,
    is_codeword_tensor,
    is_integer,
    size_in_bytes,
)
from uefl.core.lazy_tensor import is_lazy
from uefl.engines.optimizer_state import OPTIMIZER_CODEWORDS, drop_stale_optimizer_state, list_codeword_indices
from uefl.engines.serial import SerialEngine, has_torch_dropout, to_channels_last
from uefl.engines.stacked.capture_lock import CAPTURE_LOCK
from uefl.engines.stacked.client_stack import (
    PUBLIC_SET,
    BatchSums,
    ClientStack,
    ReceivedClient,
    add_batch_sums,
    describe_silos,
    pack_tensors,
    stack_clients,
    unstack_tensors,
)
from uefl.engines.stacked.compiler import Compiler
from uefl.engines.stacked.device_buffers import DeviceBuffers
from uefl.engines.stacked.device_data import DeviceData
from uefl.engines.stacked.silo_mapper import SiloMapper
from uefl.engines.stacked.stack_size import compute_stack_size, count_activations
from uefl.engines.stacked.stack_trainer import NoiseKeys, StackTrainer
from uefl.engines.stacked.task_runner import TaskRunner
from uefl.engines.stacked.two_part_tasks import complete_answers


class StackedEngine(SerialEngine):
    """Run clients in this process, several at a time, but at most `max_stack_size`; 0 sets the limit by memory."""

    _num_public_sets = 1  # sets of public images in `public`, of equal size: one for each federation

    def __init__(
        self,
        silos: Sequence[Silo],
        net: nn.Module,
        *,
        max_stack_size: int = 0,
        use_cuda_graphs: bool = True,
        use_compiler: bool = False,
        **settings: Any,
    ) -> None:
        self._is_lazy = any(is_lazy(silo.train.x) for silo in silos)
        try:
            super().__init__(silos, net, **settings)
            public_offsets = {name: self._num_public * self._get_public_set(name) for name in self.silos}
            self._data = DeviceData(self.device, self.public, self._num_public, public_offsets)
            self._load_stack([*self.silos][:1] if self._is_lazy else [*self.silos])
        except torch.OutOfMemoryError:
            hint = "use fewer images per silo" if self._is_lazy else "use lazy=true, or fewer images per silo"
            raise InputError(f"the silos' images do not fit into the memory of {self.device}; {hint}") from None
        if has_torch_dropout(self.net):
            raise InputError("engine=stacked does not support torch's Dropout; use uefl's Dropout or engine=serial")
        self.max_stack_size = max_stack_size
        # A captured graph reads from one place, but the examples of lazy silos are loaded anew for every stack.
        use_cuda_graphs = use_cuda_graphs and self.device.type == "cuda" and not self._is_lazy
        public_sets = self.public.x.view(self._num_public_sets, self._num_public, *self.public.x.shape[1:])
        has_sets = self._num_public and self._num_public_sets > 1
        self._public_set_numbers = [
            {PUBLIC_SET: self._data.to_device([i])} if has_sets else {} for i in range(self._num_public_sets)
        ]
        self._mapper = SiloMapper(self.net, public_sets, self.matmul_precision)
        self._trainable_names = self._mapper.trainable_names
        x = next(iter(self.silos.values())).test.x
        # Lazy examples have not been converted to the network's type yet.
        self._activations = count_activations(self.net, x.shape[1:], x.dtype if is_integer(x) else None)
        self._buffers: dict[Any, DeviceBuffers] = {}
        parts = (self.net, self._trainable_names, self._noise_layers, self._autocast)
        self._compiler = Compiler(*parts, self._mapper.select_public_images) if use_compiler else None
        # Neither refers to the engine, whose memory would otherwise be freed only by the garbage collection.
        self._trainer = StackTrainer(
            self._data, self._mapper, self._compiler, self._autocast, use_cuda_graphs=use_cuda_graphs
        )
        self._task_runner = TaskRunner(self._data, self._mapper, self._autocast)

    def fit(self, method: Method, broadcast: Broadcast, *, evaluate: bool = True) -> Iterator[Reply]:
        return self._fit_clients(method, [broadcast], evaluate=evaluate)

    def query(self, method: Method, task: str, broadcast: Broadcast, splits: Sequence[Split]) -> Iterator[Reply]:
        return self._query_servers(method, task, [broadcast], splits)

    def _query_servers(
        self, method: Method, task: str, broadcasts: Sequence[Broadcast], splits: Sequence[Split]
    ) -> Iterator[Reply]:
        """Run a client task at the participants of one server, or of several servers."""
        client_task = method.client_tasks[task]
        if not client_task.needs_full_split:
            return self._query_clients(method, task, client_task, broadcasts, splits)
        first_part = client_task._replace(compute=client_task.parts.prepare) if client_task.parts else client_task
        if client_task.parts and self._can_stack_full_splits(broadcasts):
            prepared = self._query_clients(method, task, first_part, broadcasts, splits)
            return iter(sorted(complete_answers(client_task.parts, prepared), key=lambda reply: reply.silo_name))
        replies = (
            reply
            for broadcast in broadcasts
            for reply in self._query_one_by_one(method, task, first_part, broadcast, splits)
        )
        return complete_answers(client_task.parts, replies) if client_task.parts else replies

    def _can_stack_full_splits(self, broadcasts: Sequence[Broadcast]) -> bool:
        """Return whether silos are stacked in a task that needs a full split; few silos on a CPU gain nothing."""
        has_groups = any(silo.train_groups is not None for silo in self.silos.values())
        return (self.device.type == "cuda" or len(broadcasts) > 1) and not has_groups and not self._is_lazy

    def release(self) -> None:
        self._buffers.clear()
        if self._compiler:
            self._compiler.release()
        with CAPTURE_LOCK.work():  # torch keeps cached memory while another thread captures
            gc.collect()  # buffers and the graphs captured on them refer to each other
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _fit_clients(self, method: Method, broadcasts: Sequence[Broadcast], *, evaluate: bool) -> Iterator[Reply]:
        """Train the participants of one round of one server, or of several servers."""
        used_signatures = set()

        def fit_stack(stack: ClientStack) -> list[Reply]:
            signature, replies = self._fit_stack(method, broadcasts, stack, evaluate=evaluate)
            used_signatures.add(signature)
            return replies

        yield from self._run_stacks(method, broadcasts, fit_stack, with_gradients=True)
        # Buffers of other shapes are not needed again: codewords were added since.
        self._buffers = {s: buffers for s, buffers in self._buffers.items() if s in used_signatures}

    def _fit_stack(
        self, method: Method, broadcasts: Sequence[Broadcast], stack: ClientStack, *, evaluate: bool
    ) -> tuple[Any, list[Reply]]:
        """Evaluate and train a stack; return the signature of its buffers and the replies."""
        broadcast, started, names = broadcasts[0], time.perf_counter(), stack.silo_names
        splits, local_splits = (method.eval_splits, method.local_eval_splits) if evaluate else ((), ())
        # Copied to the host at the end, so that the host does not wait for the device in between.
        received_sums = self._evaluate_stack(method, stack, broadcast.round - 1, splits)
        self.on_progress(describe_silos(names), "training")
        signature, buffers = self._get_buffers(method, broadcast, stack)
        num_steps = self._train_stack(method, buffers, broadcast)
        self.net.eval()
        extras, client_states = self._trainer.finish(method, buffers.stack, num_steps, broadcast.lr)
        local_sums = self._evaluate_stack(method, buffers.stack, broadcast.round, local_splits)
        stored, tensors = self._unpack_buffers(method, buffers, broadcasts, client_states)
        sent = [({}, {}) if broadcast.is_personal else method.pack_reply(*pair) for pair in zip(tensors, extras)]
        received_bytes, sent_bytes = stack.received_bytes(), [sum(map(size_in_bytes, pair)) for pair in sent]
        finite = find_finite_rows(buffers.stack.client_tensors, len(names))  # the host waits for the device from here
        received, local = (add_batch_sums(names, sums, on_host=True) for sums in (received_sums, local_sums))
        seconds = (time.perf_counter() - started) / len(names)
        replies = [
            Reply(
                silo_name=name,
                num_examples=len(self.silos[name].train.y),
                tensors=sent[i][0],
                evaluations=Evaluations(received[name], local[name]),
                extras=sent[i][1],
                received_bytes=received_bytes,
                sent_bytes=sent_bytes[i],
                seconds=seconds,
                is_finite=finite[i] and sent[i][0] is tensors[i] and not sent[i][1],
            )
            for i, name in enumerate(names)
        ]
        # Only now: if memory had ended above, silos would train again, from the state that they had.
        self.client_states.update(stored)
        return signature, replies

    def _query_clients(
        self,
        method: Method,
        task: str,
        client_task: ClientTask,
        broadcasts: Sequence[Broadcast],
        splits: Sequence[Split],
    ) -> Iterator[Reply]:
        """Run a client task, whose name is `task`, stack by stack."""

        def query_stack(stack: ClientStack) -> list[Reply]:
            started = time.perf_counter()
            self.on_progress(describe_silos(stack.silo_names), task)
            sums = self._query_stack(method, task, client_task, stack, broadcasts[0].round, splits)
            answers = add_batch_sums(stack.silo_names, sums, on_host=task == "evaluate")
            seconds, received_bytes = (time.perf_counter() - started) / len(stack.silo_names), stack.received_bytes()
            return [
                Reply(
                    silo_name=name,
                    num_examples=len(self.silos[name].train.y),
                    answers=answers[name],
                    received_bytes=received_bytes,
                    sent_bytes=sum(size_in_bytes(answer) for answer in answers[name].values()),
                    seconds=seconds,
                )
                for name in stack.silo_names
            ]

        return self._run_stacks(method, broadcasts, query_stack, with_gradients=False)

    # --- stacks ---------------------------------------------------------------------------------------------------

    def _run_stacks(
        self,
        method: Method,
        broadcasts: Sequence[Broadcast],
        run_stack: Callable[[ClientStack], list[Reply]],
        *,
        with_gradients: bool,
    ) -> Iterator[Reply]:
        """Run all participants, stack by stack; a stack that does not fit into memory is split."""
        done: set[str] = set()
        while True:
            stack: ClientStack | None = None
            too_large = 0
            try:
                for stack in self._make_stacks(method, broadcasts, done, with_gradients=with_gradients):
                    if self._is_lazy:
                        self._load_stack(stack.silo_names)
                    replies = run_stack(stack)
                    done.update(stack.silo_names)
                    stack = None  # frees its memory, and if the next one cannot be made, this one is not too large
                    yield from replies
            except torch.OutOfMemoryError:  # of a step, or of the stack itself
                num_left = sum(name not in done for broadcast in broadcasts for name in broadcast.participants)
                limit = self._choose_stack_size(method, with_gradients=with_gradients)
                too_large = len(stack.silo_names) if stack else min(num_left, limit)
            if not too_large:
                return
            del stack  # frees its memory, as leaving the handler above freed that of the failed step
            self._split_stacks(too_large)

    @property
    def _num_public(self) -> int:
        """Return the number of public images of a federation."""
        return len(self.public.y) // self._num_public_sets

    def _get_public_set(self, name: str) -> int:
        """Return the number of the set of public images that this silo reads."""
        del name
        return 0

    def _load_stack(self, silo_names: Sequence[str]) -> None:
        """Put the examples of these silos on the device."""
        splits: dict[str, dict[str, Any]]
        splits = {name: {split: self._load_split(name, split) for split in SPLITS} for name in silo_names}
        self._data.load({name: replace(self.silos[name], **own) for name, own in splits.items()})

    def _split_stacks(self, too_large: int) -> None:
        """Halve the stacks after one of this size did not fit into the device's memory."""
        if too_large == 1:
            raise InputError(
                f"the batch of one silo does not fit into the memory of {self.device}; use a smaller local.batch_size"
            )
        self.max_stack_size = -(-too_large // 2)
        self.release()
        self.on_warning(
            f"{too_large} silos at a time do not fit into the memory of {self.device}; "
            f"the run continues with {self.max_stack_size} at a time."
        )

    def _make_stacks(
        self, method: Method, broadcasts: Sequence[Broadcast], done: Collection[str], *, with_gradients: bool
    ) -> Iterator[ClientStack]:
        """Yield stacks of the remaining silos, each of one shape and of limited size, the largest silos first."""
        clients = [
            client
            for broadcast in broadcasts
            for client in self._receive_broadcasts(
                method, broadcast, [n for n in broadcast.participants if n not in done]
            )
        ]
        by_shape: dict[Any, list[ReceivedClient]] = {}
        for client in sorted(clients, key=lambda client: (-len(self.silos[client.name].train.y), client.name)):
            by_shape.setdefault(client.shapes(), []).append(client)
        max_size = self._choose_stack_size(method, with_gradients=with_gradients)
        for group in by_shape.values():
            num_stacks = -(-len(group) // max_size)
            size = -(-len(group) // num_stacks)  # as few stacks as possible, of about equal size
            for start in range(0, len(group), size):
                yield stack_clients(group[start : start + size], one_server=len(broadcasts) == 1)

    def _choose_stack_size(self, method: Method, *, with_gradients: bool, batch_size: int = 0) -> int:
        """Return how many silos fit at a time, with batches of the method's size or of another one."""
        batch_size = batch_size or (method.local.batch_size if with_gradients else method.local.eval_batch_size)
        return self.max_stack_size or compute_stack_size(
            self._activations, batch_size, self.device.type, with_gradients=with_gradients
        )

    def _receive_broadcasts(self, method: Method, broadcast: Broadcast, names: Sequence[str]) -> list[ReceivedClient]:
        """Return what each of these silos has when its round begins."""
        local_names = list(method.client_state_names(self.net))
        received = {n: self._move_tensor(t) for n, t in broadcast.model_state.items() if not is_codeword_tensor(n)}
        extras = {n: to_channels_last(t.to(self.device)) for n, t in broadcast.extras.items()}
        all_codewords = {n: self._move_tensor(t) for n, t in broadcast.model_state.items() if is_codeword_tensor(n)}
        gathered: dict[bytes, Tensors] = {}  # silos with equal rows of the ledger share their codewords
        clients = []
        for name in names:
            access_row = broadcast.access[find_row(broadcast.silo_names, name)]
            row_bytes = access_row.numpy(force=True).tobytes()
            if row_bytes not in gathered:
                gathered[row_bytes] = gather_accessible_rows(all_codewords, access_row)
            codewords = gathered[row_bytes]
            stored = self.client_states.get(name) or self._make_client_state(method, name)
            stored = drop_stale_optimizer_state(stored, access_row) | self._make_label_state(method, name)
            initial_tensors = self._get_initial_tensors(name)
            initialized = method.initialize_client(initial_tensors, received, stored)
            local_tensors = initialized | {n: stored.get(n, initial_tensors[n]) for n in local_names}
            client_state = {n: t for n, t in stored.items() if n not in local_tensors}
            public_set = self._public_set_numbers[self._get_public_set(name)]
            parts = (codewords, local_tensors, client_state, received, extras, public_set)
            clients.append(ReceivedClient(name, *parts))
        return clients

    def _move_tensor(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, self.dtype) if tensor.is_floating_point() else tensor.to(self.device)

    def _get_buffers(self, method: Method, broadcast: Broadcast, stack: ClientStack) -> tuple[Any, DeviceBuffers]:
        """Return buffers that hold this stack, and their signature; buffers of the same shapes are reused."""
        updates = [update for phase in method.make_phases(broadcast) for update in phase.updates]
        trainable = [
            tuple((n, u.lr_multiplier(n)) for n in sorted(self._trainable_names) if u.is_trainable(n)) for u in updates
        ]
        shapes = [tuple((n, t.shape) for n, t in tensors.items()) for tensors in stack[1:]]
        signature = (len(stack.silo_names), method.local, *trainable, *shapes)
        if signature not in self._buffers:
            self._buffers[signature] = DeviceBuffers(stack, self._trainable_names, method.local, updates)
        self._buffers[signature].copy_stack(stack, updates, broadcast.lr)
        return signature, self._buffers[signature]

    # --- training -------------------------------------------------------------------------------------------------

    def _train_stack(self, method: Method, buffers: DeviceBuffers, broadcast: Broadcast) -> list[int]:
        """Train a stack, sorted by silo size, and return the number of steps of each silo."""
        self.net.train()
        return self._trainer.train(method, buffers, broadcast, NoiseKeys(self._derive_key, self._derive_order_key))

    def _unpack_buffers(
        self, method: Method, buffers: DeviceBuffers, broadcasts: Sequence[Broadcast], client_states: Sequence[Tensors]
    ) -> tuple[dict[str, Tensors], Sequence[Tensors]]:
        """Return each silo's client state by its name, and the tensors of its reply."""
        all_names = set(buffers.stack.client_tensors)
        local_names = all_names if broadcasts[0].is_personal else set(method.client_state_names(self.net))
        access_rows = {name: row for b in broadcasts for name, row in zip(b.silo_names, b.access)}
        trained = {n: t.detach() for n, t in buffers.stack.client_tensors.items()}
        copied = {n: t.clone() for n, t in {**buffers.stack.client_state, **buffers.optimizer_state()}.items()}
        num_silos = len(buffers.stack.silo_names)
        copied_rows, local_rows = (
            unstack_tensors(tensors, num_silos) for tensors in (copied, {n: trained[n].clone() for n in local_names})
        )
        stored: dict[str, Tensors] = {}
        for i, name in enumerate(buffers.stack.silo_names):
            stored[name] = {**copied_rows[i], **client_states[i], **local_rows[i]}
            if not method.local.reset_optimizer:
                stored[name][OPTIMIZER_CODEWORDS] = list_codeword_indices(access_rows[name])
        return stored, pack_tensors({n: t for n, t in trained.items() if n not in local_names}, num_silos)

    # --- evaluation and other queries -------------------------------------------------------------------------------

    def _evaluate_stack(
        self, method: Method, stack: ClientStack, round_number: int, splits: Sequence[Split]
    ) -> list[BatchSums]:
        if splits:
            self.on_progress(describe_silos(stack.silo_names), "evaluating")
        return self._query_stack(method, "evaluate", method.client_tasks["evaluate"], stack, round_number, splits)

    def _query_stack(
        self,
        method: Method,
        task: str,
        client_task: ClientTask,
        stack: ClientStack,
        round_number: int,
        splits: Sequence[Split],
    ) -> list[BatchSums]:
        """Run a client task, whose name is `task`, on all examples of these splits."""

        def choose_stack_size(batch_size: int) -> int:
            return self._choose_stack_size(method, with_gradients=False, batch_size=batch_size)

        self.net.eval()
        return self._task_runner.run(
            *(task, client_task, stack, round_number, splits),
            eval_batch_size=method.local.eval_batch_size,
            derive_key=self._derive_key,
            choose_stack_size=choose_stack_size,
        )


compiled_engine = partial(StackedEngine, use_compiler=True)
