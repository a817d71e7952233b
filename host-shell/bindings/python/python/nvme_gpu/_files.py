"""Files of an ext4 on a drive that no kernel mounts."""

from __future__ import annotations

import io
import json
import os
import stat as _modes
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from . import _arguments, _buffers, _native
from ._errors import Usage
from ._held import Held, OneProcess
from ._native import View
from ._store import Pending, Store, open as _open

_Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]


class FileStat(NamedTuple):
    """An inode, by the names of :class:`os.stat_result` where that has them.

    ``kind``: ``"file"``, ``"directory"``, ``"symlink"``, ``"fifo"``, ``"char-device"``, ``"block-device"`` or
    ``"socket"``. ``st_size``: bytes of data. ``flags``: names such as ``"immutable"``, ``"extents"``, ``"verity"`` and
    ``"inline_data"``. ``generation`` differs between files that had the same inode one after the other. Times are in
    nanoseconds since 1970.
    """

    kind: str
    st_mode: int
    st_ino: int
    st_size: int
    st_nlink: int
    st_uid: int
    st_gid: int
    flags: tuple[str, ...]
    generation: int
    st_mtime_ns: int
    st_ctime_ns: int


class Extent(NamedTuple):
    """Bytes of a file that lie together: ``nbytes`` bytes from byte ``logical`` of the file on lie in the store from byte
    ``place`` on. They are whole blocks of the file system, of which the last may go on past the end of the file. What was
    not ``written``, and what lies between extents, is zeros whatever the device holds."""

    logical: int
    place: int
    nbytes: int
    written: bool


class DirEntry:
    """A name in a directory with its inode. Made by :meth:`Volume.scandir`."""

    __slots__ = ("name", "path", "_stat")

    def __init__(self, name: str, path: str, found: FileStat) -> None:
        self.name = name
        self.path = path
        self._stat = found

    def stat(self) -> FileStat:
        """Its inode; of a link the link's own."""
        return self._stat

    def is_dir(self) -> bool:
        """Whether it is a directory; a link to one is none."""
        return _modes.S_ISDIR(self._stat.st_mode)

    def is_file(self) -> bool:
        """Whether it is a regular file; a link to one is none."""
        return _modes.S_ISREG(self._stat.st_mode)

    def is_symlink(self) -> bool:
        """Whether it is a symbolic link."""
        return _modes.S_ISLNK(self._stat.st_mode)

    def __repr__(self) -> str:
        return f"<nvme_gpu.DirEntry {self.name!r}, {self._stat.kind}>"


class Volume(Held):
    """The ext4 on a store, or on its partition ``part``, which no kernel mounts for writing meanwhile. It is only read.

    ``store``: a :class:`Store`; or the name of a device as for :func:`open`, where ``part=N`` among its options names a
    partition (``"vfio:0000:01:00.0?part=1"``), with the ``options`` of :func:`open`. That store is for reading only, and
    closed with the volume.

    Paths begin at the root of the file system. They are text, bytes or paths of Python; names that are no UTF-8 are
    escaped as :func:`os.fsdecode` does. Everything that the device says is checked; checksums of metadata are verified
    where the file system has them.

    Any number of threads may use it. Closing the store closes it and its files.

    Raises :class:`Usage` for a partition that is not there, :class:`NvmeGpuError` with the code ``device`` for what is no
    ext4, has features that are not read, or is damaged; what the device says.
    """

    __slots__ = ("_native", "_store", "_owns", "__weakref__")

    def __init__(self, store: Store | str | os.PathLike[str], part: int | None = None, **options: Any) -> None:
        number = None if part is None else _arguments.whole("part", part, 1, 0xFFFF_FFFF)
        self._owns = not isinstance(store, Store)
        if isinstance(store, Store):
            if options:
                raise TypeError(f"options of a store that is open already: {', '.join(options)}")
            self._store = store
        else:
            found = _native.location(f"{os.fspath(store)}:/")
            if found is None:
                raise Usage(f"{os.fspath(store)!r} names no device", "name one as for nvme_gpu.open")
            device, named, _ = found
            if named is not None and number is not None:
                raise Usage("the partition is named twice", "leave part= out of the device, or the argument")
            number = named if number is None else number
            self._store = _open(device, **{"read_only": True, **options})
        try:
            self._native = _native.Volume(self._store._native, number)
        except BaseException:
            if self._owns:
                self._store.close()
            raise

    @property
    def store(self) -> Store:
        """The store in which it lies."""
        return self._store

    @property
    def info(self) -> dict[str, Any]:
        """What the file system says of itself: ``label``, ``uuid``, ``block_bytes``, ``blocks``, ``inodes``,
        ``has_checksums``, ``has_errors``; ``damage``: what is wrong with the first partition table, if that at the end of
        the drive was used, else None."""
        found: dict[str, Any] = json.loads(self._native.info())
        return found

    def stat(self, path: _Path, *, follow_symlinks: bool = True) -> FileStat:
        """The inode that ``path`` names.

        Raises :class:`NotFound`; :class:`Usage` for a path through what is no directory, and for links without an end.
        """
        return _stat(self._native.stat(os.fsencode(path), _arguments.flag("follow_symlinks", follow_symlinks)))

    def exists(self, path: _Path) -> bool:
        """Whether ``path`` names something; False for a link to nothing."""
        try:
            self.stat(path)
        except FileNotFoundError:
            return False
        return True

    def listdir(self, path: _Path = "/") -> list[str]:
        """The names in a directory, sorted by their bytes, without ``.`` and ``..``.

        Raises as :meth:`stat`; :class:`Usage` for what is no directory.
        """
        return [os.fsdecode(name) for name, _ in self._native.entries(os.fsencode(path))]

    def scandir(self, path: _Path = "/") -> Iterator[DirEntry]:
        """The names in a directory with their inodes, as :meth:`listdir` sorts them.

        Raises as :meth:`listdir`.
        """
        folder = os.fsdecode(path).rstrip("/")
        found = self._native.entries(os.fsencode(path))
        names = ((os.fsdecode(name), about) for name, about in found)
        return (DirEntry(name, f"{folder}/{name}", _stat(about)) for name, about in names)

    def readlink(self, path: _Path) -> str:
        """The target of a symbolic link.

        Raises as :meth:`stat`; :class:`Usage` for what is no link.
        """
        return os.fsdecode(self._native.read_link(os.fsencode(path)))

    def open(self, path: _Path) -> DriveFile:
        """The file at ``path``. Links are followed.

        Raises as :meth:`stat`; :class:`Usage` for what is no regular file, and for one that is encrypted, compressed, or
        has a block map of ext2 in place of extents.
        """
        return DriveFile(self, path)

    def read(self, path: _Path, offset: int = 0, nbytes: int | None = None) -> bytes:
        """``nbytes`` bytes of a file from byte ``offset`` on, all that follow with None; fewer at its end.

        Raises as :meth:`open`; :class:`NvmeGpuError` with the code ``mismatch`` if the file's inode changed meanwhile.
        """
        with self.open(path) as file:
            data = file.pread(file.nbytes if nbytes is None else nbytes, offset)
            file.check_unchanged()
            return data

    def extents(self, path: _Path) -> list[Extent]:
        """Where the data of a file lie: :meth:`DriveFile.extents`."""
        with self.open(path) as file:
            return file.extents()

    def close(self) -> None:
        """Lets go of the store, and closes it if the volume opened it. Files of the volume stay open until the store is
        closed."""
        self._native.close()
        if self._owns:
            self._store.close()

    def __repr__(self) -> str:
        return f"<nvme_gpu.Volume on {self._store!r}>"


class DriveFile(OneProcess, io.RawIOBase):
    """A file of a :class:`Volume`, opened for reading: a binary file of Python without a buffer. Made by
    :meth:`Volume.open`.

    ``read``, ``readinto``, ``seek``, ``tell`` and the others are those of :class:`io.RawIOBase`; for many short reads put
    it into an :class:`io.BufferedReader`. :meth:`pread` needs no position, and any number of threads may use it. Catalogs,
    tables and loaders of a file that is closed stay until the store is closed.
    """

    def __init__(self, volume: Volume, path: _Path) -> None:
        super().__init__()
        self._store = volume.store
        self._path = os.fsdecode(path)
        self._at = 0
        self._native = volume._native.open(volume.store._native, os.fsencode(path))
        self._stat = _stat(self._native.stat())

    @property
    def name(self) -> str:
        """Its path."""
        return self._path

    @property
    def store(self) -> Store:
        """The store in which it lies."""
        return self._store

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return self._stat.st_size

    def stat(self) -> FileStat:
        """Its inode as it was when it was opened."""
        return self._stat

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """The byte with which the next read begins."""
        self._check_open()
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Sets where the next read begins, counted from the begin, from here, or from the end (``whence`` 0, 1, 2)."""
        self._check_open()
        if whence not in (io.SEEK_SET, io.SEEK_CUR, io.SEEK_END):
            raise Usage(f"whence is {whence!r}", "use io.SEEK_SET, io.SEEK_CUR or io.SEEK_END")
        origin = (0, self._at, self.nbytes)[whence]
        moved = _arguments.whole("offset", offset, -(1 << 63), (1 << 63) - 1)
        self._at = _arguments.whole("the position", origin + moved, 0, (1 << 63) - 1)
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        """Fills ``buffer``, writable memory of the host, from the position on; how many bytes, 0 at the end."""
        whole = memoryview(buffer)
        nbytes = min(whole.nbytes, max(self.nbytes - self._at, 0))
        if nbytes:
            self._fill(_buffers.view(whole.cast("B")[:nbytes], "buffer", writable=True), self._at)
        self._at += nbytes
        return nbytes

    def readall(self) -> bytes:
        """What follows the position."""
        data = self.pread(max(self.nbytes - self._at, 0), self._at)
        self._at += len(data)
        return data

    def pread(self, nbytes: int, offset: int) -> bytes:
        """``nbytes`` bytes from byte ``offset`` on, fewer at the end of the file. The position stays."""
        offset = _arguments.whole("offset", offset, 0, (1 << 64) - 1)
        left = max(self.nbytes - offset, 0)
        view, data = View.of_new_bytes(min(_arguments.whole("nbytes", nbytes, 0, sys.maxsize), left))
        self._fill(view, offset)
        return data

    def extents(self) -> list[Extent]:
        """Where its data lie in the store, in the order of the file.

        Raises :class:`Usage` for a small file whose data lie in its inode.
        """
        self._check_open()
        return [Extent(*one) for one in self._native.extents()]

    def pieces(self, offset: int, nbytes: int) -> list[tuple[int, int]]:
        """Where ``nbytes`` bytes from byte ``offset`` of the file on lie: first byte in the store, and bytes, of each
        piece.

        Raises :class:`Usage` for bytes in a hole, or past the end.
        """
        self._check_open()
        most = (1 << 64) - 1
        first = _arguments.whole("offset", offset, 0, most)
        return self._native.pieces(first, _arguments.whole("nbytes", nbytes, 0, most))

    def check_unchanged(self) -> None:
        """Raises :class:`NvmeGpuError` with the code ``mismatch`` if the file's inode is not what it was when the file was
        opened."""
        self._check_open()
        self._native.check_unchanged()

    def _check_open(self) -> None:
        if self.closed:
            raise Usage(f"{self._path} is closed", "open it again, or close it later")

    def _fill(self, view: View, offset: int) -> None:
        self._check_open()
        if view.nbytes:
            Pending(self._native.read(view, offset), None).result()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.nbytes} bytes"
        return f"<nvme_gpu.DriveFile {self._path!r}, {state}>"


class MountedFile(DriveFile):
    """An immutable file of an ext4 that the kernel has mounted, by the places of its data on the block device.

    ``path``: of this machine. The file must be immutable (``chattr +i``), so that the kernel neither writes it nor moves
    its blocks; Linux 6.0 or newer. ``store``: one that has the bytes of the block device, or with ``part`` of the whole
    drive: a drive that is reached another way than by its mounted block device, which :func:`open` refuses, or the image
    behind a loop device.

    Its methods are those of :class:`DriveFile`, and it goes where that does: :func:`catalog`, :class:`LayerLoader`.
    ``pread`` and reads by position check after each read that the file is what it was. Tables and loaders do not: call
    :meth:`check_unchanged` before you use what they read, as root can take the flag away.

    Raises :class:`Usage` for what is no regular file, lies on no ext4 or is not immutable, for a file of which some bytes
    are not on the device as they are in the file, and for a store with another file system; :class:`NotFound`;
    :class:`NvmeGpuError` with the code ``mismatch`` for a file that changes meanwhile.
    """

    def __init__(self, path: str | os.PathLike[str], store: Store, part: int | None = None) -> None:
        io.RawIOBase.__init__(self)
        if not isinstance(store, Store):
            raise TypeError(f"store is of the type {type(store).__name__}: pass a nvme_gpu.Store")
        self._store = store
        self._path = os.path.abspath(os.fspath(path))
        self._at = 0
        number = None if part is None else _arguments.whole("part", part, 1, 0xFFFF_FFFF)
        self._native = _native.DriveFile.mounted(store._native, self._path, number)
        self._stat = _stat(self._native.stat())

    def _fill(self, view: View, offset: int) -> None:
        super()._fill(view, offset)
        self._native.check_unchanged()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.nbytes} bytes"
        return f"<nvme_gpu.MountedFile {self._path!r}, {state}>"


class LocalFile:
    """A file of this machine by the store ``file:PATH``, for what reads those of volumes, too."""

    def __init__(self, path: str, options: Mapping[str, Any]) -> None:
        self.store = _open(f"file:{path}", **{**options, "read_only": True})
        self.nbytes = self.store.nbytes

    def pieces(self, offset: int, nbytes: int) -> list[tuple[int, int]]:
        """All of it in one piece."""
        return [(offset, nbytes)]

    def check_unchanged(self) -> None:
        """A file that is written meanwhile gives old and new bytes, as with any reader."""

    def close(self) -> None:
        """Closes its store."""
        self.store.close()


def _stat(found: _native._About) -> FileStat:
    kind, mode, number, nbytes, links, uid, gid, flags, generation, modified, changed = found
    nanoseconds = [seconds * 1_000_000_000 + rest for seconds, rest in (modified, changed)]
    return FileStat(kind, mode, number, nbytes, links, uid, gid, tuple(flags), generation, *nanoseconds)
