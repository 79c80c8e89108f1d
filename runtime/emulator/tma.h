// What the copy engine knows of a tensor, on the host: tensor_map.py writes it into the kernel's
// opaque 128 bytes.
#pragma once

#include "memory.h"

namespace emulator {

constexpr int kMaxRank = 5;

struct HostTensorMap {
  u64 magic;
  u64 base;  // address of element 0
  u32 rank;
  u32 element_bytes;
  u32 swizzle;  // 0 none, 1 32 bytes, 2 64 bytes, 3 128 bytes: the driver's numbers
  u32 reserved;
  u32 sizes[kMaxRank];  // innermost first
  u32 box[kMaxRank];
  u64 strides[kMaxRank - 1];  // bytes, of dimensions 1 and up
};
static_assert(sizeof(HostTensorMap) <= 128, "a tensor map has 128 bytes");

// The swizzles of TMA and wgmma exchange 16-byte chunks by bits of the absolute address.
// `span` is 16 (none), 32, 64 or 128.
inline u32 swizzled(u32 address, u32 span) {
  return address ^ (((address >> 7) & (span / 16 - 1)) << 4);
}

}  // namespace emulator
