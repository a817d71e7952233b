"""cuFile over its stand-in: which way a file takes, what is said where it is refused, and what it reads."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import pytest

import nvme_gpu
from conftest import stand_in

pytestmark = pytest.mark.skipif(not stand_in(), reason="the stand-in of CUDA is not here")

BYTES = 1 << 20


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "data"
    data = random.Random(5).randbytes(BYTES)
    path.write_bytes(data)
    return f"file:{path}", data


def read(store, offset, nbytes, stream=None):
    """Bytes of the store by way of memory of the GPU."""
    array = nvme_gpu.Array((nbytes,), "uint8", 1, store._native)
    pending = store.read_into(array, offset, stream=stream)
    return pending.result().tobytes(), pending


@pytest.mark.parametrize("answer,way", [("", "direct"), ("p2pdma", "p2pdma"), ("compat", "compat"), ("short", "direct")])
def test_the_path_says_which_way_a_file_takes(file, monkeypatch, answer, way):
    name, data = file
    monkeypatch.setenv("FAKE_CUFILE", answer)
    with nvme_gpu.open(name, gpu=0, gds="require") as store:
        assert f"cuFile ({way})" in store.path["path"]
        before = store.stats()["commands"]
        for offset, nbytes in ((0, BYTES), (12_345, 54_321), (BYTES - 1, 1)):
            found, pending = read(store, offset, nbytes)
            assert found == data[offset : offset + nbytes] and pending.done()
        assert store.stats()["commands"] == before, "no read of our own"
        assert bytes(store.table(0, shape=(BYTES // 512, 512), dtype="uint8").gather([3])) == data[3 * 512 : 4 * 512]


def test_without_it_cufile_is_not_used(file, monkeypatch):
    name, data = file
    monkeypatch.setenv("FAKE_CUFILE", "failing:5030")
    with nvme_gpu.open(name, gpu=0) as store:
        assert "cuFile" not in store.path["path"] + store.path["why"]
        assert read(store, 7, 5000)[0] == data[7:5007]


@pytest.mark.parametrize("number", [5008, 5027, 5030])
def test_a_file_that_is_refused_is_read_our_own_way_or_not_opened(file, monkeypatch, number):
    name, data = file
    monkeypatch.setenv("FAKE_CUFILE", f"unregistered:{number}")
    with nvme_gpu.open(name, gpu=0, gds="auto") as store:
        assert str(number) in store.path["why"] and "cuFile (" not in store.path["path"]
        assert read(store, 4096, 4096)[0] == data[4096:8192]
    with pytest.raises(nvme_gpu.NvmeGpuError) as caught:
        nvme_gpu.open(name, gpu=0, gds="require")
    assert str(number) in caught.value.cause and caught.value.remedy and caught.value.code == "environment"


@pytest.mark.parametrize("answer,number", [("failing:5030", "5030"), ("aligned", "5022")])
def test_a_read_that_is_refused_goes_our_own_way_or_raises(file, monkeypatch, answer, number):
    name, data = file
    monkeypatch.setenv("FAKE_CUFILE", answer)
    with nvme_gpu.open(name, gpu=0, gds="auto") as store:
        assert read(store, 5, 4096)[0] == data[5:4101]
    with nvme_gpu.open(name, gpu=0, gds="require") as store:
        with pytest.raises(nvme_gpu.NvmeGpuError, match=number):
            read(store, 5, 4096)
        # Memory of the host is not cuFile's.
        assert store.read(4096, 5) == data[5:4101]


def test_an_error_of_the_file_ends_the_read(file, monkeypatch):
    name, _ = file
    monkeypatch.setenv("FAKE_CUFILE", "errno")
    with nvme_gpu.open(name, gpu=0, gds="auto") as store:
        with pytest.raises(nvme_gpu.NvmeGpuError, match="Input/output error"):
            read(store, 0, 4096)


def test_what_cannot_be_asked_for_is_typed(file):
    name, _ = file
    with pytest.raises(nvme_gpu.Usage, match="gds is 'frob'"):
        nvme_gpu.open(name, gpu=0, gds="frob")
    with pytest.raises(nvme_gpu.Usage, match="has no GPU"):
        nvme_gpu.open(name, gds="require")
    with pytest.raises(nvme_gpu.Usage, match="for files"):
        nvme_gpu.open("sim:mem?size=1MiB&queues=32", gpu=0, gds="require")
    with nvme_gpu.open("sim:mem?size=1MiB&queues=32", gpu=0, gds="auto") as store:
        store.write(b"abc" * 1000)
        assert read(store, 3, 300)[0] == b"abc" * 100
    with nvme_gpu.open(name, gpu=0, gds="auto") as store, pytest.raises(nvme_gpu.Usage):
        read(store, BYTES, 1)


@pytest.mark.parametrize("answer,status,text", [("", "ok", "answered 0"), ("unopened:5007", "warning", "5007")])
def test_the_doctor_says_what_cufile_answers(monkeypatch, answer, status, text):
    monkeypatch.setenv("FAKE_CUFILE", answer)
    words = [sys.executable, "-m", "nvme_gpu", "doctor", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    one = next(one for one in json.loads(done.stdout)["findings"] if one["check"] == "cuFile")
    assert one["status"] == status and text in one["text"] and "libcufile.so.0" in one["text"] and one["remedy"]
