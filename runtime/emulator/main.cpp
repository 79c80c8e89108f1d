// The program: reads a job (job.py writes it), runs its blocks one after another, writes the
// results and the report.
//
//   kernel JOB RESULT REPORT SECONDS
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "memory.h"

#if EMULATOR_ASAN
extern "C" void __asan_poison_memory_region(void const volatile* address, std::size_t size);
#endif

namespace emulator {
namespace {

class Reader {
 public:
  explicit Reader(const char* path) {
    FILE* file = std::fopen(path, "rb");
    if (file == nullptr) fail(path);
    std::fseek(file, 0, SEEK_END);
    bytes_.resize(static_cast<std::size_t>(std::ftell(file)));
    std::rewind(file);
    if (std::fread(bytes_.data(), 1, bytes_.size(), file) != bytes_.size()) fail(path);
    std::fclose(file);
  }
  const u8* take(u64 n) {
    if (n > bytes_.size() - at_) fail("the job is too short");
    at_ += n;
    return bytes_.data() + at_ - n;
  }
  template <class T>
  T value() {
    T out;
    std::memcpy(&out, take(sizeof(T)), sizeof(T));
    return out;
  }
  [[noreturn]] static void fail(const char* what) {
    std::fprintf(stderr, "emulator: %s\n", what);
    std::exit(3);
  }

 private:
  std::vector<u8> bytes_;
  std::size_t at_ = 0;
};

// A copy of `bytes` that lies like the caller's within 256 bytes; AddressSanitizer's red zones
// touch both of its ends.
void place_buffer(Buffer& buffer, const u8* bytes) {
  const u64 front = buffer.origin % 256;
  void* memory = nullptr;
  if (posix_memalign(&memory, 256, front + buffer.bytes + (buffer.bytes == 0 ? 1 : 0)) != 0)
    Reader::fail("out of memory");
  buffer.memory = static_cast<u8*>(memory) + front;
#if EMULATOR_ASAN
  __asan_poison_memory_region(memory, front);
#endif
  if (buffer.bytes > 0) std::memcpy(buffer.memory, bytes, buffer.bytes);
}

// The engine's address for one of the caller's. Buffers may overlap (views of one tensor), so the
// one that begins there comes first, then one that holds it, then one that ends there.
u64 relocated(u64 pointer) {
  if (pointer == 0) return 0;
  const Buffer* found = nullptr;
  int rank = 0;
  for (const Buffer& buffer : buffers) {
    const u64 offset = pointer - buffer.origin;
    const int fit = offset > buffer.bytes ? 0 : offset == 0 ? 3 : offset < buffer.bytes ? 2 : 1;
    if (fit > rank) found = &buffer, rank = fit;
  }
  if (found == nullptr) Reader::fail("a pointer argument lies in no buffer");
  return reinterpret_cast<u64>(found->memory) + (pointer - found->origin);
}

int run_job(const char* job_path, const char* result_path) {
  Reader job(job_path);
  if (std::memcmp(job.take(8), "FLSHEMU2", 8) != 0) Reader::fail("not a job of this version");
  run.threads = job.value<std::int32_t>();
  run.smem_bytes = job.value<std::int32_t>();
  run.schedule = static_cast<Schedule>(job.value<u32>());
  const u32 argument_bytes = job.value<u32>(), pointers = job.value<u32>(),
            buffer_count = job.value<u32>();
  run.random = (job.value<u64>() + 1) * 0x9e3779b97f4a7c15ull | 1;
  const long long first = job.value<std::int64_t>(), last = job.value<std::int64_t>(),
                  step = job.value<std::int64_t>();
  run.grid = job.value<std::int64_t>();
  const u64 words = (argument_bytes + 7) / 8;
  void* storage = nullptr;  // tensor maps lie at multiples of 64 bytes
  if (posix_memalign(&storage, 64, words * 8 + 64) != 0) Reader::fail("out of memory");
  u64* arguments = static_cast<u64*>(storage);
  std::memcpy(arguments, job.take(argument_bytes), argument_bytes);
  const u8* pointer_offsets = job.take(pointers * sizeof(u32));
  buffers.resize(buffer_count);
  for (Buffer& buffer : buffers) {
    buffer.origin = job.value<u64>();
    buffer.bytes = job.value<u64>();
    buffer.writable = job.value<u32>() != 0;
    const u32 name_bytes = job.value<u32>();
    buffer.name.assign(reinterpret_cast<const char*>(job.take(name_bytes)), name_bytes);
    place_buffer(buffer, job.take(buffer.bytes));
  }
  for (u32 i = 0; i < pointers; ++i) {
    u32 offset;
    std::memcpy(&offset, pointer_offsets + i * sizeof(u32), sizeof offset);
    if (offset / 8 >= words) Reader::fail("a pointer lies behind the arguments");
    arguments[offset / 8] = relocated(arguments[offset / 8]);
  }
  run.arguments = arguments;
  run.argument_bytes = argument_bytes;
  run.warps = run.threads / kWarpSize;
  allocate_stacks(&threads[0].fiber, sizeof(Thread), run.threads);
  for (const Feature& feature : features()) {
    if (feature.run_begin != nullptr) feature.run_begin();
  }
  for (long long block = first; block < last && !run.aborted; block += step) run_block(block);

  FILE* result = std::fopen(result_path, "wb");
  if (result == nullptr) Reader::fail(result_path);
  for (const Buffer& buffer : buffers) {
    if (buffer.writable) std::fwrite(buffer.memory, 1, buffer.bytes, result);
  }
  if (std::fclose(result) != 0) Reader::fail(result_path);
  return 0;
}

}  // namespace
}  // namespace emulator

int main(int argc, char** argv) {
  if (argc != 5) emulator::Reader::fail("usage: kernel JOB RESULT REPORT SECONDS");
  emulator::install_crash_handlers(argv[3]);
  alarm(static_cast<unsigned>(std::atoi(argv[4])));
  const int status = emulator::run_job(argv[1], argv[2]);
  emulator::write_report();
  return status;
}
