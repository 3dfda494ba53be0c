"""Mistakes in options, commands and arguments are answered as those in settings are: in one line, with exit code 2."""

import os
import subprocess
import sys

import pytest
import typer
from harness import call_cli, call_with_mistake

from uefl.cli.main import app

COMMANDS = ", ".join(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["run", "--devise", "cuda"],
            "unknown option '--devise' of `uefl run` (did you mean '--device'?); known: --out, --device, --threads, "
            "--workers, --preset, --engine, --skip-bad, --strict, --help",
        ),
        (["comparee"], f"unknown command 'comparee' (did you mean 'compare'?); known: {COMMANDS}"),
        (["xyz"], f"unknown command 'xyz'; known: {COMMANDS}"),
        (["-h"], "unknown option '-h'; known: --version, --install-completion, --show-completion, --help"),
        (["data", "shw"], "unknown command 'shw' of `uefl data` (did you mean 'show'?); known: show"),
        (["compare", "--workers", "x"], "--workers: 'x' is not a whole number"),
        (["watch", "run", "new", "--level", "low"], "--level: 'low' is not a number"),
        (["predict"], "missing argument RUN of `uefl predict`: folder of a finished run, or a model file"),
        (
            ["deploy", "init", "new", "north"],
            "missing option --address of `uefl deploy init`: host name or address at which silos reach the coordinator",
        ),
        (["demo", "digits"], "got unexpected extra argument (digits); see `uefl demo --help`"),
        (["run", "--device"], "option '--device' requires an argument"),
        (["run", "--a\nb"], "unknown option '--a b' of `uefl run`; known: --out, --device, --threads, --workers, "),
    ],
)
def test_a_typing_error_is_one_line_that_names_what_is_allowed(arguments: list[str], message: str) -> None:
    line = call_with_mistake(*arguments)
    assert line.startswith(message) if message.endswith(" ") else line == message


def test_a_misspelt_command_of_a_deployment_names_the_nearest_one() -> None:
    message = call_with_mistake("deploy", "dctor")
    assert message.startswith("unknown command 'dctor' of `uefl deploy` (did you mean 'doctor'?); known: init, serve,")


@pytest.mark.parametrize("arguments", [[], ["data"], ["deploy"]])
def test_a_group_without_a_command_prints_its_help(arguments: list[str]) -> None:
    """As a process, since the help goes to the terminal by itself; the exit code is that of click."""
    command = [sys.executable, "-m", "uefl.cli.main", *arguments]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, "COLUMNS": "80"})
    assert (answer.returncode, answer.stderr) == (2, "")
    assert "Usage: " in answer.stdout
    assert "--help" in answer.stdout


def test_help_is_no_mistake() -> None:
    answer = call_cli("predict", "--help")
    assert (answer.code, answer.stderr) == (0, "")
