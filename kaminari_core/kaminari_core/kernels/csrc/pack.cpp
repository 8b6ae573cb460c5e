// Codes into the layout of the kernels, and back to full weights.
#include <cstring>

#include "simd.h"

namespace kaminari {

void pack_codes(const uint8_t* codes, int64_t first, int64_t n, int64_t columns, int bits, uint8_t* packed, int64_t panel,
                int64_t panel_end) {
  const int64_t step = bits == 4 ? 8 : 4;
  for (; panel < panel_end; ++panel) {
    uint8_t* to = packed + panel * kPanel * columns * bits / 8;
    for (int64_t channel = 0; channel < kPanel; ++channel) {
      int64_t row = panel * kPanel + channel - first;
      if (row < 0 || row >= n) continue;
      const uint8_t* from = codes + row * columns;
      for (int64_t k = 0; k < columns; k += step)
        for (int64_t i = 0; i < 4; ++i) {
          uint8_t byte = bits == 4 ? uint8_t((from[k + i] & 0x0f) | (from[k + 4 + i] << 4)) : from[k + i];
          to[(k / step * kPanel + channel) * 4 + i] = byte;
        }
    }
  }
}

namespace {

// Eight codes of one channel, k in order, from its four bytes at 4 bits or from its two words of four at 8 bits.
KAMINARI_INLINE void eight(const uint8_t* codes, int bits, int64_t channel, uint8_t* to) {
  uint32_t word;
  std::memcpy(&word, codes + channel * 4, 4);
  uint32_t next;
  if (bits == 4) {
    next = (word >> 4) & 0x0f0f0f0f, word &= 0x0f0f0f0f;
  } else {
    std::memcpy(&next, codes + (kPanel + channel) * 4, 4);
  }
  std::memcpy(to, &word, 4), std::memcpy(to + 4, &next, 4);
}

#if defined(__x86_64__)
template <typename T>
KAMINARI_AVX2 KAMINARI_INLINE void widen(const uint8_t* codes, float zero, float scale, T* to) {
  __m256 value = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes))));
  value = _mm256_mul_ps(_mm256_sub_ps(value, _mm256_set1_ps(zero)), _mm256_set1_ps(scale));
  if constexpr (sizeof(T) == 4) {
    _mm256_storeu_ps(to, value);
  } else {
    __m256i words = avx2::rounded(value);
    __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), packed);
  }
}
#endif

#define KAMINARI_DEQUANTIZE(name, attribute, convert)                                                           \
  template <typename T>                                                                                         \
  attribute void name(const PackedWeight& w, T* out, int64_t panel) {                                           \
    const int64_t groups = w.columns / w.group, step = kPanel * w.bits;                                         \
    for (int64_t channel = 0; channel < kPanel && panel * kPanel + channel < w.rows; ++channel) {               \
      T* to = out + channel * w.columns;                                                                        \
      for (int64_t g = 0; g < groups; ++g) {                                                                    \
        const int64_t at = (panel * groups + g) * kPanel;                                                       \
        const float zero = w.zeros[at + channel], scale = to_float(w.scales[at + channel]);                     \
        const uint8_t* codes = w.codes + at * w.group * w.bits / 8;                                             \
        for (int64_t k = 0; k < w.group; k += 8, codes += step, to += 8) {                                      \
          uint8_t few[8];                                                                                       \
          eight(codes, w.bits, channel, few);                                                                   \
          convert(few, zero, scale, to);                                                                        \
        }                                                                                                       \
      }                                                                                                         \
    }                                                                                                           \
  }

template <typename T>
KAMINARI_INLINE void widen_portable(const uint8_t* codes, float zero, float scale, T* to) {
  for (int i = 0; i < 8; ++i) from_float((float(codes[i]) - zero) * scale, to[i]);
}

KAMINARI_DEQUANTIZE(dequantize_portable, , widen_portable)
#if defined(__x86_64__)
KAMINARI_DEQUANTIZE(dequantize_avx2, KAMINARI_AVX2, widen)
#endif

}  // namespace

template <typename T>
void dequantize_codes(const PackedWeight& w, T* out, int64_t panel, int64_t panel_end, Isa isa) {
  for (; panel < panel_end; ++panel, out += kPanel * w.columns) {
#if defined(__x86_64__)
    if (isa >= Isa::avx2) {
      dequantize_avx2(w, out, panel);
      continue;
    }
#endif
    dequantize_portable(w, out, panel);
  }
}

template void dequantize_codes<float>(const PackedWeight&, float*, int64_t, int64_t, Isa);
template void dequantize_codes<bf16>(const PackedWeight&, bf16*, int64_t, int64_t, Isa);

}  // namespace kaminari
