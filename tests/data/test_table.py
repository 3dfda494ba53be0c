"""Tables: what their cells become, what silos send for it, and what is said about bad input."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from uefl.core.errors import InputError
from uefl.data.config import DataConfig
from uefl.data.defaults import get_default_config
from uefl.data.readers.context import ReadContext
from uefl.data.readers.heart import HEART_FILE
from uefl.data.readers.table import read_table, read_training_table
from uefl.data.table_config import TableConfig
from uefl.data.table_format import Column, ColumnSums, TableFormat, compute_sums, scale_by_sums
from uefl.experiment.parsing import parse_experiments

HEADER = "age,chol,pain,smoker,ill,site"
PAINS, ANSWERS = ("none", "mild", "strong"), ("yes", "No")
ROWS = [
    f"{40 + i},{200 + 7 * i if i % 3 else 0},{PAINS[i % 3]},{ANSWERS[i % 2]},{i % 2},{'ns'[i % 2]}" for i in range(12)
]


def write_csv(folder: Path, lines: list[str], *, encoding: str = "utf-8") -> Path:
    path = folder / "own.csv"
    path.write_bytes("\n".join(lines).encode(encoding))
    return path


def read(path: Path, *, skip_bad: bool = False, group: str = "", **fields: Any):
    config = TableConfig(**{"label": "ill", "silo": "site", **fields})
    return read_training_table("table", path, ReadContext(skip_bad=skip_bad, table=config, group=group))


def load(path: Path, **fields: Any):
    config = TableConfig(**{"label": "ill", "silo": "site", "missing": ("chol=0",), **fields})
    return DataConfig(
        name="table", path=str(path), partitioner="natural", shifts=(), num_silos=(), train_per_silo=0,
        test_per_silo=0, table=config,
    ).load(0)  # fmt: skip


def test_kinds_and_levels_are_guessed_from_the_cells(tmp_path: Path) -> None:
    images = read(write_csv(tmp_path, [HEADER, *ROWS]), missing=("chol=0",))
    assert images.table is not None
    kinds = {column.name: (column.kind, column.levels) for column in images.table.columns}
    assert kinds == {
        "age": ("numeric", ()),
        "chol": ("numeric", ()),
        "pain": ("categorical", ("mild", "none", "strong")),
        "smoker": ("boolean", ()),
    }
    assert images.classes == ("0", "1")
    assert images.silos == ("n", "s")
    assert images.x[:, 1].isnan().tolist() == [i % 3 == 0 for i in range(12)]  # chol=0 is missing


def test_missing_values_become_zero_and_an_indicator(tmp_path: Path) -> None:
    silos, images = load(write_csv(tmp_path, [HEADER, *ROWS]))
    table = images.table
    assert table is not None
    assert [c.num_features for c in table.columns] == [1, 2, 3, 1]
    x = table.encode(images.x)
    missing = images.x[:, 1].isnan()
    assert x[missing, 1].tolist() == [0.0] * 4
    assert x[:, 2].tolist() == missing.float().tolist()
    assert x[:, 3:6].sum(1).tolist() == [1.0] * 12  # one level per row
    assert set(x[:, 6].tolist()) == {-1.0, 1.0}
    assert silos[0].train.x.dtype == torch.float32


def test_scaling_uses_only_the_sums_of_training_rows() -> None:
    """Mean and deviation of the pooled training rows follow from the sums; validation and test rows have no part."""
    config = get_default_config("heart")
    images = config.read_images()
    silos = config.make_silos(images, 3)
    assert images.table is not None
    sums = [compute_sums(images.table, silo.train.x) for silo in silos]
    scaled = scale_by_sums(images.table, sums)
    pooled = torch.cat([silo.train.x for silo in silos])
    for i, column in enumerate(scaled.columns):
        present = pooled[:, i][pooled[:, i].isfinite()]
        assert column.has_indicator == (len(present) < len(pooled)), column.name
        if column.kind == "numeric":
            assert column.mean == pytest.approx(float(present.mean()), rel=1e-12)
            assert column.std == pytest.approx(float(present.std(correction=0)), rel=1e-9)
    loaded, _ = config.load(3)
    assert torch.equal(loaded[0].test.x, scaled.encode(silos[0].test.x))


def test_given_constants_take_the_place_of_sums(tmp_path: Path) -> None:
    _, images = load(write_csv(tmp_path, [HEADER, *ROWS]), scale=("age=50,10",))
    assert images.table is not None
    age, chol = images.table.columns[:2]
    assert (age.mean, age.std) == (50.0, 10.0)
    assert chol.mean != 0.0


def test_a_constant_column_and_a_large_offset_stay_finite() -> None:
    table = TableFormat((Column("constant", "numeric"), Column("seconds", "numeric")))
    values = torch.stack([torch.full((50,), 7.0), 1.6e9 + torch.arange(50.0)], 1).double()
    x = scale_by_sums(table, [compute_sums(table, values)]).encode(values)
    assert x[:, 0].abs().max() == 0
    assert x[:, 1].abs().max() < 10
    empty = scale_by_sums(table, [ColumnSums(3, (0, 0), (0.0, 0.0), (0.0, 0.0))])
    assert empty.encode(torch.full((1, 2), math.nan)).tolist() == [[0.0, 1.0, 0.0, 1.0]]


def test_a_format_survives_json_and_reads_new_rows(tmp_path: Path) -> None:
    path = write_csv(tmp_path, [HEADER, *ROWS])
    _, images = load(path)
    assert images.table is not None
    table = TableFormat.from_json(images.table.to_json())
    assert table == images.table
    new = tmp_path / "new.csv"
    new.write_text("pain;smoker;age;chol;remark\nmild;no;50;\nmild;no;50;;x\nsevere;no;50;;x\nstrong;yes;unknown;1;x\n")
    rows = read_table(new, table)
    assert rows.lines == [3]
    assert [message.partition("new.csv: ")[2] for message in rows.skipped] == [
        "line 2: 4 cells, but there are 5 columns",
        "line 4: pain 'severe' is not one of its levels: mild, none, strong",
        "line 5: age 'unknown' is not a number; set missing.age=unknown if it means missing, or categorical=age",
    ]
    assert rows.x.shape == (1, table.num_features)
    whole = read_table(path, table)
    assert torch.equal(whole.x, table.encode(images.x))


@pytest.mark.parametrize("text", ["", "[]", '{"columns": []}', '{"columns": [{"name": "a"}]}', "{" * 9])
def test_a_damaged_format_is_rejected(text: str) -> None:
    with pytest.raises(InputError, match="the format of a table is damaged"):
        TableFormat.from_json(text)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "the file is empty; it needs the columns ill, site"),
        ([HEADER], "no rows below the names of the columns"),
        (["age,chol", "1,2"], "no column 'ill'; the columns are age, chol"),
        ([HEADER + ",age", *(r + ",1" for r in ROWS)], "two columns are named 'age'"),
        (["Export of 1 May", "", HEADER, *ROWS], "line 3 names the columns, but 1 line stands before it; remove it"),
        ([HEADER, *ROWS, "1,2,3"], "line 14: 3 cells, but there are 6 columns"),
        ([HEADER, *ROWS, HEADER], "line 14: repeats the names of the columns"),
        ([HEADER, *ROWS, "50,210,mild,yes,,n"], "line 14: column 'ill' is empty"),
        ([HEADER, *ROWS, "50,210,mild,yes,1,"], "line 14: column 'site' is empty"),
        ([HEADER, *ROWS, "fifty,210,mild,yes,1,n"], "line 14: age 'fifty' is not a number; set missing.age=fifty"),
        ([HEADER, *ROWS, "inf,210,mild,yes,1,n"], "line 14: age 'inf' is not a number"),
        ([HEADER, *ROWS, '"50,5",210,mild,yes,1,n'], "line 14: age '50,5' has a decimal comma; set decimal_comma=true"),
    ],
)  # fmt: skip
def test_bad_input_gets_one_line_or_a_counted_skip(tmp_path: Path, lines: list[str], message: str) -> None:
    path = write_csv(tmp_path, lines)
    with pytest.raises(InputError) as caught:
        read(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    if "line" in message and "names" not in message:
        assert read(path, skip_bad=True).num_skipped == 1


def test_spreadsheet_habits_are_read(tmp_path: Path) -> None:
    """A byte-order mark, semicolons, decimal commas, empty lines, spaces and a column without a name."""
    lines = [";" + HEADER.replace(",", "; "), ";;;;;;", *("1;" + r.replace(",", ";") for r in ROWS), "", " ; "]
    lines[2] = lines[2].replace(";40;", ";40,5;")
    images = read(write_csv(tmp_path, lines, encoding="utf-8-sig"), decimal_comma=True)
    assert images.x.shape == (12, 4)
    assert images.x[0, 0] == 40.5
    assert "1 column without a name ignored" in images.notes


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"PK\x03\x04xx", "an Excel workbook or zip archive; save the sheet as CSV in UTF-8"),
        ("ill;site\nä;b".encode("latin-1"), "not a CSV file in UTF-8"),
        ("ill,site\na,b".encode("utf-16"), "not a CSV file in UTF-8"),
    ],
)
def test_other_files_are_named(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "own.csv").write_bytes(data)
    with pytest.raises(InputError, match=message):
        read(tmp_path / "own.csv")


def test_a_column_that_is_half_text_needs_a_declaration(tmp_path: Path) -> None:
    rows = [r.replace(str(40 + i), "old", 1) if i % 2 else r for i, r in enumerate(ROWS)]
    path = write_csv(tmp_path, [HEADER, *rows])
    with pytest.raises(InputError) as caught:
        read(path)
    assert "column 'age' has 6 numbers and 6 texts, such as 'old'; set categorical=age, numeric=age with" in str(
        caught.value
    )
    assert read(path, numeric=("age",), missing=("age=old",)).x[:, 0].isnan().sum() == 6
    assert len(read(path, categorical=("age",)).table.columns[0].levels) == 7


@pytest.mark.parametrize(
    "date", ["2023-05-{:02d}", "{:02d}/05/2023", "{}.5.23", "2023-05-{:02d}T08:30:00Z", "{} May 2023"]
)
def test_a_column_of_dates_is_named_as_such(tmp_path: Path, date: str) -> None:
    """Few dates would pass as categories, many as names; a declared kind is not questioned."""
    remedy = "set ignore=visit, or convert it to a number, such as the days since an event"
    for days in (2, 28):
        cells = [date.format(1 + i % days) for i in range(60)]
        path = write_csv(tmp_path, ["visit,age,ill", *(f"{cell},{i},{i % 2}" for i, cell in enumerate(cells))])
        with pytest.raises(InputError) as caught:
            read(path, label="ill", silo="")
        assert str(caught.value) == f"{path}: column 'visit' has 60 dates, such as '{cells[0]}'; {remedy}"
    assert len(read(path, label="ill", silo="", ignore=("visit",)).y) == 60
    assert len(read(path, label="ill", silo="", categorical=("visit",)).y) == 60
    with pytest.raises(InputError, match=f"line 2: visit '{cells[0]}' is a date, not a number; {remedy}"):
        read(path, label="ill", silo="", numeric=("visit",))


@pytest.mark.parametrize(
    ("cell", "is_ambiguous"),
    [("1,234", True), ("1,234.5", False), ("1,234,567", False), ("1.234,5", False), ("1 234", False)],
)
def test_separated_thousands_are_named_as_such(tmp_path: Path, cell: str, is_ambiguous: bool) -> None:
    """A comma before three digits may also be a decimal one."""
    message = f"line 2: cost '{cell}' separates thousands; remove the separators from the file"
    message += "; if it is a decimal comma, set decimal_comma=true" if is_ambiguous else ""
    for fraction in (2, 10):  # half of the cells, or a few of them
        cells = [f'"{cell}"' if i % fraction == 0 else "999" for i in range(20)]
        path = write_csv(tmp_path, ["cost,ill", *(f"{text},{i % 2}" for i, text in enumerate(cells))])
        with pytest.raises(InputError) as caught:
            read(path, label="ill", silo="")
        assert str(caught.value) == f"{path}: {message}"


def test_a_column_of_names_needs_a_declaration(tmp_path: Path) -> None:
    rows = [f"{name},{r}" for name, r in zip([f"patient {i}" for i in range(60)], ROWS * 5)]
    path = write_csv(tmp_path, [f"who,{HEADER}", *rows])
    with pytest.raises(
        InputError, match="column 'who' has 60 different texts, such as 'patient 0'; set group=who if it"
    ):
        read(path)
    assert [c.name for c in read(path, ignore=("who",)).table.columns] == ["age", "chol", "pain", "smoker"]


@pytest.mark.parametrize(
    ("name", "is_identifier"), [("patient_id", True), ("patientId", True), ("ID", True), ("acid", False)]
)
def test_whole_numbers_of_a_column_called_id_are_warned_about(name: str, is_identifier: bool, tmp_path: Path) -> None:
    path = write_csv(tmp_path, [f"{name},{HEADER}", *(f"{i % 7},{row}" for i, row in enumerate(ROWS * 5))])
    warnings = [line for line in read(path).warnings if name in line]
    assert warnings == [line for line in warnings if f"set group={name} if it names patients" in line]
    assert bool(warnings) == is_identifier
    assert not any(name in line for line in read(path, ignore=(name,)).warnings)


def test_a_column_that_numbers_the_rows_is_warned_about() -> None:
    config = TableConfig(label="num", positive=("above:0",), silo="dataset")
    images = read_training_table("table", HEART_FILE, ReadContext(table=config))
    assert images.warnings == ("column 'id' has another whole number in every row; set ignore=id",)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"label": ""}, "table needs the column with the class of a row: set label=<column>"),
        ({"ignore": ("weight",)}, "ignore names column 'weight', but .* has only age, chol"),
        ({"missing": ("weight=0",)}, "missing names column 'weight'"),
        ({"missing": ("chol",)}, r"missing=chol must give each column once: missing.<column>=<value>"),
        ({"scale": ("age=50",)}, "scale.age=50 must be mean,deviation, such as 54,9"),
        ({"scale": ("age=50,0",)}, "scale.age=50,0 must be mean,deviation"),
        ({"scale": ("smoker=1,1",)}, "scale.smoker needs a numeric column, but smoker is boolean"),
        ({"scale": ("pain=1,1",)}, "scale.pain needs a numeric column, but pain is categorical"),
        ({"levels": ("pain=mild,none",)}, "line 4: pain 'strong' is not one of its levels: mild, none"),
        ({"numeric": ("age",), "ignore": ("age",)}, "column 'age' stands twice in numeric, categorical, boolean"),
        ({"numeric": ("age",), "levels": ("age=40",)}, "levels.age needs a categorical column, but age is numeric"),
        ({"positive": ("above:x",)}, "positive=above:x must be label values, or above:<number>"),
        ({"positive": ("nosuch",)}, "positive=nosuch is not a value of 'ill', which has 0, 1"),
        ({"positive": ("1", "2")}, "positive=2 is not a value of 'ill', which has 0, 1"),
        ({"positive": ("0", "1")}, "positive=0,1 makes every row positive; 'ill' has 0, 1"),
        ({"positive": ("above:7",)}, "positive=above:7 makes every row negative; 'ill' has 0, 1"),
        ({"silo": "ill"}, "silo=ill and label=ill name the same column"),
        ({"ignore": ("ill",)}, "ignore=ill and label=ill name the same column"),
        ({"ignore": ("age", "chol", "pain", "smoker")}, "no column is left as input of the network"),
    ],
)
def test_settings_that_do_not_fit_are_named(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    path = write_csv(tmp_path, [HEADER, *ROWS])
    with pytest.raises(InputError, match=message):
        read(path, **fields)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["digits", "label=x"], "label has no effect: it needs a table, but digits is no table"),
        (["digits", "scale.age=5,1"], "scale has no effect: it needs a table, but digits is no table"),
        (["heart", "image_size=8"], "image_size has no effect: it needs images, but heart is a table"),
    ],
)
def test_settings_of_another_kind_of_source_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_experiments(["uefl", *arguments], [], "default")


def test_a_column_may_have_the_name_of_a_setting() -> None:
    (experiment,) = parse_experiments(["uefl", "heart", "missing.alpha=0"], [], "default").values()
    assert "alpha=0" in experiment.data.table.missing


def test_labels_may_be_several_classes_or_a_rule(tmp_path: Path) -> None:
    path = write_csv(tmp_path, [HEADER, *ROWS])
    assert read(path, label="pain").classes == ("mild", "none", "strong")
    by_rule = read(path, label="age", positive=("above:45",))
    assert by_rule.classes == ("negative", "positive")
    assert by_rule.y.tolist() == [0] * 6 + [1] * 6
    by_value = read(path, label="pain", positive=("mild", "strong"))
    assert by_value.y.tolist() == [0, 1, 1] * 4


def test_the_positive_class_of_two_texts_is_named(tmp_path: Path) -> None:
    path = write_csv(tmp_path, [HEADER, *ROWS])
    assert read(path, label="smoker").notes == (
        "'yes' counts as the positive class of 'smoker'; set positive=No for the other one",
    )
    assert read(path, label="smoker", positive=("No",)).notes == ()
    assert read(path).notes == ()  # 1 of 0 and 1
    path = write_csv(tmp_path, [HEADER, *(r.replace(",0,n", ",-1,n") for r in ROWS)])
    assert read(path).notes == ("'-1' counts as the positive class of 'ill'; set positive=1 for the other one",)


def test_labels_are_compared_as_numbers_too(tmp_path: Path) -> None:
    path = write_csv(tmp_path, [HEADER, *(r.replace(",1,s", ",1.0,s").replace(",0,n", ",0.0,n") for r in ROWS)])
    assert read(path, positive=("1",)).y.tolist() == [0, 1] * 6


def test_a_table_of_one_class_is_refused_unless_it_is_one_silo_of_several(tmp_path: Path) -> None:
    path = write_csv(tmp_path, [HEADER, *ROWS[::2]])
    with pytest.raises(InputError, match="label column 'ill' has only the value '0', but training needs two classes"):
        read(path)
    config = TableConfig(label="ill", positive=("1",))
    images = read_training_table("table", path, ReadContext(table=config, is_one_silo=True))
    assert images.y.tolist() == [0] * 6


def test_a_split_column_decides_what_is_tested(tmp_path: Path) -> None:
    rows = [f"{r},{'test' if i > 8 else 'train'}" for i, r in enumerate(ROWS)]
    images = read(write_csv(tmp_path, [f"{HEADER},part", *rows]), split="part")
    assert images.is_test.tolist() == [False] * 9 + [True] * 3


def test_heart_has_four_hospitals_and_zeros_are_missing() -> None:
    silos, images = get_default_config("heart").load(0)
    assert {silo.name: sum(len(e.y) for e in (silo.train, silo.validation, silo.test)) for silo in silos} == {
        "Cleveland": 304,
        "Hungary": 293,
        "Switzerland": 123,
        "VA Long Beach": 200,
    }
    assert images.classes == ("negative", "positive")
    assert torch.bincount(images.y).tolist() == [411, 509]
    table = images.table
    assert table is not None
    names = [column.name for column in table.columns]
    chol, trestbps = images.x[:, names.index("chol")], images.x[:, names.index("trestbps")]
    assert (int(chol.isnan().sum()), int(trestbps.isnan().sum())) == (172 + 30, 1 + 59)
    assert float(chol.nan_to_num(999).min()) > 0


def test_the_rows_of_a_table_are_not_shifted() -> None:
    config = get_default_config("heart", "domains")
    with pytest.raises(InputError, match="shift 'rotate:0' needs images, but heart is a table"):
        config.load(0)
    silos, _ = get_default_config("heart", "dirichlet").load(0)
    assert len(silos) == 10
