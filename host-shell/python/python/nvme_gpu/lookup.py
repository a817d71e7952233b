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

from . import _buffers, _dtypes, _native
from ._errors import Usage
from ._native import View

__all__ = ["NgramTables", "engram", "qwen_ple"]


class NgramTables:
    """The hashes of a model's tables: :func:`engram`, :func:`qwen_ple`."""

    __slots__ = ("_native",)

    def __init__(self, native: _native.NgramTables) -> None:
        self._native = native

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

    def row_ids(self, layer: int, tokens: Any, *, before: Any = (), out: Any = None) -> Any:
        """int64 of the shape ``(tokens, hashes)``: the rows of ``layer`` that each of ``tokens`` selects.

        ``tokens``: one dimension of int32 or int64 on the host, or a list; -1 stands for a token of an image where the
        model's hashes stop at images. ``before``: the tokens of the sequence so far, or its last :meth:`history` ones;
        none for the beginning. Drafts that were refused are left out of it: nothing else is kept from call to call.

        Raises :class:`Usage` for a token that the model does not have; nothing is written to ``out`` then.
        """
        at = self._at(layer)
        _, heads, history, _ = self._native.about(at)
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
