"""What cannot be: each ends in a typed error with its remedy, nothing is sent, and the store works afterwards."""

from __future__ import annotations

import array
import ctypes
import threading

import pytest

import nvme_gpu
import nvme_gpu.compute
from conftest import SIM, Device, rows_of

numpy = pytest.importorskip("numpy")

HUGE = 1 << 62


def opens(*words, **options):
    return lambda store, table: nvme_gpu.open(*words, **options)


def strided(dtype="int32"):
    return numpy.zeros((8, 8), dtype=dtype)[:, ::2]


class Interface:
    """An object that says of itself what it is told to."""

    def __init__(self, **words):
        found = {"version": 3, "shape": (1,), "typestr": "<i8", "data": (4096, False), "strides": None}
        self.__cuda_array_interface__ = {**found, **words}


class Broken:
    """DLPack that fails."""

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **words):
        raise BufferError("broken")


class Index:
    def __index__(self):
        raise RuntimeError("no number after all")


OPENING = {
    "no device": opens(""),
    "no such kind": opens("floppy:0"),
    "a number": opens(5),
    "bytes": opens(b"sim:mem"),
    "None": opens(None),
    "NUL": opens("sim:mem\0?size=1MiB"),
    "NUL in a path": opens("file:/tmp/a\0b"),
    "a line break": opens("sim:mem\n"),
    "a surrogate": opens("sim:\udcff"),
    "an unknown option": opens("sim:mem?colour=red"),
    "a bad size": opens("sim:mem?size=lots"),
    "a negative size": opens("sim:mem?size=-5"),
    "a huge size": opens("sim:mem?size=99999999999999999999"),
    "a missing file": opens("file:/does/not/exist"),
    "a folder": opens("file:/tmp"),
    "a missing image": opens("sim:/does/not/exist.img"),
    "a missing function": opens("vfio:0000:ff:1f.7"),
    "no function": opens("vfio:what"),
    "a missing socket": opens("vfio-user:/does/not/exist"),
    "an empty stripe": opens("stripe:"),
    "a stripe of nothing": opens("stripe:|"),
    "a bad stripe": opens("stripe:sim:mem?size=1MiB|sim:mem?size=1MiB?stripe=0"),
    "no queues": opens(SIM, queues=0),
    "negative queues": opens(SIM, queues=-1),
    "too many queues": opens(SIM, queues=1 << 40),
    "queues as text": opens(SIM, queues="8"),
    "queues as a fraction": opens(SIM, queues=1.5),
    "queues as a truth": opens(SIM, queues=True),
    "no depth": opens(SIM, depth=0),
    "no time": opens(SIM, timeout_ms=0),
    "negative time": opens(SIM, timeout_ms=-1),
    "time as text": opens(SIM, timeout_ms="1s"),
    "endless time": opens(SIM, timeout_ms=1 << 80),
    "namespace 0": opens(SIM, nsid=0),
    "namespace 9": opens(SIM, nsid=9),
    "a negative GPU": opens(SIM, gpu=-1),
    "a GPU as text": opens(SIM, gpu="cuda:0"),
    "a GPU that is not there": opens(SIM, gpu=77),
    "no queues for the GPU": opens(SIM, gpu_queues=0),
    "no such tier": opens(SIM, gpu_tier=4),
    "a tier without a GPU": opens(SIM, gpu_tier=1),
    "both accesses": opens(SIM, allow_write=True, read_only=True),
    "an unknown way": opens(SIM, file_io="fast"),
    "an unknown option of open": opens(SIM, colour="red"),
}

BYTES = {
    "read past the end": lambda s, t: s.read(1, s.nbytes),
    "read over the end": lambda s, t: s.read(2, s.nbytes - 1),
    "read a negative length": lambda s, t: s.read(-1),
    "read at a negative offset": lambda s, t: s.read(1, -1),
    "read a huge length": lambda s, t: s.read(HUGE),
    "read more than 64 bits": lambda s, t: s.read(1 << 70),
    "read at a huge offset": lambda s, t: s.read(1, (1 << 64) - 1),
    "read at more than 64 bits": lambda s, t: s.read(1, 1 << 64),
    "read a fraction": lambda s, t: s.read(1.0),
    "read at text": lambda s, t: s.read(1, "0"),
    "read with a broken index": lambda s, t: s.read(Index()),
    "read into bytes": lambda s, t: s.read_into(b"12345"),
    "read into text": lambda s, t: s.read_into("12345"),
    "read into None": lambda s, t: s.read_into(None),
    "read into a list": lambda s, t: s.read_into([1, 2]),
    "read into a frozen array": lambda s, t: s.read_into(numpy.broadcast_to(numpy.int32(1), (4, 4))),
    "read into gaps": lambda s, t: s.read_into(strided()),
    "read into a reversed array": lambda s, t: s.read_into(numpy.zeros(8)[::-1]),
    "read into the order of Fortran": lambda s, t: s.read_into(numpy.zeros((4, 4), order="F")),
    "read into a read-only view": lambda s, t: s.read_into(memoryview(b"12345")),
    "read into a released view": lambda s, t: s.read_into(released()),
    "read into objects": lambda s, t: s.read_into(numpy.zeros(3, dtype=object)),
    "read into memory of a GPU": lambda s, t: s.read_into(Interface()),
    "read into broken DLPack": lambda s, t: s.read_into(Broken()),
    "read into over the end": lambda s, t: s.read_into(bytearray(2), s.nbytes - 1),
    "read into at a negative offset": lambda s, t: s.read_into(bytearray(2), -5),
    "write past the end": lambda s, t: s.write(b"x", s.nbytes),
    "write at a negative offset": lambda s, t: s.write(b"x", -1),
    "write text": lambda s, t: s.write("text"),
    "write a number": lambda s, t: s.write(5),
    "write gaps": lambda s, t: s.write(strided()),
    "write from a GPU": lambda s, t: s.write_from(Interface()),
    "wait for a fraction that is none": lambda s, t: s.read_into(bytearray(1)).result(float("nan")),
    "wait for text": lambda s, t: s.read_into(bytearray(1)).result("soon"),
}


def released():
    view = memoryview(bytearray(8))
    view.release()
    return view


TABLES = {
    "no shape": lambda s, t: s.table(0, shape=(), dtype="int32"),
    "a shape that is a number": lambda s, t: s.table(0, shape=5, dtype="int32"),
    "a shape that is text": lambda s, t: s.table(0, shape="10", dtype="int32"),
    "a negative length": lambda s, t: s.table(0, shape=(-1, 4), dtype="int32"),
    "a length that is a fraction": lambda s, t: s.table(0, shape=(2.5, 4), dtype="int32"),
    "rows of no bytes": lambda s, t: s.table(0, shape=(10, 0), dtype="int32"),
    "more rows than fit": lambda s, t: s.table(0, shape=(HUGE, 4), dtype="int32"),
    "rows that are too long": lambda s, t: s.table(0, shape=(2, HUGE, HUGE), dtype="int32"),
    "a row past the end": lambda s, t: s.table(s.nbytes - 15, shape=(1, 4), dtype="int32"),
    "a negative offset": lambda s, t: s.table(-1, shape=(1, 4), dtype="int32"),
    "an offset of 65 bits": lambda s, t: s.table(1 << 64, shape=(1, 4), dtype="int32"),
    "an unknown dtype": lambda s, t: s.table(0, shape=(1, 4), dtype="int33"),
    "a dtype of objects": lambda s, t: s.table(0, shape=(1, 4), dtype=object),
    "no dtype": lambda s, t: s.table(0, shape=(1, 4), dtype=None),
    "a dtype of the other byte order": lambda s, t: s.table(0, shape=(1, 4), dtype=">i4"),
    "a table of no store": lambda s, t: nvme_gpu.Table("sim:mem", 0, (1, 4), "int32"),
    "rows one by one": lambda s, t: list(t),
}

IDS = {
    "-1": lambda s, t: t.gather(-1),
    "before the first": lambda s, t: t[-101],
    "the number of rows": lambda s, t: t[100],
    "63 bits": lambda s, t: t[(1 << 63) - 1],
    "the least of 64 bits": lambda s, t: t[-(1 << 63)],
    "64 bits": lambda s, t: t[1 << 63],
    "one bad among good": lambda s, t: t[[1, 2, -7, 3]],
    "-1 in 32 bits": lambda s, t: t[numpy.array([-1], "int32")],
    "a fraction": lambda s, t: t[1.0],
    "text": lambda s, t: t["1"],
    "None": lambda s, t: t[None],
    "dots": lambda s, t: t[...],
    "two axes": lambda s, t: t[1, :],
    "a truth": lambda s, t: t[True],
    "truths": lambda s, t: t[[True, False]],
    "a mask": lambda s, t: t.gather(numpy.zeros(100, dtype=bool)),
    "a mask of other rows": lambda s, t: t[numpy.zeros(99, dtype=bool)],
    "a mask of two lengths": lambda s, t: t[numpy.zeros((100, 4), dtype=bool)],
    "a masked array": lambda s, t: t[numpy.ma.masked_array([1, 2], [True, False])],
    "-1 in 8 bits": lambda s, t: t[numpy.array([-1], "int8")],
    "fractions": lambda s, t: t[numpy.zeros(3)],
    "16 bits": lambda s, t: t.gather(numpy.zeros(3, "int16")),
    "unsigned": lambda s, t: t.gather(numpy.zeros(3, "uint64")),
    "unsigned 64 bits": lambda s, t: t[numpy.full(3, (1 << 64) - 1, "uint64")],
    "bytes": lambda s, t: t[b"\0\1"],
    "the other byte order": lambda s, t: t.gather(numpy.zeros(3, ">i8")),
    "gaps": lambda s, t: t.gather(numpy.zeros(8, int)[::2]),
    "uneven lists": lambda s, t: t[[[1, 2], [3]]],
    "lists of different depth": lambda s, t: t[[[1], 2]],
    "lists of text": lambda s, t: t[["1", "2"]],
    "a set": lambda s, t: t[{1, 2}],
    "a dictionary": lambda s, t: t[{}],
    "an object": lambda s, t: t[object()],
    "objects": lambda s, t: t[numpy.array([1, None], dtype=object)],
    "broken DLPack": lambda s, t: t[Broken()],
    "a GPU without one": lambda s, t: t[Interface()],
    "a GPU's gaps": lambda s, t: t[Interface(shape=(4,), strides=(16,))],
    "a GPU's fractions": lambda s, t: t[Interface(typestr="<f4")],
    "a GPU's other byte order": lambda s, t: t[Interface(typestr=">i8")],
    "a GPU's mask": lambda s, t: t[Interface(mask=Interface())],
    "a GPU's address 0": lambda s, t: t[Interface(data=(0, False))],
    "a GPU's negative length": lambda s, t: t[Interface(shape=(-3,))],
    "a GPU's huge length": lambda s, t: t[Interface(shape=(HUGE, HUGE))],
    "a GPU's half interface": lambda s, t: t[half_interface()],
}


def half_interface():
    found = Interface()
    del found.__cuda_array_interface__["data"]
    return found


def out(shape, dtype="int32"):
    return numpy.zeros(shape, dtype=dtype)


PLACES = {
    "too small": lambda s, t: t.gather([1, 2], out=out((1, 4))),
    "too large": lambda s, t: t.gather([1, 2], out=out((3, 4))),
    "of another shape": lambda s, t: t.gather([1, 2], out=out((4, 2))),
    "of another dtype": lambda s, t: t.gather([1, 2], out=out((2, 4), "float64")),
    "of the same size": lambda s, t: t.gather([1, 2], out=out((2, 4), "float32")),
    "with gaps": lambda s, t: t.gather([1, 2], out=out((2, 8))[:, ::2]),
    "read-only": lambda s, t: t.gather([1, 2], out=bytes(32)),
    "of a GPU": lambda s, t: t.gather([1, 2], out=Interface(shape=(2, 4), typestr="<i4")),
    "nothing": lambda s, t: t.gather([1, 2], out=5),
    "the ids themselves": lambda s, t: same_memory(t),
    "a short status": lambda s, t: t.gather([1, 2], status=out(1)),
    "a long status": lambda s, t: t.gather([1, 2], status=out(3)),
    "a status of 64 bits": lambda s, t: t.gather([1, 2], status=out(2, "int64")),
    "a read-only status": lambda s, t: t.gather([1], status=bytes(4)),
    "an unknown check": lambda s, t: t.gather([1], check="never"),
    "an unknown dtype": lambda s, t: t.gather([1], dtype="int33"),
    "a negative stream": lambda s, t: t.gather(Device([1]), stream=-1),
    "a stream that is text": lambda s, t: t.gather(Device([1]), stream="main"),
    "a limit that is no number": lambda s, t: t.check(timeout=float("nan")),
    "scatter of too few": lambda s, t: t.scatter([1, 2], out((1, 4))),
    "scatter of another dtype": lambda s, t: t.scatter([1, 2], out((2, 4), "float64")),
    "scatter of another shape": lambda s, t: t.scatter([1, 2], out((4, 2))),
    "scatter of gaps": lambda s, t: t.scatter([1, 2], out((2, 8))[:, ::2]),
    "scatter of text": lambda s, t: t.scatter([1], "text"),
    "scatter of None": lambda s, t: t.scatter([1], None),
    "scatter to -1": lambda s, t: t.scatter([-1], out((1, 4))),
    "scatter twice": lambda s, t: t.scatter([1, 1], out((2, 4)), unique=True),
    "scatter of uneven lists": lambda s, t: t.scatter([1, 2], [[1, 2, 3, 4], [5]]),
    "scatter by fractions": lambda s, t: t.scatter(numpy.zeros(1), out((1, 4))),
    "scatter from a GPU": lambda s, t: t.scatter([1], Interface(shape=(1, 4), typestr="<i4")),
    "scatter by a GPU's ids": lambda s, t: t.scatter(Interface(), out((1, 4))),
    "an addition to int64": lambda s, t: s.table(0, shape=(9,), dtype="int64").scatter_add([1], out(1, "int64")),
    "an addition to -1": lambda s, t: t.scatter_add([-1], out((1, 4))),
}


def same_memory(table):
    shared = numpy.zeros(8, dtype="int64")
    return table.gather(shared[:4], out=shared.view("int32")[:16].reshape(4, 4))


ALL = {
    f"{group}: {name}": call
    for group, cases in (("open", OPENING), ("bytes", BYTES), ("table", TABLES), ("ids", IDS), ("places", PLACES))
    for name, call in cases.items()
}
# What no call of ours is reached with, or what its library raises by itself.
FOREIGN = {"bytes: read with a broken index": RuntimeError}


def test_there_are_two_hundred_with_those_of_files_and_tensors():
    import test_catalog
    import test_torch

    assert len(ALL) + len(test_catalog.BAD) + len(test_torch.BAD) >= 200


@pytest.fixture(scope="module")
def shared():
    with nvme_gpu.open(SIM) as store:
        yield store, rows_of(store, 100, 4)


@pytest.mark.parametrize("name", ALL)
def test_it_ends_in_a_typed_error(shared, name):
    store, table = shared
    allowed = (nvme_gpu.NvmeGpuError, TypeError, FOREIGN.get(name, nvme_gpu.Usage))
    with pytest.raises(allowed) as caught:
        ALL[name](store, table)
    if isinstance(caught.value, nvme_gpu.NvmeGpuError):
        assert caught.value.cause and caught.value.remedy and caught.value.code
    assert table[[99]].tolist() == [[99000, 99001, 99002, 99003]]


@pytest.mark.parametrize("name", [name for name in ALL if not name.startswith("open")])
def test_it_does_so_on_a_closed_store_too(name):
    store = nvme_gpu.open(SIM)
    table = store.table(0, shape=(100, 4), dtype="int32")
    store.close()
    allowed = (nvme_gpu.NvmeGpuError, TypeError, FOREIGN.get(name, nvme_gpu.Usage))
    with pytest.raises(allowed):
        ALL[name](store, table)


def test_it_does_so_on_other_threads(shared):
    store, table = shared
    kinds = set()

    def work(names):
        for name in names:
            try:
                ALL[name](store, table)
            except Exception as error:
                kinds.add(type(error))

    names = [name for name in ALL if not name.startswith("open")]
    threads = [threading.Thread(target=work, args=(names[start::4],)) for start in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert kinds <= {nvme_gpu.Usage, nvme_gpu.OutOfRange, TypeError, RuntimeError}, kinds
    assert table[[99]].tolist() == [[99000, 99001, 99002, 99003]]


@pytest.mark.parametrize("device", ["file", "sim"])
def test_a_write_guard_holds(tmp_path, device):
    path = tmp_path / "data.bin"
    path.write_bytes(bytes(4 << 20))
    row = array.array("i", [1] * 4).tobytes()
    model = tmp_path / "model.npy"
    numpy.save(model, numpy.ones(5))
    with nvme_gpu.open(f"{device}:{path}", read_only=True) as store:
        table = store.table(0, shape=(8, 4), dtype="int32")
        for call in (
            lambda: store.write(b"x"),
            lambda: store.write(b"x", durable=True),
            lambda: store.write_from(bytearray(4096)).result(),
            lambda: table.scatter([1], row),
            lambda: table.scatter_add([1], row),
            lambda: table.__setitem__([1], row),
            lambda: nvme_gpu.import_file(store, model),
        ):
            with pytest.raises(nvme_gpu.Usage, match="read"):
                call()
        assert table[[1]].tolist() == [[0] * 4]
    assert path.read_bytes() == bytes(4 << 20)


def test_a_write_guard_holds_for_the_gpu_and_torch(tmp_path):
    torch = pytest.importorskip("torch")
    import nvme_gpu.torch

    path = tmp_path / "data.img"
    path.write_bytes(bytes(4 << 20))
    with nvme_gpu.open(f"sim:{path}?queues=32", gpu=0, read_only=True) as store:
        table = store.table(0, shape=(8, 4), dtype="int32")
        rows = Device([1] * 4, "<i4", shape=(1, 4))
        state = nvme_gpu.torch.state(table, "cpu")
        for call in (
            lambda: table.scatter(Device([1]), rows, check="now"),
            lambda: table.scatter_add(Device([1]), rows, check="now"),
            lambda: store.write_from(rows).result(),
            lambda: torch.ops.nvme_ops.scatter(state, torch.tensor([1]), torch.ones(1, 4, dtype=torch.int32)),
            lambda: torch.ops.nvme_ops.scatter_add(state, torch.tensor([1]), torch.ones(1, 4, dtype=torch.int32)),
        ):
            with pytest.raises(nvme_gpu.Usage, match="read"):
                call()
        assert table[[1]].tolist() == [[0] * 4]
    assert path.read_bytes() == bytes(4 << 20)


def test_the_extension_module_checks_addresses_itself():
    View = nvme_gpu._native.View
    with pytest.raises(ValueError):
        View.raw(None, 0, 8, (1,), "int64", (1, 0), False)
    with pytest.raises(ValueError):
        View.raw(None, (1 << 64) - 4, 8, (1,), "int64", (1, 0), False)
    with pytest.raises(TypeError):
        View.from_dlpack(5)
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    with pytest.raises(TypeError):
        View.from_dlpack(make(ctypes.addressof(ctypes.c_int(5)), b"something else", None))
    capsule = numpy.zeros(4).__dlpack__()
    View.from_dlpack(capsule)
    with pytest.raises(TypeError):
        View.from_dlpack(capsule)
    with pytest.raises(MemoryError):
        nvme_gpu.Array((HUGE, HUGE), "int64", 8)


NO_FLAGS = ["no", "False", "", 0, 1, None, 1.0, [], b"0"]


@pytest.mark.parametrize("wrong", NO_FLAGS)
def test_what_is_no_boolean_is_refused(store, wrong, tmp_path):
    """Anything is true or false in Python: a writable drive by allow_write="no" is nobody's wish."""
    table = rows_of(store, 20, 4)
    numpy = pytest.importorskip("numpy")
    numpy.save(tmp_path / "rows.npy", numpy.zeros((4, 4), "float32"))
    x = numpy.zeros((4, 4), "float32")
    calls = [
        lambda: nvme_gpu.open("sim:mem?size=1MiB", allow_write=wrong),
        lambda: nvme_gpu.open("sim:mem?size=1MiB", read_only=wrong),
        lambda: store.write_from(b"1234", durable=wrong),
        lambda: store.write(b"1234", durable=wrong),
        lambda: table.scatter([1], numpy.zeros((1, 4), "int32"), unique=wrong),
        lambda: nvme_gpu.import_file(store, tmp_path / "rows.npy", verify=wrong),
        lambda: nvme_gpu.compute.moe_router(x, 2, over_all=wrong),
        lambda: nvme_gpu.compute.moe_router(x, 2, probabilities=wrong),
        lambda: nvme_gpu.compute.attention_naive(*[numpy.zeros((1, 1, 2, 8), "float32")] * 3, causal=wrong),
        lambda: nvme_gpu.compute.linear_backward_naive(x, x, x, needs=(True, wrong, True)),
    ]
    calls += [lambda name=name: nvme_gpu.DataLoader(table, 4, **{name: wrong}) for name in FLAGS_OF_LOADERS]
    for number, call in enumerate(calls):
        with pytest.raises(TypeError, match="True or False"):
            call()
            pytest.fail(f"call {number} took {wrong!r}")
    for right in (True, numpy.True_):
        nvme_gpu.open("sim:mem?size=1MiB", read_only=right).close()


FLAGS_OF_LOADERS = ("shuffle", "pad", "drop_last", "with_ids")


@pytest.mark.parametrize("wrong", [True, "1", b"1", None, 1.5, [], float("nan")])
def test_what_is_no_whole_number_is_refused(store, wrong):
    table = rows_of(store, 20, 4)
    calls = [lambda name=name: nvme_gpu.open("sim:mem?size=1MiB", **{name: wrong}) for name in NUMBERS_OF_STORES]
    calls += [lambda name=name: nvme_gpu.DataLoader(table, **{"batch_size": 4, name: wrong}) for name in NUMBERS_OF_LOADERS]
    calls += [lambda: store.read(wrong), lambda: store.read(1, wrong), lambda: store.table(wrong, shape=(1, 1), dtype="int8")]
    calls += [lambda: store.table(0, shape=(wrong, 1), dtype="int8"), lambda: store.read_into(bytearray(1), wrong)]
    for number, call in enumerate(calls):
        with pytest.raises(TypeError):
            call()
            pytest.fail(f"call {number} took {wrong!r}")


NUMBERS_OF_STORES = ("queues", "depth", "timeout_ms", "nsid", "gpu_queues", "gpu_blocks")
NUMBERS_OF_LOADERS = ("batch_size", "seed", "rank", "world", "prefetch_depth", "streams")


@pytest.mark.parametrize("name", ["cuda:", "cuda:-1", "cuda:1.0", "cpu:x", "cpu:", "gpu", "", "cuda0", "CUDA", 0])
def test_what_is_no_device_is_refused(store, name):
    table = rows_of(store, 20, 4)
    with pytest.raises(nvme_gpu.Usage):
        nvme_gpu.DataLoader(table, 4, device=name)
