/* Memory in which no stretch is longer than a limit: every allocation above it answers ENOMEM, as on a device whose
 * memory is fragmented. Preloaded; without a limit (0, as at the start) it only passes on. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>

static size_t limit;

void refuse_above(size_t nbytes) { limit = nbytes; }

static int refused(size_t nbytes) { return limit && nbytes > limit; }

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

extern int posix_memalign(void **, size_t, size_t);
extern void *aligned_alloc(size_t, size_t);

/* glibc's own names: dlsym itself allocates, so it cannot be asked for these. */
extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);

void *malloc(size_t nbytes) {
    if (refused(nbytes)) return errno = ENOMEM, NULL;
    return __libc_malloc(nbytes);
}

void *calloc(size_t count, size_t nbytes) {
    if (nbytes && refused(count > SIZE_MAX / nbytes ? SIZE_MAX : count * nbytes)) return errno = ENOMEM, NULL;
    return __libc_calloc(count, nbytes);
}

void *realloc(void *old, size_t nbytes) {
    if (refused(nbytes)) return errno = ENOMEM, NULL;
    return __libc_realloc(old, nbytes);
}

int posix_memalign(void **out, size_t alignment, size_t nbytes) {
    if (refused(nbytes)) return ENOMEM;
    return NEXT(posix_memalign)(out, alignment, nbytes);
}

void *aligned_alloc(size_t alignment, size_t nbytes) {
    if (refused(nbytes)) return errno = ENOMEM, NULL;
    return NEXT(aligned_alloc)(alignment, nbytes);
}

void *mmap(void *address, size_t nbytes, int protection, int flags, int fd, off_t offset) {
    if ((flags & MAP_ANONYMOUS) && refused(nbytes)) return errno = ENOMEM, MAP_FAILED;
    return NEXT(mmap)(address, nbytes, protection, flags, fd, offset);
}

void *mmap64(void *address, size_t nbytes, int protection, int flags, int fd, off_t offset) {
    return mmap(address, nbytes, protection, flags, fd, offset);
}
