"""Tensor maps through libcuda: on a stand-in built from C, and on a GPU where there is one."""

from __future__ import annotations

from pathlib import Path

import helpers_fake_cuda
import pytest
from helpers_fake_cuda import FakeCuda

from flashsmith.generator.errors import LaunchError, MissingComponentError, SpecError
from flashsmith.runtime.driver import on_device
from flashsmith.runtime.driver_maps import TENSOR_MAP_BYTES, encode_tensor_map

SIZES, STRIDES, BOX = (72, 47, 3, 2), (432, 144, 1 << 34), (64, 96, 1, 1)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    library = helpers_fake_cuda.build(tmp_path)
    helpers_fake_cuda.install(monkeypatch, library)
    return library


@pytest.mark.parametrize(("dtype", "number"), [("fp16", 6), ("bf16", 9)])
def test_the_driver_gets_every_number(fake: FakeCuda, dtype: str, number: int) -> None:
    """CU_TENSOR_MAP_DATA_TYPE_*; no interleaving, 128-byte swizzle, 128-byte L2 promotion, zeros outside."""
    address = 0x7F12_3456_7890_0000
    encoded = encode_tensor_map(address, dtype, SIZES, STRIDES, BOX)
    assert encoded == b"\x5a" * TENSOR_MAP_BYTES
    numbers = fake.map_numbers
    assert numbers[:7] == [number, 4, address, 0, 3, 2, 0]
    assert tuple(numbers[7:11]) == SIZES
    assert [n & 0xFFFFFFFF for n in numbers[11:15]] == list(BOX)
    assert [n >> 32 for n in numbers[11:15]] == [1] * 4  # every element of each dimension
    assert tuple(numbers[15:18]) == STRIDES


def test_the_map_is_encoded_at_an_aligned_address_wherever_memory_lies(fake: FakeCuda) -> None:
    keep = []
    for i in range(64):
        keep.append(encode_tensor_map(16 * i, "bf16", SIZES, STRIDES, BOX))
        keep.append(bytearray(i))  # moves the next allocation
    assert fake.maps == 64


def test_a_thread_without_a_context_borrows_one(fake: FakeCuda) -> None:
    assert fake.depth == 0
    assert len(encode_tensor_map(64, "bf16", SIZES, STRIDES, BOX)) == TENSOR_MAP_BYTES
    assert fake.depth == 0 and fake.maps == 1
    with on_device(0):  # one that is current is used as it is
        encode_tensor_map(64, "bf16", SIZES, STRIDES, BOX)
        assert fake.depth == 1


def test_a_refused_map_says_sizes_strides_and_box(fake: FakeCuda) -> None:
    fake.map_code = 1
    with pytest.raises(
        LaunchError, match=r"encoding a tensor map of sizes \(72, 47, 3, 2\), byte strides \(432"
    ) as error:
        encode_tensor_map(0, "bf16", SIZES, STRIDES, BOX)
    assert error.value.code == 1


def test_another_dtype_is_refused_before_the_driver_is_asked(fake: FakeCuda) -> None:
    with pytest.raises(SpecError, match=r"one of fp16, bf16, but got 'fp8'"):
        encode_tensor_map(0, "fp8", SIZES, STRIDES, BOX)
    assert fake.maps == 0


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    helpers_fake_cuda.install(monkeypatch, None)
    with pytest.raises(MissingComponentError, match="NVIDIA driver"):
        encode_tensor_map(0, "bf16", SIZES, STRIDES, BOX)


@pytest.mark.gpu
def test_the_real_driver_takes_and_refuses_maps() -> None:
    import torch

    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs a GPU with a copy engine for tensors (compute capability 9.0)")
    tensor = torch.zeros(2, 47, 3, 72, dtype=torch.bfloat16, device="cuda")
    encoded = encode_tensor_map(tensor.data_ptr(), "bf16", SIZES, (432, 144, 47 * 432), BOX)
    assert len(encoded) == 128 and any(encoded)
    assert encoded == encode_tensor_map(tensor.data_ptr(), "bf16", SIZES, (432, 144, 47 * 432), BOX)
    # Along a dimension of size 1 nothing is stepped; a launch gives it the stride of one row.
    assert len(encode_tensor_map(tensor.data_ptr(), "bf16", (72, 47, 1, 1), (432, 144, 144), BOX)) == 128
    with pytest.raises(LaunchError, match="encoding a tensor map"):
        encode_tensor_map(tensor.data_ptr(), "bf16", SIZES, (430, 144, 47 * 432), BOX)
