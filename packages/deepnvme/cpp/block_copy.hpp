// Copying a block between a bounce slot and a person's memory, and summing it up on the way.
#pragma once

#include <cstddef>
#include <cstdint>

namespace deepnvme {

// Copies past the cache where that pays: neither the drive nor, mostly, the person reads the copy before it would have
// left the cache anyway, and an ordinary store first fetches the line that it overwrites.
void copy_block(std::byte* to, const std::byte* from, size_t nbytes);

// The same, and crc32c_raw(0, from, nbytes) of the bytes, which are fetched from memory once for both.
uint32_t copy_block_and_sum(std::byte* to, const std::byte* from, size_t nbytes);

}  // namespace deepnvme
