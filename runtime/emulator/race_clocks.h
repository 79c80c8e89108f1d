// The clocks of the race detector; part of race.cpp.
#pragma once

#include "race.h"

#if EMULATOR_RACE

#include <algorithm>

namespace emulator {
namespace {

// One access: whose, and its number there.
struct Epoch {
  u32 clock = 0;  // 0: no access
  u16 agent = 0;
  u16 place = 0;
};

// ---- Agents: 0..T-1 are the threads, then who works beside them, as they first appear ----------

struct Agent {
  Beside engine;
  int index;
};
std::vector<Agent> agents;
u16 agent_numbers[static_cast<int>(Beside::kStoreWrites) + 1][kMaxThreads];  // 0: none yet

// The agent's number, or 0 if it has done nothing.
u32 known_agent(Beside engine, int index) { return agent_numbers[static_cast<int>(engine)][index]; }

u32 agent_of(Beside engine, int index) {
  u16& number = agent_numbers[static_cast<int>(engine)][index];
  if (number == 0) {
    number = static_cast<u16>(agents.size());
    agents.push_back({engine, index});
  }
  return number;
}

std::string describe_agent(u32 agent) {
  const Agent& who = agents[agent];
  switch (who.engine) {
    case Beside::kNone:
      break;
    case Beside::kCopies:
      return "a copy of " + describe_thread(who.index);
    case Beside::kLoads:
      return "a TMA load";
    case Beside::kProducts:
      return format("a wgmma of warp %d", who.index);
    case Beside::kStoreReads:
    case Beside::kStoreWrites:
      return "a TMA store of " + describe_thread(who.index);
  }
  return describe_thread(who.index);
}

// ---- Views -------------------------------------------------------------------------------------

// What a thread has seen: `base`, shared with whom it met last, and its own entries, which run
// ahead of it. `_fenced`: those of them that the async proxy sees.
struct View {
  std::shared_ptr<const Clocks> base;
  u32 own = 1;
  u32 own_fenced = 0;
  u32 copies = 0;  // own copy groups waited for
  u32 copies_fenced = 0;
};
View views[kMaxThreads];

u32 entry_of(const std::vector<u32>& clock, u32 agent) {
  return agent < clock.size() ? clock[agent] : 0;
}

void raise_entry(std::vector<u32>& clock, u32 agent, u32 value) {
  if (value == 0) return;
  if (agent >= clock.size()) clock.resize(agent + 1);
  clock[agent] = std::max(clock[agent], value);
}

void raise_all(std::vector<u32>& clock, const std::vector<u32>& other) {
  if (other.size() > clock.size()) clock.resize(other.size());
  for (std::size_t i = 0; i < other.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

void raise_all(Clocks& clocks, const Clocks& other) {
  raise_all(clocks.generic, other.generic);
  raise_all(clocks.async, other.async);
}

// The entries that a view holds beside its base.
void raise_own(Clocks& clocks, int thread) {
  const View& view = views[thread];
  const u32 self = static_cast<u32>(thread);
  raise_entry(clocks.generic, self, view.own);
  raise_entry(clocks.async, self, view.own_fenced);
  if (view.copies != 0) {
    const u32 copies = agent_of(Beside::kCopies, thread);
    raise_entry(clocks.generic, copies, view.copies);
    raise_entry(clocks.async, copies, view.copies_fenced);
  }
}

// Whether `thread` has seen the access.
bool ordered(const Epoch& earlier, int thread) {
  if (earlier.agent == static_cast<u32>(thread)) return true;
  const View& view = views[thread];
  if (earlier.clock <= entry_of(view.base->generic, earlier.agent)) return true;
  return view.copies != 0 && earlier.agent == known_agent(Beside::kCopies, thread) &&
         earlier.clock <= view.copies;
}

// Whether what `thread` starts in the async proxy comes after the write.
bool ordered_in_proxy(const Epoch& earlier, int thread) {
  const View& view = views[thread];
  if (earlier.clock <= entry_of(view.base->async, earlier.agent)) return true;
  if (earlier.agent == static_cast<u32>(thread)) return earlier.clock <= view.own_fenced;
  return view.copies_fenced != 0 && earlier.agent == known_agent(Beside::kCopies, thread) &&
         earlier.clock <= view.copies_fenced;
}

void begin_block_of_clocks() {
  agents.clear();
  for (int t = 0; t < run.threads; ++t) agents.push_back({Beside::kNone, t});
  std::fill(&agent_numbers[0][0], &agent_numbers[0][0] + sizeof agent_numbers / sizeof(u16),
            u16{0});
  const auto empty = std::make_shared<const Clocks>();
  for (int t = 0; t < run.threads; ++t) {
    views[t] = View{};
    views[t].base = empty;
  }
}

// Whether `clock` has seen all that `other` has.
bool covers(const std::vector<u32>& clock, const std::vector<u32>& other) {
  for (std::size_t i = 0; i < other.size(); ++i) {
    if (other[i] > entry_of(clock, static_cast<u32>(i))) return false;
  }
  return true;
}

}  // namespace

void race_join(const int* members, int count) {
  auto joined = std::make_shared<Clocks>(*views[members[0]].base);
  const Clocks* merged = views[members[0]].base.get();
  for (int m = 1; m < count; ++m) {
    const Clocks* base = views[members[m]].base.get();
    if (base == merged) continue;  // neighbours mostly share one
    merged = base;
    raise_all(*joined, *base);
  }
  for (int m = 0; m < count; ++m) raise_own(*joined, members[m]);
  for (int m = 0; m < count; ++m) {
    View& view = views[members[m]];
    view.base = joined;
    view.own += 1;
  }
}

void race_release(SyncPoint& point, int thread) {
  View& view = views[thread];
  if (view.base != point.merged) {
    raise_all(point.left, *view.base);
    point.merged = view.base;
  }
  raise_own(point.left, thread);
  point.snapshot.reset();
  view.own += 1;
}

void race_acquire(SyncPoint& point, int thread) {
  static std::shared_ptr<const Clocks> last_base, last_taken, last_result;
  View& view = views[thread];
  if (point.snapshot == nullptr) point.snapshot = std::make_shared<const Clocks>(point.left);
  if (view.base == point.snapshot) return;
  if (view.base != last_base || point.snapshot != last_taken) {
    last_base = view.base;
    last_taken = point.snapshot;
    if (covers(last_taken->generic, last_base->generic) &&
        covers(last_taken->async, last_base->async)) {
      last_result = last_taken;
    } else {
      auto joined = std::make_shared<Clocks>(*last_base);
      raise_all(*joined, *last_taken);
      last_result = std::move(joined);
    }
  }
  view.base = last_result;
}

void race_async_done(int thread, u32 group) {
  View& view = views[thread];
  if (group > view.copies) view.copies = group;
}

void race_proxy_done(Beside engine, int index, u32 number, int thread) {
  static std::shared_ptr<const Clocks> last_base, last_result;
  static u32 last_agent = 0, last_number = 0;
  View& view = views[thread];
  const u32 agent = agent_of(engine, index);
  if (view.base != last_base || agent != last_agent || number != last_number) {
    auto raised = std::make_shared<Clocks>(*view.base);
    raise_entry(raised->generic, agent, number);
    raise_entry(raised->async, agent, number);
    last_base = view.base;
    last_agent = agent;
    last_number = number;
    last_result = std::move(raised);
  }
  view.base = last_result;
}

void race_proxy_fence(int thread) {
  static std::shared_ptr<const Clocks> last_base, last_result;
  View& view = views[thread];
  if (view.base != last_base) {
    auto raised = std::make_shared<Clocks>(*view.base);
    raise_all(raised->async, raised->generic);
    last_base = view.base;
    last_result = std::move(raised);
  }
  view.base = last_result;
  view.own_fenced = view.own;
  view.copies_fenced = view.copies;
  view.own += 1;
}

}  // namespace emulator

#endif  // EMULATOR_RACE
