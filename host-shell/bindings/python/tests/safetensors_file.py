"""Files of safetensors, written from the format's description, also with what the package does not write."""

from __future__ import annotations

import json


def file_bytes(tensors, *, align=1, shift=0, metadata=None, extra=None) -> bytes:
    """A file of tensors, each (name, the format's name of its type, shape, bytes), in this order. Data begin ``shift`` bytes
    after a multiple of ``align``; ``extra``: entries of the header that are written as they are."""
    header: dict = {"__metadata__": metadata} if metadata else {}
    data = bytearray()
    for name, dtype, shape, part in tensors:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(part)]}
        data += part
    text = json.dumps(header | (extra or {})).encode()
    text += b" " * (-(8 + len(text)) % align + shift)
    return len(text).to_bytes(8, "little") + text + bytes(data)
