// Shared memory in regions, and the global buffers of the call: every access is checked against
// both.
#pragma once

#include "engine.h"

namespace emulator {

constexpr int kChunk = 16;  // bytes: the unit of cp.async and of an ldmatrix row
constexpr u32 kRegionShift =
    19;  // an address is (region + 1) << kRegionShift | offset; the offset stays physical,
constexpr u32 kMaxSmem =
    1u << 18;  // so swizzles see the same low bits, and half a window lies between regions

struct Region {
  int offset = 0, bytes = 0;
  const char* name = nullptr;
};

inline std::vector<Region> regions;     // of this block
inline std::vector<u8> smem;            // the block's dynamic shared memory
inline std::vector<u16> chunk_written;  // per chunk: which bytes hold a value (bit i: byte i)
inline std::vector<u16>
    chunk_in_flight;  // per chunk: 1 + the thread whose copy has not been waited for, or kTmaLoad
constexpr u16 kTmaLoad = 0xffff;
inline std::vector<u16>
    chunk_readers;  // per chunk: reads of the async proxy that have not been waited for

// The physical offset of [address, address + bytes), which must lie in one region and be a multiple
// of `bytes`. Anything else is a finding that ends the block.
u32 shared_offset(u32 address, int bytes, const Place& place);
// The same for any number of bytes, from a multiple of `alignment` on.
u32 shared_range(u32 address, int bytes, int alignment, const Place& place);
std::string describe_shared(u32 offset);

// Checks that the bytes hold values and that no copy into them is in flight.
void check_shared_read(u32 offset, int bytes, const Place& place);
// Checks that no copy into the bytes is in flight; from now on they hold values.
void check_shared_write(u32 offset, int bytes, const Place& place);

// Beyond the first, the passes one phase (the 8 rows of a matrix, 16 bytes each) takes over the 32
// banks. For ldmatrix and stmatrix.
u64 extra_passes(const u32* rows);

struct Buffer {
  u64 origin = 0;  // the caller's address
  u64 bytes = 0;
  bool writable = false;
  std::string name;
  u8* memory = nullptr;  // the engine's copy, congruent to `origin` modulo 256
  u64 shadow = 0;        // index of its first cell in the race detector (writable buffers)
};
inline std::vector<Buffer> buffers;

// The buffer that holds all of [pointer, pointer + bytes), or null.
Buffer* buffer_of(const void* pointer, u64 bytes);
std::string describe_global(const void* pointer);
// Reports an access outside of the buffers (or a store to an input, or a misaligned one). True if
// it may go on.
bool check_global(const void* pointer, int bytes, int alignment, bool store, const Place& place);

}  // namespace emulator
