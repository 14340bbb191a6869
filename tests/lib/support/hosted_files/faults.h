/* What an operator does if the first value of its input is the number of a fault.
 *
 * If WRITES is defined, loading the library writes a file of that name.
 */

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

enum { ABORT = 1001, NULL_POINTER, ENDLESS, UNCHECKED_10_GIB, CHECKED_10_GIB, STATUS };

static void touch(volatile char* bytes, size_t size) {
  for (size_t i = 0; i < size; i += 4096) bytes[i] = 1;
}

static const char* take_10_gib(void) {
  for (int i = 0; i < 160; ++i) {
    char* part = (char*)malloc((size_t)64 << 20);
    if (part == NULL) return "failed to allocate memory";
    touch(part, (size_t)64 << 20);
  }
  return NULL;
}

/* Fails, or returns the text of an error or NULL. */
static const char* fail(int fault) {
  static volatile int is_endless = 1;
  static int* volatile nowhere = NULL;
  if (fault == ABORT) abort();
  if (fault == NULL_POINTER) *nowhere = 1;
  if (fault == ENDLESS) while (is_endless) {}
  if (fault == UNCHECKED_10_GIB) touch((char*)malloc((size_t)10 << 30), (size_t)10 << 30);
  if (fault == CHECKED_10_GIB) return take_10_gib();
  return fault == STATUS ? "as the test wants" : NULL;
}

#ifdef WRITES
__attribute__((constructor)) static void write_file(void) { fclose(fopen(WRITES, "w")); }
#endif
