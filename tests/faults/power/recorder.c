/* Records what a process does to the files below one folder, and injects faults of the disk. Preloaded (LD_PRELOAD).
 *
 * POWER_ROOT is the folder, POWER_LOG the file of records. While the file POWER_TROUBLE exists, each call
 * takes POWER_SECONDS, or fails with the number POWER_ERROR. A record is a header, then one or two paths (each ends with
 * a zero), then the written bytes. A write through a shared map is found when the file is synced or a mark is set, by
 * comparison with a copy. Calls that glibc makes itself (stdio) are not seen: the reader compares its result with the
 * files that the process left. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { WRITE = 1, TRUNCATE, SYNC, SYNC_FAILED, CREATE, MKDIR, RENAME, LINK, UNLINK, MARK, EXTEND };
enum { ON_WRITE = 1, ON_SYNC = 2, ON_NAMES = 4, IS_DSYNC = 8 };

typedef struct { uint32_t op, path_bytes; uint64_t ino, offset, size; } Header;
typedef struct { char *at; size_t size; uint64_t ino, offset; char *copy; char path[1024]; } Map;

static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static char root[1024];
static size_t root_bytes;
static int log_fd = -1;
static Map maps[32];
static long seen[8], fail_after[8], fail_times[8];
static int fail_error[8], ignored;
static volatile int held;
static const char *trouble;
static int trouble_ms, trouble_error;

#define REAL(type, name, ...) \
    static type (*real_##name)(__VA_ARGS__); \
    if (!real_##name) real_##name = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

__attribute__((constructor)) static void begin(void) {
    const char *folder = getenv("POWER_ROOT"), *log = getenv("POWER_LOG");
    if (!folder || !log || !realpath(folder, root)) return;
    root_bytes = strlen(root);
    const char *seconds = getenv("POWER_SECONDS"), *error = getenv("POWER_ERROR");
    trouble = getenv("POWER_TROUBLE");
    trouble_ms = seconds ? 1000 * atoi(seconds) : 0, trouble_error = error ? atoi(error) : 0;
    REAL(int, open, const char *, int, ...);
    int fd = real_open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    log_fd = fcntl(fd, F_DUPFD_CLOEXEC, 900);
    close(fd);
}

static int is_below(const char *path) {
    return log_fd >= 0 && !strncmp(path, root, root_bytes) && (path[root_bytes] == '/' || !path[root_bytes]);
}

/* Writes the path of a descriptor. Returns whether it is recorded. */
static int path_of(int fd, char *path) {
    char link[64];
    if (log_fd < 0) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, 1023);
    if (n < 0) return 0;
    path[n] = 0;
    return is_below(path);
}

/* Writes the absolute path of a name, whose last part is not followed. Returns whether it is recorded. */
static int place_of(int dir, const char *name, char *path) {
    char folder[1100], real[4096], whole[5200];
    if (log_fd < 0 || !name || strlen(name) > 1000) return 0;
    if (name[0] == '/') snprintf(folder, sizeof folder, "%s", name);
    else if (dir == AT_FDCWD) snprintf(folder, sizeof folder, "./%s", name);
    else snprintf(folder, sizeof folder, "/proc/self/fd/%d/%s", dir, name);
    size_t n = strlen(folder);
    while (n > 1 && folder[n - 1] == '/') folder[--n] = 0;
    char *slash = strrchr(folder, '/'), last[1024];
    snprintf(last, sizeof last, "%s", slash + 1);
    slash[slash == folder] = 0;
    if (!realpath(folder, real)) return 0;
    if (snprintf(whole, sizeof whole, "%s/%s", !strcmp(real, "/") ? "" : real, last) > 1000) return 0;
    strcpy(path, whole);
    return is_below(path);
}

static uint64_t ino_of(int fd) { struct stat s; return fstat(fd, &s) ? 0 : s.st_ino; }
static uint64_t ino_at(const char *path) { struct stat s; return lstat(path, &s) ? 0 : s.st_ino; }
static uint64_t size_of(int fd) { struct stat s; return fstat(fd, &s) ? 0 : (uint64_t)s.st_size; }

static void record(uint32_t op, uint64_t ino, uint64_t offset, const void *data, uint64_t size, const char *path,
                   const char *other) {
    REAL(ssize_t, writev, int, const struct iovec *, int);
    size_t n = strlen(path) + 1, m = other ? strlen(other) + 1 : 0;
    Header h = {op, (uint32_t)(n + m), ino, offset, size};
    struct iovec parts[] = {{&h, sizeof h}, {(void *)path, n}, {(void *)other, m}, {(void *)data, data ? size : 0}};
    size_t all = sizeof h + n + m + (data ? size : 0);
    if (real_writev(log_fd, parts, 4) != (ssize_t)all) { perror("recorder"); _exit(97); }
}

static void look_at_maps(void) {
    for (Map *m = maps; m < maps + 32; m++)
        for (size_t at = 0; m->at && at < m->size; at += 512) {
            size_t n = m->size - at < 512 ? m->size - at : 512;
            if (memcmp(m->at + at, m->copy + at, n)) {
                memcpy(m->copy + at, m->at + at, n);
                record(WRITE, m->ino, m->offset + at, m->copy + at, n, m->path, NULL);
            }
        }
}

static int is_in_trouble(void) { return trouble && !access(trouble, F_OK); }

/* Waits for a disk that is slow, without the lock: other threads go on. */
static void take_time(void) {
    while (held) usleep(1000);
    for (int ms = 0; ms < trouble_ms && is_in_trouble(); ms++) usleep(1000);
}

/* Returns 0, or the error that a call of this kind must fail with. -1: half of it is to be written. */
static int fault(int kind) {
    if (trouble_error && is_in_trouble()) return trouble_error;
    long n = ++seen[kind];
    return fail_times[kind] && n > fail_after[kind] && n <= fail_after[kind] + fail_times[kind] ? fail_error[kind] : 0;
}

/* For the process itself, through ctypes. */
void power_mark(const char *text) {
    pthread_mutex_lock(&lock);
    if (log_fd >= 0) { look_at_maps(); record(MARK, 0, 0, NULL, 0, text, NULL); }
    pthread_mutex_unlock(&lock);
}
long power_seen(int kind) { return seen[kind]; }
void power_ignore(int kinds) { ignored = kinds; }
void power_hold(int whether) { held = whether; }
void power_fail(int kind, long after, long times, int error) {
    seen[kind] = 0, fail_after[kind] = after, fail_times[kind] = times, fail_error[kind] = error;
}

/* A barrier for a file or folder, or for `size` bytes of it. Returns -1, as if the kernel had failed, where a fault is
 * due. */
static int barrier(int fd, const char *path, int kind, uint64_t offset, uint64_t size) {
    if (ignored & kind) return 0;
    look_at_maps();
    int error = fault(ON_SYNC);
    record(error ? SYNC_FAILED : SYNC, ino_of(fd), offset, NULL, size, path, NULL);
    if (error) errno = error;
    return error ? -1 : 0;
}

/* What pwrite, pwritev, write and writev do here: `whole` bytes at `offset` are in the page cache. */
static ssize_t written(int fd, const char *path, uint64_t offset, const struct iovec *parts, int count, ssize_t whole) {
    size_t done = 0;
    for (int i = 0; i < count && (ssize_t)done < whole; i++) {
        size_t left = (size_t)whole - done, n = left < parts[i].iov_len ? left : parts[i].iov_len;
        record(WRITE, ino_of(fd), offset + done, parts[i].iov_base, n, path, NULL);
        done += n;
    }
    return whole > 0 && fcntl(fd, F_GETFL) & O_DSYNC && barrier(fd, path, IS_DSYNC, offset, (uint64_t)whole) ? -1 : whole;
}

static ssize_t write_parts(int fd, const struct iovec *parts, int count, int64_t offset) {
    REAL(ssize_t, writev, int, const struct iovec *, int);
    REAL(ssize_t, pwritev, int, const struct iovec *, int, off_t);
    char path[1024];
    if (!path_of(fd, path)) return offset < 0 ? real_writev(fd, parts, count) : real_pwritev(fd, parts, count, offset);
    take_time();
    pthread_mutex_lock(&lock);
    ssize_t done = -1;
    int error = fault(ON_WRITE);
    if (error > 0) errno = error;
    else {
        uint64_t at = offset >= 0 ? (uint64_t)offset
                      : fcntl(fd, F_GETFL) & O_APPEND ? size_of(fd) : (uint64_t)lseek(fd, 0, SEEK_CUR);
        struct iovec half = {parts[0].iov_base, parts[0].iov_len / 2};
        if (error < 0) parts = &half, count = 1;
        done = offset < 0 ? real_writev(fd, parts, count) : real_pwritev(fd, parts, count, offset);
        done = written(fd, path, at, parts, count, done);
    }
    int kept = errno;
    pthread_mutex_unlock(&lock);
    errno = kept;
    return done;
}

ssize_t write(int fd, const void *data, size_t n) {
    REAL(ssize_t, write, int, const void *, size_t);
    struct iovec part = {(void *)data, n};
    char path[1024];
    return path_of(fd, path) ? write_parts(fd, &part, 1, -1) : real_write(fd, data, n);
}
ssize_t pwrite(int fd, const void *data, size_t n, off_t at) {
    struct iovec part = {(void *)data, n};
    return write_parts(fd, &part, 1, at);
}
ssize_t pwrite64(int fd, const void *data, size_t n, off_t at) { return pwrite(fd, data, n, at); }
ssize_t writev(int fd, const struct iovec *parts, int count) { return write_parts(fd, parts, count, -1); }
ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t at) { return write_parts(fd, parts, count, at); }
ssize_t pwritev64(int fd, const struct iovec *parts, int count, off_t at) { return write_parts(fd, parts, count, at); }
ssize_t pwritev2(int fd, const struct iovec *parts, int count, off_t at, int flags) {
    (void)flags;
    return write_parts(fd, parts, count, at);
}

/* Copies inside the kernel: those who call fall back on read and write. */
ssize_t copy_file_range(int in, off64_t *at, int out, off64_t *to, size_t n, unsigned flags) {
    REAL(ssize_t, copy_file_range, int, off64_t *, int, off64_t *, size_t, unsigned);
    char path[1024];
    if (!path_of(out, path)) return real_copy_file_range(in, at, out, to, n, flags);
    errno = EXDEV;
    return -1;
}
ssize_t sendfile64(int out, int in, off64_t *at, size_t n) {
    REAL(ssize_t, sendfile64, int, int, off64_t *, size_t);
    char path[1024];
    if (!path_of(out, path)) return real_sendfile64(out, in, at, n);
    errno = ENOTSOCK;
    return -1;
}
ssize_t sendfile(int out, int in, off_t *at, size_t n) { return sendfile64(out, in, at, n); }

static int sync_fd(int fd, int (*real)(int)) {
    char path[1024];
    if (!path_of(fd, path)) return real(fd);
    take_time();
    pthread_mutex_lock(&lock);
    int result = barrier(fd, path, ON_SYNC, 0, 0), kept = errno;
    pthread_mutex_unlock(&lock);
    errno = kept;
    return result;
}
int fsync(int fd) { REAL(int, fsync, int); return sync_fd(fd, real_fsync); }
int fdatasync(int fd) { REAL(int, fdatasync, int); return sync_fd(fd, real_fdatasync); }
int msync(void *at, size_t size, int flags) {
    REAL(int, msync, void *, size_t, int);
    int result = 0;
    pthread_mutex_lock(&lock);
    look_at_maps();
    for (Map *m = maps; m < maps + 32; m++)
        if (m->at && (char *)at < m->at + m->size && (char *)at + size > m->at && flags & MS_SYNC && !(ignored & ON_SYNC)) {
            int error = fault(ON_SYNC);
            record(error ? SYNC_FAILED : SYNC, m->ino, 0, NULL, 0, m->path, NULL);
            if (error) errno = error, result = -1;
        }
    pthread_mutex_unlock(&lock);
    return result ? result : real_msync(at, size, flags);
}

static int resized(int fd, int (*real)(int, off_t), off_t size) {
    char path[1024];
    if (!path_of(fd, path)) return real(fd, size);
    take_time();
    pthread_mutex_lock(&lock);
    int error = fault(ON_WRITE), result = error ? -1 : real(fd, size);
    if (error) errno = error > 0 ? error : ENOSPC;
    if (!result) record(TRUNCATE, ino_of(fd), (uint64_t)size, NULL, 0, path, NULL);
    pthread_mutex_unlock(&lock);
    return result;
}
int ftruncate(int fd, off_t size) { REAL(int, ftruncate, int, off_t); return resized(fd, real_ftruncate, size); }
int ftruncate64(int fd, off_t size) { return ftruncate(fd, size); }
int truncate(const char *name, off_t size) {
    int fd = open(name, O_WRONLY | O_CLOEXEC), result = fd < 0 ? -1 : ftruncate(fd, size);
    if (fd >= 0) close(fd);
    return result;
}
int truncate64(const char *name, off_t size) { return truncate(name, size); }

/* Returns an error number, as posix_fallocate does. */
static int allocated(int fd, int mode, off_t at, off_t size) {
    REAL(int, fallocate, int, int, off_t, off_t);
    char path[1024];
    int is_ours = path_of(fd, path), error;
    if (is_ours) take_time();
    pthread_mutex_lock(&lock);
    error = is_ours ? fault(ON_WRITE) : 0;
    if (error < 0) error = ENOSPC;
    if (!error && real_fallocate(fd, mode, at, size)) error = errno;
    if (!error && is_ours && !mode) record(EXTEND, ino_of(fd), (uint64_t)(at + size), NULL, 0, path, NULL);
    pthread_mutex_unlock(&lock);
    return error;
}
int posix_fallocate(int fd, off_t at, off_t size) { return allocated(fd, 0, at, size); }
int posix_fallocate64(int fd, off_t at, off_t size) { return allocated(fd, 0, at, size); }
int fallocate(int fd, int mode, off_t at, off_t size) {
    int error = allocated(fd, mode, at, size);
    if (error) errno = error;
    return error ? -1 : 0;
}
int fallocate64(int fd, int mode, off_t at, off_t size) { return fallocate(fd, mode, at, size); }

int openat(int dir, const char *name, int flags, ...) {
    REAL(int, openat, int, const char *, int, ...);
    char path[1024], real[1024];
    va_list rest;
    va_start(rest, flags);
    int mode = va_arg(rest, int);
    va_end(rest);
    if (!(flags & (O_CREAT | O_TRUNC)) || !place_of(dir, name, path)) return real_openat(dir, name, flags, mode);
    take_time();
    pthread_mutex_lock(&lock);
    int is_new = flags & O_CREAT && !ino_at(path), error = is_new ? fault(ON_NAMES) : 0, fd = -1;
    if (error) errno = error;
    else fd = real_openat(dir, name, flags, mode);
    int kept = errno;
    if (fd >= 0 && path_of(fd, real)) {
        if (is_new) record(CREATE, ino_of(fd), 0, NULL, 0, real, NULL);
        else if (flags & O_TRUNC) record(TRUNCATE, ino_of(fd), 0, NULL, 0, real, NULL);
    }
    pthread_mutex_unlock(&lock);
    errno = kept;
    return fd;
}
#define MODE(flags) va_list rest; va_start(rest, flags); int mode = va_arg(rest, int); va_end(rest)
int open(const char *name, int flags, ...) { MODE(flags); return openat(AT_FDCWD, name, flags, mode); }
int open64(const char *name, int flags, ...) { MODE(flags); return openat(AT_FDCWD, name, flags, mode); }
int openat64(int dir, const char *name, int flags, ...) { MODE(flags); return openat(dir, name, flags, mode); }
int creat(const char *name, mode_t mode) { return openat(AT_FDCWD, name, O_WRONLY | O_CREAT | O_TRUNC, mode); }

int mkdirat(int dir, const char *name, mode_t mode) {
    REAL(int, mkdirat, int, const char *, mode_t);
    char path[1024];
    if (!place_of(dir, name, path)) return real_mkdirat(dir, name, mode);
    take_time();
    pthread_mutex_lock(&lock);
    int error = ino_at(path) ? 0 : fault(ON_NAMES);
    int result = error ? -1 : real_mkdirat(dir, name, mode), kept = error ? error : errno;
    if (!result) record(MKDIR, ino_at(path), 0, NULL, 0, path, NULL);
    pthread_mutex_unlock(&lock);
    errno = kept;
    return result;
}
int mkdir(const char *name, mode_t mode) { return mkdirat(AT_FDCWD, name, mode); }

static int renamed(int from, const char *name, int to, const char *new_name, unsigned flags, int op) {
    REAL(int, renameat2, int, const char *, int, const char *, unsigned);
    REAL(int, linkat, int, const char *, int, const char *, int);
    char path[1024], target[1024];
    int is_ours = place_of(from, name, path) & place_of(to, new_name, target);
    if (is_ours) take_time();
    pthread_mutex_lock(&lock);
    int error = is_ours ? fault(ON_NAMES) : 0, result = -1;
    if (error) errno = error;
    else if (op == LINK) result = real_linkat(from, name, to, new_name, (int)flags);
    else result = real_renameat2(from, name, to, new_name, flags);
    int kept = errno;
    if (is_ours && !result) record(op, ino_at(target), 0, NULL, 0, path, target);
    pthread_mutex_unlock(&lock);
    errno = kept;
    return result;
}
int rename(const char *name, const char *target) { return renamed(AT_FDCWD, name, AT_FDCWD, target, 0, RENAME); }
int renameat(int a, const char *name, int b, const char *target) { return renamed(a, name, b, target, 0, RENAME); }
int renameat2(int a, const char *name, int b, const char *target, unsigned flags) {
    return renamed(a, name, b, target, flags, RENAME);
}
int link(const char *name, const char *target) { return renamed(AT_FDCWD, name, AT_FDCWD, target, 0, LINK); }
int linkat(int a, const char *name, int b, const char *target, int flags) {
    return renamed(a, name, b, target, (unsigned)flags, LINK);
}

int unlinkat(int dir, const char *name, int flags) {
    REAL(int, unlinkat, int, const char *, int);
    char path[1024];
    if (!place_of(dir, name, path)) return real_unlinkat(dir, name, flags);
    take_time();
    pthread_mutex_lock(&lock);
    uint64_t ino = ino_at(path);
    int error = fault(ON_NAMES), result = error ? -1 : real_unlinkat(dir, name, flags), kept = error ? error : errno;
    if (!result) record(UNLINK, ino, 0, NULL, 0, path, NULL);
    pthread_mutex_unlock(&lock);
    errno = kept;
    return result;
}
int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }
int remove(const char *name) {
    struct stat s;
    return unlinkat(AT_FDCWD, name, !lstat(name, &s) && S_ISDIR(s.st_mode) ? AT_REMOVEDIR : 0);
}

void *mmap(void *at, size_t size, int protection, int flags, int fd, off_t offset) {
    REAL(void *, mmap, void *, size_t, int, int, int, off_t);
    void *found = real_mmap(at, size, protection, flags, fd, offset);
    char path[1024];
    if (log_fd < 0 || fd < 0 || found == MAP_FAILED || !(protection & PROT_WRITE) || !(flags & MAP_SHARED)) return found;
    if (!path_of(fd, path) || size > 64 << 20) return found;
    pthread_mutex_lock(&lock);
    for (Map *m = maps; m < maps + 32; m++)
        if (!m->at) {
            m->copy = real_mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            memcpy(m->copy, found, size);
            m->size = size, m->ino = ino_of(fd), m->offset = (uint64_t)offset;
            snprintf(m->path, sizeof m->path, "%s", path);
            m->at = found;
            break;
        }
    pthread_mutex_unlock(&lock);
    return found;
}
void *mmap64(void *at, size_t size, int protection, int flags, int fd, off_t offset) {
    return mmap(at, size, protection, flags, fd, offset);
}
int munmap(void *at, size_t size) {
    REAL(int, munmap, void *, size_t);
    pthread_mutex_lock(&lock);
    for (Map *m = maps; log_fd >= 0 && m < maps + 32; m++)
        if (m->at && m->at == at) {
            look_at_maps();
            real_munmap(m->copy, m->size);
            m->at = NULL;
        }
    pthread_mutex_unlock(&lock);
    return real_munmap(at, size);
}
