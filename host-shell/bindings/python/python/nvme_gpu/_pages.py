"""Pages of keys and values by key, which are found again after a restart or a power cut."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

from . import _buffers, _native, _page_pieces
from ._arguments import flag, whole
from ._errors import NvmeGpuError, PageMiss, Usage, in_short
from ._held import Held, OneProcess
from ._page_pieces import PageBlocks
from ._store import Pending, Store

PageOutcome = Literal["stored", "present", "in_progress", "no_room"]
_OUTCOMES: tuple[PageOutcome, ...] = get_args(PageOutcome)
_CREATE = ("auto", "never", "always")
_FAR = (1 << 62) - 1
_Texts = tuple[str, str, str, str, str, str, str]


class PendingPages(Pending):
    """Pages under way. ``result()`` returns a list with an entry for each page; it raises for none of them."""

    __slots__ = ("_outcomes", "_words")

    def __init__(
        self, operation: _native.Operation, outcomes: _native.PageOutcomes, words: tuple[PageOutcome, ...] | None
    ) -> None:
        super().__init__(operation, None)
        self._outcomes, self._words = outcomes, words

    def result(self, timeout: float | None = None) -> list[Any]:
        """Waits ``timeout`` seconds at most, None as long as it may take, and returns the outcome of each page."""
        super().result(timeout)
        words = self._words
        return [words[one] if words and isinstance(one, int) else one for one in self._outcomes.all()]


class PagePins(OneProcess):
    """Pages that stay where they are until :meth:`release`, or until this object is dropped or their store is closed. A
    context manager.
    """

    __slots__ = ("_native", "__weakref__")

    def __init__(self, native: _native.PagePins) -> None:
        self._native = native

    def __len__(self) -> int:
        """How many of the keys were found, from the first on."""
        return self._native.count

    def release(self) -> None:
        """Lets them make room for others. A second call does nothing."""
        self._native.release()

    def __enter__(self) -> PagePins:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class PageStore(Held):
    """Pages of keys and values by key, in an area of a store. What was stored is found again by the next process.

    ``page_bytes``: the longest page. ``offset``, ``nbytes``: the area, from a multiple of 4,096 on; None: to the end of the
    store. Ranks take an area each, or one by :meth:`shared`. ``model``, ``revision``, ``dtype``, ``layout``, ``block_tokens``,
    ``parallel_rank``, ``group``, ``hash_algorithm``, ``seed``: what pages depend on besides the tokens; they are in every
    key, and an area that was made for others is not read.

    ``create``: ``"auto"`` makes an empty store where the area is blank, or holds a store of another model or size, or a
    damaged one (:attr:`formatted` says why); ``"never"`` raises then; ``"always"`` begins anew. Data that are no page store,
    as in the first MiB behind zeros, are never overwritten by ``"auto"``, nor is what cannot be read. Only the process that
    opened or formatted an area last may change it.

    Pages are contiguous memory of the host, or of the store's GPU: a tensor of any stride, a list of tensors, or
    :class:`PageBlocks`, which take the place of as many pages as they have. Any thread may call. Closing the store closes this.

    Raises :class:`Usage` for sizes that cannot be, and :class:`NvmeGpuError` with the code ``mismatch`` for an area that
    holds something else.
    """

    __slots__ = ("_store", "_native", "__weakref__")

    def __init__(
        self,
        store: Store,
        offset: int = 0,
        nbytes: int | None = None,
        *,
        page_bytes: int,
        model: str,
        revision: str = "",
        dtype: str = "",
        layout: str = "",
        block_tokens: int = 0,
        parallel_rank: str = "",
        group: int = 0,
        hash_algorithm: str = "",
        seed: str = "",
        create: Literal["auto", "never", "always"] = "auto",
    ) -> None:
        if not isinstance(store, Store):
            raise TypeError(f"store is of the type {type(store).__name__}: use nvme_gpu.open")
        texts = (model, revision, dtype, layout, parallel_rank, hash_algorithm, seed)
        parts = _checked(offset, nbytes, page_bytes, texts, (block_tokens, group), create, _CREATE)
        self._store: Store | None = store
        self._native = _native.PageStore(store._native, *parts, create)

    @classmethod
    def shared(
        cls,
        device: str,
        offset: int = 0,
        nbytes: int | None = None,
        *,
        page_bytes: int,
        model: str,
        revision: str = "",
        dtype: str = "",
        layout: str = "",
        block_tokens: int = 0,
        parallel_rank: str = "",
        group: int = 0,
        hash_algorithm: str = "",
        seed: str = "",
        create: Literal["auto", "never"] = "auto",
        directory: str | os.PathLike[str] | None = None,
        allow_write: bool = False,
        queues: int = 8,
        depth: int = 64,
        timeout_ms: int = 5000,
    ) -> PageStore:
        """Opens an area that processes of one user share. The first one owns it and opens ``device``, as :func:`open` does;
        the others reach it through the owner. When an owner ends, the process that calls next owns the area, and recovers it
        as after a crash: stored pages are found, pins have ended. Pins of a process that is no owner also end after ten minutes,
        and when a lookup of it gets no answer in time.

        All pass the same sizes and fingerprint; ranks whose pages differ ask for another ``part`` of :meth:`keys`.
        ``directory``: of the sockets, with the mode 0700; None for ``nvme-gpu`` in XDG_RUNTIME_DIR, or ``nvme-gpu-UID`` among
        temporary files. If no owner answers, lookups find nothing, and other calls end with the code ``timeout`` after
        ``timeout_ms`` and ten seconds.

        Raises as the constructor does, also for an owner with pages of another model or version of this package.
        """
        if not isinstance(device, str):
            raise TypeError(f"device is of the type {type(device).__name__}: pass text")
        texts = (model, revision, dtype, layout, parallel_rank, hash_algorithm, seed)
        parts = _checked(offset, nbytes, page_bytes, texts, (block_tokens, group), create, _CREATE[:2])
        options = (
            flag("allow_write", allow_write),
            whole("queues", queues, 1, 4095),
            whole("depth", depth, 1, 4095),
            whole("timeout_ms", timeout_ms, 1, 86_400_000),
        )
        self = cls.__new__(cls)
        self._store = None
        self._native = _native.PageStore.shared(device, *parts, create, directory, options)
        return self

    @property
    def store(self) -> Store:
        """The store on which it lies.

        Raises :class:`Usage` for a shared area, whose owner opens the device.
        """
        if self._store is None:
            raise Usage("the area is shared, and its owner has the store", "use close() of the page store")
        return self._store

    @property
    def is_shared(self) -> bool:
        """Whether it was opened by :meth:`shared`."""
        return self._store is None

    @property
    def formatted(self) -> str | None:
        """Why the area was made anew when it was opened; None where its pages were kept."""
        return self._native.formatted

    @property
    def page_bytes(self) -> int:
        """The longest page, in bytes."""
        return self._native.sizes[1]

    @property
    def nbytes(self) -> int:
        """Bytes that the journal and the pages take of the area."""
        return self._native.sizes[0]

    def keys(self, block_hashes: Iterable[bytes], part: int = 0) -> list[bytes]:
        """The keys of part ``part``, as the number of a layer, of the blocks that the engine knows by ``block_hashes``."""
        return self._native.keys(_all_bytes(block_hashes), whole("part", part, 0, 0xFFFF_FFFF))

    def contains(self, keys: Iterable[bytes]) -> list[bool]:
        """For each key whether its page is found. Loading it may still show that it is lost."""
        return self._native.contains(_all_bytes(keys))

    def lengths(self, keys: Iterable[bytes]) -> list[int | None]:
        """For each key the length of its page in bytes; None where it is not found."""
        return self._native.lengths(_all_bytes(keys))

    def touch(self, keys: Iterable[bytes]) -> None:
        """Counts the pages that are there as used: the last of ``keys`` makes room before the first."""
        self._native.touch(_all_bytes(keys))

    def pin_prefix(self, keys: Iterable[bytes]) -> PagePins:
        """Pins the pages of the first keys, up to the first key without a page: none of them makes room for others."""
        return PagePins(self._native.pin_prefix(_all_bytes(keys)))

    def store_async(self, keys: Sequence[bytes], pages: Sequence[Any] | PageBlocks, *, stream: Any = None) -> PendingPages:
        """Starts to store ``pages``; the result has an entry for each: ``"stored"``, found from now on, also after a power
        cut; ``"present"``, a page of this key was there; ``"in_progress"``, another call is storing this key; ``"no_room"``,
        all other pages are in use; or the :class:`NvmeGpuError` for which it was not stored.

        Pages in memory of a GPU are copied and checksummed there after what ``stream`` does before, as in
        :meth:`Table.gather`; once the stream has passed the copy, they may change."""
        pages = [pages] if isinstance(pages, PageBlocks) else pages
        if _on_gpu(pages):
            operation, outcomes = self._native.store_on_gpu(*self._pieces(keys, pages, False, stream))
        else:
            operation, outcomes = self._native.store(*self._pairs(keys, pages, False))
        return PendingPages(operation, outcomes, _OUTCOMES)

    def load_async(self, keys: Sequence[bytes], pages: Sequence[Any] | PageBlocks, *, stream: Any = None) -> PendingPages:
        """Starts to fill ``pages``; the result has an entry for each: its length in bytes, or the :class:`NvmeGpuError`, a
        :class:`PageMiss` where the page should be computed. A page that was not loaded is zero.

        Pages in memory of a GPU: where :attr:`path` says so, the GPU reads them in ``stream``, and what the stream does
        later finds each page whole and checked, or zero."""
        pages = [pages] if isinstance(pages, PageBlocks) else pages
        if _on_gpu(pages):
            operation, outcomes = self._native.load_on_gpu(*self._pieces(keys, pages, True, stream))
        else:
            operation, outcomes = self._native.load(*self._pairs(keys, pages, True))
        return PendingPages(operation, outcomes, None)

    def put(
        self, keys: Sequence[bytes], pages: Sequence[Any] | PageBlocks, *, stream: Any = None
    ) -> list[PageOutcome | NvmeGpuError]:
        """Stores ``pages``, as :meth:`store_async`, and returns the outcome of each."""
        return self.store_async(keys, pages, stream=stream).result()

    def get(self, keys: Sequence[bytes], pages: Sequence[Any] | PageBlocks, *, stream: Any = None) -> list[int | NvmeGpuError]:
        """Fills ``pages``, as :meth:`load_async`, and returns the length of each, or the error."""
        return self.load_async(keys, pages, stream=stream).result()

    @property
    def path(self) -> dict[str, str]:
        """``pages``: ``"gpu"`` where the GPU itself moves pages between its memory and the drive, else ``"cpu"``; ``why``."""
        by_gpu, why = self._native.way()
        return {"pages": "gpu" if by_gpu else "cpu", "why": why}

    def remove(self, keys: Iterable[bytes]) -> int:
        """Removes pages, durably, and returns how many there were."""
        return self._native.remove(_all_bytes(keys))

    def clear(self) -> None:
        """Removes all pages, durably."""
        self._native.clear()

    def checkpoint(self) -> None:
        """Writes what the next opening reads first. It is never needed; before the end of a process it saves time."""
        self._native.checkpoint()

    def stats(self) -> dict[str, int]:
        """Counts since it was opened: ``pages`` found now, of ``capacity``; ``loaded``, ``missed``, ``stored``, ``evicted``;
        ``lost``: dropped because the drive did not hold what was stored; ``failed``: not stored, since the drive failed;
        ``checkpoints``; ``loaded_by_gpu``, ``stored_by_gpu``: pages that a GPU moved; and what opening found:
        ``recovered_pages``, ``recovered_log_blocks``, ``damaged_checkpoints``, ``damaged_log_blocks``. Of a shared area they
        are those of the owner; ``owner`` is 1 in it, ``epoch`` the number of its opening, ``unanswered`` lookups of this
        process that no owner answered."""
        found: dict[str, int] = json.loads(self._native.stats())
        return found

    def __len__(self) -> int:
        """Pages that are found."""
        return self.stats()["pages"]

    def _pieces(
        self, keys: Sequence[bytes], pages: Sequence[Any], writable: bool, stream: Any
    ) -> tuple[list[bytes], list[_native.View], list[_page_pieces.Part], int]:
        count = sum(len(page) if isinstance(page, PageBlocks) else 1 for page in pages)
        if len(keys) != count:
            raise Usage(f"{len(keys)} keys do not match {count} pages", "pass one page for each key")
        if self._store is None:
            raise Usage("a page lies in memory of a GPU, and the area is shared", "use memory of the host here")
        native, number = self._store._native, _buffers.stream_of(stream, self._store.gpu)
        views, pieces = _page_pieces.of_pages(pages, native, number, writable)
        return _all_bytes(keys), views, pieces, number

    def _pairs(
        self, keys: Sequence[bytes], pages: Sequence[Any], writable: bool
    ) -> tuple[list[bytes], list[_native.View]]:
        if len(keys) != len(pages):
            raise Usage(f"{len(keys)} keys do not match {len(pages)} pages", "pass one page for each key")
        views = [_buffers.view(page, "a page", writable=writable) for page in pages]
        return _all_bytes(keys), views


def _checked(
    offset: int,
    nbytes: int | None,
    page_bytes: int,
    texts: _Texts,
    numbers: tuple[int, int],
    create: str,
    allowed: tuple[str, ...],
) -> tuple[tuple[int, int | None, int], _Texts, tuple[int, int]]:
    """The area, the texts and the numbers of a fingerprint, as the extension module takes them."""
    for name, text in zip(("model", "revision", "dtype", "layout", "parallel_rank", "hash_algorithm", "seed"), texts):
        if not isinstance(text, str):
            raise TypeError(f"{name} is of the type {type(text).__name__}: pass text")
    if create not in allowed:
        words = ", ".join(map(repr, allowed[:-1]))
        raise Usage(f"create is {in_short(create)!r}", f"use {words} or {allowed[-1]!r}")
    area = (
        whole("offset", offset, 0, _FAR),
        None if nbytes is None else whole("nbytes", nbytes, 0, _FAR),
        whole("page_bytes", page_bytes, 1, 1 << 30),
    )
    block_tokens, group = numbers
    return area, texts, (whole("block_tokens", block_tokens, 0, 0xFFFF_FFFF), whole("group", group, 0, 0xFFFF_FFFF))


def _on_gpu(pages: Sequence[Any]) -> bool:
    return any(_page_pieces.is_of_gpu(page) for page in pages)


def _all_bytes(values: Iterable[Any]) -> list[bytes]:
    values = list(values)
    return values if {bytes}.issuperset(map(type, values)) else [_bytes(value) for value in values]


def _bytes(value: Any) -> bytes:
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise TypeError(f"a key is of the type {type(value).__name__}: pass bytes")
    return bytes(value)


__all__ = ["PageBlocks", "PageMiss", "PageOutcome", "PagePins", "PageStore", "PendingPages"]
