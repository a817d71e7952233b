"""Run by hand where vLLM 0.32 or 0.33 can be imported: its own Engram table beside that of nvme_gpu.vllm, on the CPU, bit by bit.

    TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES= python tests/engines/vllm_on_cpu.py FOLDER

vLLM's lookup is a kernel of Triton, which Triton's interpreter runs. FOLDER gets a checkpoint of the true layout with small tables.
Prints one line of JSON.
"""

import json
import os
import sys
from types import SimpleNamespace

import torch
from sglang_on_cpu import CONFIG, checkpoint
from triton.backends import backends
from triton.runtime import interpreter

TOKENS = 24


def main(folder):
    # vLLM for CPUs uses Triton where it has a back end for them.
    backends.setdefault("cpu", SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True)))
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(multi_processor_count=4)
    torch.accelerator.current_device_index = lambda: 0
    import vllm
    import vllm.config
    import vllm.models.deepseek_v41.common.engram as engram

    import nvme_gpu.vllm

    # Bounds of a GPU; and the interpreter makes a number of 32 bits of a truth, and refuses it.
    engram._engram_lookup_thresholds = lambda device: (None, None)
    converted = interpreter._implicit_cvt
    interpreter._implicit_cvt = lambda value: value if isinstance(value, bool) else converted(value)
    config = {**vars(CONFIG), "engram_compressed_vocab_size": 1000, "engram_pad_token_id": 2}
    layout = engram.EngramLayout(SimpleNamespace(**{**config, "engram_num_embeddings": [0, 0]}))
    sizes = [tuple(size for order in layer for size in order) for layer in layout.primes]
    layout.num_embeddings = tuple(sum(one) for one in sizes)
    tensors = checkpoint(folder, layout)

    def of_ranks(rank, ranks):
        engram.get_engram_dp_size = lambda: 1
        engram.get_tensor_model_parallel_world_size = lambda: ranks
        engram.get_tensor_model_parallel_rank = lambda: rank

    def load(made, layer):
        for parameter, name in ((made.weight, "weight"), (made.weight_scale_inv, "scale")):
            parameter.weight_loader(parameter, tensors[f"layers.{layer}.engram.embed.{name}"])
        return made

    original = engram.ParallelEngramEmbedding
    os.environ["NVME_GPU_ENGRAM"] = f"{folder}/model.safetensors.index.json"
    nvme_gpu.vllm.register()
    vllm.config.get_current_vllm_config = lambda: SimpleNamespace(engram_config=SimpleNamespace(cpu_offload=False))
    generator, compared = torch.Generator().manual_seed(6), 0
    for index, layer in enumerate(layout.layer_ids):
        starts = torch.tensor([sum(sizes[index][:head]) for head in range(24)])
        ids = torch.stack([torch.randint(0, size, (TOKENS,), generator=generator) for size in sizes[index]], dim=1) + starts
        ids = ids.to(torch.int32)
        # Padding has no rows, and a view of a longer batch has gaps.
        ids[-3:] = engram.DEAD_ID
        gaps = torch.cat([ids, ids], dim=1)[:, :24]
        for ranks in (1, 2, 5):
            for rank in range(ranks):
                of_ranks(rank, ranks)
                theirs = load(original(layout.num_embeddings[index], 256, sizes[index]), layer)
                ours = load(engram.Engram._create_embedding(None, layout, index), layer)
                assert isinstance(ours, original) and ours.weight.numel() == 0
                shape = (TOKENS, theirs.part_n_hash_cols, 256)
                wanted, found = torch.full(shape, 7, dtype=torch.bfloat16), torch.full(shape, 9, dtype=torch.bfloat16)
                for chosen in (ids, gaps):
                    theirs.lookup(chosen, wanted)
                    ours.lookup(chosen, found, background=True)
                    assert torch.equal(found.view(torch.int16), wanted.view(torch.int16)), (layer, ranks, rank)
                    compared += shape[0] * shape[1]
                if ranks == 1:
                    assert torch.equal(ours(ids), wanted)
    try:
        ours.lookup(ids, torch.empty(TOKENS, 24 * 264, dtype=torch.uint8))
    except nvme_gpu.Usage as error:
        assert "bfloat16" in error.cause
    else:
        raise SystemExit("packed rows were made")
    try:
        load(ours, 1)
    except nvme_gpu.Usage as error:
        assert "rows" in error.cause
    else:
        raise SystemExit("another checkpoint was taken for this one")
    print(json.dumps({"vllm": vllm.__version__, "torch": torch.__version__, "rows_compared": compared, "equal": True}))


if __name__ == "__main__":
    main(sys.argv[1])
