"""Layers of a model that are read while others are used."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from . import _arguments, _buffers, _dtypes, _native
from ._catalog import Catalog, Entry
from ._errors import Usage
from ._gathers import same_gpu
from ._held import Held, OneProcess
from ._store import Store

Layers = Sequence[str] | Mapping[str, Sequence[str]] | None


class LayerLoader(Held):
    """Reads layers of a model into slots of memory ahead of their use.

    ``with loader.layer(i) as w:`` gives layer ``i``: ``w`` maps the names of its tensors to arrays, tensors of torch where
    torch is loaded. The layers that come next are read meanwhile.

    ``catalog``: of :func:`catalog` or :func:`import_file`; a file of a drive's ext4 may lie in several extents, which are
    read one by one. ``device``: where layers lie, ``"cpu"``, ``"cuda"``,
    ``"cuda:0"`` or a device of torch; None: the store's GPU if it has one, else the host.

    ``layers``: None: a layer for each number in the tensors' names, as in ``model.layers.7.`` and ``blk.7.``; a list of
    prefixes of names, each a layer; or a mapping of a name to the names of its tensors.

    ``slots``: how many layers memory holds at a time, besides those that stay: 2 reads one ahead of the one in use.
    ``ahead``: how many are read ahead at most. ``resident``: layers that stay once they are loaded: a list of their
    numbers, or bytes into which the first ones have to fit. ``order``: ``"sequential"``, from the first to the last and
    again; ``"learned"``, as in the first pass, which ends when its first layer is asked for again; or a list of numbers.

    ``manifest``: a path of what ``nvme-gpu manifest`` made of the catalog's file. Each tensor is compared with it where it
    was loaded, on the GPU by a kernel before the layer is there; other bytes are an error with the code ``mismatch``, which
    names the layer and the place in the file.

    On a GPU nothing waits: the current stream of torch, or ``stream``, waits by an event until the layer is there, and
    the slot is read into again when the stream has come to the end of the ``with``. A read that fails is known when it
    has ended: the next call for a layer, :meth:`check` or :meth:`Layer.check` raises it, and what was computed from that
    layer on is wrong: call :meth:`check` before a result is used. In memory of the host ``with`` waits until the layer
    is there, and raises. After an error the layer is read again when it is asked for again.

    Any number of threads may use it. It belongs to the process that made it. Closing the store ends it.

    Raises :class:`Usage` for layers, slots or an order that cannot be, and for a manifest of another file;
    :class:`NvmeGpuError` without memory, and with the code ``mismatch`` where the file begins otherwise than its manifest.
    """

    __slots__ = ("_native", "_store", "_names", "_layers", "_places_of", "_entries", "__weakref__")

    def __init__(
        self,
        catalog: Mapping[str, Entry],
        device: Any = None,
        *,
        layers: Layers = None,
        slots: int = 2,
        ahead: int | None = None,
        resident: int | Iterable[int] = 0,
        order: Literal["sequential", "learned"] | Iterable[int] = "sequential",
        manifest: str | os.PathLike[str] | None = None,
    ) -> None:
        if not isinstance(catalog, Catalog):
            raise TypeError(f"catalog is of the type {type(catalog).__name__}: use nvme_gpu.catalog(store)")
        store = catalog.store
        self._store: Store = store
        self._entries = dict(catalog)
        places = [(name, entry.offset, entry.nbytes) for name, entry in self._entries.items()]
        self._native = _native.LayerLoader(
            store._native,
            places,
            catalog._file,
            _which(layers),
            _arguments.whole("slots", slots, 1, 1 << 20),
            None if ahead is None else _arguments.whole("ahead", ahead, 0, 1 << 20),
            _stay(resident),
            _order(order),
            _on_gpu(device, store),
            None if manifest is None else (os.fspath(manifest), catalog._begin),
        )
        self._layers = self._native.layers()
        self._names = {name: index for index, (name, _, _) in enumerate(self._layers)}
        self._places_of: dict[int, dict[str, tuple[int, int]]] = {}

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the layers: the beginnings of their tensors' names."""
        return tuple(name for name, _, _ in self._layers)

    @property
    def path(self) -> dict[str, Any]:
        """Where layers lie and what brings them: ``device``, ``memory`` (``host`` or ``gpu``), ``mover``, ``slots``,
        ``slot_bytes``, ``resident``, ``resident_bytes``, ``verified_by`` (``host`` or ``gpu``, None without a manifest)."""
        found: dict[str, Any] = json.loads(self._native.path())
        return found

    def stats(self) -> dict[str, int]:
        """Counts: layers ``asked`` for, how many of them were ``ready`` or under way, ``reads`` of layers that were
        started, their ``bytes``, and how many of those a manifest has, ``verified``."""
        found: dict[str, int] = json.loads(self._native.stats())
        return found

    def layer(self, layer: int | str, *, stream: Any = None) -> Layer:
        """Layer ``layer``, a number or a name, for use in a ``with``.

        ``stream``: on a GPU, what uses the layer: None is the current stream of torch where torch uses the GPU, else the
        default one. It must not be captured.

        Entering raises :class:`Usage` when all slots are held, and what the device says, with the layer's name.
        """
        if isinstance(layer, str):
            if layer not in self._names:
                raise Usage(f"there is no layer {layer!r}", "use one of names, or a number")
            index = self._names[layer]
        else:
            index = _arguments.whole("layer", layer, 0, len(self._layers) - 1)
        return Layer(self, index, stream)

    def _places(self, layer: int) -> dict[str, tuple[int, int]]:
        """Where the tensors of a layer lie in its memory, and their bytes, by their names."""
        if layer not in self._places_of:
            self._places_of[layer] = {name: (at, nbytes) for name, at, nbytes in self._layers[layer][2]}
        return self._places_of[layer]

    def check(self, timeout: float | None = None) -> None:
        """Waits until all layers that were given out are there, ``timeout`` seconds at most, and raises the first error.

        On the host they are. Raises :class:`Timeout` when they are not there in time.
        """
        self._native.check(timeout)

    def close(self) -> None:
        """Waits for reads under way, and lets go of the store. Arrays that were given out stay."""
        self._native.close()

    def __repr__(self) -> str:
        return f"<nvme_gpu.LayerLoader of {len(self)} layers, {self.path['slots']} slots, {self.path['memory']}>"


class Layer(OneProcess, Mapping[str, Any]):
    """The tensors of a layer by name, whole or without the layer's name before it. Made by :meth:`LayerLoader.layer`.

    Arrays lie in the layer's slot, without a copy: the slot is held until the ``with`` has ended and the last of them is
    gone. They are tensors of torch where torch is loaded, on the host else arrays of numpy, and on a GPU else objects with
    ``__cuda_array_interface__``. A dtype that the library lacks, such as the blocks of GGUF, comes as uint8, with bytes
    along the last length; where rows end inside a byte, as of an odd number of F4, with all bytes along one length.
    """

    __slots__ = ("_loader", "_index", "_stream", "_native", "_found", "_whole")

    def __init__(self, loader: LayerLoader, index: int, stream: Any) -> None:
        self._loader = loader
        self._index = index
        self._stream = stream
        self._native: _native.Layer | None = None
        self._found: dict[str, Any] = {}
        self._whole: Any = None

    def __enter__(self) -> Layer:
        if self._native is not None:
            raise Usage("the layer is in use already", "ask the loader for it again")
        on_gpu = self._loader.path["memory"] == "gpu"
        number = _buffers.stream_of(self._stream, self._loader._store.gpu) if on_gpu or self._stream is not None else 0
        self._native = self._loader._native.layer(self._index, number)
        self._whole = _bytes_of(self._native, self._loader._store.gpu, number)
        return self

    def __exit__(self, *_: object) -> None:
        self._found.clear()
        self._native = self._whole = None

    @property
    def index(self) -> int:
        """Its number."""
        return self._index

    @property
    def name(self) -> str:
        """Its name."""
        return self._loader._layers[self._index][0]

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""
        return self._loader._layers[self._index][1]

    def check(self, timeout: float | None = None) -> None:
        """Waits until it is there, ``timeout`` seconds at most, and raises why it is not. On the host it is."""
        self._used().wait(timeout)

    def __getitem__(self, name: str) -> Any:
        native = self._used()
        places = self._loader._places(self._index)
        for whole in (name, self.name + name):
            if whole in self._found:
                return self._found[whole]
            if whole in places:
                entry = self._loader._entries[whole]
                made = _array(self._whole, native, *places[whole], entry.dtype, entry.shape)
                self._found[whole] = made
                return made
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (name for name, _, _ in self._loader._layers[self._index][2])

    def __len__(self) -> int:
        return len(self._loader._layers[self._index][2])

    def _used(self) -> _native.Layer:
        if self._native is None:
            raise Usage(f"layer {self._index} is not in use", "use it inside of its `with`")
        return self._native

    def __repr__(self) -> str:
        state = "not in use" if self._native is None else f"{self.nbytes} bytes"
        return f"<nvme_gpu.Layer {self._index} {self.name!r}, {state}>"


class CudaArray:
    """Memory of a layer on a GPU: cupy, numba and torch take it by ``__cuda_array_interface__``."""

    __slots__ = ("_owner", "_address", "_shape", "_dtype", "_stream", "_typestr")

    def __init__(
        self, owner: _native.Layer, address: int, shape: tuple[int, ...], dtype: str, typestr: str, stream: int
    ) -> None:
        self._owner, self._address, self._stream = owner, address, stream
        self._shape, self._dtype, self._typestr = shape, dtype, typestr

    @property
    def shape(self) -> tuple[int, ...]:
        """Its lengths."""
        return self._shape

    @property
    def dtype(self) -> str:
        """The name of its dtype."""
        return self._dtype

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self._shape,
            "typestr": self._typestr,
            "data": (self._address, True),
            "strides": None,
            # The layer's stream waits for it; 0 is not a stream of this interface, 1 is the default one.
            "stream": self._stream or 1,
            "version": 3,
        }


_TYPESTR = {"bool": "|b1", "int8": "|i1", "uint8": "|u1"}
_KINDS = {"i": "int", "u": "uint", "f": "float", "c": "complex"}


def _typestr(name: str) -> str | None:
    if name in _TYPESTR:
        return _TYPESTR[name]
    for letter, kind in _KINDS.items():
        if name.startswith(kind) and name[len(kind) :].isdigit():
            return f"<{letter}{int(name[len(kind) :]) // 8}"
    return None


def _bytes_of(native: _native.Layer, gpu: int | None, stream: int) -> Any:
    """All bytes of a layer as the library has them that makes its arrays."""
    torch = _buffers.torch()
    nbytes = native.nbytes
    if native.is_on_gpu:
        array = CudaArray(native, native.address, (nbytes,), "uint8", "|u1", stream)
        if torch is None or not nbytes:
            return array
        # The interface names no producer's stream here: the layer's own waits already.
        return torch.as_tensor(_Unordered(array), device=f"cuda:{gpu}")
    memory = (ctypes.c_char * nbytes).from_address(native.address) if nbytes else bytearray()
    if nbytes:
        memory._layer = native  # type: ignore[union-attr]
    if torch is not None:
        return torch.frombuffer(memory, dtype=torch.uint8) if nbytes else torch.empty(0, dtype=torch.uint8)
    numpy = _buffers.numpy()
    if numpy is None:
        return memoryview(memory).cast("B")
    whole = numpy.frombuffer(memory, dtype="uint8")
    whole.flags.writeable = False
    return whole


class _Unordered:
    """A CudaArray without a stream to wait for."""

    __slots__ = ("_array",)

    def __init__(self, array: CudaArray) -> None:
        self._array = array

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        found = dict(self._array.__cuda_array_interface__)
        found["data"] = (found["data"][0], False)
        return found | {"stream": None}


def _array(whole: Any, native: _native.Layer, at: int, nbytes: int, dtype: str, shape: tuple[int, ...]) -> Any:
    """The tensor at byte ``at`` of a layer."""
    if isinstance(whole, CudaArray):
        typestr = _typestr(dtype)
        if typestr is None:
            shape, dtype, typestr = _in_bytes(shape, nbytes), "uint8", "|u1"
        return CudaArray(native, whole._address + at, shape, dtype, typestr, whole._stream)
    part = whole[at : at + nbytes]
    if isinstance(part, memoryview):
        fmt: Any = _dtypes.SIZES.get(dtype, (1, None))[1]
        if fmt is None or not nbytes:
            return part
        return part.cast(fmt, list(shape)) if shape else part.cast(fmt)
    if _buffers.is_tensor(part):
        kind = getattr(_buffers.torch(), dtype, None)
        if kind is None:
            return part.view(_in_bytes(shape, nbytes))
        if dtype == "float4_e2m1fn_x2":
            # An element of torch is a pair of the file's.
            return part.view(_in_bytes(shape, nbytes)).view(kind)
        return part.view(kind).view(shape) if nbytes else part.new_empty(shape, dtype=kind)
    numpy = _buffers.numpy()
    assert numpy is not None
    if not hasattr(numpy, "bool_" if dtype == "bool" else dtype):
        return part.reshape(_in_bytes(shape, nbytes))
    return part.view(dtype).reshape(shape)


def _in_bytes(shape: tuple[int, ...], nbytes: int) -> tuple[int, ...]:
    """The shape of bytes in place of elements along the last length; one length where rows end inside a byte."""
    rows = 1
    for one in shape[:-1]:
        rows *= one
    if rows and nbytes % rows:
        return (nbytes,)
    return (*shape[:-1], nbytes // rows) if rows else (*shape[:-1], 0)


def _which(layers: Any) -> list[str] | list[tuple[str, list[str]]] | None:
    if layers is None:
        return None
    if isinstance(layers, str):
        raise TypeError("layers is one text: pass a list of prefixes")
    if isinstance(layers, Mapping):
        return [(str(name), [str(one) for one in tensors]) for name, tensors in layers.items()]
    found = list(layers)
    for one in found:
        if not isinstance(one, str):
            raise TypeError(f"a layer of the type {type(one).__name__}: pass prefixes, or a mapping of names to lists")
    return found


def _stay(resident: Any) -> int | list[int]:
    if hasattr(resident, "__iter__"):
        return [_arguments.whole("a resident layer", one, 0, 1 << 32) for one in resident]
    return _arguments.whole("resident", resident, 0, (1 << 63) - 1)


def _order(order: Any) -> list[int] | None:
    if isinstance(order, str):
        if order not in ("sequential", "learned"):
            raise Usage(f"order is {order!r}", "use 'sequential', 'learned', or a list of numbers")
        return None if order == "sequential" else []
    found = [_arguments.whole("a layer of the order", one, 0, 1 << 32) for one in order]
    if not found:
        raise Usage("the order has no layers", "name them, or leave the order out")
    return found


def _on_gpu(device: Any, store: Store) -> bool | None:
    """Whether layers lie on the store's GPU; None where the store decides."""
    if device is None:
        return None
    is_gpu, number = _arguments.device(device)
    if number is not None:
        same_gpu(store.gpu, (_buffers.CUDA, number), "device")
    return is_gpu
