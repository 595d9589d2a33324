/* An own pool rather than OpenMP's: no second run-time beside torch's, a count per call, several callers at once,
 * and it survives fork.
 *
 * A job lies on its caller's stack and is listed as long as it has parts that nobody took. Parts are taken under
 * the mutex; a thread's last touch of a job is the decrement of `unfinished`, after which the caller may return
 * and the job be gone. The condition variables are therefore the pool's, not the job's.
 */
#define _GNU_SOURCE
#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>
#include <unistd.h>

enum {
    MOST_WORKERS = 1023,
    /* Waking a sleeping thread takes some 40 us, and the gap between two steps of a loop is often shorter. Longer
     * spinning would take the core from torch's threads, which run between our steps. */
    SPIN_NANOSECONDS = 20000,
};

struct job {
    part_function *part;
    void *context;
    int parts;
    int taken;              /* guarded by pool.mutex */
    atomic_int unfinished;
    struct job *next;       /* guarded by pool.mutex */
};

static struct {
    pthread_mutex_t mutex;
    pthread_cond_t job_added;
    pthread_cond_t job_finished;
    struct job *jobs;      /* those with parts left to take, oldest first */
    int workers;
    atomic_uint additions; /* counts jobs added: what an idle worker watches while it spins */
} pool = {
    .mutex = PTHREAD_MUTEX_INITIALIZER,
    .job_added = PTHREAD_COND_INITIALIZER,
    .job_finished = PTHREAD_COND_INITIALIZER,
};

/* ---- waiting ---- */

static void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Whether *word differed from `value` before the spinning time was up. */
static int spin_until_changed(const atomic_uint *word, unsigned value) {
    int64_t end = nanoseconds() + SPIN_NANOSECONDS;
    do {
        for (int i = 0; i < 32; i++) {
            if (atomic_load_explicit(word, memory_order_acquire) != value) return 1;
            pause_briefly();
        }
    } while (nanoseconds() < end);
    return 0;
}

static int spin_until_zero(const atomic_int *count) {
    int64_t end = nanoseconds() + SPIN_NANOSECONDS;
    do {
        for (int i = 0; i < 32; i++) {
            /* acquire: pairs with the release in finish_part, so the caller sees what the parts wrote */
            if (atomic_load_explicit(count, memory_order_acquire) == 0) return 1;
            pause_briefly();
        }
    } while (nanoseconds() < end);
    return 0;
}

/* ---- taking and finishing parts ---- */

/* The next part of `job`, or -1. Unlists the job with its last part. Called with the mutex held. */
static int take_part(struct job *job) {
    if (job->taken == job->parts) return -1;
    int part = job->taken++;
    if (job->taken == job->parts) {
        struct job **link = &pool.jobs;
        while (*link != job) link = &(*link)->next;
        *link = job->next;
    }
    return part;
}

static void finish_part(struct job *job) {
    if (atomic_fetch_sub_explicit(&job->unfinished, 1, memory_order_acq_rel) != 1) return;
    /* Under the mutex: else the caller could look, find work unfinished, and sleep just after this signal. */
    pthread_mutex_lock(&pool.mutex);
    pthread_cond_broadcast(&pool.job_finished);
    pthread_mutex_unlock(&pool.mutex);
}

static void *work(void *unused) {
    (void)unused;
    pthread_mutex_lock(&pool.mutex);
    for (;;) {
        while (pool.jobs) {
            struct job *job = pool.jobs;
            int part = take_part(job);
            pthread_mutex_unlock(&pool.mutex);
            job->part(job->context, part);
            finish_part(job);
            pthread_mutex_lock(&pool.mutex);
        }
        unsigned seen = atomic_load_explicit(&pool.additions, memory_order_relaxed);
        pthread_mutex_unlock(&pool.mutex);
        spin_until_changed(&pool.additions, seen);
        pthread_mutex_lock(&pool.mutex);
        while (!pool.jobs) pthread_cond_wait(&pool.job_added, &pool.mutex);
    }
    return NULL;
}

/* ---- fork: the child has none of the workers, so it begins with an empty pool ---- */

static void before_fork(void) { pthread_mutex_lock(&pool.mutex); }

static void after_fork_in_parent(void) { pthread_mutex_unlock(&pool.mutex); }

static void after_fork_in_child(void) {
    /* Made anew, not unlocked: the condition variables may still count waiters that the child does not have. */
    pthread_mutex_init(&pool.mutex, NULL);
    pthread_cond_init(&pool.job_added, NULL);
    pthread_cond_init(&pool.job_finished, NULL);
    pool.jobs = NULL;
    pool.workers = 0;
}

static void handle_forks(void) { pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child); }

/* ---- starting workers ---- */

/* Called with the mutex held. Where the system refuses a thread, fewer have to do. */
static void have_workers(int count) {
    if (count > MOST_WORKERS) count = MOST_WORKERS;
    if (pool.workers >= count) return;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* inherited: signals belong to the program's own threads */
    while (pool.workers < count) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, work, NULL) != 0) break;
        pthread_detach(thread);
        pool.workers++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static int next_part(struct job *job) {
    pthread_mutex_lock(&pool.mutex);
    int part = take_part(job);
    pthread_mutex_unlock(&pool.mutex);
    return part;
}

void run_parts(int parts, part_function *part, void *context) {
    if (parts <= 1) {
        part(context, 0);
        return;
    }
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, handle_forks);

    struct job job = {.part = part, .context = context, .parts = parts, .unfinished = parts};
    pthread_mutex_lock(&pool.mutex);
    have_workers(parts - 1);
    struct job **end = &pool.jobs;
    while (*end) end = &(*end)->next;
    *end = &job;
    atomic_fetch_add_explicit(&pool.additions, 1, memory_order_release);
    int mine = take_part(&job);
    pthread_cond_broadcast(&pool.job_added);
    pthread_mutex_unlock(&pool.mutex);

    for (; mine >= 0; mine = next_part(&job)) {
        part(context, mine);
        finish_part(&job);
    }
    if (spin_until_zero(&job.unfinished)) return;
    pthread_mutex_lock(&pool.mutex);
    while (atomic_load_explicit(&job.unfinished, memory_order_acquire) != 0)
        pthread_cond_wait(&pool.job_finished, &pool.mutex);
    pthread_mutex_unlock(&pool.mutex);
}

int usable_cores(void) {
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) return CPU_COUNT(&allowed);
    long online = sysconf(_SC_NPROCESSORS_ONLN); /* more cores than the fixed set has room for */
    return online > 0 ? (int)online : 1;
}
