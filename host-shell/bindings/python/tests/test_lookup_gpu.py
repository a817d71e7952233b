"""Row ids of tokens in GPU memory, by the stand-in of CUDA: those of the host, in batches, chunks, drafts and graphs."""

from __future__ import annotations

import json

import pytest

import nvme_gpu
from nvme_gpu import lookup

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
from test_compute_gpu import Graph  # noqa: E402

END = 90
PLE = {"ple_layer_ids": [2], "vocab_size": 100, "hidden_size": 64, "eos_token_id": END, "ngram_vocab_size_base": 500}


@pytest.fixture(params=["qwen", "engram"])
def tables(request, tmp_path):
    if request.param == "qwen":
        return lookup.qwen_ple(PLE)
    path = tmp_path / "tokenizer.json"
    words = ["<a>", "<b>", "<pad>", *(f"{word}{at}" for at in range(48) for word in ("Word", "word"))]
    model = {"type": "WordLevel", "vocab": {word: at for at, word in enumerate(words)}, "unk_token": "<a>"}
    path.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    config = {
        "engram_layer_ids": [1],
        "engram_num_embeddings": [53 + 59 + 61 + 67 + 71 + 73],
        "engram_max_ngram_size": 4,
        "engram_vocab_size": 50,
        "engram_n_heads": 2,
        "engram_head_dim": 256,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": 51,
    }
    return lookup.engram(config, path)


def text(tables, count, seed=0):
    """Tokens, with the ends of texts or images among them."""
    tokens = np.random.default_rng((seed, count)).integers(0, 99, count)
    tokens[np.random.default_rng((seed, count, 1)).random(count) < 0.1] = END if tables.history(1) == 2 else -1
    return tokens


def tensor(cuda, values, dtype=torch.int64):
    return cuda(torch.from_numpy(np.asarray(values, np.int64 if len(values) == 0 else None)).to(dtype))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_the_gpu_selects_the_rows_that_the_host_does(cuda, tables, dtype):
    for count in (1, 2, 3, 700, 0):
        tokens = text(tables, count)
        found = tables.row_ids(1, tensor(cuda, tokens, dtype))
        assert found.is_cuda and np.array_equal(found.cpu().numpy(), tables.row_ids(1, tokens))
    out = tensor(cuda, np.zeros((3, found.shape[1])))
    assert tables.row_ids(1, tensor(cuda, [1, 2, 3], dtype), out=out) is out
    assert np.array_equal(out.cpu().numpy(), tables.row_ids(1, [1, 2, 3]))


def test_batches_go_on_from_their_histories(cuda, tables):
    texts = [text(tables, 40, seed) for seed in range(5)]
    histories = tables.histories(1, 8, device="cuda")
    slots, seen = [6, 0, 7, 3, 2], [0] * 5
    # A whole prompt, chunks, a decoded token each, nothing at all.
    for step in ([40, 3, 1, 0, 17], [0, 1, 1, 1, 1], [0, 0, 2, 5, 1], [0, 30, 1, 1, 1]):
        starts = np.concatenate([[0], np.cumsum(step)])
        parts = [one[at : at + count] for one, at, count in zip(texts, seen, step)]
        given = {"starts": tensor(cuda, starts, torch.int32), "slots": tensor(cuda, slots)}
        tokens = tensor(cuda, np.concatenate(parts))
        found = tables.row_ids(1, tokens, histories=histories, **given).cpu().numpy()
        wanted = [tables.row_ids(1, part, before=one[:at]) for one, at, part in zip(texts, seen, parts)]
        assert np.array_equal(found, np.concatenate(wanted))
        tables.commit(1, tokens, histories, **given)
        seen = [at + count for at, count in zip(seen, step)]
    kept = histories.cpu().numpy()
    for one, at, slot in zip(texts, seen, slots):
        assert kept[slot].tolist() == one[at - tables.history(1) : at].tolist()
    begin = tables.histories(1, 1, device="cuda").cpu().numpy()[0]
    assert all((kept[slot] == begin).all() for slot in (1, 4, 5))


def test_refused_drafts_leave_no_trace(cuda, tables):
    histories = tables.histories(1, 2, device="cuda")
    known = [[], []]
    for drafts, accepted in (([[5, 6, 7], [8, 9, 1]], [3, 1]), ([[4, 4, 4], [2, 3, 5]], [0, 2]), ([[7, 1, 2], [6, 6, 1]], [1, 3])):
        tokens = tensor(cuda, np.concatenate(drafts))
        starts = tensor(cuda, [0, 3, 6], torch.int32)
        found = tables.row_ids(1, tokens, histories=histories, starts=starts).cpu().numpy()
        wanted = [tables.row_ids(1, part, before=before) for part, before in zip(drafts, known)]
        assert np.array_equal(found, np.concatenate(wanted))
        tables.commit(1, tokens, histories, starts=starts, accepted=tensor(cuda, accepted, torch.int32))
        known = [before + part[:count] for before, part, count in zip(known, drafts, accepted)]


def test_what_cannot_be_selects_no_row(cuda, tables):
    unknown = 99 if tables.history(1) == 3 else 100
    for token in (unknown, -2, 1 << 40, -(1 << 63)):
        found = tables.row_ids(1, tensor(cuda, [1, 2, token, 3, 4, 5, 6])).cpu().numpy()
        assert np.array_equal(found[:2], tables.row_ids(1, [1, 2]))
        assert (found[2] == -1).all() and (found[3] == -1).all()
        assert np.array_equal(found[-1], tables.row_ids(1, [6], before=[3, 4, 5])[0])
    tokens = tensor(cuda, [1, 2, 3, 4])
    some = tables.row_ids(1, tokens, starts=tensor(cuda, [0, 1, 3], torch.int32)).cpu().numpy()
    assert np.array_equal(some[1:3], tables.row_ids(1, [2, 3])) and (some[3] == -1).all()
    for starts in ([0, 5], [-1, 4], [3, 1], [0, 1 << 30]):
        assert (tables.row_ids(1, tokens, starts=tensor(cuda, starts, torch.int32)).cpu().numpy()[:3] == -1).all()
    histories = tables.histories(1, 2, device="cuda")
    for slot in (2, -1, 1 << 60):
        given = {"histories": histories, "slots": tensor(cuda, [slot])}
        assert (tables.row_ids(1, tokens, **given).cpu().numpy() == -1).all()
        tables.commit(1, tokens, histories, slots=given["slots"])
    for count in (5, -1):
        tables.commit(1, tokens, histories, accepted=tensor(cuda, [count], torch.int32))
        assert (tables.row_ids(1, tokens[:1].clone(), histories=histories).cpu().numpy()[:, -1] == -1).all()
    # The other history was never touched.
    assert (histories.cpu().numpy()[1] == tables.histories(1, 1, device="cuda").cpu().numpy()[0]).all()


def test_a_graph_reads_the_rows_of_the_tokens_of_now(cuda, monkeypatch):
    tables = lookup.qwen_ple(PLE)
    with nvme_gpu.open("sim:mem?size=16MiB&queues=32&threads=2", gpu=0) as store:
        table = store.table(0, shape=(tables.rows(1), 4), dtype="int32")
        table.scatter(range(len(table)), [[row] * 4 for row in range(len(table))])
        tokens, histories = tensor(cuda, [5, 6]), tables.histories(1, 2, device="cuda")
        starts = tensor(cuda, [0, 1, 2], torch.int32)
        ids, rows = tensor(cuda, np.zeros((2, 16))), tensor(cuda, np.zeros((2, 16, 4)), torch.int32)
        status = tensor(cuda, np.zeros((2, 16)), torch.int32)

        def step():
            tables.row_ids(1, tokens, histories=histories, starts=starts, out=ids)
            tables.commit(1, tokens, histories, starts=starts)
            table.gather(ids, out=rows, status=status)

        step()
        torch.cuda.synchronize()
        histories.fill_(END)
        graph, known = Graph(monkeypatch, step), [[], []]
        for each in ([5, 6], [7, END], [1, 1], [2, 3], [99, 0]):
            tokens.copy_(torch.tensor(each))
            rows.fill_(-7)
            graph.launch()
            wanted = [tables.row_ids(1, [token], before=before)[0] for token, before in zip(each, known)]
            assert np.array_equal(ids.cpu().numpy(), wanted)
            assert np.array_equal(rows.cpu().numpy()[..., 3], wanted) and not status.cpu().any()
            known = [before + [token] for before, token in zip(known, each)]
        tokens.copy_(torch.tensor([100, 1]))
        graph.launch()
        # A token that the model does not have: zeros and their status, never a plausible row.
        assert (ids.cpu().numpy()[0] == -1).all() and not rows.cpu()[0].any()
        assert (status.cpu().numpy()[0] != 0).all() and not status.cpu()[1].any()


def test_arguments_that_do_not_fit_are_named(cuda):
    tables = lookup.qwen_ple(PLE)
    tokens, histories = tensor(cuda, [1, 2]), tables.histories(1, 2, device="cuda")
    int32 = tensor(cuda, [0, 2], torch.int32)
    for given, told in (
        ({"before": [1]}, "before is given for tokens on a GPU"),
        ({"starts": tensor(cuda, [0, 2])}, "starts is int64"),
        ({"starts": tensor(cuda, [0], torch.int32)}, "fewer than two numbers"),
        ({"histories": histories[:, :1].clone()}, "histories has the shape"),
        ({"histories": histories, "slots": tensor(cuda, [0, 1])}, "slots has the shape"),
        ({"slots": tensor(cuda, [0])}, "without histories"),
        ({"histories": histories[:1].clone(), "starts": tensor(cuda, [0, 1, 2], torch.int32)}, "1 histories are fewer than the 2"),
        ({"starts": torch.tensor([0, 2], dtype=torch.int32)}, "starts lies in memory of the host"),
        ({"out": tensor(cuda, np.zeros((1, 16)))}, "out has the shape"),
    ):
        with pytest.raises(nvme_gpu.Usage, match=told):
            tables.row_ids(1, tokens, **given)
    with pytest.raises(nvme_gpu.Usage, match="histories is given for tokens on the host"):
        tables.row_ids(1, [1, 2], histories=histories)
    with pytest.raises(nvme_gpu.Usage, match="tokens lie in memory of the host"):
        tables.commit(1, torch.tensor([1]), histories)
    with pytest.raises(nvme_gpu.Usage, match="accepted has the shape"):
        tables.commit(1, tokens, histories, accepted=int32)
    with pytest.raises(nvme_gpu.Usage, match="there are no histories"):
        tables.commit(1, tokens, None)
    with pytest.raises(nvme_gpu.Usage, match="tokens is float32"):
        tables.row_ids(1, tensor(cuda, [1], torch.float32))
