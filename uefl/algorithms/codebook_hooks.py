"""The points at which a federated round calls its codebook; without a codebook nothing happens there."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from uefl.core.codebook_size import CodebookSize
from uefl.core.federation import Clients, ClientTask, Evaluations, ServerState, Silo

if TYPE_CHECKING:
    from uefl.algorithms.fedavg import FedAvg
    from uefl.core.codebook import QuantizedFeatures
    from uefl.models.network import Prediction


class CodebookHooks:
    """What a round asks of a codebook. Each hook here is the one of a method without a codebook."""

    @property
    def code_loss_weight(self) -> float:
        """L_code divided by the mean squared distance between features and codewords."""
        return 0.0

    def check_rounds(self, method: FedAvg) -> None:
        """Raise an `InputError` if the codebook does not fit the method's rounds."""
        del method

    def check_silos(self, silos: Sequence[Silo]) -> None:
        """Raise an `InputError` if the codebook needs data that a silo does not have."""
        del silos

    def choose_size(self, net: nn.Module, num_examples: Collection[int]) -> CodebookSize | None:
        """Return the codewords per extension and the segments, given the silos' numbers of training examples."""
        del net, num_examples
        return None

    def adapt_network(self, net: nn.Module) -> nn.Module:
        """Put a codebook into the network."""
        return net

    def initialize_codebook(self, method: FedAvg, clients: Clients, server: ServerState) -> ServerState:
        """Give the server its initial codewords."""
        del method, clients
        return server

    def after_round(self, method: FedAvg, clients: Clients, server: ServerState) -> ServerState:
        """Extend the codebook where an iteration ends."""
        del method, clients
        return server

    def evaluate_targets(
        self, method: FedAvg, clients: Clients, server: ServerState, evaluations: dict[str, Evaluations]
    ) -> dict[str, Evaluations]:
        """Choose the codewords of silos without training data."""
        del method, clients, server
        return evaluations

    def loss(self, prediction: Prediction | QuantizedFeatures) -> Tensor | float:
        """Return L_code."""
        del prediction
        return 0.0

    def client_tasks(self, method: FedAvg) -> Mapping[str, ClientTask]:
        """Return the client tasks of the codebook, by name."""
        del method
        return {}


NO_CODEBOOK = CodebookHooks()
