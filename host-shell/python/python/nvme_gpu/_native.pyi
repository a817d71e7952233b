"""The extension module. Its classes have no options and no checks of arguments: use those of nvme_gpu."""

import os
from typing import Any, Literal, TypeAlias, final

__all__ = [
    "Array",
    "Attention",
    "DriveFile",
    "Experts",
    "GpuOperation",
    "Import",
    "KvPages",
    "Ladder",
    "Layer",
    "LayerLoader",
    "Linear",
    "Matrix",
    "Operation",
    "Router",
    "Sampler",
    "SearchIndex",
    "Steps",
    "Store",
    "Summaries",
    "Table",
    "View",
    "Volume",
    "__version__",
    "angles",
    "argmax_on_cpu",
    "attention_on_cpu",
    "balance",
    "build_index",
    "calls_under_way",
    "doctor",
    "flash_on_cpu",
    "gemv_on_cpu",
    "gpu",
    "kept_buffers",
    "linear_backward_on_cpu",
    "linear_forward_on_cpu",
    "location",
    "matmul_on_cpu",
    "rms_norm_on_cpu",
    "rope_on_cpu",
    "route_on_cpu",
    "silu_mul_on_cpu",
    "unpack_on_cpu",
]
__version__: str

_About = tuple[str, int, int, int, int, int, int, list[str], int, tuple[int, int], tuple[int, int]]

@final
class View:
    @staticmethod
    def from_buffer(object: Any, writable: bool) -> View: ...
    @staticmethod
    def from_dlpack(capsule: Any) -> View: ...
    @staticmethod
    def of_new_bytes(nbytes: int) -> tuple[View, bytes]: ...
    @staticmethod
    def raw(
        owner: Any,
        address: int,
        nbytes: int,
        shape: tuple[int, ...],
        dtype: str,
        device: tuple[int, int],
        readonly: bool,
    ) -> View: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> tuple[int, int]: ...
    @property
    def readonly(self) -> bool: ...

@final
class Array:
    """Memory that a gather fills where no library of arrays gave its own: C-contiguous, on the host or on a GPU.

    Other libraries take it without a copy by ``__dlpack__``, ``__cuda_array_interface__`` (on a GPU) or
    ``__array_interface__`` (on the host).
    """

    def __new__(cls, shape: tuple[int, ...], dtype: str, itemsize: int, store: Store | None = None) -> Array: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def stream(self) -> int: ...
    def tobytes(self) -> bytes: ...
    def tolist(self) -> Any: ...
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...
    @property
    def __array_interface__(self) -> dict[str, Any]: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...

@final
class Operation:
    def done(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> bool: ...
    def check_whole(self) -> None: ...
    def check(self) -> None: ...

@final
class GpuOperation:
    @property
    def is_captured(self) -> bool: ...
    def done(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> bool: ...
    def finish(self) -> None: ...
    def check(self) -> None: ...

@final
class Import:
    @staticmethod
    def of_file(store: Store, path: str | os.PathLike[str], offset: int, verify: bool) -> Import: ...
    @staticmethod
    def of_manifest(path: str | os.PathLike[str], out: str | os.PathLike[str]) -> Import: ...
    @staticmethod
    def of_store(store: Store, offset: int, nbytes: int | None) -> Import: ...
    def progress(self) -> tuple[int, int]: ...
    def cancel(self) -> None: ...
    def wait(self, timeout: float | None = None) -> bool: ...
    def found(self) -> str: ...

@final
class SearchIndex:
    def __new__(cls, store: Store, offset: int) -> SearchIndex: ...
    def info(self) -> str: ...
    def search(
        self,
        queries: View,
        out: tuple[View, View, View, View],
        given: tuple[int, int, int],
        threads: int,
        element: str,
    ) -> Operation: ...
    def search_on_gpu(
        self,
        queries: tuple[int, int],
        out: tuple[int, int, int, int],
        given: tuple[int, int, int],
        stream: int,
        buffers: Any | None = None,
    ) -> GpuOperation: ...
    def check(self, timeout: float | None = None) -> bool: ...
    def close(self) -> None: ...

@final
class Store:
    def __new__(
        cls,
        device: str,
        *,
        gpu: int | None = None,
        queues: int = 8,
        depth: int = 64,
        timeout_ms: int = 5000,
        allow_write: bool = False,
        read_only: bool = False,
        nsid: int = 1,
        gpu_queues: int = 16,
        gpu_blocks: int = 32,
        gpu_tier: int | None = None,
        file_io: Literal["auto", "uring", "pread"] = "auto",
        gds: Literal["off", "auto", "require"] = "off",
    ) -> Store: ...
    @property
    def calls(self) -> int: ...
    @property
    def is_open(self) -> bool: ...
    @property
    def gpu_index(self) -> int | None: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...
    def path(self) -> str: ...
    def stats(self) -> str: ...
    def read(self, view: View, offset: int) -> Operation: ...
    def write(self, view: View, offset: int, durable: bool) -> Operation: ...
    def move_on_gpu(
        self,
        is_write: bool,
        offset: int,
        bytes: int,
        address: int,
        stream: int,
        buffers: Any | None = None,
    ) -> GpuOperation: ...
    def read_by_cufile(self, offset: int, bytes: int, address: int, stream: int) -> bool: ...
    def flush(self) -> Operation: ...
    def order(self, first: int, then: int) -> None: ...
    def close(self, timeout: float | None = None) -> None: ...

@final
class Table:
    def __new__(cls, store: Store, offset: int, rows: int, row_bytes: int) -> Table: ...
    def widened(self, stored: str, dtype: str) -> Table: ...
    def gather(self, ids: View, wide: bool, out: View, status: View | None) -> Operation: ...
    def scatter(self, ids: View, wide: bool, source: View, status: View | None, unique: bool) -> Operation: ...
    def scatter_add(self, ids: View, wide: bool, source: View, status: View | None, dtype: str) -> Operation: ...
    def gather_on_gpu(
        self,
        ids: int,
        wide: bool,
        count: int,
        out: int,
        status: int,
        stream: int,
        buffers: Any | None = None,
        array: Array | None = None,
        apart: bool = False,
    ) -> GpuOperation: ...
    def change_on_gpu(
        self,
        ids: int,
        wide: bool,
        count: int,
        rows: int,
        status: int,
        stream: int,
        buffers: Any | None = None,
        dtype: str | None = None,
    ) -> GpuOperation: ...
    def check(self, timeout: float | None = None) -> bool: ...
    def keep_failure(self, operation: Operation) -> None: ...
    def is_idle(self) -> bool: ...

@final
class Volume:
    def __new__(cls, store: Store, part: int | None = None) -> Volume: ...
    def info(self) -> str: ...
    def stat(self, path: bytes, follows: bool) -> _About: ...
    def entries(self, path: bytes) -> list[tuple[bytes, _About]]: ...
    def read_link(self, path: bytes) -> bytes: ...
    def open(self, store: Store, path: bytes) -> DriveFile: ...
    def close(self) -> None: ...

@final
class DriveFile:
    @staticmethod
    def mounted(store: Store, path: str, part: int | None = None) -> DriveFile: ...
    def stat(self) -> _About: ...
    def extents(self) -> list[tuple[int, int, int, bool]]: ...
    def pieces(self, offset: int, bytes: int) -> list[tuple[int, int]]: ...
    def place(self, offset: int, bytes: int) -> int: ...
    def read(self, view: View, offset: int) -> Operation: ...
    def catalog(self) -> str: ...
    def check_unchanged(self) -> None: ...

@final
class LayerLoader:
    def __new__(
        cls,
        store: Store,
        tensors: list[tuple[str, int, int]],
        file: DriveFile | None,
        which: list[str] | list[tuple[str, list[str]]] | None,
        slots: int,
        ahead: int | None,
        resident: int | list[int],
        order: list[int] | None,
        on_gpu: bool | None,
        manifest: tuple[str, int] | None,
    ) -> LayerLoader: ...
    def layers(self) -> list[tuple[str, int, list[tuple[str, int, int]]]]: ...
    def path(self) -> str: ...
    def stats(self) -> str: ...
    def layer(self, index: int, stream: int) -> Layer: ...
    def check(self, timeout: float | None = None) -> None: ...
    def close(self) -> None: ...

@final
class Layer:
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def is_on_gpu(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> None: ...

@final
class Sampler:
    def __new__(
        cls,
        rows: int,
        batch: int,
        seed: int | None,
        rank: int,
        world: int,
        drops_uneven: bool,
        drops_last: bool,
    ) -> Sampler: ...
    @property
    def batches(self) -> int: ...
    def batch(self, epoch: int, batch: int) -> bytes: ...

@final
class Steps:
    def __new__(cls, gpu: int) -> Steps: ...
    def gemv(
        self, format: int, shape: tuple[int, int, int], addresses: tuple[int, int, int], adds: bool, stream: int
    ) -> None: ...
    def unpack(self, format: int, shape: tuple[int, int, int], addresses: tuple[int, int], stream: int) -> None: ...
    def rms_norm(
        self, shape: tuple[int, int], epsilon: float, addresses: tuple[int, int, int], stream: int
    ) -> None: ...
    def rope(
        self,
        shape: tuple[int, int, int, int, int],
        addresses: tuple[int, int, int, int, int, int],
        stream: int,
    ) -> None: ...
    def attention(
        self,
        shape: tuple[int, int, int, int, int],
        scale: float,
        addresses: tuple[int, int, int, int],
        stream: int,
    ) -> None: ...
    def silu_mul(self, elements: int, addresses: tuple[int, int, int], stream: int) -> None: ...
    def argmax(self, shape: tuple[int, int], addresses: tuple[int, int, int], stream: int) -> None: ...

@final
class Router:
    def __new__(cls, gpu: int) -> Router: ...
    def route(
        self, shape: tuple[int, int, int], over_all: bool, addresses: tuple[int, int, int], stream: int
    ) -> None: ...

@final
class Matrix:
    def __new__(cls, store: Store, offset: int, format: int, shape: tuple[int, int]) -> Matrix: ...
    @property
    def nbytes(self) -> int: ...
    def gemv(self, x: View, out: View) -> Operation: ...
    def gemv_on_gpu(self, x: int, y: int, stream: int, buffers: Any | None = None) -> GpuOperation: ...
    def gathered(self, ids: View, x: View, out: View) -> Operation: ...
    def gathered_on_gpu(
        self, ids: int, wide: bool, count: int, x: int, y: int, stream: int, buffers: Any | None = None
    ) -> GpuOperation: ...
    def gemm(self, x: View, dtype: str, out: View) -> Operation: ...
    def workspace_bytes(self) -> int: ...
    def gemm_on_gpu(
        self, addresses: tuple[int, int, int], tokens: int, dtype: str, stream: int, buffers: Any | None = None
    ) -> GpuOperation: ...
    def check(self, timeout: float | None = None) -> bool: ...
    def close(self) -> None: ...

@final
class KvPages:
    def __new__(cls, store: Store, offset: int, pages: int, shape: tuple[int, int, int, bool]) -> KvPages: ...
    def attend(
        self,
        given: tuple[int, int, int, bool],
        queries: View,
        tables: tuple[View, View],
        scale: float,
        out: View,
        tail: tuple[View, View] | None = None,
    ) -> Operation: ...
    def workspace_bytes(self, given: tuple[int, int, int, bool]) -> int: ...
    def attend_on_gpu(
        self,
        given: tuple[int, int, int, bool],
        addresses: tuple[int, int, int, int, int, int, int],
        scale: float,
        stream: int,
        buffers: Any | None = None,
    ) -> GpuOperation: ...
    def choose(
        self,
        given: tuple[int, int, int, bool],
        queries: View,
        tables: tuple[View, View],
        summaries: Summaries,
        kept: tuple[int, int, int],
        out: tuple[View, View],
    ) -> Operation: ...
    def choice_words(
        self, given: tuple[int, int, int, bool], kept: tuple[int, int, int]
    ) -> tuple[int, int, int]: ...
    def choose_on_gpu(
        self,
        given: tuple[int, int, int, bool],
        addresses: tuple[int, int, int, int],
        summaries: Summaries,
        kept: tuple[int, int, int],
        stream: int,
    ) -> None: ...
    def check(self, timeout: float | None = None) -> bool: ...
    def close(self) -> None: ...

@final
class Summaries:
    def __new__(cls, store: Store, pages: KvPages, on_gpu: bool) -> Summaries: ...
    def read(self, first: int, count: int) -> None: ...
    def update(self, pages: View, ids: View) -> Operation: ...
    def update_on_gpu(self, pages: int, ids: int, count: int, stream: int) -> None: ...
    def tobytes(self) -> bytes: ...

_Placed: TypeAlias = tuple[int, int]

@final
class Experts:
    def __new__(
        cls,
        store: Store,
        layers: list[tuple[_Placed, _Placed, _Placed]],
        shape: tuple[int, int, int, int],
        over_all: bool,
        cache: tuple[int, str, list[tuple[int, int]], int] | None = None,
    ) -> Experts: ...
    def sizes(self) -> tuple[int, int, int]: ...
    def compute(self, layer: int, logits: View, x: View, out: View, adds: bool) -> Operation: ...
    def step_on_gpu(
        self,
        shape: tuple[int, int],
        addresses: tuple[int, int, int, int],
        adds: bool,
        stream: int,
        buffers: Any | None = None,
    ) -> GpuOperation: ...
    def counts(self) -> tuple[int, int, int, list[list[int]]]: ...
    def check(self, timeout: float | None = None) -> bool: ...
    def close(self) -> None: ...

@final
class Ladder:
    def __new__(cls, gpu: int) -> Ladder: ...
    def has(self, name: str) -> bool: ...
    def matmul(
        self,
        name: str,
        shape: tuple[int, int, int],
        dtypes: tuple[str, str],
        places: tuple[_Placed, _Placed, _Placed],
        stream: int,
    ) -> None: ...

@final
class Linear:
    def __new__(cls, gpu: int) -> Linear: ...
    def forward(
        self,
        name: str,
        shape: tuple[int, int, int],
        activation: str,
        addresses: tuple[int, int, int, int, int],
        stream: int,
    ) -> None: ...
    def backward(
        self,
        name: str,
        shape: tuple[int, int, int],
        activation: str,
        given: tuple[int, int, int, int, int],
        wanted: tuple[int, int, int],
        stream: int,
    ) -> None: ...

_Strided: TypeAlias = tuple[int, int, int, int]

@final
class Attention:
    def __new__(cls, gpu: int) -> Attention: ...
    def workspace_bytes(self, name: str, shape: tuple[int, int, int, int, int, int]) -> int: ...
    def attend(
        self,
        name: str,
        shape: tuple[int, int, int, int, int, int],
        is_bf16: bool,
        causal: bool,
        scale: float,
        places: tuple[_Strided, _Strided, _Strided, _Strided],
        room: tuple[int, int],
        stream: int,
    ) -> None: ...

def angles(positions: int, head_elements: int, base: float, out: View) -> Operation: ...
def gemv_on_cpu(format: int, weights: View, x: View, columns: int, out: View, adds: bool) -> Operation: ...
def unpack_on_cpu(format: int, rows: View, columns: int, out: View) -> Operation: ...
def rms_norm_on_cpu(x: View, weight: View, epsilon: float, out: View) -> Operation: ...
def rope_on_cpu(
    shape: tuple[int, int, int, int, int],
    angles: View,
    queries: View,
    given: tuple[View, View],
    caches: tuple[View, View],
) -> Operation: ...
def attention_on_cpu(
    shape: tuple[int, int, int, int, int],
    queries: View,
    caches: tuple[View, View],
    scale: float,
    out: View,
) -> Operation: ...
def silu_mul_on_cpu(x: View, factor: View, out: View) -> Operation: ...
def argmax_on_cpu(x: View, elements: int, out: View) -> Operation: ...
def route_on_cpu(
    logits: View,
    shape: tuple[int, int],
    over_all: bool,
    experts: View,
    weights: View,
    probabilities: View | None = None,
) -> Operation: ...
def matmul_on_cpu(a: View, b: View, out: View, shape: tuple[int, int, int], is_blocked: bool) -> Operation: ...
def linear_forward_on_cpu(
    shape: tuple[int, int, int],
    activation: str,
    x: View,
    weights: View,
    bias: View | None,
    out: View,
    sums: View | None = None,
) -> Operation: ...
def linear_backward_on_cpu(
    shape: tuple[int, int, int],
    activation: str,
    given: tuple[View, View, View, View],
    wanted: tuple[View | None, View | None, View | None],
) -> Operation: ...
def flash_on_cpu(
    shape: tuple[int, int, int, int, int, int],
    causal: bool,
    scale: float,
    given: tuple[View, View, View],
    out: View,
    counts: View | None = None,
) -> Operation: ...
def balance(
    counts: list[int], probabilities: View
) -> tuple[float, float, float, int, float | None]: ...
def build_index(
    store: Store, offset: int, vectors: View, elements: int, shape: tuple[int, int, int], names: tuple[str, str]
) -> Import: ...
def calls_under_way() -> int: ...
def doctor() -> str: ...
def gpu(index: int) -> str: ...
def kept_buffers() -> int: ...
def location(text: str) -> tuple[str, int | None, str] | None: ...
