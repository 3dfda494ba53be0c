"""The package imports on Windows and macOS: no module of it needs a module that only POSIX has."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import uefl

POSIX_ONLY = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog", "posix_ipc", "crypt", "spwd", "nis")
ROOT = Path(uefl.__file__).parent
MODULES = sorted(
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in ROOT.rglob("*.py")
    if "app" not in path.relative_to(ROOT).parts
)
# Only our own modules are hidden from: other packages know the system they run on.
HIDE = """
import builtins, importlib, sys
hidden, real_import, missing = set({names!r}), builtins.__import__, []
def import_without_posix(name, globals=None, *rest):
    if name.partition(".")[0] in hidden and (globals or {{}}).get("__name__", "").partition(".")[0] == "uefl":
        raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
    return real_import(name, globals, *rest)
builtins.__import__ = import_without_posix
for module in {modules!r}:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as e:
        if e.name in hidden:
            missing.append(f"{{module}}: {{e.name}}")
print(missing)
"""


def test_no_module_imports_what_only_posix_has() -> None:
    code = HIDE.format(names=POSIX_ONLY, modules=MODULES)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.stdout.splitlines()[-1:] == ["[]"], result.stderr


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_calls_what_only_posix_has_when_it_is_imported(path: Path) -> None:
    """Attributes of os and signal that Windows lacks stand inside functions, which run only when they are called."""
    posix_only = {
        "os": {"fork", "getuid", "geteuid", "setsid", "killpg", "getpgid", "uname", "sysconf"},
        "signal": {"SIGKILL", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGCHLD", "alarm", "pthread_sigmask"},
    }
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert node.attr not in posix_only.get(node.value.id, ()), ast.unparse(node)
