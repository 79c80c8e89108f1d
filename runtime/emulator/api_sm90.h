// What a Hopper kernel's translation unit sees of the engine, beside api.h.
#pragma once

#include "api.h"

// One lane's operands of a wgmma.m64nNk16 with 16-bit inputs.
struct ProductOperands {
  float* d;                     // columns / 2 accumulators
  const unsigned* a_registers;  // 4, or null: A is in shared memory
  unsigned long long a, b;      // matrix descriptors
  int columns;                  // N
  int scale_d;                  // 0: D is not read
  bool b_transposed;            // rows of k
  bool bf16;
};

extern "C" {

void emulator_mbarrier_init(unsigned barrier, int arrivals, const char* file, int line);
void emulator_fence_mbarrier_init(const char* file, int line);
void emulator_fence_proxy_async(const char* file, int line);
void emulator_mbarrier_arrive(unsigned barrier, const char* file, int line);
void emulator_mbarrier_arrive_expect_tx(unsigned barrier, int bytes, const char* file, int line);
void emulator_mbarrier_wait(unsigned barrier, unsigned parity, const char* file, int line);

void emulator_prefetch_tensormap(const void* map, const char* file, int line);
// `at` holds the box's first element, innermost dimension first.
void emulator_tma_load(unsigned dst, const void* map, int rank, const int* at, unsigned barrier,
                       const char* file, int line);
void emulator_tma_store(const void* map, int rank, const int* at, unsigned src, const char* file,
                        int line);
void emulator_bulk_commit_group(const char* file, int line);
void emulator_bulk_wait_group_read(int newest_in_flight, const char* file, int line);
void emulator_bulk_wait_group(int newest_in_flight, const char* file, int line);

// The registers of `d` and `a_registers` must stay in scope until the warp has waited.
void emulator_wgmma(const ProductOperands* operands, const char* name, const char* file, int line);
void emulator_wgmma_fence(const char* file, int line);
void emulator_wgmma_commit_group(const char* file, int line);
void emulator_wgmma_wait_group(int newest_in_flight, const char* file, int line);

// The bits of all 32 lanes' values, to each of them.
unsigned emulator_redux_or(unsigned value, unsigned lanes, const char* file, int line);

void emulator_setmaxnreg(int registers, bool increase, const char* file, int line);
void emulator_stmatrix_x4(unsigned row, const unsigned* r, const char* file, int line);
int emulator_atomic_add_global_s32(int* pointer, int value, const char* file, int line);
}
