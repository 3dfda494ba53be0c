"""Encoders have the published shapes, sizes and parameter names, and can be stacked."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

from uefl.errors import InputError
from uefl.models.encoders import ENCODERS, encoder

PARAMETERS = {
    "vgg11": 9_220_480,
    "vgg16": 14_714_688,
    "vgg16-bn": 14_723_136,
    "resnet18": 11_176_512,
    "resnet18-cifar": 11_168_832,  # 9408 - 1728 less: the stem is 3x3, not 7x7
    "gn-conv": (27 + 1) * 64 + (576 + 1) * 128 + 2 * (1152 + 1) * 128 + 2 * (64 + 3 * 128),
    "lenet-cifar": (75 + 1) * 64 + (1600 + 1) * 64 + (1600 + 1) * 1024 + 1025 * 1024,
    "mlp": (3 * 784 + 1) * 1024 + 1025 * 1024,
}

NAMES = {
    "vgg16": ("features.0.weight", "features.28.bias"),
    "vgg16-bn": ("features.0.weight", "features.1.running_mean", "features.41.weight"),
    "vgg11": ("features.3.weight", "features.18.bias"),
    "resnet18": ("conv1.weight", "bn1.running_var", "layer1.0.conv1.weight", "layer2.0.downsample.0.weight"),
    "resnet18-cifar": ("conv1.weight", "layer4.1.bn2.bias"),
}

SHAPES = [
    ("vgg11", 32, (512, 1, 1)),
    ("vgg16", 32, (512, 1, 1)),
    ("vgg16", 96, (512, 3, 3)),
    ("vgg16", 224, (512, 7, 7)),
    ("vgg16-bn", 32, (512, 1, 1)),
    ("vgg16-bn", 96, (512, 3, 3)),
    ("resnet18", 28, (512, 1, 1)),
    ("resnet18", 32, (512, 1, 1)),
    ("resnet18", 96, (512, 3, 3)),
    ("resnet18", 224, (512, 7, 7)),
    ("resnet18-cifar", 28, (512, 4, 4)),
    ("resnet18-cifar", 32, (512, 4, 4)),
    ("gn-conv", 28, (128,)),
    ("gn-conv", 96, (128,)),
    ("lenet-fmnist", 28, (1024,)),
    ("lenet-cifar", 32, (1024,)),
    ("lenet-cifar", 96, (1024,)),
    ("mlp", 28, (1024,)),
    ("dirt", 28, (64,)),
    ("dirt", 32, (64,)),
]
POOLED = ("vgg11", "vgg16", "vgg16-bn", "resnet18", "resnet18-cifar", "gn-conv")


def small(name: str, channels: int) -> nn.Module:
    """The encoder at the smallest size that all take."""
    torch.manual_seed(0)
    return encoder(name, channels, size=32).eval()


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_as_many_as_published(name: str) -> None:
    assert sum(p.numel() for p in encoder(name, 3).parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", NAMES)
def test_parameters_have_the_names_of_torchvision(name: str) -> None:
    assert set(NAMES[name]) <= set(encoder(name, 3).state_dict())


def test_the_names_of_vgg16_are_exactly_those_of_its_convolutions() -> None:
    places = (0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28)
    assert list(encoder("vgg16", 3).state_dict()) == [f"features.{i}.{w}" for i in places for w in ("weight", "bias")]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("name", "size", "shape"), SHAPES)
def test_shapes(name: str, size: int, shape: tuple[int, ...], channels: int) -> None:
    net = encoder(name, channels, size=size).eval()
    with torch.no_grad():
        z = net(torch.randn(2, channels, size, size))
    assert z.shape == (2, *shape)
    assert z.shape[1] == net.width
    assert z.isfinite().all()


@pytest.mark.parametrize("name", POOLED)
def test_a_pooled_map_is_the_mean_of_its_tokens(name: str) -> None:
    x = torch.randn(2, 1, 64, 64)
    net = encoder(name, 1, pool=False).eval()
    with torch.no_grad():
        tokens = net(x)
        net.pool = True
        torch.testing.assert_close(net(x), tokens.flatten(2).mean(-1))


@pytest.mark.parametrize(("name", "size"), [("vgg16", 28), ("vgg11", 31), ("lenet-cifar", 15), ("dirt", 15)])
def test_images_that_would_vanish_are_refused_at_the_door(name: str, size: int) -> None:
    with pytest.raises(InputError, match=f"size={size}"):
        encoder(name, 3, size=size)


@pytest.mark.parametrize("name", ["lenet-cifar", "dirt"])
def test_the_smallest_size_works(name: str) -> None:
    assert encoder(name, 3, size=16).eval()(torch.randn(1, 3, 16, 16)).isfinite().all()


def test_an_unknown_name_answers_with_the_known_ones() -> None:
    with pytest.raises(InputError, match="unknown encoder 'vgg17'; known: residual, vgg11, vgg16"):
        encoder("vgg17", 3)
    with pytest.raises(InputError, match="unknown field of encoder mlp 'pool'; known: size, width"):
        encoder("mlp", 3, pool=True)
    with pytest.raises(InputError, match="channels=0"):
        encoder("vgg16", 0)


@pytest.mark.parametrize("name", ENCODERS)
def test_stacked_encoders_compute_what_each_does(name: str) -> None:
    nets = [small(name, 1) for _ in range(2)]
    with torch.no_grad():
        for p in nets[1].parameters():
            p.mul_(0.9)
    x = torch.randn(2, 3, 1, 32, 32)
    params, buffers = stack_module_state(nets)

    def one(params: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return functional_call(nets[0], (params, buffers), (x,))

    with torch.no_grad():
        z = vmap(one)(params, buffers, x)
        for k, net in enumerate(nets):
            torch.testing.assert_close(z[k], net(x[k]), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ENCODERS)
def test_every_parameter_learns(name: str) -> None:
    net = small(name, 1).train()
    net(torch.randn(4, 1, 32, 32)).square().mean().backward()
    still = [n for n, p in net.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert still == []


@pytest.mark.parametrize("name", ["dirt", "resnet18-cifar"])
def test_stacked_batch_norms_keep_their_own_statistics(name: str) -> None:
    nets = [small(name, 1).train() for _ in range(2)]
    x = torch.randn(2, 3, 1, 32, 32)
    params, buffers = stack_module_state(nets)
    with torch.no_grad():
        vmap(lambda p, b, x: functional_call(nets[0], (p, b), (x,)))(params, buffers, x)
        for k, net in enumerate(nets):
            net(x[k])
            for buffer, value in net.named_buffers():
                torch.testing.assert_close(buffers[buffer][k], value, rtol=1e-3, atol=1e-4)
