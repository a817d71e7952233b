"""Tables: rows of one size and dtype in a store, by ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from . import _arguments, _buffers, _dtypes, _gathers, _indices, _native, _prefetch, _scales
from ._errors import Timeout, Usage, in_short
from ._gathers import Check, OnError
from ._held import OneProcess
from ._native import Array, View
from ._prefetch import Prefetch

if TYPE_CHECKING:
    from ._store import Store


class Table(OneProcess):
    """Rows of one size and dtype in a store. Made by :meth:`Store.table`. Any number of threads may use it.

    ``table[ids]`` is ``table.gather(ids)``, and takes indices as numpy has them: a number from the end (``table[-1]``), a
    mask with one truth for each row, ids of any whole dtype, and arrays with gaps. In arrays a negative id stays an error,
    since it is padding in most of them.
    """

    __slots__ = (
        "_native",
        "_store",
        "_shape",
        "_row",
        "_stored",
        "_stored_bytes",
        "_dtype",
        "_size",
        "_row_bytes",
        "_on_error",
        "_others",
        "_torch",
        "__weakref__",
    )

    def __init__(
        self,
        store: Store,
        offset: int,
        shape: Any,
        dtype: Any,
        result: _scales.RowConversion = _scales.RowConversion(),
        ranges: list[tuple[int, int]] | None = None,
    ) -> None:
        if not isinstance(getattr(store, "_native", None), _native.Store):
            raise TypeError("store is not a nvme_gpu.Store: use store.table(...)")
        offset = _arguments.whole("offset", offset, 0, (1 << 64) - 1)
        if isinstance(shape, (str, bytes)) or not hasattr(shape, "__iter__"):
            raise TypeError("shape is not a tuple: pass (rows, *row)")
        lengths = tuple(_arguments.whole("a length of the shape", one, 0, (1 << 63) - 1) for one in shape)
        if not lengths:
            raise Usage("the shape has no length", "pass (rows, *row)")
        self._store = store
        self._shape, self._row = lengths, lengths[1:]
        elements = 1
        for one in self._row:
            elements *= one
        is_blocks = isinstance(dtype, str) and dtype in _dtypes.BLOCKS
        if is_blocks:
            self._stored = str(dtype)
            block, block_bytes = _dtypes.BLOCKS[dtype]
            if elements % block:
                raise Usage(f"rows of {elements} elements of {dtype}", f"use a multiple of {block}")
            self._stored_bytes = elements // block * block_bytes
        else:
            self._stored = _dtypes.name_of(dtype)
            self._stored_bytes = elements * _dtypes.SIZES[self._stored][0]
        if max(self._stored_bytes, 4 * elements) >= 1 << 63:
            raise Usage(f"rows of {self._stored_bytes} bytes", "use a smaller shape")
        self._native = _native.Table(store._native, offset, lengths[0], self._stored_bytes, ranges)
        self._dtype = "float16" if is_blocks else self._stored
        if result.to is not None:
            self._dtype = _dtypes.name_of(result.to)
        if is_blocks or self._dtype != self._stored:
            self._native = self._native.widened(self._stored, self._dtype)
        if result.has_scales:
            self._native = _scales.scaled(store, self._native, (lengths[0], elements), result)
        self._size = _dtypes.SIZES[self._dtype][0]
        self._row_bytes = elements * self._size
        self._others: dict[str, Table] = {}
        self._torch: Any = None
        self._on_error: OnError = "raise"
        if result.on_error != "raise":
            self._native = self._counting(result.on_error)
            self._on_error = result.on_error

    @property
    def store(self) -> Store:
        """The store in which it lies."""
        return self._store

    @property
    def shape(self) -> tuple[int, ...]:
        """``(rows, *row)``."""
        return self._shape

    @property
    def dtype(self) -> str:
        """The name of the dtype of gathered rows."""
        return self._dtype

    @property
    def stored_dtype(self) -> str:
        """The name of the dtype of rows in the store."""
        return self._stored

    @property
    def on_error(self) -> OnError:
        """What becomes of rows that a gather cannot read: ``"raise"``, ``"zero"`` or ``"nan"``."""
        return self._on_error

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in the store."""
        return self._stored_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all rows in the store."""
        return self._stored_bytes * self._shape[0]

    @property
    def ndim(self) -> int:
        """Number of lengths of the shape."""
        return len(self._shape)

    @property
    def size(self) -> int:
        """Number of elements of all rows."""
        return self._shape[0] * (self._row_bytes // self._size)

    def __len__(self) -> int:
        return self._shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """All rows, read to an array of numpy."""
        if copy is False:
            raise ValueError("rows on a drive are copied to memory: pass copy=None")
        rows = self.gather(slice(None))
        numpy = _buffers.numpy()
        return rows if numpy is None else numpy.asarray(rows, dtype=dtype)

    def __getitem__(self, ids: Any) -> Any:
        return self.gather(_indices.ids_of(ids, self._shape[0]))

    def __setitem__(self, ids: Any, rows: Any) -> None:
        self.scatter(_indices.ids_of(ids, self._shape[0]), rows)

    def __iter__(self) -> NoReturn:
        raise TypeError("a table is not iterated over row by row: gather many rows at a time")

    def __repr__(self) -> str:
        return f"<nvme_gpu.Table {self._shape} {self._dtype} of {self._store!r}>"

    def gather(
        self,
        ids: Any,
        out: Any = None,
        dtype: Any = None,
        stream: Any = None,
        check: Check | None = None,
        status: Any = None,
    ) -> Any:
        """Rows by ids: ``out[i] = table[ids[i]]``, of the shape ``(*ids.shape, *row)``.

        ``ids``: int32 or int64, of any shape: a number, a slice, lists, or an array. Where they lie decides who
        gathers: the CPU for memory of the host, the GPU of the store for its memory. The result comes from the
        library of the ids: a tensor of torch for tensors; for others an array of numpy, or :class:`Array` (with
        ``__dlpack__``) on a GPU and without numpy.

        An id that is negative or too large gives a row of zeros and an error, which is an :class:`IndexError`, too. So does a row that could not be read. A table
        with ``on_error="zero"`` or ``"nan"`` raises none of these: ``status`` and ``failed_rows`` of :meth:`Store.stats` tell
        of them. Other errors, such as a closed store, it does raise.

        ``out``: contiguous memory of the table's dtype on the same device, which is filled and returned.
        ``dtype``: what the rows are converted to: float16, bfloat16 and float8 to float16 or float32 on the way, as
        ``to`` of :meth:`Store.table` does; else by the library of the result.
        ``stream``: on a GPU, where the gather is put: None is the current stream of torch where torch uses the GPU,
        else the default one; a number, or a stream of torch, cupy, pycuda, numba or cuda.core. It may be captured.
        ``check``: ``"now"`` waits and raises; ``"later"`` leaves errors to :meth:`check` and to the next gather.
        None is ``"now"`` on the CPU and ``"later"`` on a GPU; a captured gather is always ``"later"``.
        ``status``: int32 for each id on the same device: 0, an NVMe status (SCT << 8 | SC), or a number below 0.

        Raises :class:`Usage`, :class:`Status`, :class:`Timeout` or :class:`Gone`, with ``row`` and ``id``. With
        ``out`` the other rows are right then.
        """
        _gathers.known_check(check)
        if dtype is not None and out is None and (wide := self._widened(dtype)) is not None:
            return wide.gather(ids, None, None, stream, check, status)
        return _gathers.gather(self, ids, out, dtype, stream, check, status)

    def prefetch(self, ids: Any, stream: Any = None) -> Prefetch:
        """Begins ``table[ids]``: submits the reads of the rows, and returns at once. :meth:`Prefetch.result` gives the rows.

        ``ids`` and ``stream`` are those of :meth:`gather`. In memory of a GPU a launch in the stream submits the reads and
        leaves the GPU: what the program puts into the stream next runs while the drive works. That is for few rows (768
        rows of 256 bytes, or 192 KiB) of one drive, of multiples of 4 bytes; ``result`` reads others itself, and those
        that are begun while others hold the queues (``late_rows`` of :meth:`Store.stats`). The ids stay as they are until
        then. Ids in memory of the host are gathered by ``result``.
        """
        return _prefetch.of_ids(self, ids, stream)

    def scatter(
        self,
        ids: Any,
        rows: Any,
        *,
        unique: bool = False,
        stream: Any = None,
        check: Check | None = None,
        status: Any = None,
    ) -> None:
        """Writes rows by ids: ``table[ids[i]] = rows[i]``.

        ``ids``: as in :meth:`gather`. ``rows``: memory of the table's dtype and the shape ``(*ids.shape, *row)`` on the
        same device; with ids in memory of the host also lists of numbers, where numpy is installed. With memory of the
        host this waits. With memory of the GPU it is put into ``stream``: gathers that come after it in the stream see
        the rows. The GPU writes them itself where offset and length of the table's rows are multiples of a block of one
        drive; a host thread sends the commands for all others.

        The GPU takes no lock: two writers of one row are ordered by a stream or by waiting. A call on memory of the host
        that writes a part of such a row at the same time, or adds to it, may put the rest of the row back to what it
        was.

        Of several rows with the same id the last is written; with ``unique`` that is an error, and nothing is written.
        Bytes beside the rows do not change. ``check``, ``status``: as in :meth:`gather`.

        Raises as :meth:`gather`, and :class:`Usage` for a store that is for reading only.
        """
        self._change(ids, rows, status, stream, check, _arguments.flag("unique", unique), False)

    def scatter_add(
        self, ids: Any, rows: Any, *, stream: Any = None, check: Check | None = None, status: Any = None
    ) -> None:
        """Adds rows by ids: ``table[ids[i]] += rows[i]``; otherwise as :meth:`scatter`.

        Sums are made in 32 bits and rounded once; rows of the same id are summed. The dtype is float32, float16,
        bfloat16 or int32. Additions of several threads through one store are all counted.

        Raises as :meth:`scatter`.
        """
        self._change(ids, rows, status, stream, check, False, True)

    def check(self, timeout: float | None = None) -> None:
        """Waits for the gathers on the GPU that came before, and raises the first failure that was not raised yet.

        Of captured gathers it looks at their last run that has ended. ``timeout``: seconds for all of them; None is, for
        each, what :meth:`Pending.result` says.

        Raises :class:`Timeout` when they have not ended in time, else what :meth:`gather` raises.
        """
        if not self._native.check(timeout):
            raise Timeout(
                f"gathers of this table have not ended {_arguments.within(timeout)}",
                "wait for what their streams do before them, or longer",
                "unfinished",
            )

    def _widened(self, dtype: Any) -> Table | None:
        """This table with elements that come out as ``dtype``, where a gather makes that on the way."""
        name = _dtypes.name_of(dtype)
        if name == self._dtype or self._stored != self._dtype:
            return None
        if self._stored not in _dtypes.WIDENED or name not in _dtypes.WIDE:
            return None
        wide = self._others.get(name)
        if wide is None:
            wide = self._others[name] = self._with(self._native.widened(self._stored, name), name, self._on_error)
        return wide

    def cached(self, nbytes: int) -> Table:
        """These rows with a cache of ``nbytes`` bytes in memory of the store's GPU, for gathers by the GPU whose rows come
        again: a row that is there is not read from the drive. Any write through the store makes all of it stale. Rows are
        kept as they are stored, before they are converted; a row that lies in two ranges of a lookup table is not kept. The
        cache lives as long as a table with it.

        Raises :class:`Usage` for a store without a GPU that submits reads of one drive, and for less than a set of rows;
        :class:`NvmeGpuError` without memory.
        """
        native = self._native.cached(_arguments.whole("nbytes", nbytes, 1, (1 << 62) - 1))
        return self._with(native, self._dtype, self._on_error)

    def with_on_error(self, on_error: OnError) -> Table:
        """These rows with another ``on_error``, as :meth:`Store.table` has it. :meth:`check` of either table raises for both.

        Raises :class:`Usage` for ``"nan"`` and rows that come out as integers.
        """
        if on_error == self._on_error:
            return self
        return self._with(self._counting(on_error), self._dtype, on_error)

    def _counting(self, on_error: OnError) -> _native.Table:
        """The native table for a known ``on_error``."""
        if on_error not in ("raise", "zero", "nan"):
            raise Usage(f"on_error is {on_error!r}", "use 'raise', 'zero' or 'nan'")
        is_error, nan_of = on_error == "raise", self._stored if on_error == "nan" else None
        try:
            return self._native.with_failed_rows(is_error, nan_of)
        except Usage as error:
            raise Usage(f"on_error is 'nan': {error.cause}", "use 'zero' or 'raise'") from None

    def _with(self, native: _native.Table, dtype: str, on_error: OnError) -> Table:
        """These rows by another native table, which makes ``dtype`` of them."""
        made = object.__new__(Table)
        made._native, made._on_error = native, on_error
        made._store, made._shape, made._row = self._store, self._shape, self._row
        made._stored, made._stored_bytes, made._dtype = self._stored, self._stored_bytes, dtype
        made._size = _dtypes.SIZES[dtype][0]
        made._row_bytes = self._row_bytes // self._size * made._size
        made._others, made._torch = {}, None
        return made

    # ---- ids and places

    def _ids(self, ids: Any, stream: Any) -> tuple[View, tuple[int, ...], Any]:
        if isinstance(ids, slice):
            ids = range(*ids.indices(self._shape[0]))
        plain = isinstance(ids, (list, tuple, range)) or hasattr(ids, "__index__") and not hasattr(ids, "__len__")
        if plain and not hasattr(ids, "dtype"):
            flat, shape = _buffers.flattened(ids)
            return View.from_buffer(flat, False), shape, flat
        number = _buffers.stream_of(stream, self._store.gpu) if hasattr(ids, "__cuda_array_interface__") or stream is not None else 0
        view = _buffers.view(ids, "ids", writable=False, store=self._store._native, stream=number)
        self._wide(view)
        return view, view.shape, ids

    @staticmethod
    def _wide(view: View) -> bool:
        name = _dtypes.of_format(view.dtype)
        if name not in ("int32", "int64"):
            remedy = "use ids[mask.nonzero()], or numbers" if name == "bool" else "convert them"
            raise Usage(f"ids are {name}: they must be int32 or int64", remedy)
        return name == "int64"

    def _place(self, value: Any, what: str, shape: tuple[int, ...], writable: bool, stream: int = 0) -> View:
        """Memory for rows of ``shape``."""
        view = _buffers.view(value, what, writable=writable, store=self._store._native, stream=stream)
        self._fits(view, what, shape)
        return view

    def _fits(self, view: View, what: str, shape: tuple[int, ...]) -> None:
        wanted = (*shape, *self._row)
        name = _dtypes.of_format(view.dtype)
        # Where numpy lacks the dtype, its bits come as bytes or as integers of its size; another dtype of that size has
        # other numbers.
        raw = self._dtype in _dtypes.FOREIGN and name in ("int8", "int16", "uint16") and (
            _dtypes.SIZES[name][0] == self._size
        )
        if name not in (self._dtype, "uint8") and not raw:
            raise Usage(f"{what} is {name}, the table {self._dtype}", f"use {self._dtype}")
        nbytes = self._row_bytes
        for one in shape:
            nbytes *= one
        if view.nbytes != nbytes or (name == self._dtype and tuple(view.shape) != wanted):
            raise Usage(f"{what} has the shape {tuple(view.shape)} in place of {wanted}", "use one row for each id")

    def _status(self, status: Any, stream: int = 0) -> View | None:
        if status is None:
            return None
        view = _buffers.view(status, "status", writable=True, store=self._store._native, stream=stream)
        if _dtypes.of_format(view.dtype) != "int32":
            raise Usage(f"status is {_dtypes.of_format(view.dtype)}", "use int32")
        return view

    # ---- the CPU

    def _new(self, shape: tuple[int, ...]) -> Any:
        """Memory of the host for rows of ``shape``."""
        shape = (*shape, *self._row)
        numpy = _buffers.numpy()
        if numpy is not None and hasattr(numpy, self._dtype if self._dtype != "bool" else "bool_"):
            try:
                return numpy.empty(shape, dtype=self._dtype)
            except (ValueError, OverflowError) as error:
                raise MemoryError(str(error)) from error
        return Array(shape, self._dtype, self._size)

    def _ended_on_cpu(self, operation: _native.Operation, check: Check | None) -> None:
        operation.wait()
        if check == "later":
            # What went wrong with all of it is raised: nothing came, and no status was written.
            self._native.keep_failure(operation)
        else:
            operation.check()

    def _change(
        self, ids: Any, rows: Any, status: Any, stream: Any, check: Check | None, unique: bool, add: bool, apart: bool = False
    ) -> Any:
        """With ``apart``, for ids of a GPU: the failure is raised by the operation that this returns, and no other call."""
        _gathers.known_check(check)
        if _buffers.is_tensor(ids):
            view, shape = _buffers.of_tensor(ids.contiguous(), "ids"), tuple(ids.shape)
        else:
            view, shape, _ = self._ids(ids, stream)
        if isinstance(rows, (list, tuple)):
            rows = _listed(rows, self._dtype)
        if _buffers.is_tensor(rows):
            rows = rows.detach().contiguous()
        if view.device[0] not in _buffers.CPU:
            return self._change_on_gpu(view, shape, ids, rows, status, stream, check, unique, add, apart)
        source = self._place(rows, "rows", shape, False)
        wide, places = self._wide(view), self._status(status)
        if add:
            operation = self._native.scatter_add(view, wide, source, places, self._dtype)
        else:
            operation = self._native.scatter(view, wide, source, places, unique)
        self._ended_on_cpu(operation, check)
        return operation

    # ---- the GPU

    def _change_on_gpu(
        self,
        ids: View,
        shape: tuple[int, ...],
        owner: Any,
        rows: Any,
        status: Any,
        stream: Any,
        check: Check | None,
        unique: bool,
        add: bool,
        apart: bool,
    ) -> _native.GpuOperation:
        if unique:
            raise Usage("unique= with ids in memory of a GPU", "leave it out: the last row of equal ids is written")
        number = _buffers.stream_of(stream, self._store.gpu)
        source = self._place(rows, "rows", shape, False, number)
        places = self._status(status, number)
        for one, what in ((ids, "ids"), (source, "rows"), (places, "status")):
            if one is not None:
                _gathers.same_gpu(self._store._native.gpu_index, one.device, what)
        count = _gathers.count_of(shape)
        _gathers.status_fits(places, count)
        for value in (owner, rows, status):
            _gathers.after_current(self._store._native, value, number)
        where = places.address if places is not None else 0
        held = (ids, owner, source, rows, places)
        operation = self._native.change_on_gpu(
            ids.address, self._wide(ids), count, source.address, where, number, held, self._dtype if add else None, apart
        )
        _gathers.checked(operation, check)
        return operation


def _listed(rows: Any, dtype: str) -> Any:
    """Lists of numbers as an array of ``dtype``, which holds each of them.

    Raises :class:`Usage` for numbers that would become others: those with a fraction for whole numbers, and too large ones.
    """
    numpy = _buffers.numpy()
    if numpy is None:
        raise Usage("lists of numbers need numpy", "install it, or pass an array")
    try:
        kind = numpy.dtype(dtype)
        given = _whole(numpy, rows, dtype) if kind.kind in "iub" else _real(numpy, rows, dtype, kind.kind == "c")
        with numpy.errstate(all="ignore"):
            made = given.astype(kind)
        is_held = made == given if kind.kind in "iub" else numpy.isfinite(made) == numpy.isfinite(given)
    except (ValueError, TypeError, OverflowError) as error:
        raise Usage(f"rows: {error}", "give lists of numbers, one row for each id") from error
    wrong = numpy.flatnonzero(numpy.logical_not(is_held))
    if wrong.size:
        number = given.flat[int(wrong[0])]
        shown = in_short(number.item() if hasattr(number, "item") else number)
        raise Usage(f"rows: {dtype} does not hold the number {shown}", "nothing was written: use numbers of the table's dtype")
    return made


def _whole(numpy: Any, rows: Any, dtype: str) -> Any:
    given = numpy.asarray(rows)
    if given.size and given.dtype.kind not in "iub":
        # numpy makes float64 of numbers where some have a sign and others take 64 bits.
        given = numpy.asarray(rows, dtype=object)
        if not all(hasattr(one, "__index__") for one in given.flat):
            raise TypeError(f"numbers with a fraction, or what is no number, for rows of {dtype}")
    return given


def _real(numpy: Any, rows: Any, dtype: str, is_complex: bool) -> Any:
    given = numpy.asarray(rows)
    if given.dtype.kind == "O":
        given = numpy.asarray([float(one) for one in given.flat]).reshape(given.shape)
    if given.size and given.dtype.kind not in ("iubfc" if is_complex else "iubf"):
        raise TypeError(f"{given.dtype} for rows of {dtype}")
    return given
