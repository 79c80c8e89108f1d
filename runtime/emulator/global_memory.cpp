// Global memory: the buffers of the call, with bounds, and the loads and stores on them.
#include <cstring>

#include "api.h"
#include "memory.h"
#include "race.h"

namespace emulator {

Buffer* buffer_of(const void* pointer, u64 bytes) {
  static std::size_t last = 0;
  const u8* first = static_cast<const u8*>(pointer);
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    Buffer& buffer = buffers[(last + i) % buffers.size()];
    if (first >= buffer.memory && first + bytes <= buffer.memory + buffer.bytes) {
      last = (last + i) % buffers.size();
      return &buffer;
    }
  }
  return nullptr;
}

std::string describe_global(const void* pointer) {
  const u8* at = static_cast<const u8*>(pointer);
  const Buffer* nearest = nullptr;
  long long distance = 0;
  for (const Buffer& buffer : buffers) {
    const long long first = at - buffer.memory;
    const long long beyond = first < 0 ? -first : first - static_cast<long long>(buffer.bytes);
    if (nearest == nullptr || beyond < distance) nearest = &buffer, distance = beyond;
  }
  if (at == nullptr) return "the null pointer";
  if (nearest == nullptr || distance > (1 << 24))
    return format("address %p, far from every buffer", pointer);
  return format("byte %lld of '%s', which has %llu bytes",
                static_cast<long long>(at - nearest->memory), nearest->name.c_str(),
                static_cast<unsigned long long>(nearest->bytes));
}

bool check_global(const void* pointer, int bytes, int alignment, bool store, const Place& place) {
  const Buffer* buffer = buffer_of(pointer, static_cast<u64>(bytes));
  if (buffer == nullptr) {
    report("out-of-bounds", place,
           format("%s %s %d bytes at %s", describe_thread(current).c_str(),
                  store ? "stores" : "loads", bytes, describe_global(pointer).c_str()));
    return false;
  }
  if (store && !buffer->writable) {
    report("read-only", place,
           format("%s stores to %s, an input", describe_thread(current).c_str(),
                  describe_global(pointer).c_str()));
    return false;
  }
  if (reinterpret_cast<std::uintptr_t>(pointer) % static_cast<std::uintptr_t>(alignment) != 0) {
    report("misaligned", place,
           format("%s %s %d bytes at %s: the address must be a multiple of %d",
                  describe_thread(current).c_str(), store ? "stores" : "loads", bytes,
                  describe_global(pointer).c_str(), alignment));
    return false;
  }
  return true;
}

}  // namespace emulator

using namespace emulator;

extern "C" void emulator_st_global(void* pointer, const void* values, int bytes, const char* name,
                                   const char* file, int line) {
  const Place place{name, file, line};
  count(name);
  if (!check_global(pointer, bytes, bytes, true, place)) return;
  race_global(Access::kWrite, pointer, bytes, current, place);
  std::memcpy(pointer, values, static_cast<std::size_t>(bytes));
  maybe_let_others_run();
}

extern "C" void emulator_ld_global(void* values, const void* pointer, int bytes, const char* name,
                                   const char* file, int line) {
  const Place place{name, file, line};
  count(name);
  if (!check_global(pointer, bytes, bytes, false, place)) {
    std::memset(values, 0xff, static_cast<std::size_t>(bytes));
    return;
  }
  race_global(Access::kRead, pointer, bytes, current, place);
  std::memcpy(values, pointer, static_cast<std::size_t>(bytes));
  maybe_let_others_run();
}
