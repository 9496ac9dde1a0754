/* Another time of day for a process. Preloaded (LD_PRELOAD).
 *
 * FALSE_CLOCK is a file with one int64: the seconds by which the time of day is ahead. It is mapped, so that a change
 * is seen at once, by all processes. Clocks that count from the machine's start stay true. A wait until a time of day
 * gets the kernel's time. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

/* A wait until an earlier second than this one is by a clock that counts from the machine's start. */
enum { THIS_CENTURY = 1000000000 };

static const volatile int64_t *ahead;

__attribute__((constructor)) static void open_clock(void) {
    const char *path = getenv("FALSE_CLOCK");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *at = mmap(NULL, sizeof *ahead, PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (at != MAP_FAILED) ahead = at;
}

static int64_t seconds_ahead(void) { return ahead ? *ahead : 0; }

/* Other libraries are initialised before this one and may ask for the time: the kernel is always there. */
int clock_gettime(clockid_t id, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real ? real(id, now) : (int)syscall(SYS_clock_gettime, id, now);
    if (!failed && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += seconds_ahead();
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec precise;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &precise)) return -1;
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *to) {
    struct timespec now;
    if (clock_gettime(CLOCK_REALTIME, &now)) return -1;
    if (to) *to = now.tv_sec;
    return now.tv_sec;
}

static struct timespec true_time(const struct timespec *until) {
    struct timespec made = *until;
    if (made.tv_sec > THIS_CENTURY) made.tv_sec -= seconds_ahead();
    return made;
}

int pthread_cond_timedwait(pthread_cond_t *cond, pthread_mutex_t *mutex, const struct timespec *until) {
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    struct timespec made = true_time(until);
    /* glibc for x86-64 has an older function of this name, which `dlsym` finds. */
    if (!real) real = (__typeof__(real))dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!real) real = (__typeof__(real))dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    return real(cond, mutex, &made);
}

int sem_timedwait(sem_t *semaphore, const struct timespec *until) {
    static int (*real)(sem_t *, const struct timespec *);
    struct timespec made = true_time(until);
    if (!real) real = (int (*)(sem_t *, const struct timespec *))dlsym(RTLD_NEXT, "sem_timedwait");
    return real(semaphore, &made);
}
