/* A library of custom operators for ONNX Runtime: Faulty(x) is x + 1, unless the first value of x is a fault's number.
 *
 * The package of ONNX Runtime has no headers, so this declares what it uses of the binary interface: the first entry of
 * OrtApiBase, entries of OrtApi by their number, which never changes, and the struct OrtCustomOp of version 17.
 */

#include <stddef.h>
#include <stdint.h>

#include "faults.h"

typedef void* Status;

typedef struct {
  const void* const* (*get_api)(uint32_t version);
  const char* (*get_version)(void);
} ApiBase;

enum { VERSION = 17, FLOAT = 1, FAIL = 1 };
enum {
  CREATE_STATUS = 0,
  CREATE_CUSTOM_OP_DOMAIN = 26,
  CUSTOM_OP_DOMAIN_ADD = 27,
  ADD_CUSTOM_OP_DOMAIN = 28,
  GET_TENSOR_MUTABLE_DATA = 51,
  KERNEL_CONTEXT_GET_INPUT = 90,
  KERNEL_CONTEXT_GET_OUTPUT = 91,
};

typedef struct CustomOp {
  uint32_t version;
  void* (*create_kernel)(const struct CustomOp*, const void* api, const void* info);
  const char* (*get_name)(const struct CustomOp*);
  const char* (*get_provider)(const struct CustomOp*);
  int (*get_input_type)(const struct CustomOp*, size_t);
  size_t (*get_input_count)(const struct CustomOp*);
  int (*get_output_type)(const struct CustomOp*, size_t);
  size_t (*get_output_count)(const struct CustomOp*);
  void (*compute)(void* kernel, void* context);
  void (*destroy)(void* kernel);
  int (*get_input_characteristic)(const struct CustomOp*, size_t);
  int (*get_output_characteristic)(const struct CustomOp*, size_t);
  int (*get_input_memory_type)(const struct CustomOp*, size_t);
  int (*get_variadic[4])(const struct CustomOp*);
  Status (*create_kernel_v2)(const struct CustomOp*, const void* api, const void* info, void** kernel);
  Status (*compute_v2)(void* kernel, void* context);
  void* not_used[16];
} CustomOp;

static const void* const* api;

static const char* name(const CustomOp* op) { return "Faulty"; }
static const char* provider(const CustomOp* op) { return NULL; }
static int float_type(const CustomOp* op, size_t index) { return FLOAT; }
static size_t one(const CustomOp* op) { return 1; }
static int zero(const CustomOp* op, size_t index) { return 0; }
static void destroy(void* kernel) {}

static Status create(const CustomOp* op, const void* given, const void* info, void** kernel) {
  *kernel = (void*)op;
  return NULL;
}

static Status status(const char* text) {
  return ((Status(*)(int, const char*))api[CREATE_STATUS])(FAIL, text);
}

static float* data(Status value) {
  void* found = NULL;
  ((Status(*)(void*, void**))api[GET_TENSOR_MUTABLE_DATA])(value, &found);
  return found;
}

static Status compute(void* kernel, void* context) {
  static const int64_t shape[] = {4};
  void *x = NULL, *y = NULL;
  ((Status(*)(void*, size_t, void**))api[KERNEL_CONTEXT_GET_INPUT])(context, 0, &x);
  ((Status(*)(void*, size_t, const int64_t*, size_t, void**))api[KERNEL_CONTEXT_GET_OUTPUT])(context, 0, shape, 1, &y);
  const char* text = fail((int)data(x)[0]);
  if (text != NULL) return status(text);
  for (int i = 0; i < 4; ++i) data(y)[i] = data(x)[i] + 1;
  return NULL;
}

static const CustomOp faulty = {
    .version = VERSION,
    .get_name = name,
    .get_provider = provider,
    .get_input_type = float_type,
    .get_input_count = one,
    .get_output_type = float_type,
    .get_output_count = one,
    .destroy = destroy,
    .get_input_characteristic = zero,
    .get_output_characteristic = zero,
    .get_input_memory_type = zero,
    .create_kernel_v2 = create,
    .compute_v2 = compute,
};

Status RegisterCustomOps(void* options, const ApiBase* base) {
  void* domain = NULL;
  api = base->get_api(VERSION);
  ((Status(*)(const char*, void**))api[CREATE_CUSTOM_OP_DOMAIN])("faulty", &domain);
  ((Status(*)(void*, const CustomOp*))api[CUSTOM_OP_DOMAIN_ADD])(domain, &faulty);
  return ((Status(*)(void*, void*))api[ADD_CUSTOM_OP_DOMAIN])(options, domain);
}
