"""A layer of experts in files, computed by the products of the module of transformers in whose place it stands."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import closing
from typing import Any

from ._errors import Usage
from ._expert_blocks import ExpertBlock, check_implementation
from ._expert_cache import ExpertBank, ExpertCache, OnReadError


class ExpertLayer:
    """The experts of a layer: reads what the router chose, and multiplies with it. Used under the lock of the cache."""

    def __init__(
        self,
        torch: Any,
        block: ExpertBlock,
        bank: ExpertBank,
        cache: ExpertCache,
        check_open: Callable[[], None],
        on_error: OnReadError,
    ) -> None:
        self._torch, self.name, self.experts, self.bank, self.cache = torch, block.name, block.experts, bank, cache
        self.inner, self.router, self._check_open, self._on_error = block.module, block.router, check_open, on_error
        self.following: ExpertLayer | None = None
        """The next layer, whose experts are guessed."""

    def __call__(self, x: Any, index: Any, weights: Any) -> Any:
        """The results for states ``x``, ``(tokens, width)``, of the experts ``index`` with ``weights``, ``(tokens, k)``."""
        self._check(x, index, weights)
        with self._torch.no_grad(), self.cache.lock:
            # Under the lock: another thread may close the stream while this one waits for it.
            self._check_open()
            return self._computed(x, index, weights)

    def _check(self, x: Any, index: Any, weights: Any) -> None:
        # Weights of another shape, as one for each expert, would be those of other pairs.
        if x.dim() != 2 or index.dim() != 2 or index.shape != weights.shape or len(index) != len(x):
            shapes = ", ".join(str(tuple(one.shape)) for one in (x, index, weights))
            raise Usage(
                f"{self.name} was given states, experts and weights of the shapes {shapes}",
                "use (tokens, width), (tokens, k) and (tokens, k), as transformers 5.19 does",
            )
        if self._torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad):
            raise Usage(f"{self.name} computes no gradient", "call the model under torch.no_grad()")
        slots = self.cache.slots
        if (x.device, x.dtype) != (slots.device, slots.dtype):
            raise Usage(
                f"{self.name} has a cache of {slots.dtype} on {slots.device}, and its input is {x.dtype} on {x.device}",
                "move and convert the model before its experts are streamed",
            )

    def _computed(self, x: Any, index: Any, weights: Any) -> Any:
        torch = self._torch
        ids, order = torch.sort(index.reshape(-1), stable=True)
        found, counts = torch.unique_consecutive(ids, return_counts=True)
        wanted, sizes = found.tolist(), counts.tolist()
        if any(not 0 <= one < self.experts for one in wanted):
            raise Usage(f"{self.name} was asked for experts {wanted}", f"use numbers below {self.experts}")
        tokens = torch.div(order, index.shape[-1], rounding_mode="floor")
        segments, begin = {}, 0
        for expert, size in zip(wanted, sizes):
            segments[expert] = (begin, begin + size)
            begin += size
        rows = x.new_empty((begin, x.shape[-1]))
        is_eager = check_implementation(self.name, self.inner) == "eager"
        guess = functools.partial(self._guess, self.following, x) if self.following is not None else None
        with closing(self.cache.pieces(self.bank, wanted, self._on_error, guess)) as pieces:
            for piece in pieces:
                self._multiply(x, tokens, rows, segments, piece, is_eager)
        factors = weights.reshape(-1)[order].unsqueeze(-1)
        if is_eager:
            return self._added(x, tokens, rows, factors, segments)
        return (rows * factors)[torch.argsort(order)].view(*index.shape, x.shape[-1]).sum(dim=1).to(x.dtype)

    def _added(self, x: Any, tokens: Any, rows: Any, factors: Any, segments: dict[int, tuple[int, int]]) -> Any:
        """Sums in the order of the experts, which the eager products have, too."""
        out = self._torch.zeros_like(x)
        for begin, end in segments.values():
            out.index_add_(0, tokens[begin:end], (rows[begin:end] * factors[begin:end]).to(out.dtype))
        return out

    def _multiply(
        self,
        x: Any,
        tokens: Any,
        rows: Any,
        segments: dict[int, tuple[int, int]],
        piece: dict[int, int | None],
        is_eager: bool,
    ) -> None:
        """Writes the results of a piece to the rows of the pairs of tokens and experts that chose it."""
        torch = self._torch
        there = {expert: slot for expert, slot in piece.items() if slot is not None}
        for expert in piece.keys() - there.keys():
            begin, end = segments[expert]
            rows[begin:end] = float("nan")
        if is_eager:
            # One at a time: the eager products make masks of tokens times experts, which slots would make large.
            for expert, slot in there.items():
                begin, end = segments[expert]
                zeros = torch.zeros(end - begin, dtype=torch.long, device=x.device)
                rows[begin:end] = self._products(x[tokens[begin:end]], zeros, slice(slot, slot + 1))
        elif there:
            places = torch.cat([torch.arange(*segments[expert], device=x.device) for expert in there])
            spans = {slot: segments[expert][1] - segments[expert][0] for expert, slot in there.items()}
            slots = torch.cat([places.new_full((length,), slot) for slot, length in spans.items()])
            rows[places] = self._products(x[tokens[places]], slots, slice(None))

    def _products(self, x: Any, slots: Any, of: slice) -> Any:
        """The model's own products, with the slots in place of its parameters, and a weight of 1 for each row."""
        inner, tensors = self.inner, {name: one[of] for name, one in self.cache.slots.tensors.items()}
        inner.__dict__.update(tensors, num_experts=len(tensors["down_proj"]))
        try:
            return inner(x, slots.unsqueeze(-1), x.new_ones((len(x), 1)))
        finally:
            for name in tensors:
                del inner.__dict__[name]
            inner.num_experts = self.experts

    def _guess(self, following: ExpertLayer, x: Any) -> None:
        """Has the experts read that the next layer's router chooses for this layer's input."""
        if following.router is None or following.cache.slots.device != x.device:
            return
        # Not by the module's call: hooks that collect logits would see them twice.
        chosen = type(following.router).forward(following.router, x)[2].reshape(-1)
        times = self._torch.bincount(chosen, minlength=following.experts)
        best = self._torch.sort(times, descending=True, stable=True)
        likely = [expert for expert, count in zip(best.indices.tolist(), best.values.tolist()) if count]
        following.cache.guess(following.bank, likely)


@functools.cache
def module_class() -> Any:
    """The class of modules that stand where experts stood; made late, as torch is imported late."""
    import torch

    class StreamedExperts(torch.nn.Module):
        """The experts of a layer in files. Called as the experts of transformers: with states of the shape ``(tokens,
        width)``, and numbers and weights of the chosen experts, ``(tokens, k)``; returns as the states."""

        def __init__(self, layer: ExpertLayer) -> None:
            super().__init__()
            self.num_experts = layer.experts
            self.layer = layer

        def __reduce_ex__(self, protocol: Any) -> Any:
            # What copies and pickles a model asks this, too.
            raise Usage(
                f"{self.layer.name} is read from files and cannot be copied or pickled",
                "load the model once more where it is used",
            )

        def _save_to_state_dict(self, *_: Any, **__: Any) -> None:
            raise Usage(f"the weights of {self.layer.name} lie in files", "copy the files of the checkpoint instead")

        def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
            return self.layer(hidden_states, top_k_index, top_k_weights)

    return StreamedExperts
