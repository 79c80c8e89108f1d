// Vector clocks and the shadow of shared memory and of writable global buffers, in cells of 4
// bytes.
#include "race.h"

#include "memory.h"

#if EMULATOR_RACE

#include <memory>
#include <unordered_map>

namespace emulator {
namespace {

// ---- Clocks: agents 0..T-1 are the threads, T..2T-1 their asynchronous copies
// -----------------------------------

using Clock = std::vector<u32>;

// What a thread has seen: `base`, shared with whom it met last, and its own two entries, which run
// ahead of it.
struct View {
  std::shared_ptr<const Clock> base;
  u32 own = 1;
  u32 copies = 0;  // own copy groups waited for
};
View views[kMaxThreads];

u32 seen(int thread, u32 agent) {
  const View& view = views[thread];
  if (agent == static_cast<u32>(thread)) return view.own;
  if (agent == static_cast<u32>(run.threads + thread)) return view.copies;
  return (*view.base)[agent];
}

// ---- Shadow
// ------------------------------------------------------------------------------------------------------

struct Epoch {
  u32 clock = 0;  // 0: no access
  u16 agent = 0;
  u16 place = 0;
};

constexpr int kReadsInline = 8;

struct Cell {
  u32 block = 0;  // 1 + the block whose accesses these are
  u16 reads = 0;
  Epoch write;
  Epoch read[kReadsInline];
};

std::vector<Cell> shared_cells;
std::vector<Cell> global_cells;
std::unordered_map<const Cell*, std::vector<Epoch>> more_reads;  // beyond kReadsInline

std::vector<Place> places;

u16 place_id(const Place& place) {
  struct Entry {
    Place place;
    u16 id = 0;
    bool used = false;
  };
  static Entry recent[1024];
  const std::size_t hash = static_cast<std::size_t>(place.line) * 31 +
                           reinterpret_cast<std::uintptr_t>(place.primitive) / 8 +
                           reinterpret_cast<std::uintptr_t>(place.pc);
  Entry& entry = recent[hash % 1024];
  if (entry.used && entry.place == place) return entry.id;
  std::size_t id = 0;
  while (id < places.size() && !(places[id] == place)) ++id;
  if (id == places.size() && id < 0xffff) places.push_back(place);
  entry = {place, static_cast<u16>(id), true};
  return entry.id;
}

void begin_block_of_race() {
  const auto empty = std::make_shared<const Clock>(static_cast<std::size_t>(2 * run.threads), 0u);
  for (int t = 0; t < run.threads; ++t) views[t] = View{empty, 1, 0};
  shared_cells.resize(static_cast<std::size_t>(run.smem_bytes + kChunk) / 4);
  more_reads.clear();
}

void begin_run_of_race() {
  u64 cells = 0;
  for (Buffer& buffer : buffers) {
    if (!buffer.writable) continue;
    buffer.shadow = cells;
    cells += buffer.bytes / 4 + 2;
  }
  global_cells.resize(cells);
}

const bool race_registered =
    add_feature({.run_begin = begin_run_of_race, .block_begin = begin_block_of_race});

std::string describe_agent(u32 agent) {
  if (agent < static_cast<u32>(run.threads)) return describe_thread(static_cast<int>(agent));
  return "a copy of " + describe_thread(static_cast<int>(agent) - run.threads);
}

void report_race(const char* how, const std::string& where, int thread, const Place& place,
                 const Epoch& earlier) {
  const Place& other = places[earlier.place];
  report("race", place,
         format("%s: %s by %s, not ordered after %s by %s, %s", where.c_str(),
                describe(place).c_str(), describe_thread(thread).c_str(), describe(other).c_str(),
                describe_agent(earlier.agent).c_str(), how));
}

bool ordered(const Epoch& earlier, int thread) {
  return earlier.agent == static_cast<u32>(thread) || earlier.clock <= seen(thread, earlier.agent);
}

// The first read of the cell that `thread` has not seen, or null.
const Epoch* unseen_read(const Cell& cell, int thread) {
  const int inline_reads = cell.reads < kReadsInline ? cell.reads : kReadsInline;
  for (int i = 0; i < inline_reads; ++i) {
    if (!ordered(cell.read[i], thread)) return &cell.read[i];
  }
  if (cell.reads > kReadsInline) {
    for (const Epoch& read : more_reads[&cell]) {
      if (!ordered(read, thread)) return &read;
    }
  }
  return nullptr;
}

void remember_read(Cell& cell, int thread, const Epoch& mine) {
  const int inline_reads = cell.reads < kReadsInline ? cell.reads : kReadsInline;
  for (int i = 0; i < inline_reads; ++i) {
    // A read that this one comes after says nothing more: who has seen this one has seen that one.
    if (ordered(cell.read[i], thread)) {
      cell.read[i] = mine;
      return;
    }
  }
  if (cell.reads < kReadsInline) {
    cell.read[cell.reads++] = mine;
    return;
  }
  more_reads[&cell].push_back(mine);
  cell.reads = kReadsInline + 1;
}

// Returns false after a finding, so that one access gives one.
template <class Where>
bool access(Cell& cell, Access kind, int thread, const Epoch& mine, const Place& place,
            const Where& where) {
  if (cell.write.clock != 0 && !ordered(cell.write, thread)) {
    report_race(kind == Access::kRead ? "a write it reads" : "a write it overwrites", where(),
                thread, place, cell.write);
    cell.write.clock = 0;
    return false;
  }
  if (kind == Access::kRead) {
    remember_read(cell, thread, mine);
    return true;
  }
  const Epoch* read = cell.reads == 0 ? nullptr : unseen_read(cell, thread);
  const Epoch found = read == nullptr ? Epoch{} : *read;
  if (cell.reads > kReadsInline) more_reads.erase(&cell);
  cell.reads = 0;
  cell.write = mine;
  if (read == nullptr) return true;
  report_race("a read of the old value", where(), thread, place, found);
  return false;
}

void access_shared(Access kind, u32 offset, int bytes, int thread, const Epoch& mine,
                   const Place& place) {
  const auto where = [offset] { return describe_shared(offset); };
  const u32 block = static_cast<u32>(run.block) + 1;
  for (u32 i = offset / 4; i <= (offset + static_cast<u32>(bytes) - 1) / 4; ++i) {
    Cell& cell = shared_cells[i];
    if (cell.block != block) {
      cell.block = block;
      cell.reads = 0;
      cell.write.clock = 0;
    }
    if (!access(cell, kind, thread, mine, place, where)) return;
  }
}

}  // namespace

void race_shared(Access kind, u32 offset, int bytes, int thread, const Place& place) {
  access_shared(kind, offset, bytes, thread,
                {views[thread].own, static_cast<u16>(thread), place_id(place)}, place);
}

void race_async_write(u32 offset, int bytes, int thread, u32 group, const Place& place) {
  const Epoch mine{group, static_cast<u16>(run.threads + thread), place_id(place)};
  access_shared(Access::kWrite, offset, bytes, thread, mine, place);
}

void race_async_done(int thread, u32 group) {
  if (group > views[thread].copies) views[thread].copies = group;
}

void race_global(Access kind, const void* pointer, int bytes, int thread, const Place& place) {
  const Buffer* buffer = buffer_of(pointer, static_cast<u64>(bytes));
  if (buffer == nullptr || !buffer->writable) return;
  const Epoch mine{views[thread].own, static_cast<u16>(thread), place_id(place)};
  const u64 offset = static_cast<u64>(static_cast<const u8*>(pointer) - buffer->memory);
  const auto where = [pointer] { return describe_global(pointer); };
  const u32 block = static_cast<u32>(run.block) + 1;
  for (u64 i = offset / 4; i <= (offset + static_cast<u64>(bytes) - 1) / 4; ++i) {
    Cell& cell = global_cells[buffer->shadow + i];
    if (cell.block != block) {
      // Nothing orders two blocks of a launch.
      const bool used =
          cell.block != 0 && (cell.write.clock != 0 || (kind == Access::kWrite && cell.reads != 0));
      const Epoch earlier = cell.write.clock != 0 ? cell.write : cell.read[0];
      const u32 other = cell.block - 1;
      cell.block = block;
      cell.reads = 0;
      cell.write.clock = 0;
      if (used) report_race(format("in block %u", other).c_str(), where(), thread, place, earlier);
    }
    if (!access(cell, kind, thread, mine, place, where)) return;
  }
}

void race_join(const int* members, int count) {
  auto joined = std::make_shared<Clock>(*views[members[0]].base);
  const Clock* merged = views[members[0]].base.get();
  for (int m = 1; m < count; ++m) {
    const Clock* base = views[members[m]].base.get();
    if (base == merged) continue;  // neighbours mostly share one
    merged = base;
    for (std::size_t i = 0; i < joined->size(); ++i)
      (*joined)[i] = std::max((*joined)[i], (*base)[i]);
  }
  for (int m = 0; m < count; ++m) {
    const std::size_t thread = static_cast<std::size_t>(members[m]);
    (*joined)[thread] = std::max((*joined)[thread], views[thread].own);
    u32& copies = (*joined)[static_cast<std::size_t>(run.threads) + thread];
    copies = std::max(copies, views[thread].copies);
  }
  for (int m = 0; m < count; ++m) {
    View& view = views[members[m]];
    view.base = joined;
    view.own += 1;
  }
}

}  // namespace emulator

#endif  // EMULATOR_RACE
