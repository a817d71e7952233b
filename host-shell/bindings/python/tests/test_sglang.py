"""nvme_gpu.sglang over a stand-in of SGLang's modules; engines/sglang_on_cpu.py has SGLang's own classes beside it."""

from __future__ import annotations

import sys
import types

import pytest

import nvme_gpu
import nvme_gpu.sglang as adapter
from test_lookup_table import safetensors
from test_scales import COLUMNS, OFFSET, ROWS, Case, on_gpu

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


@pytest.fixture
def sglang(monkeypatch):
    """The modules that the adapter imports. Returns the hooks, by the last part of their target."""
    hooks = Hooks()
    registry = types.SimpleNamespace(HookRegistry=hooks, HookType=types.SimpleNamespace(REPLACE="replace", AFTER="after"))
    monkeypatch.setitem(sys.modules, "sglang.srt.layers.engram", types.SimpleNamespace(EngramEmbedding=EngramEmbedding))
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", registry)
    for name in ("sglang", "sglang.srt", "sglang.srt.layers", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(adapter, "_EMBEDDINGS", set())
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


def test_nothing_changes_without_the_variable(sglang, monkeypatch):
    monkeypatch.delenv("NVME_GPU_ENGRAM", raising=False)
    adapter.register()
    assert not sglang.found


@pytest.mark.parametrize(
    ("text", "says"),
    [("{", "no JSON object"), ('{"gpu": 0}', "names no source"), ('{"source": 5}', "names no source")],
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

    def table(source, weight, *, shape, to, scales, on_error, gpu):
        assert (weight, to, on_error, gpu) == ("layers.1.engram.embed.weight", "bfloat16", "nan", 0)
        return gpu_store.table(OFFSET, shape=shape, dtype="float8_e4m3fn", to=to, scales=of_gpu, on_error=on_error)

    of_gpu = scales
    monkeypatch.setattr(adapter, "lookup_table", table)
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
