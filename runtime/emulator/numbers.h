// The 16-bit float types: exact widening, rounding to nearest even.
#pragma once

#include <cstdint>
#include <cstring>

// One body for every x86-64 host, with AVX2 where the machine has it.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define EMULATOR_CLONES __attribute__((target_clones("arch=haswell", "default")))
#else
#define EMULATOR_CLONES
#endif

namespace emulator {

inline float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float bf16_to_f32(std::uint32_t half) { return float_of(half << 16); }

inline float f16_to_f32(std::uint32_t half) {
  const std::uint32_t magnitude = (half & 0x7fffu) << 13;
  const std::uint32_t sign = (half & 0x8000u) << 16;
  // 2^112 moves the exponent's bias from 15 to 127; infinity and NaN keep their exponent.
  const std::uint32_t finite = bits_of(float_of(magnitude) * 0x1p112f);
  return float_of((magnitude < 0x0f800000u ? finite : magnitude | 0x7f800000u) | sign);
}

inline std::uint32_t f32_to_bf16(float value) {
  const std::uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
  return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

inline std::uint32_t f32_to_f16(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fffu;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and above round to infinity
  if (magnitude < 0x38800000u) {                        // below 2^-14: a multiple of 2^-24
    if (magnitude < 0x33000000u) return sign;           // below 2^-25
    const std::uint32_t shift = 126u - (magnitude >> 23);
    const std::uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    const std::uint32_t kept = mantissa >> shift;
    const std::uint32_t lost = mantissa & ((1u << shift) - 1);
    const std::uint32_t half = 1u << (shift - 1);
    return sign | (kept + (lost > half || (lost == half && (kept & 1u)) ? 1u : 0u));
  }
  return sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13);
}

}  // namespace emulator
