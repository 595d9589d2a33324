#include "crc32c.hpp"

#include <array>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace deepnvme {
namespace {

static_assert(std::endian::native == std::endian::little, "the kernels read words as they lie in the message");

// Note: reflected polynomials. Bit 31 of a 32-bit value is the coefficient of x^0, as CRC-32C transmits the lowest
// bit first. The generator is x^32 + 0x1EDC6F41, reflected 0x82F63B78.
constexpr uint32_t kGenerator = 0x82F63B78;
constexpr uint32_t kOne = 0x80000000;  // x^0

constexpr uint32_t times_x(uint32_t a) { return a & 1 ? a >> 1 ^ kGenerator : a >> 1; }

constexpr uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (; a; a <<= 1, b = times_x(b)) {
    if (a & kOne) product ^= b;
  }
  return product;
}

// x^(2^i)
constexpr std::array<uint32_t, 67> kSquares = [] {
  std::array<uint32_t, 67> squares{};
  squares[0] = times_x(kOne);
  for (size_t i = 1; i < squares.size(); ++i) squares[i] = multiply(squares[i - 1], squares[i - 1]);
  return squares;
}();

// x^(n * 2^low)
constexpr uint32_t power_of_x(uint64_t n, size_t low = 0) {
  uint32_t product = kOne;
  for (size_t i = low; n; n >>= 1, ++i) {
    if (n & 1) product = multiply(product, kSquares[i]);
  }
  return product;
}

// -- table: eight bytes at a time; kTable[k][b] is the remainder of byte b followed by k zero bytes -----------------

constexpr std::array<std::array<uint32_t, 256>, 8> kTable = [] {
  std::array<std::array<uint32_t, 256>, 8> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t remainder = byte;
    for (int bit = 0; bit < 8; ++bit) remainder = times_x(remainder);
    table[0][byte] = remainder;
  }
  for (size_t k = 1; k < 8; ++k) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t shorter = table[k - 1][byte];
      table[k][byte] = shorter >> 8 ^ table[0][shorter & 0xFF];
    }
  }
  return table;
}();

uint32_t raw_by_table(uint32_t raw, const void* data, size_t nbytes) {
  const auto* p = static_cast<const unsigned char*>(data);
  for (; nbytes >= 8; nbytes -= 8, p += 8) {
    uint64_t word;
    std::memcpy(&word, p, 8);
    word ^= raw;
    raw = 0;
    for (size_t k = 0; k < 8; ++k) raw ^= kTable[7 - k][word >> 8 * k & 0xFF];
  }
  for (; nbytes; --nbytes, ++p) raw = raw >> 8 ^ kTable[0][(raw ^ *p) & 0xFF];
  return raw;
}

#if defined(__x86_64__)

// -- sse4.2: the CPU's crc32 instruction, three chains at once because its result takes three cycles ----------------

__attribute__((target("sse4.2"))) uint32_t one_chain(uint32_t raw, const unsigned char* p, size_t nbytes) {
  uint64_t chain = raw;
  for (; nbytes >= 8; nbytes -= 8, p += 8) {
    uint64_t word;
    std::memcpy(&word, p, 8);
    chain = _mm_crc32_u64(chain, word);
  }
  raw = static_cast<uint32_t>(chain);
  for (; nbytes; --nbytes, ++p) raw = _mm_crc32_u8(raw, *p);
  return raw;
}

// raw * x^e, given x^(e - 33): the instruction multiplies its 64-bit operand by x^32, and the product of two
// reflected values comes out one place lower than it should, which is a further x.
__attribute__((target("sse4.2,pclmul"))) uint32_t scaled(uint32_t raw, uint32_t power_less_33) {
  const __m128i product =
      _mm_clmulepi64_si128(_mm_cvtsi32_si128(static_cast<int>(raw)), _mm_cvtsi32_si128(static_cast<int>(power_less_33)), 0);
  return static_cast<uint32_t>(_mm_crc32_u64(0, static_cast<uint64_t>(_mm_cvtsi128_si64(product))));
}

__attribute__((target("sse4.2,pclmul"))) uint32_t raw_by_sse42(uint32_t raw, const void* data, size_t nbytes) {
  // Long enough that joining the chains is nothing, short enough that three of them stay in the first cache.
  constexpr size_t kChain = 4096;
  constexpr uint32_t kOver1 = power_of_x(8 * kChain - 33);
  constexpr uint32_t kOver2 = power_of_x(16 * kChain - 33);
  const auto* p = static_cast<const unsigned char*>(data);
  for (; nbytes >= 3 * kChain; nbytes -= 3 * kChain, p += 3 * kChain) {
    uint64_t a = raw, b = 0, c = 0;
    for (size_t i = 0; i < kChain; i += 8) {
      uint64_t words[3];
      std::memcpy(&words[0], p + i, 8);
      std::memcpy(&words[1], p + i + kChain, 8);
      std::memcpy(&words[2], p + i + 2 * kChain, 8);
      a = _mm_crc32_u64(a, words[0]);
      b = _mm_crc32_u64(b, words[1]);
      c = _mm_crc32_u64(c, words[2]);
    }
    raw = scaled(static_cast<uint32_t>(a), kOver2) ^ scaled(static_cast<uint32_t>(b), kOver1) ^ static_cast<uint32_t>(c);
  }
  return one_chain(raw, p, nbytes);
}

// -- vpclmulqdq: 256 bytes, or 512, at a time folded onto the next by carry-less multiplication ----------------------
//
// A 128-bit lane holds L = lo * x^64 + hi (its low half comes first in the message). Moving it n bits on means
// L * x^n = lo * x^(n + 64) + hi * x^n; each product gains an x, as above, so the factors are one power less.

constexpr int64_t factor_of_low(uint64_t bits) { return static_cast<int64_t>(uint64_t{power_of_x(bits + 63)} << 32); }
constexpr int64_t factor_of_high(uint64_t bits) { return static_cast<int64_t>(uint64_t{power_of_x(bits - 1)} << 32); }

constexpr size_t kRegisters = 8;

// A round's lines are more than the processor itself fetches ahead. As far as block_copy.cpp does: alone 2 KiB do as
// well, while others use the memory they take up to twice as long. Beyond the end it does nothing.
__attribute__((always_inline)) inline void prefetch(const unsigned char* p, size_t nbytes) {
  constexpr size_t kAhead = 8 << 10;
  for (size_t line = 0; line < nbytes; line += 64) _mm_prefetch(p + kAhead + line, _MM_HINT_T0);
}

__attribute__((target("avx2,pclmul,vpclmulqdq,sse4.2"))) uint32_t raw_by_vpclmulqdq(uint32_t raw, const void* data,
                                                                                   size_t nbytes) {
  constexpr size_t kStep = kRegisters * sizeof(__m256i);
  constexpr int64_t kLow = factor_of_low(8 * kStep), kHigh = factor_of_high(8 * kStep);
  if (nbytes < 2 * kStep) return raw_by_sse42(raw, data, nbytes);
  const auto* p = static_cast<const unsigned char*>(data);
  const auto load = [&p](size_t i) __attribute__((target("avx2"))) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p) + i);
  };
  const __m256i factors = _mm256_set_epi64x(kHigh, kLow, kHigh, kLow);
  __m256i folded[kRegisters];
  for (size_t i = 0; i < kRegisters; ++i) folded[i] = load(i);
  // The register so far is a summand of the first four bytes.
  folded[0] = _mm256_xor_si256(folded[0], _mm256_set_epi32(0, 0, 0, 0, 0, 0, 0, static_cast<int>(raw)));
  for (p += kStep, nbytes -= kStep; nbytes >= kStep; p += kStep, nbytes -= kStep) {
    prefetch(p, kStep);
    for (size_t i = 0; i < kRegisters; ++i) {
      const __m256i low = _mm256_clmulepi64_epi128(folded[i], factors, 0x00);
      const __m256i high = _mm256_clmulepi64_epi128(folded[i], factors, 0x11);
      folded[i] = _mm256_xor_si256(_mm256_xor_si256(low, high), load(i));
    }
  }
  // What was folded is a message of kStep bytes with the same remainder.
  raw = one_chain(0, reinterpret_cast<const unsigned char*>(folded), sizeof folded);
  return raw_by_sse42(raw, p, nbytes);
}

// The same with registers twice as wide: intrinsics are of one width, and a compiler target is of one function.
__attribute__((target("avx512f,pclmul,vpclmulqdq,sse4.2"))) uint32_t raw_by_avx512(uint32_t raw, const void* data,
                                                                                  size_t nbytes) {
  constexpr size_t kStep = kRegisters * sizeof(__m512i);
  constexpr int64_t kLow = factor_of_low(8 * kStep), kHigh = factor_of_high(8 * kStep);
  constexpr int kXorOfThree = 0x96;
  if (nbytes < 2 * kStep) return raw_by_vpclmulqdq(raw, data, nbytes);
  const auto* p = static_cast<const unsigned char*>(data);
  const auto load = [&p](size_t i) __attribute__((target("avx512f"))) {
    return _mm512_loadu_si512(reinterpret_cast<const __m512i*>(p) + i);
  };
  const __m512i factors = _mm512_set_epi64(kHigh, kLow, kHigh, kLow, kHigh, kLow, kHigh, kLow);
  __m512i folded[kRegisters];
  for (size_t i = 0; i < kRegisters; ++i) folded[i] = load(i);
  folded[0] = _mm512_xor_si512(folded[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(raw))));
  for (p += kStep, nbytes -= kStep; nbytes >= kStep; p += kStep, nbytes -= kStep) {
    prefetch(p, kStep);
    for (size_t i = 0; i < kRegisters; ++i) {
      const __m512i low = _mm512_clmulepi64_epi128(folded[i], factors, 0x00);
      const __m512i high = _mm512_clmulepi64_epi128(folded[i], factors, 0x11);
      folded[i] = _mm512_ternarylogic_epi64(low, high, load(i), kXorOfThree);
    }
  }
  raw = one_chain(0, reinterpret_cast<const unsigned char*>(folded), sizeof folded);
  return raw_by_vpclmulqdq(raw, p, nbytes);
}

bool has_sse42() { return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul"); }
// The compiler's run-time check also asks whether the operating system saves the wide registers.
bool has_vpclmulqdq() {
  return has_sse42() && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("vpclmulqdq");
}
bool has_avx512() { return has_vpclmulqdq() && __builtin_cpu_supports("avx512f"); }

#endif

const std::vector<Crc32cKernel>& all_kernels() {
  static const std::vector<Crc32cKernel> kernels = {
#if defined(__x86_64__)
      {"avx512", has_avx512, raw_by_avx512},
      {"vpclmulqdq", has_vpclmulqdq, raw_by_vpclmulqdq},
      {"sse4.2", has_sse42, raw_by_sse42},
#endif
      {"table", [] { return true; }, raw_by_table},
  };
  return kernels;
}

}  // namespace

uint32_t crc32c_raw(uint32_t raw, const void* data, size_t nbytes) {
  static const auto best = crc32c_kernels().front().raw;
  return best(raw, data, nbytes);
}

uint32_t crc32c_shift(uint32_t raw, uint64_t nbytes) { return multiply(power_of_x(nbytes, 3), raw); }

std::vector<Crc32cKernel> crc32c_kernels() {
  std::vector<Crc32cKernel> here;
  for (const Crc32cKernel& kernel : all_kernels()) {
    if (kernel.runs_here()) here.push_back(kernel);
  }
  return here;
}

}  // namespace deepnvme
