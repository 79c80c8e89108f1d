// The race detector: vector clocks a thread and a pseudo-agent for each thread's asynchronous
// copies.
//
// An access is ordered after an earlier one if the accessing thread's clock has seen the earlier
// agent's. Only barriers, warp_sync and waits move clocks; shuffles, votes and matrix instructions
// order no memory. Every function is empty outside the race flavour.
#pragma once

#include "engine.h"

namespace emulator {

enum class Access : u8 { kRead, kWrite };

#if EMULATOR_RACE
// `thread` accesses `bytes` of shared memory at `offset`, or of a global buffer at `pointer`.
void race_shared(Access access, u32 offset, int bytes, int thread, const Place& place);
void race_global(Access access, const void* pointer, int bytes, int thread, const Place& place);
// `thread` issues a copy into shared memory; it is done for others once they have seen `group` of
// this thread.
void race_async_write(u32 offset, int bytes, int thread, u32 group, const Place& place);
// `thread` has waited for its copies up to and including `group`.
void race_async_done(int thread, u32 group);
// All of `members` have arrived at one point: each has seen what every other did before.
void race_join(const int* members, int count);
#else
inline void race_shared(Access, u32, int, int, const Place&) {}
inline void race_global(Access, const void*, int, int, const Place&) {}
inline void race_async_write(u32, int, int, u32, const Place&) {}
inline void race_async_done(int, u32) {}
inline void race_join(const int*, int) {}
#endif

}  // namespace emulator
