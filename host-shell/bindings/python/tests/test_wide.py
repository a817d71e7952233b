"""Rows whose elements come out wider than they are stored, beside numpy and the package gguf."""

from __future__ import annotations

import pytest

import nvme_gpu
from conftest import Device

numpy = pytest.importorskip("numpy")
gguf = pytest.importorskip("gguf.quants")
Kind = pytest.importorskip("gguf.constants").GGMLQuantizationType

OFFSET = 77


def stored(store, data, *args, **words):
    """A table over ``data`` at an odd byte of the store."""
    store.write(numpy.ascontiguousarray(data).view("uint8"), OFFSET)
    return store.table(OFFSET, *args, **words)


def numbers():
    return numpy.random.default_rng(3).standard_normal((50, 96)).astype("float32")


@pytest.mark.parametrize("to", [None, "float16", "float32"])
@pytest.mark.parametrize("name", ["q8_0", "q4_0", "q4_1"])
def test_blocks_are_what_gguf_makes_of_them(store, name, to):
    kind = getattr(Kind, name.upper())
    raw = gguf.quantize(numbers(), kind)
    want = gguf.dequantize(raw, kind)
    table = stored(store, raw, shape=(50, 96), dtype=name, to=to)
    assert (table.stored_dtype, table.dtype) == (name, to or "float16")
    assert (table.row_bytes, table.nbytes) == (raw.shape[1], raw.nbytes)
    ids = numpy.array([[3, 49], [0, 3]])
    found = table[ids]
    assert found.shape == (2, 2, 96) and found.dtype == (to or "float16")
    assert (found == want[ids].astype(found.dtype)).all()


def test_halves_are_widened_on_the_way(store):
    values = numbers().astype("float16")
    table = stored(store, values, shape=values.shape, dtype="float16")
    found = table.gather([4, 0], dtype="float32")
    assert found.dtype == numpy.float32 and (found == values[[4, 0]]).all()
    again = table.gather([1], dtype=numpy.float32)
    assert (again == values[1]).all()
    # bfloat16 is the upper half of float32.
    high = (numbers().view("uint32") >> 16).astype("uint16")
    table = stored(store, high, shape=high.shape, dtype="bfloat16", to="float32")
    want = (high.astype("uint32") << 16).view("float32")
    assert (table[range(50)] == want).all()
    assert table.gather([7]).dtype == numpy.float32


def of_f8(byte, exponent_bits, fraction_bits):
    """By the definition of the format."""
    bias = (1 << (exponent_bits - 1)) - 1
    exponent, fraction = byte >> fraction_bits & ((1 << exponent_bits) - 1), byte & ((1 << fraction_bits) - 1)
    size = fraction / (1 << fraction_bits)
    value = size * 2.0 ** (1 - bias) if exponent == 0 else (1 + size) * 2.0 ** (exponent - bias)
    return -value if byte & 0x80 else value


@pytest.mark.parametrize(("name", "bits", "top"), [("float8_e4m3fn", (4, 3), 0x7F), ("float8_e5m2", (5, 2), 0x7C)])
def test_small_floats_are_widened(store, name, bits, top):
    every = numpy.array([byte for byte in range(256) if byte & 0x7F < top], dtype="uint8")
    table = stored(store, every, shape=(len(every),), dtype=name)
    found = table.gather(range(len(every)), dtype="float32")
    assert found.tolist() == [of_f8(int(byte), *bits) for byte in every]


def test_on_a_gpu_rows_come_out_as_on_the_cpu(gpu_store):
    raw = gguf.quantize(numbers(), Kind.Q4_1)
    table = stored(gpu_store, raw, shape=(50, 96), dtype="q4_1", to="float32")
    found = table[Device([9, 9, 31])]
    table.check()
    assert found.dtype == "float32" and found.shape == (3, 96)
    assert found.tobytes() == table[[9, 9, 31]].tobytes()
    values = numbers().astype("float16")
    table = stored(gpu_store, values, shape=values.shape, dtype="float16")
    # Whoever asks for the status of each row may read the others.
    found = table.gather(Device([5, 50]), dtype="float32", status=Device([0, 0], "<i4"))
    with pytest.raises(nvme_gpu.Usage) as caught:
        table.check()
    assert caught.value.row == 1
    assert found.tobytes() == values[5].astype("float32").tobytes() + bytes(4 * 96)


def test_what_is_not_widened_is_refused(store):
    table = stored(store, numbers(), shape=(50, 32), dtype="q8_0")
    for change in (table.scatter, table.scatter_add):
        with pytest.raises(nvme_gpu.Usage, match="not written"):
            change([1], numpy.zeros((1, 32), "float16"))
    for words in (
        {"shape": (4, 33), "dtype": "q8_0"},
        {"shape": (4, 32), "dtype": "q8_0", "to": "float64"},
        {"shape": (4, 32), "dtype": "int8", "to": "float16"},
        {"shape": (4, 32), "dtype": "float32", "to": "float16"},
        {"shape": (4, 32), "dtype": "q5_0"},
    ):
        with pytest.raises(nvme_gpu.Usage):
            store.table(0, **words)
    with pytest.raises(nvme_gpu.Usage):
        table.gather([1], out=numpy.zeros((1, 32), "float32"))
