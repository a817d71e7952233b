"""Row ids of lookup tables, beside the rows of other programs in the tests of the crate nvme-lookup."""

import json
import pathlib

import numpy as np
import pytest

import nvme_gpu
from nvme_gpu import lookup

GOLDEN = pathlib.Path(__file__).parents[3] / "lookup/tests"
PLE = {
    "text_config": {
        "ple_layer_ids": [2, 5],
        "vocab_size": 248320,
        "hidden_size": 2560,
        "eos_token_id": [248046, 1],
    }
}


def golden():
    lines = np.loadtxt(GOLDEN / "ple.tsv", dtype=np.int64)
    return lines[:, 0].copy(), lines[:, 1:17], lines[:, 17:]


def test_rows_of_qwen_are_those_of_transformers(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PLE))
    tables = lookup.qwen_ple(tmp_path / "config.json")
    tokens, *wanted = golden()
    assert (tables.layers, tables.columns, tables.rows(1)) == ((1, 4), 160, 320_001_446)
    for layer, rows in zip(tables.layers, wanted):
        assert tables.history(layer) == 2
        assert np.array_equal(tables.row_ids(layer, tokens), rows)
        assert np.array_equal(tables.row_ids(layer, tokens.tolist()), rows)
        assert np.array_equal(tables.row_ids(layer, tokens.astype(np.int32)), rows)
        out = np.empty((27, 16), np.int64)
        assert tables.row_ids(layer, tokens[13:], before=tokens[:13], out=out) is out
        assert np.array_equal(out, rows[13:])
        assert np.array_equal(tables.row_ids(layer, tokens[39:], before=tokens[37:39].tolist()), rows[39:])
        assert tables.row_ids(layer, []).shape == (0, 16)


def test_rows_of_a_table_are_those_that_tokens_select():
    tables = lookup.qwen_ple({**PLE["text_config"], "ngram_vocab_size_base": 100, "hidden_size": 64})
    with nvme_gpu.open("sim:mem?size=16MiB") as store:
        table = store.table(0, shape=(tables.rows(1), 4), dtype="int32")
        table.scatter(range(len(table)), [[row] * 4 for row in range(len(table))])
        ids = tables.row_ids(1, [5, 6, 7, 248046, 9])
        assert np.array_equal(table[ids][..., 0], ids)


def test_bad_tokens_and_memory_are_refused_before_anything_is_written():
    tables = lookup.qwen_ple(PLE)
    out = np.full((2, 16), 7, np.int64)
    for tokens in ([1, 248320], [1, -1], [1, -(1 << 63)], np.array([1, 248320], np.int32)):
        with pytest.raises(nvme_gpu.Usage, match=r"token -?\d+ at position 1 is not in 0..248320"):
            tables.row_ids(1, tokens, out=out)
    with pytest.raises(nvme_gpu.Usage, match="token 248320"):
        tables.row_ids(1, [1, 2], before=[248320], out=out)
    assert (out == 7).all()
    wrong = (out[:1], out[:, :15].copy(), out.astype(np.int32), np.empty((2, 16), np.float64))
    for place in wrong:
        with pytest.raises(nvme_gpu.Usage, match="out is"):
            tables.row_ids(1, [1, 2], out=place)
    for tokens in (np.zeros((2, 2), np.int64), np.zeros(2), [[1, 2]]):
        with pytest.raises(nvme_gpu.Usage, match="use one dimension of int32 or int64|tokens is"):
            tables.row_ids(1, tokens)
    with pytest.raises(nvme_gpu.Usage, match="layer 2 has no lookup table"):
        tables.row_ids(2, [1])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"vocab_size": None}, "no key vocab_size"),
        ({"eos_token_id": 248320}, "eos_token_id"),
        ({"hidden_size": 2561}, "a multiple of the 16 heads"),
        ({"ngram_size": 99}, "ngram_size of the configuration is 99"),
        ({"seed": -1}, "seed of the configuration is -1"),
    ],
)
def test_bad_configurations_are_refused_with_their_key(change, told):
    with pytest.raises(nvme_gpu.Usage, match=told):
        lookup.qwen_ple({**PLE["text_config"], **change})


def test_engram_needs_a_tokenizer_of_its_model(tmp_path):
    config = {
        "engram_layer_ids": [1],
        "engram_num_embeddings": [384006168],
        "engram_max_ngram_size": 4,
        "engram_vocab_size": 16000000,
        "engram_n_heads": 8,
        "engram_head_dim": 256,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": 99092,
    }
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(nvme_gpu.Usage, match="the tokenizer cannot be used"):
        lookup.engram(config, path)
    words = ["<a>", "<b>", "<pad>", "Word", "word", "wörd", " ", "\t", "other"]
    model = {"type": "WordLevel", "vocab": {word: at for at, word in enumerate(words)}, "unk_token": "<a>"}
    path.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    with pytest.raises(nvme_gpu.Usage, match="9 tokens become 6 classes, the configuration says 99092"):
        lookup.engram(config, path)
    with pytest.raises(nvme_gpu.Usage, match="has 384006168 rows by the configuration"):
        lookup.engram({**config, "engram_compressed_vocab_size": 6, "engram_vocab_size": 50}, path)
    rows = 53 + 59 + 61 + 67 + 71 + 73
    small = {"engram_vocab_size": 50, "engram_n_heads": 2, "engram_num_embeddings": rows}
    tables = lookup.engram({**config, **small, "engram_compressed_vocab_size": 6}, path)
    # Words that read alike select the same rows; an image ends what hashes see.
    same = tables.row_ids(1, [3, 4, 5, 6])
    assert np.array_equal(same, tables.row_ids(1, [5, 5, 3, 7]))
    assert np.array_equal(tables.row_ids(1, [8, -1, 3])[2:], tables.row_ids(1, [3]))
    with pytest.raises(FileNotFoundError):
        lookup.engram(config, tmp_path / "none.json")
