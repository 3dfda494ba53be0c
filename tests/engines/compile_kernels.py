"""Compile the kernels of stacked silos for a GPU that need not be there, and print what their loads and stores are.

A program of its own: in the tests, Triton interprets its kernels, and its interpreter accepts more than its compiler.
"""

from __future__ import annotations

import collections
import json
import re
import sys
from collections.abc import Mapping
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel

from uefl.engines.stacked import batch_norm, convolution, group_norm, pooling

H200 = GPUTarget("cuda", 90, 32)
SUMS = {"center", "sums", "p", "q", "a", "means", "scales", "weight", "bias", "dw"}  # in float32 in any case
IMAGES = {"H": 14, "W": 14, "C": 64, "P": 14, "Q": 14, "OUT": 64, "ROWS": 3, "COLUMNS": 3, "STRIDE": 1, "PAD": 1}
COLOR_IMAGES = {"C": 4, "WIDE": False}  # three channels and one of zeros
TILE = {"BM": 64, "BN": 64, "BK": 32, "BC": 64, "PART": 4096, "TAPS": 1}
FLAGS = {"BIAS": True, "REVERSED": False, "WIDE": True, "IS_BACKWARD": True, "DOUBLE": False}
NORMS = {"EPS": 1e-5, "GROUPS": 8}
KERNELS: Mapping[str, tuple[Any, Mapping[str, Any]]] = {
    "convolution": (convolution._forward_kernel, IMAGES | TILE | FLAGS),
    "convolution of color images": (convolution._forward_kernel, IMAGES | TILE | FLAGS | COLOR_IMAGES),
    "filter gradient": (convolution._filter_gradient_kernel, IMAGES | TILE),
    "short filter gradient": (convolution._short_filter_gradient_kernel, IMAGES | TILE | {"C": 1}),
    "short filter gradient of color images": (
        convolution._short_filter_gradient_kernel,
        IMAGES | TILE | COLOR_IMAGES,
    ),
    "batch norm, sums": (batch_norm._sum_kernel, {"PART": 1024, "BN": 32, "BC": 64} | FLAGS),
    "batch norm": (batch_norm._combine_kernel, {"BN": 32, "BC": 64} | FLAGS),
    "group norm": (group_norm._group_norm_kernel, {"C": 64, "BN": 64} | NORMS | FLAGS),
    "group norm, gradient": (group_norm._group_norm_gradient_kernel, {"C": 64, "BN": 64} | NORMS | FLAGS),
    "pooling": (pooling._pool_kernel, IMAGES | {"P": 7, "Q": 7, "BLOCK": 1024}),
    "pooling, gradient": (pooling._pool_gradient_kernel, IMAGES | {"P": 7, "Q": 7, "BLOCK": 1024}),
}


def count_accesses(kernel: Any, constants: Mapping[str, Any], dtype: str) -> dict[str, int]:
    """Compile a kernel for images of this type, and count its loads and stores by the instruction.

    Addresses are aligned, and so is a number of channels, but not the number of images.
    """
    signature: dict[str, str] = {}
    constexprs, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], constexprs[i,] = "constexpr", constants[name]
        else:
            signature[name] = "i32" if name.isupper() else "*fp32" if name in SUMS else f"*{dtype}"
            if name not in ("B", "N"):
                attributes[i,] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    ptx = compile_kernel(source, target=H200).asm["ptx"]
    return dict(collections.Counter(re.findall(r"(?:ld|st)\.global[\w.]*|cp\.async\.\w+", ptx)))


if __name__ == "__main__":
    counts = {f"{n}, {d}": count_accesses(*k, d) for n, k in KERNELS.items() for d in ("fp32", "bf16")}
    sys.stdout.write(json.dumps(counts))
