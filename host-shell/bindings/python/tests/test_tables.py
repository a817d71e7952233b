"""Rows by ids, by the CPU."""

from __future__ import annotations

import array
import sys
import threading
import time

import pytest

import nvme_gpu
from conftest import rows_of

numpy = pytest.importorskip("numpy")


def test_ids_of_every_kind_give_the_same_rows(store):
    table = rows_of(store, 100, 4, 96)
    want = [[5000, 5001, 5002, 5003], [7000, 7001, 7002, 7003]]
    kinds = (
        [5, 7],
        range(5, 9, 2),
        slice(5, 9, 2),
        array.array("i", [5, 7]),
        array.array("q", [5, 7]),
        numpy.array([5, 7]),
        numpy.array([5, 7], dtype="int32"),
        [numpy.int64(5), 7],
    )
    for ids in kinds:
        assert table[ids].tolist() == want, ids
    assert table[5].tolist() == want[0] and table[numpy.int32(5)].shape == (4,)


def test_the_shape_is_that_of_the_ids_and_of_a_row(store):
    table = store.table(0, shape=(50, 2, 3), dtype="float16")
    assert table[numpy.zeros((4, 5), dtype=int)].shape == (4, 5, 2, 3)
    assert table[[[0], [1]]].shape == (2, 1, 2, 3)
    assert table[[]].shape == (0, 2, 3) and table[numpy.zeros((3, 0), int)].shape == (3, 0, 2, 3)
    assert table[4].dtype == numpy.float16
    assert (len(table), table.shape, table.dtype) == (50, (50, 2, 3), "float16")
    assert (table.row_bytes, table.nbytes, table.store) == (12, 600, store)
    assert "float16" in repr(table)


def test_rows_are_numbers_when_they_have_no_shape(store):
    table = store.table(0, shape=(10,), dtype="int64")
    table[[1, 2]] = [11, 22]
    assert table[[2, 1, 0]].tolist() == [22, 11, 0]
    assert table[2] == 22


def test_random_ids_against_memory(store):
    random = numpy.random.default_rng(7)
    values = random.standard_normal((3000, 37)).astype("float32")
    store.write(values, 1234)
    table = store.table(1234, shape=values.shape, dtype=values.dtype)
    for count in (1, 100, 5000):
        ids = random.integers(0, 3000, count)
        assert (table[ids] == values[ids]).all()
    assert (table[ids.astype("int32").reshape(50, 100)] == values[ids.reshape(50, 100)]).all()


def test_an_output_is_filled_and_returned(store):
    table = rows_of(store, 100, 4)
    out = numpy.empty((2, 4), dtype="int32")
    assert table.gather([1, 2], out=out) is out and out.tolist() == table[[1, 2]].tolist()
    plain = bytearray(2 * 16)
    assert table.gather([1, 2], out=plain) is plain and plain == out.tobytes()
    assert table.gather([1, 2], dtype="float64").dtype == numpy.float64


def test_bad_ids_are_rows_of_zeros_and_an_error_of_the_check(store):
    table = rows_of(store, 100, 4)
    out, status = numpy.full((4, 4), 9, dtype="int32"), numpy.full(4, 9, dtype="int32")
    with pytest.raises(nvme_gpu.Usage) as caught:
        table.gather([1, -1, 100, 2], out=out, status=status)
    assert (caught.value.row, caught.value.id) == (1, -1)
    assert "rows that failed: 2" in str(caught.value)
    assert status.tolist() == [0, -1, -1, 0]
    assert out.tolist() == [[1000, 1001, 1002, 1003], [0] * 4, [0] * 4, [2000, 2001, 2002, 2003]]
    assert table.gather([-1], check="later").tolist() == [[0] * 4]


def test_a_row_that_cannot_be_read_fails_alone():
    with nvme_gpu.open("sim:mem?size=16MiB&fault=status:0x281@op=read,nth=2", queues=1, depth=1) as store:
        table = store.table(0, shape=(1000, 4096), dtype="uint8")
        status = numpy.zeros(3, dtype="int32")
        with pytest.raises(nvme_gpu.Status) as caught:
            table.gather([1, 500, 900], status=status)
        assert (caught.value.sct, caught.value.sc) == (2, 0x81) and caught.value.row is not None
        assert sorted(status.tolist()) == [0, 0, 0x281]


def test_scatter_writes_the_last_of_equal_ids_or_refuses(store):
    table = rows_of(store, 100, 4, 3)
    table.scatter(numpy.array([[8, 9], [8, 1]]), numpy.arange(16, dtype="int32").reshape(2, 2, 4))
    assert table[[8, 9, 1]].tolist() == [[8, 9, 10, 11], [4, 5, 6, 7], [12, 13, 14, 15]]
    assert table[7].tolist() == [7000, 7001, 7002, 7003]
    with pytest.raises(nvme_gpu.Usage):
        table.scatter([1, 1], numpy.zeros((2, 4), "int32"), unique=True)
    assert table[1].tolist() == [12, 13, 14, 15]


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
def test_scatter_add_counts_every_addition(store, dtype):
    table = store.table(5, shape=(40, 3), dtype=dtype)
    ones = numpy.ones((8, 3), dtype=dtype)

    def add():
        for _ in range(20):
            table.scatter_add([1, 2, 1, 39, 0, 0, 0, 0], ones)

    threads = [threading.Thread(target=add) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert table[[0, 1, 2, 39]][:, 0].tolist() == [320, 160, 80, 80]


def test_bfloat16_goes_by_its_bytes(store):
    table = store.table(0, shape=(10, 2), dtype="bfloat16")
    table.scatter([3], numpy.array([[0x3F80, 0x4000]], dtype="uint16").view("uint8"))
    table.scatter_add([3, 3], numpy.array([[0x3F80, 0x3F80]] * 2, dtype="uint16").view("uint8"))
    found = table[[3]]
    assert isinstance(found, nvme_gpu.Array) and found.dtype == "bfloat16"
    assert found.tobytes() == numpy.array([0x4040, 0x4080], dtype="uint16").tobytes()


def test_arrays_of_ours_go_to_numpy_without_a_copy(store):
    made = nvme_gpu.Array((2, 3), "float32", 4)
    table = store.table(0, shape=(10, 3), dtype="float32")
    table.scatter([4], [[1.5, 2.5, 3.5]])
    assert table.gather([4, 5], out=made) is made
    assert made.tolist() == [[1.5, 2.5, 3.5], [0, 0, 0]]
    seen = numpy.asarray(made)
    shared = numpy.from_dlpack(made)
    seen[1, 0] = 9
    assert shared[1, 0] == 9 and made.tolist()[1][0] == 9
    assert made.__dlpack_device__() == (1, 0) and made.device == "cpu"
    if numpy.__version__ >= "2.1":
        copied = numpy.from_dlpack(made, copy=True)
        copied[0, 0] = 77
        assert made.tolist()[0][0] == 1.5
    del made
    assert seen[1, 0] == 9 and shared[1, 0] == 9
    assert not hasattr(nvme_gpu.Array((1,), "int8", 1), "__cuda_array_interface__")


def test_dlpack_alone_is_a_buffer(store):
    class Foreign:
        """What has DLPack and nothing else."""

        def __init__(self, values, new):
            self.values, self.new = values, new

        def __dlpack_device__(self):
            return self.values.__dlpack_device__()

        def __dlpack__(self, **words):
            if not self.new and words:
                raise TypeError("an old producer")
            return self.values.__dlpack__(**words)

    table = rows_of(store, 100, 4)
    for new in (True, False):
        out = numpy.empty((2, 4), dtype="int32")
        table.gather(Foreign(numpy.array([3, 4]), new), out=Foreign(out, new))
        assert out.tolist() == table[[3, 4]].tolist()
    with pytest.raises(nvme_gpu.Usage):
        table[Foreign(numpy.arange(10)[::2], True)]


def test_threads_gather_at_once(store):
    table = rows_of(store, 1000, 4)
    failures = []

    def work(seed):
        random = numpy.random.default_rng(seed)
        for _ in range(30):
            ids = random.integers(0, 1000, 50)
            if (table[ids][:, 0] != ids * 1000).any():
                failures.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not failures


def test_a_table_ends_with_its_store():
    store = nvme_gpu.open("sim:mem?size=16MiB")
    table = store.table(0, shape=(10, 4), dtype="int32")
    store.close()
    for call in (lambda: table[[1]], lambda: table.scatter([1], numpy.zeros((1, 4), "int32")), table.check):
        with pytest.raises(nvme_gpu.Usage, match="closed"):
            call()


def test_dtypes_of_every_library_have_one_name():
    from nvme_gpu import _dtypes

    for dtype, name in (
        ("half", "float16"),
        ("<f4", "float32"),
        (numpy.dtype("int16"), "int16"),
        (numpy.float64, "float64"),
        (float, "float64"),
        ("float8_e5m2", "float8_e5m2"),
        ("torch.bfloat16", "bfloat16"),
    ):
        assert _dtypes.name_of(dtype) == name
    assert nvme_gpu.Array((2, 0), "int8", 1).tolist() == [[], []]
    assert nvme_gpu.Array((), "float32", 4).tolist() == 0
    with pytest.raises(nvme_gpu.Usage):
        nvme_gpu.Array((1,), "bfloat16", 2).tolist()
    assert "Array" in repr(nvme_gpu.Array((1,), "bool", 1))


@pytest.mark.parametrize("dtype, size, typestr", [("bool", 1, "|b1"), ("complex64", 8, "<c8"), ("uint16", 2, "<u2")])
def test_an_array_names_its_type(dtype, size, typestr):
    made = nvme_gpu._native.Array((2, 3), dtype, size)
    assert made.__array_interface__["typestr"] == typestr and made.nbytes == 6 * size
    assert not hasattr(made, "__cuda_array_interface__")


def test_a_type_without_a_code_is_refused():
    with pytest.raises(AttributeError, match="bfloat16 has no code"):
        nvme_gpu._native.Array((2,), "bfloat16", 2).__array_interface__
    with pytest.raises(BufferError, match="DLPack has no q8_0"):
        nvme_gpu._native.Array((2,), "q8_0", 34).__dlpack__()


def test_a_copy_by_dlpack_is_memory_of_its_own(store):
    table = rows_of(store, 100, 4)
    made = nvme_gpu._native.Array((1, 4), "int32", 4)

    class Copied:
        def __dlpack_device__(self):
            return made.__dlpack_device__()

        def __dlpack__(self, **words):
            return made.__dlpack__(**words, copy=True)

    table.gather([3], out=made)
    shared, copied = numpy.from_dlpack(made), numpy.from_dlpack(Copied())
    table.gather([5], out=made)
    assert (shared[0][0], copied[0][0]) == (5000, 3000)


def test_memory_that_may_not_be_written_is_no_place_for_a_read(store):
    view = nvme_gpu._native.View.from_buffer(b"abcd", False)
    with pytest.raises(nvme_gpu.Usage, match="read-only"):
        store._native.read(view, 0)


def test_an_index_of_several_parts_is_refused(store):
    """numpy and torch take table[1, 2] for an element, and table[()] for all rows."""
    table = rows_of(store, 40, 4)
    before = store.read(640)
    for index in ((1, 2), (), (0, ...), (slice(2), 0), ([1], [2]), (None,), None, ..., (1, 2, 3)):
        with pytest.raises(nvme_gpu.Usage):
            table[index]
        with pytest.raises(nvme_gpu.Usage):
            table[index] = numpy.zeros(4, "int32")
    assert store.read(640) == before
    assert table[(5,)].tolist() == table[5].tolist() == [5000, 5001, 5002, 5003]
    assert table[([5, 6],)].tolist() == table[[5, 6]].tolist() == table.gather((5, 6)).tolist()


@pytest.mark.parametrize("index", [slice(None), slice(3, 30, 4), slice(30, 3, -5), slice(-4, None), slice(50, 60), slice(8, 2)])
def test_a_slice_means_what_it_means_in_numpy(store, index):
    table = rows_of(store, 40, 4)
    whole = table[numpy.arange(40)]
    assert numpy.array_equal(table[index], whole[index]) and table[index].shape == whole[index].shape


# What table[...] makes ids of, and gather takes as it is.
INDICES = [
    numpy.array([True, False] * 20), numpy.int8(3), numpy.array([1, 2], "uint8"), numpy.array([1, 2], "int16"),
    numpy.array([1, 2], "uint64"), numpy.array([1, 2], ">i8"),
]  # fmt: skip
NO_IDS = [numpy.array([1.0]), True, numpy.True_, 1.0, "1", b"1", [True], [1.5], ["1"], [[1], [2, 3]], [[], [1]]]


@pytest.mark.parametrize("wrong", [*INDICES, *NO_IDS])
def test_ids_that_mean_something_else_in_numpy_are_refused(store, wrong):
    table = rows_of(store, 40, 4)
    calls = [lambda: table.gather(wrong), lambda: table.scatter(wrong, numpy.zeros((2, 4), "int32"))]
    if any(wrong is one for one in NO_IDS):
        calls.append(lambda: table[wrong])
    for call in calls:
        with pytest.raises((nvme_gpu.Usage, TypeError)):
            call()


@pytest.mark.parametrize("wrong", [-1, 40, -(2**63), 2**63 - 1, 2**63, -(2**63) - 1])
def test_a_scatter_judges_all_ids_before_it_sends_anything(store, wrong):
    table = rows_of(store, 40, 4)
    before, commands = store.read(640), store.stats()["commands"]
    fits = -(1 << 63) <= wrong < 1 << 63
    for place in range(3):
        ids = [3, 5, 7]
        ids[place] = wrong
        for call in (table.scatter, table.scatter_add, table.__setitem__):
            with pytest.raises(nvme_gpu.Usage) as caught:
                call(ids, numpy.ones((3, 4), "int32"))
            assert (caught.value.row, caught.value.id) == ((place, wrong) if fits else (None, None))
    assert store.stats()["commands"] == commands
    assert store.read(640) == before
    if fits:
        status = numpy.full(3, 9, "int32")
        table.scatter([3, wrong, 7], numpy.ones((3, 4), "int32"), check="later", status=status)
        assert status.tolist() == [-5, -1, -5] and store.read(640) == before


def test_lists_in_lists_are_bounded(store):
    """A list may contain itself, and few lists may stand for more ids than there is memory."""
    table = rows_of(store, 40, 4)
    endless: list = []
    endless.append(endless)
    behind: list = [1]
    behind.append(behind)
    deep: object = 3
    for _ in range(100_000):
        deep = [deep]
    wide: object = [1, 2]
    for _ in range(31):
        wide = [wide, wide]
    for ids in (endless, behind, deep, wide, (endless,), [endless, endless]):
        for call in (lambda ids=ids: table.gather(ids), lambda ids=ids: table.scatter(ids, numpy.zeros((1, 4), "int32"))):
            with pytest.raises((nvme_gpu.Usage, TypeError)):
                call()
    nested: object = 3
    for _ in range(32):
        nested = [nested]
    # numpy before version 2 has 32 lengths at most, with that of the row.
    assert table.gather(nested[0]).shape == (1,) * 31 + (4,)
    with pytest.raises(nvme_gpu.Usage):
        table.scatter([1], [endless])
    while isinstance(deep, list):
        deep = deep[0]


def test_a_check_that_is_left_for_later_raises_once(store):
    table = rows_of(store, 100, 4)
    table.gather([1, 200], check="later")
    with pytest.raises(nvme_gpu.Usage, match="row 1"):
        table.check()
    table.check()
    table.gather([1], check="later")
    table.check()


def test_memory_is_made_while_other_threads_run():
    count, is_over = [0], []

    def counts():
        while not is_over:
            count[0] += 1
            time.sleep(0.0005)

    before = sys.getswitchinterval()
    thread = threading.Thread(target=counts)
    thread.start()
    # From here on a thread runs only where another one lets it.
    sys.setswitchinterval(1000)
    try:
        ran = []
        for _ in range(50):
            first = count[0]
            made = nvme_gpu.Array((64 << 20,), "uint8", 1)
            ran.append(count[0] - first)
            assert made.nbytes == 64 << 20
            time.sleep(0.001)
    finally:
        sys.setswitchinterval(before)
        is_over.append(True)
        thread.join()
    assert any(ran)


@pytest.mark.parametrize(
    "dtype,rows",
    [
        ("int32", [[1.5, 2]]),
        ("int32", [[1.0, 2.0]]),
        ("int32", [[1 << 31, 0]]),
        ("uint8", [[-1, 0]]),
        ("uint8", [[256, 0]]),
        ("int64", [[1 << 63, -1]]),
        ("int64", [[1 << 70, 0]]),
        ("bool", [[2, 0]]),
        ("float16", [[1e6, 0]]),
        ("float32", [[1e300, 0]]),
        ("float32", [[1j, 0]]),
        ("float32", [["1", "2"]]),
        ("float32", [[None, 0]]),
        ("float32", [[1, 2], [3]]),
    ],
)
def test_numbers_in_lists_that_the_dtype_does_not_hold_are_not_written(store, dtype, rows):
    pytest.importorskip("numpy")
    store.write(bytes(range(64)))
    table = store.table(0, shape=(4, 2), dtype=dtype)
    for change in (table.scatter, table.scatter_add) if dtype in ("int32", "float32") else (table.scatter,):
        with pytest.raises(nvme_gpu.Usage, match="rows: "):
            change([1], rows)
    assert store.read(64) == bytes(range(64))


@pytest.mark.parametrize(
    "dtype,rows",
    [
        ("int32", [[-(1 << 31), (1 << 31) - 1]]),
        ("uint64", [[1, (1 << 64) - 1]]),
        ("bool", [[True, 0]]),
        ("float32", [[0.1, 1 << 24]]),
        ("float32", [[float("inf"), 10**30]]),
        ("float16", [[65504, True]]),
        ("complex64", [[1 + 2j, 0.5]]),
    ],
)
def test_numbers_in_lists_are_written_as_the_dtype_has_them(store, dtype, rows):
    numpy = pytest.importorskip("numpy")
    table = store.table(0, shape=(4, 2), dtype=dtype)
    table.scatter([1], rows)
    assert numpy.array_equal(table[[1]], numpy.array(rows, dtype=dtype))
