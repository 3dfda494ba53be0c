"""On a CUDA device: the same draws as on the CPU, the same story in double precision, the same bits twice."""

import pytest
import torch
from torch import nn

from uefl import UEFL, Book, Local, Net, Serial, Silo
from uefl.kmeans import kmeans
from uefl.noise import bits, key, normal, permutation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def trained(device: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Three rounds, an extension and one more round, dropout on."""
    x = normal(key("x"), (240, 1, 8, 8))
    y = (x.mean((1, 2, 3)) > 0).long()
    silos = [Silo.split(f"s{i}", x[i::3].roll(i, 3) * (1 + i), y[i::3]) for i in range(3)]
    book = Book(words=8, segments=2, warm_up=1, gamma=0.0, errors=0.0)
    method = UEFL(rounds=3, extra_rounds=1, iterations=2, passes=4, local=Local(batch=16, epochs=1), codebook=book)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoder = nn.Sequential(nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        net = method.build(Net(encoder, 2, (1, 8, 8), hidden=16))
    clients = Serial(silos, net, device=device, dtype=dtype)
    server = method.start(clients)
    while server.round < method.budget:
        server = method.step(clients, server)
    assert server.access.shape[1] > 8, "the run must extend"
    return {name: tensor.cpu() for name, tensor in server.state.items()}


def test_draws_are_the_same_on_every_device() -> None:
    assert torch.equal(bits(key("a"), 10_000), bits(key("a"), 10_000, "cuda").cpu())
    assert torch.equal(permutation(key("b"), 10_000), permutation(key("b"), 10_000, "cuda").cpu())


def test_double_precision_tells_the_same_story_as_the_cpu() -> None:
    ours, theirs = trained("cuda", torch.float64), trained("cpu", torch.float64)
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-9, atol=1e-9)


def test_the_same_seed_gives_the_same_bits_twice() -> None:
    first, second = trained("cuda", torch.float32), trained("cuda", torch.float32)
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_kmeans_is_as_good_as_on_the_cpu() -> None:
    points = normal(key("points"), (20_000, 16))
    there, here = kmeans(points.cuda(), 64, key=1).inertia.item(), kmeans(points, 64, key=1).inertia.item()
    assert there == pytest.approx(here, rel=0.01)
