"""Linear layers and attention of nvme_gpu.compute against torch in float64: on the host, and every rung on the stand-in."""

from __future__ import annotations

import math

import pytest

import nvme_gpu

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
from compute_numbers import close, softmax  # noqa: E402
from nvme_gpu import compute  # noqa: E402
from torch.nn import functional  # noqa: E402

FORWARD = ["naive", "fused", "persistent"]
BACKWARD = ["naive", "atomic_free", "warp_reduce"]
ACTIVATIONS = [None, "relu", "silu", "gelu"]


def dice(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32))


@pytest.fixture(params=["host", "gpu"])
def place(request, cuda):
    """Makes tensors of the host, or of the GPU."""
    made = cuda if request.param == "gpu" else lambda tensor: tensor
    made.is_gpu = request.param == "gpu"
    return made


def by_torch(x, weights, bias, activation):
    """The layer in float64."""
    sums = functional.linear(x, weights, bias)
    if activation == "gelu":
        return sums, sums * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (sums + 0.044715 * sums**3)))
    return sums, sums if activation is None else getattr(functional, activation)(sums)


@pytest.mark.parametrize("rung", FORWARD)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape,outputs", [((3, 5), 7), ((1,), 1), ((2, 3, 64), 130), ((0, 4), 3), ((70, 33), 9)])
def test_layers_are_those_of_torch(place, rung, activation, shape, outputs):
    x, weights, bias = dice(*shape), dice(outputs, shape[-1]), dice(outputs, seed=1)
    forward = getattr(compute, f"linear_forward_{rung}")
    sums, y = by_torch(x.double(), weights.double(), bias.double(), activation)
    size = functional.linear(x.double().abs(), weights.double().abs(), bias.double().abs())
    before = place(torch.full((*shape[:-1], outputs), math.nan))
    words = {"activation": activation, "sums": before}
    found = forward(place(x), place(weights), place(bias), **words)
    close(found.cpu(), y, size + 1)
    if activation is not None:
        close(before.cpu(), sums, size + 1)
    out = place(torch.full(y.shape, math.nan))
    assert forward(place(x), place(weights), activation=activation, out=out) is out
    close(out.cpu(), by_torch(x.double(), weights.double(), None, activation)[1], size + 1)


@pytest.mark.parametrize("rung", BACKWARD)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape,outputs", [((3, 5), 7), ((2, 3, 40), 33), ((1, 1), 1), ((0, 4), 3)])
def test_gradients_are_those_of_autograd(place, rung, activation, shape, outputs):
    x, weights, bias = dice(*shape), dice(outputs, shape[-1]), dice(outputs, seed=1)
    exact = [one.double().requires_grad_() for one in (x, weights, bias)]
    sums, y = by_torch(*exact, activation)
    dy = dice(*y.shape, seed=2)
    y.backward(dy.double())
    backward = getattr(compute, f"linear_backward_{rung}")
    given = [place(one) for one in (dy, x, weights)]
    before = None if activation is None else place(sums.detach().float())
    found = backward(*given, before, activation=activation)
    for one, want in zip(found, exact):
        close(one.cpu(), want.grad, want.grad.abs().max() * 10 + 1 if want.numel() else 1)
    some = backward(*given, before, activation=activation, needs=(False, True, False))
    assert some[0] is None and some[2] is None
    close(some[1].cpu(), exact[1].grad, 30)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_autograd_agrees_with_finite_differences(activation):
    x, weights, bias = (dice(*shape).mul(0.5) + 0.3 for shape in ((2, 3, 4), (5, 4), (5,)))
    given = [one.requires_grad_() for one in (x, weights, bias)]
    call = lambda *words: compute.linear(*words, activation=activation)  # noqa: E731
    with pytest.warns(UserWarning, match="double precision"):
        assert torch.autograd.gradcheck(call, given, eps=1e-2, atol=2e-2, rtol=2e-2)
    # Those that are not wanted are not computed; gradients that are expanded have gaps.
    loss = compute.linear(x.detach(), weights, activation=activation).sum()
    weights.grad = None
    loss.backward()
    want = weights.detach().double().requires_grad_()
    by_torch(x.detach().double(), want, None, activation)[1].sum().backward()
    close(weights.grad, want.grad, 10)
    again = compute.linear(x, weights, activation=activation)
    (first,) = torch.autograd.grad(again.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once|does not require grad"):
        first.sum().backward()


def test_autograd_on_the_gpu(cuda):
    given = [cuda(one).requires_grad_() for one in (dice(6, 32), dice(9, 32), dice(9))]
    compute.linear(*given, activation="silu").backward(cuda(dice(6, 9)))
    torch.cuda.synchronize()
    exact = [one.detach().as_subclass(torch.Tensor).double().requires_grad_() for one in given]
    by_torch(*exact, "silu")[1].backward(dice(6, 9).double())
    for one, want in zip(given, exact):
        close(one.grad.detach().as_subclass(torch.Tensor) if one.grad.is_cuda else one.grad, want.grad, 30)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_layers_of_halves(cuda, dtype, activation):
    x, weights, bias = dice(5, 64).to(dtype), dice(30, 64).to(dtype), dice(30).to(dtype)
    sums = cuda(torch.zeros(5, 30))
    found = compute.linear_forward_mixed_precision(cuda(x), cuda(weights), cuda(bias), activation=activation, sums=sums)
    assert found.dtype == dtype
    want = by_torch(x.double(), weights.double(), bias.double(), activation)
    close(found.cpu().float(), want[1], want[1].abs() + 1, 1e-2)
    if activation:
        close(sums.cpu(), want[0], 50)
    with pytest.raises(nvme_gpu.Usage, match="x is bfloat16 in memory of the host|x is float16 in memory of the host"):
        compute.linear_forward_mixed_precision(x, weights)
    with pytest.raises(nvme_gpu.Usage, match="x is .*, weights "):
        other = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
        compute.linear_forward_mixed_precision(cuda(x), cuda(weights.to(other)))


def test_layers_that_do_not_fit_are_named(place):
    x, weights, bias = place(dice(3, 8)), place(dice(4, 8)), place(dice(4))
    y = place(dice(3, 4))
    for call, cause in [
        (lambda: compute.linear_forward_fused(place(dice(3, 9)), weights), r"x has the shape \(3, 9\): use \(..., 8\)"),
        (lambda: compute.linear_forward_fused(x, bias), "weights has the shape"),
        (lambda: compute.linear_forward_fused(x, weights, place(dice(3))), "bias has the shape"),
        (lambda: compute.linear_forward_fused(x, weights, bias, activation="tanh"), "activation is 'tanh'"),
        (lambda: compute.linear_forward_fused(x, weights, out=place(dice(4, 3))), "out has the shape"),
        (lambda: compute.linear_forward_fused(x, weights, sums=place(dice(4, 3))), "sums has the shape"),
        (lambda: compute.linear_forward_mixed_precision(x, weights), "x is float32: use bfloat16 or float16"),
        (lambda: compute.linear_backward_naive(place(dice(3, 5)), x, weights), "dy has the shape"),
        (lambda: compute.linear_backward_naive(y, x, weights, activation="silu"), "the gradient of silu without sums"),
        (lambda: compute.linear_backward_naive(y, x, weights, place(dice(3, 5)), activation="silu"), "sums has the shape"),
        (lambda: compute.linear(dice(3, 8).numpy(), dice(4, 8).numpy()), "no tensors of torch"),
    ]:
        with pytest.raises(nvme_gpu.Usage, match=cause):
            call()


RUNGS = ["naive", "tiled", "flash", "flash2"]
SHAPES = [(1, 1, 1, 1, 1, 8), (2, 4, 2, 5, 9, 64), (1, 6, 1, 33, 70, 24), (2, 2, 2, 0, 3, 16), (1, 2, 1, 3, 0, 8), (1, 8, 2, 1, 300, 128)]


def function(rung):
    return compute.multi_query_attention if rung == "multi_query" else getattr(compute, f"attention_{rung}")


def by_numpy(q, k, v, causal, scale, counts=None):
    """Attention in float64; a query without a key is zeros."""
    q, k, v = (one.double().numpy() for one in (q, k, v))
    found = np.zeros_like(q)
    tokens, length = q.shape[2], k.shape[2]
    for s in range(q.shape[0]):
        there = length if counts is None else int(counts[s])
        for head in range(q.shape[1]):
            kv = head * k.shape[1] // q.shape[1]
            for token in range(tokens):
                limit = max(0, there - (tokens - 1 - token)) if causal else there
                if limit:
                    shares = softmax(k[s, kv, :limit] @ q[s, head, token] * scale)
                    found[s, head, token] = shares @ v[s, kv, :limit]
    return found


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_of_the_host(shape, causal):
    sequences, heads, kv_heads, tokens, length, elements = shape
    q, k, v = dice(sequences, heads, tokens, elements), *(dice(sequences, kv_heads, length, elements, seed=s) for s in (1, 2))
    counts = (torch.arange(sequences, dtype=torch.int32) * 3 + 2).clamp(max=length)
    for rung in (*RUNGS, "multi_query"):
        found = function(rung)(q, k, v, causal=causal, scale=0.3)
        close(found, by_numpy(q, k, v, causal, 0.3), 10)
    found = compute.attention_flash2(q, k, v, causal=causal, counts=counts)
    close(found, by_numpy(q, k, v, causal, elements**-0.5, counts), 10)
    arrays = compute.attention_flash2(q.numpy(), k.numpy(), v.numpy(), np.empty(q.shape, np.float32), causal=causal)
    close(arrays, by_numpy(q, k, v, causal, elements**-0.5), 10)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rung", [*RUNGS, "multi_query"])
def test_attention_of_the_gpu(cuda, rung, shape, causal):
    sequences, heads, kv_heads, tokens, length, elements = shape
    counts = (torch.arange(sequences, dtype=torch.int32) * 5 + 1).clamp(max=length)
    for dtype in (torch.bfloat16, torch.float16):
        q = dice(sequences, heads, tokens, elements).to(dtype)
        k, v = (dice(sequences, kv_heads, length, elements, seed=s).to(dtype) for s in (1, 2))
        want = by_numpy(q.float(), k.float(), v.float(), causal, elements**-0.5)
        found = function(rung)(cuda(q), cuda(k), cuda(v), causal=causal)
        assert found.dtype == dtype
        close(found.cpu().float(), want, np.abs(want) + 0.3, 2e-2)
        # Tokens before heads, as layers have them.
        turned = [one.transpose(1, 2).contiguous().transpose(1, 2) for one in (q, k, v)]
        out = cuda(torch.full((sequences, tokens, heads, elements), math.nan, dtype=dtype)).transpose(1, 2)
        words = {"causal": causal, "counts": cuda(counts)}
        assert function(rung)(*(cuda(one) for one in turned), out, **words) is out
        want = by_numpy(q.float(), k.float(), v.float(), causal, elements**-0.5, counts)
        close(out.cpu().float(), want, np.abs(want) + 0.3, 2e-2)


@pytest.mark.parametrize("count", [-1, 6, 2**31 - 1, -(2**31)])
def test_counts_that_are_none_are_refused(count):
    """-1 keys are not all of them."""
    q, k = dice(2, 4, 3, 8), dice(2, 2, 5, 8)
    out = torch.full((2, 4, 3, 8), 7.0)
    for rung in (*RUNGS, "multi_query"):
        with pytest.raises(nvme_gpu.Usage, match=rf"counts\[1\].* is {count}: use 0 to 5"):
            function(rung)(q, k, k, out, counts=torch.tensor([5, count], dtype=torch.int32))
        assert (out == 7).all(), "nothing is computed then"


def test_attention_that_does_not_fit_is_named(cuda):
    q, k = dice(1, 4, 3, 8), dice(1, 2, 5, 8)
    half, key = cuda(q.half()), cuda(k.half())
    for call, cause in [
        (lambda: compute.attention_flash2(q[0], k, k), "q has the shape"),
        (lambda: compute.attention_flash2(q, dice(1, 3, 5, 8), dice(1, 3, 5, 8)), "4 heads of queries over 3 of keys"),
        (lambda: compute.attention_flash2(q, k, dice(1, 2, 6, 8)), "v has the shape"),
        (lambda: compute.attention_flash2(dice(1, 2, 3, 12), dice(1, 2, 3, 12), dice(1, 2, 3, 12)), "heads of 12 elements"),
        (lambda: compute.attention_flash2(q, k, k.half()), "q is float32, v float16"),
        (lambda: compute.attention_flash2(q, k, k, scale=0), "scale is 0.0: use a finite number above 0"),
        (lambda: compute.attention_flash2(q, k, k, counts=torch.zeros(2, dtype=torch.int32)), "counts has the shape"),
        (lambda: compute.attention_flash2(q.half(), k.half(), k.half()), "q is float16 in memory of the host"),
        (lambda: compute.attention_flash2(q.transpose(1, 2), k.transpose(1, 2).contiguous(), k.transpose(1, 2)), "heads|contiguous"),
        (lambda: compute.attention_flash2(cuda(q), cuda(k), cuda(k)), "q is float32 on a GPU"),
        (lambda: compute.attention_flash2(half, key, key, q.half()), "out lies in memory of the host"),
        (lambda: compute.attention_flash2(half, key, cuda(dice(1, 2, 5, 9).half())[..., :8]), "v has the strides"),
        (lambda: compute.attention_flash2(half, key[:, :1].expand(1, 4, 5, 8), key), "k is not contiguous|v has the shape"),
        (lambda: compute.attention_flash2(half, key, key, half[..., :4]), "out has the shape"),
    ]:  # fmt: skip
        with pytest.raises(nvme_gpu.Usage, match=cause):
            call()
    whole = torch.randn(1, 3, 4, 8).transpose(1, 2)
    with pytest.raises(nvme_gpu.Usage, match="q is not contiguous: pass q.contiguous"):
        compute.attention_flash2(whole, k, k)
