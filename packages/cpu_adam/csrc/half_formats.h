/* fp32 <-> bf16 and fp16, rounding to nearest even as torch does, in integer arithmetic.
 *
 * No conversion instructions: AVX512-BF16's flushes denormals, and what is written once in plain C gives
 * the same bits everywhere. Every choice below is a select, not a branch, so that loops over these vectorise.
 */
#ifndef CPU_ADAM_HALF_FORMATS_H
#define CPU_ADAM_HALF_FORMATS_H

#include "bits.h"

INLINE float float_of_bf16(uint16_t half) { return float_of((uint32_t)half << 16); }

/* Of a number or the canonical NaN; with other NaN the addition could overflow into an infinity or a zero. */
INLINE uint16_t bf16_of(float value) {
    uint32_t bits = bits_of(value);
    uint32_t to_even = 0x7FFFu + ((bits >> 16) & 1u);
    return (uint16_t)((bits + to_even) >> 16);
}

INLINE float float_of_fp16(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    uint32_t magnitude = (uint32_t)(half & 0x7FFFu) << 13; /* fields now lie where fp32 has them */
    /* The exponent's bias is 15, not 127: multiply by 2^(127-15). Exact, and right for denormals too. */
    uint32_t finite = bits_of(float_of(magnitude) * 0x1p112f);
    uint32_t not_finite = magnitude > 0x0F800000u ? (uint32_t)QUIET_NAN_BITS : (uint32_t)INFINITY_BITS;
    return float_of(sign | (magnitude >= 0x0F800000u ? not_finite : finite));
}

INLINE uint16_t fp16_of(float value) {
    uint32_t bits = bits_of(value);
    uint32_t magnitude = bits & 0x7FFFFFFFu;
    uint32_t sign = (bits >> 16) & 0x8000u;
    /* Normal results: drop 13 bits to nearest even, then change the exponent's bias. */
    uint32_t normal = ((magnitude + 0x0FFFu + ((magnitude >> 13) & 1u)) >> 13) - ((127u - 15u) << 10);
    /* Below 2^-14 the result is denormal, in units of 2^-24: exactly what adding 0.5 rounds to. */
    uint32_t denormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
    uint32_t finite = magnitude < 0x38800000u ? denormal : normal;
    uint32_t half = magnitude >= 0x477FF000u ? 0x7C00u : finite; /* from 65520 up: infinity */
    return (uint16_t)(is_nan_bits(bits) ? 0x7E00u : sign | half);
}

#endif
