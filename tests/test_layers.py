"""The folders are the architecture: who may import whom, and what `import uefl` costs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import uefl

ROOT = Path(uefl.__file__).parent
FOUNDATION = {
    "errors",
    "noise",
    "hashing",
    "augment",
    "codebook",
    "gaussian",
    "kmeans",
    "uncertainty",
    "federation",
    "aggregate",
    "local",
    "metrics",
    "plugins",
    "download",
}
MAY = {  # part of the package: parts it may import
    **dict.fromkeys(FOUNDATION, FOUNDATION),
    "algorithms": FOUNDATION | {"algorithms"},
    "engines": FOUNDATION | {"engines", "settings", "flower"},
    "models": FOUNDATION | {"models"},
    "checkpoint": FOUNDATION,
    "records": FOUNDATION,
    "settings": {"errors"},
    "data": {"errors", "noise", "federation", "plugins", "download", "data"},
    "experiment": FOUNDATION | {"settings", "algorithms", "models", "data"},
}


def part(module):
    """`uefl.algorithms.book` belongs to `algorithms`."""
    names = module.split(".")
    return names[1] if len(names) > 1 else ""


def imports(path, *, lazy=True):
    """Modules of the package that a file imports, those only for types apart."""
    tree = ast.parse(path.read_text())
    typing = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    skipped = {id(inner) for block in typing for inner in ast.walk(block)}
    nodes = ast.walk(tree) if lazy else tree.body
    for node in nodes:
        if id(node) in skipped:
            continue
        if isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names if node.module == "uefl")
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


FILES = [
    p for p in sorted(ROOT.rglob("*.py")) if part(".".join(["uefl", *p.relative_to(ROOT).with_suffix("").parts])) in MAY
]


def test_the_files_are_found():
    names = {p.stem for p in FILES}
    assert names >= {*FOUNDATION, "serial", "fedavg", "book", "net", "experiment"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_arrows_point_one_way(path):
    here = path.relative_to(ROOT).with_suffix("").parts[0]
    wanted = {part(m) for m in imports(path) if m.split(".")[0] == "uefl"} - {"", here, "__version__"}
    assert wanted <= MAY[here], f"{here} must not import {sorted(wanted - MAY[here])}"


def test_algorithms_and_engines_do_not_know_each_other():
    for one, other in (("algorithms", "engines"), ("engines", "algorithms")):
        found = [p for p in (ROOT / one).glob("*.py") for m in imports(p) if m.startswith(f"uefl.{other}")]
        assert found == []


def test_the_servers_half_of_the_wire_does_not_know_algorithms_either():
    for name in ("wire", "census", "reading"):  # what the Flower engine imports
        wanted = {part(m) for m in imports(ROOT / "flower" / f"{name}.py") if m.startswith("uefl.")}
        assert wanted <= FOUNDATION | {"engines", "flower"}


def test_the_foundation_has_no_circle():
    arrows = {n: {part(m) for m in imports(ROOT / f"{n}.py") if m.startswith("uefl.")} for n in FOUNDATION}
    while arrows:
        free = [n for n, to in arrows.items() if not to & arrows.keys()]
        assert free, f"a circle among {sorted(arrows)}"
        for name in free:
            del arrows[name]


HEAVY = {"flwr", "ray", "sklearn", "matplotlib", "mlxtend", "scipy", "pandas", "torchvision"}


def test_importing_brings_nothing_heavy_along():
    code = "import sys, uefl, uefl.experiment, uefl.engines; print(*{m.split('.')[0] for m in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    assert "torch" in done.stdout.split()
    assert not HEAVY & set(done.stdout.split())


def test_a_run_on_a_cpu_leaves_torchs_compiler_alone():
    """Which takes a second to import, and the classes of `torch.optim` do when made."""
    code = """
import sys
from stripes import ROUNDS, clients, play, short
from uefl.algorithms import UEFL, FedAvg
from uefl.local import Local
for method in (short(FedAvg), short(UEFL), FedAvg(**{**ROUNDS, "local": Local(optimizer="sgd")})):
    play(method, clients(method))
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parent)
    assert done.stdout == "False\n", done.stderr
