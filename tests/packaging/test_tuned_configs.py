"""The shipped tuned configs: readable, and of the kernels that are generated now."""

from __future__ import annotations

from pathlib import Path

from flashsmith.runtime.store import stale_reason
from flashsmith.runtime.store_files import PACKAGED
from flashsmith.runtime.store_reading import read_file
from flashsmith.runtime.tune.records import current_provenance
from flashsmith.runtime.tune.restamp import stamps_of


def packaged_files() -> list[Path]:
    return sorted(PACKAGED.rglob("*.yaml"))


def test_every_record_is_read() -> None:
    assert packaged_files()
    assert [problem for path in packaged_files() for problem in read_file(path).problems] == []


def test_a_record_of_another_kernel_says_so_where_it_is_used() -> None:
    for path in packaged_files():
        for stamp in stamps_of(path):
            if stamp.state == "changed":
                assert stale_reason(stamp.record, current_provenance()), stamp.record


def test_every_record_is_of_a_kernel_that_is_still_generated() -> None:
    """A number of another kernel is no number of this one: such a record is measured again, or removed.

    That the generator's digest alone differs is allowed here: `flashsmith show --restamp FILE` renews it. So is a file
    that says at its head what has changed since ("# Changed since: ..."): a call that uses such a record is told, too.
    """
    faults = [
        f"{path.relative_to(PACKAGED)}: {stamp.record.problem} at {stamp.record.bucket}: {stamp.reason}.\n"
        f"    {stamp.remedy} --out tuned_configs   (on {stamp.record.device.name})"
        for path in packaged_files()
        if "\n# Changed since: " not in path.read_text().split("schema:")[0]
        for stamp in stamps_of(path)
        if stamp.state not in ("fresh", "same")
    ]
    assert not faults, "measure these again, or remove them:\n" + "\n".join(faults)
