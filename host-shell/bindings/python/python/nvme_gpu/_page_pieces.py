"""Pages in memory of a GPU as pieces: tensors of any stride, and several tensors that are one page."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from . import _buffers
from ._errors import Usage
from ._gathers import after_current, same_gpu
from ._native import View

Pieces = list[tuple[int, int]]
MOST_PIECES = 1 << 16
"""Pieces of one page: more are elements apart, and should be copied first."""


def is_of_gpu(page: Any) -> bool:
    """Whether a page lies in memory of a GPU: a tensor, an array, or a list or tuple of them."""
    if isinstance(page, (list, tuple)):
        # Parts are memory: a list in a list, which may contain itself, is none.
        return bool(page) and not isinstance(page[0], (list, tuple)) and is_of_gpu(page[0])
    return _buffers.is_of_gpu(page, "a page")


def of_pages(pages: Sequence[Any], store: Any, stream: int, writable: bool) -> tuple[list[View], list[Pieces]]:
    """Views that keep the memory of ``pages``, and the pieces of each, for the GPU of ``store``, a native one."""
    views: list[View] = []
    found: list[Pieces] = []
    for page in pages:
        parts = page if isinstance(page, (list, tuple)) else (page,)
        pieces: Pieces = []
        for part in parts:
            if not is_of_gpu(part):
                raise Usage(
                    "a page lies in memory of the host, and another one in that of a GPU", "pass one kind a call"
                )
            view, more = _of_part(part, store, stream, writable)
            same_gpu(store.gpu_index, view.device, "a page")
            after_current(store, part, stream)
            views.append(view)
            pieces += more
            if len(pieces) > MOST_PIECES:
                raise Usage(
                    f"a page lies in more than {MOST_PIECES} pieces",
                    "copy it to a contiguous tensor: page.contiguous()",
                )
        found.append(pieces)
    return views, found


def _of_part(part: Any, store: Any, stream: int, writable: bool) -> tuple[View, Pieces]:
    if _buffers.is_tensor(part) and not part.is_contiguous():
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
    device = (_buffers.CUDA, tensor.device.index or 0)
    return View.raw(tensor, start, 0, (0,), "uint8", device, False), pieces
