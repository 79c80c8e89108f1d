// The race detector: vector clocks a thread, and pseudo-agents for work that goes on beside it.
//
// An access is ordered after an earlier one if the accessing thread's clock has seen the earlier
// agent's. Only barriers, warp_sync and waits move clocks; shuffles, votes and matrix instructions
// order no memory.
//
// A thread has two clocks: what comes before its own (generic) accesses, and what comes before the
// accesses of the async proxy that it starts (TMA, wgmma operands). Ordinary writes reach the
// second through fence.proxy.async alone, whoever executes it on the way. Every function is empty
// outside the race flavour.
#pragma once

#include <memory>

#include "engine.h"

namespace emulator {

enum class Access : u8 { kRead, kWrite };

// Who works beside the threads. The index is a thread (copies, stores), an mbarrier (loads) or a
// warp (products); such work is done for others once they have seen its number.
enum class Beside : u8 { kNone, kCopies, kLoads, kProducts, kStoreReads, kStoreWrites };

#if EMULATOR_RACE
// What both clocks of a thread have seen, by agent.
struct Clocks {
  std::vector<u32> generic;
  std::vector<u32> async;
};

// An object that threads leave their clocks at and take them from: an mbarrier's phase, a named
// barrier's.
struct SyncPoint {
  Clocks left;
  std::shared_ptr<const Clocks> merged;  // the last clocks taken in
  std::shared_ptr<const Clocks> snapshot;
};

// `thread` accesses `bytes` of shared memory at `offset`, or of a global buffer at `pointer`.
void race_shared(Access access, u32 offset, int bytes, int thread, const Place& place);
void race_global(Access access, const void* pointer, int bytes, int thread, const Place& place);
// `thread` relies on the last write of the bytes, without reading them.
void race_must_see(u32 offset, int bytes, int thread, const Place& place);
// `thread` issues a copy into shared memory; it is done for others once they have seen `group` of
// this thread.
void race_async_write(u32 offset, int bytes, int thread, u32 group, const Place& place);
// `thread` has waited for its copies up to and including `group`.
void race_async_done(int thread, u32 group);
// All of `members` have arrived at one point: each has seen what every other did before.
void race_join(const int* members, int count);

// `thread` starts work number `number` of an engine of the async proxy on these bytes.
void race_proxy_shared(Access access, u32 offset, int bytes, Beside engine, int index, u32 number,
                       int thread, const Place& place);
void race_proxy_global(Access access, const void* pointer, int bytes, Beside engine, int index,
                       u32 number, int thread, const Place& place);
// `thread` has seen the engine's work up to and including `number`.
void race_proxy_done(Beside engine, int index, u32 number, int thread);
void race_proxy_fence(int thread);

void race_release(SyncPoint& point, int thread);
void race_acquire(SyncPoint& point, int thread);
#else
struct SyncPoint {};
inline void race_shared(Access, u32, int, int, const Place&) {}
inline void race_global(Access, const void*, int, int, const Place&) {}
inline void race_must_see(u32, int, int, const Place&) {}
inline void race_async_write(u32, int, int, u32, const Place&) {}
inline void race_async_done(int, u32) {}
inline void race_join(const int*, int) {}
inline void race_proxy_shared(Access, u32, int, Beside, int, u32, int, const Place&) {}
inline void race_proxy_global(Access, const void*, int, Beside, int, u32, int, const Place&) {}
inline void race_proxy_done(Beside, int, u32, int) {}
inline void race_proxy_fence(int) {}
inline void race_release(SyncPoint&, int) {}
inline void race_acquire(SyncPoint&, int) {}
#endif

}  // namespace emulator
