// What a kernel's translation unit sees of the engine: one function an instruction, with the place
// of the call.
//
// The twins in primitives_*.h call these. A later family adds declarations here or in a header of
// its own. All shared-memory addresses are the u32 values that `emulator_smem_region` handed out.
#pragma once

extern "C" {

int emulator_thread_index();
long long emulator_block_index();
long long emulator_grid_size();

// Declares `bytes` of dynamic shared memory from `offset` on; the address is valid for that region
// alone.
unsigned emulator_smem_region(int offset, int bytes, const char* name, const char* file, int line);

// bar.sync id, with the threads of the whole block when `threads` is 0.
void emulator_barrier_sync(int id, int threads, const char* file, int line);
// bar.arrive id: counts the warp's threads and goes on.
void emulator_barrier_arrive(int id, int threads, const char* file, int line);
void emulator_warp_sync(const char* file, int line);

void emulator_cp_async_16(unsigned dst, const void* src, int src_bytes, const char* file, int line);
void emulator_cp_async_commit_group(const char* file, int line);
void emulator_cp_async_wait_group(int newest_in_flight, const char* file, int line);

// r: 4 registers of this lane.
void emulator_ldmatrix_x4(unsigned* r, unsigned row, bool transposed, const char* file, int line);
// d: 4 floats, a: 4 registers; D = A B + D. bf16 chooses between the two 16-bit types.
void emulator_mma_m16n8k16(float* d, const unsigned* a, unsigned b0, unsigned b1, bool bf16,
                           const char* file, int line);
unsigned emulator_shfl_bfly(unsigned value, int lane_mask, const char* file, int line);
bool emulator_vote_any(bool predicate, const char* file, int line);

// The lower half is `lo`; round to nearest even, NaN becomes 0x7fff.
unsigned emulator_cvt_rn_f16x2_f32(float lo, float hi);
unsigned emulator_cvt_rn_bf16x2_f32(float lo, float hi);
float emulator_f16_to_f32(unsigned short bits);
float emulator_bf16_to_f32(unsigned short bits);

// `bytes` of shared memory at `address`, which must be a multiple of `bytes`.
void emulator_st_shared(unsigned address, const void* values, int bytes, const char* name,
                        const char* file, int line);
void emulator_ld_shared(void* values, unsigned address, int bytes, const char* name,
                        const char* file, int line);

// `bytes` of global memory at `pointer`, which must be a multiple of `bytes`.
void emulator_st_global(void* pointer, const void* values, int bytes, const char* name,
                        const char* file, int line);
void emulator_ld_global(void* values, const void* pointer, int bytes, const char* name,
                        const char* file, int line);

// Generated at the end of the kernel's translation unit: runs the kernel's body with the Arguments
// at `arguments`.
void emulator_kernel(const void* arguments);
}
