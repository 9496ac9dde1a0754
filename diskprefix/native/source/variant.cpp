// The operators, compiled once for each kind of CPU: VARIANT is its name.

#include "packing.h"
#include "plan.h"
#include "planes.h"

#define TEXT_OF(name) #name
#define TEXT(name) TEXT_OF(name)

namespace diskprefix {

extern const Operators VARIANT;
const Operators VARIANT = {TEXT(VARIANT), require_matrix, attention, pack, look_up, run, split, join};

}  // namespace diskprefix
