// Equality of constants as guards mean it.
#pragma once

#include "refs.h"

namespace torchdynamo {

// Same exact type and equal, element by element in tuples: 1 is not True, 0.0 is not -0.0, nan equals nan.
bool constants_equal(PyObject* a, PyObject* b);

}  // namespace torchdynamo
