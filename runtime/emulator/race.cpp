// Vector clocks and the shadow of shared memory and of writable global buffers, in cells of 4
// bytes.
#include "race.h"

#include "memory.h"

#if EMULATOR_RACE

#include <unordered_map>

#include "race_clocks.h"

namespace emulator {
namespace {

constexpr int kReadsInline = 16;  // every warp of the largest Hopper block reads K_j

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
  begin_block_of_clocks();
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

void report_race(const std::string& how, const std::string& where, int thread, const Place& place,
                 const Epoch& earlier) {
  const Place& other = places[earlier.place];
  report("race", place,
         format("%s: %s by %s, not ordered after %s by %s, %s", where.c_str(),
                describe(place).c_str(), describe_thread(thread).c_str(), describe(other).c_str(),
                describe_agent(earlier.agent).c_str(), how.c_str()));
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

// Who accesses: `thread`, or an engine of the async proxy that it has started.
struct Accessor {
  int thread;
  bool proxy;
};

bool write_ordered(const Epoch& write, const Accessor& who) {
  return who.proxy ? ordered_in_proxy(write, who.thread) : ordered(write, who.thread);
}

void remember_read(Cell& cell, const Accessor& who, const Epoch& mine) {
  const int inline_reads = cell.reads < kReadsInline ? cell.reads : kReadsInline;
  for (int i = 0; i < inline_reads; ++i) {
    // A read that this one comes after says nothing more: who has seen this one has seen that one.
    const bool after =
        who.proxy ? cell.read[i].agent == mine.agent : ordered(cell.read[i], who.thread);
    if (after) {
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
bool access(Cell& cell, Access kind, const Accessor& who, const Epoch& mine, const Place& place,
            const Where& where) {
  if (cell.write.clock != 0 && !write_ordered(cell.write, who)) {
    const char* what = kind == Access::kRead ? "a write it reads" : "a write it overwrites";
    const bool unfenced = who.proxy && ordered(cell.write, who.thread);
    report_race(unfenced ? format("%s: no fence.proxy.async lies between", what) : what, where(),
                who.thread, place, cell.write);
    cell.write.clock = 0;
    return false;
  }
  if (kind == Access::kRead) {
    remember_read(cell, who, mine);
    return true;
  }
  const Epoch* read = cell.reads == 0 ? nullptr : unseen_read(cell, who.thread);
  const Epoch found = read == nullptr ? Epoch{} : *read;
  if (cell.reads > kReadsInline) more_reads.erase(&cell);
  cell.reads = 0;
  cell.write = mine;
  if (read == nullptr) return true;
  report_race("a read of the old value", where(), who.thread, place, found);
  return false;
}

Cell& shared_cell(u32 index) {
  Cell& cell = shared_cells[index];
  const u32 block = static_cast<u32>(run.block) + 1;
  if (cell.block != block) {
    cell.block = block;
    cell.reads = 0;
    cell.write.clock = 0;
  }
  return cell;
}

void access_shared(Access kind, u32 offset, int bytes, const Accessor& who, const Epoch& mine,
                   const Place& place) {
  const auto where = [offset] { return describe_shared(offset); };
  for (u32 i = offset / 4; i <= (offset + static_cast<u32>(bytes) - 1) / 4; ++i) {
    if (!access(shared_cell(i), kind, who, mine, place, where)) return;
  }
}

void access_global(Access kind, const void* pointer, int bytes, const Accessor& who,
                   const Epoch& mine, const Place& place) {
  const Buffer* buffer = buffer_of(pointer, static_cast<u64>(bytes));
  if (buffer == nullptr || !buffer->writable) return;
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
      if (used) report_race(format("in block %u", other), where(), who.thread, place, earlier);
    }
    if (!access(cell, kind, who, mine, place, where)) return;
  }
}

Epoch epoch_of(int thread, const Place& place) {
  return {views[thread].own, static_cast<u16>(thread), place_id(place)};
}

Epoch epoch_of(Beside engine, int index, u32 number, const Place& place) {
  return {number, static_cast<u16>(agent_of(engine, index)), place_id(place)};
}

}  // namespace

void race_shared(Access kind, u32 offset, int bytes, int thread, const Place& place) {
  access_shared(kind, offset, bytes, {thread, false}, epoch_of(thread, place), place);
}

void race_global(Access kind, const void* pointer, int bytes, int thread, const Place& place) {
  access_global(kind, pointer, bytes, {thread, false}, epoch_of(thread, place), place);
}

void race_must_see(u32 offset, int bytes, int thread, const Place& place) {
  for (u32 i = offset / 4; i <= (offset + static_cast<u32>(bytes) - 1) / 4; ++i) {
    Cell& cell = shared_cell(i);
    if (cell.write.clock == 0 || ordered(cell.write, thread)) continue;
    report_race("a write it relies on", describe_shared(offset), thread, place, cell.write);
    cell.write.clock = 0;
    return;
  }
}

void race_async_write(u32 offset, int bytes, int thread, u32 group, const Place& place) {
  access_shared(Access::kWrite, offset, bytes, {thread, false},
                epoch_of(Beside::kCopies, thread, group, place), place);
}

void race_proxy_shared(Access kind, u32 offset, int bytes, Beside engine, int index, u32 number,
                       int thread, const Place& place) {
  access_shared(kind, offset, bytes, {thread, true}, epoch_of(engine, index, number, place), place);
}

void race_proxy_global(Access kind, const void* pointer, int bytes, Beside engine, int index,
                       u32 number, int thread, const Place& place) {
  access_global(kind, pointer, bytes, {thread, true}, epoch_of(engine, index, number, place),
                place);
}

}  // namespace emulator

#endif  // EMULATOR_RACE
