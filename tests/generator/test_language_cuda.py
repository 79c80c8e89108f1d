"""The CUDA text of masks and scores: exact for the common ones, formatted and without residue for any."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from helpers_language import MaskWriter

from flashsmith.generator import mods
from flashsmith.generator.errors import TensorError
from flashsmith.generator.language import and_masks, compose_scores, exp, or_masks, trace_mask, trace_score, where
from flashsmith.generator.language.cuda import (
    check_tables,
    mod_argument_values,
    mod_table_arguments,
    render_mods,
)

ids = np.zeros((2, 8), dtype=np.int32)
bias = np.zeros((2, 3, 16), dtype=np.float32)
window, far, scale = 5, 1 << 40, 0.5

CAUSAL = """\
// Whether row q_idx of head h in batch item b sees key kv_idx:
//   kv_idx <= q_idx + (seqlen_k - seqlen_q)
__device__ __forceinline__ bool mask_mod(const Arguments& args, int b, int h, int q_idx,
                                         int kv_idx) {
  return kv_idx <= q_idx + (args.seqlen_k - args.seqlen_q);
}
"""

CAUSAL_RANGE = """\
// Keys that rows q_first to q_last have to visit, and keys that every one of them sees.
__device__ __forceinline__ KvRange kv_range(const Arguments& args, int b, int h, int q_first,
                                            int q_last) {
  const int diagonal = args.seqlen_k - args.seqlen_q;
  const int visit_end = min_s32(max_s32(q_last + diagonal + 1, 0), args.seqlen_k);
  const int full_end = min_s32(max_s32(q_first + diagonal + 1, 0), visit_end);
  return KvRange{0, visit_end, 0, full_end};
}
"""

WINDOW = """\
// Whether row q_idx of head h in batch item b sees key kv_idx:
//   (q_idx + (seqlen_k - seqlen_q) - left <= kv_idx) & (kv_idx <= q_idx + (seqlen_k - seqlen_q) +
//     right)
__device__ __forceinline__ bool mask_mod(const Arguments& args, int b, int h, int q_idx,
                                         int kv_idx) {
  const int position = q_idx + (args.seqlen_k - args.seqlen_q);
  return position - args.mask_left <= kv_idx && kv_idx <= position + args.mask_right;
}
"""

ALIBI = """\
// The score (scaled, natural units) of row q_idx and key kv_idx:
//   score - slopes[h] * float(abs(q_idx + (seqlen_k - seqlen_q) - kv_idx))
__device__ __forceinline__ float score_mod(const Arguments& args, float score, int b, int h,
                                           int q_idx, int kv_idx) {
  const float slopes = ld_global_f32(args.score_slopes + h * args.score_slopes_stride_0);
  const int index_1 = abs_s32(q_idx + (args.seqlen_k - args.seqlen_q) - kv_idx);
  return score - slopes * static_cast<float>(index_1);
}
"""

SOFTCAP = """\
// The score (scaled, natural units) of row q_idx and key kv_idx:
//   softcap * tanh(score * inverse_softcap)
__device__ __forceinline__ float score_mod(const Arguments& args, float score, int b, int h,
                                           int q_idx, int kv_idx) {
  return args.score_softcap * tanh_f32(score * args.score_inverse_softcap);
}
"""

DOCUMENT = """\
// Whether row q_idx of head h in batch item b sees key kv_idx:
//   ids_q[b, q_idx] == ids_q[b, kv_idx]
__device__ __forceinline__ bool mask_mod(const Arguments& args, int b, int h, int q_idx,
                                         int kv_idx) {
  const int* ids_q_row_gmem = args.mask_ids_q + b * args.mask_ids_q_stride_0;
  ids_q_row_gmem += min_s32(q_idx, args.seqlen_q - 1) * args.mask_ids_q_stride_1;
  const int ids_q_row = ld_global_s32(ids_q_row_gmem);
  const int* ids_q_key_gmem = args.mask_ids_q + b * args.mask_ids_q_stride_0;
  ids_q_key_gmem += min_s32(kv_idx, args.seqlen_k - 1) * args.mask_ids_q_stride_1;
  const int ids_q_key = ld_global_s32(ids_q_key_gmem);
  return ids_q_row == ids_q_key;
}
"""

SINK_CLASSES = """\
// Whether rows q_first to q_last see none, all or perhaps some of keys kv_first to kv_last.
__device__ __forceinline__ int classify_tile(const Arguments& args, int b, int h, int q_first,
                                             int q_last, int kv_first, int kv_last) {
  const bool condition_1 = kv_last < q_first - args.mask_window || q_last < kv_first;
  if (4 <= kv_first && condition_1) return TILE_EMPTY;
  const bool condition_2 = q_last - args.mask_window <= kv_first && kv_last <= q_first;
  return (kv_last < 4 || condition_2) ? TILE_FULL : TILE_MIXED;
}
"""


def sink(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx < 4) | ((q_idx - kv_idx <= window) & (kv_idx <= q_idx))


def test_text_of_common_masks() -> None:
    causal = render_mods(trace_mask(mods.causal).graph, None)
    assert (causal.mask_function, causal.kv_range_function) == (CAUSAL, CAUSAL_RANGE)
    assert (causal.score_function, causal.classify_function, causal.needs_classify) == ("", "", False)
    assert causal.arguments == ()
    assert render_mods(trace_mask(mods.sliding_window(3, 5)).graph, None).mask_function == WINDOW
    assert render_mods(trace_mask(mods.document(ids)).graph, None).mask_function == DOCUMENT
    with_sink = render_mods(trace_mask(sink).graph, None)
    assert with_sink.needs_classify and with_sink.classify_function == SINK_CLASSES


def test_text_of_common_scores() -> None:
    alibi = render_mods(None, trace_score(mods.alibi(np.zeros(4, dtype=np.float32))).graph)
    assert alibi.score_function == ALIBI
    assert (alibi.mask_function, alibi.kv_range_function, alibi.classify_function) == ("", "", "")
    assert alibi.arguments == (
        ("const float*", "score_slopes", "slopes of the score: fp32, 1 dimension"),
        ("long long", "score_slopes_stride_0", "slopes, dimension 0"),
    )
    assert render_mods(None, trace_score(mods.softcap(30.0)).graph).score_function == SOFTCAP


@pytest.mark.parametrize(
    "mask",
    [
        mods.causal,
        mods.sliding_window(3, 5),
        mods.prefix_lm(4),
        mods.document(ids),
        and_masks(mods.causal, mods.document(ids)),
        mods.everything,
        lambda b, h, q, kv: q // 64 == kv // 64,
    ],
)
def test_masks_that_need_no_classification(mask: Any) -> None:
    text = render_mods(trace_mask(mask).graph, None)
    assert not text.needs_classify and text.classify_function == ""


def test_no_mask_and_no_score_need_nothing() -> None:
    text = render_mods(None, None)
    assert text.arguments == () and not text.needs_classify
    assert text.mask_function == text.score_function == text.kv_range_function == text.classify_function == ""


def test_arguments_are_named_after_their_mod_and_wide_ones_come_first() -> None:
    mask = trace_mask(lambda b, h, q, kv: (kv - q <= window) & (kv <= far) & (ids[b, kv + 1] > 0))
    score = trace_score(lambda s, b, h, q, kv: s * scale + bias[b, 0, q - kv])
    text = render_mods(mask.graph, score.graph)
    assert [(ctype, name) for ctype, name, _ in text.arguments] == [
        ("const int*", "mask_ids"),
        ("long long", "mask_ids_stride_0"),
        ("long long", "mask_ids_stride_1"),
        ("long long", "mask_far"),
        ("const float*", "score_bias"),
        ("long long", "score_bias_stride_0"),
        ("long long", "score_bias_stride_1"),
        ("long long", "score_bias_stride_2"),
        ("int", "mask_ids_size_1"),
        ("int", "mask_window"),
        ("int", "score_bias_size_2"),
        ("float", "score_scale"),
    ]
    assert mod_argument_values("mask", mask) == {"mask_window": 5, "mask_far": far, "mask_ids_size_1": 8}
    assert mod_argument_values("score", score) == {"score_scale": 0.5, "score_bias_size_2": 16}
    (table,) = mod_table_arguments("score", score.graph)
    assert table.pointer == "score_bias" and table.sizes == (None, None, "score_bias_size_2")
    assert table.strides == ("score_bias_stride_0", "score_bias_stride_1", "score_bias_stride_2")


def test_a_changed_value_changes_no_text() -> None:
    one, other = (render_mods(trace_mask(mods.sliding_window(w, w)).graph, None) for w in (3, 300))
    assert one == other


def test_tables_too_small_for_their_indices_are_refused() -> None:
    traced = trace_score(lambda s, b, h, q, kv: s + bias[b, h, q] + bias[1, 2, kv] + bias[0, 0, q - kv])
    check_tables(traced, batch=2, nheads=3, seqlen_q=16, seqlen_k=16)
    cases = {
        "batch": {"batch": 3}, "nheads": {"nheads": 4}, "seqlen_q": {"seqlen_q": 17}, "seqlen_k": {"seqlen_k": 17},
    }  # fmt: skip
    for word, change in cases.items():
        with pytest.raises(TensorError, match=rf"at least {next(iter(change.values()))} elements for {word}"):
            check_tables(traced, **{"batch": 2, "nheads": 3, "seqlen_q": 16, "seqlen_k": 16, **change})
    constant = trace_score(lambda s, b, h, q, kv: s + bias[5, 0, 0])
    with pytest.raises(TensorError, match="at least 6 elements for index 5"):
        check_tables(constant, batch=1, nheads=1, seqlen_q=1, seqlen_k=1)
    empty = np.zeros(0, dtype=np.float32)
    anywhere = trace_score(lambda s, b, h, q, kv: s + empty[q - kv])
    with pytest.raises(TensorError, match="at least 1 elements for its indices"):
        check_tables(anywhere, batch=1, nheads=1, seqlen_q=1, seqlen_k=1)


def test_names_of_captured_values_never_hide_anything() -> None:
    scope: dict[str, Any] = {"table": ids, "np": np}
    exec(
        "def make(args, b_, range, h, condition_1, mask_mod, int_, index_1):\n"
        "    def mask(b, head, q, kv):\n"
        "        return ((args[b, q + 1] == args[b, kv + 1]) & (range[b, kv] == int_) & (kv * q < condition_1)\n"
        "                & (mask_mod[b, h] == index_1) & (b_ > kv))\n"
        "    return mask",
        scope,
    )
    mask = scope["make"](ids, 1, ids.astype(np.int64), 2, 3, ids.astype(np.uint8), 4, 5)
    text = render_mods(trace_mask(mask).graph, None)
    locals_ = re.findall(r"(\w+) = ", text.mask_function)
    assert len(locals_) == len(set(locals_))
    assert not set(locals_) & {"args", "b", "h", "q_idx", "kv_idx", "int", "range", "mask_mod", "ld_global_s32"}


# ---- Any text --------------------------------------------------------------------------------

#: A captured name as long as names get, so that lines are as long as they get.
a_long_name_of_a_table = np.zeros((2, 3, 4, 5), dtype=np.int64)
another_long_name_here = 3


def long_names(b: Any, h: Any, q: Any, kv: Any) -> Any:
    element = a_long_name_of_a_table[b, h, q - kv, kv * another_long_name_here]
    other = a_long_name_of_a_table[b, h // 2, kv % another_long_name_here, q]
    return where(element > other, element % another_long_name_here == other // another_long_name_here, q < kv)


def texts() -> list[str]:
    """The functions of many masks and scores."""
    masks = [MaskWriter(Random(seed), large=seed % 3 == 0).mask(depth=2 + seed % 4).function() for seed in range(150)]
    masks += [mods.causal, mods.sliding_window(1, 2), mods.prefix_lm(3), mods.document(ids), sink, long_names]
    graphs = [trace_mask(mask).graph for mask in masks]
    graphs.append(or_masks(*graphs[:12]))
    rendered = [render_mods(graph, None) for graph in graphs]
    scores = [
        mods.softcap(2.0),
        mods.alibi(np.zeros((2, 3), dtype=np.float32)),
        lambda s, b, h, q, kv: s + bias[b, h, q - kv],
        lambda s, b, h, q, kv: where(long_names(b, h, q, kv), exp(s) / (kv + 1), s * -1e-30 + float("-inf")),
    ]
    rendered += [render_mods(None, trace_score(score).graph) for score in scores]
    rendered.append(render_mods(None, compose_scores(*scores).graph))
    functions = [(r.mask_function, r.score_function, r.kv_range_function, r.classify_function) for r in rendered]
    return [text for group in functions for text in group if text]


def test_text_fits_the_line_and_has_no_residue() -> None:
    for text in texts():
        assert text.endswith("}\n") and "\n\n" not in text and "\t" not in text
        for line in text.split("\n"):
            assert len(line) <= 100 and line == line.rstrip(), line
        names = re.findall(r"const [\w ]+? (\w+) = ", text)
        for name in names:
            assert len(re.findall(rf"\b{name}\b", text)) > 1, f"{name} is computed for nothing:\n{text}"


def test_text_is_as_clang_format_would_have_it(tmp_path: Path, repo_root: Path) -> None:
    folders = f"{Path(sys.executable).parent}:{Path(shutil.which('env') or '/usr/bin/env').parent}"
    tool = shutil.which("clang-format") or shutil.which("clang-format", path=folders)
    if tool is None:
        pytest.skip("needs clang-format (pip install flashsmith[dev])")
    file = tmp_path / "mods.cu"
    file.write_text("\n".join(texts()))
    style = f"--style=file:{repo_root / '.clang-format'}"
    done = subprocess.run([tool, style, str(file)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == file.read_text().splitlines()


def test_text_is_deterministic() -> None:
    assert texts() == texts()
