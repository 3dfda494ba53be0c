"""A silo's label prior: the logarithm of its class frequencies, which logit adjustment adds to logits.

Menon et al., Long-tail learning via logit adjustment (ICLR 2021).
"""

from __future__ import annotations

import torch
from torch import Tensor

from uefl.core.client_model import ClientModel

LOG_PRIOR = "log_prior"  # name in the client state: [C], log π_k


def compute_log_prior(label_counts: Tensor) -> Tensor:
    """Return log π of examples per class [C], with add-one smoothing; zeros without examples."""
    counts = label_counts.double()
    if not counts.sum():
        return torch.zeros_like(counts)
    return ((counts + 1) / (counts + 1).sum()).log()


def adjust_logits(model: ClientModel, logits: Tensor) -> Tensor:
    """Return logits [..., C] plus the silo's log π_k, if its client state has one."""
    log_prior = model.client_state.get(LOG_PRIOR)
    return logits if log_prior is None else logits + log_prior
