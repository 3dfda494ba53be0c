"""The demo's main job, UEFL on rotated digits, compared with a loop written like the authors' code; a few rounds each.

Both have the demo's silos, encoder, hidden layer, codewords, segments, batch size, epochs and Adam. As in the authors'
code, the loop makes data loaders for every silo and round, quantizes by a dense one-hot product, stores a codebook per
silo, averages all other weights, and evaluates the whole network 20 times per silo and round. Dropout is on in those
passes (the authors' code turned it off, so they were equal, at the same cost). uefl starts with a K-means codebook
instead of the warm-up, so that all its rounds quantize, and it evaluates all that the demo does: the received model on
validation and test images and the local model on test images, 20 samples each.
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

from benchmarks.cpu_profile import profile_operations
from benchmarks.harness import OURS, Measurement, Options, measure_interleaved
from uefl.algorithms.extensible_codebook import ExtensibleCodebook
from uefl.core.federation import Silo
from uefl.engines.serial import SerialEngine
from uefl.experiment.experiment import Experiment
from uefl.experiment.recipes import make_experiment
from uefl.models.residual_encoder import ResidualBlock

ROUNDS, MC_SAMPLES, EVAL_BATCH_SIZE = 3, 20, 100


class Quantizer(nn.Module):
    """Quantize by all distances, a one-hot matrix and a product with the codebook."""

    def __init__(self, num_codewords: int, width: int) -> None:
        super().__init__()
        self.codebook = nn.Embedding(num_codewords, width)
        self.codebook.weight.data.normal_()

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        flat = z.reshape(-1, self.codebook.embedding_dim)
        squares = flat.pow(2).sum(1, keepdim=True) + self.codebook.weight.pow(2).sum(1)
        distance = squares - 2 * flat @ self.codebook.weight.t()
        one_hot = torch.zeros_like(distance).scatter_(1, distance.argmin(1, keepdim=True), 1)
        codewords = (one_hot @ self.codebook.weight).view(z.shape)
        loss = F.mse_loss(codewords, z.detach()) + 0.25 * F.mse_loss(codewords.detach(), z)
        return z + (codewords - z).detach(), loss


class AuthorsNetwork(nn.Module):
    """The authors' network at the demo's size; as in their code, ReLU comes before max-pool."""

    def __init__(self, experiment: Experiment) -> None:
        super().__init__()
        codebook, model = experiment.method.codebook, experiment.model
        assert codebook
        widths = [1, model.width, 2 * model.width, 4 * model.width]
        self.encoder = nn.Sequential(
            *(nn.Sequential(ResidualBlock(a, b), nn.ReLU(), nn.MaxPool2d(2)) for a, b in pairwise(widths))
        )
        width = widths[-1]
        self.discretizer = Quantizer(codebook.num_codewords, width // codebook.segments)
        self.classifier = nn.Sequential(
            nn.Dropout(model.dropout),
            nn.Linear(9 * width, model.hidden_size),
            nn.GELU(),
            nn.Dropout(model.dropout),
            nn.Linear(model.hidden_size, 10),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encoder(x).flatten(2).transpose(1, 2)
        z, loss = self.discretizer(F.layer_norm(z, z.shape[-1:]))
        return self.classifier(z.flatten(1)), loss


def run_authors_loop(silos: Sequence[Silo], experiment: Experiment) -> None:
    """Run rounds of local training, averaging without the codebooks, and evaluation."""
    torch.manual_seed(0)
    local = experiment.method.local
    server = AuthorsNetwork(experiment)
    nets = [deepcopy(server) for _ in silos]
    for _ in range(ROUNDS):
        for net, silo in zip(nets, silos):
            net.train()
            optimizer = torch.optim.Adam(net.parameters(), local.lr)
            for _ in range(local.epochs):
                for x, y in DataLoader(TensorDataset(*silo.train), batch_size=local.batch_size, shuffle=True):
                    optimizer.zero_grad()
                    logits, code_loss = net(x)
                    (F.cross_entropy(logits, y) + code_loss).backward()
                    optimizer.step()
        states = [net.state_dict() for net in nets]
        shared = [n for n in states[0] if "discretizer" not in n]
        mean = {n: torch.stack([s[n].float() for s in states]).mean(0) for n in shared}
        for net, silo in zip(nets, silos):
            net.load_state_dict(mean, strict=False)
            evaluate(net, silo)


@torch.no_grad()
def evaluate(net: AuthorsNetwork, silo: Silo) -> tuple[float, float]:
    """Return accuracy and entropy of the mean of the dropout samples."""
    net.eval()
    for layer in net.classifier:
        layer.train(isinstance(layer, nn.Dropout))
    correct, entropy = 0.0, 0.0
    for x, y in DataLoader(TensorDataset(*silo.test), batch_size=EVAL_BATCH_SIZE):
        p = torch.stack([net(x)[0].softmax(1) for _ in range(MC_SAMPLES)]).mean(0)
        correct += float((p.argmax(1) == y).sum())
        entropy += float(torch.special.entr(p).sum())
    return correct / len(silo.test.y), entropy / len(silo.test.y)


def run_uefl(silos: Sequence[Silo], experiment: Experiment, device: str) -> None:
    """Run the same rounds with uefl."""
    method = experiment.method
    clients = SerialEngine(silos, experiment.build_network((1, 28, 28), 10), seed=experiment.seed, device=device)
    server = method.initialize_server(clients)
    while server.round < method.total_rounds:
        server = method.step(clients, server)


def make_demo(*, rounds: int = ROUNDS, tiny: bool = False) -> tuple[list[Silo], Experiment]:
    """Return the demo's silos and experiment, without warm-up."""
    experiment = make_experiment("uefl", "mnist5k")
    codebook = ExtensibleCodebook(warmup_rounds=0, commitment_weight=0.01)  # four segments, as in earlier records
    # The authors' code has no fine-tuning.
    method = replace(experiment.method.without_own_models(), rounds=rounds, iterations=1, codebook=codebook)
    data = experiment.data
    if tiny:
        method = replace(method, local=replace(method.local, epochs=1), codebook=replace(codebook, num_codewords=8))
        data = replace(data, train_per_silo=40, test_per_silo=8)
    silos, _ = data.load(0)
    return silos, replace(experiment, method=method)


def run(options: Options) -> Iterator[Measurement]:
    """Measure rounds of the demo with uefl and with the authors' loop."""
    silos, experiment = make_demo(tiny=options.tiny)
    contenders = {
        OURS: lambda: run_uefl(silos, experiment, options.device),
        "authors' code": lambda: run_authors_loop(silos, experiment),
    }
    for contender, values in measure_interleaved(contenders, options, warm_up=False).items():
        yield Measurement(contender, "a round of the demo", "CPU s", [v / ROUNDS for v in values], f"{ROUNDS} rounds")
    yield from profile_operations(contenders[OURS], "a round of the demo", rounds_per_call=ROUNDS)
