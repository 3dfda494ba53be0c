"""One client after another in plain PyTorch: the reference that every other engine must agree with."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from uefl.engines.optimizer import Optimizer
from uefl.engines.pooling import pooled_first
from uefl.errors import InputError
from uefl.federation import (
    Batch,
    Broadcast,
    Method,
    Model,
    Multiply,
    Part,
    Reply,
    Silo,
    Split,
    State,
    batches,
    gathered,
    is_words,
    size_in_bytes,
)
from uefl.noise import key, noises, permutation, set_key

OPTIMIZER = "optimizer."  # prefix of optimiser state among what a silo keeps
WORDS = OPTIMIZER + "words"  # which words that state is of


class Serial:
    """Clients in one process. `watch` hears the silo and what it does, for a progress display."""

    def __init__(
        self,
        silos: Sequence[Silo],
        net: nn.Module,
        *,
        seed: int = 0,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        multiply: Multiply = "exact",
        watch: Callable[[str, str], None] = lambda _silo, _doing: None,
    ) -> None:
        names = [silo.name for silo in silos]
        if len(set(names)) < len(names):
            raise InputError(f"silos must have different names, not {', '.join(names)}")
        self.seed, self.device, self.dtype, self.watch = seed, torch.device(device), dtype, watch
        if multiply != "exact" and self.device.type != "cuda":
            raise InputError(f"{multiply} is for CUDA devices, on {self.device.type} there are float32 and float64")
        self.multiply = multiply
        if self.device.type == "cuda":
            if self.device.index is not None:
                torch.cuda.set_device(self.device)  # kernels of Triton and graphs go where the process is
            choose_kernels(tf32=multiply != "exact")
        ordered = sorted(silos, key=lambda silo: silo.name)  # the order given changes nothing
        self.silos = {silo.name: self._placed(silo) for silo in ordered}
        # Channels last: convolutions are 1.4 to 1.8 times faster on CPU, and tensor cores want it on GPU.
        self.net = copy.deepcopy(net).to(self.device, dtype).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        for silo in ordered[:1]:
            pooled_first(self.net, silo.train.x.shape[1:])
        self.initial = {name: t.clone() for name, t in self.net.state_dict().items()}
        self.memory: dict[str, State] = {}  # what each silo keeps; part of the checkpoint in one process
        self._noises = noises(self.net)

    @property
    def sizes(self) -> Mapping[str, int]:
        return {name: len(silo.train.y) for name, silo in self.silos.items()}

    @property
    def domains(self) -> Mapping[str, str]:
        return {name: silo.domain for name, silo in self.silos.items()}

    def begin(self) -> State:
        return {name: t.clone() for name, t in self.initial.items()}

    def fit(self, method: Method, say: Broadcast, *, measure: bool = True) -> Iterator[Reply]:
        for name in sorted(say.who):
            started = time.perf_counter()
            model = self._receive(method, say, name)
            before = self._measured(method, model, name, say.round - 1, "received ", method.splits) if measure else {}
            self.watch(name, "trains")
            with self._scope():
                steps = self._train(method, model, say, name)
            self.net.eval()
            with torch.no_grad():
                extra, kept = method.finish(model, self.silos[name].train, steps=steps, rate=say.rate)
            after = self._measured(method, model, name, say.round, "local ", method.local_splits) if measure else {}
            reply = self._reply(method, model, kept, name)
            yield Reply(
                who=name,
                size=len(self.silos[name].train.y),
                tensors=reply,
                answers={**before, **after},
                extra=extra,
                received_bytes=size_in_bytes(model.received) + size_in_bytes(say.sent),
                sent_bytes=size_in_bytes(reply) + size_in_bytes(extra),
                seconds=time.perf_counter() - started,
            )

    def ask(self, method: Method, task: str, say: Broadcast, on: Sequence[Split]) -> Iterator[Reply]:
        for name in sorted(say.who):
            started = time.perf_counter()
            self.watch(name, task)
            model = self._receive(method, say, name)
            answers = self._answers(method, task, model, name, say.round, on)
            yield Reply(
                who=name,
                size=len(self.silos[name].train.y),
                answers=answers,
                received_bytes=size_in_bytes(model.received) + size_in_bytes(say.sent),
                sent_bytes=sum(size_in_bytes(answer) for answer in answers.values()),
                seconds=time.perf_counter() - started,
            )

    def _placed(self, silo: Silo) -> Silo:
        def placed(part: Part) -> Part:
            return Part(laid_out(part.x.to(self.device, self.dtype)), part.y.to(self.device))

        return Silo(silo.name, placed(silo.train), placed(silo.validation), placed(silo.test), silo.domain)

    def _receive(self, method: Method, say: Broadcast, name: str) -> Model:
        """Bind the network to what this silo receives and to what it kept; the broadcast itself stays untouched."""
        row = say.access[say.silos.index(name)]
        said = gathered(say.state, row)
        kept = still_true(self.memory.get(name) or self._first(method, name), row)
        own = {n: kept.get(n, self.initial[n]) for n in method.keeps(self.net)}
        load(self.net, {**said, **own})
        placed = self.net.state_dict()
        received = {n: placed[n].clone() for n in said}  # in the network's layout, whatever that of the message
        rest = {n: t for n, t in kept.items() if n not in own}
        params = {n: p for n, p in self.net.named_parameters() if p.requires_grad}
        sent = {n: laid_out(t.to(self.device)) for n, t in say.sent.items()}
        return Model(self.net, params, sent=sent, received=received, kept=rest)

    def _first(self, method: Method, name: str) -> State:
        """What a silo keeps that never trained, or lost what it kept."""
        first = method.first(self.net, key(self.seed, name, "first"))
        return {n: t.to(self.device, self.dtype) for n, t in first.items()}

    def _train(self, method: Method, model: Model, say: Broadcast, name: str) -> int:
        """Local training; returns the number of steps."""
        local, part = method.local, self.silos[name].train
        self.net.train()
        optimizers = []
        for update in method.updates(say):
            params = {n: p for n, p in model.params.items() if update.learns(n)}
            times = {n: update.rate(n) for n in params}
            optimizers.append((update, Optimizer(local, params, say.rate, times)))
        if not local.fresh:
            restore(model, [optimizer for _, optimizer in optimizers])
        step = 0
        for epoch in range(local.epochs):
            order = permutation(key(self.seed, name, say.round, epoch, "order"), len(part.y), self.device)
            for cut in batches(len(part.y), local.batch):
                index = order[cut]
                batch = Batch(part.x[index], part.y[index], step, epoch)
                self._draw(key(self.seed, name, say.round, step, "train"))
                for update, optimizer in optimizers:
                    with self._precise():
                        loss = update.loss(model, batch)
                    descend(method, model, loss, optimizer)
                step += 1
        if not local.fresh:
            model.kept |= saved([optimizer for _, optimizer in optimizers])
            model.kept[WORDS] = indices(say.access[say.silos.index(name)])
        return step

    def _measured(
        self, method: Method, model: Model, name: str, round_: int, prefix: str, on: Sequence[Split]
    ) -> dict[str, State]:
        """Measurements, addressed by the round whose model is measured."""
        self.watch(name, "measures")
        return {prefix + s: a for s, a in self._answers(method, "measure", model, name, round_, on).items()}

    def _answers(
        self, method: Method, task: str, model: Model, name: str, round_: int, on: Sequence[Split]
    ) -> dict[str, State]:
        """A task over parts of a silo's data: sums over batches, or one answer from the whole. No data, no answer."""
        with self._scope():
            return self._asked(method, task, model, name, round_, on)

    def _asked(
        self, method: Method, task: str, model: Model, name: str, round_: int, on: Sequence[Split]
    ) -> dict[str, State]:
        do = getattr(method, task)
        answers: dict[str, State] = {}
        self.net.eval()
        for split in on:
            part = self.silos[name].part(split)
            size = len(part.y) if getattr(do, "whole", False) else method.local.evaluation_batch
            answer: State = {}
            for i, cut in enumerate(batches(len(part.y), max(size, 1))):
                self._draw(key(self.seed, name, round_, i, task, split))
                with torch.no_grad(), self._precise():
                    sums = do(model, Batch(part.x[cut], part.y[cut], i))
                answer = {n: answer[n] + t for n, t in sums.items()} if answer else sums
            if answer:
                answers[split] = answer
        return answers

    def _reply(self, method: Method, model: Model, kept: State, name: str) -> State:
        """What goes back; what the method keeps stays here."""
        stays = set(method.keeps(self.net))
        state = {n: t.detach().clone() for n, t in self.net.state_dict().items()}
        self.memory[name] = {**model.kept, **kept, **{n: state[n] for n in stays}}
        return {n: t for n, t in state.items() if n not in stays}

    def _precise(self) -> AbstractContextManager[object]:
        """Half precision where it was asked for; words and sums stay in full."""
        if self.multiply != "bf16":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)

    def _draw(self, address: int) -> None:
        """Address the next draws: our layers' by key, whatever else a user's network draws by torch's generators."""
        set_key(self._noises, address)
        torch.default_generator.manual_seed(address)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(address)

    def _scope(self) -> AbstractContextManager[None]:
        """In which seeds are ours; afterwards torch's generators stand where the user had them."""
        return torch.random.fork_rng([self.device] if self.device.type == "cuda" else [])


def choose_kernels(*, tf32: bool, repeatable: bool = True) -> None:
    """Choose CUDA kernels for the whole process: those that give the same bits twice, or those that win a race.

    With `tf32`, products round their factors to 10 bits, which tensor cores want.
    """
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(repeatable, warn_only=True)  # where there is no such kernel, torch warns
    torch.backends.cudnn.benchmark = not repeatable
    # A debugging aid that writes every tensor twice.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def foreign(net: nn.Module) -> bool:
    """Whether a network has torch's own dropout, whose draws have no address."""
    return any(isinstance(m, nn.modules.dropout._DropoutNd) for m in net.modules())


def laid_out(tensor: Tensor) -> Tensor:
    """Images with channels last: a checkpoint forgets the layout, and convolutions round differently in each."""
    return torch.empty_like(tensor, memory_format=torch.channels_last).copy_(tensor) if tensor.dim() == 4 else tensor


def load(net: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into a network; a codebook takes the size of what it is given."""
    with torch.no_grad():
        for name, tensor in tensors.items():
            owner, _, leaf = name.rpartition(".")
            module = net.get_submodule(owner)
            old = getattr(module, leaf)
            if old.shape == tensor.shape:
                old.copy_(tensor)
            elif isinstance(old, nn.Parameter):
                setattr(module, leaf, nn.Parameter(tensor.to(old.device, old.dtype).clone(), old.requires_grad))
            else:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, the network needs {tuple(old.shape)}")


def descend(method: Method, model: Model, loss: Tensor, optimizer: Optimizer) -> None:
    """One update of some weights down one loss."""
    params = optimizer.params
    found = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
    gradients = method.adjust(model, {n: g for n, g in zip(params, found) if g is not None})
    optimizer.step(dict(zip(gradients, method.local.clipped(list(gradients.values())))))


def saved(optimizers: Sequence[Optimizer]) -> State:
    """Optimiser state as named tensors."""
    return {
        f"{OPTIMIZER}{i}.{entry}.{param}": value
        for i, optimizer in enumerate(optimizers)
        for param, state in optimizer.state.items()
        for entry, value in state.items()
    }


def indices(row: Tensor) -> Tensor:
    """A row of the ledger as the numbers of its words."""
    return row.cpu().nonzero()[:, 0]


def still_true(kept: State, row: Tensor) -> State:
    """What a silo kept, without the optimiser's state of words, if these are other words now."""
    if WORDS not in kept or torch.equal(kept[WORDS].cpu(), indices(row)):
        return kept
    return {n: t for n, t in kept.items() if not (n.startswith(OPTIMIZER) and is_words(n.split(".", 3)[-1]))}


def restore(model: Model, optimizers: Sequence[Optimizer]) -> None:
    """Give optimisers back what a silo kept of them; where words came or went, theirs starts afresh as a whole."""
    found: dict[tuple[int, str], State] = {}
    for name, value in model.kept.items():
        if name.startswith(OPTIMIZER) and name != WORDS:
            i, entry, param = name.removeprefix(OPTIMIZER).split(".", 2)
            found.setdefault((int(i), param), {})[entry] = value
    for (at, param), state in found.items():
        if all(value.dim() == 0 or value.shape == model.params[param].shape for value in state.values()):
            optimizers[at].state[param] = {n: value.clone() for n, value in state.items()}
