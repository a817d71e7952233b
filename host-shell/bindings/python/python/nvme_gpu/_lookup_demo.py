"""``python -m nvme_gpu lookup-demo``: rows of lookup tables that a text selects, from files in the layout of the released
checkpoints, every bit compared.

Small tables are made and read from their files. With ``true_rows`` they have the published numbers of rows, and a simulated
drive computes the rows from their address: there are no files, and the output says so.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import tempfile
import time
from array import array
from builtins import open as open_file
from typing import Any, Callable, NamedTuple

from . import Array, Store, Table, Usage, import_file, lookup, lookup_table, open
from . import _buffers

Progress = Callable[[str], None]

ENGRAM = "layers.{}.engram.embed."
PLE = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding.shard_{}.weight"
ENGRAM_LAYERS, ENGRAM_FILES, ENGRAM_COLUMNS, ENGRAM_HEADS = (1, 14), 48, 256, 24
PLE_SHARDS, PLE_FILES = 128, 10
# The first prime is above this, and the number of classes of tokens: as published, and small.
ENGRAM_TRUE, ENGRAM_SMALL = (16_000_000, 99_092), (1_000, 0)
PLE_TRUE, PLE_SMALL = 20_000_000, 1_000
INDEX = "model.safetensors.index.json"
SPECIAL = ("<unk>", "<bos>", "<pad>")
TOKEN = re.compile(r"[A-Za-z]+|[0-9]|[!-~]| +")
GENERATED = "sim:generated?size={}&block=512"
FIRST_BYTE = 8 + 1016
"""Before the rows of a generated table: as many bytes as a header has, a multiple of 8 and of no block."""


class DemoTable(NamedTuple):
    """A table, the ids that a text selects, and its tensors in the order of rows."""

    name: str
    kind: str
    dtype: str
    ids: Any
    shape: tuple[int, int]
    tensors: tuple[str, ...]


def run(true_rows: bool, tokens: int, text: str | None, gpu: int | None, progress: Progress) -> dict[str, Any]:
    """What was read, how fast, and whether each bit is right."""
    numpy = _buffers.numpy()
    if numpy is None:
        raise Usage("the demonstration compares rows by numpy or torch, and numpy is not installed", "pip install numpy")
    progress("reading the text")
    what, words = _text(text)
    words = words[:tokens]
    if len(words) < tokens:
        words = (words * (tokens // max(len(words), 1) + 1))[:tokens]
    progress("hashing the text")
    with tempfile.TemporaryDirectory() as folder:
        tables = _tables(folder, words, true_rows)
        found: dict[str, Any] = {"text": what, "tokens": len(words), "true_rows": true_rows, "compared_by": _judge_name()}
        if true_rows:
            ways = _generated(tables, gpu, progress)
        else:
            ways = _from_files(folder, tables, gpu, progress)
    found["rows_are"] = (
        "generated: the simulated drive computes each row from its address, and there are no files"
        if true_rows
        else f"random bytes in {ENGRAM_FILES} and {PLE_FILES} files of safetensors, which were made for this run"
    )
    found["tables"] = [
        {"name": one.name, "rows": one.shape[0], "row_bytes": one.shape[1], "tensors": len(one.tensors), "ids": one.ids.size}
        for one in tables
    ]
    return found | {"ways": ways, "verified": all(one["right"] for one in ways)}


def shown(found: dict[str, Any]) -> str:
    """The answer as lines of text."""
    lines = [f"{found['tokens']} tokens of {found['text']}; rows compared by {found['compared_by']}"]
    lines.append(f"rows are {found['rows_are']}")
    for one in found["tables"]:
        in_tensors = f"{one['tensors']} tensor{'s' if one['tensors'] != 1 else ''}"
        lines.append(f"{one['name']:34} {one['rows']:>12,} rows of {one['row_bytes']} bytes in {in_tensors}, {one['ids']} asked for")
    for one in found["ways"]:
        word = "every bit right" if one["right"] else "WRONG"
        lines.append(f"{one['table']:34} {one['way']:28} {one['rows_per_s']:>12,} rows/s  {word}  {one['moved_by']}")
    return "\n".join(lines)


# ---- the text and its ids


def _text(path: str | None) -> tuple[str, list[str]]:
    """What the text is, and its words: the documentation of Python, which comes with it, unless a file is named."""
    if path is not None:
        with open_file(path, encoding="utf-8", errors="replace") as file:
            what, text = path, file.read()
    elif importlib.util.find_spec("pydoc_data") is not None:
        from pydoc_data.topics import topics

        what, text = "Python's language reference", "\n".join(topics.values())
    else:
        what, text = "the documentation of Python's module os", "\n".join(str(one.__doc__) for one in vars(os).values())
    words = TOKEN.findall(text)
    if not words:
        raise Usage(f"{what} has no words", "name a text with letters")
    return what, words


def _tokens(words: list[str], classes: int) -> tuple[dict[str, int], int]:
    """A vocabulary of the words, and how many of them read alike; ``classes``: to be filled up to as many, 0 for not."""
    vocabulary = {word: at for at, word in enumerate(SPECIAL)}
    for word in words:
        vocabulary.setdefault(word if word.strip() else " ", len(vocabulary))
    alike = len({word.lower() for word in vocabulary})
    for number in range(max(classes - alike, 0)):
        vocabulary[f"word{number:x}"] = len(vocabulary)
    return vocabulary, max(classes, alike)


def _primes(above: int) -> Any:
    """Primes from ``above`` on."""
    candidate = above | 1
    while True:
        if all(candidate % divisor for divisor in range(3, int(candidate**0.5) + 1, 2)):
            yield candidate
        candidate += 2


def _tables(folder: str, words: list[str], true_rows: bool) -> list[DemoTable]:
    base, classes = ENGRAM_TRUE if true_rows else ENGRAM_SMALL
    vocabulary, classes = _tokens(words, classes)
    ids = array("q", (vocabulary[word if word.strip() else " "] for word in words))
    primes = _primes(base)
    config = {
        "engram_layer_ids": list(ENGRAM_LAYERS),
        "engram_num_embeddings": [sum(next(primes) for _ in range(ENGRAM_HEADS)) for _ in ENGRAM_LAYERS],
        "engram_max_ngram_size": 4,
        "engram_vocab_size": base,
        "engram_n_heads": 8,
        "engram_head_dim": ENGRAM_COLUMNS,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": classes,
    }
    tokenizer = os.path.join(folder, "tokenizer.json")
    with open_file(tokenizer, "w", encoding="utf-8") as file:
        model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}
        json.dump({"version": "1.0", "added_tokens": [], "model": model}, file)
    engram = lookup.engram(config, tokenizer)
    made = []
    for layer in engram.layers:
        rows, name = engram.rows(layer), f"Engram, layer {layer}"
        chosen = engram.row_ids(layer, ids)
        made.append(DemoTable(f"{name}, E4M3", "engram", "float8_e4m3fn", chosen, (rows, 256), (ENGRAM.format(layer) + "weight",)))
        made.append(DemoTable(f"{name}, scales", "engram", "float8_e8m0fnu", chosen, (rows, 8), (ENGRAM.format(layer) + "scale",)))
    settings = {"ple_layer_ids": [2], "vocab_size": 248_320, "hidden_size": 2560, "eos_token_id": 248_046}
    settings["ngram_vocab_size_base"] = PLE_TRUE if true_rows else PLE_SMALL
    ple = lookup.qwen_ple(settings)
    rows = -(-ple.rows(1) // PLE_SHARDS) * PLE_SHARDS
    tensors = tuple(PLE.format(number) for number in range(PLE_SHARDS))
    made.append(DemoTable("Qwen PLE, E4M3", "ple", "float8_e4m3fn", ple.row_ids(1, ids), (rows, ple.columns), tensors))
    return made


# ---- files


def _from_files(folder: str, tables: list[DemoTable], gpu: int | None, progress: Progress) -> list[dict[str, Any]]:
    content = {one.name: random.Random(at).randbytes(one.shape[0] * one.shape[1]) for at, one in enumerate(tables)}
    ways: list[dict[str, Any]] = []
    for kind, count in (("engram", ENGRAM_FILES), ("ple", PLE_FILES)):
        of_kind = [one for one in tables if one.kind == kind]
        progress(f"writing {count} files")
        paths = _checkpoint(os.path.join(folder, kind), count, of_kind, content)
        nbytes = sum(_rounded(os.path.getsize(path)) for path in paths) + (1 << 20)
        with open(f"sim:mem?size={_rounded(nbytes)}&block=512{_shared(gpu)}", gpu) as store:
            at, catalogs = 0, []
            for path in paths:
                catalogs.append(import_file(store, path, offset=at))
                at += _rounded(os.path.getsize(path))
            for one in of_kind:
                progress(f"reading rows of {one.name}")
                wanted = _of_bytes(content[one.name], one)
                # The index stands for all files of the checkpoint.
                table = lookup_table(os.path.join(folder, kind, INDEX), one.tensors, shape=one.shape)
                with table.store:
                    ways.append(_way(one, table, wanted, "of the files"))
                ways.append(_way(one, lookup_table(catalogs, one.tensors, shape=one.shape), wanted, _of_drive(store)))
    return ways


def _checkpoint(folder: str, count: int, tables: list[DemoTable], content: dict[str, bytes]) -> list[str]:
    """Files of safetensors and their index: the tensors of ``tables`` by parts of equal size, among small ones of others."""
    os.mkdir(folder)
    files: list[list[tuple[str, str, list[int], bytes]]] = [[] for _ in range(count)]
    for number in range(count):
        files[number].append((f"layers.{number}.attn_norm.weight", "F32", [number % 7 + 1], bytes(4 * (number % 7 + 1))))
    # Tensors of one table are in any order; a table of one tensor has a file with its scales, and no other.
    for place, one in enumerate(tables):
        data, parts = content[one.name], len(one.tensors)
        shard = len(data) // parts
        order = random.Random(7).sample(range(parts), parts)
        for step, number in enumerate(order):
            to = step % count if parts > 1 else 2 + place // 2 * 14
            dtype = "F8_E4M3" if one.dtype == "float8_e4m3fn" else "F8_E8M0"
            shape = [one.shape[0] // parts, one.shape[1]]
            files[to].append((one.tensors[number], dtype, shape, data[number * shard : (number + 1) * shard]))
    paths, weight_map = [], {}
    for number, tensors in enumerate(files):
        name = f"model-{number + 1:05}-of-{count:05}.safetensors"
        header, at = {}, 0
        for tensor, dtype, shape, data in tensors:
            header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
            at, weight_map[tensor] = at + len(data), name
        text = json.dumps(header).encode()
        paths.append(os.path.join(folder, name))
        with open_file(paths[-1], "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text + b"".join(data for *_, data in tensors))
    with open_file(os.path.join(folder, INDEX), "w", encoding="utf-8") as file:
        json.dump({"metadata": {}, "weight_map": weight_map}, file)
    return paths


# ---- rows that are generated


def _generated(tables: list[DemoTable], gpu: int | None, progress: Progress) -> list[dict[str, Any]]:
    """Tables one after the other on a drive whose bytes follow from their address: each tensor behind a gap of a header."""
    places, at = [], 0
    for one in tables:
        shard = one.shape[0] // len(one.tensors) * one.shape[1]
        ranges = []
        for _ in one.tensors:
            ranges.append((at + FIRST_BYTE, shard))
            at += _rounded(FIRST_BYTE + shard)
        places.append(ranges)
    ways = []
    with open(GENERATED.format(_rounded(at)) + _shared(gpu), gpu, read_only=True) as store:
        for one, ranges in zip(tables, places):
            progress(f"reading rows of {one.name}")
            table = Table(store, ranges[0][0], one.shape, one.dtype, ranges=ranges if len(ranges) > 1 else None)
            ways.append(_way(one, table, _of_address(ranges, one), _of_drive(store)))
    return ways


def _of_address(ranges: list[tuple[int, int]], one: DemoTable) -> Callable[[], Any]:
    """The rows by the rule of the drive: eight bytes from byte 8 i on are number i of SplitMix64."""

    def wanted() -> Any:
        numpy: Any = _buffers.numpy()
        begins = numpy.array([begin for begin, _ in ranges], numpy.uint64)
        ids = numpy.ascontiguousarray(one.ids).reshape(-1).astype(numpy.uint64)
        of_shard = numpy.uint64(one.shape[0] // len(ranges))
        first = begins[(ids // of_shard).astype(numpy.int64)] + ids % of_shard * numpy.uint64(one.shape[1])
        # Rows and their places are multiples of eight bytes.
        index = first[:, None] // numpy.uint64(8) + numpy.arange(one.shape[1] // 8, dtype=numpy.uint64)
        word = (index + numpy.uint64(1)) * numpy.uint64(0x9E3779B97F4A7C15)
        word = (word ^ word >> numpy.uint64(30)) * numpy.uint64(0xBF58476D1CE4E5B9)
        word = (word ^ word >> numpy.uint64(27)) * numpy.uint64(0x94D049BB133111EB)
        return (word ^ word >> numpy.uint64(31)).astype("<u8").view(numpy.uint8).reshape(len(ids), one.shape[1])

    return wanted


# ---- gathers and their comparison


def _way(one: DemoTable, table: Table, wanted: Callable[[], Any], name: str) -> dict[str, Any]:
    """Gathers all ids, and compares the rows as they are stored; E4M3 also as bfloat16."""
    numpy: Any = _buffers.numpy()
    ids = numpy.ascontiguousarray(one.ids).reshape(-1)
    by_gpu = table.store.gpu is not None
    places: Any = _on_gpu(table.store, ids) if by_gpu else ids
    # What a first call sets up is not timed.
    _gathered(table, places[:1] if not by_gpu else places, by_gpu)
    begin = time.perf_counter()
    rows = _gathered(table, places, by_gpu)
    seconds = time.perf_counter() - begin
    stored = wanted()
    right = _same(_bytes(rows, one.shape[1]), stored)
    if one.dtype == "float8_e4m3fn":
        wide = _gathered(table, places, by_gpu, "bfloat16")
        right = right and _same(_bytes(wide, 2 * one.shape[1]), _bfloat16(stored))
    path = table.store.path
    return {
        "table": one.name,
        "way": name,
        "rows_per_s": round(len(ids) / seconds),
        "moved_by": path["why"] or path["path"],
        "right": right,
    }


def _gathered(table: Table, ids: Any, by_gpu: bool, dtype: str | None = None) -> Any:
    numpy: Any = _buffers.numpy()
    if by_gpu:
        return table.gather(ids, dtype=dtype, check="now")
    if dtype is not None:
        table = table._widened(dtype) or table
    return table.gather(ids, out=numpy.empty((len(ids), table._row_bytes), numpy.uint8))


def _on_gpu(store: Store, ids: Any) -> Array:
    """The ids in memory of the GPU, by way of another drive: no library of arrays is needed."""
    with open(f"sim:mem?size={_rounded(ids.nbytes) + (1 << 20)}&queues=32", gpu=store.gpu) as other:
        other.write(ids)
        made = Array((len(ids),), "int64", 8, store._native)
        other.read_into(made).result()
        return made


def _bytes(rows: Any, row_bytes: int) -> Any:
    numpy: Any = _buffers.numpy()
    found = numpy.frombuffer(rows.tobytes(), numpy.uint8) if isinstance(rows, Array) else rows
    return found.reshape(-1, row_bytes)


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        return None
    return torch


def _judge_name() -> str:
    torch = _torch()
    return "numpy" if torch is None else f"torch {torch.__version__}"


def _same(found: Any, wanted: Any) -> bool:
    torch, numpy = _torch(), _buffers.numpy()
    if torch is None:
        assert numpy is not None
        return bool(numpy.array_equal(found, wanted))
    return bool(torch.equal(torch.from_numpy(found.copy()), torch.from_numpy(wanted.copy())))


def _bfloat16(stored: Any) -> Any:
    """The bytes of E4M3 elements as bfloat16, which has all of them: by torch where it has the dtype."""
    torch, numpy = _torch(), _buffers.numpy()
    if torch is not None and hasattr(torch, "float8_e4m3fn"):
        wide = torch.from_numpy(stored.copy()).view(torch.float8_e4m3fn).float()
        words = wide.to(torch.bfloat16).view(torch.int16)
        # The bits of a NaN are torch's choice, and depend on the processor.
        words[torch.isnan(wide)] = 0x7FC0
        return words.numpy().view("uint8").reshape(len(stored), -1)
    assert numpy is not None
    codes = numpy.arange(256)
    exponent, fraction = codes >> 3 & 15, codes & 7
    size = numpy.where(exponent == 0, fraction / 512, (1 + fraction / 8) * 2.0 ** (exponent - 7))
    values = numpy.where(codes & 128, -size, size).astype(numpy.float32)
    words = (values.view(numpy.uint32) >> 16).astype("<u2")
    words[[0x7F, 0xFF]] = 0x7FC0
    return words[stored].view(numpy.uint8).reshape(len(stored), -1)




def _of_bytes(data: bytes, one: DemoTable) -> Callable[[], Any]:
    def wanted() -> Any:
        numpy: Any = _buffers.numpy()
        whole, ids = numpy.frombuffer(data, numpy.uint8).reshape(one.shape), numpy.ascontiguousarray(one.ids).reshape(-1)
        torch = _torch()
        if torch is None:
            return whole[ids]
        return torch.from_numpy(whole.copy())[torch.from_numpy(ids)].numpy()

    return wanted


def _of_drive(store: Store) -> str:
    return "by the CPU" if store.gpu is None else f"by GPU {store.gpu}"


def _shared(gpu: int | None) -> str:
    """Options of a simulated drive: queues for a GPU, and a thread more."""
    return "" if gpu is None else "&queues=32&threads=2"


def _rounded(nbytes: int) -> int:
    return -(-nbytes // 4096) * 4096


__all__ = ["run", "shown"]
