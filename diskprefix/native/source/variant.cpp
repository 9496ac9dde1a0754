// The operators, compiled once for each kind of CPU: VARIANT is its name.

#include "attention.h"
#include "quantised.h"

#define TEXT_OF(name) #name
#define TEXT(name) TEXT_OF(name)

namespace diskprefix {

extern const Operators VARIANT;
const Operators VARIANT = {TEXT(VARIANT), attention, quantised_product};

}  // namespace diskprefix
