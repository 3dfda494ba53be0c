"""The network of one client, as losses and client tasks use it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

Tensors = dict[str, Tensor]


class ClientModel:
    """A network bound to the tensors of one client."""

    def __init__(
        self,
        net: nn.Module,
        params: Tensors,
        *,
        extras: Tensors | None = None,
        received_state: Tensors | None = None,
        client_state: Tensors | None = None,
        buffers: Tensors | None = None,
        select_public_images: Callable[[], Tensor] | None = None,
        is_bound: bool = True,
    ) -> None:
        self.net = net
        self.params = params  # trainable tensors, by name
        self.buffers = buffers or {}  # other tensors of the network, if they are not the network's own
        self.extras = extras or {}  # extras of the broadcast
        self.received_state = received_state or {}  # θ as it arrived this round
        self.client_state = client_state or {}  # tensors this silo stores between rounds, beside the network's
        self._select_public_images = select_public_images
        self._is_bound = is_bound  # `params` are the network's own tensors

    @property
    def public_images(self) -> Tensor | None:
        """Images [P, ...] that every silo can read, if there are any; selecting one of several sets copies it."""
        return self._select_public_images() if self._select_public_images else None

    def call(self, method_name: str, *args: Any) -> Any:
        """Call a method of the network, or of a part of it (`classifier.head`), with this client's tensors."""
        if self._is_bound:
            return attrgetter(method_name)(self.net)(*args)
        tensors = {f"net.{n}": t for n, t in {**self.buffers, **self.params}.items()}
        return functional_call(_MethodCaller(self.net), tensors, (method_name, *args))

    def __call__(self, x: Tensor) -> Any:
        return self.call("forward", x)

    def state_dict(self) -> Tensors:
        """Return the network's tensors with the values of this client."""
        own = {**self.buffers, **self.params}
        return {name: own.get(name, tensor).detach() for name, tensor in self.net.state_dict().items()}

    def with_params(self, params: Mapping[str, Tensor]) -> ClientModel:
        """Return the same network with some tensors replaced."""
        return ClientModel(
            self.net,
            {**self.params, **params},
            extras=self.extras,
            received_state=self.received_state,
            client_state=self.client_state,
            buffers=self.buffers,
            select_public_images=self._select_public_images,
            is_bound=False,
        )


class _MethodCaller(nn.Module):
    """Reach every method of a network through `functional_call`, which itself reaches only `forward`."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, method_name: str, *args: Any) -> Any:
        return attrgetter(method_name)(self.net)(*args)
