"""SGLang with the Engram tables of DeepSeek-V4.1 on a drive, read by the GPU.

Set ``NVME_GPU_ENGRAM`` to the checkpoint (anything that :func:`nvme_gpu.lookup_table` takes as text) and start SGLang: its plugin
loader calls :func:`register`, which puts :func:`disk_embedding`'s class in place of ``EngramEmbedding``. Without the variable
nothing changes. Instead of a path it may be a JSON object: ``source``, ``weight`` and ``scale`` (names of the tensors, with ``{}`` for
the layer), ``on_error``, and the options of :func:`nvme_gpu.open`.

Each rank reads the rows of its own tokens, so that no collective follows. Scales stay in GPU memory (3 GB a table), rows on the
drive. Small batches are asked for when their ids are known, and taken when their layer runs. Rows that could not be read are NaN
(``on_error="nan"``) and counted, so that no token is made of zeros without a word.

Written for SGLang 0.5.23; :func:`register` ends the program where the class there has another interface.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import weakref
from typing import Any, NamedTuple

from ._errors import Usage
from ._lookup_table import lookup_table
from ._prefetch import Prefetch

VARIABLE = "NVME_GPU_ENGRAM"
_ENGRAM = "sglang.srt.layers.engram"
_PARAMETERS = ["self", "num_embeddings", "dim", "layer_id", "column_bounds"]
_MOST_BEGUN = 768
"""Rows that a prefetch submits for a GPU (see :meth:`Table.prefetch`); longer batches are read when their layer runs."""


class EngramSettings(NamedTuple):
    """What :data:`VARIABLE` says."""

    source: str
    weight: str = "layers.{}.engram.embed.weight"
    scale: str = "layers.{}.engram.embed.scale"
    on_error: Any = "nan"
    options: dict[str, Any] = {}

    @classmethod
    def of_text(cls, text: str) -> EngramSettings:
        """Reads the variable's text. Raises :class:`Usage` for what is no object with a source."""
        if not text.lstrip().startswith("{"):
            return cls(text)
        try:
            found = dict(json.loads(text))
        except ValueError as error:
            raise Usage(f"{VARIABLE} is no JSON object: {error}", 'write a path, or {"source": "PATH"}') from None
        if not isinstance(found.get("source"), str):
            raise Usage(f"{VARIABLE} names no source", 'write a path, or {"source": "PATH"}')
        known = {name: found.pop(name) for name in ("source", "weight", "scale", "on_error") if name in found}
        return cls(**known, options=found)


def register() -> None:
    """The entry point of the group ``sglang.srt.plugins``.

    SGLang logs what a plugin raises and goes on, here with tables in memory that were meant for the drive. So a mistake in the
    variable, or an unknown interface, ends the program.
    """
    text = os.environ.get(VARIABLE)
    if not text:
        return
    try:
        settings = EngramSettings.of_text(text)
        engram = importlib.import_module(_ENGRAM)
        original = engram.EngramEmbedding
        parameters = list(inspect.signature(original.__init__).parameters)
        if parameters != _PARAMETERS:
            raise Usage(f"EngramEmbedding of this SGLang has the parameters {parameters}", "use SGLang 0.5.23")
        hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    except (Usage, ImportError, AttributeError) as error:
        raise SystemExit(f"nvme_gpu.sglang: {error}") from error
    hooks.HookRegistry.register(f"{_ENGRAM}.EngramEmbedding", disk_embedding(original, settings), hooks.HookType.REPLACE)
    hooks.HookRegistry.register(f"{_ENGRAM}.EngramHasher.forward", _begin, hooks.HookType.AFTER)


_EMBEDDINGS: weakref.WeakSet[Any] = weakref.WeakSet()


def _begin(hash_ids: Any, *_: Any, **__: Any) -> None:
    """Asks for the rows of a batch, ``[tokens, layers, columns]``, when its hashes are known."""
    found = sorted(_EMBEDDINGS, key=lambda one: one.layer_id)
    if len(found) != hash_ids.shape[1]:
        return
    for index, one in enumerate(found):
        one.begin(hash_ids[:, index])


class BegunRows(NamedTuple):
    """Rows that were asked for, and of which ids."""

    ids: Any
    rows: Prefetch

    def are_of(self, ids: Any) -> bool:
        """Whether they are the rows of ``ids``, by address: the layer gets the view that the rows were asked for by."""
        same_memory = ids.data_ptr() == self.ids.data_ptr()
        return bool(same_memory and ids.shape == self.ids.shape and ids.stride() == self.ids.stride())


def disk_embedding(original: type, settings: EngramSettings) -> type:
    """A class in place of SGLang's ``original``, whose rows lie where ``settings`` say."""
    torch = importlib.import_module("torch")

    class DiskEngramEmbedding(original):
        """One layer's table on a drive; :meth:`forward` returns bf16 rows as the original does, bit by bit."""

        def __init__(self, num_embeddings: int, dim: int, layer_id: int, column_bounds: tuple[int, ...]) -> None:
            torch.nn.Module.__init__(self)
            self.dim, self.layer_id = dim, layer_id
            # One shard that has all rows, whatever the number of ranks.
            self.tp_size, self.row_start, self.rows = 1, 0, num_embeddings
            self.host_table = self.peer = None
            self._sort_host_reads = self.staged_by_scheduler = False
            self._begun: BegunRows | None = None
            nothing = torch.empty(0)
            options = dict(settings.options)
            if nothing.is_cuda:
                options.setdefault("gpu", nothing.device.index)
            self.table = lookup_table(
                settings.source,
                settings.weight.format(layer_id),
                shape=(num_embeddings, dim),
                to="bfloat16",
                scales=settings.scale.format(layer_id),
                on_error=settings.on_error,
                **options,
            )
            for name in ("weight", "scale"):
                parameter = torch.nn.Parameter(nothing, requires_grad=False)
                parameter.weight_loader = self._load_nothing
                setattr(self, name, parameter)
            _EMBEDDINGS.add(self)

        def _load_nothing(self, _: Any, loaded: Any) -> None:
            """Leaves a table where it is; one of another number of rows is another checkpoint's."""
            if loaded.shape[0] != self.rows:
                raise Usage(
                    f"layer {self.layer_id}: the checkpoint has {loaded.shape[0]} rows, {settings.source} {self.rows}",
                    f"name the checkpoint that is served in {VARIABLE}",
                )

        def finish_load(self, label: str) -> None:
            """Nothing was loaded."""

        def begin(self, ids: Any) -> None:
            """Asks for the rows of ``ids`` where they are few and on the GPU."""
            self._begun = None
            if ids.is_cuda and 0 < ids.numel() <= _MOST_BEGUN:
                self._begun = BegunRows(ids, self.table.prefetch(ids.contiguous()))

        def forward(self, indices: Any, forward_batch: Any = None, *, cp_all_tokens: bool = False) -> Any:
            """The rows of ``indices``, ``[*indices.shape, dim]``, in bf16."""
            begun, self._begun = self._begun, None
            if not indices.numel():
                return self.new_rows(indices)
            if begun is not None and begun.are_of(indices):
                return begun.rows.result(out=self.new_rows(indices))
            return self.table.gather(indices.contiguous(), out=self.new_rows(indices))

    return DiskEngramEmbedding
