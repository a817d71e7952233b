"""``table[index]`` beside the same index of an array of numpy, and of a tensor of torch."""

import numpy
import pytest

import nvme_gpu

torch = pytest.importorskip("torch")

ROWS, WIDTH = 100, 4


@pytest.fixture
def values():
    return numpy.arange(ROWS * WIDTH, dtype="int32").reshape(ROWS, WIDTH)


@pytest.fixture
def table(values):
    with nvme_gpu.open("sim:mem?size=1MiB") as store:
        table = store.table(4096, shape=(ROWS, WIDTH), dtype="int32")
        table.scatter(numpy.arange(ROWS), values)
        yield table


EVERY_THIRD = numpy.arange(ROWS) % 3 == 0
INDICES = {
    "a number": 7,
    "a number from the end": -1,
    "the first from the end": -ROWS,
    "a number of numpy": numpy.int64(5),
    "a short number of numpy from the end": numpy.int8(-3),
    "an array without lengths": numpy.array(5),
    "a short array without lengths": numpy.array(5, "uint8"),
    "a short slice": slice(3, 9),
    "all": slice(None),
    "backwards": slice(None, None, -1),
    "steps from the end": slice(-3, 10, -7),
    "no rows": slice(9, 3),
    "far ends": slice(-1000, 1000, 3),
    "a tuple of one": (slice(1, 5),),
    "a mask": EVERY_THIRD,
    "a mask of nothing": numpy.zeros(ROWS, dtype=bool),
    "gaps": numpy.arange(40)[::2],
    "gaps in 32 bits": numpy.arange(40, dtype="int32")[::-3],
    "a column": numpy.arange(40).reshape(10, 4)[:, 1:3],
    "the other byte order": numpy.array([1, 77, 3], ">i8"),
    **{f"ids of {name}": numpy.array([0, 99, 3], name) for name in ("int8", "uint8", "int16", "uint16", "uint32", "uint64")},
}


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES.keys())
def test_an_index_means_what_numpy_means_by_it(table, values, index):
    found = table[index]
    assert found.dtype == values.dtype and numpy.array_equal(found, values[index])
    changed = values.copy()
    changed[index] += 1000
    table[index] = numpy.ascontiguousarray(changed[index])
    assert numpy.array_equal(table[:], changed)


TENSORS = {
    "a mask": torch.from_numpy(EVERY_THIRD),
    "gaps": torch.arange(40)[::2],
    "a column": torch.arange(40).reshape(10, 4)[:, 1:3],
    "ids of 8 bits": torch.tensor([0, 99, 3], dtype=torch.int8),
    "ids of 16 bits": torch.tensor([[0, 99, 3]], dtype=torch.int16),
    "ids of 8 bits, transposed": torch.tensor([[0, 99], [3, 5], [7, 8]], dtype=torch.int8).t(),
}


@pytest.mark.parametrize("index", TENSORS.values(), ids=TENSORS.keys())
def test_an_index_means_what_torch_means_by_it(table, values, index):
    wanted = torch.from_numpy(values.copy())
    whole = index if index.dtype == torch.bool else index.long()
    assert torch.equal(table[index], wanted[whole])
    wanted[whole] += 1000
    table[index] = wanted[whole]
    assert torch.equal(table[torch.arange(ROWS)], wanted)


@pytest.mark.parametrize("index", [ROWS, -ROWS - 1, 1 << 62, [3, ROWS], numpy.array([-1]), torch.tensor([ROWS])])
def test_a_row_that_is_not_there_is_an_index_error(table, index):
    with pytest.raises(IndexError) as caught:
        table[index]
    assert isinstance(caught.value, nvme_gpu.OutOfRange) and caught.value.code == "usage"
    assert caught.value.row in (0, 1)


def test_a_table_has_the_sizes_of_an_array(table, values):
    assert (table.ndim, table.size, table.nbytes, len(table)) == (values.ndim, values.size, values.nbytes, len(values))
    assert numpy.array_equal(numpy.asarray(table), values)
    assert numpy.asarray(table, dtype="float64").dtype == "float64"
    with pytest.raises(ValueError):
        table.__array__(copy=False)
    wide = table.store.table(4096, shape=(ROWS, 8), dtype="float16", to="float32")
    assert (wide.ndim, wide.size) == (2, ROWS * 8)


def test_a_slice_makes_no_list_of_numbers(monkeypatch, table):
    """Ids of a slice are made by numpy where it is there, and are the same without it."""
    with_numpy = table[10:90:3]
    monkeypatch.setattr(nvme_gpu._store._buffers, "numpy", lambda: None)
    assert table[10:90:3].tobytes() == with_numpy.tobytes()
