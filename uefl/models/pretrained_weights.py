"""Load trained weights into an encoder, from a file or from torchvision's public files."""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from uefl.core.errors import InputError
from uefl.core.federation import Tensors
from uefl.models.torchvision_weights import fetch_torchvision_weights

IMAGENET_SOURCE = "imagenet"  # instead of a file: torchvision's weights
_CLASSIFIER_PREFIXES = ("classifier.", "fc.")  # tensors of torchvision's full models that an encoder does not have
_SUFFIXES = (".safetensors", ".pth", ".pt")


class WeightsReport(NamedTuple):
    """What was loaded."""

    file: Path
    num_loaded: int  # tensors
    num_ignored: int  # tensors of a classifier
    file_dtype: str  # of the file's weights; the encoder keeps its own dtype
    has_summed_filters: bool  # filters for color images were summed for grayscale images


def load_weights(encoder: nn.Module, source: str) -> WeightsReport:
    """Load `source`, a file or `imagenet`, into an encoder; if a tensor does not fit, the encoder stays unchanged."""
    path = _find_torchvision_file(encoder) if source == IMAGENET_SOURCE else Path(source).expanduser()
    file_tensors = _read_tensors(path)
    encoder_tensors = encoder.state_dict()
    ignored = [name for name in file_tensors if name.startswith(_CLASSIFIER_PREFIXES)]
    unknown = [name for name in file_tensors if name not in encoder_tensors and name not in ignored]
    # Files older than PyTorch 0.4.1 have no batch counts, and nothing here reads them.
    missing = [n for n in encoder_tensors if n not in file_tensors and not n.endswith("num_batches_tracked")]
    if missing:
        fraction = _format_fraction(missing, encoder_tensors)
        raise InputError(f"{path}: the encoder's tensor '{missing[0]}' is missing ({fraction} tensors are missing)")
    if unknown:  # for instance, a ResNet34 contains every tensor of a ResNet18
        fraction = _format_fraction(unknown, file_tensors)
        raise InputError(f"{path}: the encoder has no tensor '{unknown[0]}' ({fraction} tensors are unknown)")
    first = _first_convolution_name(encoder)
    names = [name for name in file_tensors if name in encoder_tensors]
    fitted = {name: _fit_tensor(path, name, file_tensors[name], encoder_tensors[name], first) for name in names}
    encoder.load_state_dict(fitted, strict=False)
    dtypes = [file_tensors[name].dtype for name in names if file_tensors[name].is_floating_point()]
    return WeightsReport(
        file=path,
        num_loaded=len(fitted),
        num_ignored=len(ignored),
        file_dtype=str(dtypes[0]).removeprefix("torch."),
        has_summed_filters=first in file_tensors and file_tensors[first].shape != encoder_tensors[first].shape,
    )


def _find_torchvision_file(encoder: nn.Module) -> Path:
    name = getattr(encoder, "torchvision_file", "")
    if not name:
        raise InputError(f"no official weights exist for {type(encoder).__name__} with this stem; name a file")
    return fetch_torchvision_weights(name)


def _read_tensors(path: Path) -> Tensors:
    """Return all tensors of a file, by name. Nothing in the file is ever executed."""
    if path.suffix not in _SUFFIXES:
        raise InputError(f"{path}: weights must be a {', '.join(_SUFFIXES)} file, or '{IMAGENET_SOURCE}'")
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    try:
        tensors = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except UnpicklingError as error:
        raise InputError(f"{path}: damaged, or not only tensors; save a state_dict") from error
    except Exception as error:  # a damaged file can make the readers raise anything
        raise InputError(f"{path}: damaged, or not a {path.suffix} file ({type(error).__name__})") from error
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in tensors.items()
    ):
        raise InputError(f"{path}: not a dictionary of tensors by name; save a state_dict")
    return {name: tensor.detach() for name, tensor in tensors.items()}


def _fit_tensor(path: Path, name: str, tensor: Tensor, target: Tensor, first: str) -> Tensor:
    """Return a tensor of the file in the shape and dtype of the encoder's tensor."""
    if name == first and tensor.dim() == 4 and tensor.shape[1] == 3 and target.shape[1] == 1:
        # The sum gives the same output for a grayscale image as the filters for three equal channels.
        tensor = tensor.to(target.dtype).sum(1, keepdim=True)
    if tensor.shape != target.shape:
        raise InputError(f"{path}: '{name}' has shape {list(tensor.shape)}, the encoder needs {list(target.shape)}")
    if tensor.is_floating_point() != target.is_floating_point():
        raise InputError(f"{path}: '{name}' is {tensor.dtype}, the encoder needs {target.dtype}")
    tensor = tensor.to(target.dtype)
    if not tensor.isfinite().all():
        raise InputError(f"{path}: '{name}' has values that are not finite")
    return tensor


def _first_convolution_name(encoder: nn.Module) -> str:
    return next((f"{name}.weight" for name, m in encoder.named_modules() if isinstance(m, nn.Conv2d)), "")


def _format_fraction(names: list[str], tensors: Tensors) -> str:
    return f"{len(names)} of {len(tensors)}"
