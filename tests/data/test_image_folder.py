import os
import zipfile

import pytest
import torch
from file_factories import encode_image, make_pixels, make_png, write_folder, write_zip

from uefl.core.errors import InputError
from uefl.data.readers.labeled_files import MIN_BYTES_FOR_THREADS
from uefl.data.sources import read_images

SILOS = {f"{silo}/{c}/{i}.png": make_png(seed) for seed, (silo, c, i) in enumerate(
    (s, c, i) for s in ("north", "south") for c in ("cat", "dog") for i in range(3))}  # fmt: skip


def add_split(files):
    """Put two thirds of each class into train and one third into test."""
    return {
        f"{silo}/{'test' if name[0] == '2' else 'train'}/{c}/{name}": data
        for (silo, c, name), data in ((key.split("/"), data) for key, data in files.items())
    }


def test_folder_and_zip_archive_give_the_same_images(tmp_path):
    unpacked = read_images("folder", str(write_folder(tmp_path / "folder", SILOS)))
    for number, compression in enumerate((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)):
        # In reverse: the order in an archive must not matter.
        path = write_zip(tmp_path / f"{number}.zip", dict(reversed(SILOS.items())), compression)
        zipped = read_images("folder", str(path))
        assert torch.equal(unpacked.x, zipped.x)
        assert torch.equal(unpacked.y, zipped.y)
        assert unpacked.silo_ids is not None
        assert zipped.silo_ids is not None
        assert torch.equal(unpacked.silo_ids, zipped.silo_ids)
    assert unpacked.silos == ("north", "south")
    assert unpacked.classes == ("cat", "dog")
    assert not unpacked.is_test.any()
    assert torch.equal(unpacked.x[4], torch.from_numpy(make_pixels(4)).permute(2, 0, 1))


def test_silos_with_a_split_each(tmp_path):
    images = read_images("folder", str(write_folder(tmp_path, add_split(SILOS))))
    assert images.silos == ("north", "south")
    assert images.is_test.sum() == 4
    assert images.warnings == ()


def test_train_and_test_folders_are_not_silos(tmp_path):
    files = {
        "Train/1/a.png": make_png(1),
        "Train/10/a.png": make_png(2),
        "Train/2/a.png": make_png(3),
        "Test/10/b.png": make_png(4),
    }
    images = read_images("folder", str(write_folder(tmp_path, files)))
    assert images.silos == ()
    assert images.classes == ("1", "2", "10"), "numbers are sorted by value"
    assert images.is_test.sum() == 1


def test_pacs_has_domains_also_below_wrapping_folders(tmp_path):
    unwrapped = read_images("pacs", str(write_folder(tmp_path / "a", SILOS)))
    wrapped = read_images("pacs", str(write_folder(tmp_path / "b", {f"PACS/kfold/{k}": v for k, v in SILOS.items()})))
    assert unwrapped.domains == wrapped.domains == ("north", "south")
    assert unwrapped.silo_ids is None
    assert torch.equal(unwrapped.x, wrapped.x)


def test_class_folders_have_neither_silo_nor_split(tmp_path):
    images = read_images("folder", str(write_folder(tmp_path, {"cat/1.png": make_png(1), "dog/1.png": make_png(2)})))
    assert (images.silos, images.domains, images.classes) == ((), (), ("cat", "dog"))


def test_files_that_are_no_images_by_name_are_skipped_and_counted(tmp_path):
    extra = {"README.txt": b"hello", ".DS_Store": b"", "north/cat/Thumbs.db": b"", "__MACOSX/cat/._1.png": b""}
    images = read_images("folder", str(write_folder(tmp_path, SILOS | extra)))
    assert images.notes == ("1 files skipped: no image by their name",)
    assert len(images.y) == len(SILOS)


def test_images_of_different_sizes_need_image_size(tmp_path):
    path = str(write_folder(tmp_path, SILOS | {"south/dog/9.png": make_png(99, (9, 7, 3))}))
    with pytest.raises(InputError, match=r"south/dog/9.png: 7×9 pixels, but most images have 8×8; set image_size"):
        read_images("folder", path)
    assert read_images("folder", path, image_size=6).x.shape == (13, 3, 6, 6)
    assert read_images("folder", path, skip_bad=True).num_skipped == 1


def test_deviating_first_image_is_the_one_reported(tmp_path):
    path = str(write_folder(tmp_path, SILOS | {"north/cat/!.png": make_png(99, (8, 8))}))
    with pytest.raises(InputError, match=r"north/cat/!\.png: 1 channels, but most images have 3"):
        read_images("folder", path, image_size=8)


def test_image_that_cannot_be_decoded_is_rejected_or_skipped(tmp_path):
    good = encode_image(make_pixels(5, (64, 64, 3)), "JPEG")
    files = SILOS | {"north/cat/8.png": b"not an image", "south/dog/9.jpg": good[: len(good) // 2]}
    path = str(write_zip(tmp_path / "t.zip", files))
    reason = r"t\.zip: north/cat/8\.png: not an image format that Pillow supports"
    with pytest.raises(InputError, match=f"{reason}; --skip-bad skips such files$"):
        read_images("folder", path)
    images = read_images("folder", path, skip_bad=True)
    assert images.num_skipped == 2
    assert "--skip-bad" not in " ".join(images.notes)
    assert len(images.y) == len(SILOS)


def test_silo_without_images_is_rejected_or_skipped(tmp_path):
    (write_folder(tmp_path, SILOS) / "west" / "cat").mkdir(parents=True)
    with pytest.raises(InputError, match="silo 'west' has no image"):
        read_images("folder", str(tmp_path))
    assert read_images("folder", str(tmp_path), skip_bad=True).num_skipped == 1


@pytest.mark.parametrize("name", ["/etc/cat/1.png", "../up/cat/1.png", "a/../../cat/1.png", "C:\\cat\\1.png"])
def test_zip_member_outside_the_archive_is_rejected_or_skipped(tmp_path, name):
    path = str(write_zip(tmp_path / "outside.zip", SILOS | {name: make_png(50)}))
    with pytest.raises(InputError, match=r"outside.zip: member .* has an absolute path or '\.\.'"):
        read_images("folder", path)
    images = read_images("folder", path, skip_bad=True)
    assert (images.num_skipped, len(images.y)) == (1, len(SILOS))


def test_truncated_zip_is_rejected(tmp_path):
    archive = write_zip(tmp_path / "t.zip", SILOS).read_bytes()
    for keep in (0, 10, len(archive) // 2, len(archive) - 10):
        (tmp_path / "t.zip").write_bytes(archive[:keep])
        with pytest.raises(InputError, match=r"t\.zip: not a zip archive, or truncated"):
            read_images("folder", str(tmp_path / "t.zip"))


def test_error_names_a_zip_member_with_a_wrong_checksum(tmp_path):
    archive = bytearray(write_zip(tmp_path / "t.zip", SILOS).read_bytes())
    archive[len("north/cat/0.png") + 30 + 60] ^= 255
    (tmp_path / "t.zip").write_bytes(archive)
    with pytest.raises(InputError, match=r"t\.zip: north/cat/0\.png: cannot be unpacked"):
        read_images("folder", str(tmp_path / "t.zip"))


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (
            {"val/cat/1.png": b""},
            "unexpected folder 'val' beside train and test.*validation images are taken from the training images",
        ),
        ({"train/a/b/c/1.png": b""}, "train/a/b/c/1.png: 4 folders deep, but most images are 2"),
        ({"1.png": b""}, "1.png: 0 folders deep, but most images are 2"),
        ({"test/fox/1.png": make_png(77)}, "label 'fox' does not occur in the training images"),
    ],
)
def test_unsupported_layout_is_rejected_with_the_reason(tmp_path, extra, reason):
    files = {
        "train/cat/1.png": make_png(1),
        "train/dog/1.png": make_png(2),
        "test/cat/2.png": make_png(3),
        "test/dog/2.png": make_png(4),
    }
    with pytest.raises(InputError, match=reason):
        read_images("folder", str(write_folder(tmp_path, files | extra)))


def test_split_folder_is_not_a_wrapping_folder(tmp_path):
    path = str(write_folder(tmp_path, {f"train/{name}": data for name, data in SILOS.items()}))
    with pytest.raises(InputError, match="unexpected folder 'north' beside train and test"):
        read_images("folder", path)


def test_skip_bad_drops_classes_without_training_images(tmp_path):
    files = {
        "train/cat/1.png": make_png(1),
        "train/dog/1.png": make_png(2),
        "test/bee/2.png": make_png(3),
        "test/dog/2.png": make_png(4),
    }
    images = read_images("folder", str(write_folder(tmp_path, files)), skip_bad=True)
    assert images.classes == ("cat", "dog")
    assert images.y.tolist() == [1, 0, 1], "test/dog, then train/cat and train/dog"
    assert images.num_skipped == 1


@pytest.mark.parametrize("path", ["nowhere", "file/below", "empty", "bad\0name"])
def test_unreadable_path_is_an_error_of_one_line(tmp_path, path):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError) as e:
        read_images("folder", str(tmp_path / path))
    assert "\n" not in str(e.value)
    assert path.partition("\0")[0] in str(e.value)


def test_control_characters_in_names_are_not_printed(tmp_path):
    path = str(write_zip(tmp_path / "t.zip", SILOS | {"north/cat/\x1b[2J\n.png": b"?"}))
    with pytest.raises(InputError, match=r"north/cat/\?\[2J\?\.png"):
        read_images("folder", path)


def test_progress_bar_is_shown_for_any_path(tmp_path, monkeypatch, capsys):
    path = write_folder(tmp_path / "a[", {f"b]/{name}": data for name, data in SILOS.items()}) / "b]"
    assert "[/b]" in str(path)
    without_bar = read_images("folder", str(path), show_progress=False)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then assumes a terminal
    monkeypatch.setenv("TERM", "xterm")
    with_bar = read_images("folder", str(path), image_size=8)
    assert "decoding" in capsys.readouterr().err
    assert torch.equal(without_bar.x, with_bar.x)


def test_folder_needs_a_path_and_unknown_names_are_rejected():
    with pytest.raises(InputError, match="folder needs a path"):
        read_images("folder")
    with pytest.raises(InputError, match="unknown data set 'imagenet'; known: mnist5k, digits, heart, mnist"):
        read_images("imagenet")


def test_files_decoded_in_threads_keep_their_order(tmp_path):
    files = {f"{'xy'[i % 2]}/{i:03d}.png": make_png(i, (90, 90, 3)) for i in range(70)}
    assert len(files["x/000.png"]) > MIN_BYTES_FOR_THREADS
    images = read_images("folder", str(write_zip(tmp_path / "t.zip", files)))
    for row, name in enumerate(sorted(files)):
        assert torch.equal(images.x[row], torch.from_numpy(make_pixels(int(name[2:5]), (90, 90, 3))).permute(2, 0, 1))


def test_links_to_folders_are_followed_without_loops(tmp_path):
    mounted = write_folder(tmp_path / "mounted", {k.partition("/")[2]: v for k, v in SILOS.items() if "south" in k})
    folder = write_folder(tmp_path / "folder", {k: v for k, v in SILOS.items() if "north" in k})
    (folder / "south").symlink_to(mounted)
    (folder / "north" / "again").symlink_to(folder)
    images = read_images("folder", str(folder))
    assert images.silos == ("north", "south")
    assert len(images.y) == len(SILOS)


def test_dangling_link_is_rejected_or_skipped(tmp_path):
    (write_folder(tmp_path, SILOS) / "north" / "cat" / "7.png").symlink_to(tmp_path / "gunpacked.png")
    with pytest.raises(InputError, match=r"north/cat/7\.png: No such file"):
        read_images("folder", str(tmp_path))
    assert read_images("folder", str(tmp_path), skip_bad=True).num_skipped == 1


def test_pipes_are_rejected(tmp_path):
    os.mkfifo(write_folder(tmp_path, SILOS) / "north" / "cat" / "7.png")
    with pytest.raises(InputError, match="not a regular file"):
        read_images("folder", str(tmp_path))
    os.mkfifo(tmp_path / "pipe.zip")
    with pytest.raises(InputError, match="neither a file nor a folder"):
        read_images("folder", str(tmp_path / "pipe.zip"))
