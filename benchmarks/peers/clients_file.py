"""Many clients in one mapped file, and the work that all contenders do: per round, 100 drawn clients train.

A client has 50 to 200 training images and ten test images of MNIST, whose images repeat. The network is the encoder
`lenet-fmnist` with a small classifier; SGD, batch size 10, one local epoch. All contenders start from the same weights,
train the clients that uefl draws, and see the same batches: a second file beside the first one has all three.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.peers.workload import DTYPES
from uefl.core.noise import derive_key, permutation, uniform
from uefl.data.readers.tensor_file import map_pixels
from uefl.data.sources import read_images

CLIENTS_PER_ROUND, LR, BATCH_SIZE, NUM_CLASSES, SEED = 100, 0.1, 10, 10, 0
TRAIN_SIZES, TEST_SIZE, NUM_HELD_OUT = (50, 200), 10, 2000
MEAN, STD = 0.5, 0.25  # of the data set `tensors`
INITIAL = "initial."  # beginning of the names of initial weights


class Schedule(NamedTuple):
    """The clients of each round, and the rows of their training images in the order in which they see them."""

    participants: Tensor  # [rounds, CLIENTS_PER_ROUND]
    rows: Tensor  # of all clients of all rounds, one after the other
    starts: Tensor  # [rounds · CLIENTS_PER_ROUND + 1], where the rows of each of them begin

    def get_rows(self, round_number: int, position: int) -> Tensor:
        """Return the rows of one of the clients of a round; rounds count from 1."""
        i = (round_number - 1) * CLIENTS_PER_ROUND + position
        return self.rows[int(self.starts[i]) : int(self.starts[i + 1])]


class ClientsFile(NamedTuple):
    """The images of all clients, mapped."""

    num_clients: int
    dtype: torch.dtype  # in which a contender trains
    pixels: Any  # np.memmap uint8 [n, 1, 28, 28]
    labels: Tensor
    schedule: Schedule

    def load_train(self, round_number: int, position: int) -> tuple[Tensor, Tensor]:
        """Read the training examples of one of the clients of a round, in the order in which it sees them."""
        rows = self.schedule.get_rows(round_number, position)
        return scale_pixels(self.pixels[rows.numpy()]).to(self.dtype), self.labels[rows]


def write_clients(path: Path, num_clients: int, data: str, rounds: int) -> None:
    """Write the file of clients, and beside it uefl's initial weights and draws, and the images that no client has."""
    from benchmarks.peers.clients_uefl import draw_schedule, make_experiment  # which peers need not import

    images = read_images(data)
    order = permutation(derive_key("benchmarks"), len(images.y))
    held_out, own = order[:NUM_HELD_OUT], order[NUM_HELD_OUT:]
    low, high = TRAIN_SIZES
    sizes = (low + uniform(derive_key("clients"), (num_clients,)) * (high + 1 - low)).long()
    sizes += sizes % BATCH_SIZE == 1  # uefl has no batch of one example, but pfl would
    sizes += TEST_SIZE
    silo = torch.repeat_interleave(torch.arange(num_clients), sizes)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    rows = own[torch.arange(len(silo)) % len(own)]
    is_test = torch.arange(len(silo)) - starts[silo] < TEST_SIZE
    save_file({"x": images.x[rows], "y": images.y[rows], "silo": silo, "is_test": is_test}, path)
    experiment = make_experiment(str(path), rounds)
    net = experiment.build_network(images.x.shape[1:], NUM_CLASSES)
    initial = {f"{INITIAL}{i:02}": tensor.clone() for i, tensor in enumerate(net.state_dict().values())}
    shared = {"x": images.x[held_out], "y": images.y[held_out], **initial, **draw_schedule(experiment)._asdict()}
    save_file(shared, _get_shared_path(path))


def open_clients(path: str, precision: str) -> ClientsFile:
    """Map the file of clients, and limit torch to one thread."""
    torch.set_num_threads(1)
    with safe_open(path, framework="pt") as file:
        labels = file.get_tensor("y").clone()
        num_clients = int(file.get_slice("silo")[len(labels) - 1 :]) + 1
    with safe_open(_get_shared_path(Path(path)), framework="pt") as file:
        schedule = Schedule(*(file.get_tensor(name).clone() for name in Schedule._fields))
    return ClientsFile(num_clients, DTYPES[precision], map_pixels(Path(path)), labels, schedule)


def scale_pixels(pixels: Any) -> Tensor:
    """Scale pixels as the data set `tensors` does."""
    return (torch.from_numpy(pixels).float() / 255 - MEAN) / STD


def make_layers() -> nn.Sequential:
    """Make the network from layers of torch; its tensors are in the order of uefl's."""
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 5), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Conv2d(4, 12, 5), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()),
        *(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, NUM_CLASSES)),
    )


def make_network(path: str, precision: str) -> nn.Sequential:
    """Make the network with uefl's initial weights."""
    net = make_layers().to(DTYPES[precision])
    with safe_open(_get_shared_path(Path(path)), framework="pt") as file:
        state = {name: file.get_tensor(f"{INITIAL}{i:02}") for i, name in enumerate(net.state_dict())}
    net.load_state_dict(state)
    return net


def parse_arguments() -> tuple[str, int, str]:
    """Return the file of clients, the number of rounds and the precision; a file for the final weights follows."""
    return sys.argv[1], int(sys.argv[2]), sys.argv[3]


def report_begin() -> None:
    """Print the begin of the first round for the clock of the parent process."""
    print("begin", flush=True)


def report_middle() -> None:
    """Print that half of the clients of a round have trained, when the parent process reads the memory."""
    print("middle", flush=True)


def report_round() -> None:
    """Print the end of a round."""
    print("round", flush=True)


@torch.no_grad()
def report_model(path: str, net: nn.Module) -> None:
    """Print the accuracy of the final model on the images that no client has, and save its weights."""
    with safe_open(_get_shared_path(Path(path)), framework="pt") as file:
        x, y = scale_pixels(file.get_tensor("x").numpy()), file.get_tensor("y")
    save_file({f"{i:02}": t.contiguous() for i, t in enumerate(net.state_dict().values())}, sys.argv[4])
    print(f"accuracy {float((net.float().eval()(x).argmax(1) == y).double().mean()):.4f}", flush=True)


def _get_shared_path(path: Path) -> Path:
    return path.with_name(f"shared-{path.name}")
