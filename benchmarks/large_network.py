"""The authors' MNIST setup on a GPU: 9 silos x 2000, blocks of 128/256/512, batch size 1024, 20 epochs per round."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.digits import load_digits, make_silos
from benchmarks.eager_loop import EagerLoop
from benchmarks.gpu_rounds import UeflRounds, measure_rounds
from benchmarks.harness import OURS, Measurement, Options
from benchmarks.many_clients import measure_device_rates
from uefl.algorithms.extensible_codebook import ExtensibleCodebook
from uefl.algorithms.uefl import UEFL
from uefl.core.local import LocalTraining
from uefl.core.noise import evaluation_mode
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

    @property
    def images_per_round(self) -> int:
        """Number of images that a round trains, those of every epoch counted."""
        return self.num_silos * self.epochs * self.train_per_silo


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
    yield from measure_rounds(contenders, peer, size.images_per_round / size.batch_size, options)
    if options.on_cuda:
        yield estimate_pass_seconds(net, size, options)


def estimate_pass_seconds(net: Net, size: Size, options: Options) -> Measurement:
    """Estimate the least time of the passes between a round's convolutions, at the device's measured rate of copies."""
    num_bytes = count_pass_bytes(net) * size.images_per_round
    seconds = num_bytes / measure_device_rates(options)[1]
    quantity = "training alone: passes between convolutions"
    return Measurement("lower bound", quantity, "s", [seconds], f"bytes: {num_bytes / 1e12:.2f} TB")


def count_pass_bytes(net: Net) -> int:
    """Count the bytes per image that the passes between convolutions must move at least in half precision.

    Convolutions read and write memory. A block has n values before its max-pool and p after it. Forward, statistics
    read 2n, norm and ReLU read n and write n, and the second norm, the sum, the max-pool and ReLU read 2n and write p.
    Backward, a norm reads values and their gradients for its sums, and once more for its own gradients: the second norm
    reads n + p twice and writes 2n, also for the shortcut; the first one reads 2n twice and writes n. One byte per
    pooled value says which value was the largest; it is written once and read twice.
    """
    assert isinstance(net.encoder, ResidualEncoder)
    x, num_bytes = next(net.parameters()).new_zeros(1, *net.input_shape), 0
    for block in net.encoder.blocks.children():
        before, x = _run_block(block, x)
        n, p = before.numel(), x.numel()
        forward, backward = 6 * n + p, 2 * (n + p) + 2 * n + 2 * (2 * n) + n
        num_bytes += 2 * (forward + backward) + 3 * p
    return num_bytes


def _run_block(block: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a block computes before its max-pool and after it."""
    residual, *pool = block.children()
    with torch.no_grad(), evaluation_mode(block):
        before: Tensor = residual(x)
        return before, nn.Sequential(*pool)(before)
