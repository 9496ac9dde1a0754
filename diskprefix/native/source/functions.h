// Functions of one number. Those of C libraries differ in last bits, by library and by CPU. These only add, multiply, divide
// and compare, in double precision and in a fixed order, so their bits are the same everywhere. Their relative errors are below
// 1e-14: nearly all results, rounded to float32, are the closest numbers.

#pragma once

#include <cstdint>
#include <cstring>

#include "vector.h"

namespace diskprefix {
namespace {
namespace functions {

constexpr double MAGIC = 6755399441055744.0;  // 1.5 × 2^52: adding it rounds to an integer, which the last bits then hold

inline int64_t bits_of(double x) { return loaded<int64_t>(&x); }
inline double of_bits(int64_t bits) { return loaded<double>(&bits); }
inline double size_of(double x) { return of_bits(bits_of(x) & INT64_MAX); }
inline double with_sign(double size, double x) { return of_bits(bits_of(size) | (bits_of(x) & INT64_MIN)); }

// Returns factors[0] + factors[1] × x + factors[2] × x² + ..
template <int COUNT>
inline double polynomial(const double (&factors)[COUNT], double x) {
  double sum = factors[COUNT - 1];
  for (int i = COUNT - 2; i >= 0; --i) sum = sum * x + factors[i];
  return sum;
}

// exp(x) = power + excess, where `power` is the power of 2 near it. x is limited to ±200, beyond which float32 has 0 and infinity.
struct Exponential {
  double power, excess;

  explicit Exponential(double x) {
    // x = n × log(2) + rest. n times the first part of log(2), which has 32 bits, is exact.
    constexpr double LOG2_E = 1.4426950408889634, LOG_2 = 0.69314718036912382, LOG_2_REST = 1.9082149292705877e-10;
    // (exp(rest) - 1) / rest, by Taylor.
    static constexpr double FACTORS[] = {
        1.0, 1.0 / 2, 1.0 / 6, 1.0 / 24, 1.0 / 120, 1.0 / 720, 1.0 / 5040, 1.0 / 40320, 1.0 / 362880, 1.0 / 3628800,
        1.0 / 39916800, 1.0 / 479001600};
    x = x > 200.0 ? 200.0 : x < -200.0 ? -200.0 : x;
    const double shifted = x * LOG2_E + MAGIC, n = shifted - MAGIC, rest = (x - n * LOG_2) - n * LOG_2_REST;
    power = of_bits((int64_t)(((uint64_t)bits_of(shifted) + 1023) << 52));
    excess = power * (rest * polynomial(FACTORS, rest));
  }
};

inline double exp(double x) {
  const Exponential power(x);
  return power.power + power.excess;
}

// exp(x) - 1.
inline double expm1(double x) {
  const Exponential power(x);
  return (power.power - 1.0) + power.excess;
}

inline double tanh(double x) {
  const double above = expm1(2.0 * size_of(x));
  return with_sign(above / (above + 2.0), x);
}

// The logarithm of a normal number above 0.
inline double log_of_normal(double x) {
  constexpr double LOG_2 = 0.69314718055994531;
  // atanh(part) / part, by Taylor in its square, for a part of up to 0.172.
  static constexpr double FACTORS[] = {1.0, 1.0 / 3, 1.0 / 5, 1.0 / 7, 1.0 / 9, 1.0 / 11, 1.0 / 13, 1.0 / 15, 1.0 / 17, 1.0 / 19};
  // x = 2^n × near, where near is between √½ and √2.
  constexpr int64_t ROOT_OF_HALF = 0x3fe6a09e667f3bcd;
  const int64_t n = (bits_of(x) - ROOT_OF_HALF) >> 52;
  const double near = of_bits(bits_of(x) - (int64_t)((uint64_t)n << 52)), part = (near - 1.0) / (near + 1.0);
  return (double)n * LOG_2 + 2.0 * part * polynomial(FACTORS, part * part);
}

// log(1 + x). Adds what the sum loses (Kahan), so that it is exact near 0, too.
inline double log1p(double x) {
  const double sum = 1.0 + x;
  if (!(sum > 0.0)) return sum == 0.0 ? -(double)__builtin_inff() : (double)__builtin_nanf("");
  if (sum > 1e300) return x;
  return log_of_normal(sum) - ((sum - 1.0) - x) / sum;
}

inline double erf(double x) {
  // erf(x) / x as a polynomial of x² / 8 - 1, which is between -1 and 1 for |x| < 4: interpolated at Chebyshev's nodes, in 60
  // digits. From 4 on, the closest float32 is 1.
  static constexpr double FACTORS[] = {
      0.35353099564340534, -0.17657623330130523, 0.13167511689457301, -0.10771044253545135, 0.090208994119236954,
      -0.074727865533420743, 0.059886904826834321, -0.045765113435603362, 0.033060634426595951, -0.02247354443570853,
      0.014349587142508053, -0.0086063389679000794, 0.0048536026717978286, -0.0025778442545346778, 0.0012924610709774494,
      -0.0006137646682407346, 0.00027584292755275936, -0.00011653212012305502, 4.7437560640449226e-05,
      -1.9634665615239374e-05, 7.2297437613821044e-06, -1.7836268604372104e-06, 6.2433565017861229e-07,
      -4.8793014736592978e-07, 1.5025706497805747e-07};
  const double size = size_of(x);
  return size >= 4.0 ? with_sign(1.0, x) : x * polynomial(FACTORS, x * x * 0.125 - 1.0);
}

// The sine and the cosine of an angle, which lose precision from about 10^8 on, where float32 has no fractions.
struct Rotation {
  double sine, cosine;

  explicit Rotation(double angle) {
    // angle = n × π/2 + rest. n times each of the first two parts of π/2, which have 27 bits, is exact.
    constexpr double OF_QUARTERS = 0.63661977236758134, PART_1 = 1.570796325802803;
    constexpr double PART_2 = 9.920935739593517e-10, PART_3 = 5.721188726109832e-18;
    // sin(rest) / rest and cos(rest), by Taylor in the square of the rest.
    static constexpr double SINE[] = {
        1.0, -1.0 / 6, 1.0 / 120, -1.0 / 5040, 1.0 / 362880, -1.0 / 39916800, 1.0 / 6227020800, -1.0 / 1307674368000};
    static constexpr double COSINE[] = {
        1.0, -1.0 / 2, 1.0 / 24, -1.0 / 720, 1.0 / 40320, -1.0 / 3628800, 1.0 / 479001600, -1.0 / 87178291200,
        1.0 / 20922789888000};
    const double shifted = angle * OF_QUARTERS + MAGIC, n = shifted - MAGIC;
    double rest = ((angle - n * PART_1) - n * PART_2) - n * PART_3;
    // From 10^15 on, `n` is not the closest integer.
    rest = rest > 1.0 ? 1.0 : rest < -1.0 ? -1.0 : rest;
    const double square = rest * rest, upright = rest * polynomial(SINE, square), across = polynomial(COSINE, square);
    const int64_t quarters = bits_of(shifted);
    const int64_t sign_of_sine = quarters & 2, sign_of_cosine = (quarters + 1) & 2;
    sine = of_bits(bits_of(quarters & 1 ? across : upright) ^ (int64_t)((uint64_t)sign_of_sine << 62));
    cosine = of_bits(bits_of(quarters & 1 ? upright : across) ^ (int64_t)((uint64_t)sign_of_cosine << 62));
  }
};

}  // namespace functions
}  // namespace
}  // namespace diskprefix
