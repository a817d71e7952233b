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


# Bytes of a block, and the upper bytes of its binary16 scales.
LARGE = {
    "q2_k": (84, (81, 83)),
    "q3_k": (110, (109,)),
    "q4_k": (144, (1, 3)),
    "q5_k": (176, (1, 3)),
    "q6_k": (210, (209,)),
    "iq4_nl": (18, (1,)),
    "iq4_xs": (136, (1,)),
    "mxfp4": (17, ()),
}


def blocks_of(name, rows=40, blocks=5):
    """Rows of any bytes whose scales are finite, and their elements as gguf has them."""
    nbytes, scales = LARGE[name]
    raw = numpy.random.default_rng(9).integers(0, 256, (rows * blocks, nbytes), "uint8")
    raw[:, list(scales)] &= 0xBF
    raw = raw.reshape(rows, -1)
    return raw, gguf.dequantize(raw, getattr(Kind, name.upper()))


def bfloat16(values):
    """The upper halves of float32, rounded to the nearest, ties to even."""
    bits = values.view("uint32")
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("uint16")


@pytest.mark.parametrize("name", LARGE)
def test_large_blocks_have_the_bits_of_gguf(store, name):
    raw, want = blocks_of(name)
    ids = [39, 0, 7, 7]
    table = stored(store, raw, shape=want.shape, dtype=name, to="float32")
    assert table[ids].tobytes() == want[ids].tobytes()
    with numpy.errstate(over="ignore"):
        halves = want.astype("float16")
    table = stored(store, raw, shape=want.shape, dtype=name)
    assert table[ids].tobytes() == halves[ids].tobytes()
    table = stored(store, raw, shape=want.shape, dtype=name, to="bfloat16")
    assert table[ids].tobytes() == bfloat16(want)[ids].tobytes()
    with pytest.raises(nvme_gpu.Usage):
        store.table(0, shape=(2, want.shape[1] + 16), dtype=name)


@pytest.mark.parametrize("name", LARGE)
def test_large_blocks_on_a_gpu_are_those_of_the_cpu(gpu_store, name):
    raw, want = blocks_of(name)
    table = stored(gpu_store, raw, shape=want.shape, dtype=name, to="bfloat16")
    status = Device([9, 9, 9], "<i4")
    found = table.gather(Device([39, 40, 0]), status=status)
    with pytest.raises(nvme_gpu.Usage):
        table.check()
    wanted = bfloat16(want)[[39, 0]]
    assert found.tobytes() == wanted[0].tobytes() + bytes(wanted[0].nbytes) + wanted[1].tobytes()
    assert status.tolist() == [0, -1, 0]


def test_small_floats_become_bfloat16(store):
    every = numpy.array([byte for byte in range(256) if byte & 0x7F < 0x7F], dtype="uint8")
    table = stored(store, every, shape=(len(every),), dtype="float8_e4m3fn", to="bfloat16")
    want = numpy.array([of_f8(int(byte), 4, 3) for byte in every], "float32")
    assert table[range(len(every))].tobytes() == bfloat16(want).tobytes()


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
