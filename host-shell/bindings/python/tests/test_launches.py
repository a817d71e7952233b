"""Launches that are refused, and captured ones, by the stand-in of a GPU."""

from __future__ import annotations

import ctypes
import gc
import time

import pytest

import nvme_gpu
from conftest import SIM_GPU, Device, rows_of


@pytest.fixture
def driver(gpu_store):
    library = ctypes.CDLL("libcuda.so.1")
    library.fake_cuda_refuse_after.argtypes = [ctypes.c_longlong]
    library.cuStreamBeginCapture_v2.argtypes = [ctypes.c_void_p, ctypes.c_uint]
    library.cuStreamEndCapture.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.cuGraphInstantiateWithFlags.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64]
    library.cuGraphLaunch.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.cuStreamSynchronize.argtypes = [ctypes.c_void_p]
    for name in ("cuGraphDestroy", "cuGraphExecDestroy"):
        getattr(library, name).argtypes = [ctypes.c_void_p]
    yield library
    library.fake_cuda_refuse_after(-1)


class Graph:
    """What ``work`` puts into a stream of its own, whose number it gets."""

    def __init__(self, cuda, work):
        self.cuda = cuda
        self.stream, graph, self.exec = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        assert cuda.cuStreamCreate(ctypes.byref(self.stream), 1) == 0
        # Memory that the collector frees in between would end the capture.
        gc.collect()
        assert cuda.cuStreamBeginCapture_v2(self.stream, 0) == 0
        try:
            self.made = work(self.stream.value)
        except nvme_gpu.NvmeGpuError:
            # What was captured before goes with the graph.
            if cuda.cuStreamEndCapture(self.stream, ctypes.byref(graph)) == 0:
                cuda.cuGraphDestroy(graph)
            raise
        assert cuda.cuStreamEndCapture(self.stream, ctypes.byref(graph)) == 0
        assert cuda.cuGraphInstantiateWithFlags(ctypes.byref(self.exec), graph, 0) == 0
        assert cuda.cuGraphDestroy(graph) == 0

    def run(self):
        assert self.cuda.cuGraphLaunch(self.exec, self.stream) == 0
        assert self.cuda.cuStreamSynchronize(self.stream) == 0

    def destroy(self):
        assert self.cuda.cuGraphExecDestroy(self.exec) == 0


def test_a_refused_launch_leaves_the_buffers_alone(gpu_store, driver):
    """A gather whose rows are blocks is two launches: the second one is refused while the first one runs."""
    gpu_store.write(bytes(range(256)) * 64)
    table = gpu_store.table(0, shape=(300, 32), dtype="q8_0", to="float32")
    for refused in (0, 1):
        out = Device([7.0] * 1600, "<f4", shape=(50, 32))
        driver.fake_cuda_refuse_after(refused)
        with pytest.raises(nvme_gpu.NvmeGpuError, match="OUT_OF_MEMORY"):
            table.gather(Device(range(50)), out=out)
        driver.fake_cuda_refuse_after(-1)
        # The memory is the program's again.
        for index in range(1600):
            out.memory[index] = 3.0
        time.sleep(0.05)
        assert set(out.tolist()) == {3.0}
    table.gather(Device(range(50)), out=out, check="now")


def test_few_rows_are_converted_by_the_launch_that_gathers_them(gpu_store, driver):
    gpu_store.write(bytes([0, 0x3C] * 4096))
    table = gpu_store.table(0, shape=(500, 8), dtype="float16", to="float32")
    ids, out = Device(range(50)), Device([7.0] * 400, "<f4", shape=(50, 8))
    driver.fake_cuda_refuse_after(1)
    table.gather(ids, out=out, check="now")
    assert set(out.tolist()) == {1.0}
    # The halves of a gather are one launch each.
    driver.fake_cuda_refuse_after(2)
    table.prefetch(ids).result(out, check="now")
    driver.fake_cuda_refuse_after(-1)


def test_few_rows_of_several_ranges_are_converted_by_one_launch_too(gpu_store, driver):
    """Ranges of whole blocks, so that a row lies in two of them; each element of a row is 1.0, less in its second half."""
    row = bytes([0, 0x3C] * 1536 + [0, 0x38] * 1536)
    for first, part in ((1 << 20, row * 2 + row[:4096]), (0, row[4096:] + row)):
        gpu_store.write(part, first)
    ranges = [(1 << 20, 2 * len(row) + 4096), (0, 2 * len(row) - 4096)]
    result = nvme_gpu._scales.RowConversion(to="float32")
    table = nvme_gpu.Table(gpu_store, 0, (4, 3072), "float16", result, ranges)
    ids, out = Device([2, 0, 3, 2]), Device([7.0] * 4 * 3072, "<f4", shape=(4, 3072))
    wanted = ([1.0] * 1536 + [0.5] * 1536) * 4
    before = gpu_store.stats()
    driver.fake_cuda_refuse_after(1)
    table.gather(ids, out=out, check="now")
    assert out.tolist() == wanted
    driver.fake_cuda_refuse_after(2)
    again = Device([7.0] * 4 * 3072, "<f4", shape=(4, 3072))
    table.prefetch(ids).result(again, check="now")
    driver.fake_cuda_refuse_after(-1)
    assert again.tolist() == wanted
    after = gpu_store.stats()
    assert after["owned_gathers"] == before["owned_gathers"] + 1
    assert after["begun_gathers"] == before["begun_gathers"] + 1


@pytest.mark.parametrize("launches", range(4))
def test_a_refused_gather_of_distinct_rows_leaves_its_memory_to_no_one(gpu_store, driver, launches):
    gpu_store.write(bytes(range(1, 251)) * 4)
    table = gpu_store.table(0, shape=(100, 8), dtype="uint8")
    ids = Device([index % 100 for index in range(4096)])
    out = Device([7] * 4096 * 8, "|u1", shape=(4096, 8))
    driver.fake_cuda_refuse_after(launches)
    with pytest.raises(nvme_gpu.NvmeGpuError, match="OUT_OF_MEMORY"):
        table.gather(ids, out=out)
    driver.fake_cuda_refuse_after(-1)
    table.gather(ids, out=out, check="now")
    stored = (bytes(range(1, 251)) * 4)[:800]
    assert bytes(out.memory) == (stored * 41)[: 4096 * 8]


def test_the_result_of_a_captured_read_says_what_to_do(gpu_store, driver):
    gpu_store.write(bytes([9]) * 8192)
    out = Device([0] * 8192, "|u1")
    graph = Graph(driver, lambda stream: gpu_store.read_into(out, stream=stream))
    pending = graph.made
    for timeout in (None, 0.01):
        with pytest.raises(nvme_gpu.Timeout, match="has not run to its end") as caught:
            pending.result(timeout)
        assert "launch the graph" in caught.value.remedy and "wait again" not in str(caught.value)
    assert set(out.tolist()) == {0} and not pending.done()
    graph.run()
    assert pending.result() is out and set(out.tolist()) == {9}
    graph.destroy()


def test_captured_gathers_come_back_with_their_graphs(gpu_store, driver):
    """More of them than a store has launches, which are 4,096. The driver lets go on a thread of its own."""
    table = rows_of(gpu_store, 100, 4)
    ids, out = Device([3, 7]), Device([0] * 8, "<i4", shape=(2, 4))

    def many(stream):
        for _ in range(200):
            table.gather(ids, out=out, stream=stream)

    graphs, refused = 0, 0
    while graphs < 25:
        try:
            graph = Graph(driver, many)
        except nvme_gpu.NvmeGpuError:
            refused += 1
            assert refused < 1000
            time.sleep(0.01)
            continue
        graph.run()
        assert out.tolist() == [3000, 3001, 3002, 3003, 7000, 7001, 7002, 7003]
        graph.destroy()
        graphs += 1
    table.check()


def test_memory_of_captured_gathers_of_a_file_goes_with_their_graphs(driver, tmp_path):
    """The staging memory of a host thread, up to 32 MiB for each graph, is given back once the graph is gone."""
    path = tmp_path / "rows.bin"
    path.write_bytes(bytes(1 << 16))
    with nvme_gpu.open(f"file:{path}", gpu=0) as store:
        table = rows_of(store, 100, 4)
        ids, out = Device([3, 7]), Device([0] * 8, "<i4", shape=(2, 4))
        table.gather(ids, out=out, check="now")
        before = driver.fake_cuda_registered()
        graphs = [Graph(driver, lambda stream: table.gather(ids, out=out, stream=stream)) for _ in range(6)]
        assert driver.fake_cuda_registered() >= before + 5
        for graph in graphs:
            graph.destroy()
        end = time.monotonic() + 60
        while driver.fake_cuda_registered() > before and time.monotonic() < end:
            time.sleep(0.01)
            table.gather(ids, out=out, check="now")
        assert driver.fake_cuda_registered() <= before


@pytest.mark.parametrize("kind", ["sim", "file"])
def test_each_run_of_a_graph_has_its_own_failures(gpu_store, driver, tmp_path, kind):
    """A run is told of whether the runs before it failed or not, and with the number of its own rows."""
    path = tmp_path / "rows.bin"
    path.write_bytes(bytes(1 << 16))
    with nvme_gpu.open(f"file:{path}", gpu=0) as of_file:
        table = rows_of(gpu_store if kind == "sim" else of_file, 100, 4)
        ids, out = Device([3, 7, 9]), Device([0] * 12, "<i4", shape=(3, 4))
        graph = Graph(driver, lambda stream: table.gather(ids, out=out, stream=stream))
        for wrong in ((), (1,), (0, 2), (2,), (), (0, 1, 2)):
            for row in range(3):
                ids.memory[row] = -1 if row in wrong else 3
            graph.run()
            if not wrong:
                table.check()
                continue
            with pytest.raises(nvme_gpu.Usage, match=rf"row {wrong[0]}: .*rows that failed: {len(wrong)}:"):
                table.check()
        graph.destroy()


def test_waiting_for_several_gathers_takes_one_time(gpu_store, driver):
    """The waits share what is left of the time: with none left, none of them waits."""
    table = rows_of(gpu_store, 100, 4)
    for _ in range(20):
        table.gather(Device([1, 2, 3]))
    try:
        table.check(0)
    except nvme_gpu.Timeout as error:
        assert "have not ended" in str(error)
    table.check(60)


def test_closed_stores_leave_no_registration(driver):
    """The words that kernels and the host share are memory of the host that is registered with the GPU."""

    def one():
        with nvme_gpu.open(SIM_GPU, gpu=0) as store:
            rows_of(store, 64, 4).gather(Device([3, 5])).tolist()
        gc.collect()
        return driver.fake_cuda_registered()

    first = one()
    assert [one() for _ in range(3)] == [first] * 3


def test_a_graph_keeps_the_words_of_its_closed_store(driver):
    """A launch of the graph reads in them that it may touch nothing else; they go with the graph."""
    before = driver.fake_cuda_registered()
    store = nvme_gpu.open(SIM_GPU, gpu=0)
    ids, table = Device([3, 5]), rows_of(store, 64, 4)
    out = Device([7] * 8, "<i4", shape=(2, 4))

    def gather(stream):
        table.gather(ids, out=out, stream=stream)

    graph = Graph(driver, gather)
    store.close()
    del store, table
    graph.run()
    assert out.tolist() == [0] * 8
    gc.collect()
    assert driver.fake_cuda_registered() > before
    graph.destroy()
    # Opening another store takes back what graphs that are gone have left.
    nvme_gpu.open(SIM_GPU, gpu=0).close()
    gc.collect()
    assert driver.fake_cuda_registered() == before


def test_a_gather_that_reports_apart_leaves_its_table_alone(gpu_store):
    """Batches of a loader raise their own failures: the next call of the table's has none of them."""
    table = rows_of(gpu_store, 50, 4)
    ids, out = Device([3, 60]), Device([0] * 8, "<i4")
    at = [one.__cuda_array_interface__["data"][0] for one in (ids, out)]
    for apart in (True, False):
        launched = table._native.gather_on_gpu(at[0], True, 2, at[1], 0, 0, (ids, out), apart=apart)
        assert launched.wait()
        if apart:
            table.check()
            with pytest.raises(nvme_gpu.NvmeGpuError, match="row 1"):
                launched.finish()
        else:
            with pytest.raises(nvme_gpu.NvmeGpuError):
                table.check()
