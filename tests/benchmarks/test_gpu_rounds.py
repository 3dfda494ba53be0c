"""The kinds of kernels in the profiles of GPU benchmarks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.gpu_rounds import KERNEL_KINDS, TENSOR_CORE_KINDS, classify_kernel

STACKED = Path(__file__).parents[2] / "uefl" / "engines" / "stacked"
REST = list(KERNEL_KINDS)[-1]


def test_the_kernels_of_the_stacked_engine_have_a_kind_of_their_own():
    kernels = [name for path in STACKED.glob("*.py") for name in re.findall(r"def (_\w+_kernel)\(", path.read_text())]
    assert len(kernels) >= 4
    assert [name for name in kernels if classify_kernel(name) == REST] == []
    assert classify_kernel("_filter_gradient_kernel") in TENSOR_CORE_KINDS


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("sm90_xmma_fprop_implicit_gemm_f32f32_tf32f32_f32_nhwckrsc_nhwc", "convolutions"),
        ("sm90_xmma_wgrad_implicit_gemm_bf16", "filter gradients"),
        ("cutlass_80_tensorop_s1688gemm_64x64_32x6_tn_align4", "products"),
        ("triton_red_fused__native_batch_norm_legit_functional_3", "batch norm"),
        ("void at::native::max_pool_backward_nhwc<float, float>", "pooling"),
        ("void at::native::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>>", "optimizer"),
        ("Memcpy DtoH (Device -> Pageable)", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>", REST),
    ],
)
def test_kernels_of_libraries_are_recognized_by_their_names(kernel, kind):
    assert classify_kernel(kernel) == kind
