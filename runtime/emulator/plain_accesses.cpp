// The callbacks of -fsanitize=thread, of which this file is the whole run-time library in the race
// flavour: loads and stores of the kernel's text that go through no primitive. Only the thread's
// own stack, the arguments and the program's constants may be touched so.
#include "memory.h"
#include "race.h"

#if EMULATOR_RACE

#include <link.h>

#include <cstring>

extern "C" char __executable_start, _end;

namespace emulator {
namespace {

// How far the program was moved from the addresses it was linked for, which its debug information
// uses.
std::uintptr_t load_bias() {
  static const std::uintptr_t bias = [] {
    std::uintptr_t first = 0;
    dl_iterate_phdr(
        [](dl_phdr_info* info, std::size_t, void* to) {
          *static_cast<std::uintptr_t*>(to) = info->dlpi_addr;
          return 1;  // the first one is the program itself
        },
        &first);
    return first;
  }();
  return bias;
}

void plain_access(const void* address, std::size_t bytes, Access kind, const void* caller) {
  const char* at = static_cast<const char*>(address);
  const Fiber& fiber = threads[current].fiber;
  if (at >= fiber.stack && at + bytes <= fiber.stack + fiber.stack_bytes) return;
  if (at >= &__executable_start && at < &_end) return;
  const char* arguments = static_cast<const char*>(run.arguments);
  if (kind == Access::kRead && at >= arguments && at + bytes <= arguments + run.argument_bytes)
    return;
  const void* pc =
      reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(caller) - load_bias());
  const Place place{kind == Access::kRead ? "a plain load" : "a plain store", nullptr, 0, pc};
  for (int t = 0; t < run.threads; ++t) {
    const Fiber& other = threads[t].fiber;
    if (at < other.stack || at >= other.stack + other.stack_bytes) continue;
    report("race", place,
           format("%s touches the registers (the stack) of %s", describe_thread(current).c_str(),
                  describe_thread(t).c_str()));
    return;
  }
  if (check_global(address, static_cast<int>(bytes), 1, kind == Access::kWrite, place)) {
    race_global(kind, address, static_cast<int>(bytes), current, place);
  }
}

}  // namespace
}  // namespace emulator

using emulator::Access;
using emulator::plain_access;

#define EMULATOR_PC __builtin_return_address(0)
#define EMULATOR_TSAN(bytes)                                                                      \
  void __tsan_read##bytes(void* p) { plain_access(p, bytes, Access::kRead, EMULATOR_PC); }        \
  void __tsan_write##bytes(void* p) { plain_access(p, bytes, Access::kWrite, EMULATOR_PC); }      \
  void __tsan_unaligned_read##bytes(void* p) {                                                    \
    plain_access(p, bytes, Access::kRead, EMULATOR_PC);                                           \
  }                                                                                               \
  void __tsan_unaligned_write##bytes(void* p) {                                                   \
    plain_access(p, bytes, Access::kWrite, EMULATOR_PC);                                          \
  }                                                                                               \
  void __tsan_volatile_read##bytes(void* p) {                                                     \
    plain_access(p, bytes, Access::kRead, EMULATOR_PC);                                           \
  }                                                                                               \
  void __tsan_volatile_write##bytes(void* p) {                                                    \
    plain_access(p, bytes, Access::kWrite, EMULATOR_PC);                                          \
  }                                                                                               \
  void __tsan_read_write##bytes(void* p) { plain_access(p, bytes, Access::kWrite, EMULATOR_PC); } \
  void __tsan_unaligned_read_write##bytes(void* p) {                                              \
    plain_access(p, bytes, Access::kWrite, EMULATOR_PC);                                          \
  }

extern "C" {
EMULATOR_TSAN(1)
EMULATOR_TSAN(2)
EMULATOR_TSAN(4)
EMULATOR_TSAN(8)
EMULATOR_TSAN(16)
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_read_range(void* p, unsigned long bytes) {
  plain_access(p, bytes, Access::kRead, EMULATOR_PC);
}
void __tsan_write_range(void* p, unsigned long bytes) {
  plain_access(p, bytes, Access::kWrite, EMULATOR_PC);
}
void* __tsan_memcpy(void* to, const void* from, unsigned long bytes) {
  plain_access(from, bytes, Access::kRead, EMULATOR_PC);
  plain_access(to, bytes, Access::kWrite, EMULATOR_PC);
  return std::memcpy(to, from, bytes);
}
void* __tsan_memmove(void* to, const void* from, unsigned long bytes) {
  plain_access(from, bytes, Access::kRead, EMULATOR_PC);
  plain_access(to, bytes, Access::kWrite, EMULATOR_PC);
  return std::memmove(to, from, bytes);
}
void* __tsan_memset(void* to, int value, unsigned long bytes) {
  plain_access(to, bytes, Access::kWrite, EMULATOR_PC);
  return std::memset(to, value, bytes);
}
}

#endif  // EMULATOR_RACE
