"""Optimizers that write the rows of embeddings on NVMe."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import torch as _torch

from ._disk_embedding import table_of
from ._errors import Usage
from ._gradients import check_averaged
from ._operations import OPS, state
from ._store import Table


def _rate(name: str, value: Any) -> float:
    number = math.nan
    if not isinstance(value, bool) and hasattr(value, "__float__"):
        number = float(value)
    if not 0 <= number < math.inf:
        raise Usage(f"{name} is {value!r}", "use a finite number from 0 on")
    return number


class _RowOptimizer(_torch.optim.Optimizer):
    """What both have in common: gradients are judged, then rows are written."""

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any], ranks: str) -> None:
        if ranks not in ("same", "separate"):
            raise Usage(f"ranks is {ranks!r}", "use 'same' or 'separate'")
        self._ranks = ranks
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch has it; all parameters are weights of embeddings on NVMe."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._judge(group)
        except BaseException:
            self.param_groups.pop()
            raise

    def _judge(self, group: dict[str, Any]) -> None:
        _rate("lr", group["lr"])
        for weight in group["params"]:
            table = table_of(weight)
            if table.stored_dtype != table.dtype:
                raise Usage(
                    f"rows of {table.stored_dtype} that come out as {table.dtype} are not written",
                    "use a table of the stored dtype, or weight.requires_grad_(False)",
                )

    @_torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Any = None) -> Any:
        """Writes the rows that gradients were accumulated for, and waits for the GPU where those are there.

        Raises :class:`Usage` for a gradient or a change of a row that is not finite: no row of any table is written then.
        """
        loss = None
        if closure is not None:
            with _torch.enable_grad():
                loss = closure()
        changes: list[tuple[Any, Table, Any, Any, Any]] = []
        for group in self.param_groups:
            self._judge(group)
            for weight in group["params"]:
                if weight.grad is not None:
                    changes += self._changes(group, weight)
        for weight, table, ids, change, kept in changes:
            OPS.scatter_add(state(table, ids.device), ids, change)
            self._keep(weight, ids, kept)
        return loss

    def _changes(self, group: dict[str, Any], weight: Any) -> list[tuple[Any, Table, Any, Any, Any]]:
        """What one gradient comes to; nothing without rows."""
        table = weight.table
        if weight.grad.layout is not _torch.sparse_coo:
            raise Usage("the gradient of a DiskEmbedding is dense", "leave it as backward makes it: sparse")
        if self._ranks == "same":
            check_averaged(weight)
        if weight.grad.is_cuda and _torch.cuda.is_current_stream_capturing():
            raise Usage(
                "a step of a DiskEmbedding while a graph is captured: it looks at its gradients first",
                "capture forward and backward, and step outside of the graph",
            )
        grad = weight.grad.coalesce()
        ids, values = grad.indices()[0], grad.values().float()
        if not ids.numel():
            return []
        change, kept = self._change(weight, group, ids, values)
        change = change.to(getattr(_torch, table.dtype))
        good = _torch.isfinite(values).all(1) & _torch.isfinite(change).all(1)
        if not bool(good.all()):
            wrong = int(ids[~good][0])
            raise Usage(
                f"the gradient of row {wrong}, or what the row changes by, is not finite",
                "no row was written: look for inf and NaN in the loss, lower lr, or use torch.amp.GradScaler",
            )
        return [(weight, table, ids, change, kept)]

    def _change(self, weight: Any, group: dict[str, Any], ids: Any, grad: Any) -> tuple[Any, Any]:
        """What is added to the rows ``ids``, which are different ones, and what :meth:`_keep` gets once it is."""
        raise NotImplementedError

    def _keep(self, weight: Any, ids: Any, kept: Any) -> None:
        """Keeps what the next step needs of this one."""


class DiskSGD(_RowOptimizer):
    """``torch.optim.SGD`` without momentum, for the weights of :class:`DiskEmbedding` modules.

    ``params``: ``embedding.parameters()``. ``lr``: the learning rate, which a scheduler of torch may change.
    ``ranks``: with several processes of ``torch.distributed``: ``"same"``: they train the same rows, each in a table of its
    own, and a step is refused unless :func:`average_gradients` came before it; ``"separate"``: each trains others.
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.01, *, ranks: Literal["same", "separate"] = "same") -> None:
        super().__init__(params, {"lr": lr}, ranks)

    def _change(self, weight: Any, group: dict[str, Any], ids: Any, grad: Any) -> tuple[Any, Any]:
        return grad * -float(group["lr"]), None


class DiskAdagrad(_RowOptimizer):
    """Row-wise Adagrad for the weights of :class:`DiskEmbedding` modules: one sum of squares for each row, in memory of
    the weight's device, and in ``state_dict``.

    ``eps`` is added to the root of the sum; the rest is as in :class:`DiskSGD`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.01,
        eps: float = 1e-10,
        *,
        ranks: Literal["same", "separate"] = "same",
    ) -> None:
        super().__init__(params, {"lr": lr, "eps": eps}, ranks)

    def _judge(self, group: dict[str, Any]) -> None:
        super()._judge(group)
        _rate("eps", group["eps"])

    def _change(self, weight: Any, group: dict[str, Any], ids: Any, grad: Any) -> tuple[Any, Any]:
        sums = self.state[weight].get("sums")
        before = 0.0 if sums is None else sums[ids].float()
        after = before + grad.pow(2).mean(1)
        scale = float(group["lr"]) / (after.sqrt() + float(group["eps"]))
        # A row whose gradients were all zero, with an eps of 0.
        return grad * -scale.nan_to_num(0, 0, 0).unsqueeze(1), after

    def _keep(self, weight: Any, ids: Any, kept: Any) -> None:
        sums = self.state[weight].get("sums")
        if sums is None:
            sums = self.state[weight]["sums"] = _torch.zeros(weight.shape[0], device=ids.device)
        sums[ids] = kept.to(sums.dtype)
