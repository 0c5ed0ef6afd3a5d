"""`tierd convert` for any architecture whose experts are on transformers' interface."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import numpy as np
import torch
import transformers
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping

from tierd.checkpoint.finder import FP8_DTYPE
from tierd.checkpoint.generic import GenericExpert, GenericLayer, GenericModel, plan_generic
from tierd.checkpoint.plan import ConversionPlan
from tierd.checkpoint.quantisation import Coding, Quantisation
from tierd.checkpoint.reader import Checkpoint, SourceTensor, missing_tensors
from tierd.errors import UnsupportedModel
from tierd.integrations.transformers.architecture import config_of, empty_model, text_config
from tierd.integrations.transformers.experts import tiered_experts
from tierd.integrations.transformers.interface import ExpertsModule, experts_modules
from tierd.integrations.transformers.off_interface import adopt
from tierd.integrations.transformers.published import Parameter, collect
from tierd.store.manifest import Interface, InterfaceModule

__all__ = ["plan_by_transformers", "resolve_by_transformers"]

_TOP_K_NAMES: Final = (
    "top_k",
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "top_k_experts",
    "num_selected_experts",
)


def plan_by_transformers(checkpoint: Checkpoint, *, experts: str, dense: str, shard_bytes: int) -> ConversionPlan:
    """What a conversion by transformers' rules will write; raises like `resolve_by_transformers` and `plan_generic`."""
    model = resolve_by_transformers(checkpoint)
    return plan_generic(model, experts=experts, dense=dense, shard_bytes=shard_bytes)


def resolve_by_transformers(checkpoint: Checkpoint) -> GenericModel:
    """Finds the experts of a checkpoint. No weight is read but one expert of each layer's kind, to check its shape.

    Raises:
        UnsupportedModel: an architecture, checkpoint format or layout of experts that cannot be carried; by name.
        StoreDamaged: the checkpoint does not have the experts that its config says.
    """
    coding = Quantisation.read(checkpoint.config).coding
    if coding not in (Coding.PLAIN, Coding.FP8):
        raise UnsupportedModel(
            f"{checkpoint.config.where}: the checkpoint is quantised to {coding}: that is read for known families only",
            hint="Use the model's unquantised release; tierd quantises with --experts int8 or int4-g64.",
        )
    config = config_of(checkpoint.folder)
    model = empty_model(config)
    adopt(model, tiered_experts)
    modules = experts_modules(model)
    wanted = {f"{module.path}.{name}" for module in modules for name in module.parameters}
    mapping = get_model_conversion_mapping(model)
    tensors, scales = _published(checkpoint)
    parameters, renamed = collect(tensors, scales, model, mapping, wanted)
    layers = [_layer(module, parameters, config) for module in modules]
    for layer, module in zip(layers, modules, strict=True):
        _check_first(layer, module)
    return GenericModel(
        family=str(config.model_type),
        tensors=tensors,
        scales=scales,
        layers=layers,
        top_k=min(_top_k(model, modules[0], config), *(module.experts for module in modules)),
        vocab_size=int(getattr(text_config(config), "vocab_size", 0) or 0),
        matrices=_matrices(model, renamed, modules),
        interface=Interface(
            architecture=type(model).__name__,
            transformers=transformers.__version__,
            modules=tuple(InterfaceModule(**module.description()) for module in modules),
        ),
    )


def _published(checkpoint: Checkpoint) -> tuple[dict[str, SourceTensor], dict[str, SourceTensor]]:
    """All tensors, those of other towers than the text model's too, under the names that transformers expects.

    Returns:
        Tensors by name, and the scales of those that hold 8-bit floats by the same names.

    Raises:
        StoreDamaged: scales are missing.
    """
    tensors = {
        entry.name: SourceTensor(
            entry.name, entry.dtype, entry.shape, checkpoint.folder / file, entry.begin, entry.nbytes
        )
        for file, header in checkpoint.headers.items()
        for entry in header.tensors.values()
    }
    coded = [name for name, tensor in tensors.items() if tensor.dtype == FP8_DTYPE]
    lost = [f"{name}_scale_inv" for name in coded if f"{name}_scale_inv" not in tensors]
    if lost:
        raise missing_tensors(checkpoint.folder, lost, len(tensors), len(checkpoint.headers))
    scales = {name: tensors.pop(f"{name}_scale_inv") for name in coded}
    return tensors, scales


def _layer(module: ExpertsModule, parameters: Mapping[str, Parameter], config: Any) -> GenericLayer:
    own = {name: parameters[f"{module.path}.{name}"] for name in module.parameters}
    experts = []
    for expert in range(module.experts):
        tensors = {
            tensor.name: tensor for parameter in own.values() for tensor in parameter.tensors_of(expert, module.experts)
        }
        read = partial(_read_expert, module, own, expert, config)
        experts.append(GenericExpert(f"{module.path}, expert {expert}", tuple(tensors.values()), read))
    return GenericLayer(
        module.layer,
        module.input_size,
        module.intermediate_size,
        module.has_gate,
        module.has_bias,
        experts,
    )


def _read_expert(
    module: ExpertsModule, parameters: Mapping[str, Parameter], expert: int, config: Any
) -> dict[str, np.ndarray]:
    """Matrices with one row per output, biases as float32; see `GenericExpert.read`."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in parameters.items():
        value = parameter.read(f"{module.path}.{name}", expert, module.experts, config)
        if module.module.is_transposed and value.ndim == 2:
            value = value.T
        place = name.removesuffix("_bias")
        ending = ".bias" if name.endswith("_bias") else ""
        if place == "gate_up_proj":
            found["gate" + ending], found["up" + ending] = _apart(value, module)
        else:
            found[place.removesuffix("_proj") + ending] = value
        if expert == module.experts - 1:
            parameter.release()
    return {name: _as_numpy(value, bias=name.endswith(".bias")) for name, value in found.items()}


def _apart(both: torch.Tensor, module: ExpertsModule) -> tuple[torch.Tensor, torch.Tensor]:
    if module.module.is_concatenated:
        gate, up = both.chunk(2)
        return gate, up
    return both[::2], both[1::2]


def _as_numpy(value: torch.Tensor, *, bias: bool) -> np.ndarray:
    bits = value.dtype is torch.bfloat16 and not bias
    plain: np.ndarray = (value.contiguous().view(torch.int16) if bits else value.float().contiguous()).numpy()
    return plain.view(np.uint16) if bits else plain


def _check_first(layer: GenericLayer, module: ExpertsModule) -> None:
    """UnsupportedModel unless an expert has the shapes that the module's code works with."""
    hidden, width = module.input_size, module.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    shapes |= {"gate.bias": (width,), "up.bias": (width,), "down.bias": (hidden,)}
    for name, value in layer.experts[0].read().items():
        if value.shape != shapes[name]:
            raise UnsupportedModel(
                f"{module.path}: {name} of an expert has the shape {list(value.shape)}, {list(shapes[name])} is wanted"
            )


def _top_k(model: nn.Module, module: ExpertsModule, config: Any) -> int:
    parent = model.get_submodule(module.path.rpartition(".")[0])
    for place in (parent, *parent.children(), text_config(config), config):
        for name in _TOP_K_NAMES:
            value = getattr(place, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
                return value
    raise UnsupportedModel(
        f"how many experts {type(model).__name__} chooses for a token is not said under any known name",
        hint=f"Known names: {', '.join(_TOP_K_NAMES)}.",
    )


def _matrices(model: nn.Module, renamed: Mapping[str, str], modules: list[ExpertsModule]) -> frozenset[str]:
    """Published tensors that are the weight of a linear layer or an embedding, and no router."""
    sizes = {module.experts for module in modules}
    plain = {
        f"{path}.weight"
        for path, module in model.named_modules()
        if (isinstance(module, nn.Linear) and module.out_features not in sizes) or isinstance(module, nn.Embedding)
    }
    return frozenset(name for name, target in renamed.items() if target in plain)
