"""The GPU models that a machine without a GPU predicts for: one typical product per architecture, and pipe rates.

Sources. SM counts, boost clocks and memory bandwidth: NVIDIA's product data sheets and architecture whitepapers (Ampere
GA100 and GA102, Ada AD102, Hopper GH100, Blackwell). `mma_fma` (fp16 multiply, fp32 accumulate, dense, per SM and
clock, through mma.sync) follows from the whitepapers' TFLOP/s; on sm_90 mma.sync reaches about 62 % of the wgmma rate
(Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture", 2024). ex2 and shared memory rates: CUDA
C++ Programming Guide, "Throughput of Native Arithmetic Instructions". `l2_bytes` per SM and clock are round figures.
Where NVIDIA says nothing (mma.sync on sm_100 and newer data-centre parts) the Ampere rate is assumed.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...generator.arch import Arch
from ...generator.errors import ArchError, unknown_name_message


@dataclass(frozen=True, slots=True)
class PipeRates:
    """What one SM does per clock: mma multiply-adds, fp32 and special-function lanes, shared memory and L2 bytes."""

    mma_fma: int
    fp32_lanes: int
    mufu_lanes: int = 16
    smem_bytes: int = 128
    l2_bytes: int = 48


@dataclass(frozen=True, slots=True)
class GpuModel:
    """A product: SMs, boost clock in GHz, memory bandwidth in GB/s, and its pipe rates."""

    name: str
    arch: str
    sm_count: int
    clock_ghz: float
    memory_gbps: float
    rates: PipeRates


_AMPERE = PipeRates(mma_fma=1024, fp32_lanes=64)
_CONSUMER = PipeRates(mma_fma=256, fp32_lanes=128, l2_bytes=32)
_WORKSTATION = PipeRates(mma_fma=512, fp32_lanes=128, l2_bytes=32)
_HOPPER = PipeRates(mma_fma=1270, fp32_lanes=128)
_BLACKWELL = PipeRates(mma_fma=1024, fp32_lanes=128)

#: The first of an architecture stands for it.
GPUS: tuple[GpuModel, ...] = (
    GpuModel("NVIDIA A100-SXM4-80GB", "sm_80", 108, 1.41, 2039, _AMPERE),
    GpuModel("NVIDIA A30", "sm_80", 56, 1.44, 933, _AMPERE),
    GpuModel("NVIDIA GeForce RTX 3090", "sm_86", 82, 1.695, 936, _CONSUMER),
    GpuModel("NVIDIA A10", "sm_86", 72, 1.695, 600, _WORKSTATION),
    GpuModel("NVIDIA Jetson AGX Orin", "sm_87", 16, 1.3, 205, PipeRates(mma_fma=1024, fp32_lanes=128, l2_bytes=32)),
    GpuModel("NVIDIA GeForce RTX 4090", "sm_89", 128, 2.52, 1008, _CONSUMER),
    GpuModel("NVIDIA L40S", "sm_89", 142, 2.52, 864, _WORKSTATION),
    GpuModel("NVIDIA H200", "sm_90", 132, 1.755, 4800, _HOPPER),
    GpuModel("NVIDIA H100 80GB HBM3", "sm_90", 132, 1.755, 3350, _HOPPER),
    GpuModel("NVIDIA B200", "sm_100", 148, 1.85, 8000, _BLACKWELL),
    GpuModel("NVIDIA B300", "sm_103", 148, 1.92, 8000, _BLACKWELL),
    GpuModel("NVIDIA Jetson AGX Thor", "sm_110", 20, 1.57, 273, PipeRates(mma_fma=1024, fp32_lanes=128, l2_bytes=32)),
    GpuModel("NVIDIA GeForce RTX 5090", "sm_120", 170, 2.41, 1792, _CONSUMER),
    GpuModel("NVIDIA GB10", "sm_121", 48, 2.42, 273, _CONSUMER),
)


def gpu_model(arch: Arch, name: str | None = None) -> GpuModel:
    """The model called `name`, or the one that stands for `arch`. Raises ArchError for another one's name."""
    of_arch = {gpu.name: gpu for gpu in GPUS if gpu.arch == arch.name}
    if name is None:
        if not of_arch:
            known = ", ".join(dict.fromkeys(gpu.arch for gpu in GPUS))
            raise ArchError(f"No GPU model is known for {arch}, so nothing can be predicted. Known: {known}.")
        return next(iter(of_arch.values()))
    if name not in of_arch:
        raise ArchError(unknown_name_message(f"{arch} GPU", name, tuple(of_arch)))
    return of_arch[name]
