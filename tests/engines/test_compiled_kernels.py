"""The Triton kernels compile for a GPU, and those bound by memory access vectors, also in a batch of any size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import import_or_skip

PROGRAM = Path(__file__).with_name("compile_kernels.py")


@pytest.fixture(scope="module")
def accesses() -> dict[str, dict[str, int]]:
    import_or_skip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, str(PROGRAM)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    counts: dict[str, dict[str, int]] = json.loads(done.stdout)
    return counts


def test_all_kernels_compile(accesses: dict[str, dict[str, int]]) -> None:
    """What the interpreter accepts, the compiler may not: a type in a variable, for example."""
    assert len(accesses) == 22
    assert all(accesses.values())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kernel", ["batch norm", "group norm", "group norm, gradient", "pooling", "pooling, gradient"])
def test_kernels_bound_by_memory_read_and_write_vectors(
    kernel: str, dtype: str, accesses: dict[str, dict[str, int]]
) -> None:
    """If the compiler cannot know that neighbors are inside together, it reads one value at a time."""
    counts = accesses[f"{kernel}, {dtype}"]
    assert not [name for name in counts if name.startswith("ld.") and ".v4." not in name]
    num_single = sum(count for name, count in counts.items() if name.startswith("st.") and ".v4." not in name)
    assert num_single <= 2, "sums of a channel"


@pytest.mark.parametrize("kernel", ["convolution, fp32", "convolution, bf16", "filter gradient, bf16"])
def test_channels_are_read_as_vectors_while_products_run(kernel: str, accesses: dict[str, dict[str, int]]) -> None:
    """Triton 3.6 did not see that a block begins at a multiple of its size, and read its channels one by one."""
    counts = accesses[kernel]
    assert counts.get("cp.async.cg", 0) >= 6, "16 bytes at a time, while earlier blocks are multiplied"
    assert not {"ld.global.b16", "cp.async.ca"} & set(counts)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kernel", ["convolution of color images", "short filter gradient of color images"])
def test_kernels_read_the_channels_of_a_color_at_once(
    kernel: str, dtype: str, accesses: dict[str, dict[str, int]]
) -> None:
    """With three channels each value has an address of its own, and computing it takes longer than the products."""
    assert not {"ld.global.b16", "ld.global.b32", "st.global.b32"} & set(accesses[f"{kernel}, {dtype}"])
