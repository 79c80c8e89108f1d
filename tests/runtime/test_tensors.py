"""What a call's tensors must be, and which are read in place."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false, reportOptionalSubscript=false

from __future__ import annotations

import logging
import math

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashsmith.generator.errors import SpecError, TensorError, UnsupportedError
from flashsmith.generator.spec import ProblemShape
from flashsmith.runtime import tensors


def qkv(sq=5, sk=7, h=4, hk=2, d=16, dv=None, b=2, dtype=torch.float16):
    return (
        torch.zeros(b, sq, h, d, dtype=dtype),
        torch.zeros(b, sk, hk, d, dtype=dtype),
        torch.zeros(b, sk, hk, dv or d, dtype=dtype),
    )


def test_inputs_of_a_legal_call():
    inputs = tensors.check_inputs(*qkv(dv=24, dtype=torch.bfloat16))
    assert inputs == tensors.Inputs(
        dtype="bf16", shape=ProblemShape(2, 5, 7, 4, 2), head_dim=16, head_dim_v=24, device_type="cpu", device_index=0
    )


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda q, k, v: (q, k, v[:, :6]), TensorError, r"length .*\(2, 7, 2, 16\).*\(2, 6, 2, 16\).*Cut or pad"),
        (lambda q, k, v: (q, k, v[:, :, :1]), TensorError, r"number of heads .*\(2, 7, 2, 16\).*\(2, 7, 1, 16\)"),
        (lambda q, k, v: (q, k, v[:1]), TensorError, r"batch size.*\(1, 7, 2, 16\)"),
        (lambda q, k, v: (q[:1], k, v), TensorError, r"batch size.*q \(1, 5, 4, 16\)"),
        (lambda q, k, v: (q[..., :8], k, v), TensorError, r"same head_dim.*\(2, 5, 4, 8\)"),
        (lambda q, k, v: (q[:, :, :3], k, v), SpecError, r"multiple of nheads of k and v, but got 3 and 2"),
        (lambda q, k, v: (q, k[:, :, :0], v[:, :, :0]), SpecError, r"at least one head"),
        (lambda q, k, v: (q[..., :7], k[..., :7], v), SpecError, r"head_dim must be a multiple of 8.*got 7.*pad"),
        (lambda q, k, v: (q[..., :0], k[..., :0], v), SpecError, r"head_dim must be a multiple of 8.*got 0"),
        (lambda q, k, v: (q, k, v[..., :12]), SpecError, r"head_dim_v must be a multiple of 8.*got 12"),
        (lambda q, k, v: (q.bfloat16(), k, v), TensorError, r"one dtype, but got q torch.bfloat16, k torch.float16"),
        (lambda q, k, v: (q.float(), k.float(), v.float()), TensorError, r"torch.float16 or torch.bfloat16.*autocast"),
        (lambda q, k, v: (q.int(), k.int(), v.int()), TensorError, r"but got torch.int32"),
        (lambda q, k, v: (q[0], k[0], v[0]), TensorError, r"q must have 4 dimensions.*\(5, 4, 16\)"),
        (lambda q, k, v: (q.numpy(), k, v), TensorError, r"q must be a torch tensor .* got numpy.ndarray.*as_tensor"),
        (lambda q, k, v: (q, [1], v), TensorError, r"k must be a torch tensor"),
        (lambda q, k, v: (q.to("meta"), k, v), TensorError, r"q must be a plain tensor .*Tensor on meta"),
        (lambda q, k, v: (q.to_sparse(), k, v), TensorError, r"q must be a dense tensor.*to_dense"),
    ],
)
def test_illegal_calls_say_rule_values_remedy(change, error, words):
    with pytest.raises(error, match=words):
        tensors.check_inputs(*change(*qkv()))


def test_head_dim_beyond_256_is_refused():
    with pytest.raises(SpecError, match="but got 264"):
        tensors.check_inputs(*qkv(d=264))


def test_tensors_on_two_devices_are_refused():
    q, k, v = qkv()
    with pytest.raises(TensorError, match=r"one device, but got q on cpu, k on meta"):
        # k is checked for data first; only its device matters here.
        tensors._check_same_device(q, k.to("meta"), v)


def test_sizes_beyond_the_kernels_integers_are_refused():
    base = torch.zeros(8, dtype=torch.float16)
    wide = base.as_strided((1 << 16, 1, 1 << 16, 8), (0, 0, 0, 1))
    with pytest.raises(UnsupportedError, match=r"batch \* nheads at most 2147483647.*Split"):
        tensors.check_inputs(wide, wide, wide)
    long = base.as_strided((1, 1 << 29, 1, 8), (0, 0, 0, 1))
    with pytest.raises(UnsupportedError, match="Lengths must be below 536870912"):
        tensors.check_inputs(long, long, long)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -0.5, 0.0, 1e-50, 1e39])
def test_a_scale_that_fp32_cannot_hold_is_refused(scale):
    with pytest.raises(SpecError, match="softmax_scale must be a finite number above 0"):
        tensors.check_softmax_scale(scale, 64)


@pytest.mark.parametrize("scale", ["0.1", True, torch.tensor(0.1), 1j])
def test_a_scale_that_is_no_python_number_is_refused(scale):
    with pytest.raises(SpecError, match="softmax_scale must be a number or None"):
        tensors.check_softmax_scale(scale, 64)


def test_the_scale_defaults_to_one_over_root_d():
    assert tensors.check_softmax_scale(None, 64) == 0.125
    assert tensors.check_softmax_scale(2, 64) == 2.0
    for scale in (numpy.float32(0.5), numpy.float16(0.5)):
        assert tensors.check_softmax_scale(scale, 64) == 0.5


@pytest.mark.parametrize("scale", [10**400, 10**5000, 1e38, 1e-38, -(10**400)], ids=lambda scale: type(scale).__name__)
def test_a_scale_out_of_range_is_refused(scale):
    with pytest.raises(SpecError, match="softmax_scale must be a finite number above 0"):
        tensors.check_softmax_scale(scale, 64)


@pytest.mark.parametrize(
    ("slopes", "words"),
    [
        ([0.5] * 4, "but got list"),
        (torch.zeros(4, dtype=torch.float16), "torch.float16"),
        (torch.zeros(3), r"shape \(3,\)"),
        (torch.zeros(2, 4, 1), r"shape \(2, 4, 1\)"),
        (torch.zeros(1, 4), r"shape \(1, 4\)"),
    ],
)
def test_wrong_alibi_slopes_are_refused(slopes, words):
    q, k, v = qkv()
    with pytest.raises(TensorError, match=rf"float32.*\(4,\) or \(2, 4\).*{words}"):
        tensors.check_alibi_slopes(slopes, tensors.check_inputs(q, k, v), q.device)


def test_alibi_slopes_on_another_device_are_refused():
    q, k, v = qkv()
    with pytest.raises(TensorError, match=r"on cpu, but got torch.float32 .* on meta"):
        tensors.check_alibi_slopes(torch.zeros(4, device="meta"), tensors.check_inputs(q, k, v), q.device)


@pytest.mark.parametrize(
    ("sizes", "strides", "address", "reason"),
    [
        ((2, 3, 4, 16), (192, 64, 16, 1), 0, None),
        ((2, 3, 4, 16), (0, 64, 0, 1), 16, None),  # expanded
        ((2, 3, 4, 16), (192, 16, 48, 1), 32, None),  # (batch, heads, seqlen, dim) seen as bshd
        ((2, 3, 4, 16), (1 << 31, 64, 16, 1), 0, None),
        ((1, 3, 1, 16), (7, 64, 3, 1), 0, None),  # a stride never used
        ((2, 3, 4, 16), (384, 128, 32, 2), 0, "last dimension has stride 2"),
        ((2, 3, 4, 16), (195, 65, 16, 1), 0, r"strides \(195, 65, 16, 1\) are not multiples of 8"),
        ((2, 3, 4, 16), (192, 64, 16, 1), 2, "address is not a multiple of 16"),
        ((2, 0, 4, 16), (3, 5, 7, 2), 2, None),  # nothing to read
    ],
)
def test_what_a_kernel_reads_in_place(sizes, strides, address, reason):
    import re

    found = tensors.copy_reason(sizes, strides, address)
    assert (found is None) if reason is None else (found is not None and re.search(reason, found))


def test_a_copy_is_made_and_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(tensors, "_logged_copies", set())
    odd = torch.randn(2, 3, 4, 17)[..., :16]
    with caplog.at_level(logging.WARNING, logger="flashsmith"):
        copy = tensors.readable("v", odd)
        tensors.readable("v", odd)
    assert copy.is_contiguous() and torch.equal(copy, odd)
    assert [record.message.split(":")[0] for record in caplog.records] == ["v is copied before each such call"]


def test_a_misaligned_but_dense_tensor_moves_to_an_aligned_address():
    base = torch.randn(2 * 3 * 4 * 16 + 1).half()
    view = base[1:].view(2, 3, 4, 16)
    assert view.is_contiguous() and view.data_ptr() % 16 == 2
    copy = tensors.readable("q", view)
    assert copy.data_ptr() % 16 == 0 and torch.equal(copy, view)


def test_a_negative_bit_is_resolved():
    dense = torch.randn(2, 3, 4, 16)
    negative = torch._neg_view(dense)
    copy = tensors.readable("v", negative)
    assert not copy.is_neg() and torch.equal(copy, -dense)
    conjugate = torch.complex(dense, dense).conj().imag
    assert torch.equal(tensors.readable("v", conjugate), -dense)


def test_a_good_tensor_is_taken_as_it_is():
    dense = torch.randn(2, 3, 4, 16).half()
    assert tensors.readable("q", dense) is dense


@given(
    sizes=st.tuples(*[st.integers(1, 3)] * 3),
    strides=st.tuples(*[st.integers(0, 40)] * 3),
    offset=st.integers(0, 9),
)
def test_whatever_is_read_in_place_has_aligned_rows(sizes, strides, offset):
    storage = torch.arange(40 * 2 * 3 + 9 + 8, dtype=torch.float16)
    view = storage.as_strided((*sizes, 8), (*strides, 1), offset)
    found = tensors.readable("k", view)
    assert torch.equal(found, view)
    batch, seqlen, heads = tensors.launch_strides(found.shape, found.stride())
    for b in range(sizes[0]):
        for s in range(sizes[1]):
            for h in range(sizes[2]):
                element = found.data_ptr() + 2 * (b * batch + s * seqlen + h * heads)
                assert element % 16 == 0
                assert element == found[b, s, h].data_ptr()


class FakeCupy:
    """Just enough of a CuPy array: DLPack, dtype, byte strides."""

    def __init__(self, array):
        self.array = array
        self.dtype = array.dtype
        self.strides = array.strides

    def __getitem__(self, index):
        return FakeCupy(self.array[index])

    def __dlpack__(self, **kwargs):
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


FakeCupy.__module__ = "cupy.core"


def test_cupy_arrays_become_views_and_negative_strides_copies(monkeypatch):
    import numpy

    monkeypatch.setattr(tensors, "_logged_copies", set())
    array = numpy.arange(64, dtype=numpy.float16).reshape(2, 2, 2, 8)
    assert tensors.is_cupy(FakeCupy(array)) and not tensors.is_cupy(array)
    view = tensors.torch_from_cupy("q", FakeCupy(array))
    assert view.data_ptr() == array.ctypes.data
    flipped = tensors.torch_from_cupy("q", FakeCupy(array[:, ::-1]))
    assert torch.equal(flipped, torch.from_numpy(array[:, ::-1].copy()))
    with pytest.raises(TensorError, match=r"float16.*int32.*bfloat16"):
        tensors.torch_from_cupy("q", FakeCupy(array.astype(numpy.int32)))
