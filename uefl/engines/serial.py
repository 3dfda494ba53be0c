"""The serial engine: one client after another in plain PyTorch. It is the reference for every other engine."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from uefl.core import noise_addresses as addresses
from uefl.core.errors import InputError
from uefl.core.federation import (
    Batch,
    Broadcast,
    ClientModel,
    ClientTask,
    Evaluations,
    Examples,
    MatmulPrecision,
    Method,
    Phase,
    Reply,
    Silo,
    Split,
    Tensors,
    find_row,
    gather_accessible_rows,
    is_integer,
    iterate_batch_slices,
    load_examples,
    size_in_bytes,
)
from uefl.core.label_prior import mark_labels
from uefl.core.lazy_tensor import is_lazy, map_inputs
from uefl.core.noise import (
    NoiseLayer,
    announce_noise_keys,
    derive_key,
    permutation,
    salt_noise_layers,
    set_noise_key,
)
from uefl.engines.optimizer import NamedOptimizer
from uefl.engines.optimizer_state import (
    OPTIMIZER_CODEWORDS,
    drop_stale_optimizer_state,
    list_codeword_indices,
    pack_optimizer_state,
    unpack_optimizer_state,
)


def ignore_progress(silo_name: str, activity: str) -> None:
    """Show no progress."""
    del silo_name, activity


class SerialEngine:
    """Run clients in this process.

    `on_progress` receives a silo's name and its activity, for a progress display; `on_warning` receives sentences.
    """

    def __init__(
        self,
        silos: Sequence[Silo],
        net: nn.Module,
        *,
        seed: int = 0,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        matmul_precision: MatmulPrecision = "full",
        on_progress: Callable[[str, str], None] = ignore_progress,
        on_warning: Callable[[str], None] = lambda _message: None,
    ) -> None:
        names = [silo.name for silo in silos]
        if len(set(names)) < len(names):
            raise InputError(f"silo names must be unique: {', '.join(names)}")
        self.seed, self.device, self.dtype = seed, torch.device(device), dtype
        self.on_progress, self.on_warning = on_progress, on_warning
        if matmul_precision != "full" and self.device.type != "cuda":
            raise InputError(
                f"precision={matmul_precision} needs a CUDA device; allowed on {self.device.type}: float32, float64"
            )
        self.matmul_precision = matmul_precision
        if self.device.type == "cuda":
            if self.device.index is not None:
                torch.cuda.set_device(self.device)  # Triton kernels and CUDA graphs use the current device
            choose_kernels(tf32=matmul_precision != "full")
        sorted_silos = sorted(silos, key=lambda silo: silo.name)  # results do not depend on the given order
        self.silos = {silo.name: self._move_to_device(silo) for silo in sorted_silos}
        self.num_examples: Mapping[str, int] = {silo.name: len(silo.train.y) for silo in sorted_silos}
        self.public = self._move_examples(self._collect_public_examples(sorted_silos))
        self.net = copy_to_device(net, self.device, dtype)
        self.initial_tensors = {name: t.clone() for name, t in self.net.state_dict().items()}
        self.client_states: dict[str, Tensors] = {}  # by silo; part of the checkpoint
        self._noise_layers = salt_noise_layers(self.net)
        self._autocast = partial(make_autocast, self.device, matmul_precision)

    @property
    def domains(self) -> Mapping[str, str]:
        return {name: silo.domain for name, silo in self.silos.items()}

    def initial_model_state(self) -> Tensors:
        return {name: t.clone() for name, t in self.initial_tensors.items()}

    def release(self) -> None:
        """Free the device memory that only rounds need; a later round allocates it again."""

    def fit(self, method: Method, broadcast: Broadcast, *, evaluate: bool = True) -> Iterator[Reply]:
        for name in sorted(broadcast.participants):
            started = time.perf_counter()
            model = self._receive_broadcast(method, broadcast, name)
            splits, local_splits = (method.eval_splits, method.local_eval_splits) if evaluate else ((), ())
            received = self._evaluate(method, model, name, broadcast.round - 1, splits)
            self.on_progress(name, "training")
            with self._fork_rng():
                num_steps = self._train_silo(method, model, broadcast, name)
            self.net.eval()
            with torch.no_grad():
                extras, client_state = method.finish_training(
                    model, self._get_train_examples(name), num_steps=num_steps, lr=broadcast.lr
                )
            local = self._evaluate(method, model, name, broadcast.round, local_splits)
            tensors = self._store_client_state(method, model, client_state, name, is_personal=broadcast.is_personal)
            tensors, extras = ({}, {}) if broadcast.is_personal else method.pack_reply(tensors, extras)
            yield Reply(
                silo_name=name,
                num_examples=len(self.silos[name].train.y),
                tensors=tensors,
                evaluations=Evaluations(received, local),
                extras=extras,
                received_bytes=size_in_bytes(model.received_state) + size_in_bytes(broadcast.extras),
                sent_bytes=size_in_bytes(tensors) + size_in_bytes(extras),
                seconds=time.perf_counter() - started,
            )

    def query(self, method: Method, task: str, broadcast: Broadcast, splits: Sequence[Split]) -> Iterator[Reply]:
        return self._query_one_by_one(method, task, method.client_tasks[task], broadcast, splits)

    def _query_one_by_one(
        self, method: Method, task: str, client_task: ClientTask, broadcast: Broadcast, splits: Sequence[Split]
    ) -> Iterator[Reply]:
        """Run a client task, whose name is `task`, at one participant after another."""
        for name in sorted(broadcast.participants):
            started = time.perf_counter()
            self.on_progress(name, task)
            model = self._receive_broadcast(method, broadcast, name)
            answers = self._answer_query(method, task, client_task, model, name, broadcast.round, splits)
            yield Reply(
                silo_name=name,
                num_examples=len(self.silos[name].train.y),
                answers=answers,
                received_bytes=size_in_bytes(model.received_state) + size_in_bytes(broadcast.extras),
                sent_bytes=sum(size_in_bytes(answer) for answer in answers.values()),
                seconds=time.perf_counter() - started,
            )

    def _move_to_device(self, silo: Silo) -> Silo:
        if silo.sources is not None:
            silo = replace(silo, train=silo.train._replace(y=mark_labels(silo.train.y, silo.sources)), sources=None)
        if is_lazy(silo.train.x):  # its examples are moved when they are read
            return silo
        move, groups = self._move_examples, silo.train_groups
        return Silo(
            silo.name,
            move(silo.train),
            move(silo.validation),
            move(silo.test),
            silo.domain,
            train_groups=None if groups is None else groups.to(self.device),
            moved_labels=silo.moved_labels,
        )

    def _get_train_examples(self, name: str) -> Examples:
        """Return the training examples of a silo for a method; those of a lazy silo are read if it uses them."""
        train = self.silos[name].train
        return self._move_examples(train) if is_lazy(train.x) else train

    def _load_split(self, name: str, split: Split) -> Examples:
        """Return the examples of a silo on the device; those of a lazy silo are read now."""
        examples = self.silos[name].examples(split)
        return self._move_examples(load_examples(examples)) if is_lazy(examples.x) else examples

    def _move_examples(self, examples: Examples) -> Examples:
        return move_examples(examples, self.device, self.dtype)

    def _receive_broadcast(self, method: Method, broadcast: Broadcast, name: str) -> ClientModel:
        """Copy what this silo receives and its client state into the network; the broadcast itself never changes."""
        access_row = broadcast.access[find_row(broadcast.silo_names, name)]
        model_state = gather_accessible_rows(broadcast.model_state, access_row)
        client_state = self.client_states.get(name) or self._make_client_state(method, name)
        client_state = drop_stale_optimizer_state(client_state, access_row) | self._make_label_state(method, name)
        initial_tensors = self._get_initial_tensors(name)
        local_tensors = {n: client_state.get(n, initial_tensors[n]) for n in method.client_state_names(self.net)}
        initialized = method.initialize_client(initial_tensors, model_state, client_state)
        copy_into_network(self.net, {**model_state, **initialized, **local_tensors})
        network_tensors = self.net.state_dict()
        received = {n: t if n in initialized else network_tensors[n] for n, t in model_state.items()}
        return ClientModel(
            self.net,
            {n: p for n, p in self.net.named_parameters() if p.requires_grad},
            extras={n: to_channels_last(t.to(self.device)) for n, t in broadcast.extras.items()},
            # In the network's memory layout, unless the silo starts with other values.
            received_state={n: t.to(network_tensors[n], copy=True) for n, t in received.items()},
            client_state={n: t for n, t in client_state.items() if n not in local_tensors},
            select_public_images=lambda: self._get_public_examples(name).x,
        )

    def _collect_public_examples(self, silos: Sequence[Silo]) -> Examples:
        return collect_public_examples(silos)

    def _get_public_examples(self, name: str) -> Examples:
        """Return the public images of this silo's federation."""
        del name
        return self.public

    def _get_initial_tensors(self, name: str) -> Tensors:
        """Return the network's tensors before the first round, as this silo knows them."""
        del name
        return self.initial_tensors

    def _derive_key(self, name: str, *address: int | str) -> int:
        """Return the noise key of an address at this silo."""
        return derive_key(self._get_seed(name), name, *address)

    def _get_seed(self, name: str) -> int:
        """Return the seed of this silo's federation."""
        del name
        return self.seed

    def get_personal_tensors(self, method: Method, broadcast: Broadcast) -> dict[str, Tensors]:
        """Return by silo the tensors of its own that predictions use."""
        return collect_personal_tensors(
            method, self.net, broadcast, self.seed, self.client_states, self.initial_tensors
        )

    def _make_client_state(self, method: Method, name: str) -> Tensors:
        """Return the state of a client that has not trained yet, or that lost its state."""
        noise_key = self._derive_key(name, addresses.INITIAL_CLIENT_STATE)
        client_state = method.initial_client_state(self.net, noise_key)
        return {n: t.to(self.device, self.dtype) for n, t in client_state.items()}

    def _make_label_state(self, method: Method, name: str) -> Tensors:
        """Return the client state that follows from this silo's training labels."""
        label_state = method.compute_label_state(self.net, self.silos[name].own_labels)
        return {n: t.to(self.device, self.dtype) for n, t in label_state.items()}

    def _train_silo(self, method: Method, model: ClientModel, broadcast: Broadcast, name: str) -> int:
        """Train locally and return the number of steps."""
        local, phases = method.local, method.make_phases(broadcast)
        self.net.train()
        optimizers = [make_optimizers(method, model, phase, broadcast.lr) for phase in phases]
        all_optimizers = [optimizer for of_phase in optimizers for optimizer in of_phase]
        if not local.reset_optimizer:
            unpack_optimizer_state(model, all_optimizers)
        num_steps = sum(
            self._run_phase(method, model, broadcast, name, phase, of_phase)
            for phase, of_phase in zip(phases, optimizers)
        )
        if not local.reset_optimizer:
            model.client_state |= pack_optimizer_state(all_optimizers)
            access_row = broadcast.access[find_row(broadcast.silo_names, name)]
            model.client_state[OPTIMIZER_CODEWORDS] = list_codeword_indices(access_row)
        return num_steps

    def _run_phase(
        self,
        method: Method,
        model: ClientModel,
        broadcast: Broadcast,
        name: str,
        phase: Phase,
        optimizers: Sequence[NamedOptimizer],
    ) -> int:
        """Run one phase of the local training and return its number of steps on training examples."""
        examples, step = self._get_public_examples(name) if phase.is_public else self._load_split(name, "train"), 0
        purpose = addresses.PUBLIC_STEP if phase.is_public else addresses.TRAINING_STEP
        num_examples = phase.count_examples(len(examples.y))
        batch_slices = list(iterate_batch_slices(num_examples, method.local.batch_size))
        num_steps = phase.epochs * len(batch_slices)
        noise_keys = [self._derive_key(name, broadcast.round, step, purpose) for step in range(num_steps)]
        announce_noise_keys(self._noise_layers, noise_keys)
        for epoch in range(phase.epochs):
            order = permutation(self._derive_order_key(phase, name, broadcast.round, epoch), num_examples, self.device)
            for batch_slice in batch_slices:
                indices = order[batch_slice]
                x, y = examples.x[indices], examples.y[indices]
                self._seed_noise(noise_keys[step])
                for update, optimizer in zip(phase.updates, optimizers):
                    with self._autocast():
                        loss = update.loss(model, Batch(x, y, step, epoch if update.per_epoch else 0))
                    apply_update(method, model, loss, optimizer)
                step += 1
        return 0 if phase.is_public else step

    def _derive_order_key(self, phase: Phase, name: str, round_number: int, epoch: int) -> int:
        """Return the key of the order of examples in one epoch; that of public images is the same at every silo."""
        if phase.is_public:
            return derive_key(self._get_seed(name), round_number, epoch, addresses.PUBLIC_ORDER)
        return self._derive_key(name, round_number, epoch, addresses.BATCH_ORDER)

    def _evaluate(
        self, method: Method, model: ClientModel, name: str, round_number: int, splits: Sequence[Split]
    ) -> dict[str, Tensors]:
        """Return metric sums by split; their noise is addressed by the round of the evaluated model."""
        if not splits:
            return {}
        self.on_progress(name, "evaluating")
        client_task = method.client_tasks["evaluate"]
        return self._answer_query(method, "evaluate", client_task, model, name, round_number, splits)

    def _answer_query(
        self,
        method: Method,
        task: str,
        client_task: ClientTask,
        model: ClientModel,
        name: str,
        round_number: int,
        splits: Sequence[Split],
    ) -> dict[str, Tensors]:
        """Run a client task per split: sums over batches, or one answer from all examples. Skip empty splits."""
        answers: dict[str, Tensors] = {}
        self.net.eval()
        with self._fork_rng(), torch.no_grad(), self._autocast():
            for split in splits:
                examples = self._load_split(name, split)
                batch_size = len(examples.y) if client_task.needs_full_split else method.local.eval_batch_size
                groups = self.silos[name].train_groups if client_task.needs_full_split and split == "train" else None
                answer: Tensors = {}
                for i, batch_slice in enumerate(iterate_batch_slices(len(examples.y), max(batch_size, 1))):
                    noise_key = self._derive_key(name, round_number, i, addresses.TASKS.get(task, task), split)
                    self._seed_noise(noise_key)
                    x, y = examples.x[batch_slice], examples.y[batch_slice]
                    batch = Batch(x, y, i, noise_key=noise_key, groups=groups)
                    sums = client_task.compute(model, batch)
                    answer = {n: answer[n] + t for n, t in sums.items()} if answer else sums
                if answer:
                    answers[split] = answer
        return answers

    def _store_client_state(
        self, method: Method, model: ClientModel, client_state: Tensors, name: str, *, is_personal: bool
    ) -> Tensors:
        """Store the client state and return the tensors of the reply."""
        tensors = {n: t.detach().clone() for n, t in self.net.state_dict().items()}
        local_names = set(tensors) if is_personal else set(method.client_state_names(self.net))
        self.client_states[name] = {**model.client_state, **client_state, **{n: tensors[n] for n in local_names}}
        return {n: t for n, t in tensors.items() if n not in local_names}

    def _seed_noise(self, noise_key: int) -> None:
        seed_noise(self._noise_layers, noise_key, self.device)

    def _fork_rng(self) -> AbstractContextManager[None]:
        return fork_rng(self.device)


def move_examples(examples: Examples, device: torch.device, dtype: torch.dtype) -> Examples:
    """Return examples on a device, in the type and memory layout in which a network takes them."""
    target = examples.x.dtype if is_integer(examples.x) else dtype
    x = map_inputs(examples.x, lambda x: to_channels_last(x.to(device, target)), target)
    return Examples(x, examples.y.to(device))


def make_autocast(device: torch.device, matmul_precision: MatmulPrecision) -> AbstractContextManager[object]:
    """Return the context of half-precision products; codewords and sums keep full precision."""
    if matmul_precision != "bf16":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)


def seed_noise(layers: Sequence[NoiseLayer], noise_key: int, device: torch.device) -> None:
    """Set the key of our noise layers, and torch's generators for other random layers of a network."""
    set_noise_key(layers, noise_key)
    torch.default_generator.manual_seed(noise_key)
    if device.type == "cuda":
        torch.cuda.manual_seed(noise_key)


def fork_rng(device: torch.device) -> AbstractContextManager[None]:
    """Return a context that restores the user's torch generators on exit."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def collect_personal_tensors(
    method: Method,
    net: nn.Module,
    broadcast: Broadcast,
    seed: int,
    client_states: Mapping[str, Tensors],
    initial_tensors: Tensors,
) -> dict[str, Tensors]:
    """Return by silo the tensors of its own that predictions use, also of silos that have not trained."""
    names = method.personal_tensor_names(net)
    personal_tensors = {}
    for silo_name, access_row in zip(broadcast.silo_names, broadcast.access) if names else ():
        noise_key = derive_key(seed, silo_name, addresses.INITIAL_CLIENT_STATE)
        state = client_states.get(silo_name) or method.initial_client_state(net, noise_key)
        received = gather_accessible_rows(broadcast.model_state, access_row)
        state = {**state, **method.initialize_client(initial_tensors, received, state)}
        state = {**initial_tensors, **received, **state}
        personal_tensors[silo_name] = {n: state[n].to(initial_tensors[n]) for n in names}
    return personal_tensors


def copy_to_device(net: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Copy a network, with channels last: convolutions are 1.4 to 1.8 times faster on CPU, tensor cores need it."""
    copied: nn.Module = copy.deepcopy(net).to(device, dtype).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return copied


def collect_public_examples(silos: Sequence[Silo]) -> Examples:
    """Return the public images, none if silos have none, with their positions as labels; all silos have the same."""
    first = silos[0]
    public = first.test.x[:0] if first.public is None else first.public
    for silo in silos[1:]:
        if silo.public is not first.public and not (
            silo.public is not None and first.public is not None and torch.equal(silo.public, first.public)
        ):
            raise InputError(f"silos {first.name} and {silo.name} have different public images; they must be the same")
    return Examples(public, torch.arange(len(public)))


def choose_kernels(*, tf32: bool, deterministic: bool = True) -> None:
    """Choose CUDA kernels for the whole process: deterministic ones, or those that are fastest in a benchmark.

    With `tf32`, matrix products round their factors to 10 bits, as tensor cores require.
    """
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic, warn_only=True)  # torch warns if no such kernel exists
    torch.backends.cudnn.benchmark = not deterministic
    # A debugging aid that writes every tensor twice.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def has_torch_dropout(net: nn.Module) -> bool:
    """Return whether a network has torch's dropout, whose draws are not addressed."""
    return any(isinstance(m, nn.modules.dropout._DropoutNd) for m in net.modules())


def to_channels_last(tensor: Tensor) -> Tensor:
    """Return images with channels last: checkpoints lose the layout, and convolutions round differently in each."""
    return torch.empty_like(tensor, memory_format=torch.channels_last).copy_(tensor) if tensor.dim() == 4 else tensor


def copy_into_network(net: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into a network; parameters, such as codewords, are resized if necessary."""
    with torch.no_grad():
        for name, tensor in tensors.items():
            owner, _, leaf = name.rpartition(".")
            module = net.get_submodule(owner)
            target = getattr(module, leaf)
            if target.shape == tensor.shape:
                target.copy_(tensor)
            elif isinstance(target, nn.Parameter):
                setattr(
                    module, leaf, nn.Parameter(tensor.to(target.device, target.dtype).clone(), target.requires_grad)
                )
            else:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, the network needs {tuple(target.shape)}")


def make_optimizers(method: Method, model: ClientModel, phase: Phase, lr: float) -> list[NamedOptimizer]:
    """Return one optimizer per update of a phase."""
    optimizers = []
    for update in phase.updates:
        params = {n: p for n, p in model.params.items() if update.is_trainable(n)}
        lr_multipliers = {n: update.lr_multiplier(n) for n in params}
        optimizers.append(NamedOptimizer(method.local, params, lr, lr_multipliers))
    return optimizers


def apply_update(method: Method, model: ClientModel, loss: Tensor, optimizer: NamedOptimizer) -> None:
    """Update the optimizer's weights by the gradients of a loss."""
    params = optimizer.params
    computed = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
    gradients = method.adjust_gradients(model, {n: g for n, g in zip(params, computed) if g is not None})
    optimizer.step(dict(zip(gradients, method.local.clip_gradients(list(gradients.values())))))
