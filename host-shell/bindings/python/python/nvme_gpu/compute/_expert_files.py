"""The experts of published files: where each lies, what it holds, and its bytes, without repacking the files."""

from __future__ import annotations

import os
import re
from typing import Any, Literal, NamedTuple

from .. import _buffers, _native
from .._catalog import Catalog
from .._errors import Usage
from .._files import DriveFile, Volume
from .._held import Held, OneProcess
from .._lookup_table import _of_index
from .._store import Store, open as _open
from . import _tensors as t

Which = Literal["gate", "up", "gate_up", "down"]


class ExpertPart(NamedTuple):
    """A tensor of an expert, or its part of a tensor of all experts."""

    matrix: str
    """``"gate"``, ``"up"``, ``"gate_up"`` or ``"down"``."""
    role: str
    """``"weight"``, ``"packed_weight"`` or ``"weight_blocks"``; ``"scale"``, ``"global_scale"``, ``"global_divisor"``,
    ``"zero_point"``, ``"group_index"``, ``"packed_shape"``, ``"bias"`` or ``"input_scale"``."""
    tensor: str
    """Its name in the file."""
    dtype: str
    """As :attr:`Entry.dtype`."""
    shape: tuple[int, ...]
    """Of this expert's part."""
    nbytes: int
    at: int
    """Its first byte in the memory of the expert."""
    is_scalar: bool
    """A single number, which a program keeps in memory."""


class ExpertRead(NamedTuple):
    """A range of the store that is read at once."""

    offset: int
    """First byte in the store."""
    nbytes: int
    at: int
    """First byte in the memory of the expert."""


class ExpertMatrix(NamedTuple):
    """How a matrix is stored."""

    matrix: str
    format: str
    """The name of a dtype, or of elements with their scales; ``"unknown: ..."`` for bytes that are listed only."""
    shape: tuple[int, int]
    """Rows and columns in elements; 0 columns if the format does not say how many."""
    is_transposed: bool
    """Rows of the file are columns of the matrix."""
    is_interleaved: bool
    """Rows of gate and up take turns, as in gpt-oss."""


class ExpertLayout(OneProcess):
    """The experts of a layer. Made by :meth:`ExpertFiles.layout` and :func:`expert_layout`; ``len`` is their number."""

    __slots__ = ("_store", "_native", "_owned", "_about")

    def __init__(self, store: Store, native: _native.ExpertLayout, owned: ExpertFiles | None = None) -> None:
        self._store, self._native, self._owned = store, native, owned
        self._about = native.about()

    @property
    def store(self) -> Store:
        """The store that reads them."""
        return self._store

    @property
    def name(self) -> str:
        """The name under which they lie in the files, as ``"model.layers.3.mlp.experts"``."""
        return self._about[0]

    @property
    def layer(self) -> int | None:
        """The number of the layer; None for a draft block."""
        return self._about[1]

    def __len__(self) -> int:
        return self._about[2]

    @property
    def width(self) -> int:
        """Elements of a token's vector; 0 if no format says how many."""
        return self._about[3]

    @property
    def hidden(self) -> int:
        """Rows of gate and up."""
        return self._about[4]

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that hold any one of the experts."""
        return self._about[5]

    def parts(self, expert: int) -> list[ExpertPart]:
        """The tensors of an expert, or its parts of those of all."""
        found = self._native.parts(self._number(expert))
        return [ExpertPart(*one[:4], tuple(one[4]), *one[5:]) for one in found]

    def nbytes(self, expert: int) -> int:
        """Bytes of all parts of an expert."""
        return sum(part.nbytes for part in self.parts(expert))

    def matrices(self, expert: int) -> list[ExpertMatrix]:
        """How the matrices of an expert are stored: types may differ between layers, matrices and experts."""
        return [ExpertMatrix(*one) for one in self._native.matrices(self._number(expert))]

    def reads(self, expert: int, *, scalars: bool = True) -> list[ExpertRead]:
        """The ranges of the store that fetch an expert, neighbours as one. Without ``scalars`` those of single numbers are
        left out, which lie behind all others in memory."""
        reads, of_scalars, _ = self._native.reads(self._number(expert))
        return [ExpertRead(*one) for one in reads + (of_scalars if scalars else [])]

    def read(self, expert: int, out: Any = None) -> Any:
        """The memory of an expert: ``out``, or a new bytearray. ``out`` is writable memory of the host, of as many bytes as
        :meth:`reads` fill. Waits for the bytes.

        Raises :class:`Usage` for memory of another size, and what the device says.
        """
        number = self._number(expert)
        memory = bytearray(self._native.reads(number)[2]) if out is None else out
        t.run(self._native.read(_buffers.view(memory, "out", writable=True), number))
        return memory

    def tensors(self, expert: int) -> dict[str, bytes]:
        """The bytes of each part of an expert by the name of its tensor. Waits for them."""
        memory = memoryview(self.read(expert))
        return {part.tensor: bytes(memory[part.at : part.at + part.nbytes]) for part in self.parts(expert)}

    def unpack(self, expert: int, matrix: Which, out: Any = None, *, memory: Any = None) -> Any:
        """A matrix of an expert as float32 of the shape ``(rows, columns)``: ``out``, or a new array. Gate and up are also
        those rows of a matrix that has both. ``memory``: what :meth:`read` returned; else it is read.

        Raises :class:`Usage` for a matrix that is not there and a format with which nothing computes here.
        """
        number = self._number(expert)
        shape = self._native.unpacked_shape(number, str(matrix))
        if out is None:
            import numpy

            out = numpy.empty(shape, numpy.float32)
        y = t.operand(out, "out", ("float32",), writable=True)
        t.shaped(y, "out", shape)
        bytes_ = self.read(number) if memory is None else memory
        view = _buffers.view(bytes_, "memory", writable=False)
        t.run(self._native.unpack(view, y.view, number, str(matrix)))
        return out

    def close(self) -> None:
        """Closes the files if :func:`expert_layout` opened them."""
        if self._owned is not None:
            self._owned.close()

    def __enter__(self) -> ExpertLayout:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    def _number(expert: int) -> int:
        return t.whole("expert", expert, 0, (1 << 32) - 1)

    def __repr__(self) -> str:
        return f"<nvme_gpu.compute.ExpertLayout {self.name!r}, {len(self)} experts of {self.width} x {self.hidden}>"


class ExpertFiles(Held):
    """The files of a model with experts. Only headers are read.

    ``source``: as for :meth:`nvme_gpu.Store.lookup_table`: a path of this machine, that of an index of safetensors
    (``.json``) or of the first part of a split GGUF, which stand for all their files; ``DEVICE:/path`` in an ext4 on a drive,
    where the first part stands for all, too; a file of a :class:`Volume` or a :class:`MountedFile`; a :class:`Store` or
    :class:`Catalog`; or several paths or files. Paths are opened for reading only, with the ``options`` of :func:`open`.

    Raises :class:`Usage` for files of no known format, parts of a split GGUF that are missing or in another order, and files
    that are shorter or longer than their headers say.
    """

    __slots__ = ("_store", "_native", "_owned", "_of_drive")

    def __init__(self, source: Any, **options: Any) -> None:
        self._owned: Store | Volume | None = None
        self._of_drive: list[_native.DriveFile] = []
        is_one = isinstance(source, (str, os.PathLike, Store, Catalog, DriveFile))
        sources: list[Any] = [source] if is_one else list(source)
        if not sources:
            raise Usage("no files are named", "name one or more")
        try:
            if all(isinstance(one, (str, os.PathLike)) for one in sources):
                self._of_paths([os.fspath(one) for one in sources], options)
            elif options:
                raise TypeError(f"options of what is open already: {', '.join(options)}")
            else:
                self._of_open(sources)
        except BaseException:
            if self._owned is not None:
                self._owned.close()
            raise

    def _of_paths(self, named: list[str], options: dict[str, Any]) -> None:
        places = [_native.location(path) for path in named]
        if all(place is None for place in places):
            # A first part stands for the others where they are not named.
            paths = _of_this_machine(named[0]) if len(named) == 1 else [path for one in named for path in _of_index(one)]
            if any("|" in path for path in paths):
                raise Usage("a path has the character '|'", "name it by a link without")
            device = f"file:{paths[0]}" if len(paths) == 1 else "joined:" + "|".join(f"file:{path}" for path in paths)
            store = _open(device, **{"read_only": True, **options})
            self._owned = store
            self._in_store(store, paths)
            return
        on_drive = [place for place in places if place is not None]
        if len(on_drive) < len(places) or len({place[:2] for place in on_drive}) > 1:
            raise Usage("the files lie on several devices", "name files of one drive")
        device, part, _ = on_drive[0]
        volume = Volume(device, part, **options)
        self._owned = volume
        on_volume = [path for _, _, path in on_drive]
        files = [volume.open(path) for path in (_parts_of(on_volume[0]) if len(on_volume) == 1 else on_volume)]
        self._of_files(files)

    def _of_open(self, sources: list[Any]) -> None:
        files = [one._file if isinstance(one, Catalog) else one for one in sources]
        if all(isinstance(one, (DriveFile, _native.DriveFile)) for one in files):
            if len({id(one.store) for one in sources}) > 1:
                raise Usage("the files lie in several stores", "name files of one drive")
            self._of_files(files, sources[0].store)
        elif len(sources) > 1:
            raise Usage("several sources are named", "name paths, files of one drive, or one store or catalog")
        elif isinstance(sources[0], Catalog):
            found = sources[0]
            begins = found.files or {"the store": found._begin}
            regions: list[tuple[str, int, int | None]] = [(name, begin, None) for name, begin in begins.items()]
            self._store = found.store
            self._native = _native.ExpertFiles.of_regions(self._store._native, regions)
        elif isinstance(sources[0], Store):
            self._in_store(sources[0], None)
        else:
            raise TypeError(f"a source is of the type {type(sources[0]).__name__}: pass paths, files, a store or a catalog")

    def _in_store(self, store: Store, paths: list[str] | None) -> None:
        self._store = store
        members = store._native.member_offsets()
        if paths is None and len(members) == 1:
            self._native = _native.ExpertFiles.in_store(store._native, 0, None)
            return
        names = store._device.removeprefix("joined:").split("|") if paths is None else paths
        # A file of this machine ends where its member does, one on a drive where its header says.
        regions = [
            (name, first, nbytes if os.path.isfile(name.removeprefix("file:")) else None)
            for name, (first, nbytes) in zip(names, members)
        ]
        self._native = _native.ExpertFiles.of_regions(store._native, regions)

    def _of_files(self, files: list[Any], store: Store | None = None) -> None:
        self._store = files[0].store if store is None else store
        native = [one._native if isinstance(one, DriveFile) else one for one in files]
        self._native = _native.ExpertFiles.of_drive(self._store._native, native)
        self._of_drive = native

    def _check_unchanged(self) -> None:
        """Raises :class:`NvmeGpuError` with the code ``mismatch`` if the inode of a file on a drive is not what it was."""
        for file in self._of_drive:
            file.check_unchanged()

    @property
    def store(self) -> Store:
        """The store that reads the files."""
        return self._store

    @property
    def layers(self) -> list[int]:
        """The numbers of the layers that have experts."""
        return self._native.layers()

    @property
    def names(self) -> list[str]:
        """The names under which experts lie in the files: those of layers, and those of draft blocks."""
        return self._native.names()

    def layout(self, layer: int | str) -> ExpertLayout:
        """The experts of a layer by its number, or by one of :attr:`names`.

        Raises :class:`Usage`, with the name, for experts or tensors that are missing, there twice, or of a shape that does
        not fit, and for tensors whose meaning is not known.
        """
        return self._layout(layer, None)

    def _layout(self, layer: int | str, owned: ExpertFiles | None) -> ExpertLayout:
        store = self._store._native
        if isinstance(layer, str):
            native = self._native.named(store, layer)
        else:
            native = self._native.layer(store, t.whole("layer", layer, 0, (1 << 32) - 1))
        return ExpertLayout(self._store, native, owned)

    def close(self) -> None:
        """Lets go of the files; closes the store if this opened it."""
        self._native.close()
        if self._owned is not None:
            self._owned.close()

    def __repr__(self) -> str:
        return f"<nvme_gpu.compute.ExpertFiles with experts under {len(self.names)} names>"


def expert_layout(source: Any, layer: int | str, **options: Any) -> ExpertLayout:
    """The experts of a layer in published files. As ``ExpertFiles(source, **options).layout(layer)``; closing the layout
    closes the files."""
    files = ExpertFiles(source, **options)
    try:
        return files._layout(layer, files)
    except BaseException:
        files.close()
        raise


def _of_this_machine(path: str) -> list[str]:
    """The files for which a path stands."""
    if path.endswith(".json") or not _is_first(path):
        return _of_index(path)
    found = _native.files_of_set(path)
    return [path] if found is None else [os.fspath(one) for one in found]


_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


def _is_first(path: str) -> bool:
    found = _PART.fullmatch(path)
    return found is not None and int(found[2]) == 1 and int(found[3]) > 1


def _parts_of(path: str) -> list[str]:
    """The parts of a split GGUF on a drive, by the name of the first one."""
    found = _PART.fullmatch(path)
    if found is None or not _is_first(path):
        return [path]
    stem, _, count = found.groups()
    return [f"{stem}-{number + 1:05}-of-{count}.gguf" for number in range(int(count))]
