"""Show silos before training: a table of counts, and a figure with one row per silo."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.table import Table
from torch import Tensor

from uefl.core.errors import InputError, unknown_value_error
from uefl.core.federation import Examples, Silo, list_parts
from uefl.data.images import Images

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_SILOS = 24  # silos in a figure or table; the others are only counted
_SAMPLES_PER_SILO = 10
_FORMATS = (".png", ".pdf", ".svg", ".jpg")
_SPLIT_COLORS = (("train", "#3b6ea5"), ("validation", "#e0a030"), ("test", "#9a9a9a"))


def make_count_table(silos: Sequence[Silo], images: Images) -> Table:
    """Return a table with the number of images per silo and split, and the number of classes it trains with."""
    table = Table(title=f"{images.name}: {len(silos)} silos", caption=_describe_omitted(silos) or None)
    for heading in ("silo", "domain"):
        table.add_column(heading)
    parts = name_parts(silos)
    for heading in (*parts, "classes"):
        table.add_column(heading, justify="right")
    for silo in silos[:_MAX_SILOS]:
        num_classes = int((torch.bincount(_get_shown_examples(silo).y) > 0).sum())
        table.add_row(
            silo.name, silo.domain, *map(str, (*count_examples(silo, parts), f"{num_classes} of {len(images.classes)}"))
        )
    table.add_section()
    num_domains = len({silo.domain for silo in silos})
    totals = [sum(column) for column in zip(*(count_examples(silo, parts) for silo in silos))]
    table.add_row("all", f"{num_domains} domain{'s' * (num_domains > 1)}", *map(str, totals), "")
    return table


def draw_silos(silos: Sequence[Silo], images: Images, path: Path) -> Path:
    """Draw sample images and labels of each silo; return the path, which is a new name if `path` exists."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    check_figure_format(path)
    shown = silos[:_MAX_SILOS]
    figure = Figure(figsize=(11, 0.8 + 0.85 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(shown), 2, squeeze=False, width_ratios=(2, 1))
    for (left, right), silo in zip(axes, shown):
        _draw_samples(left, silo, images)
        _draw_labels(right, silo, images)
    axes[-1, 1].set_xlabel("class")
    figure.suptitle(f"{images.name}: {_describe_omitted(silos) or f'{len(silos)} silos'}")
    handles = [axes[0, 1].bar([0], [0], color=color) for _, color in _SPLIT_COLORS]
    figure.legend(handles, [name for name, _ in _SPLIT_COLORS], loc="outside lower right", ncols=len(_SPLIT_COLORS))
    return save_new_file(figure, path)


def check_figure_format(path: Path) -> None:
    """Raise an error if a figure cannot be written in the format that its name gives."""
    if path.suffix.lower() not in _FORMATS:
        raise unknown_value_error("image format", path.suffix or path.name, _FORMATS)


def _draw_samples(axis: Axes, silo: Silo, images: Images) -> None:
    strip = _make_sample_strip(_get_shown_examples(silo), images)
    axis.imshow(strip, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    axis.set_xticks([])
    axis.set_yticks([])
    remark = "" if len(silo.train.y) else "\n(test only)"
    domain = "" if silo.domain in silo.name else f"\n{silo.domain}"
    axis.set_ylabel(f"{silo.name}{domain}{remark}", rotation=0, ha="right", va="center", fontsize=8)


def _draw_labels(axis: Axes, silo: Silo, images: Images) -> None:
    num_classes = len(images.classes)
    bottom = np.zeros(num_classes)
    for name, color in _SPLIT_COLORS:
        height = torch.bincount(getattr(silo, name).y, minlength=num_classes).numpy()
        axis.bar(np.arange(num_classes), height, bottom=bottom, color=color, width=0.85)
        bottom = bottom + height
    ticks = range(num_classes) if num_classes <= 12 else (0, num_classes - 1)
    axis.set_xticks(list(ticks))
    axis.set_xticklabels([images.classes[c][:9] for c in ticks])
    axis.tick_params(labelsize=6)


def _make_sample_strip(examples: Examples, images: Images) -> NDArray[Any]:
    """Return images side by side [h, w, c], spread over the labels, with the standardization undone."""
    by_label = examples.y.argsort(stable=True)
    indices = by_label[torch.linspace(0, len(by_label) - 1, min(_SAMPLES_PER_SILO, len(by_label))).long()]
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (images.mean, images.std))
    x: Tensor = (examples.x[indices] * std + mean).clamp(0, 1)
    blank = x.new_ones(_SAMPLES_PER_SILO - len(x), *x.shape[1:])
    row = torch.cat([*torch.cat([x, blank])], dim=-1).permute(1, 2, 0)
    return np.asarray(row[..., 0] if row.shape[-1] == 1 else row)


def save_new_file(figure: Any, path: Path) -> Path:
    """Save under a new name: an existing figure may be the only record of an earlier partition."""
    number = 1
    while True:
        new_path = path if number == 1 else path.with_stem(f"{path.stem}-{number}")
        try:
            with new_path.open("xb") as file:
                figure.savefig(file, format=new_path.suffix[1:].lower(), dpi=110)
            return new_path
        except FileExistsError:
            number += 1
        except OSError as error:
            raise InputError(f"cannot write {new_path}: {error.strerror}") from error


def _describe_omitted(silos: Sequence[Silo]) -> str:
    return f"the first {_MAX_SILOS} of {len(silos)} silos" if len(silos) > _MAX_SILOS else ""


def name_parts(silos: Sequence[Silo]) -> list[str]:
    """Return the parts of the silos: the splits, and `calibration` if a silo has examples for it."""
    return max((list(list_parts(silo)) for silo in silos), key=len)


def count_examples(silo: Silo, parts: Sequence[str]) -> list[int]:
    """Return the number of examples of each part."""
    own = list_parts(silo)
    return [len(own[part].y) if part in own else 0 for part in parts]


def _get_shown_examples(silo: Silo) -> Examples:
    """Return the training images of a silo, or its test images if it does not train."""
    return silo.train if len(silo.train.y) else silo.test
