"""Optimizers that write the rows of embeddings on NVMe."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import torch as _torch

from ._disk_embedding import table_of
from ._errors import Usage
from ._gradients import check_averaged, check_rows
from ._operations import OPS, state
from ._table import Table


def _rate(name: str, value: Any) -> float:
    number = math.nan
    if not isinstance(value, bool) and hasattr(value, "__float__"):
        number = float(value)
    if not 0 <= number < math.inf:
        raise Usage(f"{name} is {value!r}", "use a finite number from 0 on")
    return number


# What schedulers and newer versions of torch add to a group of parameters.
_OF_TORCH = {"params", "initial_lr", "param_names"}


def _has_groups(groups: Any) -> bool:
    """Whether these are groups of weights as a state of torch's optimizers has them."""
    if not isinstance(groups, (list, tuple)) or not all(isinstance(group, dict) for group in groups):
        return False
    return all(isinstance(group.get("params"), (list, tuple)) for group in groups)


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

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from what ``state_dict()`` of an optimizer of this kind returned: nothing is converted.

        Raises :class:`Usage` for what this optimizer does not know, and for numbers that would not train a row as they
        did there: nothing has changed then.
        """
        kept = self._judged(state_dict)
        super().load_state_dict(state_dict)
        # torch converts the state of a weight to the dtype of the weight.
        for weight, one in kept:
            for name, value in one.items():
                self.state[weight][name] = value.detach().to(device=weight.device, copy=True)

    def _judged(self, state_dict: Any) -> list[tuple[Any, dict[str, Any]]]:
        """The state of each weight."""
        if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= state_dict.keys():
            raise Usage("this is no state of an optimizer", "pass what state_dict() returned")
        groups, mine = state_dict["param_groups"], self.param_groups
        states = state_dict["state"]
        if not _has_groups(groups) or not isinstance(states, dict) or not all(isinstance(one, dict) for one in states.values()):
            raise Usage("this is no state of an optimizer", "pass what state_dict() returned")
        sizes, own = ([len(group["params"]) for group in one] for one in (groups, mine))
        if sizes != own:
            raise Usage(f"the state is of groups of {sizes} weights, and this optimizer has {own}", "load it into the same")
        weights: dict[Any, Any] = {}
        for group, of_mine in zip(groups, mine):
            unknown = sorted(group.keys() - of_mine.keys() - _OF_TORCH)
            if unknown:
                raise Usage(f"the state has {unknown[0]!r}, which {type(self).__name__} does not know", "load it elsewhere")
            self._judge({**of_mine, **group, "params": of_mine["params"]})
            weights.update(zip(group["params"], of_mine["params"]))
        kept = []
        for key, one in states.items():
            if key not in weights:
                raise Usage(f"the state has a weight {key!r}, which none of its groups has", "pass what state_dict() returned")
            for name, value in one.items():
                self._judge_state(weights[key], name, value)
            kept.append((weights[key], one))
        return kept

    def _judge_state(self, weight: Any, name: str, value: Any) -> None:
        """Refuses what a weight's state cannot be."""
        raise Usage(f"the state has {name!r} of a weight, which {type(self).__name__} does not keep", "load it elsewhere")

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
        check_rows(weight.grad)
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
        self._judge_kept(ids, kept)
        return [(weight, table, ids, change, kept)]

    def _change(self, weight: Any, group: dict[str, Any], ids: Any, grad: Any) -> tuple[Any, Any]:
        """What is added to the rows ``ids``, which are different ones, and what :meth:`_keep` gets once it is."""
        raise NotImplementedError

    def _judge_kept(self, ids: Any, kept: Any) -> None:
        """Refuses what the next step could not go on from."""

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
    the weight's device, and in ``state_dict``, in float32 whatever the weight's dtype is.

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
        if sums is not None:
            self._judge_sums(weight, sums)
        before = 0.0 if sums is None else sums[ids]
        after = before + grad.pow(2).mean(1)
        scale = float(group["lr"]) / (after.sqrt() + float(group["eps"]))
        # A row whose gradients were all zero, with an eps of 0.
        return grad * -scale.nan_to_num(0, 0, 0).unsqueeze(1), after

    @staticmethod
    def _judge_sums(weight: Any, sums: Any) -> None:
        rows = int(weight.shape[0])
        if not isinstance(sums, _torch.Tensor) or sums.dtype is not _torch.float32 or tuple(sums.shape) != (rows,):
            shown = f"{sums.dtype} of the shape {tuple(sums.shape)}" if isinstance(sums, _torch.Tensor) else type(sums).__name__
            raise Usage(f"the sums of squares are {shown}", f"use torch.float32 of the shape ({rows},)")

    def _judge_state(self, weight: Any, name: str, value: Any) -> None:
        if name != "sums":
            super()._judge_state(weight, name, value)
        self._judge_sums(weight, value)
        good = _torch.isfinite(value) & (value >= 0)
        if not bool(good.all()):
            wrong = int((~good).nonzero()[0])
            raise Usage(
                f"the sum of squares of row {wrong} is {float(value[wrong])}, which no gradients add up to",
                "load a state from before the gradients overflowed",
            )

    def _judge_kept(self, ids: Any, kept: Any) -> None:
        good = _torch.isfinite(kept)
        if not bool(good.all()):
            wrong = int(ids[~good][0])
            raise Usage(
                f"the sum of squares of row {wrong} is not finite, and the row would change no more",
                "no row was written: clip gradients, or load a state from before they overflowed",
            )

    def _keep(self, weight: Any, ids: Any, kept: Any) -> None:
        sums = self.state[weight].get("sums")
        if sums is None:
            sums = self.state[weight]["sums"] = _torch.zeros(weight.shape[0], device=ids.device)
        sums[ids] = kept
