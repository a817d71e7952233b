"""Rows whose elements have scales apart from them, beside numpy; gpu/lookup_table_on_gpu.py has torch beside them."""

from __future__ import annotations

import pytest

import nvme_gpu
from conftest import SIM_GPU, Device
from test_lookup_table import safetensors

np = pytest.importorskip("numpy")

ROWS, COLUMNS = 300, 256
OFFSET = 8 + 96
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], "float32")


def e4m3():
    """All 256 numbers of E4M3, by their definition."""
    bits = np.arange(256)
    exponent, fraction = bits >> 3 & 15, bits & 7
    value = np.where(exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * 2.0 ** (exponent - 7.0))
    value[bits & 0x7F == 0x7F] = np.nan
    return np.where(bits & 0x80, -value, value).astype("float32")


def e8m0(values):
    return np.where(values == 255, np.nan, 2.0 ** (values.astype("float64") - 127)).astype("float32")


def random(shape, least=0, most=256, seed=5):
    return np.random.default_rng(seed).integers(least, most, shape, "uint8")


def each(scales, columns):
    return np.repeat(scales, columns, axis=1)


def same(found, wanted):
    """Equal bits, and NaN where NaN is wanted."""
    found = np.asarray(found)
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    assert np.array_equal(np.isnan(found), np.isnan(wanted))
    assert (found.view("uint8") == wanted.view("uint8"))[~np.isnan(wanted).repeat(wanted.itemsize, axis=-1)].all()


class Case:
    """Stored rows, words for the table, and the rows as float32."""

    def __init__(self, name):
        weights = random((ROWS, COLUMNS))
        nibbles = np.stack([weights & 15, weights >> 4], axis=2).reshape(ROWS, -1)
        fours, eights, powers = E2M1[nibbles], e4m3()[weights], random((ROWS, COLUMNS // 32), 100, 140, 6)
        factors = random((ROWS, 2 * COLUMNS // 16), 0, 0x7F, 7)
        self.stored, self.words = weights, {"dtype": "float8_e4m3fn"}
        if name == "e8m0":
            powers[3] = 255
            self.words["scales"], self.wanted = powers, eights * each(e8m0(powers), 32)
        elif name == "number":
            self.words["scales"], self.wanted = 0.037, eights * np.float32(0.037)
        elif name == "float32":
            scales = np.random.default_rng(8).standard_normal((ROWS, 2)).astype("float32")
            self.words["scales"], self.wanted = scales, eights * each(scales, 128)
        elif name in ("modelopt", "compressed-tensors"):
            number, word = (np.float32(0.0021), "factor") if name == "modelopt" else (np.float32(476.2), "over")
            of_groups = e4m3()[factors]
            scales = of_groups * number if word == "factor" else of_groups / number
            self.words = {"dtype": "float4_e2m1fn_x2", word: float(number), "scales": Numbers(factors, "float8_e4m3fn")}
            self.wanted = fours * each(scales, 16)
        else:
            self.stored = np.concatenate([weights, powers], axis=1)
            self.words, self.wanted = {"dtype": "float8_scaled"}, eights * each(e8m0(powers), 32)

    @property
    def shape(self):
        return self.wanted.shape


class Numbers(np.ndarray):
    """Bytes that say that they are of another dtype, as an array of ml_dtypes does."""

    def __new__(cls, values, name):
        made = np.asarray(values).view(cls)
        made.name = name
        return made

    def __array_finalize__(self, other):
        self.name = getattr(other, "name", "uint8")

    @property
    def dtype(self):
        return self.name


KINDS = ["e8m0", "number", "float32", "modelopt", "compressed-tensors", "ds4"]
IDS = [0, ROWS - 1, 3, 3, 17, 100, 5]


def table_of(store, case, **words):
    store.write(case.stored, OFFSET)
    return store.table(OFFSET, shape=case.shape, **{"to": "float32", **case.words, **words})


@pytest.mark.parametrize("to", ["float32", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_multiplied_by_their_scales(store, kind, to):
    case = Case(kind)
    table = table_of(store, case, to=to)
    with np.errstate(over="ignore", invalid="ignore"):
        same(table[IDS], case.wanted[IDS].astype(to))
        same(table[np.arange(ROWS)], case.wanted.astype(to))
    assert table.row_bytes == case.stored.shape[1]


@pytest.fixture
def gpu_store():
    try:
        opened = nvme_gpu.open(SIM_GPU, gpu=0)
    except nvme_gpu.NvmeGpuError as error:
        pytest.skip(str(error))
    with opened:
        yield opened


def on_gpu(scales):
    """The same scales in memory of the GPU."""
    if not isinstance(scales, np.ndarray):
        return scales
    name = scales.dtype if isinstance(scales, Numbers) else scales.dtype.name
    of_bytes = Device(np.asarray(scales).view("uint8").reshape(-1).tolist(), "|u1")
    return nvme_gpu._scales.LoadedScales(of_bytes, name)


@pytest.mark.parametrize("is_halved", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_multiplies_alike(gpu_store, kind, is_halved):
    case = Case(kind)
    table = table_of(gpu_store, case)
    words = {name: on_gpu(value) for name, value in case.words.items()}
    table = gpu_store.table(OFFSET, shape=case.shape, to="float32", **words)
    ids = Device([*IDS, -1, ROWS])
    out = Device([7.0] * (len(IDS) + 2) * case.shape[1], "<f4", (len(IDS) + 2, case.shape[1]))
    status = Device([9] * (len(IDS) + 2), "<i4")
    if is_halved:
        begun = table.prefetch(ids)
        begun.result(out, status=status)
    else:
        table.gather(ids, out, status=status)
    with pytest.raises(nvme_gpu.Usage):
        table.check()
    assert status.tolist() == [0] * len(IDS) + [-1, -1]
    found = np.array(out.tolist(), "float32").reshape(out.shape)
    same(found[: len(IDS)], case.wanted[IDS])
    assert not found[len(IDS) :].any()


def test_scales_are_where_the_rows_are_gathered(gpu_store):
    case = Case("e8m0")
    table = table_of(gpu_store, case)
    same(table[IDS], case.wanted[IDS])
    with pytest.raises(nvme_gpu.Usage, match="memory of the host, and the GPU"):
        table.gather(Device(IDS))
    table = table_of(gpu_store, case, scales=on_gpu(case.words["scales"]))
    with pytest.raises(nvme_gpu.Usage, match="memory of a GPU, and the CPU"):
        table[IDS]


def test_scales_come_from_the_files_of_the_rows(tmp_path):
    case, halves = Case("e8m0"), ROWS // 2
    paths = [tmp_path / f"{number}.safetensors" for number in range(2)]
    for number, path in enumerate(paths):
        part = slice(number * halves, (number + 1) * halves)
        rows, scales = case.stored[part], case.words["scales"][part]
        tensors = [(f"w.{number}.weight", "F8_E4M3", rows), (f"w.{number}.scale", "F8_E8M0", scales)]
        safetensors(path, tensors)
    table = nvme_gpu.lookup_table(paths, "w.{}.weight", shape=case.shape, to="float32", scales="w.{}.scale")
    same(table[IDS], case.wanted[IDS])
    table.store.close()


def test_scales_of_blocks_of_rows_are_refused(tmp_path):
    """As those of 128 rows and 128 columns: (2, 128) are as many as one for each of 256 rows."""
    rows, scales = random((256, 512)), random((2, 128), 100, 140)
    path = tmp_path / "one.safetensors"
    safetensors(path, [("w", "F8_E4M3", rows), ("s", "F8_E8M0", scales)])
    with pytest.raises(nvme_gpu.Usage, match=r"'s' have the shape \(2, 128\), and their table 256 rows"):
        nvme_gpu.lookup_table(path, "w", to="float32", scales="s")
    paths = [tmp_path / f"{number}.safetensors" for number in range(2)]
    for number, path in enumerate(paths):
        # The rows of one shard more, and of the other fewer.
        of_shard = random((100 + 56 * number, 4), 100, 140)
        safetensors(path, [(f"{number}.w", "F8_E4M3", rows[:128]), (f"{number}.s", "F8_E8M0", of_shard)])
    with pytest.raises(nvme_gpu.Usage, match=r"'0.s' have the shape \(100, 4\), and their table 128 rows"):
        nvme_gpu.lookup_table(paths, "{}.w", to="float32", scales="{}.s")


@pytest.mark.parametrize("kind", ["modelopt", "compressed-tensors"])
def test_packed_rows_and_their_number_come_from_a_file(tmp_path, kind):
    case = Case(kind)
    [word] = {"factor", "over"} & case.words.keys()
    scales = np.asarray(case.words["scales"]).view(np.ndarray)
    number = np.array([case.words[word]], "float32")
    path = tmp_path / "one.safetensors"
    safetensors(path, [("n", "F32", number), ("w", "U8", case.stored), ("s", "F8_E4M3", scales)])
    words = {"stored": "float4_e2m1fn_x2", "to": "float32", "scales": "s", word: "n"}
    table = nvme_gpu.lookup_table(path, "w", shape=case.shape, dtype="uint8", **words)
    same(table[IDS], case.wanted[IDS])
    table.store.close()
    with pytest.raises(nvme_gpu.Usage, match="name a tensor of one float32"):
        nvme_gpu.lookup_table(path, "w", **{**words, word: "s"})
    with pytest.raises(nvme_gpu.Usage, match="is of the dtype float8_e4m3fn, and stored is"):
        nvme_gpu.lookup_table(path, "s", stored="float4_e2m1fn_x2", to="float32")


def test_wrong_scales_are_refused(store):
    case = Case("e8m0")
    for words, match in [
        ({"scales": case.words["scales"][1:]}, "are not as many for each of"),
        ({"scales": case.words["scales"][:, :7].copy()}, "are not as many for each of"),
        # As many numbers, of other rows.
        ({"scales": case.words["scales"].reshape(8, ROWS)}, r"shape \(8, 300\) are not as many for each of"),
        ({"scales": case.words["scales"].reshape(2, ROWS // 2, 8)}, "are not as many for each of"),
        ({"scales": np.ones((ROWS, 8), "int64")}, "scales are int64"),
        ({"scales": np.zeros((ROWS, 0), "float32")}, "are not as many for each of"),
        ({"factor": 2.0, "over": 3.0}, "both given"),
        ({"scales": 0.0}, "zero or not finite"),
        ({"factor": float("nan")}, "zero or not finite"),
        ({"scales": 2.0, "factor": 3.0}, "their product"),
        ({"factor": "two"}, "factor is 'two'"),
        ({"to": None}, "come out as they are stored"),
    ]:
        with pytest.raises(nvme_gpu.Usage, match=match):
            table_of(store, case, **words)
    with pytest.raises(nvme_gpu.Usage, match="no power of two"):
        store.table(0, shape=(4, 96), dtype="float8_e4m3fn", to="float32", scales=np.ones((4, 2), "float32"))


def test_scaled_rows_are_not_written(store):
    table = table_of(store, Case("e8m0"))
    with pytest.raises(nvme_gpu.Usage, match="are not written"):
        table[[1]] = np.zeros((1, COLUMNS), "float32")


def test_a_factor_that_several_tensors_are_named_for_is_refused():
    for found in ([], [None, None]):
        with pytest.raises(nvme_gpu.Usage, match=rf"factor: 'a.\*' names {len(found)} tensors"):
            nvme_gpu._scales.number_of("factor", "a.*", lambda _, found=found: found)
