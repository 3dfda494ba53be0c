"""The preview of a table counts what the table holds."""

import io
from pathlib import Path

import torch
from rich.console import Console

from uefl.data.defaults import get_default_config
from uefl.data.table_preview import draw_table_silos, make_column_tables, make_silo_table


def test_heart_is_shown_with_label_mix_missing_share_and_ranges(tmp_path: Path) -> None:
    config = get_default_config("heart")
    images = config.read_images()
    silos = config.make_silos(images, 0)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(make_silo_table(silos, images))
    (columns,) = make_column_tables(silos, images)
    console.print(columns)
    text = console.export_text()
    (silo_row,) = [line for line in text.splitlines() if "Switzerland" in line and "positive" in line]
    x = torch.cat([images.x[images.silo_ids == k] for k in (images.silos.index("Switzerland"),)])
    assert "positive 93%, negative 7%" in silo_row  # 115 of 123 patients
    assert f"{float(x.isnan().double().mean()):.0%}" in silo_row
    rows = {line.split("│")[1].strip(): line for line in text.splitlines() if line.count("│") > 4}
    age = images.x[images.silo_ids == images.silos.index("Cleveland"), 0]
    assert f"{float(age.min()):g} to {float(age.max()):g}" in rows["age"]
    assert "all missing" in rows["chol"].split("│")[5]  # never measured in Switzerland
    assert "asymptomatic" in rows["cp"]
    path = draw_table_silos(silos, images, tmp_path / "silos.png")
    assert path.stat().st_size > 1000
    assert draw_table_silos(silos, images, path).name == "silos-2.png"


def test_many_silos_are_shown_in_several_tables_that_fit_80_characters() -> None:
    config = get_default_config("heart")
    images = config.read_images()
    silos = [silo for _ in range(4) for silo in config.make_silos(images, 0)][:14]
    tables = make_column_tables(silos, images)
    assert [len(table.columns) for table in tables] == [6, 6, 6]
    assert [table.caption for table in tables] == [None, None, "the first 12 of 14 silos"]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(*tables)
    text = console.export_text()
    assert text.count("28 to 77") == 3, "the age in Cleveland is shown whole"
    assert max(map(len, text.splitlines())) <= 80
