// Values in planes, as a store, an exported file or an object of a bucket may hold them: whatever the bytes are, all
// variants write the same values or refuse them.

#include "input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  Input input(bytes, size);
  Planes call = {};
  const int64_t all = choose_form(input, call, 3), item = bytes_of(call.dtype), row_bytes = call.width * item;
  std::vector<uint8_t> data;
  if (input.flag()) {
    // Sound data that the rest of the input damages.
    Guarded values(all), room(call.num_rows * row_bytes);
    const int spread = 1 << input.number(0, 6);
    for (int64_t i = 0; i + item <= all; i += item)
      values.as<uint8_t>()[i + item - 1] = input.random() % spread, values.as<uint8_t>()[i] = input.random();
    call.values = values.as<void>(), call.data = room.as<void>(), call.num_bytes = room.size();
    if (!variants().back()->split(&call)) data.assign(room.as<uint8_t>(), room.as<uint8_t>() + call.num_bytes);
    for (const uint8_t* at = input.rest(); at + 4 <= bytes + size; at += 4) {
      const size_t place = (at[0] << 16 | at[1] << 8 | at[2]) % (data.size() + 1);
      if (place < data.size()) data[place] ^= at[3];
      else data.resize(data.size() - std::min<size_t>(data.size(), at[3] & 15));
    }
  } else {
    call.bits = input.number(0, 5);
    data.assign(input.rest(), input.rest() + input.left());
  }
  Guarded stored(data.size());
  stored.copied(data.data());
  call.data = stored.as<void>(), call.num_bytes = data.size();
  int32_t expected = 0;
  std::vector<uint8_t> first(all), found(all);
  for (const Operators* operators : variants()) {
    Guarded values(all);
    values.copied(std::vector<uint8_t>(all, 0xa5).data());
    call.values = values.as<void>();
    const int32_t refused = operators->join(&call);
    found.assign(values.as<uint8_t>(), values.as<uint8_t>() + all);
    if (operators == variants().front()) expected = refused, first = found;
    if (refused != expected) fail("some variants refuse these planes", operators->name);
    if (!refused && found != first) fail("other values of the same planes", operators->name);
    for (int64_t row = 0; row + 1 < call.num_rows; ++row)
      for (int64_t i = row * call.stride + row_bytes; i < (row + 1) * call.stride; ++i)
        if (found[i] != 0xa5) fail("bytes between rows are written", operators->name);
  }
  return 0;
}
