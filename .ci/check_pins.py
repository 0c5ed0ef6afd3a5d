"""Checks, without a network, that requirements/*.txt pin what pyproject.toml asks for.

Every dependency must be pinned to one version that satisfies its specifier, with hashes; the run pins must be part of
the development pins, at the same versions; and no pin file may name an index or a local path.

    python .ci/check_pins.py [FOLDER]

prints each problem and leaves with exit code 1 if there is one. FOLDER holds pyproject.toml and requirements/.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# Which extras each file is compiled with. The others are optional: they are checked when they are there.
REQUIRED = {"run": (), "dev": ("test", "bench")}
OPTIONAL = {"train": ("train",), "oracle": ("oracle",), "torch": ("torch",), "ray": ("ray",)}

PIN = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>\S+)( ; (?P<marker>[^\\]*?))?(?P<hashes>( --hash=\S+)*)\s*$")


def read_pins(path: Path, problems: list[str]) -> dict[str, str]:
    """Return {canonical name: version} of a pin file, noting every line that is not an exact, hashed pin.

    Pins whose marker is for another platform or Python are checked for hashes and left out of the result.
    """
    pins: dict[str, str] = {}
    text = path.read_text()
    leaks = (line.strip() for line in text.splitlines() if re.search(r"https?://|^--|[\s=]/\w", line))
    problems.extend(f"{path.name}: names an index or a local path: {line}" for line in leaks)
    for entry in re.sub(r"\s*\\\n\s*", " ", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE)).splitlines():
        if not entry.strip():
            continue
        found = PIN.match(entry)
        if found is None:
            problems.append(f"{path.name}: not pinned to one version: {entry.strip()[:80]}")
        else:
            if "--hash=sha256:" not in found["hashes"]:
                problems.append(f"{path.name}: {found['name']} has no hash")
            if found["marker"] is None or Marker(found["marker"]).evaluate():
                pins[canonicalize_name(found["name"])] = found["version"]
    return pins


def wanted(project: dict[str, object], extras: tuple[str, ...]) -> list[Requirement]:
    """Return the project's dependencies with those of `extras`, as far as they apply on this platform."""
    dependencies = project.get("dependencies", [])
    optional = project.get("optional-dependencies", {})
    assert isinstance(dependencies, list)
    assert isinstance(optional, dict)
    lines = [*dependencies, *(line for extra in extras for line in optional[extra])]
    requirements = [Requirement(line) for line in lines]
    return [r for r in requirements if r.marker is None or r.marker.evaluate()]


def check(folder: Path) -> list[str]:
    """Return the problems of FOLDER's pins, as sentences; empty if there are none."""
    problems: list[str] = []
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    pins: dict[str, dict[str, str]] = {}
    for name, extras in {**REQUIRED, **OPTIONAL}.items():
        path = folder / "requirements" / f"{name}.txt"
        if not path.exists():
            if name in REQUIRED:
                problems.append(f"requirements/{name}.txt is missing")
            continue
        pins[name] = read_pins(path, problems)
        for requirement in wanted(project, extras):
            version = pins[name].get(canonicalize_name(requirement.name))
            if version is None:
                problems.append(f"{path.name}: {requirement.name} of pyproject.toml is not pinned")
            elif not requirement.specifier.contains(version, prereleases=True):
                problems.append(f"{path.name}: {requirement.name} {version} is not {requirement.specifier}")
    for name, version in pins.get("run", {}).items():
        other = pins.get("dev", {}).get(name)
        if other != version:
            problems.append(f"run.txt has {name} {version}, dev.txt has {other}")
    return problems


def main() -> int:
    """Print the problems; 0 if there are none."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent
    problems = check(folder)
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
