// Activations to whole numbers: per row and group of K, the largest magnitude becomes the largest code.
#include <cmath>
#include <cstring>
#include <limits>

#include "simd.h"

namespace kaminari {
namespace {

constexpr int32_t kInfinityBits = 0x7f800000;
constexpr int kLargest[] = {0, 127, 32639};  // by digits: 127, or 127 * 256 + 127

// Where one group of one row goes.
struct Place {
  int8_t* digits;
  int32_t* sums;
  float* scale;
};

KAMINARI_INLINE Place place(const QuantizedRows& to, int64_t row, int64_t group) {
  int64_t at = group * to.rows + row;
  return {to.digits + at * to.count * to.group, to.sums + at * to.count, to.scales + at};
}

// The scale of a group whose largest magnitude has these bits, and what values are multiplied with.
KAMINARI_INLINE float factor(int32_t largest_bits, int count, float& scale) {
  float largest;
  std::memcpy(&largest, &largest_bits, 4);
  if (largest_bits >= kInfinityBits) {
    scale = std::numeric_limits<float>::quiet_NaN();
    return 0.0f;
  }
  scale = largest / float(kLargest[count]);
  // The reciprocal of a scale near the smallest floats is infinite: such a group is zero.
  float inverse = float(kLargest[count]) / largest;
  return largest > 0.0f && std::isfinite(inverse) ? inverse : 0.0f;
}

template <typename T>
void quantize_portable(const T* x, const QuantizedRows& to, int64_t row, int64_t row_end) {
  for (; row < row_end; ++row) {
    for (int64_t g = 0; g < to.columns / to.group; ++g) {
      const T* from = x + row * to.columns + g * to.group;
      Place out = place(to, row, g);
      int32_t largest = 0;
      for (int64_t k = 0; k < to.group; ++k) {
        float value = to_float(from[k]);
        int32_t bits;
        std::memcpy(&bits, &value, 4);
        bits &= 0x7fffffff;
        largest = bits > largest ? bits : largest;
      }
      float inverse = factor(largest, to.count, *out.scale);
      int32_t high_sum = 0, low_sum = 0;
      for (int64_t k = 0; k < to.group; ++k) {
        int32_t code = inverse == 0.0f ? 0 : int32_t(std::nearbyint(to_float(from[k]) * inverse));
        int32_t high = to.count == 2 ? (code + 128) >> 8 : 0;
        int32_t low = code - high * 256;
        if (to.count == 2) out.digits[k] = int8_t(high);
        out.digits[(to.count - 1) * to.group + k] = int8_t(low);
        high_sum += high, low_sum += low;
      }
      if (to.count == 2) out.sums[0] = -high_sum;
      out.sums[to.count - 1] = -low_sum;
    }
  }
}

#if defined(__x86_64__)

KAMINARI_AVX512 KAMINARI_INLINE __m512 load16(const float* p) { return _mm512_loadu_ps(p); }
KAMINARI_AVX512 KAMINARI_INLINE __m512 load16(const bf16* p) {
  __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

template <typename T>
KAMINARI_AVX512 void quantize_avx512(const T* x, const QuantizedRows& to, int64_t row, int64_t row_end) {
  for (; row < row_end; ++row) {
    for (int64_t g = 0; g < to.columns / to.group; ++g) {
      const T* from = x + row * to.columns + g * to.group;
      Place out = place(to, row, g);
      __m512i magnitude = _mm512_setzero_si512();
      for (int64_t k = 0; k < to.group; k += 16) {
        __m512i bits = _mm512_and_si512(_mm512_castps_si512(load16(from + k)), _mm512_set1_epi32(0x7fffffff));
        magnitude = _mm512_max_epi32(magnitude, bits);
      }
      float inverse = factor(_mm512_reduce_max_epi32(magnitude), to.count, *out.scale);
      // A product with zero would be NaN where the value is infinite; those lanes are masked away.
      __mmask16 live = inverse == 0.0f ? 0 : 0xffff;
      __m512i high_sum = _mm512_setzero_si512(), low_sum = _mm512_setzero_si512();
      for (int64_t k = 0; k < to.group; k += 16) {
        __m512i low = _mm512_maskz_cvtps_epi32(live, _mm512_mul_ps(load16(from + k), _mm512_set1_ps(inverse)));
        if (to.count == 2) {
          __m512i high = _mm512_srai_epi32(_mm512_add_epi32(low, _mm512_set1_epi32(128)), 8);
          low = _mm512_sub_epi32(low, _mm512_slli_epi32(high, 8));
          high_sum = _mm512_add_epi32(high_sum, high);
          _mm_storeu_si128(reinterpret_cast<__m128i*>(out.digits + k), _mm512_cvtepi32_epi8(high));
        }
        low_sum = _mm512_add_epi32(low_sum, low);
        int8_t* digits = out.digits + (to.count - 1) * to.group + k;
        _mm_storeu_si128(reinterpret_cast<__m128i*>(digits), _mm512_cvtepi32_epi8(low));
      }
      if (to.count == 2) out.sums[0] = -_mm512_reduce_add_epi32(high_sum);
      out.sums[to.count - 1] = -_mm512_reduce_add_epi32(low_sum);
    }
  }
}

#endif

}  // namespace

template <typename T>
void quantize_rows(const T* x, const QuantizedRows& to, int64_t row, int64_t row_end, Isa isa) {
#if defined(__x86_64__)
  if (isa >= Isa::avx512) return quantize_avx512(x, to, row, row_end);
#endif
  quantize_portable(x, to, row, row_end);
}

template void quantize_rows<float>(const float*, const QuantizedRows&, int64_t, int64_t, Isa);
template void quantize_rows<bf16>(const bf16*, const QuantizedRows&, int64_t, int64_t, Isa);

}  // namespace kaminari
