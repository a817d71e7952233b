"""nvme_gpu.compute over tensors of a GPU, by the stand-in of CUDA: what the host computes, and in graphs."""

from __future__ import annotations

import ctypes

import pytest

import nvme_gpu
from conftest import python, stand_in

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
import compute_numbers as numbers  # noqa: E402
from nvme_gpu import compute  # noqa: E402


def dice(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32))


def stored(name, rows, columns):
    return torch.from_numpy(numbers.weights(name, rows, columns)[0])


# What a computation is given, of which it may change the first ones, and the computation.
CASES = {
    "gemv": (lambda: [stored("q4_k", 9, 512), dice(3, 512)], lambda w, x: compute.gemv(w, x, format="q4_k")),
    "gemv one": (lambda: [dice(9, 64).half(), dice(64)], compute.gemv),
    "gemv add": (
        lambda: [dice(2, 9), dice(9, 64), dice(2, 64)],
        lambda y, w, x: compute.gemv(w, x, y, accumulate=True),
    ),
    "unpack": (lambda: [stored("q6_k", 3, 256)], lambda rows: compute.unpack(rows, format="q6_k")),
    "unpack bf16": (lambda: [dice(3, 96).bfloat16()], compute.unpack),
    "rms_norm": (lambda: [dice(3, 5, 33), dice(33)], compute.rms_norm),
    "rms_norm same": (lambda: [dice(7, 33), dice(33)], lambda x, weight: compute.rms_norm(x, weight, x)),
    "silu_mul": (lambda: [dice(100), dice(100, seed=1)], compute.silu_mul),
    "argmax": (lambda: [dice(4, 1001)], compute.argmax),
    "rope": (
        lambda: [dice(2, 4, 8), dice(2, 2, 8), dice(2, 2, 8), dice(5, 2, 8), dice(5, 2, 8), compute.rope_angles(5, 8, device="cpu")],
        lambda q, k, v, keys, values, angles: compute.rope(q, k, v, keys, values, 3, angles),
    ),
    "attention": (
        lambda: [dice(2, 4, 8), dice(5, 2, 8), dice(5, 2, 8, seed=1)],
        lambda q, keys, values: compute.attention(q, keys, values, 3),
    ),
    "moe_router": (lambda: [dice(6, 9)], lambda x: compute.moe_router(x, 3, probabilities=True)),
}  # fmt: skip


def parts(found):
    return list(found) if isinstance(found, tuple) else [found]


def same(found, wanted):
    """Equal, and sums of f32 as far as the order in which the kernel's lanes add lets them be."""
    for one, want in zip(parts(found), parts(wanted), strict=True):
        assert one.is_cuda and one.dtype == want.dtype
        if want.dtype != torch.float32:
            assert torch.equal(one.cpu(), want)
            continue
        largest = float(want.abs().max()) if want.numel() else 0.0
        torch.testing.assert_close(one.cpu(), want, rtol=1e-5, atol=1e-5 * largest + 1e-6)


@pytest.mark.parametrize("name", CASES)
def test_the_gpu_computes_what_the_host_does(cuda, name):
    make, call = CASES[name]
    host, gpu = make(), [cuda(one) for one in make()]
    wanted, found = call(*host), call(*gpu)
    same(found, wanted)
    same(tuple(gpu), tuple(host))


class Graph:
    """What `call` puts into a stream of the stand-in, as a graph."""

    def __init__(self, monkeypatch, call):
        self.cuda = ctypes.CDLL("libcuda.so")
        self.stream, graph, self.exec = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self.done("cuStreamCreate", ctypes.byref(self.stream), 1)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: self.stream.value, raising=False)
        self.done("cuStreamBeginCapture_v2", self.stream, 0)
        self.found = call()
        self.done("cuStreamEndCapture", self.stream, ctypes.byref(graph))
        self.done("cuGraphInstantiateWithFlags", ctypes.byref(self.exec), graph, ctypes.c_ulonglong(0))

    def done(self, name, *words):
        assert getattr(self.cuda, name)(*words) == 0, name

    def launch(self):
        self.done("cuGraphLaunch", self.exec, self.stream)
        self.done("cuStreamSynchronize", self.stream)


@pytest.mark.parametrize("name", [name for name in CASES if not name.endswith(("add", "same"))])
def test_a_graph_computes_again(cuda, monkeypatch, name):
    make, call = CASES[name]
    first = [cuda(one) for one in make()]
    call(*first)
    given = [cuda(one) for one in make()]
    if name == "argmax":
        # torch fills what argmax starts from; without CUDA it does so at once, and not in the stream.
        given[0] = cuda(make()[0].abs())
    graph = Graph(monkeypatch, lambda: call(*given))
    for seed in (5, 6):
        changed = [one if one.dtype == torch.uint8 else one + seed for one in make()]
        for to, one in zip(given, changed):
            to.copy_(one)
        for one in parts(graph.found):
            one.fill_(77)
        if name == "rope":
            graph.found.copy_(changed[0])
        graph.launch()
        same(graph.found, call(*changed))


def test_a_matrix_of_a_drive_in_a_graph(cuda, monkeypatch):
    if not stand_in():
        pytest.fail("needs the stand-in of CUDA")
    with nvme_gpu.open("sim:mem?size=8MiB&queues=32&threads=2", gpu=0) as store:
        weights, x, y = dice(50, 64), cuda(dice(64)), cuda(torch.zeros(50))
        store.write(weights)
        matrix = compute.Matrix(store, 0, "float32", (50, 64))
        matrix.gemv(x, y, check="now")
        graph = Graph(monkeypatch, lambda: matrix.gemv(x, y, check="now"))
        for seed in (1, 2):
            x.copy_(dice(64, seed=seed))
            y.fill_(float("nan"))
            graph.launch()
            matrix.check(10)
            given = dice(64, seed=seed)
            numbers.close(y.cpu(), weights.double() @ given.double(), weights.abs() @ given.abs())


def test_devices_that_do_not_fit_are_named(cuda):
    w, x = dice(4, 32), dice(32)
    with pytest.raises(nvme_gpu.Usage, match="x lies in memory of the host, weights in GPU 0: use one device"):
        compute.gemv(cuda(w), x)
    with pytest.raises(nvme_gpu.Usage, match="out lies in memory of the host, the other arguments in GPU 0"):
        compute.gemv(cuda(w), cuda(x), torch.zeros(4))
    with pytest.raises(nvme_gpu.Usage, match="33 columns"):
        compute.gemv(cuda(dice(4, 33)), cuda(dice(33)))

    class Foreign:
        __cuda_array_interface__ = {"shape": (32,), "typestr": "<f4", "data": (4096, False), "version": 3}

    with pytest.raises(nvme_gpu.Usage, match="x lies in memory of a GPU and is no tensor of torch"):
        compute.gemv(w, Foreign())


def test_nothing_to_compute_launches_nothing(cuda):
    none, some = cuda(dice(0, 32)), cuda(dice(32))
    assert compute.gemv(none, some).shape == (0,) and compute.gemv(cuda(dice(4, 32)), none).shape == (0, 4)
    assert compute.rms_norm(none, some).shape == compute.silu_mul(none, none).shape == (0, 32)
    assert compute.unpack(none).shape == (0, 32) and compute.argmax(none).shape == (0,)
    assert compute.moe_router(none, 2).experts.shape == (0, 2)
    heads = cuda(dice(0, 2, 8))
    assert compute.attention(heads, cuda(dice(3, 2, 8)), cuda(dice(3, 2, 8)), 3).shape == (0, 2, 8)


def test_a_gpu_without_the_kernels_says_so():
    done = python(
        """
        import ctypes, sys
        import nvme_gpu
        for kind in (nvme_gpu._native.Steps, nvme_gpu._native.Router):
            try:
                kind(0)
            except nvme_gpu.NvmeGpuError as error:
                print(error.code)
        """,
        FAKE_CUDA="badptx",
    )
    assert done.stdout.split() == ["environment", "environment"], done.stdout


def test_results_lie_apart_from_what_the_gpu_reads(cuda):
    weights, x = cuda(dice(4, 32)), cuda(dice(32))
    two = cuda(dice(2, 32))
    memory = dice(3, 64).bfloat16()
    for call in (
        lambda: compute.gemv(weights, x, x[:4]),
        lambda: compute.rms_norm(two[0], x, x),
        lambda: compute.rms_norm(two.view(64)[:32], x, two.view(64)[16:48]),
        lambda: compute.silu_mul(x, two[0], two[0]),
        lambda: compute.unpack(cuda(memory[:1]), out=cuda(memory.view(torch.float32)[:2].reshape(1, 64))),
        lambda: compute.matmul(weights, cuda(dice(32, 4)), weights.view(128)[:16].view(4, 4)),
    ):
        with pytest.raises(nvme_gpu.Usage, match="share memory"):
            call()
    same(compute.silu_mul(x, two[0], x), compute.silu_mul(cuda(dice(32)).cpu(), two[0].cpu()))
