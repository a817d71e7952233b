"""Layers of experts: the router's choice, the experts, and how evenly they are used."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Sequence

from .. import _buffers, _native
from .._errors import Timeout, Usage
from .._held import Launching
from .._store import Store
from . import _tensors as t
from ._expert_files import ExpertFiles, ExpertLayout
from ._matrix import store_of

_F32 = ("float32",)
_BIASES = ("the bias of gate", "the bias of up", "the bias of down")
_MOST = (1 << 32) - 1
_MOST_EXPERTS = 4096


class Routed(NamedTuple):
    """What :func:`moe_router` chose."""

    experts: Any
    """int32 of the shape ``(tokens, k)``: numbers of experts, the largest logit first."""
    weights: Any
    """float32 of the same shape: what their results are multiplied by."""
    probabilities: Any
    """float32 of the shape of the logits: the softmax over all experts; None unless asked for."""


class Balance(NamedTuple):
    """How evenly experts are used."""

    most_to_mean: float
    """The largest number of choices of an expert, in parts of the mean: 1 where all are chosen as often."""
    variation: float
    """Standard deviation of the numbers of choices, in parts of the mean."""
    entropy: float
    """Entropy of the choices, in parts of the largest there can be: 1 where all are chosen as often."""
    unused: int
    """Experts that were never chosen."""
    loss: float | None
    """The auxiliary loss of the Switch Transformer without its factor: 1 where all are alike. None without
    probabilities."""


class Counts(NamedTuple):
    """What the cache of :class:`Experts` has counted."""

    hits: int
    """Choices whose expert was in the cache."""
    misses: int
    """Those whose expert was read."""
    evictions: int
    """Experts that made room for another."""
    chosen: list[list[int]]
    """How often each expert of each layer was chosen."""


def moe_router(logits: Any, k: int, *, over_all: bool = False, probabilities: bool = False) -> Routed:
    """The ``k`` experts with the largest logits of each token, of equal ones the first, and their weights.

    ``logits``: float32 of the shape ``(tokens, experts)``, 4,096 experts at most. Weights are the softmax over those that
    were chosen, or with ``over_all`` over all experts. ``probabilities``: whether to return the softmax over all, for
    :func:`moe_load_balance`. On a GPU experts and weights are views of one tensor, with gaps.

    Raises :class:`Usage` for what does not fit.
    """
    x = t.operand(logits, "logits", _F32)
    t.shaped(x, "logits", ("tokens", "experts"))
    tokens, experts = x.shape
    if not 1 <= experts <= _MOST_EXPERTS:
        raise Usage(f"logits of {experts} experts", f"use 1 to {_MOST_EXPERTS}")
    choices = t.whole("k", k, 1, experts)
    shape = (tokens, choices)
    of_all = t.place(None, "probabilities", x, x.shape) if t.flag("probabilities", probabilities) else None
    if x.gpu is None:
        number, weight = t.place(None, "experts", x, shape, "int32"), t.place(None, "weights", x, shape)
        softmax = None if of_all is None else of_all.view
        given = (experts, choices)
        t.run(_native.route_on_cpu(x.view, given, t.flag("over_all", over_all), number.view, weight.view, softmax))
        found = number.value, weight.value
    else:
        chosen = t.place(None, "chosen", x, (*shape, 4), "int32")
        addresses = (x.address, chosen.address, 0 if of_all is None else of_all.address)
        sizes = (tokens, experts, choices)
        t.kernels(_native.Router, x.gpu).route(sizes, t.flag("over_all", over_all), addresses, t.stream(x.gpu))
        found = chosen.value[..., 0], chosen.value.view(_buffers.torch().float32)[..., 2]  # type: ignore[union-attr]
    return Routed(*found, None if of_all is None else of_all.value)


Score = Literal["softmax", "softmax_of_chosen", "sigmoid", "sqrt_softplus"]


def moe_route(
    logits: Any,
    k: int,
    *,
    score: Score = "softmax",
    bias: Any = None,
    groups: int = 1,
    kept_groups: int = 1,
    best_of_group: int = 1,
    normalise: bool = False,
    epsilon: float = 0.0,
    factor: float = 1.0,
    chosen: Any = None,
) -> Routed:
    """The experts of each token by the rule of a published model, and their weights; computed on the CPU.

    ``logits``: float32 of the shape ``(tokens, experts)``. ``score``: of an expert, by which it is selected and weighed:
    ``"softmax"`` over all (Qwen3, Mixtral), ``"softmax_of_chosen"`` (gpt-oss; logits select), ``"sigmoid"`` (DeepSeek-V3,
    GLM, Kimi-K2), ``"sqrt_softplus"`` (DeepSeek-V4). ``bias``: float32, a number for each expert, which is added to the
    scores that select and not to the weights. ``groups``: of consecutive experts; the ``kept_groups`` groups with the
    largest sums of their ``best_of_group`` scores are left. ``normalise``: whether weights are divided by their sum and
    ``epsilon``; ``factor`` multiplies them. ``chosen``: int32 of the shape ``(tokens, k)``, the experts of a table by the
    token's id (DeepSeek-V4's first layers), which are weighed only.

    Of equal scores the expert with the smaller number is selected, of equal groups the first; NaN is below every number. The
    experts of a token come with the largest score first, those of ``chosen`` as they are given.

    Raises :class:`Usage` for what does not fit, and for tensors of a GPU.
    """
    x = _of_host(logits, "logits", "float32")
    t.shaped(x, "logits", ("tokens", "experts"))
    tokens, experts = x.shape
    choices = t.whole("k", k, 1, _MOST_EXPERTS)
    added = None if bias is None else _of_host(bias, "bias", "float32")
    given = None if chosen is None else _of_host(chosen, "chosen", "int32")
    if given is not None:
        t.shaped(given, "chosen", (tokens, choices))
        if added is not None:
            raise Usage("bias and chosen are given", "leave bias out: a table selects")
    of_groups = tuple(
        t.whole(name, one, 1, _MOST_EXPERTS)
        for name, one in (("groups", groups), ("kept_groups", kept_groups), ("best_of_group", best_of_group))
    )
    rule = (
        *(experts, choices, str(score), (of_groups[0], of_groups[1], of_groups[2])),
        *(t.flag("normalise", normalise), t.epsilon_of(epsilon), t.number("factor", factor)),
    )
    number = t.place(None, "experts", x, (tokens, choices), "int32")
    weight = t.place(None, "weights", x, (tokens, choices))
    views = (None if added is None else added.view, None if given is None else given.view)
    t.run(_native.route_by_rule_on_cpu(x.view, rule, *views, number.view, weight.view))
    return Routed(number.value, weight.value, None)


def moe_activation(
    gate: Any,
    up: Any,
    out: Any = None,
    *,
    limit: float | None = None,
    alpha: float | None = None,
    beta: float | None = None,
    linear_beta: float | None = None,
) -> Any:
    """What the matrix down of an expert multiplies: ``silu(gate) * up``, elementwise; computed on the CPU.

    ``limit``: the largest gate, and the largest magnitude of up (DeepSeek-V4). With ``alpha``, too,
    ``(up + 1) * gate * sigmoid(alpha * gate)`` (gpt-oss: 7 and 1.702). ``beta``: SiTU, which is
    ``beta * tanh(gate / beta) * sigmoid(gate) * up``, with ``linear_beta`` and ``linear_beta * tanh(up / linear_beta)`` in
    place of up (Kimi-K3: 4 and 25). ``gate``, ``up``: float32 of one shape. ``out``: as ``gate``, which is returned.

    Raises :class:`Usage` for what does not fit, and for tensors of a GPU.
    """
    x, y = _of_host(gate, "gate", "float32"), _of_host(up, "up", "float32")
    t.shaped(y, "up", x.shape)
    to = t.place(out, "out", x, x.shape)
    t.run(_native.activate_on_cpu(x.view, y.view, _activation(limit, alpha, beta, linear_beta), to.view))
    return to.value


def _activation(
    limit: float | None, alpha: float | None, beta: float | None, linear_beta: float | None
) -> tuple[float | None, float | None, float | None, float | None]:
    """Returns all as numbers. NaN would clamp nothing, and a limit below 0 turns the clamp round."""

    def positive(name: str, value: float | None) -> float | None:
        return None if value is None else t.number(name, value, positive=True)

    return (
        positive("limit", limit),
        None if alpha is None else t.number("alpha", alpha),
        positive("beta", beta),
        positive("linear_beta", linear_beta),
    )


def _of_host(value: Any, what: str, dtype: str) -> t.Operand:
    found = t.operand(value, what, (dtype,))
    if found.gpu is not None:
        raise Usage(f"{what} lies in memory of a GPU", "pass a copy in memory of the host")
    return found


def moe_load_balance(counts: Any, probabilities: Any = None) -> Balance:
    """How evenly experts are used: metrics, which are computed on the CPU.

    ``counts``: how often each expert was chosen, whole numbers: a list, or an array such as
    ``torch.bincount(routed.experts.flatten(), minlength=experts)``. ``probabilities``: float32 of the shape
    ``(tokens, experts)``, of :func:`moe_router`, for the loss. Tensors of a GPU are copied to the host, which waits.

    Raises :class:`Usage` for what does not fit.
    """
    numbers = counts.tolist() if hasattr(counts, "tolist") else list(counts)
    numbers = [t.whole("a count", one, 0, (1 << 63) - 1) for one in numbers]
    if probabilities is None:
        view = _native.View.from_buffer(b"", False)
    else:
        if _buffers.is_tensor(probabilities):
            probabilities = probabilities.detach().cpu().contiguous()
        x = t.operand(probabilities, "probabilities", _F32)
        t.shaped(x, "probabilities", ("tokens", len(numbers)))
        view = x.view
    return Balance(*_native.balance(numbers, view))


class Experts(Launching):
    """Layers of experts on a store: ``down @ activation(gate @ x, up @ x)`` for each of a token's experts, added up by the
    weights of its router. Only those that were chosen are read.

    ``source``: the :class:`ExpertFiles` of a model, with ``layers``, their numbers or names, all by default; or a list of
    :class:`ExpertLayout`. The files say sizes, formats and biases, and may have tensors for each expert or those of all
    merged, rows of gate and up in turns, and scales apart. The cache has MXFP4, and the formats of :func:`gemv`, as they
    are, and others as float32. Or a :class:`Store` with ``layers`` that lie as they are multiplied: for each gate, up and
    down as ``(offset, format)``, the first byte of the matrices of all experts, one after the other, and a format of
    :func:`gemv`. Only then are given: ``width``, elements of a token's vector; ``hidden``, rows of gate and up; both
    multiples of 32, of 64 for ``mxfp4``, of 256 for ``q4_k`` and ``q6_k``; ``experts``, of a layer, 4,096 at most.

    ``choices``: experts of a token. ``over_all``: as for :func:`moe_router`. ``limit``, ``alpha``, ``beta``,
    ``linear_beta``: of the activation, as for :func:`moe_activation`.

    ``cache_bytes``: memory of the store's GPU for experts; None: only memory of the host is computed with. Published files
    take a staging area besides: the bytes of the largest expert in the files for each expert that a step may need.
    ``policy``: which expert makes room for another. ``pinned``: ``(layer, expert)`` that are read now and stay. ``tokens``:
    tokens of a step on the GPU at most. The memory is kept until the process ends, for graphs may use it.

    Raises :class:`Usage` for layers that cannot be, formats with which nothing computes, experts of one layer in different
    formats, and a cache with fewer slots than a step may need.
    """

    __slots__ = ("_store", "_native", "_layers", "_shape", "_tokens", "_published", "__weakref__")
    _LAUNCHED = "steps"

    def __init__(
        self,
        source: Store | ExpertFiles | Sequence[ExpertLayout],
        layers: Sequence[Any] | None = None,
        *,
        choices: int,
        width: int | None = None,
        hidden: int | None = None,
        experts: int | None = None,
        over_all: bool = False,
        limit: float | None = None,
        alpha: float | None = None,
        beta: float | None = None,
        linear_beta: float | None = None,
        cache_bytes: int | None = None,
        policy: Literal["lru", "lfu", "clock"] = "lru",
        pinned: Sequence[tuple[int, int]] = (),
        tokens: int = 1,
    ) -> None:
        cache = None
        self._tokens = t.whole("tokens", tokens, 1, _MOST)
        if cache_bytes is not None:
            kept = [(t.whole("a pinned layer", a, 0, _MOST), t.whole("a pinned expert", b, 0, _MOST)) for a, b in pinned]
            cache = (t.whole("cache_bytes", cache_bytes, 0, (1 << 63) - 1), str(policy), kept, self._tokens)
        numbers = _activation(limit, alpha, beta, linear_beta)
        of_all, count = t.flag("over_all", over_all), t.whole("choices", choices, 1, _MOST)
        given = (width, hidden, experts)
        if isinstance(source, Store):
            self._store, native = source, store_of(source)
            if layers is None or None in given:
                raise Usage("experts on a store without layers or sizes", "give layers, width, hidden and experts")
            places = [_places(number, layer) for number, layer in enumerate(layers)]
            sizes = [t.whole(name, one, 1, _MOST) for name, one in zip(("width", "hidden", "experts"), given)]
            shape = (sizes[0], sizes[1], sizes[2], count)
            self._native = _native.Experts(native, places, shape, of_all, numbers, cache)
        else:
            if given != (None, None, None):
                raise Usage("sizes are given for published files", "leave them out: the files say them")
            found = _layouts(source, layers)
            self._store = found[0].store
            native = store_of(self._store)
            self._native = _native.Experts.of_layouts(
                native, [one._native for one in found], count, of_all, numbers, cache
            )
        *of_layer, self._layers = self._native.shape()
        self._shape = (of_layer[0], of_layer[1], of_layer[2], of_layer[3])
        self._published = not isinstance(source, Store)

    @property
    def store(self) -> Store:
        """The store on which they lie."""
        return self._store

    @property
    def layers(self) -> int:
        """How many layers."""
        return self._layers

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Elements of a token's vector, rows of gate and up, experts of a layer, experts of a token."""
        return self._shape

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot of the cache: of the largest expert."""
        return self._native.sizes()[0]

    @property
    def slots(self) -> int:
        """Experts that the cache holds at most; 0 without one."""
        return self._native.sizes()[1]

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory of the GPU that it holds."""
        return self._native.sizes()[2]

    def compute(
        self,
        layer: int,
        logits: Any,
        x: Any,
        out: Any = None,
        *,
        chosen: tuple[Any, Any] | None = None,
        accumulate: bool = False,
        biases: tuple[Any, Any, Any] | None = None,
        probabilities: Any = None,
        check: t.Check | None = None,
    ) -> Any:
        """The results of a layer's experts, added up for each token.

        ``layer``: its place among the layers of these experts. ``logits``: float32 of the shape ``(tokens, experts)``, what
        the layer's router says; or None with ``chosen``, of published files: numbers of experts, int32, and their weights,
        float32, both of the shape ``(tokens, choices)``, as the model's own router chose them. ``x``: ``(tokens, width)``.
        ``out``: as ``x``, which is returned; with ``accumulate`` results are added to it. ``biases``: of gate, up and down,
        float32, a row for each expert; those of published files are added without. ``probabilities``: as the logits, gets
        the softmax over all experts.

        On the store's GPU the choice, the reads of experts that are not in the cache, and the products are put into the
        current stream of torch, which may be captured. Steps of one cache follow one another: in one stream, or ordered by
        the program. A token with an expert that was not read is NaN, and the next step that chooses the expert reads it
        again; a token whose number is no expert is NaN, too. In memory of the host threads read each expert that was chosen;
        a call that raises leaves ``out`` as it was where it is refused, or with ``accumulate``, else it is NaN.
        ``check``: as for :meth:`Matrix.gemv`.

        Raises :class:`Usage` for what does not fit; :class:`Status`, :class:`Timeout` or :class:`Gone` for an expert that
        was not read.
        """
        t.known(check)
        width, hidden, experts, choices = self._shape
        which = t.whole("layer", layer, 0, self._layers - 1)
        v = t.operand(x, "x", _F32)
        t.shaped(v, "x", ("tokens", width))
        if accumulate and out is None:
            raise Usage("accumulate without out", "pass the sums so far as out")
        adds = t.flag("accumulate", accumulate)
        if chosen is not None:
            if logits is not None or biases is not None or probabilities is not None or not self._published:
                raise Usage(
                    "chosen is given with logits, biases or probabilities, or for experts that are not published files",
                    "pass None for the logits, and nothing else of a router",
                )
            return self._compute_chosen(which, chosen, v, out, adds, check)
        r = t.operand(logits, "logits", _F32)
        t.shaped(r, "logits", (v.shape[0], experts))
        of_matrices = self._biases(biases, (hidden, hidden, width))
        gpu = t.together(logits=r, x=v, **dict(zip(_BIASES, of_matrices)))
        y = t.place(out, "out", v, v.shape)
        of_all = None if probabilities is None else t.place(probabilities, "probabilities", r, r.shape)
        if gpu is None:
            views = (of_matrices[0].view, of_matrices[1].view, of_matrices[2].view) if of_matrices else None
            t.run(self._native.compute(which, r.view, v.view, y.view, adds, views))
            if of_all is not None:
                _softmax(r, of_all)
            return y.value
        self._fits(gpu, v)
        addresses = (r.address, v.address, y.address, 0 if of_all is None else of_all.address)
        given, offsets = (which, v.shape[0]), [bias.address for bias in of_matrices] or [0, 0, 0]
        t.checked(self._native.step_on_gpu(given, addresses, None, offsets, adds, t.stream(gpu)), check)
        return y.value

    def _compute_chosen(
        self, which: int, chosen: tuple[Any, Any], v: t.Operand, out: Any, adds: bool, check: t.Check | None
    ) -> Any:
        """The results for experts that a router of the program chose."""
        given = list(chosen)
        if len(given) != 2:
            raise Usage(f"{len(given)} arrays are chosen", "give numbers of experts and their weights")
        shape = (v.shape[0], self._shape[3])
        numbers, weights = t.operand(given[0], "chosen", ("int32",)), t.operand(given[1], "weights", _F32)
        t.shaped(numbers, "chosen", shape)
        t.shaped(weights, "weights", shape)
        gpu = t.together(chosen=numbers, weights=weights, x=v)
        y = t.place(out, "out", v, v.shape)
        if gpu is None:
            t.run(self._native.compute_chosen(which, (numbers.view, weights.view), v.view, y.view, adds))
            return y.value
        self._fits(gpu, v)
        addresses, of_router = (0, v.address, y.address, 0), (numbers.address, weights.address)
        stream = t.stream(gpu)
        t.checked(self._native.step_on_gpu((which, v.shape[0]), addresses, of_router, [0, 0, 0], adds, stream), check)
        return y.value

    def _fits(self, gpu: int, v: t.Operand) -> None:
        """Raises :class:`Usage` for another GPU than the store's, and too many tokens."""
        t.same_gpu(self._store._native.gpu_index, (2, gpu), "x")
        if v.shape[0] > self._tokens:
            raise Usage(f"a step of {v.shape[0]} tokens", f"use {self._tokens} at most, or a larger tokens=")

    def _biases(self, biases: tuple[Any, Any, Any] | None, rows: tuple[int, int, int]) -> list[t.Operand]:
        """The biases of gate, up and down as operands, or none."""
        if biases is None:
            return []
        given = list(biases)
        if len(given) != 3:
            raise Usage(f"{len(given)} biases are given", "give those of gate, up and down")
        found = [t.operand(bias, name, _F32) for name, bias in zip(_BIASES, given)]
        for name, bias, count in zip(_BIASES, found, rows):
            t.shaped(bias, name, (self._shape[2], count))
        return found

    def counts(self) -> Counts:
        """What the cache on the GPU has counted. Waits for the GPU. Raises :class:`Usage` without a cache."""
        t.settle(self._store.gpu)
        return Counts(*self._native.counts())

    def __repr__(self) -> str:
        width, hidden, experts, choices = self._shape
        return f"<nvme_gpu.compute.Experts {self._layers} layers, {choices} of {experts} of {width} x {hidden}>"


def _layouts(source: Any, layers: Sequence[int | str] | None) -> list[ExpertLayout]:
    """The layouts of these layers, or those that ``source`` lists."""
    if isinstance(source, ExpertFiles):
        found = [source.layout(layer) for layer in (source.layers if layers is None else layers)]
    elif layers is not None:
        raise Usage("layers are given beside a list of layouts", "leave them out, or pass the files")
    else:
        found = [source] if isinstance(source, ExpertLayout) else list(source)
    if not found:
        raise Usage("there are no layers of experts", "name files with experts, or one layer or more")
    if not all(isinstance(one, ExpertLayout) for one in found):
        raise TypeError("experts are made of a Store, ExpertFiles, or a list of ExpertLayout")
    if any(one.store is not found[0].store for one in found):
        raise Usage("the layers lie on several stores", "open their files together")
    return found


def _places(number: int, layer: Any) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    matrices = list(layer)
    if len(matrices) != 3:
        raise Usage(f"layer {number} has {len(matrices)} matrices", "give gate, up and down")
    found = [
        (t.whole("an offset", offset, 0, (1 << 63) - 1), t.FORMATS[t.format_of(format)][0]) for offset, format in matrices
    ]
    return found[0], found[1], found[2]


def _softmax(logits: t.Operand, out: t.Operand) -> None:
    """The softmax of each token, in memory of the host."""
    shape = (logits.shape[0], 1)
    number, weight = t.place(None, "experts", logits, shape, "int32"), t.place(None, "weights", logits, shape)
    given = (logits.shape[1], 1)
    t.run(_native.route_on_cpu(logits.view, given, False, number.view, weight.view, out.view))


def moe_experts_compute(
    experts: Experts,
    layer: int,
    logits: Any,
    x: Any,
    out: Any = None,
    *,
    chosen: tuple[Any, Any] | None = None,
    accumulate: bool = False,
    biases: tuple[Any, Any, Any] | None = None,
    probabilities: Any = None,
    check: t.Check | None = None,
) -> Any:
    """:meth:`Experts.compute` of ``experts``."""
    if not isinstance(experts, Experts):
        raise TypeError(f"experts is of the type {type(experts).__name__}: use nvme_gpu.compute.Experts")
    given = {"chosen": chosen, "accumulate": accumulate, "biases": biases, "probabilities": probabilities}
    return experts.compute(layer, logits, x, out, check=check, **given)
