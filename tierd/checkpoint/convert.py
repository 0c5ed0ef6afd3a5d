"""Converting a published checkpoint to a store: streamed, verified, safe to kill at any moment and to run again."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tierd.checkpoint.destination import begun_conversion, check_space, is_complete
from tierd.checkpoint.journal import Journal, read_log, write_identity
from tierd.checkpoint.plan import ConversionPlan, DenseShardPlan, Planner, plan_conversion
from tierd.checkpoint.reader import Checkpoint
from tierd.checkpoint.shard_output import write_dense_shard, write_expert_shard
from tierd.checkpoint.source import SourceRelease, compare_identity, identity_of, read_texts, reopen
from tierd.errors import StoreDamaged
from tierd.store.checksums import sha256
from tierd.store.index import new_index
from tierd.store.manifest import DenseTensorInfo, StoredFile
from tierd.store.store import ExpertStore
from tierd.store.writing import DEFAULT_SHARD_BYTES, PARTIAL_SUFFIX, seal_store, write_atomic

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierd.checkpoint.journal import Identity
    from tierd.store.writing import ExpertShardPlan

__all__ = ["Conversion", "ConversionProgress", "ConversionReport", "convert"]


@dataclass(frozen=True, slots=True)
class ConversionProgress:
    """How far a conversion is: bytes written and verified, of all, and the shard it works on (from 1)."""

    done_bytes: int
    total_bytes: int
    shard: int
    shards: int
    file: str


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """What a conversion made.

    Attributes:
        path: the store.
        fingerprint: of the store.
        total_bytes: of all its files but the manifest.
        bytes_per_weight: of the expert records, counted from the index.
        resumed_shards: shards that an earlier run had completed.
        freed: source files that were removed (`consume`).
    """

    path: Path
    fingerprint: str
    total_bytes: int
    bytes_per_weight: float
    resumed_shards: int
    freed: list[Path] = field(default_factory=list)

    def to_table(self) -> dict[str, Any]:
        """The report for machines."""
        return {**asdict(self), "path": str(self.path), "freed": [str(path) for path in self.freed]}


def convert(
    src: Path | str,
    dst: Path | str,
    *,
    experts: str = "native",
    dense: str = "native",
    consume: bool = False,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Callable[[ConversionProgress], None] | None = None,
) -> ConversionReport:
    """Converts `src` to the store `dst`; see `Conversion`."""
    conversion = Conversion.prepare(src, dst, experts=experts, dense=dense, consume=consume, shard_bytes=shard_bytes)
    return conversion.run(progress)


@dataclass(slots=True)
class Conversion:
    """A planned conversion; nothing has been written yet.

    Attributes:
        source: the opened checkpoint.
        target: the destination.
        plan: what will be written.
        consume: free source shards that are fully used.
        finished: shards that an earlier run completed.
    """

    source: Checkpoint
    target: Path
    plan: ConversionPlan
    consume: bool
    finished: set[str]
    _texts: dict[str, bytes]
    _options: dict[str, Any]
    _identity: Identity | None

    @property
    def has_tokenizer(self) -> bool:
        """Whether the store will be able to read and write text."""
        return "tokenizer.json" in self._texts

    @classmethod
    def prepare(
        cls,
        src: Path | str,
        dst: Path | str,
        *,
        experts: str = "native",
        dense: str = "native",
        consume: bool = False,
        shard_bytes: int = DEFAULT_SHARD_BYTES,
        planner: Planner = plan_conversion,
    ) -> Self:
        """Checks the source, the destination and the free space, and plans every shard.

        The planner says what the checkpoint becomes; the default knows the families that have a mapping.

        Raises:
            UsageError: wrong options, a destination with other content, a changed source, or too little space.
            UnsupportedModel: a family, dtype or tensor that is not known.
            StoreDamaged: the checkpoint is incomplete or inconsistent.
        """
        folder, target = Path(src), Path(dst)
        options = {"experts": experts, "dense": dense, "shard_bytes": shard_bytes}
        identity = begun_conversion(target)
        if identity is None:
            checkpoint = Checkpoint.open(folder)
            finished: set[str] = set()
        else:
            done, consumed, _ = read_log(target)
            checkpoint = reopen(folder, identity, consumed)
            finished = set(done)
        plan = planner(checkpoint, experts=experts, dense=dense, shard_bytes=shard_bytes)
        texts = read_texts(folder)
        if identity is not None:
            compare_identity(identity, plan, options, texts, folder)
        finished = {shard.file for shard in plan.shards if shard.file in finished and is_complete(target, shard)}
        check_space(plan, target, finished, consume=consume)
        return cls(checkpoint, target, plan, consume, finished, texts, options, identity)

    def run(self, progress: Callable[[ConversionProgress], None] | None = None) -> ConversionReport:
        """Writes what is missing, shard by shard, and seals the store.

        Raises:
            UsageError: another conversion into the destination is running.
            DriveError: source or destination cannot be read or written; running again goes on.
            ChecksumMismatch: what was read back is not what was written.
        """
        self.target.mkdir(parents=True, exist_ok=True)
        with Journal.open(self.target) as journal:
            if self._identity is None:
                write_identity(self.target, identity_of(self.source, self.plan, self._options, self._texts))
            report = self._write(journal, progress or (lambda _: None))
            journal.remove()
        return report

    def _write(self, journal: Journal, progress: Callable[[ConversionProgress], None]) -> ConversionReport:
        shards = self.plan.shards
        resumed = {shard.file for shard in shards if self._is_done(journal, shard)}
        release = SourceRelease(self.plan, resumed)
        freed = release.free(journal) if self.consume else []
        done, total = 0, self.plan.shard_bytes

        for number, shard in enumerate(shards, start=1):
            report = _reporter(progress, ConversionProgress(done, total, number, len(shards), shard.file))
            if shard.file not in resumed:
                self._write_shard(journal, shard, report)
                release.finish(shard.file)
                if self.consume:
                    freed += release.free(journal)
            report(shard.header.file_bytes)
            done += shard.header.file_bytes
        return self._seal(journal, len(resumed), freed)

    def _write_shard(
        self, journal: Journal, shard: DenseShardPlan | ExpertShardPlan, report: Callable[[int], None]
    ) -> None:
        """Writes one shard and notes it in the journal once it is verified and durable."""
        lost = [path.name for path in self.plan.source_files(shard) if path.name in journal.consumed]
        if lost:
            raise StoreDamaged(
                f"{self.target / shard.file} is gone, and so is its source {lost[0]}, which was freed",
                hint="Download the checkpoint again and convert into an empty directory.",
            )
        (self.target / (shard.file + PARTIAL_SUFFIX)).unlink(missing_ok=True)
        check_space(self.plan, self.target, set(journal.finished) - {shard.file}, consume=self.consume, next_only=True)
        if isinstance(shard, DenseShardPlan):
            checksums = write_dense_shard(self.target, shard, report)
        else:
            checksums = write_expert_shard(self.target, self.plan, shard, report)
        journal.finish_shard(shard.file, checksums)

    def _is_done(self, journal: Journal, shard: DenseShardPlan | ExpertShardPlan) -> bool:
        return shard.file in journal.finished and is_complete(self.target, shard)

    def _seal(self, journal: Journal, resumed: int, freed: list[Path]) -> ConversionReport:
        """Writes small files, index and manifest, and opens the result as any reader will."""
        plan = self.plan
        index = new_index(plan.geometry)
        for number, shard in enumerate(plan.experts):
            rows = index[shard.flats.start : shard.flats.stop]
            rows["shard"] = number
            rows["offset"] = [entry.begin for entry in shard.header.tensors.values()]
            rows["xxh3"] = journal.finished[shard.file]
        for name, data in self._texts.items():
            write_atomic(self.target / name, data)
        manifest = seal_store(
            self.target,
            family=plan.model.family,
            model_type=self.source.config.model_type,
            expert_format=plan.expert_format,
            dense_format=plan.dense_format,
            geometry=plan.geometry,
            shards=[shard.shard for shard in plan.experts],
            index=index,
            dense_shards=[shard.shard for shard in plan.dense],
            dense=[
                _dense_info(number, shard, position, journal)
                for number, shard in enumerate(plan.dense)
                for position in range(len(shard.items))
            ],
            files=[StoredFile(name=name, bytes=len(data), sha256=sha256(data)) for name, data in self._texts.items()],
            interface=plan.interface,
        )
        store = ExpertStore.open(self.target)
        geometry = plan.geometry
        weights = sum(entry.experts * geometry.layouts[entry.layout].weights for entry in geometry.layers)
        written = int(store.index["bytes"].sum())
        if written != geometry.expert_bytes:
            raise StoreDamaged(f"{self.target}: {written} bytes of experts written, {geometry.expert_bytes} expected")
        return ConversionReport(
            self.target, manifest.fingerprint, manifest.total_bytes, written / weights, resumed, freed
        )


def _reporter(progress: Callable[[ConversionProgress], None], start: ConversionProgress) -> Callable[[int], None]:
    """Reports bytes written into the current shard as progress of the whole."""
    return lambda written: progress(replace(start, done_bytes=start.done_bytes + written))


def _dense_info(number: int, shard: DenseShardPlan, position: int, journal: Journal) -> DenseTensorInfo:
    item = shard.items[position]
    entry = shard.header.tensors[item.name]
    return DenseTensorInfo(
        name=item.name,
        dtype=item.stored,
        shape=item.shape,
        shard=number,
        offset=entry.begin,
        nbytes=entry.nbytes,
        xxh3=f"{journal.finished[shard.file][position]:016x}",
        scales=item.scales,
    )
