import pytest
import torch
from making import as_folder, png

from uefl.data.sources import read
from uefl.errors import InputError

FILES = {f"images/{i}.png": png(i) for i in range(6)}
ROWS = [f"images/{i}.png,{'cat' if i % 2 else 'dog'},{'north' if i < 3 else 'south'},train" for i in range(6)]


def listed(tmp_path, rows, head="path,label,silo,split"):
    as_folder(tmp_path, FILES)
    path = tmp_path / "list.csv"
    path.write_text("\n".join([head, *rows]) + "\n")
    return str(path)


def test_a_list_says_label_silo_and_split(tmp_path):
    images = read("folder", listed(tmp_path, [*ROWS[:5], ROWS[5].replace("train", "test")]))
    assert images.classes == ("cat", "dog")
    assert images.silos == ("north", "south")
    assert images.y.tolist() == [1, 0] * 3
    assert images.silo is not None
    assert images.silo.tolist() == [0, 0, 0, 1, 1, 1]
    assert images.test.tolist() == [False] * 5 + [True]


def test_the_order_of_the_rows_does_not_matter_and_the_split_may_be_left_out(tmp_path):
    forth = read("folder", listed(tmp_path, ROWS))
    back = read("folder", listed(tmp_path, [r.rpartition(",")[0] for r in reversed(ROWS)], "path,label,silo"))
    assert torch.equal(forth.x, back.x)
    assert torch.equal(forth.y, back.y)


def test_a_changed_image_is_read_again_though_the_list_is_the_same(tmp_path):
    path = listed(tmp_path, ROWS)
    before = read("folder", path)
    as_folder(tmp_path, {"images/0.png": png(77, (8, 8, 3))})
    assert not torch.equal(before.x[0], read("folder", path).x[0])


@pytest.mark.parametrize("column", ["path", "label", "silo"])
def test_a_missing_column_is_named(tmp_path, column):
    head = ",".join(c for c in ("path", "label", "silo") if c != column)
    with pytest.raises(InputError, match=rf"list.csv: no column '{column}'; a list has path,label,silo\[,split\]"):
        read("folder", listed(tmp_path, ["a,b"], head))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("images/9.png,cat,north,train", "images/9.png: No such file"),
        ("images,cat,north,train", "images: not a regular file"),
        ("images/1.png,,north,train", "row 8: 'label' is empty"),
        ("images/1.png", "row 8: 'label' is empty"),
        ("images/1.png,cat,north,dev", "row 8: split 'dev' is neither train nor test"),
        ("images/1.png,cat,east,test", "silo 'east' has no training image"),
        ("images/1.png,fox,north,test", "label 'fox' is outside the classes"),
        ("list.csv,cat,north,train", "list.csv: list.csv: not an image"),
    ],
)
def test_a_bad_row_is_named_or_skipped(tmp_path, row, reason):
    path = listed(tmp_path, [*ROWS, row])
    with pytest.raises(InputError, match=reason):
        read("folder", path)
    images = read("folder", path, skip_bad=True)
    assert (images.skipped, len(images.y)) == (1, 6)
    assert images.silos == ("north", "south")


def test_bytes_that_are_no_csv(tmp_path):
    (tmp_path / "list.csv").write_bytes(b"path,label,silo\n\xff\xfe,a,b\n")
    with pytest.raises(InputError, match=r"list.csv: not a CSV file in UTF-8"):
        read("folder", str(tmp_path / "list.csv"))
