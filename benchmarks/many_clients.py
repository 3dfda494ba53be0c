"""100 small clients on a GPU: whole rounds (training, average, evaluation, 20 dropout samples) and an eager loop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.digits import load_digits, make_silos
from benchmarks.eager_loop import EagerLoop
from benchmarks.gpu_rounds import UeflRounds, count_step_flops, measure_rounds
from benchmarks.harness import OURS, Measurement, Options, measure_seconds
from uefl.algorithms.fedavg import FedAvg
from uefl.core.federation import Examples, MatmulPrecision, Silo
from uefl.core.local import LocalTraining
from uefl.engines.stacked.stack_size import count_activations
from uefl.models.network import Net

LOCAL = LocalTraining(optimizer="sgd", momentum=0.0, lr=0.01, batch_size=48, epochs=1)
METHOD = FedAvg(rounds=50, iterations=1, local=LOCAL, evaluate_local=False)


def make_fedcr_network() -> Net:
    """Make FedCR's network for CIFAR: two 5x5 convolutions of 64 filters, 1600-1024-1024-10; max-pool before ReLU."""
    torch.manual_seed(0)
    encoder = nn.Sequential(
        *(nn.Conv2d(3, 64, 5), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Conv2d(64, 64, 5), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(1600, 1024), nn.ReLU()),
    )
    return Net(encoder, 10, (3, 32, 32), hidden_size=1024, feature_norm="none")


def pad_to_cifar_shape(silo: Silo) -> Silo:
    """Pad digits to the shape of CIFAR images, 3 x 32 x 32."""

    def pad(examples: Examples) -> Examples:
        return Examples(F.pad(examples.x, (2, 2, 2, 2)).repeat(1, 3, 1, 1), examples.y)

    return Silo(silo.name, pad(silo.train), pad(silo.validation), pad(silo.test))


def run(options: Options) -> Iterator[Measurement]:
    """Measure whole rounds of uefl and of an eager loop, and on a GPU the lower bound of training."""
    num_clients, train_per_silo, test_per_silo = (4, 96, 32) if options.tiny else (100, 480, 96)
    digits = load_digits(options.data)
    silos = [pad_to_cifar_shape(s) for s in make_silos(digits, num_clients, train_per_silo, test_per_silo)]
    net = make_fedcr_network()
    precisions: dict[str, MatmulPrecision] = {OURS: "full"}
    if options.on_cuda:
        precisions = {OURS: "bf16", f"{OURS}, tf32": "tf32"}
    contenders = {
        contender: UeflRounds(METHOD, net, silos, options.device, matmul_precision=precision)
        for contender, precision in precisions.items()
    }
    peer = EagerLoop(net, silos, LOCAL, METHOD.mc_samples, options.device)
    num_steps = train_per_silo // LOCAL.batch_size
    yield from measure_rounds(contenders, peer, num_steps * num_clients, options)
    if options.on_cuda:
        yield estimate_lower_bound(net, peer, num_clients, num_steps, options)
        yield measure_plain_products(net, num_clients, num_steps, options)


def measure_plain_products(net: Net, num_clients: int, num_steps: int, options: Options) -> Measurement:
    """Measure a round's convolutions as products that torch multiplies for all clients at once.

    The time is what the device's library needs for the same operations with patches ready in memory.
    """
    x = torch.zeros(LOCAL.batch_size, 3, 32, 32, device=options.device)
    seconds = 0.0
    for number, module in enumerate(net.encoder.children()):
        inputs, x = x, module(x)
        if not isinstance(module, nn.Conv2d):
            continue
        num_filters, channels, *kernel = module.weight.shape
        patch, positions = channels * kernel[0] * kernel[1], LOCAL.batch_size * x.shape[2] * x.shape[3]
        products = [(positions, patch, num_filters), (patch, positions, num_filters)]  # outputs, filter gradients
        if number:  # gradients of its inputs, each of which sums over all filters
            products.append(
                (inputs.shape[0] * inputs.shape[2] * inputs.shape[3], num_filters * patch // channels, channels)
            )
        for m, k, n in products:
            a, b = (
                torch.randn(num_clients, *shape, device=options.device, dtype=torch.bfloat16)
                for shape in ((m, k), (k, n))
            )
            seconds += find_best_seconds(functools.partial(torch.bmm, a, b), options)
    return Measurement("torch.bmm", "convolutions alone", "s", [seconds * num_steps], "patches ready in memory")


def estimate_lower_bound(net: Net, peer: EagerLoop, num_clients: int, num_steps: int, options: Options) -> Measurement:
    """Estimate the least time of a round's training from its operations, its bytes and the device's measured rates."""
    flops_per_second, bytes_per_second = measure_device_rates(options)
    weight_bytes = 4 * num_clients * sum(p.numel() for p in net.parameters())
    num_images = num_clients * LOCAL.batch_size
    activation_bytes = 2 * num_images * count_activations(net.to(options.device), (3, 32, 32)).total
    # Weights: read forward and backward, gradients written and read, weights read and written. Activations: written
    # and read in both directions, in half precision.
    num_bytes = 6 * weight_bytes + 4 * activation_bytes
    flops = count_step_flops(peer) * num_clients
    seconds = max(flops / flops_per_second, num_bytes / bytes_per_second) * num_steps
    bound = "operations" if flops / flops_per_second > num_bytes / bytes_per_second else "bytes"
    note = f"{bound}: {num_bytes / 1e9:.1f} GB, {flops / 1e9:.0f} GFLOP per step"
    return Measurement("lower bound", "training alone", "s", [seconds], note)


def measure_device_rates(options: Options) -> tuple[float, float]:
    """Measure operations and bytes per second of the device, on large products and copies."""
    a = torch.randn(8192, 8192, device=options.device, dtype=torch.bfloat16)
    b: Tensor = torch.empty(2**28, device=options.device)
    c = torch.empty_like(b)
    product, copy = find_best_seconds(lambda: a @ a, options), find_best_seconds(lambda: c.copy_(b), options)
    return 2 * 8192**3 / product, 2 * b.numel() * 4 / copy


def find_best_seconds(work: Callable[[], object], options: Options, calls: int = 20) -> float:
    """Return the seconds of one call in the fastest of three series."""
    work()
    return min(measure_seconds(lambda: [work() for _ in range(calls)], options.device) / calls for _ in range(3))
