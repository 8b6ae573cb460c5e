// What this processor can do, asked once.
#include "kernels.h"

namespace kaminari {

Isa best_isa() {
#if defined(__x86_64__)
  static const Isa best = [] {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return Isa::portable;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vnni"))
      return Isa::avx2;
    return __builtin_cpu_supports("avx512bf16") ? Isa::avx512bf16 : Isa::avx512;
  }();
  return best;
#else
  return Isa::portable;
#endif
}

}  // namespace kaminari
