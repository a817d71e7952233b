"""`torch.distributed.checkpoint` for a torch that has none: as much of its reader as `nvme_gpu.dcp` extends, a writer of
the same files, and `save` and `load` in one process. With a newer torch its own are tested."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import io
import os
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import torch


class LoadItemType(enum.Enum):
    TENSOR = 1
    BYTE_IO = 2


@dataclasses.dataclass(frozen=True)
class MetadataIndex:
    fqn: str


@dataclasses.dataclass
class StorageInfo:
    relative_path: str
    offset: int
    length: int


@dataclasses.dataclass
class Metadata:
    storage_data: dict[MetadataIndex, StorageInfo]
    kinds: dict[str, LoadItemType]


@dataclasses.dataclass(frozen=True)
class ReadItem:
    type: LoadItemType
    storage_index: MetadataIndex


@dataclasses.dataclass
class LoadPlan:
    items: list[ReadItem]


class CheckpointException(Exception):
    def __init__(self, failures: dict[int, Any]) -> None:
        super().__init__(str(failures))
        self.failures = failures


class FileSystemBase:
    pass


class View(io.RawIOBase):
    def __init__(self, file: Any, offset: int, length: int) -> None:
        super().__init__()
        self.file, self.offset, self.length = file, offset, length
        self.seek(0)

    def seek(self, offset: int, whence: int = 0) -> int:
        begin = self.offset + (self.length if whence == 2 else 0)
        return self.file.seek(offset if whence == 1 else begin + offset, 1 if whence == 1 else 0) - self.offset

    def tell(self) -> int:
        return self.file.tell() - self.offset

    def readable(self) -> bool:
        return self.file.readable()

    def seekable(self) -> bool:
        return self.file.seekable()

    def readinto(self, buffer: Any) -> int:
        return self.file.readinto(buffer)


class FileSystemReader:
    def __init__(self, path: Any) -> None:
        self.path = Path(path)
        self.storage_data: dict[MetadataIndex, StorageInfo] = {}

    def read_metadata(self) -> Metadata:
        with self.fs.create_stream(self.fs.concat_path(self.path, ".metadata"), "rb") as file:
            return pickle.load(file)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        self.storage_data = metadata.storage_data

    def read_data(self, plan: LoadPlan, planner: Any) -> Any:
        for item in plan.items:
            place = self.storage_data[item.storage_index]
            with self.fs.create_stream(self.fs.concat_path(self.path, place.relative_path), "rb") as file:
                view = View(file, place.offset, place.length)
                if item.type is LoadItemType.BYTE_IO:
                    planner.load_bytes(item, io.BytesIO(view.read(place.length)))
                else:
                    tensor = torch.load(view, map_location="cpu", weights_only=True)
                    planner.resolve_tensor(item).copy_(tensor)
        ended: Any = torch.futures.Future()
        ended.set_result(None)
        return ended


class Planner:
    """Puts what was read into a state."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def load_bytes(self, item: ReadItem, data: io.BytesIO) -> None:
        self.state[item.storage_index.fqn] = torch.load(data)

    def resolve_tensor(self, item: ReadItem) -> Any:
        return self.state[item.storage_index.fqn].detach()


def save(state: dict[str, Any], folder: Any) -> None:
    """As FileSystemWriter with two threads: two files, and `.metadata`."""
    os.makedirs(folder, exist_ok=True)
    found = Metadata({}, {})
    for number, (name, value) in enumerate(state.items()):
        data = io.BytesIO()
        torch.save(value, data)
        file = f"__0_{number % 2}.distcp"
        path = Path(folder) / file
        offset = path.stat().st_size if path.exists() else 0
        with path.open("ab") as out:
            out.write(data.getvalue())
        found.storage_data[MetadataIndex(name)] = StorageInfo(file, offset, len(data.getvalue()))
        found.kinds[name] = LoadItemType.TENSOR if torch.is_tensor(value) else LoadItemType.BYTE_IO
    (Path(folder) / ".metadata").write_bytes(pickle.dumps(found))


def load(state: dict[str, Any], reader: Any) -> None:
    try:
        metadata = reader.read_metadata()
        reader.set_up_storage_reader(metadata, True)
        items = [ReadItem(metadata.kinds[name], MetadataIndex(name)) for name in state]
        reader.read_data(LoadPlan(items), Planner(state)).wait()
    except Exception as error:
        raise CheckpointException({0: (error, None)}) from error


@contextlib.contextmanager
def installed() -> Any:
    """Puts the module where that of torch would be."""
    package, files = types.ModuleType("torch.distributed.checkpoint"), types.ModuleType("filesystem")
    files.FileSystemReader, files.FileSystemBase = FileSystemReader, FileSystemBase  # type: ignore[attr-defined]
    package.filesystem = files  # type: ignore[attr-defined]
    names = {package.__name__: package, f"{package.__name__}.filesystem": files}
    sys.modules.update(names)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
