"""Rows by ids, by the stand-in of a GPU."""

from __future__ import annotations

import ctypes
import gc

import pytest

import nvme_gpu
from conftest import SIM, SIM_GPU, Device, drain, during_reads, rows_of


def values(array):
    return memoryview(array.tobytes()).cast("i", array.shape).tolist()


def test_ids_of_the_gpu_are_gathered_by_the_gpu(gpu_store):
    assert gpu_store.gpu == 0 and gpu_store.path["data"] == "gpu" and gpu_store.path["tier"] == 1
    table = rows_of(gpu_store, 100, 4, 96)
    before = gpu_store.stats()["commands"]
    found = table[Device([3, 7, 3])]
    assert isinstance(found, nvme_gpu.Array) and found.device == "cuda:0" and found.dtype == "int32"
    assert values(found) == [[row * 1000 + column for column in range(4)] for row in (3, 7, 3)]
    assert gpu_store.stats()["commands"] == before, "the CPU's queues moved nothing"
    table.check()


def test_a_tier_is_taken_or_refused():
    with nvme_gpu.open(SIM_GPU, gpu=0, gpu_tier=1) as store:
        assert store.path["tier"] == 1
    with pytest.raises(nvme_gpu.NvmeGpuError, match="tier 3 does not work here"):
        nvme_gpu.open(SIM_GPU, gpu=0, gpu_tier=3)


@pytest.mark.parametrize("typestr", ["<i4", "<i8"])
def test_the_shape_is_that_of_the_ids(gpu_store, typestr):
    table = rows_of(gpu_store, 100, 4)
    found = table[Device(range(6), typestr, shape=(2, 3))]
    assert found.shape == (2, 3, 4) and found.tolist()[1][2] == [5000, 5001, 5002, 5003]
    assert table[Device([], typestr)].shape == (0, 4)


def test_bad_ids_are_zeros_and_the_check_names_the_gather(gpu_store):
    table = rows_of(gpu_store, 100, 4)
    status = Device([9, 9, 9], "<i4")
    found = table.gather(Device([1, -1, 100]), status=status)
    with pytest.raises(nvme_gpu.Usage) as caught:
        table.check()
    assert caught.value.row == 1 and "gather 0 of 3 rows" in str(caught.value)
    assert values(found) == [[1000, 1001, 1002, 1003], [0] * 4, [0] * 4]
    assert status.tolist() == [0, -1, -1]
    table.check()


def test_rows_that_did_not_come_cannot_be_read_from_the_array(gpu_store):
    table = rows_of(gpu_store, 100, 4)
    found = table[Device([1, -1])]
    ways = (
        found.tobytes,
        found.tolist,
        found.__dlpack__,
        lambda: found.__cuda_array_interface__,
        found.check_filled,
        lambda: gpu_store.write_from(found, 0).result(),
        lambda: table.scatter(Device([1, 2]), found),
    )
    for way in ways * 2:
        with pytest.raises(nvme_gpu.Usage) as caught:
            way()
        assert caught.value.row == 1, way
    table.check()
    # What writes over it makes it readable again; a read that fails does not.
    gpu_store.read_into(found, 16).result()
    assert values(found) == [[1000, 1001, 1002, 1003], [2000, 2001, 2002, 2003]]
    assert table.gather(Device([5, 6]), out=found) is found
    assert values(found)[0][0] == 5000
    # A caller who got the failed row as an error, or asked for each status, may read the other rows.
    with pytest.raises(nvme_gpu.Usage):
        table.gather(Device([7, -1]), out=found, check="now")
    assert values(found) == [[7000, 7001, 7002, 7003], [0] * 4]
    status = Device([9, 9], "<i4")
    assert values(table.gather(Device([8, -1]), status=status))[0][0] == 8000
    with pytest.raises(nvme_gpu.Usage):
        table.check()


def test_the_next_gather_raises_what_an_earlier_one_ended_with(gpu_store):
    table = rows_of(gpu_store, 100, 4)
    table[Device([-5])]
    while not table._native.is_idle():
        pass
    with pytest.raises(nvme_gpu.Usage):
        table[Device([1])]
    assert values(table[Device([1])])[0][0] == 1000


def test_check_now_waits_and_raises_once(gpu_store):
    table = rows_of(gpu_store, 100, 4)
    with pytest.raises(nvme_gpu.Usage):
        table.gather(Device([-5]), check="now")
    table.check()
    table.gather(Device([5]), check="now")


def test_an_output_is_filled(gpu_store):
    table = rows_of(gpu_store, 100, 4)
    out = Device([0] * 8, "<i4", shape=(2, 4))
    assert table.gather(Device([4, 9]), out=out, check="now") is out
    assert out.tolist() == [4000, 4001, 4002, 4003, 9000, 9001, 9002, 9003]


def test_streams_of_every_library_are_numbers(gpu_store):
    class Torch:
        cuda_stream = 1

    class Cupy:
        ptr = 2

    class Numba:
        handle = ctypes.c_void_p(2)

    class Core:
        def __cuda_stream__(self):
            return (0, 1)

    table = rows_of(gpu_store, 100, 4)
    for stream in (None, 0, 1, 2, Torch(), Cupy(), Numba(), Core()):
        assert values(table.gather(Device([3]), stream=stream, check="now"))[0][0] == 3000
    for bad in (-1, "main", 1.5, True, object(), 1 << 64):
        with pytest.raises((nvme_gpu.Usage, TypeError)):
            table.gather(Device([3]), stream=bad)


def test_a_stream_of_another_context_is_refused(gpu_store):
    cuda = ctypes.CDLL("libcuda.so.1")
    table, data = rows_of(gpu_store, 100, 4), Device([0] * 16, "<i4")
    before, other, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    assert cuda.cuCtxGetCurrent(ctypes.byref(before)) == 0
    assert cuda.cuCtxCreate_v2(ctypes.byref(other), 0, 0) == 0
    try:
        assert cuda.cuStreamCreate(ctypes.byref(stream), 1) == 0
        assert cuda.cuCtxSetCurrent(before) == 0
        for call in (
            lambda: table.gather(Device([3]), stream=stream.value),
            lambda: gpu_store.read_into(data, stream=stream.value).result(),
        ):
            with pytest.raises(nvme_gpu.Usage, match="context"):
                call()
        assert cuda.cuStreamDestroy_v2(stream) == 0
    finally:
        assert cuda.cuCtxDestroy_v2(other) == 0
    assert values(table.gather(Device([3]), check="now"))[0][0] == 3000 and data.tolist() == [0] * 16


def test_the_stream_of_a_producer_is_waited_for(gpu_store):
    table = rows_of(gpu_store, 100, 4)
    assert values(table.gather(Device([3], stream=2), check="now"))[0][0] == 3000
    assert values(table.gather(Device([4], stream=1), stream=2, check="now"))[0][0] == 4000


def test_an_array_goes_on_by_both_interfaces(gpu_store):
    table = rows_of(gpu_store, 100, 4)
    made = table.gather(Device([1, 2]), stream=2)
    interface = made.__cuda_array_interface__
    assert interface["shape"] == (2, 4) and interface["typestr"] == "<i4" and interface["stream"] == 2
    assert made.stream == 2 and interface["data"] == (made.address, False)
    assert not hasattr(made, "__array_interface__")
    assert made.__dlpack_device__() == (2, 0)
    for stream in (None, 1, 2, -1):
        capsule = made.__dlpack__(stream=stream, max_version=(1, 0))
        assert "dltensor_versioned" in repr(capsule)
        del capsule
    assert "dltensor_versioned" not in repr(made.__dlpack__())
    with pytest.raises(nvme_gpu.Usage):
        made.__dlpack__(stream=-7)
    with pytest.raises(BufferError):
        made.__dlpack__(copy=True)
    with pytest.raises(BufferError):
        made.__dlpack__(dl_device=(1, 0))
    # A gather takes it as its ids, by CUDA's interface; and by DLPack alone.
    ids = gpu_store.table(0, shape=(100, 2), dtype="int64")
    gpu_store.write((5).to_bytes(8, "little") + (6).to_bytes(8, "little"))
    chained = ids[Device([0])]

    class Foreign:
        def __dlpack_device__(self):
            return chained.__dlpack_device__()

        def __dlpack__(self, **words):
            return chained.__dlpack__(**words)

    want = rows_of(gpu_store, 100, 4, 1 << 20)
    assert values(want[chained])[0][1][0] == 6000
    assert values(want[Foreign()])[0][1][0] == 6000


QUEUES = "sim:mem?size=32MiB&queues=32"


def test_buffers_stay_until_their_gather_has_ended():
    def let_go(store, saw):
        # All names of the gather's buffers go at once.
        table = store.table(0, shape=(100, 4), dtype="int32")
        ids, out = Device([1, 2]), Device([7] * 8, "<i4", shape=(2, 4))
        memory = out.memory
        table.gather(ids, out=out)
        del ids, out
        gc.collect()
        is_idle = table._native.is_idle()
        saw()
        assert not is_idle
        table.check()
        assert table._native.is_idle() and list(memory) == [0] * 8

    during_reads(let_go, QUEUES, gpu=0)


def test_a_table_and_a_store_may_go_before_their_gathers():
    def let_go(store, saw):
        table = store.table(0, shape=(100, 4), dtype="int32")
        found = table[Device([1])]
        del table
        gc.collect()
        kept = nvme_gpu._native.kept_buffers()
        saw()
        assert kept >= 1
        store.close()
        del store
        gc.collect()
        assert values(found) == [[0] * 4]
        drain()

    during_reads(let_go, QUEUES, gpu=0)


def test_a_check_with_a_limit_says_that_gathers_go_on():
    def check(store, saw):
        table = store.table(0, shape=(100, 4), dtype="int32")
        table[Device([1])]
        try:
            table.check(timeout=0.01)
        except nvme_gpu.Timeout as error:
            assert "0.01 s" in error.cause
        else:
            saw()
            pytest.fail("the gather had ended, or the check waited for it")
        table.check()

    during_reads(check, QUEUES, gpu=0)


def test_more_gathers_than_are_looked_at_one_by_one(gpu_store):
    table = rows_of(gpu_store, 100, 4)
    found = [table.gather(Device([one]), stream=one % 3) for one in range(80)]
    table.check()
    assert [values(one)[0][0] for one in found] == [one * 1000 for one in range(80)]


def test_a_read_that_fails_names_its_part_and_the_member():
    fault = "fault=status:0x281@op=read,nth=1"
    # A command for several rows that fails is read again row by row.
    with nvme_gpu.open(SIM_GPU + "&" + fault + "-2", gpu=0) as store:
        memory = Device(bytes(8192), "|u1")
        with pytest.raises(nvme_gpu.Status, match="of 8192 bytes on the GPU"):
            store.read_into(memory, 4096).result(timeout=20)
        store.read_into(memory, 4096).result(timeout=20)
    member = "sim:mem?size=1MiB&queues=32&threads=2"
    with nvme_gpu.open(f"stripe:{member}|{member}&{fault}?stripe=64KiB", gpu=0) as store:
        table = rows_of(store, 1024, 4, 65536)
        with pytest.raises(nvme_gpu.Status, match="member 1 of the stripe"):
            table.gather(Device([3]), check="now")
        assert values(table.gather(Device([3]), check="now"))[0][0] == 3000


def test_memory_of_the_wrong_side_is_refused(gpu_store):
    table = rows_of(gpu_store, 100, 4)
    with pytest.raises(nvme_gpu.Usage, match="memory of the host"):
        table.gather(Device([1]), out=bytearray(16))
    with pytest.raises(nvme_gpu.Usage, match="memory of a GPU"):
        table.gather([1], out=Device([0] * 4, "<i4", shape=(1, 4)))
    with pytest.raises(nvme_gpu.Usage, match="status has 2 places"):
        table.gather(Device([1]), status=Device([0, 0], "<i4"))
    with pytest.raises(nvme_gpu.Usage, match="lies in memory of the host"):
        table.scatter(Device([1]), bytearray(16))
    with pytest.raises(nvme_gpu.Usage, match="unique"):
        table.scatter(Device([1]), Device([0] * 4, "<i4", shape=(1, 4)), unique=True)
    with pytest.raises(nvme_gpu.Usage, match="flush"):
        gpu_store.write_from(Device([0] * 4), durable=True)
    with nvme_gpu.open(SIM) as plain:
        with pytest.raises(nvme_gpu.Usage, match="without a GPU"):
            plain.table(0, shape=(10, 4), dtype="int32")[Device([1])]


def test_rows_are_written_from_memory_of_the_gpu(gpu_store):
    table = rows_of(gpu_store, 100, 4)
    table.scatter(Device([5, 9]), Device(range(8), "<i4", shape=(2, 4)), stream=2)
    found = table.gather(Device([9, 5]), stream=2)
    table.scatter_add(Device([5, 5]), Device([1] * 8, "<i4", shape=(2, 4)), stream=2, check="now")
    assert values(found) == [[4, 5, 6, 7], [0, 1, 2, 3]]
    assert table[5].tolist() == [2, 3, 4, 5]
    table.scatter(Device([-1]), Device([1] * 4, "<i4", shape=(1, 4)))
    with pytest.raises(nvme_gpu.Usage, match="scatter 3 of 1 rows"):
        table.check()


def test_bytes_are_read_into_and_written_from_memory_of_the_gpu(gpu_store):
    data = bytes(index * 7 & 0xFF for index in range(200_000))
    gpu_store.write(data, 77)
    memory = Device(bytes(200_000), "|u1")
    assert gpu_store.read_into(memory, 77).result(timeout=20) is memory
    assert bytes(memory.memory) == data
    pending = gpu_store.write_from(memory, 1_000_001, stream=2)
    pending.result()
    assert gpu_store.read(200_000, 1_000_001) == data
    with pytest.raises(nvme_gpu.Usage):
        gpu_store.read_into(memory, gpu_store.nbytes - 5)


def test_files_and_stripes_are_gathered_too(tmp_path):
    path = tmp_path / "data.bin"
    path.write_bytes(bytes(1 << 20))
    for device in (path, "stripe:sim:mem?size=1MiB|sim:mem?size=1MiB?stripe=64KiB"):
        with nvme_gpu.open(device, gpu=0) as store:
            table = rows_of(store, 100, 4, 70_001)
            assert values(table[Device([99, 3])])[0][0] == 99000
            with pytest.raises(nvme_gpu.Usage):
                table.gather(Device([100]), check="now")


def test_a_gather_in_halves_gives_the_rows(gpu_store):
    table = rows_of(gpu_store, 100, 4)
    before = gpu_store.stats()
    begun = table.prefetch(Device([3, 7, 3]))
    between = table[Device([9])]
    assert begun._begun.submits and "begun" in repr(begun)
    found = begun.result()
    assert values(found) == [[row * 1000 + column for column in range(4)] for row in (3, 7, 3)]
    assert values(between) == [[9000, 9001, 9002, 9003]]
    with pytest.raises(nvme_gpu.Usage, match="finished before"):
        begun.result()
    after = gpu_store.stats()
    assert after["begun_gathers"] == before["begun_gathers"] + 1 and after["late_rows"] == before["late_rows"]
    # Into memory of the caller, with a status for each id; rows that did not come are zero.
    out, status = Device([7] * 12, "<i4", shape=(3, 4)), Device([9, 9, 9], "<i4")
    begun = table.prefetch(Device([1, -1, 100]))
    assert begun.result(out, status=status) is out
    with pytest.raises(nvme_gpu.Usage) as caught:
        table.check()
    assert caught.value.row == 1
    assert out.tolist() == [1000, 1001, 1002, 1003] + [0] * 8 and status.tolist() == [0, -1, -1]


def test_a_gather_in_halves_that_is_refused_can_be_finished(gpu_store):
    table = rows_of(gpu_store, 100, 4)
    begun = table.prefetch(Device([5]))
    for out in (Device([0] * 3, "<i4"), bytearray(16), [1]):
        with pytest.raises((nvme_gpu.Usage, TypeError)):
            begun.result(out)
    assert values(begun.result()) == [[5000, 5001, 5002, 5003]]
    for ids in (Device([1.5], "<f4"), Device([1], kind="host")):
        with pytest.raises(nvme_gpu.Usage):
            table.prefetch(ids)


def test_gathers_that_are_never_finished_give_their_queues_back(gpu_store):
    table = rows_of(gpu_store, 100, 4)
    for _ in range(30):
        table.prefetch(Device(list(range(64))))
    gc.collect()
    drain()
    assert values(table.prefetch(Device([5])).result()) == [[5000, 5001, 5002, 5003]]


def test_rows_of_the_host_are_gathered_by_the_result():
    with nvme_gpu.open(SIM) as store:
        table = rows_of(store, 100, 4)
        begun = table.prefetch([3, 7])
        assert begun.result().tolist() == [[3000, 3001, 3002, 3003], [7000, 7001, 7002, 7003]]
        with pytest.raises(nvme_gpu.Usage):
            begun.result()


def test_a_store_that_is_closed_between_the_halves():
    store = nvme_gpu.open(SIM_GPU, gpu=0)
    begun = rows_of(store, 100, 4).prefetch(Device([3]))
    store.close()
    with pytest.raises(nvme_gpu.NvmeGpuError, match="closed"):
        begun.result()
    del begun


def test_rows_that_come_again_are_read_from_the_cache(tmp_path):
    """The image is changed behind the drive's back: what is still as it was came from the cache."""
    image = tmp_path / "image"
    image.write_bytes(b"".join(bytes([number]) * 4096 for number in range(80)) + bytes(1 << 20))
    with nvme_gpu.open(f"sim:{image}?queues=32&threads=2", gpu=0) as store:
        table = store.table(0, shape=(80, 1024), dtype="float32")
        cached, ids = table.cached(4 << 20), Device(range(40))
        found = cached[ids].tobytes()
        assert found == b"".join(bytes([number]) * 4096 for number in range(40))
        with image.open("r+b") as file:
            file.write(b"\xff" * 40 * 4096)
        assert table[ids].tobytes() == b"\xff" * 40 * 4096
        for _ in range(3):
            assert cached[ids].tobytes() == found
        # Tables that are made of it share its cache.
        assert cached.with_on_error("nan")[ids].tobytes() == found
        assert cached[Device([41])].tobytes() == bytes([41]) * 4096
        counts = store.stats()
        assert (counts["cache_asked"], counts["cache_hits"]) == (5 * 40 + 1, 4 * 40)
        # A write makes the whole cache stale.
        store.write(bytes(4096), 79 * 4096)
        assert cached[ids].tobytes() == b"\xff" * 40 * 4096
        assert store.stats()["cache_hits"] == 4 * 40
        wide = store.table(0, shape=(80, 2048), dtype="float16", to="float32").cached(4 << 20)
        assert wide.dtype == "float32" and wide[Device([42])].shape == (1, 2048)
    with pytest.raises(nvme_gpu.Usage, match="closed"):
        cached[[1]].tobytes()


def test_a_cache_that_cannot_be():
    with nvme_gpu.open(SIM) as store:
        with pytest.raises(nvme_gpu.Usage, match="GPU"):
            rows_of(store, 10, 4).cached(1 << 20)
    with nvme_gpu.open(SIM_GPU, gpu=0) as store:
        table = rows_of(store, 10, 1024)
        with pytest.raises(nvme_gpu.Usage, match="smaller than one set"):
            table.cached(4096)
        for wrong in (0, 1 << 62):
            with pytest.raises(nvme_gpu.Usage):
                table.cached(wrong)
        with pytest.raises(TypeError):
            table.cached("1GiB")
