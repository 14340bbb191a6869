/* What docs/c/libfmq_queue.cpp uses of libfmq, to compile it without Android. A queue only shows what it was made from. */
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <vector>

struct native_handle_t {
    int version, numFds, numInts, data[1];
};

inline native_handle_t *native_handle_create(int fds, int integers) {
    return new native_handle_t{sizeof(native_handle_t), fds, integers, {-1}};
}

namespace android::hardware {

enum MQFlavor : uint32_t { kSynchronizedReadWrite = 1, kUnsynchronizedWrite = 2 };

struct GrantorDescriptor {
    uint32_t flags, fdIndex, offset;
    uint64_t extent;
};

template <typename T, MQFlavor flavor> struct MQDescriptor {
    MQDescriptor(const std::vector<GrantorDescriptor> &grantors, native_handle_t *handle, size_t quantum)
        : grantors(grantors), handle(handle), quantum(quantum) {}
    std::vector<GrantorDescriptor> grantors;
    native_handle_t *handle;
    size_t quantum;
};

template <typename T, MQFlavor flavor> struct MessageQueue {
    MessageQueue(const MQDescriptor<T, flavor> &descriptor, bool resetPointers = true)
        : descriptor(descriptor), resetPointers(resetPointers) {}
    MQDescriptor<T, flavor> descriptor;
    bool resetPointers;
};

} // namespace android::hardware
