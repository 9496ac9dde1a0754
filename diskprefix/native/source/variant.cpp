// The operators, compiled once for each kind of CPU: VARIANT is its name.

#include "blocks.h"
#include "dense.h"
#include "experts.h"
#include "packing.h"
#include "plan.h"
#include "planes.h"

#define TEXT_OF(name) #name
#define TEXT(name) TEXT_OF(name)

namespace diskprefix {

extern const Operators VARIANT;
const Operators VARIANT = {TEXT(VARIANT), require_matrix, attention, product, norm, gated, attention_block, dense, experts, pack,
                           look_up, convolution, delta_rule, state_space, run, split, join};

}  // namespace diskprefix
