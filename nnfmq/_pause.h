/* What a thread that polls memory does between two looks. */
#ifndef NNFMQ_PAUSE_H
#define NNFMQ_PAUSE_H

static inline void nnfmq_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb" ::: "memory"); /* delays by some ns; `yield` is a no-op on most CPUs */
#endif
}

#endif
