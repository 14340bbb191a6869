/* Makes docs/c's libfmq queue of COUNT records, prints its descriptor for test_libfmq_example.py, and exits with stdin. */
#include "libfmq_queue.cpp"

#include <cstdio>

int main(int, char **words) {
    uint32_t count = static_cast<uint32_t>(atoi(words[1]));
    int fd = sealed_memory(count);
    if (fd < 0)
        return 1;
    auto queue = attach(fd, count);
    const char *separator = "{\"grantors\":[";
    for (const auto &grantor : queue->descriptor.grantors) {
        printf("%s{\"fdIndex\":%u,\"offset\":%u,\"extent\":%llu}", separator, grantor.fdIndex, grantor.offset,
               static_cast<unsigned long long>(grantor.extent));
        separator = ",";
    }
    printf("],\"quantum\":%zu,\"flags\":%u}\n", queue->descriptor.quantum, kSynchronizedReadWrite);
    printf("%d %d\n", queue->descriptor.handle->data[0], queue->resetPointers);
    fflush(stdout);
    return getchar() == EOF ? 0 : 1;
}
