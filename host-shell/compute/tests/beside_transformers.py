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

import numpy
import torch
import transformers


def load(model: pathlib.Path) -> transformers.PreTrainedModel:
    """The model with every weight as float32."""
    torch.backends.cuda.matmul.allow_tf32 = False
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
