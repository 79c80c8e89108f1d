"""A stand-in for libcuda with contexts, modules and a recording launch, built from C by whatever compiler is there."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from flashsmith.runtime import driver

SOURCE = r"""
#include <stdlib.h>
#include <string.h>
typedef void* P;
typedef struct { P context; int device; } Function;

int fake_init_code = 0, fake_version = 13000, fake_devices = 2, fake_cc = 90;
int fake_retains = 0, fake_loads = 0, fake_unloads = 0, fake_capturing = 0, fake_code = 0, fake_depth = 0;
int fake_launches = 0;
unsigned fake_shape[7];
P fake_stream, fake_current;
char fake_bytes[4096];
int fake_nbytes = 0;
static __thread P stack[64];
static __thread int depth = 0, mode = 0;
static char contexts[16];
static int initialised = 0;

static P top(void) { return depth ? stack[depth - 1] : 0; }
int cuInit(unsigned f) { if (!fake_init_code) initialised = 1; return fake_init_code; }
int cuDriverGetVersion(int* v) { *v = fake_version; return 0; }
int cuDeviceGetCount(int* n) { *n = fake_devices; return initialised ? 0 : 3; }
int cuDeviceGet(int* d, int i) { if (i < 0 || i >= fake_devices) return 101; *d = i; return 0; }
int cuDeviceGetName(char* s, int n, int d) { strncpy(s, "NVIDIA Fake", n); return 0; }
int cuDeviceTotalMem_v2(size_t* b, int d) { *b = 1ull << 40; return 0; }
int cuDeviceGetAttribute(int* v, int a, int d) {
  switch (a) {
    case 75: *v = fake_cc / 10; return 0;
    case 76: *v = fake_cc % 10; return 0;
    case 16: *v = 132; return 0;
    case 38: *v = 50 << 20; return 0;
    case 13: *v = 1980000; return 0;
  }
  return 1;
}
int cuDevicePrimaryCtxRetain(P* c, int d) { *c = contexts + d; ++fake_retains; return 0; }
int cuCtxPushCurrent_v2(P c) { stack[depth++] = c; fake_depth = depth; return 0; }
int cuCtxPopCurrent_v2(P* c) { if (!depth) return 201; *c = stack[--depth]; fake_depth = depth; return 0; }
int cuCtxGetCurrent(P* c) { *c = top(); return 0; }
int cuCtxGetDevice(int* d) { if (!depth) return 201; *d = (int)((char*)top() - contexts); return 0; }
int cuThreadExchangeStreamCaptureMode(int* m) { int old = mode; mode = *m; *m = old; return 0; }
int cuStreamIsCapturing(P s, int* status) { *status = fake_capturing; return 0; }
int fake_capture = 7;
int cuStreamGetCaptureInfo_v2(P s, int* status, unsigned long long* id, P* graph, P** dependencies, size_t* count) {
  *status = fake_capturing;
  *id = fake_capture;
  return graph || dependencies || count ? 1 : 0;
}
int cuModuleLoadData(P* m, const void* image) {
  if (!depth) return 201;
  if (fake_capturing && mode != 2) return 900;
  if (!memcmp(image, "old", 3)) return 209;
  Function* f = malloc(sizeof(Function));
  f->context = top();
  f->device = (int)((char*)top() - contexts);
  *m = f;
  ++fake_loads;
  return 0;
}
int cuModuleUnload(P m) { ++fake_unloads; return top() == ((Function*)m)->context ? 0 : 201; }
int cuModuleGetFunction(P* f, P m, const char* name) { *f = m; return strcmp(name, "missing") ? 0 : 500; }
/* A module's one global variable counts its words. */
int cuModuleGetGlobal_v2(unsigned long long* p, size_t* n, P m, const char* name) {
  static long long words[512];
  for (int i = 0; i < 512; ++i) words[i] = i;
  *p = (unsigned long long)words;
  *n = sizeof words;
  return strcmp(name, "missing") ? 0 : 500;
}
int cuFuncSetAttribute(P f, int a, int v) { return a == 8 && v <= 232448 ? 0 : 1; }
int cuFuncGetAttribute(int* v, int a, P f) { *v = a == 4 ? 168 : 0; return 0; }
int fake_map_code = 0, fake_maps = 0;
unsigned long long fake_map_numbers[20];
/* Writes what it was given into the map, refuses a map that is not aligned to 64 bytes, as the driver does. */
int cuTensorMapEncodeTiled(P map, int dtype, unsigned rank, P address, const unsigned long long* sizes,
                           const unsigned long long* strides, const unsigned* box, const unsigned* steps,
                           int interleave, int swizzle, int promotion, int fill) {
  if (!depth) return 201;
  ++fake_maps;
  if ((unsigned long long)map % 64) return 1;
  unsigned long long numbers[20] = {dtype, rank, (unsigned long long)address, interleave, swizzle, promotion, fill};
  for (unsigned i = 0; i < rank && i < 4; ++i) {
    numbers[7 + i] = sizes[i];
    numbers[11 + i] = box[i] | (unsigned long long)steps[i] << 32;
    if (i + 1 < rank) numbers[15 + i] = strides[i];
  }
  memcpy(fake_map_numbers, numbers, sizeof numbers);
  memset(map, 0x5a, 128);
  return fake_map_code;
}
/* Device memory is the host's. A launch with more blocks than `fake_blocks` fails, where that is not 0. */
int fake_allocated = 0, fake_freed = 0, fake_copied = 0, fake_blocks = 0;
int cuMemAlloc_v2(unsigned long long* p, size_t n) {
  if (!depth) return 201;
  *p = (unsigned long long)calloc(1, n);
  ++fake_allocated;
  return 0;
}
int cuMemFree_v2(unsigned long long p) { free((void*)p); ++fake_freed; return 0; }
int cuMemcpyHtoD_v2(unsigned long long to, const void* from, size_t n) { memcpy((void*)to, from, n); return 0; }
int cuMemcpyDtoH_v2(void* to, unsigned long long from, size_t n) { memcpy(to, (void*)from, n); return 0; }
int cuCtxSynchronize(void) {
  const char* blocks = getenv("FAKE_CUDA_BLOCKS");
  if (blocks) fake_blocks = atoi(blocks);
  return fake_blocks && fake_shape[0] > (unsigned)fake_blocks ? 715 : 0;
}
int cuGetErrorName(int code, const char** s) { *s = "CUDA_ERROR"; return 0; }
int cuGetErrorString(int code, const char** s) { *s = "words of the driver"; return 0; }
int cuLaunchKernel(P f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned smem,
                   P stream, void** params, void** extra) {
  ++fake_launches;
  if (!depth) return 201;
  if (((Function*)f)->context != top()) return 400;
  unsigned shape[7] = {gx, gy, gz, bx, by, bz, smem};
  memcpy(fake_shape, shape, sizeof shape);
  fake_stream = stream;
  fake_current = top();
  memcpy(fake_bytes, params[0], fake_nbytes);
  /* The kernels of the conformance program: pointers to three inputs and to the output. */
  if (fake_copied) memcpy(((P*)params[0])[3], ((P*)params[0])[0], fake_copied);
  return fake_code;
}
"""


class FakeCuda:
    """The built library; `fake.devices = 0` and the like set its `fake_*` integers."""

    library: ctypes.CDLL

    def __init__(self, path: Path) -> None:
        object.__setattr__(self, "library", ctypes.CDLL(str(path)))

    def __getattr__(self, name: str) -> int:
        return ctypes.c_int.in_dll(self.library, f"fake_{name}").value

    def __setattr__(self, name: str, value: int) -> None:
        ctypes.c_int.in_dll(self.library, f"fake_{name}").value = value

    @property
    def shape(self) -> list[int]:
        return list((ctypes.c_uint * 7).in_dll(self.library, "fake_shape"))

    @property
    def stream(self) -> int:
        return ctypes.c_void_p.in_dll(self.library, "fake_stream").value or 0

    def bytes(self, count: int) -> bytes:
        return bytes((ctypes.c_char * 4096).in_dll(self.library, "fake_bytes"))[:count]

    @property
    def map_numbers(self) -> list[int]:
        """What the latest map was made of: dtype, rank, address, 4 modes, 4 sizes, 4 boxes and steps, 3 strides."""
        return list((ctypes.c_ulonglong * 20).in_dll(self.library, "fake_map_numbers"))

    def push(self, device: int) -> None:
        """Makes `device` current in this thread, as torch does."""
        context = ctypes.c_void_p()
        self.library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        self.library.cuCtxPushCurrent_v2(context)


def build(folder: Path) -> FakeCuda:
    """A fresh copy with its own state. Skips the test where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("needs a C compiler to build a stand-in for libcuda")
    source, library = folder / "fake.c", folder / "libcuda.so.1"
    source.write_text(SOURCE)
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-w", "-o", library, source], check=True)
    return FakeCuda(library)


def install(patch: pytest.MonkeyPatch, fake: FakeCuda | None) -> None:
    """Makes `driver` start afresh on `fake`, or on a machine without a driver."""
    patch.setattr(driver, "LIBRARY_NAMES", ("libcuda-absent.so.1",))
    for name, value in (
        ("_library", None if fake is None else fake.library),
        ("_searched", True),
        ("_initialised", False),
        ("_forked", False),
        ("_contexts", {}),
        ("_launch_kernel", None),
    ):
        patch.setattr(driver, name, value)


def in_thread(function: Any) -> Any:
    """What `function` returns or raises in a new thread, which has no current context."""
    box: list[Any] = []

    def run() -> None:
        try:
            box.append(function())
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            box.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(box[0], BaseException):
        raise box[0]
    return box[0]
