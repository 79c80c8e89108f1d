// The arithmetic of one warp's part of a wgmma: D (16, N) = A (16, 16) B (16, N) [+ D].
#pragma once

#include <cstring>

#include "numbers.h"
#include "wgmma_operands.h"

namespace emulator {
namespace {

constexpr int kRowsOfWarp = 16;
constexpr int kDepth = 16;
constexpr int kMaxColumns = 256;

float widened(u16 bits, bool bf16) { return bf16 ? bf16_to_f32(bits) : f16_to_f32(bits); }

// The operands in shared memory, widened: A by row from the warp's first one on, B by k.
void fetch_a(const MatrixOperand& operand, bool bf16, float (*to)[kDepth]) {
  operand.for_each_chunk([&](u32 offset, int mn, int k) {
    u16 halves[8];
    std::memcpy(halves, &smem[offset], sizeof halves);
    for (int i = 0; i < 8; ++i) to[mn - operand.first_row][k + i] = widened(halves[i], bf16);
  });
}

EMULATOR_CLONES void widen_all(const u16* from, float* to, int count, bool bf16) {
  if (bf16) {
    for (int i = 0; i < count; ++i) to[i] = bf16_to_f32(from[i]);
  } else {
    for (int i = 0; i < count; ++i) to[i] = f16_to_f32(from[i]);
  }
}

void fetch_b(const MatrixOperand& operand, bool bf16, float (*to)[kMaxColumns]) {
  static u16 halves[kDepth][kMaxColumns];
  operand.for_each_chunk([&](u32 offset, int mn, int k) {
    u16 chunk[8];
    std::memcpy(chunk, &smem[offset], sizeof chunk);
    if (operand.transposed) {
      std::memcpy(&halves[k][mn], chunk, sizeof chunk);
    } else {
      for (int i = 0; i < 8; ++i) halves[k + i][mn] = chunk[i];
    }
  });
  for (int k = 0; k < kDepth; ++k) widen_all(halves[k], to[k], operand.rows, bf16);
}

// Products are exact in fp32; the sum runs over k in order, then D.
EMULATOR_CLONES void accumulate(const float (*a)[kDepth], const float (*b)[kMaxColumns],
                                int columns, bool keep, float* values) {
  for (int row = 0; row < kRowsOfWarp; ++row) {
    float total[kMaxColumns];
    for (int n = 0; n < columns; ++n) total[n] = 0.0f;
    for (int k = 0; k < kDepth; ++k) {
      for (int n = 0; n < columns; ++n) total[n] += a[row][k] * b[k][n];
    }
    float* d = values + row * columns;
    for (int n = 0; n < columns; ++n) d[n] = keep ? d[n] + total[n] : total[n];
  }
}

// Register j of lane l, g = l/4, q = 2*(l%4): row g + 8*((j/2)%2), column 8*(j/4) + q + j%2.
int place_in_tile(int lane, int j, int columns) {
  return (lane / 4 + 8 * (j / 2 % 2)) * columns + 8 * (j / 4) + 2 * (lane % 4) + j % 2;
}

}  // namespace
}  // namespace emulator
