"""On a CUDA device: the same draws as on the CPU, the same story in double precision, the same bits twice."""

import gc
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uefl import UEFL, Book, FedAvg, Local, Net, Serial, Silo
from uefl.algorithms import ALGORITHMS
from uefl.checkpoint import load_checkpoint, save_checkpoint
from uefl.engines import Stacked
from uefl.federation import State
from uefl.kmeans import kmeans
from uefl.noise import bits, key, normal, permutation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
ENGINES: dict[str, Callable[..., Serial]] = {
    "serial": Serial,
    "stacked": Stacked,
    "stacked, step by step": partial(Stacked, captured=False),
    "one at a time": partial(Stacked, chunk=1),
    "compiled": partial(Stacked, chunk=1, compiled=True),
}
RAGGED, EVEN = (0, 80, 160, 230, 240), (0, 66, 132, 198)


def body() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.ReLU()),
    )


class Functional(nn.Module):
    """Convolutions as functions, in every spelling, and numbers from the host, which no CUDA graph can capture."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(8, 1, 3, 3) / 3), nn.Parameter(torch.randn(8, 8, 3, 3) / 9)
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        x = (x - torch.tensor([0.1], device=x.device, dtype=x.dtype)) / 2
        x = F.relu(F.conv2d(x, self.first, self.bias))
        return F.relu(F.conv2d(input=x, weight=self.second, bias=self.bias, stride=2, padding=1))


def federation(
    method: FedAvg,
    engine: Callable[..., Serial],
    device: str,
    *,
    body: Callable[[], nn.Module] = body,
    cuts: Sequence[int] = RAGGED,
    **fields: Any,
) -> Serial:
    x = normal(key("x"), (240, 1, 8, 8))
    y = (x.mean((1, 2, 3)) > 0).long()
    each = [Silo.split(f"s{i}", x[a:b].roll(i, 3) * (1 + i), y[a:b]) for i, (a, b) in enumerate(pairwise(cuts))]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = method.build(Net(body(), 2, (1, 8, 8), hidden=16))
    return engine(each, net, device=device, **fields)


def ours() -> UEFL:
    """Three rounds, an extension and one more round, dropout on."""
    book = Book(words=8, segments=2, warm_up=1, gamma=0.0, errors=0.0)
    return UEFL(rounds=3, extra_rounds=1, iterations=2, passes=4, local=Local(batch=16, epochs=2), codebook=book)


def trained(engine: Callable[..., Serial], device: str, method: FedAvg | None = None, **fields: Any) -> State:
    method = method or ours()
    clients = federation(method, engine, device, **fields)
    server = method.start(clients)
    while server.round < method.budget:
        server = method.step(clients, server)
    assert method.codebook is None or server.access.shape[1] > 8, "the run must extend"
    return {name: tensor.cpu() for name, tensor in server.state.items()}


def test_draws_are_the_same_on_every_device() -> None:
    assert torch.equal(bits(key("a"), 10_000), bits(key("a"), 10_000, "cuda").cpu())
    assert torch.equal(permutation(key("b"), 10_000), permutation(key("b"), 10_000, "cuda").cpu())
    keys = torch.tensor([key(i) for i in range(5)])
    each = torch.stack([bits(int(k), 3001) for k in keys])
    assert torch.equal(bits(keys.cuda()[:, None], 3001).cpu(), each)
    assert torch.equal(torch.vmap(lambda k: bits(k, 3001))(keys.cuda()).cpu(), each)


@pytest.mark.parametrize("engine", ENGINES)
def test_double_precision_tells_the_same_story_as_the_cpu(engine: str) -> None:
    found = trained(ENGINES[engine], "cuda", dtype=torch.float64)
    expected = trained(Serial, "cpu", dtype=torch.float64)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("multiply", ["exact", "tf32", "bf16"])
@pytest.mark.parametrize("engine", ENGINES)
def test_the_same_seed_gives_the_same_bits_twice(engine: str, multiply: str) -> None:
    first, second = (trained(ENGINES[engine], "cuda", multiply=multiply) for _ in range(2))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_a_network_of_functions_that_cannot_be_captured_runs_all_the_same() -> None:
    found, expected = (trained(e, "cuda", dtype=torch.float64, body=Functional) for e in (Stacked, Serial))
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-9, atol=1e-9)
    for multiply in ("tf32", "bf16"):
        assert all(t.isfinite().all() for t in trained(Stacked, "cuda", multiply=multiply, body=Functional).values())


@pytest.mark.parametrize("multiply", ["tf32", "bf16"])
@pytest.mark.parametrize("engine", ["stacked", "compiled"])
def test_a_run_that_goes_on_elsewhere_ends_in_the_same_bits(engine: str, multiply: str, tmp_path: Path) -> None:
    """Another process has no captured steps, and compiles anew."""
    from torch._inductor.utils import fresh_cache

    whole = trained(ENGINES[engine], "cuda", multiply=multiply)
    method, fields = ours(), {"multiply": multiply}
    first = federation(method, ENGINES[engine], "cuda", **fields)
    server = method.start(first)
    for _ in range(2):
        server = method.step(first, server)
    torch._dynamo.reset()
    with fresh_cache():
        second = federation(method, ENGINES[engine], "cuda", **fields)
        save_checkpoint(tmp_path / "c", server, first.memory)
        server, second.memory = load_checkpoint(tmp_path / "c", second.device)
        while server.round < method.budget:
            server = method.step(second, server)
    assert all(torch.equal(tensor.cpu(), whole[name]) for name, tensor in server.state.items())


def test_garbage_of_another_engine_does_not_break_a_capture() -> None:
    """Engines are in cycles with their captured steps, so they go when the collector comes by."""
    expected = trained(Serial, "cuda", dtype=torch.float64)
    before = gc.get_threshold()
    gc.set_threshold(100)
    try:
        for _ in range(4):
            found = trained(Stacked, "cuda", dtype=torch.float64)
    finally:
        gc.set_threshold(*before)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("engine", ["stacked", "stacked, step by step", "compiled"])
@pytest.mark.parametrize("name", [n for n in ALGORITHMS if n not in ("uefl", "vq-fedavg", "pooled")])
def test_every_method_agrees_on_a_stack(name: str, engine: str) -> None:
    kind = ALGORITHMS[name]
    local = kind().suited(Local(batch=16, epochs=2, rate=3e-3))
    method = kind(rounds=3, iterations=1, passes=4, local=local)
    # To compile takes many seconds for every size of batch.
    fields: Any = {"dtype": torch.float64, "cuts": EVEN if engine == "compiled" else RAGGED}
    found, expected = (trained(e, "cuda", method, **fields) for e in (ENGINES[engine], Serial))
    for n, tensor in found.items():
        torch.testing.assert_close(tensor, expected[n], rtol=1e-9, atol=1e-9)


def test_another_choice_of_silos_every_round_finds_its_own_steps() -> None:
    method = FedAvg(rounds=6, iterations=1, participation=2, passes=4, local=Local(batch=16, epochs=2))
    found, expected = (trained(e, "cuda", method, dtype=torch.float64) for e in (Stacked, Serial))
    for n, tensor in found.items():
        torch.testing.assert_close(tensor, expected[n], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_coarser_products_stay_near_after_one_round(engine: str, optimizer: Any) -> None:
    local = Local(optimizer=optimizer, rate=0.05 if optimizer == "sgd" else 1e-3, batch=16, epochs=2)
    method = FedAvg(rounds=1, iterations=1, passes=4, local=local)
    exact = trained(Serial, "cuda", method, dtype=torch.float64)
    for multiply, most in (("exact", 1e-4), ("tf32", 3e-3), ("bf16", 3e-2)):
        found = trained(ENGINES[engine], "cuda", method, multiply=multiply)
        ours, theirs = (torch.cat([state[n].double().flatten() for n in sorted(state)]) for state in (found, exact))
        assert (ours - theirs).norm() / theirs.norm() < most


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("c", "o", "k", "pad"), [(3, 20, 5, 0), (64, 64, 3, 1), (1, 16, 3, 1), (32, 80, 1, 0)])
def test_stacked_convolutions_are_those_of_each(c: int, o: int, k: int, pad: int, dtype: torch.dtype) -> None:
    from uefl.engines.convolution import Convolution

    x, w, b = (normal(key(n), s).cuda() for n, s in (("x", (3, 5, c, 9, 11)), ("w", (3, o, c, k, k)), ("b", (3, o))))
    inputs = [t.requires_grad_() for t in (x, w, b)]
    y = Convolution.apply(*inputs, pad, dtype)
    slope = normal(key("slope"), y.shape).cuda()
    found = (y, *torch.autograd.grad(y, inputs, slope.to(y.dtype)))
    theirs = torch.stack([F.conv2d(*(t[i].double() for t in inputs), padding=pad) for i in range(3)])
    expected = (theirs, *torch.autograd.grad(theirs, inputs, slope.double()))
    for ours, reference in zip(found, expected):
        assert (ours.double() - reference).norm() / reference.norm() < (2e-3 if dtype == torch.float32 else 2e-2)


def test_kmeans_is_as_good_as_on_the_cpu() -> None:
    points = normal(key("points"), (20_000, 16))
    there, here = kmeans(points.cuda(), 64, key=1).inertia.item(), kmeans(points, 64, key=1).inertia.item()
    assert there == pytest.approx(here, rel=0.01)
