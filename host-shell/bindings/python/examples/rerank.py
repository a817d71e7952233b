"""Sentences in the order of their likeness to a question; word vectors are gathered from NVMe.

    python rerank.py [--cpu] [QUESTION SENTENCE...]

A sentence's vector is the mean of its words' rows: `table[ids]`, with the ids of a tokenizer. The table is that of the
package wordllama (32,000 rows of 512 bytes that begin at byte 96 of a safetensors file), imported to a simulated drive.
The vectors are compared with wordllama's own. The last line is JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import sys
from pathlib import Path

import numpy

import nvme_gpu

QUESTION = "Which drive answers small random reads fastest?"
SENTENCES = [
    "Solid state disks serve thousands of tiny requests at once.",
    "The recipe needs two eggs and a cup of flour.",
    "A hard disk moves its head for every random access.",
    "She plays the violin in a small orchestra.",
    "Queue depth hides the latency of flash memory.",
    "Trains to the coast leave every hour.",
]


def vectors(table: nvme_gpu.Table, tokenizer, texts: list[str], use_gpu: bool) -> numpy.ndarray:
    """One vector for each text: the mean of its words' rows."""
    encoded = [one.ids for one in tokenizer.encode_batch(texts, add_special_tokens=False)]
    longest = max(map(len, encoded))
    ids = numpy.zeros((len(texts), longest), dtype=numpy.int64)
    mask = numpy.zeros((len(texts), longest, 1), dtype=numpy.float32)
    for row, one in enumerate(encoded):
        ids[row, : len(one)], mask[row, : len(one)] = one, 1
    if use_gpu:
        import torch

        rows = table[torch.from_numpy(ids).cuda()].float()
        on_gpu = torch.from_numpy(mask).cuda()
        return ((rows * on_gpu).sum(1) / on_gpu.sum(1)).cpu().numpy()
    rows = table[ids].astype(numpy.float32)
    return (rows * mask).sum(axis=1) / mask.sum(axis=1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="use no GPU")
    parser.add_argument("texts", nargs="*")
    words = parser.parse_args()
    question, *sentences = words.texts if len(words.texts) > 1 else [QUESTION, *SENTENCES]
    found = importlib.util.find_spec("wordllama")
    if found is None or found.origin is None:
        print("wordllama is not installed: pip install wordllama", file=sys.stderr)
        return 6
    folder = Path(found.origin).parent
    from safetensors.numpy import load_file
    from wordllama.inference import WordLlamaInference
    from wordllama.wordllama import WordLlama

    logging.disable(logging.INFO)
    weights = folder / "weights" / "l2_supercat_256.safetensors"
    words_of = folder / "tokenizers" / "l2_supercat_tokenizer_config.json"
    theirs = WordLlamaInference(load_file(weights)["embedding.weight"], WordLlama.load_tokenizer(words_of))
    tokenizer = WordLlama.load_tokenizer(words_of)
    tokenizer.no_padding()

    gpu, note = None if words.cpu else 0, "--cpu was given" if words.cpu else ""
    device = "sim:mem?size=64MiB&queues=32&threads=2"
    try:
        store = nvme_gpu.open(device, gpu)
    except nvme_gpu.NvmeGpuError as error:
        store, gpu, note = nvme_gpu.open(device), None, f"without a GPU: {error.cause}"
    if gpu is not None and not _has_torch():
        gpu, note = None, "torch with CUDA is not installed: ids on the CPU"
    with store:
        table = nvme_gpu.import_file(store, weights)["embedding.weight"].as_table()
        ours = vectors(table, tokenizer, [question, *sentences], gpu is not None)
        table.check()
    want = theirs.embed([question, *sentences])
    difference = float(numpy.abs(ours - want).max())
    norm = ours / numpy.linalg.norm(ours, axis=1, keepdims=True)
    scores = norm[1:] @ norm[0]
    order = numpy.argsort(-scores)
    their_norm = want / numpy.linalg.norm(want, axis=1, keepdims=True)
    same_order = bool((order == numpy.argsort(-(their_norm[1:] @ their_norm[0]))).all())
    print(question)
    for place in order:
        print(f"{scores[place]:7.3f}  {sentences[place]}")
    right = difference < 1e-4 and same_order
    answer = {
        "rows": len(table),
        "row_bytes": table.row_bytes,
        "sentences": len(sentences),
        "by": "cpu" if gpu is None else "gpu",
        "largest_difference": difference,
        "same_order": same_order,
        "best": sentences[order[0]],
        "checked": "right" if right else "WRONG",
        "note": note,
    }
    print(json.dumps(answer))
    return 0 if right else 3


def _has_torch() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


if __name__ == "__main__":
    sys.exit(main())
