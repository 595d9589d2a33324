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
constexpr size_t kLarge = 64 << 10;

#if defined(__x86_64__)

constexpr size_t kLine = 64;
// Far enough for a memory that others use meanwhile: there it saves a sixth of the time, where nobody does nothing.
constexpr size_t kAhead = 8 << 10;

// `to` at a whole line, nbytes whole lines.
template <Target target>
void copy_lines(std::byte* to, const std::byte* from, size_t nbytes) {
  const auto store = [](__m128i* where, __m128i value) {
    if constexpr (target == Target::memory) {
      _mm_stream_si128(where, value);
    } else {
      _mm_store_si128(where, value);
    }
  };
  for (; nbytes; nbytes -= kLine, to += kLine, from += kLine) {
    _mm_prefetch(from + kAhead, _MM_HINT_T0);
    const auto* source = reinterpret_cast<const __m128i*>(from);
    auto* line = reinterpret_cast<__m128i*>(to);
    // A whole line at a time: the write-combining buffer then leaves as one burst.
    const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
    store(line, a);
    store(line + 1, b);
    store(line + 2, c);
    store(line + 3, d);
  }
}

template <Target target>
void copy_large(std::byte* to, const std::byte* from, size_t nbytes) {
  const size_t head = std::min(nbytes, static_cast<size_t>(-reinterpret_cast<uintptr_t>(to) % kLine));
  const size_t lines = (nbytes - head) / kLine * kLine;
  std::memcpy(to, from, head);
  copy_lines<target>(to + head, from + head, lines);
  std::memcpy(to + head + lines, from + head + lines, nbytes - head - lines);
  // Streamed stores are not ordered by a release; who is told that the bytes are there must find them.
  if constexpr (target == Target::memory) _mm_sfence();
}

#endif

void copy_small(std::byte* to, const std::byte* from, size_t nbytes) { std::memcpy(to, from, nbytes); }

auto copy_towards([[maybe_unused]] Target target, [[maybe_unused]] size_t nbytes) {
#if defined(__x86_64__)
  if (nbytes >= kLarge) return target == Target::memory ? copy_large<Target::memory> : copy_large<Target::slot>;
#endif
  return copy_small;
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
