// The product of two matrices whose numbers bfloat16 holds exactly: codes of FP8 and FP4 times the scales of their
// blocks, and bfloat16 itself. Products are exact, sums are float32.
//
// Both operands are laid out as pairs of neighbours along the summed dimension, which the processor's VDPBF16PS
// multiplies and adds at once. The summed dimension is gone through in blocks: each is summed from zero, and the sums of
// the blocks are added in their order. So each element's sum is the same whatever the number of threads.

#pragma GCC optimize("no-tree-loop-vectorize")  // loops have their vectors already

#include <cstdint>
#include <cstring>
#include <memory>

#ifdef __AVX512BF16__
#include <immintrin.h>

namespace {

constexpr int64_t kColumns = 64;    // of a panel: four vectors of sums
constexpr int64_t kRows = 6;        // of a tile: 24 vectors of sums, 4 of columns, 1 of a row, of 32
constexpr int64_t kTask = 32 * kRows;  // rows that a thread takes of a panel

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// A matrix whose first dimension stays in the result and whose second one is summed.
struct Matrix {
  const uint16_t* at;
  int64_t stride, summed_stride;

  inline uint32_t bits(int64_t index, int64_t summed) const { return at[index * stride + summed * summed_stride]; }
};

// Lays out `count` lines from `first` on as pairs, to[pair * pair_stride + line * line_stride]; lines up to `filled` are
// filled with zeros, and so is the partner of the last number if there is none.
void lay_out(const Matrix& matrix, int64_t first, int64_t count, int64_t filled, int64_t depth, uint32_t* to,
             int64_t line_stride, int64_t pair_stride) {
  const int64_t pairs = (depth + 1) / 2, whole = depth / 2;
  const auto pair = [&](int64_t line, int64_t index) {
    return matrix.bits(first + line, 2 * index) | matrix.bits(first + line, 2 * index + 1) << 16;
  };
  if (matrix.summed_stride == 1) {
    for (int64_t line = 0; line < count; ++line)
      for (int64_t index = 0; index < whole; ++index) to[index * pair_stride + line * line_stride] = pair(line, index);
  } else {
    // Numbers of 16 lines lie in one line of the cache. What goes to 16 lines is collected first: those that are apart by
    // a power of two would drive each other out of the cache.
    constexpr int64_t kTogether = 16;
    for (int64_t begin = 0; begin < count; begin += kTogether) {
      const int64_t lines = least(kTogether, count - begin);
      for (int64_t start = 0; start < whole; start += kTogether) {
        uint32_t found[kTogether][kTogether];
        const int64_t together = least(kTogether, whole - start);
        for (int64_t index = 0; index < together; ++index)
          for (int64_t line = 0; line < lines; ++line) found[index][line] = pair(begin + line, start + index);
        for (int64_t line = 0; line < lines; ++line)
          for (int64_t index = 0; index < together; ++index)
            to[(start + index) * pair_stride + (begin + line) * line_stride] = found[index][line];
      }
    }
  }
  if (whole < pairs)
    for (int64_t line = 0; line < count; ++line)
      to[whole * pair_stride + line * line_stride] = matrix.bits(first + line, depth - 1);
  for (int64_t line = count; line < filled; ++line)
    for (int64_t index = 0; index < pairs; ++index) to[index * pair_stride + line * line_stride] = 0;
}

// The factors of the sums of a block, by row and by column; none if null.
struct Factors {
  const float* of_rows;
  const float* of_columns;
  int rows_first;
};

template <int kCount>
void tile(const uint32_t* rows, int64_t row_stride, const uint32_t* panel, int64_t pairs, float* out, int64_t stride,
          int64_t columns, bool adds, const Factors& factors) {
  __mmask16 there[4];
  for (int i = 0; i < 4; ++i) {
    const int64_t left = columns - 16 * i;
    there[i] = left >= 16 ? 0xffff : left > 0 ? __mmask16((1 << left) - 1) : 0;
  }
  __m512 sums[kCount][4];
  for (int row = 0; row < kCount; ++row)
    for (int i = 0; i < 4; ++i) sums[row][i] = _mm512_setzero_ps();
  for (int64_t pair = 0; pair < pairs; ++pair) {
    __m512i column[4];
    for (int i = 0; i < 4; ++i) column[i] = _mm512_loadu_si512(panel + pair * kColumns + 16 * i);
    for (int row = 0; row < kCount; ++row) {
      const __m512i both = _mm512_set1_epi32(int32_t(rows[row * row_stride + pair]));
      for (int i = 0; i < 4; ++i) sums[row][i] = _mm512_dpbf16_ps(sums[row][i], (__m512bh)both, (__m512bh)column[i]);
    }
  }
  for (int row = 0; row < kCount; ++row) {
    for (int i = 0; i < 4; ++i) {
      float* at = out + row * stride + 16 * i;
      const __m512 before = adds ? _mm512_maskz_loadu_ps(there[i], at) : _mm512_setzero_ps();
      __m512 sum = sums[row][i];
      if (factors.of_rows) {
        const __m512 of_row = _mm512_set1_ps(factors.of_rows[row]);
        const __m512 of_column = _mm512_maskz_loadu_ps(there[i], factors.of_columns + 16 * i);
        const __m512 first = factors.rows_first ? of_row : of_column, second = factors.rows_first ? of_column : of_row;
        sum = _mm512_fmadd_ps(_mm512_mul_ps(sum, first), second, before);
      } else {
        sum = _mm512_add_ps(before, sum);
      }
      _mm512_mask_storeu_ps(at, there[i], sum);
    }
  }
}

using Tile = void (*)(const uint32_t*, int64_t, const uint32_t*, int64_t, float*, int64_t, int64_t, bool, const Factors&);
constexpr Tile kTiles[] = {tile<1>, tile<2>, tile<3>, tile<4>, tile<5>, tile<6>};

}  // namespace
#endif

// out = left @ right^T, both with the summed dimension second, times the factors of the blocks if there are any.
//   left, right   bfloat16
//   *_stride      numbers from one row to the next; *_summed from one summed number to the next
//   out           float32, [rows, columns], without gaps
//   depth         numbers that are summed for each; block: how many from zero, an even number
//   of_rows       float32, [blocks, rows]; of_columns: [blocks, columns]; or null, both
//   rows_first    whether a sum is multiplied by the row's factor first; the second product is not rounded
//   threads       at most so many work on it
//   done          becomes 1; stays as it is where the processor has no such instruction
extern "C" __attribute__((visibility("default"))) void te_precision_product(
    const uint16_t* left, int64_t left_stride, int64_t left_summed, const uint16_t* right, int64_t right_stride,
    int64_t right_summed, float* out, int64_t rows, int64_t columns, int64_t depth, int64_t block, const float* of_rows,
    const float* of_columns, int rows_first, int threads, int* done) {
#ifdef __AVX512BF16__
  const Matrix lefts{left, left_stride, left_summed};
  const Matrix rights{right, right_stride, right_summed};
  const int64_t pairs = (depth + 1) / 2, panels = (columns + kColumns - 1) / kColumns;
  const int64_t tasks = (rows + kTask - 1) / kTask;
  const std::unique_ptr<uint32_t[]> pairs_of_rows(new uint32_t[rows * pairs]);
  const std::unique_ptr<uint32_t[]> pairs_of_columns(new uint32_t[panels * kColumns * pairs]);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
#pragma omp for nowait
    for (int64_t task = 0; task < tasks; ++task) {
      const int64_t first = task * kTask, count = least(kTask, rows - first);
      lay_out(lefts, first, count, count, depth, pairs_of_rows.get() + first * pairs, pairs, 1);
    }
#pragma omp for
    for (int64_t panel = 0; panel < panels; ++panel)
      lay_out(rights, panel * kColumns, least(kColumns, columns - panel * kColumns), kColumns, depth,
              pairs_of_columns.get() + panel * kColumns * pairs, 1, kColumns);
#pragma omp for collapse(2)
    for (int64_t panel = 0; panel < panels; ++panel) {
      for (int64_t task = 0; task < tasks; ++task) {
        const uint32_t* of_panel = pairs_of_columns.get() + panel * kColumns * pairs;
        const int64_t column = panel * kColumns, end = least((task + 1) * kTask, rows);
        for (int64_t row = task * kTask; row < end; row += kRows) {
          for (int64_t begin = 0, index = 0; begin < pairs; begin += block / 2, ++index) {
            const Factors factors{of_rows ? of_rows + index * rows + row : nullptr,
                                  of_columns ? of_columns + index * columns + column : nullptr, rows_first};
            kTiles[least(kRows, end - row) - 1](pairs_of_rows.get() + row * pairs + begin, pairs,
                                                of_panel + begin * kColumns, least(block / 2, pairs - begin),
                                                out + row * columns + column, columns, columns - column, begin > 0, factors);
          }
        }
      }
    }
  }
  *done = 1;
#endif
}
