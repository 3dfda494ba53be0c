"""Real features for K-means: tokens of a briefly trained residual encoder on digits, as the quantizer sees them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, layer_norm

from benchmarks.images import taken
from uefl.codebook import tokens
from uefl.federation import Part
from uefl.models.residual import ResidualEncoder

WIDTH = 128


def features(part: Part, images: int, device: str = "cpu", steps: int = 60) -> Tensor:
    """[images · 49, 128] after layer norm; two blocks of 64 and 128 channels, some steps of Adam 1e-3, batch 32."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(ResidualEncoder(channels=1, size=28, width=64, depth=2), nn.Flatten(), nn.Linear(6272, 10))
    net = net.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    for step in range(steps):
        x, y = (t.to(device) for t in taken(part, 32 * step, 32))
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        optimizer.step()
    net.eval()
    with torch.no_grad():
        z = torch.cat([tokens(net[0](x.to(device))) for x in torch.split(taken(part, 0, images).x, 100)])
    return layer_norm(z, z.shape[-1:]).reshape(-1, WIDTH).contiguous()
