// The engine's shared state: the block that runs, its threads and warps, and how features add to
// them.
//
// All sources are compiled as one translation unit (build.py writes it), once a flavour:
// EMULATOR_RACE and EMULATOR_ASAN are 0 or 1. Names must therefore differ between files even where
// they are local to one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fibers.h"

namespace emulator {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

constexpr int kWarpSize = 32;
constexpr int kMaxWarps = 32;
constexpr int kMaxThreads = kWarpSize * kMaxWarps;
constexpr u32 kAllLanes = 0xffffffffu;
constexpr bool kRace = EMULATOR_RACE != 0;

// Which instruction, where in the kernel's text. `pc` is set instead of the file for a plain load
// or store.
struct Place {
  const char* primitive = nullptr;
  const char* file = nullptr;
  int line = 0;
  const void* pc = nullptr;

  bool operator==(const Place& other) const {
    return line == other.line && primitive == other.primitive && file == other.file &&
           pc == other.pc;
  }
};

enum class Schedule : u32 { kRoundRobin, kReverse, kGreedy, kReverseGreedy, kRandom };

struct Thread {
  Fiber fiber;
  bool exited = false;
  bool waits = false;  // at `place`, for others
  Place place;         // the last instruction that may block
};

struct Warp {
  u32 ready = 0;    // lanes that can run
  u32 arrived = 0;  // lanes at the warp-wide instruction `meeting`
  Place meeting;
  void* operands[kWarpSize] = {};  // what each arrived lane brought
  Place barrier;  // where the first lane arrived at the block barrier of this phase
  u32 at_barrier = 0;
};

struct Run {
  int threads = 0;
  int warps = 0;
  int smem_bytes = 0;
  long long block = 0;  // the block that runs now
  long long grid = 0;   // blocks of the launch
  Schedule schedule = Schedule::kRoundRobin;
  u64 random = 1;
  const void* arguments = nullptr;
  u32 argument_bytes = 0;
  bool aborted = false;  // a finding after which the block cannot go on
};

inline Run run;
inline Thread threads[kMaxThreads];
inline Warp warps[kMaxWarps];
inline int current = 0;  // the thread that runs

inline int warp_of(int thread) { return thread / kWarpSize; }
inline int lane_of(int thread) { return thread % kWarpSize; }

// What a group of instructions adds to the engine. Registered by a static object in its own file.
struct Feature {
  void (*run_begin)() = nullptr;
  void (*block_begin)() = nullptr;
  void (*thread_end)(int thread) = nullptr;
  void (*block_end)() = nullptr;  // all threads have ended: what is left over is a finding
  bool (*idle)() = nullptr;       // no thread can run: finish late work; true if some was left
  void (*describe)(std::string& text) = nullptr;  // state that explains a deadlock
};
inline std::vector<Feature>& features() {
  static std::vector<Feature> list;
  return list;
}
inline bool add_feature(const Feature& feature) {
  features().push_back(feature);
  return true;
}

// scheduler.cpp
void run_block(long long block);
void make_ready(int thread);
void wait_here(const Place& place);  // returns when another thread has called make_ready(current)
void let_others_run();            // a point where the schedule may switch; the thread stays ready
void maybe_let_others_run();      // the same, for the random schedule alone
[[noreturn]] void abort_block();  // ends the block after a finding that leaves no way on
u32 next_random(u32 below);

// reports.cpp
struct Finding {
  const char* kind;
  std::string message;
  Place place;
  int thread = -1;
};
void report(const char* kind, const Place& place, const std::string& message);
std::string describe(const Place& place);
std::string describe_thread(int thread);
std::string format(const char* text, ...) __attribute__((format(printf, 1, 2)));
void count(const char* name, u64 n = 1);
void count_conflicts(const Place& place, u64 extra);
void write_report();
void install_crash_handlers(const char* report_path);

// collectives.cpp: each lane brings operands; the last one to arrive gets true and executes for all
// of them, reading warps[..].operands, then calls `meeting_done`.
bool meet(const Place& place, void* operands);
void meeting_done();

}  // namespace emulator
