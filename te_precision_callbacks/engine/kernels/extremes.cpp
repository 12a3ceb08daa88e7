// The smallest and the largest number of a tensor, from each element read once; both are nan where there is a nan.
//
// Numbers are compared as integers: with the bits below the sign inverted where it is set, the integers have the order of
// the numbers, -nan < -inf < ... < -0 < 0 < ... < inf < nan. So no number needs a second look, and 16 bits stay 16 bits.

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace {

#if defined(__AVX512BW__)
constexpr int kBytes = 64;
#elif defined(__AVX2__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif
constexpr int kVectors = 4;             // at once: none waits for the one before
constexpr int64_t kPiece = 1 << 18;     // bytes
constexpr int kAhead = 2048;            // bytes: not every processor, as some virtual machine's, prefetches by itself

template <typename Int>
struct Extremes {
  Int low = std::numeric_limits<Int>::max(), high = std::numeric_limits<Int>::min();

  inline void add(Int other_low, Int other_high) {
    if (other_low < low) low = other_low;
    if (other_high > high) high = other_high;
  }
};

template <typename V>
inline V in_order(V bits) {
  constexpr int kSign = sizeof(bits[0]) * 8 - 1;
  typedef std::remove_reference_t<decltype(bits[0])> Int;
  return bits ^ ((bits >> kSign) & std::numeric_limits<Int>::max());
}

template <typename Int>
Extremes<Int> of_piece(const char* at, int64_t count) {
  typedef Int Vector __attribute__((vector_size(kBytes)));
  constexpr int kLanes = kBytes / sizeof(Int);
  Vector low[kVectors], high[kVectors];
  for (int i = 0; i < kVectors; ++i) {
    low[i] = Vector{} + std::numeric_limits<Int>::max();
    high[i] = Vector{} + std::numeric_limits<Int>::min();
  }
  const int64_t rounds = count / (kVectors * kLanes);
  for (int64_t round = 0; round < rounds; ++round, at += kVectors * kBytes) {
    for (int i = 0; i < kVectors; ++i) {
      Vector bits;
      std::memcpy(&bits, at + i * kBytes, kBytes);
      __builtin_prefetch(at + i * kBytes + kAhead);
      bits = in_order(bits);
      low[i] = bits < low[i] ? bits : low[i];
      high[i] = bits > high[i] ? bits : high[i];
    }
  }
  Extremes<Int> found;
  for (int i = 0; i < kVectors; ++i)
    for (int lane = 0; lane < kLanes; ++lane) found.add(low[i][lane], high[i][lane]);
  typedef Int Single __attribute__((vector_size(sizeof(Int))));
  for (int64_t rest = rounds * kVectors * kLanes; rest < count; ++rest, at += sizeof(Int)) {
    Single bits;
    std::memcpy(&bits, at, sizeof(Int));
    const Int number = in_order(bits)[0];
    found.add(number, number);
  }
  return found;
}

template <typename Int>
void extremes(const char* values, int64_t count, Int infinity, int threads, char* low, char* high) {
  constexpr int64_t kCount = kPiece / sizeof(Int);
  const int64_t pieces = (count + kCount - 1) / kCount;
  Int lowest = std::numeric_limits<Int>::max(), highest = std::numeric_limits<Int>::min();
#pragma omp parallel for num_threads(threads) if (threads > 1 && pieces > 1) reduction(min : lowest) reduction(max : highest)
  for (int64_t piece = 0; piece < pieces; ++piece) {
    const int64_t begin = piece * kCount;
    const auto found = of_piece<Int>(values + begin * sizeof(Int), count - begin < kCount ? count - begin : kCount);
    lowest = found.low < lowest ? found.low : lowest;
    highest = found.high > highest ? found.high : highest;
  }
  const auto as_bits = [](Int number) { return number < 0 ? Int(number ^ std::numeric_limits<Int>::max()) : number; };
  Int bits[2] = {as_bits(lowest), as_bits(highest)};
  if (highest > infinity || lowest < Int(~infinity)) bits[0] = bits[1] = Int(infinity | (infinity >> 1));  // nan
  std::memcpy(low, &bits[0], sizeof(Int));
  std::memcpy(high, &bits[1], sizeof(Int));
}

}  // namespace

// Writes the extremes of `count` elements, at least one, in their own type.
//   dtype    of values: 0 for float32, 1 for bfloat16, 2 for float16
//   threads  at most so many work on it
extern "C" __attribute__((visibility("default"))) void te_precision_extremes(
    const char* values, int dtype, int64_t count, int threads, char* low, char* high) {
  if (dtype == 0)
    extremes<int32_t>(values, count, 0x7f800000, threads, low, high);
  else
    extremes<int16_t>(values, count, dtype == 1 ? 0x7f80 : 0x7c00, threads, low, high);
}
