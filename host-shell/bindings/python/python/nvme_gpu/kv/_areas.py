"""What the engines' options say of the place of the pages, and the page store that they mean."""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from .._arguments import whole
from .._errors import NvmeGpuError, Usage, in_short, listed
from .._pages import PageStore
from .._store import Store, open


class AreaOptions(NamedTuple):
    """``device``: as for :func:`nvme_gpu.open`. ``offset``, ``nbytes``: the area of the first rank; rank N has the one that
    begins N times ``nbytes`` further on. ``revision``: of the model's weights, which engines do not tell. ``kv_format``: that
    of the cache's elements, as ``"fp8_e5m2"``, for engines that say uint8. ``create``: as for :class:`PageStore`. The others
    are those of :func:`nvme_gpu.open`."""

    device: str
    offset: int = 0
    nbytes: int | None = None
    revision: str = ""
    kv_format: str = ""
    create: Any = "auto"
    shared: bool = False
    directory: str | None = None
    allow_write: bool = False
    queues: int = 8
    depth: int = 64
    timeout_ms: int = 5000

    @classmethod
    def of(cls, options: Mapping[str, Any], where: str) -> AreaOptions:
        """Reads the options that the engine's setting ``where`` has.

        Raises :class:`Usage` for one that is not known, and without a device.
        """
        unknown = sorted(set(options) - set(cls._fields))
        if unknown:
            raise Usage(f"{where} has the unknown option {listed(unknown)}", f"use {', '.join(cls._fields)}")
        device = options.get("device")
        if not isinstance(device, str) or not device:
            raise Usage(f"{where} names no device", 'add "device": "file:PATH", or the name of a drive')
        if not isinstance(options.get("shared", False), bool):
            raise Usage(f"{where} has shared = {in_short(options['shared'])}", "use true or false")
        if options.get("directory") is not None and not options.get("shared"):
            raise Usage(f"{where} has a directory of sockets, and shared is not set", "set shared to true")
        return cls(**options)

    def dtype(self, *names: object) -> str:
        """The element formats as a field of the fingerprint.

        Raises :class:`Usage` for bytes of which nothing tells the format.
        """
        if not self.kv_format and all(str(name) in ("", "None", "torch.uint8", "uint8") for name in names):
            raise Usage("the engine stores keys and values as uint8 and does not tell the format", "set kv_format to its name")
        return " ".join([*map(str, names), self.kv_format])

    def part(self, rank: int) -> int:
        """The part of keys for the pages of rank ``rank``: in a shared area they lie beside those of the others."""
        return rank if self.shared else 0

    def parallel_rank(self, rank: int, ranks: int) -> str:
        """The rank as a field of the fingerprint, which is the same for all that share an area."""
        return f"each of {ranks}" if self.shared else f"{rank} of {ranks}"

    def open(self, rank: int, ranks: int, page_bytes: int, gpu: int | None = None, **fingerprint: Any) -> PageStore:
        """The page store of rank ``rank`` of ``ranks`` that share the device, for pages of ``gpu``. :func:`close` closes it."""
        offset = whole("offset", self.offset, 0, (1 << 62) - 1)
        nbytes = None if self.nbytes is None else whole("nbytes", self.nbytes, 1, (1 << 62) - 1)
        texts: dict[str, Any] = {
            name: _short(value) if isinstance(value, str) else value for name, value in fingerprint.items()
        }
        if self.shared and gpu is not None:
            raise Usage("shared is set, and a shared area takes no memory of a GPU", "set nbytes to a rank's share instead")
        if self.shared:
            return PageStore.shared(
                self.device,
                offset,
                nbytes,
                page_bytes=page_bytes,
                revision=str(self.revision),
                create=self.create,
                directory=self.directory,
                allow_write=self.allow_write,
                queues=self.queues,
                depth=self.depth,
                timeout_ms=self.timeout_ms,
                **texts,
            )
        if ranks > 1 and nbytes is None:
            raise Usage(f"{ranks} ranks have one device, and nbytes is not set", "set nbytes to a rank's share, or shared to true")
        store = open(
            self.device,
            gpu,
            allow_write=self.allow_write,
            queues=self.queues,
            depth=self.depth,
            timeout_ms=self.timeout_ms,
        )
        try:
            return PageStore(
                store,
                offset + rank * (nbytes or 0),
                nbytes,
                page_bytes=page_bytes,
                revision=str(self.revision),
                create=self.create,
                **texts,
            )
        except BaseException:
            store.close()
            raise


MOST_REFUSED = 65_536


class RefusedKeys:
    """Keys of pages that the drive could not read, although they may be right: engines would ask for them again at once.

    Of more than ``MOST_REFUSED`` the oldest are forgotten, so that a drive that fails takes no memory without end: an engine
    asks for such a page, which fails, once more."""

    def __init__(self) -> None:
        self._keys: dict[bytes, None] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: bytes) -> None:
        """Adds a key as the newest."""
        self.discard(key)
        self._keys[key] = None
        if len(self._keys) > MOST_REFUSED:
            del self._keys[next(iter(self._keys))]

    def discard(self, key: bytes) -> None:
        """Removes a key, as of a page that was stored."""
        self._keys.pop(key, None)

    def clear(self) -> None:
        """Removes all keys."""
        self._keys.clear()


def versions(*packages: str) -> list[str]:
    """Versions of the packages that are loaded: what lies in a page may change between them, and nothing else tells."""
    return [f"{name} {getattr(sys.modules[name], '__version__', '')}" for name in packages if name in sys.modules]


def digest(value: Any) -> str:
    """A short text that differs where ``value``, of JSON's types, does."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def leading(found: Iterable[bool]) -> int:
    """How many are true before the first that is not; those behind it are not asked for."""
    count = 0
    for one in found:
        if not one:
            break
        count += 1
    return count


def _short(text: str) -> str:
    """A field of a fingerprint: a long text, as the path of a model, by its begin and its digest."""
    return text if len(text.encode()) <= 255 else f"{text[:40]}~{digest(text)}"


def close(pages: PageStore) -> None:
    """Closes the page store and its store. A checkpoint before it saves the next opening the log."""
    try:
        if not pages.is_shared or pages.stats()["owner"]:
            pages.checkpoint()
    except NvmeGpuError:
        # Never needed: what was stored is found without it.
        pass
    finally:
        if pages.is_shared:
            pages.close()
        else:
            pages.store.close()


ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "lmcache": "LMCache"}
"""Packages of engines whose adapters are here, and what people call them."""

ADAPTERS = {
    "vllm": ("NvmeOffloadingConnector", "NvmeTier"),
    "sglang": ("NvmeStorage",),
    "lmcache": ("NvmeBackend", "NvmeL2Adapter"),
}
"""The classes that an engine's options name."""


def engines() -> list[dict[str, str]]:
    """Which engines are installed, and whether their adapters load, in the form of findings of ``nvme-gpu doctor``. It imports
    the engines, which takes up to a minute."""
    installed = importlib.metadata.packages_distributions()
    findings = []
    for package, name in ENGINES.items():
        if package not in installed:
            continue
        version = importlib.metadata.version(installed[package][0])
        finding = {"subject": "key and value caches", "check": f"{name} {version}", "status": "ok", "text": "", "remedy": ""}
        try:
            module = importlib.import_module(f"nvme_gpu.kv.{package}")
            names = ", ".join(getattr(module, name).__name__ for name in ADAPTERS[package])
            finding["text"] = f"nvme_gpu.kv.{package} loads: {names}"
        # An engine may raise anything while it is imported.
        except Exception as error:
            finding.update(status="warning", text=f"nvme_gpu.kv.{package} does not load: {type(error).__name__}: {error}",
                           remedy="use a version that docs/guide/kv.md names")  # fmt: skip
        findings.append(finding)
    if "nixl" in installed:
        findings.append(nixl_finding(importlib.metadata.version(installed["nixl"][0])))
    return findings


def nixl_finding(version: str) -> dict[str, str]:
    """Whether NIXL finds the back end, and the loader its libraries."""
    finding = {"subject": "key and value caches", "check": f"NIXL {version}", "status": "ok", "text": "", "remedy": ""}
    folder = os.environ.get("NIXL_PLUGIN_DIR")
    if not folder:
        return {**finding, "text": "NIXL_PLUGIN_DIR is not set, and a link in NIXL's own folder is not looked for"}
    path = os.path.join(folder, "libplugin_NVME_GPU.so")
    try:
        if not os.path.exists(path):
            raise FileNotFoundError("NIXL_PLUGIN_DIR names no folder with libplugin_NVME_GPU.so")
        ctypes.CDLL(path)
        finding["text"] = f"{path} loads"
    except OSError as error:
        finding.update(status="warning", text=str(error), remedy="build it as docs/guide/kv.md says")
    return finding
