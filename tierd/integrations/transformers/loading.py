"""`load`: a model of transformers whose routed experts stay in a store."""

from __future__ import annotations

import math
import tempfile
import weakref
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tierd.checkpoint.source import TEXT_FILES
from tierd.client.open import open_source
from tierd.client.source import ExpertSource, SourceStats, StoreView
from tierd.errors import StoreDamaged, UnsupportedModel, UsageError
from tierd.integrations.transformers.architecture import config_of, model_class, quiet, text_config
from tierd.integrations.transformers.dense import lazy_state
from tierd.integrations.transformers.experts import BINDING, BoundExperts, ExpertsRuntime, tiered_experts
from tierd.integrations.transformers.hints import find_router
from tierd.integrations.transformers.interface import ExpertsModule, experts_modules, is_on_interface
from tierd.integrations.transformers.off_interface import adopt
from tierd.integrations.transformers.records import RecordReader
from tierd.integrations.transformers.vram import DeviceTier
from tierd.policy.policies import make_policy
from tierd.sizes import parse_bytes
from tierd.store.formats import ExpertFormat
from tierd.store.geometry import Geometry

__all__ = ["IMPLEMENTATION", "Tier", "attach", "load", "load_from", "resolve_dtype"]

IMPLEMENTATION = "tierd"
"""Name of the experts function in transformers' registry."""

_CONFIG_FILES = ("config.json", "generation_config.json")


def attach() -> None:
    """Make the experts function known to transformers, as `experts_implementation="tierd"`. May be called again."""
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, tiered_experts)


class Tier:
    """The store behind a model that `load` made; the model has it as `model.tierd`.

    Attributes:
        source: brings the experts.
        runtime: what the model's modules share.
    """

    def __init__(self, source: ExpertSource, runtime: ExpertsRuntime, *, owns_source: bool) -> None:
        self.source = source
        self.runtime = runtime
        self._finalizer = weakref.finalize(self, source.close) if owns_source else None

    def __repr__(self) -> str:
        return f"<Tier {self.source}, {self.runtime.device_tier or 'no device tier'}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tier:
        return self

    @property
    def stats(self) -> SourceStats:
        """Requests by outcome and tier, waits, messages."""
        return self.source.stats

    def tokenizer(self) -> Any:
        """The tokenizer of the store, with its chat template; UsageError if the store has none."""
        with tempfile.TemporaryDirectory(prefix="tierd-") as scratch:
            names = _copy_texts(self.source.store, Path(scratch), TEXT_FILES)
            if not {"tokenizer.json", "tokenizer.model", "vocab.json"} & set(names):
                raise UsageError("this store has no tokenizer")
            own_code = "tokenizer_config.json" in names and b'"auto_map"' in self.source.store.read_file(
                "tokenizer_config.json"
            )
            # A checkpoint's own code is not run; where it names some, tokenizer.json says the same.
            kind = transformers.PreTrainedTokenizerFast if own_code else transformers.AutoTokenizer
            with quiet():
                return kind.from_pretrained(scratch)

    def close(self) -> None:
        """End the session with the daemon, and a private daemon with it. The model cannot run any more."""
        self.release()
        if self._finalizer is not None:
            self._finalizer()

    def release(self) -> None:
        """Let the experts on the device go."""
        if self.runtime.device_tier is not None:
            self.runtime.device_tier.clear()


def load(
    store: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
    arena: str | None = None,
    in_process: bool = False,
    vram: str | None = None,
    policy: str = "decayed-frequency",
    prefetch: bool = False,
    attn_implementation: str | None = None,
    name: str = "transformers",
    patience: float = 60.0,
) -> Any:
    """A model of transformers: dense weights in memory, routed experts in the store.

    Args:
        store: a directory (a private daemon is started, and stopped with the model), `unix:PATH`, or `HOST:PORT`.
        device: that computes.
        dtype: of dense weights and of computing; None: bf16 where the store's experts are bf16, else float32.
        arena: RAM for experts of a private daemon, an amount or a share of all experts.
        in_process: read the directory without a daemon.
        vram: most bytes of experts that are kept on the device, such as `8GiB`; None keeps none.
        policy: who leaves the device.
        prefetch: tell the daemon which experts the next layer will probably want.
        attn_implementation: as in `from_pretrained`.
        name: of this process, for operators.
        patience: seconds to wait for a daemon that went away.

    Returns:
        An ordinary model in evaluation mode, of the class that config.json names; `model.tierd` is its `Tier`.

    Raises:
        UnsupportedModel: transformers does not know the architecture, or its experts are not on the interface.
        StoreDamaged: store and architecture do not fit each other.
        TierdError: of the store or the daemon.
    """
    source = open_source(
        str(store),
        name=name,
        numerics="torch",
        kernel_path=f"torch {torch.__version__} {torch.device(device).type}",
        in_process=in_process,
        arena=arena,
        patience=patience,
    )
    try:
        return load_from(
            source,
            device=torch.device(device),
            dtype=resolve_dtype(dtype, source),
            vram=None if vram is None else parse_bytes(vram, option="vram"),
            policy=policy,
            prefetch=prefetch,
            attn_implementation=attn_implementation,
        )
    except BaseException:
        source.close()
        raise


def load_from(
    source: ExpertSource,
    *,
    device: torch.device,
    dtype: torch.dtype,
    vram: int | None = None,
    policy: str = "decayed-frequency",
    prefetch: bool = False,
    attn_implementation: str | None = None,
    owns_source: bool = True,
) -> Any:
    """The same on an open source, which the model's `Tier` closes if `owns_source`; see `load`."""
    attach()
    store = source.store
    with tempfile.TemporaryDirectory(prefix="tierd-") as scratch:
        folder = Path(scratch)
        _copy_texts(store, folder, _CONFIG_FILES)
        config = _wanted_config(config_of(folder), store)
        model = _dense_model(config, store, device, dtype, attn_implementation)
        _set_generation_config(model, folder)
    modules = experts_modules(model)
    geometry = store.manifest.geometry
    _check_geometry(modules, geometry, store)
    readers = [RecordReader(layout, dtype) for layout in geometry.layouts]
    tier = _device_tier(device, dtype, vram, policy, geometry)
    runtime = ExpertsRuntime(source, device_tier=tier, hints=prefetch)
    routers = [find_router(model, module, geometry.top_k) for module in modules]
    entries = {entry.layer: entry for entry in geometry.layers}
    for module, following in zip(modules, [*routers[1:], None], strict=True):
        bound = BoundExperts(runtime, module, readers[entries[module.layer].layout], following)
        setattr(module.module, BINDING, bound)
    model.tierd = Tier(source, runtime, owns_source=owns_source)
    model.register_forward_pre_hook(_note_phase, with_kwargs=True)
    model.save_pretrained = _refuse_saving
    return model


def resolve_dtype(wanted: str | torch.dtype | None, source: ExpertSource) -> torch.dtype:
    """The type in which a model computes; None: bf16 where the experts are bf16, else float32."""
    if isinstance(wanted, torch.dtype):
        return wanted
    if wanted is None:
        return torch.bfloat16 if source.store.manifest.expert_format is ExpertFormat.BF16 else torch.float32
    names = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
    found = getattr(torch, names.get(wanted, wanted), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise UsageError(f"dtype {wanted!r} is not known", hint="Use float32, bfloat16 or float16.")
    return found


def _copy_texts(store: StoreView, folder: Path, names: tuple[str, ...]) -> list[str]:
    """Copies those small files that the store has; returns their names."""
    there = {file.name for file in store.manifest.files}
    found = [name for name in names if name in there]
    for name in found:
        (folder / name).write_bytes(store.read_file(name))
    return found


def _wanted_config(config: Any, store: StoreView) -> Any:
    """The config of what the store holds: families that are known here are stored without vision and the like."""
    text = text_config(config)
    if store.manifest.interface is None and text is not config:
        text.architectures = None
        return text
    return config


def _dense_model(
    config: Any, store: StoreView, device: torch.device, dtype: torch.dtype, attn_implementation: str | None
) -> Any:
    """The model with all weights but those of routed experts, which never get memory."""
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config  # the store holds values, whatever the checkpoint held
    cls = model_class(config)
    options: dict[str, Any] = {"experts_implementation": IMPLEMENTATION}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    with quiet():
        model, report = _without_experts(cls).from_pretrained(
            None,
            config=config,
            state_dict=lazy_state(store),
            dtype=dtype,
            device_map=None if device.type == "cpu" else {"": device},
            output_loading_info=True,
            **options,
        )
    model.__class__ = cls
    missing = sorted(report["missing_keys"])
    if missing:
        raise StoreDamaged(
            f"the store has no dense tensor for {missing[0]}"
            + (f" and {len(missing) - 1} more parameters of {cls.__name__}" if len(missing) > 1 else ""),
            hint="Its config.json and its weights do not belong together.",
        )
    model.requires_grad_(False)
    return model


def _without_experts(cls: type[Any]) -> type[Any]:
    """The same class, but a new model gives its experts' parameters up before anything is allocated for them."""

    def __init__(self: Any, *arguments: Any, **options: Any) -> None:  # noqa: N807
        cls.__init__(self, *arguments, **options)
        adopt(self, tiered_experts)
        for module in self.modules():
            if is_on_interface(module):
                _strip(module)

    return type(cls.__name__, (cls,), {"__init__": __init__, "__module__": cls.__module__})


def _strip(module: nn.Module) -> None:
    """Leaves tensors on the meta device in place of the experts' parameters: shapes without memory."""
    experts = module.num_experts
    for name, value in list(module.named_parameters(recurse=False)):
        if value.ndim >= 2 and value.shape[0] == experts:
            del module._parameters[name]  # noqa: SLF001
            empty = torch.empty_like(value, device="meta", requires_grad=False)
            empty._is_hf_initialized = True  # noqa: SLF001
            object.__setattr__(module, name, empty)


def _set_generation_config(model: Any, folder: Path) -> None:
    if (folder / "generation_config.json").exists() and model.can_generate():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)


def _check_geometry(modules: list[ExpertsModule], geometry: Geometry, store: StoreView) -> None:
    wanted = {module.layer: module for module in modules}
    there = {entry.layer: entry for entry in geometry.layers}
    if set(wanted) != set(there):
        odd = min(set(wanted) ^ set(there))
        raise StoreDamaged(f"layer {odd} has experts in {'the model' if odd in wanted else 'the store'} only")
    for layer, module in wanted.items():
        layout = geometry.layouts[there[layer].layout]
        down = next(part for part in layout.parts if part.name == "down")
        up = next(part for part in layout.parts if part.name == "up")
        names = {part.name for part in layout.parts}
        same = (
            there[layer].experts == module.experts
            and (down.shape[0], up.shape[0]) == (module.input_size, module.intermediate_size)
            and ("gate" in names) == module.has_gate
            and ("up.bias" in names) == module.has_bias
        )
        if not same:
            raise StoreDamaged(
                f"the experts of layer {layer} have other shapes in the store than in {module.path}",
                hint="The store was made from another checkpoint than its config.json says.",
            )
    if not store.manifest.dense:
        raise UnsupportedModel("the store has no dense weights")


def _device_tier(
    device: torch.device, dtype: torch.dtype, vram: int | None, policy: str, geometry: Geometry
) -> DeviceTier | None:
    if device.type == "cpu" and vram is None:
        return None
    size = torch.finfo(dtype).bits // 8
    largest = max(
        sum(
            math.prod(part.shape) * size
            for part in layout.parts
            if part.name in ("gate", "up", "down") or part.name.endswith(".bias")
        )
        for layout in geometry.layouts
    )
    return DeviceTier(
        device,
        budget=vram or 0,
        policy=make_policy(policy),
        geometry=geometry,
        expert_bytes=largest,
    )


def _note_phase(model: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Tells counters whether a pass is one of single tokens, for whole batches too."""
    ids = options.get("input_ids", arguments[0] if arguments else None)
    model.tierd.runtime.decoding = bool(ids.shape[-1] == 1) if isinstance(ids, torch.Tensor) else None


def _refuse_saving(*_: Any, **__: Any) -> None:
    raise UsageError(
        "a model with experts from tierd cannot be saved: its routed experts are in the store only",
        hint="Keep the checkpoint that the store was made from.",
    )
