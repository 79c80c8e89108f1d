// setmaxnreg, stmatrix and the atomics of Hopper kernels.
#include <cstring>

#include "api_sm90.h"
#include "memory.h"
#include "race.h"

namespace emulator {
namespace {

constexpr int kRegisterFile = 65536;

// Registers that no warp owns, and how many a thread of each warp owns.
int free_registers = 0;
int registers_of[kMaxWarps];
std::vector<int> short_of_registers;  // threads that wait for the pool
struct Adjustment {
  Place place;
  u32 warps = 0;  // of the warpgroup, that have executed it
};
Adjustment adjustments[kMaxWarps / 4];

// What a launch gives each thread: warps come in fours, one for each part of the register file.
int launch_registers() {
  const int threads_rounded = (run.warps + 3) / 4 * 4 * kWarpSize;
  const int each = kRegisterFile / threads_rounded / 8 * 8;
  return each < 256 ? each : 256;
}

void begin_block_of_registers() {
  free_registers = 0;
  for (int w = 0; w < run.warps; ++w) registers_of[w] = launch_registers();
  for (Adjustment& adjustment : adjustments) adjustment = Adjustment{};
  short_of_registers.clear();
}

void describe_registers(std::string& text) {
  if (short_of_registers.empty()) return;
  text += format("; %d registers are free, each thread was launched with %d", free_registers,
                 launch_registers());
}

void end_block_of_registers() {
  for (const Adjustment& adjustment : adjustments) {
    if (adjustment.warps == 0) continue;
    report("divergence", adjustment.place,
           "not every warp of the warpgroup has executed this setmaxnreg");
  }
}

const bool registers_registered = add_feature({.block_begin = begin_block_of_registers,
                                               .block_end = end_block_of_registers,
                                               .describe = describe_registers});

struct StmatrixOperands {
  u32 offset;
  const u32* r;
};

}  // namespace
}  // namespace emulator

using namespace emulator;

extern "C" void emulator_setmaxnreg(int registers, bool increase, const char* file, int line) {
  const Place place{increase ? "setmaxnreg_inc" : "setmaxnreg_dec", file, line};
  if (!meet(place, nullptr)) return;
  const int warp = warp_of(current), group = warp / 4;
  if (registers < 24 || registers > 256 || registers % 8 != 0) {
    report("operand", place,
           format("setmaxnreg takes a multiple of 8 from 24 to 256, but got %d", registers));
    abort_block();
  }
  Adjustment& adjustment = adjustments[group];
  if (adjustment.warps == 0) adjustment.place = place;
  if (!(adjustment.place == place) || (adjustment.warps >> warp % 4 & 1) != 0 ||
      (group + 1) * 4 > run.warps) {
    report("divergence", place,
           format("all 4 warps of a warpgroup must execute the same setmaxnreg, but warp %d is at "
                  "%s and another was at %s",
                  warp, describe(place).c_str(), describe(adjustment.place).c_str()));
    abort_block();
  }
  adjustment.warps |= 1u << warp % 4;
  if (adjustment.warps == 0xf) adjustment.warps = 0;
  const int more = (registers - registers_of[warp]) * kWarpSize;
  if (!increase && more > 0) {
    report("operand", place,
           format("setmaxnreg.dec asks for %d registers, but a thread of warp %d has %d", registers,
                  warp, registers_of[warp]));
    abort_block();
  }
  if (more < 0 && !increase) {
    free_registers -= more;
    registers_of[warp] = registers;
    std::vector<int> waiting = std::move(short_of_registers);
    short_of_registers.clear();
    for (int thread : waiting) make_ready(thread);
  }
  if (more > 0) {
    while (free_registers < more) {
      short_of_registers.push_back(current);
      wait_here(place);
    }
    free_registers -= more;
    registers_of[warp] = registers;
  }
  meeting_done();
}

// Lane 8m+i brings the address of row i of matrix m. Register m of lane l, g = l/4, q = 2*(l%4), is
// M[g][q] | M[g][q+1] << 16.
extern "C" void emulator_stmatrix_x4(unsigned row, const unsigned* r, const char* file, int line) {
  const Place place{"stmatrix_x4", file, line};
  StmatrixOperands mine{shared_offset(row, kChunk, place), r};
  check_shared_write(mine.offset, kChunk, place);
  if (!meet(place, &mine)) return;
  void** operands = warps[warp_of(current)].operands;
  u32 rows[kWarpSize];
  for (int lane = 0; lane < kWarpSize; ++lane)
    rows[lane] = static_cast<StmatrixOperands*>(operands[lane])->offset;
  for (int matrix = 0; matrix < 4; ++matrix)
    count_conflicts(place, extra_passes(&rows[8 * matrix]));
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const int g = lane / 4, q = 2 * (lane % 4);
    for (int m = 0; m < 4; ++m) {
      const u32 at = rows[8 * m + g] + static_cast<u32>(q) * 2;
      race_shared(Access::kWrite, at, 4, warp_of(current) * kWarpSize + lane, place);
      std::memcpy(&smem[at], &static_cast<StmatrixOperands*>(operands[lane])->r[m], 4);
    }
  }
  meeting_done();
}

// Atomics of several blocks on one word are no race: they are not recorded.
extern "C" int emulator_atomic_add_global_s32(int* pointer, int value, const char* file, int line) {
  const Place place{"atomic_add_global_s32", file, line};
  count(place.primitive);
  if (!check_global(pointer, 4, 4, true, place)) return 0;
  const int before = *pointer;
  *pointer = static_cast<int>(static_cast<u32>(before) + static_cast<u32>(value));
  maybe_let_others_run();
  return before;
}
