"""A silo's label prior: the logarithm of its class frequencies, which logit adjustment adds to logits.

Menon et al., Long-tail learning via logit adjustment (ICLR 2021).
"""

from __future__ import annotations

import torch
from torch import Tensor

from uefl.core.client_model import ClientModel

LOG_PRIOR = "log_prior"  # name in the client state: [C], log π_k; of examples from S silos [S, C]
_MAX_CLASSES = 2**32  # an int64 has room for a label and the number of a silo


def compute_log_prior(label_counts: Tensor) -> Tensor:
    """Return log π of examples per class [C], with add-one smoothing; zeros without examples."""
    counts = label_counts.double()
    if not counts.sum():
        return torch.zeros_like(counts)
    return ((counts + 1) / (counts + 1).sum()).log()


def compute_log_priors(marked_labels: Tensor, num_classes: int) -> Tensor:
    """Return the log π of each source of examples [S, C]."""
    sources, y = split_marked_labels(marked_labels)
    rows = range(int(sources.max()) + 1 if len(sources) else 1)
    return torch.stack([compute_log_prior(y[sources == i].bincount(minlength=num_classes)) for i in rows])


def mark_labels(y: Tensor, sources: Tensor) -> Tensor:
    """Return labels that also name the silo each example came from, so that a batch carries both."""
    return y + sources.to(y.device) * _MAX_CLASSES


def split_marked_labels(marked_labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of the silo each example came from, 0 where labels are not marked, and its label."""
    return marked_labels // _MAX_CLASSES, marked_labels % _MAX_CLASSES


def adjust_logits(model: ClientModel, logits: Tensor) -> Tensor:
    """Return logits [..., C] plus the silo's log π_k, if its client state has one."""
    log_prior = model.client_state.get(LOG_PRIOR)
    return logits if log_prior is None else logits + log_prior
