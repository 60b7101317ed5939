/* A network file system for tests: clients that cache, and a server that loses replies. Linux, root, /dev/fuse.
 *
 *   gcc -O2 -pthread -o netfs netfs.c
 *   ./netfs SERVER CLIENT...
 *
 * SERVER is a folder, and each CLIENT a mount point on which it appears, as through an NFS client on a machine of its
 * own. The program speaks the kernel's FUSE protocol itself, so it needs no library. netfs.py says what it does, and is
 * the way to use it. Commands come in on stdin, one a line, and each is answered by one line on stdout. After `quit`, or
 * at the end of stdin, everything is unmounted.
 *
 *   set NAME VALUE                                a setting; see `settings`
 *   fault CLIENT CALL ERRNO AFTER SKIP TIMES PERCENT TEXT    answer calls with an error; see `struct fault`
 *   clear                                         forget all faults
 *   count CALL                                    how many calls of this name came in
 *   hits                                          how many were answered by a fault
 *   crash                                         the server forgets bytes and names that no client has synced
 *   cut CLIENT                                    the machine of this client loses its power
 *
 * A client holds each file by a handle on the server's inode (an O_PATH descriptor), never by its path: so a file that
 * another client has deleted is stale, whatever has its name by now. What a client writes stays with it until the file
 * is synced or closed. One lock is held while a call is made, so that calls of several clients follow each other.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { MAX_WRITE = 1 << 20, MAX_CLIENTS = 8, MAX_FAULTS = 32, BUCKETS = 1024, MOST_UNSYNCED = 4096, MOST_CALLS = 64 };

/* Seconds for which a client believes what it has seen, and what the server can do. */
static struct { const char *name; double value; } settings[] = {
    {"attr_s", 0}, {"entry_s", 0}, {"negative_s", 0}, {"list_s", 0},
    {"link_errno", 0}, {"direct", 1}, {"rename_flags", 0}, {"fallocate", 0},
};
enum { ATTR_S, ENTRY_S, NEGATIVE_S, LIST_S, LINK_ERRNO, DIRECT, RENAME_FLAGS, FALLOCATE, SETTINGS };

struct fault {
    int client;     /* which one; -1: all */
    char call[16];
    int error;      /* 0: what the repetition of a request says whose reply was lost; see `repeated` */
    int after;      /* the call is made before it is said to have failed */
    long skip, times; /* let so many pass first; then break so many, 0: all */
    int percent;    /* of the others */
    char text[128]; /* only names that contain this; "-": all */
};

struct listing { int uses; size_t count; struct entry { ino_t ino; int type; char name[256]; } *entries; };

struct node {
    struct node *next;
    ino_t ino;
    int handle;         /* O_PATH */
    unsigned long uses; /* lookups that the kernel has not forgotten */
    int opens;
    int unwritten;      /* a memory file with what this client sees while it has written; -1 otherwise */
    int silly_folder;   /* where its last name was taken while it was open, -1 otherwise */
    char silly[32], name[256]; /* the name by which it was last found */
    struct listing *listing; /* of a folder */
    double listed_at;
};

struct client { int number, device; const char *folder; struct node root, *nodes[BUCKETS]; };
struct request { struct client *client; struct fuse_in_header *head; const void *body; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct client clients[MAX_CLIENTS];
static struct fault faults[MAX_FAULTS];
static struct { char call[16]; long calls; } counts[MOST_CALLS];
static long hits, silly_number;
static ino_t unsynced[MOST_UNSYNCED];
static char unsynced_path[MOST_UNSYNCED][64];
static size_t unsynced_count;
static struct { ino_t ino; int folder; char name[256]; } new_names[MOST_UNSYNCED];
static size_t new_count;
static int lost_folder; /* where a crash puts what it loses */
static const char *call_name; /* of the call that is being made */

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

static char *proc_path(int handle) {
    static char path[64]; /* under the lock */
    snprintf(path, sizeof path, "/proc/self/fd/%d", handle);
    return path;
}

/* --- faults --- */

/* A request whose reply was lost is sent again, and the server finds that it was done already. */
static int repeated(const char *call) {
    int makes = !strcmp(call, "link") || !strcmp(call, "create") || !strcmp(call, "mkdir") || !strcmp(call, "symlink");
    return makes ? EEXIST : ENOENT;
}

static struct fault *fault_for(int client, const char *call, const char *text) {
    for (int i = 0; i < MAX_FAULTS; i++) {
        struct fault *fault = &faults[i];
        if (!fault->call[0] || strcmp(fault->call, call) || (fault->client >= 0 && fault->client != client))
            continue;
        if ((strcmp(fault->text, "-") && !strstr(text, fault->text)) || rand() % 100 >= fault->percent)
            continue;
        if (fault->skip-- > 0)
            continue;
        fault->skip = 0;
        if (fault->times && --fault->times == 0)
            fault->call[0] = 0;
        hits++;
        return fault;
    }
    return NULL;
}

static void count(const char *call) {
    for (int i = 0; i < MOST_CALLS; i++)
        if (!counts[i].call[0] || !strcmp(counts[i].call, call)) {
            snprintf(counts[i].call, sizeof counts[i].call, "%s", call);
            counts[i].calls++;
            return;
        }
}

/* --- replies and notices --- */

static void send_out(struct client *client, uint64_t unique, int error, const void *data, size_t size) {
    struct fuse_out_header head = {(uint32_t)(sizeof head + size), error, unique};
    struct iovec parts[2] = {{&head, sizeof head}, {(void *)data, size}};
    if (writev(client->device, parts, size ? 2 : 1) < 0 && errno != ENOENT && errno != ENODEV && errno != EPERM)
        perror("netfs: reply");
}

/* Answer a request. `result`: 0, or an errno as a negative number. */
static void answer(struct request *request, int result, const void *data, size_t size) {
    send_out(request->client, request->head->unique, result, data, result ? 0 : size);
}

/* --- nodes --- */

static struct node *node_of(struct client *client, uint64_t id) {
    return id == FUSE_ROOT_ID ? &client->root : (struct node *)(uintptr_t)id;
}

static uint64_t id_of(struct client *client, struct node *node) {
    return node == &client->root ? FUSE_ROOT_ID : (uint64_t)(uintptr_t)node;
}

static struct node *known(struct client *client, ino_t ino) {
    struct node *node = client->nodes[ino % BUCKETS];
    while (node && node->ino != ino)
        node = node->next;
    return node;
}

/* Stale: no name leads to it any more. (A file that this client deleted while it was open has a silly name.) */
static int status_of(struct node *node, struct stat *status) {
    if (fstat(node->handle, status))
        return -errno;
    if (!status->st_nlink)
        return -ESTALE;
    struct stat own;
    if (node->unwritten >= 0 && !fstat(node->unwritten, &own))
        status->st_size = own.st_size;
    return 0;
}

static int check(struct node *node) {
    struct stat status;
    return status_of(node, &status);
}

static void drop_listing(struct listing *listing) {
    if (listing && !--listing->uses) {
        free(listing->entries);
        free(listing);
    }
}

static void changed(struct node *folder) {
    drop_listing(folder->listing);
    folder->listing = NULL;
}

static void forget(struct client *client, uint64_t id, uint64_t uses) {
    struct node *node = node_of(client, id);
    if (node == &client->root || (node->uses -= uses) || node->opens)
        return;
    struct node **at = &client->nodes[node->ino % BUCKETS];
    while (*at != node)
        at = &(*at)->next;
    *at = node->next;
    close(node->handle);
    changed(node);
    if (node->unwritten >= 0)
        close(node->unwritten);
    free(node);
}

static void seconds(double value, uint64_t *whole, uint32_t *nanos) {
    *whole = (uint64_t)value;
    *nanos = (uint32_t)((value - (double)*whole) * 1e9);
}

static struct fuse_attr attributes(const struct stat *s) {
    struct fuse_attr out = {
        .ino = s->st_ino, .size = (uint64_t)s->st_size, .blocks = (uint64_t)s->st_blocks, .mode = s->st_mode,
        .atime = (uint64_t)s->st_atim.tv_sec, .atimensec = (uint32_t)s->st_atim.tv_nsec,
        .mtime = (uint64_t)s->st_mtim.tv_sec, .mtimensec = (uint32_t)s->st_mtim.tv_nsec,
        .ctime = (uint64_t)s->st_ctim.tv_sec, .ctimensec = (uint32_t)s->st_ctim.tv_nsec,
        .nlink = (uint32_t)s->st_nlink, .uid = s->st_uid, .gid = s->st_gid, .blksize = 4096,
    };
    return out;
}

/* Find or make the node of a name, and describe it to the kernel. */
static int enter(struct client *client, struct node *folder, const char *name, struct fuse_entry_out *out) {
    struct stat status;
    int handle = openat(folder->handle, name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    if (handle < 0)
        return -errno;
    if (fstat(handle, &status))
        return -errno;
    struct node *node = known(client, status.st_ino);
    if (node) {
        close(handle);
    } else {
        node = calloc(1, sizeof *node);
        *node = (struct node){client->nodes[status.st_ino % BUCKETS], status.st_ino, handle, 0, 0, -1, -1, "", "", NULL, 0};
        client->nodes[status.st_ino % BUCKETS] = node;
    }
    int result = status_of(node, &status);
    if (result)
        return result;
    node->uses++;
    snprintf(node->name, sizeof node->name, "%s", name);
    *out = (struct fuse_entry_out){.nodeid = id_of(client, node), .generation = 1, .attr = attributes(&status)};
    seconds(settings[ENTRY_S].value, &out->entry_valid, &out->entry_valid_nsec);
    seconds(settings[ATTR_S].value, &out->attr_valid, &out->attr_valid_nsec);
    return 0;
}

/* --- what a client has written, and the server has not --- */

static int own_copy(struct node *node) {
    if (node->unwritten >= 0)
        return 0;
    int from = open(proc_path(node->handle), O_RDONLY | O_CLOEXEC), to = memfd_create("unwritten", MFD_CLOEXEC);
    static char block[1 << 16];
    ssize_t size = from < 0 ? -1 : 0;
    while (from >= 0 && (size = read(from, block, sizeof block)) > 0)
        if (write(to, block, (size_t)size) != size)
            break;
    int error = size < 0 ? -errno : 0;
    if (from >= 0)
        close(from);
    if (error)
        close(to);
    else
        node->unwritten = to;
    return error;
}

static void mark_unsynced(struct node *node, int yes) {
    size_t i = 0;
    while (i < unsynced_count && unsynced[i] != node->ino)
        i++;
    if (!yes && i < unsynced_count) {
        close(atoi(strrchr(unsynced_path[i], '/') + 1));
        unsynced[i] = unsynced[--unsynced_count];
        memcpy(unsynced_path[i], unsynced_path[unsynced_count], sizeof unsynced_path[i]);
    } else if (yes && i == unsynced_count && i < MOST_UNSYNCED) {
        unsynced[unsynced_count] = node->ino;
        /* A handle that stays open: the node may be forgotten before the crash. */
        snprintf(unsynced_path[unsynced_count++], 64, "/proc/self/fd/%d", dup(node->handle));
    }
}

static void mark_new(struct node *folder, const char *name) {
    if (new_count == MOST_UNSYNCED)
        return;
    new_names[new_count].ino = folder->ino;
    new_names[new_count].folder = dup(folder->handle);
    snprintf(new_names[new_count++].name, 256, "%s", name);
}

static void sync_names(struct node *folder) {
    size_t kept = 0;
    for (size_t i = 0; i < new_count; i++)
        if (new_names[i].ino == folder->ino)
            close(new_names[i].folder);
        else
            new_names[kept++] = new_names[i];
    new_count = kept;
}

/* Send what was written to the server. On an error it is lost, as on NFS, and the caller is told now. */
static int send_written(struct client *client, struct node *node) {
    if (node->unwritten < 0)
        return 0;
    struct fault *fault = fault_for(client->number, "store", node->name);
    int from = node->unwritten, result = fault ? -fault->error : check(node);
    node->unwritten = -1;
    int to = result ? -1 : open(proc_path(node->handle), O_WRONLY | O_CLOEXEC);
    if (!result && to < 0)
        result = -errno;
    struct stat status;
    if (!result && (fstat(from, &status) || ftruncate(to, status.st_size)))
        result = -errno;
    static char block[1 << 16];
    for (off_t at = 0; !result && at < status.st_size;) {
        ssize_t size = pread(from, block, sizeof block, at);
        if (size <= 0 || pwrite(to, block, (size_t)size, at) != size)
            result = -EIO;
        at += size;
    }
    close(from);
    if (to >= 0)
        close(to);
    mark_unsynced(node, 1);
    return result;
}

/* --- calls on names --- */

static void lookup(struct request *request) {
    struct fuse_entry_out out;
    struct node *folder = node_of(request->client, request->head->nodeid);
    int result = check(folder);
    if (!result)
        result = enter(request->client, folder, request->body, &out);
    if (result == -ENOENT && settings[NEGATIVE_S].value > 0) {
        memset(&out, 0, sizeof out);
        seconds(settings[NEGATIVE_S].value, &out.entry_valid, &out.entry_valid_nsec);
        result = 0;
    }
    answer(request, result, &out, sizeof out);
}

/* While a client has a file open, its deletion only renames it; on the last close it goes. */
static int is_hidden(struct client *client, struct node *folder, const char *name) {
    struct stat status;
    if (fstatat(folder->handle, name, &status, AT_SYMLINK_NOFOLLOW) || status.st_nlink > 1)
        return 0;
    struct node *node = known(client, status.st_ino);
    if (!node || !node->opens || node->silly_folder >= 0)
        return 0;
    snprintf(node->silly, sizeof node->silly, ".nfs%012lx", ++silly_number);
    if (renameat(folder->handle, name, folder->handle, node->silly))
        return 0;
    node->silly_folder = dup(folder->handle);
    return 1;
}

static int remove_name(struct client *client, struct node *folder, const char *name, int flags) {
    struct stat status;
    struct node *node = fstatat(folder->handle, name, &status, AT_SYMLINK_NOFOLLOW) ? NULL : known(client, status.st_ino);
    if (node && node->silly_folder >= 0 && !strcmp(node->silly, name))
        return -EBUSY;
    if (!flags && is_hidden(client, folder, name))
        return 0;
    return unlinkat(folder->handle, name, flags) ? -errno : 0;
}

static int rename_to(struct client *client, struct node *from, const char *old, uint64_t folder, unsigned flags) {
    struct node *to = node_of(client, folder);
    const char *new = old + strlen(old) + 1;
    if (flags && !settings[RENAME_FLAGS].value)
        return -EINVAL;
    if (check(to))
        return -ESTALE;
    changed(to);
    if (!flags)
        is_hidden(client, to, new);
    if (renameat2(from->handle, old, to->handle, new, flags))
        return -errno;
    mark_new(to, new);
    return 0;
}

/* The name that a call makes or removes; of a rename the new one. */
static const char *new_name(struct request *request) {
    const char *body = request->body;
    switch (request->head->opcode) {
    case FUSE_MKDIR:
        return body + sizeof(struct fuse_mkdir_in);
    case FUSE_MKNOD:
        return body + sizeof(struct fuse_mknod_in);
    case FUSE_LINK:
        return body + sizeof(struct fuse_link_in);
    case FUSE_RENAME:
        body += sizeof(struct fuse_rename_in);
        return body + strlen(body) + 1;
    case FUSE_RENAME2:
        body += sizeof(struct fuse_rename2_in);
        return body + strlen(body) + 1;
    default:
        return body;
    }
}

static int make(struct request *request, struct node *folder, const char *name, struct fuse_entry_out *out) {
    const struct fuse_mkdir_in *mkdir_in = request->body;
    const struct fuse_mknod_in *mknod_in = request->body;
    const struct fuse_link_in *link_in = request->body;
    int failed;
    if (request->head->opcode == FUSE_MKDIR) {
        failed = mkdirat(folder->handle, name, mkdir_in->mode);
    } else if (request->head->opcode == FUSE_MKNOD) {
        failed = mknodat(folder->handle, name, mknod_in->mode, mknod_in->rdev);
    } else if (request->head->opcode == FUSE_SYMLINK) {
        failed = symlinkat(name + strlen(name) + 1, folder->handle, name);
    } else {
        struct node *old = node_of(request->client, link_in->oldnodeid);
        if (settings[LINK_ERRNO].value)
            return -(int)settings[LINK_ERRNO].value;
        if (check(old))
            return -ESTALE;
        failed = linkat(AT_FDCWD, proc_path(old->handle), folder->handle, name, AT_SYMLINK_FOLLOW);
    }
    if (failed)
        return -errno;
    mark_new(folder, name);
    return enter(request->client, folder, name, out);
}

/* A call that changes a folder: is it answered with a fault, and is it made? */
static void change(struct request *request) {
    struct client *client = request->client;
    struct node *folder = node_of(client, request->head->nodeid);
    const char *name = new_name(request);
    struct fuse_entry_out entry = {0};
    size_t size = 0;
    struct fault *fault = fault_for(client->number, call_name, name);
    struct fault lost = fault ? *fault : (struct fault){0};
    int result = check(folder);
    changed(folder);
    if (fault && !lost.after)
        result = -lost.error;
    if (!result)
        switch (request->head->opcode) {
        case FUSE_UNLINK:
            result = remove_name(client, folder, name, 0);
            break;
        case FUSE_RMDIR:
            result = remove_name(client, folder, name, AT_REMOVEDIR);
            break;
        case FUSE_RENAME:
            result = rename_to(client, folder, (const char *)request->body + sizeof(struct fuse_rename_in),
                               ((const struct fuse_rename_in *)request->body)->newdir, 0);
            break;
        case FUSE_RENAME2:
            result = rename_to(client, folder, (const char *)request->body + sizeof(struct fuse_rename2_in),
                               ((const struct fuse_rename2_in *)request->body)->newdir,
                               ((const struct fuse_rename2_in *)request->body)->flags);
            break;
        default:
            result = make(request, folder, name, &entry);
            size = sizeof entry;
        }
    if (fault && lost.after && !result) {
        if (entry.nodeid)
            forget(client, entry.nodeid, 1);
        result = lost.error ? -lost.error : -repeated(call_name);
    }
    answer(request, result, &entry, size);
}

/* --- calls on files --- */

static void create(struct request *request) {
    const struct fuse_create_in *in = request->body;
    const char *name = (const char *)(in + 1);
    struct { struct fuse_entry_out entry; struct fuse_open_out open; } out = {0};
    struct client *client = request->client;
    struct node *folder = node_of(client, request->head->nodeid);
    /* A create that is not exclusive can be repeated, so that its reply cannot be lost. */
    struct fault *fault = fault_for(client->number, in->flags & O_EXCL ? "create" : "make", name);
    struct fault lost = fault ? *fault : (struct fault){0};
    int result = check(folder);
    changed(folder);
    if (fault && !lost.after)
        result = -lost.error;
    else if (!result && (in->flags & O_DIRECT) && !settings[DIRECT].value)
        result = -EINVAL;
    if (!result) {
        int made = openat(folder->handle, name, O_CREAT | O_WRONLY | O_CLOEXEC | (in->flags & O_EXCL), in->mode);
        result = made < 0 ? -errno : enter(client, folder, name, &out.entry);
        if (made >= 0) {
            close(made);
            mark_new(folder, name);
        }
    }
    if (fault && lost.after && !result) {
        forget(client, out.entry.nodeid, 1);
        result = lost.error ? -lost.error : -EEXIST;
    }
    if (!result)
        node_of(client, out.entry.nodeid)->opens++;
    out.open.fh = 1;
    answer(request, result, &out, sizeof out);
}

static void open_file(struct request *request) {
    const struct fuse_open_in *in = request->body;
    struct client *client = request->client;
    struct node *node = node_of(client, request->head->nodeid);
    struct fuse_open_out out = {0};
    struct fault *fault = fault_for(client->number, "open", node->name);
    int result = fault ? -fault->error : check(node);
    if (!result && (in->flags & O_DIRECT) && !settings[DIRECT].value)
        result = -EINVAL;
    if (!result) {
        node->opens++;
        out.fh = (in->flags & O_ACCMODE) != O_RDONLY;
        /* Close-to-open: the attributes are asked for anew. The kernel drops the data by itself. */
        struct fuse_notify_inval_inode_out all = {request->head->nodeid, -1, 0};
        send_out(client, 0, FUSE_NOTIFY_INVAL_INODE, &all, sizeof all);
    }
    answer(request, result, &out, sizeof out);
}

static void release(struct request *request) {
    struct client *client = request->client;
    struct node *node = node_of(client, request->head->nodeid);
    if (!--node->opens && node->silly_folder >= 0) {
        unlinkat(node->silly_folder, node->silly, 0);
        close(node->silly_folder);
        node->silly_folder = -1;
        if (node->unwritten >= 0)
            close(node->unwritten);
        node->unwritten = -1;
    }
    if (!node->opens)
        send_written(client, node);
    answer(request, 0, NULL, 0);
    if (!node->opens && !node->uses)
        forget(client, request->head->nodeid, 0);
}

static void read_file(struct request *request) {
    static char data[MAX_WRITE];
    const struct fuse_read_in *in = request->body;
    struct node *node = node_of(request->client, request->head->nodeid);
    struct fault *fault = fault_for(request->client->number, "read", node->name);
    int result = fault ? -fault->error : check(node);
    ssize_t size = 0;
    if (!result) {
        int from = node->unwritten >= 0 ? dup(node->unwritten) : open(proc_path(node->handle), O_RDONLY | O_CLOEXEC);
        size = from < 0 ? -1 : pread(from, data, in->size < MAX_WRITE ? in->size : MAX_WRITE, (off_t)in->offset);
        result = size < 0 ? -errno : 0;
        if (from >= 0)
            close(from);
    }
    answer(request, result, data, (size_t)(result ? 0 : size));
}

static void write_file(struct request *request) {
    const struct fuse_write_in *in = request->body;
    struct node *node = node_of(request->client, request->head->nodeid);
    struct fuse_write_out out = {in->size, 0};
    int result = check(node);
    if (!result)
        result = own_copy(node);
    if (!result && pwrite(node->unwritten, in + 1, in->size, (off_t)in->offset) != (ssize_t)in->size)
        result = -EIO;
    answer(request, result, &out, sizeof out);
}

static void sync_file(struct request *request) {
    struct client *client = request->client;
    struct node *node = node_of(client, request->head->nodeid);
    struct fault *fault = fault_for(client->number, call_name, node->name);
    int result = 0;
    if (request->head->opcode == FUSE_FSYNCDIR)
        result = check(node);
    else if (request->head->opcode == FUSE_FSYNC || ((const struct fuse_flush_in *)request->body)->fh)
        result = send_written(client, node); /* the close of a handle for reading sends nothing */
    if (fault)
        result = -fault->error;
    if (!result && request->head->opcode == FUSE_FSYNC)
        mark_unsynced(node, 0);
    if (!result && request->head->opcode == FUSE_FSYNCDIR)
        sync_names(node);
    answer(request, result, NULL, 0);
}

static void allocate(struct request *request) {
    const struct fuse_fallocate_in *in = request->body;
    struct node *node = node_of(request->client, request->head->nodeid);
    int result = settings[FALLOCATE].value ? own_copy(node) : -EOPNOTSUPP;
    if (!result && fallocate(node->unwritten, (int)in->mode, (off_t)in->offset, (off_t)in->length))
        result = -errno;
    answer(request, result, NULL, 0);
}

static void attributes_out(struct request *request) {
    struct stat status;
    struct fuse_attr_out out = {0};
    int result = status_of(node_of(request->client, request->head->nodeid), &status);
    if (!result)
        out.attr = attributes(&status);
    seconds(settings[ATTR_S].value, &out.attr_valid, &out.attr_valid_nsec);
    answer(request, result, &out, sizeof out);
}

static void set_attributes(struct request *request) {
    const struct fuse_setattr_in *in = request->body;
    struct node *node = node_of(request->client, request->head->nodeid);
    struct timespec times[2] = {{(time_t)in->atime, in->valid & FATTR_ATIME ? (long)in->atimensec : UTIME_OMIT},
                                {(time_t)in->mtime, in->valid & FATTR_MTIME ? (long)in->mtimensec : UTIME_OMIT}};
    int result = check(node);
    if (!result && in->valid & FATTR_MODE && chmod(proc_path(node->handle), in->mode & 07777))
        result = -errno;
    if (!result && in->valid & FATTR_SIZE &&
        (node->unwritten >= 0 ? ftruncate(node->unwritten, (off_t)in->size)
                              : truncate(proc_path(node->handle), (off_t)in->size)))
        result = -errno;
    if (!result && in->valid & (FATTR_ATIME | FATTR_MTIME) && utimensat(AT_FDCWD, proc_path(node->handle), times, 0))
        result = -errno;
    if (result)
        answer(request, result, NULL, 0);
    else
        attributes_out(request);
}

/* --- folders --- */

static struct listing *list_folder(struct node *node) {
    int handle = openat(node->handle, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *folder = handle < 0 ? NULL : fdopendir(handle);
    if (!folder)
        return NULL;
    struct listing *listing = calloc(1, sizeof *listing);
    listing->uses = 1;
    for (struct dirent *entry; (entry = readdir(folder));) {
        listing->entries = realloc(listing->entries, (listing->count + 1) * sizeof *listing->entries);
        struct entry *out = &listing->entries[listing->count++];
        out->ino = entry->d_ino;
        out->type = entry->d_type;
        snprintf(out->name, sizeof out->name, "%s", entry->d_name);
    }
    closedir(folder);
    return listing;
}

static void open_folder(struct request *request) {
    struct node *node = node_of(request->client, request->head->nodeid);
    struct fuse_open_out out = {0};
    struct fault *fault = fault_for(request->client->number, "opendir", node->name);
    int result = fault ? -fault->error : check(node);
    if (!result && (!node->listing || now() - node->listed_at >= settings[LIST_S].value)) {
        changed(node);
        node->listing = list_folder(node);
        node->listed_at = now();
        result = node->listing ? 0 : -EIO;
    }
    if (!result) {
        node->listing->uses++;
        out.fh = (uint64_t)(uintptr_t)node->listing;
    }
    answer(request, result, &out, sizeof out);
}

static void read_folder(struct request *request) {
    static char data[1 << 16];
    const struct fuse_read_in *in = request->body;
    struct listing *listing = (struct listing *)(uintptr_t)in->fh;
    size_t room = in->size < sizeof data ? in->size : sizeof data, used = 0;
    const char *name = node_of(request->client, request->head->nodeid)->name;
    struct fault *fault = fault_for(request->client->number, "readdir", name);
    for (size_t i = in->offset; i < listing->count; i++) {
        struct entry *entry = &listing->entries[i];
        size_t length = strlen(entry->name), size = FUSE_DIRENT_ALIGN(FUSE_NAME_OFFSET + length);
        if (used + size > room)
            break;
        struct fuse_dirent *out = (struct fuse_dirent *)(data + used);
        *out = (struct fuse_dirent){.ino = entry->ino, .off = i + 1, .namelen = (uint32_t)length,
                                    .type = (uint32_t)entry->type};
        memcpy(data + used + FUSE_NAME_OFFSET, entry->name, length);
        used += size;
    }
    answer(request, fault ? -fault->error : 0, data, used);
}

static void release_folder(struct request *request) {
    drop_listing((struct listing *)(uintptr_t)((const struct fuse_release_in *)request->body)->fh);
    answer(request, 0, NULL, 0);
}

/* --- the rest --- */

static void start(struct request *request) {
    const struct fuse_init_in *in = request->body;
    struct fuse_init_out out = {.major = FUSE_KERNEL_VERSION, .max_readahead = in->max_readahead,
                                .max_background = 16, .congestion_threshold = 12, .max_write = MAX_WRITE,
                                .time_gran = 1, .max_pages = MAX_WRITE / 4096};
    out.minor = in->minor < FUSE_KERNEL_MINOR_VERSION ? in->minor : FUSE_KERNEL_MINOR_VERSION;
    out.flags = in->flags & (FUSE_ASYNC_READ | FUSE_BIG_WRITES | FUSE_MAX_PAGES);
    answer(request, 0, &out, sizeof out);
}

static void room(struct request *request) {
    struct statvfs status;
    struct fuse_statfs_out out = {0};
    fstatvfs(request->client->root.handle, &status);
    out.st = (struct fuse_kstatfs){.blocks = status.f_blocks, .bfree = status.f_bfree, .bavail = status.f_bavail,
                                   .files = status.f_files, .ffree = status.f_ffree, .bsize = (uint32_t)status.f_bsize,
                                   .frsize = (uint32_t)status.f_frsize, .namelen = 255};
    answer(request, 0, &out, sizeof out);
}

static void follow(struct request *request) {
    char target[4096];
    ssize_t size = readlinkat(node_of(request->client, request->head->nodeid)->handle, "", target, sizeof target);
    answer(request, size < 0 ? -errno : 0, target, size < 0 ? 0 : (size_t)size);
}

static void forget_one(struct request *request) {
    forget(request->client, request->head->nodeid, ((const struct fuse_forget_in *)request->body)->nlookup);
}

static void forget_many(struct request *request) {
    const struct fuse_batch_forget_in *in = request->body;
    const struct fuse_forget_one *one = (const struct fuse_forget_one *)(in + 1);
    for (uint32_t i = 0; i < in->count; i++)
        forget(request->client, one[i].nodeid, one[i].nlookup);
}

static void ignore(struct request *request) { (void)request; }

static const struct { uint32_t opcode; const char *name; void (*make)(struct request *); } calls[] = {
    {FUSE_INIT, "init", start}, {FUSE_LOOKUP, "lookup", lookup}, {FUSE_FORGET, "forget", forget_one},
    {FUSE_BATCH_FORGET, "forget", forget_many}, {FUSE_GETATTR, "getattr", attributes_out},
    {FUSE_SETATTR, "setattr", set_attributes}, {FUSE_READLINK, "readlink", follow}, {FUSE_SYMLINK, "symlink", change},
    {FUSE_MKNOD, "mknod", change}, {FUSE_MKDIR, "mkdir", change}, {FUSE_UNLINK, "unlink", change},
    {FUSE_RMDIR, "rmdir", change}, {FUSE_RENAME, "rename", change}, {FUSE_RENAME2, "rename", change},
    {FUSE_LINK, "link", change}, {FUSE_CREATE, "create", create}, {FUSE_OPEN, "open", open_file},
    {FUSE_READ, "read", read_file}, {FUSE_WRITE, "write", write_file}, {FUSE_FLUSH, "flush", sync_file},
    {FUSE_FSYNC, "fsync", sync_file}, {FUSE_FSYNCDIR, "fsyncdir", sync_file}, {FUSE_RELEASE, "release", release},
    {FUSE_FALLOCATE, "fallocate", allocate}, {FUSE_OPENDIR, "opendir", open_folder},
    {FUSE_READDIR, "readdir", read_folder}, {FUSE_RELEASEDIR, "releasedir", release_folder},
    {FUSE_STATFS, "statfs", room}, {FUSE_INTERRUPT, "interrupt", ignore},
};

static void *serve(void *argument) {
    struct client *client = argument;
    size_t size = MAX_WRITE + (1 << 16);
    char *buffer = aligned_alloc(4096, size);
    for (;;) {
        ssize_t length = read(client->device, buffer, size);
        if (length < 0 && errno == ENODEV)
            return NULL; /* unmounted */
        if (length < (ssize_t)sizeof(struct fuse_in_header))
            continue;
        struct fuse_in_header *head = (struct fuse_in_header *)buffer;
        struct request request = {client, head, head + 1};
        buffer[length] = 0;
        pthread_mutex_lock(&lock);
        size_t i = 0, known_calls = sizeof calls / sizeof *calls;
        while (i < known_calls && calls[i].opcode != head->opcode)
            i++;
        if (i < known_calls) {
            call_name = calls[i].name;
            count(call_name);
            calls[i].make(&request);
        } else {
            answer(&request, -ENOSYS, NULL, 0);
        }
        pthread_mutex_unlock(&lock);
    }
}

static int mounted(struct client *client, int number, const char *server, const char *folder) {
    char options[128];
    struct stat status;
    client->number = number;
    client->folder = folder;
    client->root = (struct node){.handle = open(server, O_PATH | O_DIRECTORY | O_CLOEXEC), .unwritten = -1,
                                 .silly_folder = -1};
    client->device = open("/dev/fuse", O_RDWR | O_CLOEXEC);
    if (client->root.handle < 0 || client->device < 0 || fstat(client->root.handle, &status))
        return -1;
    client->root.ino = status.st_ino;
    snprintf(options, sizeof options, "fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other", client->device);
    return mount("netfs", folder, "fuse.netfs", MS_NOSUID | MS_NODEV, options);
}

static void cut(struct client *client) {
    umount2(client->folder, MNT_FORCE); /* ends all calls that are under way, with an error */
    umount2(client->folder, MNT_DETACH);
}

static void crash(void) {
    char name[32];
    while (new_count) {
        snprintf(name, sizeof name, "%ld", ++silly_number);
        new_count--;
        renameat(new_names[new_count].folder, new_names[new_count].name, lost_folder, name);
        close(new_names[new_count].folder);
    }
    while (unsynced_count) {
        const char *path = unsynced_path[--unsynced_count];
        if (truncate(path, 0))
            perror("netfs: crash");
        close(atoi(strrchr(path, '/') + 1));
    }
}

static long obey(char *line) {
    char name[32];
    double value;
    struct fault fault = {0};
    int number = 0;
    if (sscanf(line, "set %31s %lf", name, &value) == 2) {
        for (int i = 0; i < SETTINGS; i++)
            if (!strcmp(settings[i].name, name)) {
                settings[i].value = value;
                return 0;
            }
        return -1;
    }
    if (sscanf(line, "fault %d %15s %d %d %ld %ld %d %127s", &fault.client, fault.call, &fault.error, &fault.after,
               &fault.skip, &fault.times, &fault.percent, fault.text) == 8) {
        for (int i = 0; i < MAX_FAULTS; i++)
            if (!faults[i].call[0]) {
                faults[i] = fault;
                return 0;
            }
        return -1;
    }
    if (sscanf(line, "count %31s", name) == 1) {
        for (int i = 0; i < MOST_CALLS; i++)
            if (!strcmp(counts[i].call, name))
                return counts[i].calls;
        return 0;
    }
    if (!strncmp(line, "hits", 4))
        return hits;
    if (!strncmp(line, "clear", 5))
        memset(faults, 0, sizeof faults);
    else if (!strncmp(line, "crash", 5))
        crash();
    else if (sscanf(line, "cut %d", &number) == 1 && number >= 0 && number < MAX_CLIENTS && clients[number].folder)
        cut(&clients[number]);
    else
        return -1;
    return 0;
}

int main(int argc, char **argv) {
    pthread_t thread;
    struct rlimit files;
    char line[512];
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    umask(0);
    snprintf(line, sizeof line, "%s.lost", argc > 1 ? argv[1] : "");
    mkdir(line, 0700);
    lost_folder = open(line, O_PATH | O_DIRECTORY | O_CLOEXEC);
    signal(SIGINT, SIG_IGN); /* Ctrl-C is for the tests */
    for (int i = 0; i + 2 < argc && i < MAX_CLIENTS; i++) {
        if (mounted(&clients[i], i, argv[1], argv[i + 2])) {
            perror("netfs: cannot mount");
            return 1;
        }
        pthread_create(&thread, NULL, serve, &clients[i]);
    }
    puts("0");
    fflush(stdout);
    while (fgets(line, sizeof line, stdin) && strncmp(line, "quit", 4)) {
        pthread_mutex_lock(&lock);
        long result = obey(line);
        pthread_mutex_unlock(&lock);
        printf("%ld\n", result);
        fflush(stdout);
    }
    for (int i = 0; i < MAX_CLIENTS && clients[i].folder; i++)
        umount2(clients[i].folder, MNT_DETACH);
    _exit(0);
}
