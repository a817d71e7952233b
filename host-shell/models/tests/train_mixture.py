"""Trains a small mixture of experts (Mixtral, bytes as tokens) on the project's documents, and has transformers go on.

    pip install torch transformers safetensors
    python host-shell/models/tests/train_mixture.py host-shell/models/tests/mixture [--seconds 60] [--text DIR]

Writes config.json and model.safetensors (bf16, names of Mixtral's checkpoints) and tokens.json: for each prompt the
bytes that MixtralForCausalLM of those files chooses, in float32. `cargo test -p nvme-models mixture` compares.
"""

import argparse
import json
import math
import pathlib
import sys
import time

import torch
import transformers
from safetensors.torch import save_file

PROMPTS = ["The drive reads", "A queue has ", "On a GPU ", "## Limits\n"]
TOKENS = 64
LENGTH, BATCH = 192, 96
CONFIG = {
    "vocab_size": 256,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.02,
    "bos_token_id": None,
    "eos_token_id": None,
}


def corpus(folder: pathlib.Path) -> torch.Tensor:
    """The bytes of all documents, in the order of their names."""
    files = [folder / "README.md", *sorted((folder / "docs").rglob("*.md"))]
    text = b"\n".join(path.read_bytes() for path in files)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def train(model, data: torch.Tensor, seconds: float, seed: int) -> dict:
    """Steps of AdamW until the time is over; the loss of held-out bytes, in bits for each."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    held = data[-len(data) // 20 :].to(device)
    data = data[: -len(data) // 20].to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.05)
    began, step, used = time.monotonic(), 0, 0.0
    while used < 1.0:
        used = min((time.monotonic() - began) / seconds, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 100) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * used)))
        starts = torch.randint(len(data) - LENGTH, (BATCH,), generator=generator)
        batch = torch.stack([data[start : start + LENGTH] for start in starts])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}", file=sys.stderr)
    return {"steps": step, "held_out_bits": bits(model, held), "device": str(device)}


@torch.no_grad()
def bits(model, held: torch.Tensor) -> float:
    count = min(len(held) // LENGTH, 64)
    batch = held[: count * LENGTH].reshape(count, LENGTH)
    logits = model(input_ids=batch).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), batch[:, 1:].reshape(-1))
    return loss.item() / math.log(2)


def save(model, folder: pathlib.Path) -> None:
    """In bf16, with the names of Mixtral's checkpoints: one tensor for each matrix of an expert."""
    tensors = {}
    for name, value in model.state_dict().items():
        value = value.detach().to("cpu", torch.bfloat16)
        if name == "lm_head.weight":
            continue
        name = name.replace(".mlp.gate.", ".block_sparse_moe.gate.")
        if name.endswith("mlp.experts.gate_up_proj"):
            for expert, both in enumerate(value):
                gate, up = both.chunk(2)
                of = name.replace("mlp.experts.gate_up_proj", f"block_sparse_moe.experts.{expert}")
                tensors[f"{of}.w1.weight"], tensors[f"{of}.w3.weight"] = gate.contiguous(), up.contiguous()
        elif name.endswith("mlp.experts.down_proj"):
            for expert, down in enumerate(value):
                of = name.replace("mlp.experts.down_proj", f"block_sparse_moe.experts.{expert}")
                tensors[f"{of}.w2.weight"] = down.contiguous()
        else:
            tensors[name] = value.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(
        json.dumps({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", **CONFIG}, indent=2) + "\n"
    )


@torch.no_grad()
def follow(folder: pathlib.Path) -> list[dict]:
    """What transformers makes of the files: greedy, on the CPU, in float32."""
    model, report = transformers.MixtralForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    missing = [name for name in report["missing_keys"] if name != "lm_head.weight"]
    if missing or report["unexpected_keys"]:
        raise SystemExit(f"names that do not fit: {missing[:3]} {list(report['unexpected_keys'])[:3]}")
    model.eval()
    runs = []
    for prompt in PROMPTS:
        tokens, least = list(prompt.encode()), math.inf
        for _ in range(TOKENS):
            logits = model(input_ids=torch.tensor([tokens])).logits[0, -1].double()
            best = logits.topk(2).values
            least = min(least, (best[0] - best[1]).item())
            tokens.append(int(logits.argmax()))
        ours = tokens[len(prompt.encode()) :]
        print(repr(prompt), "->", repr(bytes(ours).decode(errors="replace")), file=sys.stderr)
        runs.append({"prompt": prompt, "tokens": ours, "least_margin": round(least, 5)})
    return runs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to train")
    parser.add_argument("--text", type=pathlib.Path, default=pathlib.Path(__file__).parents[3], help="README and docs")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**CONFIG)).to(device)
    data = corpus(args.text)
    found = train(model, data, args.seconds, args.seed)
    save(model, args.folder)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    report = {**versions, "bytes": len(data), **found, "runs": follow(args.folder)}
    (args.folder / "tokens.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({key: value for key, value in report.items() if key != "runs"}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
