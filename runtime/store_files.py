"""Tuned-config files on disk: where they are, and writing them whole (reading them: `store_reading`).

Packaged files lie in `flashsmith/tuned_configs/`, the user's in `FLASHSMITH_CONFIG_DIR`; both as
`<arch>/<gpu>/<family>.yaml`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..generator.errors import StoreError
from . import variables
from .store_reading import forget, read_file
from .store_schema import ANY_GPU, SCHEMA_VERSION, DeviceIdentity, Record, record_from_dict
from .store_yaml import dump_yaml

logger = logging.getLogger("flashsmith.store")

LOCK_SECONDS = 30.0
PACKAGED = Path(__file__).resolve().parent.parent / "tuned_configs"
_COMMENT = (
    "flashsmith: tuned configs of {family} on {where}.\n"
    "Written by `flashsmith tune`; meant to be read, reviewed and shared. Times are milliseconds of one call."
)


@dataclass(frozen=True, slots=True)
class Stored:
    """The file that records were stored in, and the old records that were kept in place of new ones."""

    path: Path
    kept: tuple[Record, ...] = ()


def gpu_slug(name: str) -> str:
    """The directory name of a GPU model: "NVIDIA H200" -> "nvidia-h200"; "" and None mean no particular GPU."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:64]
    return slug or ANY_GPU


def user_root() -> Path:
    """The directory of the user's own tuned configs."""
    return Path(variables.config_dir())


def tuned_path(root: Path, arch: str, gpu: str, family: str) -> Path:
    """The file that holds the winners of `family` on the GPU called `gpu` (its name or its slug)."""
    return root / arch / gpu_slug(gpu) / f"{family}.yaml"


def files_of(root: Path, arch: str, family: str) -> tuple[Path, ...]:
    """Every existing file of `family` for `arch` under `root`, sorted by GPU."""
    try:
        with os.scandir(root / arch) as entries:
            found = sorted(entry.name for entry in entries)
    except OSError:
        return ()
    paths = (root / arch / name / f"{family}.yaml" for name in found)
    return tuple(path for path in paths if path.is_file())


def save_records(records: Iterable[Record], *, arch: str, family: str, gpu: str = "", root: Path | None = None) -> Path:
    """The path of the file that now holds `records` beside the ones it held; see `store_records`."""
    return store_records(records, arch=arch, family=family, gpu=gpu, root=root).path


def store_records(
    records: Iterable[Record],
    *,
    arch: str,
    family: str,
    gpu: str = "",
    root: Path | None = None,
    replace_predictions: bool = False,
) -> Stored:
    """The file that now holds `records` beside the ones it held; equal (class, bucket) are replaced.

    A "predicted" record never replaces a "measured" one, nor (unless `replace_predictions`) a stronger prediction of
    the same generator and NVRTC: one that was proved where it is not, or that chose among more compiled configs. The
    file is replaced whole under a lock; one that cannot be read is set aside as `<name>.rejected-<n>`. Raises
    StoreError where the directory cannot be written.
    """
    from filelock import FileLock, Timeout

    fresh = [record_from_dict(record.to_dict(), where="new record") for record in records]
    path = tuned_path(root if root is not None else user_root(), arch, gpu, family)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock", timeout=LOCK_SECONDS):
            merged, kept = _merge(_existing(path), fresh, replace_predictions)
            _write_atomically(path, _text_of(merged, arch=arch, gpu=gpu_slug(gpu), family=family))
    except Timeout:
        raise StoreError(
            f"{path} was locked by another process for {LOCK_SECONDS:.0f} s."
            " Wait for it, or remove the .lock file if that process is gone."
        ) from None
    except OSError as error:
        raise StoreError(
            f"Tuned configs cannot be written to {path}: {error.strerror or error}."
            " Point FLASHSMITH_CONFIG_DIR at a writable directory."
        ) from None
    forget(path)
    return Stored(path, kept)


def device_of(records: Iterable[Record]) -> DeviceIdentity | None:
    """The device of the first record, or None."""
    return next((record.device for record in records), None)


def _existing(path: Path) -> tuple[Record, ...]:
    """The records of `path`; an unreadable or partly unreadable file is first copied aside, so that nothing is lost."""
    forget(path)
    if not path.exists():
        return ()
    current = read_file(path, keep_copy=False)
    if current.problems:
        aside = next(_free_names(path))
        os.link(path, aside)
        logger.warning(
            "%s could not be read in full (%s); its old text is kept as %s.", path, current.problems[0], aside.name
        )
    return current.records


def _free_names(path: Path) -> Iterator[Path]:
    for number in range(1, 10_000):
        candidate = path.with_name(f"{path.name}.rejected-{number}")
        if not candidate.exists():
            yield candidate
    raise StoreError(f"Too many rejected copies beside {path}. Remove them.")


def _merge(
    old: Iterable[Record], new: Iterable[Record], replace_predictions: bool
) -> tuple[list[Record], tuple[Record, ...]]:
    """Old and new records as one list, and the old ones that stand where a new one would."""
    merged = {record.key: record for record in old}
    kept: list[Record] = []
    for record in new:
        known = merged.get(record.key)
        if known is not None and _outweighs(known, record, replace_predictions):
            kept.append(known)
            logger.warning("Kept the %s record of %s; the predicted one was not stored.", known.status, known.problem)
        else:
            merged[record.key] = record
    return [merged[key] for key in sorted(merged)], tuple(kept)


def _outweighs(known: Record, record: Record, replace_predictions: bool) -> bool:
    """Whether `known` stays in place of `record`."""
    if record.status == "measured" or known.status == "measured":
        return record.status != "measured"
    made, remade = known.provenance, record.provenance
    if replace_predictions or (made.generator, made.nvrtc) != (remade.generator, remade.nvrtc):
        return False
    return (bool(known.verified), known.compiled) > (bool(record.verified), record.compiled)


def _text_of(records: Iterable[Record], *, arch: str, gpu: str, family: str) -> str:
    data = {
        "schema": SCHEMA_VERSION,
        "family": family,
        "arch": arch,
        "gpu": gpu,
        "records": [record.to_dict() for record in records],
    }
    where = f"any GPU of {arch}" if gpu == ANY_GPU else f"{gpu} ({arch})"
    return dump_yaml(data, comment=_COMMENT.format(family=family, where=where))


def _write_atomically(path: Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name[:40]}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
