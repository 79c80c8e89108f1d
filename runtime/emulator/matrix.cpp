// ldmatrix and mma.m16n8k16, executed once a warp from what the lanes brought.
#include <cstring>

#include "api.h"
#include "memory.h"
#include "numbers.h"
#include "race.h"

namespace emulator {
namespace {

struct LdmatrixOperands {
  u32* r;
  u32 row;
};

struct MmaOperands {
  float* d;
  const u32* a;
  u32 b[2];
};

// Lane l, g = l/4, q = 2*(l%4). Register r of A, half h: row g + 8*(r&1), k = q + h + 8*(r>>1).
// Register r of B, half h: k = q + h + 8r, column g. Register r of D: row g + 8*(r>>1), column q +
// (r&1). Products are exact in fp32; the sum runs over k in order, then D.
EMULATOR_CLONES void multiply(const u32 (*a)[4], const u32 (*b)[2], float (*d)[4], bool bf16) {
  float a_rows[16][16], b_rows[16][8], sums[16][8];
  u32 a_bits[16][16], b_bits[16][8];
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const int g = lane / 4, q = 2 * (lane % 4);
    for (int r = 0; r < 4; ++r) {
      const int row = g + 8 * (r & 1), k = q + 8 * (r >> 1);
      a_bits[row][k] = a[lane][r] & 0xffffu;
      a_bits[row][k + 1] = a[lane][r] >> 16;
      sums[g + 8 * (r >> 1)][q + (r & 1)] = d[lane][r];
    }
    for (int r = 0; r < 2; ++r) {
      b_bits[q + 8 * r][g] = b[lane][r] & 0xffffu;
      b_bits[q + 8 * r + 1][g] = b[lane][r] >> 16;
    }
  }
  if (bf16) {
    for (int i = 0; i < 256; ++i) a_rows[i / 16][i % 16] = bf16_to_f32(a_bits[i / 16][i % 16]);
    for (int i = 0; i < 128; ++i) b_rows[i / 8][i % 8] = bf16_to_f32(b_bits[i / 8][i % 8]);
  } else {
    for (int i = 0; i < 256; ++i) a_rows[i / 16][i % 16] = f16_to_f32(a_bits[i / 16][i % 16]);
    for (int i = 0; i < 128; ++i) b_rows[i / 8][i % 8] = f16_to_f32(b_bits[i / 8][i % 8]);
  }
  for (int row = 0; row < 16; ++row) {
    float total[8] = {};
    for (int k = 0; k < 16; ++k) {
      for (int n = 0; n < 8; ++n) total[n] += a_rows[row][k] * b_rows[k][n];
    }
    for (int n = 0; n < 8; ++n) sums[row][n] += total[n];
  }
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const int g = lane / 4, q = 2 * (lane % 4);
    for (int r = 0; r < 4; ++r) d[lane][r] = sums[g + 8 * (r >> 1)][q + (r & 1)];
  }
}

}  // namespace

u64 extra_passes(const u32* rows) {
  int worst = 1;
  for (int i = 0; i < 8; ++i) {
    int same_banks = 0;
    for (int j = 0; j < 8; ++j) {
      if (((rows[i] ^ rows[j]) / kChunk) % 8 != 0) continue;
      bool counted = false;  // equal rows are read once
      for (int k = 0; k < j; ++k) counted |= rows[k] == rows[j];
      same_banks += counted ? 0 : 1;
    }
    worst = same_banks > worst ? same_banks : worst;
  }
  return static_cast<u64>(worst - 1);
}

}  // namespace emulator

using namespace emulator;

// Lane 8m+i brings the address of row i of matrix m. Register m of lane l, g = l/4, q = 2*(l%4), is
// M[g][q] | M[g][q+1] << 16, and transposed M[q][g] | M[q+1][g] << 16.
extern "C" void emulator_ldmatrix_x4(unsigned* r, unsigned row, bool transposed, const char* file,
                                     int line) {
  LdmatrixOperands mine{r, row};
  const Place place{transposed ? "ldmatrix_x4_trans" : "ldmatrix_x4", file, line};
  const u32 offset = shared_offset(row, kChunk, place);
  check_shared_read(offset, kChunk, place);
  race_shared(Access::kRead, offset, kChunk, current, place);
  if (!meet(place, &mine)) return;
  void** operands = warps[warp_of(current)].operands;
  u16 matrices[kWarpSize][8];
  u32 rows[kWarpSize];
  for (int lane = 0; lane < kWarpSize; ++lane) {
    rows[lane] = static_cast<LdmatrixOperands*>(operands[lane])->row & ((1u << kRegionShift) - 1);
    std::memcpy(matrices[lane], &smem[rows[lane]], kChunk);
  }
  for (int matrix = 0; matrix < 4; ++matrix)
    count_conflicts(place, extra_passes(&rows[8 * matrix]));
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const int g = lane / 4, q = 2 * (lane % 4);
    u32* to = static_cast<LdmatrixOperands*>(operands[lane])->r;
    for (int m = 0; m < 4; ++m) {
      const u16(*matrix)[8] = &matrices[8 * m];
      to[m] = transposed ? matrix[q][g] | static_cast<u32>(matrix[q + 1][g]) << 16
                         : matrix[g][q] | static_cast<u32>(matrix[g][q + 1]) << 16;
    }
  }
  meeting_done();
}

extern "C" void emulator_mma_m16n8k16(float* d, const unsigned* a, unsigned b0, unsigned b1,
                                      bool bf16, const char* file, int line) {
  MmaOperands mine{d, a, {b0, b1}};
  if (!meet({bf16 ? "mma_m16n8k16_f32_bf16" : "mma_m16n8k16_f32_f16", file, line}, &mine)) return;
  void** operands = warps[warp_of(current)].operands;
  u32 a_all[kWarpSize][4], b_all[kWarpSize][2];
  float d_all[kWarpSize][4];
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const MmaOperands& from = *static_cast<MmaOperands*>(operands[lane]);
    std::memcpy(a_all[lane], from.a, sizeof a_all[lane]);
    std::memcpy(b_all[lane], from.b, sizeof b_all[lane]);
    std::memcpy(d_all[lane], from.d, sizeof d_all[lane]);
  }
  multiply(a_all, b_all, d_all, bf16);
  for (int lane = 0; lane < kWarpSize; ++lane) {
    std::memcpy(static_cast<MmaOperands*>(operands[lane])->d, d_all[lane], sizeof d_all[lane]);
  }
  meeting_done();
}

extern "C" unsigned emulator_cvt_rn_f16x2_f32(float lo, float hi) {
  count("cvt_rn_f16x2_f32");
  return f32_to_f16(lo) | f32_to_f16(hi) << 16;
}

extern "C" unsigned emulator_cvt_rn_bf16x2_f32(float lo, float hi) {
  count("cvt_rn_bf16x2_f32");
  return f32_to_bf16(lo) | f32_to_bf16(hi) << 16;
}

extern "C" float emulator_f16_to_f32(unsigned short bits) { return f16_to_f32(bits); }
extern "C" float emulator_bf16_to_f32(unsigned short bits) { return bf16_to_f32(bits); }
