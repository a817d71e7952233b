"""vLLM with the Engram tables of DeepSeek-V4.1 on a drive, read by the GPU.

Set ``NVME_GPU_ENGRAM`` to the checkpoint, as :mod:`nvme_gpu.sglang` has it, and start vLLM: its plugin loader calls
:func:`register`, after which its Engram layers make tables of :func:`disk_embedding`. Without the variable nothing changes.

Heads stay sharded over ranks as vLLM shards them, and each rank reads the rows of its heads. Scales stay in GPU memory. With
``cpu_offload`` of ``--engram-config``, vLLM's default, rows are read in the stream in which vLLM reads ahead, else where the layers
begin. Ids without a row, which stand for padding, are zeros; rows that could not be read are NaN and counted.

Written for vLLM 0.32, whose interface 0.33 has, too; :func:`register` ends the program where the classes have another one. Tables
that are sharded over replicas (``embedding_across_dp``) are refused: each replica reads its own.
"""

from __future__ import annotations

import importlib
from typing import Any

from ._engines import ENGRAM, ENGRAM_WEIGHT, TableSettings, check_rows, known_class
from ._errors import Usage

_VERSION = "vLLM 0.32 or 0.33"
_MODULE = "vllm.models.deepseek_v41.common.engram"
_PARAMETERS = ["num_embeddings", "dim", "head_sizes", "block_size", "cpu_offload", "dp_shared_memory", "use_thp"]


def register() -> None:
    """The entry point of the group ``vllm.general_plugins``. A mistake in the variable, or an unknown interface, ends the program."""
    try:
        settings = TableSettings.of(ENGRAM, ENGRAM_WEIGHT)
        if settings is None:
            return
        kind = disk_embedding(known_class(_MODULE, "ParallelEngramEmbedding", _PARAMETERS, _VERSION), settings)
        engram = known_class(_MODULE, "Engram", _ENGRAM_PARAMETERS, _VERSION)
        if not hasattr(engram, "_create_embedding"):
            raise Usage("Engram of this version has no _create_embedding", f"use {_VERSION}")
    except (Usage, ImportError) as error:
        raise SystemExit(f"nvme_gpu.vllm: {error}") from error

    def create(_: Any, layout: Any, layer_hash_index: int) -> Any:
        config = importlib.import_module("vllm.config").get_current_vllm_config().engram_config
        sizes = tuple(size for order in layout.primes[layer_hash_index] for size in order)
        rows = layout.num_embeddings[layer_hash_index]
        return kind(layout.layer_ids[layer_hash_index], rows, layout.head_dim, sizes, cpu_offload=config.cpu_offload)

    engram._create_embedding = create


_ENGRAM_PARAMETERS = [
    "config", "quant_config", "layout", "layer_hash_index", "use_sequence_parallel", "prefix", "prefetch_stream",
]  # fmt: skip


def disk_embedding(original: type, settings: TableSettings) -> type:
    """A class in place of vLLM's ``original``, an Engram table, whose rows lie where ``settings`` say."""
    torch = importlib.import_module("torch")

    class DiskEngramEmbedding(original):
        """One layer's table on a drive; :meth:`lookup` gives the rows of this rank's heads as the original does, bit by bit."""

        def __init__(
            self, layer_id: int, num_embeddings: int, dim: int, head_sizes: tuple[int, ...], cpu_offload: bool = True
        ) -> None:
            if importlib.import_module(_MODULE).get_engram_dp_size() > 1:
                raise Usage("a table on a drive is sharded over replicas", "leave embedding_across_dp out of --engram-config")
            super().__init__(num_embeddings, dim, head_sizes, cpu_offload=cpu_offload)
            self.layer_id = layer_id
            self.table = settings.layer(layer_id, (num_embeddings, dim), self.weight.device)

        def _weight_loader(self, parameter: Any, loaded: Any) -> None:
            check_rows(self.layer_id, self.num_embeddings, loaded)

        def _allocate_weights(self) -> Any:
            nothing = torch.empty(0, self.dim)
            return nothing.to(torch.float8_e4m3fn), nothing[:, : self.dim // self.block_size].to(torch.uint8)

        def lookup(self, indices: Any, out: Any, background: bool = False) -> None:
            """Puts the rows of this rank's heads of ``indices``, ``[tokens, heads]``, into ``out``; zeros for ids of other ranks."""
            if not indices.shape[0]:
                return
            if out.dtype != torch.bfloat16:
                raise Usage(f"rows of a table on a drive come out as bfloat16, not as {out.dtype}", f"unset {ENGRAM}")
            first, heads = self.head_start, self.part_n_hash_cols
            ids = indices[:, first : first + heads].long()
            if ids.shape[1] < heads:
                ids = torch.nn.functional.pad(ids, (0, heads - ids.shape[1]), value=-1)
            owned = (ids >= self.vocab_start_idx) & (ids < self.vocab_end_idx)
            rows = out.view(*ids.shape, self.dim)
            self.table.gather(ids.where(owned, ids.new_full((), self.vocab_start_idx)), out=rows)
            rows.masked_fill_(~owned.unsqueeze(-1), 0)

    return DiskEngramEmbedding
