// cp.async, as late as the rules allow: the destination is NaN from the issue until the thread's
// own wait.
#include <cstring>

#include "api.h"
#include "memory.h"
#include "race.h"

namespace emulator {
namespace {

struct Copy {
  u32 offset;
  const void* source;
  int source_bytes;
  Place place;
};

struct Copies {
  std::vector<Copy> issued;  // not delivered yet, oldest first
  std::vector<std::size_t>
      group_end;      // per committed and not completed group: end of its copies in `issued`
  u32 committed = 0;  // groups of this thread so far
};
Copies copies[kMaxThreads];

void begin_block_of_copies() {
  for (int t = 0; t < run.threads; ++t) copies[t] = Copies{};
}

void end_thread_of_copies(int thread) {
  const Copies& mine = copies[thread];
  if (mine.issued.empty()) return;
  const bool committed = !mine.group_end.empty();
  report(
      "in-flight", mine.issued.front().place,
      format("%s ended with %zu cp.async in flight, %s", describe_thread(thread).c_str(),
             mine.issued.size(), committed ? "committed but not waited for" : "never committed"));
}

const bool copies_registered =
    add_feature({.block_begin = begin_block_of_copies, .thread_end = end_thread_of_copies});

void deliver(const Copy& copy) {
  u8* to = &smem[copy.offset];
  const std::size_t bytes = static_cast<std::size_t>(copy.source_bytes);
  if (bytes > 0) std::memcpy(to, copy.source, bytes);
  std::memset(to + bytes, 0, kChunk - bytes);
  chunk_written[copy.offset / kChunk] = 0xffff;
  chunk_in_flight[copy.offset / kChunk] = 0;
}

}  // namespace
}  // namespace emulator

using namespace emulator;

extern "C" void emulator_cp_async_16(unsigned dst, const void* src, int src_bytes, const char* file,
                                     int line) {
  const Place place{"cp_async_16", file, line};
  count(place.primitive);
  const u32 offset = shared_offset(dst, kChunk, place);
  if (src_bytes < 0 || src_bytes > kChunk) {
    report("operand", place,
           format("src_bytes of cp.async must be 0 to 16, but got %d", src_bytes));
    abort_block();
  }
  const bool aligned = reinterpret_cast<std::uintptr_t>(src) % kChunk == 0;
  if (src_bytes == 0 && !aligned) {
    report("misaligned", place,
           "the source of cp.async must be a multiple of 16, even where nothing is read");
  }
  bool readable = src_bytes > 0 && check_global(src, src_bytes, kChunk, false, place);
  if (readable) race_global(Access::kRead, src, src_bytes, current, place);
  check_shared_write(offset, kChunk, place);
  Copies& mine = copies[current];
  race_async_write(offset, kChunk, current, mine.committed + 1, place);
  std::memset(&smem[offset], 0xff, kChunk);
  chunk_in_flight[offset / kChunk] = static_cast<u16>(current + 1);
  mine.issued.push_back({offset, src, readable ? src_bytes : 0, place});
  maybe_let_others_run();
}

extern "C" void emulator_cp_async_commit_group(const char*, int) {
  count("cp_async_commit_group");
  Copies& mine = copies[current];
  mine.group_end.push_back(mine.issued.size());
  ++mine.committed;
}

extern "C" void emulator_cp_async_wait_group(int newest_in_flight, const char* file, int line) {
  count("cp_async_wait_group");
  Copies& mine = copies[current];
  if (newest_in_flight < 0) {
    report("operand", {"cp_async_wait_group", file, line},
           "the number of groups that may stay in flight is negative");
    abort_block();
  }
  const std::size_t groups = mine.group_end.size();
  if (groups <= static_cast<std::size_t>(newest_in_flight)) return;
  const std::size_t done = groups - static_cast<std::size_t>(newest_in_flight);
  const std::size_t end = mine.group_end[done - 1];
  for (std::size_t i = 0; i < end; ++i) deliver(mine.issued[i]);
  mine.issued.erase(mine.issued.begin(), mine.issued.begin() + static_cast<std::ptrdiff_t>(end));
  mine.group_end.erase(mine.group_end.begin(),
                       mine.group_end.begin() + static_cast<std::ptrdiff_t>(done));
  for (std::size_t& group_end : mine.group_end) group_end -= end;
  race_async_done(current, mine.committed - static_cast<u32>(newest_in_flight));
  maybe_let_others_run();
}
