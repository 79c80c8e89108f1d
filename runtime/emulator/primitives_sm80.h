// Host twins of the Ampere primitives: same names and meanings, executed by the engine.
#pragma once

#include "api.h"

// The place of the call in the kernel's text.
#define EMULATOR_PLACE const char *file = __builtin_FILE(), int line = __builtin_LINE()

typedef unsigned int u32;
typedef unsigned short u16;

inline int thread_index() { return emulator_thread_index(); }
inline long long block_index() { return emulator_block_index(); }

inline u32 smem_region(int offset, int bytes, const char* name, EMULATOR_PLACE) {
  return emulator_smem_region(offset, bytes, name, file, line);
}

inline void barrier_sync(EMULATOR_PLACE) { emulator_barrier_sync(0, 0, file, line); }
inline void warp_sync(EMULATOR_PLACE) { emulator_warp_sync(file, line); }

inline void cp_async_16(u32 dst_smem, const void* src_gmem, int src_bytes, EMULATOR_PLACE) {
  emulator_cp_async_16(dst_smem, src_gmem, src_bytes, file, line);
}
inline void cp_async_commit_group(EMULATOR_PLACE) { emulator_cp_async_commit_group(file, line); }
template <int N>
inline void cp_async_wait_group(EMULATOR_PLACE) {
  emulator_cp_async_wait_group(N, file, line);
}

inline void ldmatrix_x4(u32 (&r)[4], u32 row_smem, EMULATOR_PLACE) {
  emulator_ldmatrix_x4(r, row_smem, false, file, line);
}
inline void ldmatrix_x4_trans(u32 (&r)[4], u32 row_smem, EMULATOR_PLACE) {
  emulator_ldmatrix_x4(r, row_smem, true, file, line);
}

inline void mma_m16n8k16_f32_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, EMULATOR_PLACE) {
  emulator_mma_m16n8k16(d, a, b0, b1, false, file, line);
}
inline void mma_m16n8k16_f32_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1,
                                  EMULATOR_PLACE) {
  emulator_mma_m16n8k16(d, a, b0, b1, true, file, line);
}

inline u32 cvt_rn_f16x2_f32(float lo, float hi) { return emulator_cvt_rn_f16x2_f32(lo, hi); }
inline u32 cvt_rn_bf16x2_f32(float lo, float hi) { return emulator_cvt_rn_bf16x2_f32(lo, hi); }

inline float shfl_bfly_f32(float value, int lane_mask, EMULATOR_PLACE) {
  u32 bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  bits = emulator_shfl_bfly(bits, lane_mask, file, line);
  __builtin_memcpy(&value, &bits, sizeof bits);
  return value;
}
inline bool vote_any(bool predicate, EMULATOR_PLACE) {
  return emulator_vote_any(predicate, file, line);
}

inline void st_shared_b32(u32 address, u32 value, EMULATOR_PLACE) {
  emulator_st_shared(address, &value, 4, "st_shared_b32", file, line);
}
inline void ld_shared_v4(u32 (&r)[4], u32 address, EMULATOR_PLACE) {
  emulator_ld_shared(r, address, 16, "ld_shared_v4", file, line);
}

inline void st_global_v4(void* address, const u32 (&r)[4], EMULATOR_PLACE) {
  emulator_st_global(address, r, 16, "st_global_v4", file, line);
}
inline void st_global_f32(float* address, float value, EMULATOR_PLACE) {
  emulator_st_global(address, &value, 4, "st_global_f32", file, line);
}

inline float ld_global_f32(const float* address, EMULATOR_PLACE) {
  float value;
  emulator_ld_global(&value, address, 4, "ld_global_f32", file, line);
  return value;
}
inline int ld_global_s32(const int* address, EMULATOR_PLACE) {
  int value;
  emulator_ld_global(&value, address, 4, "ld_global_s32", file, line);
  return value;
}
inline long long ld_global_s64(const long long* address, EMULATOR_PLACE) {
  long long value;
  emulator_ld_global(&value, address, 8, "ld_global_s64", file, line);
  return value;
}
inline int ld_global_u8(const unsigned char* address, EMULATOR_PLACE) {
  unsigned char value;
  emulator_ld_global(&value, address, 1, "ld_global_u8", file, line);
  return value;
}
inline float ld_global_f16(const u16* address, EMULATOR_PLACE) {
  u16 bits;
  emulator_ld_global(&bits, address, 2, "ld_global_f16", file, line);
  return emulator_f16_to_f32(bits);
}
inline float ld_global_bf16(const u16* address, EMULATOR_PLACE) {
  u16 bits;
  emulator_ld_global(&bits, address, 2, "ld_global_bf16", file, line);
  return emulator_bf16_to_f32(bits);
}
