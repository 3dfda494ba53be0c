"""Real features for K-means: tokens of a briefly trained residual encoder on digits, as the quantizer receives them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, layer_norm

from benchmarks.digits import take_cyclic
from uefl.core.codebook import to_tokens
from uefl.core.federation import Examples
from uefl.models.residual_encoder import ResidualEncoder

WIDTH = 128


def compute_features(examples: Examples, num_images: int, device: str = "cpu", num_steps: int = 60) -> Tensor:
    """Return [num_images · 49, 128] after layer norm, from two blocks trained with Adam, lr 1e-3, batch size 32."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(
            ResidualEncoder(in_channels=1, image_size=28, width=64, depth=2), nn.Flatten(), nn.Linear(6272, 10)
        )
    net = net.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    for step in range(num_steps):
        x, y = (t.to(device) for t in take_cyclic(examples, 32 * step, 32))
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        optimizer.step()
    net.eval()
    with torch.no_grad():
        images = take_cyclic(examples, 0, num_images).x
        z = torch.cat([to_tokens(net[0](x.to(device))) for x in torch.split(images, 100)])
    return layer_norm(z, z.shape[-1:]).reshape(-1, WIDTH).contiguous()
