"""Call a function of a client's model for all silos of a stack at once, by `vmap`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_map

from uefl.core.federation import ClientModel, MatmulPrecision, Tensors
from uefl.core.noise import HAS_TRITON, NoiseLayer
from uefl.engines.stacked.client_stack import PUBLIC_SET, ClientStack
from uefl.engines.stacked.vmap_overrides import VmapOverrides


class SiloMapper:
    """The network and what all silos share beside their stacks."""

    def __init__(self, net: nn.Module, public_sets: Tensor, matmul_precision: MatmulPrecision) -> None:
        self.net, self.public_sets = net, public_sets  # [S, P, ...], one set of public images for each federation
        self.trainable_names = {n for n, p in net.named_parameters() if p.requires_grad}
        self._noise_layer_names = [name for name, m in net.named_modules() if isinstance(m, NoiseLayer)]
        self._use_triton = HAS_TRITON and matmul_precision != "full"

    def call_for_silos(self, stack: ClientStack, keys: Tensor, function: Callable[..., Any], *inputs: Any) -> Any:
        """Return `function(model, *inputs)` of all silos of a stack, each with its own tensors and noise key."""

        def call(
            client_tensors: Tensors,
            client_received: Tensors,
            client_state: Tensors,
            client_extras: Tensors,
            public_set: Tensors,
            key: Tensor,
            *inputs: Any,
        ) -> Any:
            tensors = {**stack.shared_tensors, **client_tensors}
            buffers = {n: t for n, t in tensors.items() if n not in self.trainable_names}
            model = ClientModel(
                self.net,
                {n: t for n, t in tensors.items() if n in self.trainable_names},
                extras={**stack.shared_extras, **client_extras},
                received_state={**stack.shared_received, **client_received},
                client_state=client_state,
                select_public_images=lambda: self.select_public_images(public_set),
                buffers=buffers | {f"{layer}.key": key for layer in self._noise_layer_names},
                is_bound=False,
            )
            return function(model, *inputs)

        of_silos = (stack.client_tensors, stack.client_received, stack.client_state, stack.client_extras)
        stacked = (*of_silos, stack.public_set, keys, *inputs)
        if len(stack.silo_names) > 1:
            with VmapOverrides(use_triton=self._use_triton):
                return vmap(call)(*stacked)
        return tree_map(lambda t: t.unsqueeze(0), call(*tree_map(lambda t: t.squeeze(0), stacked)))

    def select_public_images(self, public_set: Tensors) -> Tensor:
        """Return the set of public images whose number is given, or the only one."""
        if not public_set:
            return self.public_sets[0]
        return self.public_sets[public_set[PUBLIC_SET]].squeeze(0)
