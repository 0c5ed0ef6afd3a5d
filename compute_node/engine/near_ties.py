"""Near-ties told apart from errors: where a model and its reference differ, is float32 fine enough to decide?

Both compute in float32, in another order of sums. Where the two best logits, or the last expert chosen and the first
left out, are closer than that rounds, either may come out, and neither is wrong. A run of the reference in float64
says how close they are; without one the reference's own logits say it of tokens, and nothing says it of experts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from compute_node.engine.oracle import TOLERANCE, OracleReference, OracleResult

__all__ = ["EQUAL", "ERROR", "NEAR_TIE", "Difference", "DoubleRun", "Verdict", "judge", "recorded_run"]

EQUAL: Final = "equal"
NEAR_TIE: Final = "near-tie"
ERROR: Final = "error"

_FARTHER: Final = 4.0
"""A model may be so many times as far from float64 as the reference, where that itself misses the tolerance."""


@dataclass(frozen=True, slots=True)
class DoubleRun:
    """What the reference's code computes from the same weights in float64.

    Attributes:
        by: whose code it is, with its version.
        logits: float64 [prompt + greedy - 1, vocabulary], the rows of `OracleResult.logits`.
        routes: per layer, and for the token of each row, the experts that the router chooses, ascending; more than one
            choice where it changes as its input is moved by what float32 rounds away.
    """

    by: str
    logits: NDArray[np.float64]
    routes: dict[int, list[set[tuple[int, ...]]]]


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference that was looked at: what it is, and whether rounding explains it."""

    text: str
    near_tie: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a comparison comes to.

    Attributes:
        kind: `equal`; `near-tie`: rounding explains every difference; or `error`.
        differences: what was looked at, the first of each kind.
        by: what decided: a float64 run, the folder's record of one, or margins; empty where nothing had to be decided.
        model_distance: of the model's logits from float64's, in units of the reference's scale; None without a run.
        reference_distance: of the reference's.
    """

    kind: str
    differences: tuple[Difference, ...] = ()
    by: str = ""
    model_distance: float | None = None
    reference_distance: float | None = None


def judge(
    reference: OracleReference,
    result: OracleResult,
    double: DoubleRun | None = None,
    recorded: dict[str, Any] | None = None,
) -> Verdict:
    """Whether what differs is a near-tie or an error.

    Args:
        reference: what was computed elsewhere.
        result: how the model compares.
        double: the reference's code in float64, if it could be run.
        recorded: what `recorded_run` found; looked at only without `double`.
    """
    expected = _expected(reference)
    if result.logits.shape[1] != expected.shape[1] or len(result.logits) < len(expected):
        return Verdict(ERROR, (Difference("the shapes of the logits differ", near_tie=False),))
    ours = None if double is None else _distances(double.logits, result.logits[: len(expected)], reference)
    theirs = None if double is None else _distances(double.logits, expected, reference)
    by = "" if double is None else double.by
    farthest = (None if ours is None else float(ours.max()), None if theirs is None else float(theirs.max()))
    if result.passed:
        return Verdict(EQUAL, (), by, *farthest)
    routes, unsettled = _routes(reference, result, double, recorded)
    differences = [*routes, *_token(reference, result, double)]
    wrong = np.flatnonzero(_distances(expected, result.logits, reference) > TOLERANCE)
    settled = [int(row) for row in wrong if row < unsettled]
    if settled:
        differences.append(_logits(settled, ours, theirs))
    if result.max_route_weight_error > TOLERANCE:
        text = f"weights of the same experts differ by {result.max_route_weight_error:.1e}"
        differences.append(Difference(text, near_tie=False))
    by = by or ("the summary.json beside the folder" if recorded else "the reference's own margins")
    kind = NEAR_TIE if all(each.near_tie for each in differences) else ERROR
    return Verdict(kind, tuple(differences), by, *farthest)


def recorded_run(folder: Path, reference: OracleReference) -> dict[str, Any] | None:
    """What the script that made a folder wrote of its float64 run into `summary.json` beside it; None: nothing."""
    try:
        rows = json.loads((folder.resolve().parent / "summary.json").read_text(encoding="utf-8"))["families"]
        (row,) = (row for row in rows if row.get("family") == folder.resolve().name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return dict(row) if row.get("greedy") == reference.greedy and "f64_routes_equal" in row else None


def _routes(
    reference: OracleReference, result: OracleResult, double: DoubleRun | None, recorded: dict[str, Any] | None
) -> tuple[list[Difference], int]:
    """Other choices of experts, and the first row from which on logits may differ for that reason.

    Only the first difference in each chain is judged: what another expert did to a token, all later layers see, of
    this token and of those behind it.
    """
    if set(result.routes) != set(reference.routes):
        return [Difference("other layers have experts", near_tie=False)], 0
    found: list[Difference] = []
    places: list[tuple[int, int]] = []
    for layer in sorted(reference.routes):
        theirs = reference.routes[layer]
        ours = result.routes[layer][: len(theirs)]
        if ours.shape != theirs.shape:
            text = f"layer {layer} chooses {ours.shape[1]} experts for a token, not {theirs.shape[1]}"
            return [Difference(text, near_tie=False)], 0
        for token in np.flatnonzero((ours != theirs).any(axis=1)).tolist():
            follows = any(at < layer and before <= token for at, before in places)
            places.append((layer, token))
            if follows:
                continue
            if double is not None:
                close = {tuple(ours[token].tolist()), tuple(theirs[token].tolist())} <= double.routes[layer][token]
            else:
                close = recorded is not None and not recorded["f64_routes_equal"]
            text = f"layer {layer}, token {token}: experts {_unlike(ours[token], theirs[token])}"
            if not close and double is None:
                text += "; a float64 run would say how close they are"
            found.append(Difference(text, near_tie=close))
    tokens = [token for _, token in places]
    if double is not None:  # behind the prompt the reference does not say what it chose
        prompt = len(reference.input_ids)
        choices = double.routes.values()
        tokens += [row for each in choices for row in range(prompt, len(each)) if len(each[row]) > 1]
    return found, min(tokens, default=len(result.logits))


def _token(reference: OracleReference, result: OracleResult, double: DoubleRun | None) -> list[Difference]:
    """The first greedy token that differs, if one does."""
    place = result.greedy_equal
    if place >= len(reference.greedy):
        return []
    mine, wanted = result.greedy[place], reference.greedy[place]
    text = f"greedy token {place} is {mine} in place of {wanted}"
    if double is not None:
        logits = double.logits[len(reference.input_ids) + place - 1]
    elif reference.greedy_logits is not None:
        logits = reference.greedy_logits[place].astype(np.float64)
    else:
        return [Difference(text, near_tie=False)]
    gap = float(logits[wanted] - logits[mine]) / reference.scale
    return [Difference(f"{text}: their logits lie {gap:.1e} apart", near_tie=gap <= 2 * TOLERANCE)]


def _logits(rows: list[int], ours: NDArray[np.float64] | None, theirs: NDArray[np.float64] | None) -> Difference:
    """Rows beyond the tolerance that no other choice of experts explains: the reference itself may be as far off."""
    if ours is None or theirs is None:
        return Difference(f"logits of row {rows[0]} differ by more than {TOLERANCE:.0e}", near_tie=False)
    unsure = [theirs[row] > TOLERANCE and ours[row] <= _FARTHER * theirs[row] for row in rows]
    row = rows[int(np.argmin(unsure))]
    text = f"logits of row {row}: float64 lies {ours[row]:.1e} from the model, {theirs[row]:.1e} from the reference"
    return Difference(text, near_tie=all(unsure))


def _unlike(ours: NDArray[np.int64], theirs: NDArray[np.int64]) -> str:
    mine, others = set(ours.tolist()), set(theirs.tolist())
    return f"{sorted(mine - others)} in place of {sorted(others - mine)}"


def _expected(reference: OracleReference) -> NDArray[np.float32]:
    """The reference's rows in the order of `OracleResult.logits`; of the prompt only, if it has no others."""
    if reference.greedy_logits is None:
        return reference.logits
    return np.concatenate([reference.logits, reference.greedy_logits[1:]])


def _distances(truth: NDArray[Any], found: NDArray[Any], reference: OracleReference) -> NDArray[np.float64]:
    """Row by row the largest distance of a logit, in units of the reference's scale, as far as both have rows."""
    rows = min(len(truth), len(found))
    farthest: NDArray[np.float64] = np.abs(truth[:rows].astype(np.float64) - found[:rows]).max(axis=1)
    return farthest / reference.scale
