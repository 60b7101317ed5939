/* Counts, records and breaks the calls by which a process changes a folder, or reads it. For LD_PRELOAD, on 64-bit
 * Linux.
 *
 *   gcc -shared -fPIC -O2 -o shim.so shim.c
 *   SHIM_FOLDER=/data LD_PRELOAD=./shim.so program
 *
 *   SHIM_FOLDER  the folder to watch, without symbolic links in its path. Other calls are left alone.
 *   SHIM_LOG     a file: one line for each call, written when it has ended:
 *                number, call, result, errno, path, other; with tabs between. `other` is the second path of a link or
 *                rename; for an open "new" or "trunc": whether it made the file, or cut one that was there.
 *   SHIM_AT      the number of the call to break, from 1
 *   SHIM_DO      how: kill (SIGKILL before the call), kill-after, EIO, ENOSPC or ESTALE (the call fails with this
 *                error; "ESTALE+": so do all later ones), repeat (the call is made twice, as NFS does when a reply is
 *                lost, and the second result counts)
 *   SHIM_ONLY    for SHIM_AT, count only calls whose name starts with this: "fsync", "pwrite"
 *   SHIM_SYNC    "no": syncs are counted, recorded and broken, but not made. That is faster, and only a power cut could
 *                show the difference.
 *   SHIM_READS   "yes": calls that open for reading, and that read, count too: openread, read, pread, preadv
 *
 * A process can also set these with the shim_* functions at the end: after a fork, once for each trial.
 *
 * Each call asks /proc for the path of its handle instead of keeping a table of handles: a table would have to follow
 * every dup, fork and close, and speed does not matter here. The calls are then made as system calls, so nothing has to
 * be looked up in libc. Calls inside libc (stdio) are not seen; Python's files and torch's use these functions.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { ROOM = 2 * PATH_MAX };
enum fault { NONE, KILL, KILL_AFTER, FAIL, REPEAT };

static char folder[PATH_MAX];
static char only[32];
static enum fault fault;
static int fault_errno;
static long fault_at;
static int log_handle = -1;
static int skips_syncs;
static int fault_lasts, sees_reads;
static atomic_long seen, counted;
static atomic_int hit;

struct call {
    const char *name, *path, *other;
    long number; /* 0: it does not touch the folder */
    int fails, dies, repeats;
};

/* --- paths --- */

static int below(const char *path) {
    size_t length = strlen(folder);
    return length && !strncmp(path, folder, length) && (path[length] == '/' || path[length] == 0);
}

static const char *path_of(int handle, char *room) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", handle);
    ssize_t length = readlink(link, room, ROOM - 1);
    room[length < 0 ? 0 : length] = 0;
    return room;
}

static const char *path_at(int start, const char *path, char *room) {
    if (path[0] == '/') {
        snprintf(room, ROOM, "%s", path);
        return room;
    }
    char base[ROOM];
    if (start != AT_FDCWD)
        path_of(start, base);
    else if (!getcwd(base, sizeof base))
        base[0] = 0;
    if (strlen(base) + strlen(path) + 2 > ROOM) {
        errno = ENAMETOOLONG;
        room[0] = 0;
        return room;
    }
    strcpy(room, base);
    strcat(room, "/");
    return strcat(room, path);
}

/* --- one call: before, and after --- */

static void die(void) {
    kill(getpid(), SIGKILL);
    for (;;)
        pause();
}

static struct call begin(const char *name, const char *path, const char *other) {
    struct call call = {name, path, other, 0, 0, 0, 0};
    if (!below(path) && !below(other))
        return call;
    call.number = atomic_fetch_add(&seen, 1) + 1;
    if (fault == NONE || strncmp(name, only, strlen(only)))
        return call;
    long count = atomic_fetch_add(&counted, 1) + 1;
    if (count != fault_at && !(fault_lasts && count > fault_at))
        return call;
    atomic_store(&hit, 1);
    if (fault == KILL)
        die();
    call.fails = fault == FAIL;
    call.dies = fault == KILL_AFTER;
    call.repeats = fault == REPEAT;
    return call;
}

static long end(struct call *call, long result) {
    int error = call->fails ? fault_errno : errno;
    if (call->fails)
        result = -1;
    if (call->number && log_handle >= 0) {
        char line[2 * ROOM + 128];
        int length = snprintf(line, sizeof line, "%ld\t%s\t%ld\t%d\t%s\t%s\n", call->number, call->name, result,
                              result < 0 ? error : 0, call->path, call->other);
        syscall(SYS_write, log_handle, line, (size_t)length); /* one write to the end: lines of threads stay whole */
    }
    if (call->dies)
        die();
    errno = error;
    return result;
}

/* Forget a result whose reply is lost. */
static void drop(const char *name, long result) {
    if (result >= 0 && !strncmp(name, "open", 4))
        syscall(SYS_close, result);
}

/* Make `action`, a system call, unless it is to fail. `errno` is only looked at where it fails, or left as it was. */
#define MAKE(name, path, other, action)                   \
    do {                                                  \
        int errno_before = errno;                         \
        struct call call = begin(name, path, other);      \
        errno = errno_before;                             \
        if (call.repeats)                                 \
            drop(name, (action));                         \
        return end(&call, call.fails ? -1 : (action));    \
    } while (0)

#define WITH_HANDLE(name, handle, action)                 \
    do {                                                  \
        char path[ROOM];                                  \
        if (!folder[0])                                   \
            return action;                                \
        int errno_on_entry = errno;                       \
        path_of(handle, path);                            \
        errno = errno_on_entry;                           \
        MAKE(name, path, "", action);                     \
    } while (0)

#define WITH_PATH(name, start, given, action)             \
    do {                                                  \
        char path[ROOM];                                  \
        if (!folder[0])                                   \
            return action;                                \
        int errno_on_entry = errno;                       \
        path_at(start, given, path);                      \
        errno = errno_on_entry;                           \
        MAKE(name, path, "", action);                     \
    } while (0)

#define WITH_PATHS(name, from, old, to, new, action)      \
    do {                                                  \
        char path[ROOM], other[ROOM];                     \
        if (!folder[0])                                   \
            return action;                                \
        int errno_on_entry = errno;                       \
        path_at(from, old, path);                         \
        path_at(to, new, other);                          \
        errno = errno_on_entry;                           \
        MAKE(name, path, other, action);                  \
    } while (0)

/* --- opening and closing --- */

static int opened_to_read(int start, const char *given, int flags) {
    WITH_PATH("openread", start, given, syscall(SYS_openat, start, given, flags, 0));
}

static int opened(int start, const char *given, int flags, mode_t mode) {
    if (folder[0] && sees_reads && (flags & O_ACCMODE) == O_RDONLY && !(flags & O_CREAT))
        return opened_to_read(start, given, flags);
    if (!folder[0] || !(flags & O_CREAT))
        return syscall(SYS_openat, start, given, flags, mode);
    char path[ROOM];
    int errno_on_entry = errno;
    path_at(start, given, path);
    struct stat status;
    int is_there = lstat(path, &status) == 0;
    errno = errno_on_entry;
    const char *what = is_there ? (flags & O_TRUNC ? "trunc" : "") : "new";
    MAKE("open", path, what, syscall(SYS_openat, start, given, flags, mode));
}

#define TAKE_MODE(flags)                                  \
    mode_t mode = 0;                                      \
    if ((flags) & (O_CREAT | (O_TMPFILE & ~O_DIRECTORY))) { \
        va_list rest;                                     \
        va_start(rest, flags);                            \
        mode = va_arg(rest, mode_t);                      \
        va_end(rest);                                     \
    }

int open(const char *path, int flags, ...) {
    TAKE_MODE(flags)
    return opened(AT_FDCWD, path, flags, mode);
}

int open64(const char *path, int flags, ...) {
    TAKE_MODE(flags)
    return opened(AT_FDCWD, path, flags, mode);
}

int openat(int start, const char *path, int flags, ...) {
    TAKE_MODE(flags)
    return opened(start, path, flags, mode);
}

int openat64(int start, const char *path, int flags, ...) {
    TAKE_MODE(flags)
    return opened(start, path, flags, mode);
}

int close(int handle) {
    int errno_on_entry = errno;
    int flags = folder[0] ? fcntl(handle, F_GETFL) : -1;
    errno = errno_on_entry;
    if (flags < 0 || (flags & O_ACCMODE) == O_RDONLY) /* nothing was written by it */
        return syscall(SYS_close, handle);
    char path[ROOM];
    path_of(handle, path);
    struct call call = begin("close", path, "");
    errno = errno_on_entry;
    return end(&call, syscall(SYS_close, handle)); /* one that fails has closed the handle all the same, in Linux */
}

/* --- writing and syncing --- */

ssize_t write(int handle, const void *data, size_t size) {
    WITH_HANDLE("write", handle, syscall(SYS_write, handle, data, size));
}

ssize_t writev(int handle, const struct iovec *parts, int count) {
    WITH_HANDLE("writev", handle, syscall(SYS_writev, handle, parts, count));
}

ssize_t pwrite(int handle, const void *data, size_t size, off_t offset) {
    WITH_HANDLE("pwrite", handle, syscall(SYS_pwrite64, handle, data, size, offset));
}

ssize_t pwrite64(int handle, const void *data, size_t size, off64_t offset) {
    return pwrite(handle, data, size, offset);
}

ssize_t pwritev(int handle, const struct iovec *parts, int count, off_t offset) {
    WITH_HANDLE("pwritev", handle, syscall(SYS_pwritev, handle, parts, count, offset, 0));
}

ssize_t pwritev64(int handle, const struct iovec *parts, int count, off64_t offset) {
    return pwritev(handle, parts, count, offset);
}

ssize_t pwritev2(int handle, const struct iovec *parts, int count, off_t offset, int flags) {
    WITH_HANDLE("pwritev2", handle, syscall(SYS_pwritev2, handle, parts, count, offset, 0, flags));
}

ssize_t pwritev64v2(int handle, const struct iovec *parts, int count, off64_t offset, int flags) {
    return pwritev2(handle, parts, count, offset, flags);
}

int fsync(int handle) { WITH_HANDLE("fsync", handle, skips_syncs ? 0 : syscall(SYS_fsync, handle)); }

int fdatasync(int handle) {
    WITH_HANDLE("fdatasync", handle, skips_syncs ? 0 : syscall(SYS_fdatasync, handle));
}

int ftruncate(int handle, off_t size) { WITH_HANDLE("ftruncate", handle, syscall(SYS_ftruncate, handle, size)); }

int ftruncate64(int handle, off64_t size) { return ftruncate(handle, size); }

int fallocate(int handle, int mode, off_t offset, off_t size) {
    WITH_HANDLE("fallocate", handle, syscall(SYS_fallocate, handle, mode, offset, size));
}

int fallocate64(int handle, int mode, off64_t offset, off64_t size) { return fallocate(handle, mode, offset, size); }

int sync_file_range(int handle, off64_t offset, off64_t size, unsigned int flags) {
    WITH_HANDLE("sync_file_range", handle, skips_syncs ? 0 : syscall(SYS_sync_file_range, handle, offset, size, flags));
}

/* --- reading --- */

#define READING(name, handle, action)                     \
    do {                                                  \
        if (!sees_reads)                                  \
            return action;                                \
        WITH_HANDLE(name, handle, action);                \
    } while (0)

ssize_t read(int handle, void *data, size_t size) { READING("read", handle, syscall(SYS_read, handle, data, size)); }

ssize_t pread(int handle, void *data, size_t size, off_t offset) {
    READING("pread", handle, syscall(SYS_pread64, handle, data, size, offset));
}

ssize_t pread64(int handle, void *data, size_t size, off64_t offset) { return pread(handle, data, size, offset); }

ssize_t preadv2(int handle, const struct iovec *parts, int count, off_t offset, int flags) {
    READING("preadv", handle, syscall(SYS_preadv2, handle, parts, count, offset, 0, flags));
}

ssize_t preadv64v2(int handle, const struct iovec *parts, int count, off64_t offset, int flags) {
    return preadv2(handle, parts, count, offset, flags);
}

ssize_t preadv(int handle, const struct iovec *parts, int count, off_t offset) {
    return preadv2(handle, parts, count, offset, 0);
}

ssize_t preadv64(int handle, const struct iovec *parts, int count, off64_t offset) {
    return preadv2(handle, parts, count, offset, 0);
}

/* --- names --- */

int renameat(int from, const char *old, int to, const char *new) {
    WITH_PATHS("rename", from, old, to, new, syscall(SYS_renameat2, from, old, to, new, 0));
}

int rename(const char *old, const char *new) { return renameat(AT_FDCWD, old, AT_FDCWD, new); }

int linkat(int from, const char *old, int to, const char *new, int flags) {
    WITH_PATHS("link", from, old, to, new, syscall(SYS_linkat, from, old, to, new, flags));
}

int link(const char *old, const char *new) { return linkat(AT_FDCWD, old, AT_FDCWD, new, 0); }

int unlinkat(int start, const char *path_given, int flags) {
    WITH_PATH(flags & AT_REMOVEDIR ? "rmdir" : "unlink", start, path_given,
              syscall(SYS_unlinkat, start, path_given, flags));
}

int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }

int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

int mkdirat(int start, const char *path_given, mode_t mode) {
    WITH_PATH("mkdir", start, path_given, syscall(SYS_mkdirat, start, path_given, mode));
}

int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

/* --- what the process says itself --- */

/* Watch a folder, from call 1 on; "" for none. Lines go to the file `log`, unless that is "". 0, or -1 and errno. */
int shim_watch(const char *path, const char *log, int makes_syncs) {
    skips_syncs = !makes_syncs;
    if (log_handle >= 0)
        syscall(SYS_close, log_handle);
    log_handle = *log ? syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666) : -1;
    atomic_store(&seen, 0);
    snprintf(folder, sizeof folder, "%s", path);
    return *log && log_handle < 0 ? -1 : 0;
}

/* Break the call number `at` of those whose name starts with `prefix`, counted from now. -1 for an unknown way. */
int shim_arm(long at, const char *how, const char *prefix) {
    fault = !strcmp(how, "kill")         ? KILL
            : !strcmp(how, "kill-after") ? KILL_AFTER
            : !strcmp(how, "repeat")     ? REPEAT
            : *how                       ? FAIL
                                         : NONE;
    fault_lasts = *how && how[strlen(how) - 1] == '+';
    fault_errno = !strcmp(how, "ENOSPC")                            ? ENOSPC
                  : !strcmp(how, "EIO")                             ? EIO
                  : !strncmp(how, "ESTALE", 6) && !how[6 + fault_lasts] ? ESTALE
                                                                    : 0;
    if (fault == FAIL && !fault_errno)
        return -1;
    snprintf(only, sizeof only, "%s", prefix);
    fault_at = at;
    atomic_store(&counted, 0);
    atomic_store(&hit, 0);
    return 0;
}

/* Count calls that read, too. */
void shim_see_reads(int yes) { sees_reads = yes; }

/* Watch nothing and break nothing. */
void shim_reset(void) {
    shim_see_reads(0);
    shim_watch("", "", 1);
    shim_arm(0, "", "");
}

/* How many calls there were. */
long shim_count(void) { return atomic_load(&seen); }

/* Whether the call to break came. */
int shim_hit(void) { return atomic_load(&hit); }

static const char *setting(const char *name) {
    const char *found = getenv(name);
    return found ? found : "";
}

__attribute__((constructor)) static void from_environment(void) {
    if (!*setting("SHIM_FOLDER"))
        return;
    shim_see_reads(!strcmp(setting("SHIM_READS"), "yes"));
    if (shim_arm(atol(setting("SHIM_AT")), setting("SHIM_DO"), setting("SHIM_ONLY")) < 0 ||
        shim_watch(setting("SHIM_FOLDER"), setting("SHIM_LOG"), strcmp(setting("SHIM_SYNC"), "no")) < 0) {
        fprintf(stderr, "shim: SHIM_DO or SHIM_LOG is wrong\n");
        _exit(126);
    }
}
