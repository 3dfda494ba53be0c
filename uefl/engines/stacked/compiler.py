"""Run single silos by compiled code, for networks that fill a device with one silo's batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from uefl.core.federation import Batch, ClientModel, Tensors, Update
from uefl.core.noise import NoiseLayer
from uefl.engines.stacked.device_buffers import DeviceBuffers
from uefl.engines.stacked.fusion.fusible_layers import INDUCTOR_OPTIONS, make_layers_fusible

COMPILE_BACKEND: Any = "inductor"  # torch's default
MAX_COMPILED_SHAPES = 4096  # torch's limit is 8 shapes for all federations of a process
RECOMPILE_LIMITS = (
    "recompile_limit",
    "accumulated_recompile_limit",
    "cache_size_limit",
    "accumulated_cache_size_limit",
)


class Compiler:
    """Compute gradients by `torch.compile` if it supports the loss; in float64 they equal those of eager code."""

    def __init__(
        self,
        net: nn.Module,
        trainable_names: Collection[str],
        noise_layers: Sequence[NoiseLayer],
        autocast: Callable[[], AbstractContextManager[object]],
        select_public_images: Callable[[Tensors], Tensor],
    ) -> None:
        self.net, self.trainable_names, self.noise_layers, self.autocast = net, trainable_names, noise_layers, autocast
        self.select_public_images = select_public_images
        make_layers_fusible(net)

    def compute_gradients(self, buffers: DeviceBuffers, update: Update, keys: Tensor, batch: Batch) -> Tensors | None:
        """Return the gradients of one update of a stack of one silo; None if eager code must compute them."""
        if len(buffers.stack.silo_names) > 1 or update.loss in buffers.uncompilable_losses:
            return None
        assert isinstance(batch.step, Tensor)  # one step per stacked silo
        saved = {n: t for n, t in buffers.stack.client_tensors.items() if n not in self.trainable_names}
        saved = {} if is_capturing() else {n: t.clone() for n, t in saved.items()}
        self._bind_network(buffers)
        for layer in self.noise_layers:
            layer.key.copy_(keys[0])
        signature = (update.loss, batch.epoch)
        if signature not in buffers.compiled_losses:
            buffers.compiled_losses[signature] = self._compile_loss(buffers, update, batch.epoch)
        params = {n: p for n, p in self.net.named_parameters() if n in self.trainable_names and update.is_trainable(n)}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the compiler's hints to its developers
                loss = buffers.compiled_losses[signature](batch.x[0], batch.y[0], batch.step[0])
                gradients = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
        except Exception:  # an error of the loss itself is raised again by eager code
            restore_buffers(buffers, saved)
            buffers.uncompilable_losses.add(update.loss)
            return None
        return {n: g.unsqueeze(0) for n, g in zip(params, gradients) if g is not None}

    def release(self) -> None:
        """Give the network tensors of its own again, and forget compiled code, which may refer to buffers."""
        import torch._dynamo as dynamo

        for module in self.net.modules():
            owned: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for tensors in owned:
                for leaf, tensor in tensors.items():
                    if tensor is not None:
                        own = tensor.detach().clone()
                        is_parameter = isinstance(tensor, nn.Parameter)
                        tensors[leaf] = nn.Parameter(own, tensor.requires_grad) if is_parameter else own
        dynamo.reset()

    def _bind_network(self, buffers: DeviceBuffers) -> None:
        """Bind the network to the memory of the buffers, since the compiler optimizes a module's own tensors best.

        The bound tensors of a buffer never change: compiled code identifies them by their identity.
        """
        for n, t in buffers.stack.client_tensors.items():
            owner, _, leaf = n.rpartition(".")
            module = self.net.get_submodule(owner)
            tensors: Any = module._parameters if leaf in module._parameters else module._buffers
            if n not in buffers.bound_tensors:
                is_parameter = tensors is module._parameters
                buffers.bound_tensors[n] = nn.Parameter(t[0], n in self.trainable_names) if is_parameter else t[0]
            tensors[leaf] = buffers.bound_tensors[n]

    def _compile_loss(self, buffers: DeviceBuffers, update: Update, epoch: int) -> Callable[..., Tensor]:
        import torch._dynamo as dynamo  # takes a second
        import torch._inductor as inductor

        stack = buffers.stack
        public_set = {n: t[0] for n, t in stack.public_set.items()}
        model = ClientModel(
            self.net,
            {n: p for n, p in self.net.named_parameters() if n in self.trainable_names},
            extras={**stack.shared_extras, **{n: t[0] for n, t in stack.client_extras.items()}},
            received_state={**stack.shared_received, **{n: t[0] for n, t in stack.client_received.items()}},
            client_state={n: t[0] for n, t in stack.client_state.items()},
            select_public_images=lambda: self.select_public_images(public_set),
        )

        def compute_loss(x: Tensor, y: Tensor, step: Tensor) -> Tensor:
            with self.autocast():
                loss: Tensor = update.loss(model, Batch(x, y, step, epoch))
            return loss

        for name in RECOMPILE_LIMITS:
            if hasattr(dynamo.config, name):
                setattr(dynamo.config, name, max(getattr(dynamo.config, name), MAX_COMPILED_SHAPES))
        # Choose no kernel by its speed, so that the next run gives the same bits; older compilers lack this option.
        wanted: dict[str, Any] = {"deterministic": True, **INDUCTOR_OPTIONS}
        options = {
            n: value for n, value in wanted.items() if COMPILE_BACKEND == "inductor" and n in inductor.list_options()
        }
        compiled: Callable[..., Tensor] = torch.compile(
            compute_loss, dynamic=False, backend=COMPILE_BACKEND, options=options or None
        )
        return compiled


def restore_buffers(buffers: DeviceBuffers, saved_buffers: Tensors) -> None:
    """Restore what a forward pass changed: the statistics of batch norm."""
    for n, t in saved_buffers.items():
        buffers.stack.client_tensors[n].copy_(t)


def is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
