// Conversions between numbers and codes of FP8 and FP4, each in one pass over a matrix: the largest magnitudes of its
// blocks, the codes of its numbers times the factors of their blocks, and the numbers of codes times such factors.
//
// The results are those of plain torch bit for bit: formats.py, blocks.py and nvfp4.py.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>

namespace {

constexpr uint32_t kInfinity = 0x7f800000;

inline uint32_t bits_of(float number) {
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  return bits;
}

inline float of_bits(uint32_t bits) {
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}

// Numbers come as the bits of float32 or of bfloat16, which are its upper half.
inline float number(uint32_t bits) { return of_bits(bits); }
inline float number(uint16_t bits) { return of_bits(uint32_t(bits) << 16); }

template <typename Bits>
constexpr Bits infinity() {
  return Bits(sizeof(Bits) == 4 ? kInfinity : kInfinity >> 16);
}

// Calls `each` with the blocks of a row and how many columns they have; the compiler knows the usual numbers.
template <typename Each>
inline void by_width(int64_t width, int64_t columns, const Each& each) {
  const int64_t whole = columns / width;
  if (width == 16)
    for (int64_t block = 0; block < whole; ++block) each(block, 16);
  else if (width == 32)
    for (int64_t block = 0; block < whole; ++block) each(block, 32);
  else
    for (int64_t block = 0; block < whole; ++block) each(block, width);
  if (columns % width) each(whole, columns % width);
}

// Magnitudes are ordered as their bits are, and NaN is above infinity.
template <typename Bits, bool kNanSpreads>
inline Bits magnitude(Bits bits) {
  const Bits found = bits & Bits(Bits(~Bits(0)) >> 1);
  return !kNanSpreads && found > infinity<Bits>() ? Bits(0) : found;
}

template <typename Bits, bool kNanSpreads>
inline void raise(const Bits* __restrict from, int64_t count, Bits* __restrict most) {
  for (int64_t index = 0; index < count; ++index) {
    const Bits found = magnitude<Bits, kNanSpreads>(from[index]);
    most[index] = found > most[index] ? found : most[index];
  }
}

template <typename Bits>
inline Bits largest(const Bits* from, int64_t count) {
  Bits found = 0;
  for (int64_t index = 0; index < count; ++index) found = from[index] > found ? from[index] : found;
  return found;
}

template <typename Bits, bool kNanSpreads>
void largest_of(const void* matrix, int64_t rows, int64_t columns, int64_t height, int64_t width, float* out,
                int threads) {
  const Bits* from = static_cast<const Bits*>(matrix);
  const int64_t stripes = (rows + height - 1) / height, blocks = (columns + width - 1) / width;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const std::unique_ptr<Bits[]> of_columns(new Bits[columns]);
    Bits* const most = of_columns.get();
#pragma omp for
    for (int64_t stripe = 0; stripe < stripes; ++stripe) {
      std::fill(most, most + columns, Bits(0));
      const int64_t end = std::min(rows, (stripe + 1) * height);
      for (int64_t row = stripe * height; row < end; ++row)
        raise<Bits, kNanSpreads>(from + row * columns, columns, most);
      float* const to = out + stripe * blocks;
      if (width == 1)
        for (int64_t block = 0; block < blocks; ++block) to[block] = number(most[block]);
      else
        by_width(width, columns, [&](int64_t block, int64_t count) {
          to[block] = number(largest(most + block * width, count));
        });
    }
  }
}

// A number's code, without sign as that of a magnitude. NaN has the code of all ones but the sign.
template <int kMantissa, int kBias, uint32_t kLargest, int kBits>
struct Format {
  static constexpr int kCodesAByte = 8 / kBits;
  static constexpr bool kDraws = false;

  static inline uint32_t with_sign(uint32_t bits, uint32_t code) {
    constexpr uint32_t kOnes = (1u << (kBits - 1)) - 1;
    return (bits & 0x7fffffff) > kInfinity ? kOnes : code | bits >> 31 << (kBits - 1);
  }

  // The nearest, ties to even, saturating.
  static inline uint32_t code(float value, float) {
    constexpr int kShift = 23 - kMantissa;
    const uint32_t bits = bits_of(value), within = std::min(bits & 0x7fffffff, kLargest);
    const uint32_t rounded =
        ((within + ((1u << (kShift - 1)) - 1) + ((within >> kShift) & 1)) >> kShift) - ((127u - kBias) << kMantissa);
    // Below the smallest normal number codes are equally apart; so are the float32 from here on.
    const float apart = of_bits(uint32_t(127 + 23 + 1 - kBias - kMantissa) << 23);
    const uint32_t subnormal = bits_of(of_bits(within) + apart) - bits_of(apart);
    return with_sign(bits, within < (uint32_t(127 + 1 - kBias) << 23) ? subnormal : rounded);
  }
};
using E4M3 = Format<3, 7, 0x43e00000, 8>;   // up to 448
using E5M2 = Format<2, 15, 0x47600000, 8>;  // up to 57344
using E2M1 = Format<1, 1, 0x40c00000, 4>;   // up to 6

// Up where a random number below 1 is smaller than the distance from the next smaller number, as a part of the gap.
struct StochasticE2M1 : E2M1 {
  static constexpr bool kDraws = true;

  static inline uint32_t code(float value, float random) {
    const uint32_t bits = bits_of(value), within = std::min(bits & 0x7fffffff, 0x40c00000u);
    // Two codes for each power of two from 2 on; below, the gap is 0.5.
    const uint32_t power = std::max(within >> 23, 127u) - 127;
    const float gaps = of_bits(within) * of_bits((128 - power) << 23);
    const int32_t below = int32_t(gaps);
    return with_sign(bits, 2 * power + uint32_t(below) + uint32_t(random < gaps - float(below)));
  }
};

// The codes of numbers that have the factor of their block, or each its own.
template <typename Bits, typename To, bool kOwnFactor>
inline void codes_of(const Bits* __restrict from, const float* __restrict factors, const float* __restrict random,
                     int64_t count, uint8_t* __restrict to) {
  const float of_all = kOwnFactor ? 0.0f : *factors;
  for (int64_t index = 0; index < count; ++index)
    to[index] = uint8_t(To::code(number(from[index]) * (kOwnFactor ? factors[index] : of_all),
                                 To::kDraws ? random[index] : 0.0f));
}

// Two codes a byte, from one, and back; `count` codes.
inline void pack(const uint8_t* __restrict from, int64_t count, uint8_t* __restrict to) {
  for (int64_t index = 0; index < count / 2; ++index) to[index] = uint8_t(from[2 * index] | from[2 * index + 1] << 4);
}

inline void unpack(const uint8_t* __restrict from, int64_t count, uint8_t* __restrict to) {
  for (int64_t index = 0; index < count / 2; ++index) {
    to[2 * index] = from[index] & 15;
    to[2 * index + 1] = from[index] >> 4;
  }
}

template <typename Bits, typename To>
void encode(const void* matrix, int64_t rows, int64_t columns, int64_t height, int64_t width, const float* factors,
            const float* random, uint8_t* out, int threads) {
  const int64_t blocks = (columns + width - 1) / width, bytes = columns / To::kCodesAByte;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const std::unique_ptr<uint8_t[]> unpacked(new uint8_t[columns]);
#pragma omp for
    for (int64_t row = 0; row < rows; ++row) {
      const Bits* from = static_cast<const Bits*>(matrix) + row * columns;
      const float* of_row = factors + row / height * blocks;
      const float* drawn = To::kDraws ? random + row * columns : random;
      uint8_t* const line = out + row * bytes;
      uint8_t* const to = To::kCodesAByte == 1 ? line : unpacked.get();
      if (width == 1)
        codes_of<Bits, To, true>(from, of_row, drawn, columns, to);
      else
        by_width(width, columns, [&](int64_t block, int64_t count) {
          const int64_t first = block * width;
          codes_of<Bits, To, false>(from + first, of_row + block, To::kDraws ? drawn + first : drawn, count,
                                        to + first);
        });
      if (To::kCodesAByte == 2) pack(to, columns, line);
    }
  }
}

inline void put(float value, float* to) { *to = value; }
inline void put(float value, uint16_t* to) { *to = uint16_t(bits_of(value) >> 16); }

enum class Factor { kNone, kOne, kOwn };

template <typename Out, Factor kFactor>
inline void numbers_of(const uint8_t* __restrict from, const float* __restrict numbers, const float* __restrict factors,
                       int64_t count, Out* __restrict to) {
  for (int64_t index = 0; index < count; ++index) {
    const float found = numbers[from[index]];
    put(kFactor == Factor::kNone ? found : found * factors[kFactor == Factor::kOwn ? index : 0], to + index);
  }
}

template <typename Out>
void decode(const uint8_t* codes, int64_t rows, int64_t columns, int64_t height, int64_t width, int bits,
            const float* numbers, const float* factors, void* out, int threads) {
  const int64_t blocks = (columns + width - 1) / width, bytes = columns * bits / 8;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const std::unique_ptr<uint8_t[]> unpacked(new uint8_t[columns]);
#pragma omp for
    for (int64_t row = 0; row < rows; ++row) {
      const uint8_t* from = codes + row * bytes;
      if (bits == 4) unpack(from, columns, unpacked.get());
      if (bits == 4) from = unpacked.get();
      const float* of_row = factors ? factors + row / height * blocks : nullptr;
      Out* to = static_cast<Out*>(out) + row * columns;
      if (!factors)
        numbers_of<Out, Factor::kNone>(from, numbers, nullptr, columns, to);
      else if (width == 1)
        numbers_of<Out, Factor::kOwn>(from, numbers, of_row, columns, to);
      else
        by_width(width, columns, [&](int64_t block, int64_t count) {
          numbers_of<Out, Factor::kOne>(from + block * width, numbers, of_row + block, count, to + block * width);
        });
    }
  }
}

// The nearest bfloat16, ties to even.
inline uint16_t as_bfloat16(float value) {
  const uint32_t bits = bits_of(value);
  return (bits & 0x7fffffff) > kInfinity ? 0x7fc0 : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

constexpr int kGroup = 16;

inline void transform_group(const uint16_t* __restrict from, const double* __restrict matrix, uint16_t* __restrict to) {
  double sums[kGroup] = {};
  for (int row = 0; row < kGroup; ++row) {
    const double one = number(from[row]);
    for (int column = 0; column < kGroup; ++column) sums[column] += one * matrix[row * kGroup + column];
  }
  for (int column = 0; column < kGroup; ++column) to[column] = as_bfloat16(float(sums[column]));
}

#define EXPORTED extern "C" __attribute__((visibility("default")))

}  // namespace

// Of each but the last:
//   matrix        [rows, columns] without gaps: float32, or bfloat16
//   height, width of a block; blocks at an edge may be partial
//   threads       at most so many work on it

//   nan_spreads   whether a block with NaN has NaN; else NaN is skipped
//   out           float32, [rows of blocks, columns of blocks]: the largest magnitude
EXPORTED void te_precision_block_amaxes(const void* matrix, int is_float32, int64_t rows, int64_t columns,
                                        int64_t height, int64_t width, int nan_spreads, float* out, int threads) {
  const auto chosen = is_float32 ? (nan_spreads ? largest_of<uint32_t, true> : largest_of<uint32_t, false>)
                                 : (nan_spreads ? largest_of<uint16_t, true> : largest_of<uint16_t, false>);
  chosen(matrix, rows, columns, height, width, out, threads);
}

//   factors       float32, [rows of blocks, columns of blocks]
//   random        float32, [rows, columns], below 1, to round E2M1 up or down; null to round to nearest
//   mantissa      bits of the format's: 3 (E4M3), 2 (E5M2) or 1 (E2M1, an even number of columns and of a block's)
//   out           [rows, columns], or of E2M1 [rows, columns / 2], the even code in the lower half
EXPORTED void te_precision_encode(const void* matrix, int is_float32, int64_t rows, int64_t columns, int64_t height,
                                  int64_t width, const float* factors, const float* random, int mantissa, uint8_t* out,
                                  int threads) {
  const auto chosen = mantissa == 3   ? (is_float32 ? encode<uint32_t, E4M3> : encode<uint16_t, E4M3>)
                      : mantissa == 2 ? (is_float32 ? encode<uint32_t, E5M2> : encode<uint16_t, E5M2>)
                      : random        ? (is_float32 ? encode<uint32_t, StochasticE2M1> : encode<uint16_t, StochasticE2M1>)
                                      : (is_float32 ? encode<uint32_t, E2M1> : encode<uint16_t, E2M1>);
  chosen(matrix, rows, columns, height, width, factors, random, out, threads);
}

//   codes         as te_precision_encode writes them
//   bits          of a code: 8 or 4
//   numbers       float32, of each code
//   factors       float32, [rows of blocks, columns of blocks]; or null
//   out           [rows, columns]: float32, or bfloat16, which has to hold the products
EXPORTED void te_precision_decode(const uint8_t* codes, int64_t rows, int64_t columns, int64_t height, int64_t width,
                                  int bits, const float* numbers, const float* factors, void* out, int to_float32,
                                  int threads) {
  (to_float32 ? decode<float> : decode<uint16_t>)(codes, rows, columns, height, width, bits, numbers, factors, out,
                                                  threads);
}

//   groups        of 16 numbers that follow one another: bfloat16
//   matrix        float64, [16, 16]: each group as a row is multiplied by it, and rounded to float32 and to bfloat16
//   out           as groups
EXPORTED void te_precision_transform_groups(const uint16_t* groups, int64_t count, const double* matrix, uint16_t* out,
                                            int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t group = 0; group < count; ++group) transform_group(groups + group * kGroup, matrix, out + group * kGroup);
}
