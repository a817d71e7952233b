"""Files of tensors: imported, found again, refused."""

from __future__ import annotations

import io
import json
import os
import pickle
import random

import pytest

import nvme_gpu
from conftest import SIM, drain, during_reads, interrupted
from safetensors_file import file_bytes

numpy = pytest.importorskip("numpy")

KINDS = {"bool": "BOOL", "uint8": "U8", "int16": "I16", "float16": "F16", "int32": "I32", "float32": "F32", "int64": "I64"}


def safetensors(path, tensors, metadata=None, extra=None):
    """Writes arrays as the format has it."""
    parts = [(name, KINDS[array.dtype.name], array.shape, array.tobytes()) for name, array in tensors.items()]
    path.write_bytes(file_bytes(parts, metadata=metadata, extra=extra))
    return path


@pytest.fixture
def model(tmp_path):
    generator = numpy.random.default_rng(1)
    tensors = {
        "embedding.weight": generator.standard_normal((500, 24)).astype("float16"),
        "norm": generator.standard_normal(7).astype("float32"),
        "mask": numpy.array([[True, False], [False, True]]),
        "steps": numpy.array(5, dtype="int64"),
        "nothing": numpy.zeros((0, 3), dtype="int32"),
    }
    return safetensors(tmp_path / "model.safetensors", tensors, {"format": "np"}), tensors


def test_an_imported_file_is_a_catalog_of_tables(store, model):
    path, tensors = model
    seen = []
    found = nvme_gpu.import_file(store, path, 4097, progress=lambda *words: seen.append(words))
    size = path.stat().st_size
    assert seen[-1] == (2 * size, 2 * size)
    assert (found.format, found.nbytes, found.metadata) == ("safetensors", size, {"format": "np"})
    assert set(found) == set(tensors) and len(found) == 5 and "norm" in found and found.get("other") is None
    for name in ("embedding.weight", "norm", "mask"):
        entry, array = found[name], tensors[name]
        assert (entry.name, entry.dtype, entry.shape) == (name, array.dtype.name, array.shape)
        assert store.read(entry.nbytes, entry.offset) == array.tobytes()
        table = entry.as_table()
        ids = numpy.arange(len(array))[::-1].copy()
        assert (table[ids] == array[::-1]).all()
    assert len(found["nothing"].as_table()) == 0
    with pytest.raises(nvme_gpu.Usage, match="single number"):
        found["steps"].as_table()
    with pytest.raises(KeyError):
        found["other"]
    assert "5 tensors" in repr(found) and "embedding.weight" in repr(found["embedding.weight"])
    for one in (found, found["norm"]):
        with pytest.raises(nvme_gpu.Usage, match="spawn"):
            pickle.dumps(one)


def test_what_was_imported_is_found_again(store, model):
    path, _ = model
    first = nvme_gpu.import_file(store, path, 100, verify=False)
    again = nvme_gpu.catalog(store, 100)
    assert [(one.name, one.offset) for one in again.values()] == [(one.name, one.offset) for one in first.values()]
    with nvme_gpu.open(path, read_only=True) as file:
        own = nvme_gpu.catalog(file)
        assert {name: one.offset + 100 for name, one in own.items()} == {name: one.offset for name, one in first.items()}
        assert own["norm"].as_table()[3].tobytes() == model[1]["norm"][3].tobytes()
    after = first.nbytes + 100
    second = nvme_gpu.import_file(store, path, after)
    assert second["norm"].offset == first["norm"].offset + first.nbytes


@pytest.mark.parametrize("dtype", ["bool", "uint8", "float16", "int32", "float64", "complex64"])
@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_arrays_that_numpy_saved_are_imported(store, tmp_path, dtype, version):
    array = (numpy.arange(60) % 7).reshape(10, 2, 3).astype(dtype)
    path = tmp_path / "an array.npy"
    with open(path, "wb") as file:
        numpy.lib.format.write_array(file, array, version=version)
    entry = nvme_gpu.import_file(store, str(path))["an array"]
    assert (entry.dtype, entry.shape) == (dtype, (10, 2, 3))
    assert store.read(entry.nbytes, entry.offset) == array.tobytes()
    if dtype != "complex64":
        assert (entry.as_table()[[9, 0]] == array[[9, 0]]).all()


def test_the_library_of_the_format_agrees(store, tmp_path):
    other = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    arrays = {f"layer.{one}.weight": numpy.random.default_rng(one).random((one, 5)).astype("float32") for one in range(1, 9)}
    path = tmp_path / "theirs.safetensors"
    other.save_file(arrays, str(path), metadata={"by": "them"})
    found = nvme_gpu.import_file(store, path)
    assert set(found) == set(arrays) and found.metadata == {"by": "them"}
    for name, array in arrays.items():
        assert (found[name].as_table()[numpy.arange(len(array))] == array).all()


def random_gguf(path, seed):
    """A file of the package gguf; what it has to hold is read by its own reader."""
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    kinds = gguf.GGMLQuantizationType
    chance = random.Random(seed)
    generator = numpy.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    if seed % 3:
        writer.add_custom_alignment(8 << 3 * (seed % 4))
    for number, (add, value) in enumerate(
        [
            (writer.add_uint8, 200),
            (writer.add_int8, -7),
            (writer.add_uint16, 40_000),
            (writer.add_int16, -400),
            (writer.add_uint32, 1 << 31),
            (writer.add_int32, -(1 << 31)),
            (writer.add_float32, 1e-5),
            (writer.add_bool, True),
            (writer.add_string, "naïve \0 text"),
            (writer.add_uint64, (1 << 64) - 1),
            (writer.add_int64, -(1 << 63)),
            (writer.add_float64, 0.1),
            (writer.add_array, [f"token {one}" for one in range(chance.randrange(1, 3000))]),
            (writer.add_array, [chance.random() for _ in range(9)]),
            (writer.add_array, [True, False]),
        ]
    ):
        add(f"test.{number}", value)
    raw = [("Q4_0", 18), ("Q4_1", 20), ("Q5_0", 22), ("Q8_0", 34), ("Q4_K", 144), ("Q5_K", 176), ("Q6_K", 210), ("MXFP4", 17), ("BF16", 2)]
    for number in range(chance.randrange(1, 30)):
        lengths = [chance.randrange(1, 6) for _ in range(chance.randrange(1, 5))]
        if chance.random() < 0.5:
            dtype = chance.choice(["float32", "float16", "float64", "int8", "int16", "int32", "int64"])
            writer.add_tensor(f"blk.{number}.weight", generator.integers(0, 99, lengths).astype(dtype))
        else:
            name, block = chance.choice(raw)
            array = generator.integers(0, 256, (*lengths[:-1], lengths[-1] * block), dtype="uint8")
            writer.add_tensor(f"blk.{number}.weight", array, raw_dtype=getattr(kinds, name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return gguf.GGUFReader(path)


THEIRS = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "f64": "float64"}


@pytest.mark.parametrize("seed", range(12))
def test_gguf_is_read_as_its_own_package_reads_it(store, tmp_path, seed):
    path = tmp_path / "model.gguf"
    reader = random_gguf(path, seed)
    found = nvme_gpu.import_file(store, path, 4096)
    assert (found.format, found.nbytes) == ("gguf", path.stat().st_size)
    assert set(found) == {one.name for one in reader.tensors} and not found.files
    for theirs in reader.tensors:
        entry = found[theirs.name]
        kind = theirs.tensor_type.name.lower()
        assert entry.dtype == THEIRS.get(kind, f"int{kind[1:]}" if kind[0] == "i" else kind)
        assert entry.shape == tuple(int(one) for one in reversed(theirs.shape))
        assert (entry.offset - 4096, entry.nbytes) == (theirs.data_offset, theirs.n_bytes)
        assert store.read(entry.nbytes, entry.offset) == theirs.data.tobytes()
    values = found.metadata
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert set(values) == set(fields)
    for name, field in fields.items():
        ours, theirs = values[name], field.contents()
        if field.types[-1].name == "FLOAT32":
            # Ours are the shortest decimals that mean them.
            ours, theirs = numpy.float32(ours).tolist(), numpy.float32(theirs).tolist()
        assert ours == theirs, name


def test_blocks_of_gguf_are_tables(store, tmp_path):
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    kinds = gguf.GGMLQuantizationType
    numbers = numpy.random.default_rng(5).standard_normal((20, 64)).astype("float32")
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    stored = {name: gguf.quantize(numbers, getattr(kinds, name)) for name in ("Q8_0", "Q4_0", "Q4_1")}
    for name, array in stored.items():
        writer.add_tensor(name, array, raw_dtype=getattr(kinds, name))
    writer.add_tensor("Q5_0", numpy.zeros((2, 22), "uint8"), raw_dtype=kinds.Q5_0)
    writer.add_tensor("Q6_K", numpy.zeros((2, 210), "uint8"), raw_dtype=kinds.Q6_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = nvme_gpu.import_file(store, path)
    for name, array in stored.items():
        want = gguf.dequantize(array, getattr(kinds, name)).astype("float16")
        table = found[name].as_table()
        assert table.shape == (20, 64) and (table[[19, 0]] == want[[19, 0]]).all()
    assert not found["Q6_K"].as_table()[:].any()
    with pytest.raises(nvme_gpu.Usage, match="q5_0"):
        found["Q5_0"].as_table()


def test_a_model_in_several_files_is_one_catalog(store, tmp_path):
    other = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    arrays = {f"layer.{one}": numpy.random.default_rng(one).random((one + 1, 5)).astype("float32") for one in range(9)}
    names = [f"model-{one + 1:05}-of-00003.safetensors" for one in range(3)]
    places = {name: names[int(name[6:]) % 3] for name in arrays}
    for file in names:
        other.save_file({name: array for name, array in arrays.items() if places[name] == file}, str(tmp_path / file))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 900}, "weight_map": places}))
    found = nvme_gpu.import_file(store, index, 100)
    assert set(found) == set(arrays) and found.metadata == {"total_size": 900}
    assert list(found.files) == names and found.files[names[0]] == 100
    for name, array in arrays.items():
        assert (found[name].as_table()[numpy.arange(len(array))] == array).all()
    alone = nvme_gpu.catalog(store, found.files[names[1]])
    assert {one: alone[one].offset for one in alone} == {one: found[one].offset for one in arrays if places[one] == names[1]}
    (tmp_path / names[1]).unlink()
    (tmp_path / names[2]).unlink()
    with pytest.raises(nvme_gpu.Usage, match=f"2 of 3 files are missing: {names[1]}, {names[2]}"):
        nvme_gpu.import_file(store, index)


def saved(array, **words):
    file = io.BytesIO()
    numpy.save(file, array, **words)
    return file.getvalue()


PLAIN = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
BAD = {
    "empty": b"",
    "zeros": bytes(100),
    "text": b"a file of words, long enough to be looked at",
    "GGUF": b"GGUF" + bytes(100),
    "a header that is too long": (1 << 62).to_bytes(8, "little") + b"{}",
    "a header that ends early": (50).to_bytes(8, "little") + b'{"a"',
    "JSON that is none": (4).to_bytes(8, "little") + b"{!!}",
    "data that are missing": PLAIN | {"shape": [9], "data_offsets": [0, 9]},
    "data that are left over": PLAIN | {"shape": [3], "data_offsets": [0, 3]},
    "a gap": PLAIN | {"data_offsets": [1, 5]},
    "an end before the begin": PLAIN | {"data_offsets": [4, 0]},
    "a huge end": PLAIN | {"data_offsets": [0, 1 << 63], "shape": [1 << 63]},
    "a shape that overflows": PLAIN | {"shape": [1 << 40, 1 << 40]},
    "a negative length": PLAIN | {"shape": [-4]},
    "an unknown dtype": PLAIN | {"dtype": "Q4"},
    "another byte order": saved(numpy.zeros(3, ">f4")),
    "fields": saved(numpy.zeros(3, [("a", "<f4")])),
    "objects": saved(numpy.array([None]), allow_pickle=True),
    "the order of Fortran": saved(numpy.asfortranarray(numpy.zeros((3, 3)))),
    "half an array": saved(numpy.zeros(300))[:-1],
    "an array and more": saved(numpy.zeros(3)) + b"more",
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_file_of_tensors_is_refused_and_nothing_is_written(store, tmp_path, name):
    path = tmp_path / "bad"
    if isinstance(BAD[name], bytes):
        path.write_bytes(BAD[name])
    else:
        safetensors(path, {"b": numpy.zeros(0, "uint8")}, extra={"a": BAD[name]})
        path.write_bytes(path.read_bytes() + bytes(4))
    with pytest.raises(nvme_gpu.Usage) as caught:
        nvme_gpu.import_file(store, path)
    assert str(path) in caught.value.cause and caught.value.remedy
    assert store.stats()["commands"] == 0


def test_other_bad_words_of_an_import(store, model, tmp_path):
    path, _ = model
    cases = (
        (nvme_gpu.Usage, lambda: nvme_gpu.import_file(store, path, store.nbytes - 10)),
        (nvme_gpu.Usage, lambda: nvme_gpu.import_file(store, path, -1)),
        (nvme_gpu.Usage, lambda: nvme_gpu.import_file(store, path, (1 << 64) - 1)),
        (TypeError, lambda: nvme_gpu.import_file(store, path, "0")),
        (TypeError, lambda: nvme_gpu.import_file("sim:mem", path)),
        (TypeError, lambda: nvme_gpu.import_file(store, 5)),
        (nvme_gpu.NvmeGpuError, lambda: nvme_gpu.import_file(store, "a\0b")),
        (nvme_gpu.Usage, lambda: nvme_gpu.import_file(store, tmp_path)),
        (nvme_gpu.NvmeGpuError, lambda: nvme_gpu.import_file(store, tmp_path / "missing")),
        (nvme_gpu.Usage, lambda: nvme_gpu.catalog(store)),
        (nvme_gpu.Usage, lambda: nvme_gpu.catalog(store, store.nbytes)),
        (nvme_gpu.Usage, lambda: nvme_gpu.catalog(store, store.nbytes + 1)),
        (TypeError, lambda: nvme_gpu.catalog(None)),
        (TypeError, lambda: nvme_gpu.import_file(store, path, progress=5)),
    )
    for kind, call in cases:
        with pytest.raises(kind):
            call()
    store.close()
    with pytest.raises(nvme_gpu.Usage, match="closed"):
        nvme_gpu.import_file(store, path)


@pytest.mark.parametrize("change", ["a byte more", "another file behind it", "a shorter header", "a byte less"])
def test_a_file_that_its_header_does_not_cover_has_no_catalog(store, model, tmp_path, change):
    path, _ = model
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    changed = {
        "a byte more": whole + b"x",
        "another file behind it": whole + whole,
        "a shorter header": (length - 1).to_bytes(8, "little") + whole[8:],
        "a byte less": whole[:-1],
    }[change]
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(changed)
    store.write(changed, 4096)
    with nvme_gpu.open(bad, read_only=True) as file:
        for call in (
            lambda: nvme_gpu.catalog(bad),
            lambda: nvme_gpu.catalog(file),
            lambda: nvme_gpu.catalog(file, nbytes=len(changed)),
            lambda: nvme_gpu.catalog(store, 4096, nbytes=len(changed)),
            lambda: nvme_gpu.import_file(store, bad, 1 << 20),
            lambda: nvme_gpu.write_manifest(bad, tmp_path / "manifest"),
        ):
            with pytest.raises(nvme_gpu.Usage):
                call()
    assert not (tmp_path / "manifest").exists()


def test_the_size_of_a_file_among_others_is_given(store, model, tmp_path):
    path, _ = model
    whole = path.read_bytes()
    box = tmp_path / "box"
    box.write_bytes(bytes(100) + whole + bytes(100))
    with nvme_gpu.open(box, read_only=True) as file:
        with pytest.raises(nvme_gpu.Usage, match="its header describes") as caught:
            nvme_gpu.catalog(file, 100)
        assert "size" in caught.value.remedy
        found = nvme_gpu.catalog(file, 100, nbytes=len(whole))
        assert found.nbytes == len(whole) and "norm" in found
        for size in (len(whole) - 1, len(whole) + 1, len(whole) + 101):
            with pytest.raises(nvme_gpu.Usage):
                nvme_gpu.catalog(file, 100, nbytes=size)
    with pytest.raises(nvme_gpu.Usage):
        nvme_gpu.catalog(store, nbytes=-1)


def gguf_part(number, count, tensors, total):
    """A part of a split GGUF with int8 tensors of five elements."""
    text = lambda word: len(word).to_bytes(8, "little") + word.encode()
    head = b"GGUF" + (3).to_bytes(4, "little") + len(tensors).to_bytes(8, "little") + (3).to_bytes(8, "little")
    for key, kind, value in (("split.no", 2, number), ("split.count", 2, count), ("split.tensors.count", 5, total)):
        head += text(key) + kind.to_bytes(4, "little") + value.to_bytes(2 if kind == 2 else 4, "little")
    for place, name in enumerate(tensors):
        head += text(name) + (1).to_bytes(4, "little") + (5).to_bytes(8, "little") + (24).to_bytes(4, "little") + (32 * place).to_bytes(8, "little")
    head += bytes(-len(head) % 32)
    return head + b"".join(name.encode() * 5 + bytes(27) for name in tensors)


def test_a_split_gguf_is_one_catalog_or_none(store, tmp_path):
    paths = [tmp_path / f"m-{number:05}-of-00002.gguf" for number in (1, 2)]
    paths[0].write_bytes(gguf_part(0, 2, "ab", 3))
    paths[1].write_bytes(gguf_part(1, 2, "c", 3))
    found = nvme_gpu.import_file(store, paths[0], 512)
    assert list(found) == ["a", "b", "c"] and list(found.files.values()) == [512, 512 + 4096]
    again = nvme_gpu.catalog(store, 512)
    for name in "abc":
        assert found[name].read() == again[name].read() == name.encode() * 5
    for path, words in ((paths[0], "part 2 of 2 is not at byte 4096"), (paths[1], "it is part 2 of 2")):
        with pytest.raises(nvme_gpu.Usage, match=words) as caught:
            nvme_gpu.catalog(path)
        assert "first part" in caught.value.remedy
    paths[1].unlink()
    with pytest.raises(nvme_gpu.Usage, match="1 of 2 parts are missing: m-00002-of-00002.gguf"):
        nvme_gpu.import_file(store, paths[0], 512)


def test_an_index_is_no_file_of_tensors(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {}}))
    with pytest.raises(nvme_gpu.Usage, match="a text of JSON"):
        nvme_gpu.catalog(index)


def test_packed_numbers_and_scales_have_tables(store, tmp_path):
    path = safetensors(
        tmp_path / "packed.safetensors",
        {},
        extra={
            "four": {"dtype": "F4", "shape": [2, 8], "data_offsets": [0, 8]},
            "scales": {"dtype": "F8_E8M0", "shape": [3, 2], "data_offsets": [8, 14]},
            "nothing": {"dtype": "F8_E4M3FNUZ", "shape": [2], "data_offsets": [14, 16]},
        },
    )
    path.write_bytes(path.read_bytes() + bytes(range(16)))
    found = nvme_gpu.import_file(store, path)
    # Bytes 4 to 7: two elements each, the first one in the lower half.
    assert found["four"].as_table()[[1]].tolist() == [[2, 0, 3, 0, 4, 0, 6, 0]]
    out = numpy.zeros((1, 2), "uint8")
    found["scales"].as_table().gather([2], out=out)
    assert out.tolist() == [[12, 13]]
    assert len(found["nothing"].as_table()) == 2


def test_a_store_for_reading_only_takes_no_import(tmp_path, model):
    target = tmp_path / "target"
    target.write_bytes(bytes(1 << 20))
    with nvme_gpu.open(target, read_only=True) as store:
        with pytest.raises(nvme_gpu.Usage, match="read"):
            nvme_gpu.import_file(store, model[0])
    assert target.read_bytes() == bytes(1 << 20)


@pytest.fixture
def long(tmp_path):
    path = tmp_path / "long.npy"
    numpy.save(path, numpy.frombuffer(random.Random(1).randbytes(24 << 20), "uint8").reshape(-1, 4096))
    return path


def test_what_progress_raises_ends_the_import(long):
    class Enough(Exception):
        pass

    def progress(done, total):
        assert 0 < done <= total
        raise Enough

    with nvme_gpu.open("sim:mem?size=64MiB&fault=delay:50ms@op=write,every=8") as store:
        with pytest.raises(Enough):
            nvme_gpu.import_file(store, long, progress=progress)
        drain()
        assert store.stats()["bytes"] < 2 * long.stat().st_size


def test_ctrl_c_ends_an_import(long):
    with nvme_gpu.open("sim:mem?size=64MiB&fault=delay:200ms@op=write,every=2") as store:
        interrupted(lambda: nvme_gpu.import_file(store, long))
        drain()
        assert store.stats()["bytes"] < 2 * long.stat().st_size


def test_a_file_that_changes_meanwhile_is_found(tmp_path, long):
    changed = []

    def progress(done, total):
        if not changed and done >= total // 2:
            with open(long, "r+b") as file:
                file.seek(-1, os.SEEK_END)
                last = file.read(1)
                file.seek(-1, os.SEEK_END)
                file.write(bytes([last[0] ^ 255]))
            changed.append(done)

    with nvme_gpu.open("sim:mem?size=64MiB&fault=delay:250ms@op=read,every=4") as store:
        with pytest.raises(nvme_gpu.NvmeGpuError) as caught:
            nvme_gpu.import_file(store, long, progress=progress)
    assert caught.value.code == "mismatch" and str(long) in caught.value.cause


def test_an_error_of_the_device_ends_an_import_and_spares_the_store(model):
    with nvme_gpu.open(SIM + "&fault=status:0x281@op=read,nth=1") as store:
        with pytest.raises(nvme_gpu.Status) as caught:
            nvme_gpu.import_file(store, model[0], 512)
        assert (caught.value.sct, caught.value.sc) == (2, 0x81)
        assert "norm" in nvme_gpu.import_file(store, model[0], 512)


def test_a_catalog_is_there_when_its_import_has_ended(tmp_path):
    path = tmp_path / "late.npy"
    numpy.save(path, numpy.arange(1024))

    def ask(store, saw):
        late = nvme_gpu._native.Import.of_file(store._native, path, 0, True)
        try:
            late.found()
            error = None
        except nvme_gpu.Usage as caught:
            error = caught
        saw()
        assert error is not None and "the import has not ended" in error.cause
        assert late.wait() and "late" in late.found()

    during_reads(ask, what="@op=write,nth=1")


def test_an_output_is_not_the_file_that_it_is_made_of(model, tmp_path):
    path, _ = model
    content = path.read_bytes()
    os.link(path, tmp_path / "hard")
    os.symlink(path, tmp_path / "soft")
    for out in (path, tmp_path / "hard", tmp_path / "soft", f"{tmp_path}/./{path.name}"):
        with pytest.raises(nvme_gpu.Usage, match="would be written over"):
            nvme_gpu.write_manifest(path, out)
    for name in (path, tmp_path / "hard", tmp_path / "soft"):
        with nvme_gpu.open(f"file:{name}") as store, pytest.raises(nvme_gpu.Usage, match="the file of the store itself"):
            nvme_gpu.import_file(store, path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(nvme_gpu.Usage, match="a pipe, not a regular file"):
        nvme_gpu.write_manifest(path, tmp_path / "pipe")
    assert path.read_bytes() == content
    nvme_gpu.write_manifest(path, tmp_path / "manifest")
    assert sorted(os.listdir(tmp_path)) == sorted([path.name, "hard", "soft", "pipe", "manifest"])
