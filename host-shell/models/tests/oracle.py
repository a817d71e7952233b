"""Compares `nvme-gpu generate` with llama.cpp: the same weights, widened to float32, and greedy choice.

    pip install xllamacpp gguf numpy
    nvme-gpu generate MODEL.gguf --prompt TEXT --json --logits run.npy > run.json
    python oracle.py MODEL.gguf run.json,run.npy [MORE.json,MORE.npy]

A line of JSON for each run. The exit code is 1 when tokens differ, or numbers by more than the tolerance.
"""

import argparse
import json
import pathlib
import sys
import tempfile

import gguf
import numpy
import xllamacpp


def widen(model: pathlib.Path, out: pathlib.Path) -> None:
    """Writes the model with every tensor as float32."""
    reader, writer = gguf.GGUFReader(model), gguf.GGUFWriter(out, "llama")
    own = ("general.architecture", "general.file_type", "general.quantization_version")
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key in own:
            continue
        kind = field.types[0]
        element = field.types[1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), kind, element)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        wide = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, numpy.ascontiguousarray(wide, dtype=numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def server(model: pathlib.Path) -> xllamacpp.Server:
    """llama.cpp with keys and values in float32."""
    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.n_ctx, params.n_parallel, params.warmup = 2048, 1, False
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return xllamacpp.Server(params)


def compare(llama: xllamacpp.Server, report: dict, logits: numpy.ndarray) -> dict:
    """What llama.cpp makes of the same prompt, and the largest difference of the logarithms of its five likeliest."""
    tokens = report["tokens"]
    answer = llama.handle_completions(
        {
            "prompt": report["prompt_tokens"],
            "max_tokens": len(tokens),
            "temperature": 0,
            "top_k": 1,
            "logprobs": 5,
            "cache_prompt": False,
        }
    )
    steps = answer["choices"][0]["logprobs"]["content"]
    wide = logits.astype(numpy.float64)
    wide -= wide.max(axis=1, keepdims=True)
    wide -= numpy.log(numpy.exp(wide).sum(axis=1, keepdims=True))
    apart = 0.0
    for row, step in zip(wide, steps, strict=False):
        for likely in step["top_logprobs"]:
            apart = max(apart, abs(likely["logprob"] - float(row[likely["id"]])))
    return {"tokens_equal": [step["id"] for step in steps] == tokens, "tokens": len(tokens), "apart": apart}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("runs", nargs="+", metavar="REPORT,LOGITS")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="of a logarithm of a probability")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wide = pathlib.Path(folder) / "float32.gguf"
        widen(args.model, wide)
        llama = server(wide)
        good = True
        for run in args.runs:
            report, logits = run.split(",")
            with open(report, encoding="utf-8") as file:
                found = compare(llama, json.load(file), numpy.load(logits))
            good &= found["tokens_equal"] and found["apart"] <= args.tolerance
            print(json.dumps({"run": report, **found}), flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
