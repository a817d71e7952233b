"""vLLM's offloading connector over pages on NVMe: a failed load is computed again, a failed store is a miss."""

from __future__ import annotations

import contextvars
import logging
import os
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import OffloadingSpec
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from .._errors import Usage
from ._areas import AreaOptions, digest, versions
from ._vllm_lookups import LookupManager, StepAnswer, StepMessage, shared_fields
from ._vllm_pages import BlockLayout, PageWorker

_LOG = logging.getLogger("nvme_gpu")
_VERSIONS = ("0.32", "0.33")
# Those that vLLM itself reads from the same object.
_OF_VLLM = ("spec_name", "spec_module_path", "block_size", "blocks_per_chunk", "canonical_layout", "offload_prompt_only",
            "self_describing_kv_events")  # fmt: skip
_CONFIG: contextvars.ContextVar[Any] = contextvars.ContextVar("nvme_gpu_vllm_config", default=None)
"""vLLM's configuration while a connector of ours makes its specification."""


class NvmeOffloadingSpec(OffloadingSpec):
    """Pages of vLLM's keys and values on a drive.

    Raises :class:`Usage` under another connector, which takes a failed load for a success or stops at it, for options that
    are not known, and for vLLM's canonical layout.
    """

    def __init__(self, config: Any) -> None:
        of_vllm = _CONFIG.get()
        if of_vllm is None:
            raise Usage(
                "NvmeOffloadingSpec is used by a connector that takes no failed transfers",
                'set "kv_connector": "NvmeOffloadingConnector", "kv_connector_module_path": "nvme_gpu.kv.vllm"',
            )
        super().__init__(config)
        if config.canonical_layout:
            raise Usage("canonical_layout is set, and pages have the layout of a rank", "remove canonical_layout")
        options = {name: value for name, value in config.extra_config.items() if name not in _OF_VLLM}
        area = AreaOptions.of(options, "kv_connector_extra_config")
        self._area = area._replace(revision=area.revision or getattr(of_vllm.model_config, "revision", None) or "")
        self._hash_algorithm = str(of_vllm.cache_config.prefix_caching_hash_algo)
        self._manager: LookupManager | None = None
        self._worker: PageWorker | None = None
        self.forms: list[Any] = []
        """The tensors of keys and values as the model has them."""

    def get_manager(self) -> LookupManager:
        """What the scheduler asks."""
        if self._manager is None:
            events = self.kv_events_config.enable_kv_cache_events
            self._manager = LookupManager(self.config.parallel.world_size, events)
        return self._manager

    def get_worker(self, kv_caches: Any) -> PageWorker:
        """What moves chunks, in an area that it opens now."""
        if self._worker is None:
            config = self.config
            layout = BlockLayout(kv_caches, [group.group_id for group in config.groups], self.blocks_per_chunk)
            parallel = config.parallel
            sizes = {name: getattr(parallel, f"{name}_size") for name in ("tp", "pp", "pcp", "dcp")}
            replica, replicas = parallel.data_parallel_index or 0, parallel.data_parallel_size or 1
            of_pages = {
                "groups": [[group.tokens_per_block, list(group.layer_names)] for group in config.groups],
                "order": config.kv_cache_layout,
                "pages": layout.fingerprint(),
                "tensors": self.forms,
                "versions": versions("vllm"),
            }
            gpu = (layout.device.index or 0) if layout.device.type == "cuda" else None
            pages = self._area.open(
                replica * parallel.world_size + parallel.rank,
                replicas * parallel.world_size,
                layout.page_bytes,
                gpu=gpu,
                model=config.model.name,
                dtype=self._area.dtype(config.model.dtype),
                layout=digest(of_pages),
                block_tokens=config.cache.tokens_per_hash * self.blocks_per_chunk,
                parallel_rank=f"{self._area.parallel_rank(parallel.rank, parallel.world_size)} {digest(sizes)}",
                hash_algorithm=self._hash_algorithm,
                seed=os.environ.get("PYTHONHASHSEED", ""),
            )
            _LOG.info("vLLM: %s %s", pages.stats(), pages.path if gpu is not None else "")
            self._worker = PageWorker(pages, layout, self._area.part(parallel.rank))
        return self._worker


class NvmeOffloadingConnector(OffloadingConnector):
    """vLLM's connector, which stops at a failed transfer, over :class:`NvmeOffloadingSpec`, whose transfers may fail.

    Raises :class:`Usage` for a version of vLLM that it was not written for.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        version = str(getattr(vllm, "__version__", ""))
        if not any(version == known or version.startswith(f"{known}.") for known in _VERSIONS):
            raise Usage(f"vLLM {version} is not one of {', '.join(_VERSIONS)}", "use one of them, or the tier NvmeTier")
        options = vllm_config.kv_transfer_config.kv_connector_extra_config
        if not issubclass(OffloadingSpecFactory.get_spec_cls(options), NvmeOffloadingSpec):
            raise Usage(
                f"kv_connector_extra_config has spec_name = {options.get('spec_name')!r}",
                'set "spec_name": "NvmeOffloadingSpec", "spec_module_path": "nvme_gpu.kv.vllm"',
            )
        self._has_groups = len(kv_cache_config.kv_cache_groups) > 1
        self._num_blocks = kv_cache_config.num_blocks
        self._jobs_sent = 0
        self._requests: dict[int, str] = {}
        self._failed_requests: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._answer = StepAnswer()
        token = _CONFIG.set(vllm_config)
        try:
            super().__init__(vllm_config, role, kv_cache_config)
        finally:
            _CONFIG.reset(token)

    # ---- in the scheduler

    def _manager(self) -> Any:
        assert self.connector_scheduler is not None
        return self.connector_scheduler.manager

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """vLLM's message to the workers, with lookups."""
        message = self._manager().message(super().build_connector_meta(scheduler_output))
        self._jobs_sent = max([self._jobs_sent, *(job + 1 for job in (*message.load_jobs, *message.store_jobs))])
        return message

    def update_connector_output(self, connector_output: Any) -> None:
        """Takes the answers of the workers before vLLM ends their jobs."""
        answer = connector_output.kv_connector_worker_meta
        if isinstance(answer, StepAnswer):
            self._manager().note(answer)
        super().update_connector_output(connector_output)

    def reset_cache(self) -> Any:
        """Removes all pages, in the next step, and drops the stores before it."""
        done = super().reset_cache()
        self._manager().clear_pages(self._jobs_sent)
        return done

    # ---- in a worker

    def _worker(self) -> Any:
        assert self.connector_worker is not None
        return self.connector_worker.worker

    def register_kv_caches(self, kv_caches: Any) -> None:
        """Opens the area for these tensors."""
        assert self.connector_worker is not None
        self.connector_worker.spec.forms = [_form(name, one, self._num_blocks) for name, one in sorted(kv_caches.items())]
        super().register_kv_caches(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Answers lookups, and starts loads and the stores of the step before."""
        message = self._connector_metadata
        assert isinstance(message, StepMessage)
        self._requests.update((number, job.req_id) for number, job in message.load_jobs.items())
        if message.epoch != self._answer.epoch:
            self._answer = StepAnswer(epoch=message.epoch)
        self._answer.answers.update(self._worker().answer(message))
        super().start_load_kv(forward_context, **kwargs)

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        """Requests whose loads have ended, failed ones too."""
        finished = super().get_finished(finished_req_ids)
        for job in self._worker().take_ended():
            if not job.is_load:
                self._answer.unstored.update(job.failed)
                continue
            request = self._requests.pop(job.number, None)
            self._answer.unloaded.update(job.failed)
            if job.failed and request is not None:
                if self._has_groups:
                    self._failed_requests.add(request)
                else:
                    self._failed_blocks |= job.blocks
        return finished

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """As ``get_finished``, with the requests whose load failed, where blocks of several cache groups have one number."""
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving, self._failed_requests = results.failed_recving | self._failed_requests, set()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that vLLM computes again."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def build_connector_worker_meta(self) -> Any:
        """What the scheduler is told: jobs that have ended, and answers."""
        of_vllm = super().build_connector_worker_meta()
        if self.connector_worker is None:
            return of_vllm
        answer = self._answer
        if of_vllm is None and not (answer.answers or answer.unstored or answer.unloaded):
            return None
        self._answer = StepAnswer(epoch=answer.epoch)
        told = shared_fields(OffloadingWorkerMetadata() if of_vllm is None else of_vllm)
        return StepAnswer(**told, epoch=answer.epoch, answers=answer.answers, unstored=answer.unstored, unloaded=answer.unloaded)


def _form(name: str, tensor: Any, blocks: int) -> list[Any]:
    """The shape of a layer's tensor and the order of its dimensions in memory, whatever the number of blocks."""
    shape = ["blocks" if size == blocks else size for size in tensor.shape]
    order = sorted(range(len(shape)), key=lambda at: (-tensor.stride(at), at))
    return [name, shape, order, str(tensor.dtype)]
