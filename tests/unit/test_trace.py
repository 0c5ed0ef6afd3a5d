"""Traces: what is written can be read, and a file that is no trace is refused with what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tierd.errors import UsageError
from tierd.policy.trace import TraceWriter, join_traces, load_trace

FIXED = Path(__file__).parents[1] / "bench" / "traces"


def writer(path, **changes):
    facts = {"layers": (2, 5), "layer_experts": (4, 6), "top_k": 2, "expert_bytes": 777} | changes
    return TraceWriter(path, **facts)


def routes(*rows):
    return np.array(rows)


def test_what_a_run_recorded_is_read_again(tmp_path):
    record = writer(tmp_path / "t.npz")
    record.add([10, 11], routes([[0, 1], [5, 0]], [[3, 1], [2, 4]]), sequence=0, prefill=True)
    record.add([12], routes([[2, 0], [1, 3]]), sequence=0, prefill=False)
    record.add([13], routes([[0, 1], [0, 1]]), sequence=1, prefill=True)
    record.save()
    trace = load_trace(tmp_path / "t.npz")
    assert trace.tokens.tolist() == [10, 11, 12, 13]
    assert trace.steps.tolist() == [0, 0, 1, 2]
    assert trace.prefill.tolist() == [True, True, False, True]
    assert trace.sequences.tolist() == [0, 0, 0, 1]
    assert (trace.layers, trace.layer_experts, trace.top_k, trace.expert_bytes) == ((2, 5), (4, 6), 2, 777)
    assert trace.flat()[0].tolist() == [[0, 1], [9, 4]]
    assert trace.step_bounds() == [0, 2, 3, 4]
    assert trace.experts_total == 10
    assert [path.name for path in tmp_path.iterdir()] == ["t.npz"]


def test_an_empty_run_is_a_trace(tmp_path):
    writer(tmp_path / "t.npz").save()
    trace = load_trace(tmp_path / "t.npz")
    assert (len(trace), trace.step_bounds(), trace.head(4).step_bounds()) == (0, [0], [0])


def test_a_trace_that_grows_too_large_stops_at_a_whole_step(tmp_path):
    record = writer(tmp_path / "t.npz", max_bytes=100)
    for token in range(10):
        record.add([token], routes([[0, 1], [0, 1]]), sequence=0, prefill=False)
    assert record.full
    assert len(record) == 4
    record.save()
    assert len(load_trace(tmp_path / "t.npz")) == 4


@pytest.mark.parametrize(("experts", "dtype"), [(256, np.uint8), (257, np.uint16), (70_000, np.uint32)])
def test_expert_numbers_take_as_few_bytes_as_they_need(tmp_path, experts, dtype):
    record = writer(tmp_path / "t.npz", layers=(0,), layer_experts=(experts,))
    record.add([1], routes([[0, experts - 1]]), sequence=0, prefill=False)
    record.save()
    with np.load(tmp_path / "t.npz") as content:
        assert content["experts"].dtype == dtype
    assert load_trace(tmp_path / "t.npz").experts.max() == experts - 1


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"--trace .*nowhere"):
        writer(tmp_path / "nowhere" / "t.npz").save()


def test_the_first_tokens_end_with_a_whole_step(tmp_path):
    record = writer(tmp_path / "t.npz")
    for rows in (3, 2):
        record.add([1] * rows, routes(*[[[0, 1], [0, 1]]] * rows), sequence=0, prefill=True)
    record.save()
    trace = load_trace(tmp_path / "t.npz")
    assert [len(trace.head(tokens)) for tokens in (0, 2, 3, 4, 5, 9)] == [0, 0, 3, 3, 5, 5]


def test_prompts_can_be_put_in_front_of_each_text():
    trace = load_trace(FIXED / "held.npz").head(1024).with_prompts(100, 64)
    sizes = np.diff(trace.step_bounds())
    assert sizes.tolist() == ([64, 36] + [1] * 412) * 2
    assert trace.prefill.sum() == 200
    assert trace.prefill[512:612].all()


def test_the_fixed_traces_can_be_read():
    trace = load_trace(FIXED / "held.npz")
    assert (len(trace), trace.layers, set(trace.layer_experts), trace.top_k) == (53_248, tuple(range(8)), {32}, 4)
    assert np.flatnonzero(np.diff(trace.sequences))[:2].tolist() == [511, 1023]


def test_runs_are_joined_as_texts_of_their_own(tmp_path):
    trace = load_trace(FIXED / "held.npz").head(600)
    joined = join_traces([trace, trace])
    assert (len(joined), len(joined.step_bounds()) - 1) == (1200, 1200)
    assert joined.sequences[[0, 599, 600, 1199]].tolist() == [0, 1, 2, 3]
    writer(tmp_path / "t.npz").save()
    with pytest.raises(UsageError, match="different models"):
        join_traces([trace, load_trace(tmp_path / "t.npz")])


def good():
    return {
        "tokens": np.array([1, 2]),
        "experts": np.array([[[0, 1]], [[2, 3]]], np.uint8),
        "steps": np.array([0, 0]),
        "prefill": np.array([True, True]),
        "sequences": np.array([0, 0]),
        "layers": np.array([0]),
        "layer_experts": np.array([4]),
        "expert_bytes": np.array(10),
    }


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"tokens": None}, "`tokens`"),
        ({"tokens": np.array([1.0, 2.0])}, "`tokens`"),
        ({"tokens": np.array([1])}, "do not fit together"),
        ({"tokens": np.array([1, -2])}, "negative"),
        ({"experts": np.zeros((2, 4), np.uint8)}, "`experts`"),
        ({"experts": np.array([[[0, 4]], [[2, 3]]], np.uint8)}, "outside its layer"),
        ({"experts": np.array([[[0, 0]], [[2, 3]]], np.uint8)}, "twice"),
        ({"steps": np.array([1, 0])}, "steps fall"),
        ({"steps": np.array([1])}, "different lengths"),
        ({"prefill": np.array([0, 1])}, "`prefill`"),
        ({"prefill": np.array([True, False])}, "both kinds"),
        ({"sequences": None}, "`sequences`"),
        ({"layers": np.array([0, 1])}, "do not fit"),
        ({"layer_experts": np.array([0])}, "too many experts"),
        ({"layer_experts": np.array([1 << 40])}, "too many experts"),
        ({"expert_bytes": np.array(-1)}, "negative"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path, change, what):
    arrays = {name: array for name, array in (good() | change).items() if array is not None}
    np.savez(tmp_path / "t.npz", **arrays)
    with pytest.raises(UsageError, match=what) as caught:
        load_trace(tmp_path / "t.npz")
    assert "t.npz" in caught.value.message


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 junk", b"\x93NUMPY", None])
def test_a_file_that_cannot_be_read_is_refused(tmp_path, content):
    path = tmp_path / "t.npz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=r"t\.npz: cannot be read as a trace"):
        load_trace(path)


def test_objects_in_a_file_are_never_loaded(tmp_path):
    np.savez(tmp_path / "t.npz", **good() | {"tokens": np.array([{}, {}], object)})
    with pytest.raises(UsageError, match="cannot be read as a trace"):
        load_trace(tmp_path / "t.npz")


def test_a_window_of_no_tokens_is_refused(tmp_path):
    np.savez(tmp_path / "t.npz", tokens=good()["tokens"], experts=good()["experts"], window=np.array(0))
    with pytest.raises(UsageError, match="window"):
        load_trace(tmp_path / "t.npz")
