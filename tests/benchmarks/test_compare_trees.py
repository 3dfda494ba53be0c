"""The comparison of two source trees: which names a tree needs, and one turn in this one."""

import pytest
import typer

from benchmarks.compare_trees import ADAPTERS, BENCHMARKS, NEW_TREE, WORKER, detect_version, run_turn, save_data
from benchmarks.harness import Options
from benchmarks.trees_table import render_table


def test_a_tree_is_recognized_by_its_modules(tmp_path):
    assert detect_version(NEW_TREE) == "present"
    with pytest.raises(typer.BadParameter, match="has no"):
        detect_version(tmp_path)
    (tmp_path / "uefl").mkdir()
    (tmp_path / "uefl" / "federation.py").touch()
    assert detect_version(tmp_path) == "0.1"


@pytest.mark.parametrize("version", ADAPTERS)
def test_the_program_of_a_turn_compiles(version):
    compile(WORKER.format(adapter=ADAPTERS[version]), version, "exec")


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_turn_runs_in_this_tree(name, tmp_path):
    options, size = Options(tiny=True), BENCHMARKS[name].tiny
    save_data(name, options, size, tmp_path / "silos.safetensors")
    result = run_turn(NEW_TREE, name, options, size, "serial", tmp_path / "silos.safetensors")
    assert result["seconds"] > 0
    assert 0 <= result["accuracy"] <= 1


def test_a_failed_turn_reports_the_error(tmp_path):
    with pytest.raises(RuntimeError, match="a turn of frameworks"):
        run_turn(NEW_TREE, "frameworks", Options(tiny=True), BENCHMARKS["frameworks"].tiny, "serial", tmp_path / "no")


@pytest.mark.records
def test_the_readme_shows_the_table_of_the_records():
    assert render_table() in (NEW_TREE / "benchmarks" / "README.md").read_text()
