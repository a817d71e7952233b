"""Bytes in and out, and what is under way."""

from __future__ import annotations

import array
import mmap
import pathlib

import pytest

import nvme_gpu
from conftest import SIM, during_reads, read_at_last


def test_any_offset_and_any_length(store):
    store.write(b"hello", 1_000_001)
    store.flush()
    assert store.read(7, 1_000_000) == b"\0hello\0"
    assert store.read(0, store.nbytes) == b""
    assert store.block_bytes in (512, 4096)


@pytest.mark.parametrize("size", [0, 1, 511, 512, 4097, 1 << 20])
def test_buffers_of_the_standard_library(store, size):
    data = bytes(index * 7 & 0xFF for index in range(size))
    store.write(memoryview(data), 77)
    for buffer in (bytearray(size), array.array("B", bytes(size)), memoryview(bytearray(size))):
        assert store.read_into(buffer, 77).result() is buffer
        assert bytes(buffer) == data


def test_a_mapped_file_is_a_buffer(store):
    mapped = mmap.mmap(-1, 8192)
    store.write(b"x" * 8192)
    store.read_into(mapped).result()
    assert mapped[:] == b"x" * 8192


def test_arrays_of_numpy_of_any_shape(store):
    numpy = pytest.importorskip("numpy")
    values = numpy.arange(24, dtype="float32").reshape(2, 3, 4)
    store.write(values, 5)
    back = numpy.zeros_like(values)
    store.read_into(back, 5).result()
    assert (back == values).all()
    halves = values.astype("float16")
    store.write(halves, 5)
    store.read_into(halves, 5).result()


def test_a_durable_write_is_there_without_a_flush(tmp_path):
    image = f"sim:{tmp_path / 'disk.img'}"
    with nvme_gpu.open(f"{image}?size=16MiB") as store:
        store.write(b"kept", 3, durable=True)
    with nvme_gpu.open(image) as store:
        assert store.read(4, 3) == b"kept"


def test_paths_of_each_kind_are_files(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    # A name that would be that of a simulated drive if it were text.
    for name in ("drive.img", "sim:mem"):
        (tmp_path / "folder" / name).write_bytes(b"bytes of a file")
    monkeypatch.chdir(tmp_path / "folder")
    for device in ("drive.img", "./drive.img", "../folder/drive.img", pathlib.Path("drive.img"), pathlib.Path("sim:mem")):
        with nvme_gpu.open(device) as store:
            assert store.read(store.nbytes) == b"bytes of a file"
    with pytest.raises(nvme_gpu.NvmeGpuError, match="No such file"):
        nvme_gpu.open(pathlib.Path("nothing.img"))
    with pytest.raises(nvme_gpu.Usage, match="names no device, and there is no such file"):
        nvme_gpu.open("nothing.img")


def test_files_are_stores(tmp_path):
    path = tmp_path / "data.bin"
    path.write_bytes(bytes(range(256)) * 64)
    with nvme_gpu.open(path, file_io="pread") as store:
        assert store.read(4, 254) == b"\xfe\xff\x00\x01"
        assert store.path["data"] == "host"
    with nvme_gpu.open(f"file:{path}") as store:
        store.write(b"new", 1)
        assert store.stats()["bytes"] > 0
    assert path.read_bytes()[:5] == b"\x00new\x04"


def test_a_store_says_what_it_is(store):
    assert repr(store).startswith("<nvme_gpu.Store 'sim:mem")
    assert store.path["device"] == SIM and store.path["why"]
    before = store.stats()
    store.read(4096)
    after = store.stats()
    assert after["commands"] > before["commands"] and after["bytes"] >= before["bytes"] + 4096
    assert not store.closed and store.gpu is None


def test_a_pending_read_is_asked_and_waited_for():
    def ask(store, saw):
        pending = store.read_into(bytearray(100), 7)
        is_done, text = pending.done(), repr(pending)
        try:
            pending.result(timeout=0.01)
            error = None
        except nvme_gpu.Timeout as caught:
            error = caught
        saw()
        assert not is_done and "under way" in text
        assert error is not None and error.code == "unfinished" and "wait again" in error.remedy
        assert isinstance(error, TimeoutError)
        assert pending.result(timeout=60) == bytearray(100)
        assert pending.done() and pending.result() == bytearray(100)

    during_reads(ask)


def test_reads_are_under_way_together():
    def read(store, saw):
        all_of_them = [store.read_into(bytearray(512), index * 4096) for index in range(8)]
        for one in all_of_them:
            one.result()
        # One after the other they take as long as eight.
        saw(8)

    during_reads(read)


def test_a_closed_store_refuses_and_closes_again():
    store = nvme_gpu.open(SIM)
    store.close()
    store.close()
    assert store.closed and "closed" in repr(store)
    for call in (lambda: store.read(1), lambda: store.write(b"x"), store.flush, store.stats, lambda: store.path):
        with pytest.raises(nvme_gpu.Usage, match="closed"):
            call()


def test_a_status_of_the_controller_has_its_codes():
    with nvme_gpu.open(SIM + "&fault=status:0x281@op=read") as store:
        with pytest.raises(nvme_gpu.Status) as caught:
            store.read(4096)
        error = caught.value
        assert (error.sct, error.sc, error.code) == (2, 0x81, "command")
        assert error.cause and error.remedy and error.row is None


def test_a_command_without_an_answer_is_a_timeout():
    with nvme_gpu.open(SIM + "&fault=drop@op=read,nth=1", timeout_ms=1000) as store:
        with pytest.raises(nvme_gpu.Timeout) as caught:
            store.read(512)
        assert caught.value.code == "timeout"
        assert read_at_last(store, 512) == bytes(512)


def test_a_device_that_leaves_is_gone():
    with nvme_gpu.open(SIM + "&fault=allones@op=read,nth=1", timeout_ms=5000) as store:
        with pytest.raises(nvme_gpu.Gone) as caught:
            store.read(512)
        assert caught.value.code == "gone" and caught.value.remedy


def test_a_failure_that_was_not_asked_for_is_logged(caplog):
    import gc

    with nvme_gpu.open(SIM + "&fault=status:0x281@op=read") as store:
        pending = store.read_into(bytearray(512))
        while not pending.done():
            pass
        del pending
        gc.collect()
    assert any("not asked for" in record.message for record in caplog.records)


def test_opening_and_closing_is_logged(caplog):
    with caplog.at_level("INFO", logger="nvme_gpu"):
        nvme_gpu.open(SIM).close()
    texts = [record.message for record in caplog.records]
    assert any(text.startswith("opened sim:") for text in texts) and any("closing" in text for text in texts)


def test_calls_that_use_the_device_are_counted(store):
    first = store.stats()["calls"]
    assert store.stats()["calls"] == first and store.nbytes and store.path and not store.closed
    store.write(b"12")
    store.read(2)
    table = store.table(0, shape=(10, 4), dtype="int32")
    opened = store.stats()["calls"]
    assert opened > first + 1
    table.gather([1, 2])
    assert store.stats()["calls"] == opened + 1
