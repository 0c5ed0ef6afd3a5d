"""How a family turns queries and keys by position, and how that is read from config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compute_node import kernels
from compute_node.models.config_reader import ConfigReader
from compute_node.models.yarn import Yarn, magnitude
from tierd.errors import UnsupportedModel

__all__ = ["RopeSettings", "read_rope"]

F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSettings:
    """Rotary embeddings of a head.

    Attributes:
        theta: base of the wavelengths.
        rotary_dim: elements of a head that are turned, even.
        interleaved: pairs are neighbours (2j, 2j + 1) and not (j, j + rotary_dim / 2).
        yarn: stretching to a longer context, or None.
    """

    theta: float
    rotary_dim: int
    interleaved: bool = False
    yarn: Yarn | None = None

    @property
    def reach(self) -> int:
        """Positions of a stretched context; 0 where it is not stretched. A config may still say the length before."""
        return 0 if self.yarn is None else int(self.yarn.factor * self.yarn.original_positions)

    def tables(self, positions: int) -> tuple[F32, F32]:
        """Cosines and sines, float32 [positions, rotary_dim / 2] each, computed in float64 and rounded once."""
        if self.yarn is None:
            return kernels.rope_tables(positions, self.rotary_dim, self.theta)
        turns = self.yarn.frequencies(self.rotary_dim, self.theta)
        angles = np.arange(positions, dtype=np.float64)[:, None] * turns
        factor = self.yarn.attention_factor
        return (np.cos(angles) * factor).astype(np.float32), (np.sin(angles) * factor).astype(np.float32)


def read_rope(
    read: ConfigReader,
    *,
    theta: float,
    head_dim: int,
    share: float | None = None,
    interleaved: bool = False,
    yarn: bool = False,
    ignored: tuple[str, ...] = (),
) -> RopeSettings:
    """Rotary settings from `rope_parameters`, or from the older `rope_theta`, `rope_scaling` and their like.

    Args:
        read: the config.
        theta: the family's base where the config has none.
        head_dim: elements of the heads that are turned.
        share: of them that is turned by default (`partial_rotary_factor`); None: the family turns all and knows no
            other share.
        interleaved: layout of the family's pairs.
        yarn: whether the family knows YaRN.
        ignored: settings in `rope_parameters` that change nothing for text.

    Raises:
        UnsupportedModel: another kind of rope (linear, dynamic, llama3 ...), or a setting that is not known.
    """
    base, part = read.optional_number("rope_theta"), read.optional_number("partial_rotary_factor")
    stretched: Yarn | None = None
    for name in ("rope_parameters", "rope_scaling"):
        parameters = read.value(name)
        if parameters is None:
            continue
        if not isinstance(parameters, dict):
            raise read.refuse(name, "an object is expected")
        nested = ConfigReader(parameters, f"{read.family}: {name}")
        for setting in ignored:
            nested.value(setting)
        kind = nested.value("rope_type", "type")
        if kind not in (None, "default") and not (yarn and kind == "yarn"):
            known = "the default rope and yarn are" if yarn else "only the default rope is"
            raise read.refuse(f"{name}.rope_type", f"{known} known", kind)
        if kind == "yarn":
            stretched = _yarn(nested)
        elif yarn:
            nested.value("original_max_position_embeddings")
        base = _agreed(read, name, "rope_theta", base, nested.optional_number("rope_theta"))
        part = _agreed(read, name, "partial_rotary_factor", part, nested.optional_number("partial_rotary_factor"))
        nested.finish()
    if share is None and part not in (None, 1.0):
        raise read.refuse("partial_rotary_factor", "only full rotary embeddings are known", part)
    rotary_dim = int(head_dim * (part or share or 1.0))
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        raise UnsupportedModel(
            f"{read.family}: {rotary_dim} elements of a head_dim of {head_dim} are rotary; rotary embeddings turn pairs"
        )
    return RopeSettings(theta=base or theta, rotary_dim=rotary_dim, interleaved=interleaved, yarn=stretched)


def _agreed(read: ConfigReader, where: str, name: str, known: float | None, found: float | None) -> float | None:
    if None not in (known, found) and known != found:
        raise read.refuse(name, f"it contradicts {where}", known)
    return known if found is None else found


def _yarn(nested: ConfigReader) -> Yarn:
    factor = nested.number("factor", 0.0)
    original = nested.integer("original_max_position_embeddings")
    if factor < 1:
        raise nested.refuse("factor", "a number of at least 1 is expected")
    weight, all_dim = nested.optional_number("mscale"), nested.optional_number("mscale_all_dim")
    given: Any = nested.optional_number("attention_factor")
    if given is None and weight and all_dim:
        given = magnitude(factor, weight) / magnitude(factor, all_dim)
    return Yarn(
        factor=factor,
        original_positions=original,
        beta_fast=nested.number("beta_fast", 32.0),
        beta_slow=nested.number("beta_slow", 1.0),
        truncate=nested.boolean("truncate", default=True),
        attention_factor=magnitude(factor) if given is None else given,
        all_dim_weight=all_dim or 0.0,
    )
