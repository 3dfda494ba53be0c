"""Encoders have the published shapes, numbers of parameters and parameter names, and run under `vmap`."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

from uefl.core.errors import InputError
from uefl.models import ENCODERS
from uefl.models.build import build_encoder
from uefl.models.model_config import ModelConfig

NUM_PARAMETERS = {
    "vgg11": 9_220_480,
    "vgg16": 14_714_688,
    "vgg16-bn": 14_723_136,
    "resnet18": 11_176_512,
    "resnet18-cifar": 11_168_832,  # 9408 - 1728 less: the stem is 3x3, not 7x7
    "group-norm-conv": (27 + 1) * 64 + (576 + 1) * 128 + 2 * (1152 + 1) * 128 + 2 * (64 + 3 * 128),
    "lenet-cifar": (75 + 1) * 64 + (1600 + 1) * 64 + (1600 + 1) * 1024 + 1025 * 1024,
    "mlp": (3 * 784 + 1) * 1024 + 1025 * 1024,
}

TORCHVISION_NAMES = {
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
    ("group-norm-conv", 28, (128,)),
    ("group-norm-conv", 96, (128,)),
    ("lenet-fmnist", 28, (1024,)),
    ("lenet-cifar", 32, (1024,)),
    ("lenet-cifar", 96, (1024,)),
    ("mlp", 28, (1024,)),
    ("dirt", 28, (64,)),
    ("dirt", 32, (64,)),
]
AVERAGE_POOLED = ("vgg11", "vgg16", "vgg16-bn", "resnet18", "resnet18-cifar", "group-norm-conv")


def make_small_encoder(name: str) -> nn.Module:
    """Return an encoder of grayscale images, of the smallest size that all accept."""
    torch.manual_seed(0)
    return build_encoder(name, 1, image_size=32).eval()


@pytest.mark.parametrize("name", NUM_PARAMETERS)
def test_the_number_of_parameters_is_the_published_one(name: str) -> None:
    assert sum(p.numel() for p in build_encoder(name, 3).parameters()) == NUM_PARAMETERS[name]


@pytest.mark.parametrize("name", TORCHVISION_NAMES)
def test_parameters_have_torchvisions_names(name: str) -> None:
    assert set(TORCHVISION_NAMES[name]) <= set(build_encoder(name, 3).state_dict())


def test_vgg16_has_parameters_in_its_convolutions_only() -> None:
    layers = (0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28)
    assert list(build_encoder("vgg16", 3).state_dict()) == [
        f"features.{i}.{w}" for i in layers for w in ("weight", "bias")
    ]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("name", "size", "shape"), SHAPES)
def test_shapes(name: str, size: int, shape: tuple[int, ...], channels: int) -> None:
    net = build_encoder(name, channels, image_size=size).eval()
    with torch.no_grad():
        z = net(torch.randn(2, channels, size, size))
    assert z.shape == (2, *shape)
    assert z.shape[1] == net.num_features
    assert z.isfinite().all()


@pytest.mark.parametrize("name", AVERAGE_POOLED)
def test_average_pooling_gives_the_mean_of_the_tokens(name: str) -> None:
    x = torch.randn(2, 1, 64, 64)
    net = build_encoder(name, 1, average_pool=False).eval()
    with torch.no_grad():
        tokens = net(x)
        net.average_pool = True
        torch.testing.assert_close(net(x), tokens.flatten(2).mean(-1))


@pytest.mark.parametrize(("name", "size"), [("vgg16", 28), ("vgg11", 31), ("lenet-cifar", 15), ("dirt", 15)])
def test_too_small_images_raise_an_input_error(name: str, size: int) -> None:
    with pytest.raises(InputError, match=f"image_size={size} must be at least"):
        build_encoder(name, 3, image_size=size)


@pytest.mark.parametrize("name", ["lenet-cifar", "dirt"])
def test_the_smallest_image_size_works(name: str) -> None:
    assert build_encoder(name, 3, image_size=16).eval()(torch.randn(1, 3, 16, 16)).isfinite().all()


def test_unknown_names_raise_an_input_error_with_the_known_ones() -> None:
    with pytest.raises(InputError, match="unknown encoder 'vgg17'; known: residual, vgg11, vgg16"):
        build_encoder("vgg17", 3)
    with pytest.raises(InputError, match="encoder mlp takes no average_pool; its settings: image_size, width"):
        build_encoder("mlp", 3, average_pool=True)
    with pytest.raises(InputError, match="in_channels=0 must be at least 1"):
        build_encoder("vgg16", 0)


def test_listing_encoders_imports_no_torch() -> None:
    code = "import sys; from uefl.models import ENCODERS; print(*ENCODERS, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [*ENCODERS, "False"]


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_under_vmap_equal_single_ones(name: str) -> None:
    nets = [make_small_encoder(name) for _ in range(2)]
    with torch.no_grad():
        for p in nets[1].parameters():
            p.mul_(0.9)
    x = torch.randn(2, 3, 1, 32, 32)
    params, buffers = stack_module_state(nets)

    def call(params: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return functional_call(nets[0], (params, buffers), (x,))

    with torch.no_grad():
        z = vmap(call)(params, buffers, x)
        for k, net in enumerate(nets):
            # Single precision: under vmap, sums have another order in each of up to 18 layers.
            torch.testing.assert_close(z[k], net(x[k]), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ENCODERS)
def test_every_parameter_has_a_gradient(name: str) -> None:
    net = make_small_encoder(name).train()
    net(torch.randn(4, 1, 32, 32, requires_grad=True)).square().mean().backward()
    without = [n for n, p in net.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert without == []


@pytest.mark.parametrize("name", ["dirt", "resnet18-cifar"])
def test_batch_norm_under_vmap_has_statistics_per_client(name: str) -> None:
    nets = [make_small_encoder(name).train() for _ in range(2)]
    x = torch.randn(2, 3, 1, 32, 32)
    params, buffers = stack_module_state(nets)
    with torch.no_grad():
        vmap(lambda p, b, x: functional_call(nets[0], (p, b), (x,)))(params, buffers, x)
        for k, net in enumerate(nets):
            net(x[k])
            for buffer, value in net.named_buffers():
                torch.testing.assert_close(buffers[buffer][k], value, rtol=1e-3, atol=1e-4)  # as above


def test_rows_of_a_table_need_an_encoder_that_accepts_them():
    net = ModelConfig(encoder="mlp", width=8, hidden_size=4).build_network((5,), 2)
    assert net(torch.randn(3, 5)).logits.shape == (1, 3, 2)
    with pytest.raises(
        InputError, match="encoder=resnet18 needs images, but the data are rows of a table; set encoder=mlp"
    ):
        ModelConfig(encoder="resnet18").build_network((5,), 2)
    with pytest.raises(InputError, match="augment=flip needs images"):
        ModelConfig(encoder="mlp", augment="flip").build_network((5,), 2)


def test_identity_and_no_hidden_layer_are_a_logistic_regression() -> None:
    config = ModelConfig(encoder="identity", feature_norm="none", hidden_size=0, dropout=0.0)
    net = config.build_network((5,), 3)
    weight, bias = (p for p in net.parameters())
    assert (weight.shape, bias.shape) == ((3, 5), (3,))
    x = torch.randn(4, 5)
    assert torch.equal(net.eval()(x).logits[0], x @ weight.T + bias)


def test_a_gaussian_code_needs_a_size() -> None:
    net = ModelConfig(encoder="identity", hidden_size=0).build_network((5,), 3)
    with pytest.raises(InputError, match="hidden_size=0 leaves no size for the Gaussian code; set code_size"):
        net.use_gaussian_classifier(0, 1)
