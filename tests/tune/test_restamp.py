from __future__ import annotations

from dataclasses import replace

import pytest
from helpers_tune import ARCH, DEFAULT, FAMILY, SHAPE, SPACE, SPEC, record

from flashsmith.generator.environment import generator_digest
from flashsmith.generator.errors import StoreError
from flashsmith.generator.language import trace_mask
from flashsmith.generator.rendering import render
from flashsmith.generator.spec import AttentionSpec
from flashsmith.runtime.store_files import save_records, tuned_path
from flashsmith.runtime.store_reading import forget, read_file
from flashsmith.runtime.store_schema import Provenance, SpecClass
from flashsmith.runtime.tune.records import current_provenance, kernel_digest
from flashsmith.runtime.tune.request import TuneProblem, named_function
from flashsmith.runtime.tune.restamp import known_graphs, restamp, spec_of, stamps_of, tune_command

PLACE = {"arch": "sm_90", "family": "forward_sm80", "gpu": "NVIDIA H200"}
OLD = Provenance(generator="0" * 16, flashsmith="0.0.9", nvrtc="12.9", driver="570.1")
CAUSAL = TuneProblem(head_dim=64, causal=True).traced().spec
NOW = generator_digest()[:16]


@pytest.fixture(autouse=True)
def clean_slate(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(tmp_path / "cache"))
    forget()
    yield
    forget()


def old(config=DEFAULT, spec=SPEC, *, kernel=None, **changes):
    """A record of an older generator, whose text was that of today unless `kernel` says otherwise."""
    digest = kernel_digest(spec, config, ARCH) if kernel is None else kernel
    return record(config, spec, provenance=replace(OLD, kernel=digest), **changes)


def states(stamps):
    return [stamp.state for stamp in stamps]


def test_the_digest_is_of_the_text():
    source = render(SPEC, DEFAULT, ARCH, family=FAMILY)
    assert source.digest.startswith(kernel_digest(SPEC, DEFAULT, ARCH))
    assert kernel_digest(SPEC, SPACE[3], ARCH) != kernel_digest(SPEC, DEFAULT, ARCH)
    assert kernel_digest(CAUSAL, DEFAULT, ARCH) != kernel_digest(SPEC, DEFAULT, ARCH)


def test_a_record_of_the_same_text_gets_todays_generator_and_nothing_else(tmp_path):
    path = save_records([old()], root=tmp_path, **PLACE)
    (stamp,) = restamp(path)
    assert (stamp.state, stamp.remedy) == ("same", "")
    assert read_file(path).records == (replace(old(), provenance=replace(old().provenance, generator=NOW)),)
    before = path.read_bytes(), path.stat().st_mtime_ns
    assert states(restamp(path)) == ["fresh"]
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before


def test_other_texts_are_left_and_the_rest_of_the_file_too(tmp_path):
    shapes = [replace(SHAPE, batch=batch) for batch in (1, 2, 3, 4)]
    records = [
        old(shape=shapes[0], kernel="f" * 16),
        old(shape=shapes[1], kernel=""),
        replace(old(shape=shapes[2]), config={**DEFAULT.to_dict(), "B_r": 7}),
        old(shape=shapes[3]),
    ]
    path = save_records(records, root=tmp_path, **PLACE)
    stamps = restamp(path)
    assert states(stamps) == ["changed", "unknown", "changed", "same"]
    assert f"was {'f' * 16} and is {kernel_digest(SPEC, DEFAULT, ARCH)}" in stamps[0].reason
    assert "does not say" in stamps[1].reason
    assert "no longer be generated" in stamps[2].reason
    assert all(stamp.remedy.startswith("flashsmith tune -d 64") for stamp in stamps[:3])
    assert read_file(path).records[:3] == tuple(records[:3])


def test_looking_writes_nothing(tmp_path):
    path = save_records([old()], root=tmp_path, **PLACE)
    before = path.read_bytes()
    assert states(stamps_of(path)) == ["same"]
    assert path.read_bytes() == before


def test_a_function_of_ones_own_must_be_given(tmp_path):
    def every_other(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx) % 2 == 0

    graph = trace_mask(every_other).graph
    path = save_records([old(spec=AttentionSpec(head_dim=64, mask=graph))], root=tmp_path, **PLACE)
    (stamp,) = restamp(path)
    assert stamp.state == "unknown" and "only its author has" in stamp.reason
    assert "--mask-mod MODULE:FUNCTION" in stamp.remedy
    assert states(restamp(path, graphs=(graph, None))) == ["same"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window_size": (1024, -1)},
        {"window_size": (-1, 7)},
        {"window_size": (1024, 1024)},
        {"causal": True, "window_size": (256, -1)},
        {"softcap": 30.0},
        {"alibi": True},
        {"causal": True, "softcap": 15.0, "alibi": True},
        {"dtype": "fp16", "head_dim": 192, "head_dim_v": 128, "causal": True},
    ],
    ids=str,
)
def test_what_options_ask_for_is_known(options):
    spec = TuneProblem(**options).traced(nheads=12).spec
    assert spec_of(SpecClass.of(spec), known_graphs()) == spec
    assert spec_of(replace(SpecClass.of(spec), mask="0" * 16), known_graphs()) is None
    assert spec_of(replace(SpecClass.of(spec), score="0" * 16), known_graphs()) is None


@pytest.mark.parametrize(
    ("options", "values", "words"),
    [
        ({"causal": True}, None, "--causal"),
        ({"causal": True, "window_size": (256, -1)}, {"left": 256}, "--causal --window 256,-1"),
        ({"window_size": (-1, 7)}, {"right": 7}, "--window -1,7"),
        ({"softcap": 30.0, "alibi": True}, {"softcap": 30.0}, "--softcap 30.0 --alibi"),
    ],
)
def test_the_command_tunes_the_same_problem(options, values, words):
    spec = TuneProblem(head_dim=64, **options).traced().spec
    command = tune_command(record(spec=spec, values=values), "forward_sm80")
    assert command == (
        f"flashsmith tune -d 64 --dtype bf16 {words} --seqlens 4096 --batch 4 --nheads 32 --family forward_sm80"
    )


def test_the_command_says_what_differs_from_the_usual():
    shape = replace(SHAPE, seqlen_k=8192, nheads_k=8)
    spec = AttentionSpec(dtype="fp16", head_dim=192, head_dim_v=128)
    predicted = record(spec=spec, shape=shape, status="predicted")
    assert tune_command(predicted, "forward_sm90") == (
        "flashsmith tune -d 192 --head-dim-v 128 --dtype fp16 --seqlens 4096 --batch 4 --nheads 32 --seqlen-k 8192"
        " --nheads-k 8 --family forward_sm90 --predict --arch sm_90 --gpu 'Test GPU'"
    )


def test_what_is_no_tuned_file_is_an_error(tmp_path):
    with pytest.raises(StoreError, match="there is no such file"):
        restamp(tuned_path(tmp_path, "sm_90", "any", "forward_sm80"))
    path = save_records([old()], root=tmp_path, **PLACE)
    path.write_text("[]")
    forget()
    with pytest.raises(StoreError, match="must be a map"):
        restamp(path)


def test_provenance_without_a_kernel_is_as_it_was():
    """An interrupted run is resumed by comparing this: it must not know of a kernel."""
    assert "kernel" not in current_provenance().to_dict()


def test_a_library_function_is_known_where_it_is_named(tmp_path):
    module = tmp_path / "masks.py"
    module.write_text("from flashsmith.generator.mods import prefix_lm\nmask = prefix_lm(100)\n")
    graph = trace_mask(named_function(f"{module}:mask")).graph
    path = save_records([old(spec=AttentionSpec(head_dim=64, mask=graph))], root=tmp_path, **PLACE)
    assert states(stamps_of(path)) == ["unknown"]
    assert states(stamps_of(path, graphs=[graph])) == ["same"]
