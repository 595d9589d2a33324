/* Persistent worker threads. */
#ifndef CPU_ADAM_THREADS_H
#define CPU_ADAM_THREADS_H

typedef void part_function(void *context, int part);

/* Calls part(context, 0 .. parts - 1), each once, spread over up to `parts` threads of which the caller is one,
 * and returns when all are done. Workers are started when first needed and kept. May be called from several
 * threads at once; a caller whom no worker can help does everything itself, so it never waits for a free one.
 * What one part wrote is visible to the caller afterwards. */
void run_parts(int parts, part_function *part, void *context);

int usable_cores(void);

#endif
