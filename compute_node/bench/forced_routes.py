"""Overrides what routers choose: a table of routes, one row for each position of a text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np
from numba import cfunc
from numpy.typing import NDArray

from compute_node.kernels import Op, Segment
from compute_node.kernels.lanes import f32_at, i32_at, i64_at
from compute_node.kernels.op import KERNEL, address_of, record
from compute_node.models.decoder_program import DecoderProgram
from tierd.errors import UsageError
from tierd.policy.drawn_routes import RECORDED
from tierd.store.geometry import Geometry

__all__ = ["drawn_apart", "force_routes"]

_SPREAD: Final = 1009
"""How far tokens that follow each other lie apart in the table."""
_ROUTES: Final = 4096


@cfunc(KERNEL, cache=True, error_model="numpy")
def _force_kernel(args: int, lo: int, hi: int) -> None:
    """Record: indices, stride, weights, stride, positions, routes, route rows, bytes of a row, k, tokens, their factor.

    A unit is a row.
    """
    m = i64_at(args)
    for row in range(lo, hi):
        indices, weights = i32_at(m[0] + row * m[1]), f32_at(m[2] + row * m[3])
        place = i64_at(m[4])[row] + i64_at(m[9])[row] * m[10]
        routes = i32_at(m[5] + (place % m[6]) * m[7])
        for k in range(m[8]):
            indices[k] = routes[k]
            weights[k] = np.float32(1) / np.float32(m[8])


def force_routes(program: DecoderProgram, routes: NDArray[np.int32], *, by_token: bool = False) -> DecoderProgram:
    """The program with these routes, each expert with the same weight, whatever its routers say.

    Args:
        program: of a model.
        routes: int32 [positions, layers with experts, k], contiguous; a later position begins anew.
        by_token: the place in the table depends on the row's token as well, so that texts at one position differ.

    Raises:
        UsageError: routes for another model.
    """
    layers, chosen = len(program.expert_layers), program.route_indices.shape[1]
    if routes.dtype != np.int32 or routes.ndim != 3 or routes.shape[1:] != (layers, chosen) or not len(routes):
        raise UsageError(f"routes must be int32 [positions, {layers}, {chosen}], not {routes.dtype} {routes.shape}")
    table = np.ascontiguousarray(routes)
    body = []
    for number, segment in enumerate(program.body):
        if number == layers:
            body.append(segment)
            continue
        args = record([
            address_of(program.route_indices), program.route_indices.strides[0],
            address_of(program.route_weights), program.route_weights.strides[0],
            address_of(program.batch.positions), address_of(table) + number * table.strides[1],
            len(table), table.strides[0], chosen, address_of(program.batch.token_ids), _SPREAD if by_token else 0,
        ])  # fmt: skip
        op = Op(
            f"{segment.name}: given routes", "forced routes", _force_kernel.address, args, program.batch.count,
            units=1, per_row=True, grain=1, work=chosen, keep=(program, table),
        )  # fmt: skip
        body.append(Segment(segment.name, [*segment.ops, op]))
    return replace(program, body=tuple(body))


def drawn_apart(sizes: Geometry) -> Callable[[DecoderProgram], DecoderProgram]:
    """Forces routes of the recorded trace's generator; neighbours share no more experts than chance has them share.

    Args:
        sizes: of the model.

    Returns:
        What changes a program, for `Model`.
    """
    routes = RECORDED.generate(
        tokens=_ROUTES, layers=len(sizes.layers), experts=sizes.layers[0].experts, top_k=sizes.top_k
    )
    return lambda program: force_routes(program, routes, by_token=True)
