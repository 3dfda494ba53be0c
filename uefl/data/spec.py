"""Which images, cut into which silos."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from uefl.data.concerns import lonely
from uefl.data.cuts import CUTS
from uefl.data.images import Images
from uefl.data.share import Share
from uefl.data.shifts import parsed, shifted
from uefl.data.sources import SOURCES, read
from uefl.errors import InputError, unknown
from uefl.federation import Part, Silo
from uefl.plugins import has

TEST_LABELS = ("all", "own")
_ELSEWHERE: Any = {"identity": False}  # where data lie and how loudly to complain say nothing about a run
_TARGETED = ("held-out", "ghifary")


@dataclass(frozen=True, kw_only=True)
class Data:
    """Which images, cut into which silos: all that decides what a silo holds, the seed apart."""

    name: str = "mnist5k"
    path: str = field(default="", metadata=_ELSEWHERE)
    size: int = 0  # height and width to resize to; 0: as they are
    only: int = 0  # the first so many classes; 0: all
    skip_bad: bool = False
    strict: bool = field(default=False, metadata=_ELSEWHERE)

    cut: str = "domains"  # one of CUTS
    shifts: tuple[str, ...] = ("rotate:0", "rotate:-50", "rotate:120")  # one domain each; (): the source's own domains
    silos: tuple[int, ...] = (3, 3, 3)  # silos of each domain; held-out: of all source domains together
    train: int = 440  # images a silo trains with, validation included (held-out: a domain's, at most); 0: all
    sizes: tuple[int, ...] = ()  # the same, silo by silo, for cut=domains
    test: int = 110  # test images a silo; 0: share all there are
    test_part: float = 0.2  # of a silo's images, where the source has no test split of its own and test is 0
    test_labels: str = "all"  # whose mix of labels the test images have under label skew: all silos', or the silo's own
    merge: bool = False  # forget the source's own test split
    validation: float = 0.1  # part of the training images that decides (D3)
    alpha: float = 0.1  # α of the Dirichlet cuts
    labels: int = 5  # classes a silo, for cut=classes
    target: str = ""  # the held-out domain: a shift, or a domain of the source

    def __post_init__(self) -> None:
        if not has(SOURCES, "uefl.readers", self.name):
            raise unknown("data set", self.name, SOURCES)
        if self.cut not in CUTS:
            raise unknown("cut", self.cut, CUTS)
        if self.test_labels not in TEST_LABELS:
            raise unknown("test_labels", self.test_labels, TEST_LABELS)
        for shift in self.shifts:
            parsed(shift)
        self._check_numbers()
        self._check_silos()
        self._check_target()

    def _check_numbers(self) -> None:
        for name in ("size", "only", "train", "test"):
            if getattr(self, name) < 0:
                raise InputError(f"{name}={getattr(self, name)} must be 0 or more")
        for name in ("test_part", "validation"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} must be at least 0 and below 1")
        if not 1e-9 <= self.alpha <= 1e9:  # beyond, Dirichlet draws lose their meaning in double precision
            raise InputError(f"alpha={self.alpha} must be between 1e-9 and 1e9")
        if self.labels < 1:
            raise InputError(f"labels={self.labels} must be 1 or more")
        if min((*self.silos, *self.sizes), default=1) < 1:
            raise InputError(f"silos={self.silos} and sizes={self.sizes} must be 1 or more each")

    def _check_silos(self) -> None:
        if self.sizes and self.cut != "domains":
            raise InputError(f"sizes={self.sizes} belongs to cut=domains, not to cut={self.cut}")
        if self.sizes and len(self.sizes) != sum(self.silos):
            raise InputError(f"sizes={self.sizes} must have one entry for each of {sum(self.silos)} silos")
        if self.cut in _TARGETED or self.cut == "given" or (self.cut == "domains" and not self.shifts):
            return  # only the source knows its domains and silos
        if not self.shifts or len(self.shifts) != len(self.silos):
            raise InputError(f"shifts={self.shifts} and silos={self.silos} must have one entry per domain each")

    def _check_target(self) -> None:
        if self.target and self.cut not in _TARGETED:
            raise InputError(f"target={self.target} needs cut={' or cut='.join(_TARGETED)}, not cut={self.cut}")
        if self.cut not in _TARGETED:
            return
        if len(set(self.shifts)) != len(self.shifts) or (self.cut == "ghifary" and not self.shifts):
            raise InputError(f"cut={self.cut}: shifts={self.shifts} must name every domain once")
        if len(self.silos) > 1:
            raise InputError(f"cut={self.cut}: silos={self.silos} must be one number, for all source domains together")
        if self.shifts and self.target not in self.shifts:
            raise unknown("target", self.target, self.shifts)

    def load(self, seed: int) -> tuple[list[Silo], Images]:
        """The silos, and the images they were cut from."""
        # Images of different sizes must be stretched as they are read; others after the shift, on original pixels.
        early = self.size if self.name in ("folder", "pacs") else 0
        found = read(self.name, self.path, skip_bad=self.skip_bad, strict=self.strict, size=early or None)
        images = first_classes(found, self.only)
        silos = self.divide(images, seed)
        if self.strict and (odd := lonely(silos)):
            raise InputError(odd[0])
        return silos, images

    def divide(self, images: Images, seed: int) -> list[Silo]:
        """Cut these images into silos."""
        return [self._filled(share, images, seed) for share in self.shares(images, seed)]

    def shares(self, images: Images, seed: int) -> list[Share]:
        """Which image goes where, without looking at any."""
        return CUTS[self.cut](self, images, seed)

    def _filled(self, share: Share, images: Images, seed: int) -> Silo:
        def part(at: Tensor) -> Part:
            x = resized(shifted(images.x[at], share.owner.shift, seed, at), self.size)
            return Part(standardised(x, images), images.y[at])

        owner = share.owner
        return Silo(owner.name, part(share.train), part(share.validation), part(share.test), domain=owner.domain)


def first_classes(images: Images, count: int) -> Images:
    """Only the images of the first classes, such as the letters a to j; 0 keeps all."""
    if not count:
        return images
    if count > len(images.classes):
        raise InputError(f"only={count}, but {images.name} has {len(images.classes)} classes")
    kept = images.y < count
    return replace(
        images,
        x=images.x[kept],
        y=images.y[kept],
        test=images.test[kept],
        classes=images.classes[:count],
        domain=None if images.domain is None else images.domain[kept],
        silo=None if images.silo is None else images.silo[kept],
    )


def resized(x: Tensor, size: int) -> Tensor:
    """Resize uint8 images to a square; after the shift, which acts on the pixels as they came."""
    if not size or x.shape[-2:] == (size, size):
        return x
    if not len(x):  # a part without images has a shape too, and the network is built for it
        return x.new_empty((*x.shape[:-2], size, size))
    scaled = F.interpolate(x.float(), (size, size), mode="bilinear", antialias=True, align_corners=False)
    return scaled.round().clamp(0, 255).to(torch.uint8)


def standardised(x: Tensor, images: Images) -> Tensor:
    """Pixels in [0, 1], less the data set's fixed mean, over its fixed deviation (D13)."""
    mean = torch.tensor(images.mean).view(-1, 1, 1)
    std = torch.tensor(images.std).view(-1, 1, 1)
    return (x.float() / 255 - mean) / std
