"""One table over many tensors: shards of a lookup table in the files of a checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from typing import Any

from . import _dtypes, _native, _scales
from ._catalog import Catalog, Entry, catalog, table_of
from ._errors import Usage
from ._files import DriveFile, Volume
from ._gathers import OnError
from ._scales import RowConversion
from ._store import Store, open as _open
from ._table import Table

_Source = "Store | Catalog | DriveFile | str | os.PathLike[str]"


def lookup_table(
    source: Store | Catalog | DriveFile | str | os.PathLike[str] | Sequence[Any],
    names: str | Iterable[str],
    *,
    shape: Any = None,
    dtype: Any = None,
    to: Any = None,
    stored: str | None = None,
    scales: Any = None,
    factor: Any = 1.0,
    over: Any = 1.0,
    on_error: OnError = "raise",
    **options: Any,
) -> Table:
    """The table of the rows of several tensors, one tensor after the other, read from where they lie in their files:
    nothing is copied. Row ``r`` of shards with ``n`` rows each is row ``r % n`` of shard ``r // n``.

    ``source``: files of safetensors, GGUF or ``.npy``: a path of this machine, or that of an index (``.json``), which stands
    for all files that it names; ``DEVICE:/path`` of a file in an ext4 on a drive; a file of a :class:`Volume` or a
    :class:`MountedFile`; a :class:`Store` in which files lie, each at the beginning of a member of ``joined:``; a
    :class:`Catalog`; or several of one of these. Files of one drive may lie in any number of extents.

    ``names``: the tensors, in the order of the rows. One name, or a name with ``{}`` for the numbers 0, 1, 2 and so on, as in
    ``"model.embedding.shard_{}.weight"``. ``shape``: the shape that the table must have, ``(rows, *row)``. ``dtype``: the
    dtype that its tensors must have. ``to``, ``scales``, ``factor``, ``over`` and ``on_error``: as for :meth:`Store.table`; the three
    before the last may name tensors of the same files, which are read to memory whole: the scales in the order of the rows (``{}`` as above),
    the others one float32. ``stored``: what tensors of bytes hold, ``"float4_e2m1fn_x2"`` or another of the blocks that
    :meth:`Store.table` has; ``shape`` is that of their elements. Paths are opened for reading only, with the
    ``options`` of :func:`open`; ``gpu=0`` is for a GPU that gathers. Closing the table's store closes them.

    Only headers are read. Raises :class:`Usage` for a tensor that is in no file, in two, or named twice; for a number that is
    missing among the shards; for tensors whose rows have other shapes or dtypes, and for other ones than ``shape`` and
    ``dtype`` say; for a file that is shorter or longer than its header says, and as :func:`catalog` and
    :meth:`Store.table`.
    """
    catalogs, owned = _catalogs(source, options)
    try:
        result = RowConversion(to, scales, factor, over, on_error)
        return _of_catalogs(catalogs, names, (shape, dtype, stored), result)
    except BaseException:
        if owned is not None:
            owned.close()
        raise


def _of_catalogs(
    catalogs: list[Catalog],
    names: str | Iterable[str],
    wanted: tuple[Any, Any, str | None],
    result: RowConversion,
) -> Table:
    shape, dtype, stored = wanted
    found: dict[str, Entry] = {}
    for one in catalogs:
        for name, entry in one.items():
            if name in found:
                raise Usage(f"the tensor {name!r} is in two of the files", "name the files of one checkpoint, each once")
            found[name] = entry
    tensors = [_named(found, name) for name in _names(found, names)]
    first = tensors[0]
    for tensor in tensors:
        tensor._check_table()
        if tensor.dtype != first.dtype:
            raise Usage(
                f"{tensor.name!r} is of the dtype {tensor.dtype}, {first.name!r} of {first.dtype}",
                "name tensors of one dtype",
            )
        if tensor.shape[1:] != first.shape[1:]:
            raise Usage(
                f"the rows of {tensor.name!r} have the shape {tensor.shape[1:]}, those of {first.name!r} {first.shape[1:]}",
                "name tensors of one table",
            )
        if tensor._store is not first._store:
            raise Usage(
                f"{tensor.name!r} and {first.name!r} lie in two stores", "open both as one store: joined:DEVICE|DEVICE"
            )
    row, kind = first.shape[1:], first.dtype
    if stored is not None:
        row, kind = _unpacked(first, stored), stored
    rows = (sum(tensor.shape[0] for tensor in tensors), *row)
    if shape is not None and tuple(shape) != rows:
        raise Usage(f"the tensors have the shape {rows}, not {tuple(shape)}", "check names= and shape=")
    if dtype is not None and _stored_name(dtype) != first.dtype:
        raise Usage(f"the tensors are of the dtype {first.dtype}, not {dtype}", "check names= and dtype=")

    def find(name: str) -> list[Entry]:
        return [_named(found, one) for one in _names(found, name)]

    result = result._replace(
        scales=_scales.read_scales(result.scales, find, [tensor.shape[0] for tensor in tensors]),
        factor=_scales.number_of("factor", result.factor, find),
        over=_scales.number_of("over", result.over, find),
    )
    return table_of(tensors, rows, kind, result)


def _unpacked(tensor: Entry, stored: str) -> tuple[int, ...]:
    """The shape of a row of bytes that are blocks of elements."""
    if stored not in _dtypes.BLOCKS or tensor.dtype not in ("uint8", "int8"):
        raise Usage(
            f"{tensor.name!r} is of the dtype {tensor.dtype}, and stored is {stored!r}",
            "use it for tensors of uint8 or int8, with one of " + ", ".join(_dtypes.BLOCKS),
        )
    elements, nbytes = _dtypes.BLOCKS[stored]
    *before, last = tensor.shape[1:] or (1,)
    if last % nbytes:
        raise Usage(f"rows of {last} bytes are not whole blocks of {nbytes} bytes, as {stored} has them", "check stored=")
    return (*before, last // nbytes * elements)


def _stored_name(dtype: Any) -> str:
    return dtype if isinstance(dtype, str) and dtype in _dtypes.BLOCKS else _dtypes.name_of(dtype)


def _named(found: dict[str, Entry], name: str) -> Entry:
    if name not in found:
        raise Usage(f"no file has the tensor {name!r}", "check the names, and that all files are named")
    return found[name]


def _names(found: dict[str, Entry], names: str | Iterable[str]) -> list[str]:
    """The names in the order of the rows, each once."""
    if isinstance(names, str):
        before, mark, after = names.partition("{}")
        if not mark:
            return [names]
        numbers = sorted(number for name in found if (number := _number(name, before, after)) is not None)
        missing = next((at for at, number in enumerate(numbers) if at != number), None)
        if missing is not None:
            raise Usage(
                f"no file has the tensor {before}{missing}{after}, and there is one with the number {numbers[-1]}",
                "name all files of the checkpoint",
            )
        return [f"{before}{number}{after}" for number in range(max(len(numbers), 1))]
    listed = list(names)
    if not listed:
        raise Usage("names is empty", "name one tensor or more")
    for at, name in enumerate(listed):
        if not isinstance(name, str):
            raise TypeError(f"a name is of the type {type(name).__name__}: pass texts")
        if name in listed[:at]:
            raise Usage(f"the tensor {name!r} is named twice", "name each tensor once")
    return listed


def _number(name: str, before: str, after: str) -> int | None:
    if len(name) <= len(before) + len(after) or not name.startswith(before) or not name.endswith(after):
        return None
    digits = name[len(before) : len(name) - len(after)]
    if not digits.isascii() or not digits.isdecimal() or len(digits) > 9 or digits != str(int(digits)):
        return None
    return int(digits)


def _catalogs(source: Any, options: dict[str, Any]) -> tuple[list[Catalog], Store | Volume | None]:
    """The catalogs of the files, and what was opened for them."""
    is_one = isinstance(source, (str, os.PathLike, Store, Catalog, DriveFile))
    sources: list[Any] = [source] if is_one else list(source)
    if not sources:
        raise Usage("no files are named", "name one or more")
    if not all(isinstance(one, (str, os.PathLike)) for one in sources):
        if options:
            raise TypeError(f"options of what is open already: {', '.join(options)}")
        return [found for one in sources for found in _of_open(one)], None
    paths = [path for one in sources for path in _of_index(os.fspath(one))]
    places = [_native.location(path) for path in paths]
    on_drive = [place for place in places if place is not None]
    if not on_drive:
        return _of_paths(paths, options)
    if len(on_drive) < len(paths) or len({place[:2] for place in on_drive}) > 1:
        raise Usage("the files lie on several devices", "name files of one drive, or open joined:DEVICE|DEVICE")
    device, part, _ = on_drive[0]
    volume = Volume(device, part, **options)
    try:
        return [catalog(volume.open(path)) for _, _, path in on_drive], volume
    except BaseException:
        volume.close()
        raise


def _of_open(source: Any) -> list[Catalog]:
    if isinstance(source, Catalog):
        return [source]
    if isinstance(source, DriveFile):
        return [catalog(source)]
    if not isinstance(source, Store):
        raise TypeError(f"a source is of the type {type(source).__name__}: pass stores, files, catalogs or paths alone")
    members = source._native.member_offsets()
    if len(members) == 1:
        return [catalog(source)]
    # A file of this machine ends where its member does, one on a drive where its header says.
    names = source._device.removeprefix("joined:").split("|")
    is_file = [os.path.isfile(name.removeprefix("file:")) for name in names]
    return [
        catalog(source, first, nbytes=nbytes if of_file else None)
        for (first, nbytes), of_file in zip(members, is_file)
    ]


def _of_paths(paths: list[str], options: dict[str, Any]) -> tuple[list[Catalog], Store]:
    if any("|" in path for path in paths):
        raise Usage("a path has the character '|'", "name it by a link without")
    device = f"file:{paths[0]}" if len(paths) == 1 else "joined:" + "|".join(f"file:{path}" for path in paths)
    store = _open(device, **{"read_only": True, **options})
    try:
        return _of_open(store), store
    except BaseException:
        store.close()
        raise


def _of_index(path: str) -> list[str]:
    """The files that an index names, in their order there; of another file its path."""
    if not path.endswith(".json"):
        return [path]
    if _native.location(path) is not None:
        raise Usage(f"{path} is an index on a drive", "name the files of the checkpoint")
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)["weight_map"]
        files = list(dict.fromkeys(found.values()))
        if not files or not all(isinstance(one, str) and os.path.basename(one) == one for one in files):
            raise ValueError("weight_map names no files beside the index")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Usage(f"{path} is no index of safetensors: {error}", "name an index, or the files") from error
    return [os.path.join(os.path.dirname(path), one) for one in files]
