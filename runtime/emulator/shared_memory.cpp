// Shared memory: regions, poison, and the checks of each load and store.
#include <cstring>

#include "api.h"
#include "memory.h"
#include "race.h"

namespace emulator {
namespace {

void begin_block_of_shared_memory() {
  regions.clear();
  smem.assign(static_cast<std::size_t>(run.smem_bytes),
              0xff);  // NaN in every 16-bit and 32-bit float type
  const std::size_t chunks = (smem.size() + kChunk - 1) / kChunk;
  chunk_written.assign(chunks, 0);
  chunk_in_flight.assign(chunks, 0);
  chunk_readers.assign(chunks, 0);
}

const bool shared_memory_registered = add_feature({.block_begin = begin_block_of_shared_memory});

u16 byte_mask(u32 offset, int bytes) {
  return static_cast<u16>(((1u << bytes) - 1) << (offset % kChunk));
}

void check_not_in_flight(u32 offset, const char* what, const Place& place) {
  const int owner = chunk_in_flight[offset / kChunk];
  if (owner == 0) return;
  const std::string copy =
      owner == kTmaLoad ? std::string("a TMA load") : "a cp.async of " + describe_thread(owner - 1);
  report("in-flight", place,
         format("%s %s %s while %s into these bytes has not been waited for",
                describe_thread(current).c_str(), what, describe_shared(offset).c_str(),
                copy.c_str()));
}

}  // namespace

u32 shared_offset(u32 address, int bytes, const Place& place) {
  return shared_range(address, bytes, bytes, place);
}

u32 shared_range(u32 address, int bytes, int alignment, const Place& place) {
  const u32 tag = address >> kRegionShift;
  const u32 offset = address & ((1u << kRegionShift) - 1);
  if (tag == 0 || tag > regions.size()) {
    report("out-of-bounds", place,
           format("%s uses the shared-memory address 0x%x, which no region holds",
                  describe_thread(current).c_str(), address));
    abort_block();
  }
  const Region& region = regions[tag - 1];
  // Signed: an address below the region wraps to the end of the window before it, so its tag may
  // differ by one.
  const long long first = static_cast<long long>(offset) - region.offset;
  if (first < 0 || first + bytes > region.bytes) {
    report("out-of-bounds", place,
           format("%s uses bytes %lld to %lld of the shared-memory region '%s', which has %d",
                  describe_thread(current).c_str(), first, first + bytes - 1, region.name,
                  region.bytes));
    abort_block();
  }
  if (offset % static_cast<u32>(alignment) != 0) {
    report("misaligned", place,
           format("%s uses %d bytes at %s: the address must be a multiple of %d",
                  describe_thread(current).c_str(), bytes, describe_shared(offset).c_str(),
                  alignment));
    abort_block();
  }
  return offset;
}

std::string describe_shared(u32 offset) {
  for (const Region& region : regions) {
    const int first = static_cast<int>(offset) - region.offset;
    if (first >= 0 && first < region.bytes)
      return format("byte %d of shared-memory region '%s'", first, region.name);
  }
  return format("byte %u of shared memory", offset);
}

void check_shared_read(u32 offset, int bytes, const Place& place) {
  const u16 needed = byte_mask(offset, bytes);
  if (chunk_in_flight[offset / kChunk] != 0) {
    check_not_in_flight(offset, "reads", place);
  } else if ((chunk_written[offset / kChunk] & needed) != needed) {
    report("uninitialised", place,
           format("%s reads %s, which nothing has written", describe_thread(current).c_str(),
                  describe_shared(offset).c_str()));
  }
}

void check_shared_write(u32 offset, int bytes, const Place& place) {
  check_not_in_flight(offset, "writes", place);
  if (chunk_readers[offset / kChunk] != 0) {
    report(
        "in-flight", place,
        format("%s overwrites %s while a wgmma or TMA store that reads it has not been waited for",
               describe_thread(current).c_str(), describe_shared(offset).c_str()));
  }
  chunk_written[offset / kChunk] |= byte_mask(offset, bytes);
}

}  // namespace emulator

using namespace emulator;

extern "C" unsigned emulator_smem_region(int offset, int bytes, const char* name, const char* file,
                                         int line) {
  for (std::size_t i = 0; i < regions.size(); ++i) {
    const Region& region = regions[i];
    if (region.offset == offset && region.bytes == bytes && std::strcmp(region.name, name) == 0) {
      return (static_cast<u32>(i) + 1) << kRegionShift | static_cast<u32>(offset);
    }
  }
  if (offset < 0 || bytes <= 0 || offset % kChunk != 0 ||
      offset + static_cast<long long>(bytes) > run.smem_bytes) {
    report(
        "out-of-bounds", {"smem_region", file, line},
        format("region '%s' takes bytes %d to %lld, but the launch has %d bytes of shared memory "
               "(and regions start at"
               " multiples of %d)",
               name, offset, static_cast<long long>(offset) + bytes - 1, run.smem_bytes, kChunk));
    abort_block();
  }
  regions.push_back({offset, bytes, name});
  return static_cast<u32>(regions.size()) << kRegionShift | static_cast<u32>(offset);
}

extern "C" void emulator_st_shared(unsigned address, const void* values, int bytes,
                                   const char* name, const char* file, int line) {
  const Place place{name, file, line};
  count(name);
  const u32 offset = shared_offset(address, bytes, place);
  check_shared_write(offset, bytes, place);
  race_shared(Access::kWrite, offset, bytes, current, place);
  std::memcpy(&smem[offset], values, static_cast<std::size_t>(bytes));
  maybe_let_others_run();
}

extern "C" void emulator_ld_shared(void* values, unsigned address, int bytes, const char* name,
                                   const char* file, int line) {
  const Place place{name, file, line};
  count(name);
  const u32 offset = shared_offset(address, bytes, place);
  check_shared_read(offset, bytes, place);
  race_shared(Access::kRead, offset, bytes, current, place);
  std::memcpy(values, &smem[offset], static_cast<std::size_t>(bytes));
  maybe_let_others_run();
}
