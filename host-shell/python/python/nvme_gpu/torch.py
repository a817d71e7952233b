"""PyTorch: operations that torch.compile keeps and orders, and an embedding whose weights lie on NVMe.

>>> import torch, nvme_gpu, nvme_gpu.torch
>>> store = nvme_gpu.open("sim:mem?size=16MiB")
>>> table = store.table(0, shape=(1000, 4), dtype="float32")
>>> state = nvme_gpu.torch.state(table)
>>> torch.ops.nvme_ops.scatter(state, torch.tensor([7]), torch.ones(1, 4))
>>> torch.ops.nvme_ops.gather(state, torch.tensor([7, 8])).tolist()
[[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]]
>>> store.close()

The operations are defined by ``torch.library`` alone and use no ABI of torch. ``table[ids]`` takes tensors without this
module; its operations are for code that is compiled or exported.

A table is passed as its *state*: a tensor that stands for its content. All operations change it as far as torch knows,
gathers too: a compiler copies a tensor before it is changed, and would move a gather that only reads the first one over
a scatter to its copy. So a compiled program drops, merges and moves none of them. Its shape names the table, so that no operation
reads it: a copy of it stands for the same table.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch as _torch

from ._errors import Usage
from ._store import Store, Table, open

__all__ = ["DiskEmbedding", "state", "store_of"]

_LOCK = threading.Lock()
_BY_NUMBER: weakref.WeakValueDictionary[int, Table] = weakref.WeakValueDictionary()
_NUMBERS: weakref.WeakKeyDictionary[Table, int] = weakref.WeakKeyDictionary()
_STATES: weakref.WeakKeyDictionary[Table, dict[Any, Any]] = weakref.WeakKeyDictionary()
_STORES: dict[tuple[str, int | None], Store] = {}
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
    _read_into_tensor(made, device_path, offset)
    return made


def _read_tensor_fake(device_path: str, offset: int, shape: Any, dtype: Any, device: Any) -> Any:
    return _torch.empty(list(shape), dtype=dtype or _torch.uint8, device=device)


def _read_into_tensor(t: Any, device_path: str, offset: int) -> None:
    # A tensor's device has its number, also where "cuda" alone was asked for.
    pending = store_of(device_path, t.device.index if t.is_cuda else None).read_into(t, offset)
    if not t.is_cuda:
        pending.result()


_LIBRARY = _torch.library.Library("nvme_ops", "DEF")
for _schema in (
    "gather(Tensor(a!) state, Tensor ids) -> Tensor",
    "gather_out(Tensor(a!) state, Tensor ids, Tensor(b!) out) -> ()",
    "scatter(Tensor(a!) state, Tensor ids, Tensor src) -> ()",
    "scatter_add(Tensor(a!) state, Tensor ids, Tensor src) -> ()",
    "read_tensor(str device_path, int offset, SymInt[] shape, ScalarType? dtype, Device device) -> Tensor",
    "read_into_tensor(Tensor(a!) t, str device_path, int offset) -> ()",
):
    _LIBRARY.define(_schema)
for _name, _real, _meta in (
    ("gather", _gather, _gather_meta),
    ("gather_out", _gather_out, _nothing),
    ("scatter", _scatter, _nothing),
    ("scatter_add", _scatter_add, _nothing),
    ("read_into_tensor", _read_into_tensor, _nothing),
):
    _LIBRARY.impl(_name, _real, "CPU")
    _LIBRARY.impl(_name, _real, "CUDA")
    _LIBRARY.impl(_name, _meta, "Meta")
# No tensor goes in: this one is for every device.
_LIBRARY.impl("read_tensor", _read_tensor, "CompositeExplicitAutograd")
if hasattr(_torch.library, "register_fake"):
    _torch.library.register_fake("nvme_ops::read_tensor", _read_tensor_fake, lib=_LIBRARY)
_OPS = _torch.ops.nvme_ops


class _Rows(_torch.autograd.Function):
    """Rows forward; backward the optimizer's step on the rows that were used."""

    @staticmethod
    def forward(ctx: Any, anchor: Any, ids: Any, module: DiskEmbedding) -> Any:
        ctx.save_for_backward(ids)
        ctx.module = module
        return _OPS.gather(module._state(ids.device), ids)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (ids,) = ctx.saved_tensors
        ctx.module._step(ids.reshape(-1), grads[0])
        return None, None, None


class DiskEmbedding(_torch.nn.Module):
    """``nn.Embedding`` whose weights are the rows of a table on NVMe, with the optimizer's step inside of backward.

    ``table``: of the shape ``(num_embeddings, embedding_dim)`` and a floating dtype; of float16 and bfloat16 each step is
    rounded to the dtype. ``optimizer``: ``"sgd"``, ``"adagrad"`` (row-wise: one sum of squares for each row, in memory of
    the ids' device), or None: the rows do not change. ``lr``: the learning rate; it may be changed between steps.
    ``eps``: added to the root of the sum. ``padding_idx``: a row whose gradient is dropped.

    A step takes place for each backward, as if the optimizer followed it at once: gradients are not accumulated over
    several. Ids that repeat are summed. Nothing waits for the GPU, and ids are not made unique by a call that would. In
    evaluation mode, and under ``no_grad``, rows are only read. ``state_dict`` has the sums of ``"adagrad"`` and not the
    rows, which are in the table.
    """

    sums: Any

    def __init__(
        self,
        table: Table,
        optimizer: str | None = "sgd",
        lr: float = 0.01,
        eps: float = 1e-10,
        padding_idx: int | None = None,
    ) -> None:
        super().__init__()
        if len(table.shape) != 2:
            raise Usage(f"an embedding of a table of the shape {table.shape}", "use the shape (rows, dimensions)")
        if table.dtype not in ("float32", "float16", "bfloat16"):
            raise Usage(f"an embedding of {table.dtype}", "use float32, float16 or bfloat16")
        if optimizer not in ("sgd", "adagrad", None):
            raise Usage(f"optimizer is {optimizer!r}", "use 'sgd', 'adagrad' or None")
        if padding_idx is not None and not 0 <= padding_idx < table.shape[0]:
            raise Usage(f"padding_idx is {padding_idx}", f"use 0 to {table.shape[0] - 1}")
        self.table = table
        self.num_embeddings, self.embedding_dim = table.shape
        self.optimizer, self.lr, self.eps, self.padding_idx = optimizer, lr, eps, padding_idx
        if optimizer == "adagrad":
            self.register_buffer("sums", _torch.zeros(table.shape[0]))
        # Something that wants a gradient, so that backward comes here.
        self._anchor = _torch.zeros((), requires_grad=True)

    def forward(self, ids: Any) -> Any:
        """Rows of the shape ``(*ids.shape, embedding_dim)``; ``ids`` are int32 or int64."""
        if self.training and self.optimizer is not None and _torch.is_grad_enabled():
            return _Rows.apply(self._anchor, ids, self)
        return _OPS.gather(self._state(ids.device), ids)

    def extra_repr(self) -> str:
        """What a printed module says."""
        return f"{self.num_embeddings}, {self.embedding_dim}, optimizer={self.optimizer}, lr={self.lr}"

    def _state(self, device: Any) -> Any:
        return state(self.table, device)

    def _step(self, ids: Any, grad: Any) -> None:
        kind = getattr(_torch, self.table.dtype)
        grad = grad.reshape(ids.shape[0], self.embedding_dim).float()
        if ids.shape[0] == 0:
            return
        if self.padding_idx is not None:
            grad = grad * (ids != self.padding_idx).unsqueeze(1)
        if self.optimizer == "sgd":
            _OPS.scatter_add(self._state(ids.device), ids, (grad * -self.lr).to(kind))
            return
        # Equal ids stand side by side: each run of them is one place in what follows. Places that are left over have
        # the first id and a gradient of zero.
        ordered, order = _torch.sort(ids.long())
        begins = _torch.ones_like(ordered)
        begins[1:] = (ordered[1:] != ordered[:-1]).long()
        places = _torch.cumsum(begins, 0) - 1
        total = _torch.zeros_like(grad).index_add_(0, places, grad[order])
        of_place = ordered[:1].expand_as(ordered).clone().scatter_(0, places, ordered)
        known = of_place.clamp(0, self.num_embeddings - 1)
        if self.sums.device != ids.device:
            self.sums = self.sums.to(ids.device)
        self.sums.index_add_(0, known, total.pow(2).mean(1))
        scale = self.lr / (self.sums[known].sqrt() + self.eps)
        _OPS.scatter_add(self._state(ids.device), of_place, (total * -scale.unsqueeze(1)).to(kind))

