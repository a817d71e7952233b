"""What there is without numpy and torch, and without what one of them lacks."""

from __future__ import annotations

import array
import ctypes
import json
import logging
import sys

import pytest

import nvme_gpu
from conftest import Device, rows_of
from nvme_gpu import __main__ as command_line
from nvme_gpu import _buffers, _dtypes, _store


@pytest.fixture
def alone(monkeypatch):
    """No numpy and no torch, for this package."""
    monkeypatch.setitem(sys.modules, "numpy", None)
    monkeypatch.setattr(_buffers, "torch", lambda: None)


@pytest.mark.usefixtures("alone")
def test_rows_come_as_arrays_of_the_package(store):
    table = rows_of(store, 20, 3)
    found = table[[4, 5]]
    assert isinstance(found, nvme_gpu.Array) and found.tolist() == [[4000, 4001, 4002], [5000, 5001, 5002]]
    assert table.gather([4], dtype="int32").tolist() == [[4000, 4001, 4002]]
    with pytest.raises(nvme_gpu.Usage, match="install numpy, or convert"):
        table.gather([4], dtype="int64")
    with pytest.raises(nvme_gpu.Usage, match="lists of numbers need numpy"):
        table.scatter([4], [[1, 2, 3]])
    table.scatter([4], array.array("i", [1, 2, 3]).tobytes())
    assert table[4].tolist() == [1, 2, 3]


@pytest.mark.usefixtures("alone")
def test_batches_come_as_arrays_of_the_package(store):
    table = rows_of(store, 5, 3)
    batches = list(nvme_gpu.DataLoader(table, 2, with_ids=True))
    assert [ids for ids, _ in batches] == [[0, 1], [2, 3], [4]]
    assert all(isinstance(rows, nvme_gpu.Array) for _, rows in batches)
    assert batches[1][1].tolist() == [[2000, 2001, 2002], [3000, 3001, 3002]]


def test_batches_of_numpy_where_torch_lacks_the_dtype(store, monkeypatch):
    numpy = pytest.importorskip("numpy")
    store.write(bytes(range(32)))
    table = store.table(0, shape=(4, 4), dtype="uint16")
    monkeypatch.setattr(_buffers, "torch", lambda: object())
    (rows,) = nvme_gpu.DataLoader(table, 4)
    assert isinstance(rows, numpy.ndarray) and rows.dtype == numpy.uint16
    assert rows.tobytes() == bytes(range(32))


def test_a_tensor_of_a_dtype_that_torch_lacks_is_refused(store, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.delattr(torch, "int16")
    table = store.table(0, shape=(4, 4), dtype="int16")
    with pytest.raises(nvme_gpu.Usage, match="this torch has no int16"):
        table[torch.tensor([1])]


def test_rows_that_no_memory_holds_are_a_memory_error(store):
    pytest.importorskip("numpy")
    table = store.table(0, shape=(1 << 15, 1 << 10), dtype="uint8")
    with pytest.raises(MemoryError):
        table._new((1 << 62,))


@pytest.mark.parametrize("dtype", ["<q9", ">i4", "|O", "<zz"])
def test_a_text_that_is_no_dtype_is_refused(dtype):
    pytest.importorskip("numpy")
    with pytest.raises(nvme_gpu.Usage, match="no rows can have the dtype"):
        _dtypes.name_of(dtype)


def test_a_gather_does_not_widen_where_the_dtype_is_the_same(store):
    numpy = pytest.importorskip("numpy")
    values = numpy.arange(8, dtype="float16").reshape(2, 4)
    store.write(values)
    table = store.table(0, shape=(2, 4), dtype="float16")
    same = table.gather([1], dtype="float16")
    assert same.dtype == numpy.float16 and same.tolist() == [[4, 5, 6, 7]]
    # Nothing on the way makes whole numbers: numpy does.
    assert table.gather([1], dtype="int32").dtype == numpy.int32


def test_changes_and_tensors_that_are_checked_later_keep_their_status(store):
    torch = pytest.importorskip("torch")
    table = rows_of(store, 10, 4)
    status = array.array("i", [9, 9])
    table.scatter([3, -1], array.array("i", range(8)).tobytes(), status=status, check="later")
    # Nothing is written by a call with an id that is out of range.
    assert status.tolist() == [-5, -1] and table[3].tolist() == [3000, 3001, 3002, 3003]
    table.scatter([3, 4], array.array("i", range(8)).tobytes(), status=status, check="later")
    assert status.tolist() == [0, 0] and table[3].tolist() == [0, 1, 2, 3]
    places = torch.full((2,), 9, dtype=torch.int32)
    found = table.gather(torch.tensor([10, 3]), status=places, check="later")
    assert places.tolist() == [-1, 0] and found.tolist() == [[0] * 4, [0, 1, 2, 3]]


class ReadOnly(Device):
    """Memory of the GPU that may not be written."""

    @property
    def __cuda_array_interface__(self):
        found = super().__cuda_array_interface__
        return found | {"data": (found["data"][0], True)}


def test_memory_of_the_gpu_that_is_read_only_is_not_written(gpu_store):
    table = rows_of(gpu_store, 10, 4)
    out = ReadOnly([7] * 4, "<i4", shape=(1, 4))
    with pytest.raises(nvme_gpu.Usage, match="out is read-only"):
        table.gather(Device([1]), out=out)
    with pytest.raises(nvme_gpu.Usage, match="buf is read-only"):
        gpu_store.read_into(out)
    assert list(out.memory) == [7] * 4
    table.scatter(Device([2]), out, check="now")
    assert table[2].tolist() == [7] * 4


def test_strides_of_memory_without_gaps_are_taken(gpu_store):
    table = rows_of(gpu_store, 10, 4)
    out = Device([0] * 8, "<i4", shape=(2, 4), strides=(16, 4))
    table.gather(Device([3, 1], strides=(8,)), out=out, check="now")
    assert out.tolist() == [3000, 3001, 3002, 3003, 1000, 1001, 1002, 1003]
    with pytest.raises(nvme_gpu.Usage, match="not C-contiguous"):
        table.gather(Device([3, 1]), out=Device([0] * 8, "<i4", shape=(2, 4), strides=(4, 8)))


def test_an_array_of_the_gpu_is_not_converted(gpu_store):
    table = rows_of(gpu_store, 10, 4)
    assert table.gather(Device([3]), dtype="int32", check="now").tolist() == [[3000, 3001, 3002, 3003]]
    with pytest.raises(nvme_gpu.Usage, match="gather with tensors of torch"):
        table.gather(Device([3]), dtype="float64")


def test_memory_of_another_gpu_is_refused(gpu_store, cuda):
    class Other(Device):
        class device:
            id = 1

    with pytest.raises(nvme_gpu.Usage, match="lies on GPU 1, the store uses GPU 0"):
        gpu_store.read_into(Other([0] * 4))


def test_the_default_stream_is_that_of_torch_where_torch_uses_the_gpu(cuda, monkeypatch):
    torch = pytest.importorskip("torch")
    assert _buffers.stream_of(None, 0) == 0
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert _buffers.stream_of(None, 0) == cuda.current.cuda_stream == 2


def test_the_default_stream_is_that_of_the_gpu_of_the_store(gpu_store, cuda, monkeypatch):
    torch = pytest.importorskip("torch")
    asked = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    # Torch's current device is another one.
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=1: (asked.append(device), cuda.current)[1])
    table = rows_of(gpu_store, 100, 4)
    table.gather(Device([3]), check="now")
    table.scatter(Device([3]), Device([1, 2, 3, 4], "<i4", shape=(1, 4)), check="now")
    gpu_store.read_into(Device([0] * 4)).result()
    assert len(asked) >= 3 and set(asked) == {0}


def test_dlpack_that_is_read_only_is_not_written(store):
    array_of_package = nvme_gpu.Array((16,), "uint8", 1)
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]

    class ReadOnlyArray:
        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self, **words):
            capsule = array_of_package.__dlpack__(max_version=(1, 0))
            # struct DLManagedTensorVersioned: two numbers of 32 bits, two addresses, the flags; 1 is read-only.
            flags = ctypes.c_uint64.from_address(pointer_of(capsule, b"dltensor_versioned") + 24)
            flags.value |= 1
            return capsule

    store.write(bytes(range(1, 17)))
    with pytest.raises(nvme_gpu.Usage, match="buf is read-only"):
        store.read_into(ReadOnlyArray())
    assert array_of_package.tobytes() == bytes(16)
    store.write_from(ReadOnlyArray()).result()
    assert store.read(16) == bytes(16)


def test_the_end_of_the_program_closes_what_it_can(monkeypatch, caplog):
    class Open:
        closed = 0

        def close(self):
            self.closed += 1

    class Broken(Open):
        def close(self):
            raise OSError("no space left")

    stores = [Open(), Broken(), Open()]
    monkeypatch.setattr(_store, "_OPEN", stores)
    with caplog.at_level(logging.WARNING):
        _store._close_all()
    assert stores[0].closed == stores[2].closed == 1
    (record,) = caplog.records
    assert "at exit: no space left" in record.getMessage()


def test_the_demo_says_why_no_gpu_gathers(capsys, monkeypatch):
    def opened(path, gpu=None, **more):
        if gpu is not None:
            raise nvme_gpu.NvmeGpuError("no GPU here", "use --cpu", "environment")
        return real(path, **more)

    real = command_line.open
    monkeypatch.setattr(command_line, "open", opened)
    monkeypatch.setattr(_buffers, "numpy", lambda: None)
    words = ["demo", "--ids", "300", "--seconds", "0.01", "--rows", "1000", "--json"]
    monkeypatch.setattr(sys, "argv", ["nvme_gpu", *words])
    assert command_line.main() == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verified"] and "no GPU here" in found["no_gpu"] and found["nearest_to_king"] == []
    assert {one["way"] for one in found["ways"]} == {
        "table[ids] by CPU threads",
        "table[ids] of the file",
        "mmap and slices",
        "os.pread",
    }
