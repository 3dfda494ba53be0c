import pytest
import torch
from file_factories import make_png, write_folder

from uefl.core.errors import InputError
from uefl.data.config import DataConfig
from uefl.data.quality import collect_warnings
from uefl.data.sources import read_images

FILES = {f"{s}/{p}/{c}/{i}.png": make_png(10 * n + i) for n, (s, p, c) in enumerate(
    (s, p, c) for s in ("a", "b") for p in ("train", "test") for c in ("x", "y")) for i in range(3)}  # fmt: skip


def make_config(path, **settings):
    return DataConfig(name="folder", path=str(path), partitioner="natural", shifts=(), num_silos=(), **settings)


def test_images_without_problems_pass_strict(tmp_path):
    assert read_images("folder", str(write_folder(tmp_path, FILES)), strict=True).warnings == ()
    silos, images = make_config(tmp_path, strict=True).load(0)
    assert collect_warnings(silos, images) == []


def test_single_class_silo_is_warned_about_once_and_rejected_by_strict(tmp_path):
    single = {f"c/{split}/x/{i}.png": make_png(900 + 10 * n + i) for n, split in enumerate(("train", "test"))
              for i in range(3)}  # fmt: skip
    config = make_config(write_folder(tmp_path, FILES | single))
    silos, images = config.load(0)
    assert collect_warnings(silos, images) == ["1 of 3 silos have training examples of only one class: c"]
    with pytest.raises(InputError, match=r"1 of 3 silos have training examples of only one class: c \(strict\)"):
        make_config(tmp_path, strict=True).load(0)


def test_duplicates_across_train_and_test_are_counted_also_between_silos(tmp_path):
    copies = {"a/test/x/9.png": FILES["a/train/x/1.png"], "b/test/y/9.png": FILES["a/train/x/1.png"]}
    path = str(write_folder(tmp_path, FILES | copies))
    for _ in ("decoded", "cached"):
        assert read_images("folder", path).warnings == ("2 test examples also occur in the training split",)
    with pytest.raises(InputError, match="strict"):
        read_images("folder", path, strict=True)


def test_copies_that_a_drawn_split_separates_are_counted_and_rejected_by_strict(tmp_path):
    """Without a split of its own, the folder is divided here: one of three copies is a test image."""
    unique = {name.replace("/train/", "/").replace("/test/", "/t"): png for name, png in FILES.items()}
    copies = {f"a/x/copy{i}.png": make_png(500) for i in range(40)}
    config = make_config(write_folder(tmp_path, unique | copies), test_fraction=0.5)
    silos, images = config.load(0)
    (warning,) = collect_warnings(silos, images)
    count = int(warning.split()[0])
    assert warning == f"{count} test examples are copies of training examples, which the split separated"
    copy = images.x.flatten(1).float().mode(0).values.view(3, 8, 8)  # the most common image
    standardized = (copy / 255 - 0.5) / 0.25
    assert count == sum(torch.allclose(x, standardized) for silo in silos for x in silo.test.x) > 0
    with pytest.raises(InputError, match=rf"{count} test examples are copies of training examples, .* \(strict\)"):
        make_config(tmp_path, test_fraction=0.5, strict=True).load(0)


def test_a_drawn_split_of_different_images_is_not_warned_about(tmp_path):
    unique = {name.replace("/train/", "/").replace("/test/", "/t"): png for name, png in FILES.items()}
    silos, images = make_config(write_folder(tmp_path, unique), strict=True).load(0)
    assert collect_warnings(silos, images) == []


def test_duplicates_within_training_are_not_warned_about(tmp_path):
    path = str(write_folder(tmp_path, FILES | {"b/train/x/9.png": FILES["a/train/x/1.png"]}))
    assert read_images("folder", path).warnings == ()


def test_silo_without_training_images_is_rejected_or_skipped(tmp_path):
    path = str(write_folder(tmp_path, FILES | {"c/test/x/1.png": make_png(970)}))
    with pytest.raises(InputError, match="silo 'c' has no training image"):
        read_images("folder", path)
    images = read_images("folder", path, skip_bad=True)
    assert images.silos == ("a", "b")
    assert len(images.y) == len(FILES)


def test_source_with_only_test_images_is_rejected(tmp_path):
    path = str(write_folder(tmp_path, {"test/x/1.png": make_png(1), "test/y/1.png": make_png(2)}))
    for skip_bad in (False, True):
        with pytest.raises(InputError, match="no training image"):
            read_images("folder", path, skip_bad=skip_bad)


def test_mean_and_deviation_have_one_entry_per_channel(tmp_path):
    gray = {"a/1.png": make_png(1, (8, 8)), "b/1.png": make_png(2, (8, 8))}
    color = {"a/1.png": make_png(1), "b/1.png": make_png(2)}
    for files, num_channels in ((gray, 1), (color, 3)):
        images = read_images("folder", str(write_folder(tmp_path / str(num_channels), files)))
        assert (images.mean, images.std) == ((0.5,) * num_channels, (0.25,) * num_channels)
