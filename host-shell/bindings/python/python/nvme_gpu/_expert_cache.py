"""A cache of experts of published files: reads that a step needs, guesses for the next block, and which expert makes room."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, Literal, NamedTuple

from . import _buffers
from ._errors import NvmeGpuError, Usage
from ._expert_slots import ExpertSlots
from ._native import Operation
from .compute._expert_files import ExpertLayout

OnReadError = Literal["raise", "nan"]
Key = tuple[int, int]
"""Number of the bank, and of the expert."""


class ExpertCounts(NamedTuple):
    """What a cache of experts has counted. An expert counts once in a step, however many tokens chose it."""

    hits: int
    """Experts of steps that were in the cache."""
    reads: int
    """Those that a step read."""
    bytes_read: int
    """Bytes of these reads and of guesses."""
    evictions: int
    """Experts that made room for another."""
    streamed: int
    """Of the reads those of steps that wanted too many experts to keep them."""
    failed: int
    """Experts of steps that could not be read."""
    guesses: int
    """Experts that were read for the next block before its router chose."""
    guesses_used: int
    """Of the guesses those that the router chose: neither hits nor reads."""
    guesses_wasted: int
    """Those that it did not choose, and those that failed."""


class ExpertBank:
    """The experts of a layer: where they lie, and the number under which the cache knows them."""

    def __init__(self, number: int, layout: ExpertLayout, check: Callable[[], None]) -> None:
        self.number, self.layout, self.check_unchanged = number, layout, check
        self.memory_bytes = [layout._native.reads(expert)[2] for expert in range(len(layout))]
        self.nbytes = [layout.nbytes(expert) for expert in range(len(layout))]


class _Read:
    """A read under way, into one of the buffers."""

    def __init__(self, expert: int, buffer: int, nbytes: int, operation: Operation) -> None:
        self.expert, self.buffer, self.nbytes, self.operation = expert, buffer, nbytes, operation


class CachePlan(NamedTuple):
    """How a budget is divided."""

    slots: int
    slot_bytes: int
    buffers: int
    buffer_bytes: int
    scratch: int
    """Numbers of float32."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the cache takes."""
        return self.slots * self.slot_bytes + self.buffers * self.buffer_bytes + 4 * self.scratch

    @classmethod
    def of(cls, budget: int, slot_bytes: int, buffers: int, buffer_bytes: int, scratch: int, most: int) -> CachePlan:
        """As many slots as fit into ``budget`` bytes, ``most`` at most.

        Raises :class:`Usage` where not even one fits.
        """
        rest = budget - buffers * buffer_bytes - 4 * scratch
        if rest < slot_bytes:
            least = budget - rest + slot_bytes
            raise Usage(
                f"a cache of {budget} bytes, and an expert with {buffers} reads at a time takes {least}",
                "pass a larger cache_bytes=, or fewer reads= and guesses=",
            )
        return cls(min(rest // slot_bytes, most), slot_bytes, buffers, buffer_bytes, scratch)


class ExpertCache:
    """Experts of one form on one device, in ``slots``. Whoever calls :meth:`pieces` holds :attr:`lock` until it is through."""

    def __init__(
        self, torch: Any, slots: ExpertSlots, plan: CachePlan, guesses: int, share: float, lock: threading.RLock
    ) -> None:
        self.lock, self.plan, self.slots = lock, plan, slots
        self._share = share
        self._most_guesses = guesses
        is_pinned = slots.device.type == "cuda"
        self._new_buffer: Callable[[], Any] = lambda: torch.empty(plan.buffer_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        self._buffers = [self._new_buffer() for _ in range(plan.buffers)]
        self._free_buffers = list(range(plan.buffers - guesses))
        self._free_guesses = list(range(plan.buffers - guesses, plan.buffers))
        self._free_slots = list(reversed(range(plan.slots)))
        self._held: OrderedDict[Key, int] = OrderedDict()
        self._guessed: dict[Key, _Read] = {}
        self._late: list[_Read] = []
        self._counts = dict.fromkeys(ExpertCounts._fields, 0)

    def counts(self) -> ExpertCounts:
        """What was counted so far."""
        return ExpertCounts(**self._counts)

    def holds(self, bank: ExpertBank, expert: int) -> bool:
        """Whether the expert lies in a slot."""
        return (bank.number, expert) in self._held

    def pieces(
        self, bank: ExpertBank, wanted: Sequence[int], on_error: OnReadError, guess: Callable[[], None] | None = None
    ) -> Generator[dict[int, int | None], None, None]:
        """The slots of the experts ``wanted``, in one or more pieces; None for one that was not read. The slots of a piece
        are good until the next piece is asked for. ``guess`` is called when all reads of the step have ended.

        Raises what a read ended with, unless ``on_error`` is ``"nan"``; :class:`NvmeGpuError` with the code ``mismatch`` for
        a file of a drive that changed.
        """
        all_ = set(wanted)
        hits = {expert: self._held[bank.number, expert] for expert in wanted if (bank.number, expert) in self._held}
        for expert in hits:
            self._held.move_to_end((bank.number, expert))
        self._counts["hits"] += len(hits)
        misses = [expert for expert in wanted if expert not in hits]
        is_few = len(all_) <= self._share * len(bank.layout) or len(misses) <= len(self._free_slots)
        is_kept = is_few and len(all_) <= self.plan.slots
        reads = _StepReads(self, bank, misses)
        try:
            reads.begin()
            if not misses and guess is not None:
                guess()
            if hits or not misses:
                yield dict(hits)
            at_once = len(misses) if is_kept else min(self.plan.slots, max(self.plan.buffers - self._most_guesses, 1))
            for first in range(0, len(misses), max(at_once, 1)):
                pinned = all_ if is_kept else set(misses[first : first + at_once])
                piece = {expert: reads.finish(expert, pinned, on_error) for expert in misses[first : first + at_once]}
                bank.check_unchanged()
                if guess is not None and first + at_once >= len(misses):
                    guess()
                yield dict(piece)
                if not is_kept:
                    self._counts["streamed"] += len(piece)
                    for expert in piece:
                        self._make_oldest((bank.number, expert))
        except BaseException:
            # What was read since the files changed, or half of it, must not be found again.
            self._forget(bank, [expert for expert in misses if (bank.number, expert) in self._held])
            raise
        finally:
            reads.end()

    def _forget(self, bank: ExpertBank, experts: list[int]) -> None:
        for expert in experts:
            self._free_slots.append(self._held.pop((bank.number, expert)))

    def _make_oldest(self, key: Key) -> None:
        if key in self._held:
            self._held.move_to_end(key, last=False)

    def place(self, key: Key, pinned: set[int]) -> int:
        """A slot for an expert: a free one, or that of the expert that was used the longest time ago and is none of
        ``pinned`` of the same bank."""
        if not self._free_slots:
            oldest = next(one for one in self._held if one[0] != key[0] or one[1] not in pinned)
            self._free_slots.append(self._held.pop(oldest))
            self._counts["evictions"] += 1
        return self._free_slots.pop()

    def keep(self, key: Key, slot: int) -> None:
        """Says that a slot has an expert now."""
        self._held[key] = slot

    def start(self, bank: ExpertBank, expert: int, buffer: int) -> _Read:
        """Starts to read an expert into a buffer."""
        nbytes = bank.memory_bytes[expert]
        view = _buffers.of_tensor(self._buffers[buffer][:nbytes], "a buffer")
        return _Read(expert, buffer, nbytes, bank.layout._native.read(view, expert))

    def memory(self, read: _Read) -> Any:
        """The bytes that a read has filled."""
        return self._buffers[read.buffer][: read.nbytes]

    def give_back(self, read: _Read) -> None:
        """Frees the buffer of a read, which gets new memory where the read still writes to the old."""
        if not read.operation.done():
            self._buffers[read.buffer] = self._new_buffer()
        is_guess = read.buffer >= self.plan.buffers - self._most_guesses
        (self._free_guesses if is_guess else self._free_buffers).append(read.buffer)

    def count(self, name: str, more: int = 1) -> None:
        """Adds to one of the counts."""
        self._counts[name] += more

    def guess(self, bank: ExpertBank, experts: Sequence[int]) -> None:
        """Starts to read experts that a later step may want, the most likely first, as far as buffers of guesses are free.
        They take no slots before a step wants them, so that they evict nothing."""
        with self.lock:
            self._collect_late()
            for expert in experts:
                key = (bank.number, expert)
                if key in self._held or key in self._guessed:
                    continue
                if not self._free_guesses:
                    return
                self._guessed[key] = self.start(bank, expert, self._free_guesses[-1])
                self._free_guesses.pop()
                self.count("guesses")
                self.count("bytes_read", bank.nbytes[expert])

    def take_guess(self, key: Key) -> _Read | None:
        """The read of a guess that a step wants."""
        return self._guessed.pop(key, None)

    def drop_guesses(self, bank: ExpertBank) -> None:
        """What was guessed for a bank and is not wanted: its buffers are free when the reads have ended."""
        for key in [key for key in self._guessed if key[0] == bank.number]:
            self._late.append(self._guessed.pop(key))
            self.count("guesses_wasted")
        self._collect_late()

    def _collect_late(self) -> None:
        late, self._late = self._late, []
        for read in late:
            if read.operation.done():
                self.give_back(read)
            else:
                self._late.append(read)

    def close(self) -> None:
        """Waits for reads under way, and lets go of the memory."""
        with self.lock:
            for read in [*self._guessed.values(), *self._late]:
                read.operation.wait()
            self._guessed, self._late = {}, []
            self._held.clear()
            self.slots.tensors.clear()
            self._buffers.clear()


class _StepReads:
    """The reads of a step: as many at a time as there are buffers, in the order of the experts."""

    def __init__(self, cache: ExpertCache, bank: ExpertBank, misses: list[int]) -> None:
        self._cache, self._bank = cache, bank
        self._guesses = {expert: cache.take_guess((bank.number, expert)) for expert in misses}
        self._waiting = deque(expert for expert in misses if self._guesses[expert] is None)
        self._under_way: dict[int, _Read] = {}
        cache.drop_guesses(bank)

    def begin(self) -> None:
        """Starts what buffers are free for."""
        free = self._cache._free_buffers
        while self._waiting and free:
            # A buffer is taken when its read has started: files that are closed refuse, and it would be lost.
            self._under_way[self._waiting[0]] = self._cache.start(self._bank, self._waiting[0], free[-1])
            self._waiting.popleft()
            free.pop()

    def finish(self, expert: int, pinned: set[int], on_error: OnReadError) -> int | None:
        """Waits for an expert and writes it to a slot. Returns None for one that was not read, or whose numbers were refused."""
        cache, key = self._cache, (self._bank.number, expert)
        guessed = self._guesses.get(expert)
        if guessed is not None and not _is_well(guessed):
            cache.count("guesses_wasted")
            self._under_way[expert] = cache.start(self._bank, expert, guessed.buffer)
            guessed = None
        self._guesses.pop(expert, None)
        if guessed is not None:
            self._under_way[expert] = guessed
            cache.count("guesses_used")
        read = self._under_way[expert]
        slot = None
        try:
            read.operation.wait()
            read.operation.check()
            slot = cache.place(key, pinned)
            cache.slots.fill(slot, self._bank.layout, expert, cache.memory(read))
            cache.keep(key, slot)
        except NvmeGpuError as error:
            cache.count("failed")
            if on_error == "raise":
                error.cause = f"expert {expert} of {self._bank.layout.name}: {error.cause}"
                raise
        finally:
            if slot is not None and key not in cache._held:
                cache._free_slots.append(slot)
                slot = None
            cache.give_back(self._under_way.pop(expert))
        if guessed is None:
            cache.count("reads")
            cache.count("bytes_read", self._bank.nbytes[expert])
        self.begin()
        return slot

    def end(self) -> None:
        """Gives back the buffers of what is still under way."""
        for read in [*self._under_way.values(), *(one for one in self._guesses.values() if one is not None)]:
            self._cache.give_back(read)
        self._under_way, self._guesses = {}, {}


def _is_well(read: _Read) -> bool:
    try:
        read.operation.wait()
        read.operation.check()
    except NvmeGpuError:
        return False
    return True

