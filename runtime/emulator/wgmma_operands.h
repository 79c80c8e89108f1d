// Where a wgmma's matrix descriptor finds each 16-byte chunk of its operand.
#pragma once

#include "tma.h"

namespace emulator {

struct MatrixDescriptor {
  u32 start, lead, stride;  // bytes
  u32 span;                 // of the swizzle: 16 (none), 32, 64 or 128
  u32 base_offset;

  explicit MatrixDescriptor(u64 bits)
      : start(static_cast<u32>(bits & 0x3fff) << 4),
        lead(static_cast<u32>(bits >> 16 & 0x3fff) << 4),
        stride(static_cast<u32>(bits >> 32 & 0x3fff) << 4),
        span(bits >> 62 == 0 ? 16u : 256u >> (bits >> 62)),
        base_offset(static_cast<u32>(bits >> 49 & 7)) {}
};

// A 16-bit operand of 16 along K: `rows` along M or N. The chunks hold 8 elements along K of one
// row, or, in an operand with rows of k (`transposed`), 8 elements along M or N of one k.
struct MatrixOperand {
  MatrixDescriptor descriptor;
  int rows;
  int first_row;  // the warp's own rows of A begin here
  bool transposed;

  // Calls `chunk(offset, mn, k)` for each chunk, with its first element.
  template <class Chunk>
  void for_each_chunk(const Chunk& chunk) const {
    const MatrixDescriptor& d = descriptor;
    const u32 w = d.span / 16;
    const bool swizzle = d.span != 16;
    if (!transposed) {
      for (u32 mn = static_cast<u32>(first_row); mn < static_cast<u32>(first_row + rows); ++mn) {
        const u32 row = d.start + mn % 8 * d.span + mn / 8 * d.stride;
        for (u32 half = 0; half < 2; ++half)
          chunk(place_of(row + half * (swizzle ? 16u : d.lead)), static_cast<int>(mn),
                static_cast<int>(half * 8));
      }
      return;
    }
    for (u32 k = 0; k < 16; ++k) {
      const u32 line = d.start + k % 8 * d.span + k / 8 * (swizzle ? d.stride : d.lead);
      for (u32 m8 = static_cast<u32>(first_row) / 8; m8 < static_cast<u32>(first_row + rows) / 8;
           ++m8) {
        const u32 at = swizzle ? m8 % w * 16 + m8 / w * d.lead : m8 * d.stride;
        chunk(place_of(line + at), static_cast<int>(m8 * 8), static_cast<int>(k));
      }
    }
  }

 private:
  u32 place_of(u32 address) const { return swizzled(address & 0x3ffff, descriptor.span); }
};

}  // namespace emulator
