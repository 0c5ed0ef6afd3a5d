"""Which machine code the kernels become can be said, and is refused where it cannot be had."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

import llvmlite.binding as llvm
import pytest

from compute_node.commands.options import load_settings
from compute_node.engine.kernel_path import kernel_path
from compute_node.kernel_choice import force_kernels
from tierd.errors import UsageError

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="names features of x86-64")

WIDE = "+avx,+avx2,+fma,+avx512f,+avx512vnni,-avx10.1"
NARROW = "+avx,+avx2,+fma,-avx512f,-avx512vnni,-avx10.1"
CHOOSE = """
import json, os, sys
import llvmlite.binding as llvm

llvm.get_host_cpu_name = lambda: "host"
llvm.get_host_cpu_features = lambda: type("Features", (), {"flatten": lambda self: sys.argv[1]})()
from compute_node.kernel_choice import force_kernels
found = []
for path in sys.argv[2:]:
    force_kernels(path)
    found.append([os.environ.get(f"NUMBA_CPU_{word}") for word in ("NAME", "FEATURES")])
print(json.dumps(found), "numba" in sys.modules)
"""


def chosen(features, *paths, **variables):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_CPU")}
    command = [sys.executable, "-c", CHOOSE, features, *paths]
    done = subprocess.run(command, env=environment | variables, capture_output=True, text=True, check=True)
    found, _, loaded = done.stdout.strip().rpartition(" ")
    assert loaded == "False"
    return json.loads(found)


def test_what_the_compiler_is_told_before_it_is_imported():
    found = chosen(WIDE, "auto", "avx2", "portable", "avx512", NUMBA_CPU_NAME="k8")
    assert found == [["k8", None], ["host", NARROW], ["generic", ""], [None, None]]


def test_the_best_path_needs_no_other_code_than_auto():
    assert chosen(NARROW, "portable", "avx2") == [["generic", ""], [None, None]]


def host(monkeypatch, features):
    monkeypatch.setattr(llvm, "get_host_cpu_features", type("F", (), {"flatten": lambda _: features}))


def test_instructions_that_the_processor_lacks_are_refused(monkeypatch):
    host(monkeypatch, NARROW)
    with pytest.raises(UsageError, match="--kernels avx512: this processor has not") as refused:
        load_settings(None, {"kernels": "avx512"})
    assert "avx2" in refused.value.hint
    with pytest.raises(UsageError, match="--kernels neon is unknown"):
        force_kernels("neon")


def test_the_choice_counts_wherever_it_is_made(monkeypatch, tmp_path):
    """Kernels are loaded in this process, so another path than theirs is refused: that is how it is seen here."""
    other = "portable" if kernel_path() != "portable" else "avx2"
    host(monkeypatch, WIDE)
    refused = f"--kernels {other}: kernels for {kernel_path()} are loaded"
    with pytest.raises(UsageError, match=refused):
        load_settings(None, kernels=other)
    file = tmp_path / "node.toml"
    file.write_text(f'[node]\nkernels = "{other}"\n')
    with pytest.raises(UsageError, match=refused):
        load_settings(file)
    monkeypatch.setenv("TIERD_NODE_KERNELS", other)
    with pytest.raises(UsageError, match=refused):
        load_settings(None)
    assert load_settings(None, kernels="auto").kernels == "auto"


@pytest.mark.soak  # compiles the portable path
def test_the_portable_path_generates_the_same_tokens(embedded_store):
    def generated(path):
        command = [
            sys.executable, "-m", "compute_node", "generate", str(embedded_store), "--in-process", "-p", "She was",
            "--max-tokens", "24", "--temperature", "0.9", "--seed", "3", "--json", "--kernels", path,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        answer = json.loads(done.stdout)
        return answer["kernel_path"], answer["token_ids"]

    (ours, expected), (path, tokens) = generated("auto"), generated("portable")
    assert ours == kernel_path()
    assert path == "portable"
    assert tokens == expected
