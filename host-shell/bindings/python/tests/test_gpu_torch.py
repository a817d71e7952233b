"""Batches, layers, benchmarks and operations with a torch that has a GPU, by the stand-in of CUDA."""

from __future__ import annotations

import ctypes
import json
import random
import sys

import pytest

import nvme_gpu
from conftest import rows_of
from nvme_gpu import __main__ as command_line
from nvme_gpu import _buffers, _loaders
from test_loaders import LAYERS, ROWS, WIDTH, is_right, model

torch = pytest.importorskip("torch")
import nvme_gpu.torch  # noqa: E402

TABLE, COLUMNS = 53, 5


def row_numbers(batch):
    """The row numbers of a batch whose rows are checked."""
    for row in batch.tolist():
        assert row == [row[0] + column for column in range(COLUMNS)]
    return [row[0] // 1000 for row in batch.tolist()]


@pytest.mark.parametrize("staging", ["gpu", "pinned"])
@pytest.mark.parametrize("depth", [0, 2])
def test_batches_come_to_the_gpu_in_streams_of_the_loader(gpu_store, cuda, staging, depth):
    table = rows_of(gpu_store, TABLE, COLUMNS, 77)
    before = gpu_store.stats()["commands"]
    loader = nvme_gpu.DataLoader(table, 10, device="cuda", staging=staging, prefetch_depth=depth, streams=2)
    assert len(cuda.streams) == 2
    current, seen = cuda.current, []
    for batch in loader:
        assert batch.is_cuda and batch.dtype == torch.int32
        seen += row_numbers(batch)
        # What uses it is ordered after it, and its memory stays until that has ended.
        waiting, event = cuda.waits[-1]
        assert waiting is current and event.stream is cuda.streams[(len(seen) - 1) // 10 % 2]
        assert cuda.used_by[-1] is current and cuda.current is current
    assert seen == list(range(TABLE)) and len(cuda.waits) == len(loader) == 6
    assert cuda.pinned == 6, "ids, or rows, go through pinned memory once a batch"
    by_the_cpu = gpu_store.stats()["commands"] > before
    assert by_the_cpu == (staging == "pinned")


@pytest.mark.parametrize("staging", ["gpu", "pinned"])
def test_an_error_waits_for_the_batches_before_it(gpu_store, cuda, staging, monkeypatch):
    start = nvme_gpu.DataLoader._start

    def ended(*args):
        batch = start(*args)
        operation = batch._launched if staging == "gpu" else batch._operation
        assert operation.wait(10)
        return batch

    monkeypatch.setattr(nvme_gpu.DataLoader, "_start", ended)
    table = rows_of(gpu_store, TABLE, COLUMNS)
    batches = iter(nvme_gpu.DataLoader(table, 2, sampler=[4, 5, 0, 1, 6, TABLE, 7, 8], device="cuda", staging=staging))
    assert row_numbers(next(batches)) == [4, 5]
    assert row_numbers(table[[3]]) == [3], "other reads of the table do not raise it"
    assert row_numbers(next(batches)) == [0, 1]
    with pytest.raises(nvme_gpu.Usage) as caught:
        next(batches)
    assert caught.value.row == 1
    table.check()


@pytest.mark.parametrize("staging", ["gpu", "pinned"])
def test_a_batch_on_the_gpu_has_its_ids_and_its_errors(gpu_store, cuda, staging):
    table = rows_of(gpu_store, TABLE, COLUMNS)
    words = {"device": "cuda:0", "staging": staging}
    ids, rows = next(iter(nvme_gpu.DataLoader(table, 3, with_ids=True, **words)))
    assert ids == [0, 1, 2] and row_numbers(rows) == ids
    batches = iter(nvme_gpu.DataLoader(table, 2, sampler=[4, 5, 6, TABLE, 7, 8], **words))
    assert row_numbers(next(batches)) == [4, 5]
    with pytest.raises(nvme_gpu.Usage) as caught:
        next(batches)
    assert caught.value.row == 1


@pytest.mark.parametrize("staging", ["gpu", "pinned"])
def test_rows_that_are_no_error_are_zeros_in_batches_too(gpu_store, cuda, staging):
    table = rows_of(gpu_store, TABLE, COLUMNS).with_on_error("zero")
    batches = iter(nvme_gpu.DataLoader(table, 2, sampler=[4, TABLE, 6, 7], device="cuda", staging=staging))
    first = next(batches)
    assert row_numbers(first[:1]) == [4] and first[1].tolist() == [0] * COLUMNS
    assert row_numbers(next(batches)) == [6, 7]
    table.check()


def test_batches_go_to_the_gpu_of_the_store_alone(gpu_store, cuda, monkeypatch):
    table = rows_of(gpu_store, TABLE, COLUMNS)
    with pytest.raises(nvme_gpu.Usage, match="lies on GPU 1"):
        nvme_gpu.DataLoader(table, 4, device="cuda:1")
    monkeypatch.setattr(_buffers, "torch", lambda: None)
    with pytest.raises(nvme_gpu.Usage, match="import torch first"):
        nvme_gpu.DataLoader(table, 4, device="cuda")


@pytest.fixture
def catalog(gpu_store, tmp_path):
    return nvme_gpu.import_file(gpu_store, model(tmp_path / "m.safetensors"), offset=1001)


def test_layers_on_the_gpu_are_tensors(catalog, cuda):
    with nvme_gpu.LayerLoader(catalog) as loader:
        assert loader.path["memory"] == "gpu" and "gpu" in repr(loader)
        for index in [*range(LAYERS)] * 2:
            with loader.layer(index) as w:
                w.check(10)
                assert w["w"].is_cuda and w["w"].dtype == torch.float32 and w["w"].shape == (ROWS, WIDTH)
                assert is_right(index, w["w"].tolist())
                assert w["b"].dtype == torch.bfloat16 and w["b"].shape == (3,)
                assert bytes(w["b"].view(torch.uint8).tolist()) == bytes(range(6))
        with loader.layer(0, stream=cuda.current) as w:
            assert is_right(0, w["w"].tolist())
    with pytest.raises(nvme_gpu.Usage, match="closed"):
        with loader.layer(0):
            pass


def test_layers_on_the_gpu_without_torch_are_arrays_of_cuda(catalog, monkeypatch):
    monkeypatch.setattr(_buffers, "torch", lambda: None)
    loader = nvme_gpu.LayerLoader(catalog, "cuda:0")
    for stream, number in ((2, 2), (None, 1)):
        with loader.layer(3, stream=stream) as w:
            loader.check(10)
            weight, bias = w["w"], w["b"]
            assert (weight.shape, weight.dtype) == ((ROWS, WIDTH), "float32")
            found = weight.__cuda_array_interface__
            address, readonly = found.pop("data")
            assert readonly and found == {
                "shape": (ROWS, WIDTH),
                "typestr": "<f4",
                "strides": None,
                "stream": number,
                "version": 3,
            }
            values = (ctypes.c_float * (ROWS * WIDTH)).from_address(address)
            assert is_right(3, [values])
            # bfloat16 has no letter of this interface: its bytes are along the last length.
            assert (bias.shape, bias.dtype) == ((6,), "uint8")
            assert bias.__cuda_array_interface__["typestr"] == "|u1"
    with pytest.raises(nvme_gpu.Usage, match="lies on GPU 1"):
        nvme_gpu.LayerLoader(catalog, "cuda:1")


def test_dtypes_have_the_letters_of_the_interface():
    letters = {"bool": "|b1", "int8": "|i1", "uint8": "|u1", "int64": "<i8", "uint16": "<u2", "float16": "<f2"}
    letters |= {"float64": "<f8", "complex64": "<c8", "bfloat16": None, "float8_e4m3fn": None, "q4_0": None}
    assert {name: _loaders._typestr(name) for name in letters} == letters


def bench_of(capsys, monkeypatch, path, *more):
    words = ["bench", str(path), "--sizes", "4096,65536", "--runs", "1", "--json", *more]
    monkeypatch.setattr(sys, "argv", ["nvme_gpu", *words])
    status = command_line.main()
    return status, json.loads(capsys.readouterr().out)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(random.Random(3).randbytes(1 << 18))
    return path


def test_the_bench_reads_into_tensors_of_the_gpu(capsys, monkeypatch, cuda, file):
    status, found = bench_of(capsys, monkeypatch, file)
    assert status == 0 and found["verified"], found
    by_way = {one["way"]: one["to"] for one in found["ways"]}
    for name in (
        "read_into by the GPU",
        "read_into of the file, gds='auto'",
        "torch.from_file and .cuda()",
        "pread into pinned memory and .copy_()",
    ):
        assert by_way[name] == "GPU memory", found["missing"]
    assert by_way["mmap and slices"] == by_way["read_into by CPU threads"] == "host memory"
    reads = sum(one["reads"] for one in found["ways"] if one["way"].startswith(("torch", "pread")))
    # Each read is waited for: in the run that is timed, and in the one that is compared.
    assert cuda.synchronized == 2 * reads and cuda.pinned == 3


def test_the_bench_finds_wrong_bytes_of_the_gpu(capsys, monkeypatch, cuda, file):
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: cuda(torch.zeros_like(tensor)))
    status, found = bench_of(capsys, monkeypatch, file)
    assert status == 3 and not found["verified"]
    assert {one["way"] for one in found["ways"] if not one["right"]} == {"torch.from_file and .cuda()"}


def test_the_bench_says_why_a_way_does_not_run(capsys, monkeypatch, file):
    def opened(device, gpu, **more):
        if gpu is not None:
            raise nvme_gpu.NvmeGpuError("no GPU here", "use --cpu", "environment")
        return real(device, gpu, **more)

    real = command_line._bench.open
    monkeypatch.setattr(command_line._bench, "open", opened)
    monkeypatch.setitem(sys.modules, "torch", None)
    status, found = bench_of(capsys, monkeypatch, file)
    assert status == 0 and found["verified"]
    assert "no GPU here" in found["missing"]["read_into by the GPU"]
    assert "no GPU here" in found["missing"]["read_into of the file, gds='auto'"]
    assert found["missing"]["torch.from_file"] == "torch is not installed"
    assert {one["way"] for one in found["ways"]} == {"read_into by CPU threads", "mmap and slices"}


def test_operations_read_into_tensors_of_the_gpu(cuda, file):
    before = {key for key in nvme_gpu._operations._STORES}
    tensor = torch.zeros(1000, dtype=torch.uint8)
    nvme_gpu._operations.read_into_tensor(cuda(tensor), f"file:{file}", 5)
    (key,) = set(nvme_gpu._operations._STORES) - before
    assert key == (f"file:{file}", 0), "a store with the tensor's GPU"
    with nvme_gpu._operations._STORES.pop(key) as opened:
        opened.read_into(cuda(torch.zeros(1, dtype=torch.uint8))).result()
    assert bytes(tensor.tolist()) == file.read_bytes()[5:1005]
