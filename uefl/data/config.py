"""The settings that define the silos of an experiment, and loading them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from uefl.core.errors import InputError, unknown_value_error
from uefl.core.federation import Examples, Silo, map_examples
from uefl.core.field_rules import check_ranges, setting
from uefl.core.lazy_tensor import LazyTensor, is_lazy
from uefl.core.memory import check_memory
from uefl.data import PARTITIONERS, SOURCES
from uefl.data.calibration_part import hold_out_calibration
from uefl.data.images import Images, resize_images, select_first_classes, select_rows, standardize_images
from uefl.data.partitioners.groups import mark_groups_of_target, partition_groups, warn_groups_of_target
from uefl.data.partitioners.leave_one_domain_out import get_named_domains
from uefl.data.partitioners.natural import parse_fold
from uefl.data.partitioners.partition import Partition
from uefl.data.public_images import fit_images, mark_public_images
from uefl.data.quality import warn_separated_copies, warn_single_class_silos
from uefl.data.shifts import NO_SHIFT, apply_shift, parse_shift
from uefl.data.sources import read_images
from uefl.data.table_config import TableConfig
from uefl.data.table_format import TableFormat, compute_sums, scale_by_sums

ALL_TARGETS = "all"  # every domain or site is left out in turn, each in a run of its own
TEST_LABEL_DISTRIBUTIONS = ("global", "silo")
_BYTES_PER_PIXEL = 4  # float32
_LEAVE_ONE_OUT = ("leave-one-domain-out", "leave-one-domain-out-paired")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which images to use and how to divide them among silos; with a seed, it determines the data of every silo."""

    name: str = setting("mnist5k", "Data set; `uefl list data` names all.")
    path: str = setting(
        "",
        "Folder, zip archive or CSV manifest to read; empty uses UEFL_DATA, the cache or a download.",
        in_run_id=False,
    )
    image_size: int = setting(
        0, "Height and width to resize images to, in pixels; 0 keeps their size.", at_least=0, at_most=4096
    )
    num_classes: int = setting(0, "Number of classes to use, in class order; 0 uses all classes.", at_least=0)
    skip_bad: bool = setting(False, "Skip and count images that cannot be read, instead of stopping at the first.")
    lazy: bool = setting(
        False,
        "Read a silo's images only while it takes part, so that memory does not grow with the number of silos; the "
        "data set `tensors` always does.",
        in_run_id=False,
    )
    strict: bool = setting(
        False, "Stop at warnings, such as silos with one class or test images in the training split.", in_run_id=False
    )

    partitioner: str = setting("domains", "Rule that divides images among silos; `uefl list partitioners` names all.")
    shifts: tuple[str, ...] = setting(
        ("rotate:0", "rotate:-50", "rotate:120"),
        "Feature shift of each domain, such as rotate:120 or noise:25+blur:1; empty uses the domains of the source.",
    )
    num_silos: tuple[int, ...] = setting(
        (3, 3, 3), "Silos per domain (leave-one-domain-out: one number for all training domains together).", at_least=1
    )
    train_per_silo: int = setting(
        440,
        "Training images per silo, including validation images (leave-one-domain-out: maximum per domain); "
        "0 uses all images.",
        at_least=0,
    )
    train_sizes: tuple[int, ...] = setting(
        (), "Training images of each silo for partitioner=domains; empty gives each train_per_silo.", at_least=1
    )
    test_per_silo: int = setting(
        110, "Test images per silo (leave-one-domain-out: of the target); 0 divides all test images.", at_least=0
    )
    test_fraction: float = setting(
        0.2,
        "Fraction of a silo's images used for testing, if the source has no test split and test_per_silo=0.",
        at_least=0,
        below=1,
    )
    fold: str = setting(
        "",
        "Fold to test with, for cross-validation with partitioner=natural: 2/5 is the second of five parts of every "
        "silo, in an order drawn by the seed; empty uses test_fraction or the split of the source.",
    )
    test_label_distribution: str = setting(
        "global", "Label distribution of a silo's test images under label skew: global (all silos) or silo (its own)."
    )
    pool_splits: bool = setting(False, "Pool the training and test split of the source before dividing the images.")
    validation_fraction: float = setting(
        0.1,
        "Fraction of a silo's training images held out for validation; every decision uses only these (D3).",
        at_least=0,
        below=1,
    )
    calibration_fraction: float = setting(
        0.0,
        "Fraction of a silo's training images held out for `uefl calibrate` and `uefl watch`; nothing else reads them.",
        at_least=0,
        below=1,
        zero="none",
        in_run_id="when changed",
    )
    # Beyond these bounds, Dirichlet draws are meaningless in double precision.
    alpha: float = setting(
        0.1,
        "Concentration α of the Dirichlet partitioners; a smaller value gives more skew.",
        at_least=1e-9,
        at_most=1e9,
    )
    classes_per_silo: int = setting(5, "Classes per silo for partitioner=pathological.", at_least=1)
    target: str = setting(
        "",
        "What leave-one-domain-out holds out: one of shifts, a domain or silo of the source, or `all` in turn.",
    )

    public_images: int = setting(
        0, "Images without labels that every silo can read, for methods that need them (FCCL); 0: none.", at_least=0
    )
    public_data: str = setting(
        "digits", "Data set of the public images; of the data set itself, no silo then gets these images."
    )
    group: str = setting(
        "",
        "Images or rows that stay together in every split, such as those of a patient: a column of a table or a CSV "
        "manifest, or a pattern (regular expression) in the paths of a folder.",
    )
    table: TableConfig = setting(default_factory=TableConfig, help_text="Meaning of the columns of a table.")

    def __post_init__(self) -> None:
        check_ranges(self)
        SOURCES.check_name(self.name)
        SOURCES.check_name(self.public_data)
        PARTITIONERS.check_name(self.partitioner)
        if self.test_label_distribution not in TEST_LABEL_DISTRIBUTIONS:
            raise unknown_value_error("test_label_distribution", self.test_label_distribution, TEST_LABEL_DISTRIBUTIONS)
        for shift in self.shifts:
            parse_shift(shift)
        if self.fold and self.partitioner != "natural":
            raise InputError(f"fold={self.fold} needs partitioner=natural, not partitioner={self.partitioner}")
        parse_fold(self.fold)
        self._check_silos()
        self._check_target()

    def _check_silos(self) -> None:
        if self.train_sizes and self.partitioner != "domains":
            raise InputError(
                f"train_sizes={self.train_sizes} needs partitioner=domains, not partitioner={self.partitioner}"
            )
        if self.train_sizes and len(self.train_sizes) != sum(self.num_silos):
            raise InputError(f"train_sizes={self.train_sizes} must have one entry per silo: {sum(self.num_silos)}")
        if self.partitioner in (*_LEAVE_ONE_OUT, "natural") or (self.partitioner == "domains" and not self.shifts):
            return  # only the source defines its domains and silos
        if not self.shifts or len(self.shifts) != len(self.num_silos):
            raise InputError(f"shifts={self.shifts} and num_silos={self.num_silos} must each have one entry per domain")

    def _check_target(self) -> None:
        if self.partitioner not in _LEAVE_ONE_OUT:
            if self.target:
                raise InputError(
                    f"target={self.target} needs partitioner={' or '.join(_LEAVE_ONE_OUT)}, not {self.partitioner}"
                )
            return
        needs_shifts = self.partitioner == "leave-one-domain-out-paired"
        if len(set(self.shifts)) != len(self.shifts) or (needs_shifts and not self.shifts):
            raise InputError(f"partitioner={self.partitioner}: shifts={self.shifts} must name every domain once")
        if len(self.num_silos) > 1:
            raise InputError(
                f"partitioner={self.partitioner}: num_silos={self.num_silos} must be one number, "
                "the silos of all training domains together"
            )
        if self.shifts and self.target not in (*self.shifts, ALL_TARGETS):
            raise unknown_value_error("target", self.target, (*self.shifts, ALL_TARGETS))

    def list_targets(self) -> list[str]:
        """Return what leave-one-domain-out can hold out: the shifts, or the domains or silos of the source."""
        return list(self.shifts) or list(get_named_domains(self.read_images())[0])

    def check_used(self, paths: Iterable[Sequence[str]]) -> None:
        """Raise an error if the user set a field, such as (table, label), that source or partitioner ignore."""
        names = {path[1] if path[0] == "table" else path[0] for path in paths}  # the third is a column's name
        is_table = SOURCES[self.name].is_table
        unused = {"image_size", "lazy"} if is_table else {field.name for field in fields(TableConfig)}
        for name in sorted(names & unused):
            kind, needed = ("a table", "images") if is_table else ("no table", "a table")
            raise InputError(f"{name} has no effect: it needs {needed}, but {self.name} is {kind}")
        for name in sorted(names & PARTITIONERS[self.partitioner].ignored_settings):
            users = [other for other in PARTITIONERS if name not in PARTITIONERS[other].ignored_settings]
            raise InputError(
                f"{name} has no effect with partitioner={self.partitioner}; it is used by {', '.join(users)}"
            )

    def load(self, seed: int, images: Images | None = None) -> tuple[list[Silo], Images]:
        """Return the silos, and the images they were made from; several seeds may share images that were read once."""
        images = images or self.read_images()
        partitions = self.make_partitions(images, seed)
        silos = self._load_silos(partitions, images, seed)
        warnings = warn_groups_of_target(self, images)
        if not self.reads_lazily(images):  # copies are found by reading all images
            warnings = warn_separated_copies(partitions, images) + warnings
        if images.table:
            table = replace(images.table, classes=images.classes)
            table = scale_by_sums(table, [compute_sums(table, silo.train.x) for silo in silos])
            silos, images = [encode_silo(silo, table) for silo in silos], replace(images, table=table)
        if self.strict and (problems := warnings + warn_single_class_silos(silos)):
            raise InputError(f"{problems[0]} (strict)")
        return silos, replace(images, warnings=(*images.warnings, *warnings))

    def read_images(self, *, show_progress: bool = True, is_one_silo: bool = False) -> Images:
        """Read the images of the chosen classes; they are resized now or after the shift, as their source declares."""
        image_size = self.image_size if SOURCES[self.name].resize_when_reading else 0
        images = read_images(
            self.name,
            self.path,
            skip_bad=self.skip_bad,
            strict=self.strict,
            image_size=image_size or None,
            show_progress=show_progress,
            table=self.table,
            group=self.group,
            is_one_silo=is_one_silo,
        )
        return select_first_classes(images, self.num_classes)

    def make_silos(self, images: Images, seed: int) -> list[Silo]:
        """Divide these images among silos; all can read the same public images. Cells of a table are not scaled yet."""
        return self._load_silos(self.make_partitions(images, seed), images, seed)

    def _load_silos(self, partitions: list[Partition], images: Images, seed: int) -> list[Silo]:
        if not images.table and not self.reads_lazily(images):
            self._check_memory(partitions, images)
        public = self.load_public_images(images, seed)
        return [self._load_silo(partition, images, seed, public) for partition in partitions]

    def _check_memory(self, partitions: list[Partition], images: Images) -> None:
        num_images = sum(len(indices) for _, *splits in partitions for indices in splits)
        channels, height, width = images.x.shape[1:]
        if self.image_size:
            height = width = self.image_size
        num_bytes = num_images * channels * height * width * _BYTES_PER_PIXEL
        check_memory(
            num_bytes, f"{num_images} images of {height}×{width} pixels", "set lazy=true or a smaller image_size"
        )

    def reads_lazily(self, images: Images) -> bool:
        """Return whether a silo's images are read only while it takes part."""
        return not images.table and (self.lazy or is_lazy(images.x))

    def make_partitions(self, images: Images, seed: int) -> list[Partition]:
        """Return the indices of every silo's images without reading pixels; no silo gets a public image."""
        is_left_out = mark_public_images(images, self.num_held_out, seed) | mark_groups_of_target(self, images)
        partition, kept = PARTITIONERS[self.partitioner].partition, select_rows(images, ~is_left_out)
        if kept.group_ids is None:
            partitions = partition(self, kept, seed)
        else:
            partitions = partition_groups(partition, self, kept, seed)
        if is_left_out.any():
            indices = (~is_left_out).nonzero()[:, 0]  # by the index among the remaining images
            partitions = [Partition(silo, *(indices[split] for split in splits)) for silo, *splits in partitions]
        return hold_out_calibration(partitions, images, self.calibration_fraction, seed)

    @property
    def num_held_out(self) -> int:
        """Number of images of the data set itself that are public."""
        return self.public_images if self.public_data == self.name else 0

    def load_public_images(self, images: Images, seed: int) -> Tensor | None:
        """Return the public images in the shape of a silo's, or None if there are none."""
        if not self.public_images:
            return None
        if images.table:
            raise InputError(f"public_images={self.public_images} needs images, but {self.name} is a table")
        shape = (*images.x.shape[1:2], *((self.image_size,) * 2 if self.image_size else images.x.shape[2:]))
        source = images
        if not self.num_held_out:
            image_size = shape[1] if SOURCES[self.public_data].resize_when_reading else None
            source = read_images(self.public_data, image_size=image_size)
        is_public = mark_public_images(source, self.public_images, seed)
        return fit_images(standardize_images(source.x[is_public], source), shape)

    def _load_silo(self, partition: Partition, images: Images, seed: int, public: Tensor | None) -> Silo:
        if images.table and partition.silo.shift != NO_SHIFT:
            raise InputError(
                f"shift '{partition.silo.shift}' needs images, but {self.name} is a table; set shifts=none"
            )

        def read_rows(indices: Tensor) -> Tensor:
            if images.table:
                return images.x[indices]
            x = apply_shift(images.x[indices], partition.silo.shift, seed, indices)
            return standardize_images(resize_images(x, self.image_size), images)

        def load_split(indices: Tensor) -> Examples:
            if not self.reads_lazily(images):
                return Examples(read_rows(indices), images.y[indices])
            size = (self.image_size,) * 2 if self.image_size else images.x.shape[2:]
            shape = (len(indices), images.x.shape[1], *size)
            x: Any = LazyTensor(lambda positions: read_rows(indices[positions]), shape, torch.float32)
            return Examples(x, images.y[indices])

        silo, *splits = partition
        train, validation, test = map(load_split, splits[:3])
        return Silo(
            *(silo.name, train, validation, test),
            domain=silo.domain,
            public=public,
            train_groups=None if images.group_ids is None else images.group_ids[partition.train],
            calibration=load_split(partition.calibration) if len(partition.calibration) else None,
        )


def encode_silo(silo: Silo, table: TableFormat) -> Silo:
    """Return the silo of a table with features in place of parsed cells."""
    return map_examples(silo, lambda examples: examples._replace(x=table.encode(examples.x)))
