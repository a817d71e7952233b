"""Keys and values on a store: what is found, loaded, saved, evicted, and what failures leave."""

from __future__ import annotations

import os
import pickle
import random
import time

import pytest

import nvme_gpu
from conftest import SIM, drain

numpy = pytest.importorskip("numpy")

TOKENS, PAGE = 4, (2, 4, 3, 8)  # keys and values, tokens, heads, elements: 768 bytes of float32
LAYERS = ("first", "second", "third")


def opened(store, blocks=16, **more):
    given = {"layers": LAYERS, "blocks": blocks, "block_tokens": TOKENS, "page_shape": PAGE, "dtype": "float32"}
    return nvme_gpu.KvStore(store, 1000, **{**given, **more})


def caches(seed=0, blocks=12):
    random = numpy.random.default_rng(seed)
    return {name: random.normal(size=(blocks, *PAGE)).astype(numpy.float32) for name in LAYERS}


def empty(blocks=12):
    return {name: numpy.full((blocks, *PAGE), -1, dtype=numpy.float32) for name in LAYERS}


def saved(kv, name, tokens, block_ids, given, finish=True):
    """Saves the full blocks of a prompt; how many tokens were found before."""
    found = kv.get_num_new_matched_tokens(name, tokens)
    kv.update_state_after_alloc(name, block_ids)
    for layer in kv.layers:
        kv.save_kv_layer(layer, given[layer], [name])
    kv.wait_for_save()
    if finish:
        kv.request_finished(name)
    return found


def loaded(kv, name, tokens, block_ids, given):
    """Loads what is found of a prompt into the blocks; how many tokens."""
    found = kv.get_num_new_matched_tokens(name, tokens)
    kv.update_state_after_alloc(name, block_ids, found)
    kv.start_load_kv(given, [name])
    for layer in kv.layers:
        kv.wait_for_layer_load(layer)
    kv.request_finished(name)
    return found


def test_a_prompt_is_found_by_one_that_begins_as_it(store):
    kv, given = opened(store), caches()
    assert saved(kv, "a", range(13), [5, 2, 7, 9], given) == 0
    assert len(kv) == 3 and kv.free == 13 and kv.capacity == 16
    into = empty()
    # Two blocks are the same, the third differs.
    assert loaded(kv, "b", [*range(8), 99, *range(9, 20)], [0, 11, 3, 4, 6], into) == 8
    for layer in LAYERS:
        assert (into[layer][[0, 11]] == given[layer][[5, 2]]).all()
        untouched = [at for at in range(12) if at not in (0, 11)]
        assert (into[layer][untouched] == -1).all()
    assert kv.get_block_ids_with_load_errors() == set()


def test_the_last_token_is_never_found(store):
    kv = opened(store)
    saved(kv, "a", range(8), [0, 1], caches())
    assert len(kv) == 2
    assert kv.get_num_new_matched_tokens("b", range(8)) == 4
    assert kv.get_num_new_matched_tokens("b", range(9)) == 8
    assert kv.get_num_new_matched_tokens("b", range(9), 4) == 4
    assert kv.get_num_new_matched_tokens("b", range(9), 8) == 0
    assert kv.get_num_new_matched_tokens("b", []) == 0


def test_keys_depend_on_all_before_them_on_extra_and_on_the_model(store):
    kv = opened(store)
    keys = kv.block_hashes(range(11))
    assert len(keys) == 2 and len(set(keys)) == 2 and all(len(key) == 32 for key in keys)
    assert kv.block_hashes(numpy.arange(11)) == keys
    other = kv.block_hashes([7, *range(1, 11)])
    assert other[0] != keys[0] and other[1] != keys[1]
    assert kv.block_hashes(range(11), ["adapter"])[0] != keys[0]
    assert kv.block_hashes(range(11), ["ab", "c"]) != kv.block_hashes(range(11), ["a", "bc"])
    assert opened(store, model="other").block_hashes(range(11))[0] != keys[0]
    assert opened(store).block_hashes(range(11)) == keys
    saved(kv, "a", range(9), [0, 1], caches())
    assert kv.get_num_new_matched_tokens("b", range(9), extra=["adapter"]) == 0


def test_nothing_is_found_before_all_layers_were_written(store):
    kv, given = opened(store), caches()
    kv.get_num_new_matched_tokens("a", range(9))
    kv.update_state_after_alloc("a", [0, 1])
    for number, layer in enumerate(LAYERS):
        kv.save_kv_layer(layer, given[layer])
        assert kv.get_num_new_matched_tokens("b", range(9)) == 0
        if number < 2:
            kv.wait_for_save()
            assert len(kv) == 0
    assert kv.get_num_new_matched_tokens("b", range(9)) == 0
    kv.wait_for_save(durable=True)
    assert kv.get_num_new_matched_tokens("b", range(9)) == 8


def test_layers_that_were_not_handed_over_are_given_up(store):
    kv, given = opened(store, blocks=2), caches()
    kv.get_num_new_matched_tokens("a", range(9))
    kv.update_state_after_alloc("a", [0, 1])
    kv.save_kv_layer("first", given["first"])
    kv.request_finished("a")
    kv.wait_for_save()
    assert len(kv) == 0 and kv.free == 2
    assert saved(kv, "a", range(9), [0, 1], given) == 0 and len(kv) == 2


def test_a_request_that_grows_saves_what_is_new(store):
    kv, given = opened(store), caches()
    saved(kv, "a", range(6), [0, 1], given, finish=False)
    assert len(kv) == 1
    before = store.stats()["commands"]
    kv.update_state_after_alloc("a", [0, 1, 2], tokens=range(11))
    for layer in LAYERS:
        kv.save_kv_layer(layer, given[layer], num_tokens=7)
    kv.wait_for_save()
    assert len(kv) == 1 and store.stats()["commands"] == before, "the block has 3 tokens yet"
    for layer in LAYERS:
        kv.save_kv_layer(layer, given[layer])
    kv.wait_for_save()
    kv.request_finished("a")
    into = empty()
    assert loaded(kv, "b", range(12), [3, 4], into) == 8
    assert all((into[layer][[3, 4]] == given[layer][[0, 1]]).all() for layer in LAYERS)
    with pytest.raises(nvme_gpu.Usage, match="tokens of a request have changed"):
        kv.get_num_new_matched_tokens("c", range(6))
        kv.update_state_after_alloc("c", [0], tokens=[1, *range(1, 9)])


def test_what_was_used_longest_ago_makes_room_from_its_end(store):
    kv, given = opened(store, blocks=4), caches()
    saved(kv, "a", range(9), [0, 1], given)
    saved(kv, "b", range(100, 109), [2, 3], given)
    assert kv.free == 0
    loaded(kv, "again", range(9), [4, 5], empty())
    saved(kv, "c", range(200, 205), [6], given)
    # The last block of b is gone, and its first is still found.
    assert kv.get_num_new_matched_tokens("look", range(100, 109)) == 4
    kv.request_finished("look")
    assert kv.get_num_new_matched_tokens("look", range(9)) == 8
    kv.request_finished("look")
    assert len(kv) == 4


def test_what_is_to_be_loaded_stays(store):
    kv, given = opened(store, blocks=2), caches()
    saved(kv, "a", range(9), [0, 1], given)
    assert kv.get_num_new_matched_tokens("b", range(9)) == 8
    saved(kv, "c", range(100, 109), [2, 3], given)
    assert len(kv) == 2, "there is no room: c is not kept"
    kv.clear()
    kv.update_state_after_alloc("b", [6, 7], 8)
    into = empty()
    kv.start_load_kv(into)
    kv.clear()
    assert len(kv) == 2
    for layer in LAYERS:
        kv.wait_for_layer_load(layer)
        assert (into[layer][[6, 7]] == given[layer][[0, 1]]).all()
    saved(kv, "e", range(100, 109), [2, 3], given)
    assert kv.get_num_new_matched_tokens("look", range(100, 109)) == 8
    kv.request_finished("look")
    kv.clear()
    assert len(kv) == 0 and kv.free == 2


def test_part_of_what_was_found_may_be_loaded(store):
    kv, given = opened(store), caches()
    saved(kv, "a", range(17), [0, 1, 2, 3], given)
    assert kv.get_num_new_matched_tokens("b", range(17), 4) == 12
    kv.update_state_after_alloc("b", [8, 9, 10], 8)
    into = empty()
    kv.start_load_kv(into)
    for layer in LAYERS:
        kv.wait_for_layer_load(layer)
        assert (into[layer][[9, 10]] == given[layer][[1, 2]]).all() and (into[layer][8] == -1).all()
    kv.start_load_kv(into)
    assert not any(kv._loads.values()), "nothing is loaded twice"


def test_random_requests_get_what_they_saved(store):
    dice, kv = random.Random(3), opened(store, blocks=10)
    content = {}
    for number in range(150):
        tokens = [dice.randrange(2) for _ in range(dice.randrange(1, 20))]
        keys = kv.block_hashes(tokens)
        into, ids = empty(), dice.sample(range(12), len(keys) + 1)
        found = loaded(kv, f"load {number}", tokens, ids, into) // TOKENS
        for at in range(found):
            for layer in LAYERS:
                assert (into[layer][ids[at]] == content[keys[at]][layer]).all()
        given = caches(number)
        new = [at for at, key in enumerate(keys) if key not in kv._index]
        saved(kv, f"save {number}", tokens, ids, given)
        for at in new:
            if keys[at] in kv._index:
                content[keys[at]] = {layer: given[layer][ids[at]].copy() for layer in LAYERS}
        slots = [block.slot for block in kv._index.values()] + kv._free
        assert sorted(slots) == list(range(10)) and not any(block.pins for block in kv._index.values())
    assert len(kv) == 10


@pytest.mark.parametrize("which", ["nth=1", "nth=3", "every=4", "every=1"])
def test_a_page_that_is_not_read_is_named_and_the_others_are_right(which):
    with nvme_gpu.open(f"{SIM}&fault=status:0x281@op=read,{which}") as store:
        # Rows of whole blocks: a write reads nothing.
        kv, given = opened_at_blocks(store), caches_of_blocks()
        saved(kv, "a", range(13), [5, 2, 7], given)
        into = {name: numpy.full_like(cache, -1) for name, cache in given.items()}
        assert kv.get_num_new_matched_tokens("b", range(13)) == 12
        kv.update_state_after_alloc("b", [0, 11, 3], 12)
        kv.start_load_kv(into)
        failed = set()
        for layer in LAYERS:
            try:
                kv.wait_for_layer_load(layer)
            except nvme_gpu.KvLoadError as error:
                assert error.layer == layer and error.block_ids and error.code == "command"
                assert isinstance(error.__cause__, nvme_gpu.Status) and f"blocks {min(error.block_ids)}" in str(error)
                failed |= error.block_ids
                bad = error.block_ids
            else:
                bad = frozenset()
            for to, come in ((0, 5), (11, 2), (3, 7)):
                assert (into[layer][to] == (-1 if to in bad else given[layer][come])).all()
        assert failed
        assert kv.get_block_ids_with_load_errors() == failed and kv.get_block_ids_with_load_errors() == set()
        assert len(kv) == 3 - len(failed) and kv.free == 16 - len(kv), "they are not found again"
        # What was not loaded is not saved from the cache as if it had been.
        for layer in LAYERS:
            kv.save_kv_layer(layer, into[layer])
        kv.wait_for_save()
        assert len(kv) == 3 - len(failed)
        kv.update_state_after_alloc("b", [0, 11, 3])
        for layer in LAYERS:
            kv.save_kv_layer(layer, given[layer])
        kv.wait_for_save()
        assert len(kv) == 3, "after they were computed"


def opened_at_blocks(store):
    given = {"layers": LAYERS, "blocks": 16, "block_tokens": TOKENS, "page_shape": (1024,), "dtype": "float32"}
    kv = nvme_gpu.KvStore(store, 4096, **given)
    # Places that are no neighbours: of a command for several rows each row is moved again alone.
    kv._free.sort(key=lambda slot: (slot % 4, slot), reverse=True)
    return kv


def caches_of_blocks(blocks=12):
    random = numpy.random.default_rng(1)
    return {name: random.normal(size=(blocks, 1024)).astype(numpy.float32) for name in LAYERS}


def test_a_block_whose_page_was_not_written_is_not_kept():
    with nvme_gpu.open(f"{SIM}&fault=status:0x281@op=write,nth=2") as store:
        kv, given = opened_at_blocks(store), caches_of_blocks()
        kv.get_num_new_matched_tokens("a", range(13))
        kv.update_state_after_alloc("a", [5, 2, 7])
        for layer in LAYERS:
            kv.save_kv_layer(layer, given[layer])
        with pytest.raises(nvme_gpu.Status):
            kv.wait_for_save()
        kept, free = len(kv), kv.free
        assert kept < 3 and free == 16 - 3, "places of failed writes are not used again"
        kv.wait_for_save()
        saved(kv, "a", range(13), [5, 2, 7], given)
        assert len(kv) == 3
        into = {name: numpy.full_like(cache, -1) for name, cache in given.items()}
        assert loaded(kv, "b", range(13), [0, 11, 3], into) == 12
        assert all((into[name][[0, 11, 3]] == given[name][[5, 2, 7]]).all() for name in LAYERS)


def test_a_drive_that_left():
    with nvme_gpu.open(f"{SIM}&fault=allones@op=read,nth=1") as store:
        kv, given = opened_at_blocks(store), caches_of_blocks()
        saved(kv, "a", range(13), [5, 2, 7], given)
        kv.get_num_new_matched_tokens("b", range(13))
        kv.update_state_after_alloc("b", [0, 1, 2], 12)
        kv.start_load_kv({name: numpy.empty_like(cache) for name, cache in given.items()})
        failed = set()
        for layer in LAYERS:
            with pytest.raises(nvme_gpu.KvLoadError) as caught:
                kv.wait_for_layer_load(layer)
            assert caught.value.code == "gone"
            failed |= caught.value.block_ids
        assert failed == {0, 1, 2} == kv.get_block_ids_with_load_errors() and len(kv) == 0
    drain()


def test_usage(store):
    kv, given = opened(store), caches()
    for change in (
        {"layers": 0},
        {"layers": []},
        {"layers": ["a", "a"]},
        {"blocks": 0},
        {"block_tokens": 0},
        {"page_shape": (0, 4)},
        {"blocks": 1 << 20},
        {"dtype": "float17"},
    ):
        with pytest.raises(nvme_gpu.NvmeGpuError):
            opened(store, **change)
    for change in ({"layers": "abc"}, {"layers": 1.5}):
        with pytest.raises(TypeError):
            opened(store, **change)
    with pytest.raises(TypeError, match="use nvme_gpu.open"):
        opened("store")
    with pytest.raises(nvme_gpu.Usage, match="no request 'b'"):
        kv.update_state_after_alloc("b", [0])
    with pytest.raises(nvme_gpu.Usage, match="3 computed tokens"):
        kv.get_num_new_matched_tokens("a", range(9), 3)
    with pytest.raises(nvme_gpu.Usage, match="64 bits"):
        kv.block_hashes([1 << 70])
    saved(kv, "a", range(9), [0, 1], given)
    kv.get_num_new_matched_tokens("a", range(9))
    for ids, count in (([0, 1], 12), ([0, 1], 3), ([0], 8)):
        with pytest.raises(nvme_gpu.Usage, match="were found"):
            kv.update_state_after_alloc("a", ids, count)
    kv.update_state_after_alloc("a", [0, 40], 8)
    with pytest.raises(nvme_gpu.Usage, match="block 40 of a cache of 12"):
        kv.start_load_kv(given)
    kv.update_state_after_alloc("a", [0, 1], 8)
    with pytest.raises(nvme_gpu.Usage, match="no cache of the layer 'first'"):
        kv.start_load_kv({name: given[name] for name in LAYERS[1:]})
    fixed = {name: cache.copy() for name, cache in given.items()}
    fixed["second"].flags.writeable = False
    with pytest.raises(nvme_gpu.Usage, match="'second' is read-only"):
        kv.start_load_kv(fixed)
    with pytest.raises(nvme_gpu.Usage, match="has the shape"):
        kv.start_load_kv({name: cache[..., :4] for name, cache in given.items()})
    with pytest.raises(TypeError, match="pass a tensor"):
        kv.start_load_kv({name: cache.tolist() for name, cache in given.items()})
    kv.start_load_kv(given)
    with pytest.raises(nvme_gpu.Usage, match="call wait_for_layer_load first"):
        kv.save_kv_layer("first", given["first"])
    with pytest.raises(nvme_gpu.Usage, match="no layer 'fourth'"):
        kv.wait_for_layer_load("fourth")
    for layer in LAYERS:
        kv.wait_for_layer_load(layer)
    with pytest.raises(nvme_gpu.Usage, match="cannot be pickled"):
        pickle.dumps(kv)
    assert "2 blocks of 4 tokens, 16 fit" in repr(kv) and kv.store is store


def test_tensors_of_torch_and_what_has_dlpack(store):
    torch = pytest.importorskip("torch")
    kv = opened(store, layers=2, dtype="bfloat16")
    given = {name: torch.randn((12, *PAGE)).to(torch.bfloat16) for name in kv.layers}
    saved(kv, "a", torch.arange(9), [5, 2], given)
    into = {name: torch.zeros((12, *PAGE), dtype=torch.bfloat16) for name in kv.layers}

    class Other:
        """A cache of another library."""

        def __init__(self, tensor):
            self.tensor = tensor

        def __dlpack__(self, **more):
            return self.tensor.__dlpack__()

        def __dlpack_device__(self):
            return self.tensor.__dlpack_device__()

    others = {name: Other(cache) for name, cache in into.items()}
    assert loaded(kv, "b", range(9), [1, 0], others) == 8
    for name in kv.layers:
        assert torch.equal(into[name][[1, 0]], given[name][[5, 2]]) and not into[name][2:].any()


@pytest.mark.parametrize("width", [1024, 300])
def test_tensors_on_the_gpu(gpu_store, cuda, width):
    torch = pytest.importorskip("torch")
    kv = nvme_gpu.KvStore(gpu_store, 4096, layers=2, blocks=8, block_tokens=4, page_shape=(width,), dtype="float32")
    given = {name: cuda(torch.randn((12, width))) for name in kv.layers}
    into = {name: cuda(torch.zeros((12, width))) for name in kv.layers}
    saved(kv, "a", range(9), [5, 2], given)
    assert loaded(kv, "b", range(9), [1, 0], into) == 8
    for name in kv.layers:
        assert torch.equal(into[name].cpu()[[1, 0]], given[name].cpu()[[5, 2]]) and not into[name].cpu()[2:].any()


def test_failures_of_the_gpu(cuda):
    torch = pytest.importorskip("torch")
    device = "sim:mem?size=32MiB&queues=32&threads=2&fault=status:0x281@op=read,nth=2"
    with nvme_gpu.open(device, gpu=0) as store:
        kv = nvme_gpu.KvStore(store, 4096, layers=1, blocks=16, block_tokens=4, page_shape=(1024,), dtype="float32")
        given = {"0": cuda(torch.randn((12, 1024)))}
        for number in range(3):
            saved(kv, f"a {number}", range(100 * number, 100 * number + 5), [number], given)
        failed = set()
        for number in range(3):
            into = {"0": cuda(torch.zeros((12, 1024)))}
            try:
                assert loaded(kv, f"b {number}", range(100 * number, 100 * number + 5), [7], into) == 4
                assert torch.equal(into["0"].cpu()[7], given["0"].cpu()[number])
            except nvme_gpu.KvLoadError as error:
                assert error.block_ids == {7} and not into["0"].cpu().any()
                kv.request_finished(f"b {number}")
                failed.add(number)
        assert failed == {1} and len(kv) == 2 and kv.get_block_ids_with_load_errors() == {7}
    drain()


def test_a_request_on_the_gpu_has_its_own_failures_alone(cuda):
    torch = pytest.importorskip("torch")
    device = "sim:mem?size=32MiB&queues=32&threads=2&fault=status:0x281@op=read,nth=2"
    prompts = {name: range(100 * number, 100 * number + 5) for number, name in enumerate("abc")}
    with nvme_gpu.open(device, gpu=0) as store:
        kv = nvme_gpu.KvStore(store, 4096, layers=1, blocks=16, block_tokens=4, page_shape=(1024,), dtype="float32")
        given = {"0": cuda(torch.randn((12, 1024)))}
        for number, (name, tokens) in enumerate(prompts.items()):
            saved(kv, name, tokens, [number], given)
        into = {"0": cuda(torch.zeros((12, 1024)))}
        for number, (name, tokens) in enumerate(prompts.items()):
            assert kv.get_num_new_matched_tokens(name, tokens) == 4
            kv.update_state_after_alloc(name, [number + 4], 4)
        # The second one fails, and has ended before the third one is launched and the first one is waited for.
        for name in prompts:
            kv.start_load_kv(into, [name])
            assert kv._loads["0"][-1].move._operation.wait()
        with pytest.raises(nvme_gpu.KvLoadError) as raised:
            kv.wait_for_layer_load("0")
        assert raised.value.block_ids == {5}
        assert torch.equal(into["0"].cpu()[[4, 6]], given["0"].cpu()[[0, 2]]) and not into["0"].cpu()[5].any()
        assert len(kv) == 2 and kv.get_block_ids_with_load_errors() == {5}
    drain()


def test_saves_on_the_gpu_that_fail_stop_no_other_request(cuda):
    torch = pytest.importorskip("torch")
    device = "sim:mem?size=32MiB&queues=32&threads=2&fault=status:0x281@op=write,nth=1"
    with nvme_gpu.open(device, gpu=0) as store:
        kv = nvme_gpu.KvStore(store, 4096, layers=1, blocks=16, block_tokens=4, page_shape=(1024,), dtype="float32")
        given = {"0": cuda(torch.randn((12, 1024)))}
        for number, name in enumerate("ab"):
            kv.get_num_new_matched_tokens(name, range(100 * number, 100 * number + 5))
            kv.update_state_after_alloc(name, [number])
        for name in "ab":
            kv.save_kv_layer("0", given["0"], [name])
            table = kv._tables["0"]
            while not table._native.is_idle():
                time.sleep(0.001)
        with pytest.raises(nvme_gpu.NvmeGpuError):
            kv.wait_for_save()
        for name in "ab":
            kv.request_finished(name)
        into = {"0": cuda(torch.zeros((12, 1024)))}
        assert loaded(kv, "c", range(5), [7], into) == 0
        assert loaded(kv, "d", range(100, 105), [7], into) == 4
        assert torch.equal(into["0"].cpu()[7], given["0"].cpu()[1])
    drain()


@pytest.mark.parametrize("is_on_gpu", [False, True])
def test_a_move_that_has_not_ended_moved_nothing(monkeypatch, is_on_gpu):
    monkeypatch.setattr(nvme_gpu._kv_moves._buffers, "is_tensor", lambda _: is_on_gpu)

    class Late:
        def wait(self):
            assert not is_on_gpu
            raise nvme_gpu.Timeout("the gather has not ended", "wait", "unfinished")

        def finish(self):
            assert is_on_gpu
            raise nvme_gpu.Timeout("the gather has not ended", "wait", "unfinished")

    class Status:
        def __len__(self):
            return 3

        def tolist(self):
            raise AssertionError("it waits for the stream of the move")

    moved = nvme_gpu._kv_moves.Move(None, Late(), Status(), None)
    bad, error = moved.wait()
    assert bad == {0, 1, 2} and error.code == "unfinished"


def test_blocks_in_use_are_not_looked_through_for_one_that_makes_room(store):
    kv = opened(store, blocks=8)
    for number in range(8):
        saved(kv, str(number), range(number * 100, number * 100 + 5), [number], caches())
    for number in range(7):
        assert kv.get_num_new_matched_tokens(str(number), range(number * 100, number * 100 + 5)) == TOKENS
    assert len(kv._idle) == 1 and len(kv) == 8
    saved(kv, "new", range(5000, 5005), [0], caches())
    assert kv.get_num_new_matched_tokens("other", range(700, 705)) == 0
    for number in range(7):
        kv.request_finished(str(number))
    assert len(kv._idle) == len(kv) == 8
    kv.clear()
    assert len(kv) == 0 and kv.free == 8


def test_the_end_of_a_request_looks_at_its_own_blocks_alone(store):
    class Blocks(dict):
        """Blocks that are being saved, which count how often all of them were looked at."""

        looks = 0

        def __iter__(self):
            Blocks.looks += 1
            return super().__iter__()

        def items(self):
            Blocks.looks += 1
            return super().items()

        def values(self):
            Blocks.looks += 1
            return super().values()

    kv, given = opened(store), caches()
    kv._saving = Blocks(kv._saving)
    # Other requests stay incomplete meanwhile: their last layer is never saved.
    for number in range(4):
        kv.get_num_new_matched_tokens(f"other {number}", [number] * 9)
        kv.update_state_after_alloc(f"other {number}", [0, 1])
        for layer in LAYERS[:-1]:
            kv.save_kv_layer(layer, given[layer], [f"other {number}"])
    saved(kv, "mine", range(100, 113), [5, 2, 7, 9], given)
    kv.get_num_new_matched_tokens("left", range(200, 213))
    kv.update_state_after_alloc("left", [5, 2, 7])
    kv.save_kv_layer(LAYERS[0], given[LAYERS[0]], ["left"])
    kv.request_finished("left")
    kv.wait_for_save()
    assert Blocks.looks == 0 and len(kv) == 3 and kv.free == 16 - 8 - 3
    for number in range(4):
        kv.request_finished(f"other {number}")
    assert kv.free == 13 and not kv._saving and not kv._saving_by


def test_a_request_is_named_once(store):
    """Its pins would be given back twice, and its block make room while another request has yet to load it."""
    kv, given = opened(store, blocks=1), caches()
    saved(kv, "w", range(5), [0, 1], given)
    for name in "ab":
        assert kv.get_num_new_matched_tokens(name, range(5)) == 4
        kv.update_state_after_alloc(name, [2, 5], 4)
    with pytest.raises(nvme_gpu.Usage, match="'a' is named twice"):
        kv.start_load_kv(given, ["a", "b", "a"])
    with pytest.raises(nvme_gpu.Usage, match="'b' is named twice"):
        kv.save_kv_layer("first", given["first"], ["b", "b"])


def test_extra_is_of_types_that_a_key_tells_apart(store):
    kv = opened(store)
    one, other = numpy.zeros(2000), numpy.zeros(2000)
    other[1000] = 1
    for extra in ([one], [("salt", other)], [{"a": 1}], [[1]]):
        with pytest.raises(nvme_gpu.Usage, match="extra has a value of the type"):
            kv.block_hashes(range(8), extra)
        with pytest.raises(nvme_gpu.Usage, match="extra has a value of the type"):
            kv.get_num_new_matched_tokens("a", range(8), extra=extra)
    extras = [[], ["1"], [1], [1.0], [b"1"], [True], [None], [("1",)], ["1", "1"]]
    assert len({kv.block_hashes(range(8), extra)[0] for extra in extras}) == len(extras)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_of_a_fork_does_not_wait_for_a_thread_of_its_parent(store):
    kv = opened(store)
    with kv._lock:
        child = os.fork()
        if child == 0:
            try:
                kv.get_num_new_matched_tokens("x", range(9))
            except nvme_gpu.Usage:
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("raised", [KeyboardInterrupt, MemoryError])
def test_blocks_that_an_exception_kept_from_a_cache_are_failed_ones(store, monkeypatch, raised):
    kv, given = opened(store), caches()
    saved(kv, "a", range(13), [5, 2, 7], given)
    found = kv.get_num_new_matched_tokens("b", range(13))
    kv.update_state_after_alloc("b", [0, 1, 2], found)
    kv.start_load_kv(empty(), ["b"])

    def stopped(*_):
        raise raised("half-way")

    first, *others = kv.layers
    with monkeypatch.context() as patch:
        patch.setattr(nvme_gpu._kv, "put", stopped)
        with pytest.raises(raised):
            kv.wait_for_layer_load(first)
    assert kv.get_block_ids_with_load_errors() == {0, 1, 2}
    with pytest.raises(nvme_gpu.KvLoadError, match="half-way") as caught:
        kv.wait_for_layer_load(first)
    assert caught.value.block_ids == {0, 1, 2}
    for layer in kv.layers:
        kv.wait_for_layer_load(layer)
    kv.request_finished("b")
    kv.clear()
    assert len(kv) == 0 and kv.free == kv.capacity, "pins are given back"


def test_what_was_written_is_kept_where_an_exception_ends_the_wait(store, monkeypatch):
    kv, given = opened(store), caches()
    kv.get_num_new_matched_tokens("a", range(13))
    kv.update_state_after_alloc("a", [5, 2, 7])
    for layer in kv.layers:
        kv.save_kv_layer(layer, given[layer])
    # Another save, whose wait is interrupted, comes behind these.
    kv.get_num_new_matched_tokens("b", range(50, 63))
    kv.update_state_after_alloc("b", [0, 1, 3])
    kv.save_kv_layer(kv.layers[0], given[kv.layers[0]], ["b"])
    wait, count = nvme_gpu._kv_moves.Move.wait, []

    def interrupted(move):
        count.append(move)
        if len(count) == len(kv.layers) + 1:
            raise KeyboardInterrupt
        return wait(move)

    monkeypatch.setattr(nvme_gpu._kv_moves.Move, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        kv.wait_for_save()
    assert len(kv) == 3
    kv.wait_for_save()
    kv.request_finished("a")
    kv.request_finished("b")
    kv.clear()
    assert kv.free == kv.capacity
