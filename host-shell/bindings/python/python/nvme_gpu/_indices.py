"""What ``table[index]`` means: the ids of rows, as numpy has it for numbers, slices, masks and whole numbers of any size."""

from __future__ import annotations

import sys
from typing import Any

from . import _buffers
from ._errors import Usage

# Whole numbers of torch that gathers do not take; uint8 is a mask of old programs there.
_OTHER_WHOLE = ("torch.int8", "torch.int16", "torch.uint16", "torch.uint32", "torch.uint64")


def ids_of(index: Any, rows: int) -> Any:
    """The ids for :meth:`Table.gather` of ``table[index]`` in a table of ``rows`` rows.

    A tuple names several lengths in numpy and torch, of which a table has one: the rows.
    """
    if isinstance(index, tuple):
        if len(index) != 1:
            raise Usage(
                f"an index of {len(index)} parts, and a table is indexed by rows alone",
                "use table[ids] and index the result, or table.gather(ids)",
            )
        index = index[0]
    if index is None or index is ...:
        raise Usage(f"the index {index!r}", "use ids, or a slice of rows")
    # Another thread may be importing numpy just now: its names come one after the other.
    numpy = sys.modules.get("numpy")
    number: Any = getattr(numpy, "integer", ())
    array: Any = getattr(numpy, "ndarray", ())
    if isinstance(index, number):
        index = int(index)
    if isinstance(index, int) and not isinstance(index, bool):
        return index + rows if -rows <= index < 0 else index
    if _buffers.is_tensor(index):
        return _of_tensor(index, rows)
    if isinstance(index, array):
        return _of_array(numpy, index, rows)
    return index


def _of_tensor(index: Any, rows: int) -> Any:
    torch: Any = _buffers.torch()
    if index.dtype is torch.bool:
        _fits(tuple(index.shape), rows)
        return index.nonzero().squeeze(1)
    if index.dtype in (torch.int32, torch.int64):
        # Of another layout, or without data: refused where its memory is looked at.
        has_gaps = index.layout is torch.strided and not index.is_contiguous()
        return index.contiguous() if has_gaps else index
    return index.long().contiguous() if str(index.dtype) in _OTHER_WHOLE else index


def _of_array(numpy: Any, index: Any, rows: int) -> Any:
    if hasattr(index, "mask"):
        raise Usage("ids are a masked array, whose mask would be lost", "use ids.compressed()")
    if index.dtype.kind == "b":
        _fits(index.shape, rows)
        return index.nonzero()[0]
    if index.dtype.kind not in "iu":
        return index
    is_known = index.dtype.isnative and index.dtype.name in ("int32", "int64")
    # Not ascontiguousarray, which makes a list of a single number.
    return numpy.asarray(index, dtype=index.dtype if is_known else "int64", order="C")


def _fits(shape: tuple[int, ...], rows: int) -> None:
    if shape != (rows,):
        raise Usage(f"a mask of the shape {tuple(shape)} for {rows} rows", "use one truth for each row")
