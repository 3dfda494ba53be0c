"""The protocol between algorithms (what is learned) and engines (where clients run), and the values they exchange.

Legend for shapes: K silos, n examples, B batch, V codewords, D size of a codeword, C classes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from uefl.core import noise_addresses as addresses
from uefl.core.client_model import ClientModel as ClientModel
from uefl.core.client_model import Tensors as Tensors
from uefl.core.errors import InputError
from uefl.core.example_checks import check_fraction, check_train_size, convert_examples
from uefl.core.lazy_tensor import LazyTensor, load_inputs, select_inputs
from uefl.core.noise import derive_key, permutation

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
MatmulPrecision = Literal["full", "tf32", "bf16"]  # precision of float32 matrix products; tf32 and bf16 need CUDA
CODEWORDS_SUFFIX = "codebook.codewords"  # such a tensor has one row per codeword; a silo receives only its own rows


class Examples(NamedTuple):
    """Examples and their labels."""

    x: Tensor  # [n, ...]
    y: Tensor  # [n] int64


@dataclass(frozen=True, eq=False)
class Silo:
    """An owner of data. Training uses `train`, decisions use `validation`; `test` is never used for a decision (D3).

    `calibration` is no split: no engine reads it. It is for what follows the training. A method that moves training
    examples to another silo sets the last two fields, if it needs to know whose they were.
    """

    name: str
    train: Examples
    validation: Examples
    test: Examples
    domain: str = ""
    public: Tensor | None = None  # [P, ...] images that every silo can read, without labels; the same for all silos
    train_groups: Tensor | None = None  # [n] int64, equal for training examples of one group, such as a patient
    calibration: Examples | None = None  # examples that only a calibration reads, after training; None: none
    sources: Tensor | None = None  # [n] int64, number of the silo that each training example came from
    moved_labels: Tensor | None = None  # [m] int64, labels of the training examples that another silo has instead

    @property
    def own_labels(self) -> Tensor:
        """Labels of the silo's own training examples, wherever they are; their frequencies are its label prior."""
        return self.train.y if self.moved_labels is None else self.moved_labels

    @classmethod
    def from_tensors(
        cls,
        name: str,
        x: Tensor | NDArray[Any] | Sequence[Any],
        y: Tensor | NDArray[Any] | Sequence[Any],
        *,
        domain: str = "",
        test_fraction: float = 0.2,
        validation_fraction: float = 0.1,
        calibration_fraction: float = 0.0,
        seed: int = 0,
        public: Tensor | None = None,
        groups: Tensor | None = None,
        lazy: bool = False,
    ) -> Silo:
        """Split examples into test examples and, of the rest, validation, calibration and training examples.

        The seed draws them. Both fractions are those of the examples that are not for testing.

        Tensors, NumPy arrays and lists are accepted. Labels are class indices. Images of uint8 are scaled:
        (x / 255 − 0.5) / 0.25; other inputs stay as they are. Examples of one group, such as a patient, stay together:
        `groups` [n] has equal integers for them. With `lazy`, the inputs are read only while the silo takes part: give
        a view of a file, such as `np.memmap`.
        """
        owner = f"silo {name}"
        check_fraction(owner, "test_fraction", test_fraction)
        check_fraction(owner, "validation_fraction", validation_fraction, allow_zero=True)
        check_fraction(owner, "calibration_fraction", calibration_fraction, allow_zero=True)
        x, y = convert_examples(owner, LazyTensor.from_array(x) if lazy else x, y)
        ids = None if groups is None else torch.unique(torch.as_tensor(groups), return_inverse=True)[1]
        if ids is not None and len(ids) != len(y):
            raise InputError(f"{owner}: groups has {len(ids)} entries, but there are {len(y)} examples")
        count = len(y) if ids is None else int(ids.max()) + 1
        order = permutation(derive_key(seed, name, addresses.SILO_SPLIT), count).to(y.device)
        num_test = round(count * test_fraction)
        num_validation, num_calibration = (
            round((count - num_test) * fraction) for fraction in (validation_fraction, calibration_fraction)
        )
        num_held_out = num_test + num_validation
        if not num_test:
            kind = "examples" if ids is None else "groups"
            raise InputError(f"{owner}: test_fraction={test_fraction} of {count} {kind} is none; one is needed")
        first_train = num_held_out + num_calibration
        indices = [order[first_train:], order[num_test:num_held_out], order[:num_test], order[num_held_out:first_train]]
        if ids is not None:
            indices = [torch.isin(ids, chosen).nonzero()[:, 0] for chosen in indices]
        check_train_size(owner, len(indices[0]))
        train, validation, test, calibration = (Examples(select_inputs(x, i), y[i]) for i in indices)
        return cls(
            *(name, train, validation, test),
            domain=domain,
            public=public,
            train_groups=None if ids is None else ids[indices[0]],
            calibration=calibration if num_calibration else None,
        )

    def examples(self, split: Split) -> Examples:
        """Return the examples of a split."""
        examples: Examples = getattr(self, split)
        return examples


class Batch(NamedTuple):
    """The examples that a client task or a training step receives, and its position in the local training."""

    x: Tensor
    y: Tensor
    step: int | Tensor = 0  # a tensor if stacked clients are at different steps
    epoch: int = 0  # of the local training; always 0 for an update without `per_epoch`
    # Of a task that needs a full split: its draws, addressed by seed, silo, round, task and split.
    noise_key: int | Tensor = 0
    groups: Tensor | None = None  # [n] of a task that needs the full training split, where the silo has groups


class Broadcast(NamedTuple):
    """What the server sends. Silo k receives `model_state` and `extras`, but only its own rows of the codewords."""

    round: int
    model_state: Tensors
    silo_names: tuple[str, ...]  # the order of the rows of `access`
    access: Tensor  # [K, V] bool, the server's ledger: which codewords each silo may use
    extras: Tensors = {}  # tensors that are not trained: a mean gradient, class priors, virtual images
    participants: tuple[str, ...] = ()  # silos of this round
    lr: float = 0.0  # learning rate of this round
    is_personal: bool = False  # silos keep all that they train as client state; their replies have no tensors


class Evaluations(NamedTuple):
    """Metric sums that one silo measured, by the model that was evaluated."""

    received: Mapping[str, Tensors] = {}  # model as it arrived, by split
    local: Mapping[str, Tensors] = {}  # model after local training and before averaging, by split
    target: Mapping[str, Tensors] = {}  # test split of a silo without training data, by target access (D15)


class Reply(NamedTuple):
    """What one silo returns. A non-empty `rejected` is the reason why the reply is not used."""

    silo_name: str
    num_examples: int  # n_k, number of training examples
    tensors: Tensors = {}  # trained weights; of the codewords, the silo's own rows
    evaluations: Evaluations = Evaluations()  # of a training round
    answers: Mapping[str, Tensors] = {}  # of a query, by split
    extras: Tensors = {}  # tensors of a method beside the weights
    received_bytes: int = 0
    sent_bytes: int = 0
    seconds: float = 0.0
    rejected: str = ""
    note: str = ""  # text about this silo for the record
    is_finite: bool = False  # the engine has found all tensors finite; the server checks other replies itself


@dataclass(frozen=True)
class ServerState:
    """Everything the server has between two steps. It is a value, and it is the checkpoint."""

    silo_names: tuple[str, ...]  # sorted: the order of the rows of `access`
    model_state: Tensors  # θ: encoder, codewords, classifier
    access: Tensor  # [K, V] bool, which codewords each silo may use
    method_state: Tensors = field(default_factory=dict)  # a method's own tensors: control variates, priors, averages
    round: int = 0  # completed rounds
    iteration: int = 0
    is_codebook_final: bool = False  # no silo was uncertain: no further extension
    open_record: dict[str, Any] = field(default_factory=dict)  # record of the last round, not yet evaluated
    completed_records: tuple[dict[str, Any], ...] = ()  # records completed by the last step

    def replace(self, **changes: Any) -> ServerState:
        """Return a copy with some fields changed."""
        return replace(self, **changes)


class TaskParts(NamedTuple):
    """A client task in two parts, so that an engine with many silos can run the second for all of them at once."""

    prepare: Callable[[ClientModel, Batch], Tensors]  # with the silo's model
    complete: Callable[[Sequence[Tensors]], list[Tensors]]  # the answers, from what each silo prepared


class ClientTask(NamedTuple):
    """A computation that the server may query. It returns sums, which the engine adds over batches."""

    compute: Callable[[ClientModel, Batch], Tensors]
    needs_full_split: bool = False  # K-means must receive all examples of a split at once
    num_blank_images: int = 1  # blank images whose answer shows the form of others; K-means of few images has no answer
    # What is wrong with an answer of another machine, beside the answer for blank images, and the silo's examples.
    find_error: Callable[[Tensors, Tensors, int], str] = lambda _answer, _blank_answer, _num_examples: ""
    parts: TaskParts | None = None  # of a task that needs a full split: the same computation in two parts
    selecting_extras: tuple[str, ...] = ()  # extras that select a part of a silo's examples; blank images stay whole


class Update(NamedTuple):
    """One optimizer update of a training step: a loss and the weights that it trains."""

    loss: Callable[[ClientModel, Batch], Tensor]
    is_trainable: Callable[[str], bool] = lambda _: True
    lr_multiplier: Callable[[str], float] = lambda _: 1.0  # of a weight, by name; multiplies the round's learning rate
    # The loss depends on `batch.epoch`. A captured or compiled step cannot read a number that changes, so engines pass
    # the epoch to updates that declare this, and 0 to all others.
    per_epoch: bool = False


class Phase(NamedTuple):
    """A part of the local training: passes over a silo's examples, and the updates of each step.

    A phase on public images has the same batches at every silo. As these images have no labels, `y` of such a batch is
    the position of each image among the public ones.
    """

    updates: Sequence[Update]
    epochs: int
    fraction: float = 1.0  # of the training examples, the first ones; at least one
    is_public: bool = False  # on the public images instead of the training examples

    def count_examples(self, num_examples: int) -> int:
        """Return how many of a silo's examples this phase uses."""
        return max(1, int(num_examples * self.fraction)) if num_examples else 0


class Method(Protocol):
    """What an engine needs of an algorithm to run its clients."""

    @property
    def local(self) -> Any: ...
    @property
    def eval_splits(self) -> Sequence[Split]:
        """Splits on which a silo evaluates the model it received."""

    @property
    def local_eval_splits(self) -> Sequence[Split]:
        """Splits on which a silo evaluates its own model before averaging."""

    @property
    def client_tasks(self) -> Mapping[str, ClientTask]:
        """The tasks that a server may query, by name."""

    def initialize_client(self, initial: Tensors, received: Tensors, client_state: Tensors) -> Tensors:
        """Return tensors of the network that a silo starts with instead of the received ones.

        `initial` are the network's tensors before the first round. Tensors that are not returned start as received.
        """

    def make_phases(self, broadcast: Broadcast) -> Sequence[Phase]:
        """Return the phases of the local training, in order."""

    def adjust_gradients(self, model: ClientModel, gradients: Tensors) -> Tensors:
        """Change gradients before the optimizer uses them."""

    def finish_training(
        self, model: ClientModel, examples: Examples, *, num_steps: int, lr: float
    ) -> tuple[Tensors, Tensors]:
        """Return extras to send and client state to store. Runs in evaluation mode, without gradients."""

    def pack_reply(self, tensors: Tensors, extras: Tensors) -> tuple[Tensors, Tensors]:
        """Return the tensors and extras that leave the silo, given all trained tensors that are not client state."""

    def client_state_names(self, net: nn.Module) -> Collection[str]:
        """Return names of the network's tensors that stay at the silo and are never sent."""

    def personal_tensor_names(self, net: nn.Module) -> Collection[str]:
        """Return those names among the tensors that stay at the silo that predictions use."""

    def initial_client_state(self, net: nn.Module, noise_key: int) -> Tensors:
        """Return client state before the first training. Tensors it does not name start as the network's."""

    def compute_label_state(self, net: nn.Module, y: Tensor) -> Tensors:
        """Return client state that a silo computes anew from its training labels for every message."""


class Clients(Protocol):
    """An engine is anything with these members. It decides where clients run, never what they learn."""

    seed: int

    @property
    def net(self) -> nn.Module:
        """The network as a template: names and types of its tensors, not their values."""

    @property
    def domains(self) -> Mapping[str, str]:
        """True domain by silo; only oracles use it."""

    @property
    def num_examples(self) -> Mapping[str, int]:
        """Number of training examples by silo, names sorted."""

    def initial_model_state(self) -> Tensors:
        """Return the network's tensors before the first round."""

    def fit(self, method: Method, broadcast: Broadcast, *, evaluate: bool = True) -> Iterator[Reply]:
        """Evaluate the received model at every participant, train it, evaluate the result, and send it back."""

    def query(self, method: Method, task: str, broadcast: Broadcast, splits: Sequence[Split]) -> Iterator[Reply]:
        """Run one of the method's client tasks on the received model at every participant, once per split."""


def is_integer(x: Tensor) -> bool:
    """Return whether inputs are integers, such as tokens, which no engine converts to floating point."""
    return x.dtype in (torch.int32, torch.int64)


def is_codeword_tensor(name: str) -> bool:
    """Return whether a tensor has one row per codeword."""
    return name.endswith(CODEWORDS_SUFFIX)


def find_row(silo_names: Sequence[str], silo_name: str) -> int:
    """Return the position of a silo among sorted names, in a time that hardly grows with their number."""
    row = bisect_left(silo_names, silo_name)
    if row == len(silo_names) or silo_names[row] != silo_name:
        raise ValueError(f"{silo_name} is not among the silos")
    return row


def gather_accessible_rows(model_state: Tensors, access_row: Tensor) -> Tensors:
    """Return what a silo with this row of the ledger receives: all tensors, but only its own codewords."""
    return {name: tensor[access_row] if is_codeword_tensor(name) else tensor for name, tensor in model_state.items()}


def size_in_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Return the bytes on the wire, counted equally in every engine."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def iterate_batch_slices(n: int, batch_size: int) -> Iterator[slice]:
    """Yield slices of n examples; a single last example joins the previous batch, since batch norm needs two."""
    starts = list(range(0, n, batch_size))
    if len(starts) > 1 and n - starts[-1] == 1:
        starts.pop()
    for i, start in enumerate(starts):
        yield slice(start, starts[i + 1] if i + 1 < len(starts) else n)


def map_examples(silo: Silo, change: Callable[[Examples], Examples]) -> Silo:
    """Return a silo with all its examples changed, those for calibration too."""
    changed: dict[str, Any] = {split: change(silo.examples(split)) for split in SPLITS}
    return replace(silo, **changed, calibration=silo.calibration and change(silo.calibration))


def load_examples(examples: Examples) -> Examples:
    """Return examples with their inputs in memory."""
    return examples._replace(x=load_inputs(examples.x))


def list_parts(silo: Silo) -> dict[str, Examples]:
    """Return the examples of a silo by the name of their part; without examples for calibration, the splits."""
    parts: dict[str, Examples] = {split: silo.examples(split) for split in SPLITS}
    return parts if silo.calibration is None else {**parts, "calibration": silo.calibration}


def concatenate_examples(pieces: Sequence[Examples]) -> Examples:
    """Return several sets of examples as one."""
    return Examples(torch.cat([p.x for p in pieces]), torch.cat([p.y for p in pieces]))


def concatenate_groups(silos: Sequence[Silo]) -> Tensor | None:
    """Return the groups of all silos' training examples; None if a silo has none."""
    groups = [silo.train_groups for silo in silos if silo.train_groups is not None]
    return torch.cat(groups) if len(groups) == len(silos) else None
