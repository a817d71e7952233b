"""The scheduler's side of nvme_gpu.kv.vllm: which chunks requests ask for, and what the workers that own the areas answer.

An area has one owner, the worker beside the GPU. A lookup goes to the workers with the message of a step, and the answer
comes back with its results: a chunk is found when every worker has pinned its part, and stays pinned until the load has
ended or the request needs none.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    PrepareStoreOutput,
    RequestOffloadingContext,
)


class ChunkKeys(LoadStoreSpec):
    """The keys of the chunks that a job moves, in the order of its blocks."""

    def __init__(self, keys: Iterable[bytes]) -> None:
        self.keys = [bytes(key) for key in keys]


@dataclass
class StepMessage(OffloadingConnectorMetadata):
    """What the scheduler tells the workers in a step; they do it in the order of the fields."""

    epoch: int = 0
    """Answers of an earlier one are of before the cache was reset."""
    clears_before: int | None = None
    """All pages are removed, and jobs with a lower number are not stored."""
    released: list[bytes] = field(default_factory=list)
    touched: list[bytes] = field(default_factory=list)
    asked: list[bytes] = field(default_factory=list)


@dataclass
class StepAnswer(OffloadingWorkerMetadata):
    """What workers tell the scheduler after a step."""

    epoch: int = 0
    answers: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    """For each key the workers that looked for it, and those that have pinned it."""
    unstored: set[bytes] = field(default_factory=set)
    unloaded: set[bytes] = field(default_factory=set)

    def aggregate(self, other: Any) -> StepAnswer:
        """The answers of both; those of an older epoch count no more."""
        merged = StepAnswer(**shared_fields(super().aggregate(other)), epoch=max(self.epoch, other.epoch))
        for one in (self, other):
            merged.unstored |= one.unstored
            merged.unloaded |= one.unloaded
            if one.epoch == merged.epoch:
                for key, (workers, found) in one.answers.items():
                    before = merged.answers.get(key, (0, 0))
                    merged.answers[key] = (before[0] + workers, before[1] + found)
        return merged


def shared_fields(of_vllm: Any) -> dict[str, Any]:
    """The fields that vLLM's own class of a message has, whatever its version added."""
    kind = OffloadingWorkerMetadata if isinstance(of_vllm, OffloadingWorkerMetadata) else OffloadingConnectorMetadata
    return {one.name: getattr(of_vllm, one.name) for one in fields(kind)}


class LookupManager(OffloadingManager):
    """Lookups, loads and stores of requests. The scheduler's threads call; none of the methods waits for a drive."""

    medium = Medium.STORAGE

    def __init__(self, workers: int, has_events: bool) -> None:
        self._lock = threading.RLock()
        self._workers, self._has_events = workers, has_events
        self._events: list[Any] = []
        self._epoch = 0
        self._clears_before: int | None = None
        self._answers: dict[bytes, bool] = {}
        """Whether a key is found. Keys that are are pinned by all workers."""
        self._waiting: dict[bytes, tuple[int, int]] = {}
        """Keys whose lookup is under way, with the counts of :attr:`StepAnswer.answers`."""
        self._holders: dict[bytes, set[str]] = {}
        self._held: dict[str, set[bytes]] = {}
        self._loading: dict[str, set[bytes]] = {}
        self._unstored: set[bytes] = set()
        self._asked: list[bytes] = []
        self._released: list[bytes] = []
        self._touched: list[bytes] = []

    def lock(self) -> Any:
        """A context in which no other thread changes what lookups have found (vLLM 0.33)."""
        return self._lock

    # ---- what requests ask

    def lookup(self, key: Any, req_context: Any) -> Any:
        """HIT or MISS, or RETRY until the workers have answered."""
        tiers = getattr(req_context, "load_tier_filter", None)
        if tiers is not None and not tiers.allows(self.medium, Locality.LOCAL):
            return LookupResult.MISS
        key = bytes(key)
        with self._lock:
            self._holders.setdefault(key, set()).add(req_context.req_id)
            self._held.setdefault(req_context.req_id, set()).add(key)
            answer = self._answers.get(key)
            if answer is not None:
                return LookupResult.HIT if answer else LookupResult.MISS
            if key not in self._waiting:
                self._waiting[key] = (0, 0)
                self._asked.append(key)
            return LookupResult.RETRY

    def prepare_load(self, keys: Collection[Any], req_context: Any) -> Any:
        """The chunks of a load, pinned until :meth:`complete_load`."""
        spec = ChunkKeys(keys)
        with self._lock:
            loading = self._loading.setdefault(req_context.req_id, set())
            loading.update(spec.keys)
            self._let_go(req_context.req_id, self._held.get(req_context.req_id, set()) - loading)
        return spec

    def complete_load(self, keys: Collection[Any], req_context: Any) -> None:
        """Lets the chunks of an ended load make room for others."""
        ended = set(map(bytes, keys))
        with self._lock:
            loading = self._loading.get(req_context.req_id, set())
            loading -= ended
            if not loading:
                self._loading.pop(req_context.req_id, None)
            self._let_go(req_context.req_id, ended)

    def touch(self, keys: Collection[Any], req_context: Any) -> None:
        """Makes the chunks the last to make room."""
        with self._lock:
            self._touched.extend(map(bytes, keys))

    def prepare_store(self, keys: Collection[Any], req_context: Any) -> Any:
        """All chunks but those that are pinned: those are there."""
        with self._lock:
            chosen = [key for key in keys if not self._answers.get(bytes(key))]
        return PrepareStoreOutput(keys_to_store=chosen, store_spec=ChunkKeys(chosen), evicted_keys=[])

    def complete_store(self, keys: Collection[Any], req_context: Any, success: bool = True) -> None:
        """Forgets that the chunks were missing. vLLM says success of each job; the next lookup asks the areas."""
        with self._lock:
            for key in map(bytes, keys):
                if self._answers.get(key) is False:
                    del self._answers[key]
            stored = [key for key in keys if bytes(key) not in self._unstored]
            self._unstored.difference_update(map(bytes, keys))
            if self._has_events and success and stored:
                event = OffloadingEvent(keys=stored, medium=self.medium, removed=False, locality=Locality.LOCAL)
                self._events.append(event)

    def take_events(self) -> Iterable[Any]:
        """Chunks that all workers have stored since the last call."""
        with self._lock:
            events, self._events = self._events, []
        return events

    def on_new_request(self, req_context: Any) -> Any:
        """No wish of its own."""
        return RequestOffloadingContext()

    def on_schedule_end(self, context: Any) -> None:
        """Requests that are computed from now on ask no more."""
        with self._lock:
            for request in context.new_req_ids:
                self._let_go(request, self._held.get(request, set()) - self._loading.get(request, set()))

    def on_request_finished(self, req_context: Any) -> None:
        """Lets go of what the request holds, but for what is being loaded."""
        request = req_context.req_id
        with self._lock:
            self._let_go(request, self._held.get(request, set()) - self._loading.get(request, set()))

    def has_pending_work(self) -> bool:
        """True while a lookup or the removal of all pages is under way: vLLM steps on without requests then."""
        with self._lock:
            return bool(self._waiting) or self._clears_before is not None

    def reset_cache(self) -> None:
        """Forgets everything. The connector says next which jobs the workers drop (:meth:`clear_pages`)."""
        with self._lock:
            self._epoch += 1
            for one in (self._answers, self._waiting, self._holders, self._held, self._loading, self._unstored):
                one.clear()
            for items in (self._asked, self._released, self._touched, self._events):
                items.clear()

    def clear_pages(self, before: int) -> None:
        """Has the workers remove all pages and drop jobs with a number below ``before``."""
        with self._lock:
            self._clears_before = before

    # ---- what workers are told, and answer

    def message(self, of_vllm: Any) -> StepMessage:
        """The message of this step."""
        with self._lock:
            made = StepMessage(
                **shared_fields(of_vllm),
                epoch=self._epoch,
                clears_before=self._clears_before,
                released=self._released,
                touched=self._touched,
                asked=self._asked,
            )
            self._clears_before, self._released, self._touched, self._asked = None, [], [], []
        return made

    def note(self, answer: StepAnswer) -> None:
        """Takes what workers answered in a step."""
        with self._lock:
            if answer.epoch != self._epoch:
                return
            self._unstored |= answer.unstored
            for key, counts in answer.answers.items():
                self._note_lookup(key, counts)
            for key in answer.unloaded:
                if self._answers.pop(key, False):
                    self._released.append(key)
                if key in self._holders:
                    self._answers[key] = False

    def _note_lookup(self, key: bytes, counts: tuple[int, int]) -> None:
        before = self._waiting.get(key)
        if before is None:
            return
        workers, found = before[0] + counts[0], before[1] + counts[1]
        if workers < self._workers:
            self._waiting[key] = (workers, found)
            return
        del self._waiting[key]
        is_found = found == self._workers
        if self._holders.get(key):
            self._answers[key] = is_found
        # Some ranks alone have it, or the request that asked has ended: nothing else would take these pins back.
        if found and self._answers.get(key) is not True:
            self._released.append(key)

    def _let_go(self, request: str, keys: Iterable[bytes]) -> None:
        held = self._held.get(request, set())
        for key in list(keys):
            held.discard(key)
            holders = self._holders.get(key)
            if holders is None:
                continue
            holders.discard(request)
            if not holders:
                del self._holders[key]
                if self._answers.pop(key, False):
                    self._released.append(key)
        if not held:
            self._held.pop(request, None)
