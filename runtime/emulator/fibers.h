// One stack a CUDA thread, switched by hand on x86-64 and by ucontext elsewhere.
#pragma once

#include <cstddef>

#if !defined(__x86_64__) || !defined(__linux__) || EMULATOR_UCONTEXT
#define EMULATOR_USES_UCONTEXT 1
#include <ucontext.h>
#else
#define EMULATOR_USES_UCONTEXT 0
#endif

namespace emulator {

struct Fiber {
  char* stack = nullptr;  // lowest usable byte; a guard page lies below
  std::size_t stack_bytes = 0;
  void* fake_stack = nullptr;  // AddressSanitizer's
#if EMULATOR_USES_UCONTEXT
  ucontext_t context;
#else
  void* stack_pointer = nullptr;
#endif
};

// Gives fibers[0..count) a stack each. `stride` is sizeof of the struct that begins with the Fiber.
void allocate_stacks(Fiber* first, std::size_t stride, int count);
// The next switch to `fiber` starts `entry`, which must never return.
void prepare(Fiber& fiber, int index, void (*entry)());
void switch_fiber(Fiber& from, Fiber& to);
// To be called first by an entry function.
void entered_fiber();
// The stack of the process's main thread, which calls the first switch.
void describe_main_stack(Fiber& fiber);

}  // namespace emulator
