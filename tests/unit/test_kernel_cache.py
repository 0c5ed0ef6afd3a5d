from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import compute_node
from compute_node.engine.kernel_path import kernel_path
from compute_node.kernels import cache, warm_up

PROBE = """
import importlib.util, os, sys
folder = sys.argv[1]
def load(name):
    spec = importlib.util.spec_from_file_location(name, f"{folder}/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
print(load("cache").prepare())
load("compiling").tell_once()
sys.path.insert(0, folder)
import first
print(first.answer(4))
"""
FIRST = """
from numba import njit
from second import double

@njit(cache=True)
def answer(x):
    return double(x)
"""
SECOND = """
from numba import njit

@njit(cache=True)
def double(x):
    return x * {factor}
"""


def probe(folder, home):
    environment = {**os.environ, "XDG_CACHE_HOME": str(home)}
    # -B: Python's own cache goes by time and size, which the edit below leaves alone on purpose.
    done = subprocess.run(
        [sys.executable, "-B", "-c", PROBE, str(folder)], env=environment, capture_output=True, text=True, check=True
    )
    where, answer = done.stdout.split()
    assert done.stderr.count("compiling kernels for this processor") == 1
    return Path(where), int(answer)


def test_an_edit_in_a_called_file_never_runs_old_code(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    for name in ("cache.py", "compiling.py"):
        shutil.copy(Path(cache.__file__).with_name(name), package)
    (package / "first.py").write_text(FIRST)
    (package / "second.py").write_text(SECOND.format(factor=2))
    before, answer = probe(package, tmp_path)
    assert answer == 8
    assert list(before.rglob("first.answer*.nbi"))
    status = (package / "second.py").stat()
    (package / "second.py").write_text(SECOND.format(factor=3))
    os.utime(package / "second.py", ns=(status.st_atime_ns, status.st_mtime_ns))
    after, answer = probe(package, tmp_path)
    assert answer == 12
    assert before != after
    assert before.parent == after.parent == tmp_path / "tierd" / "kernels"


def test_the_name_covers_sources_and_processor(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("x = 1")
    first = cache.kernel_hash(tmp_path)
    assert first == cache.kernel_hash(tmp_path)
    (tmp_path / "b.py").write_text("")
    second = cache.kernel_hash(tmp_path)
    monkeypatch.setenv("NUMBA_CPU_NAME", "generic")
    third = cache.kernel_hash(tmp_path)
    assert len({first, second, third}) == 3


def test_this_process_uses_the_directory_of_its_own_sources():
    assert warm_up().name == cache.kernel_hash(Path(compute_node.__file__).parent / "kernels")
    assert os.environ["NUMBA_CACHE_DIR"] == str(warm_up())
    assert list(warm_up().rglob("*.nbi"))


def test_a_home_that_cannot_be_written_gives_a_temporary_directory_and_says_so(tmp_path, monkeypatch, capsys):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setattr(cache.tempfile, "gettempdir", lambda: str(tmp_path))
    root = cache.cache_root()
    assert root == tmp_path / f"tierd-kernels-{os.getuid()}"
    assert root.stat().st_mode & 0o777 == 0o700
    assert str(root) in capsys.readouterr().err


def test_a_directory_that_others_may_write_is_not_trusted(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cache.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    open_to_all = tmp_path / "tierd" / "kernels"
    open_to_all.mkdir(parents=True)
    open_to_all.chmod(0o777)
    assert cache.cache_root() == tmp_path / "tmp" / f"tierd-kernels-{os.getuid()}"


@pytest.mark.parametrize(("days", "kept"), [(1, True), (40, False)])
def test_versions_unused_for_a_month_are_removed(tmp_path, monkeypatch, days, kept):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("NUMBA_CACHE_DIR", os.environ["NUMBA_CACHE_DIR"])
    monkeypatch.setattr(sys.modules["numba"].config, "CACHE_DIR", os.environ["NUMBA_CACHE_DIR"])
    old = tmp_path / "tierd" / "kernels" / "0123"
    old.mkdir(parents=True)
    (old / "code.nbi").write_text("")
    when = old.stat().st_mtime - days * 86400
    os.utime(old, (when, when))
    current = cache.prepare()
    assert current.is_dir()
    assert old.exists() == kept


def test_the_kernel_path_is_that_of_the_processor_that_code_is_compiled_for(monkeypatch):
    monkeypatch.setenv("NUMBA_CPU_NAME", "generic")
    monkeypatch.delenv("NUMBA_CPU_FEATURES", raising=False)
    assert kernel_path() == "portable"
    monkeypatch.setenv("NUMBA_CPU_FEATURES", "+avx2,+fma")
    assert kernel_path() == "avx2"
    monkeypatch.setenv("NUMBA_CPU_FEATURES", "+avx2,+fma,+avx512f")
    assert kernel_path() == "avx512"
