// Any values become the same planes in all variants, in no more room than there is, and the same values again.

#include "input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  Input input(bytes, size);
  Planes call = {};
  const int64_t all = choose_form(input, call, 2), item = bytes_of(call.dtype), row_bytes = call.width * item;
  const int64_t room = input.number(0, call.num_rows * row_bytes);
  Guarded values(all);
  const uint32_t spread = 1 << input.number(0, 8);
  for (int64_t i = 0; i < all; ++i)
    values.as<uint8_t>()[i] = i % item == item - 1 ? input.random() % spread : input.random();
  std::copy_n(input.rest(), std::min<size_t>(input.left(), all), values.as<uint8_t>());
  int32_t expected = 0;
  Planes first = {};
  std::vector<uint8_t> first_data;
  for (const Operators* operators : variants()) {
    Guarded data(room), again(all);
    again.copied(values.as<void>());
    call.values = values.as<void>(), call.data = data.marked().as<void>(), call.num_bytes = room;
    const int32_t refused = operators->split(&call);
    if (operators == variants().front()) expected = refused, first = call;
    if (refused != expected) fail("some variants refuse these values", operators->name);
    if (refused) continue;
    if (call.num_bytes > room || call.bits != first.bits || call.num_bytes != first.num_bytes) fail("other planes", operators->name);
    std::vector<uint8_t> made(data.as<uint8_t>(), data.as<uint8_t>() + call.num_bytes);
    if (operators == variants().front()) first_data = made;
    if (made != first_data) fail("other bytes of the planes", operators->name);
    Guarded exact(made.size());
    call.data = exact.copied(made.data()).as<void>();
    for (int64_t row = 0; row < call.num_rows; ++row) memset(again.as<char>() + row * call.stride, 0x5a, row_bytes);
    call.values = again.as<void>();
    if (operators->join(&call)) fail("its own planes are refused", operators->name);
    if (memcmp(again.as<void>(), values.as<void>(), all)) fail("other values come back", operators->name);
  }
  return 0;
}
