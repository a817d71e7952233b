"""An embedding of torch whose weights are the rows of a table."""

from __future__ import annotations

from typing import Any, NoReturn

import torch as _torch

from . import _arguments
from ._errors import Usage
from ._operations import OPS, state
from ._gathers import OnError
from ._table import Table

_DTYPES = ("float32", "float16", "bfloat16")
# Rows by ids that were judged: torch before 2.0 looks at them again otherwise, and waits for the GPU to do so.
sparse_rows = getattr(_torch, "_sparse_coo_tensor_unsafe", _torch.sparse_coo_tensor)


def table_of(weight: Any) -> Table:
    """The table whose rows ``weight`` stands for.

    Raises :class:`Usage` for a parameter of another module, and for one that something has written to: its rows lie in
    the table, where that went nowhere.
    """
    table: Table | None = getattr(weight, "table", None)
    if table is None:
        raise Usage("a parameter is no weight of a DiskEmbedding", "give it to an optimizer of torch")
    if weight.layout is not _torch.sparse_coo or weight._nnz():
        raise Usage(
            "the weight of a DiskEmbedding was changed in memory, while its rows lie in the table",
            "step with nvme_gpu.torch.DiskSGD or DiskAdagrad, and write rows with table.scatter",
        )
    return table


def _placeholder(table: Table, dtype: Any, device: Any) -> Any:
    """A sparse parameter of the table's shape without elements: what gradients of rows belong to."""
    rows, width = table.shape
    places = _torch.empty((1, 0), dtype=_torch.int64, device=device)
    values = _torch.empty((0, width), dtype=dtype, device=device)
    weight = _torch.nn.Parameter(_torch.sparse_coo_tensor(places, values, (rows, width)))
    weight.table = table
    # Whether the gradient is that of all ranks: backward says no, average_gradients yes.
    weight.is_averaged = False
    return weight


class _Rows(_torch.autograd.Function):
    """Rows forward; backward a sparse gradient of the rows that were used."""

    @staticmethod
    def forward(ctx: Any, weight: Any, ids: Any, module: DiskEmbedding) -> Any:
        ctx.save_for_backward(ids)
        ctx.like, ctx.padding = weight, module.padding_idx
        return module._gathered(ids)

    @staticmethod
    @_torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Any) -> Any:
        (ids,) = ctx.saved_tensors
        like = ctx.like
        like.is_averaged = False
        flat = ids.reshape(-1).to(device=like.device, dtype=_torch.int64)
        values = grads[0].reshape(flat.shape[0], like.shape[1]).to(device=like.device, dtype=like.dtype)
        if ctx.padding is not None:
            # Not a product with 0, which is NaN for an infinite gradient.
            values = values.masked_fill((flat == ctx.padding).unsqueeze(1), 0)
        return sparse_rows(flat.unsqueeze(0), values, like.shape), None, None


def _trained_rows(weight: Any, ids: Any, module: DiskEmbedding) -> Any:
    table_of(weight)
    return _Rows.apply(weight, ids, module)


if hasattr(_torch, "compiler") and hasattr(_torch.compiler, "disable"):
    # torch.compile does not support sparse parameters, so it calls this function without compiling it.
    _trained_rows = _torch.compiler.disable(_trained_rows)


class DiskEmbedding(_torch.nn.Module):
    """``nn.Embedding`` whose weights are the rows of a table on NVMe.

    ``table``: of the shape ``(num_embeddings, embedding_dim)`` and the dtype float32, float16 or bfloat16.
    ``padding_idx``: a row that gets no gradient, whatever that is; a negative one counts from the end.
    ``on_error``: what becomes of rows that cannot be read, as for :meth:`Store.table`; None: what the table says.

    ``weight`` is a parameter of the table's shape that holds no rows. Its gradient is sparse, as that of
    ``nn.Embedding(sparse=True)``: it is accumulated, clipped, scaled and left out as those of other parameters are, and
    ``weight.requires_grad_(False)`` freezes the rows. :class:`DiskSGD` and :class:`DiskAdagrad` write what it comes to;
    optimizers of torch, ``nn.init`` and DistributedDataParallel refuse ``weight``, and what SGD of torch does to it is
    refused by the next forward. See :func:`prepare_for_ddp` for several processes.

    ``half()`` and ``to(dtype)`` change the dtype of what comes out and of gradients; the table's stays. ``state_dict``
    has no rows, which are in the table. A DiskEmbedding is not copied or pickled.
    """

    weight: Any

    def __init__(self, table: Table, padding_idx: int | None = None, *, on_error: OnError | None = None) -> None:
        super().__init__()
        if not isinstance(table, Table):
            raise TypeError(f"table is of the type {type(table).__name__}: pass a nvme_gpu.Table")
        if len(table.shape) != 2:
            raise Usage(f"an embedding of a table of the shape {table.shape}", "use the shape (rows, dimensions)")
        if table.dtype not in _DTYPES:
            raise Usage(f"an embedding of {table.dtype}", "use float32, float16 or bfloat16")
        self.table = table if on_error is None else table.with_on_error(on_error)
        self.num_embeddings, self.embedding_dim = rows, _ = table.shape
        if padding_idx is not None:
            padding_idx = _arguments.whole("padding_idx", padding_idx, -rows, rows - 1) % rows
        self.padding_idx = padding_idx
        gpu = table.store.gpu
        device = "cpu" if gpu is None or not _torch.cuda.is_available() else f"cuda:{gpu}"
        self.weight = _placeholder(self.table, getattr(_torch, table.dtype), device)

    def forward(self, ids: Any) -> Any:
        """Rows of the shape ``(*ids.shape, embedding_dim)``; ``ids`` are int32 or int64."""
        if self.weight.requires_grad and _torch.is_grad_enabled():
            return _trained_rows(self.weight, ids, self)
        return self._gathered(ids)

    def extra_repr(self) -> str:
        """What a printed module says."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.table.dtype} on {self.table.store._device!r}{padding}"

    def _gathered(self, ids: Any) -> Any:
        return OPS.gather(state(self.table, ids.device), ids).to(self.weight.dtype)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Nothing: the rows are in the table."""

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        if f"{prefix}weight" in state_dict:
            error_msgs.append(f"{prefix}weight: the rows lie in a table: write them with table.scatter")
        unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key != f"{prefix}weight"]

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise Usage(
            "a DiskEmbedding cannot be copied: its rows lie on a drive",
            "copy the other modules, and the rows to a table of their own",
        )
