"""A plugin of pytest, by hand: the RequestRunner of vLLM's own tests, a scheduler and a connector on the CPU, over pages on a drive.

    cd VLLM_SOURCES
    PYTHONPATH=TESTS_ENGINES:. HF_HUB_OFFLINE=1 python -m pytest -p kv_vllm_runner TESTS_ENGINES/kv_vllm_offload_tests.py

VLLM_SOURCES has the tests of vLLM's source archive, without its package, and a short facebook/opt-125m/config.json.
vLLM's own test_scheduler.py runs with it in part only: it counts lookups, looks into a mock's jobs, and expects jobs that end
when it says so. Of 19 with -k "test_offloading_connector or preemption or abort or reset or concurrent" 9 passed.
"""

import os
import tempfile
from unittest.mock import MagicMock

import torch
from tests.v1.kv_connector.unit.offloading_connector import utils

from nvme_gpu.kv._vllm_lookups import ChunkKeys
from nvme_gpu.kv.vllm import NvmeOffloadingConnector, NvmeOffloadingSpec

AREA = 8 << 20
PLACE = {"device": ""}
FOLDERS = []


def place(folder, **options):
    """The area of the runners that are made from now on."""
    path = os.path.join(folder, "pages")
    if not os.path.exists(path):
        with open(path, "wb") as file:
            file.truncate(AREA)
    PLACE.clear()
    PLACE.update({"device": f"file:{path}", **options})
    return path


class RunnerSpec(NvmeOffloadingSpec):
    """Our specification, with what vLLM's harness looks at."""

    def get_manager(self):
        if self._manager is None:
            real = super().get_manager()
            self._manager = MagicMock(wraps=real)
            self.real = real
        return self._manager

    def get_worker(self, kv_caches):
        for one in kv_caches.tensors:
            one.tensor.copy_(torch.randint(-128, 128, one.tensor.shape, dtype=torch.int8))
        worker = super().get_worker(kv_caches)
        self.jobs, self.done, self.flushed = {}, [], []
        submit_store, submit_load, wait, finished = worker.submit_store, worker.submit_load, worker.wait, worker.get_finished
        self.wait_all = lambda: wait(list(worker._jobs))

        def note(submit):
            def noted(job_id, src_spec, dst_spec):
                self.jobs[job_id] = (src_spec, dst_spec)
                return submit(job_id, src_spec, dst_spec)

            return noted

        def waited(job_ids):
            self.flushed += job_ids
            wait(job_ids)

        def get_finished():
            results = finished()
            self.done += [result.job_id for result in results]
            return results

        worker.submit_store, worker.submit_load, worker.wait = note(submit_store), note(submit_load), waited
        worker.get_finished = get_finished
        return worker

    def complete_transfers(self):
        self.wait_all()

    def get_completed_transfers(self):
        done, self.done = self.done, []
        return [self.jobs[job] for job in done]

    def get_flushed_transfers(self):
        flushed, self.flushed = self.flushed, []
        return [self.jobs[job] for job in flushed if job in self.jobs]


class RunnerKeys(ChunkKeys):
    offload_keys = property(lambda self: self.keys)


ChunkKeys.offload_keys = RunnerKeys.offload_keys
made_output = utils.create_model_runner_output


def configured(kv_connector, kv_role, kv_connector_extra_config):
    if not PLACE["device"]:
        # One area has one owner, and vLLM's tests do not close theirs.
        FOLDERS.append(tempfile.TemporaryDirectory())
        place(FOLDERS[-1].name)
    extra = {**kv_connector_extra_config, "spec_name": "RunnerSpec", "spec_module_path": "kv_vllm_runner", **PLACE}
    if FOLDERS:
        PLACE["device"] = ""
    extra.pop("self_describing_kv_events", None)
    return KVTransferConfig(
        kv_connector="NvmeOffloadingConnector",
        kv_connector_module_path="nvme_gpu.kv.vllm",
        kv_role=kv_role,
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={**extra, "self_describing_kv_events": True},
    )


class Runner(utils.RequestRunner):
    """Reports failed loads to the scheduler, which vLLM's harness has no need for."""

    latest = None

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        Runner.latest = self


def output(**options):
    connector = Runner.latest.worker_connector
    made = made_output(**options)
    made.kv_connector_output.invalid_block_ids = connector.get_block_ids_with_load_errors()
    made.kv_connector_output.failed_recving = set(connector._failed_requests)
    connector._failed_requests = set()
    return made


KVTransferConfig = utils.KVTransferConfig
utils.KVTransferConfig = configured
utils.OffloadingConnector = NvmeOffloadingConnector
utils.MockOffloadingSpec = RunnerSpec
utils.MockLoadStoreSpec = ChunkKeys
utils.RequestRunner = Runner
utils.create_model_runner_output = output
