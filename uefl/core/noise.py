"""Addressed noise: each (seed, silo, round, step, purpose) gives one draw, equal in every engine and on every device.

The stream is counter-based: element i of a draw is a hash of the key and i, in integer tensor operations. So a draw can
be stacked, replayed and resumed, and it does not depend on the order in which clients run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from importlib.util import find_spec
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from uefl.core import noise_addresses as addresses
from uefl.core.device_copy import copy_without_waiting
from uefl.core.tracing import is_traced

HAS_TRITON = find_spec("triton") is not None  # installed with torch for CUDA, but not on every platform
_MASK_31_BITS = 0x7FFFFFFF
_CPU_BLOCK_SIZE = 1 << 17  # numbers hashed at once on a CPU; half a megabyte fits in a core's cache
_NUMPY_SIZE = 1 << 15  # up to so many numbers, numpy is faster; torch hashes more of them in several threads

Key = TypeVar("Key", int, Tensor)
Integers = TypeVar("Integers", Tensor, np.ndarray[Any, np.dtype[np.int32]])


def derive_key(*address: int | float | str) -> int:
    """Return the 63-bit key of an address."""
    text = "\x1f".join(f"{type(a).__name__}:{a}" for a in address)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def _to_int32(value: int) -> int:
    """Return the int32 with this 32-bit pattern."""
    return value - (1 << 32) if value & 0x80000000 else value


def _scramble(h: Integers) -> Integers:
    """Hash 32-bit integers in place, with full avalanche; int32 products overflow as intended."""
    h ^= (h >> 16) & 0xFFFF
    h *= _to_int32(0x7FEB352D)
    h ^= (h >> 15) & 0x1FFFF
    h *= _to_int32(0x846CA68B)
    h ^= (h >> 16) & 0xFFFF
    return h


def random_bits(key: int | Tensor, n: int, device: torch.device | str = "cpu") -> Tensor:
    """Return n random 32-bit integers as int32; `key` is a number or an int64 tensor."""
    key = key if isinstance(key, Tensor) else torch.tensor(key, device=device)
    if HAS_TRITON and key.is_cuda and not torch.compiler.is_compiling():  # a compiler also fuses it into one kernel
        from uefl.core.noise_triton import KeyHash

        bits: Tensor = KeyHash.apply(key, n)  # type: ignore[no-untyped-call]
        return bits
    if has_readable_value(key) and key.numel() * n <= _NUMPY_SIZE:
        return _hash_in_numpy(key, n)
    low, high = (key & 0xFFFFFFFF).to(torch.int32), (key >> 32).to(torch.int32)
    counter = torch.arange(n, dtype=torch.int32, device=key.device)
    blocks = (
        torch.split(counter, _CPU_BLOCK_SIZE) if counter.device.type == "cpu" and n > _CPU_BLOCK_SIZE else (counter,)
    )
    hashes = [_scramble(_scramble(block ^ low) + high) for block in blocks]
    return torch.cat(hashes, -1) if len(hashes) > 1 else hashes[0]


def _hash_in_numpy(key: Tensor, n: int) -> Tensor:
    """Return the bits of few numbers, for which the calls of two dozen operations take longer than the hash."""
    keys = key.numpy()
    low, high = (keys & 0xFFFFFFFF).astype(np.int32), (keys >> 32).astype(np.int32)
    return torch.from_numpy(_scramble(_scramble(np.arange(n, dtype=np.int32) ^ low) + high))


def has_readable_value(key: Tensor) -> bool:
    """Return whether a key is on the host, and neither a compiler nor `vmap` follows it."""
    return key.device.type == "cpu" and not is_traced(key)


def uniform(key: int | Tensor, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Return uniform draws in (0, 1), 24 bits each."""
    n = torch.Size(shape).numel()
    draws = (((random_bits(key, n, device) >> 8) & 0xFFFFFF).float() + 0.5).mul_(2.0**-24)
    return draws.clamp_max_(1 - 2.0**-24).reshape(tuple(shape))  # the largest would round to 1


def normal(key: int | Tensor, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Return standard normal draws (Box-Muller)."""
    if isinstance(key, Tensor) and torch.compiler.is_compiling():
        draws: Tensor = _normal_operator(key, shape)
        return draws
    n = torch.Size(shape).numel()
    u = uniform(key, (2, n), device)
    return ((-2 * u[0].log()).sqrt() * (2 * torch.pi * u[1]).cos()).reshape(tuple(shape))


@torch.library.custom_op("uefl::normal", mutates_args=(), schema="(Tensor key, SymInt[] shape) -> Tensor")
def _normal_operator(key: Tensor, shape: Sequence[int]) -> Tensor:
    """Return `normal` as one operation: a compiler's own logarithms and cosines give other bits."""
    return normal(key, shape)


@_normal_operator.register_fake
def _fake_normal(key: Tensor, shape: Sequence[int]) -> Tensor:
    return key.new_empty(shape, dtype=torch.float32)


def permutation(key: int | Tensor, n: int, device: torch.device | str = "cpu") -> Tensor:
    """Return a random order of n items."""
    return torch.argsort(random_bits(key, n, device), stable=True)


def batched_permutations(keys: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return a random order for each key, [m, max(sizes)]: row k begins with `permutation(keys[k], sizes[k])`."""
    n = max(sizes)
    bits = random_bits(keys[:, None], n)
    is_padding = torch.arange(n, device=keys.device) >= copy_without_waiting(torch.tensor(sizes), keys.device)[:, None]
    return torch.argsort(bits.masked_fill(is_padding, _MASK_31_BITS), dim=1, stable=True)


class NoiseLayer(nn.Module):
    """A layer that draws noise. The engine sets its key before each forward pass with `set_noise_key`."""

    key: Tensor
    active_in_mc_passes = True  # whether it also draws in Monte Carlo dropout passes

    def __init__(self) -> None:
        super().__init__()
        # A buffer, so that each stacked client has its own; not persistent, so that it is never sent.
        self.register_buffer("key", torch.zeros((), dtype=torch.int64), persistent=False)
        self.salt = 0  # distinguishes the layers of a network
        self.pass_key = 0  # distinguishes the passes over one batch
        self.step_keys: Sequence[int] = ()  # keys that the engine will set, in this order

    def salted_key(self) -> Tensor:
        return self.salt_key(self.key)

    def salt_key(self, key: Key) -> Key:
        """Return a key of this layer and of its present pass."""
        return key ^ self.salt ^ self.pass_key

    def list_next_keys(self, max_keys: int) -> list[int]:
        """Return the salted key of this step, and then those of the steps after it that the engine announced."""
        key = int(self.key)
        if key not in self.step_keys:
            return [self.salt_key(key)]
        first = self.step_keys.index(key)
        return [self.salt_key(k) for k in self.step_keys[first : first + max(max_keys, 1)]]


class Dropout(NoiseLayer):
    """Dropout with a mask of addressed noise."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self._factors: dict[int, Tensor] = {}  # drawn in advance, by salted key

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        if has_readable_value(self.key) and x.dtype in (torch.float32, torch.float64):
            return x * self._get_factors(x)  # the same bits with fewer operations, also in the backward pass
        mask = self._draw_mask(self.salted_key(), x.numel()).reshape(x.shape)
        return (x * mask).mul_(1 / (1 - self.p))

    def _draw_mask(self, key: Tensor, n: int) -> Tensor:
        """Return which of n values are kept."""
        return (random_bits(key, n) & _MASK_31_BITS) >= int(self.p * 2**31)

    def _get_factors(self, x: Tensor) -> Tensor:
        """Return mask / (1 − p) in the shape of x."""
        key = self.salt_key(int(self.key))
        factors = self._factors.get(key)
        if factors is None or factors.numel() < x.numel() or factors.dtype != x.dtype:
            factors = self._draw_factors(key, x)
        if factors.shape == x.shape:
            return factors
        return factors.flatten()[: x.numel()].view(x.shape)  # a short draw is the start of a longer one

    def _draw_factors(self, key: int, x: Tensor) -> Tensor:
        """Draw at once for this step, which has this salted key, and for the announced ones after it, if x is small."""
        n = x.numel()
        keys = self.list_next_keys(_NUMPY_SIZE // max(n, 1))
        masks = self._draw_mask(torch.tensor(keys).unsqueeze(1), n)
        factors = masks.to(x.dtype).mul_(1 / (1 - self.p)).view(len(keys), *x.shape)
        drawn: dict[int, Tensor] = dict(zip(keys, factors))
        self._factors = drawn if len(drawn) > 1 else {}
        return drawn[key]

    def extra_repr(self) -> str:
        return f"p={self.p}"


class GaussianSampler(NoiseLayer):
    """Draw z ~ N(μ, σ²), reparameterized; in evaluation mode, return the mean."""

    def forward(self, mean: Tensor, deviation: Tensor) -> Tensor:
        if not self.training:
            return mean
        return mean + deviation * normal(self.salted_key(), mean.shape).to(mean.dtype)


class RandomChoice(NoiseLayer):
    """Draw indices with replacement."""

    def forward(self, shape: Sequence[int], n: int) -> Tensor:
        return (uniform(self.salted_key(), shape) * n).long().clamp_max(n - 1)


def salt_noise_layers(net: nn.Module) -> list[NoiseLayer]:
    """Give each noise layer of a network a salt derived from its name, and return these layers."""
    named_layers = [(name, m) for name, m in net.named_modules() if isinstance(m, NoiseLayer)]
    for name, layer in named_layers:
        layer.salt = derive_key(addresses.NOISE_LAYER, name)
    return [layer for _, layer in named_layers]


def set_noise_key(layers: Sequence[NoiseLayer], value: int) -> None:
    """Set the key of the next draws of these layers."""
    for layer in layers:
        layer.key.fill_(value)


def announce_noise_keys(layers: Sequence[NoiseLayer], values: Sequence[int]) -> None:
    """Tell layers the keys of the next steps, in order, so that they can draw for several steps at once."""
    for layer in layers:
        layer.step_keys = values


def iterate_passes(net: nn.Module, mc_samples: int) -> Iterator[int]:
    """Yield the number of each pass over one batch, with other draws per pass; then restore the layers."""
    layers = [m for m in net.modules() if isinstance(m, NoiseLayer)]
    try:
        for i in range(mc_samples):
            for layer in layers:
                layer.pass_key = derive_key(addresses.SAMPLING_PASS, i)
            yield i
    finally:
        for layer in layers:
            layer.pass_key = 0


@contextmanager
def sampling_mode(net: nn.Module) -> Iterator[None]:
    """Put only the layers that draw noise into training mode; batch norm, for instance, keeps its mode (D1)."""
    noise_layers = [m for m in net.modules() if isinstance(m, NoiseLayer | nn.modules.dropout._DropoutNd)]
    modes = [(layer, layer.training) for layer in noise_layers if getattr(layer, "active_in_mc_passes", True)]
    for layer, _ in modes:
        layer.train()
    try:
        yield
    finally:
        for layer, training in modes:
            layer.train(training)


@contextmanager
def evaluation_mode(net: nn.Module) -> Iterator[None]:
    """Put a network into evaluation mode and restore the mode of every layer afterwards."""
    modes = [(layer, layer.training) for layer in net.modules()]
    net.eval()
    try:
        yield
    finally:
        for layer, training in modes:
            layer.training = training
