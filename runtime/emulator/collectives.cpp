// Instructions that several threads execute together: block barriers, warp_sync, shuffles, votes
// and reductions.
#include "api.h"
#include "engine.h"
#include "race.h"

namespace emulator {
namespace {

constexpr int kBarriers = 16;

struct Barrier {
  int expected = 0;
  std::vector<int> arrived;  // threads that wait
  int passed = 0;            // threads that have arrived and gone on
  SyncPoint left_by_passed;

  int arrivals() const { return static_cast<int>(arrived.size()) + passed; }
};
Barrier barriers[kBarriers];

void begin_block_of_barriers() {
  for (Barrier& barrier : barriers) barrier = Barrier{};
}

void describe_barriers(std::string& text) {
  for (int id = 0; id < kBarriers; ++id) {
    if (barriers[id].arrivals() == 0) continue;
    text += format("; barrier %d has %d of %d arrivals", id, barriers[id].arrivals(),
                   barriers[id].expected);
  }
}

const bool barriers_registered =
    add_feature({.block_begin = begin_block_of_barriers, .describe = describe_barriers});

// bar.sync is aligned: all lanes of a warp must execute the same one.
void check_aligned(const Place& place) {
  Warp& warp = warps[warp_of(current)];
  const u32 lane = 1u << lane_of(current);
  if (warp.at_barrier == 0 || warp.at_barrier == kAllLanes) {
    warp.at_barrier = 0;
    warp.barrier = place;
  } else if (!(warp.barrier == place)) {
    report("divergence", place,
           format("lanes of one warp are at different barriers: %s is at %s, others at %s",
                  describe_thread(current).c_str(), describe(place).c_str(),
                  describe(warp.barrier).c_str()));
    abort_block();
  }
  warp.at_barrier |= lane;
}

Barrier& barrier_of(int id, int participants, const Place& place) {
  const int expected = participants == 0 ? run.threads : participants;
  if (id < 0 || id >= kBarriers || expected <= 0 || expected % kWarpSize != 0 ||
      expected > run.threads) {
    report("barrier", place,
           format("a barrier needs an id below %d and whole warps of the block's %d threads, but "
                  "got id %d, %d threads",
                  kBarriers, run.threads, id, expected));
    abort_block();
  }
  Barrier& barrier = barriers[id];
  if (barrier.arrivals() == 0) barrier.expected = expected;
  if (barrier.expected != expected) {
    report("barrier", place,
           format("barrier %d is used with %d and with %d threads at once", id, barrier.expected,
                  expected));
    abort_block();
  }
  return barrier;
}

void complete(Barrier& barrier) {
  const std::vector<int> released = std::move(barrier.arrived);
  if (!released.empty()) race_join(released.data(), static_cast<int>(released.size()));
  if (barrier.passed != 0) {
    for (int thread : released) race_acquire(barrier.left_by_passed, thread);
  }
  for (int thread : released) make_ready(thread);
  barrier = Barrier{};
}

}  // namespace

bool meet(const Place& place, void* operands) {
  Warp& warp = warps[warp_of(current)];
  if (warp.arrived == 0) {
    warp.meeting = place;
    count(place.primitive);
  } else if (!(warp.meeting == place)) {
    report("divergence", place,
           format("lanes of one warp execute different warp-wide instructions: %s is at %s, others "
                  "wait at %s",
                  describe_thread(current).c_str(), describe(place).c_str(),
                  describe(warp.meeting).c_str()));
    abort_block();
  }
  warp.operands[lane_of(current)] = operands;
  warp.arrived |= 1u << lane_of(current);
  if (warp.arrived == kAllLanes) return true;
  wait_here(place);
  return false;
}

void meeting_done() {
  const int warp = warp_of(current);
  warps[warp].arrived = 0;
  for (int lane = 0; lane < kWarpSize; ++lane) make_ready(warp * kWarpSize + lane);
  let_others_run();
}

}  // namespace emulator

using namespace emulator;

extern "C" void emulator_barrier_sync(int id, int participants, const char* file, int line) {
  const Place place{participants == 0 ? "barrier_sync" : "named_barrier_sync", file, line};
  count(place.primitive);
  check_aligned(place);
  Barrier& barrier = barrier_of(id, participants, place);
  barrier.arrived.push_back(current);
  if (barrier.arrivals() < barrier.expected) {
    wait_here(place);
    return;
  }
  complete(barrier);
  let_others_run();
}

extern "C" void emulator_barrier_arrive(int id, int participants, const char* file, int line) {
  const Place place{"named_barrier_arrive", file, line};
  if (!meet(place, nullptr)) return;
  Barrier& barrier = barrier_of(id, participants, place);
  for (int lane = 0; lane < kWarpSize; ++lane)
    race_release(barrier.left_by_passed, warp_of(current) * kWarpSize + lane);
  barrier.passed += kWarpSize;
  if (barrier.arrivals() > barrier.expected) {
    report("barrier", place,
           format("barrier %d of %d threads gets %d arrivals", id, barrier.expected,
                  barrier.arrivals()));
    abort_block();
  }
  if (barrier.arrivals() == barrier.expected) {
    if (barrier.arrived.empty())
      report(
          "barrier", place,
          format("barrier %d completes with arrivals alone: the threads that should wait at it do "
                 "not",
                 id));
    complete(barrier);
  }
  meeting_done();
}

extern "C" void emulator_warp_sync(const char* file, int line) {
  if (!meet({"warp_sync", file, line}, nullptr)) return;
  int members[kWarpSize];
  for (int lane = 0; lane < kWarpSize; ++lane) members[lane] = warp_of(current) * kWarpSize + lane;
  race_join(members, kWarpSize);
  meeting_done();
}

extern "C" unsigned emulator_shfl_bfly(unsigned value, int lane_mask, const char* file, int line) {
  struct Operands {
    unsigned value, result;
    int lane_mask;
  } mine{value, 0, lane_mask};
  const Place place{"shfl_bfly_f32", file, line};
  if (meet(place, &mine)) {
    void** operands = warps[warp_of(current)].operands;
    if (lane_mask < 0 || lane_mask >= kWarpSize) {
      report("operand", place,
             format("the lane mask of a shuffle must be 0 to 31, but got %d", lane_mask));
      abort_block();
    }
    for (int lane = 0; lane < kWarpSize; ++lane) {
      Operands* to = static_cast<Operands*>(operands[lane]);
      to->result = static_cast<Operands*>(operands[lane ^ (to->lane_mask & 31)])->value;
    }
    meeting_done();
  }
  return mine.result;
}

extern "C" bool emulator_vote_any(bool predicate, const char* file, int line) {
  struct Operands {
    bool predicate, result;
  } mine{predicate, false};
  if (meet({"vote_any", file, line}, &mine)) {
    void** operands = warps[warp_of(current)].operands;
    bool any = false;
    for (int lane = 0; lane < kWarpSize; ++lane)
      any |= static_cast<Operands*>(operands[lane])->predicate;
    for (int lane = 0; lane < kWarpSize; ++lane)
      static_cast<Operands*>(operands[lane])->result = any;
    meeting_done();
  }
  return mine.result;
}

extern "C" unsigned emulator_redux_or(unsigned value, unsigned lanes, const char* file, int line) {
  if (lanes == 1u << lane_of(current)) return value;  // the only lane that is here
  if (lanes != ~0u) {
    report("operand", {"redux_or_b32", file, line},
           format("lanes must be all 32 or the caller's own, but got %#x", lanes));
    abort_block();
  }
  struct Operands {
    unsigned value, result;
  } mine{value, 0};
  if (meet({"redux_or_b32", file, line}, &mine)) {
    void** operands = warps[warp_of(current)].operands;
    unsigned all = 0;
    for (int lane = 0; lane < kWarpSize; ++lane)
      all |= static_cast<Operands*>(operands[lane])->value;
    for (int lane = 0; lane < kWarpSize; ++lane)
      static_cast<Operands*>(operands[lane])->result = all;
    meeting_done();
  }
  return mine.result;
}
