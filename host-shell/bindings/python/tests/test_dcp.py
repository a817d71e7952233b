"""Checkpoints of torch.distributed read by this library, from a folder and from an ext4: torch's own writer and loader
where this torch has them, else the stand-in's."""

from __future__ import annotations

import io
import os
import shutil
import subprocess

import pytest

import nvme_gpu
from conftest import drain, python

torch = pytest.importorskip("torch")
import dcp_stand_in  # noqa: E402

try:
    import torch.distributed.checkpoint as real
    from torch.distributed.checkpoint.filesystem import FileSystemBase as _  # noqa: F401
    import nvme_gpu.dcp as plugin
except ImportError:
    real = None
    with dcp_stand_in.installed():
        import nvme_gpu.dcp as plugin

FAILURE = dcp_stand_in.CheckpointException if real is None else real.api.CheckpointException


def save(state, folder, **more):
    if real is None:
        dcp_stand_in.save(state, folder)
    else:
        real.save(state, storage_writer=real.FileSystemWriter(folder, thread_count=2, **more))


def load(state, reader):
    if real is None:
        dcp_stand_in.load(state, reader)
    else:
        real.load(state, storage_reader=reader)


def made(seed):
    random = torch.Generator().manual_seed(seed)
    return {
        "bias": torch.randn(9, generator=random).to(torch.bfloat16),
        "flags": torch.rand(33, generator=random) > 0.5,
        "ids": torch.randint(1 << 40, (77, 3), generator=random),
        "weight": torch.randn(300, 111, generator=random),
        "small": torch.randn((), generator=random).half(),
        "steps": 1000 + seed,
        "text": io.BytesIO(b"any object" * seed),
    }


def blank():
    return {name: torch.zeros_like(value) if torch.is_tensor(value) else None for name, value in made(0).items()}


def same(found, wanted):
    flat = lambda state: {name: value for name, value in state.items() if torch.is_tensor(value)}  # noqa: E731
    assert flat(found).keys() == flat(wanted).keys()
    for name, value in flat(wanted).items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
    assert found["steps"] == wanted["steps"] and found["text"].getvalue() == wanted["text"].getvalue()


@pytest.fixture
def folder(tmp_path):
    save(made(3), tmp_path / "checkpoint")
    yield tmp_path / "checkpoint"
    drain()


@pytest.fixture
def reads(monkeypatch):
    """Bytes of each read of a store."""
    found, before = [], nvme_gpu.Store.read_into

    def read_into(store, buf, offset=0, **more):
        found.append(len(buf))
        return before(store, buf, offset, **more)

    monkeypatch.setattr(nvme_gpu.Store, "read_into", read_into)
    return found


def failure(reader, state=None):
    """The error that loading ends with."""
    with pytest.raises(FAILURE) as caught:
        load(blank() if state is None else state, reader)
    (one,) = caught.value.failures.values()
    return one[0] if isinstance(one, tuple) else one


@pytest.mark.parametrize("ahead", [1, 256 << 20])
def test_a_checkpoint_is_read_from_a_folder(folder, monkeypatch, ahead):
    monkeypatch.setattr(plugin, "_AHEAD", ahead)
    state = blank()
    load(state, plugin.DcpReader(folder, queues=2))
    same(state, made(3))


def test_only_what_is_asked_for_is_read(folder, reads):
    state = {"bias": torch.zeros(9, dtype=torch.bfloat16)}
    load(state, plugin.DcpReader(str(folder)))
    assert torch.equal(state["bias"], made(3)["bias"])
    metadata, item = reads
    assert metadata == (folder / ".metadata").stat().st_size and item < 2500
    assert sum(one.stat().st_size for one in folder.iterdir()) > 100_000


def drive(folder):
    program = shutil.which("mke2fs", path=os.environ["PATH"] + ":/usr/sbin")
    if program is None:
        pytest.skip("needs mke2fs, of e2fsprogs")
    image = folder.parent / "drive.img"
    subprocess.run([program, "-q", "-F", "-t", "ext4", "-d", folder, image, "16M"], check=True)
    return f"sim:{image}"


def test_a_checkpoint_is_read_from_a_drive_that_no_kernel_mounts(folder):
    with nvme_gpu.Volume(drive(folder)) as volume:
        reader = plugin.DcpReader("/", volume)
        state = blank()
        load(state, reader)
        same(state, made(3))
        assert reader.fs.exists("/.metadata") and not reader.fs.exists("/none")
        assert "/.metadata" in reader.fs.ls("/")
        assert isinstance(failure(plugin.DcpReader("/none", volume)), nvme_gpu.NotFound)
        with pytest.raises(TypeError, match="open already: queues"):
            plugin.DcpReader("/", volume, queues=2)


def test_a_drive_that_fails_ends_with_its_status(folder):
    with nvme_gpu.Volume(drive(folder)) as volume:
        reader = plugin.DcpReader("/", volume)
        metadata = reader.read_metadata()
        reads = volume.store.stats()["commands"]
    assert metadata and reads
    with nvme_gpu.Volume(f"{drive(folder)}?fault=status:0x281@op=read,nth={reads + 1}-1000000") as volume:
        failed = failure(plugin.DcpReader("/", volume))
    assert isinstance(failed, nvme_gpu.Status) and failed.sc == 0x81


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_files_that_are_missing_or_cut_off_are_typed_errors(folder, name):
    with open(folder / name, "r+b") as file:
        file.truncate((folder / name).stat().st_size // 2)
    error = failure(plugin.DcpReader(folder))
    assert isinstance(error, nvme_gpu.NvmeGpuError) and error.code == "file" and name in error.cause, error
    (folder / name).unlink()
    error = failure(plugin.DcpReader(folder))
    assert isinstance(error, nvme_gpu.NotFound) and name in error.cause


def test_nothing_of_a_checkpoint_is_changed(folder):
    reader = plugin.DcpReader(folder)
    for call in (reader.fs.rename, reader.fs.mkdir, reader.fs.rm_file):
        with pytest.raises(nvme_gpu.Usage, match="write with torch's FileSystemWriter"):
            call("a", "b")
    with pytest.raises(nvme_gpu.Usage, match="mode 'wb'"), reader.fs.create_stream(folder / ".metadata", "wb"):
        pass
    assert reader.fs.exists(folder / ".metadata") and len(reader.fs.ls(folder)) == len(os.listdir(folder))
    assert plugin.DcpReader.validate_checkpoint_id(folder) and not plugin.DcpReader.validate_checkpoint_id("s3://a")


def test_ranges_are_a_file_of_python(folder):
    name = str(folder / "__0_0.distcp")
    data = (folder / "__0_0.distcp").read_bytes()
    reader = plugin.DcpReader(folder)
    file = reader.fs.open(name)
    ranges = reader.fs.fetched[name] = plugin._Ranges()
    for offset, nbytes in ((10, 20), (40, 5), (40, 5), (10, 8)):
        ranges.add(file, name, offset, nbytes)
    assert ranges.at(29).data == ranges.at(10).data and ranges.at(30) is None and ranges.at(9) is None
    with reader.fs.create_stream(name, "rb") as stream:
        assert stream.readable() and stream.seekable()
        assert stream.read(3) == b"" and stream.seek(12) == 12 and stream.read(3) == data[12:15]
        assert stream.seek(25, io.SEEK_CUR) == 40 and stream.tell() == 40 and stream.read() == data[40:45]
        with pytest.raises(nvme_gpu.Usage, match="is not read"):
            stream.seek(0, io.SEEK_END)
    with pytest.raises(nvme_gpu.NvmeGpuError, match="belongs to another checkpoint"):
        plugin._Range(file, name, len(data) - 3, 4)
    assert plugin._Range(file, name, 0, 0).wait() == b""
    file.close()


def test_without_a_new_torch_the_import_says_so():
    done = python(
        """
        import sys
        sys.modules["torch.distributed.checkpoint"] = None
        try:
            import nvme_gpu.dcp
        except ImportError as error:
            print(error)
        """
    )
    assert "torch 2.3 or newer" in done.stdout
