"""Run by hand where SGLang 0.5.23 can be imported: its own classes beside those of nvme_gpu.sglang, on the CPU, bit by bit.

    python tests/engines/sglang_on_cpu.py FOLDER

FOLDER gets a checkpoint of the true layout with small tables. Prints one line of JSON.
"""

import json
import os
import sys
from types import SimpleNamespace

import torch
from safetensors.torch import save_file

CONFIG = SimpleNamespace(
    engram_layer_ids=[1, 14],
    engram_max_ngram_size=4,
    engram_n_heads=8,
    engram_vocab_size=1000,
    engram_head_dim=256,
    engram_num_embeddings=[],
    hidden_size=64,
    hc_mult=4,
    rms_norm_eps=1e-6,
)
WIDTH, BLOCK = 256, 32
QWEN = SimpleNamespace(
    ngram_size=3,
    heads_per_ngram=8,
    vocab_size=1000,
    ngram_vocab_size_base=500,
    make_ngram_vocab_size_divisible_by=128,
    eos_token_id=0,
    seed=1234,
    ple_embedding_dtype="float8_e4m3fn",
    ple_offload_embedding=True,
)
COLUMNS, SHARDS = 160, 4


def checkpoint(folder, layout):
    """Two files and their index. Returns the tensors by name."""
    generator = torch.Generator().manual_seed(5)
    made, where = {}, {}
    for layer, rows in zip(layout.layer_ids, layout.num_embeddings):
        values = torch.randint(0, 256, (rows, WIDTH), generator=generator, dtype=torch.uint8)
        values[(values & 0x7F) == 0x7F] = 0x38  # Not NaN.
        scales = torch.randint(100, 140, (rows, WIDTH // BLOCK), generator=generator, dtype=torch.uint8)
        names = [f"layers.{layer}.engram.embed.{name}" for name in ("weight", "scale")]
        tensors = dict(zip(names, (values.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu))))
        file = f"model-{layer}.safetensors"
        save_file(tensors, f"{folder}/{file}")
        made.update(tensors)
        where.update(dict.fromkeys(names, file))
    with open(f"{folder}/model.safetensors.index.json", "w", encoding="utf-8") as index:
        json.dump({"metadata": {}, "weight_map": where}, index)
    return made


def qwen(folder):
    """Rows of the table that SGLang's own layer makes for Qwen4-Exp. Returns how many were compared."""
    import sglang.srt.models.qwen4_exp as model
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.runtime_context import get_parallel

    import nvme_gpu.sglang

    parallel = {"tp_size": 1, "tp_rank": 0, "attn_tp_size": 1, "attn_dp_size": 1}
    rows = 16 * 500 + 2000
    os.environ["NVME_GPU_PLE"] = json.dumps({"source": f"{folder}/ple.safetensors", "weight": "ngrams.shard_{}.weight"})
    del os.environ["NVME_GPU_ENGRAM"]
    nvme_gpu.sglang.register()
    HookRegistry.apply_hooks()

    def make(config):
        with get_parallel().override(**parallel):
            return model.Qwen4ExpNGramEmbedding(config, COLUMNS * 16)

    # How many rows the layer wants, which its refusal says.
    save_file({"ngrams.shard_0.weight": torch.zeros(rows, COLUMNS, dtype=torch.uint8)}, f"{folder}/ple.safetensors")
    try:
        make(QWEN)
    except nvme_gpu.Usage as error:
        wanted = int(error.cause.split("not (")[1].split(",")[0])
    nvme_gpu.sglang._N_GRAM_TABLES.clear()
    values = torch.randint(0, 256, (wanted, COLUMNS), generator=torch.Generator().manual_seed(7), dtype=torch.uint8)
    values[(values & 0x7F) == 0x7F] = 0x38
    parts = values.view(torch.float8_e4m3fn).chunk(SHARDS)
    save_file({f"ngrams.shard_{number}.weight": part.contiguous() for number, part in enumerate(parts)}, f"{folder}/ple.safetensors")
    made = make(QWEN).ngram_embedding
    assert isinstance(made, model.Qwen4ExpPinnedHostEmbedding) and made.weight.numel() == 0
    # What their loader copies of a shard: nothing.
    assert made.shard_indices.org_vocab_start_index == made.shard_indices.org_vocab_end_index
    as_bf16 = values.view(torch.float8_e4m3fn).to(torch.bfloat16)
    compared = 0
    for ids in (torch.arange(wanted).view(-1, 16), torch.randint(0, wanted, (333, 16)), torch.zeros(0, 16, dtype=torch.long)):
        buffer = torch.empty(ids.shape[0], COLUMNS * 16, dtype=torch.bfloat16)
        found = made.reduce(made.gather(ids, out=buffer.view(ids.shape[0], 16, COLUMNS)))
        assert torch.equal(found.view(torch.int16), as_bf16[ids].view(torch.int16)) and torch.equal(made(ids), found)
        compared += ids.numel()
    nvme_gpu.sglang._N_GRAM_TABLES.clear()
    try:
        make(SimpleNamespace(**{**vars(QWEN), "ple_offload_embedding": False}))
    except nvme_gpu.Usage as error:
        assert "--ple-offload-embedding" in error.remedy
    else:
        raise SystemExit("a table in memory was taken for one on the drive")
    return compared


def main(folder):
    import sglang
    import sglang.srt.layers.engram as engram
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.runtime_context import get_parallel

    import nvme_gpu.sglang

    layout = engram.EngramLayout.from_config(CONFIG)
    counts = tuple(layout.column_bounds(index)[-1] for index in range(2))
    layout = engram.EngramLayout.from_config(SimpleNamespace(**{**vars(CONFIG), "engram_num_embeddings": counts}))
    tensors = checkpoint(folder, layout)

    def make(kind, index, rank=0, ranks=1):
        rows, layer = layout.num_embeddings[index], layout.layer_ids[index]
        with get_parallel().override(tp_size=ranks, tp_rank=rank):
            made = kind(rows, layout.head_dim, layer, layout.column_bounds(index))
        for name in ("weight", "scale"):
            parameter = getattr(made, name)
            parameter.weight_loader(parameter, tensors[f"layers.{layer}.engram.embed.{name}"])
        made.finish_load("test")
        return made

    original = engram.EngramEmbedding
    theirs = [make(original, index) for index in range(2)]
    halves = [make(original, 0, rank, 2) for rank in range(2)]

    os.environ["NVME_GPU_ENGRAM"] = f"{folder}/model.safetensors.index.json"
    nvme_gpu.sglang.register()
    HookRegistry.apply_hooks()
    replaced = engram.EngramEmbedding
    assert replaced is not original and issubclass(replaced, original)
    ours = [make(replaced, index) for index in range(2)]
    sharded = make(replaced, 0, 1, 2)

    # Ids by their own hash of random tokens, and every row once.
    tokens = torch.randint(0, 1000, (2000, 4), generator=torch.Generator().manual_seed(6))
    blocked = torch.zeros(2000, 4, dtype=torch.bool)
    blocked[:3, 1:] = True
    offsets = torch.tensor([layout.column_bounds(index)[:-1] for index in range(2)])
    multipliers = engram.compute_hash_multipliers(layout.layer_ids, 4, 1000)
    ids = engram.compute_engram_hash_ids(
        tokens, blocked, 2, torch.arange(1000), multipliers, torch.tensor(layout.primes), offsets
    )
    compared = 0
    for index in range(2):
        every = torch.arange(layout.num_embeddings[index]).view(1, -1)
        for chosen in (ids[:, index], ids[:1, index], ids[:0, index], every):
            wanted, found = theirs[index](chosen), ours[index](chosen)
            assert found.dtype is torch.bfloat16 and found.shape == wanted.shape
            assert torch.equal(found.view(torch.int16), wanted.view(torch.int16))
            compared += found.shape[0] * found.shape[1]
    # A rank has all rows of its tokens; theirs are the sum over ranks.
    chosen = ids[:, 0]
    with get_parallel().override(tp_size=1, tp_rank=0):
        parts = [half._owned_rows(chosen) for half in halves]
    assert torch.equal(sharded(chosen), parts[0] + parts[1])
    assert engram.Engram.embed_rows(SimpleNamespace(embed=ours[1]), ids[:, 1], None, False).shape == (2000, 24, WIDTH)
    try:
        ours[0]._load_nothing(None, tensors["layers.14.engram.embed.weight"])
    except nvme_gpu.Usage as error:
        assert "rows" in error.cause
    else:
        raise SystemExit("another checkpoint was taken for this one")
    found = {"sglang": sglang.__version__, "torch": torch.__version__, "engram_rows": compared, "qwen_rows": qwen(folder)}
    print(json.dumps({**found, "equal": True}))


if __name__ == "__main__":
    main(sys.argv[1])
