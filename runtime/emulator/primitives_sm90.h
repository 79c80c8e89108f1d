// Host twins of the Hopper primitives: same names and meanings, executed by the engine.
#pragma once

#include "api_sm90.h"
#include "primitives_sm80.h"

typedef unsigned long long u64;

struct TensorMap;  // of the kernel's own text

inline long long grid_size() { return emulator_grid_size(); }

inline void named_barrier_sync(int id, int threads, EMULATOR_PLACE) {
  emulator_barrier_sync(id, threads, file, line);
}
inline void named_barrier_arrive(int id, int threads, EMULATOR_PLACE) {
  emulator_barrier_arrive(id, threads, file, line);
}

template <int REGISTERS>
inline void setmaxnreg_inc(EMULATOR_PLACE) {
  emulator_setmaxnreg(REGISTERS, true, file, line);
}
template <int REGISTERS>
inline void setmaxnreg_dec(EMULATOR_PLACE) {
  emulator_setmaxnreg(REGISTERS, false, file, line);
}

inline void mbarrier_init(u32 barrier, int arrivals, EMULATOR_PLACE) {
  emulator_mbarrier_init(barrier, arrivals, file, line);
}
inline void fence_mbarrier_init(EMULATOR_PLACE) { emulator_fence_mbarrier_init(file, line); }
inline void fence_proxy_async(EMULATOR_PLACE) { emulator_fence_proxy_async(file, line); }
inline void mbarrier_arrive(u32 barrier, EMULATOR_PLACE) {
  emulator_mbarrier_arrive(barrier, file, line);
}
inline void mbarrier_arrive_expect_tx(u32 barrier, int bytes, EMULATOR_PLACE) {
  emulator_mbarrier_arrive_expect_tx(barrier, bytes, file, line);
}
inline void mbarrier_wait(u32 barrier, u32 parity, EMULATOR_PLACE) {
  emulator_mbarrier_wait(barrier, parity, file, line);
}

inline void prefetch_tensormap(const TensorMap& map, EMULATOR_PLACE) {
  emulator_prefetch_tensormap(&map, file, line);
}
inline void tma_load_3d(u32 dst_smem, const TensorMap& map, int c0, int c1, int c2, u32 barrier,
                        EMULATOR_PLACE) {
  const int at[] = {c0, c1, c2};
  emulator_tma_load(dst_smem, &map, 3, at, barrier, file, line);
}
inline void tma_load_4d(u32 dst_smem, const TensorMap& map, int c0, int c1, int c2, int c3,
                        u32 barrier, EMULATOR_PLACE) {
  const int at[] = {c0, c1, c2, c3};
  emulator_tma_load(dst_smem, &map, 4, at, barrier, file, line);
}
inline void tma_load_5d(u32 dst_smem, const TensorMap& map, int c0, int c1, int c2, int c3, int c4,
                        u32 barrier, EMULATOR_PLACE) {
  const int at[] = {c0, c1, c2, c3, c4};
  emulator_tma_load(dst_smem, &map, 5, at, barrier, file, line);
}
inline void tma_store_3d(const TensorMap& map, u32 src_smem, int c0, int c1, int c2,
                         EMULATOR_PLACE) {
  const int at[] = {c0, c1, c2};
  emulator_tma_store(&map, 3, at, src_smem, file, line);
}
inline void tma_store_4d(const TensorMap& map, u32 src_smem, int c0, int c1, int c2, int c3,
                         EMULATOR_PLACE) {
  const int at[] = {c0, c1, c2, c3};
  emulator_tma_store(&map, 4, at, src_smem, file, line);
}
inline void tma_store_5d(const TensorMap& map, u32 src_smem, int c0, int c1, int c2, int c3, int c4,
                         EMULATOR_PLACE) {
  const int at[] = {c0, c1, c2, c3, c4};
  emulator_tma_store(&map, 5, at, src_smem, file, line);
}
inline void bulk_commit_group(EMULATOR_PLACE) { emulator_bulk_commit_group(file, line); }
template <int N>
inline void bulk_wait_group_read(EMULATOR_PLACE) {
  emulator_bulk_wait_group_read(N, file, line);
}
template <int N>
inline void bulk_wait_group(EMULATOR_PLACE) {
  emulator_bulk_wait_group(N, file, line);
}

inline void wgmma_fence(EMULATOR_PLACE) { emulator_wgmma_fence(file, line); }
inline void wgmma_commit_group(EMULATOR_PLACE) { emulator_wgmma_commit_group(file, line); }
template <int N>
inline void wgmma_wait_group(EMULATOR_PLACE) {
  emulator_wgmma_wait_group(N, file, line);
}
// A hint to the device compiler alone.
template <int N>
inline void wgmma_guard(float (&)[N]) {}

#define EMULATOR_WGMMA_OF(N, TYPE, BF16)                                                       \
  inline void wgmma_m64n##N##k16_f32_##TYPE##_ss(float (&d)[N / 2], u64 a, u64 b, int scale_d, \
                                                 EMULATOR_PLACE) {                             \
    const ProductOperands operands{d, nullptr, a, b, N, scale_d, false, BF16};                 \
    emulator_wgmma(&operands, "wgmma_m64n" #N "k16_f32_" #TYPE "_ss", file, line);             \
  }                                                                                            \
  inline void wgmma_m64n##N##k16_f32_##TYPE##_rs(float (&d)[N / 2], const u32(&a)[4], u64 b,   \
                                                 EMULATOR_PLACE) {                             \
    const ProductOperands operands{d, a, 0, b, N, 1, true, BF16};                              \
    emulator_wgmma(&operands, "wgmma_m64n" #N "k16_f32_" #TYPE "_rs", file, line);             \
  }                                                                                            \
  inline void wgmma_m64n##N##k16_f32_##TYPE##_ss_tb(float (&d)[N / 2], u64 a, u64 b,           \
                                                    EMULATOR_PLACE) {                          \
    const ProductOperands operands{d, nullptr, a, b, N, 1, true, BF16};                        \
    emulator_wgmma(&operands, "wgmma_m64n" #N "k16_f32_" #TYPE "_ss_tb", file, line);          \
  }
#define EMULATOR_WGMMA(N)          \
  EMULATOR_WGMMA_OF(N, f16, false) \
  EMULATOR_WGMMA_OF(N, bf16, true)

EMULATOR_WGMMA(8)
EMULATOR_WGMMA(16)
EMULATOR_WGMMA(24)
EMULATOR_WGMMA(32)
EMULATOR_WGMMA(40)
EMULATOR_WGMMA(48)
EMULATOR_WGMMA(56)
EMULATOR_WGMMA(64)
EMULATOR_WGMMA(72)
EMULATOR_WGMMA(80)
EMULATOR_WGMMA(88)
EMULATOR_WGMMA(96)
EMULATOR_WGMMA(104)
EMULATOR_WGMMA(112)
EMULATOR_WGMMA(120)
EMULATOR_WGMMA(128)
EMULATOR_WGMMA(136)
EMULATOR_WGMMA(144)
EMULATOR_WGMMA(152)
EMULATOR_WGMMA(160)
EMULATOR_WGMMA(168)
EMULATOR_WGMMA(176)
EMULATOR_WGMMA(184)
EMULATOR_WGMMA(192)
EMULATOR_WGMMA(200)
EMULATOR_WGMMA(208)
EMULATOR_WGMMA(216)
EMULATOR_WGMMA(224)
EMULATOR_WGMMA(232)
EMULATOR_WGMMA(240)
EMULATOR_WGMMA(248)
EMULATOR_WGMMA(256)

inline u32 redux_or_b32(u32 value, u32 lanes, EMULATOR_PLACE) {
  return emulator_redux_or(value, lanes, file, line);
}
inline u32 shfl_bfly_b32(u32 value, int lane_mask, EMULATOR_PLACE) {
  return emulator_shfl_bfly(value, lane_mask, file, line);
}
inline float opaque_f32(float value) { return value; }

inline void stmatrix_x4(u32 row_smem, const u32 (&r)[4], EMULATOR_PLACE) {
  emulator_stmatrix_x4(row_smem, r, file, line);
}
inline u32 ld_shared_b32(u32 address, EMULATOR_PLACE) {
  u32 value;
  emulator_ld_shared(&value, address, 4, "ld_shared_b32", file, line);
  return value;
}
inline void st_global_s32(int* address, int value, EMULATOR_PLACE) {
  emulator_st_global(address, &value, 4, "st_global_s32", file, line);
}
inline int atomic_add_global_s32(int* address, int value, EMULATOR_PLACE) {
  return emulator_atomic_add_global_s32(address, value, file, line);
}
