"""The operations ``torch.ops.nvme_ops``, which torch.compile keeps and orders.

They are defined by ``torch.library`` alone and use no ABI of torch. ``table[ids]`` takes tensors without them; they are
for code that is compiled or exported.

A table is passed as its *state*: a tensor that stands for its content. All operations change it as far as torch knows,
gathers too, and both halves of one: a compiler copies a tensor before it is changed, and would move a gather that only reads the first one over
a scatter to its copy. So a compiled program drops, merges and moves none of them. Its shape names the table, so that no
operation reads it: a copy of it stands for the same table.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch as _torch

from . import _buffers
from ._errors import Usage
from ._prefetch import Prefetch
from ._store import Store, open
from ._table import Table

_LOCK = threading.Lock()
_BY_NUMBER: weakref.WeakValueDictionary[int, Table] = weakref.WeakValueDictionary()
_NUMBERS: weakref.WeakKeyDictionary[Table, int] = weakref.WeakKeyDictionary()
_STATES: weakref.WeakKeyDictionary[Table, dict[Any, Any]] = weakref.WeakKeyDictionary()
_STORES: dict[tuple[str, int | None], Store] = {}
# Begun gathers by the tensor that stands for each, whose memory is its own as long as it lives.
_BEGUN: dict[int, Prefetch] = {}
_NEXT = 2


def state(table: Table, device: Any = None) -> Any:
    """The tensor that stands for ``table``: uint8, of a shape that names it, on ``device`` (None: the GPU of the store,
    else the CPU). The same one for each call. It works as long as the table is referenced."""
    global _NEXT
    if device is None:
        device = "cpu" if table.store.gpu is None else f"cuda:{table.store.gpu}"
    place = _torch.device(device)
    with _LOCK:
        if table not in _NUMBERS:
            # 0 and 1 are sizes that a compiler takes for constants.
            _NUMBERS[table] = _NEXT
            _BY_NUMBER[_NEXT] = table
            _NEXT += 1
        of_table = _STATES.setdefault(table, {})
        if place not in of_table:
            of_table[place] = _torch.zeros(_NUMBERS[table], dtype=_torch.uint8, device=place)
        return of_table[place]


def _table(state: Any) -> Table:
    found = _BY_NUMBER.get(int(state.shape[0])) if state.dim() == 1 else None
    if found is None:
        raise Usage("the state names no table", "make it by nvme_gpu.torch.state(table), and keep the table")
    return found


def store_of(device_path: str, gpu: int | None = None) -> Store:
    """The open store that ``read_tensor`` and ``read_into_tensor`` use for ``device_path``; opened for reading at their
    first call and kept open until the program ends, or until it is closed."""
    key = (device_path, gpu)
    with _LOCK:
        found = _STORES.get(key)
        if found is None or found.closed:
            found = _STORES[key] = open(device_path, gpu)
        return found


def _rows(table: Table, ids: Any) -> tuple[int, ...]:
    return (*ids.shape, *table.shape[1:])


def _gather(state: Any, ids: Any) -> Any:
    return _table(state).gather(ids)


def _gather_meta(state: Any, ids: Any) -> Any:
    table = _table(state)
    return ids.new_empty(_rows(table, ids), dtype=getattr(_torch, table.dtype))


def _gather_out(state: Any, ids: Any, out: Any) -> None:
    _table(state).gather(ids, out=out)


def _prefetch(state: Any, ids: Any) -> Any:
    begun = _table(state).prefetch(ids)
    # At least a byte, so that no two tensors have one address.
    token = _torch.empty((*ids.shape, 1), dtype=_torch.uint8, device=ids.device)
    if ids.numel():
        key = token.data_ptr()
        _BEGUN[key] = begun
        weakref.finalize(token, _give_up, key, weakref.ref(begun))
    return token


def _give_up(key: int, begun: Any) -> None:
    """Drops a gather whose tensor is gone, unless another one has the key by now."""
    if _BEGUN.get(key) is begun():
        _BEGUN.pop(key, None)


def _prefetch_meta(state: Any, ids: Any) -> Any:
    _table(state)
    return ids.new_empty((*ids.shape, 1), dtype=_torch.uint8)


def _begun_by(table: Table, token: Any) -> Prefetch:
    found = _BEGUN.get(token.data_ptr())
    if found is None or found._table is not table:
        remedy = "pass what nvme_ops.prefetch returned for this table, once, while it is referenced"
        raise Usage("the token names no rows of this table that were begun", remedy)
    return found


def _finished(table: Table, token: Any, out: Any = None) -> Any:
    """The rows of a token. It stays good where ``out`` is refused."""
    begun = _begun_by(table, token)
    rows = begun.result(out, stream=_buffers.current_stream(token))
    _give_up(token.data_ptr(), weakref.ref(begun))
    return rows


def _finish(state: Any, token: Any) -> Any:
    table = _table(state)
    if not token.numel():
        return _finish_meta(state, token)
    return _finished(table, token)


def _finish_meta(state: Any, token: Any) -> Any:
    table = _table(state)
    return token.new_empty((*token.shape[:-1], *table.shape[1:]), dtype=getattr(_torch, table.dtype))


def _finish_out(state: Any, token: Any, out: Any) -> None:
    table = _table(state)
    if not token.numel():
        return
    _finished(table, token, out)


def _scatter(state: Any, ids: Any, src: Any) -> None:
    _table(state).scatter(ids, src)


def _scatter_add(state: Any, ids: Any, src: Any) -> None:
    _table(state).scatter_add(ids, src)


def _nothing(*_: Any) -> None:
    """What operations do to tensors without data."""


def _read_tensor(device_path: str, offset: int, shape: Any, dtype: Any, device: Any) -> Any:
    place = _torch.device(device)
    lengths = [int(one) for one in shape]
    made = _torch.empty(lengths, dtype=dtype or _torch.uint8, device=place)
    read_into_tensor(made, device_path, offset)
    return made


def _read_tensor_fake(device_path: str, offset: int, shape: Any, dtype: Any, device: Any) -> Any:
    return _torch.empty(list(shape), dtype=dtype or _torch.uint8, device=device)


def read_into_tensor(t: Any, device_path: str, offset: int) -> None:
    """Fills ``t`` from byte ``offset`` of a store that stays open, on a GPU in the order of its stream."""
    # A tensor's device has its number, also where "cuda" alone was asked for.
    pending = store_of(device_path, t.device.index if t.is_cuda else None).read_into(t, offset)
    if not t.is_cuda:
        pending.result()


_LIBRARY = _torch.library.Library("nvme_ops", "DEF")
for _schema in (
    "gather(Tensor(a!) state, Tensor ids) -> Tensor",
    "gather_out(Tensor(a!) state, Tensor ids, Tensor(b!) out) -> ()",
    "prefetch(Tensor(a!) state, Tensor ids) -> Tensor",
    "prefetched(Tensor(a!) state, Tensor token) -> Tensor",
    "prefetched_out(Tensor(a!) state, Tensor token, Tensor(b!) out) -> ()",
    "scatter(Tensor(a!) state, Tensor ids, Tensor src) -> ()",
    "scatter_add(Tensor(a!) state, Tensor ids, Tensor src) -> ()",
    "read_tensor(str device_path, int offset, SymInt[] shape, ScalarType? dtype, Device device) -> Tensor",
    "read_into_tensor(Tensor(a!) t, str device_path, int offset) -> ()",
):
    _LIBRARY.define(_schema)
for _name, _real, _meta in (
    ("gather", _gather, _gather_meta),
    ("gather_out", _gather_out, _nothing),
    ("prefetch", _prefetch, _prefetch_meta),
    ("prefetched", _finish, _finish_meta),
    ("prefetched_out", _finish_out, _nothing),
    ("scatter", _scatter, _nothing),
    ("scatter_add", _scatter_add, _nothing),
    ("read_into_tensor", read_into_tensor, _nothing),
):
    _LIBRARY.impl(_name, _real, "CPU")
    _LIBRARY.impl(_name, _real, "CUDA")
    _LIBRARY.impl(_name, _meta, "Meta")
# No tensor goes in: this one is for every device.
_LIBRARY.impl("read_tensor", _read_tensor, "CompositeExplicitAutograd")
if hasattr(_torch.library, "register_fake"):
    _torch.library.register_fake("nvme_ops::read_tensor", _read_tensor_fake, lib=_LIBRARY)
OPS = _torch.ops.nvme_ops
