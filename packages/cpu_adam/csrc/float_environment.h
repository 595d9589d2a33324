/* The floating-point mode results are promised in: round to nearest, denormals kept.
 *
 * A caller may have set another mode for its own thread (torch.set_flush_denormal does); our workers would not
 * share it, and results would depend on which thread an element fell to. Each range therefore runs in the default
 * mode and gives the caller's back.
 */
#ifndef CPU_ADAM_FLOAT_ENVIRONMENT_H
#define CPU_ADAM_FLOAT_ENVIRONMENT_H

#if defined(__SSE2__)
#include <xmmintrin.h>

enum { DEFAULT_MXCSR = 0x1F80 }; /* every exception masked, nearest, FTZ and DAZ off */

typedef unsigned float_mode;

static inline float_mode enter_default_mode(void) {
    float_mode before = _mm_getcsr();
    _mm_setcsr(DEFAULT_MXCSR);
    return before;
}

static inline void leave_default_mode(float_mode before) { _mm_setcsr(before); }

#else
#include <fenv.h>

typedef fenv_t float_mode;

static inline float_mode enter_default_mode(void) {
    float_mode before;
    fegetenv(&before);
    fesetenv(FE_DFL_ENV);
    return before;
}

static inline void leave_default_mode(float_mode before) { fesetenv(&before); }

#endif
#endif
