"""The training text, from Debian packages: six novels, the King James Bible and two dictionaries.

All of it is in the public domain (the Bible outside the United Kingdom):

* `r-cran-janeaustenr`: Jane Austen's novels, in an R lazy-load database: per object four bytes of length and a
  zlib stream of R's XDR serialisation ("R Internals", section 1.8);
* `bible-kjv`, `bible-kjv-text`: the Bible, printed by the package's own program;
* `dict-devil`, `dict-jargon`: The Devil's Dictionary and the Jargon File, as dictzip, which gzip reads.
"""

from __future__ import annotations

import gzip
import re
import struct
import subprocess
import tempfile
import zlib
from pathlib import Path

from tierd.errors import StoreDamaged, UsageError

__all__ = ["PACKAGES", "build_text", "documents", "download_packages", "novels"]

PACKAGES = ("r-cran-janeaustenr", "bible-kjv", "bible-kjv-text", "dict-devil", "dict-jargon")
FILES = (*(f"austen_{n}.txt" for n in range(6)), "devil.txt", "jargon.txt", "kjv.txt")

CHARACTER_VECTOR, CHARACTER_STRING = 16, 9  # R's STRSXP and CHARSXP
SHORTEST_NOVEL = 100_000  # characters; other objects of the package are far shorter
TIMEOUT = 300.0  # seconds for one program


def run(command: list[str], folder: Path) -> bytes:
    """The output of a program, run in `folder`.

    Raises UsageError with what the program printed where it is missing, fails or takes too long.
    """
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, timeout=TIMEOUT, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", b"") or b"").decode(errors="replace").strip()
        raise UsageError(
            f"{command[0]} failed: {said or error}",
            hint="The text comes from Debian packages: run this on Debian, or give --text a folder of *.txt files.",
        ) from error
    return done.stdout


def download_packages(folder: Path) -> None:
    """Fetch the packages into `folder` with apt-get; those that are there already are kept."""
    wanted = [package for package in PACKAGES if not list(folder.glob(f"{package}_*.deb"))]
    if wanted:
        run(["apt-get", "download", *wanted], folder)


def character_vector(serialised: bytes) -> list[str] | None:
    """The strings of one R object in XDR serialisation, or None if it is no plain character vector.

    Raises struct.error where the bytes end early.
    """
    if serialised[:2] != b"X\n":
        return None
    (version,) = struct.unpack_from(">i", serialised, 2)
    at = 14  # after the format's version and those of the writer and the oldest reader
    if version >= 3:  # which adds the name of the native encoding
        (length,) = struct.unpack_from(">i", serialised, at)
        at += 4 + length
    flags, count = struct.unpack_from(">ii", serialised, at)
    if flags & 0xFF != CHARACTER_VECTOR:
        return None
    at += 8
    lines = []
    for _ in range(count):
        flags, length = struct.unpack_from(">ii", serialised, at)
        if flags & 0xFF != CHARACTER_STRING:
            return None
        at += 8
        size = max(length, 0)  # R's missing string has the length -1
        lines.append(serialised[at : at + size].decode("utf-8", "replace"))
        at += size
    return lines


def novels(database: bytes) -> list[str]:
    """The long character vectors of an R lazy-load database, each joined to one text, in file order."""
    found = []
    at = 0
    while at + 4 < len(database):
        stream = zlib.decompressobj()
        try:
            lines = character_vector(stream.decompress(database[at + 4 :]))
        except (zlib.error, struct.error) as error:
            raise StoreDamaged(f"the R database is damaged at byte {at:,}: {error}") from error
        at = len(database) - len(stream.unused_data)
        text = "\n".join(lines or [])
        if len(text) >= SHORTEST_NOVEL:
            found.append(text)
    return found


def build_text(packages: Path, out: Path) -> None:
    """Extract the packages in `packages` and write one text file per book into `out`.

    Raises UsageError where a package is missing, StoreDamaged where one does not hold what it should.
    """
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        for package in PACKAGES:
            files = sorted(packages.glob(f"{package}_*.deb"))
            if not files:
                raise UsageError(f"{packages} has no package {package}", hint=f"apt-get download {package}")
            run(["dpkg", "-x", str(files[-1].resolve()), str(root)], packages)
        data = root / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
        books = novels(data.read_bytes()) if data.exists() else []
        for number, book in enumerate(books):
            (out / f"austen_{number}.txt").write_text(book, encoding="utf-8")
        for name in ("devil", "jargon"):
            packed = root / f"usr/share/dictd/{name}.dict.dz"
            if packed.exists():
                (out / f"{name}.txt").write_bytes(gzip.decompress(packed.read_bytes()))
        library = str(root / "usr/lib")
        verses = run([str(root / "usr/bin/bible"), "-p", library, "-f", "gen1:1-rev22:21"], root).decode()
        plain = re.sub(r"^[0-9]?[A-Za-z]+[0-9]+:[0-9]+ ", "", verses, flags=re.MULTILINE)
        (out / "kjv.txt").write_text(plain, encoding="utf-8")
    missing = [name for name in FILES if not (out / name).is_file()]
    if missing:
        raise StoreDamaged(f"the packages in {packages} gave no {', '.join(missing)}")


def documents(folder: Path) -> list[str]:
    """The books of a folder, by name, with the line breaks inside paragraphs replaced by spaces.

    The Bible keeps its lines: there, each is a verse. Raises UsageError where there are none.
    """
    texts = []
    for path in sorted(folder.glob("*.txt")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if path.name != "kjv.txt":
            text = re.sub(r"(?<!\n)\n(?!\n)", " ", text)
        texts.append(re.sub(r"[ \t]+", " ", text).strip())
    if not any(texts):
        raise UsageError(f"{folder} has no *.txt files with text in them")
    return texts
