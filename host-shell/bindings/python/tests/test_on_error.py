"""Rows that a gather cannot read: an error, zeros or NaN, with a status and counted, by the CPU and by a GPU alike."""

from __future__ import annotations

import gc

import pytest

import nvme_gpu
from conftest import SIM, SIM_GPU, Device, stand_in
from test_launches import Graph, driver  # noqa: F401 (a fixture)
from test_lookup_table import safetensors

np = pytest.importorskip("numpy")

ROWS, WIDTH = 1000, 8
BROKEN = "&fault=status:0x281@op=read,every=1"
"""Each read ends with an Unrecovered Read Error; writes of whole blocks read nothing."""
NUMBERS_ALONE = ("mxfp4", "float4_e2m1fn_x2")
"""Each of their stored bytes is a number: none is NaN."""
# Dtype of the table, and what `to` makes of it: each kind of bytes that are NaN.
FLOATS = [
    ("float32", None),
    ("float16", None),
    ("float64", None),
    ("bfloat16", None),
    ("float8_e4m3fn", None),
    ("float8_e5m2", None),
    ("float8_e4m3fnuz", None),
    ("float16", "float32"),
    ("bfloat16", "float16"),
    ("float8_e4m3fn", "bfloat16"),
    ("float8_e5m2", "float32"),
    *((blocks, to) for blocks in nvme_gpu._dtypes.BLOCKS if blocks not in NUMBERS_ALONE for to in (None, "bfloat16", "float32")),
]
NUMBERS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8", "float8_e4m3fnuz": "uint8"}


def is_nan(table, out):
    """For each row whether all of its elements are NaN, and whether all are zeros."""
    name = table.dtype
    if name == "bfloat16":
        numbers = (out.astype("uint32") << 16).view("float32")
    elif name == "float8_e4m3fn":
        numbers = np.where((out & 0x7F) == 0x7F, np.nan, out)
    elif name == "float8_e5m2":
        numbers = np.where((out & 0x7F) > 0x7C, np.nan, out)
    elif name == "float8_e4m3fnuz":
        numbers = np.where(out == 0x80, np.nan, out)
    else:
        numbers = out
    return [bool(np.isnan(row).all()) for row in numbers], [not row.any() for row in numbers.astype("float64")]


def made(store, stored, to, on_error):
    width = 256 if stored in nvme_gpu._dtypes.BLOCKS else WIDTH
    return store.table(96, shape=(ROWS, width), dtype=stored, to=to, on_error=on_error)


def gathered(table, ids, by_gpu, halves=False):
    """Rows and status, by either way."""
    width, kind = table.shape[1], NUMBERS.get(table.dtype, table.dtype)
    if not by_gpu:
        out, status = np.full((len(ids), width), 3, kind), np.full(len(ids), 9, "int32")
        found = table.prefetch(ids).result(out, status=status) if halves else table.gather(ids, out, status=status)
        assert found is out
        return out, status.tolist()
    nbytes = len(ids) * width * np.dtype(kind).itemsize
    out, status = Device([3] * nbytes, "|u1"), Device([9] * len(ids), "<i4")
    if halves:
        table.prefetch(Device(ids)).result(out, status=status, check="now")
    else:
        table.gather(Device(ids), out=out, status=status, check="now")
    return np.frombuffer(bytes(out.memory), kind).reshape(len(ids), width), status.tolist()


@pytest.fixture(params=["CPU", "GPU", "GPU, a host thread"])
def way(request, tmp_path):
    """The device of a store, and whether ids are in memory of a GPU."""
    if request.param == "CPU":
        return SIM, None
    assert stand_in(), "needs the stand-in of CUDA"
    if request.param == "GPU":
        return SIM_GPU, 0
    path = tmp_path / "rows"
    path.write_bytes(bytes(1 << 20))
    return f"file:{path}", 0


@pytest.mark.parametrize(("stored", "to"), FLOATS)
def test_failed_rows_are_nan_or_zeros_in_every_format(way, stored, to):
    device, gpu = way
    ids, bad = [5, -1, 7, ROWS, 0, 1 << 40], [1, 3, 5]
    with nvme_gpu.open(device, gpu) as store:
        # 1.0 or near it, which is neither NaN nor zero, in whatever format.
        store.write(b"\x77" * (1 << 18))
        for on_error in ("nan", "zero"):
            table = made(store, stored, to, on_error)
            assert table.on_error == on_error
            before = store.stats()["failed_rows"]
            out, status = gathered(table, ids, gpu is not None)
            assert status == [-1 if row in bad else 0 for row in range(6)]
            nans, zeros = is_nan(table, out)
            wanted = [row in bad for row in range(6)]
            assert (nans, zeros) == ((wanted, [False] * 6) if on_error == "nan" else ([False] * 6, wanted))
            assert store.stats()["failed_rows"] == before + 3
            table.check()
        # The default is an error, and zeros.
        table = made(store, stored, to, "raise")
        with pytest.raises(nvme_gpu.Usage) as caught:
            gathered(table, ids, gpu is not None)
        assert caught.value.row == 1


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("on_error", ["raise", "zero", "nan"])
@pytest.mark.parametrize("way", ["CPU", "GPU"], indirect=True)
def test_a_drive_that_fails_rows(way, on_error, halves):
    device, gpu = way
    with nvme_gpu.open(device + BROKEN, gpu) as store:
        store.write(b"\x77" * (64 << 10))
        table = store.table(0, shape=(ROWS, WIDTH), dtype="float32", on_error=on_error)
        if on_error == "raise":
            with pytest.raises(nvme_gpu.Status) as caught:
                gathered(table, [1, 2, 3], gpu is not None, halves)
            assert (caught.value.sct, caught.value.sc, caught.value.row) == (2, 0x81, 0)
            return
        out, status = gathered(table, [1, 2, 3], gpu is not None, halves)
        assert status == [0x281] * 3
        assert (np.isnan(out) if on_error == "nan" else out == 0).all()
        assert store.stats()["failed_rows"] == 3
        table.check()


def test_the_next_call_raises_by_default_and_not_otherwise(gpu_store):
    table = gpu_store.table(0, shape=(ROWS, WIDTH), dtype="float32")
    quiet = table.with_on_error("nan")
    assert (table.on_error, quiet.on_error, quiet.with_on_error("nan")) == ("raise", "nan", quiet)
    found = quiet[Device([-1])]
    while not quiet._native.is_idle():
        pass
    assert np.isnan(np.frombuffer(found.tobytes(), "float32")).all()
    quiet[Device([1])]
    quiet.check()
    table[Device([-1])]
    with pytest.raises(nvme_gpu.Usage):
        table.check()


@pytest.mark.parametrize("on_error", ["raise", "zero", "nan"])
def test_each_launch_of_a_graph_is_counted(gpu_store, driver, on_error):  # noqa: F811
    gpu_store.write(b"\x77" * (1 << 16))
    table = gpu_store.table(0, shape=(ROWS, WIDTH), dtype="float32", on_error=on_error)
    ids, out = Device([1, -1, 2, ROWS]), Device([7.0] * 4 * WIDTH, "<f4", shape=(4, WIDTH))
    status = Device([9] * 4, "<i4")
    graph = Graph(driver, lambda stream: table.gather(ids, out=out, status=status, stream=stream))
    for run in range(1, 4):
        graph.run()
        rows = np.array(out.tolist(), "float32").reshape(4, WIDTH)
        assert (np.isnan(rows[1::2]) if on_error == "nan" else rows[1::2] == 0).all()
        assert (rows[::2] != 0).all() and not np.isnan(rows[::2]).any() and status.tolist() == [0, -1, 0, -1]
        counts = gpu_store.stats()
        assert counts["failed_rows"] == 2 * run and counts["rows_read"] == 4 * run
        assert counts["bytes_read"] == 4 * WIDTH * 4 * run and counts["launches_under_way"] == 0
        assert counts["launch_blocks"] >= 1 and counts["launch_registers"] >= 32 * counts["launch_blocks"]
    if on_error == "raise":
        with pytest.raises(nvme_gpu.Usage):
            table.check()
    table.check()
    graph.destroy()
    # Launched after the store is gone, a graph has rows that failed.
    graph = Graph(driver, lambda stream: table.gather(ids, out=out, status=status, stream=stream))
    gpu_store.close()
    graph.run()
    rows = np.array(out.tolist(), "float32")
    assert (np.isnan(rows) if on_error == "nan" else rows == 0).all() and 0 not in status.tolist()
    graph.destroy()


def test_nan_is_for_floats_and_other_names_are_refused(store):
    for dtype in ("int32", "uint8", "bool"):
        with pytest.raises(nvme_gpu.Usage, match=f"on_error is 'nan': rows of {dtype} cannot be NaN"):
            store.table(0, shape=(4, 4), dtype=dtype, on_error="nan")
        store.table(0, shape=(4, 4), dtype=dtype, on_error="zero")
    for dtype in NUMBERS_ALONE:
        with pytest.raises(nvme_gpu.Usage, match=f"on_error is 'nan': rows of {dtype} cannot be NaN"):
            store.table(0, shape=(4, 32), dtype=dtype, on_error="nan")
        store.table(0, shape=(4, 32), dtype=dtype, on_error="zero")
    for bad in ("ignore", None, 0, "NaN"):
        with pytest.raises(nvme_gpu.Usage, match="on_error is"):
            store.table(0, shape=(4, 4), dtype="float32", on_error=bad)
    with pytest.raises(nvme_gpu.Usage, match="on_error is"):
        store.table(0, shape=(4, 4), dtype="float32").with_on_error("skip")


def test_errors_of_the_whole_call_are_raised(store):
    table = store.table(0, shape=(ROWS, WIDTH), dtype="float32", on_error="zero")
    with pytest.raises(nvme_gpu.Usage, match="ids are"):
        table.gather(np.zeros(3))
    # Writes are not what it is about.
    with pytest.raises(nvme_gpu.Usage):
        table.scatter([-1], np.zeros((1, WIDTH), "float32"))
    assert store.stats()["failed_rows"] == 0
    assert (table.gather([-1], check="later") == 0).all() and (table[[-1, ROWS]] == 0).all()
    assert table.gather([-1], dtype="float32").dtype == "float32"
    assert store.stats()["failed_rows"] == 4
    table.check()
    store.close()
    with pytest.raises(nvme_gpu.Usage, match="closed"):
        table[[1]]


def test_a_conversion_on_the_way_keeps_it(store):
    store.write(b"\x77" * 4096)
    table = store.table(0, shape=(100, 4), dtype="float16", on_error="nan")
    found = table.gather([1, -1], dtype="float32")
    assert found.dtype == "float32" and np.isnan(found[1]).all() and not np.isnan(found[0]).any()


def test_lookup_tables_and_batches_take_it(tmp_path):
    path = tmp_path / "t.safetensors"
    safetensors(path, [("t", "F32", np.ones((100, 4), np.float32))])
    table = nvme_gpu.lookup_table(path, "t", on_error="nan")
    assert table.on_error == "nan" and np.isnan(table[[3, 100]]).tolist() == [[False] * 4, [True] * 4]
    assert table.store.stats()["failed_rows"] == 1
    table.store.close()


def test_an_embedding_takes_it(store):
    torch = pytest.importorskip("torch")
    import nvme_gpu.torch

    table = store.table(0, shape=(100, 4), dtype="float32")
    plain = nvme_gpu.torch.DiskEmbedding(table)
    quiet = nvme_gpu.torch.DiskEmbedding(table, on_error="nan")
    assert plain.table is table and quiet.table.on_error == "nan"
    with pytest.raises(nvme_gpu.Usage):
        plain(torch.tensor([1, 100]))
    found = quiet(torch.tensor([1, 100]))
    assert torch.isnan(found[1]).all() and not torch.isnan(found[0]).any()
    with pytest.raises(nvme_gpu.Usage, match="on_error is"):
        nvme_gpu.torch.DiskEmbedding(table, on_error="no")
    gc.collect()
