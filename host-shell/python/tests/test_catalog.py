"""Files of tensors: imported, found again, refused."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import signal
import threading
import time

import pytest

import nvme_gpu
from conftest import SIM

numpy = pytest.importorskip("numpy")

KINDS = {"bool": "BOOL", "uint8": "U8", "int16": "I16", "float16": "F16", "int32": "I32", "float32": "F32", "int64": "I64"}


def safetensors(path, tensors, metadata=None, extra=None):
    """Writes arrays as the format has it."""
    header, data = ({"__metadata__": metadata} if metadata else {}), b""
    for name, array in tensors.items():
        part = array.tobytes()
        header[name] = {
            "dtype": KINDS[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(part)],
        }
        data += part
    header.update(extra or {})
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
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
        while nvme_gpu._native.calls_under_way():
            time.sleep(0.01)
        assert store.stats()["bytes"] < 2 * long.stat().st_size


def test_ctrl_c_ends_an_import(long):
    with nvme_gpu.open("sim:mem?size=64MiB&fault=delay:200ms@op=write,every=2") as store:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            nvme_gpu.import_file(store, long)
        while nvme_gpu._native.calls_under_way():
            time.sleep(0.01)
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
