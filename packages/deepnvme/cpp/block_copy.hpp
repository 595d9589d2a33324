// Copying a block between a bounce slot and a person's memory, and summing it up on the way.
#pragma once

#include <cstddef>
#include <cstdint>

namespace deepnvme {

// Where a copy goes decides how it is stored. A slot of the small pool lies in the cache and is read from there at
// once; memory does not and mostly is not: there an ordinary store would fetch each line only to overwrite it.
enum class Target { slot, memory };

void copy_block(std::byte* to, const std::byte* from, size_t nbytes, Target target);

// The same, and crc32c_raw(0, from, nbytes) of the bytes, which are fetched from memory once for both.
uint32_t copy_block_and_sum(std::byte* to, const std::byte* from, size_t nbytes, Target target);

}  // namespace deepnvme
