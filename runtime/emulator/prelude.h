// Put before a generated kernel on the host: the CUDA spellings that stand outside its primitives
// mean nothing here.
#pragma once

#include "api.h"

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
