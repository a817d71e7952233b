"""Each kind of memory as each argument: what a GPU cannot use is refused by name, before anything is launched."""

from __future__ import annotations

import ctypes
import sys

import pytest

import nvme_gpu
from conftest import SIM_GPU, Device, rows_of, stand_in

ROWS, WIDTH = 64, 4
FITS = ("gpu", "managed", "pinned", "registered")
KINDS = (*FITS, "read-only", "host", "gpu 1", "short", "odd")


@pytest.fixture(params=["sim", "file", "stripe"])
def table(request, tmp_path):
    """The rows of a drive, which the GPU reads; of a file, by a host thread; of drives in stripes."""
    if not stand_in():
        pytest.fail("needs the stand-in of CUDA: LD_LIBRARY_PATH with its libcuda.so.1")
    path = tmp_path / "rows.bin"
    path.write_bytes(bytes(1 << 20))
    drive = "sim:mem?size=1MiB&queues=32"
    name = {"sim": SIM_GPU, "file": f"file:{path}", "stripe": f"stripe:{drive}|{drive}?stripe=4KiB"}[request.param]
    with nvme_gpu.open(name, gpu=0) as store:
        yield rows_of(store, ROWS, WIDTH)


class Place(Device):
    """Memory of a kind for ``values``: "short" memory ends before the last of them, "odd" memory begins between two."""

    def __init__(self, values, typestr, kind, shape=None):
        self.odd = 1 if kind == "odd" else 0
        of = {"gpu 1": "gpu", "short": "gpu", "odd": "gpu"}.get(kind, kind)
        held = values[:-1] if kind == "short" else values
        super().__init__(held + [0] * self.odd, typestr, shape or (len(values),), kind=of, gpu=int(kind == "gpu 1"))

    @property
    def __cuda_array_interface__(self):
        found = super().__cuda_array_interface__
        return {**found, "data": (found["data"][0] + self.odd, False)}


def check(kind, name, is_written, call):
    """Whether ``call`` is carried out, as it must be with memory of the kind; or raises an error that names it."""
    if kind in FITS or (kind == "read-only" and not is_written):
        call()
        return True
    with pytest.raises(nvme_gpu.Usage, match=name) as caught:
        call()
    what = {
        "read-only": "read-only",
        "host": "is not registered with CUDA",
        "gpu 1": "lies on GPU 1, and GPU 0 would use it",
        "short": "has .* bytes of the .* that are used",
        "odd": "does not begin at a multiple of",
    }[kind]
    caught.match(what)
    assert caught.value.remedy
    return False


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_memory_as_ids(table, kind):
    ids, out = Place([3, 1, 5], "<i8", kind), Device([7] * 12, "<i4", shape=(3, WIDTH))
    if check(kind, "ids", False, lambda: table.gather(ids, out=out, check="now")):
        assert out.tolist() == [row * 1000 + at for row in (3, 1, 5) for at in range(WIDTH)]
    else:
        assert out.tolist() == [7] * 12, "nothing was launched"


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_memory_as_out(table, kind):
    if kind == "odd":
        return  # rows may lie at any address
    out = Place([7] * 12, "<i4", kind, (3, WIDTH))
    if check(kind, "out", True, lambda: table.gather(Device([3, 1, 5]), out=out, check="now")):
        assert out.tolist() == [row * 1000 + at for row in (3, 1, 5) for at in range(WIDTH)]
    else:
        assert set(out.memory) == {7}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_memory_as_status(table, kind):
    status = Place([9, 9, 9], "<i4", kind)
    out = Device([7] * 12, "<i4", shape=(3, WIDTH))
    gather = lambda: table.gather(Device([3, 1, 5]), out=out, status=status, check="now")  # noqa: E731
    if check(kind, "status", True, gather):
        assert status.tolist() == [0, 0, 0]
    else:
        assert out.tolist() == [7] * 12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("verb", ["scatter", "scatter_add"])
def test_each_kind_of_memory_of_a_scatter(table, kind, verb):
    before = table.gather([3, 1]).tolist()
    ids, rows, status = [3, 1], list(range(8)), [9, 9]

    def change(ids=Device(ids), rows=Device(rows, "<i4", (2, WIDTH)), status=Device(status, "<i4")):
        getattr(table, verb)(ids, rows, status=status, check="now")

    done = check(kind, "ids", False, lambda: change(ids=Place(ids, "<i8", kind)))
    if kind != "odd":
        done |= check(kind, "rows", False, lambda: change(rows=Place(rows, "<i4", kind, (2, WIDTH))))
    done |= check(kind, "status", True, lambda: change(status=Place(status, "<i4", kind)))
    if not done:
        assert table.gather([3, 1]).tolist() == before


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_memory_of_reads_and_writes(table, kind):
    if kind == "odd":
        return  # bytes may lie at any address
    # More than a part of a host thread or of a kernel.
    for count in (100, 70_000):
        place = Place([5] * count, "|u1", kind)
        if check(kind, "buf", True, lambda: table.store.read_into(place, 0).result()):
            assert bytes(place.memory)[: count] == table.store.read(count)
        check(kind, "buf", False, lambda: table.store.write_from(place, 200_000).result())


def test_memory_that_was_registered_in_pieces_is_one_for_kernels(table):
    """Limits of a registration make programs register memory piece by piece. Copies of a stream take one piece alone."""
    import mmap

    if table.store.path["data"] == "host":
        return  # a host thread moves the rows, by copies

    cuda = ctypes.CDLL("libcuda.so.1")
    memory = mmap.mmap(-1, 3 * 4096)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for at in (0, 4096):
        assert cuda.cuMemHostRegister_v2(ctypes.c_uint64(start + at), ctypes.c_size_t(4096), 3) == 0

    class Pieces:
        def __init__(self, nbytes):
            self.nbytes = nbytes

        @property
        def __cuda_array_interface__(self):
            return {"version": 3, "shape": (self.nbytes,), "typestr": "|u1", "data": (start + 100, False)}

    table.store.read_into(Pieces(2 * 4096 - 100)).result()
    assert memory[100 : 2 * 4096] == table.store.read(2 * 4096 - 100)
    with pytest.raises(nvme_gpu.Usage, match="has 8092 bytes of the 8093 that are used"):
        table.store.read_into(Pieces(2 * 4096 - 99)).result()
    for at in (0, 4096):
        assert cuda.cuMemHostUnregister(ctypes.c_uint64(start + at)) == 0


class At:
    """Memory at an address, as an object of a GPU."""

    def __init__(self, address, shape, typestr, strides=None):
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": shape,
            "typestr": typestr,
            "data": (address, False),
            "strides": strides,
        }


class Registered:
    """Pages of the host that are registered one by one, with ``flags`` each; ``on_gpu`` are their addresses on GPUs,
    where those are not the host's."""

    def __init__(self, flags, on_gpu=()):
        import mmap

        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.memory = mmap.mmap(-1, len(flags) * 4096)
        self.start = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.pages = [ctypes.c_uint64(self.start + index * 4096) for index in range(len(flags))]
        for page, flag in zip(self.pages, flags):
            assert self.cuda.cuMemHostRegister_v2(page, ctypes.c_size_t(4096), flag) == 0
        for page, at in zip(self.pages, on_gpu):
            assert self.cuda.fake_cuda_map_at(page, ctypes.c_uint64(at)) == 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for page in self.pages:
            assert self.cuda.cuMemHostUnregister(page) == 0


def test_a_kernel_gets_the_address_that_memory_has_on_the_gpu(table):
    """Where that is another one than on the host: each side has bytes of its own here, so that it shows."""
    there, out = (ctypes.c_int64 * 3)(9, 8, 7), (ctypes.c_int32 * 12)()
    with Registered([3, 3], [ctypes.addressof(there), ctypes.addressof(out)]) as pages:
        pages.memory[:24] = bytes((ctypes.c_int64 * 3)(3, 1, 5))
        ids, rows = At(pages.start, (3,), "<i8"), At(pages.start + 4096, (3, WIDTH), "<i4")
        table.gather(ids, out=rows, check="now")
        assert list(out) == [row * 1000 + at for row in (9, 8, 7) for at in range(WIDTH)]
        assert pages.memory[4096:4144] == bytes(48)
        # Bytes behind the first one of a registration, too.
        table.gather(At(pages.start + 8, (2,), "<i8"), out=At(pages.start + 4096, (2, WIDTH), "<i4"), check="now")
        assert list(out)[::WIDTH] == [8000, 7000, 7000]


def test_pieces_that_the_gpu_has_apart_are_not_one(table):
    there = (ctypes.c_char * 4096)()
    with Registered([3, 3], [ctypes.addressof(there)]) as pages:
        for call in (
            lambda: table.store.read_into(At(pages.start, (4097,), "|u1")).result(),
            lambda: table.store.write_from(At(pages.start, (4097,), "|u1"), 1 << 19).result(),
        ):
            with pytest.raises(nvme_gpu.Usage, match="has 4096 bytes of the 4097 that are used"):
                call()


def test_each_piece_of_memory_may_be_written_where_a_kernel_writes(table):
    if table.store.path["data"] == "host":
        return  # copies of a stream take one piece alone
    for flags in ([3, 11], [11, 3], [3, 11, 3]):
        with Registered(flags) as pages:
            place = At(pages.start, (len(flags) * 4096,), "|u1")
            with pytest.raises(nvme_gpu.Usage, match="read-only"):
                table.store.read_into(place).result()
            table.store.write_from(place, 1 << 18).result()


def test_managed_memory_is_every_gpus(table):
    out = Device([7] * 12, "<i4", shape=(3, WIDTH), kind="managed", gpu=1)
    table.gather(Device([3, 1, 5], kind="managed", gpu=1), out=out, check="now")
    assert out.tolist()[::WIDTH] == [3000, 1000, 5000]


def test_memory_that_was_freed_is_refused(table):
    out = Device([7] * 4, "<i4", shape=(1, WIDTH))
    ids = Device([1])
    at = ids.__cuda_array_interface__["data"][0]
    del ids

    class Freed:
        __cuda_array_interface__ = {"version": 3, "shape": (1,), "typestr": "<i8", "data": (at, False)}

    with pytest.raises(nvme_gpu.Usage, match="is not registered with CUDA"):
        table.gather(Freed(), out=out)
    assert out.tolist() == [7] * 4


class AtNothing:
    """Ids at an address where no memory of this process lies."""

    def __init__(self, count):
        self.__cuda_array_interface__ = {"version": 3, "shape": (count,), "typestr": "<i8", "data": (0x30_0000, False)}


def test_a_capture_judges_and_its_launches_do_not_ask(table):
    cuda = ctypes.CDLL("libcuda.so.1")
    cuda.cuStreamBeginCapture_v2.argtypes = [ctypes.c_void_p, ctypes.c_uint]
    cuda.cuStreamEndCapture.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    stream, graph = ctypes.c_void_p(), ctypes.c_void_p()
    assert cuda.cuStreamCreate(ctypes.byref(stream), 1) == 0
    out = Device([7] * 4, "<i4", shape=(1, WIDTH))
    # No memory is allocated while a stream is captured.
    of_host, ids = Place([1], "<i8", "host"), Device([2])
    assert cuda.cuStreamBeginCapture_v2(stream, 0) == 0
    try:
        with pytest.raises(nvme_gpu.Usage, match="ids"):
            table.gather(of_host, out=out, stream=stream.value)
        table.gather(ids, out=out, stream=stream.value)
        # What a graph allocates is known to nobody while it is captured, and lies at an address that is none of the
        # host's.
        table.gather(AtNothing(1), out=out, stream=stream.value)
    finally:
        ended = cuda.cuStreamEndCapture(stream, ctypes.byref(graph))
    assert ended == 0, "the refusal did not end the capture"
    cuda.cuGraphDestroy(graph)
    with pytest.raises(nvme_gpu.Usage, match="ids"):
        table.gather(AtNothing(1), out=out)


# ---- what objects say of their memory


class DlTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", DELETER),
        ("flags", ctypes.c_uint64),
        ("tensor", DlTensor),
    ]


class Managed(ctypes.Structure):
    _fields_ = [("tensor", DlTensor), ("context", ctypes.c_void_p), ("deleter", DELETER)]


class Tensor:
    """An object with DLPack that says of itself what it is told to."""

    def __init__(self, *, major=1, versioned=True, flags=0, shape=(4,), strides=None, ndim=None, device=(1, 0), **fields):
        self.memory = (ctypes.c_int32 * 4)(5, 6, 7, 8)
        self.deleted = []
        self.device = device
        tensor = DlTensor(ctypes.addressof(self.memory), device[0], device[1], len(shape), 0, 32, 1, None, None, 0)
        self.lists = (ctypes.c_int64 * len(shape))(*shape), (ctypes.c_int64 * len(strides or ()))(*(strides or ()))
        if len(shape) and fields.pop("has_shape", True):
            tensor.shape = ctypes.cast(self.lists[0], ctypes.POINTER(ctypes.c_int64))
        if strides:
            tensor.strides = ctypes.cast(self.lists[1], ctypes.POINTER(ctypes.c_int64))
        if ndim is not None:
            tensor.ndim = ndim
        for name, value in fields.items():
            setattr(tensor, name, value)
        self.deleter = DELETER(self.deleted.append)
        if versioned:
            self.managed = Versioned(major, 0, None, self.deleter, flags, tensor)
        else:
            self.managed = Managed(tensor, None, self.deleter)
        self.name = b"dltensor_versioned" if versioned else b"dltensor"

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **words):
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return make(ctypes.addressof(self.managed), self.name, None)


@pytest.mark.parametrize("versioned", [True, False])
def test_a_tensor_that_is_right_is_filled(store, versioned):
    table = rows_of(store, 10, 4)
    out = Tensor(versioned=versioned, shape=(1, 4))
    table.gather([2], out=out)
    assert list(out.memory) == [2000, 2001, 2002, 2003] and len(out.deleted) == 1
    out = Tensor(versioned=versioned, shape=(1, 3), byte_offset=4)
    store.read_into(out, 160).result()
    assert list(out.memory)[:1] == [5], "bytes before the offset stay"


@pytest.mark.parametrize(
    "wrong, what",
    [
        ({"data": None}, "NULL"),
        ({"data": 0}, "NULL"),
        ({"data": 8}, "not all memory of this process"),
        ({"byte_offset": 1 << 63}, "outside of memory"),
        ({"byte_offset": (1 << 64) - 8}, "outside of memory"),
        ({"byte_offset": 1 << 62}, "not all memory of this process"),
        ({"byte_offset": 1 << 50}, "not all memory of this process"),
        ({"data": None, "byte_offset": 64}, "NULL"),
        ({"shape": (-4,)}, "negative"),
        ({"shape": (4, -1)}, "negative"),
        ({"shape": (1 << 62, 4)}, "more bytes than memory"),
        ({"shape": (1 << 61,)}, "more bytes than memory"),
        ({"shape": (1 << 40,)}, "not all memory of this process"),
        ({"shape": (1 << 62, 1 << 62, 1 << 62)}, "more bytes than memory"),
        ({"ndim": -1}, "dimensions"),
        ({"ndim": 1 << 30}, "dimensions"),
        ({"has_shape": False}, "shape is NULL"),
        ({"strides": (2,)}, "C-contiguous"),
        ({"strides": (-1,)}, "C-contiguous"),
        ({"strides": (0,)}, "C-contiguous"),
        ({"shape": (2, 2), "strides": (1 << 62, 1)}, "C-contiguous"),
        ({"lanes": 0}, "lanes"),
        ({"lanes": 4}, "lanes"),
        ({"bits": 0}, "bits"),
        ({"bits": 24}, "bits"),
        ({"code": 200}, "code"),
        ({"device": (10, 0)}, "type 10"),
        ({"device": (0, 0)}, "type 0"),
        ({"device": (-5, 3)}, "type -5"),
        ({"major": 2}, "version"),
        ({"major": 0}, "version"),
    ],
)
def test_a_tensor_that_cannot_be_is_refused(store, wrong, what):
    table = rows_of(store, 10, 4)
    for call in (
        lambda tensor: store.read_into(tensor).result(),
        lambda tensor: table.gather([1], out=tensor),
        lambda tensor: store.write_from(tensor).result(),
        lambda tensor: table.gather(tensor),
        lambda tensor: table.gather([1], status=tensor),
    ):
        tensor = Tensor(**wrong)
        with pytest.raises(nvme_gpu.Usage) as caught:
            call(tensor)
        caught.match(what)
        assert "device" in wrong or len(tensor.deleted) == 1, "its owner was told that it is not used"
        assert list(tensor.memory) == [5, 6, 7, 8]


def test_a_read_only_tensor_is_read_and_not_written(store):
    table = rows_of(store, 10, 4)
    for call in (lambda one: store.read_into(one), lambda one: table.gather([1], out=one)):
        tensor = Tensor(flags=1, shape=(1, 4))
        with pytest.raises(nvme_gpu.Usage, match="read-only"):
            call(tensor)
        assert list(tensor.memory) == [5, 6, 7, 8] and len(tensor.deleted) == 1
    store.write_from(Tensor(flags=1), 160).result()
    assert table.gather([10 - 1]).tolist() == [[9000, 9001, 9002, 9003]]


@pytest.mark.parametrize("answer", [None, 5, (1,), ("cpu", 0), (1, 2, 3)])
def test_a_device_that_cannot_be_is_refused(store, answer):
    tensor = Tensor()
    tensor.device = answer
    with pytest.raises(nvme_gpu.Usage, match="does not say on which device"):
        store.read_into(tensor)


@pytest.mark.parametrize(
    "wrong, what",
    [
        ({"data": (0, False)}, "address 0"),
        ({"data": (None, False)}, "address 0"),
        ({"data": (-8, False)}, "address -8"),
        ({"data": (1 << 63, False)}, "address 9223372036854775808"),
        ({"data": (1 << 70, False)}, "address"),
        ({"data": ("0x1000", False)}, "is not one"),
        ({"data": (1.5, False)}, "is not one"),
        ({"data": (4096,)}, "is not one"),
        ({"data": 4096}, "is not one"),
        ({"data": (8, False)}, "is not registered with CUDA"),
        ({"data": (4096, True)}, "read-only"),
        ({"shape": (-1,)}, "shape"),
        ({"shape": (2.0,)}, "is not one"),
        ({"shape": None}, "is not one"),
        ({"shape": (1 << 63,)}, "shape"),
        ({"shape": (1 << 40, 1 << 40)}, "shape"),
        ({"strides": (8,), "shape": (2, 2)}, "strides"),
        ({"strides": (-4,), "shape": (4,)}, "C-contiguous"),
        ({"strides": ("x",)}, "is not one"),
        ({"typestr": ">i4"}, "i4"),
        ({"typestr": 5}, "is not one"),
        ({"typestr": "|O8"}, "O8"),
        ({"stream": "x"}, "is not one"),
        ({"stream": 0}, "stream"),
        ({"stream": -1}, "stream"),
        ({"mask": object()}, "mask"),
    ],
)
def test_an_array_interface_that_cannot_be_is_refused(gpu_store, wrong, what):
    good = Device([1, 2, 3, 4], "<i4")

    class Wrong:
        __cuda_array_interface__ = {**good.__cuda_array_interface__, **wrong}

    with pytest.raises(nvme_gpu.NvmeGpuError, match=what) as caught:
        gpu_store.read_into(Wrong()).result()
    assert isinstance(caught.value, nvme_gpu.Usage)
    Wrong.__cuda_array_interface__ = None
    with pytest.raises(nvme_gpu.Usage, match="is not one"):
        gpu_store.read_into(Wrong())


def test_a_buffer_without_memory_is_refused(store):
    """By the buffer protocol of C: a view whose address is NULL."""
    if sys.version_info < (3, 12):
        return  # needs __buffer__
    raw = (ctypes.c_char * 8).from_address(0)
    with pytest.raises(nvme_gpu.Usage, match="NULL"):
        store.read_into(raw)
    with pytest.raises(nvme_gpu.Usage, match="NULL"):
        store.write_from(raw)
