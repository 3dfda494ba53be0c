import pytest
import torch
from file_factories import make_gtsrb_files, make_png, write_folder, write_zip

from uefl.core.errors import InputError
from uefl.data.sources import read_images


def test_official_archives_and_unpacked_folder_give_the_same_images(tmp_path):
    files = make_gtsrb_files()
    folder = read_images("gtsrb", str(write_folder(tmp_path / "GTSRB-open", files)))
    packed = tmp_path / "gtsrb"
    packed.mkdir()
    write_zip(packed / "GTSRB-Training_fixed.zip", {k: v for k, v in files.items() if "Training" in k})
    write_zip(packed / "GTSRB_Final_Test_Images.zip", {k: v for k, v in files.items() if "Final_Test" in k})
    write_zip(packed / "GTSRB_Final_Test_GT.zip", {"GT-final_test.csv": files["GT-final_test.csv"]})
    archives = read_images("gtsrb", str(packed))
    assert torch.equal(folder.x, archives.x)
    assert torch.equal(folder.y, archives.y)
    assert folder.x.shape == (9, 3, 32, 32)
    assert folder.classes == ("00", "01", "42")
    assert folder.is_test.sum() == 3
    assert read_images("gtsrb", str(packed), image_size=16).x.shape[-1] == 16


def test_older_folder_name_is_read_too(tmp_path):
    files = {k.replace("GTSRB/Training", "GTSRB/Final_Training/Images"): v for k, v in make_gtsrb_files().items()}
    assert len(read_images("gtsrb", str(write_folder(tmp_path, files))).y) == 9


def test_gtsrb_class_folders_are_read_too(tmp_path):
    files = {
        f"{s}/{c:02d}/{i}.png": make_png(100 * c + 10 * i + len(s))
        for s in ("train", "test")
        for c in (0, 1)
        for i in (0, 1)
    }
    assert read_images("gtsrb", str(write_zip(tmp_path / "gtsrb.zip", files))).x.shape == (8, 3, 8, 8)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b";42\n", b";43\n", "class '43' of 00002.ppm must be 0 to 42"),
        (b";42\n", b";x\n", "class 'x' of 00002.ppm must be 0 to 42"),
        (b"00002.ppm", b"00009.ppm", "image 00009.ppm does not exist"),
    ],
)
def test_invalid_csv_row_is_rejected_or_skipped(tmp_path, old, new, reason):
    files = make_gtsrb_files()
    files["GT-final_test.csv"] = files["GT-final_test.csv"].replace(old, new)
    path = str(write_folder(tmp_path, files))
    with pytest.raises(InputError, match=f"GT-final_test.csv: {reason}"):
        read_images("gtsrb", path)
    images = read_images("gtsrb", path, skip_bad=True)
    assert (images.num_skipped, len(images.y)) == (1, 8)


def test_error_names_a_missing_column_or_split(tmp_path):
    files = make_gtsrb_files()
    without_class_id = files | {"GT-final_test.csv": files["GT-final_test.csv"].replace(b"ClassId", b"Class")}
    with pytest.raises(InputError, match="no column 'Filename' or 'ClassId'"):
        read_images("gtsrb", str(write_folder(tmp_path / "a", without_class_id)))
    del files["GT-final_test.csv"]
    with pytest.raises(InputError, match="needs training images"):
        read_images("gtsrb", str(write_folder(tmp_path / "b", files)))
