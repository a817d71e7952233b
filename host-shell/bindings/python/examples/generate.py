"""Text by a small llama whose layers stream from NVMe: numpy computes, two layers at a time are in memory.

    python generate.py [--tokens 12] [--layers 8] [--device DEVICE]

`LayerLoader` reads the next layer while one computes; the embeddings of the tokens are gathered, `table[ids]`. Tokens
are bytes and the weights are random, so the text means nothing: its tokens are compared with those of the same model
as a whole in memory. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy

import nvme_gpu

WIDTH, HEADS, HIDDEN, VOCABULARY = 128, 4, 320, 256
ELEMENTS = WIDTH // HEADS
EMBEDDINGS = "model.embed_tokens.weight"


def random_model(layers: int) -> dict[str, numpy.ndarray]:
    """Weights by the names that transformers gives them; the embeddings are the last matrix, too."""
    random = numpy.random.default_rng(1)
    shapes = {EMBEDDINGS: (VOCABULARY, WIDTH)}
    for layer in range(layers):
        for name in "qkvo":
            shapes[f"model.layers.{layer}.self_attn.{name}_proj.weight"] = (WIDTH, WIDTH)
        for name in ("gate", "up"):
            shapes[f"model.layers.{layer}.mlp.{name}_proj.weight"] = (HIDDEN, WIDTH)
        shapes[f"model.layers.{layer}.mlp.down_proj.weight"] = (WIDTH, HIDDEN)
    return {name: random.normal(0, 0.1, shape).astype("<f4") for name, shape in shapes.items()}


def save(path: Path, model: dict[str, numpy.ndarray]) -> None:
    """As safetensors: the length of a header, the header in JSON, the bytes of all tensors."""
    header, end = {}, 0
    for name, value in model.items():
        header[name] = {"dtype": "F32", "shape": value.shape, "data_offsets": (end, end + value.nbytes)}
        end += value.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(map(numpy.ndarray.tobytes, model.values())))


def normed(x: numpy.ndarray) -> numpy.ndarray:
    return x / numpy.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5)


def turned(x: numpy.ndarray, places: numpy.ndarray) -> numpy.ndarray:
    """Rotary position embeddings of rows (place, head, element)."""
    half = ELEMENTS // 2
    angles = places[:, None, None] / 10_000 ** (numpy.arange(half) / half)
    sin, cos, a, b = numpy.sin(angles), numpy.cos(angles), x[..., :half], x[..., half:]
    return numpy.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)


class Llama:
    """A model without its weights. `layers` gives them, a mapping for each layer, once for every call of `step`."""

    def __init__(self, layers: Callable[[], Iterator], embeddings: numpy.ndarray) -> None:
        self.layers, self.embeddings = layers, embeddings
        self.past: dict[int, tuple] = {}

    def step(self, x: numpy.ndarray) -> int:
        """The token after those whose embeddings are the rows of `x`."""
        for number, weights in enumerate(self.layers()):
            x = self.layer(number, weights, x)
        return int((normed(x[-1]) @ self.embeddings.T).argmax())

    def layer(self, number: int, weights, x: numpy.ndarray) -> numpy.ndarray:
        def product(name: str, value: numpy.ndarray) -> numpy.ndarray:
            return value @ weights[f"{name}_proj.weight"].T

        empty = numpy.empty((0, HEADS, ELEMENTS))
        keys, values = self.past.get(number, (empty, empty))
        places = numpy.arange(len(keys), len(keys) + len(x))
        y = normed(x)
        q, k, v = (product(f"self_attn.{name}", y).reshape(-1, HEADS, ELEMENTS) for name in "qkv")
        keys, values = numpy.concatenate((keys, turned(k, places))), numpy.concatenate((values, v))
        self.past[number] = keys, values
        scores = numpy.einsum("qhe,khe->hqk", turned(q, places), keys) / ELEMENTS**0.5
        scores[:, numpy.arange(len(keys)) > places[:, None]] = -numpy.inf
        shares = numpy.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        x = x + product("self_attn.o", numpy.einsum("hqk,khe->qhe", shares, values).reshape(x.shape))
        y = normed(x)
        gate = product("mlp.gate", y)
        return x + product("mlp.down", gate / (1 + numpy.exp(-gate)) * product("mlp.up", y))


def generate(model: Llama, rows: Callable, prompt: bytes, tokens: int) -> list[int]:
    """`rows`: the embeddings of tokens."""
    made = [model.step(rows(list(prompt)))]
    while len(made) < tokens:
        made.append(model.step(rows(made[-1:])))
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--device", default="sim:mem?size=64MiB&threads=2", help="it is written to")
    parser.add_argument("--cpu", action="store_true", help="numpy computes on the CPU with or without it")
    words = parser.parse_args()
    whole, prompt = random_model(words.layers), b"Once upon a time"

    with nvme_gpu.open(words.device) as store, tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "model.safetensors")
        save(file, whole)
        catalog = nvme_gpu.import_file(store, file)
        table = catalog[EMBEDDINGS].as_table()
        with nvme_gpu.LayerLoader(catalog, "cpu", slots=2) as loader:

            def streamed() -> Iterator[nvme_gpu.Layer]:
                for number in range(len(loader)):
                    with loader.layer(number) as weights:
                        yield weights

            found = generate(Llama(streamed, table[range(VOCABULARY)]), table.gather, prompt, words.tokens)
            path, stats = loader.path, loader.stats()

    def in_memory() -> Iterator[dict[str, numpy.ndarray]]:
        for number in range(words.layers):
            prefix = f"model.layers.{number}."
            yield {name.removeprefix(prefix): value for name, value in whole.items() if name.startswith(prefix)}

    embeddings = whole[EMBEDDINGS]
    want = generate(Llama(in_memory, embeddings), embeddings.__getitem__, prompt, words.tokens)
    print(bytes(found))
    answer = {
        "tokens": found,
        "layers": len(loader),
        "bytes_in_memory": path["slots"] * path["slot_bytes"],
        "bytes_read": stats["bytes"],
        "ready": stats["ready"],
        "checked": "right" if found == want else "WRONG",
    }
    print(json.dumps(answer))
    return 0 if found == want else 3


if __name__ == "__main__":
    sys.exit(main())
