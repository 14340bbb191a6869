/* A synchronized queue that libfmq (HIDL's C++ interface) shares with nnfmq. Either side may make the memory: this one
 * with `sealed_memory`, nnfmq with `MessageQueue.create(24, count)`. The other side gets the fd over a socket, and nnfmq
 * the descriptor as JSON (docs/reference/queue.md, "Descriptors"). libfmq's own constructor does not seal its memory, and
 * nnfmq accepts no memory that a peer could shrink. */
#include <fcntl.h>
#include <fmq/MessageQueue.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <vector>

using namespace android::hardware;

struct Record { /* no pointers, and the same layout on both sides */
    uint64_t time_ns;
    float values[4];
};
static_assert(sizeof(Record) == 24, "the quantum of the descriptor and of MessageQueue.adopt(fds, text, quantum=24)");

using Queue = MessageQueue<Record, kSynchronizedReadWrite>;

static uint32_t event_flag_offset(uint32_t count) { return (16 + count * sizeof(Record) + 7) / 8 * 8; }

/* Returns the fd of memory for `count` records that nobody can shrink or grow, -1 on failure. */
int sealed_memory(uint32_t count) {
    int fd = memfd_create("queue", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    bool is_sealed = fd >= 0 && ftruncate(fd, event_flag_offset(count) + 4) == 0 &&
                     fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0;
    if (fd >= 0 && !is_sealed)
        close(fd);
    return is_sealed ? fd : -1;
}

/* Attaches to the queue of `count` records in this memory. Takes ownership of `fd`. */
std::unique_ptr<Queue> attach(int fd, uint32_t count) {
    const std::vector<GrantorDescriptor> grantors{
        /* flags, fd index, offset, extent */
        {0, 0, 0, 8},                                        /* read counter */
        {0, 0, 8, 8},                                        /* write counter */
        {0, 0, 16, count * uint64_t{sizeof(Record)}},        /* ring */
        {0, 0, event_flag_offset(count), sizeof(uint32_t)}}; /* event flag word, without which no call can block */
    native_handle_t *handle = native_handle_create(/* fds */ 1, /* integers */ 0);
    handle->data[0] = fd;
    MQDescriptor<Record, kSynchronizedReadWrite> descriptor(grantors, handle, sizeof(Record));
    return std::make_unique<Queue>(descriptor, /* resetPointers, by default true: discards what is in the queue */ false);
}
