"""Experts that stay in files, in models of torch that look like those of transformers; test_transformers.py has real ones."""

from __future__ import annotations

import copy
import io
import os
import pickle
import shutil
import threading

import pytest

import nvme_gpu

torch = pytest.importorskip("torch")

from experts_stand_in import (  # noqa: E402
    CHOICES,
    EXPERTS,
    HIDDEN,
    LAYERS,
    WIDTH,
    BiasedExperts,
    Experts,
    Model,
    safetensors,
    tensors_of,
    tokens,
)

from nvme_gpu.transformers import stream_experts  # noqa: E402

NBYTES = 3 * WIDTH * HIDDEN * 4
"""Bytes of an expert of float32."""
ALL = LAYERS * EXPERTS


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def saved(tmp_path, model):
    return safetensors(tmp_path / "model.safetensors", tensors_of(model))


def budget(slots, reads=1, guesses=0):
    return (slots + reads + guesses) * NBYTES


def streamed(tmp_path, slots=4, reads=1, guesses=0, **more):
    """A model, the same one with experts in files, and the stream."""
    wanted, model = Model(), Model()
    path = saved(tmp_path, wanted)
    source = more.pop("source", path)
    return wanted, model, stream_experts(
        model, source, cache_bytes=budget(slots, reads, guesses), reads=reads, guesses=guesses, **more
    )


def refused(what, *match):
    with pytest.raises(nvme_gpu.Usage) as caught:
        what()
    for text in match:
        assert text in str(caught.value), str(caught.value)


@pytest.mark.parametrize("slots", [1, 2, 4, ALL])
@pytest.mark.parametrize("reads", [1, 3])
def test_results_are_those_of_the_model_in_memory(tmp_path, slots, reads):
    wanted, model, stream = streamed(tmp_path, slots, reads)
    with stream:
        for count in (0, 1, 2, 7, 40):
            x = tokens(count, seed=count)
            assert torch.equal(model(x), wanted(x)), count
        counts = stream.counts()
        assert counts.failed == 0 and counts.reads > 0
        assert counts.bytes_read == counts.reads * NBYTES
        assert counts.reads - counts.evictions == stream.slots
        assert (counts.evictions == 0) == (slots == ALL)


def test_a_folder_a_file_and_what_is_open_are_sources(tmp_path):
    wanted = Model()
    path, x = saved(tmp_path, wanted), tokens(5)
    with nvme_gpu.open(f"file:{path}", read_only=True) as store:
        with nvme_gpu.compute.ExpertFiles(store) as files:
            for source in (tmp_path, str(path), store, nvme_gpu.catalog(store), files):
                model = Model()
                with stream_experts(model, source, cache_bytes=budget(4), reads=1):
                    assert torch.equal(model(x), wanted(x))
            assert files.layers == list(range(LAYERS))
    (tmp_path / "none").mkdir()
    refused(lambda: stream_experts(Model(), tmp_path / "none", cache_bytes=1 << 20), "has no model.safetensors")


def test_a_stripe_is_a_source(tmp_path):
    wanted = Model()
    path, model = saved(tmp_path, wanted), Model()
    members = "|".join(f"sim:mem?size={size}MiB" for size in (4, 4))
    with nvme_gpu.open(f"stripe:{members}?stripe=4KiB") as store:
        found = nvme_gpu.import_file(store, path, 8192)
        with stream_experts(model, found, cache_bytes=budget(3), reads=1) as stream:
            assert torch.equal(model(tokens(9)), wanted(tokens(9)))
            assert stream.counts().reads > 0


# Products of float16 on the CPU need torch 2.
_HALVES = ["bfloat16"] if torch.__version__ < "2" else ["bfloat16", "float16"]


@pytest.mark.parametrize("dtype", _HALVES)
def test_numbers_of_files_become_the_dtype_of_the_model(tmp_path, dtype):
    kind = getattr(torch, dtype)
    wanted = Model(dtype=kind)
    path = safetensors(tmp_path / "model.safetensors", {name: one.float() for name, one in tensors_of(wanted).items()})
    model = Model(dtype=kind, seed=5)
    for mine, theirs in zip(model.model.layers, wanted.model.layers):
        mine.mlp.gate.load_state_dict(theirs.mlp.gate.state_dict())
    with stream_experts(model, path, cache_bytes=60_000, reads=1):
        assert torch.equal(model(tokens(9, kind)), wanted(tokens(9, kind)))


def test_biases_and_rows_that_take_turns_are_those_of_gpt_oss(tmp_path):
    wanted, model = Model(BiasedExperts), Model(BiasedExperts)
    path = saved(tmp_path, wanted)
    with stream_experts(model, path, cache_bytes=60_000, reads=2) as stream:
        assert torch.equal(model(tokens(9)), wanted(tokens(9)))
        form = stream._caches[0].slots.form
        assert form.is_transposed and form.is_interleaved and form.has_bias


def test_one_weight_in_blocks_of_mxfp4_is_its_numbers(tmp_path):
    generator = torch.Generator().manual_seed(3)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    wanted, tensors = Model(BiasedExperts), {}
    # Rows are whole blocks of 32 elements: hidden is 16, so that down is stored as bfloat16 would not be in published files.
    for number, layer in enumerate(wanted.model.layers):
        experts, bank = layer.mlp.experts, f"model.layers.{number}.mlp.experts"
        codes = torch.randint(0, 16, (EXPERTS, 2 * HIDDEN, WIDTH), generator=generator)
        scales = torch.randint(120, 130, (EXPERTS, 2 * HIDDEN, WIDTH // 32), generator=generator)
        numbers = values[codes] * (2.0 ** (scales.float() - 127)).repeat_interleave(32, -1)
        experts.gate_up_proj.data.copy_(numbers.transpose(1, 2))
        packed = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
        tensors[f"{bank}.gate_up_proj_blocks"] = packed.reshape(EXPERTS, 2 * HIDDEN, WIDTH // 32, 16)
        tensors[f"{bank}.gate_up_proj_scales"] = scales.to(torch.uint8)
        tensors[f"{bank}.down_proj"] = experts.down_proj.detach().transpose(1, 2)
        for name in ("gate_up_proj_bias", "down_proj_bias"):
            tensors[f"{bank}.{name}"] = getattr(experts, name).detach()
    model = Model(BiasedExperts)
    with stream_experts(model, safetensors(tmp_path / "m.safetensors", tensors), cache_bytes=80_000, reads=2):
        assert torch.equal(model(tokens(9)), wanted(tokens(9)))


def test_a_budget_is_kept_to_the_byte(tmp_path):
    path = saved(tmp_path, Model())
    for slots, reads, guesses in ((1, 1, 0), (5, 2, 3), (ALL, 4, 0)):
        exact = budget(slots, reads, guesses)
        for spare in (0, 1, NBYTES - 1):
            model = Model()
            with stream_experts(model, path, cache_bytes=exact + spare, reads=reads, guesses=guesses) as stream:
                assert (stream.slots, stream.memory_bytes) == (slots, exact)
                tensors = [one for cache in stream._caches for one in cache.slots.tensors.values()]
                buffers = [one for cache in stream._caches for one in cache._buffers]
                assert sum(one.nelement() * one.element_size() for one in tensors + buffers) == exact
    refused(
        lambda: stream_experts(Model(), path, cache_bytes=budget(1, 2) - 1, reads=2),
        f"a cache of {budget(1, 2) - 1} bytes",
        f"takes {budget(1, 2)}",
    )


def test_parameters_are_freed_and_the_model_is_not_saved_without_them(tmp_path):
    wanted, model, stream = streamed(tmp_path)
    with stream:
        names = [name for name, _ in model.named_parameters()]
        assert names == [f"model.layers.{layer}.mlp.gate.weight" for layer in range(LAYERS)]
        assert all(not one.mlp.experts.layer.inner._parameters for one in model.model.layers)
        refused(model.state_dict, "model.layers.0.mlp.experts lie in files")
        for copied in (lambda: copy.deepcopy(model), lambda: pickle.dumps(model), lambda: torch.save(model, io.BytesIO())):
            refused(copied, "model.layers.0.mlp.experts is read from files and cannot be copied")
    refused(lambda: model(tokens(1)), "are closed")
    stream.close()


def test_the_expert_used_the_longest_time_ago_makes_room(tmp_path):
    _, model, stream = streamed(tmp_path, slots=3, share=1.0)
    block = model.model.layers[0].mlp.experts
    x, one = tokens(1), torch.ones(1, 1)
    with stream:
        for expert in (0, 1, 2, 0, 3, 0, 1):
            block(x, torch.tensor([[expert]]), one)
        counts = stream.counts()
        # 3 takes the place of 1, and 1 that of 2.
        assert (counts.hits, counts.reads, counts.evictions) == (2, 5, 2)
        assert [stream._caches[0].holds(stream._banks[0], expert) for expert in range(4)] == [True, True, False, True]


def test_experts_of_a_step_are_read_once_and_never_evict_each_other(tmp_path):
    wanted, model, stream = streamed(tmp_path, slots=3, share=1.0)
    mine, theirs = model.model.layers[0].mlp.experts, wanted.model.layers[0].mlp.experts
    with stream:
        chosen = torch.tensor([[4, 2], [2, 4], [4, 0], [4, 2]])
        weights = torch.rand(4, 2)
        assert torch.equal(mine(tokens(4), chosen, weights), theirs(tokens(4), chosen, weights))
        assert stream.counts()[:4] == (0, 3, 3 * NBYTES, 0)
        chosen = torch.tensor([[1, 2], [2, 3], [1, 2], [3, 1]])
        assert torch.equal(mine(tokens(4), chosen, weights), theirs(tokens(4), chosen, weights))
        counts = stream.counts()
        assert (counts.hits, counts.reads, counts.evictions) == (1, 5, 2)


def test_a_step_that_wants_most_of_a_layer_leaves_the_cache_to_the_others(tmp_path):
    _, model, stream = streamed(tmp_path, slots=4, share=0.5)
    first, second = (layer.mlp.experts for layer in model.model.layers[:2])
    with stream:
        for expert in range(4):
            first(tokens(1), torch.tensor([[expert]]), torch.ones(1, 1))
        every = torch.arange(EXPERTS).reshape(-1, CHOICES)
        second(tokens(len(every)), every, torch.ones(every.shape))
        counts = stream.counts()
        assert (counts.streamed, counts.evictions) == (EXPERTS, EXPERTS)
        # All but one slot keep what they had.
        held = [stream._caches[0].holds(stream._banks[0], expert) for expert in range(4)]
        assert held == [False, True, True, True]


def faulty(path, first, last):
    """A simulated drive with the file, of which these reads fail."""
    drive = f"{path}.img"
    shutil.copy(path, drive)
    os.truncate(drive, 1 << 20)
    return f"sim:{drive}?block=512&fault=status:0x281@op=read,nth={first}-{last}"


def reads_before(path):
    """How many reads the headers take."""
    with nvme_gpu.open(faulty(path, 1 << 30, 1 << 30), queues=1) as store:
        before = store.stats()["commands"]
        with stream_experts(Model(), store, cache_bytes=budget(4), reads=1):
            return store.stats()["commands"] - before


def test_a_failed_read_is_raised_and_the_step_may_be_repeated(tmp_path):
    wanted, model = Model(), Model()
    path, x = saved(tmp_path, wanted), tokens(6)
    first = reads_before(path) + 3
    with nvme_gpu.open(faulty(path, first, first), queues=1) as store:
        with stream_experts(model, store, cache_bytes=budget(4), reads=2) as stream:
            with pytest.raises(nvme_gpu.Status, match=r"expert \d of model\.layers\.0\.mlp\.experts"):
                model(x)
            assert stream.counts().failed == 1
            assert torch.equal(model(x), wanted(x))
            assert len(stream._caches[0]._free_buffers) == 2


def test_with_nan_exactly_the_tokens_of_the_expert_are_nan(tmp_path):
    wanted, model = Model(), Model()
    path, x = saved(tmp_path, wanted), tokens(12)
    block, reference = model.model.layers[0].mlp, wanted.model.layers[0].mlp
    _, _, chosen = reference.gate(x)
    for nth in range(1, 5):
        first = reads_before(path) + nth
        with nvme_gpu.open(faulty(path, first, first), queues=1) as store:
            model = Model()
            with stream_experts(model, store, cache_bytes=budget(4), reads=1, on_error="nan") as stream:
                out = model.model.layers[0].mlp(x)
                failed = torch.isnan(out).any(-1)
                matches = [e for e in range(EXPERTS) if torch.equal(failed, (chosen == e).any(-1)) and failed.any()]
                assert len(matches) == 1 and stream.counts().failed == 1
                assert torch.isnan(out[failed]).all() and torch.equal(out[~failed], reference(x)[~failed])
                # The next step reads it again.
                assert torch.equal(model.model.layers[0].mlp(x), reference(x))
    del block


def test_an_expert_whose_numbers_are_refused_is_nan_and_not_another_one(tmp_path):
    model, broken = Model(), 3
    tensors = tensors_of(model)
    for expert in range(EXPERTS):
        name = f"model.layers.0.mlp.experts.{expert}.down_proj.weight"
        del tensors[name]
        # Numbers of 4 bits that are all 0; the shape of one expert is not that of its words.
        tensors[f"{name}_packed"] = torch.full((WIDTH, HIDDEN // 8), -0x77777778, dtype=torch.int32)
        tensors[f"{name}_scale"] = torch.ones(WIDTH, 1, dtype=torch.bfloat16)
        tensors[f"{name}_shape"] = torch.tensor([WIDTH, HIDDEN + (expert == broken)])
    path = safetensors(tmp_path / "model.safetensors", tensors)
    with stream_experts(model, path, cache_bytes=40_000, reads=1, on_error="nan", share=1.0) as stream:
        cache = stream._caches[0]
        for _ in range(2):
            chosen = torch.tensor([[1], [broken], [4], [broken]])
            out = model.model.layers[0].mlp.experts(tokens(4), chosen, torch.ones(4, 1))
            assert torch.isnan(out[[1, 3]]).all() and not out[[0, 2]].any()
        assert stream.counts().failed == 2 and not cache.holds(stream._banks[0], broken)
        assert len(cache._free_slots) + len(cache._held) == stream.slots


def test_every_read_may_fail(tmp_path):
    path = saved(tmp_path, Model())
    first = reads_before(path) + 1
    with nvme_gpu.open(faulty(path, first, 1 << 30), queues=1) as store:
        model = Model()
        with stream_experts(model, store, cache_bytes=budget(4, 3, 2), reads=3, guesses=2, on_error="nan") as stream:
            for _ in range(3):
                assert torch.isnan(model(tokens(5))).all()
            counts = stream.counts()
            assert counts.failed > 0 and counts.hits == 0 and counts.guesses == counts.guesses_wasted
            assert len(stream._caches[0]._free_slots) == stream.slots


def test_guesses_are_used_and_evict_nothing(tmp_path):
    wanted, model, stream = streamed(tmp_path, slots=4, reads=2, guesses=2, share=1.0)
    with stream:
        for step in range(12):
            x = tokens(1, seed=step)
            assert torch.equal(model(x), wanted(x))
        counts = stream.counts()
        assert counts.guesses_used > 0 and counts.guesses_used + counts.guesses_wasted <= counts.guesses
        assert counts.hits + counts.reads + counts.guesses_used == 12 * LAYERS * CHOICES
        assert counts.bytes_read == (counts.reads + counts.guesses) * NBYTES
        # Only what a step wanted came into the cache.
        assert counts.evictions == counts.reads + counts.guesses_used - stream.slots


def test_a_file_of_a_drive_that_changes_is_found(tmp_path):
    if not shutil.which("mke2fs", path=os.environ["PATH"] + ":/usr/sbin"):
        pytest.skip("needs mke2fs, of e2fsprogs")
    import subprocess

    wanted, model, image = Model(), Model(), tmp_path / "drive.img"
    folder = tmp_path / "files"
    folder.mkdir()
    path = saved(folder, wanted)
    tool = shutil.which("mke2fs", path=os.environ["PATH"] + ":/usr/sbin")
    subprocess.run([tool, "-q", "-t", "ext4", "-O", "^has_journal,^metadata_csum", "-d", folder, image, "4M"], check=True)
    with nvme_gpu.open(f"sim:{image}") as store:
        file = nvme_gpu.Volume(store).open("/model.safetensors")
        with stream_experts(model, file, cache_bytes=budget(4), reads=1) as stream:
            assert torch.equal(model(tokens(3)), wanted(tokens(3)))
            whole, size = store.read(store.nbytes), path.stat().st_size
            at = next(
                at for at in range(4, len(whole), 128) if whole[at : at + 4] == size.to_bytes(4, "little")
            )
            store.write((size + 1).to_bytes(4, "little"), at)
            with pytest.raises(nvme_gpu.NvmeGpuError) as caught:
                for step in range(20):
                    model(tokens(7, seed=step))
            assert caught.value.code == "mismatch"
            assert stream.counts().reads > 0


def test_what_is_not_understood_is_refused_and_nothing_is_replaced(tmp_path):
    model = Model()
    tensors = tensors_of(model)
    bank = "model.layers.1.mlp.experts"

    def tried(change, *match, **more):
        changed = dict(tensors)
        change(changed)
        path = safetensors(tmp_path / "changed.safetensors", changed)
        refused(lambda: stream_experts(model, path, cache_bytes=1 << 20, **more), *match)
        assert len(list(model.parameters())) == 3 * LAYERS

    one = f"{bank}.2.up_proj.weight"
    tried(lambda t: t.pop(one), "expert 2 has no weight of up")
    tried(lambda t: [t.pop(name) for name in list(t) if name.startswith(bank)], "layer 1 has no experts")
    tried(lambda t: [t.pop(name) for name in list(t) if name.startswith(f"{bank}.5.")], "has 5 experts, and")
    tried(lambda t: t.update({f"{bank}.2.up_proj.lora_A": t[one]}), "lora_A")
    tried(lambda t: t.update({one: t[one][:, 1:]}), "up is of 16 x 31")
    tried(lambda t: t.update({one: t[one].to(torch.uint8)}), one.partition(".2.")[0])

    def biases(t):
        for name in [name for name in t if name.startswith(bank)]:
            t[name.replace("weight", "bias")] = torch.zeros(len(t[name]))

    tried(biases, "the block has no bias, and the files have")

    def wider(t):
        for name in [name for name in t if name.startswith(bank)]:
            rows = WIDTH + 32
            t[name] = torch.zeros((rows, HIDDEN) if "down" in name else (HIDDEN, rows))

    tried(wider, f"matrices of {WIDTH + 32} x {HIDDEN}")
    tried(lambda t: None, "on_error is 'zero'", on_error="zero")
    tried(lambda t: None, "share is 0", share=0)
    path = saved(tmp_path, model)
    refused(lambda: stream_experts(Model(BiasedExperts), path, cache_bytes=1 << 20), "has biases, and expert 0 has none")


def test_blocks_that_are_not_known_are_refused(tmp_path):
    path = saved(tmp_path, Model())

    class OtherExperts(Experts):
        pass

    def tried(model, *match):
        refused(lambda: stream_experts(model, path, cache_bytes=1 << 20), *match)

    tried(Model(OtherExperts), "model.layers.0.mlp.experts is of the class OtherExperts")
    tried(torch.nn.Linear(2, 2), "Linear has no experts")
    for change, *match in (
        (lambda e: setattr(e, "extra", torch.nn.Parameter(torch.zeros(2))), "('extra', (2,))"),
        (lambda e: setattr(e, "down_proj", torch.nn.Parameter(torch.zeros(EXPERTS, 3, 4))), "parameters that are not known"),
        (lambda e: e.register_buffer("scale", torch.zeros(2)), "buffers that are not known: scale"),
        (lambda e: e.to(torch.float64), "torch.float64"),
        (lambda e: setattr(e, "has_gate", False), "has_gate"),
        (lambda e: setattr(e, "_is_expert_parallel", True), "expert parallelism"),
        (lambda e: setattr(e.config, "_experts_implementation", "sonicmoe"), "multiplies by 'sonicmoe'"),
    ):
        model = Model()
        change(model.model.layers[1].mlp.experts)
        tried(model, "model.layers.1.mlp.experts", *match)
        assert type(model.model.layers[0].mlp.experts) is Experts
    model = Model()
    with stream_experts(model, path, cache_bytes=1 << 20):
        tried(model, "stream a model once")


def test_two_layers_of_one_number_are_refused(tmp_path):
    path, model = saved(tmp_path, Model()), torch.nn.Module()
    model.one, model.other = Model(), Model(seed=5)
    refused(
        lambda: stream_experts(model, path, cache_bytes=1 << 20),
        "one.model.layers.0.mlp.experts and other.model.layers.0.mlp.experts are both layer 0",
    )
    assert len(list(model.parameters())) == 6 * LAYERS


def test_a_device_may_be_named_without_its_number(tmp_path):
    wanted, model, stream = streamed(tmp_path, device="cpu:0")
    with stream:
        assert torch.equal(model(tokens(3)), wanted(tokens(3)))


def test_reads_that_do_not_start_take_no_buffers(tmp_path):
    path, model = saved(tmp_path, Model()), Model()
    files = nvme_gpu.compute.ExpertFiles(path)
    with stream_experts(model, files, cache_bytes=budget(4, 2, 1), reads=2, guesses=1) as stream:
        model.model.layers[0].mlp(tokens(1))
        files.close()
        for _ in range(4):
            with pytest.raises(nvme_gpu.NvmeGpuError):
                model.model.layers[2].mlp(tokens(5))
        assert len(stream._caches[0]._free_buffers) == 2


def test_a_stream_that_closes_before_the_step_has_its_turn_is_named(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    _, model, stream = streamed(tmp_path)
    lock, block = stream._caches[0].lock, model.model.layers[0].mlp
    entered = threading.Event()

    class WaitingLock:
        """Says when a step asks for the lock, which the test holds."""

        def __enter__(self):
            entered.set()
            lock.acquire()

        def __exit__(self, *_):
            lock.release()

    def run():
        with torch.no_grad():
            return block(tokens(1))

    stream._caches[0].lock = WaitingLock()
    with ThreadPoolExecutor(1) as threads:
        with lock:
            step = threads.submit(run)
            entered.wait(60)
            stream._caches[0].lock = lock
            stream.close()
        refused(step.result, "are closed")


def test_what_a_block_is_given_is_checked(tmp_path):
    _, model, stream = streamed(tmp_path)
    block = model.model.layers[0].mlp.experts
    with stream:
        refused(lambda: block(tokens(1), torch.tensor([[EXPERTS]]), torch.ones(1, 1)), "asked for experts [6]")
        refused(lambda: block(tokens(1).double(), torch.tensor([[0]]), torch.ones(1, 1)), "its input is torch.float64")
        # Weights of all experts for each token, an expert of a token that is not there, and states of several texts.
        pairs, every = torch.zeros(2, CHOICES, dtype=torch.long), torch.ones(2, EXPERTS)
        for x, index, weights in (
            (tokens(2), pairs, every),
            (tokens(2), pairs, torch.ones(2 * CHOICES, 1)),
            (tokens(2), pairs[:1], torch.ones(1, CHOICES)),
            (tokens(1), pairs, torch.ones(2, CHOICES)),
            (tokens(2)[None], pairs, torch.ones(2, CHOICES)),
        ):
            refused(lambda x=x, index=index, weights=weights: block(x, index, weights), "of the shapes")
        with torch.enable_grad():
            x = tokens(1).requires_grad_()
            refused(lambda: block(x, torch.tensor([[0]]), torch.ones(1, 1)), "computes no gradient")


def test_threads_may_share_a_model(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    wanted, model, stream = streamed(tmp_path, slots=3, reads=2, guesses=1)

    def run(seed):
        with torch.no_grad():
            return torch.equal(model(tokens(5, seed=seed)), wanted(tokens(5, seed=seed)))

    with stream, ThreadPoolExecutor(4) as threads:
        assert all(threads.map(run, range(40)))
