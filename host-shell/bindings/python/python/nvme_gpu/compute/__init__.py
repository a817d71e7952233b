"""Computations over tensors of torch, and over weights that a kernel reads from a drive while it computes.

>>> import numpy as np
>>> import nvme_gpu
>>> from nvme_gpu import compute
>>> store = nvme_gpu.open("sim:mem?size=16MiB")
>>> weights = np.arange(64, dtype=np.float32).reshape(2, 32)
>>> store.write(weights)
>>> compute.Matrix(store, 0, "float32", (2, 32)).gemv(np.ones(32, np.float32)).tolist()
[496.0, 1520.0]
>>> compute.gemv(weights, np.ones(32, np.float32)).tolist()
[496.0, 1520.0]
>>> store.close()

Tensors on a GPU of CUDA are computed with by kernels of this library: they are put into the current stream of torch, the
call returns at once, and it may be captured in a graph. Tensors on the CPU, arrays of numpy and other buffers are computed
with by threads of the host: the call waits, without the GIL, and Ctrl-C ends the wait. All arguments of a call lie on one
device; results are of the library of the arguments. Arguments are contiguous: none is copied. Functions without a word
about gradients refuse tensors that require one.

Wrong arguments raise :class:`nvme_gpu.Usage`, which names the argument; what a drive says raises as gathers do.
"""

from __future__ import annotations

from ._attention import attention_flash, attention_flash2, attention_naive, attention_tiled, multi_query_attention
from ._experts import (
    Balance,
    Counts,
    Experts,
    Routed,
    moe_activation,
    moe_experts_compute,
    moe_load_balance,
    moe_route,
    moe_router,
)
from ._expert_files import ExpertFiles, ExpertLayout, ExpertMatrix, ExpertPart, ExpertRead, expert_layout
from ._linear import (
    linear,
    linear_backward_atomic_free,
    linear_backward_naive,
    linear_backward_warp_reduce,
    linear_forward_fused,
    linear_forward_mixed_precision,
    linear_forward_naive,
    linear_forward_persistent,
)
from ._matmul import (
    matmul,
    matmul_coarsened,
    matmul_cpu,
    matmul_cpu_blocked,
    matmul_mma,
    matmul_naive,
    matmul_tiled,
    matmul_vectorized,
    matmul_wgmma,
    matmul_wmma,
)
from ._matrix import Matrix
from ._paged import Keep, KvPages, Summaries, attention_paged
from ._steps import argmax, attention, gemv, rms_norm, rope, rope_angles, silu_mul, unpack

__all__ = [
    "Balance",
    "Counts",
    "ExpertFiles",
    "ExpertLayout",
    "ExpertMatrix",
    "ExpertPart",
    "ExpertRead",
    "Experts",
    "Keep",
    "KvPages",
    "Matrix",
    "Routed",
    "Summaries",
    "argmax",
    "attention",
    "attention_flash",
    "attention_flash2",
    "attention_naive",
    "attention_paged",
    "attention_tiled",
    "expert_layout",
    "gemv",
    "linear",
    "linear_backward_atomic_free",
    "linear_backward_naive",
    "linear_backward_warp_reduce",
    "linear_forward_fused",
    "linear_forward_mixed_precision",
    "linear_forward_naive",
    "linear_forward_persistent",
    "matmul",
    "matmul_coarsened",
    "matmul_cpu",
    "matmul_cpu_blocked",
    "matmul_mma",
    "matmul_naive",
    "matmul_tiled",
    "matmul_vectorized",
    "matmul_wgmma",
    "matmul_wmma",
    "moe_activation",
    "moe_experts_compute",
    "moe_load_balance",
    "moe_route",
    "moe_router",
    "multi_query_attention",
    "rms_norm",
    "rope",
    "rope_angles",
    "silu_mul",
    "unpack",
]
