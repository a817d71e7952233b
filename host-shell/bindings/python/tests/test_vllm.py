"""nvme_gpu.vllm over a stand-in of vLLM's modules; engines/vllm_on_cpu.py has vLLM's own classes and kernel beside it."""

from __future__ import annotations

import sys
import types

import pytest

import nvme_gpu
import nvme_gpu.vllm as adapter
from test_lookup_table import safetensors
from test_scales import COLUMNS, OFFSET, ROWS, Case, on_gpu

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

LAYERS, HEADS = (1, 14), (100, 90, 60, 50)
DEAD = -1


class EngramEmbedding(torch.nn.Module):
    """As far as the adapter uses vLLM's: heads of a rank, and memory that it asks for by a method."""

    ranks, rank = 1, 0
    _weight_loader = None

    def __init__(
        self, num_embeddings, dim, head_sizes, block_size=32, cpu_offload=False, dp_shared_memory=False, use_thp=False
    ):
        super().__init__()
        self.num_embeddings, self.dim, self.block_size, self.cpu_offload = num_embeddings, dim, block_size, cpu_offload
        self.tp_size, self.dp_size, self.n_hash_cols = self.ranks, 1, len(head_sizes)
        self.part_n_hash_cols = -(-len(head_sizes) // self.ranks)
        self.head_start = self.rank * self.part_n_hash_cols
        self.vocab_start_idx = sum(head_sizes[: self.head_start])
        self.vocab_end_idx = sum(head_sizes[: self.head_start + self.part_n_hash_cols])
        for name, memory in zip(("weight", "weight_scale_inv"), self._allocate_weights()):
            parameter = torch.nn.Parameter(memory, requires_grad=False)
            parameter.weight_loader = self._weight_loader
            setattr(self, name, parameter)

    def _allocate_weights(self):
        raise AssertionError("the table would be in memory")


class Engram:
    def __init__(self, config, quant_config, layout, layer_hash_index, use_sequence_parallel, prefix, prefetch_stream=None):
        self.embed_tokens = self._create_embedding(layout, layer_hash_index)

    def _create_embedding(self, layout, layer_hash_index):
        raise AssertionError("the table would be in memory")


LAYOUT = types.SimpleNamespace(
    layer_ids=LAYERS, num_embeddings=(ROWS, ROWS), head_dim=COLUMNS, primes=((HEADS[:2], HEADS[2:]),) * 2
)


@pytest.fixture
def vllm(monkeypatch):
    """The modules that the adapter imports. Returns the one of Engram, with classes of its own."""
    kinds = {
        "ParallelEngramEmbedding": type("ParallelEngramEmbedding", (EngramEmbedding,), {"__init__": EngramEmbedding.__init__}),
        "Engram": type("Engram", (Engram,), {"__init__": Engram.__init__}),
    }
    module = types.SimpleNamespace(**kinds, get_engram_dp_size=lambda: 1)
    monkeypatch.setitem(sys.modules, "vllm.models.deepseek_v41.common.engram", module)
    config = types.SimpleNamespace(engram_config=types.SimpleNamespace(cpu_offload=True))
    monkeypatch.setitem(sys.modules, "vllm.config", types.SimpleNamespace(get_current_vllm_config=lambda: config))
    for name in ("vllm", "vllm.models", "vllm.models.deepseek_v41", "vllm.models.deepseek_v41.common"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    # Debian's torch does not have it.
    monkeypatch.setattr(torch, "float8_e4m3fn", torch.uint8, raising=False)
    monkeypatch.delenv("NVME_GPU_ENGRAM", raising=False)
    return module


@pytest.fixture
def case():
    return Case("e8m0")


def layer(module, index):
    return module.Engram(None, None, LAYOUT, index, False, "layers").embed_tokens


def same(found, wanted):
    assert found.dtype is torch.bfloat16 and torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found[~found.isnan()], wanted[~wanted.isnan()])


@pytest.mark.parametrize(("ranks", "rank"), [(1, 0), (2, 0), (2, 1), (3, 1)])
def test_a_rank_has_the_rows_of_its_heads(vllm, tmp_path, case, monkeypatch, ranks, rank):
    tensors = []
    for number in LAYERS:
        tensors.append((f"layers.{number}.engram.embed.weight", "F8_E4M3", np.roll(case.stored, number, axis=0)))
        tensors.append((f"layers.{number}.engram.embed.scale", "F8_E8M0", np.roll(case.words["scales"], number, axis=0)))
    safetensors(tmp_path / "m.safetensors", tensors)
    monkeypatch.setenv("NVME_GPU_ENGRAM", str(tmp_path / "m.safetensors"))
    monkeypatch.setattr(EngramEmbedding, "ranks", ranks)
    monkeypatch.setattr(EngramEmbedding, "rank", rank)
    adapter.register()
    starts = torch.tensor([0, 100, 190, 250])
    ids = torch.stack([torch.tensor([0, 1, 49, 0]) + start for start in starts], dim=1).to(torch.int32)
    ids[3] = DEAD
    for index, number in enumerate(LAYERS):
        one = layer(vllm, index)
        assert one.cpu_offload and not one.weight.numel() and not one.weight_scale_inv.numel()
        every = torch.from_numpy(np.roll(case.wanted, number, axis=0)).to(torch.bfloat16)
        wanted = every[ids.clamp(min=0).long()]
        wanted[3] = 0
        heads = one.part_n_hash_cols
        wanted = wanted[:, one.head_start : one.head_start + heads]
        out = torch.full((4, heads, COLUMNS), 7, dtype=torch.bfloat16)
        one.lookup(torch.cat([ids, ids], dim=1)[:, :4], out, background=True)
        same(out[:, : wanted.shape[1]], wanted)
        # Heads that fill up the last rank have no rows.
        assert not out[:, wanted.shape[1] :].any()
        one.lookup(ids[:0], out[:0])
        for parameter in (one.weight, one.weight_scale_inv):
            parameter.weight_loader(parameter, torch.empty(ROWS, 1))
            with pytest.raises(nvme_gpu.Usage, match=f"layer {number}: the checkpoint has 7 rows"):
                parameter.weight_loader(parameter, torch.empty(7, 1))
        with pytest.raises(nvme_gpu.Usage, match="not as torch.uint8"):
            one.lookup(ids, torch.empty(4, heads, 264, dtype=torch.uint8))


def test_a_gpu_puts_rows_where_the_engine_wants_them(vllm, gpu_store, cuda, case, monkeypatch):
    gpu_store.write(case.stored, OFFSET)
    scales = on_gpu(case.words["scales"])

    def table(_, weight, *, shape, to, scales, on_error, **options):
        assert (weight, to, on_error, options) == ("layers.14.engram.embed.weight", "bfloat16", "nan", {"gpu": 0})
        return gpu_store.table(OFFSET, shape=shape, dtype="float8_e4m3fn", to=to, scales=of_gpu, on_error=on_error)

    of_gpu = scales
    monkeypatch.setattr(nvme_gpu._engines, "lookup_table", table)
    monkeypatch.setenv("NVME_GPU_ENGRAM", '{"source": "sim", "gpu": 0}')
    adapter.register()
    one = layer(vllm, 1)
    ids = torch.tensor([[0, 100, 190, 250], [99, 189, 249, 299]])
    # Memory of a GPU is given out again in the order of its stream, that of the stand-in at once.
    where = torch.Tensor.where

    def kept_where(*words):
        cuda.kept.append(where(*words))
        return cuda.kept[-1]

    monkeypatch.setattr(torch.Tensor, "where", kept_where)
    out = cuda(torch.full((2, 4, COLUMNS), 7, dtype=torch.bfloat16))
    one.lookup(cuda(ids), out)
    same(out.cpu(), torch.from_numpy(case.wanted).to(torch.bfloat16)[ids])


def test_nothing_changes_without_the_variable(vllm):
    before = vllm.Engram._create_embedding
    adapter.register()
    assert vllm.Engram._create_embedding is before


def test_tables_sharded_over_replicas_are_refused(vllm, monkeypatch):
    monkeypatch.setenv("NVME_GPU_ENGRAM", "model.safetensors")
    vllm.get_engram_dp_size = lambda: 2
    adapter.register()
    with pytest.raises(nvme_gpu.Usage, match="embedding_across_dp"):
        layer(vllm, 0)


@pytest.mark.parametrize("what", ["variable", "name", "table", "layer", "method", "module"])
def test_what_is_not_understood_ends_the_program(vllm, monkeypatch, what):
    texts = {"variable": "{", "name": '{"source": "model.safetensors", "weight": "engram.weight"}'}
    monkeypatch.setenv("NVME_GPU_ENGRAM", texts.get(what, "model.safetensors"))
    if what == "table":
        del vllm.ParallelEngramEmbedding
    elif what == "layer":
        vllm.Engram.__init__ = lambda self, config: None
    elif what == "method":
        vllm.Engram = type("Engram", (), {"__init__": Engram.__init__})
    elif what == "module":
        monkeypatch.setitem(sys.modules, "vllm.models.deepseek_v41.common.engram", None)
    with pytest.raises(SystemExit, match="nvme_gpu.vllm: "):
        adapter.register()
