// The interface of all kernels: plain pointers in, plain pointers out, no torch. `operators.cpp` is the only file that knows
// tensors and threads; each kernel works on a range of its independent outputs, so that whoever calls it decides who does what.
//
// Which instructions a kernel uses is decided when it runs (`Isa`), so one library serves every x86-64 processor. All paths compute
// the same formula; they differ in the order of floating-point sums only. On one path, what a row of the result is never depends
// on how many other rows there are, nor on how the range is split.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kaminari {

// Each includes those before it. `avx512` means F, BW, VL, DQ and VNNI; `avx512bf16` adds the dot product of bfloat16 pairs.
enum class Isa { portable = 0, avx2 = 1, avx512 = 2, avx512bf16 = 3 };

// The best that this processor and its operating system offer.
Isa best_isa();

struct bf16 {
  uint16_t bits;
};

// Output channels whose codes are interleaved: a panel.
constexpr int64_t kPanel = 16;

// A quantized weight (N, K), packed. Everything is in panels of 16 output channels, the last one padded:
//   codes   4 bits: [panel][K / 8][channel 16][4 bytes], byte i of a channel holds k = 8 j + i (low) and 8 j + 4 + i (high nibble)
//           8 bits: [panel][K / 4][channel 16][4 bytes], byte i of a channel is k = 4 j + i
//   scales  bfloat16 [panel][K / group][channel 16]
//   zeros   uint8    [panel][K / group][channel 16]
// weight[n, k] = (code - zero) * scale.
struct PackedWeight {
  const uint8_t* codes;
  const bf16* scales;
  const uint8_t* zeros;
  int64_t rows;     // N
  int64_t columns;  // K, a multiple of group
  int64_t group;    // 32, 64 or 128
  int bits;         // 4 or 8
};

// Put codes (n, K), one a byte, into rows [first, first + n) of a packed weight; for panels [panel, panel_end) of it only.
void pack_codes(const uint8_t* codes, int64_t first, int64_t n, int64_t columns, int bits, uint8_t* packed, int64_t panel,
                int64_t panel_end);

// Activations (M, K) as whole numbers, a scale per row and group of K: x = scale * (256 * high + low), or scale * low with one
// digit. All arrays are group-major, so that a tile of rows reads them in order:
//   digits    int8 [K / group][M][1 or 2: high, low][group]
//   sums      int32 [K / group][M][1 or 2]: minus the sum of each of those
//   scales    float [K / group][M]
// A group with a value that is not finite gets the scale NaN, so that its row of the result shows it.
struct QuantizedRows {
  int8_t* digits;
  int32_t* sums;
  float* scales;
  int64_t rows;
  int64_t columns;
  int64_t group;
  int count;  // digits per value: 1 (8 bits) or 2 (16 bits)
};

// Quantize rows [row, row_end) of x (M, K).
template <typename T>
void quantize_rows(const T* x, const QuantizedRows& to, int64_t row, int64_t row_end, Isa isa);

// out (M, N) = x weight^T for the output channels of panels [panel, panel_end).
template <typename T>
void linear_codes(const QuantizedRows& x, const PackedWeight& weight, T* out, int64_t panel, int64_t panel_end, Isa isa);

// The full weight of panels [panel, panel_end), as rows of `out` (rows of those panels, K).
template <typename T>
void dequantize_codes(const PackedWeight& weight, T* out, int64_t panel, int64_t panel_end, Isa isa);

// out (M, N) = x (M, K) weight (N, K)^T for output channels [channel, channel_end); sums in float.
void linear_bf16(const bf16* x, const bf16* weight, bf16* out, int64_t m, int64_t n, int64_t k, int64_t channel,
                 int64_t channel_end, Isa isa);

// One layer's attention of a decode step over the slot cache. Query (r, w, h) sees positions [0, cursors[r, w]] of row r and of kv
// head h / (heads / kv_heads); one whose cursor is at `length` or beyond belongs to no request and gets zeros.
template <typename T>
struct DecodeAttention {
  const T* query;     // (rows, width, heads, head_dim), rows and tokens at the strides below
  const T* keys;      // (slots, kv_heads, positions, head_dim), slots and heads at the strides below
  const T* values;    // as keys
  const int64_t* cursors;  // (rows, width)
  T* out;             // (rows, width, heads, head_dim), contiguous
  int64_t rows, width, heads, kv_heads, head_dim, length;
  int64_t query_row, query_token;
  int64_t slot_stride, head_stride;
  int64_t cursor_row, cursor_token;
  float scale;
};

constexpr int64_t kLongestHead = 256;

// Tasks [task, task_end) of rows * kv_heads: task t is row t % rows and kv head t / rows.
template <typename T>
void decode_attention(const DecodeAttention<T>& call, int64_t task, int64_t task_end, Isa isa);

}  // namespace kaminari
