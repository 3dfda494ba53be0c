"""Read the images of a data set: from the user's path, a known folder or a download, decoded once and then cached."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from uefl.core.errors import InputError
from uefl.core.fetch import RemoteFile
from uefl.core.paths import find_data, get_cache_folder
from uefl.data import SOURCES, cache
from uefl.data.dataset_download import download_dataset
from uefl.data.images import Images, resize_images
from uefl.data.quality import check_images
from uefl.data.readers.context import ReadContext, sanitize_line
from uefl.data.readers.manifest import list_file_stamps
from uefl.data.table_config import TableConfig

Reader = Callable[[Path, ReadContext], Images]
PAPER_SIZES: dict[str, Any] = {"train_per_silo": 2000, "test_per_silo": 500}  # nine silos: three per rotation


@dataclass(frozen=True, kw_only=True)
class Source:
    """A data set: how its files are found and read, its standardization constants and its default settings."""

    reader: Reader
    is_table: bool = False  # rows of a table instead of images: nothing to resize, nothing to cache
    path_kind: str = "folder, zip archive or CSV manifest"  # what `path` may be
    is_mapped: bool = False  # the pixels stay in the file of the source: nothing to decode, nothing to cache
    is_embedded: bool = False  # the data ship inside a package: no path, no download
    package: str = ""  # the dependency that ships embedded images; a cached file belongs to one version of it
    relative_paths: tuple[str, ...] = ()  # relative to UEFL_DATA and the cache folder, in order of preference
    system_paths: tuple[str, ...] = ()
    remote_files: tuple[RemoteFile, ...] = ()
    mean: tuple[float, ...] = (0.5,)  # per channel, of pixels in [0, 1]; a single value applies to every channel
    std: tuple[float, ...] = (0.25,)
    # Images of different sizes must be resized as they are read; others are resized after the shift, which then acts on
    # the original pixels.
    resize_when_reading: bool = False
    default_settings: Mapping[str, Any] = field(default_factory=lambda: {"partitioner": "natural"})  # of DataConfig
    default_target: str = ""  # for a source with domains of its own: the one that leave-one-domain-out holds out


def read_images(
    name: str,
    path: str = "",
    *,
    skip_bad: bool = False,
    strict: bool = False,
    image_size: int | None = None,
    show_progress: bool = True,
    table: TableConfig | None = None,
    group: str = "",
    is_one_silo: bool = False,
) -> Images:
    """Return the images of a data set; they are decoded once and then mapped from the cache.

    `strict` turns warnings into an error. A source of one silo among others need not have all labels.
    """
    if image_size is not None and image_size < 1:
        raise InputError(f"image_size={image_size} must be at least 1")
    try:
        context = ReadContext(image_size, skip_bad, show_progress, table or TableConfig(), group, is_one_silo)
        images = _read_source(name, SOURCES[name], path, context)
    except InputError as e:
        raise InputError(sanitize_line(str(e))) from e
    if strict and images.warnings:
        raise InputError(f"{path or name}: {images.warnings[0]} (strict)")
    if images.table or not image_size:
        return images
    return replace(images, x=resize_images(images.x, image_size))


def _read_source(name: str, source: Source, path: str, context: ReadContext) -> Images:
    if source.is_embedded:
        if path:
            raise InputError(f"path={path} has no effect: {name} is embedded; use the data set folder for own images")
        images = _read_embedded(name, source, context)
    else:
        path_found = _locate_source(name, source, path, context.show_progress)
        if source.is_table:
            return source.reader(path_found, context)
        images = (
            source.reader(path_found, context)
            if source.is_mapped
            else _read_cached(name, source.reader, path_found, context)
        )
    if images.table:
        return images
    return replace(images, mean=_repeat_per_channel(source.mean, images), std=_repeat_per_channel(source.std, images))


def _locate_source(name: str, source: Source, path: str, show_progress: bool) -> Path:
    """Return the user's path, else the first known path that exists, else the folder of a new download."""
    if path:
        return Path(os.path.expanduser(path))
    if not source.relative_paths:
        raise InputError(f"{name} needs a path: set path=<{source.path_kind}>")
    if existing_path := find_data(source.relative_paths, source.system_paths):
        return existing_path
    folder = get_cache_folder()
    if not source.remote_files:
        raise InputError(f"{name} cannot be downloaded automatically; put {source.relative_paths[-1]} into {folder}")
    return download_dataset(name, source.remote_files, folder / name, show_progress=show_progress)


def _read_cached(name: str, reader: Reader, path: Path, context: ReadContext) -> Images:
    file_stamps = list_file_stamps(path) if path.suffix.lower() == ".csv" else ()
    key = cache.hash_content(path, name, context.image_size, context.skip_bad, *file_stamps, *_list_group(context))
    return _load_or_decode(f"{name}-{key}", lambda: check_images(reader(path, context), context))


def _read_embedded(name: str, source: Source, context: ReadContext) -> Images:
    """Read data that ship inside a package; images are cached, since some packages hold them as text."""
    if source.is_table:
        return source.reader(Path(), context)
    key = f"{name}-{source.package}-{version(source.package)}-{cache.DECODER_VERSION}"
    return _load_or_decode(key, lambda: source.reader(Path(), context))


def _load_or_decode(key: str, decode: Callable[[], Images]) -> Images:
    """Return the images of a cached file, or decode and store them."""
    file = get_cache_folder() / "decoded" / f"{key}.safetensors"
    images = cache.load(file)
    if images is None:
        images = decode()
        with suppress(OSError, SafetensorError):  # a full or read-only disk only means decoding again next time
            cache.store(images, file)
    return images


def _list_group(context: ReadContext) -> tuple[str, ...]:
    """Return what a group adds to the key of a cached file; files cached without groups keep their key."""
    return (f"group {context.group}",) if context.group else ()


def _repeat_per_channel(constants: tuple[float, ...], images: Images) -> tuple[float, ...]:
    num_channels = images.x.shape[1]
    return constants if len(constants) == num_channels else constants[:1] * num_channels
