"""Where compiled kernels are kept between runs: one directory per version of everything that shapes the code.

The compiler's own cache looks only at the file of the decorated function, so an edit in a file that it calls
would go on running old machine code. Here the directory's name is a hash of all kernel sources, of the compiler's
versions and of the processor's features: another version never finds the wrong code.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import shutil
import stat
import sys
import tempfile
import time
from pathlib import Path

__all__ = ["cache_root", "kernel_hash", "prepare", "processor"]

_UNUSED_DAYS = 30
"""A version's directory that no process opened for this long is removed."""


def processor() -> tuple[str, str]:
    """The processor name and feature string that code is compiled for, with the compiler's own overrides applied.

    `NUMBA_CPU_NAME` and `NUMBA_CPU_FEATURES` choose another target, as they do for numba itself.
    """
    import llvmlite.binding as llvm  # noqa: PLC0415 - importing this module must cost nothing

    name = os.environ.get("NUMBA_CPU_NAME", "")
    features = os.environ.get("NUMBA_CPU_FEATURES")
    if features is None:
        features = "" if name == "generic" else llvm.get_host_cpu_features().flatten()
    return name or llvm.get_host_cpu_name(), features


def kernel_hash(sources: Path | None = None) -> str:
    """Name of the compiled code: 20 hexadecimal digits over kernel sources, versions and processor features.

    Args:
        sources: the folder whose `*.py` files are the kernels; this package's by default.
    """
    folder = sources or Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode())
        digest.update(content)
    versions = [importlib.metadata.version(package) for package in ("numba", "llvmlite", "numpy")]
    facts = [*versions, platform.python_version(), platform.machine(), *processor()]
    digest.update("\n".join(facts).encode())
    return digest.hexdigest()[:20]


def _private_directory(path: Path) -> bool:
    """Makes `path` for this user alone; False if it cannot be written or belongs to somebody else."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
    except OSError:
        return False
    # Cached code is loaded and run: a directory that another user may write is not to be trusted.
    ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
    return ours and os.access(path, os.W_OK | os.X_OK)


def cache_root() -> Path:
    """`$XDG_CACHE_HOME/tierd/kernels` (`~/.cache` by default), or a private temporary directory where that fails."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")  # noqa: PTH111, PTH118 - a missing home must not raise
    wanted = Path(base) / "tierd" / "kernels"
    if _private_directory(wanted):
        return wanted
    fallback = Path(tempfile.gettempdir()) / f"tierd-kernels-{os.getuid()}"
    if not _private_directory(fallback):
        fallback = Path(tempfile.mkdtemp(prefix="tierd-kernels-"))
    print(f"compute-node: {wanted} cannot be used; compiled kernels are kept in {fallback}", file=sys.stderr)
    return fallback


def _remove_unused(root: Path, keep: Path) -> None:
    """Removes the directories of versions that were not used for a month."""
    oldest = time.time() - _UNUSED_DAYS * 86400
    for path in root.iterdir():
        try:
            if path != keep and path.is_dir() and path.lstat().st_mtime < oldest:
                shutil.rmtree(path, ignore_errors=True)
        except OSError:
            continue


def prepare() -> Path:
    """Points the compiler's cache at this version's directory and returns it; call it before numba is imported."""
    root = cache_root()
    path = root / kernel_hash()
    path.mkdir(mode=0o700, exist_ok=True)
    os.utime(path)
    _remove_unused(root, path)
    os.environ["NUMBA_CACHE_DIR"] = str(path)
    if "numba" in sys.modules:
        sys.modules["numba"].config.CACHE_DIR = str(path)
    return path
