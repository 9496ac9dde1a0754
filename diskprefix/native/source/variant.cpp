// The operators, compiled once for each kind of CPU: VARIANT is its name.

#include "control_word.h"
#include "packing.h"
#include "plan.h"
#include "planes.h"

#define TEXT_OF(name) #name
#define TEXT(name) TEXT_OF(name)

namespace diskprefix {

template <class Function, Function operation>
struct Rounded;
template <class Result, class... Arguments, Result (*operation)(Arguments...)>
struct Rounded<Result (*)(Arguments...), operation> {
  static Result call(Arguments... arguments) {
    const UsualRounding usual;
    return operation(arguments...);
  }
};

#define ROUNDED(operation) Rounded<decltype(Operators::operation), operation>::call

extern const Operators VARIANT;
const Operators VARIANT = {TEXT(VARIANT),    require_matrix, ROUNDED(attention), ROUNDED(pack),
                           ROUNDED(look_up), ROUNDED(run),   ROUNDED(split),     ROUNDED(join)};

}  // namespace diskprefix
