import pytest
import torch
from making import as_folder, as_zip, gtsrb_files, png

from uefl.data.sources import read
from uefl.errors import InputError


def test_the_official_archives_and_their_unpacked_folder_are_the_same_images(tmp_path):
    files = gtsrb_files()
    folder = read("gtsrb", str(as_folder(tmp_path / "GTSRB-open", files)))
    packed = tmp_path / "gtsrb"
    packed.mkdir()
    as_zip(packed / "GTSRB-Training_fixed.zip", {k: v for k, v in files.items() if "Training" in k})
    as_zip(packed / "GTSRB_Final_Test_Images.zip", {k: v for k, v in files.items() if "Final_Test" in k})
    as_zip(packed / "GTSRB_Final_Test_GT.zip", {"GT-final_test.csv": files["GT-final_test.csv"]})
    archives = read("gtsrb", str(packed))
    assert torch.equal(folder.x, archives.x)
    assert torch.equal(folder.y, archives.y)
    assert folder.x.shape == (9, 3, 32, 32)
    assert folder.classes == ("00", "01", "42")
    assert folder.test.sum() == 3
    assert read("gtsrb", str(packed), size=16).x.shape[-1] == 16


def test_the_older_folder_name_is_read_too(tmp_path):
    files = {k.replace("GTSRB/Training", "GTSRB/Final_Training/Images"): v for k, v in gtsrb_files().items()}
    assert len(read("gtsrb", str(as_folder(tmp_path, files))).y) == 9


def test_a_tree_will_do_as_well(tmp_path):
    files = {
        f"{s}/{c:02d}/{i}.png": png(100 * c + 10 * i + len(s))
        for s in ("train", "test")
        for c in (0, 1)
        for i in (0, 1)
    }
    assert read("gtsrb", str(as_zip(tmp_path / "gtsrb.zip", files))).x.shape == (8, 3, 8, 8)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b";42\n", b";43\n", "class '43' of 00002.ppm is not 0 to 42"),
        (b";42\n", b";x\n", "class 'x' of 00002.ppm is not 0 to 42"),
        (b"00002.ppm", b"00009.ppm", "00009.ppm is not there"),
    ],
)
def test_a_bad_row_is_named_or_skipped(tmp_path, old, new, reason):
    files = gtsrb_files()
    files["GT-final_test.csv"] = files["GT-final_test.csv"].replace(old, new)
    path = str(as_folder(tmp_path, files))
    with pytest.raises(InputError, match=f"GT-final_test.csv: {reason}"):
        read("gtsrb", path)
    images = read("gtsrb", path, skip_bad=True)
    assert (images.skipped, len(images.y)) == (1, 8)


def test_a_missing_column_or_a_missing_half_is_named(tmp_path):
    files = gtsrb_files()
    headless = files | {"GT-final_test.csv": files["GT-final_test.csv"].replace(b"ClassId", b"Class")}
    with pytest.raises(InputError, match="no column 'Filename' or 'ClassId'"):
        read("gtsrb", str(as_folder(tmp_path / "a", headless)))
    del files["GT-final_test.csv"]
    with pytest.raises(InputError, match="needs the training images"):
        read("gtsrb", str(as_folder(tmp_path / "b", files)))
