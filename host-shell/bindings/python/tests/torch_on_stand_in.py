"""torch without CUDA, with tensors and streams that say they are of the GPU: the stand-in's memory is that of the host."""

from __future__ import annotations

import contextlib
import ctypes
import weakref

import torch


def synchronize(stream=0):
    """Waits for what was put into a stream of the stand-in."""
    assert ctypes.CDLL("libcuda.so").cuStreamSynchronize(ctypes.c_void_p(stream)) == 0


class OnGpu(torch.Tensor):
    """A tensor on GPU 0."""

    is_cuda = property(lambda self: True)
    device = property(lambda self: torch.device("cuda", 0))

    def data_ptr(self):
        """The address of its memory, which is the GPU's from now on as far as the stand-in knows."""
        # torch before 2.0 has storages with a type alone.
        storage = self.untyped_storage() if hasattr(self, "untyped_storage") else self.storage()
        cuda = ctypes.CDLL("libcuda.so.1")
        start = ctypes.c_uint64(storage.data_ptr())
        cuda.fake_cuda_lend(start, ctypes.c_size_t(storage.nbytes()), 0)
        weakref.finalize(self, cuda.fake_cuda_lend, start, ctypes.c_size_t(0), 0).atexit = False
        return super().data_ptr()

    # Inside of an operation torch's own methods return plain tensors.
    def detach(self):
        return super().detach().as_subclass(OnGpu)

    def contiguous(self):
        return super().contiguous().as_subclass(OnGpu)

    def cpu(self):
        synchronize()
        return super().detach().clone().as_subclass(torch.Tensor)


class Event:
    """An event that was recorded in a stream."""

    def __init__(self, stream):
        self.stream = stream


class Stream:
    """A stream of GPU 0: one of the two that every context of CUDA has, in turns."""

    made: list[Stream] = []
    waits: list[tuple[Stream, Event]] = []

    def __init__(self, device=None):
        assert device == 0
        self.device = torch.device("cuda", device)
        self.made.append(self)
        self.cuda_stream = 1 + len(self.made) % 2

    def record_event(self):
        return Event(self)

    def wait_event(self, event):
        self.waits.append((self, event))


def _is_gpu(device):
    return device is not None and torch.device(device).type == "cuda"


class Cuda:
    """What tests see of the GPU of torch. Called with a tensor: the same memory as a tensor of the GPU."""

    def __init__(self, monkeypatch):
        self.streams, self.waits = [], []
        self.pinned, self.used_by, self.synchronized = 0, [], 0
        monkeypatch.setattr(Stream, "made", self.streams)
        monkeypatch.setattr(Stream, "waits", self.waits)
        self.current = Stream(device=0)
        # Memory of a GPU is given out again in the order of a stream; that of the host is not.
        self.kept = []
        self.streams.clear()
        for name in ("empty", "full", "zeros"):
            monkeypatch.setattr(torch, name, self._making(getattr(torch, name)))
        real_to = torch.Tensor.to

        def to(tensor, *words, **more):
            if words and isinstance(words[0], torch.device) and _is_gpu(words[0]):
                return tensor.clone().as_subclass(OnGpu)
            return real_to(tensor, *words, **more)

        def pin(tensor):
            self.pinned += 1
            return tensor.clone()

        def synchronize_all(device=None):
            self.synchronized += 1
            synchronize()

        monkeypatch.setattr(torch.Tensor, "to", to)
        monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor.clone().as_subclass(OnGpu))
        monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: self.used_by.append(stream))
        monkeypatch.setattr(torch, "as_tensor", self._as_tensor)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
        for name, value in {
            "Stream": Stream,
            "stream": self._stream,
            "current_stream": lambda device=None: self.current,
            "synchronize": synchronize_all,
            "is_available": lambda: True,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def __call__(self, tensor):
        self.kept.append(tensor)
        return tensor.as_subclass(OnGpu)

    def _making(self, real):
        def made(*words, device=None, pin_memory=False, **more):
            self.pinned += pin_memory
            if not _is_gpu(device):
                return real(*words, device=device, **more)
            return self(real(*words, **more))

        return made

    @contextlib.contextmanager
    def _stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def _as_tensor(self, value, device=None):
        found = value.__cuda_array_interface__
        assert _is_gpu(device) and found["typestr"] == "|u1" and found["stream"] is None
        (nbytes,), (address, readonly) = found["shape"], found["data"]
        assert not readonly
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        memory._owner = value
        return torch.frombuffer(memory, dtype=torch.uint8).as_subclass(OnGpu)
