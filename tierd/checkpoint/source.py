"""The source of a conversion: opened afresh, or reopened for a conversion that goes on; and freed bit by bit."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from tierd.checkpoint.config import Config
from tierd.checkpoint.journal import Identity
from tierd.checkpoint.reader import Checkpoint
from tierd.checkpoint.tiktoken import RANKS_FILE, tokenizer_json
from tierd.errors import StoreDamaged, UsageError
from tierd.store.checksums import sha256
from tierd.store.manifest import MAX_TEXT_BYTES
from tierd.store.reading import read_small_file
from tierd.store.shards import read_header

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tierd.checkpoint.journal import Journal
    from tierd.checkpoint.plan import ConversionPlan

__all__ = ["TEXT_FILES", "SourceRelease", "compare_identity", "identity_of", "read_texts", "reopen"]

TEXT_FILES: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "LICENSE",
    "NOTICE",
)
"""Small files that are copied beside the weights where they are present."""


def read_texts(folder: Path) -> dict[str, bytes]:
    """The small files of a checkpoint by name; a raw tiktoken vocabulary becomes the tokenizer.json that it lacks."""
    texts = {name: read_small_file(folder / name, MAX_TEXT_BYTES) for name in TEXT_FILES if (folder / name).exists()}
    if "tokenizer.json" not in texts and (folder / RANKS_FILE).exists():
        try:
            settings = json.loads(texts.get("tokenizer_config.json", b"{}"))
        except (ValueError, RecursionError):
            settings = None
        if not isinstance(settings, dict):
            raise StoreDamaged(f"{folder / 'tokenizer_config.json'} is not a JSON object")
        texts["tokenizer.json"] = tokenizer_json(read_small_file(folder / RANKS_FILE, MAX_TEXT_BYTES), settings)
    return texts


def identity_of(
    checkpoint: Checkpoint, plan: ConversionPlan, options: dict[str, object], texts: dict[str, bytes]
) -> Identity:
    """The identity of a conversion that begins now."""
    files = {}
    for name, header in checkpoint.headers.items():
        status = (checkpoint.folder / name).stat()
        files[name] = (header.file_bytes, status.st_mtime_ns, header)
    hashes = {name: sha256(data) for name, data in texts.items()}
    return Identity(dict(options), plan.digest, hashes, files)


def reopen(folder: Path, identity: Identity, consumed: set[str]) -> Checkpoint:
    """The same checkpoint again, from the headers in the journal; files that were freed may be gone.

    Raises:
        UsageError: a file was changed since the conversion began.
        StoreDamaged: a file is missing that was not freed.
    """
    config = Config.read(folder)
    headers = {}
    for name, (size, modified, header) in identity.files.items():
        headers[name] = header
        path = folder / name
        if name in consumed:
            continue
        if not path.exists():
            raise StoreDamaged(f"{path} is missing; the conversion that began with it cannot go on")
        status = path.stat()
        if (status.st_size, status.st_mtime_ns) != (size, modified) or read_header(path).raw != header.raw:
            raise _changed(path)
    return Checkpoint.from_headers(folder, config, headers)


def compare_identity(
    identity: Identity, plan: ConversionPlan, options: dict[str, object], texts: dict[str, bytes], source: Path
) -> None:
    """UsageError, naming the difference, unless options, small files and plan are those of the journal."""
    for name, value in options.items():
        if identity.options.get(name) != value:
            raise UsageError(
                f"the conversion that began here used {name} {identity.options.get(name)}, not {value}",
                hint="Run it with the same options, or choose another destination.",
            )
    for name in sorted({*identity.texts, *texts}):
        if identity.texts.get(name) != (sha256(texts[name]) if name in texts else None):
            raise _changed(source / name)
    if identity.plan != plan.digest:
        raise UsageError(
            "the conversion that began here was planned by another version of tierd",
            hint="Finish it with that version, or choose another destination.",
        )


def _changed(path: Path) -> UsageError:
    return UsageError(
        f"{path} was changed since the conversion began",
        hint="A store must come from one checkpoint: remove the destination and convert again.",
    )


class SourceRelease:
    """Frees source shards of which everything needed is written, verified and durable; others are never touched.

    Args:
        plan: what uses which source file.
        finished: output shards that are complete already.
    """

    def __init__(self, plan: ConversionPlan, finished: Iterable[str]) -> None:
        done = set(finished)
        self._waiting: dict[Path, set[str]] = {}
        for shard in plan.shards:
            for path in plan.source_files(shard):
                pending = self._waiting.setdefault(path, set())
                if shard.file not in done:
                    pending.add(shard.file)

    def freed_by(self, file: str) -> list[Path]:
        """Source files for which this output shard is the last one that waits."""
        return [path for path, pending in self._waiting.items() if pending == {file}]

    def ready(self) -> list[Path]:
        """Source files for which no output shard waits."""
        return [path for path, pending in self._waiting.items() if not pending]

    def finish(self, file: str) -> None:
        """Notes that an output shard is complete."""
        for pending in self._waiting.values():
            pending.discard(file)

    def free(self, journal: Journal) -> list[Path]:
        """Removes every source file that is ready and still there; links go with their targets."""
        removed = []
        for path in self.ready():
            if path.name not in journal.consumed:
                journal.note_consumed(path.name)
            if path.exists() or path.is_symlink():
                target = path.resolve()
                path.unlink()
                target.unlink(missing_ok=True)
                removed.append(path)
        return removed
