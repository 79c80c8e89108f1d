// Which thread runs next, and what it means when none can.
#include "api.h"
#include "engine.h"

namespace emulator {
namespace {

Fiber main_fiber;
u32 ready_warps = 0;  // warps with at least one ready lane

int lowest_bit(u32 mask) { return __builtin_ctz(mask); }
int highest_bit(u32 mask) { return 31 - __builtin_clz(mask); }

// The first set bit at or above `start`, going round.
int next_bit(u32 mask, int start) {
  start &= 31;
  const u32 turned = start == 0 ? mask : (mask >> start) | (mask << (32 - start));
  return (lowest_bit(turned) + start) & 31;
}

// The first set bit at or below `start`, going round.
int previous_bit(u32 mask, int start) {
  start &= 31;
  const int up = 31 - start;
  const u32 turned = up == 0 ? mask : (mask << up) | (mask >> (32 - up));
  return (highest_bit(turned) - up) & 31;
}

int random_bit(u32 mask) {
  u32 skip = next_random(static_cast<u32>(__builtin_popcount(mask)));
  while (skip-- > 0) mask &= mask - 1;
  return lowest_bit(mask);
}

// The thread to run next, or -1. `leave_warp`: prefer another warp, where the schedule takes turns.
int pick(bool leave_warp) {
  if (ready_warps == 0) return -1;
  const int here = warp_of(current);
  const bool stay = !leave_warp && warps[here].ready != 0;
  int warp = here;
  switch (run.schedule) {
    case Schedule::kRoundRobin:
      if (!stay) warp = next_bit(ready_warps, here + 1);
      return warp * kWarpSize + lowest_bit(warps[warp].ready);
    case Schedule::kReverse:
      if (!stay) warp = previous_bit(ready_warps, here + 31);
      return warp * kWarpSize + highest_bit(warps[warp].ready);
    case Schedule::kGreedy:
      warp = lowest_bit(ready_warps);
      return warp * kWarpSize + lowest_bit(warps[warp].ready);
    case Schedule::kReverseGreedy:
      warp = highest_bit(ready_warps);
      return warp * kWarpSize + highest_bit(warps[warp].ready);
    case Schedule::kRandom:
      break;
  }
  warp = random_bit(ready_warps);
  return warp * kWarpSize + random_bit(warps[warp].ready);
}

// The thread to run next when the current one cannot; late work goes on where no thread can.
int pick_another() {
  int next = pick(false);
  while (next < 0) {
    bool worked = false;
    for (const Feature& feature : features())
      worked = worked || (feature.idle != nullptr && feature.idle());
    if (!worked) return -1;
    next = pick(false);
  }
  return next;
}

void clear_ready(int thread) {
  Warp& warp = warps[warp_of(thread)];
  warp.ready &= ~(1u << lane_of(thread));
  if (warp.ready == 0) ready_warps &= ~(1u << warp_of(thread));
}

void switch_to(int next) {
  Fiber& from = threads[current].fiber;
  if (next < 0) {
    switch_fiber(from, main_fiber);
  } else if (next != current) {
    const int me = current;
    current = next;
    switch_fiber(from, threads[next].fiber);
    current = me;
  }
}

void thread_main() {
  entered_fiber();
  emulator_kernel(run.arguments);
  for (const Feature& feature : features()) {
    if (feature.thread_end != nullptr) feature.thread_end(current);
  }
  threads[current].exited = true;
  clear_ready(current);
  switch_to(pick_another());
  __builtin_unreachable();
}

std::string list_threads(const std::vector<int>& members) {
  std::string text;
  for (std::size_t i = 0; i < members.size();) {
    std::size_t last = i;
    while (last + 1 < members.size() && members[last + 1] == members[last] + 1) ++last;
    text += text.empty() ? "" : ",";
    text += last == i ? format("%d", members[i]) : format("%d-%d", members[i], members[last]);
    i = last + 1;
  }
  return text;
}

void report_deadlock() {
  std::vector<std::pair<Place, std::vector<int>>> groups;
  std::vector<int> exited;
  for (int t = 0; t < run.threads; ++t) {
    if (threads[t].exited) {
      exited.push_back(t);
      continue;
    }
    auto group = groups.begin();
    while (group != groups.end() && !(group->first == threads[t].place)) ++group;
    if (group == groups.end()) group = groups.insert(group, {threads[t].place, {}});
    group->second.push_back(t);
  }
  std::string text = "no thread of the block can run";
  for (const auto& [place, members] : groups) {
    text += format("; %zu wait at %s: threads %s", members.size(), describe(place).c_str(),
                   list_threads(members).c_str());
  }
  if (!exited.empty())
    text += format("; %zu have ended: threads %s", exited.size(), list_threads(exited).c_str());
  for (const Feature& feature : features()) {
    if (feature.describe != nullptr) feature.describe(text);
  }
  report("deadlock", groups.empty() ? Place{} : groups.front().first, text);
}

}  // namespace

u32 next_random(u32 below) {
  run.random ^= run.random << 13;
  run.random ^= run.random >> 7;
  run.random ^= run.random << 17;
  return static_cast<u32>((run.random >> 32) * below >> 32);
}

void make_ready(int thread) {
  threads[thread].waits = false;
  warps[warp_of(thread)].ready |= 1u << lane_of(thread);
  ready_warps |= 1u << warp_of(thread);
}

void wait_here(const Place& place) {
  threads[current].place = place;
  threads[current].waits = true;
  clear_ready(current);
  switch_to(pick_another());
}

void let_others_run() {
  switch (run.schedule) {
    case Schedule::kGreedy:
    case Schedule::kReverseGreedy:
      return;
    case Schedule::kRandom:
      if (next_random(2) == 0) return;
      break;
    case Schedule::kRoundRobin:
    case Schedule::kReverse:
      break;
  }
  switch_to(pick(true));
}

void maybe_let_others_run() {
  if (run.schedule == Schedule::kRandom && next_random(8) == 0) switch_to(pick(true));
}

void abort_block() {
  run.aborted = true;
  switch_to(-1);
  __builtin_unreachable();
}

void run_block(long long block) {
  run.block = block;
  ready_warps = 0;
  for (int w = 0; w < kMaxWarps; ++w) warps[w] = Warp{};
  for (int t = 0; t < run.threads; ++t) {
    threads[t].exited = false;
    threads[t].place = Place{};
    prepare(threads[t].fiber, t, thread_main);
    make_ready(t);
  }
  for (const Feature& feature : features()) {
    if (feature.block_begin != nullptr) feature.block_begin();
  }
  if (main_fiber.stack == nullptr) describe_main_stack(main_fiber);
  current = 0;
  current = pick(false);
  switch_fiber(main_fiber, threads[current].fiber);
  if (run.aborted) return;
  for (int t = 0; t < run.threads; ++t) {
    if (!threads[t].exited) {
      report_deadlock();
      run.aborted = true;
      return;
    }
  }
  for (const Feature& feature : features()) {
    if (feature.block_end != nullptr) feature.block_end();
  }
}

}  // namespace emulator

extern "C" int emulator_thread_index() { return emulator::current; }
extern "C" long long emulator_block_index() { return emulator::run.block; }
extern "C" long long emulator_grid_size() { return emulator::run.grid; }
