"""The documentation matches the code: its example, files, commands, settings and test names exist."""

import re
import shlex
from pathlib import Path

import pytest

from uefl.experiment.parsing import parse_experiments

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "flower_app" / "README.md"])
CURRENT_PAGES = [page for page in PAGES if page.name != "CHANGELOG.md"]
TREE_ROOTS = ("benchmarks", "docs", "examples", "flower_app", "results", "studies", "uefl")


def list_commands(text: str) -> list[list[str]]:
    """List the `uefl run` and `uefl compare` commands in code blocks, with shell variables replaced."""
    variables = dict(re.findall(r'^([A-Z]+)="(.*)"$', text, re.M))
    lines = [line for block in re.findall(r"```\n(.*?)```", text, re.S) for line in block.splitlines()]
    commands = [re.sub(r"\$([A-Z]+)", lambda m: variables[m[1]], line) for line in lines if line.startswith("uefl ")]
    return [shlex.split(command, comments=True)[1:] for command in commands if "…" not in command]


def test_the_readme_shows_the_quickstart_example() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README, re.S)
    example = (ROOT / "examples" / "quickstart.py").read_text()
    assert block.strip() in example  # test_examples runs it


def test_the_readme_has_at_most_150_lines() -> None:
    assert len(README.splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_links_to_exists(page: Path) -> None:
    for name in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        assert "://" in name or (page.parent / name).exists(), name


def test_the_readme_names_every_folder() -> None:
    folders = [path for root in TREE_ROOTS for path in (ROOT / root, *(ROOT / root).rglob("*")) if path.is_dir()]
    for folder in folders:
        if any(path.is_file() for path in folder.iterdir()) and "__pycache__" not in folder.parts:
            assert f"\n{folder.relative_to(ROOT).as_posix()}/ " in README, folder


@pytest.mark.parametrize("page", CURRENT_PAGES, ids=lambda page: page.name)
def test_every_command_on_a_page_has_valid_settings(page: Path) -> None:
    for command, *arguments in list_commands(page.read_text()):
        if command in ("run", "compare"):
            settings = arguments[: next((i for i, a in enumerate(arguments) if a.startswith("--")), len(arguments))]
            assert parse_experiments(settings, ["uefl"], "default")


@pytest.mark.parametrize("page", CURRENT_PAGES, ids=lambda page: page.name)
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    tests = "\n".join(f"{path.name}\n{path.read_text()}" for path in (ROOT / "tests").rglob("test_*.py"))
    for name in re.findall(r"`(test_\w+(?:\.py)?)`", page.read_text()):
        assert f"def {name}(" in tests or f"{name}\n" in tests, name


def test_the_page_on_algorithm_1_names_code_that_exists() -> None:
    sources = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "uefl").rglob("*.py")}
    table = (ROOT / "docs" / "algorithm.md").read_text().partition("## ")[0]
    for name in re.findall(r"`([\w./]+)[`(]", table):
        *owner, member = [name] if name.endswith(".py") else name.split(".")
        pattern = rf"^ *(def {member}\(|{member}: |class {member}\b)"
        files = [text for text in sources.values() if not owner or re.search(rf"^class {owner[0]}\b", text, re.M)]
        assert name in sources or any(re.search(pattern, text, re.M) for text in files), name


@pytest.mark.parametrize(
    "block", re.findall(r"```diff\n(.*?)```", (ROOT / "docs" / "contributing.md").read_text(), re.S)
)
def test_the_diffs_for_contributors_fit_the_code(block: str) -> None:
    for path, lines in re.findall(r"^\+\+\+ b/(\S+)\n(.*?)(?=^--- |\Z)", block, re.M | re.S):
        context = [line[1:] for line in lines.splitlines() if line.startswith(" ")]
        assert not context or set(context) <= set((ROOT / path).read_text().splitlines()), path
