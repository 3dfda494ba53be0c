"""The demo's main job (UEFL on rotated digits) beside a loop written like the authors' release; a few rounds each.

Both: the demo recipe's silos, encoder, hidden layer, words, segments, batch, epochs, Adam. As in the release, the loop
makes data loaders for every silo and round, quantizes by a dense one-hot product, keeps a book at every silo, averages
all other weights, and evaluates the whole network in 20 passes at every silo each round. Dropout is on in those passes
(the release turned it off, so that they were equal, at the same cost). Ours starts with a K-means book instead of the
warm-up, so that all its rounds quantize, and measures all it does in the demo: received model on validation and test
images, local model on test images, 20 passes each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.frame import Figure, Options, take_turns
from benchmarks.ops import shares
from uefl.engines import Serial
from uefl.experiment import Experiment
from uefl.federation import Silo
from uefl.models.residual import ResidualBlock
from uefl.recipes import recipe

ROUNDS, PASSES, EVALUATION_BATCH = 3, 20, 100


class Quantizer(nn.Module):
    """All distances, a one-hot matrix, a product with the book."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.book = nn.Embedding(words, width)
        self.book.weight.data.normal_()

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        flat = z.reshape(-1, self.book.embedding_dim)
        squares = flat.pow(2).sum(1, keepdim=True) + self.book.weight.pow(2).sum(1)
        distance = squares - 2 * flat @ self.book.weight.t()
        hot = torch.zeros_like(distance).scatter_(1, distance.argmin(1, keepdim=True), 1)
        word = (hot @ self.book.weight).view(z.shape)
        loss = F.mse_loss(word, z.detach()) + 0.25 * F.mse_loss(word.detach(), z)
        return z + (word - z).detach(), loss


class Network(nn.Module):
    def __init__(self, experiment: Experiment) -> None:
        super().__init__()
        book, model = experiment.method.codebook, experiment.model
        assert book
        widths = [1, model.width, 2 * model.width, 4 * model.width]
        self.encoder = nn.Sequential(
            *(nn.Sequential(ResidualBlock(a, b), nn.ReLU(), nn.MaxPool2d(2)) for a, b in pairwise(widths))
        )
        width = widths[-1]
        self.discretizer = Quantizer(book.words, width // book.segments)
        self.classifier = nn.Sequential(
            nn.Dropout(model.dropout),
            nn.Linear(9 * width, model.hidden),
            nn.GELU(),
            nn.Dropout(model.dropout),
            nn.Linear(model.hidden, 10),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encoder(x).flatten(2).transpose(1, 2)
        z, loss = self.discretizer(F.layer_norm(z, z.shape[-1:]))
        return self.classifier(z.flatten(1)), loss


def like_the_release(silos: Sequence[Silo], experiment: Experiment) -> None:
    """Rounds of local training, averaging without the books, and evaluation."""
    torch.manual_seed(0)
    local = experiment.method.local
    server = Network(experiment)
    nets = [deepcopy(server) for _ in silos]
    for _ in range(ROUNDS):
        for net, silo in zip(nets, silos):
            net.train()
            optimizer = torch.optim.Adam(net.parameters(), local.rate)
            for _ in range(local.epochs):
                for x, y in DataLoader(TensorDataset(*silo.train), batch_size=local.batch, shuffle=True):
                    optimizer.zero_grad()
                    logits, code = net(x)
                    (F.cross_entropy(logits, y) + code).backward()
                    optimizer.step()
        states = [net.state_dict() for net in nets]
        shared = [n for n in states[0] if "discretizer" not in n]
        mean = {n: torch.stack([s[n].float() for s in states]).mean(0) for n in shared}
        for net, silo in zip(nets, silos):
            net.load_state_dict(mean, strict=False)
            evaluate(net, silo)


@torch.no_grad()
def evaluate(net: Network, silo: Silo) -> tuple[float, float]:
    net.eval()
    for layer in net.classifier:
        layer.train(isinstance(layer, nn.Dropout))
    right, entropy = 0.0, 0.0
    for x, y in DataLoader(TensorDataset(*silo.test), batch_size=EVALUATION_BATCH):
        p = torch.stack([net(x)[0].softmax(1) for _ in range(PASSES)]).mean(0)
        right += float((p.argmax(1) == y).sum())
        entropy += float(torch.special.entr(p).sum())
    return right / len(silo.test.y), entropy / len(silo.test.y)


def ours(silos: Sequence[Silo], experiment: Experiment, device: str) -> None:
    method = experiment.method
    clients = Serial(silos, experiment.network((1, 28, 28), 10), seed=experiment.seed, device=device)
    server = method.start(clients)
    while server.round < method.budget:
        server = method.step(clients, server)


def run(o: Options) -> Iterator[Figure]:
    experiment = recipe("uefl", "mnist5k")
    assert experiment.method.codebook
    book = replace(experiment.method.codebook, warm_up=0)
    method = replace(experiment.method, rounds=ROUNDS, iterations=1, codebook=book)
    if o.tiny:
        method = replace(method, local=replace(method.local, epochs=1), codebook=replace(book, words=8))
    experiment = replace(experiment, method=method)
    silos, _ = replace(experiment.data, **({"train": 40, "test": 8} if o.tiny else {})).load(0)
    contenders = {
        "uefl": lambda: ours(silos, experiment, o.device),
        "like the release": lambda: like_the_release(silos, experiment),
    }
    for who, values in take_turns(contenders, o, warm=False).items():
        yield Figure(who, "a round of the demo", "CPU s", [v / ROUNDS for v in values], f"{ROUNDS} rounds")
    yield from shares(contenders["uefl"], "a round of the demo", per=ROUNDS)
