"""DLPack both ways: the version of a capsule, and the order of the streams of producer and consumer."""

from __future__ import annotations

import ctypes
import gc

import pytest

import nvme_gpu
from conftest import Device, drain, during_reads, rows_of, stand_in
from nvme_gpu._native import Array, View

QUEUES = "sim:mem?size=32MiB&queues=32"
OLD, NEW = b"dltensor", b"dltensor_versioned"


def pointer(capsule, name):
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return get(capsule, name)


def version_of(capsule):
    """Major and minor, which stand first in a versioned tensor."""
    return tuple(ctypes.cast(pointer(capsule, NEW), ctypes.POINTER(ctypes.c_uint32))[:2])


def with_version(array, major, minor):
    capsule = array.__dlpack__(max_version=(1, 0))
    words = ctypes.cast(pointer(capsule, NEW), ctypes.POINTER(ctypes.c_uint32))
    words[0], words[1] = major, minor
    return capsule


class Given:
    """A producer whose capsule is made by ``make``; it writes down what it was asked."""

    def __init__(self, make, device=(1, 0)):
        self.make, self.device, self.asked = make, device, []

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **words):
        self.asked.append(words)
        return self.make(**words)


@pytest.mark.parametrize("major", [0, 2, 3, 2**32 - 1])
def test_another_major_version_is_refused(store, major):
    """A consumer may look at nothing else of such a tensor but its deleter: its fields may stand elsewhere."""
    store.write((7).to_bytes(8, "little"))
    ids = Array((1,), "int64", 8)
    ctypes.memset(ids.address, 0, 8)
    capsule = with_version(ids, major, 0)
    with pytest.raises(BufferError, match="version"):
        View.from_dlpack(capsule)
    table = store.table(0, shape=(4, 2), dtype="int32")
    for call in (
        lambda: table[Given(lambda **_: with_version(ids, major, 0))],
        lambda: store.read_into(Given(lambda **_: with_version(ids, major, 0))),
        lambda: store.write_from(Given(lambda **_: with_version(ids, major, 0))),
    ):
        with pytest.raises(nvme_gpu.Usage, match="version"):
            call()
    del capsule
    gc.collect()


@pytest.mark.parametrize("minor", [0, 1, 99])
def test_every_minor_version_is_taken(store, minor):
    ids = Array((1,), "int64", 8)
    table = rows_of(store, 4, 2)
    assert table[Given(lambda **_: with_version(ids, 1, minor))].tolist() == [[0, 1]]


@pytest.mark.parametrize("asked, versioned", [(None, False), ((0, 8), False), ((1, 0), True), ((1, 9), True), ((2, 0), True)])
def test_the_version_that_is_given_is_one_that_was_asked_for(asked, versioned):
    capsule = Array((2, 3), "float32", 4).__dlpack__(max_version=asked)
    if versioned:
        assert version_of(capsule)[0] == 1
    else:
        assert pointer(capsule, OLD)


@pytest.mark.parametrize("stream, asked", [(None, 1), (0, 1), (1, 1), (2, 2)])
def test_a_producer_is_told_the_stream_of_its_consumer(gpu_store, stream, asked):
    """The default stream has the number 1 in DLPack: 0 stands for nothing, None for no order that is known."""
    table = rows_of(gpu_store, 100, 2)
    kept = Device([3])

    def make(**words):
        array = Array((1,), "int64", 8, gpu_store._native)
        ctypes.memmove(array.address, ctypes.addressof(kept.memory), 8)
        return array.__dlpack__(**words)

    ids = Given(make, (2, 0))
    assert table.gather(ids, stream=stream, check="now").tolist() == [[3000, 3001]]
    assert ids.asked == [{"max_version": (1, 0), "copy": False, "stream": asked}]
    buffer = Given(make, (2, 0))
    gpu_store.write_from(buffer, 1 << 20, stream=stream).result()
    assert [words["stream"] for words in buffer.asked] == [asked]
    assert gpu_store.read(8, 1 << 20) == (3).to_bytes(8, "little")
    # Memory of the host has no streams.
    on_host = Given(lambda **words: Array((1,), "int64", 8).__dlpack__(**words))
    table[on_host]
    assert "stream" not in on_host.asked[0]


@pytest.fixture
def streams():
    """Two streams of GPU 0, and what waits for one."""
    if not stand_in():
        pytest.fail("needs the stand-in of CUDA")
    cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert cuda.cuCtxPushCurrent_v2(context) == 0
    made = [ctypes.c_void_p(), ctypes.c_void_p()]
    try:
        assert [cuda.cuStreamCreate(ctypes.byref(one), 1) for one in made] == [0, 0]

        def copied(stream, address, nbytes):
            """What a copy finds that is put into ``stream`` now."""
            to = (ctypes.c_char * nbytes)()
            where = ctypes.c_void_p(stream)
            assert cuda.cuMemcpyDtoHAsync_v2(to, ctypes.c_uint64(address), ctypes.c_size_t(nbytes), where) == 0
            assert cuda.cuStreamSynchronize(where) == 0
            return bytes(to)

        yield [one.value for one in made], copied
        assert [cuda.cuStreamDestroy_v2(one) for one in made] == [0, 0]
    finally:
        cuda.cuCtxPopCurrent_v2(ctypes.byref(context))
        cuda.cuDevicePrimaryCtxRelease_v2(0)


@pytest.mark.parametrize("how", ["own", "legacy", "default"])
def test_a_consumer_comes_after_what_fills_the_array(streams, how):
    """What it puts into its stream behind __dlpack__ sees the rows, though their reads have not ended yet."""
    (first, other), copied = streams
    consumer = other if how == "own" else 1
    asked = None if how == "default" else consumer

    def consume(store, saw):
        # Whole blocks, which are written without a read before.
        store.write(b"\1" * 4096)
        table = store.table(0, shape=(4, 16), dtype="uint8")
        made = table.gather(Device([2]), stream=first)
        under_way = not table._native.is_idle()
        saw()
        assert under_way
        # The stand-in may wait here, where CUDA lets the stream wait.
        capsule = made.__dlpack__(stream=asked, max_version=(1, 0))
        assert copied(consumer, made.address, 16) == b"\1" * 16
        del capsule
        table.check()

    during_reads(consume, QUEUES, gpu=0)
    drain()


def test_ids_by_dlpack_come_after_what_their_producer_does(streams):
    """A gather whose ids are still being gathered on another stream waits for them."""
    (first, other), _ = streams

    def consume(store, saw):
        store.write(((3).to_bytes(8, "little") + (1).to_bytes(8, "little")).ljust(4096))
        numbers = store.table(0, shape=(2, 1), dtype="int64")
        store.write(bytes(range(64)).ljust(4096), 4096)
        rows = store.table(4096, shape=(4, 16), dtype="uint8")
        ids = numbers.gather(Device([0, 1]), stream=first)
        under_way = not numbers._native.is_idle()
        saw()
        found = rows.gather(Given(ids.__dlpack__, (2, 0)), stream=other, check="now")
        flat = bytes(range(48, 64)) + bytes(range(16, 32))
        assert under_way and found.tobytes() == flat

    during_reads(consume, QUEUES, gpu=0)
    drain()


def test_minus_one_asks_for_no_order(streams):
    """The consumer sees to the order itself: its stream does not wait, and neither does the call."""
    (first, other), _ = streams

    def take(store, saw):
        store.write(b"\1" * 4096)
        table = store.table(0, shape=(4, 16), dtype="uint8")
        made = table.gather(Device([2]), stream=first)
        capsule = made.__dlpack__(stream=-1, max_version=(1, 0))
        under_way = not table._native.is_idle()
        saw()
        assert under_way, "the call has waited for the rows"
        del capsule
        table.check()

    during_reads(take, QUEUES, gpu=0)
    drain()


@pytest.mark.parametrize("copy, flags", [(None, 0), (False, 0), (True, 2)])
def test_a_consumer_is_told_that_it_got_a_copy(copy, flags):
    """By the flag of DLPack: who has a copy may write it."""
    array = Array((2, 3), "float32", 4)
    capsule = array.__dlpack__(max_version=(1, 0), copy=copy)
    words = ctypes.cast(pointer(capsule, NEW), ctypes.POINTER(ctypes.c_uint64))
    # Versions, context and deleter come before the flags, and the address after them.
    assert words[3] == flags
    assert (words[4] == array.address) == (not copy)
