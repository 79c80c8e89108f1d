// Host twins of every primitive a generated kernel may call. A family that needs more adds a header
// here.
#pragma once

#include "primitives_math.h"
#include "primitives_sm80.h"
#include "primitives_sm90.h"
