"""Compares `nvme-gpu generate` with transformers: the same weights, widened to float32, and greedy choice.

    pip install torch transformers gguf
    nvme-gpu generate MODEL.gguf --gpu --prompt TEXT --json --logits run.npy > run.json
    python beside_transformers.py MODEL.gguf run.json,run.npy [MORE.json,MORE.npy]

A line of JSON for each run. The exit code is 1 when tokens differ, or numbers by more than the tolerance, which is in
parts of the distance of a step's largest and smallest number.
"""

import argparse
import json
import pathlib
import sys

import gguf
import numpy
import torch
import transformers


def mixture(reader: gguf.GGUFReader) -> transformers.PreTrainedModel:
    """Mixtral: transformers does not read it from such a file."""

    def key(name: str) -> float:
        return reader.fields[f"llama.{name}"].contents()

    heads, kv_heads = key("attention.head_count"), key("attention.head_count_kv")
    rows = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    embedding = rows["token_embd.weight"]
    config = transformers.MixtralConfig(
        vocab_size=embedding.shape[0],
        hidden_size=key("embedding_length"),
        intermediate_size=key("feed_forward_length"),
        num_hidden_layers=key("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=key("attention.key_length"),
        num_local_experts=key("expert_count"),
        num_experts_per_tok=key("expert_used_count"),
        max_position_embeddings=key("context_length"),
        rms_norm_eps=key("attention.layer_norm_rms_epsilon"),
        rope_theta=key("rope.freq_base"),
        sliding_window=None,
        attn_implementation="eager",
    )
    model = transformers.MixtralForCausalLM(config).float()

    def halves(matrix: numpy.ndarray, count: int) -> numpy.ndarray:
        """Rows of heads whose pairs are neighbours, as transformers has them: the first half, then the second."""
        pairs = matrix.reshape(count, -1, 2, matrix.shape[-1])
        return pairs.swapaxes(1, 2).reshape(matrix.shape)

    def copy(to: torch.Tensor, array: numpy.ndarray) -> None:
        to.data.copy_(torch.from_numpy(numpy.array(array, dtype=numpy.float32)).reshape(to.shape))

    copy(model.model.embed_tokens.weight, embedding)
    copy(model.lm_head.weight, rows.get("output.weight", embedding))
    copy(model.model.norm.weight, rows["output_norm.weight"])
    for index, layer in enumerate(model.model.layers):
        of = {name.split(".")[2]: array for name, array in rows.items() if name.startswith(f"blk.{index}.")}
        copy(layer.input_layernorm.weight, of["attn_norm"])
        copy(layer.post_attention_layernorm.weight, of["ffn_norm"])
        copy(layer.self_attn.q_proj.weight, halves(of["attn_q"], heads))
        copy(layer.self_attn.k_proj.weight, halves(of["attn_k"], kv_heads))
        copy(layer.self_attn.v_proj.weight, of["attn_v"])
        copy(layer.self_attn.o_proj.weight, of["attn_output"])
        copy(layer.mlp.gate.weight, of["ffn_gate_inp"])
        copy(layer.mlp.experts.gate_up_proj, numpy.concatenate([of["ffn_gate_exps"], of["ffn_up_exps"]], axis=1))
        copy(layer.mlp.experts.down_proj, of["ffn_down_exps"])
    return model


def load(model: pathlib.Path) -> transformers.PreTrainedModel:
    """The model with every weight as float32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    reader = gguf.GGUFReader(model)
    if "llama.expert_count" in reader.fields:
        return mixture(reader).to("cuda" if torch.cuda.is_available() else "cpu").eval()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        model.parent, gguf_file=model.name, dtype=torch.float32, attn_implementation="eager"
    )
    return loaded.to("cuda" if torch.cuda.is_available() else "cpu").eval()


@torch.no_grad()
def compare(model: transformers.PreTrainedModel, report: dict, numbers: numpy.ndarray) -> dict:
    """What the model makes of the same prompt and tokens, and the largest difference of its numbers."""
    prompt, tokens = report["prompt_tokens"], report["tokens"]
    text = torch.tensor([prompt + tokens[:-1]], device=model.device)
    theirs = model(text).logits[0, len(prompt) - 1 :].double().cpu().numpy()
    apart = numpy.abs(theirs - numbers).max(axis=1) / (theirs.max(axis=1) - theirs.min(axis=1))
    chosen = theirs.argmax(axis=1).tolist()
    return {"tokens_equal": chosen == tokens, "tokens": len(tokens), "apart": float(apart.max())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("runs", nargs="+", metavar="REPORT,LOGITS")
    parser.add_argument("--tolerance", type=float, default=1e-4)
    args = parser.parse_args()
    model, bad = load(args.model), 0
    for run in args.runs:
        report, logits = run.split(",")
        found = compare(model, json.loads(pathlib.Path(report).read_text()), numpy.load(logits))
        bad += not found["tokens_equal"] or not found["apart"] <= args.tolerance
        print(json.dumps({"run": report, "transformers": transformers.__version__, **found}))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
