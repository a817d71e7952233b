"""Models of transformers whose experts stay in files: tokens and logits are those of the same model in memory.

NVME_GPU_TEST_DEVICE=cuda puts models and caches on a GPU."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
import transformers
from experts_stand_in import safetensors

import nvme_gpu
from nvme_gpu.transformers import load_model, stream_experts

pytestmark = pytest.mark.by_hand

# Sums of several threads are not added in one order.
torch.set_num_threads(1)
DEVICE = os.environ.get("NVME_GPU_TEST_DEVICE", "cpu")
WIDTH, EXPERTS, STEPS = 64, 8, 32
COMMON = {
    "vocab_size": 128,
    "hidden_size": WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "num_experts_per_tok": 2,
}
OF_QWEN = {"intermediate_size": 96, "moe_intermediate_size": 48, "num_experts": EXPERTS}
OF_V3 = {
    **{"intermediate_size": 96, "moe_intermediate_size": 48, "n_routed_experts": EXPERTS, "n_shared_experts": 1},
    **{"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
}
LATENT = {
    "num_key_value_heads": 4,
    "head_dim": None,
    **{"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16},
}
OF_V4 = {
    **{"num_key_value_heads": 1, "moe_intermediate_size": 48, "n_routed_experts": EXPERTS, "n_shared_experts": 1},
    **{"q_lora_rank": 32, "o_groups": 2, "o_lora_rank": 16, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8},
    **{"sliding_window": 16, "hc_mult": 2, "partial_rotary_factor": 0.5, "num_nextn_predict_layers": 0},
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
}
OF_NEXT = {
    **{"shared_expert_intermediate_size": 32, "linear_num_value_heads": 4, "linear_num_key_heads": 2},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4},
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
FAMILIES = {
    "gpt_oss": ("GptOssConfig", {"intermediate_size": 96, "num_local_experts": EXPERTS, "sliding_window": 16}),
    "mixtral": ("MixtralConfig", {"intermediate_size": 96, "num_local_experts": EXPERTS}),
    "qwen3_moe": ("Qwen3MoeConfig", {**OF_QWEN, "norm_topk_prob": True}),
    "glm4_moe": ("Glm4MoeConfig", OF_V3),
    "deepseek_v3": ("DeepseekV3Config", {**OF_V3, **LATENT, "n_group": 4, "topk_group": 2}),
    "deepseek_v4": ("DeepseekV4Config", OF_V4),
    "qwen3_next": ("Qwen3NextConfig", {**OF_QWEN, **OF_NEXT}),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", {**OF_QWEN, **OF_NEXT}),
}


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def model_of(family, dtype=torch.float32, **more):
    """A model with random numbers, also where transformers has zeros, so that routers choose."""
    name, sizes = FAMILIES[family]
    given = {key: value for key, value in {**COMMON, **sizes, **more}.items() if value is not None or key == "eos_token_id"}
    config = getattr(transformers, name)(**given)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    generator = torch.Generator().manual_seed(1)
    for key, one in [*model.named_parameters(), *model.named_buffers()]:
        if key.endswith("tid2eid"):
            one.copy_(torch.stack([torch.randperm(EXPERTS, generator=generator)[:2] for _ in range(len(one))]))
        elif one.is_floating_point() and "inv_freq" not in key and "norm" not in key:
            one.copy_((torch.randn(one.shape, generator=generator) * 0.15).to(one.dtype))
    return model.to(DEVICE)


def prompts(count=3, length=9):
    return torch.randint(2, 128, (count, length), generator=torch.Generator().manual_seed(2)).to(DEVICE)


def written(model, ids):
    mask = torch.ones_like(ids)
    if len(ids) > 1:
        # A shorter prompt of the batch begins later.
        mask[0, :4] = 0
    return model.generate(ids, attention_mask=mask, max_new_tokens=STEPS, do_sample=False)


def expert_bytes(model):
    block = next(one for one in model.modules() if hasattr(one, "gate_up_proj") and hasattr(one, "num_experts"))
    return sum(one[0].numel() * one.element_size() for one in block.parameters())


def same(model, streamed, stream, counts=(3, 1)):
    """Whether logits and tokens are equal, and something was read and made room."""
    ids = prompts()
    assert torch.equal(streamed(ids).logits, model(ids).logits)
    for count in counts:
        wanted = written(model, prompts(count))
        assert torch.equal(written(streamed, prompts(count)), wanted)
        assert len(set(wanted.flatten().tolist())) > 20, "the model says one thing again and again"
    found = stream.counts()
    assert found.failed == 0 and found.evictions > 0 and stream.slots < EXPERTS * 3
    assert found.hits > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_the_model_in_memory(tmp_path, family):
    model = model_of(family)
    model.save_pretrained(tmp_path)
    other = model_of(family)
    each = expert_bytes(model)
    with stream_experts(other, tmp_path, cache_bytes=11 * each + 1024, reads=4) as stream:
        assert stream.memory_bytes <= 11 * each + 1024
        same(model, other, stream)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_loaded_without_its_experts(tmp_path, family):
    # transformers 5.19 loads parts of DeepSeek-V4 as float32, which its head of bfloat16 does not take.
    dtype = torch.float32 if family == "deepseek_v4" else torch.bfloat16
    model_of(family, dtype).save_pretrained(tmp_path, max_shard_size="200KB")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, device_map=DEVICE).eval()
    each = expert_bytes(model)
    other, stream = load_model(
        tmp_path, cache_bytes=13 * each + 4096, dtype=dtype, device_map=DEVICE, stream_options={"reads": 3, "guesses": 2}
    )
    with stream:
        assert type(other) is type(model) and not other.training
        names = {name for name, _ in model.named_parameters()}
        left = {name for name, _ in other.named_parameters()}
        assert left == {name for name in names if ".experts." not in name}
        assert all(one.device.type == DEVICE for one in other.parameters())
        same(model, other, stream)
        counts = stream.counts()
        assert counts.guesses > 0 and counts.guesses_used > 0


@pytest.mark.parametrize("chosen", ["eager", "batched_mm"])
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe", "deepseek_v4"])
def test_each_way_of_products_gives_its_own_bits(tmp_path, family, chosen):
    model, other = model_of(family, torch.bfloat16), model_of(family, torch.bfloat16)
    model.save_pretrained(tmp_path)
    with stream_experts(other, tmp_path, cache_bytes=10 * expert_bytes(model) + 1024, reads=2) as stream:
        for one in (model, other):
            one.set_experts_implementation(chosen)
        same(model, other, stream)


VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def packed_of(rows, columns, generator, count=None):
    """Random E2M1 with a scale for 32: bytes of two elements, scales as bytes."""
    shape = (rows, columns) if count is None else (count, rows, columns)
    codes = torch.randint(0, 16, shape, generator=generator)
    scales = torch.randint(119, 125, (*shape[:-1], columns // 32), generator=generator)
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8), scales.to(torch.uint8)


def replaced(folder, tensors, names=None, quantisation=None):
    """Writes a checkpoint's file anew, with other tensors for the experts."""
    from safetensors.torch import load_file

    kept = {name: one for name, one in load_file(folder / "model.safetensors").items() if ".experts." not in name}
    kept.update(tensors)
    safetensors(folder / "model.safetensors", kept, names)
    if quantisation:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = quantisation
        (folder / "config.json").write_text(json.dumps(config))


def test_gpt_oss_as_it_is_published(tmp_path):
    generator = torch.Generator().manual_seed(3)
    model = model_of("gpt_oss", torch.bfloat16)
    model.save_pretrained(tmp_path)
    tensors = {}
    for layer in range(3):
        bank = f"model.layers.{layer}.mlp.experts"
        for name, rows, columns in (("gate_up_proj", 192, WIDTH), ("down_proj", WIDTH, 96)):
            packed, scales = packed_of(rows, columns, generator, EXPERTS)
            tensors[f"{bank}.{name}_blocks"] = packed.reshape(EXPERTS, rows, columns // 32, 16)
            tensors[f"{bank}.{name}_scales"] = scales
            tensors[f"{bank}.{name}_bias"] = (torch.randn(EXPERTS, rows, generator=generator) * 0.1).bfloat16()
    replaced(tmp_path, tensors, quantisation={"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]})
    whole = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, device_map=DEVICE, quantization_config=transformers.Mxfp4Config(dequantize=True)
    ).eval()
    other, stream = load_model(
        tmp_path, cache_bytes=450_000, dtype=torch.bfloat16, device_map=DEVICE, stream_options={"reads": 2}
    )
    with stream:
        assert {one.format for one in stream.files.layout(0).matrices(0)} == {"mxfp4 (low nibble first)"}
        same(whole, other, stream)


def test_fp8_with_scales_of_blocks_as_qwen_and_glm_publish_it(tmp_path):
    generator = torch.Generator().manual_seed(4)
    model = model_of("qwen3_moe", torch.bfloat16, hidden_size=128, moe_intermediate_size=128, intermediate_size=128)
    model.save_pretrained(tmp_path)
    tensors = {}
    for layer in range(3):
        for expert in range(EXPERTS):
            for name in ("gate_proj", "up_proj", "down_proj"):
                at = f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"
                tensors[at] = torch.randn(128, 128, generator=generator).to(torch.float8_e4m3fn).view(torch.uint8)
                tensors[f"{at}_scale_inv"] = torch.rand(1, 1, generator=generator) * 0.2 + 0.05
    names = {name: "F8_E4M3" for name in tensors if name.endswith("weight")}
    quantisation = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    replaced(tmp_path, tensors, names, {**quantisation, "modules_to_not_convert": ["self_attn", "lm_head", "gate"]})
    whole = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, device_map=DEVICE, quantization_config=transformers.FineGrainedFP8Config(dequantize=True)
    ).eval()
    other, stream = load_model(
        tmp_path, cache_bytes=1_400_000, dtype=torch.bfloat16, device_map=DEVICE, stream_options={"reads": 2}
    )
    with stream:
        assert {one.format for one in stream.files.layout(0).matrices(0)} == {"float8_e4m3fn 128x128"}
        same(whole, other, stream)


def test_deepseek_v4_as_it_is_published(tmp_path):
    generator = torch.Generator().manual_seed(5)
    model = model_of("deepseek_v4", torch.float32, moe_intermediate_size=64)
    model.save_pretrained(tmp_path)
    from safetensors.torch import load_file

    banks = {name.partition(".experts.")[0] for name in load_file(tmp_path / "model.safetensors") if ".experts." in name}
    tensors, names = {}, {}
    for bank in sorted(banks):
        for expert in range(EXPERTS):
            for name in ("w1", "w2", "w3"):
                at = f"{bank}.experts.{expert}.{name}"
                tensors[f"{at}.weight"], tensors[f"{at}.scale"] = packed_of(64, WIDTH, generator)
                names |= {f"{at}.weight": "I8", f"{at}.scale": "F8_E8M0"}
    assert len(banks) == 3
    quantisation = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    replaced(tmp_path, tensors, names, quantisation)
    whole = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, device_map=DEVICE, quantization_config=transformers.FineGrainedFP8Config(dequantize=True)
    ).eval()
    other, stream = load_model(
        tmp_path, cache_bytes=700_000, dtype=torch.float32, device_map=DEVICE, stream_options={"reads": 2}
    )
    with stream:
        assert {one.format for one in stream.files.layout(0).matrices(0)} == {"mxfp4 (low nibble first)"}
        same(whole, other, stream)


def test_a_failed_read_never_gives_another_token(tmp_path):
    model = model_of("qwen3_moe")
    model.save_pretrained(tmp_path)
    drive = tmp_path / "drive.img"
    shutil.copy(tmp_path / "model.safetensors", drive)
    with open(drive, "r+b") as file:
        file.truncate(8 << 20)
    ids, each = prompts(), expert_bytes(model)
    wanted, failures = written(model, ids), 0
    for nth in (40, 60, 100):
        with nvme_gpu.open(f"sim:{drive}?fault=status:0x281@op=read,nth={nth}", queues=1) as store:
            other = model_of("qwen3_moe")
            with stream_experts(other, store, cache_bytes=8 * each, reads=2) as stream:
                try:
                    found = written(other, ids)
                except nvme_gpu.Status as error:
                    failures += 1
                    assert "of model.layers." in str(error) and stream.counts().failed == 1
                    found = written(other, ids)
                assert torch.equal(found, wanted)
    assert failures == 3


def test_models_that_are_not_known_are_refused(tmp_path):
    model_of("qwen3_moe").save_pretrained(tmp_path)
    config = transformers.Qwen2MoeConfig(**{**COMMON, **OF_QWEN, "shared_expert_intermediate_size": 32})
    with pytest.raises(nvme_gpu.Usage, match="of the class Qwen2MoeExperts, which is not known"):
        stream_experts(transformers.AutoModelForCausalLM.from_config(config), tmp_path, cache_bytes=1 << 20)
    with pytest.raises(nvme_gpu.Usage, match="has 8 experts, and model.layers.0.mlp.experts 4"):
        stream_experts(model_of("qwen3_moe", num_experts=4), tmp_path, cache_bytes=1 << 20)
    with pytest.raises(nvme_gpu.Usage, match="matrices of 64 x 48, and the block's are of 64 x 32"):
        stream_experts(model_of("qwen3_moe", moe_intermediate_size=32), tmp_path, cache_bytes=1 << 20)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(nvme_gpu.Usage, match="quantised by awq"):
        load_model(tmp_path, cache_bytes=1 << 20)
