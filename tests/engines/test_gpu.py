"""On a CUDA device: the draws of the CPU, the results of the CPU in double precision, the same bits in every run."""

import gc
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import run_rounds
from torch import Tensor, nn

from uefl.algorithms import METHODS
from uefl.algorithms.extensible_codebook import ExtensibleCodebook
from uefl.algorithms.fedavg import FedAvg
from uefl.algorithms.uefl import UEFL
from uefl.core.federation import Silo, Tensors
from uefl.core.kmeans import kmeans
from uefl.core.local import LocalTraining
from uefl.core.noise import derive_key, normal, permutation, random_bits
from uefl.engines.serial import SerialEngine
from uefl.engines.stacked.stacked_engine import StackedEngine
from uefl.experiment.checkpoint import load_checkpoint, save_checkpoint
from uefl.models.network import Net

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
ENGINES: dict[str, Callable[..., SerialEngine]] = {
    "serial": SerialEngine,
    "stacked": StackedEngine,
    "stacked, no graphs": partial(StackedEngine, use_cuda_graphs=False),
    "one silo per stack": partial(StackedEngine, max_stack_size=1),
    "compiled": partial(StackedEngine, max_stack_size=1, use_compiler=True),
}
UNEQUAL_BOUNDS, EQUAL_BOUNDS = (0, 80, 160, 230, 240), (0, 66, 132, 198)  # first example of each silo


def make_encoder() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.ReLU()),
    )


class FunctionalEncoder(nn.Module):
    """Convolutions as functions, with arguments by position and by name, and a copy from the host in the forward pass.

    A CUDA graph cannot capture that copy.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(8, 1, 3, 3) / 3), nn.Parameter(torch.randn(8, 8, 3, 3) / 9)
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        x = (x - torch.tensor([0.1], device=x.device, dtype=x.dtype)) / 2
        x = F.relu(F.conv2d(x, self.first, self.bias))
        return F.relu(F.conv2d(input=x, weight=self.second, bias=self.bias, stride=2, padding=1))


def make_clients(
    method: FedAvg,
    engine: Callable[..., SerialEngine],
    device: str,
    *,
    encoder_factory: Callable[[], nn.Module] = make_encoder,
    bounds: Sequence[int] = UNEQUAL_BOUNDS,
    **fields: Any,
) -> SerialEngine:
    x = normal(derive_key("x"), (240, 1, 8, 8))
    y = (x.mean((1, 2, 3)) > 0).long()
    public = normal(derive_key("public"), (40, 1, 8, 8))
    silos = [
        Silo.from_tensors(f"s{i}", x[start:end].roll(i, 3) * (1 + i), y[start:end], public=public)
        for i, (start, end) in enumerate(pairwise(bounds))
    ]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = method.adapt_network(Net(encoder_factory(), 2, (1, 8, 8), hidden_size=16))
    return engine(silos, net, device=device, **fields)


def make_uefl() -> UEFL:
    """Return a method of three rounds, an extension and one more round, with dropout."""
    codebook = ExtensibleCodebook(num_codewords=8, segments=2, warmup_rounds=1, gamma=0.0, min_standard_errors=0.0)
    local = LocalTraining(batch_size=16, epochs=2)
    return UEFL(rounds=3, extra_rounds=1, iterations=2, mc_samples=4, local=local, codebook=codebook)


def train(engine: Callable[..., SerialEngine], device: str, method: FedAvg | None = None, **fields: Any) -> Tensors:
    """Return the weights at the end of a run."""
    method = method or make_uefl()
    clients = make_clients(method, engine, device, **fields)
    server, _ = run_rounds(method, clients)
    assert method.codebook is None or server.access.shape[1] > 8, "the run must extend the codebook"
    return {name: tensor.cpu() for name, tensor in server.model_state.items()}


def assert_close(tensors: Tensors, expected: Tensors) -> None:
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-9, atol=1e-9)


def test_draws_are_the_same_on_every_device() -> None:
    assert torch.equal(random_bits(derive_key("a"), 10_000), random_bits(derive_key("a"), 10_000, "cuda").cpu())
    assert torch.equal(permutation(derive_key("b"), 10_000), permutation(derive_key("b"), 10_000, "cuda").cpu())
    keys = torch.tensor([derive_key(i) for i in range(5)])
    bits = torch.stack([random_bits(int(key), 3001) for key in keys])
    assert torch.equal(random_bits(keys.cuda()[:, None], 3001).cpu(), bits)
    assert torch.equal(torch.vmap(lambda key: random_bits(key, 3001))(keys.cuda()).cpu(), bits)


@pytest.mark.parametrize("engine", ENGINES)
def test_double_precision_agrees_with_the_cpu(engine: str) -> None:
    tensors = train(ENGINES[engine], "cuda", dtype=torch.float64)
    assert_close(tensors, train(SerialEngine, "cpu", dtype=torch.float64))


@pytest.mark.parametrize("matmul_precision", ["full", "tf32", "bf16"])
@pytest.mark.parametrize("engine", ENGINES)
def test_the_same_seed_gives_the_same_bits_in_two_runs(engine: str, matmul_precision: str) -> None:
    first, second = (train(ENGINES[engine], "cuda", matmul_precision=matmul_precision) for _ in range(2))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_a_network_that_cannot_be_captured_runs_without_graphs() -> None:
    fields: Any = {"encoder_factory": FunctionalEncoder}
    stacked, serial = (train(e, "cuda", dtype=torch.float64, **fields) for e in (StackedEngine, SerialEngine))
    assert_close(stacked, serial)
    for matmul_precision in ("tf32", "bf16"):
        tensors = train(StackedEngine, "cuda", matmul_precision=matmul_precision, **fields)
        assert all(t.isfinite().all() for t in tensors.values())
    assert torch.cuda.current_stream() == torch.cuda.default_stream(), "a failed capture leaves no queue of its own"


@pytest.mark.parametrize("matmul_precision", ["tf32", "bf16"])
@pytest.mark.parametrize("engine", ["stacked", "compiled"])
def test_a_run_resumed_by_another_engine_object_ends_in_the_same_bits(
    engine: str, matmul_precision: str, tmp_path: Path
) -> None:
    """Like another process, it has no captured steps and compiles again."""
    from torch._inductor.utils import fresh_cache

    uninterrupted = train(ENGINES[engine], "cuda", matmul_precision=matmul_precision)
    method = make_uefl()
    first = make_clients(method, ENGINES[engine], "cuda", matmul_precision=matmul_precision)
    server, _ = run_rounds(method, first, 2)
    torch._dynamo.reset()
    with fresh_cache():
        second = make_clients(method, ENGINES[engine], "cuda", matmul_precision=matmul_precision)
        save_checkpoint(tmp_path / "c", server, first.client_states)
        server, second.client_states = load_checkpoint(tmp_path / "c", second.device)
        server, _ = run_rounds(method, second, server=server)
    assert all(torch.equal(tensor.cpu(), uninterrupted[name]) for name, tensor in server.model_state.items())


def test_garbage_collection_of_another_engine_does_not_break_a_capture() -> None:
    """Engines and their captured steps form reference cycles, so the garbage collector frees them."""
    expected = train(SerialEngine, "cuda", dtype=torch.float64)
    threshold = gc.get_threshold()
    gc.set_threshold(100)
    try:
        for _ in range(4):
            tensors = train(StackedEngine, "cuda", dtype=torch.float64)
    finally:
        gc.set_threshold(*threshold)
    assert_close(tensors, expected)


@pytest.mark.parametrize("engine", ["stacked", "stacked, no graphs", "compiled"])
@pytest.mark.parametrize("name", [n for n in METHODS if n not in ("uefl", "vq-fedavg", "centralized")])
def test_every_method_agrees_with_the_serial_engine(name: str, engine: str) -> None:
    method_class = METHODS[name]
    local = method_class().adapt_local_training(LocalTraining(batch_size=16, epochs=2, lr=3e-3))
    method = method_class(rounds=3, iterations=1, mc_samples=4, local=local)
    # Compiling takes many seconds for every batch length.
    fields: Any = {"dtype": torch.float64, "bounds": EQUAL_BOUNDS if engine == "compiled" else UNEQUAL_BOUNDS}
    tensors, expected = (train(e, "cuda", method, **fields) for e in (ENGINES[engine], SerialEngine))
    assert_close(tensors, expected)


def test_other_participants_in_every_round_reuse_the_right_steps() -> None:
    local = LocalTraining(batch_size=16, epochs=2)
    method = FedAvg(rounds=6, iterations=1, clients_per_round=2, mc_samples=4, local=local)
    stacked, serial = (train(e, "cuda", method, dtype=torch.float64) for e in (StackedEngine, SerialEngine))
    assert_close(stacked, serial)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_lower_matmul_precision_stays_close_after_one_round(engine: str, optimizer: Any) -> None:
    local = LocalTraining(optimizer=optimizer, lr=0.05 if optimizer == "sgd" else 1e-3, batch_size=16, epochs=2)
    method = FedAvg(rounds=1, iterations=1, mc_samples=4, local=local)
    exact = train(SerialEngine, "cuda", method, dtype=torch.float64)
    # TF32 rounds factors by up to 2⁻¹¹ and bfloat16 by 2⁻⁹; the bounds are six and fifteen times that after a round.
    for matmul_precision, tolerance in (("full", 1e-4), ("tf32", 3e-3), ("bf16", 3e-2)):
        rounded = train(ENGINES[engine], "cuda", method, matmul_precision=matmul_precision)
        one, other = (torch.cat([state[n].double().flatten() for n in sorted(state)]) for state in (rounded, exact))
        assert (one - other).norm() / other.norm() < tolerance


@pytest.mark.parametrize("name", ["pmfl", "fediir"])  # they differentiate within a client, our kernels outside
def test_gradients_within_a_client_are_computed_in_tf32_too(name: str) -> None:
    local = LocalTraining(optimizer="sgd", lr=0.05, batch_size=16, epochs=1)
    method = METHODS[name](rounds=1, iterations=1, mc_samples=4, local=local)
    exact = train(SerialEngine, "cuda", method, dtype=torch.float64)
    rounded = train(StackedEngine, "cuda", method, matmul_precision="tf32")
    one, other = (torch.cat([state[n].double().flatten() for n in sorted(state)]) for state in (rounded, exact))
    assert (one - other).norm() / other.norm() < 3e-3  # as in the test above


def test_kmeans_on_cuda_is_as_good_as_on_the_cpu() -> None:
    points = normal(derive_key("points"), (20_000, 16))
    cuda, cpu = (kmeans(p, 64, noise_key=1).inertia.item() for p in (points.cuda(), points))
    assert cuda == pytest.approx(cpu, rel=0.01)  # rounding may choose other seeds; over keys, inertia differs by 1 %
