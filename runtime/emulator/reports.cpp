// Findings, counters, and the report file: one JSON object a line, written at the end or when the
// process dies.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#include "engine.h"

#if EMULATOR_ASAN
extern "C" void __sanitizer_set_death_callback(void (*callback)(void));
#endif

namespace emulator {
namespace {

constexpr std::size_t kMaxFindings = 64;  // one a kind and place; the rest are counted

struct Counter {
  const char* name = nullptr;
  u64 n = 0;
};
Counter counters[256];

std::vector<Finding> findings;
std::vector<long long> finding_blocks;
u64 repeated = 0;
std::map<std::pair<std::string, int>, u64> conflicts;
std::string report_path;
bool written = false;

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (static_cast<unsigned char>(c) < 0x20) {
      out += format("\\u%04x", c);
    } else {
      out += c;
    }
  }
  return out + "\"";
}

const char* signal_name(int signal) {
  switch (signal) {
    case SIGSEGV:
      return "a wild memory access (SIGSEGV)";
    case SIGBUS:
      return "a wild memory access (SIGBUS)";
    case SIGFPE:
      return "an integer division by zero or overflow (SIGFPE)";
    case SIGILL:
      return "an illegal instruction (SIGILL)";
    case SIGALRM:
      return "the time limit: the kernel did not end";
    default:
      return "an abort";
  }
}

void on_signal(int signal) {
  const Thread& thread = threads[current];
  report(signal == SIGALRM ? "timeout" : "crash", thread.place,
         format("%s ended the run in %s; its last instruction that may wait was %s",
                signal_name(signal), describe_thread(current).c_str(),
                describe(thread.place).c_str()));
  write_report();
  _exit(signal == SIGALRM ? 124 : 125);
}

}  // namespace

std::string format(const char* text, ...) {
  va_list arguments;
  va_start(arguments, text);
  char buffer[2048];
  std::vsnprintf(buffer, sizeof buffer, text, arguments);
  va_end(arguments);
  return buffer;
}

std::string describe(const Place& place) {
  if (place.primitive == nullptr) return "none";
  if (place.file == nullptr) return format("%s at pc:%p", place.primitive, place.pc);
  return format("%s at %s:%d", place.primitive, place.file, place.line);
}

std::string describe_thread(int thread) {
  return format("thread %d (warp %d)", thread, warp_of(thread));
}

void report(const char* kind, const Place& place, const std::string& message) {
  for (const Finding& known : findings) {
    if (known.place == place && std::strcmp(known.kind, kind) == 0) {
      ++repeated;
      return;
    }
  }
  if (findings.size() >= kMaxFindings) {
    ++repeated;
    return;
  }
  findings.push_back({kind, message, place, current});
  finding_blocks.push_back(run.block);
}

void count(const char* name, u64 n) {
  std::size_t slot = reinterpret_cast<std::uintptr_t>(name) / 4 % 256;
  while (counters[slot].name != nullptr && counters[slot].name != name) slot = (slot + 1) % 256;
  counters[slot].name = name;
  counters[slot].n += n;
}

void count_conflicts(const Place& place, u64 extra) {
  if (extra != 0) conflicts[{place.file == nullptr ? "" : place.file, place.line}] += extra;
}

void write_report() {
  if (written) return;
  written = true;
  FILE* file = std::fopen(report_path.c_str(), "w");
  if (file == nullptr) return;
  for (std::size_t i = 0; i < findings.size(); ++i) {
    const Finding& finding = findings[i];
    std::fprintf(file,
                 "{\"kind\": \"%s\", \"message\": %s, \"file\": %s, \"line\": %d, \"block\": %lld, "
                 "\"thread\": %d, \"pc\": \"pc:%p\"}\n",
                 finding.kind, quoted(finding.message).c_str(),
                 finding.place.file == nullptr ? "null" : quoted(finding.place.file).c_str(),
                 finding.place.line, finding_blocks[i], finding.thread, finding.place.pc);
  }
  std::map<std::string, u64> by_name;  // equal literals may have several addresses
  for (const Counter& counter : counters) {
    if (counter.name != nullptr) by_name[counter.name] += counter.n;
  }
  std::fprintf(file, "{\"counters\": {");
  const char* separator = "";
  for (const auto& [name, n] : by_name) {
    std::fprintf(file, "%s%s: %llu", separator, quoted(name).c_str(),
                 static_cast<unsigned long long>(n));
    separator = ", ";
  }
  std::fprintf(file, "}, \"conflicts\": {");
  separator = "";
  for (const auto& [place, n] : conflicts) {
    std::fprintf(file, "%s\"%d\": %llu", separator, place.second,
                 static_cast<unsigned long long>(n));
    separator = ", ";
  }
  std::fprintf(file, "}, \"repeated\": %llu}\n", static_cast<unsigned long long>(repeated));
  std::fclose(file);
}

void install_crash_handlers(const char* path) {
  report_path = path;
  static char stack[64 * 1024];
  stack_t alternate{};
  alternate.ss_sp = stack;
  alternate.ss_size = sizeof stack;
  sigaltstack(&alternate, nullptr);
  struct sigaction action{};
  action.sa_handler = on_signal;
  action.sa_flags = SA_ONSTACK;
  sigaction(SIGALRM, &action, nullptr);
#if EMULATOR_ASAN
  __sanitizer_set_death_callback(write_report);
#else
  for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT})
    sigaction(signal, &action, nullptr);
#endif
}

}  // namespace emulator
