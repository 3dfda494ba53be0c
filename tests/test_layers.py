"""The folders are the architecture: floors that import only downwards, distinct names, and cheap imports."""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

import uefl

ROOT = Path(uefl.__file__).parent
FLOORS = (("core",), ("models",), ("data",), ("algorithms", "engines"), ("experiment",), ("flower",), ("cli",))
FILES = sorted(ROOT.rglob("*.py"))
ROOT_FILES = [path for path in FILES if path.parent == ROOT]
FLOOR_FILES = [path for path in FILES if path.parent != ROOT]


def get_module(path):
    """`uefl/core/noise.py` is `uefl.core.noise`; a package is its folder."""
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {get_module(path): path for path in FILES}


def get_package(module):
    """`uefl.algorithms.fedavg` is in the package `algorithms`."""
    return (*module.split("."), "")[1]


def list_imports(path, *, top_level_only=False):
    """Modules of uefl that a file imports at any depth, except those for type checking."""
    tree = ast.parse(path.read_text())
    type_checking = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    skipped = {id(inner) for block in type_checking for inner in ast.walk(block)}
    imports = set()
    for node in tree.body if top_level_only else ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            imports |= (names & MODULES.keys()) or {node.module}
            if node.module == "uefl":
                imports |= names - {"uefl.__version__"}
        elif isinstance(node, ast.Import):
            imports |= {alias.name for alias in node.names}
    return {name for name in imports if name.partition(".")[0] == "uefl"}


def list_allowed_packages(package):
    """The package itself and all floors below its own; packages of one floor never import each other."""
    level = next(i for i, floor in enumerate(FLOORS) if package in floor)
    return {package, *(name for floor in FLOORS[:level] for name in floor)}


def assert_acyclic(graph):
    graph = dict(graph)
    while graph:
        free = [name for name, targets in graph.items() if not targets & graph.keys() - {name}]
        assert free, f"an import cycle among {sorted(graph)}"
        for name in free:
            del graph[name]


def test_every_module_is_on_a_floor():
    packages = {get_package(get_module(path)) for path in FLOOR_FILES}
    assert packages == {name for floor in FLOORS for name in floor}
    assert len(ROOT_FILES) <= 6


@pytest.mark.parametrize("path", FLOOR_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_downwards(path):
    package = get_package(get_module(path))
    imported = {get_package(module) for module in list_imports(path)} - {""}
    forbidden = imported - list_allowed_packages(package)
    assert not forbidden, f"{package} must not import {sorted(forbidden)}"
    public_names = {f"uefl.{name}" for name in uefl.__all__}
    assert not list_imports(path) & public_names, (
        "public names are for users; modules import from where they are defined"
    )


def test_the_check_of_floors_finds_a_forbidden_import(tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text("def f():\n    from uefl.engines import serial\n    import uefl.cli.main\n")
    assert {get_package(module) for module in list_imports(wrong)} == {"engines", "cli"}
    assert "engines" not in list_allowed_packages("algorithms")
    assert "algorithms" not in list_allowed_packages("engines")
    assert all("cli" not in list_allowed_packages(name) for floor in FLOORS[:-1] for name in floor)


def test_the_root_imports_no_floor():
    for path in ROOT_FILES:
        assert not {get_package(module) for module in list_imports(path)} - {""}


def test_packages_have_no_cycle():
    graph = defaultdict(set)
    for path in FLOOR_FILES:
        package = get_package(get_module(path))
        graph[package] |= {get_package(module) for module in list_imports(path)} - {"", package}
    assert_acyclic(graph)


def test_modules_have_no_cycle():
    assert_acyclic({module: list_imports(path, top_level_only=True) for module, path in MODULES.items()})


def test_the_servers_side_of_flower_does_not_import_algorithms():
    for name in ("engine", "wire", "silo_registry", "reply_reader"):
        values = {"uefl", "uefl.experiment.settings", "uefl.data.table_format"}  # its version, and plain values
        imported = list_imports(ROOT / "flower" / f"{name}.py") - values
        assert {get_package(module) for module in imported} <= {"core", "engines", "flower"}


def normalize_stem(stem):
    """Remove endings of plurals and participles, so that stack, stacks, stacked and stacking are equal."""
    return "_".join(re.sub(r"(ings?|ed|es|s|e)$", "", word) or word for word in stem.split("_"))


def test_no_two_modules_have_nearly_the_same_name():
    names = defaultdict(list)
    for path in FLOOR_FILES:
        if path.stem != "__init__" and path.parent != ROOT / "cli":
            names[normalize_stem(path.stem)].append(str(path.relative_to(ROOT)))
            package = normalize_stem(path.parent.name)
            short = normalize_stem(path.stem).removeprefix(f"{package}_").removesuffix(f"_{package}")
            if short != normalize_stem(path.stem):  # within a package, its name distinguishes nothing
                names[f"{path.parent}/{short}"].append(str(path.relative_to(ROOT)))
            names[f"{path.parent}/{normalize_stem(path.stem)}"].append(str(path.relative_to(ROOT)))
    twins = [paths for paths in names.values() if len(paths) > 1]
    assert not twins


def test_public_names_are_resolved_lazily_and_typed():
    """The imports for type checkers and the table for `__getattr__` give the same names from the same modules."""
    tree = ast.parse((ROOT / "__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    typed = {alias.name: node.module for node in block.body for alias in node.names}
    assert typed == uefl._PUBLIC_NAMES
    assert sorted(uefl.__all__) == sorted(typed)
    for name, module in typed.items():
        assert getattr(uefl, name).__module__ == module
    assert set(dir(uefl)) >= {*uefl.__all__, "__version__"}
    with pytest.raises(AttributeError, match="module 'uefl' has no attribute 'Sillo'"):
        _ = uefl.Sillo


def test_no_public_name_hides_a_package():
    assert not set(uefl.__all__) & {path.stem for path in ROOT.iterdir()}


def list_loaded_modules(code):
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*{{m.split('.')[0] for m in sys.modules}})"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT.parent,
    )
    return set(done.stdout.split())


def test_importing_uefl_does_not_import_torch():
    assert "torch" not in list_loaded_modules("import uefl, uefl.algorithms, uefl.data, uefl.engines, uefl.models")


HEAVY = {"flwr", "ray", "sklearn", "matplotlib", "mlxtend", "scipy", "pandas", "torchvision"}


def test_importing_experiments_and_engines_imports_nothing_heavy_but_torch():
    loaded = list_loaded_modules("import uefl.experiment.experiment, uefl.engines.serial")
    assert "torch" in loaded
    assert not HEAVY & loaded


def test_a_run_on_a_cpu_does_not_import_torchs_compiler():
    """It takes a second to import, and the classes of `torch.optim` import it when they are created."""
    code = """
import sys
from harness import SHORT_RUN, make_clients, make_short_method, run_rounds
from uefl import UEFL, FedAvg, LocalTraining
sgd = FedAvg(**{**SHORT_RUN, "local": LocalTraining(optimizer="sgd")})
for method in (make_short_method(FedAvg), make_short_method(UEFL), sgd):
    run_rounds(method, make_clients(method))
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parent)
    assert done.stdout == "False\n", done.stderr
