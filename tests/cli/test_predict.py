"""`uefl predict`: folders, archives, lists and single files; rows as CSV or JSON lines; mistakes in one line."""

import csv
import io
import json
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import uefl.data
from uefl.cli.main import main
from uefl.data.readers.table import read_table
from uefl.data.table_format import TableFormat
from uefl.experiment.experiment import Experiment
from uefl.experiment.loading import load, open_models
from uefl.experiment.parsing import parse_experiments
from uefl.experiment.run import run
from uefl.experiment.run_folder import RunFolder

TUNED = "uefl fine_tuning_epochs=2"
COLUMNS = ["file", "label", "probability", "predictive_entropy", "mutual_information"]


def draw_image(kind: str, index: int, size: int = 12) -> Image.Image:
    """The upper or the left half is bright, with noise."""
    pixels = np.full((size, size), 40)
    pixels[(slice(0, size // 2), slice(None)) if kind == "upper" else (slice(None), slice(0, size // 2))] = 200
    noise = np.random.default_rng(index).normal(0, 10, pixels.shape)
    return Image.fromarray((pixels + noise).clip(0, 255).astype(np.uint8))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run on a folder of the user's own, and further images in a folder."""
    root = tmp_path_factory.mktemp("predict")
    for silo, kind, i in ((s, k, i) for s in ("north", "south") for k in ("upper", "left") for i in range(20)):
        path = root / "photos" / silo / kind / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        draw_image(kind, i + 100 * (silo == "south")).save(path)
    new = root / "new"
    new.mkdir()
    for i in range(6):
        draw_image("upper" if i < 3 else "left", 1000 + i).save(new / f"{i}.png")
    draw_image("upper", 7, size=30).save(new / "large.png")  # resized, as in training
    (new / "broken.png").write_bytes(b"\x89PNG no image")
    (new / "notes.txt").write_text("no image")
    settings = [
        "encoder=mlp",
        "width=32",
        "hidden_size=16",
        "rounds=6",
        "iterations=1",
        "local.lr=0.01",
        "batch_size=8",
    ]
    data = [f"path={root / 'photos'}", "image_size=12", "mc_samples=4"]
    (experiment,) = parse_experiments(["fedavg", "folder", *settings, *data], ["uefl"], "default").values()
    return run(experiment, root / "runs"), new


def predict(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Run `uefl predict` in this process; return exit code, output and errors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["uefl", "predict", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
    out, err = capsys.readouterr()
    return int(exit_.value.code or 0), out, err


def read_csv(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_a_folder_gives_one_row_per_image_and_names_bad_files(trained, capsys) -> None:
    folder, new = trained
    code, out, err = predict(capsys, folder, new, "--silo", "north")
    rows = read_csv(out)
    assert code == 0
    assert list(rows[0]) == COLUMNS
    assert [Path(row["file"]).name for row in rows] == [*(f"{i}.png" for i in range(6)), "large.png"]
    assert [row["label"] for row in rows[:6]] == ["upper"] * 3 + ["left"] * 3
    assert err.splitlines() == [
        "1 files skipped: no image by their name",
        f"skipped: {new}/broken.png: not an image format that Pillow supports",
        "7 predicted with the model of silo north; 1 bad one skipped",
    ]


def test_the_rows_are_those_of_predict_in_python(trained, capsys) -> None:
    folder, new = trained
    pixels = np.stack([np.array(Image.open(new / f"{i}.png"))[None] for i in range(6)])
    expected = load(folder, "north").predict(pixels)
    rows = read_csv(predict(capsys, folder, *(new / f"{i}.png" for i in range(6)), "--silo", "north")[1])
    assert [row["label"] for row in rows] == expected.names
    for column, values in zip(COLUMNS[2:], (expected.confidence, *expected.uncertainty), strict=True):
        assert [float(row[column]) for row in rows] == pytest.approx(values.tolist(), rel=1e-5)


def test_archives_and_lists_give_the_same_rows_as_files(trained, capsys, tmp_path: Path) -> None:
    folder, new = trained
    with zipfile.ZipFile(tmp_path / "new.zip", "w") as archive:
        for i in range(6):
            archive.write(new / f"{i}.png", f"{i}.png")
    (tmp_path / "new.csv").write_text("path\n" + "".join(f"{new / f'{i}.png'}\n" for i in range(6)))
    outputs = [
        predict(capsys, folder, *inputs, "--samples", 2, "--seed", 3)[1]
        for inputs in ([tmp_path / "new.zip"], [tmp_path / "new.csv"], [new / f"{i}.png" for i in range(6)])
    ]
    values = [[list(row.values())[1:] for row in read_csv(text)] for text in outputs]
    assert values[0] == values[1] == values[2]
    assert len(values[0]) == 6


def test_json_lines_go_to_a_new_file_that_is_never_overwritten(trained, capsys, tmp_path: Path) -> None:
    folder, new = trained
    out = tmp_path / "new.jsonl"
    code, printed, err = predict(capsys, folder, new / "0.png", "--silo", "south", "--out", out)
    (row,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert (code, printed) == (0, "")
    assert err == f"1 predicted with the model of silo south, in {out}\n"
    assert list(row) == COLUMNS
    assert row["label"] == "upper"
    assert 0.5 <= row["probability"] <= 1
    before = out.read_bytes()
    code, _, err = predict(capsys, folder, new, "--out", out)
    assert (code, err) == (2, f"uefl: {out} exists; choose another file with --out\n")
    assert out.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"new.jsonl"}


def test_silo_auto_names_its_choice(trained, capsys) -> None:
    folder, new = trained
    code, out, err = predict(capsys, folder, new, "--silo", "auto")
    assert code == 0
    assert len(read_csv(out)) == 7
    assert err.startswith("silo auto: the models of all silos are equal; no coverage is guaranteed for a silo that is")


def test_mistakes_are_one_line_and_exit_code_2(trained, capsys, tmp_path: Path) -> None:
    folder, new = trained
    out = tmp_path / "out.csv"
    draw_image("upper", 1).convert("RGB").save(tmp_path / "color.png")
    comparison = tmp_path / "compare-0"
    comparison.mkdir()
    (comparison / RunFolder.COMPARISON_FILE).touch()
    cases = {
        (folder, new, "--silo", "nrth"): "unknown silo 'nrth'; known: north, south",
        (folder, new, "--format", "xml"): "unknown format 'xml'; known: csv, jsonl",
        (folder, new, "--samples", "0"): "samples=0 must be at least 1",
        (folder, new / "none.png"): f"{new}/none.png: no such file or folder",
        (folder, tmp_path / "missing"): f"{tmp_path}/missing: no such file or folder",
        (folder, new, "--out", tmp_path / "out.xlsx"): (
            f"out={tmp_path}/out.xlsx: .xlsx cannot be written; choose a name that ends in .csv or .jsonl"
        ),
        (comparison, new): f"{comparison} is a comparison and has no model of its own; give one of the run folders",
        (new / "0.png", folder): f"{new}/0.png is not a model file, or it is damaged (Error while",
        (new, new): f"{new}: no such model file, and no folder with a model.safetensors",
        (folder, new / "broken.png", "--out", out): f"none of the 1 images is usable; the first: {new}/broken.png: ",
        (folder, tmp_path / "color.png", "--out", out): (
            f"none of the 1 images is usable; the first: {tmp_path}/color.png: 3 channels, but the model takes 1"
        ),
        (folder, new, "--out", tmp_path / "no" / "out.csv"): f"cannot write {tmp_path}/no/out.csv: no such file",
    }
    for arguments, message in cases.items():
        code, printed, err = predict(capsys, *arguments)
        assert (code, printed) == (2, ""), arguments
        assert err.splitlines()[-1].startswith(f"uefl: {message}"), err
    assert not out.exists()


def test_an_image_of_another_size_needs_a_model_that_was_trained_to_resize(trained, capsys) -> None:
    """The same file as in training without `image_size`."""
    folder, new = trained
    models = open_models(folder)
    fixed = replace(models.description.input_format, resizing="none")
    path = RunFolder(new.parent / "fixed").model_path
    path.parent.mkdir()
    replace(models, description=replace(models.description, input_format=fixed)).save(path)
    code, _, err = predict(capsys, path, new / "large.png")
    assert code == 2
    assert "large.png: 30×30 pixels, but the model takes 12×12; it was trained without image_size" in err


@pytest.fixture(scope="module")
def heart_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Experiment, Path]:
    """A short run on real patients of four hospitals."""
    settings = ["width=8", "hidden_size=8", "rounds=2", "iterations=1", "mc_samples=3"]
    (experiment,) = parse_experiments(["fedavg", "heart", *settings], ["uefl"], "default").values()
    return experiment, run(experiment, tmp_path_factory.mktemp("heart") / "runs")


def write_patients(path: Path, patients: slice, **bad_cells: str) -> Path:
    """Write some patients without labels to a file; every cell of a column of `bad_cells` has that text."""
    source = Path(uefl.data.__file__).parent / "embedded" / "heart_disease_uci.csv"
    with source.open(newline="") as file:
        rows = list(csv.DictReader(file))[patients]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [n for n in rows[0] if n not in ("num", "dataset")], extrasaction="ignore")
        writer.writeheader()
        writer.writerows({**row, **bad_cells} for row in rows)
    return path


def test_new_rows_of_a_table_are_predicted_as_in_training(heart_run, capsys, tmp_path: Path) -> None:
    """Real patients, read again from a file with a bad row and without labels."""
    experiment, folder = heart_run
    path = write_patients(tmp_path / "new.csv", slice(8))
    lines = path.read_text().splitlines()
    lines[4] = lines[4].replace(lines[4].split(",")[1], "old", 1)  # age
    path.write_text("\n".join(lines))
    silo_name = open_models(folder).description.silo_names[0]
    code, out, err = predict(capsys, folder, path, "--silo", silo_name)
    predicted = read_csv(out)
    assert code == 0, err
    assert [row["file"] for row in predicted] == [f"{path}:{line}" for line in (2, 3, 4, 6, 7, 8, 9)]
    assert "new.csv: line 5: age 'old'" in err
    assert f"7 predicted with the model of silo {silo_name}; 1 bad one skipped" in err
    model = load(folder, silo_name)
    table = TableFormat.from_json(model.input_format.table)
    expected = model.predict(read_table(path, table).x)
    assert [row["label"] for row in predicted] == expected.names
    silo = next(s for s in experiment.data.load(0)[0] if s.name == silo_name)
    recorded = RunFolder(folder).read_summary()["last"]["silos"][silo_name]
    assert (model.predict(silo.test.x).labels == silo.test.y.numpy()).mean() == pytest.approx(recorded["accuracy"])


def write_named_patients(path: Path, silo_values: Sequence[str]) -> Path:
    """Write as many patients of Cleveland, with these texts in the column that names silos."""
    header, *rows = write_patients(path, slice(len(silo_values))).read_text().splitlines()
    lines = [f"{row},{value}" for row, value in zip(rows, silo_values, strict=True)]
    path.write_text("\n".join([f"{header},dataset", *lines, ""]))
    return path


def test_rows_of_other_silos_are_predicted_with_a_warning(heart_run, capsys, tmp_path: Path) -> None:
    """It may be intended, so that nothing else changes; without a silo and with rows of the silo, there is none."""
    _, folder = heart_run
    mixed = write_named_patients(tmp_path / "mixed.csv", ["Hungary", "Cleveland", "Switzerland", "Hungary", ""])
    own = write_named_patients(tmp_path / "own.csv", ["Cleveland"] * 5)
    code, out, err = predict(capsys, folder, mixed, "--silo", "Cleveland")
    assert (code, err.splitlines()) == (
        0,
        [
            "warning: 3 of 5 rows are of another silo than Cleveland by column 'dataset': Hungary (2), Switzerland (1)",
            "5 predicted with the model of silo Cleveland",
        ],
    )
    code, own_out, err = predict(capsys, folder, own, "--silo", "Cleveland")
    assert (code, err) == (0, "5 predicted with the model of silo Cleveland\n")
    assert [list(row.values())[1:] for row in read_csv(out)] == [list(row.values())[1:] for row in read_csv(own_out)]
    assert "warning" not in predict(capsys, folder, mixed)[2]
    assert "5 of 5 rows are of another silo than Hungary" in predict(capsys, folder, own, "--silo", "Hungary")[2]


@pytest.mark.parametrize(
    ("method", "end"),
    [
        ("fedavg", ", or no silo for what all silos share"),
        ("fine-tuning", ", or no silo for what all silos share"),
        ("uefl", None),
        (TUNED, ", or no silo for what all silos share"),
    ],
)
def test_a_silo_that_was_left_out_of_training_has_no_model(method: str, end: str, capsys, tmp_path: Path) -> None:
    """By its own name and by that in the run; the silos that trained are named for a misspelt one."""
    tiny = ["width=8", "hidden_size=8", "rounds=1", "iterations=1", "epochs=1", "mc_samples=2"]
    tiny += ["logit_adjustment=none"]  # else models differ by the class frequencies of their silos
    tiny += ["num_codewords=8", "codebook_init=gaussian"] if method in ("uefl", TUNED) else []
    tiny += ["target_access=all", "fine_tuning_epochs=0"] if method == "uefl" else []
    rule = ["partitioner=leave-one-domain-out", "target=Hungary"]
    (experiment,) = parse_experiments([*method.split(), "heart", *tiny, *rule], ["uefl"], "default").values()
    folder, patients = run(experiment, tmp_path / "runs"), write_patients(tmp_path / "new.csv", slice(3))
    for silo in ("Hungary", "Hungary-held-out") if end is not None else ():
        code, out, err = predict(capsys, folder, patients, "--silo", silo)
        assert (code, out) == (2, "")
        assert err == (
            f"uefl: silo '{silo}' was left out of training, so it has no model of its own; use `--silo auto` for the "
            f"silo that fits the inputs best{end}\n"
        )
    if end is None:  # it may use all codewords by its settings
        assert predict(capsys, folder, patients, "--silo", "Hungary-held-out")[0] == 0
    else:
        known = "Cleveland-1, Switzerland-1, VA Long Beach-1"
        err = predict(capsys, folder, patients, "--silo", "Hungarian")[2]
        assert err == f"uefl: unknown silo 'Hungarian'; known: {known}\n"
    code, out, err = predict(capsys, folder, patients, "--silo", "auto")
    assert code == 0
    chosen = err.partition("the model of silo ")[2].strip()  # empty where the models of all silos are equal
    assert bool(chosen) == (method not in ("fedavg", "uefl"))
    assert predict(capsys, folder, patients, "--silo", chosen)[1] == out, "the same draws for the uncertainty"


def test_files_folders_and_archives_of_tables_give_the_same_rows(heart_run, capsys, tmp_path: Path) -> None:
    """The rows of two files in one command, whether they are named, in a folder or in an archive."""
    _, folder = heart_run
    (tmp_path / "new" / "deep").mkdir(parents=True)
    first = write_patients(tmp_path / "new" / "a.csv", slice(0, 3))
    second = write_patients(tmp_path / "new" / "deep" / "b.CSV", slice(3, 5))
    (tmp_path / "new" / "notes.txt").write_text("no table")
    with zipfile.ZipFile(tmp_path / "new.zip", "w") as archive:
        archive.write(first, "a.csv")
        archive.write(second, "deep/b.CSV")
    answers = [predict(capsys, folder, *i) for i in ([first, second], [tmp_path / "new"], [tmp_path / "new.zip"])]
    tables = [read_csv(out) for _, out, _ in answers]
    assert [code for code, *_ in answers] == [0, 0, 0]
    assert tables[0] == tables[1]
    assert [list(row.values())[1:] for row in tables[0]] == [list(row.values())[1:] for row in tables[2]]
    assert [row["file"] for row in tables[0]] == [f"{first}:{i}" for i in (2, 3, 4)] + [f"{second}:{i}" for i in (2, 3)]
    assert tables[2][4]["file"] == f"{tmp_path / 'new.zip'}/deep/b.CSV:3"
    assert answers[1][2].splitlines()[0] == "1 files skipped: no table by their name"


def test_a_table_in_which_everything_is_bad_does_not_fail_the_others(heart_run, capsys, tmp_path: Path) -> None:
    """Bad tables are named and counted; the exit code is 2 only if no row is left."""
    _, folder = heart_run
    good = write_patients(tmp_path / "good.csv", slice(2))
    old = write_patients(tmp_path / "old.csv", slice(2), age="old")
    short, empty, sheet = tmp_path / "short.csv", tmp_path / "empty.csv", tmp_path / "sheet.csv"
    short.write_text("age,sex\n50,Male\n")
    empty.write_text("")
    sheet.write_bytes(b"PK\x03\x04 no text")
    bad = [old, short, empty, sheet]
    code, out, err = predict(capsys, folder, old, good, *bad[1:])
    assert (code, len(read_csv(out))) == (0, 2)
    reasons = [
        f"{old}: none of the 2 rows is usable; the first: {old}: line 2: age 'old' is not a number",
        f"{short}: no column 'cp'; the columns are age, sex",
        f"{empty}: the file is empty; it needs the columns age, sex, cp",
        f"{sheet}: an Excel workbook or zip archive; save the sheet as CSV in UTF-8",
    ]
    *lines, summary = err.splitlines()
    for line, reason in zip(lines, reasons, strict=True):
        assert line.startswith(f"skipped: {reason}")
    assert summary == "2 predicted with the model of all silos; 4 bad ones skipped"
    code, out, err = predict(capsys, folder, *bad)
    assert (code, out) == (2, "")
    assert err.startswith(f"uefl: none of the 4 tables is usable; the first: {reasons[0]}")
    code, out, err = predict(capsys, folder, short)
    assert (code, out) == (2, "")
    assert err.startswith(f"uefl: {reasons[1]}")
    (tmp_path / "none").mkdir()
    code, out, err = predict(capsys, folder, tmp_path / "none")
    assert (code, err) == (2, f"uefl: {tmp_path / 'none'}: no tables found; their names end in .csv or .tsv\n")
