// Attention of a decode step: one pass over the keys and values of each row, as far as that row is filled.
//
// The query heads that share a kv head are worked on together, so that the cache is read once for all of them. A task is one
// kv head of one row, so the result does not depend on how tasks are spread over threads, nor on other rows.
#include "simd.h"

namespace kaminari {

#if defined(__x86_64__)
#define TARGET KAMINARI_AVX2
#define KAMINARI_CHUNKS \
  KAMINARI_CASE(1) KAMINARI_CASE(2) KAMINARI_CASE(3) KAMINARI_CASE(4) KAMINARI_CASE(5) KAMINARI_CASE(6) KAMINARI_CASE(8) \
  KAMINARI_CASE(10) KAMINARI_CASE(12) KAMINARI_CASE(16)
namespace avx2 {
#include "attention.inc"
}
#undef TARGET
#undef KAMINARI_CHUNKS
#define KAMINARI_CHUNKS \
  KAMINARI_CASE(1) KAMINARI_CASE(2) KAMINARI_CASE(3) KAMINARI_CASE(4) KAMINARI_CASE(5) KAMINARI_CASE(6) KAMINARI_CASE(8)
#define TARGET KAMINARI_AVX512
namespace avx512 {
#include "attention.inc"
}
#undef TARGET
#define TARGET KAMINARI_AVX512BF16
namespace avx512bf16 {
#include "attention.inc"
}
#undef TARGET
#undef KAMINARI_CHUNKS
#endif

namespace {

// Any head size up to kLongestHead, written plainly.
template <typename T>
void attend_portable(const DecodeAttention<T>& call, int64_t row, int64_t kv) {
  const int64_t group = call.heads / call.kv_heads, size = call.head_dim;
  const T* keys = call.keys + row * call.slot_stride + kv * call.head_stride;
  const T* values = call.values + row * call.slot_stride + kv * call.head_stride;
  for (int64_t token = 0; token < call.width; ++token) {
    const int64_t cursor = call.cursors[row * call.cursor_row + token * call.cursor_token];
    for (int64_t h = kv * group; h < (kv + 1) * group; ++h) {
      const T* query = call.query + row * call.query_row + token * call.query_token + h * size;
      T* out = call.out + ((row * call.width + token) * call.heads + h) * size;
      float sums[kLongestHead] = {}, largest = -1e30f, total = 0.0f;
      const bool dead = cursor < 0 || cursor >= call.length;
      for (int64_t at = 0; at <= cursor && !dead; ++at) {
        float score = 0.0f;
        for (int64_t d = 0; d < size; ++d) score += to_float(query[d]) * to_float(keys[at * size + d]);
        score *= call.scale;
        const float next = score > largest ? score : largest;
        const float kept = std::exp(largest - next), weight = std::exp(score - next);
        largest = next, total = total * kept + weight;
        for (int64_t d = 0; d < size; ++d) sums[d] = sums[d] * kept + weight * to_float(values[at * size + d]);
      }
      for (int64_t d = 0; d < size; ++d) from_float(dead ? 0.0f : sums[d] / total, out[d]);
    }
  }
}

}  // namespace

template <typename T>
void decode_attention(const DecodeAttention<T>& call, int64_t task, int64_t task_end, Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::avx512bf16 && avx512bf16::run(call, task, task_end)) return;
  if (isa >= Isa::avx512 && avx512::run(call, task, task_end)) return;
  if (isa >= Isa::avx2 && avx2::run(call, task, task_end)) return;
#endif
  for (; task < task_end; ++task) attend_portable(call, task % call.rows, task / call.rows);
}

template void decode_attention<float>(const DecodeAttention<float>&, int64_t, int64_t, Isa);
template void decode_attention<bf16>(const DecodeAttention<bf16>&, int64_t, int64_t, Isa);

}  // namespace kaminari
