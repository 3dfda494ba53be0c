import os
import zipfile

import pytest
import torch
from making import as_folder, as_zip, encoded, pixels, png

from uefl.data.entries import WORTH_THREADS
from uefl.data.sources import read
from uefl.errors import InputError

SILOS = {f"{silo}/{c}/{i}.png": png(hash_) for hash_, (silo, c, i) in enumerate(
    (s, c, i) for s in ("north", "south") for c in ("cat", "dog") for i in range(3))}  # fmt: skip


def split(files):
    """Two thirds of each class train."""
    return {
        f"{silo}/{'test' if name[0] == '2' else 'train'}/{c}/{name}": data
        for (silo, c, name), data in ((key.split("/"), data) for key, data in files.items())
    }


def test_a_folder_and_a_zip_of_it_are_the_same_images(tmp_path):
    one = read("folder", str(as_folder(tmp_path / "tree", SILOS)))
    for number, compression in enumerate((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)):
        # Written backwards: the order in an archive must not matter.
        zipped = as_zip(tmp_path / f"{number}.zip", dict(reversed(SILOS.items())), compression)
        two = read("folder", str(zipped))
        assert torch.equal(one.x, two.x)
        assert torch.equal(one.y, two.y)
        assert one.silo is not None
        assert two.silo is not None
        assert torch.equal(one.silo, two.silo)
    assert one.silos == ("north", "south")
    assert one.classes == ("cat", "dog")
    assert not one.test.any()
    assert torch.equal(one.x[4], torch.from_numpy(pixels(4)).permute(2, 0, 1))


def test_silos_with_their_own_split(tmp_path):
    images = read("folder", str(as_folder(tmp_path, split(SILOS))))
    assert images.silos == ("north", "south")
    assert images.test.sum() == 4
    assert images.warnings == ()


def test_train_and_test_alone_are_no_silos(tmp_path):
    files = {"Train/1/a.png": png(1), "Train/10/a.png": png(2), "Train/2/a.png": png(3), "Test/10/b.png": png(4)}
    images = read("folder", str(as_folder(tmp_path, files)))
    assert images.silos == ()
    assert images.classes == ("1", "2", "10"), "numbers stand in their own order"
    assert images.test.sum() == 1


def test_pacs_has_domains_also_below_wrapping_folders(tmp_path):
    plain = read("pacs", str(as_folder(tmp_path / "a", SILOS)))
    wrapped = read("pacs", str(as_folder(tmp_path / "b", {f"PACS/kfold/{k}": v for k, v in SILOS.items()})))
    assert plain.domains == wrapped.domains == ("north", "south")
    assert plain.silo is None
    assert torch.equal(plain.x, wrapped.x)


def test_classes_alone_have_neither_silo_nor_split(tmp_path):
    images = read("folder", str(as_folder(tmp_path, {"cat/1.png": png(1), "dog/1.png": png(2)})))
    assert (images.silos, images.domains, images.classes) == ((), (), ("cat", "dog"))


def test_what_is_no_image_by_its_name_is_passed_over_and_counted(tmp_path):
    extra = {"README.txt": b"hello", ".DS_Store": b"", "north/cat/Thumbs.db": b"", "__MACOSX/cat/._1.png": b""}
    images = read("folder", str(as_folder(tmp_path, SILOS | extra)))
    assert images.notes == ("1 files passed over: not images by their name",)
    assert len(images.y) == len(SILOS)


def test_images_of_another_size_need_a_size(tmp_path):
    path = str(as_folder(tmp_path, SILOS | {"south/dog/9.png": png(99, (9, 7, 3))}))
    with pytest.raises(InputError, match=r"south/dog/9.png: 7×9 pixels where most images have 8×8; give a size"):
        read("folder", path)
    assert read("folder", path, size=6).x.shape == (13, 3, 6, 6)
    assert read("folder", path, skip_bad=True).skipped == 1


def test_the_odd_first_image_is_the_odd_one(tmp_path):
    path = str(as_folder(tmp_path, SILOS | {"north/cat/!.png": png(99, (8, 8))}))
    with pytest.raises(InputError, match=r"north/cat/!\.png: 1 channels where most images have 3"):
        read("folder", path, size=8)


def test_an_image_that_does_not_decode_is_named_or_skipped(tmp_path):
    good = encoded(pixels(5, (64, 64, 3)), "JPEG")
    files = SILOS | {"north/cat/8.png": b"not an image", "south/dog/9.jpg": good[: len(good) // 2]}
    path = str(as_zip(tmp_path / "t.zip", files))
    with pytest.raises(InputError, match=r"t\.zip: north/cat/8\.png: not an image that Pillow reads"):
        read("folder", path)
    images = read("folder", path, skip_bad=True)
    assert images.skipped == 2
    assert len(images.y) == len(SILOS)


def test_a_silo_without_image_is_refused_or_skipped(tmp_path):
    (as_folder(tmp_path, SILOS) / "west" / "cat").mkdir(parents=True)
    with pytest.raises(InputError, match="silo 'west' has no image"):
        read("folder", str(tmp_path))
    assert read("folder", str(tmp_path), skip_bad=True).skipped == 1


@pytest.mark.parametrize("name", ["/etc/cat/1.png", "../up/cat/1.png", "a/../../cat/1.png", "C:\\cat\\1.png"])
def test_a_zip_that_would_leave_its_folder_is_refused(tmp_path, name):
    path = str(as_zip(tmp_path / "evil.zip", SILOS | {name: png(50)}))
    with pytest.raises(InputError, match=r"evil.zip: member .* has an absolute path or '\.\.'"):
        read("folder", path)
    images = read("folder", path, skip_bad=True)
    assert (images.skipped, len(images.y)) == (1, len(SILOS))


def test_a_truncated_zip_is_refused(tmp_path):
    whole = as_zip(tmp_path / "t.zip", SILOS).read_bytes()
    for keep in (0, 10, len(whole) // 2, len(whole) - 10):
        (tmp_path / "t.zip").write_bytes(whole[:keep])
        with pytest.raises(InputError, match=r"t\.zip: not a zip archive, or a truncated one"):
            read("folder", str(tmp_path / "t.zip"))


def test_a_member_that_fails_its_checksum_is_named(tmp_path):
    whole = bytearray(as_zip(tmp_path / "t.zip", SILOS).read_bytes())
    whole[len("north/cat/0.png") + 30 + 60] ^= 255
    (tmp_path / "t.zip").write_bytes(whole)
    with pytest.raises(InputError, match=r"t\.zip: north/cat/0\.png: cannot be unpacked"):
        read("folder", str(tmp_path / "t.zip"))


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"val/cat/1.png": b""}, "folder 'val' stands where train and test do.*validation comes out of training"),
        ({"train/a/b/c/1.png": b""}, "train/a/b/c/1.png: 4 folders deep where most images are 2"),
        ({"1.png": b""}, "1.png: 0 folders deep where most images are 2"),
        ({"test/fox/1.png": png(77)}, "label 'fox' is outside the classes"),
    ],
)
def test_a_tree_that_is_none_says_what_stands_in_the_way(tmp_path, extra, reason):
    files = {"train/cat/1.png": png(1), "train/dog/1.png": png(2), "test/cat/2.png": png(3), "test/dog/2.png": png(4)}
    with pytest.raises(InputError, match=reason):
        read("folder", str(as_folder(tmp_path, files | extra)))


def test_silos_below_a_split_are_not_taken_for_a_wrapping_folder(tmp_path):
    path = str(as_folder(tmp_path, {f"train/{name}": data for name, data in SILOS.items()}))
    with pytest.raises(InputError, match="folder 'north' stands where train and test do"):
        read("folder", path)


def test_a_class_without_training_images_goes_when_bad_is_skipped(tmp_path):
    files = {"train/cat/1.png": png(1), "train/dog/1.png": png(2), "test/bee/2.png": png(3), "test/dog/2.png": png(4)}
    images = read("folder", str(as_folder(tmp_path, files)), skip_bad=True)
    assert images.classes == ("cat", "dog")
    assert images.y.tolist() == [1, 0, 1], "test/dog, then train/cat and train/dog"
    assert images.skipped == 1


@pytest.mark.parametrize("path", ["nowhere", "file/below", "empty", "bad\0name"])
def test_a_path_that_cannot_be_read_is_one_line(tmp_path, path):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError) as e:
        read("folder", str(tmp_path / path))
    assert "\n" not in str(e.value)
    assert path.partition("\0")[0] in str(e.value)


def test_names_cannot_write_on_the_terminal(tmp_path):
    path = str(as_zip(tmp_path / "t.zip", SILOS | {"north/cat/\x1b[2J\n.png": b"?"}))
    with pytest.raises(InputError, match=r"north/cat/\?\[2J\?\.png"):
        read("folder", path)


def test_a_terminal_sees_a_bar_whatever_the_path_is_called(tmp_path, monkeypatch, capsys):
    path = as_folder(tmp_path / "a[", {f"b]/{name}": data for name, data in SILOS.items()}) / "b]"
    assert "[/b]" in str(path)
    quiet = read("folder", str(path), progress=False)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes this for a terminal
    monkeypatch.setenv("TERM", "xterm")
    loud = read("folder", str(path), size=8)
    assert "decoding" in capsys.readouterr().err
    assert torch.equal(quiet.x, loud.x)


def test_a_folder_needs_a_path_and_a_name_must_be_known():
    with pytest.raises(InputError, match="folder needs a path"):
        read("folder")
    with pytest.raises(InputError, match="unknown data set 'imagenet'; known: mnist5k, mnist"):
        read("imagenet")


def test_large_files_decoded_in_threads_keep_their_order(tmp_path):
    files = {f"{'xy'[i % 2]}/{i:03d}.png": png(i, (90, 90, 3)) for i in range(70)}
    assert len(files["x/000.png"]) > WORTH_THREADS
    images = read("folder", str(as_zip(tmp_path / "t.zip", files)))
    for row, name in enumerate(sorted(files)):
        assert torch.equal(images.x[row], torch.from_numpy(pixels(int(name[2:5]), (90, 90, 3))).permute(2, 0, 1))


def test_a_silo_may_be_a_link_and_a_link_may_not_lead_in_circles(tmp_path):
    elsewhere = as_folder(tmp_path / "mounted", {k.partition("/")[2]: v for k, v in SILOS.items() if "south" in k})
    tree = as_folder(tmp_path / "tree", {k: v for k, v in SILOS.items() if "north" in k})
    (tree / "south").symlink_to(elsewhere)
    (tree / "north" / "again").symlink_to(tree)
    images = read("folder", str(tree))
    assert images.silos == ("north", "south")
    assert len(images.y) == len(SILOS)


def test_a_dangling_link_is_refused_or_skipped(tmp_path):
    (as_folder(tmp_path, SILOS) / "north" / "cat" / "7.png").symlink_to(tmp_path / "gone.png")
    with pytest.raises(InputError, match=r"north/cat/7\.png: No such file"):
        read("folder", str(tmp_path))
    assert read("folder", str(tmp_path), skip_bad=True).skipped == 1


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(as_folder(tmp_path, SILOS) / "north" / "cat" / "7.png")
    with pytest.raises(InputError, match="not a regular file"):
        read("folder", str(tmp_path))
    os.mkfifo(tmp_path / "pipe.zip")
    with pytest.raises(InputError, match="neither a file nor a folder"):
        read("folder", str(tmp_path / "pipe.zip"))
