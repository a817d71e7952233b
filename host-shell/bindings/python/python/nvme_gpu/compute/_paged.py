"""Keys and values in pages on a store: attention over them, and the choice of those that matter."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from .. import _arguments, _native
from .._errors import Timeout, Usage
from .._held import Launching, OneProcess
from .._store import Store
from .._table import Table
from . import _tensors as t
from ._matrix import store_of

_F32, _I32 = ("float32",), ("int32",)
_MOST = (1 << 32) - 1


class Keep(NamedTuple):
    """How many pages each head of keys attends to."""

    pages: int
    """All of them at most."""
    first: int = 0
    """So many at the begin of the table are among them in any case."""
    last: int = 0
    """So many at its end."""


class KvPages(Launching):
    """Keys and values in pages on a store: of each page, for each head, ``page_tokens`` keys and then as many values.

    ``offset``: the first byte in the store, a multiple of a block. ``pages``: how many there are. ``kv_heads``: heads of
    keys and values; ``head_dim``: elements of one, a multiple of 8 up to 128. ``page_tokens``: tokens of a page, as many
    as make the part of a head whole blocks of the store, and 32 KiB at most for a GPU. ``dtype``: float16 or bfloat16.

    :attr:`table` has the pages as rows: write them by ``pages.table.scatter(ids, rows)``. Closing the store closes it.

    Raises :class:`Usage` for pages that cannot be, or do not lie inside the store.
    """

    __slots__ = ("_store", "_native", "_table", "_row", "_dtype", "__weakref__")
    _LAUNCHED = "reads of attention"

    def __init__(
        self,
        store: Store,
        offset: int,
        pages: int,
        *,
        kv_heads: int,
        head_dim: int,
        page_tokens: int,
        dtype: Any = "float16",
    ) -> None:
        native = store_of(store)
        self._dtype = t.format_of(dtype)
        if self._dtype not in ("float16", "bfloat16"):
            raise Usage(f"keys and values of {self._dtype}", "use float16 or bfloat16")
        count = t.whole("pages", pages, 1, _MOST)
        place = t.whole("offset", offset, 0, (1 << 63) - 1)
        heads = t.whole("kv_heads", kv_heads, 1, 1 << 16)
        elements = t.whole("head_dim", head_dim, 1, 1 << 16)
        tokens = t.whole("page_tokens", page_tokens, 1, 1 << 20)
        self._store, self._row = store, (heads, 2, tokens, elements)
        shape = (heads, elements, tokens, self._dtype == "bfloat16")
        self._native = _native.KvPages(native, place, count, shape)
        self._table = Table(store, place, (count, *self._row), self._dtype)

    @property
    def store(self) -> Store:
        """The store on which they lie."""
        return self._store

    @property
    def table(self) -> Table:
        """The pages as rows of the shape ``(kv_heads, 2, page_tokens, head_dim)``: keys, then values."""
        return self._table

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self._row[0]

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self._row[3]

    @property
    def page_tokens(self) -> int:
        """Tokens of a page."""
        return self._row[2]

    @property
    def dtype(self) -> str:
        """The name of the dtype of keys and values."""
        return self._dtype

    def __len__(self) -> int:
        return len(self._table)

    def summaries(self, device: Any = None) -> Summaries:
        """Room for the least and the largest of the keys of each page, element by element, from which :meth:`choose` bounds
        products. No page has a summary at first; such a page is chosen before all others.

        ``device``: ``"cpu"`` or ``"cuda"``; None is the GPU of the store, else the CPU. They take
        ``4 * kv_heads * head_dim`` bytes a page.
        """
        on_gpu = self._store.gpu is not None if device is None else _arguments.device(device)[0]
        return Summaries(self, on_gpu)

    def choose(
        self, queries: Any, table: Any, counts: Any, summaries: Summaries, keep: Keep | tuple[int, int, int]
    ) -> tuple[Any, Any]:
        """The pages that matter most to each head of keys: those with the largest bounds of its queries' products, and the
        ones that :class:`Keep` names, in the order of the table.

        ``queries``, ``table``, ``counts``: as for :func:`attention_paged`. Returns a table of the shape
        ``(sequences, kv_heads, pages)`` and counts of the shape ``(sequences, kv_heads)``, both int32, for
        :func:`attention_paged`; places past a count hold anything. A count that is negative or too large is refused, on a GPU
        by a count of -1, which :func:`attention_paged` refuses. On a GPU it is put into the current stream of torch,
        which may be captured. ``summaries`` has to be kept as long as that graph.

        Raises :class:`Usage` for what does not fit.
        """
        kept = tuple(t.whole(f"keep.{name}", one, 0, _MOST) for name, one in zip(Keep._fields, Keep(*keep)))
        if not kept[0] or kept[1] + kept[2] > kept[0]:
            raise Usage(f"{Keep(*kept)}", "choose one page at least, and as many as are kept in any case")
        if not isinstance(summaries, Summaries) or summaries._pages is not self:
            raise Usage("summaries that were not made by these pages", "use pages.summaries()")
        q, pages, number, given = self._given(queries, table, counts)
        gpu = t.together(queries=q, table=pages, counts=number)
        sequences, most = given[0], min(kept[0], given[2])
        shape = (sequences, self.kv_heads, most)
        kept3 = (kept[0], kept[1], kept[2])
        if gpu is None:
            chosen = t.place(None, "chosen", q, shape, "int32")
            many = t.place(None, "counts", q, shape[:2], "int32")
            tables = (pages.view, number.view)
            t.run(self._native.choose(given, q.view, tables, summaries._native, kept3, (chosen.view, many.view)))
            return chosen.value, many.value
        t.same_gpu(self._store._native.gpu_index, (2, gpu), "queries")
        words, at, of_counts = self._native.choice_words(given, kept3)
        room = t.place(None, "workspace", q, (max(words, 1),), "int32")
        addresses = (q.address, pages.address, number.address, room.address)
        self._native.choose_on_gpu(given, addresses, summaries._native, kept3, t.stream(gpu))
        end = at + math.prod(shape)
        found = room.value[of_counts : of_counts + sequences * self.kv_heads].view(shape[:2])
        wrong = t.outside(number, given[2])
        found.masked_fill_(wrong if given[3] else wrong.view(-1, 1), -1)
        return room.value[at:end].view(shape), found

    def __repr__(self) -> str:
        return f"<nvme_gpu.compute.KvPages {len(self)} of {self._row} {self._dtype} of {self._store!r}>"

    def _given(
        self, queries: Any, table: Any, counts: Any
    ) -> tuple[t.Operand, t.Operand, t.Operand, tuple[int, int, int, bool]]:
        """Queries and tables that fit each other."""
        q = t.operand(queries, "queries", _F32)
        t.shaped(q, "queries", ("sequences", "heads", self.head_dim))
        sequences, heads, _ = q.shape
        if not heads or heads % self.kv_heads:
            raise Usage(f"{heads} heads of queries over {self.kv_heads} of keys", "use a multiple")
        pages, number = t.operand(table, "table", _I32), t.operand(counts, "counts", _I32)
        per_head = len(pages.shape) == 3
        lists = (sequences, self.kv_heads) if per_head else (sequences,)
        t.shaped(pages, "table", (*lists, "pages"))
        t.shaped(number, "counts", lists)
        return q, pages, number, (sequences, heads, pages.shape[-1], per_head)


class Summaries(OneProcess):
    """Bounds of the keys of pages, made by :meth:`KvPages.summaries`."""

    __slots__ = ("_pages", "_native", "_on_gpu", "__weakref__")

    def __init__(self, pages: KvPages, on_gpu: bool) -> None:
        self._pages, self._on_gpu = pages, on_gpu
        self._native = _native.Summaries(pages.store._native, pages._native, on_gpu)

    @property
    def pages(self) -> KvPages:
        """Of which pages."""
        return self._pages

    def read(self, first: int = 0, count: int | None = None) -> None:
        """Makes those of ``count`` pages from page ``first`` on (None: up to the last), which threads of the host read from
        the store. Waits for it. Raises :class:`Usage` for pages that are not there, and what reads raise."""
        begin = t.whole("first", first, 0, len(self._pages))
        number = len(self._pages) - begin if count is None else t.whole("count", count, 0, _MOST)
        self._native.read(begin, number)

    def update(self, ids: Any, pages: Any) -> None:
        """Makes those of the pages ``ids``, whose content is ``pages``, as ``pages.table.scatter`` writes it: before or
        after that. On a GPU in the current stream of torch.

        ``ids``: int64 of the shape ``(n,)``, all different. A number of a page that is not there is refused, and nothing is
        made; on a GPU it is left out. ``pages``:
        ``(n, kv_heads, 2, page_tokens, head_dim)`` of the dtype of the pages.
        """
        i = t.operand(ids, "ids", ("int64",))
        t.shaped(i, "ids", ("n",))
        p = t.operand(pages, "pages", (self._pages.dtype, *(("uint16",) if self._pages.dtype == "bfloat16" else ())))
        t.shaped(p, "pages", (i.shape[0], *self._pages._row))
        gpu = t.together(ids=i, pages=p)
        if (gpu is not None) != self._on_gpu:
            raise Usage(f"pages in {p.where}, and summaries elsewhere", "use the device of the summaries")
        if gpu is None:
            t.run(self._native.update(p.view, i.view))
        else:
            t.same_gpu(self._pages.store._native.gpu_index, (2, gpu), "pages")
            self._native.update_on_gpu(p.address, i.address, i.shape[0], t.stream(gpu))

    def tobytes(self) -> bytes:
        """All of them: for each page and head the least of the keys and the largest, element by element. Waits for the
        GPU on which they lie."""
        t.settle(self._pages.store.gpu if self._on_gpu else None)
        return self._native.tobytes()


def attention_paged(
    queries: Any,
    pages: KvPages,
    table: Any,
    counts: Any,
    out: Any = None,
    *,
    tail: Any = None,
    tail_counts: Any = None,
    scale: float | None = None,
    check: t.Check | None = None,
) -> Any:
    """Attention of one query a head over keys and values in pages on a drive, which are read meanwhile.

    ``queries``: float32 of the shape ``(sequences, heads, head_dim)``; ``heads`` is a multiple of the heads of keys.
    ``table``: int32, numbers of pages: ``(sequences, most)``, or ``(sequences, kv_heads, most)`` where each head of keys has
    pages of its own. ``counts``: int32, how many of them count: the shape of the table without its last length.
    ``tail``: a page for each sequence in memory, whose first ``tail_counts`` (int32) tokens come behind those of the table:
    ``(sequences, kv_heads, 2, page_tokens, head_dim)`` of the pages' dtype. ``scale``: None is ``1 / sqrt(head_dim)``.
    ``out``: as the queries, which is returned.

    On the store's GPU it is put into the current stream of torch, which may be captured: what the tables hold when it runs
    counts. In memory of the host threads read and compute. A query without a token is zeros. A head whose pages were not
    all read, or that names a page which is not there, is NaN. A count that is negative or too large is refused, on a GPU by
    NaN for its heads. ``check``: as for :meth:`Matrix.gemv`.

    Raises :class:`Usage` for what does not fit; :class:`Status`, :class:`Timeout` or :class:`Gone` for pages that were not
    read, with ``sequence * kv_heads + head`` as ``row``.
    """
    t.known(check)
    if not isinstance(pages, KvPages):
        raise TypeError(f"pages is of the type {type(pages).__name__}: use nvme_gpu.compute.KvPages")
    q, numbers, how_many, given = pages._given(queries, table, counts)
    kinds = (pages.dtype, "uint16") if pages.dtype == "bfloat16" else (pages.dtype,)
    last = None if tail is None else t.operand(tail, "tail", kinds)
    if (tail is None) != (tail_counts is None):
        raise Usage("tail without tail_counts, or the other way round", "pass both")
    tokens = None if tail_counts is None else t.operand(tail_counts, "tail_counts", _I32)
    if last is not None and tokens is not None:
        t.shaped(last, "tail", (q.shape[0], *pages._row))
        t.shaped(tokens, "tail_counts", (q.shape[0],))
    by = 1 / math.sqrt(pages.head_dim) if scale is None else t.number("scale", scale)
    gpu = t.together(queries=q, table=numbers, counts=how_many, tail=last, tail_counts=tokens)
    y = t.place(out, "out", q, q.shape)
    if gpu is None:
        ends = None if last is None or tokens is None else (last.view, tokens.view)
        t.run(pages._native.attend(given, q.view, (numbers.view, how_many.view), by, y.view, ends))
        return y.value
    t.same_gpu(pages.store._native.gpu_index, (2, gpu), "queries")
    room = t.scratch(q, pages._native.workspace_bytes(given))
    at = (0, 0) if last is None or tokens is None else (last.address, tokens.address)
    addresses = (q.address, numbers.address, how_many.address, *at, y.address, room.address)
    started = pages._native.attend_on_gpu(given, addresses, by, t.stream(gpu))
    wrong = t.outside(how_many, given[2])
    if tokens is not None:
        of_tail = t.outside(tokens, pages.page_tokens)
        wrong = wrong | (of_tail.unsqueeze(1) if given[3] else of_tail)
    if given[3]:
        wrong = wrong.repeat_interleave(given[1] // pages.kv_heads, 1).unsqueeze(2)
    y.value.masked_fill_(wrong if given[3] else wrong.view(-1, 1, 1), math.nan)
    t.checked(started, check)
    return y.value
