/* The compression function of SHA-256 (FIPS 180-4) with the SHA instructions of x86-64.
 *
 * Other CPUs have no such function here, and `sha256_is_supported` returns 0: OpenSSL is fast enough there.
 */
#ifndef NNFMQ_SHA256_H
#define NNFMQ_SHA256_H

#include <stddef.h>
#include <stdint.h>

#define SHA256_BLOCK_BYTES 64

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

static const uint32_t sha256_constants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

/* Return whether this CPU has the SHA instructions, and SSE4.1 and SSSE3, which move the words into their places. */
static int sha256_is_supported(void)
{
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_SSE4_1) || !(c & bit_SSSE3))
        return 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & (1u << 29));
}

/* Add `count` blocks of 64 bytes to a state: the words A to H, as FIPS 180-4 calls them. */
__attribute__((target("sha,sse4.1"))) static void sha256_add_blocks(uint32_t *state, const uint8_t *data, size_t count)
{
    const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    const __m128i cdab = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)state), 0xb1);
    const __m128i efgh = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)(state + 4)), 0x1b);
    __m128i abef = _mm_alignr_epi8(cdab, efgh, 8); /* the two halves that the instructions take */
    __m128i cdgh = _mm_blend_epi16(efgh, cdab, 0xf0);
    for (; count; count--, data += SHA256_BLOCK_BYTES) {
        const __m128i abef_before = abef, cdgh_before = cdgh;
        __m128i words[4]; /* the last 16 words of the message schedule */
        for (int i = 0; i < 4; i++)
            words[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(data + 16 * i)), big_endian);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) { /* four rounds */
            const __m128i constants = _mm_loadu_si128((const __m128i *)(sha256_constants + 4 * i));
            const __m128i added = _mm_add_epi32(words[i & 3], constants);
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, added);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(added, 0x0e));
            if (i < 12) { /* the words of round i + 16 replace those of round i */
                const __m128i last = words[(i + 3) & 3];
                const __m128i seven_before = _mm_alignr_epi8(last, words[(i + 2) & 3], 4);
                const __m128i sum = _mm_sha256msg1_epu32(words[i & 3], words[(i + 1) & 3]);
                words[i & 3] = _mm_sha256msg2_epu32(_mm_add_epi32(sum, seven_before), last);
            }
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    const __m128i feba = _mm_shuffle_epi32(abef, 0x1b), dchg = _mm_shuffle_epi32(cdgh, 0xb1);
    _mm_storeu_si128((__m128i *)state, _mm_blend_epi16(feba, dchg, 0xf0));
    _mm_storeu_si128((__m128i *)(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}

#else

static int sha256_is_supported(void) { return 0; }

static void sha256_add_blocks(uint32_t *state, const uint8_t *data, size_t count)
{
    (void)state, (void)data, (void)count;
}

#endif
#endif
