"""`uefl join`: a new run folder that names its parent, for tables and image folders; the parent is never changed."""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import pytest
from harness import (
    call_cli,
    call_with_mistake,
    find_folder,
    have_equal_bits,
    list_photo_names,
    write_hospitals,
    write_photos,
)

from uefl.core.errors import InputError
from uefl.experiment.join_folder import join_run, load_newcomer, name_newcomer, open_parent, read_evaluations
from uefl.experiment.joining import JoinSettings
from uefl.experiment.loading import load, open_models
from uefl.experiment.run_folder import RunFolder

SETTINGS = ["rounds=3", "iterations=1", "epochs=1", "mc_samples=3", "warmup_rounds=1", "calibration_fraction=0.2"]


def hash_files(folder: Path) -> dict[str, str]:
    names = [n for n in sorted(os.listdir(folder)) if n != RunFolder.LOCK_FILE]
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of three hospitals, and the table of the fourth."""
    root = tmp_path_factory.mktemp("join")
    data, hungary = write_hospitals(root, "hungary.csv")
    answer = call_cli("run", "uefl", *data, *SETTINGS, "--out", str(root / "runs"))
    return find_folder(answer.stdout), hungary


@pytest.fixture(scope="module")
def joined(hospitals) -> tuple[Path, str]:
    """The folder of the run that Hungary joined, and what the command printed."""
    run, table = hospitals
    answer = call_cli("join", str(run), str(table), "epochs=2")
    assert answer.code == 0, answer
    return find_folder(answer.stdout), answer.stdout


def test_the_parent_stays_and_the_new_run_names_it(hospitals) -> None:
    run, table = hospitals
    before = hash_files(run)
    folder = find_folder(call_cli("join", str(run), str(table), "epochs=1").stdout)
    assert hash_files(run) == before
    header = json.loads((folder / "run.json").read_text())
    assert header["parent"] == run.name
    assert header["joined"][-1]["silo"] == "hungary"
    assert set(header["domains"]) == {"Cleveland", "Switzerland", "VA Long Beach", "hungary"}


def test_the_command_says_uncertainty_own_parts_and_a_table(joined) -> None:
    _, stdout = joined
    assert "predictive entropy" in stdout
    assert "Threshold" in stdout
    assert "own parts of hungary: " in stdout
    assert "codewords by K-means" in stdout
    assert re.search(r"chosen: .*, by the NLL over 5 folds of its examples \(no training \d", stdout)
    for plan in ("shared classifier", "own classifier", "new classifier and own gate"):
        assert re.search(rf"{plan} \d+\.\d{{3}}", stdout)
    for text in ("shared model", "own parts, trained", "accuracy", "NLL"):
        assert text in stdout


def test_the_new_run_predicts_and_shows_the_newcomer(joined, hospitals) -> None:
    folder, _ = joined
    rows = call_cli("predict", str(folder), str(hospitals[1]), "--silo", "hungary").stdout.splitlines()
    assert len(rows) == 294  # of 293 patients and a heading
    assert load(folder, silo="hungary").silo_name == "hungary"
    shown = call_cli("show", str(folder)).stdout
    assert "hungary joined" in shown
    assert "nothing of the other silos changed" in shown


def test_models_of_other_silos_have_the_same_bits_in_the_new_run(joined, hospitals) -> None:
    parent, child = open_models(hospitals[0]), open_models(joined[0])
    for name in parent.description.silo_names:
        assert have_equal_bits(parent.select_silo(name).model_state, child.select_silo(name).model_state)


def test_the_same_command_finds_the_finished_run(joined, hospitals) -> None:
    answer = call_cli("join", *map(str, hospitals), "epochs=2")
    assert "already joined" in answer.stdout
    assert find_folder(answer.stdout) == joined[0]


def test_further_rounds_with_all_silos_continue_the_run(hospitals) -> None:
    """Also of a run that a silo joined before, whose data are read again."""
    folder = find_folder(call_cli("join", *map(str, hospitals), "epochs=2", "head=shared").stdout)
    answer = call_cli("join", str(folder), str(hospitals[1]), "name=again", "others=train", "rounds=2")
    assert answer.code == 0, answer
    child = RunFolder(find_folder(answer.stdout))
    records = [json.loads(line) for line in child.records_path.read_text().splitlines()]
    assert [record["round"] for record in records] == [1, 2, 3, 4, 5]
    assert set(records[-1]["silos"]) == {"Cleveland", "Switzerland", "VA Long Beach", "again", "hungary"}
    assert records[-1]["participants"] == ["Cleveland", "Switzerland", "VA Long Beach", "again", "hungary"]
    one, other = (open_models(path).model_state for path in (folder, child.path))
    assert not have_equal_bits(one, {n: other[n] for n in one})
    columns = read_evaluations(child.path)
    assert list(columns) == ["shared model", "own parts, untrained", "after further rounds"]
    assert columns["after further rounds"] == records[-1]["silos"]["again"]
    assert "after further rounds" in answer.stdout


def test_the_newcomer_has_a_calibration_part_and_the_others_stay_calibrated(hospitals, tmp_path) -> None:
    run, table = hospitals
    parent = shutil.copytree(run, tmp_path / run.name)
    assert call_cli("calibrate", str(parent), "risk=0").code == 0
    answer = call_cli("join", str(parent), str(table), "epochs=1")
    assert "47 calibration examples" in answer.stdout
    assert "hungary is not calibrated yet; the calibration of the other silos still holds" in answer.stdout
    folder = find_folder(answer.stdout)
    before, after = open_models(parent), open_models(folder)
    for name in before.description.silo_names:
        assert after.description.silos[name] == before.description.silos[name]
        assert before.description.silos[name].thresholds
    assert after.description.silos["hungary"].thresholds is None
    assert "add --replace" in call_with_mistake("calibrate", str(folder), "risk=0", "coverage=0.8")
    assert call_cli("calibrate", str(folder), "risk=0").code == 0
    assert load(folder, silo="hungary").is_calibrated


def test_all_silos_that_train_further_have_their_calibration_part(hospitals, tmp_path) -> None:
    run, table = map(str, hospitals)
    answer = call_cli("join", run, table, "name=[/b]", "others=train", "rounds=1", "--out", str(tmp_path))
    assert answer.code == 0, answer  # the name is no markup of the terminal
    folder = find_folder(answer.stdout)
    assert set(open_models(folder).held_out) == {"Cleveland", "Switzerland", "VA Long Beach", "[/b]"}
    assert "[/b] joined" in call_cli("show", str(folder)).stdout
    assert "[/b]" in call_cli("calibrate", str(folder), "risk=0").stdout


def test_further_rounds_never_drop_a_classifier_of_a_silo_s_own(hospitals, tmp_path) -> None:
    run, table = map(str, hospitals)
    folder = find_folder(call_cli("join", run, table, "head=own", "epochs=0", "--out", str(tmp_path)).stdout)
    line = call_with_mistake("join", str(folder), table, "name=again", "others=train")
    assert "hungary joined with a classifier" in line


def test_a_folder_gives_its_whole_name_and_a_file_its_name_without_ending(tmp_path) -> None:
    (tmp_path / "site.v2").mkdir()
    (tmp_path / "east.csv").touch()
    names = [name_newcomer(tmp_path / path, JoinSettings()).name for path in ("site.v2", "east.csv")]
    assert names == ["site.v2", "east"]


@pytest.mark.parametrize("name", ["auto", " ", "a\nb", "a\x1b[31mb", "x" * 65])
def test_a_name_that_no_command_could_use_or_show_is_refused(hospitals, name) -> None:
    line = call_with_mistake("join", *map(str, hospitals), f"name={name}")
    assert "choose a name= of 1 to 64 printable characters" in line
    assert repr(name[:64]) in line


def test_changed_data_of_the_others_are_noticed(hospitals, tmp_path) -> None:
    run, table = hospitals
    three = run.parent.parent / "three.csv"
    text = three.read_text()
    try:
        three.write_text(text.replace("63,Male", "64,Male", 1))
        line = call_with_mistake("join", str(run), str(table), "others=train", "--out", str(tmp_path))
    finally:
        three.write_text(text)
    assert "have changed" in line
    assert not list(tmp_path.iterdir()), "a mistake leaves no folder"


def test_an_image_folder_joins_with_the_image_size_of_the_run(tmp_path) -> None:
    photos = write_photos(tmp_path / "photos", list_photo_names(["north", "south"], count=8))
    east = write_photos(tmp_path / "east", [f"{label}/{i}.png" for label in "xy" for i in range(8)], (20, 20), 1)
    small = ["width=4", "depth=1", "hidden_size=8", "image_size=12", "min_examples=2", "num_codewords=4"]
    arguments = ["run", "uefl", "folder", f"path={photos}", *small, *SETTINGS, "--out", str(tmp_path / "runs")]
    run = find_folder(call_cli(*arguments).stdout)
    answer = call_cli("join", str(run), str(east), "epochs=1")
    assert answer.code == 0, answer
    folder = find_folder(answer.stdout)
    assert open_models(folder).description.silo_names == ("east", "north", "south")
    strange = write_photos(tmp_path / "strange", ["z/1.png", "z/2.png", "x/3.png", "x/4.png"])
    assert "class 'z' is not a class" in call_with_mistake("join", str(run), str(strange))


def test_mistakes_are_one_line(hospitals, tmp_path) -> None:
    run, table = map(str, hospitals)
    assert "no such file" in call_with_mistake("join", run, str(tmp_path / "nowhere"))
    assert "unknown field 'epoch'" in call_with_mistake("join", run, table, "epoch=3")
    assert "Cleveland is in this run already" in call_with_mistake("join", run, table, "name=Cleveland")
    assert "not a run folder" in call_with_mistake("join", str(tmp_path), table)
    damaged = shutil.copytree(run, tmp_path / "damaged")
    (damaged / "records.jsonl").write_text("")
    assert "is damaged" in call_with_mistake("join", str(damaged), table, "epochs=1")


def test_a_table_of_several_silos_is_refused(hospitals) -> None:
    run, table = hospitals
    error = call_with_mistake("join", str(run), str(table.with_name("three.csv")))
    assert "column 'dataset' names 3 silos (Cleveland, Switzerland, VA Long Beach)" in error


def test_stopped_rounds_resume_to_the_same_bits(hospitals, tmp_path) -> None:
    run, table = hospitals
    parent, settings = open_parent(run), JoinSettings(name="hungary", others="train", rounds=3)
    silo = load_newcomer(parent, table, "hungary")

    def stop_after_a_round(event: dict[str, object]) -> None:
        if event["kind"] == "round":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        join_run(parent, silo, table, settings, tmp_path / "stopped", on_event=stop_after_a_round)
    (header_path,) = (tmp_path / "stopped").glob("*/run.json")
    header = header_path.read_text()
    header_path.write_text(json.dumps({**json.loads(header), "threads": 99}))
    with pytest.raises(InputError, match="was started with threads 99"):
        join_run(parent, silo, table, settings, tmp_path / "stopped")
    header_path.write_text(header)
    folders = [join_run(parent, silo, table, settings, tmp_path / name)[0] for name in ("stopped", "whole")]
    one, other = (open_models(folder) for folder in folders)
    assert have_equal_bits(one.model_state, other.model_state)
    assert not have_equal_bits(
        one.select_silo("Cleveland").model_state, parent.models.select_silo("Cleveland").model_state
    )


def test_every_later_command_takes_the_run_of_a_joined_silo(joined, hospitals, tmp_path) -> None:
    folder, table = shutil.copytree(joined[0], tmp_path / "joined"), str(hospitals[1])
    assert "hungary" in call_cli("calibrate", str(folder), "risk=0", "coverage=0.8").stdout
    predicted = call_cli("predict", str(folder), table, "--silo", "hungary").stdout.splitlines()
    assert predicted[0].endswith("prediction_set,abstain")
    assert len(predicted) == 1 + 293
    watched = call_cli("watch", str(folder), table, "--silo", "hungary")
    assert "the 293 inputs" in watched.stdout
    exported = call_cli("export", str(folder), str(tmp_path / "hungary.pt2"), "--silo", "hungary")
    assert exported.code == 0, exported
    assert (tmp_path / "hungary.pt2").exists()


def test_a_moved_and_renamed_parent_gives_the_same_new_run(joined, hospitals, tmp_path) -> None:
    run, table = hospitals
    moved = shutil.copytree(run, tmp_path / "elsewhere" / "renamed")
    answer = call_cli("join", str(moved), str(table), "epochs=2")
    assert find_folder(answer.stdout).name == joined[0].name
    other = call_cli("join", str(joined[0]), str(table), "epochs=2", "name=twin", "--out", str(tmp_path))
    twice = call_cli("join", str(run), str(table), "epochs=2", "name=twin", "--out", str(tmp_path))
    assert find_folder(other.stdout) != find_folder(twice.stdout), "another parent is another run"
