"""A shell completes commands, methods, data sets, partitioners and encoders, and never imports torch for it."""

import os
import subprocess
import sys

import pytest

CODE = """
import sys
from uefl.cli.main import main
sys.argv = ["uefl"]
try:
    main()
finally:
    print("torch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("uefl comp", ["compare"]),
        ("uefl run uef", ["uefl"]),
        ("uefl run uefl mni", ["mnist5k", "mnist"]),
        ("uefl run partitioner=leave", ["partitioner=leave-one-domain-out", "partitioner=leave-one-domain-out-paired"]),
        ("uefl list fedb", ["fedbn", "fedbr"]),
        ("uefl data show cifar", ["cifar10", "cifar100"]),
    ],
)
def test_tab_completes_names(words: str, offered: list[str]) -> None:
    completion = {"_UEFL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    result = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, env={**os.environ, **completion}, timeout=300
    )
    assert result.stdout.split() == [*offered, "False"], result.stderr


def test_the_script_for_a_shell_can_be_printed() -> None:
    environment = {**os.environ, "_UEFL_COMPLETE": "source_bash"}
    result = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=environment, timeout=300)
    assert "complete -o default -F _uefl_completion uefl" in result.stdout
