/* The floating-point mode in which kernels run: subnormal numbers are 0, as operands and as results.
 *
 * On many CPUs an operation with a subnormal number takes about 150 cycles. Softmax, sigmoid and EXP return such numbers for
 * ordinary inputs, so the time of an execution would depend on its data. The interpreter of TFLite sets the same mode.
 */
#ifndef NNFMQ_FLOAT_MODE_H
#define NNFMQ_FLOAT_MODE_H

#include <stdint.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#define NNFMQ_MXCSR_FTZ_DAZ 0x8040u
#define NNFMQ_FPCR_FZ ((uint64_t)1 << 24)

/* Sets the mode of the calling thread, and returns the one before. */
static inline uint64_t nnfmq_flush_subnormals(void) {
#if defined(__x86_64__)
    const uint32_t before = _mm_getcsr();
    _mm_setcsr(before | NNFMQ_MXCSR_FTZ_DAZ);
    return before;
#elif defined(__aarch64__)
    uint64_t before;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    __asm__ volatile("msr fpcr, %0" : : "r"(before | NNFMQ_FPCR_FZ));
    return before;
#else
    return 0;
#endif
}

/* Sets the mode that `nnfmq_flush_subnormals` returned. */
static inline void nnfmq_restore_float_mode(uint64_t before) {
#if defined(__x86_64__)
    _mm_setcsr((uint32_t)before);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(before));
#else
    (void)before;
#endif
}

#endif
