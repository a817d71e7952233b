"""nvme_gpu.sglang over a stand-in of SGLang's modules; engines/sglang_on_cpu.py has SGLang's own classes beside it."""

from __future__ import annotations

import sys
import types

import pytest

import nvme_gpu
import nvme_gpu.sglang as adapter
from test_lookup_table import safetensors
from test_scales import COLUMNS, OFFSET, ROWS, Case, e4m3, on_gpu

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

LAYERS = (1, 14)


class Hooks:
    """Keeps what is registered."""

    def __init__(self):
        self.found = []

    def register(self, target, hook, kind):
        self.found.append((target, hook, kind))


class EngramEmbedding(torch.nn.Module):
    """As far as the adapter uses SGLang's: the parameters of its constructor, and new rows."""

    def __init__(self, num_embeddings, dim, layer_id, column_bounds):
        raise AssertionError("the table would be in memory")

    def new_rows(self, indices):
        return torch.empty(*indices.shape, self.dim, dtype=torch.bfloat16, device=indices.device)


class HostEmbedding(torch.nn.Module):
    """The same of SGLang's Qwen4ExpPinnedHostEmbedding."""

    _COPIED_ATTRIBUTES = ("tp_size", "org_vocab_size", "embedding_dim", "shard_indices")

    def __init__(self, embedding, *, backend="pinned", table_dir=None):
        raise AssertionError("the table would be in memory")

    def allocate_output(self, shape, device):
        return torch.empty(shape, dtype=torch.bfloat16, device=device)

    def reduce(self, output):
        raise AssertionError("each rank has all rows")

    def forward(self, input_ids):
        return self.reduce(self.gather(input_ids))


@pytest.fixture
def sglang(monkeypatch):
    """The modules that the adapter imports. Returns the hooks, by the last part of their target."""
    hooks = Hooks()
    registry = types.SimpleNamespace(HookRegistry=hooks, HookType=types.SimpleNamespace(REPLACE="replace", AFTER="after"))
    monkeypatch.setitem(sys.modules, "sglang.srt.layers.engram", types.SimpleNamespace(EngramEmbedding=EngramEmbedding))
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", registry)
    qwen = types.SimpleNamespace(Qwen4ExpPinnedHostEmbedding=HostEmbedding)
    monkeypatch.setitem(sys.modules, "sglang.srt.models.qwen4_exp", qwen)
    for name in ("sglang", "sglang.srt", "sglang.srt.layers", "sglang.srt.models", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for name in ("_EMBEDDINGS", "_N_GRAM_TABLES"):
        monkeypatch.setattr(adapter, name, set())
    for name in (adapter.ENGRAM, adapter.PLE):
        monkeypatch.delenv(name, raising=False)
    return hooks


@pytest.fixture
def case():
    return Case("e8m0")


@pytest.fixture
def checkpoint(tmp_path, case):
    path = tmp_path / "model.safetensors"
    tensors = []
    for layer in LAYERS:
        shift = layer % 7
        tensors.append((f"layers.{layer}.engram.embed.weight", "F8_E4M3", np.roll(case.stored, shift, axis=0)))
        tensors.append((f"layers.{layer}.engram.embed.scale", "F8_E8M0", np.roll(case.words["scales"], shift, axis=0)))
    safetensors(path, tensors)
    return str(path)


def replaced(hooks):
    [(target, kind, how), (begins, begin, after)] = hooks.found
    assert (target, how) == ("sglang.srt.layers.engram.EngramEmbedding", "replace")
    assert (begins, after) == ("sglang.srt.layers.engram.EngramHasher.forward", "after")
    assert issubclass(kind, EngramEmbedding)
    return kind, begin


def test_rows_of_each_layer_come_from_the_checkpoint(sglang, checkpoint, case, monkeypatch):
    monkeypatch.setenv("NVME_GPU_ENGRAM", checkpoint)
    adapter.register()
    kind, begin = replaced(sglang)
    made = [kind(ROWS, COLUMNS, layer, (0, ROWS)) for layer in LAYERS]
    ids = torch.tensor([[0, ROWS - 1, 17], [3, 3, 100]])
    begin(torch.stack([ids, ids], dim=1), "input", batch="of a forward")
    for layer, one in zip(LAYERS, made):
        wanted = torch.from_numpy(np.roll(case.wanted, layer % 7, axis=0)).to(torch.bfloat16)[ids]
        found = one(ids, None, cp_all_tokens=False)
        assert found.dtype is torch.bfloat16 and torch.equal(found.isnan(), wanted.isnan())
        assert torch.equal(found[~wanted.isnan()], wanted[~wanted.isnan()])
        # A view with gaps, as the engine passes it, and no rows.
        assert one(torch.stack([ids, ids], dim=1)[:, 1]).shape == (2, 3, COLUMNS)
        assert one(ids[:0]).shape == (0, 3, COLUMNS)
        one.weight.weight_loader(one.weight, torch.empty(ROWS, COLUMNS))
        one.finish_load("layer")
        with pytest.raises(nvme_gpu.Usage, match=f"layer {layer}: the checkpoint has 7 rows"):
            one.scale.weight_loader(one.scale, torch.empty(7, COLUMNS // 32))


@pytest.mark.parametrize("rows", [ROWS - 1, ROWS + 1])
def test_a_table_of_another_shape_is_refused(sglang, checkpoint, monkeypatch, rows):
    monkeypatch.setenv("NVME_GPU_ENGRAM", f'{{"source": "{checkpoint}", "queues": 2}}')
    adapter.register()
    kind, _ = replaced(sglang)
    with pytest.raises(nvme_gpu.Usage, match="the tensors have the shape"):
        kind(rows, COLUMNS, 1, (0, rows))


def test_nothing_changes_without_a_variable(sglang):
    adapter.register()
    assert not sglang.found


class Embedding:
    """What SGLang's layer passes: numbers about a table that has no memory, and the scale of all elements."""

    def __init__(self, rows):
        self.org_vocab_size, self.embedding_dim, self.tp_size = rows, COLUMNS, 2
        self.shard_indices = types.SimpleNamespace(org_vocab_start_index=0, org_vocab_end_index=rows)
        self.weight = torch.empty(0, COLUMNS, dtype=torch.uint8)
        self.weight_scale = torch.ones(1, dtype=torch.bfloat16)


def of_qwen(hooks):
    [(target, kind, how), (checks, check, after)] = hooks.found
    assert (target, how) == ("sglang.srt.models.qwen4_exp.Qwen4ExpPinnedHostEmbedding", "replace")
    assert (checks, after) == ("sglang.srt.models.qwen4_exp.Qwen4ExpNGramEmbedding.__init__", "after")
    return kind, check


def test_ngrams_of_qwen_come_from_the_shards(sglang, tmp_path, case, monkeypatch):
    shards = np.split(case.stored, 3)
    names = [f"a.shard_{number}.weight" for number in range(3)]
    safetensors(tmp_path / "m.safetensors", [(name, "F8_E4M3", shard) for name, shard in zip(names, shards)])
    monkeypatch.setenv("NVME_GPU_PLE", f'{{"source": "{tmp_path}/m.safetensors", "weight": "a.shard_{{}}.weight"}}')
    adapter.register()
    kind, check = of_qwen(sglang)
    with pytest.raises(nvme_gpu.Usage, match="the tensors have the shape"):
        kind(Embedding(ROWS + 1))
    adapter._N_GRAM_TABLES.clear()
    one = kind(Embedding(ROWS), backend="file", table_dir="elsewhere")
    wanted = torch.from_numpy(e4m3()[case.stored]).to(torch.bfloat16)
    ids = torch.tensor([[0, ROWS - 1, 99, 100], [200, 3, 3, 17]])
    out = torch.empty(2, 4, COLUMNS, dtype=torch.bfloat16)
    for found in (one(ids), one(ids.int()), one.gather(ids, out=out)):
        assert torch.equal(found.isnan(), wanted[ids].isnan())
        assert torch.equal(found[~found.isnan()], wanted[ids][~found.isnan()])
    assert found is out and one(ids[:0]).shape == (0, 4, COLUMNS)
    # The loader copies the rows that a rank has: none.
    assert one.shard_indices.org_vocab_start_index == one.shard_indices.org_vocab_end_index
    one.weight.weight_loader(one.weight, torch.empty(ROWS, COLUMNS))
    assert one.weight.dtype is torch.uint8 and not one.weight.numel() and one.weight_scale.item() == 1
    for wrong in (out[:1], out.float()):
        with pytest.raises(nvme_gpu.Usage, match="pass bfloat16"):
            one.gather(ids, out=wrong)
    check(None, types.SimpleNamespace(ngram_embedding=one), "config")
    with pytest.raises(nvme_gpu.Usage, match="--ple-offload-embedding"):
        check(None, types.SimpleNamespace(ngram_embedding=torch.nn.Embedding(2, 2)), "config")
    with pytest.raises(nvme_gpu.Usage, match="two layers"):
        kind(Embedding(ROWS))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "no JSON object"),
        ('{"gpu": 0}', "names no source"),
        ('{"source": 5}', "names no source"),
        # Each layer would have the table of one.
        ('{"source": "m", "weight": "layers.1.engram.embed.weight"}', "weight = layers.1"),
        ('{"source": "m", "scale": "layers.1.engram.embed.scale"}', "scale = layers.1"),
        ('{"source": "m", "weight": "layers.{}.{}.weight"}', "weight = layers"),
        ('{"source": "m", "weight": "layers.{0}.weight"}', "weight = layers"),
        ('{"source": "m", "scale": null}', "scale = None"),
    ],
)
def test_a_mistake_in_the_variable_ends_the_program(sglang, monkeypatch, text, says):
    """SGLang logs other exceptions of plugins, and would load the tables to memory."""
    monkeypatch.setenv("NVME_GPU_ENGRAM", text)
    with pytest.raises(SystemExit, match=says):
        adapter.register()
    assert not sglang.found


def test_another_interface_ends_the_program(sglang, monkeypatch):
    class Other(EngramEmbedding):
        def __init__(self, rows):
            raise AssertionError

    monkeypatch.setenv("NVME_GPU_ENGRAM", "model.safetensors")
    monkeypatch.setattr(sys.modules["sglang.srt.layers.engram"], "EngramEmbedding", Other)
    with pytest.raises(SystemExit, match="use SGLang"):
        adapter.register()
    monkeypatch.setitem(sys.modules, "sglang.srt.layers.engram", None)
    with pytest.raises(SystemExit, match="sglang"):
        adapter.register()


def test_a_gpu_is_asked_when_the_hashes_are_known(sglang, gpu_store, cuda, case, monkeypatch):
    gpu_store.write(case.stored, OFFSET)
    scales = on_gpu(case.words["scales"])

    def table(_, weight, *, shape, to, scales, on_error, gpu):
        assert (weight, to, on_error, gpu) == ("layers.1.engram.embed.weight", "bfloat16", "nan", 0)
        return gpu_store.table(OFFSET, shape=shape, dtype="float8_e4m3fn", to=to, scales=of_gpu, on_error=on_error)

    of_gpu = scales
    monkeypatch.setattr(nvme_gpu._engines, "lookup_table", table)
    monkeypatch.setenv("NVME_GPU_ENGRAM", '{"source": "sim", "gpu": 0}')
    adapter.register()
    kind, begin = replaced(sglang)
    one = kind(ROWS, COLUMNS, 1, (0, ROWS))
    wanted = torch.from_numpy(case.wanted).to(torch.bfloat16)

    def rows_of(ids, at):
        found = one(at).cpu()
        assert torch.equal(found.isnan(), wanted[ids].isnan())
        assert torch.equal(found[~found.isnan()], wanted[ids][~found.isnan()])

    def begun():
        return gpu_store.stats()["begun_gathers"]

    ids = torch.tensor([[[0, ROWS - 1, 17]], [[3, 3, 100]]])
    hashes = cuda(ids)
    before = begun()
    begin(hashes)
    assert begun() == before + 1
    # The engine makes the view again.
    rows_of(ids[:, 0], hashes[:, 0])
    assert begun() == before + 1 and one._begun is None
    # Rows of other ids are read when they are asked for; what was begun is given back.
    begin(hashes)
    others = cuda(torch.tensor([[5, 6, 7], [8, 9, 10]]))
    rows_of(torch.tensor([[5, 6, 7], [8, 9, 10]]), others)
    # Another number of layers, and a long batch: nothing is begun.
    before = begun()
    begin(cuda(torch.zeros(2, 2, 3, dtype=torch.long)))
    begin(cuda(torch.zeros(800, 1, 1, dtype=torch.long)))
    assert begun() == before
