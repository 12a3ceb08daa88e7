// One pass over a tensor: the columns of columns.py, from each element read once.
//
// Sums and squares are taken in double: the square of a float is exact there and cannot overflow. Counts are taken in
// lanes of 32 bits. A tensor is measured in pieces, whose results are added in their order: the number of threads changes
// no result. Vectors are those of GCC and Clang; all loops over their lanes disappear.

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int64_t kPiece = 1 << 16;  // elements
constexpr int kAhead = 2048;         // bytes: not every processor, as some virtual machine's, prefetches by itself

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Units __attribute__((vector_size(4 * kLanes)));
typedef float HalfFloats __attribute__((vector_size(2 * kLanes)));
typedef double Doubles __attribute__((vector_size(4 * kLanes)));  // of half as many lanes
typedef int64_t Longs __attribute__((vector_size(4 * kLanes)));
#if !defined(__AVX2__)
typedef uint16_t Shorts __attribute__((vector_size(2 * kLanes)));
typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
#endif

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int32_t kMagnitude = 0x7fffffff;
constexpr int32_t kInfinityBits = 0x7f800000;
constexpr uint32_t kNone = 0xffffffff;

// What holds of each lane of Ints, and the lanes of which it has held. AVX-512 has masks of bits, whose bits are counted
// beside the vectors; else each lane is 0 or -1.
#if defined(__AVX512F__)
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

// The two halves of a vector as doubles. GCC 12 would convert quarters and put them together.
struct Halves {
  Doubles half[2];
};

inline Halves as_doubles(Floats x) {
#if defined(__AVX512F__)
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
#if defined(__AVX512F__)
  return (Doubles)_mm512_fmadd_pd((__m512d)x, (__m512d)x, (__m512d)sum);
#elif defined(__FMA__)
  return (Doubles)_mm256_fmadd_pd((__m256d)x, (__m256d)x, (__m256d)sum);
#else
  return sum + x * x;
#endif
}

struct Sums {
  double finite, zeros, sum, square_sum, abs_sum, underflows, overflows, error_square_sum;
  float max, negated_min;
  uint32_t smallest;  // bits of the smallest magnitude but 0, less 1; kNone if there is none
};

constexpr float power_of_two(int exponent) {
  float power = 1;
  for (; exponent < 0; ++exponent) power /= 2;
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
#if defined(__AVX512F__)
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
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(at)));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(at)));
#else
  Bytes bytes;
  std::memcpy(&bytes, at, sizeof(bytes));
  return __builtin_convertvector(bytes, Ints);
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

struct Float32 {
  static constexpr int kBytes = 4;
  static inline Floats load(const char* at) {
    Floats x;
    std::memcpy(&x, at, sizeof(x));
    return x;
  }
};

struct BFloat16 {
  static constexpr int kBytes = 2;
  static inline Floats load(const char* at) {
    return bits_of<Floats>(load_shorts(at) << 16);
  }
};

struct Float16 {
  static constexpr int kBytes = 2;
  static inline Floats load(const char* at) {
    const Ints code = load_shorts(at), magnitude = code & 0x7fff, sign = (code & 0x8000) << 16;
    const Ints number = magnitude_as_float<10, 15>(magnitude), special = kInfinityBits | (magnitude << 13);
    return bits_of<Floats>((magnitude >= 0x7c00 ? special : number) | sign);
  }
};

struct E4M3 {
  static constexpr float kLargest = 448.0f;
  static inline Floats decode(Ints code) {
    const Ints magnitude = code & 0x7f, sign = (code & 0x80) << 24;
    const Ints number = magnitude_as_float<3, 7>(magnitude), nan = Ints{} + 0x7fc00000;
    return bits_of<Floats>((magnitude == 0x7f ? nan : number) | sign);
  }
};

struct E5M2 {
  static constexpr float kLargest = 57344.0f;
  static inline Floats decode(Ints code) {
    const Ints magnitude = code & 0x7f, sign = (code & 0x80) << 24;
    const Ints number = magnitude_as_float<2, 15>(magnitude), special = kInfinityBits | (magnitude << 21);
    return bits_of<Floats>((magnitude >= 0x7c ? special : number) | sign);
  }
};

struct None {};

inline Doubles magnitude_of(Doubles x) { return bits_of<Doubles>(bits_of<Longs>(x) & 0x7fffffffffffffff); }

template <typename V>
inline double total(V lanes) {
  double sum = 0;
  for (unsigned i = 0; i < sizeof(V) / sizeof(lanes[0]); ++i) sum += lanes[i];
  return sum;
}

#if defined(__AVX512F__)
inline double total(Count count) { return static_cast<double>(count); }
#endif

template <typename Values, typename Codes>
Sums measure_piece(const char* values, const uint8_t* codes, int64_t count, float scale_inv) {
  constexpr bool kCompares = !std::is_same<Codes, None>::value;
  Count finite_count{}, zero_count{}, underflow_count{}, overflow_count{};
  Units smallest = Units{} + kNone;
  Floats max = Floats{} - kInfinity, min = Floats{} + kInfinity;
  Doubles sum[2]{}, square_sum[2]{}, abs_sum[2]{}, error_square_sum[2]{};
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
      const Floats largest = Floats{} + Codes::kLargest * scale_inv;
      add_to(underflow_count, first_alone(both(is_finite, is_zero(quantized)), is_0));
      add_to(overflow_count, both(is_finite, is_greater(bits_of<Floats>(magnitude), largest)));
      const Halves other = as_doubles(bits_of<Floats>(or_zero(is_finite, bits_of<Ints>(quantized))));
      for (int half = 0; half < 2; ++half) {
        error_square_sum[half] = plus_square(error_square_sum[half], wide.half[half] - other.half[half]);
      }
    }
  }
  Sums found{};
  const int64_t filled = (kLanes - count % kLanes) % kLanes;
  found.finite = total(finite_count);
  found.zeros = total(zero_count) - (count + filled - found.finite);  // what is not finite was set to 0
  found.sum = total(sum[0] + sum[1]);
  found.square_sum = total(square_sum[0] + square_sum[1]);
  found.abs_sum = total(abs_sum[0] + abs_sum[1]);
  found.underflows = total(underflow_count);
  found.overflows = total(overflow_count);
  found.error_square_sum = total(error_square_sum[0] + error_square_sum[1]);
  found.max = found.negated_min = -kInfinity;
  found.smallest = kNone;
  const Floats maxima = max, minima = min;  // so that those of the loop stay in registers
  const Units smallest_bits = smallest;
  for (int i = 0; i < kLanes; ++i) {
    if (maxima[i] > found.max) found.max = maxima[i];
    if (-minima[i] > found.negated_min) found.negated_min = -minima[i];
    if (smallest_bits[i] < found.smallest) found.smallest = smallest_bits[i];
  }
  return found;
}

template <typename Values>
Sums measure_piece_with(int codes_format, const char* values, const uint8_t* codes, int64_t count, float scale_inv) {
  if (codes_format == 1) return measure_piece<Values, E4M3>(values, codes, count, scale_inv);
  if (codes_format == 2) return measure_piece<Values, E5M2>(values, codes, count, scale_inv);
  return measure_piece<Values, None>(values, codes, count, scale_inv);
}

}  // namespace

// Measures `count` elements.
//   dtype         of values: 0 for float32, 1 for bfloat16, 2 for float16
//   codes         as many bytes, or null
//   codes_format  0 for none, 1 for E4M3, 2 for E5M2
//   factor        scale_inv of the codes, or null
//   sums          gets MOMENT_SUMS, and with codes COMPARISON_SUMS
//   maxima        gets MAXIMA
extern "C" __attribute__((visibility("default"))) void te_precision_one_pass(
    const char* values, int dtype, int64_t count, const uint8_t* codes, int codes_format, const float* factor,
    int threads, double* sums, double* maxima) {
  const float scale_inv = factor == nullptr ? 1.0f : *factor;
  const int bytes = dtype == 0 ? 4 : 2;
  const int64_t pieces = (count + kPiece - 1) / kPiece;
  std::vector<Sums> of_piece(pieces);
#pragma omp parallel for num_threads(threads) if (threads > 1 && pieces > 1)
  for (int64_t piece = 0; piece < pieces; ++piece) {
    const int64_t begin = piece * kPiece, size = count - begin < kPiece ? count - begin : kPiece;
    const char* from = values + begin * bytes;
    const uint8_t* from_codes = codes == nullptr ? nullptr : codes + begin;
    of_piece[piece] = dtype == 0   ? measure_piece_with<Float32>(codes_format, from, from_codes, size, scale_inv)
                      : dtype == 1 ? measure_piece_with<BFloat16>(codes_format, from, from_codes, size, scale_inv)
                                   : measure_piece_with<Float16>(codes_format, from, from_codes, size, scale_inv);
  }
  Sums all{};
  all.max = all.negated_min = -kInfinity;
  all.smallest = kNone;
  for (const Sums& one : of_piece) {
    all.finite += one.finite;
    all.zeros += one.zeros;
    all.sum += one.sum;
    all.square_sum += one.square_sum;
    all.abs_sum += one.abs_sum;
    all.underflows += one.underflows;
    all.overflows += one.overflows;
    all.error_square_sum += one.error_square_sum;
    if (one.max > all.max) all.max = one.max;
    if (one.negated_min > all.negated_min) all.negated_min = one.negated_min;
    if (one.smallest < all.smallest) all.smallest = one.smallest;
  }
  sums[0] = all.finite;
  sums[1] = static_cast<double>(count) - all.finite;
  sums[2] = all.zeros;
  sums[3] = all.sum;
  sums[4] = all.square_sum;
  sums[5] = all.abs_sum;
  if (codes_format != 0) {
    sums[6] = all.finite;
    sums[7] = all.underflows;
    sums[8] = all.overflows;
    sums[9] = all.error_square_sum;
    sums[10] = all.square_sum;
  }
  maxima[0] = all.max;
  maxima[1] = all.negated_min;
  maxima[2] = all.smallest == kNone ? -kInfinity : -bits_of<float>(all.smallest + 1);
}
