"""nvme_gpu.compute on a machine with a GPU and torch 2, beside torch: one JSON line for each case, then
`N passed, N failed`.

    python compute_on_gpu.py [--seconds 60] [CASE ...]

Needs the wheel and torch. Results are compared with torch in float64; outputs hold NaN before. Cases that begin with
`times` fail nothing by a figure: microseconds, medians of 5 runs in turns with torch. After `--seconds` no further
case begins. Exit status 0: nothing failed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
import traceback

import torch
from torch.nn import functional

import nvme_gpu
from nvme_gpu import compute

CASES = []
DRIVE = "sim:mem?size=256MiB&block=4096&queues=40&threads=8"
BLOCKS = {"q4_0": (32, 18, (0,)), "q4_1": (32, 20, (0, 2)), "q8_0": (32, 34, (0,)), "q4_k": (256, 144, (0, 2)),
          "q6_k": (256, 210, (208,)), "mxfp4": (64, 34, ())}  # fmt: skip
FORMATS = ["float32", "float16", "bfloat16", *BLOCKS]


class Skip(Exception):
    """Why a case cannot run here."""


def case(call):
    CASES.append(call)
    return call


def opened(extra="", device=DRIVE):
    return nvme_gpu.open(device + extra, gpu=0)


def poison(*shape, dtype=torch.float32):
    return torch.full(shape, math.nan, dtype=dtype, device="cuda")


def dice(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def weights(name, rows, columns):
    """Rows of a format as bytes, and their numbers as the host unpacks them."""
    if name not in BLOCKS:
        values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(getattr(torch, name))
        return values.view(torch.uint8).reshape(rows, columns * values.element_size()), values.float()
    elements, nbytes, scales = BLOCKS[name]
    generator = torch.Generator().manual_seed(rows + columns)
    blocks = torch.randint(0, 256, (rows, columns // elements, nbytes), generator=generator, dtype=torch.uint8)
    for at in scales:
        scale = (torch.rand(rows, columns // elements, 1, generator=generator) - 0.5).mul(0.1).half()
        blocks[..., at : at + 2] = scale.view(torch.uint8)
    if name == "mxfp4":
        # Two exponents near 1 in each pair of blocks.
        blocks[..., [0, 17]] = torch.randint(118, 126, (rows, columns // elements, 2), generator=generator, dtype=torch.uint8)
    stored = blocks.reshape(rows, columns // elements * nbytes)
    return stored, compute.unpack(stored, format=name)


def near(found, want, size, limit, what):
    """The largest error in parts of `size`; fails above `limit`, and for NaN."""
    torch.cuda.synchronize()
    if found.numel() == 0:
        assert found.shape == want.shape, what
        return 0.0
    worst = ((found.double() - want.double()).abs() / (size.double() + 1e-30)).max().item()
    assert worst <= limit, f"{what}: {worst:.3g} of the size, allowed are {limit}"
    return worst


def captured(call):
    """`call` as a graph, and what it returned."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    return graph, found


@case
def environment():
    return {
        "torch": torch.__version__, "cuda": torch.version.cuda, "gpu": torch.cuda.get_device_name(0),
        "nvme_gpu": nvme_gpu.__version__, "names": len(compute.__all__),
    }  # fmt: skip


@case
def products_of_stored_weights():
    worst = {}
    for name in FORMATS:
        for rows, columns in ((0, 256), (1, 256), (7, 512), (1031, 4096)):
            stored, values = weights(name, rows, columns)
            on_gpu, exact = stored.cuda(), values.cuda().double()
            found = compute.unpack(on_gpu, poison(rows, columns), format=name)
            assert torch.equal(found.cpu(), values), f"{name}: other numbers than the host's"
            for shape in ((columns,), (3, columns)):
                x = dice(*shape)
                out = poison(*shape[:-1], rows)
                assert compute.gemv(on_gpu, x, out, format=name) is out
                want, size = x.double() @ exact.T, x.double().abs() @ exact.abs().T
                worst[name] = max(worst.get(name, 0), near(out, want, size, 1e-5, f"{name} {rows} x {columns}"))
                sums = torch.ones_like(out)
                compute.gemv(on_gpu, x, sums, format=name, accumulate=True)
                near(sums, want + 1, size + 1, 1e-5, f"{name} accumulated")
    return {"worst": worst}


@case
def steps_of_a_token():
    for shape in ((0, 32), (1, 1), (3, 5, 33), (64, 8192)):
        x, weight = dice(*shape), dice(shape[-1])
        exact = x.double()
        want = exact / (exact.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
        near(compute.rms_norm(x, weight, poison(*shape)), want, want.abs() + 1e-3, 1e-4, "rms_norm")
        factor = dice(*shape, seed=1)
        want = functional.silu(exact) * factor.double()
        near(compute.silu_mul(x, factor, poison(*shape)), want, want.abs() + 1e-3, 1e-4, "silu_mul")
        if shape[0]:
            assert torch.equal(compute.argmax(x), x.argmax(-1)), "argmax"
            compute.rms_norm(x, weight, x)
    ties = torch.zeros(2, 100_001, device="cuda")
    ties[0, 777:] = 3
    assert compute.argmax(ties).tolist() == [777, 0]
    for tokens, heads, kv_heads, elements in ((1, 8, 8, 64), (5, 32, 4, 128), (3, 4, 1, 256), (2, 6, 2, 10)):
        places, first = 77, 41
        q, k, v = dice(tokens, heads, elements), dice(tokens, kv_heads, elements), dice(tokens, kv_heads, elements, seed=3)
        host = [one.cpu() for one in (q, k, v)]
        caches = [dice(places, kv_heads, elements, seed=s) for s in (4, 5)]
        of_host = [one.cpu() for one in caches]
        angles = compute.rope_angles(places, elements, device="cpu")
        compute.rope(q, k, v, *caches, first, angles.cuda())
        compute.rope(*host, *of_host, first, angles)
        for one, want in zip((q, *caches), (host[0], *of_host)):
            near(one, want.cuda(), want.cuda().abs() + 1, 1e-5, "rope")
        found = compute.attention(q, *caches, first, poison(*q.shape))
        for token in range(tokens):
            seen = slice(0, first + token + 1)
            keys, values = (one[seen].double().repeat_interleave(heads // kv_heads, 1) for one in caches)
            shares = torch.einsum("hd,nhd->hn", q[token].double(), keys).div(math.sqrt(elements)).softmax(-1)
            want = torch.einsum("hn,nhd->hd", shares, values)
            near(found[token], want, want.abs() + 0.1, 1e-4, "attention")
    return {}


@case
def router_beside_topk():
    for tokens, experts, k in ((0, 8, 2), (1, 1, 1), (513, 128, 4), (7, 4096, 33)):
        logits = dice(tokens, experts)
        for over_all in (False, True):
            found = compute.moe_router(logits, k, over_all=over_all, probabilities=True)
            top, which = logits.double().topk(k)
            assert torch.equal(found.experts.long(), which), "experts"
            share = logits.double().softmax(-1)
            near(found.probabilities, share, share + 1e-6, 1e-4, "probabilities")
            want = share.gather(1, which) if over_all else top.softmax(-1)
            near(found.weights, want, want + 1e-6, 1e-4, "weights")
    counts = torch.bincount(found.experts.flatten(), minlength=4096)
    return {"balance": compute.moe_load_balance(counts, found.probabilities)._asdict()}


@case
def matrices_of_a_drive():
    worst = {}
    with opened() as store:
        for name in FORMATS:
            for rows, columns, offset in ((1, 256, 0), (257, 512, 1022), (2048, 4096, 4096)):
                stored, values = weights(name, rows, columns)
                store.write_from(stored, offset).result(30)
                matrix = compute.Matrix(store, offset, name, (rows, columns))
                x, y = dice(columns), poison(rows)
                exact = values.cuda().double()
                matrix.gemv(x, y)
                matrix.check(30)
                size = exact.abs() @ x.double().abs()
                error = near(y, exact @ x.double(), size, 1e-5, f"{name} {rows} x {columns}")
                worst[name] = max(worst.get(name, 0), error)
        graph, _ = captured(lambda: matrix.gemv(x, y))
        for seed in (1, 2, 3):
            x.copy_(dice(columns, seed=seed))
            y.fill_(math.nan)
            graph.replay()
            near(y, exact @ x.double(), exact.abs() @ x.double().abs(), 1e-5, "in a graph")
            matrix.check(30)
        streams = [torch.cuda.Stream() for _ in range(4)]
        inputs = [dice(columns, seed=10 + s) for s in range(4)]
        torch.cuda.synchronize()
        found = []
        for turn in range(3):
            for stream, one in zip(streams, inputs):
                with torch.cuda.stream(stream):
                    found.append((one, matrix.gemv(one)))
        torch.cuda.synchronize()
        matrix.check(30)
        for one, product in found:
            near(product, exact @ one.double(), exact.abs() @ one.double().abs(), 1e-5, "of four streams")
    return {"worst": worst}


@case
def a_drive_that_fails():
    with opened("&fault=status:0x281@op=read") as store:
        matrix = compute.Matrix(store, 0, "q8_0", (512, 1024))
        y = poison(512).zero_()
        try:
            matrix.gemv(dice(1024), y, check="now")
        except nvme_gpu.Status as error:
            assert error.sc == 0x81 and error.row == 0, error
        else:
            raise AssertionError("no error")
        assert y.isnan().all(), "elements without their rows"
        matrix.gemv(dice(1024))
        try:
            matrix.check(30)
        except nvme_gpu.Status:
            return {}
    raise AssertionError("no error later")


def exact_pages(q, values, table, counts, scale):
    """Attention over pages in float64: values of pages (n, kv_heads, 2, tokens, d)."""
    heads, kv_heads = q.shape[1], values.shape[1]
    found = []
    for s in range(q.shape[0]):
        mine = []
        for head in range(heads):
            kv = head * kv_heads // heads
            row = table[s] if table.dim() == 2 else table[s, kv]
            count = counts[s] if counts.dim() == 1 else counts[s, kv]
            ids = row[: int(count)].long()
            keys, rows = (values[ids, kv, which].double().flatten(0, 1) for which in (0, 1))
            shares = (keys @ q[s, head].double() * scale).softmax(0)
            mine.append(shares @ rows)
        found.append(torch.stack(mine))
    return torch.stack(found)


@case
def pages_of_a_drive():
    answers = {}
    with opened() as store:
        for dtype in ("float16", "bfloat16"):
            pages = compute.KvPages(store, 4096, 64, kv_heads=4, head_dim=64, page_tokens=16, dtype=dtype)
            values = dice(64, 4, 2, 16, 64).to(getattr(torch, dtype))
            ids = torch.arange(64, device="cuda")
            pages.table.scatter(ids, values, check="now")
            summaries = pages.summaries()
            summaries.update(ids, values)
            on_host = pages.summaries("cpu")
            on_host.read()
            assert summaries.tobytes() == on_host.tobytes(), "summaries differ from the host's"
            q = dice(3, 16, 64)
            table = torch.randint(0, 64, (3, 40), generator=torch.Generator().manual_seed(5)).int().cuda()
            counts = torch.tensor([40, 1, 17], dtype=torch.int32, device="cuda")
            out = poison(3, 16, 64)
            compute.attention_paged(q, pages, table, counts, out)
            pages.check(30)
            want = exact_pages(q, values, table, counts, 1 / 8)
            answers[dtype] = near(out, want, want.abs() + 0.1, 1e-4, "paged")
            keep = compute.Keep(8, 1, 2)
            graph, found = captured(lambda: chosen_attention(pages, q, table, counts, summaries, keep))
            for seed in (1, 2):
                q.copy_(dice(3, 16, 64, seed=seed))
                graph.replay()
                torch.cuda.synchronize()
                pages.check(30)
                host = pages.choose(q.cpu(), table.cpu(), counts.cpu(), on_host, keep)
                assert torch.equal(found[1][1].cpu(), host[1]), "other counts than the host's"
                kept = [found[1][0].cpu()[s, h, :n] for s, row in enumerate(host[1].tolist()) for h, n in enumerate(row)]
                mine = [host[0][s, h, :n] for s, row in enumerate(host[1].tolist()) for h, n in enumerate(row)]
                assert all(map(torch.equal, kept, mine)), "other pages than the host's"
                want = exact_pages(q, values, host[0], host[1], 1 / 8)
                near(found[0], want, want.abs() + 0.1, 1e-4, "chosen pages")
            table[1, 0] = 64
            compute.attention_paged(q, pages, table, counts, out)
            try:
                pages.check(30)
                raise AssertionError("no error for a page that is not there")
            except nvme_gpu.Usage:
                assert out[1].isnan().all() and not out[0].isnan().any()
    return answers


def chosen_attention(pages, q, table, counts, summaries, keep):
    chosen = pages.choose(q, table, counts, summaries, keep)
    return compute.attention_paged(q, pages, *chosen), chosen


@case
def experts_of_a_drive():
    answers = {}
    with opened() as store:
        at, layers = 0, []
        for kinds in (("q4_0", "q8_0", "q4_1"), ("bfloat16", "float16", "float32")):
            layer = []
            for kind, name in enumerate(kinds):
                rows, columns = (256, 512) if kind == 2 else (512, 256)
                stored, _ = weights(name, 16 * rows, columns)
                store.write_from(stored, at).result(30)
                layer.append((at, name))
                at += stored.numel()
            layers.append(layer)
        for policy in ("lru", "lfu", "clock"):
            experts = compute.Experts(
                store, layers, width=256, hidden=512, experts=16, choices=3,
                cache_bytes=14 * 1_600_000, policy=policy, pinned=[(0, 5)], tokens=2,
            )  # fmt: skip
            x, logits, y = dice(2, 256), dice(2, 16), poison(2, 256)
            graph, _ = captured(lambda: [experts.compute(layer, logits, x, y) for layer in (0, 1)])
            for seed in range(12):
                x.copy_(dice(2, 256, seed=seed))
                logits.copy_(dice(2, 16, seed=seed + 99))
                y.fill_(math.nan)
                graph.replay()
                torch.cuda.synchronize()
                experts.check(30)
                want = experts.compute(1, logits.cpu(), x.cpu()).cuda()
                near(y, want, want.abs().max() + torch.zeros_like(want), 1e-4, policy)
            counts = experts.counts()
            answers[policy] = {"hits": counts.hits, "misses": counts.misses, "evictions": counts.evictions}
            assert counts.hits + counts.misses == 2 * 2 * 3 * 13, counts
    return answers


def published(width, hidden, experts, form):
    """A file of safetensors as bytes, with the experts of one layer: those of gpt-oss, or FP8 in blocks of 128 x 128."""
    generator = torch.Generator().manual_seed(width)
    bytes_ = lambda low, high, *shape: torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)  # noqa: E731
    tensors, bank = [], "model.layers.0.mlp.experts"
    if form == "gpt-oss":
        for name, rows, columns in (("gate_up_proj", 2 * hidden, width), ("down_proj", width, hidden)):
            tensors.append((f"{bank}.{name}_blocks", "U8", bytes_(0, 256, experts, rows, columns // 32, 16)))
            tensors.append((f"{bank}.{name}_scales", "U8", bytes_(116, 121, experts, rows, columns // 32)))
            bias = torch.randn(experts, rows, generator=generator).bfloat16()
            tensors.append((f"{bank}.{name}_bias", "BF16", bias))
    else:
        for expert in range(experts):
            for kind, rows, columns in (("gate", hidden, width), ("up", hidden, width), ("down", width, hidden)):
                name = f"{bank}.{expert}.{kind}_proj.weight"
                tensors.append((name, "F8_E4M3", bytes_(0, 120, rows, columns)))
                scale = torch.rand(-(-rows // 128), -(-columns // 128), generator=generator) / 3000
                tensors.append((f"{name}_scale_inv", "F32", scale))
    head, at, data = {}, 0, []
    for name, dtype, tensor in tensors:
        flat = tensor.contiguous().flatten().view(torch.uint8)
        head[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [at, at + len(flat)]}
        at += len(flat)
        data.append(flat)
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    begin = torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8)
    return torch.cat([begin, *data])


@case
def published_experts_of_a_drive():
    answers = {}
    for form, activation in (("gpt-oss", {"limit": 7.0, "alpha": 1.702}), ("fp8", {})):
        with opened() as store:
            store.write_from(published(256, 512, 16, form), 0).result(30)
            slot = 4 * 3 * 256 * 512 if form == "fp8" else 3 * 256 * 512 * 17 // 32
            experts = compute.Experts(
                compute.ExpertFiles(store), choices=3, cache_bytes=9 * (slot + 96), tokens=2, pinned=[(0, 5)], **activation
            )
            x, logits, y, z = dice(2, 256) / 8, dice(2, 16), poison(2, 256), poison(2, 256)

            def both():
                experts.compute(0, logits, x, y)
                top, which = logits.topk(3)
                experts.compute(0, None, x, z, chosen=(which.int(), top.softmax(-1)))

            graph, _ = captured(both)
            for seed in range(12):
                x.copy_(dice(2, 256, seed=seed) / 8)
                logits.copy_(dice(2, 16, seed=seed + 99))
                y.fill_(math.nan)
                z.fill_(math.nan)
                graph.replay()
                torch.cuda.synchronize()
                experts.check(30)
                want = experts.compute(0, logits.cpu(), x.cpu()).cuda()
                size = want.abs().max() + torch.zeros_like(want)
                near(y, want, size, 1e-4, form)
                near(z, want, size, 1e-4, f"{form}, given choices")
            counts = experts.counts()
            answers[form] = {"hits": counts.hits, "misses": counts.misses, "evictions": counts.evictions}
            assert counts.evictions > 0, counts
    return answers


def layer_by_torch(x, w, b, activation):
    sums = functional.linear(x, w, b)
    if activation is None:
        return sums
    return functional.gelu(sums, approximate="tanh") if activation == "gelu" else getattr(functional, activation)(sums)


def gradients_by_torch(dy, x, w, sums, activation):
    """The gradients of inputs, weights and biases in float64."""
    before = sums.double().requires_grad_()
    y = layer_by_torch(before, torch.eye(before.shape[-1], dtype=torch.float64, device="cuda"), None, activation)
    (dsums,) = torch.autograd.grad(y, before, dy.double())
    rows, of_x = dsums.reshape(-1, dsums.shape[-1]), x.double().reshape(-1, x.shape[-1])
    return (dsums @ w.double(), rows.T @ of_x, rows.sum(0))


@case
def linear_layers():
    worst = {}
    for shape, outputs in (((1,), 1), ((3, 5), 7), ((0, 4), 3), ((2, 129, 260), 515), ((1024, 1024), 768)):
        for activation in (None, "relu", "silu", "gelu"):
            x, w, b = dice(*shape), dice(outputs, shape[-1]) / math.sqrt(shape[-1]), dice(outputs, seed=1)
            exact = [one.double().requires_grad_() for one in (x, w, b)]
            want = layer_by_torch(*exact, activation)
            # Of all products of a sum.
            size = functional.linear(*(one.detach().abs() for one in exact))
            dy = dice(*want.shape, seed=2)
            for rung in ("naive", "persistent", "fused"):
                call = getattr(compute, f"linear_forward_{rung}")
                sums, out = poison(*want.shape), poison(*want.shape)
                call(x, w, b, activation=activation, out=out, sums=sums)
                error = near(out, want.detach(), size, 1e-5, f"{rung} {activation} {shape}")
                worst[rung] = max(worst.get(rung, 0), error)
            # By the sums that the layer had: the slope of relu has a step at 0.
            want = gradients_by_torch(dy, x, w, sums, activation)
            for rung in ("naive", "atomic_free", "warp_reduce"):
                found = getattr(compute, f"linear_backward_{rung}")(dy, x, w, sums, activation=activation)
                for one, gradient in zip(found, want):
                    of_all = gradient.abs() + gradient.abs().mean() + 1e-3 if gradient.numel() else gradient
                    error = near(one, gradient, of_all, 1e-4, f"{rung} {activation} {shape}")
                    worst[rung] = max(worst.get(rung, 0), error)
            again = compute.linear_backward_atomic_free(dy, x, w, sums, activation=activation)
            first = compute.linear_backward_atomic_free(dy, x, w, sums, activation=activation)
            assert all(map(torch.equal, again, first)), "other bits the second time"
            given = [one.clone().requires_grad_() for one in (x, w, b)]
            compute.linear(*given, activation=activation).backward(dy)
            for one, gradient in zip(given, again):
                assert torch.equal(one.grad, gradient), "autograd has other bits than the function"
    for dtype in (torch.bfloat16, torch.float16):
        x, w, b = dice(300, 512, dtype=dtype), dice(264, 512, dtype=dtype) / 16, dice(264, dtype=dtype)
        out = poison(300, 264, dtype=dtype)
        compute.linear_forward_mixed_precision(x, w, b, activation="gelu", out=out)
        want = layer_by_torch(x.double(), w.double(), b.double(), "gelu")
        worst[str(dtype)] = near(out, want, want.abs() + 1, 1e-2, "mixed")
    return {"worst": worst}


@case
def attention_rungs():
    worst = {}
    shapes = ((1, 1, 1, 1, 1, 8), (2, 8, 2, 65, 130, 64), (1, 4, 4, 300, 300, 128), (1, 16, 2, 1, 4097, 128), (1, 6, 3, 17, 33, 40))
    for sequences, heads, kv_heads, tokens, length, elements in shapes:
        for dtype in (torch.bfloat16, torch.float16):
            q = dice(sequences, tokens, heads, elements, dtype=dtype).transpose(1, 2)
            k, v = (dice(sequences, length, kv_heads, elements, dtype=dtype, seed=s).transpose(1, 2) for s in (1, 2))
            for causal in (False, True):
                mask = torch.ones(tokens, length, dtype=torch.bool, device="cuda")
                mask = mask.tril(length - tokens) if causal else mask
                with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                    want = functional.scaled_dot_product_attention(
                        q.double(), *(one.double().repeat_interleave(heads // kv_heads, 1) for one in (k, v)), attn_mask=mask
                    )
                for rung in ("attention_naive", "attention_tiled", "attention_flash", "attention_flash2", "multi_query_attention"):
                    out = poison(sequences, tokens, heads, elements, dtype=dtype).transpose(1, 2)
                    getattr(compute, rung)(q, k, v, out, causal=causal)
                    error = near(out, want, want.abs() + 0.1, 2e-2, f"{rung} {dtype} {causal} {tuple(q.shape)} {length}")
                    worst[rung] = max(worst.get(rung, 0), error)
    return {"worst": worst}


@case
def matmul_rungs():
    if not hasattr(compute, "matmul"):
        raise Skip("no matmul in this wheel")
    worst = {}
    for m, n, k in ((1, 1, 1), (0, 5, 3), (5, 3, 0), (33, 65, 17), (200, 130, 1000), (1024, 768, 2048), (129, 257, 8)):
        for dtype, rungs in (
            (torch.float32, ("auto", "naive", "tiled", "vectorized", "coarsened")),
            (torch.bfloat16, ("auto", "mma", "wgmma")),
            (torch.float16, ("mma", "wgmma")),
        ):
            a, b = dice(m, k, dtype=dtype), dice(k, n + 3, dtype=dtype)[:, :n]
            want = a.double() @ b.double()
            size = a.double().abs() @ b.double().abs()
            for rung in rungs:
                if rung == "wgmma" and torch.cuda.get_device_capability()[0] != 9:
                    continue
                for result in {dtype, torch.float32}:
                    out = poison(m, n, dtype=result)
                    compute.matmul(a, b, out, rung=rung)
                    limit = 1e-5 if result == torch.float32 else 1e-2
                    error = near(out, want, size + 1e-6, limit, f"{rung} {dtype} {m} x {n} x {k}")
                    worst[f"{rung} {result}"] = max(worst.get(f"{rung} {result}", 0), error)
    assert torch.equal(compute.matmul_wmma(a, b), compute.matmul_mma(a, b))
    return {"worst": worst}


@case
def several_streams_and_one_graph():
    """A chain of functions on four streams at once, and the same as a graph, against the same alone."""
    w = dice(512, 512) / 20
    norm, half = dice(512), w.bfloat16()

    def chain(x):
        y = compute.rms_norm(x, norm)
        y = compute.linear_forward_fused(y, w, activation="silu")
        y = compute.silu_mul(y, compute.gemv(half, y))
        routed = compute.moe_router(y, 4)
        return y, compute.argmax(y), routed.experts, routed.weights

    inputs = [dice(9, 512, seed=s) for s in range(4)]
    alone = [chain(x) for x in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    for _ in range(20):
        found = []
        for stream, x in zip(streams, inputs):
            with torch.cuda.stream(stream):
                found.append(chain(x))
        torch.cuda.synchronize()
        for one, want in zip(found, alone):
            assert all(map(torch.equal, one, want)), "other numbers on four streams"
    x = inputs[0].clone()
    graph, found = captured(lambda: chain(x))
    for one, want in zip(inputs, alone):
        x.copy_(one)
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, found, want)), "other numbers in a graph"
    return {}


@case
def in_a_compiled_function():
    """torch.compile without a back end of its own: the layer's results and gradients are those of the plain function."""
    w, b = dice(64, 32).requires_grad_(), dice(64).requires_grad_()

    def plain(x):
        return (compute.linear(x * 2, w, b, activation="silu") + 1).square().sum()

    compiled = torch.compile(plain, backend="eager")
    answers = []
    for call in (plain, compiled, compiled):
        w.grad = b.grad = None
        loss = call(dice(5, 32))
        loss.backward()
        answers.append((loss.detach(), w.grad, b.grad))
    for one in answers[1:]:
        assert all(map(torch.equal, one, answers[0])), "other numbers in a compiled function"
    return {}


@case
def matrices_times_many_vectors():
    """Products of many vectors, and of rows by ids, with a matrix that is read meanwhile."""
    if not hasattr(compute.Matrix, "gemm"):
        raise Skip("no gemm in this wheel")
    worst = {}
    with opened() as store:
        for name in FORMATS:
            for rows, columns in ((64, 256), (1000, 1024)):
                stored, values = weights(name, rows, columns)
                store.write_from(stored, 4096).result(30)
                matrix = compute.Matrix(store, 4096, name, (rows, columns))
                exact = values.cuda().double()
                ids = torch.randint(0, rows, (333,), generator=torch.Generator().manual_seed(3))
                for kind in (torch.int64, torch.int32):
                    x, y = dice(columns), poison(333)
                    which = ids.cuda().to(kind)
                    matrix.gathered_gemv(which, x, y)
                    matrix.check(30)
                    mine = exact[ids.cuda()]
                    error = near(y, mine @ x.double(), mine.abs() @ x.double().abs(), 1e-5, f"gathered {name}")
                    worst[f"gathered {name}"] = max(worst.get(f"gathered {name}", 0), error)
                for dtype in (torch.bfloat16, torch.float16):
                    if name in ("float32", "mxfp4") or name in ("bfloat16", "float16") and name != str(dtype)[6:]:
                        continue
                    rounded = values.cuda().to(dtype).double()
                    for tokens in (1, 17, 300):
                        x, y = dice(tokens, columns, dtype=dtype), poison(tokens, rows)
                        matrix.gemm(x, y)
                        matrix.check(30)
                        want, size = x.double() @ rounded.T, x.double().abs() @ rounded.abs().T
                        error = near(y, want, size, 1e-5, f"gemm {name} {dtype} {tokens}")
                        worst[f"gemm {name}"] = max(worst.get(f"gemm {name}", 0), error)
        which[5] = rows
        matrix.gathered_gemv(which, dice(columns), y := poison(333))
        try:
            matrix.check(30)
            raise AssertionError("no error for a row that is not there")
        except nvme_gpu.Usage:
            assert y[5].isnan() and y.isnan().sum() == 1
    return {"worst": worst}


def timed(ways, rounds=5, repeats=20):
    """Microseconds of each way: medians of rounds in turns, by events, `repeats` calls each."""
    found = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, call in ways.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(repeats):
                call()
            end.record()
            torch.cuda.synchronize()
            if turn:
                found[name].append(begin.elapsed_time(end) * 1e3 / repeats)
    return {name: round(statistics.median(one), 2) for name, one in found.items()}


@case
def times_of_matmul():
    if not hasattr(compute, "matmul"):
        raise Skip("no matmul in this wheel")
    torch.backends.cuda.matmul.allow_tf32 = False
    answers = {}
    for size in (1024, 4096):
        a, b = dice(size, size), dice(size, size, seed=1)
        out = torch.empty_like(a)
        ways = {rung: (lambda rung=rung: compute.matmul(a, b, out, rung=rung)) for rung in ("tiled", "vectorized", "coarsened")}
        answers[f"float32 {size}"] = timed({**ways, "torch": lambda: torch.matmul(a, b, out=out)}, repeats=3)
        x, y = a.bfloat16(), b.bfloat16()
        half = torch.empty_like(x)
        rungs = ("mma", "wgmma") if torch.cuda.get_device_capability()[0] == 9 else ("mma",)
        ways = {rung: (lambda rung=rung: compute.matmul(x, y, half, rung=rung)) for rung in rungs}
        answers[f"bfloat16 {size}"] = timed({**ways, "torch": lambda: torch.matmul(x, y, out=half)}, repeats=10)
    return answers


@case
def times_of_linear():
    answers = {}
    torch.backends.cuda.matmul.allow_tf32 = False
    for tokens, inputs, outputs in ((4096, 4096, 4096), (64, 4096, 4096)):
        x, w, b = dice(tokens, inputs), dice(outputs, inputs), dice(outputs)
        out = torch.empty(tokens, outputs, device="cuda")
        answers[f"float32 {tokens}"] = timed(
            {
                "fused": lambda: compute.linear_forward_fused(x, w, b, activation="gelu", out=out),
                "persistent": lambda: compute.linear_forward_persistent(x, w, b, activation="gelu", out=out),
                "torch": lambda: functional.gelu(functional.linear(x, w, b), approximate="tanh"),
            },
            repeats=4,
        )
        h, u, c = x.bfloat16(), w.bfloat16(), b.bfloat16()
        mixed = torch.empty(tokens, outputs, dtype=torch.bfloat16, device="cuda")
        answers[f"bfloat16 {tokens}"] = timed(
            {
                "mixed_precision": lambda: compute.linear_forward_mixed_precision(h, u, c, activation="gelu", out=mixed),
                "torch": lambda: functional.gelu(functional.linear(h, u, c), approximate="tanh"),
            }
        )
        given = [one.clone().requires_grad_() for one in (x, w, b)]
        dy = dice(tokens, outputs, seed=3)

        def both(forward, given=given, dy=dy):
            return torch.autograd.grad(forward(*given), given, dy)

        answers[f"forward and backward {tokens}"] = timed(
            {"linear": lambda: both(compute.linear), "torch": lambda: both(functional.linear)}, repeats=3
        )
    return answers


@case
def times_of_attention():
    answers = {}
    flash = torch.nn.attention.SDPBackend.FLASH_ATTENTION
    for name, sequences, heads, kv_heads, tokens, length in (
        ("prefill 4096", 1, 32, 32, 4096, 4096),
        ("prefill 2048 causal", 4, 32, 32, 2048, 2048),
        ("decode 16384", 8, 32, 8, 1, 16384),
    ):
        q = dice(sequences, heads, tokens, 128, dtype=torch.bfloat16)
        k, v = (dice(sequences, kv_heads, length, 128, dtype=torch.bfloat16, seed=s) for s in (1, 2))
        out, causal = torch.empty_like(q), "causal" in name

        def by_torch(q=q, k=k, v=v, causal=causal, grouped=heads != kv_heads):
            with torch.nn.attention.sdpa_kernel(flash):
                functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

        ours = compute.multi_query_attention if tokens == 1 else compute.attention_flash2
        ways = {ours.__name__: lambda: ours(q, k, v, out, causal=causal), "SDPA flash": by_torch}
        answers[name] = timed(ways, repeats=5)
    return answers


@case
def times_of_small_functions():
    """GPU time of back-to-back calls, which for small ones is that of the call itself."""
    x, w, logits = dice(64, 4096), dice(4096), dice(64, 128)
    matrix, one, out = dice(8192, 8192, dtype=torch.bfloat16), dice(8192), torch.empty(8192, device="cuda")
    half = one.bfloat16()
    factor = dice(64, 4096, seed=1)
    return {
        "gemv bf16 8192": timed({"gemv": lambda: compute.gemv(matrix, one, out), "torch": lambda: matrix @ half}),
        "rms_norm 64 x 4096": timed(
            {"rms_norm": lambda: compute.rms_norm(x, w), "torch": lambda: functional.rms_norm(x, (4096,), w, 1e-6)}
        ),
        "silu_mul 64 x 4096": timed(
            {"silu_mul": lambda: compute.silu_mul(x, factor), "torch": lambda: functional.silu(x) * factor}
        ),
        "router 64 of 128": timed(
            {
                "moe_router": lambda: compute.moe_router(logits, 4),
                "torch": lambda: torch.softmax(logits.topk(4).values, -1),
            }
        ),
        "argmax 64 x 4096": timed({"argmax": lambda: compute.argmax(x), "torch": lambda: x.argmax(-1)}),
    }


@case
def times_of_the_drive():
    """A product whose matrix is read meanwhile, beside a read of the matrix and the product."""
    answers = {}
    with opened(device="sim:mem?size=512MiB&block=4096&queues=40&threads=12") as store:
        for name in ("bfloat16", "q8_0", "q4_0"):
            rows, columns = 16_384, 8192
            matrix = compute.Matrix(store, 0, name, (rows, columns))
            room = torch.empty(rows, matrix.nbytes // rows, dtype=torch.uint8, device="cuda")
            x, y = dice(columns), poison(rows)

            def read_first(room=room, x=x, y=y, name=name):
                store.read_into(room, 0).result(30)
                compute.gemv(room, x, y, format=name)

            ways = {"streamed": lambda: matrix.gemv(x, y), "read, then gemv": read_first}
            us = timed(ways, repeats=2)
            matrix.check(30)
            answers[name] = {**us, "streamed_gb_per_s": round(matrix.nbytes / us["streamed"] / 1e3, 1)}
    return answers


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("cases", nargs="*")
    words = parser.parse_args()
    passed = failed = skipped = 0
    start = time.perf_counter()
    for one in CASES:
        if words.cases and one.__name__ not in words.cases:
            continue
        begin = time.perf_counter()
        line = {"case": one.__name__, "result": "passed"}
        try:
            if begin - start > words.seconds:
                raise Skip(f"{words.seconds} s are over")
            line.update(one() or {})
            torch.cuda.synchronize()
            passed += 1
        except Skip as why:
            line.update(result="skipped", why=str(why))
            skipped += 1
        except BaseException as error:
            line.update(result="failed", error=f"{type(error).__name__}: {error}"[:1000])
            line["where"] = traceback.format_exc().splitlines()[-6:]
            failed += 1
            if isinstance(error, KeyboardInterrupt):
                break
        line["seconds"] = round(time.perf_counter() - begin, 3)
        print(json.dumps(line, default=str), flush=True)
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
