// Small matrix products and transposes, of float matrices that the caches hold. A block of sums stays in registers
// while the depth passes; what becomes of it is the caller's.
#pragma once
#include "simd.h"

namespace hf_ssm {
namespace HF_SSM_ISA {

// The block: `block_rows` times two vectors are half of the registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int block_rows = 8;
#else
constexpr int block_rows = 4;
#endif
constexpr int block_columns = 2 * lanes;

constexpr int64_t round_up(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }

// A matrix whose element (i, k) is data[i * row + k * column]; one of the two is 1.
struct Left {
  const float* data;
  int64_t row, column;
};

// Which part of a product is computed. Those named after a triangle have one of zeros in the left matrix.
enum class Part {
  all,
  lower_result,  // blocks that lie above the diagonal are left out
  lower_left,    // row i has depth [0, i]
  upper_left,    // row i has depth [i, depth)
};

template <int columns, class Store>
HF_SSM_INLINE void product_block(int64_t depth, Left left, const float* right, int64_t right_row, Store&& store) {
  Floats sum[block_rows][columns] = {};
  const float* a = left.data;
  for (int64_t k = 0; k < depth; ++k, a += left.column, right += right_row) {
    Floats b[columns];
#pragma GCC unroll 2
    for (int j = 0; j < columns; ++j) b[j] = load(right + j * lanes);
#pragma GCC unroll 16
    for (int i = 0; i < block_rows; ++i)
#pragma GCC unroll 2
      for (int j = 0; j < columns; ++j) sum[i][j] += b[j] * a[i * left.row];
  }
#pragma GCC unroll 16
  for (int i = 0; i < block_rows; ++i)
#pragma GCC unroll 2
    for (int j = 0; j < columns; ++j) store(i, j * lanes, sum[i][j]);
}

// left (rows, depth) times right (depth, columns), `right_row` floats from row to row: store(i, j, v) is given elements
// (i, j) .. (i, j + lanes - 1) of the result. `rows` is a multiple of block_rows, `columns` of lanes.
template <Part part = Part::all, class Store>
HF_SSM_INLINE void product(int64_t rows, int64_t columns, int64_t depth, Left left, const float* right,
                           int64_t right_row, Store&& store) {
  for (int64_t j = 0; j < columns; j += block_columns)
    for (int64_t i = 0; i < rows; i += block_rows) {
      if (part == Part::lower_result && j >= i + block_rows) continue;
      const int64_t begin = part == Part::upper_left ? i : 0;
      const int64_t end = part == Part::lower_left && i + block_rows < depth ? i + block_rows : depth;
      const Left block{left.data + i * left.row + begin * left.column, left.row, left.column};
      const float* from = right + begin * right_row + j;
      auto put = [&](int64_t row, int64_t column, Floats value) { store(i + row, j + column, value); };
      if (columns - j > lanes)
        product_block<2>(end - begin, block, from, right_row, put);
      else
        product_block<1>(end - begin, block, from, right_row, put);
    }
}

// Rows a[0] .. a[lanes - 1] of a square become its columns: interleaving the halves once per bit of an index.
inline void transpose_square(Floats* a) {
  for (int bit = 1; bit < lanes; bit *= 2) {
    Floats b[lanes];
#pragma GCC unroll 16
    for (int i = 0; i < lanes; i += 2) {
#define HF_SSM_INTERLEAVE(...) __builtin_shufflevector(a[i / 2], a[(i + lanes) / 2], __VA_ARGS__)
#if HF_SSM_LANES == 16
      b[i] = HF_SSM_INTERLEAVE(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      b[i + 1] = HF_SSM_INTERLEAVE(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif HF_SSM_LANES == 8
      b[i] = HF_SSM_INTERLEAVE(0, 8, 1, 9, 2, 10, 3, 11);
      b[i + 1] = HF_SSM_INTERLEAVE(4, 12, 5, 13, 6, 14, 7, 15);
#else
      b[i] = HF_SSM_INTERLEAVE(0, 4, 1, 5);
      b[i + 1] = HF_SSM_INTERLEAVE(2, 6, 3, 7);
#endif
#undef HF_SSM_INTERLEAVE
    }
#pragma GCC unroll 16
    for (int i = 0; i < lanes; ++i) a[i] = b[i];
  }
}

// to[j * to_row + i] = from[i * from_row + j] for i < rows, j < columns.
inline void transpose(float* to, int64_t to_row, const float* from, int64_t from_row, int64_t rows, int64_t columns) {
  for (int64_t i = 0; i < rows; i += lanes)
    for (int64_t j = 0; j < columns; j += lanes) {
      if (rows - i >= lanes && columns - j >= lanes) {
        Floats square[lanes];
#pragma GCC unroll 16
        for (int r = 0; r < lanes; ++r) square[r] = load(from + (i + r) * from_row + j);
        transpose_square(square);
#pragma GCC unroll 16
        for (int r = 0; r < lanes; ++r) store(to + (j + r) * to_row + i, square[r]);
      } else {
        for (int64_t r = i; r < rows && r < i + lanes; ++r)
          for (int64_t c = j; c < columns && c < j + lanes; ++c) to[c * to_row + r] = from[r * from_row + c];
      }
    }
}

}  // namespace HF_SSM_ISA
}  // namespace hf_ssm
