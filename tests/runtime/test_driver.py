"""libcuda through ctypes: on a stand-in built from C, and on a GPU where there is one."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import helpers_fake_cuda
import pytest
from helpers_compile import kernel_text
from helpers_fake_cuda import FakeCuda, in_thread

from flashsmith.generator.errors import LaunchError, MissingComponentError
from flashsmith.runtime import driver

CUBIN = b"\x7fELF the stand-in reads no more"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    library = helpers_fake_cuda.build(tmp_path)
    helpers_fake_cuda.install(monkeypatch, library)
    return library


def packed(fake: FakeCuda, data: bytes) -> driver.ArgumentBuffer:
    fake.nbytes = len(data)
    buffer = driver.ArgumentBuffer(len(data))
    buffer.data[:] = data
    return buffer


# ---- Without a driver ----


def test_a_machine_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    helpers_fake_cuda.install(monkeypatch, None)
    monkeypatch.setattr(driver, "_searched", False)
    assert driver.cuda_version() is None
    assert driver.driver_version() == ""
    assert driver.device_count() == 0
    assert not driver.driver_available()
    with pytest.raises(MissingComponentError, match=r"libcuda-absent\.so\.1 was not found.*emulat"):
        driver.load_function(CUBIN, "scale", smem_bytes=0)


def test_a_driver_without_a_gpu(fake: FakeCuda) -> None:
    fake.init_code = 100
    assert driver.device_count() == 0
    assert driver.cuda_version() == (13, 0)
    with pytest.raises(LaunchError, match="CUDA_VISIBLE_DEVICES") as caught:
        driver.device_info(0)
    assert caught.value.code == 100


def test_importing_starts_nothing() -> None:
    program = textwrap.dedent(
        """
        import flashsmith.runtime.driver as driver
        assert driver._library is None
        assert "libcuda" not in open("/proc/self/maps").read()
        """
    )
    subprocess.run([sys.executable, "-c", program], check=True)


# ---- Devices ----


def test_device_info(fake: FakeCuda) -> None:
    assert driver.device_count() == 2
    info = driver.device_info(1)
    assert (info.name, info.cc, info.sm_count) == ("NVIDIA Fake", (9, 0), 132)
    assert (info.memory_bytes, info.l2_bytes) == (1 << 40, 50 << 20)
    assert (info.sm_clock_khz, info.memory_clock_khz) == (1980000, 0)  # the stand-in does not know the latter
    assert info.driver_version
    with pytest.raises(LaunchError, match="finding GPU 2"):
        driver.device_info(2)


@pytest.mark.parametrize(("number", "version"), [(12020, (12, 2)), (13000, (13, 0)), (12090, (12, 9))])
def test_cuda_version(fake: FakeCuda, number: int, version: tuple[int, int]) -> None:
    fake.version = number
    assert driver.cuda_version() == version


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.03  Tue Sep 9\nGCC", "580.159.03"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.57.08  Release Build", "575.57.08"),
        ("", "CUDA 13.0"),
    ],
)
def test_driver_version(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, text: str, version: str) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self: text)
    assert driver.driver_version() == version


# ---- Loading ----


def test_load_and_launch(fake: FakeCuda) -> None:
    function = driver.load_function(CUBIN, "scale", smem_bytes=200_000)
    assert (function.device, function.registers, function.local_bytes) == (0, 168, 0)
    fake.push(0)
    data = struct.pack("=QqifI", 0xDEADBEEF12345678, -5, 7, 1.5, 9)
    driver.launch(function, (2**31 - 1, 1, 1), 128, 65536, 0x7F00_0000_1234, packed(fake, data))
    assert fake.shape == [2**31 - 1, 1, 1, 128, 1, 1, 65536]
    assert fake.stream == 0x7F00_0000_1234
    assert fake.bytes(len(data)) == data
    assert fake.launches == 1


def test_one_buffer_is_launched_on_any_stream_in_turn(fake: FakeCuda) -> None:
    function = driver.load_function(CUBIN, "scale", smem_bytes=0)
    fake.push(0)
    launch, buffer = driver.launcher(function), driver.ArgumentBuffer(8)
    for stream in (0, 0x7F00_0000_1234, 0x7F00_0000_1234, 0, 5):
        launch((1, 1, 1), 32, 0, stream, buffer)
        assert fake.stream == stream


def test_a_plain_ctypes_buffer_can_be_launched(fake: FakeCuda) -> None:
    function = driver.load_function(CUBIN, "scale", smem_bytes=0)
    fake.push(0)
    fake.nbytes = 8
    driver.launch(function, (1, 2, 3), 64, 0, 0, ctypes.create_string_buffer(b"12345678"))
    assert fake.bytes(8) == b"12345678"
    assert fake.stream == 0


def test_each_device_has_its_function_and_one_context(fake: FakeCuda) -> None:
    functions = [driver.load_function(CUBIN, "scale", smem_bytes=0, device=d) for d in (0, 1, 1)]
    assert [f.device for f in functions] == [0, 1, 1]
    assert fake.retains == 2
    assert fake.depth == 0  # the caller's context is as before


def test_the_current_device_is_the_default(fake: FakeCuda) -> None:
    fake.push(1)
    assert driver.load_function(CUBIN, "scale", smem_bytes=0).device == 1
    assert in_thread(lambda: driver.load_function(CUBIN, "scale", smem_bytes=0)).device == 0


@pytest.mark.parametrize(
    ("cubin", "entry", "smem", "says", "code"),
    [
        (b"old", "scale", 0, "compiled for another GPU, or by a compiler newer than this driver", 209),
        (CUBIN, "missing", 0, "finding missing in its cubin", 500),
        (CUBIN, "scale", 300_000, "giving scale 300000 bytes of dynamic shared memory", 1),
    ],
)
def test_a_load_that_fails_leaves_nothing(
    fake: FakeCuda, cubin: bytes, entry: str, smem: int, says: str, code: int
) -> None:
    with pytest.raises(LaunchError, match=says) as caught:
        driver.load_function(cubin, entry, smem_bytes=smem)
    assert caught.value.code == code
    assert "words of the driver" in str(caught.value)
    assert fake.depth == 0
    assert fake.loads == fake.unloads


def test_unload(fake: FakeCuda) -> None:
    driver.unload(driver.load_function(CUBIN, "scale", smem_bytes=0, device=1))
    assert (fake.loads, fake.unloads, fake.depth) == (1, 1, 0)


def test_loading_is_legal_during_a_capture(fake: FakeCuda) -> None:
    assert driver.capture_id(0) == 0
    fake.capturing = 1
    assert driver.capture_id(0) == 7
    driver.load_function(CUBIN, "scale", smem_bytes=0)
    mode = ctypes.c_int(0)
    fake.library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    assert mode.value == 0  # as the thread had it


# ---- Launching from anywhere ----


def test_a_thread_without_a_context(fake: FakeCuda) -> None:
    """The cold autograd thread: it has never touched CUDA, and the tensors are on device 1."""
    function = driver.load_function(CUBIN, "scale", smem_bytes=0, device=1)
    buffer = packed(fake, b"abcd")
    in_thread(lambda: driver.launch(function, (1, 1, 1), 32, 0, 5, buffer))
    assert fake.bytes(4) == b"abcd"
    assert fake.depth == 0


def test_another_device_is_current(fake: FakeCuda) -> None:
    function = driver.load_function(CUBIN, "scale", smem_bytes=0, device=1)
    fake.push(0)
    driver.launch(function, (1, 1, 1), 32, 0, 5, packed(fake, b"abcd"))
    assert fake.bytes(4) == b"abcd"
    assert fake.depth == 1
    with driver.on_device(1):
        before = fake.launches
        driver.launch(function, (1, 1, 1), 32, 0, 5, packed(fake, b"efgh"))
        assert fake.launches == before + 1
    assert fake.depth == 1


def test_a_launch_that_fails_says_with_what(fake: FakeCuda) -> None:
    function = driver.load_function(CUBIN, "scale", smem_bytes=1024)
    fake.push(0)
    fake.code = 1
    with pytest.raises(
        LaunchError, match=r"launching scale on device 0 with grid \(7, 1, 1\), 128 threads, 2048 .*1024"
    ) as caught:
        driver.launch(function, (7, 1, 1), 128, 2048, 0, packed(fake, b""))
    assert caught.value.code == 1


def test_the_python_cost_of_a_launch_is_below_3_us(fake: FakeCuda) -> None:
    function = driver.load_function(CUBIN, "scale", smem_bytes=0)
    fake.push(0)
    buffer = packed(fake, bytes(256))

    def per_launch() -> float:
        start = time.perf_counter()
        for _ in range(2000):
            driver.launch(function, (1024, 1, 1), 128, 65536, 0x7F0000001234, buffer)
        return (time.perf_counter() - start) / 2000

    assert min(per_launch() for _ in range(10)) < 3e-6


# ---- Forks ----

FORKED = textwrap.dedent(
    """
    import os, sys, warnings
    from pathlib import Path
    import pytest, helpers_fake_cuda
    from flashsmith.generator.errors import LaunchError
    from flashsmith.runtime import driver

    warnings.simplefilter("ignore")
    patch = pytest.MonkeyPatch()
    fake = helpers_fake_cuda.FakeCuda(Path(sys.argv[1]))
    helpers_fake_cuda.install(patch, fake)
    early = sys.argv[2] == "early"
    if early:
        driver.cuda_version()  # known to start nothing
    else:
        function = driver.load_function(b"elf", "scale", smem_bytes=0, device=0)
        fake.push(0)
    pid = os.fork()
    if pid == 0:
        try:
            if early:
                driver.load_function(b"elf", "scale", smem_bytes=0)
                os._exit(7)
            assert driver.device_count() == 0
            for use in (
                lambda: driver.load_function(b"elf", "scale", smem_bytes=0),
                lambda: driver.launch(function, (1, 1, 1), 32, 0, 0, driver.ArgumentBuffer(8)),
            ):
                try:
                    use()
                except LaunchError as error:
                    assert "spawn" in str(error) and error.code == 3, error
                else:
                    os._exit(8)
            os._exit(7)
        except BaseException as error:
            print(error)
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    if not early:
        driver.launch(function, (1, 1, 1), 32, 0, 0, driver.ArgumentBuffer(8))  # the parent goes on
    """
)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("when", ["early", "late"])
def test_a_fork_before_use_works_and_one_after_it_says_so(fake: FakeCuda, tmp_path: Path, when: str) -> None:
    tests = str(Path(__file__).resolve().parents[1])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", FORKED, str(tmp_path / "libcuda.so.1"), when], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_cuda_used_by_another_library_before_the_fork(fake: FakeCuda) -> None:
    fake.init_code = 3
    with pytest.raises(LaunchError, match="spawn"):
        driver.load_function(CUBIN, "scale", smem_bytes=0)


# ---- On a GPU ----

GPU_FORKS = textwrap.dedent(
    """
    import multiprocessing, os, sys, warnings
    from flashsmith.generator.arch import arch_from_cc
    from flashsmith.generator.errors import LaunchError
    from flashsmith.runtime import driver, nvrtc

    def use():
        cubin = nvrtc.compile_to_cubin('extern "C" __global__ void k() {}', "sm_%d%d" % driver.device_info(0).cc).cubin
        driver.load_function(cubin, "k", smem_bytes=0)

    def fails():
        try:
            use()
        except LaunchError as error:
            sys.exit(0 if "spawn" in str(error) else 2)
        sys.exit(3)

    def run(method, target):
        process = multiprocessing.get_context(method).Process(target=target)
        process.start()
        process.join()
        assert process.exitcode == 0, (method, process.exitcode)

    if __name__ == "__main__":
        warnings.simplefilter("ignore")
        run("fork", use)
        use()
        run("fork", fails)
        run("spawn", use)
        use()
    """
)


@pytest.mark.gpu
def test_forks_on_a_gpu(tmp_path: Path) -> None:
    script = tmp_path / "forks.py"
    script.write_text(GPU_FORKS)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
def test_on_a_gpu_in_and_out_of_a_graph() -> None:
    import torch

    from flashsmith.generator.arch import arch_from_cc
    from flashsmith.runtime import nvrtc

    info = driver.device_info(0)
    properties = torch.cuda.get_device_properties(0)
    assert info.cc == (properties.major, properties.minor)
    assert info.sm_count == properties.multi_processor_count
    cubin = nvrtc.compile_to_cubin(kernel_text(3.0), arch_from_cc(info.cc).name).cubin
    x = torch.ones(1000, device="cuda")
    buffer = driver.ArgumentBuffer(16)
    struct.pack_into("=Qi", buffer.data, 0, x.data_ptr(), 1000)
    torch.cuda.synchronize()

    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    assert not driver.capture_id(side.cuda_stream)
    with torch.cuda.graph(graph, stream=side):
        assert driver.capture_id(side.cuda_stream)
        function = driver.load_function(cubin, "scale", smem_bytes=0, device=0)  # inside the capture
        driver.launch(function, (8, 1, 1), 128, 0, side.cuda_stream, buffer)
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    assert x.eq(9.0).all()

    stream = torch.cuda.current_stream().cuda_stream
    in_thread(lambda: driver.launch(function, (8, 1, 1), 128, 0, stream, buffer))
    torch.cuda.synchronize()
    assert x.eq(27.0).all()
    with pytest.raises(LaunchError, match="2048 threads"):
        driver.launch(function, (8, 1, 1), 2048, 0, stream, buffer)
    with pytest.raises(LaunchError, match="dynamic shared memory"):
        driver.load_function(cubin, "scale", smem_bytes=1 << 20, device=0)
    driver.unload(function)
