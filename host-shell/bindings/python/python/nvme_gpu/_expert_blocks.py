"""The mixtures of experts in a model of transformers: which modules they are, and whether they are what is known of them."""

from __future__ import annotations

import inspect
import re
from typing import Any, NamedTuple

from ._errors import Usage, listed
from ._expert_slots import ExpertForm

_FLOATS = ("torch.float32", "torch.float16", "torch.bfloat16")
_FAMILIES = {
    "gpt_oss": "GptOssExperts",
    "mixtral": "MixtralExperts",
    "qwen3_moe": "Qwen3MoeExperts",
    "qwen3_next": "Qwen3NextExperts",
    "qwen3_5_moe": "Qwen3_5MoeExperts",
    "deepseek_v3": "DeepseekV3Experts",
    "deepseek_v4": "DeepseekV4Experts",
    "glm4_moe": "Glm4MoeExperts",
}
KNOWN = {(f"transformers.models.{name}.modeling_{name}", found): name for name, found in _FAMILIES.items()}
IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
_STRIPPED = "_nvme_gpu_stripped"


class ExpertBlock(NamedTuple):
    """The experts of a layer in a model."""

    name: str
    """Of the module in the model."""
    module: Any
    parent: Any
    layer: int
    experts: int
    """How many."""
    form: ExpertForm
    dtype: Any
    device: Any
    """Where the parameters lie; ``meta`` if they have no memory."""

    @property
    def router(self) -> Any | None:
        """What chooses by the block's input alone; None for a choice by the ids of tokens."""
        found = getattr(self.parent, "gate", None) or getattr(self.parent, "router", None)
        takes = [] if found is None else list(inspect.signature(type(found).forward).parameters)[1:]
        return found if len(takes) == 1 else None


def is_known(module: Any) -> bool:
    """Whether a module is one of the classes of experts that can be streamed."""
    kind = type(module)
    return (kind.__module__, kind.__name__) in KNOWN


def find_blocks(model: Any) -> list[ExpertBlock]:
    """The experts of all layers, in the order of the model.

    Raises :class:`Usage`, with the name, for experts of a class that is not known or with parameters of other names, shapes
    or dtypes, for two layers of one number, and for a model without experts.
    """
    found = []
    for name, module in model.named_modules():
        if is_known(module):
            found.append(_block(model, name, module))
        elif name.rpartition(".")[2] == "experts" or type(module).__name__.endswith("Experts"):
            is_ours = type(module).__name__ == "StreamedExperts"
            raise Usage(
                f"{name} is of the class {type(module).__name__}, " + ("which streams" if is_ours else "which is not known"),
                "stream a model once" if is_ours else "use a model of " + ", ".join(sorted(KNOWN.values())),
            )
    if not found:
        raise Usage(f"{type(model).__name__} has no experts", "use a model of " + ", ".join(sorted(KNOWN.values())))
    names: dict[int, str] = {}
    for block in found:
        # Files are asked for the number alone: a second stack of layers would get the experts of the first one.
        other = names.setdefault(block.layer, block.name)
        if other != block.name:
            raise Usage(f"{other} and {block.name} are both layer {block.layer}", "pass the part of the model with one of them")
    return found


def strip(model: Any) -> None:
    """Takes the parameters of all experts out of a model, which then loads without them."""
    for block in find_blocks(model):
        about = {name: (tuple(one.shape), one.dtype, one.device) for name, one in block.module.named_parameters()}
        release(block.module)
        setattr(block.module, _STRIPPED, about)
        # transformers gives no random numbers to what is said to have its weights.
        block.module._is_hf_initialized = True


def release(module: Any) -> None:
    """Frees the parameters of a module of experts."""
    for name in list(module._parameters):
        del module._parameters[name]


def _block(model: Any, name: str, module: Any) -> ExpertBlock:
    numbers = re.findall(r"\.(\d+)\.", f".{name}.")
    if not numbers:
        raise Usage(f"{name} says no layer", "pass the whole model")
    if getattr(module, "_is_expert_parallel", False):
        raise Usage(f"{name} has the experts of one of several processes", "load the model without expert parallelism")
    check_implementation(name, module)
    about = getattr(module, _STRIPPED, None)
    if about is None:
        about = {name: (tuple(one.shape), one.dtype, one.device) for name, one in module.named_parameters()}
    form = _form(module, name, about)
    expected = {key: (int(module.num_experts), *shape) for key, shape in form.shapes().items()}
    given = {key: shape for key, (shape, _, _) in about.items()}
    if given != expected:
        wrong = sorted(set(given.items()) ^ set(expected.items()))
        raise Usage(f"{name} has parameters that are not known: {listed(wrong)}", "use transformers 5.19")
    buffers = [key for key, _ in module.named_buffers()]
    if buffers:
        raise Usage(f"{name} has buffers that are not known: {listed(buffers)}", "use transformers 5.19")
    dtypes, devices = {str(dtype) for _, dtype, _ in about.values()}, {str(device) for _, _, device in about.values()}
    if len(dtypes) > 1 or len(devices) > 1 or not dtypes <= set(_FLOATS):
        raise Usage(
            f"the parameters of {name} are {listed(sorted(dtypes))} on {listed(sorted(devices))}",
            "load the model without quantisation, each block on one device",
        )
    _, dtype, device = about["down_proj"]
    parent = model.get_submodule(name.rpartition(".")[0])
    return ExpertBlock(name, module, parent, int(numbers[-1]), int(module.num_experts), form, dtype, device)


def check_implementation(name: str, module: Any) -> str:
    """The name of what multiplies in a module of experts.

    Raises :class:`Usage` for one that needs the experts elsewhere than in slots.
    """
    chosen = getattr(module.config, "_experts_implementation", None) or "eager"
    if chosen not in IMPLEMENTATIONS:
        raise Usage(
            f"{name} multiplies by {chosen!r}",
            "call model.set_experts_implementation with one of " + ", ".join(IMPLEMENTATIONS),
        )
    return str(chosen)


def _form(module: Any, name: str, about: dict[str, Any]) -> ExpertForm:
    flags = {flag: getattr(module, flag, None) for flag in ("has_gate", "has_bias", "is_transposed", "is_concatenated")}
    if flags["has_gate"] is not True or not all(isinstance(one, bool) for one in flags.values()):
        raise Usage(f"{name} says of itself {flags}", "use transformers 5.19")
    shape: tuple[int, ...] = about["down_proj"][0] if "down_proj" in about else ()
    if len(shape) != 3:
        raise Usage(f"{name}.down_proj has the shape {shape}", "use transformers 5.19")
    is_transposed = bool(flags["is_transposed"])
    width, hidden = (shape[2], shape[1]) if is_transposed else (shape[1], shape[2])
    return ExpertForm(width, hidden, is_transposed, not flags["is_concatenated"], bool(flags["has_bias"]))
