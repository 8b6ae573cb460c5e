// The product of few rows of activations with a weight of 4- or 8-bit codes, bound by the bytes of the weight.
//
// Both sides are small whole numbers, so one instruction multiplies and adds four of them per channel. A 64-byte load has the codes
// of 16 channels: at 4 bits eight k of each, in two halves of the bytes. Zero points are taken off exactly, in whole numbers: the sum
// starts at zero point times minus the sum of the activations. Only then, once per group, it becomes a float.
#include <cstring>

#include "simd.h"

namespace kaminari {
namespace {

// The pieces of one group of one panel.
struct Group {
  const uint8_t* codes;
  const bf16* scales;
  const uint8_t* zeros;
};

KAMINARI_INLINE Group group_of(const PackedWeight& w, int64_t panel, int64_t g) {
  int64_t at = (panel * (w.columns / w.group) + g) * kPanel;
  return {w.codes + at * w.group * w.bits / 8, w.scales + at, w.zeros + at};
}

KAMINARI_INLINE int32_t four(const int8_t* digits) {
  int32_t word;
  std::memcpy(&word, digits, 4);
  return word;
}

// How many of a panel's channels are real.
KAMINARI_INLINE int64_t channels(const PackedWeight& w, int64_t panel) {
  int64_t left = w.rows - panel * kPanel;
  return left < kPanel ? left : kPanel;
}

KAMINARI_INLINE int code_at(const uint8_t* codes, int bits, int64_t k, int64_t channel) {
  if (bits == 8) return codes[(k / 4 * kPanel + channel) * 4 + k % 4];
  uint8_t byte = codes[(k / 8 * kPanel + channel) * 4 + k % 4];
  return k % 8 < 4 ? byte & 0x0f : byte >> 4;
}

template <typename T>
void linear_portable(const QuantizedRows& x, const PackedWeight& w, T* out, int64_t panel) {
  int64_t groups = w.columns / w.group;
  for (int64_t row = 0; row < x.rows; ++row) {
    for (int64_t channel = 0; channel < channels(w, panel); ++channel) {
      float total = 0.0f;
      for (int64_t g = 0; g < groups; ++g) {
        Group part = group_of(w, panel, g);
        int64_t at = g * x.rows + row;
        int32_t sum = 0;
        for (int digit = 0; digit < x.count; ++digit) {
          const int8_t* digits = x.digits + (at * x.count + digit) * x.group;
          sum = sum * 256 + part.zeros[channel] * x.sums[at * x.count + digit];
          for (int64_t k = 0; k < w.group; ++k) sum += code_at(part.codes, w.bits, k, channel) * digits[k];
        }
        total += float(sum) * x.scales[at] * to_float(part.scales[channel]);
      }
      from_float(total, out[row * w.rows + panel * kPanel + channel]);
    }
  }
}

#if defined(__x86_64__)

constexpr int64_t kAhead = 2048;  // bytes that the weight is fetched ahead

template <typename T>
KAMINARI_AVX512 KAMINARI_INLINE void store_panel(T* out, __m512 total, int64_t count) {
  if constexpr (sizeof(T) == 4) {
    _mm512_mask_storeu_ps(out, __mmask16((1u << count) - 1), total);
  } else {
    _mm256_mask_storeu_epi16(out, __mmask16((1u << count) - 1), _mm512_cvtepi32_epi16(avx512::rounded(total)));
  }
}

// Rows [row, row + M) of one panel. DIGITS is 1 or 2, as in QuantizedRows.
template <int BITS, int DIGITS, int M, typename T>
KAMINARI_AVX512 void tile_avx512(const QuantizedRows& x, const PackedWeight& w, T* out, int64_t panel, int64_t row) {
  __m512 total[M];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) total[m] = _mm512_setzero_ps();
  const int64_t groups = w.columns / w.group;
  for (int64_t g = 0; g < groups; ++g) {
    const Group part = group_of(w, panel, g);
    const int64_t at = g * x.rows + row;
    const int8_t* digits = x.digits + at * DIGITS * w.group;
    const __m512i zeros = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(part.zeros)));
    __m512i sum[M][DIGITS];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
      for (int d = 0; d < DIGITS; ++d)
        // Pairs of 16-bit numbers: (zero point, 0) times (minus the sum of the activations, anything).
        sum[m][d] = _mm512_dpwssd_epi32(_mm512_setzero_si512(), zeros,
                                        _mm512_set1_epi32(x.sums[(at + m) * DIGITS + d]));
    constexpr int STEP = BITS == 4 ? 8 : 4;
    const uint8_t* codes = part.codes;
    for (int64_t k = 0; k < w.group; k += STEP, codes += 64) {
      _mm_prefetch(reinterpret_cast<const char*>(codes + kAhead), _MM_HINT_T0);
      const __m512i word = _mm512_loadu_si512(codes);
      const __m512i mask = _mm512_set1_epi8(0x0f);
      const __m512i low = BITS == 4 ? _mm512_and_si512(word, mask) : word;
      const __m512i high = _mm512_and_si512(_mm512_srli_epi16(word, 4), mask);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
        for (int d = 0; d < DIGITS; ++d) {
          const int8_t* from = digits + (m * DIGITS + d) * w.group + k;
          sum[m][d] = _mm512_dpbusd_epi32(sum[m][d], low, _mm512_set1_epi32(four(from)));
          if (BITS == 4) sum[m][d] = _mm512_dpbusd_epi32(sum[m][d], high, _mm512_set1_epi32(four(from + 4)));
        }
    }
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(part.scales));
    const __m512 scales = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const __m512i whole =
          DIGITS == 1 ? sum[m][0] : _mm512_add_epi32(_mm512_slli_epi32(sum[m][0], 8), sum[m][DIGITS - 1]);
      const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(whole), _mm512_set1_ps(x.scales[at + m]));
      total[m] = _mm512_fmadd_ps(scaled, scales, total[m]);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) store_panel(out + (row + m) * w.rows + panel * kPanel, total[m], channels(w, panel));
}

// As above for channels 0-7 and 8-15 one after the other. A 16-bit sum takes 16 products with 4-bit numbers and no more:
// 16 * 15 * 128 < 2^15. So at 4 bits both halves of four loads share one, and 8-bit codes are taken as two 4-bit numbers.
template <int BITS, int DIGITS, int M, typename T>
KAMINARI_AVX2 void tile_avx2(const QuantizedRows& x, const PackedWeight& w, T* out, int64_t panel, int64_t row) {
  constexpr int STEP = BITS == 4 ? 8 : 4, STEPS = BITS == 4 ? 4 : 8, HALVES = BITS == 4 ? 1 : 2;
  const __m256i mask = _mm256_set1_epi8(0x0f), ones = _mm256_set1_epi16(1), sixteens = _mm256_set1_epi16(16);
  const int64_t groups = w.columns / w.group;
  for (int half = 0; half < 2; ++half) {
    __m256 total[M];
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) total[m] = _mm256_setzero_ps();
    for (int64_t g = 0; g < groups; ++g) {
      const Group part = group_of(w, panel, g);
      const int64_t at = g * x.rows + row;
      const int8_t* digits = x.digits + at * DIGITS * w.group;
      const __m128i zero_bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(part.zeros + 8 * half));
      const __m256i zeros = _mm256_cvtepu8_epi32(zero_bytes);
      __m256i sum[M][DIGITS];
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
        for (int d = 0; d < DIGITS; ++d)
          sum[m][d] = _mm256_madd_epi16(zeros, _mm256_set1_epi32(x.sums[(at + m) * DIGITS + d]));
      const uint8_t* codes = part.codes + 32 * half;
      for (int64_t k = 0; k < w.group;) {
        __m256i products[M][DIGITS][HALVES];
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
          for (int d = 0; d < DIGITS; ++d)
#pragma GCC unroll 2
            for (int h = 0; h < HALVES; ++h) products[m][d][h] = _mm256_setzero_si256();
        for (int step = 0; step < STEPS; ++step, k += STEP, codes += 64) {
          _mm_prefetch(reinterpret_cast<const char*>(codes + kAhead), _MM_HINT_T0);
          const __m256i word = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
          const __m256i low = _mm256_and_si256(word, mask);
          const __m256i high = _mm256_and_si256(_mm256_srli_epi16(word, 4), mask);
#pragma GCC unroll 4
          for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
            for (int d = 0; d < DIGITS; ++d) {
              const int8_t* from = digits + (m * DIGITS + d) * w.group + k;
              const __m256i first = _mm256_set1_epi32(four(from));
              const __m256i second = BITS == 4 ? _mm256_set1_epi32(four(from + 4)) : first;
              __m256i& last = products[m][d][HALVES - 1];
              products[m][d][0] = _mm256_add_epi16(products[m][d][0], _mm256_maddubs_epi16(low, first));
              last = _mm256_add_epi16(last, _mm256_maddubs_epi16(high, second));
            }
        }
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
          for (int d = 0; d < DIGITS; ++d) {
            sum[m][d] = _mm256_add_epi32(sum[m][d], _mm256_madd_epi16(products[m][d][0], ones));
            if (BITS == 8)
              sum[m][d] = _mm256_add_epi32(sum[m][d], _mm256_madd_epi16(products[m][d][HALVES - 1], sixteens));
          }
      }
      const __m128i scale_halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(part.scales + 8 * half));
      const __m256 scales = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(scale_halves), 16));
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        const __m256i whole =
            DIGITS == 1 ? sum[m][0] : _mm256_add_epi32(_mm256_slli_epi32(sum[m][0], 8), sum[m][DIGITS - 1]);
        const __m256 scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(whole), _mm256_set1_ps(x.scales[at + m]));
        total[m] = _mm256_fmadd_ps(scaled, scales, total[m]);
      }
    }
    float lanes[8];
    for (int m = 0; m < M; ++m) {
      _mm256_storeu_ps(lanes, total[m]);
      T* to = out + (row + m) * w.rows + panel * kPanel + 8 * half;
      for (int64_t channel = 8 * half; channel < 8 * half + 8 && channel < channels(w, panel); ++channel)
        from_float(lanes[channel - 8 * half], to[channel - 8 * half]);
    }
  }
}

// All rows of one panel, in the largest tiles that fit: the panel comes from memory once and from the cache after that.
template <int BITS, int DIGITS, typename T>
void linear_avx512(const QuantizedRows& x, const PackedWeight& w, T* out, int64_t panel) {
  constexpr int LARGE = DIGITS == 1 ? 12 : 8;
  int64_t row = 0;
  if (x.rows > 8)
    for (; row + LARGE <= x.rows; row += LARGE) tile_avx512<BITS, DIGITS, LARGE>(x, w, out, panel, row);
  for (; row + 8 <= x.rows; row += 8) tile_avx512<BITS, DIGITS, 8>(x, w, out, panel, row);
  if (row + 4 <= x.rows) tile_avx512<BITS, DIGITS, 4>(x, w, out, panel, row), row += 4;
  if (row + 2 <= x.rows) tile_avx512<BITS, DIGITS, 2>(x, w, out, panel, row), row += 2;
  if (row < x.rows) tile_avx512<BITS, DIGITS, 1>(x, w, out, panel, row);
}

template <int BITS, int DIGITS, typename T>
void linear_avx2(const QuantizedRows& x, const PackedWeight& w, T* out, int64_t panel) {
  int64_t row = 0;
  constexpr int LARGE = DIGITS == 1 && BITS == 4 ? 4 : 2;
  for (; row + LARGE <= x.rows; row += LARGE) tile_avx2<BITS, DIGITS, LARGE>(x, w, out, panel, row);
  if (row + 2 <= x.rows) tile_avx2<BITS, DIGITS, 2>(x, w, out, panel, row), row += 2;
  if (row < x.rows) tile_avx2<BITS, DIGITS, 1>(x, w, out, panel, row);
}

template <int BITS, int DIGITS, typename T>
void linear_vector(const QuantizedRows& x, const PackedWeight& w, T* out, int64_t panel, Isa isa) {
  if (isa >= Isa::avx512) return linear_avx512<BITS, DIGITS>(x, w, out, panel);
  linear_avx2<BITS, DIGITS>(x, w, out, panel);
}

#endif

template <typename T>
void linear_panel(const QuantizedRows& x, const PackedWeight& w, T* out, int64_t panel, Isa isa) {
#if defined(__x86_64__)
  if (isa >= Isa::avx2) {
    if (w.bits == 4 && x.count == 1) return linear_vector<4, 1>(x, w, out, panel, isa);
    if (w.bits == 4) return linear_vector<4, 2>(x, w, out, panel, isa);
    if (x.count == 1) return linear_vector<8, 1>(x, w, out, panel, isa);
    return linear_vector<8, 2>(x, w, out, panel, isa);
  }
#endif
  linear_portable(x, w, out, panel);
}

}  // namespace

template <typename T>
void linear_codes(const QuantizedRows& x, const PackedWeight& w, T* out, int64_t panel, int64_t panel_end, Isa isa) {
  for (; panel < panel_end; ++panel) linear_panel(x, w, out, panel, isa);
}

template void linear_codes<float>(const QuantizedRows&, const PackedWeight&, float*, int64_t, int64_t, Isa);
template void linear_codes<bf16>(const QuantizedRows&, const PackedWeight&, bf16*, int64_t, int64_t, Isa);

}  // namespace kaminari
