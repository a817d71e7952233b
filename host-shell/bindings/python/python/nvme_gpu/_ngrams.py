"""Tokens in GPU memory, and their row ids."""

from __future__ import annotations

from typing import Any

from . import _buffers, _native
from ._errors import Usage
from .compute import _tensors as t


def is_on_gpu(tokens: Any) -> bool:
    """Whether tokens lie in memory of a GPU, as a tensor of torch."""
    return _buffers.is_tensor(tokens) and tokens.device.type == "cuda"


def refuse_on_host(**given: Any) -> None:
    """Raises for an argument that only tokens on a GPU have."""
    for name, value in given.items():
        if value is not None:
            raise Usage(f"{name} is given for tokens on the host", "use before, or tokens on a GPU")


class StepTokens:
    """The tokens of a step, whose sequences lie one after the other."""

    __slots__ = ("gpu", "sequences", "_tokens", "_words")

    def __init__(self, tokens: Any, history: int, histories: Any, starts: Any, slots: Any) -> None:
        if not is_on_gpu(tokens):
            raise Usage("tokens lie in memory of the host", "use a tensor of a GPU")
        found = t.operand(tokens, "tokens", ("int32", "int64"))
        t.shaped(found, "tokens", ("tokens",))
        bounds = None if starts is None else t.operand(starts, "starts", ("int32",))
        kept = None if histories is None else t.operand(histories, "histories", ("int64",))
        places = None if slots is None else t.operand(slots, "slots", ("int64",))
        if bounds is not None:
            t.shaped(bounds, "starts", ("sequences + 1",))
            if bounds.count < 2:
                raise Usage("starts has fewer than two numbers", "use the first token of each sequence, and the end")
        self.sequences = 1 if bounds is None else bounds.count - 1
        if kept is not None:
            t.shaped(kept, "histories", ("histories", history))
        if places is not None:
            t.shaped(places, "slots", (self.sequences,))
        gpu = t.together(tokens=found, starts=bounds, histories=kept, slots=places)
        assert gpu is not None
        self.gpu = gpu
        self._tokens = found
        addresses = tuple(0 if one is None else one.address for one in (bounds, kept, places))
        is_wide = found.dtype == "int64"
        self._words = (
            (found.address, found.count, is_wide, self.sequences),
            (addresses[0], addresses[1], addresses[2]),
            0 if kept is None else kept.shape[0],
        )

    def row_ids(self, hashes: _native.GpuNgrams, heads: int, out: Any) -> Any:
        """Launches the hashing; returns the ids."""
        ids = t.place(out, "out", self._tokens, (self._tokens.count, heads), "int64")
        hashes.row_ids(self._words, ids.address, t.stream(self.gpu))
        return ids.value

    def commit(self, hashes: _native.GpuNgrams, accepted: Any) -> None:
        """Launches the end of the step."""
        count = None if accepted is None else t.operand(accepted, "accepted", ("int32",))
        if count is not None:
            t.shaped(count, "accepted", (self.sequences,))
            t.together(tokens=self._tokens, accepted=count)
        hashes.commit(self._words, 0 if count is None else count.address, t.stream(self.gpu))
