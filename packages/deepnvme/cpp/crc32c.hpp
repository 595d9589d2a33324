// CRC-32C (Castagnoli), as in iSCSI, ext4 and safetensors-like formats: what is read back is what was written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace deepnvme {

// Note: raw remainders. Below, "raw" is the CRC register with neither the initial nor the final inversion. Raw
// remainders are linear, raw(A followed by B) = shift(raw(A), |B|) xor raw(B), so the pieces of a request may be
// summed up in whatever order they arrive.
uint32_t crc32c_raw(uint32_t raw, const void* data, size_t nbytes);

// The raw remainder after `nbytes` further zero bytes.
uint32_t crc32c_shift(uint32_t raw, uint64_t nbytes);

// The published CRC of `nbytes` bytes whose raw remainder is `raw`.
inline uint32_t crc32c_finish(uint32_t raw, uint64_t nbytes) { return ~(raw ^ crc32c_shift(0xFFFFFFFFu, nbytes)); }

// The published CRC of data that continues data whose CRC was `value` (0 for none).
inline uint32_t crc32c(uint32_t value, const void* data, size_t nbytes) { return ~crc32c_raw(~value, data, nbytes); }

// The implementations that this CPU runs, best first ("avx512", "vpclmulqdq", "sse4.2", "table"); tests run each.
struct Crc32cKernel {
  const char* name;
  bool (*runs_here)();
  uint32_t (*raw)(uint32_t raw, const void* data, size_t nbytes);
};
std::vector<Crc32cKernel> crc32c_kernels();

}  // namespace deepnvme
