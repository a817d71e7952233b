"""Small models of torch alone that have experts under the names and with the attributes of transformers' models."""

from __future__ import annotations

import types

import torch
from safetensors_file import file_bytes

WIDTH, HIDDEN, EXPERTS, CHOICES, LAYERS = 32, 16, 6, 2, 3


class Router(torch.nn.Module):
    """Softmax over all, as Qwen3-MoE; returns logits, weights and numbers."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(EXPERTS, WIDTH))

    def forward(self, x):
        logits = x @ self.weight.t()
        weights, chosen = torch.topk(torch.softmax(logits, -1), CHOICES, dim=-1)
        return logits, weights / weights.sum(-1, keepdim=True), chosen


class Experts(torch.nn.Module):
    """What ``forward`` computes is written apart from the product code of the package: a loop over tokens' experts."""

    has_bias, is_transposed, is_concatenated, has_gate = False, False, True, True

    def __init__(self):
        super().__init__()
        self.num_experts = EXPERTS
        self.config = types.SimpleNamespace(_experts_implementation="eager")
        both, down = (2 * HIDDEN, WIDTH), (WIDTH, HIDDEN)
        if self.is_transposed:
            both, down = both[::-1], down[::-1]
        self.gate_up_proj = torch.nn.Parameter(torch.empty(EXPERTS, *both))
        self.down_proj = torch.nn.Parameter(torch.empty(EXPERTS, *down))
        if self.has_bias:
            self.gate_up_proj_bias = torch.nn.Parameter(torch.empty(EXPERTS, 2 * HIDDEN))
            self.down_proj_bias = torch.nn.Parameter(torch.empty(EXPERTS, WIDTH))

    def forward(self, x, chosen, weights):
        out = torch.zeros_like(x)
        for expert in range(self.num_experts):
            token, place = torch.where(chosen == expert)
            if not len(token):
                continue
            both = x[token] @ (self.gate_up_proj[expert] if self.is_transposed else self.gate_up_proj[expert].t())
            if self.has_bias:
                both = both + self.gate_up_proj_bias[expert]
            gate, up = both.chunk(2, -1) if self.is_concatenated else (both[..., ::2], both[..., 1::2])
            product = torch.nn.functional.silu(gate) * up
            result = product @ (self.down_proj[expert] if self.is_transposed else self.down_proj[expert].t())
            if self.has_bias:
                result = result + self.down_proj_bias[expert]
            out.index_add_(0, token, (result * weights[token, place, None]).to(out.dtype))
        return out


class BiasedExperts(Experts):
    """As gpt-oss has them."""

    has_bias, is_transposed, is_concatenated = True, True, False


# The package knows classes by their names.
Experts.__module__, Experts.__name__ = "transformers.models.qwen3_moe.modeling_qwen3_moe", "Qwen3MoeExperts"
BiasedExperts.__module__, BiasedExperts.__name__ = "transformers.models.gpt_oss.modeling_gpt_oss", "GptOssExperts"


class Block(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.gate, self.experts = Router(), kind()

    def forward(self, x):
        _, weights, chosen = self.gate(x)
        return self.experts(x, chosen, weights)


class Layer(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.mlp = Block(kind)


class Model(torch.nn.Module):
    """Layers of experts, with what goes round them."""

    def __init__(self, kind=Experts, dtype=torch.float32, seed=0):
        super().__init__()
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList(Layer(kind) for _ in range(LAYERS))
        generator = torch.Generator().manual_seed(seed)
        for one in self.parameters():
            one.data.copy_(torch.randn(one.shape, generator=generator) * 0.3)
        self.to(dtype)

    def forward(self, x):
        for layer in self.model.layers:
            x = x + layer.mlp(x)
        return x


def tokens(count, dtype=torch.float32, seed=1):
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tensors_of(model):
    """The tensors of a checkpoint: one for each matrix of an expert, as transformers saves Qwen3-MoE; merged with biases."""
    found = {}
    for number, layer in enumerate(model.model.layers):
        experts, bank = layer.mlp.experts, f"model.layers.{number}.mlp.experts"
        for name, one in experts.named_parameters():
            if experts.has_bias:
                found[f"{bank}.{name}"] = one.detach()
                continue
            for expert in range(EXPERTS):
                parts = {"down_proj": one[expert]} if name == "down_proj" else {}
                if name == "gate_up_proj":
                    parts = dict(zip(("gate_proj", "up_proj"), one[expert].chunk(2)))
                for part, value in parts.items():
                    found[f"{bank}.{expert}.{part}.weight"] = value.detach()
    return found


_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint8: "U8", torch.int32: "I32", torch.int64: "I64"}


def bytes_of(tensor):
    """The bytes of a tensor: numpy has no bfloat16."""
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.dtype != torch.uint8 else flat.numpy().tobytes()


def safetensors(path, tensors, names=None):
    """Writes tensors by name; ``names``: types of those that torch has no name for."""
    kinds = {name: _NAMES[tensor.dtype] for name, tensor in tensors.items() if name not in (names or {})} | (names or {})
    parts = [(name, kinds[name], tensors[name].shape, bytes_of(tensors[name])) for name in sorted(tensors)]
    # Data begin at a multiple of 16, so that the memory of an expert has no gaps.
    path.write_bytes(file_bytes(parts, align=16))
    return path
