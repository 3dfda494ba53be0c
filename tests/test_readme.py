"""The README's Python runs as it stands, and it is the quickstart example word for word."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_readme_shows_the_quickstart_example() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README, re.S)
    example = (ROOT / "examples" / "quickstart.py").read_text()
    assert block.strip() in example  # test_examples runs it


def test_every_file_the_readme_names_is_there() -> None:
    for name in re.findall(r"\]\(([^)#h][^)#]*)\)", README):
        assert (ROOT / name).exists(), name
