"""Read German traffic signs: the official folders of PPM images with their CSV files, or {train,test}/<class>/.

Images are resized to 32×32 with the margin of about a tenth that the official images have around the sign. The CSV
files also give the box of the sign (Roi); the images are not cropped to it, as in the folders that others publish.
"""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace
from pathlib import Path, PurePosixPath

from uefl.core.errors import InputError
from uefl.core.fetch import RemoteFile
from uefl.data.images import Images
from uefl.data.readers.archives import Files, Folder, ZipArchive, open_files
from uefl.data.readers.context import ReadContext
from uefl.data.readers.image_folder import find_group, read_image_files
from uefl.data.readers.labeled_files import LabeledFile, decode_files
from uefl.data.sources import PAPER_SIZES, Source

IMAGE_SIZE = 32
CLASS_IDS = {"": 0} | {str(c): c for c in range(1, 43)}  # by their digits without leading zeros
TRAINING_CSV = re.compile(r"(^|/)(Training|Final_Training/Images)/\d{5}/GT-\d{5}\.csv$")
TRACK = "track"  # value of `group`: shots of one physical sign
# 00003_00012.ppm is shot 12 of track 3 of its class. Test images have no tracks: each is a group of its own.
TRACK_NAME = re.compile(r"_\d+\.\w+$")
TRACK_PATTERN = r"^.*(?=_\d+\.\w+$)|^.*$"
TEST_CSV = re.compile(r"(^|/)GT-final_test\.csv$")


class CombinedFiles:
    """The official archives of one folder, presented as one folder."""

    def __init__(self, display_path: str, parts: list[Files]) -> None:
        self.display_path = display_path
        self._files_by_name = {name: part for part in parts for name in part.names}
        self.names = sorted(self._files_by_name)
        self.folders: list[str] = []

    def read(self, name: str) -> bytes:
        return self._files_by_name[name].read(name)

    def size(self, name: str) -> int:
        return self._files_by_name[name].size(name)


def read_gtsrb(path: Path, context: ReadContext) -> Images:
    """Read 43 classes of traffic signs in color."""
    files = open_files(path, context)
    archives = [n for n in files.names if n.endswith(".zip") and "/" not in n] if isinstance(files, Folder) else []
    if archives:
        files = CombinedFiles(files.display_path, [ZipArchive(path / n, context) for n in archives])
    if not any(TRAINING_CSV.search(n) or TEST_CSV.search(n) for n in files.names):
        return read_image_files("gtsrb", files, _use_tracks(files, context), owner_kind="")
    context = replace(context, image_size=context.image_size or IMAGE_SIZE)  # shares its counts with the original
    context = _use_tracks(files, context)
    labeled_files = [file._replace(group=find_group(file.path, context)) for file in _list_files(files, context)]
    return decode_files("gtsrb", files, labeled_files, context)


def _use_tracks(files: Files, context: ReadContext) -> ReadContext:
    """Replace `group=track` by a pattern; a copy of the data whose file names give no tracks has no groups."""
    if context.group != TRACK:
        return context
    has_tracks = any(TRACK_NAME.search(name) for name in files.names)
    return replace(context, group=TRACK_PATTERN if has_tracks else "")


def _list_files(files: Files, context: ReadContext) -> list[LabeledFile]:
    labeled_files: list[LabeledFile] = []
    for csv_name in files.names:
        is_test = bool(TEST_CSV.search(csv_name))
        if is_test or TRAINING_CSV.search(csv_name):
            labeled_files += _parse_csv(files, csv_name, context, is_test=is_test)
    if {file.is_test for file in labeled_files} != {False, True}:
        raise InputError(
            f"{files.display_path}: needs training images with GT-<class>.csv and test images with GT-final_test.csv"
        )
    return sorted(labeled_files)


def _parse_csv(files: Files, csv_name: str, context: ReadContext, *, is_test: bool) -> list[LabeledFile]:
    """List the images of one CSV file; test images are in Final_Test/Images, wherever their CSV file is."""
    display_path = f"{files.display_path}: {csv_name}"
    paths = {
        PurePosixPath(name).name: name
        for name in files.names
        if name.endswith(".ppm") and _is_listed_image(name, csv_name, is_test=is_test)
    }
    try:
        rows = list(csv.DictReader(io.StringIO(files.read(csv_name).decode("utf-8-sig")), delimiter=";", strict=True))
    except (csv.Error, UnicodeDecodeError) as e:
        raise InputError(f"{display_path}: not a CSV file in UTF-8 ({e})") from e
    labeled_files = []
    for row in rows:
        file_name, label = row.get("Filename"), row.get("ClassId")
        if file_name is None or label is None:
            raise InputError(f"{display_path}: no column 'Filename' or 'ClassId'")
        if label.lstrip("0") not in CLASS_IDS:
            context.skip_or_raise(f"{display_path}: class '{label}' of {file_name} must be 0 to 42")
        elif file_name not in paths:
            context.skip_or_raise(f"{display_path}: image {file_name} does not exist")
        else:
            labeled_files.append(LabeledFile(paths[file_name], f"{CLASS_IDS[label.lstrip('0')]:02d}", is_test))
    return labeled_files


def _is_listed_image(name: str, csv_name: str, *, is_test: bool) -> bool:
    folder = PurePosixPath(name).parent
    return folder.parts[-2:] == ("Final_Test", "Images") if is_test else folder == PurePosixPath(csv_name).parent


_BASE_URL = "https://sid.erda.dk/public/archives/daaeac0d7ce1152aea9b61d9f1e19370/"

GTSRB = Source(
    reader=read_gtsrb,
    relative_paths=("gtsrb", "GTSRB", "gtsrb.zip"),
    remote_files=(
        RemoteFile(_BASE_URL + "GTSRB-Training_fixed.zip", "513f3c79a4c5141765e10e952eaa2478"),
        RemoteFile(_BASE_URL + "GTSRB_Final_Test_Images.zip", "c7e4e6327067d32654124b0fe9e82185"),
        RemoteFile(_BASE_URL + "GTSRB_Final_Test_GT.zip", "fe31e9c9270bbcd7b84b7f21a9d9d9e5"),
    ),
    mean=(0.3403, 0.3121, 0.3214),
    std=(0.2724, 0.2608, 0.2669),
    default_settings={**PAPER_SIZES, "group": TRACK},
)
