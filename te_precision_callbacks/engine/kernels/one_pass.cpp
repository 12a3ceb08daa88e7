// One pass over a tensor: the columns of columns.py, from each element read once.
//
// A tensor is measured in pieces, whose results are added in their order: the number of threads changes no result. A piece
// is measured in blocks, which stay in the first cache. Extremes and counts are exact. Sums are taken in float over eight
// numbers a lane, and these in double (measure_block); with u = 2^-24, a rounding of float, and the sums taken as exact in
// double, they are at most this wrong:
//
//   sum                 7 u sum(|x|)    seven roundings, as the first number is added to 0
//   abs_sum             7 u sum(|x|)
//   square_sum          8 u sum(x^2)    of the first square too
//   error_square_sum   10 u sum(e^2)    e is rounded, which counts twice in its square
//   underflow_square_sum  8 u sum(x^2)  over the numbers whose code is 0, scaled by a power of two
//
// (N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 4.2.) Roundings go up and down alike, so that
// sums of whole tensors are wrong by a thousandth of that. A block is measured once more, in double alone
// (measure_exactly), where float does not do:
//
//   - something is inf or nan, or a square would overflow;
//   - its largest number is below 2^-44, or the sum of its squared errors, or that of its scaled underflows, below 2^-90:
//     what is lost where float has no more exponents, 2^-126 an element, would matter;
//   - the square of its mean is more than 2/3 of its variance. With it below that in all blocks, and so in the whole
//     tensor, the variance sum(x^2) / n - mean^2 is wrong by at most 8 u 5/3 + 2 * 7 u sqrt(2/3 * 5/3) = 28 u of itself,
//     and the standard deviation by 14 u, or 8.4e-7.
//
// Vectors are those of GCC and Clang; all loops over their lanes disappear.

#pragma GCC optimize("no-tree-loop-vectorize")  // loops have their vectors already

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#if defined(__SSE__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512BW__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kRun = 4;              // pairs of vectors whose sums are taken in float
constexpr int64_t kBlock = 4096;     // elements, as many runs
constexpr int64_t kPiece = 1 << 16;  // elements, as many blocks
constexpr int kBins = 256;           // of exponents
constexpr int kAhead = 2048;         // bytes: not every processor, as some virtual machine's, prefetches by itself

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Units __attribute__((vector_size(4 * kLanes)));
typedef float HalfFloats __attribute__((vector_size(2 * kLanes)));
typedef double Doubles __attribute__((vector_size(4 * kLanes)));  // of half as many lanes
typedef int64_t Longs __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Shorts __attribute__((vector_size(2 * kLanes)));
typedef int16_t SignedShorts __attribute__((vector_size(2 * kLanes)));
typedef uint16_t TwiceShorts __attribute__((vector_size(4 * kLanes)));
typedef int16_t SignedTwiceShorts __attribute__((vector_size(4 * kLanes)));
typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
typedef uint8_t TwiceBytes __attribute__((vector_size(2 * kLanes)));

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int32_t kMagnitude = 0x7fffffff;
constexpr int32_t kInfinityBits = 0x7f800000;
constexpr uint32_t kNone = 0xffffffff;
constexpr float kRounding = 1.0f + 1.0f / (1 << 21);  // ROUNDING in columns.py

// What holds of each lane of Ints, and the lanes of which it has held. AVX-512 has masks of bits, whose bits are counted
// beside the vectors; else each lane is 0 or -1.
#if defined(__AVX512BW__)
typedef __mmask16 Mask;
typedef int64_t Count;
inline Mask is_less(Ints a, Ints b) { return _mm512_cmplt_epi32_mask((__m512i)a, (__m512i)b); }
inline Mask is_zero(Ints a) { return _mm512_testn_epi32_mask((__m512i)a, (__m512i)a); }
inline Mask is_zero(Floats a) { return _mm512_cmp_ps_mask((__m512)a, _mm512_setzero_ps(), _CMP_EQ_OQ); }
inline Mask is_greater(Floats a, Floats b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ); }
inline Floats where(Mask mask, Floats a, Floats b) { return (Floats)_mm512_mask_blend_ps(mask, (__m512)b, (__m512)a); }
inline Ints or_zero(Mask mask, Ints a) { return (Ints)_mm512_maskz_mov_epi32(mask, (__m512i)a); }
inline Mask both(Mask a, Mask b) { return a & b; }
inline Mask first_alone(Mask a, Mask b) { return a & ~b; }
inline void add_to(Count& count, Mask mask) { count += __builtin_popcount(mask); }
#else
typedef Ints Mask;
typedef Ints Count;
inline Mask is_less(Ints a, Ints b) { return a < b; }
inline Mask is_zero(Ints a) { return a == 0; }
inline Mask is_zero(Floats a) { return a == 0.0f; }
inline Mask is_greater(Floats a, Floats b) { return a > b; }
inline Floats where(Mask mask, Floats a, Floats b) { return mask ? a : b; }
inline Ints or_zero(Mask mask, Ints a) { return a & mask; }
inline Mask both(Mask a, Mask b) { return a & b; }
inline Mask first_alone(Mask a, Mask b) { return a & ~b; }
inline void add_to(Count& count, Mask mask) { count -= mask; }
#endif

// The larger and the smaller number, b where one is nan. GCC 12 would often take a comparison and a choice.
#if defined(__AVX512BW__)
inline Floats larger(Floats a, Floats b) { return (Floats)_mm512_max_ps((__m512)a, (__m512)b); }
inline Floats smaller(Floats a, Floats b) { return (Floats)_mm512_min_ps((__m512)a, (__m512)b); }
inline Units smaller(Units a, Units b) { return (Units)_mm512_min_epu32((__m512i)a, (__m512i)b); }
inline TwiceShorts smaller(TwiceShorts a, TwiceShorts b) { return (TwiceShorts)_mm512_min_epu16((__m512i)a, (__m512i)b); }
#elif defined(__AVX2__)
inline Floats larger(Floats a, Floats b) { return (Floats)_mm256_max_ps((__m256)a, (__m256)b); }
inline Floats smaller(Floats a, Floats b) { return (Floats)_mm256_min_ps((__m256)a, (__m256)b); }
inline Units smaller(Units a, Units b) { return (Units)_mm256_min_epu32((__m256i)a, (__m256i)b); }
inline TwiceShorts smaller(TwiceShorts a, TwiceShorts b) { return (TwiceShorts)_mm256_min_epu16((__m256i)a, (__m256i)b); }
#else
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }
inline Floats smaller(Floats a, Floats b) { return a < b ? a : b; }
inline Units smaller(Units a, Units b) { return a < b ? a : b; }
inline TwiceShorts smaller(TwiceShorts a, TwiceShorts b) { return a < b ? a : b; }
#endif

// a - b, and 0 where b is larger.
inline TwiceShorts less(TwiceShorts a, TwiceShorts b) {
#if defined(__AVX512BW__)
  return (TwiceShorts)_mm512_subs_epu16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (TwiceShorts)_mm256_subs_epu16((__m256i)a, (__m256i)b);
#else
  return a > b ? a - b : TwiceShorts{};
#endif
}

// The two halves of a vector as doubles. GCC 12 would convert quarters and put them together.
struct Halves {
  Doubles half[2];
};

inline Halves as_doubles(Floats x) {
#if defined(__AVX512BW__)
  const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd((__m512)x), 1));
  return {{(Doubles)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)x)), (Doubles)_mm512_cvtps_pd(high)}};
#elif defined(__AVX2__)
  const __m128 low = _mm256_castps256_ps128((__m256)x), high = _mm256_extractf128_ps((__m256)x, 1);
  return {{(Doubles)_mm256_cvtps_pd(low), (Doubles)_mm256_cvtps_pd(high)}};
#else
  HalfFloats halves[2];
  std::memcpy(halves, &x, sizeof(halves));
  return {{__builtin_convertvector(halves[0], Doubles), __builtin_convertvector(halves[1], Doubles)}};
#endif
}

// sum + x * x. The square of a float is exact in a double, so that one rounding or two give the same sum; that of a
// difference of floats is not, and is rounded once where the processor can.
inline Doubles plus_square(Doubles sum, Doubles x) {
#if defined(__AVX512BW__)
  return (Doubles)_mm512_fmadd_pd((__m512d)x, (__m512d)x, (__m512d)sum);
#elif defined(__FMA__)
  return (Doubles)_mm256_fmadd_pd((__m256d)x, (__m256d)x, (__m256d)sum);
#else
  return sum + x * x;
#endif
}

// a * b + c, rounded once where the processor can.
inline Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512BW__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

struct Sums {
  double finite, zeros, sum, square_sum, abs_sum, underflows, overflows, error_square_sum, underflow_square_sum;
  float max, negated_min;
  uint32_t smallest;  // bits of the smallest magnitude but 0, less 1; kNone if there is none
};

const Sums kNothing = {0, 0, 0, 0, 0, 0, 0, 0, 0, -kInfinity, -kInfinity, kNone};

inline void add_to(Sums& all, const Sums& one) {
  all.finite += one.finite;
  all.zeros += one.zeros;
  all.sum += one.sum;
  all.square_sum += one.square_sum;
  all.abs_sum += one.abs_sum;
  all.underflows += one.underflows;
  all.overflows += one.overflows;
  all.error_square_sum += one.error_square_sum;
  all.underflow_square_sum += one.underflow_square_sum;
  if (one.max > all.max) all.max = one.max;
  if (one.negated_min > all.negated_min) all.negated_min = one.negated_min;
  if (one.smallest < all.smallest) all.smallest = one.smallest;
}

constexpr float power_of_two(int exponent) {
  float power = 1;
  for (; exponent < 0; ++exponent) power /= 2;
  for (; exponent > 0; --exponent) power *= 2;
  return power;
}

template <typename T, typename From>
inline T bits_of(From from) {
  static_assert(sizeof(T) == sizeof(From), "");
  T to;
  std::memcpy(&to, &from, sizeof(T));
  return to;
}

// Unsigned numbers of two bytes, and of one, as ints. GCC 12 takes the general way number by number.
inline Ints load_shorts(const void* at) {
#if defined(__AVX512BW__)
  return (Ints)_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(at)));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(at)));
#else
  Shorts shorts;
  std::memcpy(&shorts, at, sizeof(shorts));
  return __builtin_convertvector(shorts, Ints);
#endif
}

inline Ints load_bytes(const void* at) {
#if defined(__AVX512BW__)
  return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(at)));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(at)));
#else
  Bytes bytes;
  std::memcpy(&bytes, at, sizeof(bytes));
  return __builtin_convertvector(bytes, Ints);
#endif
}

inline Ints load_ints(const void* at) {
  Ints ints;
  std::memcpy(&ints, at, sizeof(ints));
  return ints;
}

inline Shorts bytes_as_shorts(const uint8_t* at) {
#if defined(__AVX512BW__)
  return (Shorts)_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
#elif defined(__AVX2__)
  return (Shorts)_mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)));
#else
  Bytes bytes;
  std::memcpy(&bytes, at, sizeof(bytes));
  return __builtin_convertvector(bytes, Shorts);
#endif
}

inline TwiceShorts as_shorts(TwiceBytes bytes) {
#if defined(__AVX512BW__)
  return (TwiceShorts)_mm512_cvtepu8_epi16((__m256i)bytes);
#elif defined(__AVX2__)
  return (TwiceShorts)_mm256_cvtepu8_epi16((__m128i)bytes);
#else
  return __builtin_convertvector(bytes, TwiceShorts);
#endif
}

// A number of a small float format, without its sign, as the bits of a float: its exponent and mantissa are shifted to
// their places, and the bias is that of a float; a subnormal number is a multiple of the smallest one. Multiplying the
// shifted bits instead would be exact too, but a hundred times slower on a processor where floats are subnormal.
template <int kMantissa, int kBias>
inline Ints magnitude_as_float(Ints magnitude) {
  const Ints normal = (magnitude << (23 - kMantissa)) + ((127 - kBias) << 23);
  const Floats subnormal = __builtin_convertvector(magnitude, Floats) * power_of_two(1 - kBias - kMantissa);
  return magnitude < (1 << kMantissa) ? bits_of<Ints>(subnormal) : normal;
}

// float16 as floats, exactly.
inline Floats from_float16(Shorts numbers) {
#if defined(__AVX512BW__)
  return (Floats)_mm512_cvtph_ps((__m256i)numbers);
#elif defined(__AVX2__) && defined(__F16C__)
  return (Floats)_mm256_cvtph_ps((__m128i)numbers);
#else
  const Ints code = load_shorts(&numbers), magnitude = code & 0x7fff, sign = (code & 0x8000) << 16;
  const Ints number = magnitude_as_float<10, 15>(magnitude), special = kInfinityBits | (magnitude << 13);
  return bits_of<Floats>((magnitude >= 0x7c00 ? special : number) | sign);
#endif
}

// As many numbers as two vectors have lanes. kAlternates: the second vector has every other one, not the second half.
struct Pair {
  Floats first, second;
};

struct Float32 {
  static constexpr int kBytes = 4;
  static constexpr bool kAlternates = false;
  static inline Floats load(const char* at) { return bits_of<Floats>(load_ints(at)); }
  static inline Pair load_pair(const char* at) { return {load(at), load(at + sizeof(Floats))}; }
};

struct BFloat16 {
  static constexpr int kBytes = 2;
  static constexpr bool kAlternates = true;
  static inline Floats load(const char* at) { return bits_of<Floats>(load_shorts(at) << 16); }
  static inline Pair load_pair(const char* at) {
    const Ints both = load_ints(at);
    return {bits_of<Floats>(both << 16), bits_of<Floats>(both & static_cast<int32_t>(0xffff0000))};
  }
  static inline float as_float(uint16_t bits) { return bits_of<float>(static_cast<uint32_t>(bits) << 16); }
};

struct Float16 {
  static constexpr int kBytes = 2;
  static constexpr bool kAlternates = false;
  static inline Floats load(const char* at) {
    Shorts numbers;
    std::memcpy(&numbers, at, sizeof(numbers));
    return from_float16(numbers);
  }
  static inline Pair load_pair(const char* at) { return {load(at), load(at + sizeof(Shorts))}; }
  static inline float as_float(uint16_t bits) { return from_float16(Shorts{} + bits)[0]; }
};

// decode: a code as a float. as_float16: codes in the upper bytes of shorts as float16, kFromFloat16 times too small; codes
// above kLargestCode, which stand for no number, may become one.
struct E4M3 {
  static constexpr float kLargest = 448.0f;
  static constexpr uint8_t kLargestCode = 0x7e;
  static constexpr float kFromFloat16 = 256.0f;  // float16 has four exponents' bits more: a bias of 15, not 7
  static inline Shorts as_float16(Shorts codes) { return (Shorts)((SignedShorts)codes >> 1) & 0xbfff; }
  static inline Floats decode(Ints code) {
    const Ints magnitude = code & 0x7f, sign = (code & 0x80) << 24;
    const Ints number = magnitude_as_float<3, 7>(magnitude), nan = Ints{} + 0x7fc00000;
    return bits_of<Floats>((magnitude == 0x7f ? nan : number) | sign);
  }
};

struct E5M2 {
  static constexpr float kLargest = 57344.0f;
  static constexpr uint8_t kLargestCode = 0x7b;
  static constexpr float kFromFloat16 = 1.0f;
  static inline Shorts as_float16(Shorts codes) { return codes; }
  static inline Floats decode(Ints code) {
    const Ints magnitude = code & 0x7f, sign = (code & 0x80) << 24;
    const Ints number = magnitude_as_float<2, 15>(magnitude), special = kInfinityBits | (magnitude << 21);
    return bits_of<Floats>((magnitude >= 0x7c ? special : number) | sign);
  }
};

struct None {};

inline Floats magnitude_of(Floats x) { return bits_of<Floats>(bits_of<Ints>(x) & kMagnitude); }
inline Doubles magnitude_of(Doubles x) { return bits_of<Doubles>(bits_of<Longs>(x) & 0x7fffffffffffffff); }

template <typename V>
inline double total(V lanes) {
  constexpr bool kCounts = std::is_integral<std::remove_reference_t<decltype(lanes[0])>>::value;
  std::conditional_t<kCounts, int64_t, double> sum = 0;
  for (unsigned i = 0; i < sizeof(V) / sizeof(lanes[0]); ++i) sum += lanes[i];
  return static_cast<double>(sum);
}

#if defined(__AVX512BW__)
inline double total(Count count) { return static_cast<double>(count); }
#endif

// Of copies, so that the vectors of a loop stay in registers.
inline void set_extremes(Sums& found, Floats max, Floats min, Units smallest) {
  for (int i = 0; i < kLanes; ++i) {
    if (max[i] > found.max) found.max = max[i];
    if (-min[i] > found.negated_min) found.negated_min = -min[i];
    if (smallest[i] < found.smallest) found.smallest = smallest[i];
  }
}

// Measures any number of elements with sums in double: the square of a float is exact there and cannot overflow.
template <typename Values, typename Codes>
Sums measure_exactly(const char* values, const uint8_t* codes, int64_t count, float scale_inv) {
  constexpr bool kCompares = !std::is_same<Codes, None>::value;
  Count finite_count{}, zero_count{}, underflow_count{}, overflow_count{};
  Units smallest = Units{} + kNone;
  Floats max = Floats{} - kInfinity, min = Floats{} + kInfinity;
  Doubles sum[2]{}, square_sum[2]{}, abs_sum[2]{}, error_square_sum[2]{}, underflow_square_sum[2]{};
  char rest[4 * kLanes];
  uint8_t rest_of_codes[kLanes];
  for (int64_t at = 0; at < count; at += kLanes) {
    const char* from = values + at * Values::kBytes;
    const uint8_t* from_codes = codes + at;
    const int64_t left = count - at;
    if (left < kLanes) {  // filled up with nan, of which nothing but the zeros is counted
      std::memset(rest, 0xff, sizeof(rest));
      std::memcpy(rest, from, left * Values::kBytes);
      from = rest;
      if constexpr (kCompares) {
        std::memset(rest_of_codes, 0, sizeof(rest_of_codes));
        std::memcpy(rest_of_codes, from_codes, left);
        from_codes = rest_of_codes;
      }
    }
    __builtin_prefetch(from + kAhead);
    const Floats x = Values::load(from);
    const Ints bits = bits_of<Ints>(x);
    const Mask is_finite = is_less(bits & kMagnitude, Ints{} + kInfinityBits);
    const Ints zeroed = or_zero(is_finite, bits), magnitude = zeroed & kMagnitude;
    const Mask is_0 = is_zero(magnitude);
    add_to(finite_count, is_finite);
    add_to(zero_count, is_0);
    const Floats or_lowest = where(is_finite, x, Floats{} - kInfinity);
    const Floats or_highest = where(is_finite, x, Floats{} + kInfinity);
    max = or_lowest > max ? or_lowest : max;
    min = or_highest < min ? or_highest : min;
    const Units last_if_zero = (Units)(magnitude - 1);
    smallest = last_if_zero < smallest ? last_if_zero : smallest;
    const Halves wide = as_doubles(bits_of<Floats>(zeroed));
    for (int half = 0; half < 2; ++half) {
      sum[half] += wide.half[half];
      square_sum[half] = plus_square(square_sum[half], wide.half[half]);
      abs_sum[half] += magnitude_of(wide.half[half]);
    }
    if constexpr (kCompares) {
      __builtin_prefetch(from_codes + kAhead);
      const Floats quantized = Codes::decode(load_bytes(from_codes)) * scale_inv;
      const Floats largest = Floats{} + Codes::kLargest * kRounding * scale_inv;
      const Mask is_lost = both(is_finite, is_zero(quantized));
      add_to(underflow_count, first_alone(is_lost, is_0));
      add_to(overflow_count, both(is_finite, is_greater(bits_of<Floats>(magnitude), largest)));
      const Halves other = as_doubles(bits_of<Floats>(or_zero(is_finite, bits_of<Ints>(quantized))));
      const Halves lost = as_doubles(bits_of<Floats>(or_zero(is_lost, bits)));
      for (int half = 0; half < 2; ++half) {
        error_square_sum[half] = plus_square(error_square_sum[half], wide.half[half] - other.half[half]);
        underflow_square_sum[half] = plus_square(underflow_square_sum[half], lost.half[half]);
      }
    }
  }
  Sums found = kNothing;
  const int64_t filled = (kLanes - count % kLanes) % kLanes;
  found.finite = total(finite_count);
  found.zeros = total(zero_count) - (count + filled - found.finite);  // what is not finite was set to 0
  found.sum = total(sum[0] + sum[1]);
  found.square_sum = total(square_sum[0] + square_sum[1]);
  found.abs_sum = total(abs_sum[0] + abs_sum[1]);
  found.underflows = total(underflow_count);
  found.overflows = total(overflow_count);
  found.error_square_sum = total(error_square_sum[0] + error_square_sum[1]);
  found.underflow_square_sum = total(underflow_square_sum[0] + underflow_square_sum[1]);
  set_extremes(found, max, min, smallest);
  return found;
}

inline void add_lanes(Doubles& sum, Floats lanes) {
  const Halves wide = as_doubles(lanes);
  sum += wide.half[0] + wide.half[1];
}

// The extremes of a block, the numbers that are not 0, and those of which a code became 0.
template <int kBytes>
struct Counted;

template <>
struct Counted<4> {
  Floats max = Floats{} - kInfinity, min = Floats{} + kInfinity;
  Units smallest = Units{} + kNone, is_not_0[2], nonzeros{}, underflows{};

  inline void add(const char*, Pair x, Pair magnitude) {
    max = larger(x.second, larger(x.first, max));
    min = smaller(x.second, smaller(x.first, min));
    const Units bits[2] = {bits_of<Units>(magnitude.first), bits_of<Units>(magnitude.second)};
    for (int half = 0; half < 2; ++half) {
      smallest = smaller(bits[half] - 1, smallest);
      is_not_0[half] = smaller(bits[half], Units{} + 1);
      nonzeros += is_not_0[half];
    }
  }

  inline void compare(TwiceBytes, Pair quantized) {
    underflows += (Units)or_zero(is_zero(quantized.first), (Ints)is_not_0[0]);
    underflows += (Units)or_zero(is_zero(quantized.second), (Ints)is_not_0[1]);
  }

  template <typename Values>
  void end(Sums& found) const {
    set_extremes(found, max, min, smallest);
  }
};

// Of numbers of 16 bits, as integers: those above 0 have the order of the numbers, those below 0 the opposite one, and as
// unsigned integers are larger than all above.
template <>
struct Counted<2> {
  SignedTwiceShorts signed_max = SignedTwiceShorts{} + std::numeric_limits<int16_t>::min();
  TwiceShorts unsigned_max{}, smallest = TwiceShorts{} + kLast;
  TwiceShorts is_not_0, nonzeros{}, underflows{};  // a lane has no more numbers than it can count

  static constexpr uint16_t kLast = 0xffff;

  inline void add(const char* from, Pair, Pair) {
    TwiceShorts bits;
    std::memcpy(&bits, from, sizeof(bits));
    const TwiceShorts magnitude = bits & 0x7fff;
    const SignedTwiceShorts with_sign = (SignedTwiceShorts)bits;
    signed_max = with_sign > signed_max ? with_sign : signed_max;
    unsigned_max = bits > unsigned_max ? bits : unsigned_max;
    smallest = smaller(magnitude - 1, smallest);
    is_not_0 = smaller(magnitude, TwiceShorts{} + 1);
    nonzeros += is_not_0;
  }

  inline void compare(TwiceBytes code_magnitude, Pair) { underflows += less(is_not_0, as_shorts(code_magnitude)); }

  template <typename Values>
  void end(Sums& found) const {
    int16_t signed_most = signed_max[0];
    uint16_t most = unsigned_max[0], least_magnitude = smallest[0];
    for (int i = 1; i < 2 * kLanes; ++i) {
      if (signed_max[i] > signed_most) signed_most = signed_max[i];
      if (unsigned_max[i] > most) most = unsigned_max[i];
      if (smallest[i] < least_magnitude) least_magnitude = smallest[i];
    }
    // Where all numbers have the same sign, the one next to 0.
    const uint16_t least = found.zeros > 0 ? 0 : least_magnitude + 1;
    found.max = Values::as_float(signed_most < 0 ? least | 0x8000 : signed_most);
    found.negated_min = -Values::as_float(most & 0x8000 ? most : least);
    if (least_magnitude != kLast) found.smallest = bits_of<uint32_t>(Values::as_float(least_magnitude + 1)) - 1;
  }
};

// The sums of a run, over eight numbers a lane.
template <typename Values>
struct Run {
  Floats sum{}, abs_sum{}, square_sum{};

  inline void add(const char*, Pair x, Pair magnitude) {
    sum = sum + x.first + x.second;
    abs_sum = abs_sum + magnitude.first + magnitude.second;
    square_sum = fused(x.second, x.second, fused(x.first, x.first, square_sum));
  }
};

#if defined(__AVX512BF16__)
// Products of neighbours in bfloat16 are exact, and added to a lane of floats by one instruction, with two roundings.
template <>
inline void Run<BFloat16>::add(const char* from, Pair, Pair) {
  const __m512i bits = _mm512_loadu_si512(from), magnitude = _mm512_and_si512(bits, _mm512_set1_epi16(0x7fff));
  const __m512bh one = (__m512bh)_mm512_set1_epi16(0x3f80);
  sum = (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)bits, one);
  abs_sum = (Floats)_mm512_dpbf16_ps((__m512)abs_sum, (__m512bh)magnitude, one);
  square_sum = (Floats)_mm512_dpbf16_ps((__m512)square_sum, (__m512bh)bits, (__m512bh)bits);
}
#endif

inline Floats scaled_where_zero(Floats quantized, Floats x, float up) {
  return bits_of<Floats>(or_zero(is_zero(quantized), bits_of<Ints>(x))) * up;
}

template <typename Values>
double count_above(float limit, const char* values) {
  Ints above{};
  for (int64_t at = 0; at < kBlock; at += kLanes) {
    above -= magnitude_of(Values::load(values + at * Values::kBytes)) > limit;
  }
  return total(above);
}

// Measures kBlock elements with sums in float, and tells whether these do.
template <typename Values, typename Codes>
__attribute__((noinline)) bool measure_block(const char* values, const uint8_t* codes, float scale_inv, Sums& found) {
  constexpr bool kCompares = !std::is_same<Codes, None>::value;
  Counted<Values::kBytes> counted;
  Doubles sum{}, square_sum{}, abs_sum{}, error_square_sum{}, underflow_square_sum{};
  TwiceBytes largest_code{};
  float factor = scale_inv;
  if constexpr (kCompares) factor *= Codes::kFromFloat16;
  // Numbers that became 0 are scaled to about 1, where their squares are no subnormal numbers.
  const float up = bits_of<float>((254 << 23) - (bits_of<int32_t>(scale_inv) & kInfinityBits));
  for (int64_t at = 0; at < kBlock;) {
    Run<Values> run;
    Floats error_square_part{}, underflow_square_part{};
    for (int pair = 0; pair < kRun; ++pair, at += 2 * kLanes) {
      const char* from = values + at * Values::kBytes;
      __builtin_prefetch(from + kAhead);
      if (Values::kBytes == 4) __builtin_prefetch(from + kAhead + sizeof(Floats));
      const Pair x = Values::load_pair(from);
      const Pair magnitude = {magnitude_of(x.first), magnitude_of(x.second)};
      counted.add(from, x, magnitude);
      run.add(from, x, magnitude);
      if constexpr (kCompares) {
        __builtin_prefetch(codes + at + kAhead);
        TwiceBytes code;
        std::memcpy(&code, codes + at, sizeof(code));
        const TwiceBytes code_magnitude = code & 0x7f;
        largest_code = code_magnitude > largest_code ? code_magnitude : largest_code;
        Shorts first_code, second_code;
        if constexpr (Values::kAlternates) {
          first_code = bits_of<Shorts>(code) << 8;
          second_code = bits_of<Shorts>(code) & 0xff00;
        } else {
          first_code = bytes_as_shorts(codes + at) << 8;
          second_code = bytes_as_shorts(codes + at + kLanes) << 8;
        }
        const Pair quantized = {from_float16(Codes::as_float16(first_code)) * factor,
                                from_float16(Codes::as_float16(second_code)) * factor};
        counted.compare(code_magnitude, quantized);
        const Floats first_error = x.first - quantized.first, second_error = x.second - quantized.second;
        error_square_part = fused(first_error, first_error, error_square_part);
        error_square_part = fused(second_error, second_error, error_square_part);
        const Floats first_lost = scaled_where_zero(quantized.first, x.first, up);
        const Floats second_lost = scaled_where_zero(quantized.second, x.second, up);
        underflow_square_part = fused(first_lost, first_lost, underflow_square_part);
        underflow_square_part = fused(second_lost, second_lost, underflow_square_part);
      }
    }
    add_lanes(sum, run.sum);
    add_lanes(square_sum, run.square_sum);
    add_lanes(abs_sum, run.abs_sum);
    if constexpr (kCompares) {
      add_lanes(error_square_sum, error_square_part);
      add_lanes(underflow_square_sum, underflow_square_part);
    }
  }
  found = kNothing;
  found.finite = kBlock;
  found.zeros = kBlock - total(counted.nonzeros);
  found.sum = total(sum);
  found.square_sum = total(square_sum);
  found.abs_sum = total(abs_sum);
  counted.template end<Values>(found);
  const float amax = found.max > found.negated_min ? found.max : found.negated_min;
  bool do_sums = found.square_sum < kInfinity && (amax == 0.0f || amax >= power_of_two(-44)) &&
                 found.sum * found.sum <= 0.4 * kBlock * found.square_sum;
  if constexpr (kCompares) {
    found.underflows = total(counted.underflows);
    found.error_square_sum = total(error_square_sum);
    const double scaled_underflows = total(underflow_square_sum), wide_up = up;
    found.underflow_square_sum = scaled_underflows / (wide_up * wide_up);
    for (int i = 0; i < 2 * kLanes; ++i) do_sums &= largest_code[i] <= Codes::kLargestCode;
    do_sums &= found.error_square_sum >= power_of_two(-90) && found.error_square_sum < kInfinity;
    do_sums &= found.underflows == 0 || (scaled_underflows >= power_of_two(-90) && scaled_underflows < kInfinity);
    const float largest = Codes::kLargest * kRounding * scale_inv;
    if (do_sums && amax > largest) found.overflows = count_above<Values>(largest, values);
  }
  return do_sums;
}

// Numbers that float has no more exponents for become 0 meanwhile: where they are kept, each can cost a hundred cycles.
class WithoutSubnormals {
#if defined(__SSE__)
 public:
  WithoutSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | _MM_FLUSH_ZERO_ON); }
  ~WithoutSubnormals() { _mm_setcsr(before_); }

 private:
  const unsigned before_;
#endif
};

template <typename Values, typename Codes>
Sums measure_piece(const char* values, const uint8_t* codes, int64_t count, float scale_inv) {
  // A code times a scale that is none of the usual ones may be a subnormal number, or inf.
  const bool usual = scale_inv > power_of_two(-100) && scale_inv < power_of_two(100);
  const int64_t blocks = usual ? count / kBlock : 0, rest = blocks * kBlock;
  Sums found[kPiece / kBlock];
  bool do_sums[kPiece / kBlock];
  {
    const WithoutSubnormals here;
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t at = block * kBlock;
      do_sums[block] = measure_block<Values, Codes>(values + at * Values::kBytes, codes + at, scale_inv, found[block]);
    }
  }
  Sums all = kNothing;
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t at = block * kBlock;
    add_to(all, do_sums[block] ? found[block]
                               : measure_exactly<Values, Codes>(values + at * Values::kBytes, codes + at, kBlock, scale_inv));
  }
  add_to(all, measure_exactly<Values, Codes>(values + rest * Values::kBytes, codes + rest, count - rest, scale_inv));
  return all;
}

template <typename Values>
void count_exponents(const char* values, int64_t count, int64_t* bins) {
  uint32_t tables[4][kBins] = {};  // neighbours often have the same exponent, and would wait for each other
  char rest[4 * kLanes];
  for (int64_t at = 0; at < count; at += kLanes) {
    const char* from = values + at * Values::kBytes;
    const int lanes = count - at < kLanes ? static_cast<int>(count - at) : kLanes;
    if (lanes < kLanes) {
      std::memcpy(rest, from, lanes * Values::kBytes);
      from = rest;
    }
    const Ints exponents = (bits_of<Ints>(Values::load(from)) & kMagnitude) >> 23;
    for (int i = 0; i < lanes; ++i) ++tables[i % 4][exponents[i]];
  }
  for (int bin = 0; bin < kBins; ++bin) bins[bin] += int64_t{tables[0][bin]} + tables[1][bin] + tables[2][bin] + tables[3][bin];
}

template <typename Values>
Sums measure_with(int codes_format, const char* values, const uint8_t* codes, int64_t count, float scale_inv, int64_t* bins) {
  if (bins != nullptr) count_exponents<Values>(values, count, bins);
  if (codes_format == 1) return measure_piece<Values, E4M3>(values, codes, count, scale_inv);
  if (codes_format == 2) return measure_piece<Values, E5M2>(values, codes, count, scale_inv);
  return measure_piece<Values, None>(values, codes, count, scale_inv);
}

inline double* place(double* columns, int64_t at) { return at < 0 ? nullptr : columns + at; }

inline void raise_to(double& kept, double value) {
  if (value > kept) kept = value;
}

}  // namespace

// Measures `count` elements.
//   dtype         of values: 0 for float32, 1 for bfloat16, 2 for float16
//   codes         as many bytes, or null
//   codes_format  0 for none, 1 for E4M3, 2 for E5M2
//   factor        scale_inv of the codes, or null
//   threads       at most so many work on it
//   all_sums, all_maxima
//                 to which the results are added, and of which they become the maximum
//   moments, maxima, compared, scales, scale_maxima, exponents
//                 where MOMENT_SUMS, MAXIMA, COMPARISON_SUMS, SCALE_SUMS, SCALE_MAXIMA and EXPONENT_BINS begin in these;
//                 negative for what is not wanted
extern "C" __attribute__((visibility("default"))) void te_precision_one_pass(
    const char* values, int dtype, int64_t count, const uint8_t* codes, int codes_format, const float* factor,
    int threads, double* all_sums, double* all_maxima, int64_t moments_at, int64_t maxima_at, int64_t compared_at,
    int64_t scales_at, int64_t scale_maxima_at, int64_t exponents_at) {
  double* moments = place(all_sums, moments_at);
  double* maxima = place(all_maxima, maxima_at);
  double* compared = place(all_sums, compared_at);
  double* scales = place(all_sums, scales_at);
  double* scale_maxima = place(all_maxima, scale_maxima_at);
  double* exponents = place(all_sums, exponents_at);
  const float scale_inv = factor == nullptr ? 1.0f : *factor;
  const int bytes = dtype == 0 ? 4 : 2;
  if (codes == nullptr) codes = reinterpret_cast<const uint8_t*>(values);  // to count from; they are not read
  const int64_t pieces = (count + kPiece - 1) / kPiece;
  std::vector<Sums> of_piece(pieces);
  int64_t bins[kBins] = {};
#pragma omp parallel num_threads(threads) if (threads > 1 && pieces > 1)
  {
    int64_t own_bins[kBins] = {};
#pragma omp for
    for (int64_t piece = 0; piece < pieces; ++piece) {
      const int64_t begin = piece * kPiece, size = count - begin < kPiece ? count - begin : kPiece;
      const char* from = values + begin * bytes;
      const auto measure = dtype == 0 ? measure_with<Float32> : dtype == 1 ? measure_with<BFloat16> : measure_with<Float16>;
      of_piece[piece] = measure(codes_format, from, codes + begin, size, scale_inv, exponents != nullptr ? own_bins : nullptr);
    }
    if (exponents != nullptr) {
#pragma omp critical
      for (int bin = 0; bin < kBins; ++bin) bins[bin] += own_bins[bin];
    }
  }
  Sums all = kNothing;
  for (const Sums& one : of_piece) add_to(all, one);
  if (maxima != nullptr) {
    raise_to(maxima[0], all.max);
    raise_to(maxima[1], all.negated_min);
    raise_to(maxima[2], all.smallest == kNone ? -kInfinity : -bits_of<float>(all.smallest + 1));
  }
  if (moments != nullptr) {
    moments[0] += all.finite;
    moments[1] += static_cast<double>(count) - all.finite;
    moments[2] += all.zeros;
    moments[3] += all.sum;
    moments[4] += all.square_sum;
    moments[5] += all.abs_sum;
  }
  if (compared != nullptr) {
    compared[0] += all.finite;
    compared[1] += all.underflows;
    compared[2] += all.overflows;
    compared[3] += all.error_square_sum;
    compared[4] += all.square_sum;
    compared[5] += all.underflow_square_sum;
  }
  const double scale = scale_inv;
  const bool is_scale = scale >= 0 && scale < kInfinity;
  if (scale_maxima != nullptr && is_scale) {
    raise_to(scale_maxima[0], scale);
    raise_to(scale_maxima[1], -scale);
  }
  if (scales != nullptr && is_scale) {
    scales[0] += 1;
    scales[1] += scale;
    scales[2] += scale * scale;
  }
  if (exponents != nullptr) {
    bins[0] -= static_cast<int64_t>(all.zeros);
    bins[kBins - 1] = 0;  // inf and nan
    for (int bin = 0; bin < kBins; ++bin) exponents[bin] += static_cast<double>(bins[bin]);
  }
}

namespace {

// The largest of the words without their sign: the bits of the largest magnitude, or of a NaN if there is one.
template <typename Word>
uint32_t largest_of_block(const Word* words, int64_t count) {
  typedef Word Words __attribute__((vector_size(4 * kLanes)));
  constexpr int kWords = sizeof(Words) / sizeof(Word);
  constexpr Word kMask = std::numeric_limits<Word>::max() >> 1;
  Words found = {};
  int64_t place = 0;
  for (; place + kWords <= count; place += kWords) {
    Words loaded;
    std::memcpy(&loaded, words + place, sizeof(Words));
    loaded &= kMask;
    found = loaded > found ? loaded : found;
  }
  Word largest = 0;
  for (int lane = 0; lane < kWords; ++lane) largest = found[lane] > largest ? found[lane] : largest;
  for (; place < count; ++place) {
    const Word word = words[place] & kMask;
    largest = word > largest ? word : largest;
  }
  return largest;
}

template <typename Word>
uint32_t largest_word(const char* values, int64_t count, int threads) {
  const Word* words = reinterpret_cast<const Word*>(values);
  const int64_t pieces = (count + kPiece - 1) / kPiece;
  uint32_t found = 0;
#pragma omp parallel for reduction(max : found) num_threads(threads) if (threads > 1 && pieces > 1)
  for (int64_t piece = 0; piece < pieces; ++piece) {
    const int64_t begin = piece * kPiece;
    const uint32_t largest = largest_of_block(words + begin, count - begin < kPiece ? count - begin : kPiece);
    found = largest > found ? largest : found;
  }
  return found;
}

// The largest reciprocal of float32 numbers without their sign, or a NaN if there is one.
float largest_reciprocal(const char* values, int64_t count) {
  const uint32_t* words = reinterpret_cast<const uint32_t*>(values);
  uint32_t least = 0x7F800000;
  for (int64_t place = 0; place < count; ++place) {
    const uint32_t word = words[place] & 0x7FFFFFFF;
    if (word > 0x7F800000) return std::numeric_limits<float>::quiet_NaN();
    least = word < least ? word : least;
  }
  return 1.0f / bits_of<float>(least);
}

float magnitude_of(uint32_t word, int format) {
  if (format == 0) return bits_of<float>(word);
  if (format == 1) return bits_of<float>(word << 16);
  const int bits = format == 2 ? 10 : format == 3 ? 3 : 2;  // of the mantissa
  const uint32_t exponent = word >> bits, mantissa = word & ((1u << bits) - 1);
  const int bias = format == 3 ? 7 : 15;
  if (format == 3 ? word == 0x7F : exponent == 31) {
    return format != 3 && mantissa == 0 ? kInfinity : std::numeric_limits<float>::quiet_NaN();
  }
  const float whole = exponent == 0 ? mantissa : mantissa + (1u << bits);
  return whole * bits_of<float>(static_cast<uint32_t>(127 - bias - bits + (exponent == 0 ? 1 : exponent)) << 23);
}

}  // namespace

// Of each tensor, raise `largest` to the bits of its largest magnitude, a float32, times its scale if there is one; lower
// `first` to its order if it is inf or NaN. A tensor is seven numbers: the address of its values, their format (0 float32,
// 1 bfloat16, 2 float16, 3 E4M3, 4 E5M2, 6 float32 of which 1/x counts), their count, the addresses of scale, largest
// and first, and the order.
extern "C" void te_precision_largest(const int64_t* tensors, int64_t tensor_count, int threads) {
  for (const int64_t* tensor = tensors; tensor != tensors + 7 * tensor_count; tensor += 7) {
    const char* values = reinterpret_cast<const char*>(tensor[0]);
    const int format = tensor[1] == 7 ? 0 : static_cast<int>(tensor[1]);  // 7 is an amax
    const int64_t width = format == 0 || format == 6 ? 4 : format <= 2 ? 2 : 1;
    const int64_t count = values == nullptr ? 0 : tensor[2] / width;  // FSDP may have freed the memory
    const float* scale = reinterpret_cast<const float*>(tensor[3]);
    int32_t* largest = reinterpret_cast<int32_t*>(tensor[4]);
    int32_t* first = reinterpret_cast<int32_t*>(tensor[5]);
    const int32_t order = static_cast<int32_t>(tensor[6]);
    float magnitude;
    if (format == 6) {
      magnitude = largest_reciprocal(values, count);
    } else {
      const uint32_t word = format == 0   ? largest_word<uint32_t>(values, count, threads)
                            : format <= 2 ? largest_word<uint16_t>(values, count, threads)
                                          : largest_word<uint8_t>(values, count, threads);
      magnitude = magnitude_of(word, format) * (scale == nullptr ? 1.0f : *scale);
    }
    const int32_t bits = bits_of<int32_t>(magnitude) & 0x7FFFFFFF;
    if (bits > *largest) *largest = bits;
    if (bits >= 0x7F800000 && order < *first) *first = order;
  }
}
