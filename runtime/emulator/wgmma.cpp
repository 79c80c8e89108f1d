// wgmma.m64nNk16: products of a warpgroup, as late as the rules allow.
//
// Each warp computes its own 16 rows. The operands are read at the issue and must not change until
// the warp has waited; the accumulators are NaN until then.
#include <cstring>
#include <deque>

#include "api_sm90.h"
#include "memory.h"
#include "race.h"
#include "wgmma_tiles.h"

namespace emulator {
namespace {

constexpr int kWarpsOfGroup = 4;
constexpr u32 kNotThereYet = 0xffffffffu;  // what an accumulator holds until the wait

// One accumulator tile that some product in flight adds to.
struct Accumulator {
  float* lanes[kWarpSize];
  int columns;
  u32 last_group;             // the group of the newest product
  std::vector<float> values;  // (16, columns)
};

struct Product {
  ProductOperands operands;
  u32 group;
  Place place;
  const u32* a[kWarpSize];  // registers of A, where A is not in shared memory
  u32 a_bits[kWarpSize][4];
};

struct WarpProducts {
  std::vector<Product> issued;  // not waited for, oldest first
  std::vector<Accumulator> accumulators;
  u32 committed = 0;
  u32 products = 0;
  u64 position = 0;  // in its warpgroup's sequence
  bool fenced = false;
};
WarpProducts warp_products[kMaxWarps];

// What the warps of a warpgroup must execute alike, from the step on that the slowest has reached.
struct Step {
  Place place;
  u64 a, b;
};
struct Sequence {
  std::deque<Step> steps;
  u64 first = 0;
};
Sequence sequences[kMaxWarps / kWarpsOfGroup];

void begin_block_of_products() {
  for (int w = 0; w < run.warps; ++w) warp_products[w] = WarpProducts{};
  for (Sequence& sequence : sequences) sequence = Sequence{};
}

void end_thread_of_products(int thread) {
  const WarpProducts& mine = warp_products[warp_of(thread)];
  if (mine.issued.empty()) return;
  report("in-flight", mine.issued.front().place,
         format("warp %d ended with %zu wgmma in flight, %s", warp_of(thread), mine.issued.size(),
                mine.issued.front().group > mine.committed ? "never committed" : "not waited for"));
}

void end_block_of_products() {
  for (int w = 0; w < run.warps; ++w) {
    const int leader = w / kWarpsOfGroup * kWarpsOfGroup;
    if (warp_products[w].position == warp_products[leader].position) continue;
    report("divergence", {"wgmma", nullptr, 0},
           format("warps %d and %d of one warpgroup have executed %llu and %llu wgmma instructions",
                  leader, w, static_cast<unsigned long long>(warp_products[leader].position),
                  static_cast<unsigned long long>(warp_products[w].position)));
  }
}

const bool products_registered = add_feature({.block_begin = begin_block_of_products,
                                              .thread_end = end_thread_of_products,
                                              .block_end = end_block_of_products});

// The warp executes the next wgmma instruction of its warpgroup.
void step(const Place& place, u64 a = 0, u64 b = 0) {
  const int warp = warp_of(current), group = warp / kWarpsOfGroup;
  if ((group + 1) * kWarpsOfGroup > run.warps) {
    report("divergence", place, format("warp %d belongs to no whole warpgroup of 4 warps", warp));
    abort_block();
  }
  WarpProducts& mine = warp_products[warp];
  Sequence& sequence = sequences[group];
  const std::size_t index = static_cast<std::size_t>(mine.position - sequence.first);
  if (index == sequence.steps.size()) {
    sequence.steps.push_back({place, a, b});
  } else {
    const Step& other = sequence.steps[index];
    if (!(other.place == place) || other.a != a || other.b != b) {
      report(
          "divergence", place,
          format("the warps of one warpgroup execute different wgmma instructions: warp %d is at "
                 "%s (descriptors %llx, %llx), another was at %s (%llx, %llx)",
                 warp, describe(place).c_str(), static_cast<unsigned long long>(a),
                 static_cast<unsigned long long>(b), describe(other.place).c_str(),
                 static_cast<unsigned long long>(other.a),
                 static_cast<unsigned long long>(other.b)));
      abort_block();
    }
  }
  mine.position += 1;
  u64 slowest = mine.position;
  for (int w = group * kWarpsOfGroup; w < (group + 1) * kWarpsOfGroup; ++w)
    slowest = std::min(slowest, warp_products[w].position);
  while (sequence.first < slowest) {
    sequence.steps.pop_front();
    sequence.first += 1;
  }
}

// The rows of A that a warp multiplies.
MatrixOperand operand_a(const ProductOperands& operands, int warp) {
  return {MatrixDescriptor(operands.a), kRowsOfWarp, warp % kWarpsOfGroup * kRowsOfWarp, false};
}

// All of A: which warp's instruction reads which of its rows is promised nowhere.
MatrixOperand whole_a(const ProductOperands& operands) {
  return {MatrixDescriptor(operands.a), kWarpsOfGroup * kRowsOfWarp, 0, false};
}

MatrixOperand operand_b(const ProductOperands& operands) {
  return {MatrixDescriptor(operands.b), operands.columns, 0, operands.b_transposed};
}

// Checks every chunk of an operand and marks it as being read.
void begin_read(const MatrixOperand& operand, const char* name, u32 number, const Place& place) {
  if (operand.descriptor.base_offset != 0) {
    report("operand", place,
           format("the base offset of %s's descriptor is %u; only 0 is modelled", name,
                  operand.descriptor.base_offset));
    abort_block();
  }
  const Region* region = nullptr;
  operand.for_each_chunk([&](u32 offset, int mn, int k) {
    if (region == nullptr) {
      for (const Region& candidate : regions) {
        const long long at = static_cast<long long>(operand.descriptor.start) - candidate.offset;
        if (at >= 0 && at < candidate.bytes) region = &candidate;
      }
    }
    const long long at = region == nullptr ? -1 : static_cast<long long>(offset) - region->offset;
    if (at < 0 || at + kChunk > region->bytes) {
      report("out-of-bounds", place,
             format("element (%d, %d) of %s lies at byte %lld of shared-memory region '%s', which "
                    "has %d",
                    mn, k, name, at, region == nullptr ? "none" : region->name,
                    region == nullptr ? 0 : region->bytes));
      abort_block();
    }
    check_shared_read(offset, kChunk, place);
    race_proxy_shared(Access::kRead, offset, kChunk, Beside::kProducts, warp_of(current), number,
                      current, place);
    chunk_readers[offset / kChunk] += 1;
  });
}

void end_read(const MatrixOperand& operand) {
  operand.for_each_chunk([](u32 offset, int, int) { chunk_readers[offset / kChunk] -= 1; });
}

bool untouched(const Accumulator& accumulator) {
  for (int lane = 0; lane < kWarpSize; ++lane) {
    for (int j = 0; j < accumulator.columns / 2; ++j) {
      if (bits_of(accumulator.lanes[lane][j]) != kNotThereYet) return false;
    }
  }
  return true;
}

// The accumulator tile at these registers, taken over from them unless a product is in flight.
Accumulator& accumulator_at(void** operands, int columns, bool keep, const Place& place) {
  WarpProducts& mine = warp_products[warp_of(current)];
  float* first = static_cast<ProductOperands*>(operands[0])->d;
  for (Accumulator& known : mine.accumulators) {
    if (known.lanes[0] != first) continue;
    if (known.columns != columns) {
      report(
          "operand", place,
          format("accumulators in flight are used with N = %d and N = %d", known.columns, columns));
      abort_block();
    }
    if (!untouched(known))
      report("in-flight", place, "accumulators were written while a wgmma on them was in flight");
    return known;
  }
  Accumulator accumulator;
  accumulator.columns = columns;
  accumulator.last_group = 0;
  accumulator.values.resize(static_cast<std::size_t>(kRowsOfWarp * columns));
  for (int lane = 0; lane < kWarpSize; ++lane) {
    float* d = static_cast<ProductOperands*>(operands[lane])->d;
    accumulator.lanes[lane] = d;
    for (int j = 0; j < columns / 2; ++j) {
      if (keep)
        accumulator.values[static_cast<std::size_t>(place_in_tile(lane, j, columns))] = d[j];
      d[j] = float_of(kNotThereYet);
    }
  }
  mine.accumulators.push_back(std::move(accumulator));
  return mine.accumulators.back();
}

void give_back(const Accumulator& accumulator, const Place& place) {
  if (!untouched(accumulator))
    report("in-flight", place, "accumulators were written while a wgmma on them was in flight");
  for (int lane = 0; lane < kWarpSize; ++lane) {
    for (int j = 0; j < accumulator.columns / 2; ++j)
      accumulator.lanes[lane][j] =
          accumulator.values[static_cast<std::size_t>(place_in_tile(lane, j, accumulator.columns))];
  }
}

void check_operands(void** operands, const Place& place) {
  const ProductOperands& first = *static_cast<ProductOperands*>(operands[0]);
  for (int lane = 1; lane < kWarpSize; ++lane) {
    const ProductOperands& other = *static_cast<ProductOperands*>(operands[lane]);
    if (other.a == first.a && other.b == first.b && other.scale_d == first.scale_d) continue;
    report("divergence", place,
           format("the descriptors of a wgmma must be uniform, but lanes 0 and %d differ", lane));
    abort_block();
  }
  if (first.columns < 8 || first.columns > kMaxColumns || first.columns % 8 != 0) {
    report("operand", place,
           format("N of a wgmma must be a multiple of 8 up to 256, but got %d", first.columns));
    abort_block();
  }
}

void issue(void** operands, const Place& place) {
  static float a[kRowsOfWarp][kDepth], b[kDepth][kMaxColumns];
  const int warp = warp_of(current);
  WarpProducts& mine = warp_products[warp];
  check_operands(operands, place);
  const ProductOperands& shared = *static_cast<ProductOperands*>(operands[0]);
  step(place, shared.a, shared.b);
  if (!mine.fenced)
    report(
        "fence", place,
        format("warp %d starts a wgmma, but no wgmma.fence follows its last use of registers: one "
               "is needed before the first wgmma and after each wait",
               warp));
  Product product{};
  product.operands = shared;
  product.group = mine.committed + 1;
  product.place = place;
  const u32 number = ++mine.products;
  if (shared.a_registers == nullptr) {
    const MatrixOperand in_smem = operand_a(shared, warp);
    begin_read(whole_a(shared), "A", number, place);
    fetch_a(in_smem, shared.bf16, a);
  } else {
    for (int lane = 0; lane < kWarpSize; ++lane) {
      const u32* registers = static_cast<ProductOperands*>(operands[lane])->a_registers;
      product.a[lane] = registers;
      const int g = lane / 4, q = 2 * (lane % 4);
      for (int r = 0; r < 4; ++r) {
        const u32 bits = product.a_bits[lane][r] = registers[r];
        a[g + 8 * (r & 1)][q + 8 * (r >> 1)] = widened(static_cast<u16>(bits), shared.bf16);
        a[g + 8 * (r & 1)][q + 8 * (r >> 1) + 1] =
            widened(static_cast<u16>(bits >> 16), shared.bf16);
      }
    }
  }
  const MatrixOperand in_smem = operand_b(shared);
  begin_read(in_smem, "B", number, place);
  fetch_b(in_smem, shared.bf16, b);
  Accumulator& d = accumulator_at(operands, shared.columns, shared.scale_d != 0, place);
  accumulate(a, b, shared.columns, shared.scale_d != 0, d.values.data());
  d.last_group = product.group;
  mine.issued.push_back(product);
}

void finish(const Product& product, const Place& place) {
  if (product.operands.a_registers == nullptr) {
    end_read(whole_a(product.operands));
  } else {
    for (int lane = 0; lane < kWarpSize; ++lane) {
      if (std::memcmp(product.a[lane], product.a_bits[lane], sizeof product.a_bits[lane]) == 0)
        continue;
      report("in-flight", place,
             format("registers of A were written while %s was in flight (%s)",
                    describe(product.place).c_str(),
                    describe_thread(warp_of(current) * kWarpSize + lane).c_str()));
      break;
    }
  }
  end_read(operand_b(product.operands));
}

void wait_for_products(int newest, const Place& place) {
  WarpProducts& mine = warp_products[warp_of(current)];
  step(place, static_cast<u64>(newest));
  if (mine.committed <= static_cast<u32>(newest)) return;
  const u32 due = mine.committed - static_cast<u32>(newest);
  std::size_t done = 0;
  while (done < mine.issued.size() && mine.issued[done].group <= due)
    finish(mine.issued[done++], place);
  if (done == 0) return;
  const u32 number = mine.products - static_cast<u32>(mine.issued.size() - done);
  mine.issued.erase(mine.issued.begin(), mine.issued.begin() + static_cast<std::ptrdiff_t>(done));
  std::vector<Accumulator> left;
  for (Accumulator& accumulator : mine.accumulators) {
    if (accumulator.last_group > due) {
      left.push_back(std::move(accumulator));
    } else {
      give_back(accumulator, place);
    }
  }
  mine.accumulators = std::move(left);
  mine.fenced = false;
  for (int lane = 0; lane < kWarpSize; ++lane)
    race_proxy_done(Beside::kProducts, warp_of(current), number,
                    warp_of(current) * kWarpSize + lane);
}

}  // namespace
}  // namespace emulator

using namespace emulator;

extern "C" void emulator_wgmma(const ProductOperands* operands, const char* name, const char* file,
                               int line) {
  ProductOperands mine = *operands;
  const Place place{name, file, line};
  if (!meet(place, &mine)) return;
  issue(warps[warp_of(current)].operands, place);
  meeting_done();
}

extern "C" void emulator_wgmma_fence(const char* file, int line) {
  const Place place{"wgmma_fence", file, line};
  if (!meet(place, nullptr)) return;
  step(place);
  warp_products[warp_of(current)].fenced = true;
  meeting_done();
}

extern "C" void emulator_wgmma_commit_group(const char* file, int line) {
  const Place place{"wgmma_commit_group", file, line};
  if (!meet(place, nullptr)) return;
  step(place);
  warp_products[warp_of(current)].committed += 1;
  meeting_done();
}

extern "C" void emulator_wgmma_wait_group(int newest, const char* file, int line) {
  const Place place{"wgmma_wait_group", file, line};
  if (!meet(place, nullptr)) return;
  if (newest < 0) {
    report("operand", place, "the number of groups that may stay in flight is negative");
    abort_block();
  }
  wait_for_products(newest, place);
  meeting_done();
}
