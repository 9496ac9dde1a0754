// Weights of a GGUF file of any type, with any bytes, from memory or from a file that may be cut short: packed whole and in
// two parts they are the same, and each row of them has the same numbers in all variants.

#include "forms.h"

namespace {

struct FileType {
  int64_t number, block_bytes, grid_bytes;
  QuantForm form;
};

const std::vector<FileType> TYPES = {
    {2, 18, 0, {4, 32, 0, IN_FLOAT16, {}}},   {3, 20, 0, {4, 32, 1, IN_FLOAT16, {}}},
    {6, 22, 0, {5, 32, 0, IN_FLOAT16, {}}},   {7, 24, 0, {5, 32, 1, IN_FLOAT16, {}}},
    {8, 34, 0, {8, 32, 0, IN_FLOAT16, {}}},   {10, 84, 0, {2, 16, 1, IN_NIBBLES, {}}},
    {11, 110, 0, {3, 16, 0, IN_BYTES, {}}},   {12, 144, 0, {4, 32, 1, IN_BYTES, {}}},
    {13, 176, 0, {5, 32, 1, IN_BYTES, {}}},   {14, 210, 0, {6, 16, 0, IN_BYTES, {}}},
    {16, 66, 2048, {3, 32, 0, IN_BYTES, IQ2}}, {17, 74, 4096, {3, 16, 0, IN_BYTES, IQ2}},
    {18, 98, 1024, {4, 32, 0, IN_BYTES, IQ3_SMALL}}, {19, 50, 16384, {3, 32, 0, IN_BYTES, IQ1}},
    {20, 18, 0, {4, 32, 0, IN_FLOAT16, IQ4}}, {21, 110, 2048, {4, 32, 0, IN_BYTES, IQ3}},
    {22, 82, 8192, {3, 16, 0, IN_BYTES, IQ2}}, {23, 136, 0, {4, 32, 0, IN_BYTES, IQ4}},
    {29, 56, 16384, {3, 16, 0, IN_BYTES, IQ1}}, {34, 54, 0, {2, 32, 0, SHARED, TERNARY}},
    {35, 66, 0, {2, 32, 0, SHARED, TERNARY}}, {39, 17, 0, {4, 32, 0, IN_EXPONENTS, FP4}},
    {40, 36, 0, {4, 16, 0, IN_FLOAT8, FP4}},  {41, 18, 0, {1, 128, 0, IN_FLOAT16, BINARY}},
    {42, 18, 0, {2, 64, 0, IN_FLOAT16, TERNARY}}};

int file_with(const void* content, size_t bytes, int64_t offset) {
  static const int file = memfd_create("weights", 0);
  if (ftruncate(file, 0) || pwrite(file, content, bytes, offset) != (ssize_t)bytes) fail("no file", "none");
  return file;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  Input input(bytes, size);
  cut() = input.random();
  const FileType& type = TYPES[input.number(0, TYPES.size() - 1)];
  const int64_t units = input.number(1, 3), columns = units * type.form.unit_columns(), strips = input.number(1, 3);
  const int64_t of_row = units * type.block_bytes, rows = input.flag() ? strips * 16 : input.number(1, 60);
  const bool has_order = rows != strips * 16 || input.flag(), is_cut_short = input.number(0, 7) == 7;
  const int64_t offset = input.number(0, 300), threads = input.number(1, 3), parted = input.number(0, strips);
  Guarded content(rows * of_row), grid(type.grid_bytes), order(has_order ? strips * 16 * sizeof(int32_t) : 0);
  const bool has_factors = type.form.scales == IN_FLOAT8 && input.flag();
  Guarded factors(has_factors ? strips * 16 * sizeof(float) : 0);
  for (int64_t i = 0; has_factors && i < strips * 16; ++i) factors.as<float>()[i] = 0.01f * (i + 1);
  for (int64_t i = 0; i < type.grid_bytes; ++i) grid.as<uint8_t>()[i] = input.random() % (type.form.bits == 4 ? 8 : 4);
  for (int64_t i = 0; has_order && i < strips * 16; ++i) order.as<int32_t>()[i] = input.random() % rows;
  content.filled(input);
  std::copy_n(input.rest(), std::min(input.left(), content.size()), content.as<uint8_t>());
  Packing call = {type.number, strips, columns, -1, 0, content.as<void>(), grid.as<void>(),
                  has_order ? order.as<int32_t>() : nullptr, has_factors ? factors.as<float>() : nullptr, nullptr, threads};
  const int64_t of_strip = units * type.form.unit_bytes();
  std::vector<uint8_t> first_rows, first_packed;
  for (const Operators* operators : variants()) {
    Guarded packed(strips * of_strip);
    call.content = content.as<void>(), call.order = has_order ? order.as<int32_t>() : nullptr, call.strips = strips;
    call.out = packed.marked().as<void>();
    if (operators->pack(&call)) fail("packing fails", operators->name);
    for (int part = 0; part < 2; ++part) {
      const int64_t begin = part ? parted : 0, end = part ? strips : parted;
      if (begin == end) continue;
      Guarded again((end - begin) * of_strip);
      Packing some = call;
      some.strips = end - begin, some.num_threads = 1, some.out = again.marked().as<void>();
      if (has_factors) some.factors += begin * 16;
      if (has_order) some.order += begin * 16;
      else some.content = (const char*)call.content + begin * 16 * of_row;
      if (operators->pack(&some)) fail("packing a part fails", operators->name);
      if (memcmp(again.as<void>(), packed.as<char>() + begin * of_strip, again.size())) fail("a part is packed otherwise", operators->name);
    }
    Guarded read(strips * of_strip);
    Packing from_file = call;
    from_file.content = nullptr, from_file.offset = offset, from_file.out = read.marked().as<void>();
    from_file.file = file_with(content.as<void>(), content.size() - is_cut_short, offset);
    const int32_t failure = operators->pack(&from_file);
    // Rows that are not asked for may be missing.
    if (failure ? !is_cut_short || failure != 2 : is_cut_short && !has_order) fail("reading fails, or it should", operators->name);
    if (!failure && memcmp(read.as<void>(), packed.as<void>(), packed.size())) fail("what is read is packed otherwise", operators->name);
    std::vector<uint8_t> bytes_of_it(packed.as<uint8_t>(), packed.as<uint8_t>() + packed.size());
    if (has_common_bits(operators)) {
      if (first_packed.empty()) first_packed = bytes_of_it;
      if (bytes_of_it != first_packed) fail("another variant packs otherwise", operators->name);
    }
    const TestMatrix matrix(type.form, strips * 16, columns, std::move(packed), Guarded(0), false);
    Guarded ids(strips * 16 * sizeof(int64_t)), out(strips * 16 * columns * 2);
    for (int64_t i = 0; i < strips * 16; ++i) ids.as<int64_t>()[i] = strips * 16 - 1 - i;
    const Lookup look = {strips * 16, ids.as<int64_t>(), matrix.get(), out.marked().as<void>(), threads};
    if (operators->look_up(&look)) fail("looking rows up fails", operators->name);
    std::vector<uint8_t> found(out.as<uint8_t>(), out.as<uint8_t>() + out.size());
    if (first_rows.empty()) first_rows = found;
    if (found != first_rows) fail("other numbers of the same rows", operators->name);
  }
  return 0;
}
