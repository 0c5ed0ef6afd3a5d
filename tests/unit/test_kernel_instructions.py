"""Code for processors that may not be at hand: it is compiled, with the instructions that it is written for."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

AVX512 = (
    "+sse2,+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+movbe,+xsave,+cx16,+avx512f,"
    "+avx512bw,+avx512cd,+avx512dq,+avx512vl,+avx512vnni"
)
LOOK = """
import sys
import compute_node.kernels
from compute_node.engine.kernel_path import kernel_path
from numba.core.ccallback import CFunc

assert kernel_path() == "avx512"
modules = [module for name, module in sys.modules.items() if name.startswith("compute_node.kernels.")]
kernels = {id(one): one for module in modules for one in vars(module).values() if isinstance(one, CFunc)}
code = [one._library.get_asm_str() for one in kernels.values()]
print(len(code), *(sum(word in text for text in code) for word in ("vpdpbusd", "vpermps", "zmm", "vfmadd")))
"""


@pytest.mark.soak
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names targets of x86-64")
def test_code_for_avx512_uses_its_products_of_bytes(tmp_path):
    target = {"NUMBA_CPU_NAME": "znver4", "NUMBA_CPU_FEATURES": AVX512, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", LOOK], env=os.environ | target, capture_output=True, text=True, check=True
    )
    kernels, products, look_ups, registers, fused = map(int, done.stdout.split())
    assert kernels > 10
    assert min(products, look_ups, registers, fused) > 0, done.stdout
