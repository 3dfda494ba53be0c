"""Look at silos before training on them: a picture with a row a silo, and a table of counts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.table import Table
from torch import Tensor

from uefl.data.images import Images
from uefl.errors import InputError, unknown
from uefl.federation import Part, Silo

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROWS = 24  # silos in a picture or table; the rest is counted
_SAMPLES = 10
_FORMATS = (".png", ".pdf", ".svg", ".jpg")
_PARTS = (("train", "#3b6ea5"), ("validation", "#e0a030"), ("test", "#9a9a9a"))


def counts(silos: Sequence[Silo], images: Images) -> Table:
    """How many images each silo has, and how many classes it trains with."""
    table = Table(title=f"{images.name}: {len(silos)} silos", caption=_left_out(silos) or None)
    for heading in ("silo", "domain"):
        table.add_column(heading)
    for heading in ("train", "validation", "test", "classes"):
        table.add_column(heading, justify="right")
    for silo in silos[:_ROWS]:
        classes = int((torch.bincount(_seen(silo).y) > 0).sum())
        table.add_row(silo.name, silo.domain, *map(str, (*_sizes(silo), f"{classes} of {len(images.classes)}")))
    table.add_section()
    domains = len({silo.domain for silo in silos})
    totals = [sum(column) for column in zip(*map(_sizes, silos))]
    table.add_row("all", f"{domains} domain{'s' * (domains > 1)}", *map(str, totals), "")
    return table


def picture(silos: Sequence[Silo], images: Images, path: Path) -> Path:
    """Draw samples and labels of each silo; gives the path written, a new one where `path` is taken."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if path.suffix.lower() not in _FORMATS:
        raise unknown("picture format", path.suffix or path.name, _FORMATS)
    shown = silos[:_ROWS]
    figure = Figure(figsize=(11, 0.8 + 0.85 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(shown), 2, squeeze=False, width_ratios=(2, 1))
    for (left, right), silo in zip(axes, shown):
        _draw_samples(left, silo, images)
        _draw_labels(right, silo, images)
    axes[-1, 1].set_xlabel("class")
    figure.suptitle(f"{images.name}: {_left_out(silos) or f'{len(silos)} silos'}")
    colours = [axes[0, 1].bar([0], [0], color=colour) for _, colour in _PARTS]
    figure.legend(colours, [name for name, _ in _PARTS], loc="outside lower right", ncols=len(_PARTS))
    return _written(figure, path)


def _draw_samples(axis: Axes, silo: Silo, images: Images) -> None:
    strip = _strip(_seen(silo), images)
    axis.imshow(strip, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    axis.set_xticks([])
    axis.set_yticks([])
    held = "" if len(silo.train.y) else "\n(test only)"
    domain = "" if silo.domain in silo.name else f"\n{silo.domain}"
    axis.set_ylabel(f"{silo.name}{domain}{held}", rotation=0, ha="right", va="center", fontsize=8)


def _draw_labels(axis: Axes, silo: Silo, images: Images) -> None:
    classes = len(images.classes)
    below = np.zeros(classes)
    for name, colour in _PARTS:
        height = torch.bincount(getattr(silo, name).y, minlength=classes).numpy()
        axis.bar(np.arange(classes), height, bottom=below, color=colour, width=0.85)
        below = below + height
    few = classes <= 12
    axis.set_xticks(range(classes) if few else [0, classes - 1])
    axis.set_xticklabels([images.classes[c][:9] for c in (range(classes) if few else (0, classes - 1))])
    axis.tick_params(labelsize=6)


def _strip(part: Part, images: Images) -> NDArray[Any]:
    """Images side by side [h, w, c], spread over the labels, as they look."""
    ranked = part.y.argsort(stable=True)
    chosen = ranked[torch.linspace(0, len(ranked) - 1, min(_SAMPLES, len(ranked))).long()]
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (images.mean, images.std))
    x: Tensor = (part.x[chosen] * std + mean).clamp(0, 1)
    blank = x.new_ones(_SAMPLES - len(x), *x.shape[1:])
    row = torch.cat([*torch.cat([x, blank])], dim=-1).permute(1, 2, 0)
    return np.asarray(row[..., 0] if row.shape[-1] == 1 else row)


def _written(figure: Any, path: Path) -> Path:
    """Save under a name nobody uses yet: a picture may be the only trace of an old cut."""
    number = 1
    while True:
        free = path if number == 1 else path.with_stem(f"{path.stem}-{number}")
        try:
            with free.open("xb") as file:
                figure.savefig(file, format=free.suffix[1:].lower(), dpi=110)
            return free
        except FileExistsError:
            number += 1
        except OSError as error:
            raise InputError(f"cannot write {free}: {error.strerror}") from error


def _left_out(silos: Sequence[Silo]) -> str:
    return f"the first {_ROWS} of {len(silos)} silos" if len(silos) > _ROWS else ""


def _sizes(silo: Silo) -> tuple[int, int, int]:
    return len(silo.train.y), len(silo.validation.y), len(silo.test.y)


def _seen(silo: Silo) -> Part:
    """What to show of a silo: its training images, or the test images of one that does not train."""
    return silo.train if len(silo.train.y) else silo.test
