// Runs every kernel on random shapes under AddressSanitizer and UndefinedBehaviorSanitizer: every buffer is exactly as large as it
// must be, so one element too far ends the program. Built and run by test_fuzz.py; the argument is how many rounds.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "kernels.h"

using namespace kaminari;

namespace {

std::mt19937 generator(7);

int64_t pick(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(generator); }

template <typename T>
std::vector<T> bytes(int64_t count) {
  std::vector<T> values(count);
  auto* raw = reinterpret_cast<uint8_t*>(values.data());
  for (size_t i = 0; i < values.size() * sizeof(T); ++i) raw[i] = uint8_t(pick(0, 255));
  return values;
}

void set(float& to, float value) { to = value; }
void set(bf16& to, float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  to.bits = uint16_t(bits >> 16);
}

// Mostly ordinary numbers, now and then anything.
template <typename T>
std::vector<T> numbers(int64_t count) {
  if (pick(0, 9) == 0) return bytes<T>(count);
  std::vector<T> values(count);
  for (T& value : values) set(value, std::normal_distribution<float>()(generator));
  return values;
}

template <typename T>
void products(Isa isa) {
  const int64_t group = int64_t(32) << pick(0, 2), k = group * pick(1, 5), n = pick(1, 70), m = pick(1, 30);
  const int bits = pick(0, 1) ? 4 : 8, count = int(pick(1, 2));
  const int64_t panels = (n + kPanel - 1) / kPanel, padded = panels * kPanel;
  std::vector<uint8_t> packed(padded * k * bits / 8), zeros = bytes<uint8_t>(padded * k / group);
  const auto scales = numbers<bf16>(padded * k / group);
  for (int64_t first = 0; first < n;) {
    const int64_t some = pick(1, n - first);
    const auto codes = bytes<uint8_t>(some * k);
    pack_codes(codes.data(), first, some, k, bits, packed.data(), first / kPanel, (first + some + kPanel - 1) / kPanel);
    first += some;
  }
  const PackedWeight weight{packed.data(), scales.data(), zeros.data(), n, k, group, bits};
  const auto x = numbers<T>(m * k);
  std::vector<int8_t> digits(m * k * count);
  std::vector<int32_t> sums(m * k / group * count);
  std::vector<float> row_scales(m * k / group);
  const QuantizedRows rows{digits.data(), sums.data(), row_scales.data(), m, k, group, count};
  const int64_t row = pick(0, m);
  quantize_rows(x.data(), rows, 0, row, isa), quantize_rows(x.data(), rows, row, m, isa);
  std::vector<T> out(m * n), full(n * k);
  const int64_t split = pick(0, panels);
  linear_codes(rows, weight, out.data(), 0, split, isa), linear_codes(rows, weight, out.data(), split, panels, isa);
  dequantize_codes(weight, full.data(), 0, split, isa);
  dequantize_codes(weight, full.data() + split * kPanel * k, split, panels, isa);
}

void full_products(Isa isa) {
  const int64_t m = pick(1, 20), n = pick(1, 40), k = pick(1, 300), split = pick(0, n);
  const auto x = numbers<bf16>(m * k), weight = numbers<bf16>(n * k);
  std::vector<bf16> out(m * n);
  linear_bf16(x.data(), weight.data(), out.data(), m, n, k, 0, split, isa);
  linear_bf16(x.data(), weight.data(), out.data(), m, n, k, split, n, isa);
}

template <typename T>
void attention(Isa isa) {
  const int64_t rows = pick(1, 4), width = pick(1, 4), kv_heads = pick(1, 3), heads = kv_heads * pick(1, 4);
  const int64_t size = pick(0, 3) ? 16 * pick(1, 16) : pick(1, 256), positions = pick(2, 200), slots = rows + pick(0, 2);
  const auto query = numbers<T>(rows * width * heads * size);
  const auto keys = numbers<T>(slots * kv_heads * positions * size), values = numbers<T>(keys.size());
  std::vector<int64_t> cursors(rows * width);
  for (int64_t& cursor : cursors) cursor = pick(0, positions - 1);
  std::vector<T> out(query.size());
  const DecodeAttention<T> call{
      query.data(), keys.data(), values.data(), cursors.data(), out.data(), rows, width, heads, kv_heads, size, positions - 1,
      width * heads * size, heads * size, kv_heads * positions * size, positions * size, width, 1,
      1.0f / std::sqrt(float(size))};
  const int64_t split = pick(0, rows * kv_heads);
  decode_attention(call, 0, split, isa), decode_attention(call, split, rows * kv_heads, isa);
}

}  // namespace

int main(int, char** arguments) {
  const int rounds = std::atoi(arguments[1]);
  for (int isa = 0; isa <= int(best_isa()); ++isa) {
    for (int round = 0; round < rounds; ++round) {
      products<float>(Isa(isa)), products<bf16>(Isa(isa));
      full_products(Isa(isa));
      attention<float>(Isa(isa)), attention<bf16>(Isa(isa));
    }
    std::printf("instruction set %d: %d rounds\n", isa, rounds);
  }
}
