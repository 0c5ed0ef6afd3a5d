"""Facts of packaging and layout that break silently: what is installed, what is shipped, what is named."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import tierd

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = ("tierd", "compute_node")


def run_python(code: str, *options: str, cwd: Path = ROOT) -> str:
    """Return what `code` prints in a fresh interpreter that must succeed."""
    done = subprocess.run(
        [sys.executable, *options, "-c", code], cwd=cwd, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def tracked_files() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / name for name in listing.stdout.split("\0") if name]
    return [path for path in files if path.is_file()]


def text_of(path: Path) -> str:
    """Return the text of a source file; nothing for data."""
    data = path.read_bytes()
    return "" if b"\0" in data[:8192] or path.suffix in {".safetensors", ".npz", ".npy"} else data.decode()


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


@pytest.mark.parametrize("name", sorted(PROJECT["scripts"]))
def test_every_console_script_is_installed_and_resolves(name):
    (entry,) = metadata.entry_points(group="console_scripts", name=name)
    assert entry.value == PROJECT["scripts"][name]
    assert callable(entry.load())
    assert os.access(Path(sys.executable).parent / name, os.X_OK)


def test_the_version_numbers_agree():
    assert tierd.__version__ == PROJECT["version"] == metadata.version("tierd")


def test_every_file_of_the_packages_is_shipped():
    listing = run_python(
        "import json, setuptools.dist as d\n"
        "dist = d.Distribution({'script_name': 'setup.py'}); dist.parse_config_files(); dist.set_defaults()\n"
        "build = dist.get_command_obj('build_py'); build.ensure_finalized(); build.build_lib = 'lib'\n"
        "print(json.dumps(build.get_outputs(include_bytecode=False)))"
    )
    shipped = {Path(name).relative_to("lib") for name in json.loads(listing.splitlines()[-1])}
    packages = [path.relative_to(ROOT) for path in tracked_files() if path.relative_to(ROOT).parts[0] in PACKAGES]
    assert not [str(path) for path in packages if path not in shipped]
    assert {Path(package) / "py.typed" for package in PACKAGES} <= shipped
    assert {Path("tierd/api") / f"{stem}_pb2_grpc.py" for stem in ("admin", "session", "store")} <= shipped


def test_generated_stubs_import_without_a_warning():
    stubs = [f"tierd.api.{path.stem}" for path in sorted((ROOT / "tierd/api").glob("*_pb2*.py"))]
    assert len(stubs) == 2 * len(list((ROOT / "proto").rglob("*.proto")))
    run_python(f"import {', '.join(stubs)}", "-W", "error")


def test_no_module_of_the_daemon_loads_a_compiler_or_the_compute_node():
    loaded = run_python(
        "import importlib, pkgutil, sys, tierd\n"
        "found = [module.name for module in pkgutil.walk_packages(tierd.__path__, 'tierd.')]\n"
        "apart = ('tierd.integrations', 'tierd.fleet', 'tierd.__main__')\n"
        "names = [name for name in found if not name.startswith(apart)]\n"
        "for name in names: importlib.import_module(name)\n"
        "assert 'tierd.cli' in names, names\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    assert not {"compute_node", "numba", "llvmlite", "torch", "transformers", "ray", "httpx"} & set(loaded.split())


def test_no_tracked_file_names_a_place_of_one_machine():
    # Home folders, roots of checkouts, package indexes; and, in code, a fixed temporary file.
    place = re.compile(
        r"(?<![\w.~}])/(?:work|root|home|Users)/\w|--(?:extra-)?index-url[ =]|https?://[\w.-]*(?:pypi|pythonhosted)"
    )
    temporary = re.compile(r"(?<![\w.])/tmp/\w")
    found = []
    for path in tracked_files():
        patterns = [place, temporary] if path.suffix == ".py" or ".ci" in path.parts else [place]
        for number, line in enumerate(text_of(path).splitlines(), start=1):
            if any(pattern.search(line) for pattern in patterns):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not found


def test_files_stay_short():
    sources = [path for path in tracked_files() if path.suffix == ".py" and path.parent.name != "api"]
    lengths = {str(path.relative_to(ROOT)): len(text_of(path).splitlines()) for path in sources}
    assert len(lengths) > 10
    assert not {name: length for name, length in lengths.items() if length > 400}


def test_test_files_have_names_of_their_own():
    tests = [path for path in tracked_files() if path.is_relative_to(ROOT / "tests")]
    names = [path.name for path in tests if path.match("test_*.py")]
    assert "test_house.py" in names
    assert sorted(set(names)) == sorted(names)
    assert not list((ROOT / "tests").rglob("__init__.py"))


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_commands_in_the_documents_are_make_targets(document):
    named = set(re.findall(r"(?:^|`)make ([a-z]+)", (ROOT / document).read_text(), flags=re.MULTILINE))
    assert {"test"} <= named <= make_targets()


def test_the_readme_says_why_each_dependency_is_there():
    rows = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| ")]
    explained = {name.strip() for row in rows for name in row.split("|")[1].split(",")}
    needed = {re.split(r"[^\w-]", line)[0] for line in PROJECT["dependencies"]}
    assert needed - explained == set()


def test_make_alone_prints_every_target():
    printed = subprocess.run(["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True)
    named = {line.split()[1] for line in printed.stdout.splitlines()}
    assert named == make_targets()
    assert {"setup", "demo", "test", "check", "bench", "soak", "proto"} <= named


def check_pins(folder: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, ROOT / ".ci/check_pins.py", folder], capture_output=True, text=True, check=False, timeout=60
    )
    assert not done.stderr
    return done.returncode, done.stdout


@pytest.fixture
def pins(tmp_path):
    """Return a copy of the files that pin dependencies."""
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_pins_are_in_step_with_the_project():
    assert check_pins(ROOT) == (0, "")


@pytest.mark.parametrize(
    ("file", "pattern", "replacement", "problem"),
    [
        ("requirements/dev.txt", r"^xxhash==.*\n(    .*\n)*", "", "dev.txt: xxhash of pyproject.toml is not pinned"),
        ("requirements/dev.txt", r"^numba==\S+", "numba==0.1.0", "dev.txt: numba 0.1.0 is not >="),
        ("requirements/run.txt", r"^rich==\S+", "rich==99.0", "run.txt has rich 99.0, dev.txt has"),
        ("requirements/run.txt", r"^rich==\S+ ", "rich>=15 ", "run.txt: not pinned to one version: rich>=15"),
        ("requirements/run.txt", r"^(rich==\S+) \\\n(    --hash.*\n)*", r"\1\n", "run.txt: rich has no hash"),
        ("requirements/run.txt", r"\A", "--find-links https://packages.example\n", "names an index"),
        ("pyproject.toml", r'"jinja2', '"leftpad>=1",\n  "jinja2', "leftpad of pyproject.toml is not pinned"),
    ],
    ids=["missing", "version", "run-and-dev", "range", "hash", "index", "new-dependency"],
)
def test_pins_out_of_step_are_named(pins, file, pattern, replacement, problem):
    before = (pins / file).read_text()
    after = re.sub(pattern, replacement, before, count=1, flags=re.MULTILINE)
    assert after != before
    (pins / file).write_text(after)
    code, said = check_pins(pins)
    assert code == 1
    assert problem in said


@pytest.mark.parametrize(
    ("environment", "code"), [({}, 0), ({"TIERD_TESTS_FAIL_ON_SKIP": "1"}, 1)], ids=["allowed", "forbidden"]
)
def test_a_skipped_test_is_named_and_fails_a_run_that_forbids_it(tmp_path, environment, code):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "tests/conftest.py", tmp_path / "tests")
    (tmp_path / "tests/test_example.py").write_text(
        "import asyncio, pytest\n"
        "@pytest.mark.skip(reason='no drive')\n"
        "def test_left_out(): pass\n"
        "async def test_loop(): assert type(asyncio.get_running_loop()).__module__ == 'uvloop'\n"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TIERD_", "COV", "PYTEST"))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env=clean | environment | {"PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == code, done.stdout
    assert "1 test skipped: tests/test_example.py::test_left_out (no drive)" in done.stdout
    assert "1 passed, 1 skipped" in done.stdout.splitlines()[-1]
