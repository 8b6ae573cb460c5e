// The few vector operations that the floating-point kernels are written in, once per instruction set. Such a kernel's body is a
// file of its own (*.inc) that is included once for each of these namespaces, with TARGET saying what the compiler may use in it.
//
//   F          a vector of LANES floats
//   Raw<T>     a chunk of 2 * LANES values of T, as `dot` wants it
//   load2      a chunk as two vectors of floats. In which order the values lie in them is the same for all loads of one type,
//              and `store2` undoes it.
#pragma once

#include <cmath>
#include <cstring>
#include <initializer_list>

#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define KAMINARI_INLINE inline __attribute__((always_inline))
#define KAMINARI_AVX2 __attribute__((target("avx2,fma")))
#define KAMINARI_AVX512 __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")))
#define KAMINARI_AVX512BF16 __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16")))

namespace kaminari {

KAMINARI_INLINE float to_float(float x) { return x; }
KAMINARI_INLINE float to_float(bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

KAMINARI_INLINE void from_float(float value, float& to) { to = value; }
KAMINARI_INLINE void from_float(float value, bf16& to) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  // To nearest, ties to even; NaN stays NaN.
  to.bits = value != value ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

namespace portable {
constexpr int LANES = 1;
using F = float;
KAMINARI_INLINE F set1(float x) { return x; }
KAMINARI_INLINE F add(F a, F b) { return a + b; }
KAMINARI_INLINE F mul(F a, F b) { return a * b; }
KAMINARI_INLINE F fma(F a, F b, F c) { return a * b + c; }
KAMINARI_INLINE F max(F a, F b) { return a > b ? a : b; }
KAMINARI_INLINE F loadf(const float* p) { return *p; }
KAMINARI_INLINE void storef(float* p, F a) { *p = a; }
KAMINARI_INLINE float hmax(F a) { return a; }
KAMINARI_INLINE float hsum(F a) { return a; }
KAMINARI_INLINE void hsum4(float* to, F a, F b, F c, F d) { to[0] = a, to[1] = b, to[2] = c, to[3] = d; }
KAMINARI_INLINE F exp2(F x) { return std::exp2(x); }
template <typename T>
struct Raw {
  F a, b;
};
template <typename T>
KAMINARI_INLINE void load2(const T* p, F& a, F& b) { a = to_float(p[0]), b = to_float(p[1]); }
template <typename T>
KAMINARI_INLINE void store2(T* p, F a, F b) { from_float(a, p[0]), from_float(b, p[1]); }
template <typename T>
KAMINARI_INLINE Raw<T> load_raw(const T* p) { return {to_float(p[0]), to_float(p[1])}; }
template <typename T>
KAMINARI_INLINE F dot(F sum, const Raw<T>& x, const Raw<T>& y) { return sum + x.a * y.a + x.b * y.b; }
}  // namespace portable

#if defined(__x86_64__)

namespace avx2 {
#define TARGET KAMINARI_AVX2
constexpr int LANES = 8;
using F = __m256;
TARGET KAMINARI_INLINE F set1(float x) { return _mm256_set1_ps(x); }
TARGET KAMINARI_INLINE F add(F a, F b) { return _mm256_add_ps(a, b); }
TARGET KAMINARI_INLINE F mul(F a, F b) { return _mm256_mul_ps(a, b); }
TARGET KAMINARI_INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
TARGET KAMINARI_INLINE F max(F a, F b) { return _mm256_max_ps(a, b); }
TARGET KAMINARI_INLINE F loadf(const float* p) { return _mm256_loadu_ps(p); }
TARGET KAMINARI_INLINE void storef(float* p, F a) { _mm256_storeu_ps(p, a); }
TARGET KAMINARI_INLINE float hmax(F a) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
// Lane 0 of the result has the sum of a, lane 1 that of b, and so on.
TARGET KAMINARI_INLINE __m128 sums4(F a, F b, F c, F d) {
  F ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  F cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
  F all = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
  return _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
}
TARGET KAMINARI_INLINE void hsum4(float* to, F a, F b, F c, F d) { _mm_storeu_ps(to, sums4(a, b, c, d)); }
TARGET KAMINARI_INLINE float hsum(F a) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
// 2^x for x <= 0: a polynomial on [-1/2, 1/2] (the Taylor series of 2^f to degree 7, below 2^-24 relative) and the exponent.
TARGET KAMINARI_INLINE F exp2(F x) {
  x = _mm256_max_ps(_mm256_set1_ps(-126.0f), x);  // in this order NaN stays
  F n = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  F f = _mm256_sub_ps(x, n);
  F p = _mm256_set1_ps(1.525273380e-5f);
  for (float c : {1.540353039e-4f, 1.333355815e-3f, 9.618129108e-3f, 5.550410866e-2f, 2.402265070e-1f, 6.931471806e-1f, 1.0f})
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(c));
  return _mm256_castsi256_ps(
      _mm256_add_epi32(_mm256_castps_si256(p), _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23)));
}
template <typename T>
struct Raw {
  F a, b;
};
TARGET KAMINARI_INLINE void load2(const float* p, F& a, F& b) { a = _mm256_loadu_ps(p), b = _mm256_loadu_ps(p + 8); }
TARGET KAMINARI_INLINE void load2(const bf16* p, F& a, F& b) {
  __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  a = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
  b = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(int(0xffff0000))));
}
TARGET KAMINARI_INLINE __m256i rounded(F x) {
  __m256i bits = _mm256_castps_si256(x);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i up = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(up, _mm256_set1_epi32(0x7fc0), nan);
}
TARGET KAMINARI_INLINE void store2(float* p, F a, F b) { _mm256_storeu_ps(p, a), _mm256_storeu_ps(p + 8, b); }
TARGET KAMINARI_INLINE void store2(bf16* p, F a, F b) {
  __m256i pairs = _mm256_or_si256(rounded(a), _mm256_slli_epi32(rounded(b), 16));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), pairs);
}
template <typename T>
TARGET KAMINARI_INLINE Raw<T> load_raw(const T* p) {
  Raw<T> raw;
  load2(p, raw.a, raw.b);
  return raw;
}
template <typename T>
TARGET KAMINARI_INLINE F dot(F sum, const Raw<T>& x, const Raw<T>& y) {
  return _mm256_fmadd_ps(x.b, y.b, _mm256_fmadd_ps(x.a, y.a, sum));
}
#undef TARGET
}  // namespace avx2

namespace avx512 {
#define TARGET KAMINARI_AVX512
constexpr int LANES = 16;
using F = __m512;
TARGET KAMINARI_INLINE F set1(float x) { return _mm512_set1_ps(x); }
TARGET KAMINARI_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
TARGET KAMINARI_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
TARGET KAMINARI_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
TARGET KAMINARI_INLINE F max(F a, F b) { return _mm512_max_ps(a, b); }
TARGET KAMINARI_INLINE F loadf(const float* p) { return _mm512_loadu_ps(p); }
TARGET KAMINARI_INLINE void storef(float* p, F a) { _mm512_storeu_ps(p, a); }
TARGET KAMINARI_INLINE float hmax(F a) { return _mm512_reduce_max_ps(a); }
TARGET KAMINARI_INLINE float hsum(F a) { return _mm512_reduce_add_ps(a); }
TARGET KAMINARI_INLINE void hsum4(float* to, F a, F b, F c, F d) {
  F ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  F cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  F all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}
TARGET KAMINARI_INLINE F exp2(F x) {
  F n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  F f = _mm512_sub_ps(x, n);
  F p = _mm512_set1_ps(1.525273380e-5f);
  for (float c : {1.540353039e-4f, 1.333355815e-3f, 9.618129108e-3f, 5.550410866e-2f, 2.402265070e-1f, 6.931471806e-1f, 1.0f})
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(c));
  return _mm512_scalef_ps(p, n);
}
template <typename T>
struct Raw {
  F a, b;
};
TARGET KAMINARI_INLINE void load2(const float* p, F& a, F& b) { a = _mm512_loadu_ps(p), b = _mm512_loadu_ps(p + 16); }
TARGET KAMINARI_INLINE void load2(const bf16* p, F& a, F& b) {
  __m512i pairs = _mm512_loadu_si512(p);
  a = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  b = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000))));
}
TARGET KAMINARI_INLINE __m512i rounded(F x) {
  __m512i bits = _mm512_castps_si512(x);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i up = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  return _mm512_mask_mov_epi32(up, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
}
TARGET KAMINARI_INLINE void store2(float* p, F a, F b) { _mm512_storeu_ps(p, a), _mm512_storeu_ps(p + 16, b); }
TARGET KAMINARI_INLINE void store2(bf16* p, F a, F b) {
  _mm512_storeu_si512(p, _mm512_or_si512(rounded(a), _mm512_slli_epi32(rounded(b), 16)));
}
template <typename T>
TARGET KAMINARI_INLINE Raw<T> load_raw(const T* p) {
  Raw<T> raw;
  load2(p, raw.a, raw.b);
  return raw;
}
template <typename T>
TARGET KAMINARI_INLINE F dot(F sum, const Raw<T>& x, const Raw<T>& y) {
  return _mm512_fmadd_ps(x.b, y.b, _mm512_fmadd_ps(x.a, y.a, sum));
}
#undef TARGET
}  // namespace avx512

namespace avx512bf16 {
#define TARGET KAMINARI_AVX512BF16
using avx512::add, avx512::exp2, avx512::fma, avx512::hmax, avx512::hsum, avx512::hsum4, avx512::load2, avx512::loadf;
using avx512::F, avx512::LANES, avx512::max, avx512::mul, avx512::set1, avx512::store2, avx512::storef;
template <typename T>
struct Raw : avx512::Raw<T> {};
template <>
struct Raw<bf16> {
  __m512bh pairs;
};
TARGET KAMINARI_INLINE Raw<float> load_raw(const float* p) { return {avx512::load_raw(p)}; }
TARGET KAMINARI_INLINE Raw<bf16> load_raw(const bf16* p) { return {(__m512bh)_mm512_loadu_si512(p)}; }
TARGET KAMINARI_INLINE F dot(F sum, const Raw<float>& x, const Raw<float>& y) {
  return _mm512_fmadd_ps(x.b, y.b, _mm512_fmadd_ps(x.a, y.a, sum));
}
TARGET KAMINARI_INLINE F dot(F sum, const Raw<bf16>& x, const Raw<bf16>& y) {
  return _mm512_dpbf16_ps(sum, x.pairs, y.pairs);
}
#undef TARGET
}  // namespace avx512bf16

#endif  // __x86_64__

}  // namespace kaminari
