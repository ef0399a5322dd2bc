"""A transformers causal model whose parameters are views of given memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from plexrl.engines.layout import Architecture
from plexrl.engines.torch import attention
from plexrl.types import BadInput

# Models that change the logits after the head: the engine computes logits from hidden states and the head alone.
_HEAD_EXTRAS = ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier")


def skeleton(model_dir: str, arch: Architecture, dtype: torch.dtype, max_context: int) -> PreTrainedModel:
    """The module tree without parameter memory (on meta), its buffers computed.

    Raises BadInput for a model that this engine would run wrongly.
    """
    try:
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
        config._attn_implementation = attention.NAME
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(f"cannot build {model_dir}: {error}", "Use a causal language model of transformers") from error
    _refuse(model, model_dir, max_context)
    names = {name for name, _ in model.named_parameters()} - ({"lm_head.weight"} if arch.tied else set())
    if names != arch.shapes.keys():
        odd = sorted(names ^ arch.shapes.keys())[:3]
        raise BadInput(f"{model_dir}: parameters and files differ at {', '.join(odd)}", "Save it with save_pretrained")
    _fill_buffers(model)
    return model.eval()


def bind(model: PreTrainedModel, views: Mapping[str, Tensor], grads: Mapping[str, Tensor] | None = None) -> None:
    """Make every parameter the view of its name; tied ones share it. With grads they train, else they are frozen."""
    bound: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for leaf, old in list(module._parameters.items()):
            if old is None:
                continue
            if id(old) not in bound:
                name = f"{path}.{leaf}" if path else leaf
                bound[id(old)] = parameter_over(views[name], grads[name] if grads is not None else None)
            module._parameters[leaf] = bound[id(old)]


def parameter_over(view: Tensor, grad: Tensor | None) -> nn.Parameter:
    """A parameter whose memory is the view. With grad it trains and gradients add up there, else it is frozen.

    `.data` gives each its own version counter: all views of a region share one, and autograd would take the first
    gradient written for a change of every parameter.
    """
    parameter = nn.Parameter(view.data, requires_grad=grad is not None)
    if grad is not None:
        parameter.grad = grad.data
    return parameter


def read_weights(model_dir: str, arch: Architecture, views: Mapping[str, Tensor]) -> None:
    """Copy all parameters from the folder's safetensors into views, converting to their dtype."""
    for file in sorted(set(arch.files.values())):
        try:
            with safe_open(str(Path(model_dir) / file), framework="pt") as tensors:
                for name, holder in arch.files.items():
                    if holder == file:
                        views[name].copy_(tensors.get_tensor(name))
        except (OSError, SafetensorError) as error:
            raise BadInput(f"cannot read {file} of {model_dir}: {error}", "Save the model again") from error


def move_buffers(model: PreTrainedModel, where: torch.device) -> None:
    """What a model has beside its parameters, computed on the CPU as transformers does, to where its layers run."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(where)


def backbone(model: PreTrainedModel) -> nn.Module:
    """The part that turns tokens into hidden states."""
    return getattr(model, model.base_model_prefix)


def head(model: PreTrainedModel) -> nn.Module:
    """The part that turns hidden states into logits."""
    return model.get_output_embeddings()


def _refuse(model: PreTrainedModel, model_dir: str, max_context: int) -> None:
    config = model.config
    extras = [name for name in _HEAD_EXTRAS if getattr(config, name, None) not in (None, 1, 1.0)]
    if extras:
        raise BadInput(f"{model_dir} changes its logits by {extras[0]}, which is not built yet", "Use another model")
    window = getattr(config, "sliding_window", None)
    windowed = any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ())
    if windowed and not (window and window >= max_context):
        raise BadInput(f"{model_dir} has layers without full attention", f"Lower max_context {max_context}")
    limit = getattr(config, "max_position_embeddings", None)
    if limit and max_context > limit:
        raise BadInput(f"max_context {max_context} is beyond the {limit} positions of {model_dir}", "Lower it")
    if head(model) is None:
        raise BadInput(f"{model_dir} has no language-model head", "Use a causal language model")


def _fill_buffers(model: PreTrainedModel) -> None:
    """Constructors make buffers (rotary frequencies), so on meta they are empty: compute them as transformers does."""
    for path, module in model.named_modules():
        empty = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        for name in empty:
            shape, dtype = module._buffers[name].shape, module._buffers[name].dtype
            module._buffers[name] = torch.full(shape, torch.nan, dtype=dtype) if dtype.is_floating_point else None
        if not empty:
            continue
        if any(p is not None for p in module._parameters.values()) or None in (module._buffers[n] for n in empty):
            raise BadInput(f"module {path} has buffers that cannot be recomputed", "This architecture is not built yet")
        with torch.no_grad():
            model._init_weights(module)
        if any(not torch.isfinite(module._buffers[name]).all() for name in empty):
            raise BadInput(f"module {path} has buffers that cannot be recomputed", "This architecture is not built yet")
