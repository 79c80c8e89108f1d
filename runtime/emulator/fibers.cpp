// Fibers: stacks with guard pages, and the switch between them.
#include "fibers.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#if EMULATOR_ASAN
extern "C" {
void __sanitizer_start_switch_fiber(void** fake_stack_save, const void* bottom, std::size_t size);
void __sanitizer_finish_switch_fiber(void* fake_stack_save, const void** bottom, std::size_t* size);
void __asan_unpoison_memory_region(void const volatile* address, std::size_t size);
}
#endif

#if !EMULATOR_USES_UCONTEXT
// Saves the callee-saved registers of the System V ABI on the old stack and takes them from the new
// one.
extern "C" void emulator_switch_stack(void** save, void* load);
__asm__(R"(
.text
.p2align 4
.type emulator_switch_stack, @function
emulator_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulator_switch_stack, .-emulator_switch_stack
)");
#endif

namespace emulator {

// AddressSanitizer's red zones make frames several times larger.
constexpr std::size_t kStackBytes = (EMULATOR_ASAN ? 512 : 128) * 1024;

void allocate_stacks(Fiber* first, std::size_t stride, int count) {
  const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t bytes = page + kStackBytes;
  void* memory = mmap(nullptr, bytes * static_cast<std::size_t>(count), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    std::perror("emulator: mmap of the stacks");
    std::exit(3);
  }
  for (int i = 0; i < count; ++i) {
    char* low = static_cast<char*>(memory) + bytes * static_cast<std::size_t>(i);
    mprotect(low, page, PROT_NONE);
    Fiber& fiber = *reinterpret_cast<Fiber*>(reinterpret_cast<char*>(first) +
                                             stride * static_cast<std::size_t>(i));
    fiber.stack = low + page;
    fiber.stack_bytes = kStackBytes;
  }
}

void prepare(Fiber& fiber, int index, void (*entry)()) {
#if EMULATOR_ASAN
  __asan_unpoison_memory_region(fiber.stack,
                                fiber.stack_bytes);  // frames a previous block abandoned
  fiber.fake_stack = nullptr;
#endif
#if EMULATOR_USES_UCONTEXT
  (void)index;
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack;
  fiber.context.uc_stack.ss_size = fiber.stack_bytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, entry, 0);
#else
  // Tops staggered by cache lines: equal frames of all threads would fall on the same cache sets.
  const std::size_t stagger = static_cast<std::size_t>(index % 64) * 576;
  std::uintptr_t top = reinterpret_cast<std::uintptr_t>(fiber.stack + fiber.stack_bytes - stagger) &
                       ~std::uintptr_t{63};
  void** slot = reinterpret_cast<void**>(top);
  *--slot = nullptr;  // the entry function sees rsp % 16 == 8, as after a call
  *--slot = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--slot = nullptr;  // rbp, rbx, r12 to r15
  fiber.stack_pointer = slot;
#endif
}

void switch_fiber(Fiber& from, Fiber& to) {
#if EMULATOR_ASAN
  __sanitizer_start_switch_fiber(&from.fake_stack, to.stack, to.stack_bytes);
#endif
#if EMULATOR_USES_UCONTEXT
  swapcontext(&from.context, &to.context);
#else
  emulator_switch_stack(&from.stack_pointer, to.stack_pointer);
#endif
#if EMULATOR_ASAN
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

void entered_fiber() {
#if EMULATOR_ASAN
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
}

void describe_main_stack(Fiber& fiber) {
#if defined(__linux__)
  pthread_attr_t attributes;
  void* low = nullptr;
  std::size_t bytes = 0;
  pthread_getattr_np(pthread_self(), &attributes);
  pthread_attr_getstack(&attributes, &low, &bytes);
  pthread_attr_destroy(&attributes);
  fiber.stack = static_cast<char*>(low);
  fiber.stack_bytes = bytes;
#else
  fiber.stack_bytes = pthread_get_stacksize_np(pthread_self());
  fiber.stack = static_cast<char*>(pthread_get_stackaddr_np(pthread_self())) - fiber.stack_bytes;
#endif
}

}  // namespace emulator
