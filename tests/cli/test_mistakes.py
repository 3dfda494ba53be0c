"""Values that make no sense are refused in one line that names them, before anything is allocated or written."""

from pathlib import Path

import pytest
from harness import call_with_mistake, list_photo_names, write_photos

from uefl.core import memory

PARTITIONERS_WITH_ALPHA = "quantity, dirichlet, dirichlet-vhl, dirichlet-fedbr, dirichlet-fedcr"


@pytest.fixture
def photos(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder with two silos of two classes, as a setting."""
    monkeypatch.setenv("UEFL_DATA", str(tmp_path_factory.mktemp("cache")))
    return f"path={write_photos(tmp_path_factory.mktemp('photos'), list_photo_names(('north', 'south')))}"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("momentum=5", "momentum=5.0 must be at least 0 and less than 1"),
        ("momentum=0.5", "momentum has no effect with optimizer=adam; it is used by sgd"),
        (
            "shifts=rotate:1e99,rotate:0,rotate:1",
            "shift 'rotate:1e99': invalid value '1e99' of rotate; it takes: degrees counter-clockwise, "
            "from -360 to 360",
        ),
        (
            "shifts=noise:256,rotate:0,rotate:1",
            "shift 'noise:256': invalid value '256' of noise; it takes: standard deviation, pixels are 0 to 255, "
            "from 0 to 255",
        ),
        ("width=-1", "width=-1 must be at least 0; 0 means the encoder's default"),
        ("depth=-1", "depth=-1 must be at least 0; 0 means the encoder's default"),
        ("image_size=100000", "image_size=100000 must be at least 0 and at most 4096"),
        (
            "num_codewords=1000000",
            "num_codewords=1000000 must be at least 0 and at most 65536; 0 means a choice by the number of features",
        ),
        ("alpha=0.3", f"alpha has no effect with partitioner=domains; it is used by {PARTITIONERS_WITH_ALPHA}"),
        ("classes_per_silo=2", "classes_per_silo has no effect with partitioner=domains; it is used by pathological"),
        (
            "path=photos",
            "path=photos has no effect: mnist5k is embedded; use the data set folder for own images",
        ),
    ],
)
def test_a_value_that_makes_no_sense_is_refused(setting: str, message: str, tmp_path: Path) -> None:
    assert call_with_mistake("run", setting, "--out", str(tmp_path)) == message
    assert not list(tmp_path.iterdir()), "nothing may look like a run that was started"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "clients_per_round=99",
            "clients_per_round=99 must be at most 2, the silos with training examples; 0 takes all",
        ),
        ("depth=9", "depth=9 needs images of at least 512 pixels, but these have 12"),
    ],
)
def test_a_value_that_does_not_fit_the_data_is_refused(setting: str, message: str, photos: str, tmp_path: Path) -> None:
    assert call_with_mistake("run", "folder", photos, setting, "--out", str(tmp_path)) == message
    assert not list(tmp_path.iterdir()), "nothing may look like a run that was started"


def test_class_folders_without_silos_hint_at_a_partitioner(tmp_path: Path) -> None:
    folder = write_photos(tmp_path, [f"{label}/{i}.png" for label in "xy" for i in range(6)])
    message = call_with_mistake("run", "folder", f"path={folder}")
    assert message == (
        "partitioner=natural needs a source that names its silos, but folder does not; arrange images as "
        "<silo>/<class>/, or set partitioner=dirichlet to divide them among silos"
    )


def test_a_table_without_silos_hints_at_its_column(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text("age,site,ill\n" + "".join(f"{20 + i},a,{i % 2}\n" for i in range(30)))
    assert call_with_mistake("run", "table", f"path={path}", "label=ill", "ignore=site") == (
        "partitioner=natural needs a source that names its silos, but table does not; set silo=<column>, or set "
        "partitioner=dirichlet to divide rows among silos"
    )


@pytest.mark.parametrize("command", [["run"], ["data", "show"]])
def test_a_path_in_place_of_a_data_set_is_named_with_what_to_write(command: list[str], tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.touch()
    for given, kind in ((path, "table"), (tmp_path, "folder")):
        message = f"'{given}' is a path; for data of your own, write: {kind} path={given}"
        assert call_with_mistake(*command, str(given)) == message


def test_the_same_field_twice_is_refused_also_under_two_names() -> None:
    twice = "field 'gamma' is set twice, to 0.1 and to 0.2"
    assert call_with_mistake("run", "gamma=0.1", "codebook.gamma=0.2") == twice
    assert call_with_mistake("run", "gamma=0.1", "gamma=0.1") == "field 'gamma' is set twice, to 0.1 and to 0.1"


def test_a_flag_may_repeat_its_setting(tmp_path: Path) -> None:
    message = call_with_mistake("run", "folder", f"path={tmp_path}", "skip_bad=true", "--skip-bad")
    assert "no images found" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["partitioner=dirichlet", "classes_per_silo=3"], "classes_per_silo has no effect with partitioner=dirichlet"),
        (["partitioner=pathological", "alpha=1"], "alpha has no effect with partitioner=pathological"),
        (
            ["partitioner=leave-one-domain-out", "test_fraction=0.1"],
            "test_fraction has no effect with partitioner=leave",
        ),
        (["partitioner=natural", "num_silos=3"], "num_silos has no effect with partitioner=natural; it is used by"),
    ],
)
def test_a_setting_that_the_partitioner_ignores_is_refused_before_training_and_in_previews(
    arguments: list[str], message: str
) -> None:
    for command in (["run", "fedavg"], ["data", "show"]):
        assert call_with_mistake(*command, "mnist5k", *arguments).startswith(message)


@pytest.mark.parametrize("text", ["", ",", "1,", "a"])
def test_seeds_that_are_no_list_of_numbers_are_refused(text: str) -> None:
    message = f"seeds='{text}' is not a list of whole numbers such as 0,1,2"
    assert call_with_mistake("compare", "--seeds", text) == message


@pytest.mark.parametrize(
    ("name", "hint", "known"),
    [
        ("local.lrr", "local.lr", "known: batch_size, epochs, eval_batch_size, lr, "),
        ("lcal.lr", "local.lr", "known: aggregation_weights, "),
        ("method.codebok.gamma", "method.codebook.gamma", "known: aggregation_weights, "),
        ("codebook.gama", "codebook.gamma", "known: alike_rule, codebook_init, "),
    ],
)
def test_a_misspelt_nested_field_names_the_nearest_one(name: str, hint: str, known: str) -> None:
    message = call_with_mistake("run", "uefl", f"{name}=1")
    assert message.startswith(f"unknown field '{name}' (did you mean '{hint}'?); {known}")


def test_a_network_that_cannot_fit_into_memory_is_refused_before_it_is_allocated(photos: str) -> None:
    message = call_with_mistake("run", "folder", photos, "width=64", "hidden_size=1000000000")
    assert message.startswith("a network of 2.6e+11 weights would need ")
    assert message.endswith("; set a smaller width, depth, hidden_size or ensemble_size")


def test_images_that_cannot_fit_into_memory_are_refused_before_they_are_allocated(
    photos: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "read_total_memory", lambda: 10**6)
    message = call_with_mistake("run", "folder", photos, "image_size=400")
    assert message.endswith(
        "24 images of 400×400 pixels would need 0.0 GB of memory, but this machine has 0.0 GB; set a smaller image_size"
    )
