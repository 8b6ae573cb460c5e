// The kernels as operators of torch: checks, allocation and threads. Nothing here depends on values, so that a compiler may take
// every operator as one node; `kaminari_core/kernels/operators.py` says what each returns when only shapes are known.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <atomic>
#include <cmath>
#include <string>
#include <type_traits>

#include "kernels.h"

namespace kaminari {
namespace {

using at::Tensor;

// Tests choose an instruction set; everybody else gets the best.
std::atomic<int> chosen_isa{-1};

Isa isa() {
  int chosen = chosen_isa.load(std::memory_order_relaxed);
  return chosen < 0 ? best_isa() : Isa(chosen);
}

constexpr const char* kIsaNames[] = {"portable", "avx2", "avx512", "avx512bf16"};

std::string instructions() { return kIsaNames[int(isa())]; }

bool use_instructions(c10::string_view name) {
  if (name.empty()) {
    chosen_isa = -1;
    return true;
  }
  for (int each = 0; each <= int(best_isa()); ++each) {
    if (name == kIsaNames[each]) {
      chosen_isa = each;
      return true;
    }
  }
  return false;
}

// Threads are worth waking for about this many bytes of weights each.
constexpr int64_t kBytesPerThread = 32 * 1024;

int64_t grain(int64_t bytes_each) { return std::max<int64_t>(1, kBytesPerThread / std::max<int64_t>(1, bytes_each)); }

void check_activations(const Tensor& x, int64_t columns) {
  TORCH_CHECK(x.device().is_cpu() && x.dim() == 2 && x.is_contiguous(), "activations must be a contiguous CPU matrix");
  TORCH_CHECK(x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kFloat, "activations must be bfloat16 or float32");
  TORCH_CHECK(x.size(1) == columns, "activations have ", x.size(1), " columns, but the weight has ", columns);
}

void check_bytes(const Tensor& tensor, at::ScalarType type, int64_t count, const char* name) {
  TORCH_CHECK(tensor.device().is_cpu() && tensor.is_contiguous() && tensor.scalar_type() == type && tensor.numel() == count,
              name, " must be contiguous and of ", count, " elements");
}

int64_t panels(int64_t rows) { return (rows + kPanel - 1) / kPanel; }

PackedWeight packed_weight(const Tensor& codes, const Tensor& scales, const Tensor& zeros, int64_t rows, int64_t columns,
                           int64_t group, int64_t bits) {
  TORCH_CHECK(bits == 4 || bits == 8, "codes have 4 or 8 bits, not ", bits);
  TORCH_CHECK(group == 32 || group == 64 || group == 128, "groups are of 32, 64 or 128, not ", group);
  TORCH_CHECK(rows > 0 && columns > 0 && columns % group == 0, "columns must be a whole number of groups");
  const int64_t padded = panels(rows) * kPanel;
  check_bytes(codes, at::kByte, padded * columns * bits / 8, "codes");
  check_bytes(scales, at::kBFloat16, padded * (columns / group), "scales");
  check_bytes(zeros, at::kByte, padded * (columns / group), "zeros");
  return {codes.const_data_ptr<uint8_t>(), reinterpret_cast<const bf16*>(scales.const_data_ptr()),
          zeros.const_data_ptr<uint8_t>(), rows, columns, group, int(bits)};
}

// Calls f with a null pointer of the kernels' type for the tensor's.
template <typename F>
void by_type(const Tensor& tensor, F f) {
  if (tensor.scalar_type() == at::kFloat) f(static_cast<float*>(nullptr));
  else f(static_cast<bf16*>(nullptr));
}

template <typename T>
const T* input(const Tensor& tensor, T*) {
  return reinterpret_cast<const T*>(tensor.const_data_ptr());
}

template <typename T>
T* output(const Tensor& tensor, T*) {
  return reinterpret_cast<T*>(tensor.mutable_data_ptr());
}

Tensor linear_codes_op(const Tensor& x, const Tensor& codes, const Tensor& scales, const Tensor& zeros, int64_t rows,
                       int64_t group, int64_t bits, int64_t activation_bits) {
  TORCH_CHECK(activation_bits == 8 || activation_bits == 16, "activations have 8 or 16 bits, not ", activation_bits);
  const int64_t m = x.size(0), columns = x.size(1);
  check_activations(x, columns);
  const PackedWeight weight = packed_weight(codes, scales, zeros, rows, columns, group, bits);
  const int64_t count = activation_bits / 8, groups = columns / group;
  Tensor out = at::empty({m, rows}, x.options());
  // One buffer: digits, then sums, then scales.
  const int64_t digit_bytes = m * columns * count, sum_bytes = m * groups * count * 4;
  Tensor buffer = at::empty({digit_bytes + sum_bytes + m * groups * 4}, x.options().dtype(at::kChar));
  int8_t* start = buffer.mutable_data_ptr<int8_t>();
  const QuantizedRows quantized{start, reinterpret_cast<int32_t*>(start + digit_bytes),
                                reinterpret_cast<float*>(start + digit_bytes + sum_bytes), m, columns, group, int(count)};
  const Isa which = isa();
  by_type(x, [&](auto* type) {
    const auto* from = input(x, type);
    auto* to = output(out, type);
    // Eight rows of activations are quantized sooner than threads are woken.
    at::parallel_for(0, m, 16, [&](int64_t row, int64_t end) { quantize_rows(from, quantized, row, end, which); });
    at::parallel_for(0, panels(rows), grain(kPanel * columns * bits / 8), [&](int64_t panel, int64_t end) {
      linear_codes(quantized, weight, to, panel, end, which);
    });
  });
  return out;
}

void dequantize_op(const Tensor& codes, const Tensor& scales, const Tensor& zeros, int64_t rows, int64_t columns,
                   int64_t group, int64_t bits, const Tensor& out) {
  TORCH_CHECK(out.scalar_type() == at::kBFloat16 || out.scalar_type() == at::kFloat, "weights become bfloat16 or float32");
  const PackedWeight weight = packed_weight(codes, scales, zeros, rows, columns, group, bits);
  check_bytes(out, out.scalar_type(), rows * columns, "out");
  const Isa which = isa();
  by_type(out, [&](auto* type) {
    auto* to = output(out, type);
    at::parallel_for(0, panels(rows), grain(kPanel * columns), [&](int64_t panel, int64_t end) {
      dequantize_codes(weight, to + panel * kPanel * columns, panel, end, which);
    });
  });
}

void pack_codes_op(const Tensor& codes, const Tensor& scales, const Tensor& zeros, int64_t first, int64_t group, int64_t bits,
                   const Tensor& packed, const Tensor& packed_scales, const Tensor& packed_zeros) {
  TORCH_CHECK(codes.dim() == 2, "codes must be a matrix");
  const int64_t n = codes.size(0), columns = codes.size(1), groups = columns / group;
  const int64_t capacity = packed_scales.numel() / groups;
  packed_weight(packed, packed_scales, packed_zeros, capacity, columns, group, bits);
  TORCH_CHECK(n > 0 && first >= 0 && first + n <= capacity, "rows ", first, " to ", first + n, " of ", capacity);
  check_bytes(codes, at::kByte, n * columns, "codes");
  check_bytes(scales, at::kBFloat16, n * groups, "scales");
  check_bytes(zeros, at::kByte, n * groups, "zeros");
  uint8_t* to = packed.mutable_data_ptr<uint8_t>();
  const int64_t begin = first / kPanel, end = panels(first + n);
  at::parallel_for(begin, end, grain(kPanel * columns), [&](int64_t panel, int64_t stop) {
    pack_codes(codes.const_data_ptr<uint8_t>(), first, n, columns, int(bits), to, panel, stop);
  });
  const auto* from_scales = reinterpret_cast<const uint16_t*>(scales.const_data_ptr());
  auto* to_scales = reinterpret_cast<uint16_t*>(packed_scales.mutable_data_ptr());
  const uint8_t* from_zeros = zeros.const_data_ptr<uint8_t>();
  uint8_t* to_zeros = packed_zeros.mutable_data_ptr<uint8_t>();
  for (int64_t row = 0; row < n; ++row) {
    const int64_t panel = (first + row) / kPanel, channel = (first + row) % kPanel;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t at = (panel * groups + g) * kPanel + channel;
      to_scales[at] = from_scales[row * groups + g];
      to_zeros[at] = from_zeros[row * groups + g];
    }
  }
}

Tensor linear_bf16_op(const Tensor& x, const Tensor& weight) {
  TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous() && weight.device().is_cpu(), "the weight must be a contiguous matrix");
  TORCH_CHECK(x.scalar_type() == at::kBFloat16 && weight.scalar_type() == at::kBFloat16, "both must be bfloat16");
  check_activations(x, weight.size(1));
  const int64_t m = x.size(0), n = weight.size(0), k = weight.size(1);
  Tensor out = at::empty({m, n}, x.options());
  bf16* type = nullptr;
  const bf16 *from = input(x, type), *with = input(weight, type);
  bf16* to = output(out, type);
  const Isa which = isa();
  // Ranges of whole tiles of eight channels.
  at::parallel_for(0, (n + 7) / 8, grain(8 * k * 2), [&](int64_t tile, int64_t end) {
    linear_bf16(from, with, to, m, n, k, tile * 8, std::min(end * 8, n), which);
  });
  return out;
}

Tensor decode_attention_op(const Tensor& query, const Tensor& keys, const Tensor& values, const Tensor& cursors) {
  TORCH_CHECK(query.dim() == 4 && keys.dim() == 4 && cursors.dim() == 2, "query (R, W, Q, D), keys (slots, K, T, D), cursors (R, W)");
  const int64_t rows = query.size(0), width = query.size(1), heads = query.size(2), size = query.size(3);
  const int64_t kv_heads = keys.size(1), positions = keys.size(2);
  TORCH_CHECK(keys.sizes() == values.sizes() && keys.strides() == values.strides(), "keys and values must be laid out alike");
  TORCH_CHECK(query.scalar_type() == keys.scalar_type() && query.scalar_type() == values.scalar_type(), "one dtype");
  TORCH_CHECK(query.scalar_type() == at::kBFloat16 || query.scalar_type() == at::kFloat, "bfloat16 or float32");
  TORCH_CHECK(keys.size(3) == size && heads % kv_heads == 0 && keys.size(0) >= rows, "shapes do not go together");
  TORCH_CHECK(size <= kLongestHead, "heads have at most ", kLongestHead, " features, not ", size);
  TORCH_CHECK(query.stride(3) == 1 && query.stride(2) == size, "the query's heads must lie behind one another");
  TORCH_CHECK(keys.stride(3) == 1 && keys.stride(2) == size, "the positions of one head must lie behind one another");
  TORCH_CHECK(cursors.scalar_type() == at::kLong && cursors.size(0) == rows && cursors.size(1) == width, "cursors (R, W) int64");
  Tensor out = at::empty({rows, width, heads * size}, query.options());
  const Isa which = isa();
  by_type(query, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    // The last position is the spare one, which requests never read: see StaticCache.
    const DecodeAttention<T> call{
        input(query, type), input(keys, type), input(values, type), cursors.const_data_ptr<int64_t>(), output(out, type),
        rows, width, heads, kv_heads, size, positions - 1, query.stride(0), query.stride(1), keys.stride(0), keys.stride(1),
        cursors.stride(0), cursors.stride(1), 1.0f / std::sqrt(float(size))};
    at::parallel_for(0, rows * kv_heads, 1, [&](int64_t task, int64_t end) { decode_attention(call, task, end, which); });
  });
  return out;
}

// Ask for pages of 2 MiB where `tensor` lies, for what is not written yet; with `now`, what is there moves as well. False where the
// system does not do it.
bool huge_pages_op(const Tensor& tensor, bool now) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
  constexpr uintptr_t kPage = 4096, kHuge = uintptr_t(2) << 20;
  const auto start = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  const uintptr_t first = (start + kPage - 1) / kPage * kPage, last = (start + tensor.nbytes()) / kPage * kPage;
  if (first >= last || madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE) != 0) return false;
  const uintptr_t inner = (first + kHuge - 1) / kHuge * kHuge, outer = last / kHuge * kHuge;
  return !now || inner >= outer || madvise(reinterpret_cast<void*>(inner), outer - inner, MADV_COLLAPSE) == 0;
#else
  return false;
#endif
}

}  // namespace

TORCH_LIBRARY(kaminari, library) {
  library.def("instructions() -> str", instructions);
  library.def("use_instructions(str name) -> bool", use_instructions);
  library.def(
      "linear_codes(Tensor x, Tensor codes, Tensor scales, Tensor zeros, int rows, int group, int bits, int activation_bits)"
      " -> Tensor");
  library.def("linear_bf16(Tensor x, Tensor weight) -> Tensor");
  library.def("decode_attention(Tensor query, Tensor keys, Tensor values, Tensor cursors) -> Tensor");
  library.def(
      "dequantize_codes(Tensor codes, Tensor scales, Tensor zeros, int rows, int columns, int group, int bits,"
      " Tensor(a!) out) -> ()");
  library.def(
      "pack_codes(Tensor codes, Tensor scales, Tensor zeros, int first, int group, int bits, Tensor(a!) packed,"
      " Tensor(b!) packed_scales, Tensor(c!) packed_zeros) -> ()");
  library.def("huge_pages(Tensor tensor, bool now) -> bool");
}

TORCH_LIBRARY_IMPL(kaminari, CPU, library) {
  library.impl("linear_codes", linear_codes_op);
  library.impl("linear_bf16", linear_bf16_op);
  library.impl("decode_attention", decode_attention_op);
  library.impl("dequantize_codes", dequantize_op);
  library.impl("pack_codes", pack_codes_op);
  library.impl("huge_pages", huge_pages_op);
}

}  // namespace kaminari
