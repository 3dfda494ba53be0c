"""Compare FedAvg and FedProx with Flower's strategies of the same names: the same weights, data and batches in both.

`python -m studies.parity run` trains in both systems on the embedded digits and writes one record per method and
precision. On Flower's side, its strategies run their own rounds; the clients are plain PyTorch and share no code with
the engines of this package. `python -m studies.parity page` makes docs/parity.md from the records. `run` needs flwr.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, NoReturn

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn

from uefl.algorithms.fedavg import FedAvg
from uefl.algorithms.fedprox import FedProx
from uefl.core import noise_addresses as addresses
from uefl.core.federation import Silo, iterate_batch_slices
from uefl.core.local import LocalTraining
from uefl.core.noise import derive_key, permutation
from uefl.data.config import DataConfig
from uefl.engines.serial import SerialEngine
from uefl.experiment.experiment import DTYPES, RESULTS_VERSION, Experiment
from uefl.experiment.records import append_records, read_records
from uefl.experiment.rounds import iterate_rounds
from uefl.models.model_config import ModelConfig

RECORDS, PAGE = Path("results/parity.jsonl"), Path("docs/parity.md")
NUM_ROUNDS, TRAIN_SIZES, TEST_PER_SILO, MU = 5, (600, 400, 200), 200, 0.1
MODEL = ModelConfig(encoder="lenet-fmnist", width=64, hidden_size=32, dropout=0.0, feature_norm="none")
LOCAL = LocalTraining(optimizer="sgd", lr=0.05, momentum=0.9, batch_size=32, epochs=2)
SCHEDULE: dict[str, Any] = {"iterations": 1, "mc_samples": 1, "evaluate_local": False, "local": LOCAL}
METHODS: dict[str, FedAvg] = {"FedAvg": FedAvg(**SCHEDULE), "FedProx": FedProx(**SCHEDULE, mu=MU)}
# Each method with one part changed, to show that the comparison notices it.
CONTROLS: dict[str, tuple[str, dict[str, Any]]] = {
    "FedAvg": ("equal weights of all silos", {"aggregation_weights": "uniform"}),
    "FedProx": ("no proximal term", {"mu": 0.0}),
}
# Largest difference of a weight, relative to the largest weight. Written down before the first comparison.
MAX_DIFFERENCES = {"float64": 1e-9, "float32": 2e-4}
CHANGED = "this package, but "  # label of a changed method in the records
Weights = list[Tensor]


@dataclass(frozen=True)
class Workload:
    """What both systems receive: silos, initial weights, and the batches of every silo and round."""

    silos: list[Silo]
    net: nn.Module
    batches: list[list[list[Tensor]]]  # [silo][round][step]: indices of training images
    seed: int

    @property
    def num_rounds(self) -> int:
        return len(self.batches[0])


@dataclass(frozen=True)
class Training:
    """What one system returns, round by round."""

    weights: list[Weights]
    accuracies: list[float]  # mean over silos


def make_workload(
    *, num_rounds: int = NUM_ROUNDS, train_sizes: tuple[int, ...] = TRAIN_SIZES, test_per_silo: int = TEST_PER_SILO
) -> Workload:
    """Load the silos, initialize the network and draw the order of all batches."""
    data = DataConfig(num_silos=(1, 1, 1), train_sizes=train_sizes, test_per_silo=test_per_silo)
    experiment = Experiment(data=data, model=MODEL)
    silos, images = data.load(experiment.seed)
    silos = sorted(silos, key=lambda silo: silo.name)
    net = experiment.build_network(tuple(silos[0].test.x.shape[1:]), len(images.classes))
    return Workload(silos, net, [draw_batches(s, num_rounds, experiment.seed) for s in silos], experiment.seed)


def draw_batches(silo: Silo, num_rounds: int, seed: int) -> list[list[Tensor]]:
    """Draw the batches of a silo, round by round; the address gives an engine of this package the same ones."""
    n, batches = len(silo.train.y), []
    for round_number in range(1, num_rounds + 1):
        address = (seed, silo.name, round_number)
        keys = [derive_key(*address, epoch, addresses.BATCH_ORDER) for epoch in range(LOCAL.epochs)]
        orders = [permutation(key, n) for key in keys]
        batches.append([order[part] for order in orders for part in iterate_batch_slices(n, LOCAL.batch_size)])
    return batches


def train_with_uefl(method: FedAvg, workload: Workload, precision: str) -> Training:
    """Train with this package."""
    method = replace(method, rounds=workload.num_rounds)
    clients = SerialEngine(workload.silos, workload.net, seed=workload.seed, dtype=DTYPES[precision])
    servers = list(iterate_rounds(method, clients))
    records = [record for server in servers for record in server.completed_records]
    return Training(
        [list(server.model_state.values()) for server in servers],
        [mean(silo["accuracy"] for silo in record["silos"].values()) for record in records],
    )


# --- Flower -------------------------------------------------------------------------------------------------------


def build_plain_network() -> nn.Sequential:
    """Build the network of MODEL from layers of PyTorch; its tensors are in the same order."""
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 5), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Conv2d(4, 12, 5), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()),
        *(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 10)),
    )


class PlainClients:
    """The part of Flower's `Grid` that a strategy uses; every node is a silo that answers in plain PyTorch.

    Flower asks the nodes in random order. Replies come in their order or its reverse, so that runs can be repeated.
    """

    def __init__(self, workload: Workload, net: nn.Module, *, reverse: bool = False) -> None:
        self.workload, self.net, self.reverse = workload, net, reverse

    def get_node_ids(self) -> Iterable[int]:
        return range(1, len(self.workload.silos) + 1)

    def send_and_receive(self, messages: Iterable[Any], *, timeout: float | None = None) -> list[Any]:
        del timeout
        ordered = sorted(messages, key=lambda message: message.metadata.dst_node_id, reverse=self.reverse)
        return [self.answer(message) for message in ordered]

    def answer(self, message: Any) -> Any:
        from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

        index, config = message.metadata.dst_node_id - 1, message.content["config"]
        reply, metrics = RecordDict(), MetricRecord()
        silo = self.workload.silos[index]
        self.net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        if message.metadata.message_type == "train":
            batches = self.workload.batches[index][int(config["server-round"]) - 1]
            train_plainly(self.net, silo, batches, float(config.get("proximal-mu", 0.0)))
            reply["arrays"] = ArrayRecord(self.net.state_dict())
            metrics["num-examples"] = len(silo.train.y)
        else:
            metrics["num-examples"] = len(silo.test.y)
            metrics["accuracy"] = compute_accuracy(self.net, silo)
        reply["metrics"] = metrics
        return Message(reply, reply_to=message)


def train_plainly(net: nn.Module, silo: Silo, batches: Sequence[Tensor], mu: float) -> None:
    """Train on these batches, with the proximal term μ/2 ‖w − wᵗ‖² of Flower's FedProx if μ > 0."""
    params = list(net.parameters())
    received, dtype = [p.detach().clone() for p in params], params[0].dtype
    optimizer = torch.optim.SGD(params, lr=LOCAL.lr, momentum=LOCAL.momentum)
    for indices in batches:
        loss = F.cross_entropy(net(silo.train.x[indices].to(dtype)), silo.train.y[indices])
        if mu > 0:
            loss = loss + mu / 2 * sum(((p - w) ** 2).sum() for p, w in zip(params, received, strict=True))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def compute_accuracy(net: nn.Module, silo: Silo) -> float:
    """Return the accuracy on the silo's test images."""
    with torch.no_grad():
        logits = net(silo.test.x.to(next(net.parameters()).dtype))
    return float((logits.argmax(1) == silo.test.y).double().mean())


def train_with_flower(
    name: str, workload: Workload, precision: str, *, reverse: bool = False, channels_last: bool = False
) -> Training:
    """Train with Flower's strategy of this name.

    The order of replies and the memory layout of the clients' network change only the rounding.
    """
    from flwr.app import ArrayRecord
    from flwr.serverapp import strategy
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # the sender of messages
    net, weights = build_plain_network().to(DTYPES[precision]), []
    if channels_last:
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def store_weights(round_number: int, arrays: Any) -> None:
        if round_number:
            weights.append(list(arrays.to_torch_state_dict().values()))

    num_silos = len(workload.silos)
    fields: dict[str, Any] = {"proximal_mu": MU} if name == "FedProx" else {}
    flower_strategy = getattr(strategy, name)(min_train_nodes=num_silos, min_evaluate_nodes=num_silos, **fields)
    tensors = [tensor.to(DTYPES[precision]) for tensor in workload.net.state_dict().values()]
    initial = ArrayRecord(dict(zip(net.state_dict(), tensors, strict=True)))
    clients = PlainClients(workload, net, reverse=reverse)
    result = flower_strategy.start(clients, initial, workload.num_rounds, evaluate_fn=store_weights)
    return Training(weights, [float(m["accuracy"]) for m in result.evaluate_metrics_clientapp.values()])


# --- comparison ---------------------------------------------------------------------------------------------------


def compare_systems(name: str, workload: Workload, precision: str) -> dict[str, Any]:
    """Train one method in both systems and return the record of their differences."""
    import flwr

    changed_part, fields = CONTROLS[name]
    flower = train_with_flower(name, workload, precision)
    here = train_with_uefl(METHODS[name], workload, precision)
    others = {
        "this package": here,
        "Flower, replies in reverse order": train_with_flower(name, workload, precision, reverse=True),
        "Flower, network with channels last": train_with_flower(name, workload, precision, channels_last=True),
        f"{CHANGED}{changed_part}": train_with_uefl(replace(METHODS[name], **fields), workload, precision),
    }
    return {
        "method": name,
        "precision": precision,
        "settings": describe_settings(workload),
        "max_difference": compute_max_difference(here.weights[-1], flower.weights[-1]),
        "bound": MAX_DIFFERENCES[precision],
        "relative_differences": {label: compare_trainings(other, flower) for label, other in others.items()},
        "accuracy": {"this package": here.accuracies, "Flower": flower.accuracies},
        "versions": {"flwr": flwr.__version__, "torch": torch.__version__, "results": RESULTS_VERSION},
    }


def describe_settings(workload: Workload) -> dict[str, Any]:
    """Return the settings that the page names."""
    return {
        "num_rounds": workload.num_rounds,
        "mu": MU,
        "encoder": MODEL.encoder,
        "train_sizes": ", ".join(str(len(silo.train.y)) for silo in workload.silos),
        "test_per_silo": len(workload.silos[0].test.y),
        **{name: getattr(LOCAL, name) for name in ("lr", "momentum", "batch_size", "epochs")},
    }


def compare_trainings(one: Training, other: Training) -> list[float]:
    """Return the largest difference of a weight after every round, relative to the largest weight."""
    pairs = zip(one.weights, other.weights, strict=True)
    return [compute_max_difference(a, b) / max(float(tensor.abs().max()) for tensor in b) for a, b in pairs]


def compute_max_difference(one: Weights, other: Weights) -> float:
    """Return the largest absolute difference of a weight."""
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(one, other, strict=True))


# --- page ---------------------------------------------------------------------------------------------------------


def render_page(records: Sequence[Mapping[str, Any]]) -> str:
    """Render docs/parity.md."""
    return TEXT.format(
        **records[0]["versions"],
        **records[0]["settings"],
        summary=render_summary(records),
        differences=render_rounds(records, "relative_differences", "compared with Flower", "{:.1e}"),
        accuracies=render_rounds(records, "accuracy", "system", "{:.2%}"),
    )


def render_summary(records: Sequence[Mapping[str, Any]]) -> str:
    """Render the differences after the last round beside their bounds."""
    rows = []
    for record in records:
        difference, bound = record["relative_differences"]["this package"][-1], record["bound"]
        numbers = [f"{record['max_difference']:.1e}", f"{difference:.1e}", f"{bound:.0e}"]
        rows.append([record["method"], record["precision"], *numbers, "yes" if difference <= bound else "**no**"])
    return render_table(["method", "precision", "difference", "relative", "bound of relative", "within"], rows)


def render_rounds(records: Sequence[Mapping[str, Any]], entry: str, label: str, number_format: str) -> str:
    """Render an entry of the records, one row per series of values and one column per round."""
    head = ["method", "precision", label, *(f"round {i + 1}" for i in range(records[0]["settings"]["num_rounds"]))]
    rows = [
        [record["method"], record["precision"], name, *map(number_format.format, values)]
        for record in records
        for name, values in record[entry].items()
    ]
    return render_table(head, rows)


def render_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))


TEXT = """# Parity with Flower

FedAvg and FedProx (μ = {mu}) of this package, beside the strategies of the same names of Flower {flwr} (torch {torch},
one CPU thread, results version {results}). Both systems receive the same initial weights, images and batches:

- three silos of embedded digits, one per rotation, with {train_sizes} training images, and with {test_per_silo} test
  images each;
- a small convolutional network without dropout (encoder `{encoder}`);
- {num_rounds} rounds, each with {epochs} epochs of SGD at every silo: learning rate {lr}, momentum {momentum},
  batches of {batch_size} images.

Flower's strategies run their own rounds and averages, in one process. Their clients are plain PyTorch: layers of
`torch.nn`, `torch.optim.SGD` and the proximal term. They share no code with the engines of this package, of which the
serial one is compared; tests compare the others with it.

```
python -m studies.parity run     # makes results/parity.jsonl, in about 90 seconds
python -m studies.parity page    # makes this page from it
```

## Weights

The largest difference of a weight after the last round, also relative to the largest weight. The bounds were written
down before the first comparison.

{summary}

**In double precision, both systems agree to rounding. In single precision they exceed the bound, because training
amplifies rounding.** Two runs of Flower exceed it too, if they differ in the memory layout of the network or in the
order in which the server adds the replies (Flower draws this order at random). This package rounds differently because
its tensors have channels last and its averages are computed in double precision.

The next table has the largest relative difference to Flower after every round. Rows with a changed method show that the
comparison notices a wrong method.

{differences}

Flower's documentation defines the proximal term as μ/2 ‖w − wᵗ‖², as the paper does. The code example below that
formula leaves out the square. The clients here follow the formula; a client copied from the example has another
objective.

## Accuracy

Mean over the silos, on their test images, after every round.

{accuracies}
"""

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
RecordsOption = Annotated[Path, typer.Option(help="File of records; `run` replaces it.")]


@app.command()
def run(records: RecordsOption = RECORDS) -> None:
    """Train both methods in both systems, in double and single precision."""
    try:
        import flwr  # noqa: F401 - it sets the level of its logger
    except ModuleNotFoundError:
        stop("this comparison needs Flower: pip install 'uefl[flower]'")
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    workload, made = make_workload(), []
    for precision in MAX_DIFFERENCES:
        for name in METHODS:
            made.append(compare_systems(name, workload, precision))
            difference = made[-1]["relative_differences"]["this package"][-1]
            typer.echo(f"{name}, {precision}: relative difference {difference:.1e}")
    records.unlink(missing_ok=True)
    append_records(records, made)


@app.command("page")
def write_page(
    records: RecordsOption = RECORDS, out: Annotated[Path, typer.Option(help="Page to write.")] = PAGE
) -> None:
    """Write the page from the records."""
    made = read_records(records)
    if not made:
        stop(f"{records} has no records; `python -m studies.parity run` makes them")
    out.write_text(render_page(made))


def stop(message: str) -> NoReturn:
    """End the command with one line and exit code 2."""
    typer.echo(message, err=True)
    raise typer.Exit(2)


if __name__ == "__main__":
    app()
