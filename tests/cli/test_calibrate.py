"""`uefl calibrate`: a table per silo, a file that is never lost, labeled files, and mistakes in one line."""

import csv
import io
import json
import shutil
from pathlib import Path
from zipfile import ZipFile

import pytest
from harness import call_cli, call_with_mistake, find_folder, list_photo_names, write_hospitals, write_photos
from rich.console import Console

from uefl.experiment.calibration import SiloCalibration
from uefl.experiment.calibration_report import explain_calibration, make_calibration_table
from uefl.experiment.loading import load
from uefl.experiment.parsing import parse_experiments
from uefl.experiment.run import run
from uefl.experiment.run_folder import RunFolder

TINY = ["rounds=2", "iterations=1", "epochs=1", "mc_samples=2", "encoder=mlp", "width=8", "hidden_size=16"]
SMALL = ["num_silos=1,1,1", "train_per_silo=80", "test_per_silo=20"]


def train_run(folder: Path, *settings: str) -> Path:
    (experiment,) = parse_experiments([*settings, *TINY], ["uefl"], "default").values()
    return run(experiment, folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    return train_run(tmp_path_factory.mktemp("digits"), "fedavg", "mnist5k", *SMALL, "calibration_fraction=0.25")


@pytest.fixture
def calibratable(trained, tmp_path_factory) -> Path:
    """A copy of the run, so that tests do not see each other's calibration."""
    return shutil.copytree(trained, tmp_path_factory.mktemp("run") / trained.name)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> tuple[Path, Path]:
    """A run without a calibration part on photos of three silos, and labeled photos."""
    root = tmp_path_factory.mktemp("photos")
    write_photos(root / "photos", list_photo_names(["north", "south", "west"], "xy", 12))
    write_photos(root / "new", list_photo_names(["labeled"], "xy", 6), seed=1)
    return train_run(root / "runs", "fedavg", "folder", f"path={root / 'photos'}"), root / "new" / "labeled"


def test_a_run_with_a_calibration_part_is_calibrated_and_predicts_sets(calibratable, tmp_path):
    answer = call_cli("calibrate", str(calibratable), "coverage=0.8", "risk=0.5")
    assert answer.code == 0, answer.stderr
    for text in ("D1-1", "D2-1", "D3-1", " 20 ", "at least 80% of the silo's new examples", "calibration.json"):
        assert text in answer.stdout, text
    values = json.loads(RunFolder(calibratable).calibration_path.read_text())["silos"]
    assert list(values) == ["D1-1", "D2-1", "D3-1"]
    assert load(calibratable, "D2-1").thresholds["set_threshold"] == values["D2-1"]["set_threshold"]

    photos = write_photos(tmp_path, ["1.png", "2.png"], (28, 28))
    rows = list(
        csv.DictReader(io.StringIO(call_cli("predict", str(calibratable), str(photos), "--silo", "D1-1").stdout))
    )
    assert list(rows[0])[-2:] == ["prediction_set", "abstain"]
    assert {row["abstain"] for row in rows} <= {"True", "False"}
    assert set("|".join(row["prediction_set"] for row in rows).split("|")) <= {*"0123456789", ""}
    assert any("|" in row["prediction_set"] for row in rows)
    auto = call_cli("predict", str(calibratable), str(photos), "--silo", "auto")
    assert "no coverage is guaranteed for a silo that is chosen by its inputs" in auto.stderr
    shared = call_cli("predict", str(calibratable), str(photos))
    assert "no prediction sets: a calibration belongs to a silo; choose one with --silo" in shared.stderr
    assert "prediction_set" not in shared.stdout


def test_another_result_is_never_written_over_the_first(calibratable):
    folder = RunFolder(calibratable)
    call_cli("calibrate", str(calibratable), "coverage=0.8", "risk=0.5", "--replace")
    before = folder.calibration_path.read_bytes()
    kept = len(list(calibratable.glob("calibration*.json")))
    assert call_cli("calibrate", str(calibratable), "coverage=0.8", "risk=0.5").code == 0
    message = call_with_mistake("calibrate", str(calibratable), "coverage=0.6")
    assert message == (
        "silo D1-1 is calibrated with coverage=0.8 risk=0.5 pooling=0, the calibration part of the run; add --replace, "
        "which keeps the old calibration"
    )
    assert folder.calibration_path.read_bytes() == before
    assert len(list(calibratable.glob("calibration*.json"))) == kept
    answer = call_cli("calibrate", str(calibratable), "coverage=0.6", "pooling=30", "--replace")
    assert f"the calibration before is kept as calibration-{kept}.json" in answer.stdout
    assert "No coverage is guaranteed per silo" in " ".join(answer.stdout.split())
    assert (calibratable / f"calibration-{kept}.json").read_bytes() == before


def test_a_table_of_several_silos_calibrates_none(tmp_path):
    data, _ = write_hospitals(tmp_path, "hungary.csv")
    folder = train_run(tmp_path / "runs", "fedavg", *data)
    error = call_with_mistake("calibrate", str(folder), str(tmp_path / "three.csv"), "--silo", "Cleveland")
    assert error.endswith(
        "column 'dataset' names 3 silos (Cleveland, Switzerland, VA Long Beach); the file of a silo has the rows of one"
    )
    with_label = call_with_mistake(
        "calibrate", str(folder), str(tmp_path / "three.csv"), "label=num", "--silo", "Cleveland"
    )
    assert with_label == error
    assert not RunFolder(folder).held_out_path.exists()


def test_a_table_of_another_silo_calibrates_none(tmp_path):
    """Of a silo of the run, and of one that the run does not have; without the column, the user's word counts."""
    data, hungary = write_hospitals(tmp_path, "hungary.csv")
    folder = train_run(tmp_path / "runs", "fedavg", *data)
    header, *rows = (tmp_path / "three.csv").read_text().splitlines(keepends=True)
    cleveland, renamed = tmp_path / "cleveland.csv", tmp_path / "renamed.csv"
    cleveland.write_text(header + "".join(row for row in rows if ",Cleveland," in row))
    renamed.write_text(hungary.read_text().replace("dataset", "site", 1))
    for path, silo, other in ((cleveland, "Switzerland", "Cleveland"), (hungary, "Cleveland", "Hungary")):
        assert call_with_mistake("calibrate", str(folder), str(path), "--silo", silo) == (
            f"{path}: column 'dataset' names silo {other}, not {silo}; give rows of {silo}, or leave the column out if "
            "they are"
        )
    for path, silo in ((cleveland, "Cleveland"), (renamed, "Switzerland")):
        answer = call_cli("calibrate", str(folder), str(path), "--silo", silo)
        assert answer.code == 0, answer.stderr


def test_a_table_of_a_silo_that_joined_under_another_name_calibrates_it(tmp_path):
    data, hungary = write_hospitals(tmp_path, "hungary.csv")
    folder = train_run(tmp_path / "runs", "fedavg", *data)
    joined = call_cli("join", str(folder), str(hungary), "name=Budapest", "epochs=1", "lr=1e-3", "batch_norm=own")
    assert joined.code == 0, joined.stderr
    answer = call_cli("calibrate", str(find_folder(joined.stdout)), str(hungary), "--silo", "Budapest")
    assert answer.code == 0, answer.stderr


def test_images_of_another_silo_calibrate_none(plain, tmp_path):
    folder, _ = plain
    path = write_photos(tmp_path / "new", list_photo_names(["south"], "xy", 6), seed=2)
    assert call_with_mistake("calibrate", str(folder), str(path), "--silo", "north") == (
        f"{path} has images of silo south, not north; the files of a silo are its own"
    )


def test_a_run_without_a_calibration_part_uses_labeled_files(plain):
    folder, labeled = plain
    assert not RunFolder(folder).held_out_path.exists()
    message = call_with_mistake("calibrate", str(folder))
    assert message == (
        f"{folder} has no calibration part; give labeled files of a silo (PATH --silo NAME), or train again with "
        "calibration_fraction=0.2"
    )
    assert call_with_mistake("calibrate", str(folder), str(labeled)) == (
        "files belong to one silo; name it with --silo: north, south, west"
    )
    answer = call_cli("calibrate", str(folder), str(labeled), "--silo", "north")
    assert answer.code == 0, answer.stderr
    found = json.loads(RunFolder(folder).calibration_path.read_text())["silos"]
    assert list(found) == ["north"]
    assert (found["north"]["num_examples"], found["north"]["source"]) == (12, "labeled files")
    assert not load(folder, "south").is_calibrated
    repeated = call_with_mistake("calibrate", str(folder), str(labeled), "--silo", "north")
    assert repeated == (
        "silo north has 12 examples already, labeled files; leave the files out, or add --replace to use them instead"
    )
    assert call_cli("calibrate", str(folder), "--silo", "north").code == 0, "the examples are stored"
    assert call_cli("calibrate", str(folder), str(labeled), "--silo", "south").code == 0
    assert list(json.loads(RunFolder(folder).calibration_path.read_text())["silos"]) == ["north", "south"]
    assert not list(folder.glob("*-1.*")), "nothing was replaced, so nothing is kept"
    replaced = call_cli("calibrate", str(folder), str(labeled), "coverage=0.8", "--silo", "south", "--replace")
    assert replaced.code == 0, replaced.stderr
    assert {path.name for path in folder.glob("*-1.*")} == {"calibration-1.json", "held-out-1.safetensors"}


def test_files_belong_to_the_owner_of_a_silos_copy(plain, tmp_path):
    folder, labeled = plain
    load(folder, "west").save(tmp_path / "west")
    assert call_cli("calibrate", str(tmp_path / "west"), str(labeled)).code == 0
    assert list(json.loads(RunFolder(tmp_path / "west").calibration_path.read_text())["silos"]) == ["west"]


def test_names_of_bad_files_cannot_control_the_terminal(plain, tmp_path):
    folder, labeled = plain
    load(folder, "west").save(tmp_path / "west")
    with ZipFile(tmp_path / "new.zip", "w") as archive:
        for path in sorted(labeled.rglob("*.png")):
            archive.write(path, path.relative_to(labeled).as_posix())
        archive.writestr("x/\x1b[2J.png", "no image")
    answer = call_cli("calibrate", str(tmp_path / "west"), str(tmp_path / "new.zip"))
    assert answer.code == 0, answer
    assert "skipped: " in answer.stderr
    assert "\x1b[2J" not in answer.stderr


def predict_photos(folder: Path, photos: Path, silo: str) -> str:
    answer = call_cli("predict", str(folder), str(photos), "--silo", silo)
    assert answer.code == 0, answer.stderr
    return answer.stdout


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name != ".lock"}


def test_a_reset_gives_back_the_predictions_before_and_says_what_it_removed(plain, tmp_path):
    """With files of two silos: first one is reset, then all; the files before a reset are kept."""
    trained, labeled = plain
    folder = shutil.copytree(trained, tmp_path / "run")
    for path in (*folder.glob("calibration*"), *folder.glob("held-out*")):
        path.unlink()  # of other tests
    files, before = read_files(folder), {s: predict_photos(folder, labeled, s) for s in ("north", "south")}
    for silo in ("north", "south"):
        assert call_cli("calibrate", str(folder), str(labeled), "coverage=0.8", "--silo", silo).code == 0
        assert predict_photos(folder, labeled, silo) != before[silo]
    calibrated, south = read_files(folder), predict_photos(folder, labeled, "south")
    answer = call_cli("calibrate", str(folder), "--reset", "--silo", "north")
    assert (answer.code, answer.stdout.splitlines()) == (
        0,
        [
            "removed from north: calibration with coverage=0.8 risk=0.05 pooling=0, what its model predicts for 12 "
            "examples, labeled files",
            "the files before are kept as calibration-1.json, held-out-1.safetensors",
        ],
    )
    assert predict_photos(folder, labeled, "north") == before["north"]
    assert predict_photos(folder, labeled, "south") == south
    for name in ("calibration.json", "held-out.safetensors"):
        assert (folder / name.replace(".", "-1.")).read_bytes() == calibrated[name]
    assert call_with_mistake("calibrate", str(folder), "--reset", "--silo", "north") == (
        f"silo north of {folder} has no calibration to remove"
    )
    assert call_cli("calibrate", str(folder), "--reset").stdout.startswith("removed from south: calibration with ")
    assert predict_photos(folder, labeled, "south") == before["south"]
    assert {n: b for n, b in read_files(folder).items() if "-1." not in n and "-2." not in n} == files
    assert call_with_mistake("calibrate", str(folder), "--reset") == f"{folder} has no calibration to remove"
    assert call_cli("calibrate", str(folder), str(labeled), "--silo", "north").code == 0, "without --replace"


def test_a_reset_keeps_and_restores_the_calibration_part_of_the_run(calibratable, tmp_path):
    before = read_files(calibratable)
    labeled = write_photos(tmp_path, [f"{i % 2}/{i}.png" for i in range(10)], (28, 28))
    assert call_cli("calibrate", str(calibratable)).code == 0
    assert call_cli("calibrate", str(calibratable), str(labeled), "--silo", "D1-1", "--replace").code == 0
    answer = call_cli("calibrate", str(calibratable), "--reset")
    assert "restored for D1-1: 20 examples, the calibration part of the run" in answer.stdout, answer
    left = {name: content for name, content in read_files(calibratable).items() if name in before}
    assert left == before
    assert not RunFolder(calibratable).calibration_path.exists()
    assert call_cli("calibrate", str(calibratable)).code == 0


def test_a_reset_that_cannot_be_is_one_line(calibratable, tmp_path):
    assert call_with_mistake("calibrate", str(calibratable), "coverage=0.8", "--reset") == (
        "--reset removes a calibration and takes only --silo, not coverage=0.8"
    )
    assert call_with_mistake("calibrate", str(calibratable), "--replace", "--reset").endswith("not --replace")
    assert call_cli("calibrate", str(calibratable)).code == 0
    copy = tmp_path / "copy"
    load(calibratable, "D1-1").save(copy)
    assert call_with_mistake("calibrate", str(copy), "--reset") == (
        f"the calibration is part of {RunFolder(copy).model_path}, a copy of a calibrated model; remove it from the "
        "run, then save the copy again"
    )


def test_the_table_fits_80_columns_and_shares_are_not_rounded_to_all_or_nothing():
    found = SiloCalibration(0.995, 0.005, 0, "labeled files", 12345, 0.59, 0.782123, 0.000123456, 1.36, 1.0)
    calibrations = {"VA Long Beach": found}
    output = io.StringIO()
    Console(file=output, width=80).print(make_calibration_table(calibrations))
    assert "…" not in output.getvalue()
    assert len(output.getvalue().splitlines()) == 6, "no heading and no name is wrapped"
    sentences = explain_calibration(calibrations)
    assert "at least 99.5% of the silo's new examples" in sentences[0]
    assert sentences[1].startswith("At most 0.5% of the answers are wrong")


def test_labels_of_a_table_are_read_with_the_settings_of_the_run(tmp_path):
    import uefl.data

    folder = train_run(tmp_path, "fedavg", "heart")
    source = Path(uefl.data.__file__).parent / "embedded" / "heart_disease_uci.csv"
    rows = source.read_text().splitlines()[:40]
    (tmp_path / "new.csv").write_text("\n".join(rows) + "\n")
    answer = call_cli("calibrate", str(folder), str(tmp_path / "new.csv"), "--silo", load_first_silo(folder))
    assert answer.code == 0, answer.stderr
    (found,) = json.loads(RunFolder(folder).calibration_path.read_text())["silos"].values()
    assert found["num_examples"] == 39
    text = (tmp_path / "new.csv").read_text().replace("num", "other")
    (tmp_path / "bad.csv").write_text(text)
    message = call_with_mistake(
        "calibrate", str(folder), str(tmp_path / "bad.csv"), "--silo", load_first_silo(folder), "--replace"
    )
    assert "no column 'num'" in message


def load_first_silo(folder: Path) -> str:
    return next(iter(json.loads((folder / "run.json").read_text())["domains"]))


def test_mistakes_are_one_line(calibratable, plain, tmp_path):
    folder, labeled = plain
    (tmp_path / "z").mkdir()
    write_photos(tmp_path / "classes", ["z/1.png", "x/1.png"])
    cases = {
        ("calibrate", str(tmp_path / "no")): "no such model file",
        ("calibrate", str(calibratable), "coverage=1.5"): "coverage=1.5 must be greater than 0 and less than 1",
        ("calibrate", str(calibratable), "coverge=0.9"): "unknown field 'coverge' (did you mean 'coverage'?)",
        ("calibrate", str(calibratable), "risk=high"): "risk=high is not a number",
        ("calibrate", str(calibratable), "--device", "gpu"): "device=gpu is not available",
        ("calibrate", str(calibratable), "--silo", "D9"): "unknown silo 'D9'; known: D1-1, D2-1, D3-1",
        ("calibrate", str(folder), str(tmp_path / "classes"), "--silo", "west"): (
            "class 'z' is not a class of the model: x, y"
        ),
        ("calibrate", str(folder), str(labeled.parent / "absent"), "--silo", "west"): "absent",
        ("calibrate", str(folder), "--silo", "west"): "silo west has no calibration part",
    }
    for arguments, message in cases.items():
        assert message in call_with_mistake(*arguments), arguments
