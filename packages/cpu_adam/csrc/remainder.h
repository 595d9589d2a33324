/* The split master: an fp32 number as its bf16 rounding and a 16-bit remainder, without loss.
 *
 * With b the fp32 bits: hi = (b + 0x8000) >> 16, lo = the low 16 bits of b as int16, and back
 * b = (hi << 16) + lo modulo 2^32. So hi is b rounded to bf16 with ties away from zero, and it is a
 * bf16 parameter that the forward pass can use as it is. Rounding ties to even cannot work: 65,537 numbers
 * round to an even hi, one more than 16 bits can tell apart.
 *
 * The largest finite numbers have hi = infinity and a negative lo; join still returns them exactly.
 * NaN becomes hi = quiet NaN, lo = 0: by the formula alone some NaN would become infinity or zero in hi
 * and so vanish from the forward pass.
 */
#ifndef CPU_ADAM_REMAINDER_H
#define CPU_ADAM_REMAINDER_H

#include "bits.h"

INLINE uint32_t split_source(float value) {
    uint32_t bits = bits_of(value);
    return is_nan_bits(bits) ? (uint32_t)QUIET_NAN_BITS : bits;
}

INLINE uint16_t split_hi(uint32_t bits) { return (uint16_t)((bits + 0x8000u) >> 16); }

INLINE int16_t split_lo(uint32_t bits) { return (int16_t)(uint16_t)bits; }

INLINE float joined(uint16_t hi, int16_t lo) { return float_of(((uint32_t)hi << 16) + (uint32_t)(int32_t)lo); }

#endif
