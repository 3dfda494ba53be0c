"""Noise with an address: one draw for one (seed, silo, round, step, purpose), in every engine and on every device.

A counter-based stream: element i of a draw is a hash of the key and i, in plain integer tensor operations, so it can be
stacked, replayed and resumed, and the order in which clients run cannot change it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from importlib.util import find_spec

import torch
from torch import Tensor, nn

TRITON = find_spec("triton") is not None  # comes with torch for CUDA, but not everywhere
_LOW31 = 0x7FFFFFFF
_BLOCK = 1 << 17  # words hashed at once on a CPU: half a megabyte stays in a core's cache


def key(*address: int | float | str) -> int:
    """The 63-bit key of an address."""
    text = "\x1f".join(f"{type(a).__name__}:{a}" for a in address)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def _signed(value: int) -> int:
    """A 32-bit pattern as the int32 that holds it."""
    return value - (1 << 32) if value & 0x80000000 else value


def _scramble(h: Tensor) -> Tensor:
    """An integer hash with full avalanche on 32 bits, in place; int32 products wrap as intended."""
    h ^= (h >> 16) & 0xFFFF
    h *= _signed(0x7FEB352D)
    h ^= (h >> 15) & 0x1FFFF
    h *= _signed(0x846CA68B)
    h ^= (h >> 16) & 0xFFFF
    return h


def bits(k: int | Tensor, n: int, device: torch.device | str = "cpu") -> Tensor:
    """n words of 32 random bits as int32; `k` is a key, or an int64 tensor that holds one."""
    k = k if isinstance(k, Tensor) else torch.tensor(k, device=device)
    if TRITON and k.is_cuda and not torch.compiler.is_compiling():  # a compiler makes one kernel of it, too
        from uefl.hashing import Hashed

        drawn: Tensor = Hashed.apply(k, n)  # type: ignore[no-untyped-call]
        return drawn
    low, high = (k & 0xFFFFFFFF).to(torch.int32), (k >> 32).to(torch.int32)
    counter = torch.arange(n, dtype=torch.int32, device=k.device)
    blocks = torch.split(counter, _BLOCK) if counter.device.type == "cpu" and n > _BLOCK else (counter,)
    words = [_scramble(_scramble(block ^ low) + high) for block in blocks]
    return torch.cat(words, -1) if len(words) > 1 else words[0]


def uniform(k: int | Tensor, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Uniform draws in (0, 1), 24 bits each."""
    n = torch.Size(shape).numel()
    drawn = (((bits(k, n, device) >> 8) & 0xFFFFFF).float() + 0.5).mul_(2.0**-24)
    return drawn.clamp_max_(1 - 2.0**-24).reshape(tuple(shape))  # the largest would round to 1


def normal(k: int | Tensor, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Standard normal draws (Box-Muller)."""
    if isinstance(k, Tensor) and torch.compiler.is_compiling():
        drawn: Tensor = _normal(k, shape)
        return drawn
    n = torch.Size(shape).numel()
    u = uniform(k, (2, n), device)
    return ((-2 * u[0].log()).sqrt() * (2 * torch.pi * u[1]).cos()).reshape(tuple(shape))


@torch.library.custom_op("uefl::normal", mutates_args=(), schema="(Tensor k, SymInt[] shape) -> Tensor")
def _normal(k: Tensor, shape: Sequence[int]) -> Tensor:
    """The same as one operation: a compiler's own logarithms and cosines end in other bits."""
    return normal(k, shape)


@_normal.register_fake
def _like_normal(k: Tensor, shape: Sequence[int]) -> Tensor:
    return k.new_empty(shape, dtype=torch.float32)


def permutation(k: int | Tensor, n: int, device: torch.device | str = "cpu") -> Tensor:
    """A random order of n things."""
    return torch.argsort(bits(k, n, device), stable=True)


def permutations(keys: Tensor, sizes: Sequence[int]) -> Tensor:
    """A random order for each key, [m, the largest size]: of row k the first `sizes[k]` are `permutation`'s."""
    n = max(sizes)
    drawn = bits(keys[:, None], n)
    past = torch.arange(n, device=keys.device) >= torch.tensor(sizes, device=keys.device)[:, None]
    return torch.argsort(drawn.masked_fill(past, _LOW31), dim=1, stable=True)


class Noise(nn.Module):
    """A layer that draws. Whoever runs the network sets its key before each forward pass with `set_key`."""

    key: Tensor
    sampled = True  # whether it draws in dropout passes, too

    def __init__(self) -> None:
        super().__init__()
        # A buffer, so that clients in one tensor have one each; not persistent, so that it never travels.
        self.register_buffer("key", torch.zeros((), dtype=torch.int64), persistent=False)
        self.salt = 0  # tells the layers of one network apart
        self.turn = 0  # and the passes of one forward batch

    def salted(self) -> Tensor:
        return self.key ^ self.salt ^ self.turn


class Dropout(Noise):
    """Dropout whose mask is addressed noise."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        drawn = bits(self.salted(), x.numel()) & _LOW31
        keep = (drawn >= int(self.p * 2**31)).reshape(x.shape)
        return (x * keep).mul_(1 / (1 - self.p))

    def extra_repr(self) -> str:
        return f"p={self.p}"


class Sample(Noise):
    """z ~ N(μ, σ²), reparameterised; in evaluation mode the mean."""

    def forward(self, mean: Tensor, deviation: Tensor) -> Tensor:
        if not self.training:
            return mean
        return mean + deviation * normal(self.salted(), mean.shape).to(mean.dtype)


class Choice(Noise):
    """Indices drawn with replacement."""

    def forward(self, shape: Sequence[int], out_of: int) -> Tensor:
        return (uniform(self.salted(), shape) * out_of).long().clamp_max(out_of - 1)


def noises(net: nn.Module) -> list[Noise]:
    """All layers of a network that draw, each with a salt from its name."""
    found = [(name, m) for name, m in net.named_modules() if isinstance(m, Noise)]
    for name, layer in found:
        layer.salt = key("layer", name)
    return [layer for _, layer in found]


def set_key(layers: Sequence[Noise], value: int) -> None:
    """Address the next draws of these layers."""
    for layer in layers:
        layer.key.fill_(value)


def turns(net: nn.Module, passes: int) -> Iterator[int]:
    """Count passes over one batch, each with draws of its own; afterwards layers draw as before."""
    layers = [m for m in net.modules() if isinstance(m, Noise)]
    try:
        for i in range(passes):
            for layer in layers:
                layer.turn = key("pass", i)
            yield i
    finally:
        for layer in layers:
            layer.turn = 0


@contextmanager
def sampling(net: nn.Module) -> Iterator[None]:
    """Layers that draw do so; every other one stays as it is, batch norm in evaluation mode included (D1)."""
    drawing = [m for m in net.modules() if isinstance(m, Noise | nn.modules.dropout._DropoutNd)]
    layers = [(m, m.training) for m in drawing if getattr(m, "sampled", True)]
    for layer, _ in layers:
        layer.train()
    try:
        yield
    finally:
        for layer, was in layers:
            layer.train(was)


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while: nothing is drawn, and no statistics move."""
    layers = [(m, m.training) for m in net.modules()]
    net.eval()
    try:
        yield
    finally:
        for layer, was in layers:
            layer.training = was
