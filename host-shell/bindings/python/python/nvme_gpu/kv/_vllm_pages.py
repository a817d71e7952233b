"""The worker's side of nvme_gpu.kv.vllm: chunks between vLLM's tensors of keys and values and a page store."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

from .._errors import NvmeGpuError, PageMiss, listed
from .._pages import PageBlocks, PagePins, PageStore, PendingPages
from ._areas import RefusedKeys, close
from ._vllm_lookups import StepMessage

_LOG = logging.getLogger("nvme_gpu")


class ChunkPlace(NamedTuple):
    """A chunk and the blocks of vLLM that it has; None for a block that the job does not name."""

    key: bytes
    group: int
    blocks: list[int | None]


class EndedJob(NamedTuple):
    """What became of a job: the keys of chunks that were not moved, and the blocks of vLLM that a load left without content."""

    number: int
    is_load: bool
    failed: list[bytes]
    blocks: set[int]


@dataclass
class MoveJob:
    """A job of vLLM under way."""

    is_load: bool
    places: list[ChunkPlace]
    refused: list[ChunkPlace]
    pending: PendingPages | None = None
    staged: list[Any] = field(default_factory=list)
    """Memory of the host for each chunk that lies in several pieces there, else None."""
    event: Any = None
    error: NvmeGpuError | None = None
    begun: float = field(default_factory=time.monotonic)

    def done(self) -> bool:
        """Whether neither the drive nor the GPU uses the blocks any more."""
        return (self.pending is None or self.pending.done()) and (self.event is None or self.event.query())

    def wait(self) -> None:
        """Waits for that. Each command to the drive has a deadline."""
        if self.pending is not None:
            self.pending.exception()
        if self.event is not None:
            self.event.synchronize()


class BlockLayout:
    """Where the blocks of a chunk lie: rows of tensors, whose bytes follow each other in its page."""

    def __init__(self, kv_caches: Any, group_ids: Sequence[int], blocks_per_chunk: int) -> None:
        self.blocks_per_chunk = blocks_per_chunk
        self._tensors = [one.tensor for one in kv_caches.tensors]
        self._refs: list[list[tuple[int, int]]] = [[(ref.tensor_idx, ref.page_size_bytes) for ref in refs] for refs in kv_caches.group_data_refs]
        self._group_of = {group_id: index for index, group_id in enumerate(group_ids)}
        self.device = self._tensors[0].device

    @property
    def page_bytes(self) -> int:
        """The longest page."""
        return max(self.nbytes(group) for group in range(len(self._refs)))

    def nbytes(self, group: int) -> int:
        """Bytes of a chunk of a group."""
        return self.blocks_per_chunk * sum(size for _, size in self._refs[group])

    def fingerprint(self) -> list[Any]:
        """What the pages depend on here."""
        return [self.blocks_per_chunk, self._refs]

    def places(self, keys: Sequence[bytes], spec: Any, is_load: bool) -> tuple[list[ChunkPlace], list[ChunkPlace]]:
        """The blocks of each chunk, and the chunks that cannot be told apart or are not whole, which are not moved."""
        of_group: list[list[bytes]] = [[] for _ in self._refs]
        for key in keys:
            of_group[self._group_of[int.from_bytes(key[-4:], "big")]].append(key)
        good: list[ChunkPlace] = []
        refused: list[ChunkPlace] = []
        blocks = [int(one) for one in spec.block_ids]
        start, count = 0, self.blocks_per_chunk
        for group, (size, first) in enumerate(zip(spec.group_sizes, spec.block_indices)):
            mine: list[int | None] = [*[None] * (first % count), *blocks[start : start + size]] if size else []
            start += size
            if is_load:
                mine += [None] * (-len(mine) % count)
            chosen = of_group[group]
            if len(mine) != len(chosen) * count:
                # vLLM left blocks out, and which chunk the others belong to would be a guess.
                refused += [ChunkPlace(key, group, [] if place else mine) for place, key in enumerate(chosen)]
                continue
            for place, key in enumerate(chosen):
                one = ChunkPlace(key, group, mine[place * count : (place + 1) * count])
                (refused if None in one.blocks and not is_load else good).append(one)
        return good, refused

    def of_gpu(self, places: Sequence[ChunkPlace]) -> list[PageBlocks]:
        """The memory of chunks in that of a GPU; chunks of a group follow each other."""
        groups = itertools.groupby(places, lambda place: place.group)
        return [PageBlocks(self._rows(group), [place.blocks for place in some]) for group, some in groups]

    def _rows(self, group: int) -> list[Any]:
        return [self._tensors[tensor][:, :size] for tensor, size in self._refs[group]]

    def pieces(self, place: ChunkPlace) -> list[Any]:
        """The memory of a chunk; where a load has no block, memory of its own, because pieces of a load may not overlap."""
        return [self._piece(block, *ref) for block in place.blocks for ref in self._refs[place.group]]

    def _piece(self, block: int | None, tensor: int, size: int) -> Any:
        if block is None:
            return torch.empty(size, dtype=torch.int8, device=self.device)
        return self._tensors[tensor][block, :size]


class PageWorker(OffloadingWorker):
    """Chunks of one worker of vLLM in an area that it owns. One thread calls.

    ``get_finished`` tells vLLM that jobs have ended, always as a success, since it stops at another word;
    :meth:`take_ended` tells the connector which chunks failed.
    """

    def __init__(self, pages: PageStore, layout: BlockLayout, part: int) -> None:
        self._pages, self._layout, self._part = pages, layout, part
        self._jobs: dict[int, MoveJob] = {}
        self._ended: list[EndedJob] = []
        self._pins: dict[bytes, PagePins] = {}
        self._refused = RefusedKeys()
        self._stale_before = 0
        self._is_usable = True
        on_gpu = layout.device.type == "cuda"
        self._streams = {way: torch.cuda.Stream(layout.device) for way in (False, True)} if on_gpu else {}

    # ---- lookups

    def answer(self, message: StepMessage) -> dict[bytes, tuple[int, int]]:
        """Does what the scheduler says besides jobs, and returns for each key that it asks for (1, whether it is pinned)."""
        if message.clears_before is not None:
            self._clear(message.clears_before)
        for key in message.released:
            pins = self._pins.pop(key, None)
            if pins is not None:
                pins.release()
        try:
            if message.touched:
                self._pages.touch(self._keys(message.touched))
            found = self._pages.contains(self._keys(message.asked)) if message.asked else []
            return {key: (1, int(is_there and self._pin(key))) for key, is_there in zip(message.asked, found)}
        except NvmeGpuError as error:
            _LOG.warning("vLLM: %d chunks were not looked for: %s", len(message.asked), error)
            return {key: (1, int(key in self._pins)) for key in message.asked}

    def _pin(self, key: bytes) -> bool:
        if not self._is_usable or key in self._refused:
            return False
        if key not in self._pins:
            pins = self._pages.pin_prefix(self._keys([key]))
            if len(pins):
                self._pins[key] = pins
        return key in self._pins

    def _clear(self, before: int) -> None:
        self._stale_before = before
        self.wait(set(self._jobs))
        self._unpin()
        self._refused.clear()
        try:
            self._pages.clear()
        except NvmeGpuError as error:
            # Pages of before the reset, as of other weights, may be there for good.
            self._is_usable = False
            _LOG.error("vLLM: the pages could not be removed, and are not used any more: %s", error)

    def _unpin(self) -> None:
        for pins in self._pins.values():
            pins.release()
        self._pins.clear()

    # ---- jobs

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Starts to store chunks, after what the current stream of the GPU does before."""
        self._submit(job_id, dst_spec.keys, src_spec, False)
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        """Starts to load chunks. ``expedited``, of vLLM 0.33, changes nothing: each load begins at once."""
        self._submit(job_id, src_spec.keys, dst_spec, True)
        return True

    def _submit(self, number: int, keys: list[bytes], spec: Any, is_load: bool) -> None:
        places, refused = self._layout.places(keys, spec, is_load)
        if not self._is_usable or (number < self._stale_before and not is_load):
            places, refused = [], refused + places
        job = self._jobs[number] = MoveJob(is_load, places, refused)
        if not places:
            return
        stream = None
        if self._streams:
            # Blocks may still be written, or zeroed, by what the model's stream has to do.
            stream = self._streams[is_load]
            stream.wait_stream(torch.cuda.current_stream(self._layout.device))
        try:
            pages = self._layout.of_gpu(places) if self._streams else [self._page(job, place) for place in places]
            move = self._pages.load_async if is_load else self._pages.store_async
            job.pending = move(self._keys([place.key for place in places]), pages, stream=stream)
        except NvmeGpuError as error:
            job.error = error
        except torch.cuda.OutOfMemoryError as error:
            # Blocks that a load does not name take memory. vLLM computes the chunks of a load that failed.
            job.error = NvmeGpuError(str(error), "leave more of the GPU's memory free", "environment")
        if stream is not None:
            job.event = torch.cuda.Event()
            job.event.record(stream)

    def _page(self, job: MoveJob, place: ChunkPlace) -> Any:
        pieces = self._layout.pieces(place)
        if len(pieces) == 1:
            job.staged.append(None)
            return pieces[0]
        staged = torch.empty(self._layout.nbytes(place.group), dtype=torch.int8) if job.is_load else torch.cat(pieces)
        job.staged.append(staged)
        return staged

    def get_finished(self) -> list[Any]:
        """The jobs that have ended since the last call."""
        ended = [number for number, job in self._jobs.items() if job.done()]
        return [self._result(number, self._jobs.pop(number)) for number in ended]

    def take_ended(self) -> list[EndedJob]:
        """What became of the jobs that ``get_finished`` has told of since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def _result(self, number: int, job: MoveJob) -> Any:
        outcomes: list[Any] = [job.error] * len(job.places)
        if job.pending is not None:
            try:
                outcomes = job.pending.result()
            except NvmeGpuError as error:
                outcomes = [error] * len(job.places)
        failed, moved = list(job.refused), 0
        for place, outcome in zip(job.places, outcomes):
            nbytes = self._layout.nbytes(place.group)
            good = outcome == nbytes if job.is_load else outcome in ("stored", "present", "in_progress")
            if not good:
                failed.append(place)
                if job.is_load and not isinstance(outcome, PageMiss):
                    self._refused.add(place.key)
                continue
            moved += nbytes if outcome in (nbytes, "stored") else 0
            if outcome in ("stored", "present"):
                self._refused.discard(place.key)
        if job.is_load:
            self._scatter(job, {place.key for place in failed})
        if failed:
            self._log(job, failed, outcomes)
        blocks = {block for place in failed for block in place.blocks if block is not None} if job.is_load else set()
        self._ended.append(EndedJob(number, job.is_load, [place.key for place in failed], blocks))
        return TransferResult(job_id=number, success=True, transfer_size=moved, transfer_time=time.monotonic() - job.begun)

    def _scatter(self, job: MoveJob, failed: set[bytes]) -> None:
        for place, staged in zip(job.places, job.staged):
            if staged is None or place.key in failed:
                continue
            pieces = self._layout.pieces(place)
            for piece, part in zip(pieces, staged.split([piece.numel() for piece in pieces])):
                piece.copy_(part)

    def _log(self, job: MoveJob, failed: list[ChunkPlace], outcomes: Iterable[Any]) -> None:
        why = [str(one) for one in outcomes if isinstance(one, NvmeGpuError)]
        why += ["all pages are in use"] * ("no_room" in outcomes) + ["blocks of the chunk are missing"] * bool(job.refused)
        word = "loaded" if job.is_load else "stored"
        count = len(job.places) + len(job.refused)
        _LOG.warning("vLLM: %d of %d chunks were not %s: %s", len(failed), count, word, listed(why))

    def wait(self, job_ids: Iterable[int]) -> None:
        """Waits until the jobs use no block any more; ``get_finished`` tells of them later."""
        for number in job_ids:
            job = self._jobs.get(number)
            if job is not None:
                job.wait()

    def shutdown(self) -> None:
        """Waits for all jobs, and closes the area."""
        self.wait(list(self._jobs))
        self._jobs.clear()
        self._unpin()
        close(self._pages)

    def _keys(self, keys: Sequence[bytes]) -> list[bytes]:
        return self._pages.keys(keys, self._part)
