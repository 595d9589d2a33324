/* Stores around the cache, for memory that is written and not soon read. */
#ifndef CPU_ADAM_STREAMING_H
#define CPU_ADAM_STREAMING_H

#include "bits.h"

#if defined(__SSE2__)
#include <emmintrin.h>

/* `to` is aligned to 16 bytes (the instruction faults otherwise); whole cache lines should be written. */
INLINE void stream(void *to, const void *from, size_t nbytes) {
    for (size_t i = 0; i < nbytes / sizeof(__m128i); i++)
        _mm_stream_si128((__m128i *)to + i, _mm_load_si128((const __m128i *)from + i));
}

/* Streaming stores are weakly ordered: without this another thread could see "done" before the data. */
INLINE void stream_fence(void) { _mm_sfence(); }

#else

INLINE void stream(void *to, const void *from, size_t nbytes) { memcpy(to, from, nbytes); }

INLINE void stream_fence(void) {}

#endif
#endif
