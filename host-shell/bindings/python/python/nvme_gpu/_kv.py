"""Keys and values of prompts on a store: pages by hash chains of tokens, with the calls of a connector of vLLM."""

from __future__ import annotations

import os
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from . import _arguments
from ._errors import KvLoadError, NvmeGpuError, Usage, listed
from ._held import OneProcess
from ._kv_moves import Move, adopted, load, put, save
from ._store import Store

_MOST = (1 << 31) - 1


def _sha256(data: bytes) -> bytes:
    # Here, since the module loads OpenSSL, which programs without a cache of keys and values do not need.
    import hashlib

    return hashlib.sha256(data).digest()


class _ProcessLock:
    """A lock that a child of fork() refuses to wait for: the thread that holds it may not be in the child."""

    def __init__(self) -> None:
        self._lock, self._process = threading.RLock(), os.getpid()

    def __enter__(self) -> None:
        if os.getpid() != self._process:
            raise Usage("a KvStore was made before a fork() and used in the child", "make one in each process")
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class _Block:
    """A place on the store for the pages of one block of tokens."""

    __slots__ = ("key", "slot", "pins", "missing", "writes", "is_bad", "has_failed")

    def __init__(self, key: bytes, slot: int, layers: Iterable[str]) -> None:
        self.key, self.slot = key, slot
        self.pins = 0
        """Loads that are to come or under way."""
        self.missing = set(layers)
        """Layers that were not handed over for saving."""
        self.writes = 0
        """Saves under way."""
        self.is_bad = False
        """It is not, or no more, found."""
        self.has_failed = False
        """A write to its place failed."""


class _Request:
    __slots__ = ("tokens", "salt", "keys", "block_ids", "matched", "first", "most_saved")

    def __init__(self, tokens: array[int], salt: bytes, keys: list[bytes]) -> None:
        self.tokens, self.salt, self.keys = tokens, salt, keys
        self.block_ids: list[int] = []
        self.matched: list[_Block] = []
        """Pinned, to be loaded from block ``first`` of the request on."""
        self.first = 0
        self.most_saved = _MOST
        """Blocks from here on hold what was not loaded."""


class _Loads:
    """Blocks that are being loaded, until the last layer has come."""

    __slots__ = ("blocks", "layers")

    def __init__(self, blocks: list[_Block], layers: int) -> None:
        self.blocks, self.layers = blocks, layers


class _Load:
    __slots__ = ("move", "loads", "cache", "block_ids", "places")

    def __init__(
        self, move: Move, loads: _Loads, cache: Any, block_ids: list[int], places: list[tuple[_Request, int]]
    ) -> None:
        self.move, self.loads, self.cache, self.block_ids, self.places = move, loads, cache, block_ids, places


class KvStore(OneProcess):
    """Keys and values of blocks of tokens on a store, to be found by other requests that begin with the same tokens.

    ``layers``: how many, or their names. ``block_tokens``: tokens of a block. ``page_shape``, ``dtype``: what a cache
    holds for a block of one layer: caches have the shape ``(num_blocks, *page_shape)``. ``blocks``: how many blocks of
    tokens fit; each takes a page for each layer, from byte ``offset`` of the store on. ``model`` goes into the keys: name
    what keys and values depend on.

    Caches are tensors of torch, on the CPU or on the store's GPU, arrays of numpy, or what has DLPack. The index is in
    memory: it is lost with this object, and the pages with it. A block is found once all its pages were written and the
    store acknowledged that. Blocks that were not used for longest make room for new ones; those that are to be loaded, or
    are being loaded or written, stay. A place to which a write failed is not used again. Any thread may call; calls wait
    for each other.
    """

    def __init__(
        self,
        store: Store,
        offset: int = 0,
        *,
        layers: int | Sequence[str],
        blocks: int,
        block_tokens: int,
        page_shape: Sequence[int],
        dtype: Any,
        model: str = "",
    ) -> None:
        if not isinstance(store, Store):
            raise TypeError(f"store is of the type {type(store).__name__}: use nvme_gpu.open")
        if isinstance(layers, str):
            raise TypeError("layers is of the type str: pass a number, or a list of names")
        if not isinstance(layers, Sequence):
            layers = [str(number) for number in range(_arguments.whole("layers", layers, 1, 1 << 16))]
        names = [str(name) for name in layers]
        if not names or len(set(names)) != len(names):
            raise Usage(f"{len(names)} layers, {len(set(names))} names", "name each layer once, one at least")
        self._capacity = _arguments.whole("blocks", blocks, 1, _MOST)
        self._tokens = _arguments.whole("block_tokens", block_tokens, 1, _MOST)
        self._page = tuple(_arguments.whole("page_shape", one, 1, _MOST) for one in page_shape)
        offset = _arguments.whole("offset", offset, 0, (1 << 62) - 1)
        self._tables = {}
        for name in names:
            table = store.table(offset, shape=(self._capacity, *self._page), dtype=dtype)
            self._tables[name] = table
            offset += table.nbytes
        self._store = store
        self._seed = _sha256(repr((model, self._tokens, self._page, str(dtype), names)).encode())
        self._lock = _ProcessLock()
        self._free = list(range(self._capacity - 1, -1, -1))
        self._index: dict[bytes, _Block] = {}
        # Those of the index that may make room, the one that was not used for longest first.
        self._idle: OrderedDict[bytes, _Block] = OrderedDict()
        self._saving: dict[bytes, tuple[str, _Block]] = {}
        # Keys of those, by the name of the request that saves them, in the order of its tokens.
        self._saving_by: dict[str, dict[bytes, None]] = {}
        self._requests: dict[str, _Request] = {}
        self._loads: dict[str, list[_Load]] = {name: [] for name in names}
        self._saves: list[tuple[Move, list[_Block]]] = []
        # Something was written since the last flush.
        self._is_unflushed = False
        self._failed: set[int] = set()
        # By layer, the blocks that an interrupted call did not load, and why.
        self._unreported: dict[str, tuple[set[int], NvmeGpuError | None]] = {}

    # ---- what there is

    @property
    def store(self) -> Store:
        """The store on which the pages lie."""
        return self._store

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers."""
        return tuple(self._tables)

    @property
    def capacity(self) -> int:
        """Blocks of tokens that fit."""
        return self._capacity

    @property
    def free(self) -> int:
        """Blocks for which there is room without another's having to go."""
        return len(self._free)

    def __len__(self) -> int:
        """Blocks of tokens that are found."""
        return len(self._index)

    def block_hashes(self, tokens: Iterable[int], extra: Sequence[Any] = ()) -> list[bytes]:
        """The keys of the full blocks of ``tokens``: each is the SHA-256 of the key before it, of ``extra`` and of the
        block's tokens. ``extra``: what else keys and values depend on, as the name of an adapter, or a salt: str, bytes,
        numbers, None, and tuples of these. Of other data, as an image, pass a digest."""
        return self._chain(self._token_ids(tokens), _salt(extra))

    # ---- what a scheduler calls

    def get_num_new_matched_tokens(
        self, request_id: str, tokens: Iterable[int], num_computed_tokens: int = 0, *, extra: Sequence[Any] = ()
    ) -> int:
        """How many tokens behind the first ``num_computed_tokens``, a multiple of a block, can be loaded.

        The last token is never among them: a model has to compute one. What was found stays until it is loaded, or the
        request is finished. Called again, it forgets what it found before.
        """
        ids = self._token_ids(tokens)
        first, rest = divmod(_arguments.whole("num_computed_tokens", num_computed_tokens, 0, _MOST), self._tokens)
        if rest:
            raise Usage(f"{num_computed_tokens} computed tokens", f"pass a multiple of {self._tokens}")
        salt = _salt(extra)
        with self._lock:
            before = self._requests.get(request_id)
            if before is not None:
                self._release(before.matched)
            keys = self._chain(ids, salt)
            request = self._requests[request_id] = _Request(ids, salt, keys)
            request.first = first
            for key in keys[first : max(len(ids) - 1, 0) // self._tokens]:
                block = self._index.get(key)
                if block is None:
                    break
                block.pins += 1
                self._idle.pop(key, None)
                request.matched.append(block)
            return len(request.matched) * self._tokens

    def update_state_after_alloc(
        self,
        request_id: str,
        block_ids: Iterable[int],
        num_external_tokens: int = 0,
        *,
        tokens: Iterable[int] | None = None,
    ) -> None:
        """Which blocks of the caches the request has, from its first token on, and how many of the tokens that were found
        are to be loaded. ``tokens``: all tokens of the request, where there are more than before."""
        with self._lock:
            request = self._known(request_id)
            count, rest = divmod(_arguments.whole("num_external_tokens", num_external_tokens, 0, _MOST), self._tokens)
            ids = [_arguments.whole("a block id", one, 0, _MOST) for one in block_ids]
            if rest or count > len(request.matched) or (count and request.first + count > len(ids)):
                raise Usage(
                    f"{num_external_tokens} tokens into {len(ids)} blocks, {len(request.matched) * self._tokens} were found",
                    "pass at most what get_num_new_matched_tokens returned, in whole blocks",
                )
            if tokens is not None:
                longer = self._token_ids(tokens)
                if longer[: len(request.tokens)] != request.tokens:
                    raise Usage("tokens of a request have changed", "pass all of them, the new ones at the end")
                request.tokens, request.keys = longer, self._chain(longer, request.salt, request.keys)
            request.block_ids, request.most_saved = ids, _MOST
            self._release(request.matched[count:])
            del request.matched[count:]

    def request_finished(self, request_id: str) -> None:
        """Forgets the request. Its saves are completed by :meth:`wait_for_save`; blocks of which layers were not handed over
        are not kept."""
        with self._lock:
            request = self._requests.pop(request_id, None)
            if request is not None:
                self._release(request.matched)
            for key in list(self._saving_by.get(request_id, ())):
                _, block = self._saving[key]
                if block.missing:
                    block.is_bad = True
                    self._end_save(key, block)

    # ---- what a worker calls

    def start_load_kv(self, caches: Mapping[str, Any], request_ids: Iterable[str] | None = None) -> None:
        """Starts to load what was found for the requests (None: for all) into ``caches``, one for each layer."""
        with self._lock:
            missing = self._tables.keys() - caches.keys()
            if missing:
                raise Usage(f"no cache of the layer {min(missing)!r}", "pass one for each layer")
            chosen = [self._known(name) for name in self._named(request_ids)]
            places = [(one, one.first + at) for one in chosen for at in range(len(one.matched)) if one.block_ids]
            if not places:
                return
            blocks = [block for one in chosen if one.block_ids for block in one.matched]
            block_ids = [one.block_ids[at] for one, at in places]
            given = {name: adopted(caches[name], name, self._page, block_ids, True) for name in self._tables}
            slots = [block.slot for block in blocks]
            loads = _Loads(blocks, len(self._tables))
            moves = {name: load(table, slots, given[name]) for name, table in self._tables.items()}
            for one in chosen:
                if one.block_ids:
                    one.matched = []
            for name, move in moves.items():
                self._loads[name].append(_Load(move, loads, given[name], block_ids, places))

    def wait_for_layer_load(self, layer: str) -> None:
        """Waits until what is being loaded of a layer is in its cache.

        Raises :class:`KvLoadError` with the blocks of the cache that were not loaded and keep what they held. The others
        are right. These blocks are in :meth:`get_block_ids_with_load_errors`, too, and are not found again.
        """
        with self._lock:
            self._table(layer)
            failed, first = self._unreported.pop(layer, (set(), None))
            try:
                while self._loads[layer]:
                    bad, error = self._loads[layer][0].move.wait()
                    first = first or error
                    self._end_load(layer, bad, failed)
            except BaseException as error:
                if failed:
                    remedy = "call wait_for_layer_load again, and compute these blocks"
                    stopped = NvmeGpuError(f"loading was interrupted: {error!r}", remedy, "unfinished")
                    self._unreported[layer] = failed, first or stopped
                raise
            finally:
                self._failed |= failed
            if failed:
                assert first is not None
                raise KvLoadError(layer, failed, first) from first

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The blocks of the caches that were not loaded in some layer, since this was called last."""
        with self._lock:
            failed, self._failed = self._failed, set()
            return failed

    def save_kv_layer(
        self, layer: str, cache: Any, request_ids: Iterable[str] | None = None, *, num_tokens: int | None = None
    ) -> None:
        """Starts to save one layer of the full blocks of the requests (None: of all) that are not on the store.

        ``num_tokens``: how many tokens of each request have keys and values in the caches; None: all. The pages are copied:
        the cache may change when this returns, on a GPU in the order of the current stream. Blocks for which there is no
        place are left out, as are those behind one that was not loaded.
        """
        most = _MOST if num_tokens is None else _arguments.whole("num_tokens", num_tokens, 0, _MOST)
        with self._lock:
            table = self._table(layer)
            if self._loads[layer]:
                raise Usage(f"the layer {layer!r} is being loaded", "call wait_for_layer_load first")
            blocks, block_ids = [], []
            for name in self._named(request_ids):
                for block, block_id in self._to_save(name, layer, most):
                    blocks.append(block)
                    block_ids.append(block_id)
            if not blocks:
                return
            given = adopted(cache, layer, self._page, block_ids, False)
            move = save(table, [block.slot for block in blocks], given, block_ids)
            for block in blocks:
                block.missing.remove(layer)
                block.writes += 1
            self._saves.append((move, blocks))

    def wait_for_save(self, *, durable: bool = False) -> None:
        """Waits until what is being saved was written, and makes blocks whose layers were all written ones that are found.

        ``durable``: also flushes the store's write cache. Raises the first error after that: the blocks that it concerns are
        not kept, and nothing else is lost.
        """
        with self._lock:
            first: NvmeGpuError | None = None
            # Only blocks with a write that has ended here may have become whole.
            ended: dict[bytes, _Block] = {}
            try:
                while self._saves:
                    move, blocks = self._saves[0]
                    bad, error = move.wait()
                    self._is_unflushed = True
                    del self._saves[0]
                    first = first or error
                    for at, block in enumerate(blocks):
                        block.writes -= 1
                        block.has_failed |= at in bad
                        block.is_bad |= at in bad
                        ended[block.key] = block
                if durable and (self._saving or self._is_unflushed):
                    try:
                        self._store.flush()
                        self._is_unflushed = False
                    except NvmeGpuError as error:
                        first = first or error
                        for key, (_, block) in self._saving.items():
                            block.is_bad = True
                            ended[key] = block
            finally:
                # The first block of a chain is the last to make room. A call that Ctrl-C ends keeps what was written.
                for key, block in reversed(list(ended.items())):
                    self._end_save(key, block)
            if first is not None:
                raise first

    def clear(self) -> None:
        """Forgets all blocks but those that are to be loaded, or are being loaded or written."""
        with self._lock:
            for block in list(self._idle.values()):
                self._drop(block)

    def __repr__(self) -> str:
        return f"<nvme_gpu.KvStore of {len(self)} blocks of {self._tokens} tokens, {self._capacity} fit>"

    # ---- inside

    def _known(self, request_id: str) -> _Request:
        found = self._requests.get(request_id)
        if found is None:
            raise Usage(f"no request {request_id!r}", "call get_num_new_matched_tokens for it first")
        return found

    def _named(self, request_ids: Iterable[str] | None) -> list[str]:
        """The requests of a call, each of which is named once: its pins are taken and given back once."""
        names = list(self._requests if request_ids is None else request_ids)
        if len(set(names)) < len(names):
            twice = next(name for at, name in enumerate(names) if name in names[:at])
            raise Usage(f"the request {twice!r} is named twice", "name each request once")
        return names

    def _table(self, layer: str) -> Any:
        found = self._tables.get(layer)
        if found is None:
            raise Usage(f"no layer {layer!r}", f"use one of {listed(self._tables)}")
        return found

    @staticmethod
    def _token_ids(tokens: Iterable[int]) -> array[int]:
        values = tokens.tolist() if hasattr(tokens, "tolist") else tokens
        try:
            return array("q", values)
        except OverflowError as error:
            raise Usage(f"tokens: {error}", "use numbers of 64 bits") from error

    def _chain(self, tokens: array[int], salt: bytes, known: Sequence[bytes] = ()) -> list[bytes]:
        """The keys of the full blocks of ``tokens``, the first of which are ``known``."""
        keys = list(known)
        key = keys[-1] if keys else self._seed
        for begin in range(len(keys) * self._tokens, len(tokens) - self._tokens + 1, self._tokens):
            block = tokens[begin : begin + self._tokens].tobytes()
            key = _sha256(key + len(salt).to_bytes(8, "little") + salt + block)
            keys.append(key)
        return keys

    def _to_save(self, name: str, layer: str, most: int) -> Iterable[tuple[_Block, int]]:
        """The blocks of a request of which this layer is to be saved, and where they lie in the cache."""
        request = self._known(name)
        tokens = min(len(request.tokens), most)
        count = min(tokens // self._tokens, len(request.block_ids), request.most_saved)
        for key, block_id in zip(request.keys[:count], request.block_ids):
            if key in self._index:
                continue
            owner, block = self._saving.get(key, (name, None))
            if block is None:
                slot = self._slot()
                if slot is None:
                    return
                block = _Block(key, slot, self._tables)
                self._saving[key] = (name, block)
                self._saving_by.setdefault(name, {})[key] = None
            if owner == name and layer in block.missing:
                yield block, block_id

    def _slot(self) -> int | None:
        """A free place, for which the block that was not used for longest may go."""
        if not self._free:
            oldest = next(iter(self._idle.values()), None)
            if oldest is not None:
                self._drop(oldest)
        return self._free.pop() if self._free else None

    def _drop(self, block: _Block) -> None:
        """The block is not found again. Its place is free once nothing loads from it."""
        if self._index.get(block.key) is block:
            del self._index[block.key]
            self._idle.pop(block.key, None)
            block.is_bad = True
            if not block.pins:
                self._free.append(block.slot)

    def _release(self, blocks: Sequence[_Block]) -> None:
        """The blocks of a chain were used: the first one is the last to make room."""
        for block in reversed(blocks):
            block.pins -= 1
            if block.pins:
                continue
            if not block.is_bad:
                self._idle[block.key] = block
            else:
                self._free.append(block.slot)

    def _end_load(self, layer: str, bad: set[int], failed: set[int]) -> None:
        """Copies rows of the first load of a layer to the cache. Adds the blocks of the others, and all if the copy raises,
        to ``failed``."""
        one = self._loads[layer][0]
        good = [at for at in range(len(one.block_ids)) if at not in bad]
        lost = set(range(len(one.block_ids)))
        try:
            put(one.cache, [one.block_ids[at] for at in good], one.move.rows, good)
            lost = bad
        finally:
            del self._loads[layer][0]
            for at in lost:
                failed.add(one.block_ids[at])
                self._drop(one.loads.blocks[at])
                request, number = one.places[at]
                request.most_saved = min(request.most_saved, number)
            one.loads.layers -= 1
            if not one.loads.layers:
                self._release(one.loads.blocks)

    def _end_save(self, key: bytes, block: _Block) -> None:
        """Keeps a block that is whole, or gives up one that is bad, once nothing is written to it."""
        if block.writes or (block.missing and not block.is_bad):
            return
        owner, _ = self._saving.pop(key)
        keys = self._saving_by[owner]
        del keys[key]
        if not keys:
            del self._saving_by[owner]
        if not block.is_bad:
            self._index[key] = self._idle[key] = block
        elif not block.has_failed:
            # A place to which a write failed is not used again: it may be damaged, and a late write may still come.
            self._free.append(block.slot)


def _salt(extra: Sequence[Any]) -> bytes:
    """The bytes for ``extra`` in keys: repr() tells values of these types apart, and leaves out elements of arrays."""

    def judge(value: Any) -> None:
        if type(value) is tuple:
            for one in value:
                judge(one)
        elif value is not None and type(value) not in (str, bytes, bool, int, float):
            raise Usage(
                f"extra has a value of the type {type(value).__name__}", "pass str, bytes or numbers; of an array its digest"
            )

    values = tuple(extra)
    judge(values)
    return repr(values).encode()
