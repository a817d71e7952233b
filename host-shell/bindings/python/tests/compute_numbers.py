"""What tests of nvme_gpu.compute share: weights as GGUF has them, and what they come to by numpy in float64."""

from __future__ import annotations

import numpy as np

BLOCKS = {"q4_0": (32, 18), "q4_1": (32, 20), "q8_0": (32, 34), "q4_k": (256, 144), "q6_k": (256, 210), "mxfp4": (64, 34)}
FLOATS = {"float32": 4, "float16": 2, "bfloat16": 2}
FORMATS = [*FLOATS, *BLOCKS]
# Where the scales of a block lie.
SCALES = {"q4_0": (0,), "q4_1": (0, 2), "q8_0": (0,), "q4_k": (0, 2), "q6_k": (208,), "mxfp4": ()}


def of_bf16(halves):
    return (halves.astype(np.uint32) << 16).view(np.float32)


def to_bf16(values):
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def weights(name, rows, columns, seed=0):
    """Rows of bytes of a format, and their numbers."""
    dice = np.random.default_rng(seed)
    values = dice.standard_normal((rows, columns)).astype(np.float32)
    if name == "float32":
        return values.view(np.uint8), values
    if name == "float16":
        halves = values.astype(np.float16)
        return halves.view(np.uint8), halves.astype(np.float32)
    if name == "bfloat16":
        halves = to_bf16(values)
        return halves.view(np.uint8), of_bf16(halves)
    elements, nbytes = BLOCKS[name]
    blocks = dice.integers(0, 256, (rows, columns // elements, nbytes), dtype=np.uint8)
    for at in SCALES[name]:
        scale = dice.uniform(-0.1, 0.1, blocks.shape[:2]).astype(np.float16)
        blocks[..., at : at + 2] = scale[..., None].view(np.uint8)
    if name == "mxfp4":
        blocks[..., [0, 17]] = dice.integers(119, 125, (*blocks.shape[:2], 2), dtype=np.uint8)
    return blocks.reshape(rows, columns // elements * nbytes), unpacked(name, blocks).reshape(rows, columns)


def unpacked(name, blocks):
    """The numbers of blocks, by the words of GGUF's description."""

    def half(at):
        return blocks[..., at : at + 2].copy().view(np.float16).astype(np.float32)

    def nibbles(part):
        return np.concatenate([part & 15, part >> 4], -1).astype(np.float32)

    if name == "mxfp4":
        pair = blocks.reshape(*blocks.shape[:-1], 2, 17)
        sizes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
        scale = np.ldexp(np.float32(1), pair[..., :1].astype(np.int32) - 127)
        return (scale * sizes[nibbles(pair[..., 1:]).astype(np.int32)]).reshape(*blocks.shape[:-1], 64)
    if name == "q8_0":
        return half(0) * blocks[..., 2:].view(np.int8).astype(np.float32)
    if name == "q4_0":
        return half(0) * (nibbles(blocks[..., 2:]) - 8)
    if name == "q4_1":
        return half(0) * nibbles(blocks[..., 4:]) + half(2)
    if name == "q4_k":
        s = blocks[..., 4:16].astype(np.int32)
        low = [(s[..., j] & 63, s[..., j + 4] & 63) for j in range(4)]
        high = [
            (s[..., j + 8] & 15 | s[..., j] >> 6 << 4, s[..., j + 8] >> 4 | s[..., j + 4] >> 6 << 4) for j in range(4)
        ]
        parts = []
        for group, (scale, least) in enumerate(low + high):
            q = blocks[..., 16 + group // 2 * 32 :][..., :32] >> 4 * (group % 2) & 15
            d = half(0) * scale[..., None].astype(np.float32)
            parts.append(d * q.astype(np.float32) - half(2) * least[..., None].astype(np.float32))
        return np.concatenate(parts, -1)
    lows, highs, scales = blocks[..., :128], blocks[..., 128:192], blocks[..., 192:208].view(np.int8)
    parts = []
    for part in range(2):
        low, high = lows[..., part * 64 :][..., :64], highs[..., part * 32 :][..., :32]
        for quarter in range(4):
            four = low[..., quarter % 2 * 32 :][..., :32] >> quarter // 2 * 4 & 15
            q = (four | (high >> 2 * quarter & 3) << 4).astype(np.int32) - 32
            s = np.repeat(scales[..., part * 8 + quarter * 2 :][..., :2], 16, -1)
            parts.append(half(208) * s.astype(np.float32) * q.astype(np.float32))
    return np.concatenate(parts, -1)


def close(found, want, size=None, rtol=1e-5):
    """Each number within ``rtol`` of the size of what was summed up."""
    found, want = np.asarray(found, np.float64), np.asarray(want, np.float64)
    assert found.shape == want.shape
    size = np.abs(want) if size is None else np.broadcast_to(np.asarray(size, np.float64), want.shape)
    wrong = ~(np.abs(found - want) <= rtol * size + 1e-6)
    assert not wrong.any(), (np.argwhere(wrong)[:3], found[wrong][:3], want[wrong][:3])


def softmax(x):
    shares = np.exp(x - x.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


def attended(queries, keys, values, scale):
    """Queries (heads, d) over keys and values (n, kv_heads, d) in float64."""
    heads, kv_heads = queries.shape[0], keys.shape[1]
    found = []
    for head in range(heads):
        kv = head * kv_heads // heads
        products = keys[:, kv].astype(np.float64) @ queries[head].astype(np.float64) * scale
        found.append(softmax(products) @ values[:, kv].astype(np.float64) if len(products) else np.zeros(queries.shape[1]))
    return np.stack(found)


def experts_by_numpy(x, logits, matrices, k, over_all=False):
    """What experts come to: matrices[kind][expert] of gate, up and down."""
    found = []
    for token, scores in zip(x.astype(np.float64), logits.astype(np.float64)):
        order = np.argsort(-scores, kind="stable")[:k]
        shares = softmax(scores)[order] if over_all else softmax(scores[order])
        total = 0
        for expert, share in zip(order, shares):
            gate, up, down = (matrices[kind][expert].astype(np.float64) for kind in range(3))
            g = gate @ token
            total = total + share * (down @ (g / (1 + np.exp(-g)) * (up @ token)))
        found.append(total)
    return np.array(found).reshape(x.shape)
