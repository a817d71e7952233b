"""Pages in memory of a GPU as pieces: tensors of any stride, and several tensors that are one page."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any, Union

from . import _buffers
from ._errors import Usage
from ._gathers import after_current, same_gpu
from ._native import View

Pieces = list[tuple[int, int]]
BlockPart = tuple[list[tuple[int, Pieces]], list[int], list[int]]
Part = Union[Pieces, BlockPart]
MOST_PIECES = 1 << 16
"""Pieces of one page: more are elements apart, and should be copied first."""


class PageBlocks:
    """Pages that are blocks of tensors of a GPU, as those of an engine's cache: the call costs less than with a view of each.

    Page ``n`` is the block ``blocks[n]`` of each tensor, or the blocks of a sequence ``blocks[n]``, one after the other: of each
    block the bytes of the first tensor, then those of the next. ``axis`` is the dimension in which all tensors count their
    blocks. None stands for a block that a load reads and leaves out.

    Raises :class:`Usage` for tensors of the host or of several GPUs, and IndexError for a block that is not there.
    """

    __slots__ = ("tensors", "axis", "_blocks", "_counts")

    def __init__(self, tensors: Any, blocks: Iterable[int | None | Sequence[int | None]], axis: int = 0) -> None:
        self.tensors = tuple(tensors) if isinstance(tensors, (list, tuple)) else (tensors,)
        if not self.tensors or not all(_buffers.is_tensor(one) and one.is_cuda for one in self.tensors):
            raise Usage("blocks are those of tensors of a GPU", "pass tensors of torch on a GPU, or a view of each block")
        if len({one.device for one in self.tensors}) > 1:
            raise Usage("the tensors of a page lie on several GPUs", "use those of one GPU")
        if any(not -one.dim() <= axis < one.dim() for one in self.tensors):
            raise Usage(f"axis is {axis}", "use the dimension of the blocks of all tensors")
        self.axis = axis
        # The blocks of all pages, and how many each page has.
        self._blocks: list[int | None] = []
        self._counts: list[int] = []
        for one in blocks:
            # Arrays of numpy and torch have __index__, whatever their shape.
            if one is None or isinstance(one, int) or (hasattr(one, "__index__") and not getattr(one, "ndim", 0)):
                one = (one,)  # type: ignore[assignment]
            before = len(self._blocks)
            self._blocks += [block if block is None else operator.index(block) for block in one]  # type: ignore[union-attr]
            self._counts.append(len(self._blocks) - before)

    def __len__(self) -> int:
        return len(self._counts)

    def of_pages(self, writable: bool) -> tuple[list[View], list[Part]]:
        """Views that keep the memory, and the pieces of the pages."""
        views: list[View] = []
        of_block: list[tuple[int, Pieces]] = []
        counts: set[int] = set()
        for tensor in self.tensors:
            if writable:
                _buffers.will_change(tensor)
            counts.add(tensor.shape[self.axis])
            step = tensor.stride(self.axis) * tensor.element_size()
            first = tensor.select(self.axis, 0) if tensor.shape[self.axis] else tensor
            view, pieces = _of_strided(first) if tensor.numel() else (_view_of(first), [])
            views.append(view)
            of_block.append((step, pieces))
        least = min(counts)
        given = [block for block in self._blocks if block is not None]
        if given and not 0 <= min(given) <= max(given) < least:
            wrong = next(block for block in given if not 0 <= block < least)
            raise IndexError(f"block {wrong} of {least}")
        if max(self._counts, default=0) * sum(len(pieces) for _, pieces in of_block) > MOST_PIECES:
            raise Usage(f"a page lies in more than {MOST_PIECES} pieces", "use blocks with fewer gaps")
        if len(given) == len(self._blocks):
            return views, [(of_block, given, self._counts)]
        spare = [*self._spare(sum(nbytes for _, pieces in of_block for _, nbytes in pieces), writable, views)]
        found: list[Part] = []
        blocks = iter(self._blocks)
        for count in self._counts:
            page: Pieces = []
            for block in itertools.islice(blocks, count):
                if block is None:
                    page += spare.pop()
                    continue
                for step, pieces in of_block:
                    page += [(address + block * step, run) for address, run in pieces]
            found.append(page)
        return views, found

    def _spare(self, nbytes: int, writable: bool, views: list[View]) -> Iterable[Pieces]:
        """Memory for the blocks that a load leaves out, apart from each other."""
        missing = self._blocks.count(None)
        if not missing or not nbytes:
            return [[] for _ in range(missing)]
        if not writable:
            raise Usage("a page has a block that is None", "store whole pages")
        memory = self.tensors[0].new_empty(missing * nbytes, dtype=_torch().uint8)
        views.append(_view_of(memory))
        return [[(memory.data_ptr() + number * nbytes, nbytes)] for number in range(missing)]


def _torch() -> Any:
    return _buffers.torch()


def _view_of(tensor: Any) -> View:
    device = (_buffers.CUDA, tensor.device.index or 0)
    return View.raw(tensor, tensor.data_ptr(), 0, (0,), "uint8", device, False)


def is_of_gpu(page: Any) -> bool:
    """Whether a page lies in memory of a GPU: a tensor, an array, a list or tuple of them, or blocks."""
    if isinstance(page, PageBlocks):
        return True
    if isinstance(page, (list, tuple)):
        # Parts are memory: a list in a list, which may contain itself, is none.
        return bool(page) and not isinstance(page[0], (list, tuple)) and is_of_gpu(page[0])
    return _buffers.is_of_gpu(page, "a page")


def of_pages(pages: Sequence[Any], store: Any, stream: int, writable: bool) -> tuple[list[View], list[Part]]:
    """Views that keep the memory of ``pages``, and their pieces, for the GPU of ``store``, a native one."""
    views: list[View] = []
    found: list[Part] = []
    ordered = False
    for page in pages:
        blocks = isinstance(page, PageBlocks)
        parts = page.tensors if blocks else page if isinstance(page, (list, tuple)) else (page,)
        pieces: Pieces = []
        for part in parts:
            if not is_of_gpu(part):
                raise Usage(
                    "a page lies in memory of the host, and another one in that of a GPU", "pass one kind a call"
                )
            if _buffers.is_tensor(part):
                same_gpu(store.gpu_index, (_buffers.CUDA, part.device.index or 0), "a page")
                if not ordered:
                    # One wait for all tensors: torch has one current stream for them.
                    after_current(store, part, stream)
                    ordered = True
            if blocks:
                continue
            view, more = _of_part(part, store, stream, writable)
            same_gpu(store.gpu_index, view.device, "a page")
            views.append(view)
            pieces += more
            if len(pieces) > MOST_PIECES:
                raise Usage(
                    f"a page lies in more than {MOST_PIECES} pieces",
                    "copy it to a contiguous tensor: page.contiguous()",
                )
        if blocks:
            more_views, of_blocks = page.of_pages(writable)
            views += more_views
            found += of_blocks
        else:
            found.append(pieces)
    return views, found


def _of_part(part: Any, store: Any, stream: int, writable: bool) -> tuple[View, Pieces]:
    if _buffers.is_tensor(part) and not part.is_contiguous():
        if writable:
            _buffers.will_change(part)
        return _of_strided(part)
    view = _buffers.view(part, "a page", writable=writable, store=store, stream=stream)
    return view, [(view.address, view.nbytes)] if view.nbytes else []


def _of_strided(tensor: Any) -> tuple[View, Pieces]:
    _buffers.check_resolved(tensor, "a page")
    size, run = tensor.element_size(), tensor.element_size()
    shape, strides = tuple(tensor.shape), [stride * size for stride in tensor.stride()]
    outer = len(shape)
    while outer and (shape[outer - 1] == 1 or strides[outer - 1] == run):
        outer -= 1
        run *= shape[outer]
    count = math.prod(shape[:outer])
    if count > MOST_PIECES:
        raise Usage(f"a page lies in {count} pieces", "copy it to a contiguous tensor: page.contiguous()")
    start = tensor.data_ptr()
    steps = ([stride * index for index in range(length)] for length, stride in zip(shape[:outer], strides[:outer]))
    pieces = [(start + sum(at), run) for at in itertools.product(*steps)] if run else []
    return _view_of(tensor), pieces
