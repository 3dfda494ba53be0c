"""Trained weights for an encoder, from a file or from torchvision's public address."""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from uefl.errors import InputError
from uefl.federation import State
from uefl.models.official import official_weights

IMAGENET = "imagenet"  # in place of a file: the official weights
_HEADS = ("classifier.", "fc.")  # how full models of torchvision name what an encoder has not
_SUFFIXES = (".safetensors", ".pth", ".pt")


class Report(NamedTuple):
    """What was loaded."""

    file: Path
    loaded: int  # tensors
    ignored: int  # tensors of a classifier
    precision: str  # of the file's weights; the encoder keeps its own
    summed: bool  # filters for colour were summed for grey images


def load_weights(encoder: nn.Module, source: str) -> Report:
    """Fill an encoder from `source`, a file or `imagenet`; it is left as it was if anything does not fit."""
    path = _official(encoder) if source == IMAGENET else Path(source).expanduser()
    given = _read(path)
    own = encoder.state_dict()
    heads = [name for name in given if name.startswith(_HEADS)]
    strangers = [name for name in given if name not in own and name not in heads]
    # Files older than PyTorch 0.4.1 do not count batches, and nothing here reads that count.
    missing = [name for name in own if name not in given and not name.endswith("num_batches_tracked")]
    if missing:
        raise InputError(f"{path}: no '{missing[0]}' ({_of(missing, own)} tensors of the encoder are missing)")
    if strangers:  # or a ResNet34 would pass for a ResNet18
        raise InputError(f"{path}: '{strangers[0]}' is not the encoder's ({_of(strangers, given)} tensors are not)")
    first = _first_convolution(encoder)
    fitted = {name: _fitted(path, name, given[name], own[name], first) for name in given if name in own}
    encoder.load_state_dict(fitted, strict=False)
    weights = [tensor for name, tensor in given.items() if name in own and tensor.is_floating_point()]
    return Report(
        file=path,
        loaded=len(fitted),
        ignored=len(heads),
        precision=str(weights[0].dtype).removeprefix("torch."),
        summed=first in given and given[first].shape != own[first].shape,
    )


def _official(encoder: nn.Module) -> Path:
    name = getattr(encoder, "official", "")
    if not name:
        raise InputError(f"there are no official weights for {type(encoder).__name__} with this stem; give a file")
    return official_weights(name)


def _read(path: Path) -> State:
    """All tensors of a file, by name. Nothing in it is ever executed."""
    if path.suffix not in _SUFFIXES:
        raise InputError(f"{path}: weights are a file {', '.join(_SUFFIXES)}, or '{IMAGENET}'")
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    try:
        found = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except UnpicklingError as error:
        raise InputError(f"{path}: refused, it is damaged or holds more than tensors (save a state_dict)") from error
    except Exception as error:  # a damaged file can make the readers raise anything
        raise InputError(f"{path}: damaged, or not such a file ({type(error).__name__})") from error
    if not isinstance(found, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in found.items()):
        raise InputError(f"{path}: not a table of tensors by name (save a state_dict)")
    return {name: tensor.detach() for name, tensor in found.items()}


def _fitted(path: Path, name: str, given: Tensor, own: Tensor, first: str) -> Tensor:
    """A tensor of the file as the encoder wants it."""
    if name == first and given.dim() == 4 and given.shape[1] == 3 and own.shape[1] == 1:
        # Summed, the filters answer to a grey image as they did to the same image in three equal channels.
        given = given.to(own.dtype).sum(1, keepdim=True)
    if given.shape != own.shape:
        raise InputError(f"{path}: '{name}' has shape {list(given.shape)}, the encoder needs {list(own.shape)}")
    if given.is_floating_point() != own.is_floating_point():
        raise InputError(f"{path}: '{name}' is {given.dtype}, the encoder needs {own.dtype}")
    given = given.to(own.dtype)
    if not given.isfinite().all():
        raise InputError(f"{path}: '{name}' holds values that are not finite")
    return given


def _first_convolution(encoder: nn.Module) -> str:
    return next((f"{name}.weight" for name, m in encoder.named_modules() if isinstance(m, nn.Conv2d)), "")


def _of(some: list[str], every: State) -> str:
    return f"{len(some)} of {len(every)}"
