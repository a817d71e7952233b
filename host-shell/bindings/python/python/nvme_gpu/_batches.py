"""Batches of rows of a table, read while others are used."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, Literal

from . import _arguments, _buffers, _native
from ._errors import NvmeGpuError, Usage, in_short
from ._gathers import same_gpu
from ._held import OneProcess
from ._native import View
from ._table import Table

_MOST = (1 << 63) - 1
_MOST_ASKED = 1 << 16
"""How often a sampler is asked for an order to get to where a state was made."""


class DataLoader(OneProcess):
    """Iterates over the rows of a table in batches, and reads the next ones meanwhile.

    ``for rows in loader`` gives one epoch: arrays of the shape ``(batch_size, *row)``, tensors of torch where torch is
    loaded; with ``with_ids`` pairs of row numbers and rows.

    ``shuffle``: another order of the rows in each epoch, which ``seed`` and the epoch's number give, the same on every
    machine. ``rank`` and ``world``: of ``world`` processes this one has every ``world``-th row from ``rank`` on, as
    ``torch.utils.data.DistributedSampler`` has it: each has as many, for which the first rows come again at the end; with
    ``pad=False`` the last ones are left out instead. ``drop_last`` leaves out a last batch that is shorter.
    ``sampler`` gives the row numbers of an epoch in place of all that, such as a sampler of torch. It is asked once for
    each epoch; its ``set_epoch`` is called before, if it has one. One without ``set_epoch`` may give another order each
    time: a state that is loaded asks it as often as the state's loader did, from its own beginning.

    ``prefetch_depth``: batches that are read ahead. ``device``: None or ``"cpu"``: rows in memory of the host; ``"cuda"``:
    tensors of torch on the store's GPU, read in ``streams`` streams of the loader's own; the current stream waits for
    them. ``staging``: ``"gpu"``: the GPU gathers the rows; ``"pinned"``: the CPU does, into pinned memory, from where
    they are copied.

    A batch that cannot be read raises when its turn comes, with the first row that failed. Iterating again goes on with
    the batch after the last one that was given out, behind the last one of an epoch with the next epoch;
    :meth:`set_epoch` begins an epoch. One iterator at a time: a new one ends those before it, whose next batch raises
    :class:`Usage`.
    """

    __slots__ = (
        "_table",
        "_size",
        "_config",
        "_sampler",
        "_own",
        "_depth",
        "_streams",
        "_staging",
        "_on_gpu",
        "_with_ids",
        "_epoch",
        "_batch",
        "_drop_last",
        "_orders",
        "_iterator",
    )

    def __init__(
        self,
        table: Table,
        batch_size: int,
        *,
        sampler: Iterable[int] | None = None,
        shuffle: bool = False,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        pad: bool = True,
        drop_last: bool = False,
        prefetch_depth: int = 2,
        streams: int = 2,
        staging: Literal["gpu", "pinned"] = "gpu",
        device: Any = None,
        with_ids: bool = False,
    ) -> None:
        if not isinstance(table, Table):
            raise TypeError(f"table is of the type {type(table).__name__}: pass a nvme_gpu.Table")
        if staging not in ("gpu", "pinned"):
            raise Usage(f"staging is {staging!r}", "use 'gpu' or 'pinned'")
        if sampler is not None and (shuffle or world != 1):
            raise Usage("a sampler beside shuffle or world", "let the sampler do it, or leave it out")
        self._table = table
        self._size = _arguments.whole("batch_size", batch_size, 1, _MOST)
        self._depth = _arguments.whole("prefetch_depth", prefetch_depth, 0, 1 << 16)
        world = _arguments.whole("world", world, 1, 1 << 32)
        # What has to be the same where a state is loaded.
        self._config: dict[str, Any] = {
            "rows": len(table),
            "batch_size": self._size,
            "shuffle": _arguments.flag("shuffle", shuffle),
            "seed": _arguments.whole("seed", seed, 0, (1 << 64) - 1),
            "world": world,
            "pad": _arguments.flag("pad", pad),
            "drop_last": _arguments.flag("drop_last", drop_last),
            "has_sampler": sampler is not None,
        }
        self._orders = None if sampler is None else _Orders(sampler)
        self._iterator: object = None
        self._sampler = sampler
        self._drop_last: bool = self._config["drop_last"]
        self._own = _native.Sampler(
            len(table),
            self._size,
            self._config["seed"] if shuffle else None,
            _arguments.whole("rank", rank, 0, world - 1),
            world,
            not pad,
            self._drop_last,
        )
        self._staging = staging
        self._with_ids = _arguments.flag("with_ids", with_ids)
        self._epoch = self._batch = 0
        count = _arguments.whole("streams", streams, 1, 64)
        self._on_gpu = _is_on_gpu(device, table)
        self._streams: list[Any] = []
        if self._on_gpu:
            torch = _buffers.torch()
            if torch is None:
                raise Usage("batches on a GPU are tensors of torch, which is not loaded", "import torch first")
            self._streams = [torch.cuda.Stream(device=table.store.gpu) for _ in range(count)]

    def __len__(self) -> int:
        """Batches of an epoch."""
        if self._sampler is None:
            return self._own.batches
        return self._batches_of(len(self._sampler))  # type: ignore[arg-type]

    @property
    def epoch(self) -> int:
        """The epoch under way, or that begins next; from 0 on."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """The next iterator begins this epoch."""
        self._epoch, self._batch = _arguments.whole("epoch", epoch, 0, _MOST), 0
        self._iterator = None
        self._forget()

    def state_dict(self) -> dict[str, Any]:
        """What :meth:`load_state_dict` goes on from: the epoch, and how many of its batches were given out. Plain numbers,
        and with a ``sampler`` a digest of the orders that it gave."""
        state = {"version": 1, "epoch": self._epoch, "batch": self._batch, **self._config}
        return state if self._orders is None else {**state, **self._orders.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iterator goes on behind the last batch that the state counts.

        Raises :class:`Usage` for the state of a loader with other rows, batches, seed or processes, and where the
        ``sampler`` does not give the order that it gave there.
        """
        version = _plain(state, "version") if isinstance(state, dict) else None
        if version is True or version != 1:
            raise Usage("this is no state of a DataLoader", "pass what state_dict() returned")
        for name, mine in self._config.items():
            theirs = _plain(state, name)
            if type(theirs) is not type(mine) or theirs != mine:
                raise Usage(
                    f"the state is of a loader with {name}={in_short(state.get(name))}, this one has {mine}", "make it the same"
                )
        epoch = _arguments.whole("epoch", state.get("epoch"), 0, _MOST)
        batch = _arguments.whole("batch", state.get("batch"), 0, _MOST)
        if self._orders is not None:
            self._orders.load(state, epoch, batch)
        if batch:
            _, batches = self._plan(epoch)
            if batch > batches:
                raise Usage(f"the state is behind batch {batch} of an epoch of {batches}", "pass what state_dict() returned")
            if batch == batches:
                # All of the epoch, as states of version 0.1 said: the next one begins.
                epoch, batch = epoch + 1, 0
                self._forget()
        self._epoch, self._batch = epoch, batch
        self._iterator = None

    def __iter__(self) -> Iterator[Any]:
        mine = self._iterator = object()
        epoch, at = self._epoch, self._batch
        numbers, batches = self._plan(epoch)
        ahead: deque[_Batch] = deque()
        started = at
        while True:
            while len(ahead) <= self._depth and started < batches:
                ahead.append(self._start(numbers(started), started))
                started += 1
            for one in ahead:
                one.go_on()
            if not ahead:
                break
            rows = ahead[0].result()
            ahead.popleft()
            at += 1
            # Behind the last batch the next epoch comes, also where the loop ends at it.
            self._epoch, self._batch = (epoch, at) if at < batches else (epoch + 1, 0)
            if not self._batch:
                self._forget()
            yield rows
            if self._iterator is not mine:
                raise Usage(
                    "another iterator of this loader, or another epoch, has begun", "use one iterator at a time, or two loaders"
                )
        if not batches:
            self.set_epoch(epoch + 1)

    def _forget(self) -> None:
        """The epoch under way has ended."""
        if self._orders is not None:
            self._orders.begun = False

    def _plan(self, epoch: int) -> tuple[Callable[[int], array[int]], int]:
        """The row numbers of a batch of an epoch by its number, and how many batches there are."""
        if self._orders is None:

            def own(batch: int) -> array[int]:
                found = array("q")
                found.frombytes(self._own.batch(epoch, batch))
                return found

            return own, self._own.batches
        all_of_it = self._orders.of(epoch)

        def given(batch: int) -> array[int]:
            return all_of_it[batch * self._size : (batch + 1) * self._size]

        return given, self._batches_of(len(all_of_it))

    def _batches_of(self, samples: int) -> int:
        return samples // self._size if self._drop_last else -(-samples // self._size)

    def _start(self, ids: array[int], number: int) -> _Batch:
        if not self._on_gpu:
            return _Batch(self._table, ids, self._with_ids, False)
        stream = self._streams[number % len(self._streams)]
        kind = _Gathered if self._staging == "gpu" else _Copied
        return kind(self._table, ids, self._with_ids, stream)

    def __repr__(self) -> str:
        return f"<nvme_gpu.DataLoader {len(self)} batches of {self._size} rows of {self._table!r}>"


def _plain(state: dict[str, Any], name: str) -> int | bool | None:
    """A whole number or a boolean of a state; None for what is neither, which no loader wrote."""
    value: Any = state.get(name)
    if isinstance(value, bool):
        return value
    return int(value.__index__()) if hasattr(value, "__index__") else None


class _Orders:
    """The row numbers that a sampler gives, epoch by epoch: the last ones are kept, and a digest of all."""

    __slots__ = ("_sampler", "_by_epoch", "_asked", "_digest", "_epoch", "_order", "begun")

    def __init__(self, sampler: Iterable[int]) -> None:
        self._sampler = sampler
        # What set_epoch says is all that an order depends on.
        self._by_epoch = hasattr(sampler, "set_epoch")
        self._asked = 0
        self._digest = ""
        self._epoch = 0
        self._order = array("q")
        self.begun = False
        """Whether the order that is kept is that of the epoch under way."""

    def of(self, epoch: int) -> array[int]:
        """Those of an epoch."""
        if not self.begun or self._epoch != epoch:
            if self._by_epoch:
                self._sampler.set_epoch(epoch)  # type: ignore[attr-defined]
                self._digest = ""
            self._ask()
            self._epoch, self.begun = epoch, True
        return self._order

    def _ask(self) -> None:
        import hashlib

        rows = (_arguments.whole("a row of the sampler", one, -_MOST - 1, _MOST) for one in self._sampler)
        self._order = array("q", rows)
        self._asked += 1
        self._digest = hashlib.sha256(self._digest.encode() + self._order.tobytes()).hexdigest()

    def state(self) -> dict[str, Any]:
        """What :meth:`load` compares."""
        part = {"sampler_rank": getattr(self._sampler, "rank", None), "sampler_digest": self._digest}
        return part if self._by_epoch else {**part, "sampler_asked": self._asked, "sampler_begun": self.begun}

    def load(self, state: dict[str, Any], epoch: int, batch: int) -> None:
        """Gets to where the sampler was when the state was made, and compares what it gives on the way."""
        self.begun = False
        digest = state.get("sampler_digest")
        if self._by_epoch:
            # A state of another rank counts the same batches of other rows.
            if batch and state.get("sampler_rank") == getattr(self._sampler, "rank", None):
                self.of(epoch)
                self._compare(digest)
            return
        asked = _arguments.whole("sampler_asked", state.get("sampler_asked"), 0, _MOST_ASKED)
        begun = _arguments.flag("sampler_begun", state.get("sampler_begun"))
        if batch and not begun or begun and not asked or self._asked > asked:
            raise Usage(
                f"a sampler that was asked {self._asked} times cannot go on at batch {batch} behind {asked} times",
                "load the state into a new loader with a new sampler",
            )
        while self._asked < asked:
            self._ask()
        self._compare(digest)
        self._epoch, self.begun = epoch, begun

    def _compare(self, digest: Any) -> None:
        if self._digest != digest:
            self.begun = False
            raise Usage(
                "the sampler gives other rows, or another order, than where the state was made",
                "make it with the same seed or generator, or use a sampler with set_epoch",
            )


class _Batch:
    """Rows that threads of the host gather into memory of the host."""

    def __init__(self, table: Table, ids: array[int], with_ids: bool, is_pinned: bool) -> None:
        self._ids, self._with_ids = ids, with_ids
        torch = _buffers.torch()
        kind = getattr(torch, table.dtype, None)
        shape = (len(ids), *table.shape[1:])
        self._rows: Any
        if kind is not None:
            assert torch is not None
            self._rows = torch.empty(shape, dtype=kind, pin_memory=is_pinned)
            place = _buffers.of_tensor(self._rows, "rows")
        else:
            self._rows = table._new((len(ids),))
            place = table._place(self._rows, "rows", (len(ids),), True)
        self._operation = table._native.gather(View.from_buffer(ids, False), True, place, None)

    def go_on(self) -> None:
        """Does what can be done without a wait."""

    def result(self) -> Any:
        self._operation.wait()
        self._operation.check()
        return self._given(self._rows)

    def _given(self, rows: Any) -> Any:
        return (list(self._ids), rows) if self._with_ids else rows


class _Copied(_Batch):
    """Rows that are gathered into pinned memory and copied to the GPU."""

    def __init__(self, table: Table, ids: array[int], with_ids: bool, stream: Any) -> None:
        super().__init__(table, ids, with_ids, True)
        self._stream = stream
        self._event: Any = None

    def go_on(self) -> None:
        if self._event is None and self._operation.done():
            # `result` raises it, when the batches before were given out.
            with suppress(NvmeGpuError):
                self._copy()

    def _copy(self) -> None:
        self._operation.wait()
        self._operation.check()
        torch: Any = _buffers.torch()
        with torch.cuda.stream(self._stream):
            self._rows = self._rows.to(self._stream.device, non_blocking=True)
            self._event = self._stream.record_event()

    def result(self) -> Any:
        if self._event is None:
            self._copy()
        return self._given(_used_now(self._rows, self._stream, self._event))


class _Gathered(_Batch):
    """Rows that the GPU gathers."""

    def __init__(self, table: Table, ids: array[int], with_ids: bool, stream: Any) -> None:
        torch: Any = _buffers.torch()
        self._ids, self._with_ids, self._stream = ids, with_ids, stream
        kind = getattr(torch, table.dtype)
        pinned = torch.frombuffer(ids, dtype=torch.int64).pin_memory()
        with torch.cuda.stream(stream):
            on_gpu = pinned.to(stream.device, non_blocking=True)
            self._rows = torch.empty((len(ids), *table.shape[1:]), dtype=kind, device=stream.device)
            held = (pinned, on_gpu, self._rows)
            self._launched = table._native.gather_on_gpu(
                on_gpu.data_ptr(), True, len(ids), self._rows.data_ptr(), 0, stream.cuda_stream, held, apart=True
            )
            self._event = stream.record_event()

    def result(self) -> Any:
        # Its end is known without a call of CUDA; the current stream is ordered all the same.
        self._launched.finish()
        return self._given(_used_now(self._rows, self._stream, self._event))


def _used_now(rows: Any, stream: Any, event: Any) -> Any:
    """What the current stream may use: it waits, and the memory is not given out again before it has ended."""
    torch: Any = _buffers.torch()
    current = torch.cuda.current_stream(stream.device)
    current.wait_event(event)
    rows.record_stream(current)
    return rows


def _is_on_gpu(device: Any, table: Table) -> bool:
    is_gpu, number = _arguments.device("cpu" if device is None else device)
    if is_gpu:
        gpu = table.store.gpu
        same_gpu(gpu, (_buffers.CUDA, number if number is not None else gpu or 0), "the batch")
    return is_gpu
