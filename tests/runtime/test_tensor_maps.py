"""Tensor maps per set of addresses, and the counters that all launches of one stream share."""

# pyright: reportArgumentType=false

from __future__ import annotations

import threading

import pytest
import torch

from flashsmith.generator.families.base import TensorMapField
from flashsmith.runtime import tensor_maps
from flashsmith.runtime.tensor_maps import MappedTensor, TensorMaps, TileCounters, mapped_tensor, tile_counters

CPU = torch.device("cpu")


class Encoder:
    """Counts what is encoded; a map is its address, repeated."""

    def __init__(self):
        self.calls = []

    def __call__(self, address, dtype, sizes, strides, box):
        self.calls.append((address, dtype, sizes, strides, box))
        return address.to_bytes(8, "little") * 16


def maps(encode):
    tensors = [MappedTensor(position, (64, 10, 2, 3), (256, 128, 2560), (64, 64, 1, 1)) for position in range(4)]
    return TensorMaps(tensors, "bf16", encode)


def test_a_map_says_sizes_strides_and_box_innermost_first():
    tensor = mapped_tensor(TensorMapField("k_map", "k", 96), (2, 47, 3, 72), (1 << 33, 216, 72))
    assert tensor == MappedTensor(1, (72, 47, 3, 2), (432, 144, 1 << 34), (64, 96, 1, 1))


def test_a_dimension_of_size_1_gets_a_legal_stride():
    """A launch knows it as 0, which the driver refuses."""
    tensor = mapped_tensor(TensorMapField("q_map", "q", 64), (1, 47, 1, 72), (0, 72, 0))
    assert tensor.strides == (144, 144, 144)


def test_a_packed_map_has_the_heads_of_a_group_side_by_side():
    """8 heads of 2 KV heads: 4 heads of 16 queries are the 64 rows of a copy."""
    field = TensorMapField("q_map", "q", 64, packed=True)
    tensor = mapped_tensor(field, (3, 47, 8, 72), (1 << 20, 600, 72), group_size=4)
    assert tensor == MappedTensor(0, (72, 4, 47, 2, 3), (144, 1200, 576, 1 << 21), (64, 4, 16, 1, 1))
    whole = mapped_tensor(field, (1, 1, 64, 72), (0, 0, 72), group_size=64)  # one KV head, one query
    assert whole == MappedTensor(0, (72, 64, 1, 1, 1), (144, 144, 144, 144), (64, 64, 1, 1, 1))
    # Only a packed map asks for the group.
    assert mapped_tensor(TensorMapField("k_map", "k", 96), (3, 47, 2, 72), (1 << 20, 144, 72), group_size=4).box == (
        64, 96, 1, 1)  # fmt: skip


def test_maps_are_joined_in_the_order_of_the_arguments_and_encoded_once():
    encode = Encoder()
    found = maps(encode)
    assert found.nbytes == 512
    joined = found.at(16, 32, 48, 64)
    assert joined == b"".join(address.to_bytes(8, "little") * 16 for address in (16, 32, 48, 64))
    assert encode.calls[2] == (48, "bf16", (64, 10, 2, 3), (256, 128, 2560), (64, 64, 1, 1))
    assert found.at(16, 32, 48, 64) is joined and len(encode.calls) == 4


def test_a_new_output_costs_one_map_not_four():
    encode = Encoder()
    found = maps(encode)
    first = found.at(16, 32, 48, 64)
    other = found.at(16, 32, 48, 80)
    assert [call[0] for call in encode.calls] == [16, 32, 48, 64, 80]
    assert other[:384] == first[:384] and other[384:] != first[384:]


def test_tensors_at_one_address_do_not_share_a_map():
    """K and V may be one tensor, each with a map of its own."""
    encode = Encoder()
    tensors = [
        MappedTensor(0, (64, 1, 1, 1), (0, 0, 0), (64, 64, 1, 1)),
        MappedTensor(1, (32, 1, 1, 1), (0, 0, 0), (64, 64, 1, 1)),
    ]
    TensorMaps(tensors, "fp16", encode).at(16, 16, 16, 16)
    assert [call[2][0] for call in encode.calls] == [64, 32]


def test_the_maps_kept_are_bounded_and_right_afterwards(monkeypatch):
    monkeypatch.setattr(tensor_maps, "MAX_KEPT", 8)
    encode = Encoder()
    found = maps(encode)
    for address in range(16, 16 * 100, 16):
        assert found.at(address, 32, 48, 64)[:8] == address.to_bytes(8, "little")
    assert len(found._joined) <= 8 and len(found._encoded) <= 8


# ---- Counters ----------------------------------------------------------------------------------------------------


def test_launches_of_one_stream_share_a_pair_and_other_streams_have_others():
    counters = TileCounters(CPU)
    first = counters.address(7, False)
    assert counters.address(7, False) == first
    assert counters.address(8, False) not in range(first - 7, first + 8)  # 8 bytes each
    assert len(counters._reserves) == 1 and not counters._reserves[0].any()


def test_each_graph_has_a_pair_per_stream():
    """Two graphs may run at once, though both were captured on one stream; a graph's own launches follow each other."""
    capture = {"id": 11}
    counters = TileCounters(CPU, lambda stream: capture["id"])
    eager = counters.address(7, False)
    first = [counters.address(7, True) for _ in range(3)]
    forked = counters.address(8, True)
    capture["id"] = 12
    second = counters.address(7, True)
    assert len(set(first)) == 1 and len({eager, first[0], forked, second}) == 4
    assert counters.address(7, False) == eager


def test_each_captured_launch_has_a_pair_where_captures_cannot_be_told_apart():
    counters = TileCounters(CPU)
    eager = counters.address(7, False)
    captured = [counters.address(7, True) for _ in range(3)]
    assert len({eager, *captured}) == 4
    assert counters.address(7, False) == eager


def test_a_capture_allocates_only_where_the_reserve_is_used_up(monkeypatch):
    monkeypatch.setattr(tensor_maps, "RESERVED_PAIRS", 4)
    made = []
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *sizes, **options: made.append(sizes) or zeros(*sizes, **options))
    counters = TileCounters(CPU)
    counters.reserve()
    assert made == [(4, 2)]
    pairs = [counters.address(1, True) for _ in range(4)]
    assert made == [(4, 2)]
    pairs.append(counters.address(1, True))
    assert made == [(4, 2), (2,)] and len(set(pairs)) == 5
    counters.reserve()  # the next call outside of a capture
    assert made[2:] == [(4, 2)]
    counters.reserve()
    counters.address(2, False)
    assert len(made) == 3
    # Every pair ever given out is alive: a graph may hold it.
    assert sum(tensor.numel() for tensor in (*counters._reserves, *counters._captured)) == 2 * (4 + 4 + 1)


def test_threads_of_new_streams_get_different_pairs(monkeypatch):
    monkeypatch.setattr(tensor_maps, "RESERVED_PAIRS", 2)
    counters = TileCounters(CPU)
    gate, found = threading.Barrier(8), {}

    def launch(stream):
        gate.wait()
        found[stream] = counters.address(stream % 4, False)

    threads = [threading.Thread(target=launch, args=(stream,)) for stream in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found[stream] == found[stream + 4] for stream in range(4)) and len(set(found.values())) == 4


def test_the_plans_of_one_gpu_share_counters_those_of_the_cpu_do_not(monkeypatch):
    monkeypatch.setattr(tensor_maps, "_counters", {})
    one = tile_counters(torch.device("cuda", 0))
    assert tile_counters(torch.device("cuda", 0)) is one and tile_counters(torch.device("cuda")) is one
    assert tile_counters(torch.device("cuda", 1)) is not one
    assert tile_counters(CPU) is not tile_counters(CPU)


def test_zeros_are_there_before_another_stream_uses_them(monkeypatch):
    """On a GPU they are written on the current stream; a launch on another one must find them."""
    order = []
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *s, device, **o: order.append("zeros") or zeros(*s, **o))

    class Stream:
        def synchronize(self):
            order.append("wait")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    TileCounters(torch.device("cuda", 0)).address(3, False)
    assert order == ["zeros", "wait"]


@pytest.mark.parametrize("capturing", [False, True])
def test_addresses_hold_two_aligned_int32(capturing):
    assert TileCounters(CPU).address(0, capturing) % 8 == 0
