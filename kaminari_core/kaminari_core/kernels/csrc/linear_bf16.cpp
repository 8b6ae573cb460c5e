// The product of few rows with a bfloat16 weight in its ordinary layout (N, K), bound by the bytes of the weight.
#include "simd.h"

namespace kaminari {

#define TARGET
namespace portable {
#include "linear_bf16.inc"
}
#undef TARGET

#if defined(__x86_64__)
#define TARGET KAMINARI_AVX2
namespace avx2 {
#include "linear_bf16.inc"
}
#undef TARGET
#define TARGET KAMINARI_AVX512
namespace avx512 {
#include "linear_bf16.inc"
}
#undef TARGET
#define TARGET KAMINARI_AVX512BF16
namespace avx512bf16 {
#include "linear_bf16.inc"
}
#undef TARGET
#endif

void linear_bf16(const bf16* x, const bf16* weight, bf16* out, int64_t m, int64_t n, int64_t k, int64_t channel,
                 int64_t channel_end, Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::avx512bf16) return avx512bf16::run(x, weight, out, m, n, k, channel, channel_end);
  if (isa == Isa::avx512) return avx512::run(x, weight, out, m, n, k, channel, channel_end);
  if (isa == Isa::avx2) return avx2::run(x, weight, out, m, n, k, channel, channel_end);
#endif
  portable::run(x, weight, out, m, n, k, channel, channel_end);
}

}  // namespace kaminari
