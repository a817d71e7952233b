"""Row ids of the lookup tables of language models, by hashes of tokens.

>>> from nvme_gpu import lookup
>>> tables = lookup.qwen_ple({"ple_layer_ids": [2], "vocab_size": 248320, "hidden_size": 2560, "eos_token_id": 248046})
>>> tables.layers, tables.rows(1), tables.columns
((1,), 320001446, 160)
>>> tables.row_ids(1, [9707, 11, 1879]).shape
(3, 16)

The ids select rows of a :class:`nvme_gpu.Table` that lies over the model's own file.
"""

from __future__ import annotations

import json
import os
from array import array
from typing import Any

from . import _buffers, _dtypes, _native, _ngrams
from ._errors import Usage
from ._native import View

__all__ = ["NgramTables", "engram", "qwen_ple"]


class NgramTables:
    """The hashes of a model's tables: :func:`engram`, :func:`qwen_ple`."""

    __slots__ = ("_native", "_on_gpus")

    def __init__(self, native: _native.NgramTables) -> None:
        self._native = native
        self._on_gpus: dict[tuple[int, int], _native.GpuNgrams] = {}

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that have a table, as names of tensors count them."""
        return tuple(self._native.layers)

    @property
    def columns(self) -> int:
        """Elements of a row."""
        return self._native.columns

    def rows(self, layer: int) -> int:
        """The rows that the hashes of ``layer`` select from; a file may have some more, for its shards."""
        return self._native.about(self._at(layer))[0]

    def history(self, layer: int) -> int:
        """The number of tokens before a token that its row ids depend on."""
        return self._native.about(self._at(layer))[2]

    def row_ids(
        self,
        layer: int,
        tokens: Any,
        *,
        before: Any = (),
        histories: Any = None,
        starts: Any = None,
        slots: Any = None,
        out: Any = None,
    ) -> Any:
        """int64 of the shape ``(tokens, hashes)``: the rows of ``layer`` that each of ``tokens`` selects.

        ``tokens``: one dimension of int32 or int64, or a list; -1 stands for a token of an image where the model's hashes
        stop at images. Drafts that were refused are left out of what comes before.

        On the host, ``before`` is the tokens of the sequence so far, or its last :meth:`history` ones; none for the
        beginning. Raises :class:`Usage` for a token that the model does not have; nothing is written to ``out`` then.

        On a GPU, in tensors of torch, tokens of several sequences lie one after the other. ``starts``: int32, the first
        token of each, and the end of the last one; one sequence without it. ``histories``: from :meth:`histories`, a row
        for each sequence, or the rows that ``slots``, int64, names; without it sequences begin. The kernel is put into the
        current stream, and may be captured: a graph hashes the tokens that are there when it is launched. A token that the
        model does not have, or that is in no sequence, selects row -1, which a gather reports as out of range.
        """
        at = self._at(layer)
        _, heads, history, _ = self._native.about(at)
        if _ngrams.is_on_gpu(tokens):
            if before is not None and len(before) != 0:
                raise Usage("before is given for tokens on a GPU", "use histories")
            step = _ngrams.StepTokens(tokens, history, histories, starts, slots)
            return step.row_ids(self._on_gpu(at, step.gpu), heads, out)
        _ngrams.refuse_on_host(histories=histories, starts=starts, slots=slots)
        known, wanted = _tokens(before, "before"), _tokens(tokens, "tokens")
        count = wanted.nbytes // 8
        if out is None:
            numpy = _buffers.numpy()
            out = _native.Array((count, heads), "int64", 8) if numpy is None else numpy.empty((count, heads), "int64")
        view = _buffers.view(out, "out", writable=True)
        if _dtypes.of_format(view.dtype) != "int64" or tuple(view.shape) != (count, heads):
            raise Usage(
                f"out is {_dtypes.of_format(view.dtype)} of the shape {tuple(view.shape)}",
                f"use int64 of the shape {(count, heads)}",
            )
        self._native.row_ids(at, known, wanted, view)
        return out

    def histories(self, layer: int, count: int, *, device: Any) -> Any:
        """The histories of ``count`` sequences that begin: an int64 tensor of torch of the shape ``(count, history)``."""
        torch: Any = _buffers.torch()
        _, _, history, padding = self._native.about(self._at(layer))
        return torch.full((count, history), padding, dtype=torch.int64, device=device)

    def commit(
        self, layer: int, tokens: Any, histories: Any, *, accepted: Any = None, starts: Any = None, slots: Any = None
    ) -> None:
        """Adds the tokens of a step to ``histories``, on a GPU: of each sequence the first ones, as many as ``accepted``,
        int32, says for it, or all. The other arguments are as for :meth:`row_ids`.

        Nothing waits for it, and it may be captured. A number that cannot be makes the history unknown: the n-grams that
        reach it select row -1. No two sequences may have one history. Raises :class:`Usage` for tokens on the host, whose
        ``before`` is all that there is.
        """
        at = self._at(layer)
        step = _ngrams.StepTokens(tokens, self._native.about(at)[2], histories, starts, slots)
        step.commit(self._on_gpu(at, step.gpu), accepted)

    def _on_gpu(self, at: int, gpu: int) -> _native.GpuNgrams:
        found = self._on_gpus.get((at, gpu))
        if found is None:
            # Two threads may load it; the kernels are there once, and either is right.
            found = self._on_gpus.setdefault((at, gpu), _native.GpuNgrams(self._native, at, gpu))
        return found

    def _at(self, layer: int) -> int:
        try:
            return self._native.layers.index(layer)
        except ValueError:
            raise Usage(f"layer {layer} has no lookup table", f"use one of {list(self.layers)}") from None

    def __repr__(self) -> str:
        return f"<nvme_gpu.lookup.NgramTables of the layers {list(self.layers)}>"


def engram(config: Any, tokenizer: Any) -> NgramTables:
    """The tables of DeepSeek-V4.1, "Engram".

    ``config``: the path of its config.json, or what is in it. ``tokenizer``: the path of its tokenizer.json.

    Raises :class:`Usage`, with the key, for a configuration that lacks one, has a value that cannot be, or does not fit
    the tokenizer; :class:`OSError` for a file that cannot be read.
    """
    with open(tokenizer, "rb") as file:
        return NgramTables(_native.NgramTables.engram(_text(config), file.read()))


def qwen_ple(config: Any) -> NgramTables:
    """The tables of Qwen3.8-Flash-Next.

    ``config``: the path of its config.json, or what is in it.

    Raises as :func:`engram`.
    """
    return NgramTables(_native.NgramTables.qwen_ple(_text(config)))


def _text(config: Any) -> str:
    if isinstance(config, (str, os.PathLike)):
        with open(config, encoding="utf-8") as file:
            return file.read()
    return json.dumps(config)


def _tokens(value: Any, what: str) -> View:
    if isinstance(value, (list, tuple, range)):
        flat, shape = _buffers.flattened(value)
        view = View.from_buffer(flat, False)
    else:
        view = _buffers.view(value, what, writable=False)
        shape = tuple(view.shape)
    name = _dtypes.of_format(view.dtype)
    if len(shape) != 1 or name not in ("int32", "int64"):
        raise Usage(f"{what} is {name} of the shape {shape}", "use one dimension of int32 or int64")
    if name == "int64":
        return view
    widened = array("q", memoryview(value)) if not _buffers.is_tensor(value) else value.long()
    return _buffers.view(widened, what, writable=False)
