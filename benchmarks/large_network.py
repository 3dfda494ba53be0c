"""The authors' MNIST setup on a GPU: 9 silos x 2000, blocks of 128/256/512, batch size 1024, 20 epochs per round."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from benchmarks.digits import load_digits, make_silos
from benchmarks.eager_loop import EagerLoop
from benchmarks.gpu_rounds import UeflRounds, measure_rounds
from benchmarks.harness import OURS, Measurement, Options
from uefl.algorithms.extensible_codebook import ExtensibleCodebook
from uefl.algorithms.uefl import UEFL
from uefl.core.local import LocalTraining
from uefl.models.network import Net
from uefl.models.residual_encoder import ResidualEncoder


class Size(NamedTuple):
    """Size of the workload."""

    num_silos: int = 9
    train_per_silo: int = 2000
    test_per_silo: int = 500
    width: int = 128
    batch_size: int = 1024
    epochs: int = 20


TINY = Size(2, 64, 32, 8, 32, 2)


def make_method(size: Size) -> UEFL:
    """Make the method with the authors' settings."""
    local = LocalTraining(
        optimizer="adam", lr=1e-3, batch_size=size.batch_size, epochs=size.epochs, eval_batch_size=512
    )
    codebook = ExtensibleCodebook(
        num_codewords=64,
        segments=1,
        codebook_init="gaussian",
        warmup_rounds=0,
        commitment_weight=0.25,
        codebook_loss_weight=1.0,
    )
    return UEFL(rounds=50, iterations=1, local=local, codebook=codebook, evaluate_local=False)


def make_network(size: Size, method: UEFL) -> Net:
    """Make the authors' network with the method's codebook."""
    torch.manual_seed(0)
    net = Net(ResidualEncoder(width=size.width, depth=3), 10, (1, 28, 28), hidden_size=512)
    adapted = method.adapt_network(net)
    assert isinstance(adapted, Net)
    return adapted


def run(options: Options) -> Iterator[Measurement]:
    """Measure whole rounds of uefl and of an eager loop."""
    size = TINY if options.tiny else Size()
    method = make_method(size)
    net = make_network(size, method)
    silos = make_silos(load_digits(options.data), size.num_silos, size.train_per_silo, size.test_per_silo)
    if options.on_cuda:
        contenders = {
            OURS: UeflRounds(method, net, silos, options.device, matmul_precision="bf16", compiled=True),
            f"{OURS}, not compiled": UeflRounds(method, net, silos, options.device, matmul_precision="bf16"),
        }
    else:
        contenders = {OURS: UeflRounds(method, net, silos, options.device, matmul_precision="full")}
    peer = EagerLoop(net, silos, method.local, method.mc_samples, options.device)
    num_steps = size.num_silos * size.epochs * (size.train_per_silo / size.batch_size)
    yield from measure_rounds(contenders, peer, num_steps, options)
