// Host twins of the arithmetic primitives. The approximate instructions are the exactly rounded
// function here, with subnormal operands and results flushed as .ftz does; conformance.py states
// how far a GPU may differ.
#pragma once

#include "api.h"

inline float negative_infinity() { return -__builtin_inff(); }

// A subnormal becomes zero of the same sign.
inline float flushed_f32(float x) {
  return __builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0.0f, x) : x;
}

inline float ex2_approx_f32(float x) { return flushed_f32(__builtin_exp2f(flushed_f32(x))); }
inline float lg2_approx_f32(float x) { return flushed_f32(__builtin_log2f(flushed_f32(x))); }
inline float rcp_approx_f32(float x) { return flushed_f32(1.0f / flushed_f32(x)); }

// The number where one operand is NaN; +0 is larger than -0.
inline float max_f32(float a, float b) {
  if (a != a) return b;
  if (b != b) return a;
  return a > b || (a == b && !__builtin_signbit(a)) ? a : b;
}
inline float min_f32(float a, float b) {
  if (a != a) return b;
  if (b != b) return a;
  return a < b || (a == b && __builtin_signbit(a)) ? a : b;
}
inline float abs_f32(float a) { return __builtin_fabsf(a); }
inline float sqrt_f32(float a) { return __builtin_sqrtf(a); }
inline float exp_f32(float a) { return __builtin_expf(a); }
inline float log_f32(float a) { return __builtin_logf(a); }
inline float tanh_f32(float a) { return __builtin_tanhf(a); }

inline int max_s32(int a, int b) { return a > b ? a : b; }
inline int min_s32(int a, int b) { return a < b ? a : b; }
inline int abs_s32(int a) { return a < 0 ? -a : a; }
inline long long max_s64(long long a, long long b) { return a > b ? a : b; }
inline long long min_s64(long long a, long long b) { return a < b ? a : b; }
inline long long abs_s64(long long a) { return a < 0 ? -a : a; }

// Quotient rounded towards minus infinity and the remainder with the divisor's sign, as Python's //
// and %.
inline int floor_div_s32(int a, int b) {
  if (b == 0) return 0;
  return a / b - (a % b != 0 && (a % b < 0) != (b < 0) ? 1 : 0);
}
inline int floor_mod_s32(int a, int b) {
  if (b == 0) return 0;
  return a % b + (a % b != 0 && (a % b < 0) != (b < 0) ? b : 0);
}
inline long long floor_div_s64(long long a, long long b) {
  if (b == 0) return 0;
  return a / b - (a % b != 0 && (a % b < 0) != (b < 0) ? 1 : 0);
}
inline long long floor_mod_s64(long long a, long long b) {
  if (b == 0) return 0;
  return a % b + (a % b != 0 && (a % b < 0) != (b < 0) ? b : 0);
}
