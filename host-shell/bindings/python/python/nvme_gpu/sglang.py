"""SGLang with lookup tables on a drive, read by the GPU: the Engram tables of DeepSeek-V4.1, the n-gram table of Qwen4-Exp.

Set ``NVME_GPU_ENGRAM``, or ``NVME_GPU_PLE``, to the checkpoint (anything that :func:`nvme_gpu.lookup_table` takes as text) and start
SGLang: its plugin loader calls :func:`register`, which puts a class of this module in place of its ``EngramEmbedding``, or of its
``Qwen4ExpPinnedHostEmbedding``, which ``--ple-offload-embedding`` chooses. Without the variables nothing changes. Instead of a path
a variable may be a JSON object: ``source``, ``weight`` and ``scale`` (names of the tensors, with ``{}`` for the layer of Engram, or for
the number of a shard), ``on_error``, and the options of :func:`nvme_gpu.open`.

Each rank reads the rows of its own tokens, so that no collective follows. Scales of Engram stay in GPU memory (3 GB a table), rows
on the drive. Small batches of Engram are asked for when their ids are known, and taken when their layer runs; Qwen's come in the
stream in which SGLang reads ahead. Rows that could not be read are NaN (``on_error="nan"``) and counted, so that no token is made of
zeros without a word.

Written for SGLang 0.5.23; :func:`register` ends the program where the classes there have another interface.
"""

from __future__ import annotations

import importlib
import weakref
from typing import Any, NamedTuple

from . import _buffers
from ._engines import ENGRAM, ENGRAM_WEIGHT, TableSettings, check_rows, known_class
from ._errors import Usage
from ._prefetch import Prefetch

PLE = "NVME_GPU_PLE"
_VERSION = "SGLang 0.5.23"
_ENGRAM = "sglang.srt.layers.engram"
_QWEN = "sglang.srt.models.qwen4_exp"
_SHARD = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding.shard_{}.weight"
_MOST_BEGUN = 768
"""Rows that a prefetch submits for a GPU (see :meth:`Table.prefetch`); longer batches are read when their layer runs."""


def register() -> None:
    """The entry point of the group ``sglang.srt.plugins``.

    SGLang logs what a plugin raises and goes on, here with tables in memory that were meant for the drive. So a mistake in the
    variable, or an unknown interface, ends the program.
    """
    try:
        engram, ple = TableSettings.of(ENGRAM, ENGRAM_WEIGHT), TableSettings.of(PLE, _SHARD)
        if engram is not None:
            original = known_class(_ENGRAM, "EngramEmbedding", ["num_embeddings", "dim", "layer_id", "column_bounds"], _VERSION)
            _hook("REPLACE", f"{_ENGRAM}.EngramEmbedding", disk_embedding(original, engram))
            _hook("AFTER", f"{_ENGRAM}.EngramHasher.forward", _begin)
        if ple is not None:
            original = known_class(_QWEN, "Qwen4ExpPinnedHostEmbedding", ["embedding", "backend", "table_dir"], _VERSION)
            _hook("REPLACE", f"{_QWEN}.Qwen4ExpPinnedHostEmbedding", disk_ngrams(original, ple))
            _hook("AFTER", f"{_QWEN}.Qwen4ExpNGramEmbedding.__init__", _check_offloaded)
    except (Usage, ImportError) as error:
        raise SystemExit(f"nvme_gpu.sglang: {error}") from error


def _hook(kind: str, target: str, hook: Any) -> None:
    """Registers a hook of a kind of SGLang's ``HookType``."""
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    hooks.HookRegistry.register(target, hook, getattr(hooks.HookType, kind))


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


def disk_embedding(original: type, settings: TableSettings) -> type:
    """A class in place of SGLang's ``original``, an Engram table, whose rows lie where ``settings`` say."""
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
            self.table = settings.layer(layer_id, (num_embeddings, dim), nothing.device)
            for name in ("weight", "scale"):
                parameter = torch.nn.Parameter(nothing, requires_grad=False)
                parameter.weight_loader = self._load_nothing
                setattr(self, name, parameter)
            _EMBEDDINGS.add(self)

        def _load_nothing(self, _: Any, loaded: Any) -> None:
            check_rows(self.layer_id, self.rows, loaded)

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
                return begun.rows.result(out=self.new_rows(indices), stream=_buffers.current_stream(indices))
            return self.table.gather(indices.contiguous(), out=self.new_rows(indices))

    return DiskEngramEmbedding


_N_GRAM_TABLES: weakref.WeakSet[Any] = weakref.WeakSet()


def _check_offloaded(_: Any, embedding: Any, *__: Any, **___: Any) -> None:
    """Refuses a table that SGLang keeps in GPU memory although :data:`PLE` is set."""
    if not hasattr(embedding.ngram_embedding, "table"):
        raise Usage(f"{PLE} is set, and SGLang keeps the table in GPU memory", "start it with --ple-offload-embedding")


class NoShard(NamedTuple):
    """The rows that SGLang's loader copies to a table of :func:`disk_ngrams`: none."""

    org_vocab_start_index: int = 0
    org_vocab_end_index: int = 0


def disk_ngrams(original: type, settings: TableSettings) -> type:
    """A class in place of SGLang's ``original``, an n-gram table in host memory, whose rows lie where ``settings`` say."""
    torch = importlib.import_module("torch")

    class DiskNgramEmbedding(original):
        """The table on a drive; :meth:`gather` returns stored numbers as bf16, which SGLang multiplies by ``weight_scale``."""

        def __init__(self, embedding: Any, *, backend: str = "pinned", table_dir: str | None = None) -> None:
            torch.nn.Module.__init__(self)
            if _N_GRAM_TABLES:
                raise Usage("two layers have n-gram tables, and their names in the files are not known", f"unset {PLE}")
            for name in original._COPIED_ATTRIBUTES:  # type: ignore[attr-defined]
                setattr(self, name, getattr(embedding, name))
            self.quant_method = None
            self.shard_indices = NoShard()
            self.register_buffer("weight_scale", embedding.weight_scale, persistent=True)
            nothing = torch.empty(0, self.embedding_dim, dtype=embedding.weight.dtype, device="cpu")
            self.weight = torch.nn.Parameter(nothing, requires_grad=False)
            self.weight.weight_loader = self._load_nothing
            shape = (self.org_vocab_size, self.embedding_dim)
            self.table = settings.table(settings.weight, shape, None, embedding.weight_scale.device)
            _N_GRAM_TABLES.add(self)

        def _load_nothing(self, *_: Any) -> None:
            """Leaves the table where it is."""

        def gather(self, input_ids: Any, out: Any = None) -> Any:
            """The rows of ``input_ids``, in ``out`` where it is given."""
            shape = (*input_ids.shape, self.embedding_dim)
            rows = self.allocate_output(shape, input_ids.device) if out is None else out
            if tuple(rows.shape) != shape or rows.dtype != torch.bfloat16:
                raise Usage(f"rows of {tuple(rows.shape)} in {rows.dtype} for {shape}", "pass bfloat16 of that shape")
            if input_ids.numel():
                self.table.gather(input_ids.long().contiguous(), out=rows)
            return rows

        def reduce(self, output: Any) -> Any:
            """The rows as they are: each rank has read all of its own."""
            return output

    return DiskNgramEmbedding
