"""`uefl watch`: an answer in words, a picture, exit code 1 on alarm and 2 on a mistake."""

from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pytest
from harness import call_cli, call_with_mistake, write_hospitals, write_photos
from PIL import Image

from uefl.experiment.parsing import parse_experiments
from uefl.experiment.run import run
from uefl.experiment.run_folder import RunFolder

TINY = ["rounds=2", "iterations=1", "epochs=1", "mc_samples=2", "encoder=mlp", "width=8", "hidden_size=16"]
CODEBOOK = ["num_codewords=16", "warmup_rounds=1"]


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> tuple[Path, Path]:
    """A run on two silos, and files: other digits of the first silo, and their negatives."""
    root = tmp_path_factory.mktemp("watch")
    silos = ["num_silos=1,1", "shifts=none,rotate:90", "train_per_silo=200", "test_per_silo=40"]
    arguments = ["uefl", "mnist5k", *silos, *TINY, *CODEBOOK, "calibration_fraction=0.4"]
    (experiment,) = parse_experiments(arguments, ["uefl"], "default").values()
    folder = run(experiment, root / "runs")
    images = experiment.data.read_images()
    partition = experiment.data.make_partitions(images, 0)[0]
    used = {int(i) for indices in partition[1:] for i in indices}
    order = np.random.default_rng(0).permutation(len(images.y)).tolist()  # the source is sorted by class
    for i in [i for i in order if i not in used][:60]:
        pixels = images.x[i, 0].numpy()
        for name, shown in (("same", pixels), ("negative", 255 - pixels)):
            (root / name).mkdir(exist_ok=True)
            Image.fromarray(shown.astype(np.uint8)).save(root / name / f"{i}.png")
    return folder, root


def test_the_answer_is_words_a_picture_and_an_exit_code(digits, tmp_path):
    folder, root = digits
    same = call_cli("watch", str(folder), str(root / "same"), "--silo", "D1-1", "--figure", str(tmp_path / "a.png"))
    assert same.code == 0, same.stdout
    assert same.stdout.startswith("No alarm: nothing shows that the 60 inputs are not like the data of silo D1-1.")
    assert f"figure: {tmp_path / 'a.png'}" in same.stdout
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.size[0] > 400
    changed = call_cli("watch", str(folder), str(root / "negative"), "--silo", "D1-1")
    assert changed.code == 1
    assert changed.stdout.startswith("ALARM: the 60 inputs are not like the data of silo D1-1")
    assert (folder / "watch-D1-1.png").exists()


def test_names_of_bad_files_cannot_control_the_terminal(digits, tmp_path):
    folder, root = digits
    with ZipFile(tmp_path / "bad.zip", "w") as archive:
        archive.writestr("\x1b[2J.png", "no image")
    inputs = [str(root / "same"), str(tmp_path / "bad.zip")]
    answer = call_cli("watch", str(folder), *inputs, "--silo", "D1-1", "--figure", str(tmp_path / "a.png"))
    assert answer.code == 0, answer
    assert "skipped: " in answer.stderr
    assert "?[2J.png" in answer.stderr
    assert "\x1b[2J" not in answer.stderr


def test_mistakes_are_one_line_and_exit_code_2(digits, tmp_path):
    folder, root = digits
    write_photos(tmp_path, ["few/1.png", "few/2.png"], (28, 28))
    inputs = str(root / "same")
    cases = {
        (str(folder), inputs): "name the silo with --silo: D1-1, D2-1",
        (str(folder), inputs, "--silo", "D7"): "unknown silo 'D7'; known: D1-1, D2-1",
        (str(folder), inputs, "--silo", "D1-1", "--looks", "0"): "looks=0 must be at least 1",
        (str(folder), inputs, "--silo", "D1-1", "--level", "1.5"): "level=1.5 must be greater than 0 and less than 1",
        (str(folder), inputs, "--silo", "D1-1", "--looks", "1000000"): "looks=1000000 is 5e-08 per look",
        (str(folder), inputs, "--silo", "D1-1", "--figure", "a.gif"): "figure=a.gif must be a PNG file",
        (str(folder), str(tmp_path / "few"), "--silo", "D1-1"): "2 inputs are too few to tell a change from chance",
        (str(folder), str(tmp_path / "no"), "--silo", "D1-1"): "no such file or folder",
        (str(tmp_path), inputs, "--silo", "D1-1"): "no such model file",
    }
    for arguments, message in cases.items():
        assert message in call_with_mistake("watch", *arguments), arguments
    RunFolder(folder).held_out_path.rename(folder / "moved")
    try:
        assert "silo D1-1 has no reference" in call_with_mistake("watch", str(folder), inputs, "--silo", "D1-1")
    finally:
        (folder / "moved").rename(RunFolder(folder).held_out_path)


def test_rows_of_other_silos_are_compared_with_a_warning(tmp_path):
    data, hungary = write_hospitals(tmp_path, "hungary.csv")
    (experiment,) = parse_experiments(["fedavg", *data, *TINY, "calibration_fraction=0.2"], [], "default").values()
    folder = run(experiment, tmp_path / "runs")
    answer = call_cli("watch", str(folder), str(hungary), "--silo", "Cleveland")
    assert answer.code in (0, 1), answer.stderr
    assert answer.stderr == (
        "warning: 293 of 293 rows are of another silo than Cleveland by column 'dataset': Hungary (293)\n"
    )
