// cp.async.bulk.tensor: boxes of 3 to 5 dimensions between global and shared memory.
//
// A load fills its destination with NaN at once and lands when the mbarrier's waiter needs it
// (mbarrier.cpp). A store reads its source at the thread's wait_group.read and reaches global
// memory at its wait_group: both as late as the rules allow.
#include "tma.h"

#include <cstring>

#include "api_sm90.h"
#include "mbarrier.h"

namespace emulator {
namespace {

constexpr u64 kTensorMapMagic = 0x70616d726f736e74ull;  // "tnsormap"

// A box: which tensor, and the coordinates of its first element.
struct Box {
  HostTensorMap map;
  int at[kMaxRank] = {};
  u32 smem = 0;  // offset of its first chunk before the swizzle
  int bytes = 0;
  Place place;

  u32 span() const { return 16u << map.swizzle; }
  int row_bytes() const { return static_cast<int>(map.box[0] * map.element_bytes); }
};

struct Load {
  Box box;
  bool readable = true;  // else its rows are outside the buffers and it lands as zeros
};
std::vector<std::vector<Load>> loads;  // by mbarrier, oldest first

struct Store {
  Box box;
  u32 group;
  bool read = false;
  bool writable = true;
  std::vector<u8> data = {};  // as it lay in shared memory
};
struct Stores {
  std::vector<Store> issued;  // not complete yet, oldest first
  u32 committed = 0;
};
Stores stores[kMaxThreads];

// Calls `row(pointer, first, valid, offset)` for each row of the box: `valid` bytes from `first` on
// lie inside the tensor (none in a row that is outside), `offset` is the row's place in the box.
template <class Row>
void for_each_row(const Box& box, const Row& row) {
  const HostTensorMap& map = box.map;
  const int rows = box.bytes / box.row_bytes();
  const long long inner_end =
      (static_cast<long long>(map.sizes[0]) - box.at[0]) * map.element_bytes;
  const long long inner_first = -static_cast<long long>(box.at[0]) * map.element_bytes;
  for (int r = 0; r < rows; ++r) {
    bool inside = true;
    long long from_base = static_cast<long long>(box.at[0]) * map.element_bytes;
    int rest = r;
    for (u32 d = 1; d < map.rank; ++d) {
      const long long c = box.at[d] + rest % static_cast<int>(map.box[d]);
      rest /= static_cast<int>(map.box[d]);
      inside = inside && c >= 0 && c < static_cast<long long>(map.sizes[d]);
      from_base += c * static_cast<long long>(map.strides[d - 1]);
    }
    const long long first = std::max(0ll, inner_first);
    const long long end = std::min<long long>(box.row_bytes(), inner_end);
    const int valid = inside && end > first ? static_cast<int>(end - first) : 0;
    // Integers: outside of the tensor the sum points nowhere.
    u8* pointer = reinterpret_cast<u8*>(map.base + static_cast<u64>(from_base + first));
    row(pointer, static_cast<int>(first), valid, r * box.row_bytes());
  }
}

[[noreturn]] void refuse(const Place& place, const std::string& what) {
  report("operand", place, what);
  abort_block();
}

Box box_of(const void* map, int rank, const int* at, u32 smem_address, const Place& place) {
  Box box;
  std::memcpy(&box.map, map, sizeof box.map);
  const HostTensorMap& m = box.map;
  box.place = place;
  if (m.magic != kTensorMapMagic) refuse(place, "the tensor map is none that the host has encoded");
  if (static_cast<int>(m.rank) != rank)
    refuse(place, format("the tensor map has %u dimensions, but the instruction %d", m.rank, rank));
  box.bytes = static_cast<int>(m.element_bytes);
  for (int d = 0; d < rank; ++d) {
    box.at[d] = at[d];
    if (m.box[d] < 1 || m.box[d] > 256)
      refuse(place, format("a box has 1 to 256 elements a dimension, but got %u", m.box[d]));
    box.bytes *= static_cast<int>(m.box[d]);
    if (d > 0 && m.strides[d - 1] % 16 != 0)
      refuse(place,
             format("the strides of a tensor map must be multiples of 16 bytes, but got %llu",
                    static_cast<unsigned long long>(m.strides[d - 1])));
  }
  if (m.base % 16 != 0) refuse(place, "the tensor must begin at a multiple of 16 bytes");
  if (m.swizzle > 3 || box.row_bytes() % 16 != 0 ||
      (m.swizzle != 0 && box.row_bytes() > static_cast<int>(box.span())))
    refuse(place,
           format("rows of a box must have a multiple of 16 bytes within the swizzle's %u, but "
                  "got %d",
                  box.span(), box.row_bytes()));
  if (static_cast<long long>(at[0]) * m.element_bytes % 16 != 0)
    refuse(place, format("the innermost coordinate must be a multiple of 16 bytes, but got %d "
                         "elements of %u bytes",
                         at[0], m.element_bytes));
  const int alignment = m.swizzle == 0 ? 128 : 128 << m.swizzle;
  box.smem = shared_range(smem_address, box.bytes, alignment, place);
  return box;
}

void land(const Load& load) {
  const Box& box = load.box;
  std::vector<u8> data(static_cast<std::size_t>(box.bytes), 0);
  if (load.readable) {
    for_each_row(box, [&](const u8* pointer, int first, int valid, int offset) {
      if (valid > 0)
        std::memcpy(&data[static_cast<std::size_t>(offset + first)], pointer,
                    static_cast<std::size_t>(valid));
    });
  }
  for (int i = 0; i < box.bytes; i += kChunk) {
    const u32 to = swizzled(box.smem + static_cast<u32>(i), box.span());
    std::memcpy(&smem[to], &data[static_cast<std::size_t>(i)], kChunk);
    chunk_written[to / kChunk] = 0xffff;
    chunk_in_flight[to / kChunk] = 0;
  }
}

void read_source(Store& store) {
  if (store.read) return;
  const Box& box = store.box;
  store.read = true;
  store.data.resize(static_cast<std::size_t>(box.bytes));
  for (int i = 0; i < box.bytes; i += kChunk) {
    const u32 from = swizzled(box.smem + static_cast<u32>(i), box.span());
    std::memcpy(&store.data[static_cast<std::size_t>(i)], &smem[from], kChunk);
    chunk_readers[from / kChunk] -= 1;
  }
}

void write_out(const Store& store) {
  if (!store.writable) return;
  for_each_row(store.box, [&](u8* pointer, int first, int valid, int offset) {
    if (valid > 0)
      std::memcpy(pointer, &store.data[static_cast<std::size_t>(offset + first)],
                  static_cast<std::size_t>(valid));
  });
}

// The newest group of the calling thread that must be done when `newest` may stay in flight.
u32 group_due(int newest, const Place& place) {
  if (newest < 0) refuse(place, "the number of groups that may stay in flight is negative");
  const u32 committed = stores[current].committed;
  return committed > static_cast<u32>(newest) ? committed - static_cast<u32>(newest) : 0;
}

void begin_block_of_tma() {
  loads.clear();
  for (int t = 0; t < run.threads; ++t) stores[t] = Stores{};
}

void end_thread_of_tma(int thread) {
  const Stores& mine = stores[thread];
  if (mine.issued.empty()) return;
  const Store& first = mine.issued.front();
  const char* how = first.group > mine.committed ? "never committed" : "not waited for";
  report("in-flight", first.box.place,
         format("%s ended with %zu TMA stores in flight, %s", describe_thread(thread).c_str(),
                mine.issued.size(), how));
}

void end_block_of_tma() {
  for (std::size_t i = 0; i < loads.size(); ++i) {
    if (loads[i].empty()) continue;
    report("in-flight", loads[i].front().box.place,
           format("the block ended with %zu TMA loads in flight that count on the mbarrier at %s",
                  loads[i].size(), describe_mbarrier(mbarriers[i]).c_str()));
  }
}

const bool tma_registered = add_feature({.block_begin = begin_block_of_tma,
                                         .thread_end = end_thread_of_tma,
                                         .block_end = end_block_of_tma});

}  // namespace

bool has_load(int barrier) {
  const std::size_t index = static_cast<std::size_t>(barrier);
  return index < loads.size() && !loads[index].empty();
}

bool deliver_load(int barrier) {
  if (!has_load(barrier)) return false;
  std::vector<Load>& waiting = loads[static_cast<std::size_t>(barrier)];
  std::size_t chosen = 0;
  if (run.schedule == Schedule::kReverse || run.schedule == Schedule::kReverseGreedy)
    chosen = waiting.size() - 1;
  if (run.schedule == Schedule::kRandom) chosen = next_random(static_cast<u32>(waiting.size()));
  const Load load = waiting[chosen];
  waiting.erase(waiting.begin() + static_cast<std::ptrdiff_t>(chosen));
  land(load);
  mbarrier_deliver(barrier, load.box.bytes);
  return true;
}

}  // namespace emulator

using namespace emulator;

extern "C" void emulator_prefetch_tensormap(const void* map, const char* file, int line) {
  const Place place{"prefetch_tensormap", file, line};
  count(place.primitive);
  u64 magic;
  std::memcpy(&magic, map, sizeof magic);
  if (magic != kTensorMapMagic) refuse(place, "the tensor map is none that the host has encoded");
}

extern "C" void emulator_tma_load(unsigned dst, const void* map, int rank, const int* at,
                                  unsigned barrier_address, const char* file, int line) {
  const Place place{"tma_load", file, line};
  count(place.primitive);
  Load load{box_of(map, rank, at, dst, place)};
  const Box& box = load.box;
  const int index = mbarrier_at(barrier_address, place);
  const Mbarrier& barrier = mbarriers[static_cast<std::size_t>(index)];
  if (!barrier.fenced) {
    report("fence", place,
           format("the copy engine uses the mbarrier at %s, but no fence.mbarrier_init follows its "
                  "initialisation by %s",
                  describe_mbarrier(barrier).c_str(),
                  describe_thread(barrier.initialised_by).c_str()));
  }
  for_each_row(box, [&](const u8* pointer, int, int valid, int) {
    if (valid > 0) load.readable &= check_global(pointer, valid, 1, false, place);
  });
  for (u32 to = box.smem; to < box.smem + static_cast<u32>(box.bytes); to += kChunk) {
    check_shared_write(to, kChunk, place);
    chunk_written[to / kChunk] = 0;
    chunk_in_flight[to / kChunk] = kTmaLoad;
  }
  race_proxy_shared(Access::kWrite, box.smem, box.bytes, Beside::kLoads, index, barrier.phase + 1,
                    current, place);
  std::memset(&smem[box.smem], 0xff, static_cast<std::size_t>(box.bytes));
  if (loads.size() <= static_cast<std::size_t>(index))
    loads.resize(static_cast<std::size_t>(index) + 1);
  loads[static_cast<std::size_t>(index)].push_back(load);
  maybe_let_others_run();
}

extern "C" void emulator_tma_store(const void* map, int rank, const int* at, unsigned src,
                                   const char* file, int line) {
  const Place place{"tma_store", file, line};
  count(place.primitive);
  Stores& mine = stores[current];
  Store store{box_of(map, rank, at, src, place), mine.committed + 1};
  const Box& box = store.box;
  for (int d = 0; d < rank; ++d) {
    if (at[d] < 0)
      refuse(place,
             format("a TMA store begins at a negative coordinate, on which the GPU traps: %d in "
                    "dimension %d; only a load may begin before the tensor",
                    at[d], d));
  }
  for_each_row(box, [&](const u8*, int first, int valid, int offset) {
    for (int i = 0; i < box.row_bytes(); i += kChunk) {
      const u32 from = swizzled(box.smem + static_cast<u32>(offset + i), box.span());
      // What lies outside the tensor is dropped and may hold anything.
      const bool stored = i + kChunk > first && i < first + valid;
      if (stored || chunk_in_flight[from / kChunk] != 0) check_shared_read(from, kChunk, place);
      chunk_readers[from / kChunk] += 1;
    }
  });
  race_proxy_shared(Access::kRead, box.smem, box.bytes, Beside::kStoreReads, current, store.group,
                    current, place);
  for_each_row(box, [&](const u8* pointer, int first, int valid, int) {
    if (valid == 0) return;
    if (first % kChunk != 0 || valid % kChunk != 0)
      refuse(place,
             format("a store must not be clipped inside 16 bytes, but %d bytes of a row of %d "
                    "lie in the tensor",
                    valid, box.row_bytes()));
    if (!check_global(pointer, valid, 1, true, place)) {
      store.writable = false;
      return;
    }
    race_proxy_global(Access::kWrite, pointer, valid, Beside::kStoreWrites, current, store.group,
                      current, place);
  });
  mine.issued.push_back(std::move(store));
  maybe_let_others_run();
}

extern "C" void emulator_bulk_commit_group(const char*, int) {
  count("bulk_commit_group");
  stores[current].committed += 1;
}

extern "C" void emulator_bulk_wait_group_read(int newest, const char* file, int line) {
  const Place place{"bulk_wait_group_read", file, line};
  count(place.primitive);
  const u32 due = group_due(newest, place);
  if (due == 0) return;
  for (Store& store : stores[current].issued) {
    if (store.group <= due) read_source(store);
  }
  race_proxy_done(Beside::kStoreReads, current, due, current);
  maybe_let_others_run();
}

extern "C" void emulator_bulk_wait_group(int newest, const char* file, int line) {
  const Place place{"bulk_wait_group", file, line};
  count(place.primitive);
  const u32 due = group_due(newest, place);
  if (due == 0) return;
  std::vector<Store> left;
  for (Store& store : stores[current].issued) {
    if (store.group <= due) {
      read_source(store);
      write_out(store);
    } else {
      left.push_back(std::move(store));
    }
  }
  stores[current].issued = std::move(left);
  race_proxy_done(Beside::kStoreReads, current, due, current);
  race_proxy_done(Beside::kStoreWrites, current, due, current);
  maybe_let_others_run();
}
