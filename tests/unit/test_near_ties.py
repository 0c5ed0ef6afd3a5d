"""What differs from a reference is a near-tie where rounding decides, and an error everywhere else."""

from __future__ import annotations

import json

import numpy as np
import pytest

from compute_node.engine.near_ties import EQUAL, ERROR, NEAR_TIE, DoubleRun, judge, recorded_run
from compute_node.engine.oracle import OracleReference, OracleResult

PROMPT, GREEDY, VOCABULARY = 4, 3, 8
ROWS = PROMPT + GREEDY - 1


def logits_of(seed=0):
    drawn = np.random.Generator(np.random.Philox(seed)).standard_normal((ROWS, VOCABULARY))
    drawn[np.arange(ROWS), np.arange(ROWS) % VOCABULARY] += 8  # clear winners
    return drawn.astype(np.float32)


def reference_of(logits):
    return OracleReference(
        input_ids=list(range(PROMPT)),
        logits=logits[:PROMPT],
        greedy=logits[PROMPT - 1 :].argmax(-1).tolist(),
        greedy_logits=logits[PROMPT - 1 :],
        routes={layer: np.tile([1, 4], (PROMPT, 1)) for layer in (0, 2)},
        route_weights={},
    )


def result_of(reference, logits, routes=None):
    greedy = logits[PROMPT - 1 :].argmax(-1).tolist()
    chosen = {layer: np.tile([1, 4], (ROWS, 1)) for layer in (0, 2)} if routes is None else routes
    expected = np.concatenate([reference.logits, reference.greedy_logits[1:]])
    equal = [mine == theirs for mine, theirs in zip(greedy, reference.greedy, strict=True)]
    return OracleResult(
        float(np.abs(logits - expected).max()) / reference.scale,
        greedy,
        [*equal, False].index(False),
        all(np.array_equal(chosen[layer][:PROMPT], reference.routes[layer]) for layer in chosen),
        0.0,
        logits,
        chosen,
    )


def double_of(logits, choices=None):
    routes = {layer: [{(1, 4)} for _ in range(ROWS)] for layer in (0, 2)}
    for (layer, token), others in (choices or {}).items():
        routes[layer][token] |= others
    return DoubleRun("float64", logits.astype(np.float64), routes)


def with_twins(gap):
    """Two best logits of the second greedy step that lie so far apart, and the same the other way round."""
    logits = logits_of()
    best = int(logits[PROMPT].argmax())
    other = (best + 1) % VOCABULARY
    logits[PROMPT, other] = logits[PROMPT, best] - gap
    swapped = logits.copy()
    swapped[PROMPT, [best, other]] = logits[PROMPT, [other, best]]
    return logits, swapped


def test_what_is_equal_says_how_far_both_are_from_float64():
    logits = logits_of()
    reference = reference_of(logits)
    assert judge(reference, result_of(reference, logits)).kind == EQUAL
    verdict = judge(reference, result_of(reference, logits), double_of(logits.astype(np.float64) + 1e-6))
    assert verdict.kind == EQUAL
    assert verdict.model_distance == verdict.reference_distance > 0


@pytest.mark.parametrize(("gap", "kind"), [(2e-5, NEAR_TIE), (5e-2, ERROR)])
@pytest.mark.parametrize("float64", [False, True])
def test_a_greedy_token_is_a_near_tie_if_its_logit_is_next_to_the_best(gap, kind, float64):
    logits, swapped = with_twins(gap)
    reference = reference_of(logits)
    verdict = judge(reference, result_of(reference, swapped), double_of(logits) if float64 else None)
    assert verdict.kind == kind
    assert "greedy token 1" in verdict.differences[0].text
    assert ("float64" in verdict.by) == float64


def test_other_experts_are_a_near_tie_if_the_router_may_choose_them_in_float64():
    logits = logits_of()
    reference = reference_of(logits)
    routes = {layer: np.tile([1, 4], (ROWS, 1)) for layer in (0, 2)}
    routes[0][2] = [1, 5]
    routes[2][3] = [0, 7]  # follows from the other choice two layers before
    moved = logits.copy()
    moved[2:] += 1e-2
    result = result_of(reference, moved, routes)
    assert judge(reference, result, double_of(logits)).kind == ERROR
    assert judge(reference, result).kind == ERROR
    verdict = judge(reference, result, double_of(logits, {(0, 2): {(1, 5)}}))
    assert verdict.kind == NEAR_TIE
    assert [each.text for each in verdict.differences] == ["layer 0, token 2: experts [5] in place of [4]"]
    moved[1, 0] += 1e-2  # before the token that went elsewhere nothing may differ
    assert judge(reference, result, double_of(logits, {(0, 2): {(1, 5)}})).kind == ERROR


def test_logits_that_float32_does_not_settle_are_no_error_of_the_model():
    exact = logits_of()
    rounded = exact.copy()
    rounded[3:] += 3e-3
    reference = reference_of(rounded)
    ours = exact.copy()
    ours[3:] -= 2e-3
    verdict = judge(reference, result_of(reference, ours), double_of(exact))
    assert verdict.kind == NEAR_TIE
    assert verdict.model_distance < verdict.reference_distance
    ours[3:] -= 0.1
    assert judge(reference, result_of(reference, ours), double_of(exact)).kind == ERROR


def test_a_record_of_a_float64_run_is_taken_from_beside_the_folder(tmp_path):
    logits = logits_of()
    reference = reference_of(logits)
    routes = {layer: np.tile([1, 4], (ROWS, 1)) for layer in (0, 2)}
    routes[2][0] = [2, 4]
    result = result_of(reference, logits, routes)
    assert recorded_run(tmp_path / "olmoe", reference) is None
    row = {"family": "olmoe", "greedy": reference.greedy, "f64_routes_equal": False}
    (tmp_path / "summary.json").write_text(json.dumps({"families": [row]}))
    recorded = recorded_run(tmp_path / "olmoe", reference)
    assert judge(reference, result, None, recorded).kind == NEAR_TIE
    assert judge(reference, result, None, recorded | {"f64_routes_equal": True}).kind == ERROR
    (tmp_path / "summary.json").write_text(json.dumps({"families": [row | {"greedy": [1]}]}))
    assert recorded_run(tmp_path / "olmoe", reference) is None
    (tmp_path / "summary.json").write_text("[]")
    assert recorded_run(tmp_path / "olmoe", reference) is None
