// mbarriers: objects of 8 bytes in shared memory, each with a phase, arrivals that it waits for and
// bytes that it expects.
#pragma once

#include "memory.h"
#include "race.h"

namespace emulator {

constexpr int kMbarrierBytes = 8;
constexpr int kMaxExpected = (1 << 20) - 1;  // arrivals, and bytes, of one phase

struct Waiter {
  int thread;
  u32 parity;
};

struct Mbarrier {
  u32 offset = 0;
  int count = 0;        // arrivals of a phase
  int pending = 0;      // arrivals that this phase still needs
  long long bytes = 0;  // announced minus delivered
  u32 phase = 0;        // completed phases
  bool fenced = false;  // the copy engine sees the initialisation
  int initialised_by = -1;
  std::vector<Waiter> waiters;
  SyncPoint arriving;   // what those who arrived have done
  SyncPoint completed;  // the same, of completed phases
};

inline std::vector<Mbarrier> mbarriers;  // of this block

// The index of the initialised barrier at `address`; anything else is a finding that ends the
// block.
int mbarrier_at(u32 address, const Place& place);
std::string describe_mbarrier(const Mbarrier& barrier);
// Counts delivered bytes and completes the phase if nothing is missing.
void mbarrier_deliver(int index, int bytes);

// tma.cpp: delivers one load that counts on the barrier. False if there is none.
bool deliver_load(int barrier);
bool has_load(int barrier);

}  // namespace emulator
