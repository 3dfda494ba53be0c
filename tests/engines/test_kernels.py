"""The Triton kernels equal torch's operations: on a GPU as they are compiled, elsewhere in Triton's interpreter.

The interpreter runs the same programs on the CPU, block by block: what a kernel reads, adds and writes is tested, not
what the compiler makes of it. It is slow, so images are small, and sums over positions have short parts there. Products
in bfloat16 are not supported, so float32 is computed there with the blocks of bfloat16.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import import_or_skip
from torch import Tensor, nn

from uefl.core.noise import derive_key, normal, random_bits
from uefl.engines.stacked.vmap_overrides import VmapOverrides

NEEDS_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}
TF32 = 2e-3  # a GPU rounds the factors of products in float32


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def device(request: pytest.FixtureRequest) -> str:
    import_or_skip("triton")
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("kernels are compiled here, not interpreted")
    return str(request.param)


def on_gpu(*values: Any) -> Any:
    """Return a parameter set that would take minutes in the interpreter."""
    return pytest.param(*values, marks=pytest.mark.gpu)


def check_interpreter(device: str, dtype: torch.dtype = torch.float32, *, is_large: bool = False) -> None:
    """Skip what the interpreter cannot compute."""
    if device == "cpu" and is_large:
        pytest.skip("takes minutes in the interpreter")
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter does not compute in bfloat16")


def make_inputs(device: str, shapes: dict[str, Sequence[int]]) -> list[Tensor]:
    return [normal(derive_key(name), shape).to(device).requires_grad_() for name, shape in shapes.items()]


def assert_close(tensors: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> None:
    for tensor, exact in zip(tensors, expected, strict=True):
        assert (tensor.double() - exact).norm() / exact.norm() < tolerance


def differentiate(outputs: Tensor, inputs: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return outputs, and the gradients of inputs for the same gradients of all outputs of this shape."""
    dy = normal(derive_key("slope"), outputs.shape).to(outputs.device, dtype)
    return (outputs, *torch.autograd.grad(outputs, inputs, dy))


def convolve_each(inputs: Sequence[Tensor], convolve: Callable[..., Tensor]) -> tuple[Tensor, ...]:
    """Return torch's convolutions, client by client, and their gradients, in double precision."""
    each = torch.stack([convolve(*(t[i].double() for t in inputs)) for i in range(len(inputs[0]))])
    return differentiate(each, inputs, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("c", "o", "k", "padding", "size"),
    [
        (3, 20, 5, 0, (2, 7, 9)),  # few channels: one block of all positions of a filter
        (1, 16, 3, 1, (4, 6, 6)),
        (32, 80, 1, 0, (2, 5, 6)),  # several blocks of filters
        (5, 20, 3, 1, (2, 5, 6)),  # few channels that become many with those of zeros
        (9, 24, 3, 1, (2, 5, 6)),  # a block of k has several positions of a filter
        (64, 64, 3, 1, (1, 4, 5)),  # in bfloat16: small blocks of few positions
        (32, 32, 3, 1, (1, 4, 5)),  # three positions of a filter share the gradients
        (32, 128, 3, 1, (1, 4, 5)),  # in bfloat16: wide blocks of filters
        *(
            on_gpu(*layer, size)
            for layer in ((3, 20, 5, 0), (64, 64, 3, 1), (128, 256, 3, 1), (1, 16, 3, 1), (32, 80, 1, 0))
            for size in ((5, 9, 11), (20, 17, 17))
        ),
    ],
)
def test_stacked_convolutions_equal_single_ones(
    c: int,
    o: int,
    k: int,
    padding: int,
    size: tuple[int, int, int],
    dtype: torch.dtype,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from uefl.engines.stacked import convolution

    check_interpreter(device, is_large=size[0] >= 5)
    if device == "cpu":
        choose = partial(convolution.choose_forward_tile, dtype)
        monkeypatch.setattr(convolution, "choose_forward_tile", lambda _dtype, *sizes: choose(*sizes))
        monkeypatch.setattr(convolution, "POSITIONS_PER_PART", 128)  # so that small images have several parts, too
        dtype = torch.float32
    inputs = make_inputs(device, {"x": (3, size[0], c, *size[1:]), "w": (3, o, c, k, k), "b": (3, o)})
    y = convolution.StackedConvolution.apply(*inputs, 1, padding, dtype)
    tolerance = 2e-2 if dtype == torch.bfloat16 else TF32 if device == "cuda" else ROUNDING[dtype]
    assert_close(differentiate(y, inputs, dtype), convolve_each(inputs, partial(F.conv2d, padding=padding)), tolerance)


@pytest.mark.parametrize(("channels", "padded"), [(1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (9, 9), (64, 64)])
def test_few_channels_become_a_power_of_two(channels: int, padded: int) -> None:
    """So they can be read at once; the added ones are zero. Where none are added, nothing is copied."""
    from uefl.engines.stacked import convolution

    images = torch.ones(2, 3, channels)
    result = convolution.pad_channels(images)
    assert result.shape == (2, 3, padded)
    assert torch.equal(result[..., :channels], images)
    assert not result[..., channels:].any()
    assert (result is images) == (channels == padded)


@pytest.mark.parametrize("size", [(6, 6), (7, 8), on_gpu((18, 18)), on_gpu((17, 22))])
@pytest.mark.parametrize(
    ("c", "k", "stride", "padding"),
    [(3, 7, 2, 3), (16, 3, 2, 1), (64, 3, 2, 1), (64, 1, 2, 0), (5, 5, 3, 0), (8, 2, 2, 0)],
)
def test_stacked_convolutions_with_a_stride_equal_single_ones(
    c: int, k: int, stride: int, padding: int, size: tuple[int, int], device: str
) -> None:
    check_interpreter(device, is_large=size[0] > 8)
    inputs = make_inputs(device, {"x": (3, 2, c, *size), "w": (3, 24, c, k, k), "b": (3, 24)})
    convolve = partial(F.conv2d, stride=stride, padding=padding)
    with VmapOverrides(use_triton=True):
        y = torch.func.vmap(convolve)(*inputs)
    tolerance = TF32 if device == "cuda" else ROUNDING[torch.float32]
    assert_close(differentiate(y, inputs, torch.float32), convolve_each(inputs, convolve), tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, on_gpu(torch.bfloat16)])
@pytest.mark.parametrize("size", [(8, 8), (7, 9), (2, 2)])
def test_stacked_max_pooling_equals_that_of_torch_with_equal_maxima_too(
    size: tuple[int, int], dtype: torch.dtype, device: str
) -> None:
    check_interpreter(device, dtype)
    whole = torch.relu(3 * normal(derive_key("x"), (3, 4, 5, *size))).round().to(device, dtype).requires_grad_()
    with VmapOverrides(use_triton=True):
        y = torch.func.vmap(nn.MaxPool2d(2))(whole)
    assert "StackedMaxPool" in type(y.grad_fn).__name__
    expected = torch.stack([F.max_pool2d(x, 2) for x in whole])
    for result, exact in zip(*(differentiate(outputs, [whole], dtype) for outputs in (y, expected)), strict=True):
        assert torch.equal(result, exact)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, on_gpu(torch.bfloat16)])
@pytest.mark.parametrize(("b", "c", "size"), [(5, 20, 7), (3, 130, 4), on_gpu(40, 16, 28)])
def test_stacked_batch_norms_equal_single_ones(
    b: int, c: int, size: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from uefl.engines.stacked import batch_norm

    check_interpreter(device, dtype, is_large=size > 7)
    if device == "cpu":
        monkeypatch.setattr(batch_norm, "POSITIONS_PER_PART", 128)
    shapes = {"x": (3, b, c, size, size), "w": (3, c), "b": (3, c)}
    weight_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    x, *weights = (normal(derive_key(n), shape).to(device) for n, shape in shapes.items())
    x = 100 + 3 * x.to(dtype)  # far from zero: squares must not cancel
    inputs = [x.requires_grad_(), *(t.to(weight_dtype).requires_grad_() for t in weights)]
    y, mean, variance = batch_norm.StackedBatchNorm.apply(*inputs, 1e-5)
    double = [t.detach().double().requires_grad_() for t in inputs]
    each = torch.stack([F.batch_norm(x, None, None, w, b, True) for x, w, b in zip(*double)])
    statistics = double[0].mean((1, 3, 4)), double[0].var((1, 3, 4), correction=0)
    stacked = (*differentiate(y, inputs, dtype), mean, variance)
    assert_close(stacked, (*differentiate(each, double, torch.float64), *statistics), ROUNDING[dtype])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, on_gpu(torch.bfloat16)])
@pytest.mark.parametrize(
    ("b", "c", "groups", "size"),
    [(3, 16, 4, (7, 5)), (2, 128, 8, (3, 3)), (2, 8, 8, (9, 9)), on_gpu(64, 64, 8, (28, 28))],
)
def test_stacked_group_norms_equal_single_ones(
    b: int, c: int, groups: int, size: tuple[int, int], dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from uefl.engines.stacked import group_norm

    check_interpreter(device, dtype, is_large=size[0] > 9)
    if device == "cpu":
        monkeypatch.setattr(group_norm, "BLOCK_ELEMENTS", 8 * c)  # so that small images have several blocks, too
    shapes = {"x": (3, b, c, *size), "w": (3, c), "b": (3, c)}
    weight_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    x, *weights = (normal(derive_key(n), shape).to(device) for n, shape in shapes.items())
    offsets = torch.linspace(60, 100, c, device=device)[:, None, None]  # far from zero: squares must not cancel
    inputs = [(offsets + 3 * x).to(dtype).requires_grad_(), *(t.to(weight_dtype).requires_grad_() for t in weights)]
    with VmapOverrides(use_triton=True):
        y = torch.func.vmap(partial(F.group_norm, eps=0.1), in_dims=(0, None, 0, 0))(inputs[0], groups, *inputs[1:])
    assert "StackedGroupNorm" in type(y.grad_fn).__name__
    double = [t.detach().double().requires_grad_() for t in inputs]
    each = torch.stack([F.group_norm(x, groups, w, b, 0.1) for x, w, b in zip(*double)])
    assert_close(differentiate(y, inputs, dtype), differentiate(each, double, torch.float64), ROUNDING[dtype])


@pytest.mark.parametrize(("c", "groups"), [(12, 3), (2048, 2)])
def test_a_group_norm_of_other_numbers_is_that_of_torch(c: int, groups: int, device: str) -> None:
    inputs = make_inputs(device, {"x": (3, 2, c, 2, 2), "w": (3, c), "b": (3, c)})
    normalize = torch.func.vmap(F.group_norm, in_dims=(0, None, 0, 0))
    with VmapOverrides(use_triton=True):
        y = normalize(inputs[0], groups, *inputs[1:])
    assert torch.equal(y, normalize(inputs[0], groups, *inputs[1:]))


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shares", ["nothing", "inputs", "weights"])
def test_gradients_of_stacked_linear_layers_lie_in_memory_as_the_weights(
    shares: str, has_bias: bool, device: str
) -> None:
    """A gradient that is transposed in memory takes an optimizer several times as long."""
    inputs = make_inputs(device, {"x": (3, 4, 5), "w": (3, 6, 5), "b": (3, 6)})[: 3 if has_bias else 2]
    shared = {"nothing": -1, "inputs": 0, "weights": 1}[shares]
    inputs = [t[0].detach().requires_grad_() if i == shared else t for i, t in enumerate(inputs)]
    in_dims = tuple(None if i == shared else 0 for i in range(len(inputs)))
    with VmapOverrides(use_triton=True):
        y = torch.func.vmap(F.linear, in_dims=in_dims)(*inputs)
    assert ("StackedLinear" in type(y.grad_fn).__name__) == (shares != "weights"), "the same weights: one product"
    results = differentiate(y, inputs, torch.float32)
    double = [t.detach().double().requires_grad_() for t in inputs]
    clients = [[t if i == shared else t[g] for i, t in enumerate(double)] for g in range(3)]
    each = torch.stack([F.linear(*of_client) for of_client in clients])
    tolerance = TF32 if device == "cuda" else ROUNDING[torch.float32]
    assert_close(results, differentiate(each, double, torch.float64), tolerance)
    if shares != "weights":
        assert results[2].is_contiguous()


def test_networks_that_use_vmap_themselves_run_with_the_operations_of_torch(device: str) -> None:
    """Two members of an ensemble within each of three silos."""
    x, w = make_inputs(device, {"x": (3, 4, 5), "w": (3, 2, 6, 5)})
    images, filters = make_inputs(device, {"images": (3, 2, 8, 6, 6), "filters": (3, 2, 4, 8, 3, 3)})

    def run(x: Tensor, w: Tensor, images: Tensor, filters: Tensor) -> tuple[Tensor, Tensor]:
        features = torch.func.vmap(lambda f: F.max_pool2d(F.group_norm(F.conv2d(images, f), 2), 2))(filters)
        return torch.func.vmap(lambda w: F.linear(x, w))(w), features

    with VmapOverrides(use_triton=True):
        results = torch.func.vmap(run)(x, w, images, filters)
    assert_close(results, torch.func.vmap(run)(x.double(), w.double(), images.double(), filters.double()), TF32)


def test_the_hash_of_the_kernel_is_that_of_tensor_operations(device: str) -> None:
    from uefl.core.noise_triton import KeyHash

    keys = torch.tensor([derive_key(i) for i in range(5)])
    bits = torch.stack([random_bits(int(key), 3001) for key in keys])
    assert torch.equal(KeyHash.apply(keys.to(device)[:, None], 3001).cpu(), bits)
    assert torch.equal(torch.vmap(lambda key: KeyHash.apply(key, 3001))(keys.to(device)).cpu(), bits)
