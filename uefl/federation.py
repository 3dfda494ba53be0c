"""The vocabulary that algorithms (what is learned) and engines (where clients run) share.

Legend for shapes: K silos, n examples, B batch, V codewords, D width of a codeword, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from uefl.noise import key, permutation

State = dict[str, Tensor]
Split = Literal["train", "validation", "test"]
Multiply = Literal["exact", "tf32", "bf16"]  # how products of float32 are made; the last two on CUDA alone
WORDS = "codebook.words"  # a tensor whose name ends so has a row per codeword, and silos receive only their rows


class Part(NamedTuple):
    """Examples and their labels."""

    x: Tensor  # [n, ...]
    y: Tensor  # [n] int64


@dataclass(frozen=True, eq=False)
class Silo:
    """One owner of data. Training sees `train`, decisions see `validation`, and `test` decides nothing, ever (D3)."""

    name: str
    train: Part
    validation: Part
    test: Part
    domain: str = ""

    @classmethod
    def split(
        cls,
        name: str,
        x: Tensor,
        y: Tensor,
        *,
        domain: str = "",
        test: float = 0.2,
        validation: float = 0.1,
        seed: int = 0,
    ) -> Silo:
        """A silo from one's own tensors: parts for test and, of the rest, for validation are drawn by the seed."""
        order = permutation(key(seed, name, "split"), len(y)).to(y.device)
        tests = round(len(y) * test)
        held = tests + round((len(y) - tests) * validation)
        train, kept, seen = (Part(x[at], y[at]) for at in (order[held:], order[tests:held], order[:tests]))
        return cls(name, train, kept, seen, domain=domain)

    def part(self, split: Split) -> Part:
        found: Part = getattr(self, split)
        return found


class Batch(NamedTuple):
    """What a client task is given of the data, and where in the local training it stands."""

    x: Tensor
    y: Tensor
    step: int | Tensor = 0  # a tensor, where clients in one tensor stand at different steps
    epoch: int = 0


class Broadcast(NamedTuple):
    """What the server says. Silo k receives `state` and `sent`, but of a tensor in `rows` only its own rows."""

    round: int
    state: State
    silos: tuple[str, ...]  # the order of the rows of `access`
    access: Tensor  # [K, V] bool, the server's ledger: the words each silo may use
    sent: State = {}  # extras that are not trained: a mean gradient, class priors, virtual data
    who: tuple[str, ...] = ()  # this round's silos
    rate: float = 0.0  # learning rate of this round


class Reply(NamedTuple):
    """What one silo answers; `refused` says why it is not to be used."""

    who: str
    size: int  # n_k, its training examples
    tensors: State = {}  # trained weights, its own rows of the words
    answers: Mapping[str, State] = {}  # measurements, by name
    extra: State = {}  # what a method sends beside the weights
    received_bytes: int = 0
    sent_bytes: int = 0
    seconds: float = 0.0
    refused: str = ""
    note: str = ""  # what the record should say of this silo


@dataclass(frozen=True)
class Server:
    """All that the server knows between two steps. It is a value, and it is the checkpoint."""

    silos: tuple[str, ...]  # names, sorted: the order of the rows of `access`
    state: State  # θ: encoder, codewords, classifier
    access: Tensor  # [K, V] bool
    memory: State = field(default_factory=dict)  # what a method remembers: control variates, priors, averages
    round: int = 0  # rounds done
    iteration: int = 0
    settled: bool = False  # nobody was uncertain any more: no further extension
    pending: dict[str, Any] = field(default_factory=dict)  # record of the last round, its measurements still to come
    records: tuple[dict[str, Any], ...] = ()  # records completed by the last step

    def but(self, **changes: Any) -> Server:
        """A copy with some fields changed."""
        return replace(self, **changes)


class Model:
    """A network bound to one client's tensors, as client tasks see it."""

    def __init__(
        self,
        net: nn.Module,
        params: State,
        *,
        sent: State | None = None,
        received: State | None = None,
        kept: State | None = None,
        buffers: State | None = None,
        bound: bool = True,
    ) -> None:
        self.net = net
        self.params = params  # what learns, by name
        self.buffers = buffers or {}  # what moves without learning, where it is not the network's own
        self.sent = sent or {}  # the broadcast's extras
        self.received = received or {}  # θ as it arrived this round
        self.kept = kept or {}  # what this silo keeps between rounds besides its kept parameters
        self._bound = bound  # `params` are the network's own tensors

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the network, or of a part of it (`classifier.head`), with this client's tensors."""
        if self._bound:
            return attrgetter(method)(self.net)(*args)
        tensors = {f"net.{n}": t for n, t in {**self.buffers, **self.params}.items()}
        return functional_call(_Calls(self.net), tensors, (method, *args))

    def __call__(self, x: Tensor) -> Any:
        return self.call("forward", x)

    def at(self, params: Mapping[str, Tensor]) -> Model:
        """The same network with some tensors replaced."""
        return Model(
            self.net,
            {**self.params, **params},
            sent=self.sent,
            received=self.received,
            kept=self.kept,
            buffers=self.buffers,
            bound=False,
        )


class _Calls(nn.Module):
    """`functional_call` reaches only `forward`; this reaches every method."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, method: str, *args: Any) -> Any:
        return attrgetter(method)(self.net)(*args)


Task = Callable[[Model, Batch], State]
"""A client task. It returns sums, which the engine adds over batches, or, marked `whole`, sees a whole part at once."""


def whole(task: Any) -> Any:
    """Mark a client task that must see all examples of a part at once, such as K-means."""
    task.whole = True
    return task


class Update(NamedTuple):
    """One optimiser update of a training step: which weights move, and down which loss."""

    loss: Callable[[Model, Batch], Tensor]
    learns: Callable[[str], bool] = lambda _: True
    rate: Callable[[str], float] = lambda _: 1.0  # of a weight, by name, times the round's learning rate


class Method(Protocol):
    """What an engine needs of an algorithm to run its clients."""

    @property
    def local(self) -> Any: ...
    @property
    def splits(self) -> Sequence[Split]:
        """What a silo measures a received model on."""

    @property
    def local_splits(self) -> Sequence[Split]:
        """What a silo measures its own model on, before averaging."""

    def updates(self, say: Broadcast) -> Sequence[Update]:
        """The updates of one training step, in order."""

    def adjust(self, model: Model, gradients: State) -> State:
        """A last word on the gradients before the optimiser sees them."""

    def finish(self, model: Model, part: Part, *, steps: int, rate: float) -> tuple[State, State]:
        """After training, in evaluation mode and without gradients: what to send beside the weights, what to keep."""

    def keeps(self, net: nn.Module) -> Collection[str]:
        """Names of tensors that stay with the silo and are never sent."""

    def first(self, net: nn.Module, address: int) -> State:
        """What a silo keeps before it ever trained; `address` keys its noise. Else kept tensors begin as the net's."""

    def measure(self, model: Model, batch: Batch) -> State:
        """Sums from which all metrics follow."""


class Clients(Protocol):
    """An engine is anything with these. It decides where and how clients run, never what they learn."""

    seed: int

    @property
    def net(self) -> nn.Module:
        """The network, as a template: its tensors' names and kinds, not their values."""

    @property
    def domains(self) -> Mapping[str, str]:
        """True domain by silo; only oracles look."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Number of training examples by silo, names sorted."""

    def begin(self) -> State:
        """The network's tensors before any round."""

    def fit(self, method: Method, say: Broadcast, *, measure: bool = True) -> Iterator[Reply]:
        """Silos measure the model they received, train it, measure what became of it, and send it back."""

    def ask(self, method: Method, task: str, say: Broadcast, on: Sequence[Split]) -> Iterator[Reply]:
        """Silos answer a task of the method (by its name) with the model they received, once for each split."""


def is_words(name: str) -> bool:
    """Whether a tensor of the state has one row per codeword."""
    return name.endswith(WORDS)


def gathered(state: State, row: Tensor) -> State:
    """What a silo with this row of the ledger receives: no word outside it."""
    return {name: tensor[row] if is_words(name) else tensor for name, tensor in state.items()}


def size_in_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes on the wire, the same count in every engine."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def batches(n: int, size: int) -> Iterator[slice]:
    """Cut n examples into batches; a lone last example joins the batch before it, since batch norm needs two."""
    starts = list(range(0, n, size))
    if len(starts) > 1 and n - starts[-1] == 1:
        starts.pop()
    for i, start in enumerate(starts):
        yield slice(start, starts[i + 1] if i + 1 < len(starts) else n)


def concatenated(parts: Sequence[Part]) -> Part:
    """Several parts as one."""
    return Part(torch.cat([p.x for p in parts]), torch.cat([p.y for p in parts]))
