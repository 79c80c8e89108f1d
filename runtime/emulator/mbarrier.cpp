// mbarrier.init, arrive, arrive.expect_tx and try_wait.parity.
//
// A wait is one instruction here: the thread sleeps until the phase is over. TMA loads land as late
// as the rules allow, when a phase needs nothing else: at the wait or, in greedy schedules, once no
// thread can run.
#include "mbarrier.h"

#include <cstring>

#include "api_sm90.h"

namespace emulator {
namespace {

constexpr u64 kMbarrierBits =
    0x7fbadbad7fbadbadull;  // what its bytes hold here, whatever its state

bool has_completed(const Mbarrier& barrier, u32 parity) { return (barrier.phase & 1) != parity; }

// Whether the present phase lacks nothing but bytes.
bool needs_bytes_alone(const Mbarrier& barrier) {
  return barrier.pending == 0 && barrier.bytes > 0;
}

void complete_if_due(Mbarrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  barrier.phase += 1;
  barrier.pending = barrier.count;
  barrier.completed = barrier.arriving;
  std::vector<Waiter> others;
  for (const Waiter& waiter : barrier.waiters) {
    if (has_completed(barrier, waiter.parity)) {
      make_ready(waiter.thread);
    } else {
      others.push_back(waiter);
    }
  }
  barrier.waiters = std::move(others);
}

bool deliver_late() {
  std::vector<int> due;
  for (std::size_t i = 0; i < mbarriers.size(); ++i) {
    const Mbarrier& barrier = mbarriers[i];
    const int index = static_cast<int>(i);
    if (!barrier.waiters.empty() && needs_bytes_alone(barrier) && has_load(index))
      due.push_back(index);
  }
  if (due.empty()) return false;
  const u32 chosen = run.schedule == Schedule::kRandom ? next_random(static_cast<u32>(due.size()))
                                                       : static_cast<u32>(due.size() - 1);
  return deliver_load(due[chosen]);
}

// In the schedules that take turns, loads land when somebody waits; the random one tosses a coin.
bool delivers_at_wait() {
  switch (run.schedule) {
    case Schedule::kGreedy:
    case Schedule::kReverseGreedy:
      return false;
    case Schedule::kRandom:
      return next_random(2) == 0;
    case Schedule::kRoundRobin:
    case Schedule::kReverse:
      break;
  }
  return true;
}

void describe_mbarriers(std::string& text) {
  for (const Mbarrier& barrier : mbarriers) {
    if (barrier.waiters.empty() && barrier.pending == barrier.count && barrier.bytes == 0) continue;
    text += format(
        "; mbarrier at %s is in phase %u (parity %u), needs %d of %d arrivals and %lld bytes",
        describe_mbarrier(barrier).c_str(), barrier.phase, barrier.phase & 1, barrier.pending,
        barrier.count, barrier.bytes);
    for (u32 parity = 0; parity < 2; ++parity) {
      std::vector<int> members;
      for (const Waiter& waiter : barrier.waiters) {
        if (waiter.parity == parity) members.push_back(waiter.thread);
      }
      if (!members.empty())
        text += format(", %zu threads wait for parity %u (%d to %d)", members.size(), parity,
                       members.front(), members.back());
    }
  }
}

void end_block_of_mbarriers() {
  for (const Mbarrier& barrier : mbarriers) {
    if (barrier.bytes == 0) continue;
    report("barrier", {"mbarrier_arrive_expect_tx", nullptr, 0},
           format("the block ended while the mbarrier at %s %s %lld bytes",
                  describe_mbarrier(barrier).c_str(),
                  barrier.bytes > 0 ? "still expects" : "has received beyond what was announced",
                  barrier.bytes > 0 ? barrier.bytes : -barrier.bytes));
  }
}

void begin_block_of_mbarriers() { mbarriers.clear(); }

const bool mbarriers_registered = add_feature({.block_begin = begin_block_of_mbarriers,
                                               .block_end = end_block_of_mbarriers,
                                               .idle = deliver_late,
                                               .describe = describe_mbarriers});

void arrive(u32 address, int announced, const Place& place) {
  Mbarrier& barrier = mbarriers[static_cast<std::size_t>(mbarrier_at(address, place))];
  if (announced < 0 || barrier.bytes + announced > kMaxExpected) {
    report("operand", place,
           format("an mbarrier can expect 0 to %d bytes in a phase, but the one at %s gets %lld",
                  kMaxExpected, describe_mbarrier(barrier).c_str(), barrier.bytes + announced));
    abort_block();
  }
  if (barrier.pending == 0) {
    report("barrier", place,
           format("%s arrives at the mbarrier at %s, which has had all %d arrivals of phase %u and"
                  " waits for %lld bytes",
                  describe_thread(current).c_str(), describe_mbarrier(barrier).c_str(),
                  barrier.count, barrier.phase, barrier.bytes));
    abort_block();
  }
  barrier.bytes += announced;
  barrier.pending -= 1;
  race_release(barrier.arriving, current);
  complete_if_due(barrier);
  maybe_let_others_run();
}

}  // namespace

std::string describe_mbarrier(const Mbarrier& barrier) { return describe_shared(barrier.offset); }

int mbarrier_at(u32 address, const Place& place) {
  const u32 offset = shared_offset(address, kMbarrierBytes, place);
  for (std::size_t i = 0; i < mbarriers.size(); ++i) {
    if (mbarriers[i].offset != offset) continue;
    u64 bits;
    std::memcpy(&bits, &smem[offset], sizeof bits);
    if (bits != kMbarrierBits) {
      report("barrier", place,
             format("the mbarrier at %s has been overwritten", describe_shared(offset).c_str()));
      abort_block();
    }
    race_must_see(offset, kMbarrierBytes, current, place);
    return static_cast<int>(i);
  }
  report("barrier", place,
         format("%s uses %s as an mbarrier, but nothing has initialised one there",
                describe_thread(current).c_str(), describe_shared(offset).c_str()));
  abort_block();
}

void mbarrier_deliver(int index, int bytes) {
  Mbarrier& barrier = mbarriers[static_cast<std::size_t>(index)];
  barrier.bytes -= bytes;
  complete_if_due(barrier);
}

}  // namespace emulator

using namespace emulator;

extern "C" void emulator_mbarrier_init(unsigned address, int arrivals, const char* file, int line) {
  const Place place{"mbarrier_init", file, line};
  count(place.primitive);
  const u32 offset = shared_offset(address, kMbarrierBytes, place);
  for (const Mbarrier& barrier : mbarriers) {
    if (barrier.offset != offset) continue;
    report("barrier", place,
           format("the mbarrier at %s is initialised twice", describe_shared(offset).c_str()));
    abort_block();
  }
  if (arrivals < 1 || arrivals > kMaxExpected) {
    report("operand", place,
           format("an mbarrier needs 1 to %d arrivals, but got %d", kMaxExpected, arrivals));
    abort_block();
  }
  check_shared_write(offset, kMbarrierBytes, place);
  race_shared(Access::kWrite, offset, kMbarrierBytes, current, place);
  std::memcpy(&smem[offset], &kMbarrierBits, kMbarrierBytes);
  Mbarrier barrier;
  barrier.offset = offset;
  barrier.count = barrier.pending = arrivals;
  barrier.initialised_by = current;
  mbarriers.push_back(std::move(barrier));
  maybe_let_others_run();
}

extern "C" void emulator_fence_mbarrier_init(const char*, int) {
  count("fence_mbarrier_init");
  for (Mbarrier& barrier : mbarriers) {
    if (barrier.initialised_by == current) barrier.fenced = true;
  }
}

extern "C" void emulator_fence_proxy_async(const char*, int) {
  count("fence_proxy_async");
  for (Mbarrier& barrier : mbarriers) {
    if (barrier.initialised_by == current) barrier.fenced = true;
  }
  race_proxy_fence(current);
}

extern "C" void emulator_mbarrier_arrive(unsigned barrier, const char* file, int line) {
  const Place place{"mbarrier_arrive", file, line};
  count(place.primitive);
  arrive(barrier, 0, place);
}

extern "C" void emulator_mbarrier_arrive_expect_tx(unsigned barrier, int bytes, const char* file,
                                                   int line) {
  const Place place{"mbarrier_arrive_expect_tx", file, line};
  count(place.primitive);
  arrive(barrier, bytes, place);
}

extern "C" void emulator_mbarrier_wait(unsigned address, unsigned parity, const char* file,
                                       int line) {
  const Place place{"mbarrier_wait", file, line};
  count(place.primitive);
  if (parity > 1) {
    report("operand", place, format("the parity of an mbarrier is 0 or 1, but got %u", parity));
    abort_block();
  }
  const int index = mbarrier_at(address, place);
  // mbarriers never moves after initialisation: blocks initialise before they wait.
  for (;;) {
    Mbarrier& barrier = mbarriers[static_cast<std::size_t>(index)];
    if (has_completed(barrier, parity)) break;
    if (needs_bytes_alone(barrier) && delivers_at_wait() && deliver_load(index)) continue;
    barrier.waiters.push_back({current, parity});
    wait_here(place);
  }
  Mbarrier& barrier = mbarriers[static_cast<std::size_t>(index)];
  race_acquire(barrier.completed, current);
  if (barrier.phase != 0) race_proxy_done(Beside::kLoads, index, barrier.phase, current);
  let_others_run();
}
