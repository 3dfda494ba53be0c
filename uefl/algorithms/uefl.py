"""UEFL: silos with unusually high uncertainty receive codewords of their own.

Uncertainty-based extensible codebook for federated learning in heterogeneous data silos (ICML 2025), Algorithm 1.
The round is FedAvg's (`fedavg.py`), the end of an iteration is the codebook's (`extensible_codebook.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from uefl.algorithms.extensible_codebook import ExtensibleCodebook
from uefl.algorithms.fedavg import FedAvg
from uefl.algorithms.fine_tuning import FineTuning
from uefl.core.field_rules import setting


@dataclass(frozen=True, kw_only=True)
class UEFL(FineTuning):
    """FedAvg with an extensible codebook: uncertain silos get codewords from K-means on their own features.

    Local fine-tuning after the last round is an option, as it is for FedAvg; the paper has none.
    """

    fine_tuning_epochs: int = setting(
        0,
        "Passes over a silo's training examples after the last round, at a tenth of the learning rate; 0: no local "
        "fine-tuning, as in the paper (D34).",
        at_least=0,
    )

    codebook: ExtensibleCodebook | None = setting(
        default_factory=ExtensibleCodebook, help_text="Codebook between encoder and classifier."
    )


@dataclass(frozen=True, kw_only=True)
class VQFedAvg(FedAvg):
    """FedAvg with a static codebook: one for all silos, or one per true domain (an oracle)."""

    codebook: ExtensibleCodebook | None = setting(
        default_factory=lambda: ExtensibleCodebook(extend="none"), help_text="Codebook of fixed size."
    )
