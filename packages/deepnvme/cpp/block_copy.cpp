#include "block_copy.hpp"

#include <algorithm>
#include <cstring>

#include "crc32c.hpp"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace deepnvme {
namespace {

// Below this the reader may well find the copy still in the cache.
constexpr size_t kStreamed = 64 << 10;

#if defined(__x86_64__)

constexpr size_t kLine = 64;

void copy_lines(std::byte* to, const std::byte* from, size_t nbytes) {
  for (; nbytes; nbytes -= kLine, to += kLine, from += kLine) {
    const auto* source = reinterpret_cast<const __m128i*>(from);
    auto* target = reinterpret_cast<__m128i*>(to);
    // A whole line at a time: the write-combining buffer then leaves as one burst.
    const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
}

void copy_streamed(std::byte* to, const std::byte* from, size_t nbytes) {
  const size_t head = std::min(nbytes, static_cast<size_t>(-reinterpret_cast<uintptr_t>(to) % kLine));
  const size_t lines = (nbytes - head) / kLine * kLine;
  std::memcpy(to, from, head);
  copy_lines(to + head, from + head, lines);
  std::memcpy(to + head + lines, from + head + lines, nbytes - head - lines);
  // Streamed stores are not ordered by a release; who is told that the bytes are there must find them.
  _mm_sfence();
}

#endif

void copy_plain(std::byte* to, const std::byte* from, size_t nbytes) { std::memcpy(to, from, nbytes); }

auto copy_towards([[maybe_unused]] Target target, [[maybe_unused]] size_t nbytes) {
#if defined(__x86_64__)
  if (target == Target::memory && nbytes >= kStreamed) return copy_streamed;
#endif
  return copy_plain;
}

}  // namespace

void copy_block(std::byte* to, const std::byte* from, size_t nbytes, Target target) {
  copy_towards(target, nbytes)(to, from, nbytes);
}

uint32_t copy_block_and_sum(std::byte* to, const std::byte* from, size_t nbytes, Target target) {
  constexpr size_t kInCache = 16 << 10;  // summed up, then copied, out of the first cache
  const auto copy = copy_towards(target, nbytes);
  uint32_t raw = 0;
  for (size_t done = 0; done < nbytes; done += kInCache) {
    const size_t step = std::min(kInCache, nbytes - done);
    raw = crc32c_raw(raw, from + done, step);
    copy(to + done, from + done, step);
  }
  return raw;
}

}  // namespace deepnvme
