from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from helpers_tune import ARCH, DEFAULT, DEVICE, FAMILY, SHAPE, SPACE, SPEC, record

from flashsmith.generator import mods
from flashsmith.generator.language import trace_mask, trace_score
from flashsmith.generator.spec import AttentionSpec, ProblemShape
from flashsmith.runtime.store import (
    MAX_REFUSED,
    Provenance,
    bucket_distance,
    forget,
    resolve,
    same_bucket,
    save_records,
    stale_reason,
)

GPU = DEVICE.name
CAUSAL = AttentionSpec(head_dim=64, mask=trace_mask(mods.causal).graph)
CAPPED = replace(CAUSAL, score=trace_score(mods.softcap(30.0)).graph)
#: Configs that the family accepts for each of these specs.
FIRST, SECOND, THIRD, FOURTH = [
    c
    for c in FAMILY.space(CAPPED, ARCH)
    if c != DEFAULT and all(FAMILY.exclusion(s, c, ARCH) is None for s in (SPEC, CAUSAL))
][:4]
NOW = Provenance(generator="", flashsmith="0.1.0", nvrtc="13.0", driver="580.1")


@pytest.fixture(autouse=True)
def clean_slate(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(tmp_path / "cache"))
    forget()
    yield
    forget()


@pytest.fixture
def store(tmp_path):
    """Saves records as the user's or as packaged, and resolves against both."""

    class Store:
        def save(self, *records, packaged=False, gpu=GPU, arch="sm_90"):
            root = tmp_path / ("packaged" if packaged else "user")
            return save_records(records, arch=arch, family=FAMILY.name, gpu=gpu, root=root)

        def resolve(self, spec=SPEC, shape=SHAPE, *, gpu=GPU, current=NOW, **ways):
            folders = {"user": tmp_path / "user", "packaged": tmp_path / "packaged"}
            return resolve(spec, ARCH, gpu, shape, FAMILY, current=current, **folders, **ways)

    return Store()


def at(length, batch=SHAPE.batch):
    return ProblemShape(batch, length, length, SHAPE.nheads, SHAPE.nheads_k)


def test_nothing_tuned_is_the_default_said_once(store, caplog):
    with caplog.at_level(logging.INFO, logger="flashsmith.store"):
        found = [store.resolve() for _ in range(3)]
    assert found[0].config == FAMILY.default_config(SPEC, ARCH)
    assert (found[0].source, found[0].record) == ("default", None)
    assert len(caplog.records) == 1
    assert "flashsmith tune" in caplog.text


def test_an_exact_record_is_taken(store):
    store.save(record(FIRST))
    found = store.resolve()
    assert (found.config, found.source, found.note, found.stale) == (FIRST, "user", "", False)
    assert found.record == record(FIRST)


def test_the_users_record_lies_over_the_packaged_one(store):
    store.save(record(FIRST), packaged=True)
    assert store.resolve().source == "packaged"
    store.save(record(SECOND))
    assert (store.resolve().config, store.resolve().source) == (SECOND, "user")


def test_packaged_buckets_stay_beside_the_users(store):
    store.save(record(FIRST, shape=at(16384)), packaged=True)
    store.save(record(SECOND, shape=at(1024)))
    assert store.resolve(shape=at(16384)).config == FIRST
    assert store.resolve(shape=at(1024)).config == SECOND


def test_the_nearest_bucket_by_log2_distance(store, caplog):
    store.save(record(FIRST, shape=at(1024)), record(SECOND, shape=at(16384)))
    assert store.resolve(shape=at(2048)).config == FIRST
    with caplog.at_level(logging.INFO, logger="flashsmith.store"):
        found = store.resolve(shape=at(8192))
        store.resolve(shape=at(8192))
    assert (found.config, found.source) == (SECOND, "nearest")
    assert "tuned at B4 N16384 H32" in found.note
    assert len(caplog.records) == 1


def test_a_neighbour_whose_blocks_would_be_empty_to_a_larger_part_is_passed_over(store):
    rows = FAMILY.default_config(SPEC, ARCH).B_r
    wide = next(c for c in SPACE if c.B_r > rows)
    narrow = next(c for c in SPACE if c.B_r <= rows and c != FAMILY.default_config(SPEC, ARCH))
    store.save(record(wide, shape=at(4 * rows)), record(narrow, shape=at(8 * rows)))
    assert store.resolve(shape=at(4 * rows)).config == wide
    assert store.resolve(shape=at(rows)).config == narrow  # half of a block of 2 * rows would be empty
    assert store.resolve(shape=at(3 * rows)).config == wide
    store.save(record(wide, shape=at(rows)))
    assert store.resolve(shape=at(rows)).config == wide  # measured there


def test_winners_of_short_lengths_do_not_serve_long_ones(store):
    store.save(record(FIRST, shape=at(1024)))
    assert store.resolve(shape=at(2048)).config == FIRST
    assert store.resolve(shape=at(64)).config == FIRST
    far = store.resolve(shape=at(4096))
    assert (far.config, far.source) == (FAMILY.default_config(SPEC, ARCH), "default")


def test_lengths_within_a_bucket_are_hits(store):
    store.save(record(FIRST, shape=at(4096)))
    assert store.resolve(shape=at(5000)).source == "user"
    assert store.resolve(shape=at(3000)).source == "user"
    assert store.resolve(shape=at(8192)).source == "nearest"


def test_batch_times_heads_counts_as_one_size():
    assert bucket_distance(ProblemShape(4, 9, 9, 8, 8), ProblemShape(8, 9, 9, 4, 4)) == 0
    assert bucket_distance(at(1024), at(4096)) == 4
    assert bucket_distance(at(1024), at(1024, batch=8)) == 1
    assert same_bucket(at(1024), at(1400))
    assert not same_bucket(at(1024), at(1500))


def test_a_ratio_of_heads_finds_its_own_record_first_then_the_nearest(store):
    def ratio(number):
        return ProblemShape(4, 4096, 4096, 32, 32 // number)

    for saved in ((8, 1), (1, 8)):  # whatever comes first in the file
        store.save(*(record(FIRST if number == 1 else SECOND, shape=ratio(number)) for number in saved))
        assert (store.resolve(shape=ratio(1)).config, store.resolve(shape=ratio(8)).config) == (FIRST, SECOND)
    assert (store.resolve(shape=ratio(2)).config, store.resolve(shape=ratio(2)).source) == (FIRST, "user")
    assert store.resolve(shape=ratio(4)).config == SECOND
    assert store.resolve(shape=replace(ratio(1), seqlen_q=8192, seqlen_k=8192)).config == FIRST


def test_a_far_ratio_of_heads_is_near_not_a_hit(store):
    store.save(record(FIRST))
    assert store.resolve(shape=replace(SHAPE, nheads_k=8)).source == "user"
    far = store.resolve(shape=replace(SHAPE, nheads_k=4))
    assert (far.config, far.source) == (FIRST, "nearest")


def test_empty_calls_resolve_too(store):
    store.save(record(FIRST))
    assert store.resolve(shape=ProblemShape(0, 0, 0, 0, 1)).config == FIRST


def test_the_class_falls_back_in_order(store):
    capped_fp16 = replace(CAPPED, dtype="fp16")
    ladder = [(capped_fp16, FIRST), (SPEC, SECOND), (CAUSAL, THIRD), (CAPPED, FOURTH)]
    for spec, config in ladder:
        store.save(record(config, spec=spec))
        found = store.resolve(CAPPED)
        assert found.config == config
        assert (found.source == "user") == (spec == CAPPED)
        assert ("tuned for" in found.note) == (spec != CAPPED)


def test_other_head_dims_and_ops_do_not_serve(store):
    store.save(record(FIRST, spec=AttentionSpec(head_dim=128)))
    store.save(record(FIRST, spec=AttentionSpec(head_dim=64, head_dim_v=128)))
    assert store.resolve().source == "default"


def test_another_gpu_of_the_architecture_is_a_seed(store):
    store.save(record(FIRST), gpu="NVIDIA H100 80GB HBM3")
    found = store.resolve()
    assert (found.config, found.source, found.stale) == (FIRST, "nearest", True)
    store.save(record(SECOND))
    assert store.resolve().config == SECOND


def test_another_architecture_is_not_looked_at(store):
    store.save(record(FIRST), arch="sm_80")
    assert store.resolve().source == "default"


def test_without_a_gpu_the_architectures_own_records_come_first(store):
    store.save(record(FIRST))
    store.save(record(SECOND, status="predicted"), gpu="")
    assert store.resolve(gpu=None).config == SECOND
    assert "predicted" in store.resolve(gpu=None).note
    assert store.resolve().config == FIRST


def test_a_measured_neighbour_beats_a_prediction_that_is_not_nearer_by_much(store):
    store.save(record(FIRST, shape=at(4096, batch=6)), packaged=True)
    store.save(record(SECOND, shape=at(4096), status="predicted"))
    assert store.resolve().config == FIRST
    assert store.resolve(shape=at(1024, batch=4)).config == FIRST


def test_a_prediction_beats_a_measurement_far_away(store):
    store.save(record(FIRST, shape=at(4096, batch=32)), packaged=True)
    store.save(record(SECOND, shape=at(4096), status="predicted"))
    assert store.resolve().config == SECOND


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("generator", "another", "templates or generator"),
        ("nvrtc", "12.9", "NVRTC"),
        ("driver", "550.1", "driver"),
    ],
)
def test_other_makers_make_a_seed_not_a_winner(store, field, value, words):
    current = replace(NOW, generator="now")
    made = replace(current, **{field: value})
    store.save(record(FIRST, provenance=made))
    found = store.resolve(current=current)
    assert (found.config, found.stale) == (FIRST, True)
    assert words in found.note
    assert "tune again" in found.note
    store.save(record(SECOND, provenance=current), packaged=True)
    assert store.resolve(current=current).config == SECOND


def test_unknown_makers_are_not_compared():
    assert stale_reason(record(), Provenance(generator="x", flashsmith="9")) == ""


def test_by_default_the_templates_are_compared(store, tmp_path):
    store.save(record(FIRST, provenance=Provenance(generator="0" * 16, flashsmith="0.1.0")))
    found = resolve(SPEC, ARCH, GPU, SHAPE, FAMILY, user=tmp_path / "user", packaged=tmp_path / "packaged")
    assert found.stale


@pytest.mark.parametrize(
    "change", [{"B_r": -16}, {"B_r": 0}, {"num_stages": "3"}, {"B_r": 1 << 40}, {"more": 1}, {"num_warps": 0}]
)
def test_a_config_the_family_refuses_is_passed_over_with_one_warning(store, change, caplog):
    store.save(record(config=FIRST), packaged=True)
    bad = replace(record(), config={**DEFAULT.to_dict(), **change})
    store.save(bad)
    assert store.resolve().config == FIRST or store.resolve().source == "default"
    store.resolve()
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1


def test_a_refused_user_record_does_not_hide_the_packaged_one(store):
    store.save(record(FIRST), packaged=True)
    store.save(replace(record(), config={**DEFAULT.to_dict(), "B_r": -16}))
    assert (store.resolve().config, store.resolve().source) == (FIRST, "packaged")


def test_a_config_that_breaks_the_build_gate_gives_way_to_the_next(store, caplog):
    store.save(record(FIRST, shape=at(4096)), record(SECOND, shape=at(2048)))
    asked = []

    def refusal(config):
        asked.append(config)
        return "8 bytes of spill stores" if config == FIRST else ""

    store.resolve(refusal=refusal)
    found = store.resolve(refusal=refusal)
    assert (found.config, found.source) == (SECOND, "nearest")
    assert f"passed over for the build gate: {FIRST} (8 bytes of spill stores)" in found.note
    assert caplog.text.count("breaks the build gate here and is passed over") == 1
    assert asked == [FIRST, SECOND] * 2


def test_where_no_record_fits_the_default_of_last_resort_is_taken(store):
    store.save(*(record(config, shape=at(512 << i)) for i, config in enumerate(SPACE[:6])))
    asked = []
    found = store.resolve(refusal=lambda config: asked.append(config) or "spills", default=lambda: SECOND)
    assert (found.config, found.source, found.record) == (SECOND, "default", None)
    assert "No tuned config fits" in found.note
    assert len(asked) == MAX_REFUSED
