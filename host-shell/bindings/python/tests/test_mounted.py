"""Files of an ext4 that the kernel has mounted: by an image that is mounted here, where this process may."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import nvme_gpu
from test_loaders import LAYERS, is_right, model

PATH = os.environ["PATH"] + ":/usr/sbin:/sbin"


def ran(*words, check=True):
    return subprocess.run(words, check=check, capture_output=True, env={**os.environ, "PATH": PATH}).returncode == 0


class Mounted:
    """A folder with an ext4, the image behind it, and an immutable model in it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.image = folder / "mounted", folder / "drive.img"
        self.folder.mkdir()
        ran("mke2fs", "-q", "-F", "-t", "ext4", str(self.image), "32M")
        self.is_mounted = ran("mount", "-o", "loop", str(self.image), str(self.folder), check=False)
        self.model = self.folder / "model.safetensors"
        if self.is_mounted:
            model(self.model)
            (self.folder / "sparse").write_bytes(b"begin")
            os.truncate(self.folder / "sparse", 100_000)
            for name in ("model.safetensors", "sparse"):
                ran("chattr", "+i", str(self.folder / name))
            os.sync()

    def close(self) -> None:
        if self.is_mounted:
            ran("chattr", "-i", str(self.model), check=False)
            ran("umount", str(self.folder))


@pytest.fixture
def mounted(tmp_path):
    for name in ("mke2fs", "mount", "chattr"):
        if shutil.which(name, path=PATH) is None:
            pytest.skip(f"needs {name}")
    found = Mounted(tmp_path)
    try:
        if not found.is_mounted:
            pytest.skip("no image can be mounted here: not root, or no loop device")
        yield found
    finally:
        found.close()


@pytest.fixture
def store(mounted):
    with nvme_gpu.open(f"file:{mounted.image}", read_only=True) as opened:
        yield opened


def test_files_that_may_change_are_refused(tmp_path):
    plain = tmp_path / "plain"
    plain.write_bytes(bytes(5000))
    with nvme_gpu.open("sim:mem?size=1MiB") as opened:
        for path, why in ((plain, "no ext4|not immutable"), ("/proc/self/status", "no ext4"), ("/dev/null", "not a regular")):
            with pytest.raises(nvme_gpu.Usage, match=why) as caught:
                nvme_gpu.MountedFile(path, opened)
            assert caught.value.remedy
        with pytest.raises(nvme_gpu.NotFound):
            nvme_gpu.MountedFile(tmp_path / "none", opened)
    with pytest.raises(nvme_gpu.Usage, match="closed"):
        nvme_gpu.MountedFile(plain, opened)
    with pytest.raises(TypeError, match="pass a nvme_gpu.Store"):
        nvme_gpu.MountedFile(plain, "sim:mem")


def test_a_mounted_file_is_read_from_its_places(mounted, store):
    data = mounted.model.read_bytes()
    with nvme_gpu.MountedFile(mounted.model, store) as file:
        assert file.nbytes == len(data) and file.store is store and file.name == str(mounted.model)
        assert file.read(10) == data[:10] and file.tell() == 10 and file.read() == data[10:]
        assert file.pread(100, 55) == data[55:155] and file.pread(9, len(data)) == b""
        about = file.stat()
        assert (about.kind, about.st_ino, about.flags) == ("file", os.stat(mounted.model).st_ino, ("immutable",))
        assert about.st_mode == os.stat(mounted.model).st_mode and about.st_mtime_ns == os.stat(mounted.model).st_mtime_ns
        found = b"".join(store.read(one.nbytes, one.place) for one in file.extents())
        assert found[: len(data)] == data
        assert b"".join(store.read(nbytes, place) for place, nbytes in file.pieces(7, 5000)) == data[7:5007]
        with pytest.raises(nvme_gpu.Usage):
            file.pieces(len(data), 1)
        assert "MountedFile" in repr(file)
    assert file.closed and not store.closed and "closed" in repr(file)


def test_holes_are_zeros(mounted, store):
    with nvme_gpu.MountedFile(mounted.folder / "sparse", store) as file:
        assert file.read() == b"begin" + bytes(99_995)
        with pytest.raises(nvme_gpu.Usage, match="do not all lie"):
            file.pieces(0, 100_000)


def test_tensors_and_layers_are_read_from_a_mounted_file(mounted, store):
    with nvme_gpu.MountedFile(mounted.model, store) as file:
        catalog = nvme_gpu.catalog(file)
        assert catalog.format == "safetensors"
        assert is_right(1, catalog["m.layers.1.w"].as_table()[:].tolist())
        with nvme_gpu.LayerLoader(catalog, "cpu", slots=2) as loader:
            for index in range(LAYERS):
                with loader.layer(index) as layer:
                    assert is_right(index, layer["w"].tolist())
            loader.check()
        file.check_unchanged()


def test_a_file_that_is_no_longer_immutable_is_not_read(mounted, store):
    with nvme_gpu.MountedFile(mounted.model, store) as file:
        ran("chattr", "-i", str(mounted.model))
        with pytest.raises(nvme_gpu.Usage, match="not immutable"):
            file.pread(10, 0)
        with open(mounted.model, "r+b") as changed:
            changed.write(b"other")
        ran("chattr", "+i", str(mounted.model))
        with pytest.raises(nvme_gpu.NvmeGpuError) as caught:
            file.check_unchanged()
        assert caught.value.code == "mismatch"


def test_a_store_with_another_file_system_is_refused(mounted, tmp_path):
    other = tmp_path / "other.img"
    ran("mke2fs", "-q", "-F", "-t", "ext4", str(other), "32M")
    for device in (f"file:{other}", "sim:mem?size=1MiB"):
        with nvme_gpu.open(device, read_only=True) as opened:
            with pytest.raises(nvme_gpu.Usage, match="does not hold the file system"):
                nvme_gpu.MountedFile(mounted.model, opened)
    begin = tmp_path / "begin.img"
    begin.write_bytes(mounted.image.read_bytes()[: 1 << 16])
    with nvme_gpu.open(f"file:{begin}", read_only=True) as opened:
        with pytest.raises(nvme_gpu.Usage, match="past the 65536 bytes"):
            nvme_gpu.MountedFile(mounted.model, opened)
        with pytest.raises(nvme_gpu.NvmeGpuError, match="partition"):
            nvme_gpu.MountedFile(mounted.model, opened, part=1)
