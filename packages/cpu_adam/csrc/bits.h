/* A float's bit pattern and back. memcpy is the portable way; it compiles to nothing. */
#ifndef CPU_ADAM_BITS_H
#define CPU_ADAM_BITS_H

#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

enum {
    SIGN_BIT = (int)0x80000000u,
    INFINITY_BITS = 0x7F800000,
    QUIET_NAN_BITS = 0x7FC00000,
};

INLINE int is_nan_bits(uint32_t bits) { return (bits & 0x7FFFFFFFu) > (uint32_t)INFINITY_BITS; }

/* Which NaN an operation makes differs between architectures (x86 a negative one, ARM a positive one) and,
 * for two NaN operands, with the order the compiler put them in. What is stored is therefore always this
 * one NaN: else results would not be the same bits on every instruction set. */
INLINE float canonical(float value) { return value == value ? value : float_of(QUIET_NAN_BITS); }

#endif
