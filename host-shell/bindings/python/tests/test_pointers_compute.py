"""Each kind of memory as each argument of the kernels that compute: what a GPU cannot use is refused by name, before
anything is launched."""

from __future__ import annotations

import ctypes

import pytest

import nvme_gpu
from conftest import SIM_GPU, Device, stand_in
from nvme_gpu import _native
from test_pointers import FITS, KINDS, Place, check

F32, Q8_0 = 0, 8
POISON = 7


class Argument:
    """An argument of a launch: its name in messages, its elements, and whether the kernel writes it."""

    def __init__(self, name, count, typestr="<f4", written=False):
        self.name, self.count, self.typestr, self.written = name, count, typestr, written

    def place(self, kind="gpu"):
        values = [POISON if self.written else 0] * self.count
        return Place(values, self.typestr, kind) if kind != "gpu" else Device(values, self.typestr)


def read(name, count, typestr="<f4"):
    return Argument(name, count, typestr)


def written(name, count, typestr="<f4"):
    return Argument(name, count, typestr, written=True)


def address(place):
    return place.__cuda_array_interface__["data"][0]


def index(store):
    import array

    vectors = array.array("f", [(at * 37 % 101) / 50 for at in range(64 * 8)])
    rows = memoryview(vectors).cast("B").cast("f", [64, 8])
    return nvme_gpu.build_index(store, rows, offset=8 << 20, degree=8, candidates=16)._native


def steps():
    return _native.Steps(0)


# Of each operation: how its arguments are given, and what is called with their addresses.
OPERATIONS = {
    "gemv": (
        [read("weights", 64), read("x", 32), written("y", 2)],
        lambda _, at: steps().gemv(F32, (2, 32, 1), at, False, 0),
    ),
    "gemv of blocks": (
        [read("weights", 68, "|u1"), read("x", 32), written("y", 2)],
        lambda _, at: steps().gemv(Q8_0, (2, 32, 1), at, False, 0),
    ),
    "unpack": (
        [read("rows", 68, "|u1"), written("y", 64)],
        lambda _, at: steps().unpack(Q8_0, (2, 32, 34), at, 0),
    ),
    "rms_norm": (
        [read("x", 64), read("weight", 32), written("y", 64)],
        lambda _, at: steps().rms_norm((2, 32), 1e-5, at, 0),
    ),
    "silu_mul": (
        [read("x", 32), read("factor", 32), written("y", 32)],
        lambda _, at: steps().silu_mul(32, at, 0),
    ),
    "linear forward": (
        [read("x", 64), read("weights", 96), read("bias", 3), written("y", 6), written("sums", 6)],
        lambda _, at: _native.Linear(0).forward("fused", (2, 32, 3), "relu", at, 0),
    ),
    "linear backward": (
        [read("x", 64), read("weights", 96), read("sums", 6), read("dy", 6)]
        + [written("dsums", 6), written("dx", 64), written("dweights", 96), written("dbias", 3)],
        lambda _, at: _native.Linear(0).backward("naive", (2, 32, 3), "relu", at[:5], at[5:], 0),
    ),
    "route": (
        [read("logits", 16), written("chosen", 16), written("probabilities", 16)],
        lambda _, at: _native.Router(0).route((2, 8, 2), False, at, 0),
    ),
    "gemv of a drive": (
        [read("x", 32), written("y", 5)],
        lambda store, at: _native.Matrix(store._native, 0, F32, (5, 32)).gemv_on_gpu(*at, 0),
    ),
    "rows of a drive": (
        [read("ids", 3, "<i8"), read("x", 32), written("y", 3)],
        lambda store, at: _native.Matrix(store._native, 0, F32, (5, 32)).gathered_on_gpu(at[0], True, 3, at[1], at[2], 0),
    ),
    "gemm of a drive": (
        [read("x", 2 * 32 * 2, "|u1"), written("y", 10), written("workspace", 24_588)],
        lambda store, at: _native.Matrix(store._native, 0, Q8_0, (5, 32)).gemm_on_gpu(at, 2, "bfloat16", 0),
    ),
    "attention of pages": (
        [read("queries", 32), read("pages", 4, "<i4"), read("counts", 2, "<i4")]
        + [read("tail", 2 * 2 * 512 * 8 * 2, "|u1"), read("tail_counts", 2, "<i4")]
        + [written("y", 32), written("workspace", 80)],
        lambda store, at: _native.KvPages(store._native, 0, 4, (1, 8, 512, False)).attend_on_gpu((2, 2, 2, False), at, 1.0, 0),
    ),
    "experts": (
        [read("logits", 4), read("x", 32), written("y", 32), written("probabilities", 4)]
        + [read("the bias of gate", 128), read("the bias of up", 128), read("the bias of down", 128)],
        lambda store, at: _native.Experts(
            store._native,
            [((0, F32), (1 << 20, F32), (2 << 20, F32))],
            (32, 32, 4, 2),
            False,
            (None, None, None, None),
            (1 << 20, "lru", [], 1),
        ).step_on_gpu((0, 1), at[:4], None, list(at[4:]), False, 0),
    ),
    "search": (
        [read("queries", 16), written("ids", 6, "<i8"), written("distances", 6)]
        + [written("codes", 2, "<i4"), written("reads", 2, "<i4")],
        lambda store, at: store.index.search_on_gpu((at[0], 2), at[1:], (3, 8, 2), 0),
    ),
}


@pytest.fixture(scope="module")
def opened():
    if not stand_in():
        pytest.fail("needs the stand-in of CUDA: LD_LIBRARY_PATH with its libcuda.so.1")
    with nvme_gpu.open(SIM_GPU, gpu=0) as store:
        yield store


class WithIndex:
    """A store with an index of vectors on it."""

    def __init__(self, store):
        self._native, self.index = store._native, index(store)


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_kind_of_memory_as_each_argument(opened, name):
    arguments, call = OPERATIONS[name]
    store = WithIndex(opened) if name == "search" else opened
    cuda = ctypes.CDLL("libcuda.so.1")
    good = [argument.place() for argument in arguments]
    kept = [list(place.memory) for place in good]
    for which, argument in enumerate(arguments):
        for kind in KINDS:
            place = argument.place(kind)
            places = [*good[:which], place, *good[which + 1 :]]
            before = list(place.memory)
            started = []

            def launch(places=places, started=started):
                started.append(call(store, tuple(map(address, places))))
                assert cuda.cuCtxSynchronize() == 0
                for operation in filter(None, started):
                    operation.finish()

            done = check(kind, argument.name, argument.written, launch)
            assert done == (kind in FITS or (kind == "read-only" and not argument.written)), (name, argument.name, kind)
            if done:
                for held, values in zip(good, kept):
                    held.memory[:] = values
            else:
                assert list(place.memory) == before, (name, argument.name, kind)
                assert [list(held.memory) for held in good] == kept, (name, argument.name, kind, "something was launched")
