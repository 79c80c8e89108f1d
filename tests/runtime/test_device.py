"""The GPUs' backend, with the driver and the compiler replaced."""
# pyright: reportArgumentType=false

from __future__ import annotations

import logging
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from flashsmith.generator.arch import arch_from_name
from flashsmith.generator.errors import ArchError
from flashsmith.generator.families import family_named
from flashsmith.generator.spec import AttentionSpec
from flashsmith.runtime import compiler, driver
from flashsmith.runtime.device import CudaBackend
from flashsmith.runtime.gate import ResourceReport

FAMILY = family_named("forward_sm80")
SPEC = AttentionSpec(dtype="bf16", head_dim=64)
CONFIG = FAMILY.default_config(SPEC, arch_from_name("sm_90"))


def report(**changes):
    values = {
        "registers": 128,
        "spill_store_bytes": 0,
        "spill_load_bytes": 0,
        "stack_bytes": 0,
        "smem_bytes": 0,
        "warnings": (),
    }
    return ResourceReport(**{**values, **changes})


@pytest.fixture
def calls(monkeypatch):
    """What was compiled, loaded, launched and unloaded; properties of one Hopper GPU."""
    seen = SimpleNamespace(compiled=[], loaded=[], launched=[], unloaded=[], report=report())

    def compile_kernel(spec, config, arch, *, family, gate):
        assert gate is False  # a slow kernel is right: it runs
        time.sleep(0.01)
        seen.compiled.append((spec, config, arch.name))
        return SimpleNamespace(cubin=b"cubin", entry=family.entry, report=seen.report, key="the key")

    def load_function(cubin, entry, *, smem_bytes, device):
        seen.loaded.append((cubin, entry, smem_bytes, device))
        return f"function {len(seen.loaded)}"

    monkeypatch.setattr(compiler, "compile_kernel", compile_kernel)
    monkeypatch.setattr(driver, "load_function", load_function)
    monkeypatch.setattr(driver, "launcher", lambda function: lambda *args: seen.launched.append((function, *args)))
    monkeypatch.setattr(driver, "unload", seen.unloaded.append)
    properties = SimpleNamespace(major=9, minor=0, name="NVIDIA H200", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return seen


def test_a_kernel_is_compiled_and_loaded_once_per_device(calls):
    backend = CudaBackend()
    assert not backend.is_loaded(SPEC, CONFIG, FAMILY, 0)
    kernel = backend.kernel(SPEC, CONFIG, FAMILY, 0)
    assert backend.kernel(SPEC, CONFIG, FAMILY, 0) is kernel and kernel.key == "the key"
    assert backend.is_loaded(SPEC, CONFIG, FAMILY, 0) and not backend.is_loaded(SPEC, CONFIG, FAMILY, 1)
    backend.kernel(SPEC, CONFIG, FAMILY, 1)
    smem = FAMILY.resources(SPEC, CONFIG).smem_bytes
    assert calls.loaded == [(b"cubin", FAMILY.entry, smem, 0), (b"cubin", FAMILY.entry, smem, 1)]
    assert calls.compiled == [(SPEC, CONFIG, "sm_90")] * 2


def test_threads_wait_for_the_one_that_compiles(calls):
    backend, found = CudaBackend(), []
    threads = [threading.Thread(target=lambda: found.append(backend.kernel(SPEC, CONFIG, FAMILY, 0))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls.compiled) == 1 and len(set(map(id, found))) == 1 and len(found) == 8


def test_a_launch_goes_to_the_driver_with_its_function(calls):
    kernel = CudaBackend().kernel(SPEC, CONFIG, FAMILY, 0)
    kernel.launch((7, 1, 1), 128, 4096, 5, "packed")
    assert calls.launched == [("function 1", (7, 1, 1), 128, 4096, 5, "packed")]


def test_unloading_frees_every_function(calls):
    backend = CudaBackend()
    backend.kernel(SPEC, CONFIG, FAMILY, 0)
    backend.kernel(SPEC, CONFIG, FAMILY, 1)
    backend.unload()
    assert sorted(calls.unloaded) == ["function 1", "function 2"]
    assert not backend.is_loaded(SPEC, CONFIG, FAMILY, 0)


def test_a_kernel_that_spills_runs_with_a_warning(calls, caplog):
    calls.report = report(spill_store_bytes=64, spill_load_bytes=64)
    with caplog.at_level(logging.WARNING, logger="flashsmith"):
        CudaBackend().kernel(SPEC, CONFIG, FAMILY, 0)
    assert len(calls.loaded) == 1
    assert len(caplog.records) == 1 and "flashsmith tune" in caplog.text


def test_the_architecture_comes_from_the_device(calls, monkeypatch):
    backend = CudaBackend()
    assert backend.arch(0).name == "sm_90" and backend.device_name(0) == "NVIDIA H200" and backend.sm_count(0) == 132
    old = SimpleNamespace(major=6, minor=1, name="NVIDIA GTX 1080", multi_processor_count=20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: old)
    assert backend.arch(0).name == "sm_90"  # asked once a device
    with pytest.raises(ArchError, match=r"8\.0 or newer.*found 6\.1"):
        backend.arch(1)
