"""nvme_gpu.compute over memory of the host, against numpy and torch."""

from __future__ import annotations

import threading
import time

import pytest

import nvme_gpu
from conftest import interrupted, python

np = pytest.importorskip("numpy")
import compute_numbers as numbers  # noqa: E402
from compute_numbers import close  # noqa: E402
from nvme_gpu import compute  # noqa: E402

F32 = np.float32


@pytest.fixture(params=["numpy", "torch"])
def library(request):
    """Makes arrays of one of both libraries; numbers of it as numpy."""
    if request.param == "numpy":
        return lambda array: array
    torch = pytest.importorskip("torch")
    return lambda array: torch.from_numpy(np.ascontiguousarray(array))


def dice(*shape, seed=0):
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(F32)


@pytest.mark.parametrize("name", numbers.FORMATS)
@pytest.mark.parametrize("rows,vectors", [(0, 1), (1, None), (7, 3), (65, 0), (131, None)])
def test_products_are_those_of_the_unpacked_numbers(name, rows, vectors, library):
    columns = 512 if rows != 7 else 256
    stored, values = numbers.weights(name, rows, columns)
    x = dice(columns) if vectors is None else dice(vectors, columns)
    found = compute.gemv(library(stored), library(x), format=name)
    assert type(found) is type(library(x)) and found.dtype == library(x).dtype
    want = x.astype(np.float64) @ values.T.astype(np.float64)
    size = np.abs(x).astype(np.float64) @ np.abs(values.T).astype(np.float64)
    close(found, want, size)
    out = library(np.ones(want.shape, F32))
    assert compute.gemv(library(stored), library(x), out, format=name, accumulate=True) is out
    close(out, want + 1, size + 1)
    unpacked = compute.unpack(library(stored), format=name)
    assert np.array_equal(np.asarray(unpacked), values), "bit by bit"


def test_floating_weights_have_their_format(library):
    for kind in (F32, np.float16):
        values = dice(5, 64).astype(kind)
        found = compute.gemv(library(values), library(dice(64)))
        close(found, values.astype(np.float64) @ dice(64), np.abs(values).astype(np.float64) @ np.abs(dice(64)))
    torch = pytest.importorskip("torch")
    values = torch.randn(3, 96).bfloat16()
    assert torch.equal(compute.unpack(values), values.float())
    assert compute.gemv(values, torch.ones(96), format="bf16").shape == (3,)


def test_the_values_of_gguf_are_those_of_its_package():
    quants = pytest.importorskip("gguf.quants")
    from gguf.constants import GGMLQuantizationType as Kind

    for name in numbers.BLOCKS:
        stored, values = numbers.weights(name, 3, 512, seed=5)
        found = quants.dequantize(stored, Kind[name.upper().replace("_K", "_K")])
        assert np.array_equal(found, compute.unpack(stored, format=name)), name
        assert np.array_equal(found, values), name


@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (3, 5, 7), (9, 4096), (33,)])
def test_norms_and_activations(shape, library):
    x, y = dice(*shape, seed=1), dice(*shape, seed=2)
    weight = dice(shape[-1])
    root = np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5)
    found = compute.rms_norm(library(x), library(weight), epsilon=1e-5)
    close(found, x / root * weight)
    same = library(x.copy())
    assert compute.rms_norm(same, library(weight), same, epsilon=1e-5) is same
    assert np.array_equal(np.asarray(same), np.asarray(found))
    want = x.astype(np.float64) / (1 + np.exp(-x.astype(np.float64))) * y
    close(compute.silu_mul(library(x), library(y)), want)
    same = library(x.copy())
    close(compute.silu_mul(same, library(y), out=same), want)


def test_the_first_of_the_largest_numbers(library):
    x = np.array([[1, 5, 5, -2], [-1, -3, -1, -9], [np.nan, -np.inf, 0, np.nan]], F32)
    assert np.asarray(compute.argmax(library(x))).tolist() == [1, 0, 2]
    one = compute.argmax(library(x[0]))
    assert one.shape == () and int(one) == 1
    large = dice(70_001)
    assert int(compute.argmax(library(large))) == large.argmax()
    assert compute.argmax(library(np.zeros((0, 3), F32))).shape == (0,)


@pytest.mark.parametrize("tokens,heads,kv_heads,head_dim", [(1, 1, 1, 2), (3, 8, 2, 64), (5, 6, 6, 10), (2, 4, 1, 256)])
def test_attention_over_a_cache(tokens, heads, kv_heads, head_dim, library):
    positions, first = 13, 4
    q, k, v = dice(tokens, heads, head_dim), dice(tokens, kv_heads, head_dim, seed=1), dice(tokens, kv_heads, head_dim, seed=2)
    caches = dice(positions, kv_heads, head_dim, seed=3), dice(positions, kv_heads, head_dim, seed=4)
    angles = compute.rope_angles(positions, head_dim, 500.0)
    place, pair = np.meshgrid(np.arange(positions), np.arange(head_dim // 2), indexing="ij")
    angle = place * 500.0 ** (-2 * pair / head_dim)
    close(angles.reshape(positions, -1, 2), np.stack([np.cos(angle), np.sin(angle)], -1), 1)

    def turned(x):
        pairs = x.reshape(*x.shape[:-1], -1, 2).astype(np.float64)
        turn = np.exp(1j * angle[first : first + tokens, None])
        product = (pairs[..., 0] + 1j * pairs[..., 1]) * turn
        return np.stack([product.real, product.imag], -1).reshape(x.shape)

    given, mine = library(q.copy()), [library(one.copy()) for one in caches]
    assert compute.rope(given, library(k), library(v), *mine, first, library(angles)) is given
    close(given, turned(q), 10)
    want = [one.astype(np.float64) for one in caches]
    want[0][first : first + tokens], want[1][first : first + tokens] = turned(k), v
    for found, expected in zip(mine, want):
        close(found, expected, 10)
    found = compute.attention(given, *mine, first)
    for token in range(tokens):
        seen = first + token + 1
        expected = numbers.attended(turned(q)[token], want[0][:seen], want[1][:seen], head_dim**-0.5)
        close(np.asarray(found)[token], expected, 10)
    again = compute.attention(given, *mine, first, library(np.empty_like(q)), scale=head_dim**-0.5)
    assert np.array_equal(np.asarray(again), np.asarray(found))


def test_no_tokens_are_nothing(library):
    none, cache = library(np.zeros((0, 2, 4), F32)), library(dice(3, 2, 4))
    assert compute.attention(none, cache, cache, 3).shape == (0, 2, 4)
    values = library(dice(3, 2, 4))
    assert compute.rope(none, none, none, cache, values, 1, library(compute.rope_angles(3, 4))) is none


@pytest.mark.parametrize("over_all", [False, True])
def test_routers_choose_as_topk_does(over_all, library):
    logits = dice(50, 13)
    logits[3] = 1.0
    logits[4, 5:] = logits[4, 5]
    found = compute.moe_router(library(logits), 4, over_all=over_all, probabilities=True)
    order = np.argsort(-logits, -1, kind="stable")[:, :4]
    assert np.asarray(found.experts).tolist() == order.tolist()
    top = np.take_along_axis(logits.astype(np.float64), order, -1)
    all_of = numbers.softmax(logits.astype(np.float64))
    close(found.weights, np.take_along_axis(all_of, order, -1) if over_all else numbers.softmax(top), 1)
    close(found.probabilities, all_of, 1)
    assert compute.moe_router(library(logits), 1).probabilities is None
    assert compute.moe_router(library(logits[:0]), 2).experts.shape == (0, 2)


def test_metrics_of_balance():
    even = compute.moe_load_balance([5] * 8, np.full((3, 8), 1 / 8, F32))
    assert even.most_to_mean == 1 and even.variation == 0 and even.unused == 0
    assert even.entropy == pytest.approx(1) and even.loss == pytest.approx(1)
    counts = np.array([6, 1, 0, 1])
    share = counts / counts.sum()
    found = compute.moe_load_balance(counts)
    assert found.loss is None and found.unused == 1 and found.most_to_mean == 3
    assert found.variation == pytest.approx(counts.std() / counts.mean())
    assert found.entropy == pytest.approx(-(share[share > 0] * np.log(share[share > 0])).sum() / np.log(4))
    probabilities = numbers.softmax(dice(9, 4))
    found = compute.moe_load_balance(counts, probabilities)
    assert found.loss == pytest.approx(4 * (share * probabilities.mean(0)).sum(), rel=1e-5)
    torch = pytest.importorskip("torch")
    assert compute.moe_load_balance(torch.tensor(counts), torch.tensor(probabilities)) == found
    with pytest.raises(nvme_gpu.Usage, match="probabilities has the shape"):
        compute.moe_load_balance([1, 2], probabilities)
    with pytest.raises(nvme_gpu.Usage, match="a count is -1"):
        compute.moe_load_balance([-1])


X, W = dice(32), dice(4, 32)
CACHE = dice(5, 2, 8)
WRONG = [
    (lambda: compute.gemv(W, dice(33)), r"x has the shape \(33,\): use \(32,\)"),
    (lambda: compute.gemv(W[:, ::2], X), "weights: .*contiguous"),
    (lambda: compute.gemv(W.astype(np.float64), X), "weights is float64: use float32 or float16"),
    (lambda: compute.gemv(W, X.astype(np.float16)), "x is float16: use float32"),
    (lambda: compute.gemv(W[0], X), r"weights has the shape \(32,\)"),
    (lambda: compute.gemv(dice(4, 33), dice(33)), "33 columns: use a multiple of 32"),
    (lambda: compute.gemv(dice(4, 0), dice(0)), "0 columns"),
    (lambda: compute.gemv(W.view(np.uint8), X), "format is not known"),
    (lambda: compute.gemv(W.view(np.uint8), X, format="q8_0"), "rows of 128 bytes: use a multiple of 34"),
    (lambda: compute.gemv(W.view(np.uint8), X, format="q5_k"), "format 'q5_k': use one of float32"),
    (lambda: compute.gemv(W, X, format="q8_0"), "weights is float32, and format is 'q8_0'"),
    (lambda: compute.gemv(W, X, accumulate=True), "accumulate without out"),
    (lambda: compute.gemv(W, X, dice(5)), r"out has the shape \(5,\): use \(4,\)"),
    (lambda: compute.gemv(W, X, X[:4]), "an output shares memory with an input"),
    (lambda: compute.gemv(W, X, np.frombuffer(bytes(16), F32)), "out.* read-?only"),
    (lambda: compute.gemv(W, np.frombuffer(bytes(129), np.uint8)[1:].view(F32)), "aligned"),
    (lambda: compute.rms_norm(W, dice(31)), r"weight has the shape \(31,\): use \(32,\)"),
    (lambda: compute.rms_norm(np.zeros((), F32), X), "x is one number"),
    (lambda: compute.rms_norm(W, X, epsilon=-1.0), "epsilon is -1.0"),
    (lambda: compute.rms_norm(W, X, epsilon=float("nan")), "epsilon is nan"),
    (lambda: compute.silu_mul(X, W), r"factor has the shape \(4, 32\): use \(32,\)"),
    (lambda: compute.argmax(dice(3, 0)), r"x has the shape \(3, 0\)"),
    (lambda: compute.rope_angles(3, 5), "head_dim is 5: use an even number"),
    (lambda: compute.rope_angles(3, 4, 0.0), "base is 0.0: use a finite number above 0"),
    (lambda: compute.attention(dice(1, 3, 8), CACHE, CACHE, 0), "3 heads of queries over 2 of keys"),
    (lambda: compute.attention(dice(2, 2, 8), CACHE, CACHE, 4), "places 4 to 6 of a cache of 5"),
    (lambda: compute.attention(dice(1, 2, 8), CACHE, CACHE[1:], 0), "value_cache has the shape"),
    (lambda: compute.attention(dice(1, 2, 6), CACHE, CACHE, 0), r"key_cache has the shape \(5, 2, 8\): use \(positions, kv_heads, 6\)"),
    (lambda: compute.attention(dice(1, 2, 300), dice(5, 2, 300), dice(5, 2, 300), 0), "heads of 300 elements"),
    (lambda: compute.attention(dice(1, 2, 8), CACHE, CACHE, 0, scale=float("inf")), "scale is inf"),
    (lambda: compute.attention(dice(1, 2, 8), CACHE, CACHE, -1), "position is -1"),
    (lambda: rope(angles=dice(4, 8)), "angles of 4 positions: use 5 or more"),
    (lambda: rope(values=dice(1, 1, 8)), "values has the shape"),
    (lambda: rope(value_cache=CACHE), "an output shares memory"),
    (lambda: compute.rope(dice(1, 2, 3), dice(1, 1, 3), dice(1, 1, 3), dice(2, 1, 3), dice(2, 1, 3), 0, dice(2, 3)), "an even number"),
    (lambda: compute.moe_router(dice(2, 5000), 1), "logits of 5000 experts"),
    (lambda: compute.moe_router(dice(2, 5), 6), "k is 6"),
    (lambda: compute.moe_router(dice(2, 5, 1), 1), "logits has the shape"),
]


def rope(**changed):
    words = {
        "queries": dice(1, 4, 8), "keys": dice(1, 2, 8), "values": dice(1, 2, 8), "key_cache": CACHE,
        "value_cache": CACHE.copy(), "position": 4, "angles": dice(5, 8),
    }  # fmt: skip
    return compute.rope(**{**words, **changed})


@pytest.mark.parametrize("call,cause", WRONG)
def test_what_does_not_fit_is_named(call, cause):
    with pytest.raises(nvme_gpu.Usage, match=cause):
        call()


def test_what_is_no_memory_is_a_type_error():
    with pytest.raises(TypeError, match="x is of the type list"):
        compute.gemv(W, [1.0] * 32)
    with pytest.raises(TypeError, match="scale is of the type str"):
        compute.attention(dice(1, 2, 8), CACHE, CACHE, 0, scale="x")
    with pytest.raises(TypeError, match="position is of the type float"):
        compute.attention(dice(1, 2, 8), CACHE, CACHE, 1.5)


def test_tensors_that_do_not_fit_are_named():
    torch = pytest.importorskip("torch")
    w, x = torch.from_numpy(W), torch.from_numpy(X)
    with pytest.raises(nvme_gpu.Usage, match=r"weights is not contiguous: its strides are \(1, 4\): pass weights.contig"):
        compute.gemv(w.t().contiguous().t(), x)
    with pytest.raises(nvme_gpu.Usage, match="x requires a gradient, which this function does not compute"):
        compute.gemv(w, x.clone().requires_grad_())
    with torch.no_grad():
        assert compute.gemv(w, x.clone().requires_grad_()).shape == (4,)
    with pytest.raises(nvme_gpu.Usage, match="x is on the device meta"):
        compute.gemv(w, x.to("meta"))
    with pytest.raises(nvme_gpu.Usage, match="x has the layout torch.sparse_coo"):
        compute.rms_norm(w.to_sparse(), x)
    with pytest.raises(nvme_gpu.Usage, match="weights is float64"):
        compute.gemv(w.double(), x)
    assert compute.rope_angles(2, 4, device="cpu").dtype == torch.float32


def test_angles_of_a_device_need_torch(monkeypatch):
    from nvme_gpu import _buffers

    monkeypatch.setattr(_buffers, "torch", lambda: None)
    with pytest.raises(nvme_gpu.Usage, match="device= without torch"):
        compute.rope_angles(2, 4, device="cpu")


def test_results_without_numpy_are_arrays(monkeypatch):
    from nvme_gpu import _buffers

    monkeypatch.setattr(_buffers, "numpy", lambda: None)
    found = compute.gemv(W, X)
    assert isinstance(found, nvme_gpu.Array) and found.shape == (4,)
    close(found.tolist(), W.astype(np.float64) @ X, np.abs(W) @ np.abs(X))
    assert compute.rms_norm(found, found).shape == (4,)


def test_other_threads_run_and_ctrl_c_ends_the_wait():
    torch = pytest.importorskip("torch")
    counted, is_over = [0], threading.Event()

    def count():
        while not is_over.is_set():
            counted[0] += 1
            time.sleep(0.001)

    thread = threading.Thread(target=count)
    thread.start()
    try:
        weights, x = torch.ones(2048, 4096), torch.ones(8, 4096)
        before = counted[0]
        interrupted(lambda: [compute.gemv(weights, x) for _ in range(10_000)])
        assert counted[0] > before, "the interpreter lock was held"
    finally:
        is_over.set()
        thread.join()


def test_a_child_of_fork_has_threads_of_its_own():
    done = python(
        """
        import os
        import numpy as np
        from nvme_gpu import compute
        w, x = np.ones((300, 64), np.float32), np.ones(64, np.float32)
        assert compute.gemv(w, x).tolist() == [64.0] * 300
        child = os.fork()
        if child == 0:
            os._exit(0 if compute.gemv(w, x).tolist() == [64.0] * 300 else 1)
        assert os.waitpid(child, 0)[1] == 0
        print("ok")
        """
    )
    assert done.stdout.strip() == "ok"


def test_every_name_of_the_module_is_described():
    import doctest

    assert doctest.testmod(compute).attempted >= 5 and doctest.testmod(compute).failed == 0
    for name in compute.__all__:
        assert getattr(compute, name).__doc__, name
        for member, found in vars(getattr(compute, name)).items() if isinstance(getattr(compute, name), type) else ():
            if callable(found) and not member.startswith("_"):
                assert found.__doc__, f"{name}.{member}"
