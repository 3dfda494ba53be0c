import pytest
from making import as_folder, png

from uefl.data.sources import read
from uefl.errors import InputError

FILES = {f"{s}/{p}/{c}/1.png": png(n) for n, (s, p, c) in enumerate(
    (s, p, c) for s in ("a", "b") for p in ("train", "test") for c in ("x", "y"))}  # fmt: skip


def test_nothing_odd_passes_the_strict(tmp_path):
    assert read("folder", str(as_folder(tmp_path, FILES)), strict=True).warnings == ()


def test_a_silo_of_one_class_is_a_warning_that_the_strict_refuse(tmp_path):
    path = str(as_folder(tmp_path, FILES | {f"c/train/x/{i}.png": png(50 + i) for i in range(3)}))
    assert read("folder", path).warnings == ("1 silos train with one class only: c",)
    with pytest.raises(InputError, match=r"1 silos train with one class only: c \(strict\)"):
        read("folder", path, strict=True)


def test_copies_across_train_and_test_are_counted_also_between_silos(tmp_path):
    copies = {"a/test/x/2.png": FILES["a/train/x/1.png"], "b/test/y/2.png": FILES["a/train/x/1.png"]}
    path = str(as_folder(tmp_path, FILES | copies))
    assert read("folder", path).warnings == ("2 test images also stand in training",)
    assert read("folder", path).warnings == ("2 test images also stand in training",), "the cache remembers"
    with pytest.raises(InputError, match="strict"):
        read("folder", path, strict=True)


def test_copies_within_training_are_no_warning(tmp_path):
    path = str(as_folder(tmp_path, FILES | {"b/train/x/2.png": FILES["a/train/x/1.png"]}))
    assert read("folder", path).warnings == ()


def test_a_silo_that_only_tests_is_refused_or_skipped(tmp_path):
    path = str(as_folder(tmp_path, FILES | {"c/test/x/1.png": png(70)}))
    with pytest.raises(InputError, match="silo 'c' has no training image"):
        read("folder", path)
    images = read("folder", path, skip_bad=True)
    assert images.silos == ("a", "b")
    assert len(images.y) == len(FILES)


def test_only_test_images_are_never_enough(tmp_path):
    path = str(as_folder(tmp_path, {"test/x/1.png": png(1), "test/y/1.png": png(2)}))
    for skip in (False, True):
        with pytest.raises(InputError, match="no training image"):
            read("folder", path, skip_bad=skip)


def test_every_source_has_a_mean_and_a_deviation_for_each_channel(tmp_path):
    grey = read("folder", str(as_folder(tmp_path / "g", {"a/1.png": png(1, (8, 8)), "b/1.png": png(2, (8, 8))})))
    colour = read("folder", str(as_folder(tmp_path / "c", {"a/1.png": png(1), "b/1.png": png(2)})))
    assert (grey.mean, grey.std) == ((0.5,), (0.25,))
    assert (colour.mean, colour.std) == ((0.5,) * 3, (0.25,) * 3)
