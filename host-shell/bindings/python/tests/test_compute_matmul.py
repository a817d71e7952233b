"""Products of two matrices by nvme_gpu.compute: on the host, and every rung on the stand-in of CUDA."""

from __future__ import annotations

import math

import pytest

import nvme_gpu

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
from compute_numbers import close  # noqa: E402
from nvme_gpu import compute  # noqa: E402

SHAPES = [(1, 1, 1), (0, 3, 2), (3, 0, 2), (4, 5, 0), (33, 17, 65), (130, 70, 41), (64, 128, 32)]
FLOATS = ["naive", "tiled", "vectorized", "coarsened"]
HALVES = ["mma", "wgmma"]


def dice(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32))


@pytest.mark.parametrize("m,n,k", SHAPES)
def test_the_host_multiplies(m, n, k):
    a, b = dice(m, k), dice(k, n)
    want, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    for call in (compute.matmul, compute.matmul_cpu, compute.matmul_cpu_blocked):
        close(call(a, b), want, size)
        out = np.full((m, n), math.nan, np.float32)
        assert call(a.numpy(), b.numpy(), out) is out
        close(out, want, size)


@pytest.mark.parametrize("m,n,k", SHAPES)
@pytest.mark.parametrize("rung", ["auto", *FLOATS])
def test_floats_on_the_gpu(cuda, rung, m, n, k):
    # Rows with gaps: slices of columns.
    a, b = cuda(dice(m, k + 5))[:, :k], cuda(dice(k, n))
    want = a.cpu().double() @ b.cpu().double()
    size = a.cpu().double().abs() @ b.cpu().double().abs()
    room = cuda(torch.full((m, n + 3), math.nan))
    out = room[:, :n]
    assert compute.matmul(a, b, out, rung=rung) is out
    close(out.cpu(), want, size)
    assert room.cpu()[:, n:].isnan().all(), "beside the result"
    found = compute.matmul(a, b) if rung == "auto" else getattr(compute, f"matmul_{rung}")(a, b)
    assert found.shape == (m, n) and found.dtype == torch.float32
    close(found.cpu(), want, size)


@pytest.mark.parametrize("m,n,k", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rung", ["auto", "wmma", *HALVES])
def test_halves_on_the_gpu(cuda, rung, dtype, m, n, k):
    if rung == "wgmma" and not compute._tensors.kernels(nvme_gpu._native.Ladder, 0).has("wgmma"):
        pytest.skip("needs a GPU of compute capability 9.0")
    a, b = cuda(dice(m, k).to(dtype)), cuda(dice(k, n).to(dtype))
    want = a.cpu().double() @ b.cpu().double()
    size = a.cpu().double().abs() @ b.cpu().double().abs()
    call = compute.matmul if rung == "auto" else getattr(compute, f"matmul_{rung}")
    found = call(a, b)
    assert found.dtype == dtype
    close(found.cpu().float(), want, size + 1e-3, 1e-2)
    out = cuda(torch.full((m, n), math.nan))
    assert call(a, b, out) is out
    close(out.cpu(), want, size)


def test_what_does_not_fit_is_named(cuda):
    a, b = dice(3, 4), dice(4, 5)
    x, y = cuda(a), cuda(b)
    half = cuda(a.half())
    for call, cause in [
        (lambda: compute.matmul(a, dice(5, 4)), r"b has the shape \(5, 4\): use \(4, n\)"),
        (lambda: compute.matmul(a[0], b), "a has the shape"),
        (lambda: compute.matmul(a.double(), b.double()), "a is float64"),
        (lambda: compute.matmul(a.half(), b.half()), "a is float16 in memory of the host: use float32, or a GPU"),
        (lambda: compute.matmul(a, b.half()), "a is float32, b float16"),
        (lambda: compute.matmul(dice(3, 8)[:, :4], b), "a is not contiguous: pass a.contiguous"),
        (lambda: compute.matmul(a, b, rung="naive"), "the rung 'naive' in memory of the host"),
        (lambda: compute.matmul(a, b, dice(3, 4)), "out has the shape"),
        (lambda: compute.matmul(a, b, a[:, :1].expand(3, 5)), "out is not contiguous"),
        (lambda: compute.matmul(x, y, rung="mma"), "the rung 'mma' for float32: use one of auto, naive"),
        (lambda: compute.matmul(half, cuda(b.half()), rung="tiled"), "the rung 'tiled' for float16: use one of auto, mma"),
        (lambda: compute.matmul(x, b), "b lies in memory of the host, a in GPU 0"),
        (lambda: compute.matmul(x, y, dice(3, 5)), "out lies in memory of the host"),
        (lambda: compute.matmul(x, y, cuda(dice(3, 5).half())), "out is float16"),
        (lambda: compute.matmul(x, y.t().contiguous().t()), "b is not contiguous"),
        (lambda: compute.matmul_cpu(x, y), "matrices in memory of a GPU: use matmul"),
        (lambda: compute.matmul_cpu_blocked(a, b.half()), "b is float16: use float32"),
        (lambda: compute.matmul(x, torch.as_strided(y, (4, 5), (2, 1))), "rows|stride"),
    ]:  # fmt: skip
        with pytest.raises(nvme_gpu.Usage, match=cause):
            call()


def test_every_name_of_the_checklist_is_here():
    names = "matmul_cpu matmul_cpu_blocked matmul_wmma"
    names += " linear_forward_naive linear_forward_fused linear_forward_persistent linear_forward_mixed_precision"
    names += " linear_backward_naive linear_backward_atomic_free linear_backward_warp_reduce"
    names += " attention_naive attention_tiled attention_flash attention_flash2 attention_paged multi_query_attention"
    names += " moe_router moe_experts_compute moe_load_balance"
    for name in names.split():
        assert name in compute.__all__ and callable(getattr(compute, name)), name
