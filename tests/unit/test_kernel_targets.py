"""The same bits on every kind of processor: the digest of a small model step, here and compiled for other targets."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numba import njit

from compute_node.engine.arithmetic import ARITHMETIC
from compute_node.kernels import (
    FORMATS,
    Batch,
    ExpertFFN,
    Matrix,
    QuantisedRows,
    RoutingRule,
    attention,
    combine,
    from_float32,
    kv_append,
    matmul,
    quantise_rows,
    quantises,
    rms_norm,
    rope,
    router,
)
from compute_node.kernels.draw import Draw
from compute_node.kernels.exp64 import exp64
from compute_node.kernels.op import address_of

AVX2 = "+sse2,+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+movbe,+xsave,+cx16"
EXPECTED = "9100f487ef1982ef22b7963fd9a258bad9fd4515f861be3bb3bb030341e3c562"
"""Changes only if the order of a sum or the form of a function changes, which would change everybody's tokens."""
EXPECTED_FAST = "cfd0e76d6d28618c44690b059dd9fb6122016d791144da524767dad85c07f512"
"""The same for the fast numerics."""
EXPECTED_BLOCKS = (
    "8554590cfffbb22bad45c2003f062bd2367e299077f1c62bf9eea2f8acaad93a",
    "5634113ee70945ab2bc94e2b0e0ee2e4892a9c36a548ac742ddb408582f26e19",
)
"""The same for fp8-e4m3, mxfp4 and int4-g32: exact, fast."""
EXPECTED_DRAWS = "5a5f6b84af57c9281dfcdde70f97ad9014d011fec3ea5a6ce5b8578eb18cc33a"
"""Of weights and tokens of draws; changes only if seeds give other tokens than they gave."""
BLOCKS = ("fp8-e4m3", "mxfp4", "int4-g32")


def values(generator, *shape):
    """Numbers of a normal-like shape made of additions alone, so that no maths library has a say."""
    return (generator.random((4, *shape), np.float32).sum(0) - np.float32(2)).astype(np.float32)


def weights(generator, weight_format, rows, cols):
    if weight_format in {"f32", "bf16"}:
        return from_float32(values(generator, rows, cols) / np.float32(8), weight_format)
    if weight_format == "int8":
        codes = generator.integers(-127, 128, (rows, cols), np.int8)
        return Matrix("int8", rows, cols, codes, generator.random(rows, np.float32) / np.float32(512))
    if weight_format == "fp8-e4m3":
        codes = (
            generator.integers(0, 127, (rows, cols), np.uint8) | generator.integers(0, 2, (rows, cols), np.uint8) << 7
        )
        return Matrix(weight_format, rows, cols, codes, generator.random((1, 1), np.float32) / np.float32(2048))
    if weight_format in BLOCKS:
        data = generator.integers(0, 256, (rows, -(-cols // 64) * 32), np.uint8)
        small = generator.integers(116, 122, (rows, 16), np.uint8)  # powers of two from 2^-11 on
        scales = small if weight_format == "mxfp4" else small.astype(np.uint16) << 7 | 0x35
        return Matrix(weight_format, rows, cols, data, scales)
    blocks = -(-cols // 128)
    scales = (generator.random((rows, blocks * 2), np.float32) / np.float32(32)).astype(np.float16)
    return Matrix("int4-g64", rows, cols, generator.integers(0, 256, (rows, blocks * 64), np.uint8), scales)


def quantised(rows, width, x, batch, numerics, weight_format):
    """Options of a matmul of these numerics over `x`, and the op that must come before it."""
    if not quantises(numerics, weight_format):
        return [], {"numerics": numerics}
    kept = QuantisedRows(rows, width)
    return [quantise_rows("quantise", x, kept, batch)], {"numerics": numerics, "quantised": kept}


def digest(numerics, formats=FORMATS[:4]):
    """SHA-256 over the results of a step with odd sizes, three sequences positions deep in a cache."""
    g = np.random.Generator(np.random.Philox(7))
    rows, hidden, kv_heads, head_dim, experts, k, width = 6, 104, 2, 26, 12, 3, 72
    batch = Batch(rows)
    pages = np.arange(3)
    batch.set([0] * rows, [0, 63, 64, 130, 131, 132], tables=address_of(pages), limits=150)
    x = values(g, rows, hidden)
    found = hashlib.sha256()
    k_cache, v_cache = values(g, kv_heads, 150, head_dim), values(g, kv_heads, 150, head_dim)
    cos, sin = (values(g, 150, head_dim // 2) for _ in range(2))
    normed, attended = np.zeros((rows, hidden), np.float32), np.zeros((rows, hidden), np.float32)
    projected, windowed = np.zeros((rows, hidden), np.float32), np.zeros((rows, hidden), np.float32)
    kv = np.zeros((rows, kv_heads * head_dim), np.float32)
    logits, chosen = np.zeros((rows, experts), np.float32), np.zeros((rows, k), np.int32)
    shares, expert_rows = np.zeros((rows, k), np.float32), np.zeros((rows, k, hidden), np.float32)
    for weight_format in formats:
        into_q, q_options = quantised(rows, hidden, normed, batch, numerics, weight_format)
        into_o, o_options = quantised(rows, hidden, attended, batch, numerics, weight_format)
        for op in (
            rms_norm("norm", x, values(g, hidden), 1e-6, normed, batch),
            *into_q,
            matmul("q", weights(g, weight_format, hidden, hidden), normed, projected, batch, **q_options),
            matmul("k", weights(g, weight_format, kv_heads * head_dim, hidden), normed, kv, batch, **q_options),
            rms_norm("q norm", projected, values(g, head_dim), 1e-6, projected, batch),
            rope("rope", projected, cos, sin, batch, head_dim=head_dim),
            kv_append("append", kv, kv, k_cache, v_cache, batch),
            attention("attention", projected, k_cache, v_cache, attended, batch, scale=0.2),
            attention("window", projected, k_cache, v_cache, windowed, batch, scale=0.2, window=70),
            *into_o,
            matmul("o", weights(g, weight_format, hidden, hidden), attended, normed, batch, **o_options),
            matmul("router", weights(g, "f32", experts, hidden), normed, logits, batch),
            router("router", logits, chosen, shares, batch, rule=RoutingRule(renormalise=True)),
            *into_q,
        ):
            op()
        ffn = ExpertFFN("expert", normed, expert_rows, intermediate=width, format=weight_format, **q_options)
        shapes = ((width, hidden), (width, hidden), (hidden, width))
        ffn.point_matrices(*(weights(g, weight_format, *shape) for shape in shapes))
        for slot in range(k):
            ffn.assign(range(rows), [slot] * rows)
            for op in ffn.segment.ops:
                op()
        combine("combine", x, expert_rows, shares, x, batch)()
        for part in (projected, attended, windowed, normed, logits, chosen, shares, expert_rows, x):
            found.update(part.tobytes())
    assert np.isfinite(x).all()
    return found.hexdigest()


@njit
def exponentials(x):
    for i in range(len(x)):
        x[i] = exp64(x[i])


def digest_of_draws():
    """SHA-256 over exponentials and over tokens that were drawn by every rule."""
    g = np.random.Generator(np.random.Philox(9))
    weights = g.random(20_000) * -40
    exponentials(weights)
    logits, tokens = values(g, 3000) * np.float32(3), []
    draw = Draw(logits.size)
    for temperature, top_k, top_p, min_p in ((1, 0, 1, 0), (0.7, 40, 1, 0), (1.5, 0, 0.9, 0), (0.9, 500, 0.95, 0.01)):
        how = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        tokens += [draw(logits, **how, seed=1, position=position) for position in range(50)]
    return hashlib.sha256(weights.tobytes() + np.array(tokens).tobytes()).hexdigest()


def test_seeds_give_the_tokens_that_they_gave():
    assert digest_of_draws() == EXPECTED_DRAWS


@pytest.mark.parametrize(("numerics", "expected"), [("exact", EXPECTED), ("fast", EXPECTED_FAST)])
def test_the_bits_are_those_that_were_promised(numerics, expected):
    assert digest(numerics) == expected


@pytest.mark.parametrize(("numerics", "expected"), list(zip(("exact", "fast"), EXPECTED_BLOCKS, strict=True)))
def test_the_bits_of_formats_with_small_blocks_are_those_that_were_promised(numerics, expected):
    assert digest(numerics, BLOCKS) == expected


def test_the_version_of_the_arithmetic_is_that_of_the_promised_bits():
    """Else nodes and workers of before and after such a change would take each other for the same."""
    pinned = "".join((EXPECTED, EXPECTED_FAST, *EXPECTED_BLOCKS))
    assert hashlib.sha256(pinned.encode()).hexdigest()[:8] == ARITHMETIC


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names targets of x86-64")
@pytest.mark.parametrize(
    ("name", "features"),
    # Code without fused multiply-adds takes a minute to compile.
    [("haswell", AVX2), pytest.param("generic", "", marks=pytest.mark.soak)],
)
def test_code_for_other_processors_gives_the_same_bits(name, features):
    environment = {**os.environ, "NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve())], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [EXPECTED, EXPECTED_FAST, *EXPECTED_BLOCKS, EXPECTED_DRAWS]


if __name__ == "__main__":
    print(digest("exact"), digest("fast"), digest("exact", BLOCKS), digest("fast", BLOCKS), digest_of_draws())
