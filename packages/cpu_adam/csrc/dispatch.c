/* The instruction sets compiled in, best first. Which one a call uses is its `isa` argument, an index here. */
#include <stddef.h>

#include "kernels.h"

static const struct kernels *const table[] = {
#if defined(__x86_64__)
    &kernels_avx512,
    &kernels_avx2,
#elif defined(__aarch64__)
    &kernels_neon,
#endif
    &kernels_generic,
};

enum { COUNT = sizeof table / sizeof *table };

const struct kernels *kernels_at(int isa) { return table[isa]; }

const char *adam_isa_name(int isa) { return isa >= 0 && isa < COUNT ? table[isa]->name : NULL; }

int adam_isa_runs(int isa) { return table[isa]->runs(); }
