// Every kernel against long division, and the arithmetic that joins remainders.

#include "crc32c.hpp"

#include <random>
#include <vector>

#include "check.hpp"

using namespace deepnvme;

namespace {

uint32_t by_definition(const unsigned char* p, size_t n) {
  uint32_t r = ~0u;
  for (size_t i = 0; i < n; ++i) {
    r ^= p[i];
    for (int bit = 0; bit < 8; ++bit) r = r >> 1 ^ (r & 1 ? 0x82F63B78u : 0);
  }
  return ~r;
}

}  // namespace

int main() {
  std::mt19937 rng(1);
  std::vector<unsigned char> data(40'000);
  for (auto& byte : data) byte = static_cast<unsigned char>(rng());
  CHECK(crc32c(0, "123456789", 9) == 0xE3069283u);
  for (size_t n : {0, 1, 8, 31, 255, 256, 300, 511, 512, 700, 1023, 1024, 1100, 1536, 4096, 12'287, 12'288, 12'289,
                   39'990}) {
    for (size_t shift : {0, 1, 7}) {
      const uint32_t expected = by_definition(data.data() + shift, n);
      for (const Crc32cKernel& kernel : crc32c_kernels()) CHECK(~kernel.raw(~0u, data.data() + shift, n) == expected);
      const size_t half = n / 3;
      const uint32_t first = crc32c_raw(0, data.data() + shift, half);
      const uint32_t second = crc32c_raw(0, data.data() + shift + half, n - half);
      CHECK(crc32c_finish(crc32c_shift(first, n - half) ^ second, n) == expected);
    }
  }
}
