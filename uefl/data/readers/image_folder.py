"""Read images in a folder or a zip archive whose folder names give the class, the split and the silo or domain.

<class>/…                        no silo, no split
train/<class>/… test/<class>/…   a split
<silo>/<class>/…                 silos, or domains as in PACS
<silo>/{train,test}/<class>/…    silos with a split each
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from uefl.core.errors import InputError
from uefl.data.images import Images
from uefl.data.readers.archives import Files, open_files
from uefl.data.readers.context import ReadContext
from uefl.data.readers.decode import SUFFIXES
from uefl.data.readers.labeled_files import LabeledFile, decode_files
from uefl.data.readers.manifest import read_manifest
from uefl.data.sources import Source

SPLIT_FOLDERS = {"train": False, "test": True}
LAYOUTS = "<class>/, {train,test}/<class>/, <silo>/<class>/ or <silo>/{train,test}/<class>/"


def read_image_folder(name: str, path: Path, context: ReadContext, *, owner_kind: str = "silo") -> Images:
    """Read images below a path, skipping folders that wrap all of them; `owner_kind` is "silo", "domain" or ""."""
    return read_image_files(name, open_files(path, context), context, owner_kind=owner_kind)


def read_image_files(name: str, files: Files, context: ReadContext, *, owner_kind: str = "silo") -> Images:
    """Read images from a folder or archive that is already open."""
    image_paths = [path for path in files.names if PurePosixPath(path).suffix.lower() in SUFFIXES]
    if len(image_paths) < len(files.names):
        context.note_counts["files skipped: no image by their name"] = len(files.names) - len(image_paths)
    if not image_paths:
        raise InputError(f"{files.display_path}: no images found; supported layouts: {LAYOUTS}")
    folders = {path: PurePosixPath(path).parts[:-1] for path in image_paths}
    num_wrapping = _count_wrapping_folders(list(folders.values()), owner_kind)
    labeled_files = _list_files(files, {path: parts[num_wrapping:] for path, parts in folders.items()}, context)
    if any(file.owner for file in labeled_files):
        _reject_empty_silos(files, labeled_files, num_wrapping, context)
        return decode_files(name, files, labeled_files, context, owner_kind=owner_kind or "silo")
    return decode_files(name, files, labeled_files, context)


def _count_wrapping_folders(folders: Sequence[tuple[str, ...]], owner_kind: str) -> int:
    """Return how many folders all images share before the layout begins."""
    num_wrapping = 0
    while True:
        inner = [parts[num_wrapping:] for parts in folders]
        is_shared = len({parts[:1] for parts in inner}) == 1
        depth = min(len(parts) for parts in inner)
        if not is_shared or depth < 2 or inner[0][0].lower() in SPLIT_FOLDERS:
            return num_wrapping
        split_is_next = all(parts[1].lower() in SPLIT_FOLDERS for parts in inner)
        if depth == 2 or (depth == 3 and split_is_next and owner_kind):
            return num_wrapping  # the folder of a single silo or domain
        num_wrapping += 1


def _list_files(files: Files, folders: dict[str, tuple[str, ...]], context: ReadContext) -> list[LabeledFile]:
    depth = Counter(len(parts) for parts in folders.values()).most_common(1)[0][0]
    split_level = _find_split_level(files, [parts for parts in folders.values() if len(parts) == depth], depth)
    labeled_files = []
    for path, parts in folders.items():
        if len(parts) != depth:
            context.skip_or_raise(
                f"{files.display_path}: {path}: {len(parts)} folders deep, but most images are {depth} folders deep"
            )
            continue
        is_test = split_level is not None and SPLIT_FOLDERS[parts[split_level].lower()]
        owner = "" if depth == 1 or split_level == 0 else parts[0]
        group = find_group(path, context)
        if context.group and not group:
            context.skip_or_raise(f"{files.display_path}: {path}: group={context.group} matches no part of this path")
            continue
        labeled_files.append(LabeledFile(path, parts[-1], is_test, owner, group))
    return labeled_files


def find_group(path: str, context: ReadContext) -> str:
    """Return the part of a path that the pattern of `group` matches, or an empty text."""
    if not context.group:
        return ""
    try:
        match = re.search(context.group, path)
    except re.error as e:
        raise InputError(f"group={context.group} is not a pattern (regular expression): {e}") from None
    return match[0] if match else ""


def _find_split_level(files: Files, folders: Sequence[tuple[str, ...]], depth: int) -> int | None:
    """Return which folder level is train or test, if any."""
    if depth not in (1, 2, 3):
        raise InputError(f"{files.display_path}: images are {depth} folders deep; supported layouts: {LAYOUTS}")
    if depth == 1:
        return None
    level = depth - 2
    names = {parts[level] for parts in folders}
    unexpected = sorted(name for name in names if name.lower() not in SPLIT_FOLDERS)
    if not unexpected:
        return level
    if depth == 3 or len(unexpected) < len(names):
        raise InputError(
            f"{files.display_path}: unexpected folder '{unexpected[0]}' beside train and test; supported layouts: "
            f"{LAYOUTS}; validation images are taken from the training images"
        )
    return None


def _reject_empty_silos(
    files: Files, labeled_files: Sequence[LabeledFile], num_wrapping: int, context: ReadContext
) -> None:
    """Skip or reject the folder of a silo that contains no image."""
    owners = {file.owner for file in labeled_files}
    wrapping_parts = PurePosixPath(labeled_files[0].path).parts[:num_wrapping]
    for folder in files.folders:
        parts = PurePosixPath(folder).parts
        if len(parts) == num_wrapping + 1 and parts[:-1] == wrapping_parts and parts[-1] not in owners:
            context.skip_or_raise(f"{files.display_path}: silo '{parts[-1]}' has no image")


def read_pacs(path: Path, context: ReadContext) -> Images:
    """Read seven classes of objects in four domains."""
    return read_image_folder("pacs", path, context, owner_kind="domain")


def read_user_images(path: Path, context: ReadContext) -> Images:
    """Read the user's folder, zip archive or CSV manifest."""
    reader = read_manifest if path.suffix.lower() == ".csv" else read_image_folder
    return reader("folder", path, context)


PACS = Source(
    reader=read_pacs,
    relative_paths=("pacs", "PACS", "PACS.zip", "pacs.zip"),
    mean=(0.485, 0.456, 0.406),  # of ImageNet
    std=(0.229, 0.224, 0.225),
    resize_when_reading=True,
    default_settings={"partitioner": "leave-one-domain-out", "train_per_silo": 0, "test_per_silo": 0},
    default_target="sketch",
)
FOLDER = Source(reader=read_user_images, resize_when_reading=True)
