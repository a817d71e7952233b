"""Writes `families/tokens.json`: what transformers makes of the files that the test `families` writes.

    NVME_WRITE_FAMILIES=FOLDER cargo test -p nvme-models --test families
    pip install torch transformers gguf numpy
    python families.py FOLDER

Weights are widened to float32 by gguf, and tokens chosen greedily. The logits are those of the last token.
"""

import json
import pathlib
import sys

import gguf
import numpy
import torch
import transformers

PROMPTS = [[1], list(range(3, 60, 7)), [at * 37 % 400 for at in range(70)]]
TOKENS = 24


class Weights:
    """The tensors and keys of a file."""

    def __init__(self, path: pathlib.Path) -> None:
        reader = gguf.GGUFReader(path)
        self.fields = reader.fields
        self.family = self.fields["general.architecture"].contents()
        self.rows = {one.name: gguf.dequantize(one.data, one.tensor_type) for one in reader.tensors}

    def key(self, name: str) -> float:
        return self.fields[f"{self.family}.{name}"].contents()

    def key_or(self, name: str, value: float) -> float:
        return self.key(name) if f"{self.family}.{name}" in self.fields else value

    def layer(self, index: int) -> dict[str, torch.Tensor]:
        prefix = f"blk.{index}."
        return {name.removeprefix(prefix): tensor(rows) for name, rows in self.rows.items() if name.startswith(prefix)}


def tensor(rows: numpy.ndarray) -> torch.Tensor:
    return torch.from_numpy(numpy.array(rows, dtype=numpy.float32))


def shape(of: Weights) -> dict[str, object]:
    return {
        "vocab_size": of.rows["token_embd.weight"].shape[0],
        "hidden_size": of.key("embedding_length"),
        "num_hidden_layers": of.key("block_count"),
        "num_attention_heads": of.key("attention.head_count"),
        "num_key_value_heads": of.key("attention.head_count_kv"),
        "head_dim": of.key("attention.key_length"),
        "max_position_embeddings": of.key("context_length"),
        "rms_norm_eps": of.key("attention.layer_norm_rms_epsilon"),
        "attn_implementation": "eager",
        "tie_word_embeddings": True,
    }


def rope(of: Weights) -> dict[str, object]:
    plain = {"rope_theta": of.key("rope.freq_base"), "rope_type": "default"}
    if f"{of.family}.rope.scaling.type" not in of.fields:
        return plain
    return {
        "rope_theta": plain["rope_theta"],
        "rope_type": "yarn",
        "factor": of.key("rope.scaling.factor"),
        "original_max_position_embeddings": of.key("rope.scaling.original_context_length"),
        "beta_fast": of.key_or("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": of.key_or("rope.scaling.yarn_beta_slow", 1.0),
        # gpt-oss says so; for Qwen3 transformers rounds by default.
        **({"truncate": False} if of.family == "gpt-oss" else {}),
    }


def experts(of: Weights) -> dict[str, object]:
    return {
        "num_experts_per_tok": of.key("expert_used_count"),
        "moe_intermediate_size" if of.family == "qwen3moe" else "intermediate_size": of.key("expert_feed_forward_length"),
    }


def model_of(of: Weights) -> transformers.PreTrainedModel:
    """An empty model of the file's family."""
    common = {**shape(of), "rope_parameters": rope(of)}
    hidden = {"intermediate_size": of.key("feed_forward_length")}
    match of.family:
        case "llama":
            return transformers.LlamaForCausalLM(transformers.LlamaConfig(**common, **hidden))
        case "qwen3":
            return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**common, **hidden))
        case "qwen3moe":
            routed = {"num_experts": of.key("expert_count"), "norm_topk_prob": True, "decoder_sparse_step": 1}
            config = transformers.Qwen3MoeConfig(**common, **hidden, **experts(of), **routed)
            return transformers.Qwen3MoeForCausalLM(config)
        case "gpt-oss":
            routed = {"num_local_experts": of.key("expert_count"), "sliding_window": of.key("attention.sliding_window")}
            config = transformers.GptOssConfig(**common, **experts(of), **routed)
            return transformers.GptOssForCausalLM(config)
    raise SystemExit(f"unknown family {of.family}")


def halves(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of heads whose pairs are neighbours, as transformers has them: the first half, then the second."""
    return rows.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def interleaved(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Rows of gate and up in turns, as gpt-oss has them."""
    return torch.stack([gate, up], dim=2).flatten(1, 2)


def fill(model: transformers.PreTrainedModel, of: Weights) -> None:
    state = {"model.embed_tokens.weight": tensor(of.rows["token_embd.weight"])}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    state["model.norm.weight"] = tensor(of.rows["output_norm.weight"])
    for index in range(model.config.num_hidden_layers):
        layer, to = of.layer(index), f"model.layers.{index}."
        if of.family == "llama":
            layer["attn_q.weight"] = halves(layer["attn_q.weight"], model.config.num_attention_heads)
            layer["attn_k.weight"] = halves(layer["attn_k.weight"], model.config.num_key_value_heads)
        names = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
        names |= {"post_attention_norm": "post_attention_layernorm"}
        names |= {f"attn_{one}": f"self_attn.{one}_proj" for one in "qkv"} | {"attn_output": "self_attn.o_proj"}
        names |= {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
        names |= {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
        names |= {"ffn_gate_inp": "mlp.router" if of.family == "gpt-oss" else "mlp.gate"}
        for name, value in layer.items():
            kind, _, what = name.rpartition(".")
            if kind in names:
                state[f"{to}{names[kind]}.{what}"] = value
        if of.family == "qwen3moe":
            both = [layer["ffn_gate_exps.weight"], layer["ffn_up_exps.weight"]]
            state[f"{to}mlp.experts.gate_up_proj"] = torch.cat(both, dim=1)
            state[f"{to}mlp.experts.down_proj"] = layer["ffn_down_exps.weight"]
        if of.family == "gpt-oss":
            state[f"{to}self_attn.sinks"] = layer["attn_sinks.weight"]
            both = [layer[f"ffn_{one}_exps.weight"] for one in ("gate", "up")]
            state[f"{to}mlp.experts.gate_up_proj"] = interleaved(*both).transpose(1, 2)
            state[f"{to}mlp.experts.down_proj"] = layer["ffn_down_exps.weight"].transpose(1, 2)
            both = [layer[f"ffn_{one}_exps.bias"] for one in ("gate", "up")]
            state[f"{to}mlp.experts.gate_up_proj_bias"] = torch.stack(both, dim=2).flatten(1)
            state[f"{to}mlp.experts.down_proj_bias"] = layer["ffn_down_exps.bias"]
    model.load_state_dict(state)


@torch.no_grad()
def runs(path: pathlib.Path) -> list[dict[str, object]]:
    of = Weights(path)
    model = model_of(of).float().eval()
    fill(model, of)
    found = []
    for prompt in PROMPTS:
        text, margin = list(prompt), float("inf")
        for _ in range(TOKENS):
            logits = model(torch.tensor([text])).logits[0, -1]
            two = logits.topk(2).values
            margin = min(margin, float((two[0] - two[1]) / (logits.max() - logits.min())))
            text.append(int(logits.argmax()))
        print(path.name, transformers.__version__, "smallest margin", margin, "tokens", len(set(text[len(prompt) :])))
        numbers = [float(f"{number:.7g}") for number in logits.tolist()]
        found.append({"prompt": prompt, "tokens": text[len(prompt) :], "logits": numbers})
    return found


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    all_runs = {path.stem: runs(path) for path in sorted(folder.glob("*.gguf"))}
    out = pathlib.Path(__file__).parent / "families" / "tokens.json"
    lines = [f"{json.dumps(name)}: [\n" + ",\n".join(map(json.dumps, of)) + "\n]" for name, of in all_runs.items()]
    out.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
