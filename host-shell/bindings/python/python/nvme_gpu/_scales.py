"""Scales that lie apart from the rows whose elements they multiply."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _buffers, _dtypes
from ._errors import Usage
from ._gathers import OnError

if TYPE_CHECKING:
    from . import _native
    from ._catalog import Entry
    from ._store import Store


class RowConversion(NamedTuple):
    """What gathers make of stored rows, as :meth:`Store.table` has it."""

    to: Any = None
    scales: Any = None
    factor: Any = 1.0
    over: Any = 1.0
    on_error: OnError = "raise"

    @property
    def has_scales(self) -> bool:
        return self.scales is not None or self.factor != 1.0 or self.over != 1.0


def scaled(store: Store, native: _native.Table, shape: tuple[int, int], result: RowConversion) -> _native.Table:
    """``native``, of ``shape`` rows and elements of a row, with its elements multiplied."""
    scales = result.scales
    times, divisor = _number("factor", result.factor), _number("over", result.over)
    if times != 1.0 and divisor != 1.0:
        raise Usage("factor and over are both given", "use the one that the file's format has")
    divides = divisor != 1.0
    number = divisor if divides else times
    if scales is None:
        return native.scaled(None, number, divides)
    if isinstance(scales, (int, float)):
        if number != 1.0:
            raise Usage("one number for the table has a factor", "pass their product as scales")
        return native.scaled(None, _number("scales", scales), False)
    memory = scales.memory if isinstance(scales, LoadedScales) else scales
    view = _buffers.view(memory, "scales", writable=False, store=store._native)
    name = _dtypes.name_of(scales.dtype) if hasattr(scales, "dtype") else _dtypes.of_format(view.dtype)
    rows, elements = shape
    found = view.nbytes // _dtypes.SIZES[name][0]
    groups = found // rows if rows else 1
    given = view.shape
    # Memory of one dimension says no shape: bytes, or numbers row by row.
    is_other = len(given) > 1 and given[0] != rows
    if groups == 0 or groups * rows != found or elements % groups or is_other:
        raise Usage(
            f"{found} scales of the shape {tuple(given)} are not as many for each of {rows} rows of {elements} elements",
            "pass scales of the shape (rows, groups)",
        )
    return native.scaled((name, elements // groups, view), number, divides)


def _number(what: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise Usage(f"{what} is {value!r}", "pass a number") from None


def number_of(what: str, value: Any, find: Callable[[str], list[Entry]]) -> Any:
    """``value``, or the number of the tensor that it names."""
    if not isinstance(value, str):
        return value
    found = find(value)
    if len(found) != 1:
        raise Usage(f"{what}: {value!r} names {len(found)} tensors", "name a tensor of one float32")
    tensor = found[0]
    if tensor.nbytes != 4 or tensor.dtype != "float32":
        raise Usage(f"{what}: {value!r} is {tensor.dtype} of the shape {tensor.shape}", "name a tensor of one float32")
    return memoryview(tensor.read()).cast("f")[0]


def read_scales(value: Any, find: Callable[[str], list[Entry]], rows: list[int]) -> Any:
    """``value``, or what lies in the tensors that it names: one number, or memory of the GPU that gathers, or of the host.

    ``rows``: how many each tensor of the table has. Raises :class:`Usage` for tensors of scales with others.
    """
    if not isinstance(value, str):
        return value
    tensors = find(value)
    first = tensors[0]
    for tensor in tensors:
        if tensor.dtype != first.dtype or tensor.shape[1:] != first.shape[1:]:
            raise Usage(f"the scales {tensor.name!r} and {first.name!r} have other dtypes or rows", "name those of one table")
    if len(tensors) == 1 and first.nbytes == 4 and first.dtype == "float32":
        return number_of("scales", value, find)
    counts = [sum(tensor.shape[:1]) for tensor in tensors]
    # Scales may lie in other shards than their rows.
    if counts != rows if len(counts) == len(rows) else sum(counts) != sum(rows):
        if len(counts) != len(rows):
            raise Usage(
                f"{len(counts)} tensors of scales have {sum(counts)} rows, and their table {sum(rows)}",
                "name the scales of all of its rows",
            )
        at = next(at for at, (one, other) in enumerate(zip(counts, rows)) if one != other)
        raise Usage(
            f"the scales {tensors[at].name!r} have the shape {tensors[at].shape}, and their table {rows[at]} rows",
            "name scales of the shape (rows, groups)",
        )
    store, total = first._store, sum(tensor.nbytes for tensor in tensors)
    into: Any = bytearray(total)
    torch = _buffers.torch()
    if store.path["data"] == "gpu":
        if torch is None:
            raise Usage("scales for rows that a GPU gathers need torch", "pip install torch, or pass scales= in its memory")
        into = torch.empty(total, dtype=torch.uint8, device=f"cuda:{store.gpu}")
    at = 0
    for tensor in tensors:
        for place, nbytes in tensor.pieces:
            part = into[at : at + nbytes] if _buffers.is_tensor(into) else memoryview(into)[at : at + nbytes]
            store.read_into(part, place).result()
            at += nbytes
    return LoadedScales(into, first.dtype)


class LoadedScales:
    """Bytes of scales with their dtype."""

    __slots__ = ("memory", "dtype")

    def __init__(self, memory: Any, dtype: str) -> None:
        self.memory, self.dtype = memory, dtype
