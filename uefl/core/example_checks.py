"""Check and convert the examples that a user gives to the library: one line names the silo, the value and the rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from uefl.core.errors import InputError
from uefl.core.lazy_tensor import LazyTensor

if TYPE_CHECKING:
    from uefl.core.federation import Examples, Silo

# Pixels of type uint8 are scaled as those of the data set `folder`: x / 255, minus the mean, divided by the deviation.
PIXEL_MEAN, PIXEL_DEVIATION = 0.5, 0.25
MIN_TRAIN_EXAMPLES = 2  # batch norm needs two


def to_tensor(owner: str, name: str, values: Any) -> Tensor:
    """Return a tensor, an array or a list as a tensor; `name` is what an error calls it."""
    try:
        if isinstance(values, Tensor):
            return values
        if isinstance(values, list | tuple) and values and isinstance(values[0], Tensor):
            return torch.stack(list(values))
        array = np.ascontiguousarray(values)  # torch reads no negative strides
        if array.dtype.kind == "u" and array.itemsize > 1:
            array = array.astype(np.int64)
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    except (TypeError, ValueError, RuntimeError) as e:
        reason = " ".join(str(e).split())
        raise InputError(f"{owner}: {name} must be a tensor, an array or a list of numbers ({reason})") from None


def convert_inputs(owner: str, x: Any) -> Tensor:
    """Return inputs as a tensor of finite numbers: floats and integers stay, images of uint8 are scaled to floats."""
    tensor = x if isinstance(x, LazyTensor) else to_tensor(owner, "x", x)
    if tensor.dim() < 2:
        raise InputError(f"{owner}: x has shape {list(tensor.shape)}; it must be [examples, …], such as [n, c, h, w]")
    if isinstance(tensor, LazyTensor):
        return cast(Tensor, _convert_when_read(owner, tensor))
    if tensor.dtype == torch.uint8:
        return (check_pixels(owner, tensor).float() / 255 - PIXEL_MEAN) / PIXEL_DEVIATION
    if tensor.is_complex():
        raise InputError(f"{owner}: x has type {_name_type(tensor)}; it must be of floats, integers or uint8 pixels")
    return check_finite(owner, tensor.float() if tensor.dtype == torch.bool else tensor)


def _convert_when_read(owner: str, x: LazyTensor) -> LazyTensor:
    """Return inputs that are converted and checked when they are read; one zero shows their type."""
    dtype = convert_inputs(owner, torch.zeros((1, *x.shape[1:]), dtype=x.dtype)).dtype
    return x.map(lambda rows: convert_inputs(owner, rows), dtype)


def check_pixels(owner: str, x: Tensor) -> Tensor:
    """Return images of uint8, or raise an error if their shape is not that of images."""
    if x.dim() != 4:
        raise InputError(f"{owner}: x of type uint8 has shape {list(x.shape)}; pixels must be images [n, c, h, w]")
    return x


def check_finite(owner: str, x: Tensor) -> Tensor:
    """Return inputs, or raise an error that names the first example with NaN or an infinite value."""
    if x.is_floating_point() and not bool(x.isfinite().all()):
        wrong = ~x.flatten(1).isfinite()
        row = int(wrong.any(1).nonzero()[0])
        value = float(x[row].flatten()[wrong[row]][0])
        raise InputError(f"{owner}: x[{row}] contains {value}; all values must be finite")
    return x


def convert_labels(owner: str, y: Any) -> Tensor:
    """Return labels as class indices [n] of type int64."""
    tensor = to_tensor(owner, "y", y)
    if tensor.dim() != 1:
        hint = ""
        if tensor.dim() == 2:
            hint = "; use y[:, 0]" if tensor.shape[1] == 1 else "; if they are one-hot, use y.argmax(1)"
        raise InputError(f"{owner}: y has shape {list(tensor.shape)}; labels must be class indices of shape [n]{hint}")
    if tensor.is_floating_point() or tensor.is_complex():
        raise InputError(f"{owner}: y has type {_name_type(tensor)}; labels must be integers")
    if len(tensor) and int(tensor.min()) < 0:
        raise InputError(f"{owner}: y contains the label {int(tensor.min())}; labels must be at least 0")
    return tensor.long()


def convert_examples(owner: str, x: Any, y: Any) -> tuple[Tensor, Tensor]:
    """Return inputs and labels as tensors of equal length."""
    inputs, labels = convert_inputs(owner, x), convert_labels(owner, y)
    if len(inputs) != len(labels):
        raise InputError(f"{owner}: x has {len(inputs)} examples, but y has {len(labels)} labels; they must be equal")
    return inputs, labels


def check_fraction(owner: str, name: str, value: float, *, allow_zero: bool = False) -> None:
    """Raise an error unless a fraction is less than 1 and greater than 0, or also 0 where that is allowed."""
    if not (0 < value < 1 or (allow_zero and value == 0)):
        rule = "at least 0" if allow_zero else "greater than 0"
        raise InputError(f"{owner}: {name}={value} must be {rule} and less than 1")


def check_train_size(owner: str, num_examples: int) -> None:
    """Raise an error if too few examples remain for training."""
    if num_examples < MIN_TRAIN_EXAMPLES:
        raise InputError(f"{owner}: training examples: {num_examples}; at least {MIN_TRAIN_EXAMPLES} are needed")


def check_silos(silos: Sequence[Silo], num_classes: int) -> list[Silo]:
    """Return silos with converted examples, or raise an error for what cannot be trained or tested with.

    A silo without any training example is allowed: the model is only tested there.
    """
    if num_classes < 2:
        raise InputError(f"num_classes={num_classes} must be at least 2")
    silos = list(silos)
    if not silos:
        raise InputError("no silos; at least one is needed")
    for number, silo in enumerate(silos):
        if not hasattr(silo, "train"):
            raise InputError(f"silos[{number}] is a {type(silo).__name__}; use Silo.from_tensors(name, x, y)")
        if not isinstance(silo.name, str) or not silo.name:
            raise InputError(f"silos[{number}] has the name {silo.name!r}; a name must be a text that is not empty")
    checked = [_check_silo(silo, num_classes) for silo in silos]
    if not any(len(silo.train.y) for silo in checked):
        raise InputError("no silo has training examples; at least one is needed")
    if not any(len(silo.test.y) for silo in checked):
        raise InputError("no silo has test examples; at least one is needed")
    first = checked[0]
    for silo in checked:
        shape, expected = (list(s.train.x.shape[1:]) for s in (silo, first))
        if shape != expected:
            raise InputError(
                f"{_name_silo(silo.name)}: examples have shape {shape}, but those of {_name_silo(first.name)} have "
                f"{expected}; all silos must have the same shape"
            )
    return checked


def _check_silo(silo: Silo, num_classes: int) -> Silo:
    owner = _name_silo(silo.name)
    train, validation, test = (
        _check_split(owner, examples, num_classes) for examples in (silo.train, silo.validation, silo.test)
    )
    if len(train.y):
        check_train_size(owner, len(train.y))
    expected, calibration = list(train.x.shape[1:]), None
    if silo.calibration is not None:
        calibration = _check_split(owner, silo.calibration, num_classes)
    for split, examples in (("validation", validation), ("test", test), ("calibration", calibration or test)):
        if (shape := list(examples.x.shape[1:])) != expected:
            raise InputError(
                f"{owner}: {split} examples have shape {shape}, but training examples have {expected}; "
                "they must be equal"
            )
    return replace(silo, train=train, validation=validation, test=test, calibration=calibration)


def _check_split(owner: str, examples: Examples, num_classes: int) -> Examples:
    x, y = convert_examples(owner, *examples)
    if len(y) and int(y.max()) >= num_classes:
        raise InputError(
            f"{owner}: y contains the label {int(y.max())}; with num_classes={num_classes}, labels are 0 to "
            f"{num_classes - 1}"
        )
    return examples._replace(x=x, y=y)


def _name_silo(name: str) -> str:
    return f"silo {name}"


def _name_type(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
