import pytest
import torch
from file_factories import make_png, write_folder

from uefl.core.errors import InputError
from uefl.data.sources import read_images

FILES = {f"images/{i}.png": make_png(i) for i in range(6)}
ROWS = [f"images/{i}.png,{'cat' if i % 2 else 'dog'},{'north' if i < 3 else 'south'},train" for i in range(6)]


def write_manifest(tmp_path, rows, header="path,label,silo,split"):
    write_folder(tmp_path, FILES)
    path = tmp_path / "manifest.csv"
    path.write_text("\n".join([header, *rows]) + "\n")
    return str(path)


def test_manifest_gives_label_silo_and_split(tmp_path):
    images = read_images("folder", write_manifest(tmp_path, [*ROWS[:5], ROWS[5].replace("train", "test")]))
    assert images.classes == ("cat", "dog")
    assert images.silos == ("north", "south")
    assert images.y.tolist() == [1, 0] * 3
    assert images.silo_ids is not None
    assert images.silo_ids.tolist() == [0, 0, 0, 1, 1, 1]
    assert images.is_test.tolist() == [False] * 5 + [True]


def test_row_order_does_not_matter_and_split_is_optional(tmp_path):
    forward = read_images("folder", write_manifest(tmp_path, ROWS))
    backward = read_images(
        "folder", write_manifest(tmp_path, [r.rpartition(",")[0] for r in reversed(ROWS)], "path,label,silo")
    )
    assert torch.equal(forward.x, backward.x)
    assert torch.equal(forward.y, backward.y)


def test_changed_image_is_read_again_though_the_manifest_is_the_same(tmp_path):
    path = write_manifest(tmp_path, ROWS)
    before = read_images("folder", path)
    write_folder(tmp_path, {"images/0.png": make_png(77, (8, 8, 3))})
    assert not torch.equal(before.x[0], read_images("folder", path).x[0])


@pytest.mark.parametrize("column", ["path", "label", "silo"])
def test_error_names_the_missing_column(tmp_path, column):
    header = ",".join(c for c in ("path", "label", "silo") if c != column)
    found = header.replace(",", ", ")
    with pytest.raises(
        InputError, match=rf"no column '{column}', but {found}; .* path,label,silo\[,split\]; .*`table`"
    ):
        read_images("folder", write_manifest(tmp_path, ["a,b"], header))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("images/9.png,cat,north,train", "images/9.png: No such file"),
        ("images,cat,north,train", "images: not a regular file"),
        ("images/1.png,,north,train", "row 8: 'label' is empty"),
        ("images/1.png", "row 8: 'label' is empty"),
        ("images/1.png,cat,north,dev", "row 8: split 'dev' must be train or test"),
        ("images/1.png,cat,east,test", "silo 'east' has no training image"),
        ("images/1.png,fox,north,test", "label 'fox' does not occur in the training images"),
        ("manifest.csv,cat,north,train", "manifest.csv: manifest.csv: not an image"),
    ],
)
def test_invalid_manifest_row_is_rejected_or_skipped(tmp_path, row, reason):
    path = write_manifest(tmp_path, [*ROWS, row])
    with pytest.raises(InputError, match=reason):
        read_images("folder", path)
    images = read_images("folder", path, skip_bad=True)
    assert (images.num_skipped, len(images.y)) == (1, 6)
    assert images.silos == ("north", "south")


def test_manifest_must_be_csv_in_utf8(tmp_path):
    (tmp_path / "manifest.csv").write_bytes(b"path,label,silo\n\xff\xfe,a,b\n")
    with pytest.raises(InputError, match=r"manifest.csv: not a CSV file in UTF-8"):
        read_images("folder", str(tmp_path / "manifest.csv"))
