"""By hand, with the plugin kv_vllm_runner: vLLM's real scheduler and offloading connector over pages of nvme_gpu.kv.vllm."""

import os

import kv_vllm_runner
import pytest
import torch
from tests.v1.kv_connector.unit.offloading_connector import utils
from tests.v1.kv_connector.unit.utils import EOS_TOKEN_ID
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec

import nvme_gpu

BLOCK = 16
PROMPT = list(range(1000, 1000 + 6 * BLOCK))


def attention(name, layers=1, window=None):
    options = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    spec = FullAttentionSpec(**options) if window is None else SlidingWindowSpec(sliding_window=window, **options)
    return KVCacheGroupSpec([f"{name}{layer}" for layer in range(layers)], spec)


def runner(asynchronous=False, groups=None, **options):
    made = utils.RequestRunner(BLOCK, 100, async_scheduling=asynchronous, kv_cache_groups=groups or [attention("layer", 3)], **options)
    made.close = lambda: [one.shutdown() for one in (made.worker_connector, made.scheduler_connector)]
    return made


def content(made, group=0):
    """The bytes of each block of the running request, by its place."""
    layout = made.worker_connector.connector_worker.worker._layout
    (blocks,) = made.scheduler.kv_cache_manager.coordinator.single_type_managers[group].req_to_blocks.values()
    refs = layout._refs[group]
    return [b"".join(layout._tensors[at][one.block_id, :size].numpy().tobytes() for at, size in refs) for one in blocks]




def ran(made, prompt=PROMPT):
    """Runs a request to its first token. Returns the content of its blocks, and how many tokens the model computed."""
    scheduled = []
    schedule = made.scheduler.schedule

    def noted(*arguments, **options):
        found = schedule(*arguments, **options)
        scheduled.append(found.total_num_scheduled_tokens)
        return found

    made.scheduler.schedule = noted
    made.new_request(token_ids=prompt)
    made.manager.reset_mock()
    made._run([0], True)
    made.scheduler.schedule = schedule
    return content(made), sum(scheduled)


def finished(made):
    made._run([EOS_TOKEN_ID], True)
    made.scheduler.reset_prefix_cache()


@pytest.fixture(params=[False, True], ids=["in_step", "asynchronous"])
def asynchronous(request):
    return request.param


@pytest.fixture(autouse=True)
def folder(tmp_path):
    kv_vllm_runner.place(tmp_path)
    return tmp_path


def spoil(folder, page):
    with open(os.path.join(folder, "pages"), "r+b") as file:
        data = file.read()
        at = data.index(page[:2048])
        file.seek(at + 7)
        file.write(bytes([data[at + 7] ^ 1]))


def overwritten(made):
    for tensor in made.worker_connector.connector_worker.worker._layout._tensors:
        tensor.zero_()


def test_blocks_come_back_with_their_bytes_and_after_a_restart(asynchronous):
    made = runner(asynchronous)
    first, count = ran(made)
    assert count == len(PROMPT)
    finished(made)
    overwritten(made)
    again, count = ran(made)
    assert again[:6] == first[:6] and count < 2 * BLOCK
    finished(made)
    made.close()
    made = runner(asynchronous)
    again, count = ran(made)
    assert again[:6] == first[:6] and count < 2 * BLOCK
    finished(made)
    made.close()


def test_a_spoilt_page_is_computed_again(asynchronous, folder):
    made = runner(asynchronous)
    first, _ = ran(made)
    finished(made)
    spoil(folder, first[2])
    overwritten(made)
    again, count = ran(made)
    # Two blocks are right; the third and those behind it are computed.
    assert again[:2] == first[:2] and count == len(PROMPT) - 2 * BLOCK
    assert not any(again[2])
    finished(made)
    made.close()


def test_several_groups_compute_the_request_again(asynchronous, folder):
    groups = [attention("full", 2), attention("window", 2, window=2 * BLOCK)]
    made = runner(asynchronous, groups)
    first, _ = ran(made)
    finished(made)
    overwritten(made)
    _, count = ran(made)
    assert count < 2 * BLOCK and content(made)[:5] == first[:5]
    finished(made)
    spoil(folder, first[1])
    overwritten(made)
    _, count = ran(made)
    assert count > 4 * BLOCK
    finished(made)
    made.close()


def test_a_failed_store_is_a_miss(asynchronous):
    kv_vllm_runner.PLACE.update(device="sim:mem?size=8MiB&fault=status:0x280@op=write,nth=60-100000", allow_write=True)
    made = runner(asynchronous)
    counts = []
    for number in range(12):
        prompt = [number] * 6 * BLOCK
        ran(made, prompt)
        finished(made)
        counts.append(ran(made, prompt)[1])
        finished(made)
    assert counts[0] < 2 * BLOCK and counts[-1] == 6 * BLOCK
    made.close()


def test_a_failed_read_is_computed_and_not_asked_for_again(asynchronous):
    kv_vllm_runner.PLACE.update(device="sim:mem?size=8MiB&fault=status:0x281@op=read,nth=100-100000", allow_write=True)
    made = runner(asynchronous)
    counts = []
    for _ in range(40):
        counts.append(ran(made)[1])
        finished(made)
    assert counts[0] == len(PROMPT) and counts[1] < 2 * BLOCK and counts[-1] >= len(PROMPT) - BLOCK
    made.close()


def test_a_drive_that_never_answers_ends_as_a_miss():
    device = "sim:mem?size=8MiB&fault=drop@op=read,nth=60-100000"
    kv_vllm_runner.PLACE.update(device=device, allow_write=True, timeout_ms=1000)
    made = runner()
    counts = []
    for _ in range(12):
        counts.append(ran(made)[1])
        finished(made)
    assert counts[1] < 2 * BLOCK and counts[-1] >= len(PROMPT) - BLOCK
    made.close()


def test_a_reset_removes_all_pages(asynchronous):
    made = runner(asynchronous)
    ran(made)
    finished(made)
    assert made.scheduler_connector.reset_cache()
    _, count = ran(made)
    assert count == len(PROMPT)
    finished(made)
    _, count = ran(made)
    assert count < 2 * BLOCK
    finished(made)
    made.close()


def test_an_aborted_request_lets_its_pages_go(asynchronous):
    made = runner(asynchronous)
    ran(made)
    finished(made)
    made.new_request(token_ids=PROMPT)
    made.scheduler.schedule()
    from vllm.v1.request import RequestStatus

    made.scheduler.finish_requests(str(made.req_id), RequestStatus.FINISHED_ABORTED)
    made._run([], True)
    real = made.connector_scheduler.manager._mock_wraps
    assert not real._held and not real._holders
    made.close()


def test_another_layout_or_parallel_size_is_refused(folder):
    made = runner()
    ran(made)
    finished(made)
    made.close()
    kv_vllm_runner.PLACE["create"] = "never"
    options = {"block_size": BLOCK, "num_kv_heads": 4, "head_size": 16, "dtype": torch.float32}
    other = KVCacheGroupSpec(["layer0", "layer1", "layer2"], FullAttentionSpec(**options))
    for changed in ({"groups": [other]}, {"worker_count": 2}):
        kv_vllm_runner.PLACE["nbytes"] = 8 << 20
        with pytest.raises(nvme_gpu.NvmeGpuError) as refused:
            runner(**changed)
        assert refused.value.code == "mismatch"
    kv_vllm_runner.PLACE["create"] = "auto"
    made = runner(groups=[other])
    assert ran(made)[1] == len(PROMPT)
    finished(made)
    made.close()


def test_a_connector_that_takes_no_failure_is_refused(monkeypatch):
    monkeypatch.setattr(utils, "KVTransferConfig", lambda **options: kv_vllm_runner.KVTransferConfig(
        kv_connector="OffloadingConnector", kv_role="kv_both",
        kv_connector_extra_config={"spec_name": "NvmeOffloadingSpec", "spec_module_path": "nvme_gpu.kv.vllm", **kv_vllm_runner.PLACE},
    ))  # fmt: skip
    with pytest.raises(nvme_gpu.Usage, match="failed transfers"):
        runner()


def test_a_version_that_is_not_known_is_refused(monkeypatch):
    monkeypatch.setattr("vllm.__version__", "0.34.1")
    with pytest.raises(nvme_gpu.Usage, match="0.34.1"):
        runner()


@pytest.mark.parametrize("blocks", [2, 3])
def test_chunks_of_several_blocks(asynchronous, blocks):
    made = runner(asynchronous, groups=None) if blocks == 1 else utils.RequestRunner(
        BLOCK, 100, blocks_per_chunk=blocks, async_scheduling=asynchronous
    )  # fmt: skip
    first, _ = ran(made)
    finished(made)
    overwritten(made)
    again, count = ran(made)
    assert again[: 6 - blocks] == first[: 6 - blocks] and count <= blocks * BLOCK
    finished(made)
