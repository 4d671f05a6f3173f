/* Stands for CANN's own libraries: descriptors, error messages and aclnnAdd. It keeps a log of what
 * was called, knows which descriptors live, and fails where it is told to. */
#include "base.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAGIC = 0x5AFE, DEAD = 0xDEAD };
typedef struct Made {
  int magic, count;
  char kind, text[240];
  struct Made *members[16];
} Made;

static char log_text[1 << 16];
static char fail_names[160];
static int fail_status, alive, wrong, executors;
static const char *message;

void stub_say(const char *format, ...) {
  size_t used = strlen(log_text);
  va_list values;
  va_start(values, format);
  vsnprintf(log_text + used, sizeof log_text - used, format, values);
  va_end(values);
}

const char *stub_log(void) { return log_text; }
int stub_alive(void) { return alive; }
int stub_wrong(void) { return wrong; }
int stub_executors(void) { return executors; }

void stub_reset(const char *name, int status) {
  log_text[0] = 0;
  alive = wrong = executors = 0;
  snprintf(fail_names, sizeof fail_names, " %s ", name);
  fail_status = status;
  message = NULL;
}

int stub_status(const char *name) {
  char word[80];
  snprintf(word, sizeof word, " %s ", name);
  if (!strstr(fail_names, word)) return 0;
  message = "EZ9999: the stub was told so";
  return fail_status;
}

const char *aclGetRecentErrMsg(void) { return message; }

static Made *made(char kind, const char *name) {
  if (stub_status(name)) return NULL;
  Made *one = calloc(1, sizeof *one);
  one->magic = MAGIC;
  one->kind = kind;
  ++alive;
  return one;
}

/* Memory of what was destroyed stays, so that a second time is seen. */
static int destroy(Made *one, char kind, const char *name) {
  if (one->magic != MAGIC || one->kind != kind) {
    ++wrong;
    return 161002;
  }
  one->magic = DEAD;
  --alive;
  for (int i = 0; i < one->count; ++i) destroy(one->members[i], 't', "member");
  stub_say("%s\n", name);
  return stub_status(name);
}

static void numbers(char *into, const int64_t *values, uint64_t count) {
  strcat(into, "(");
  for (uint64_t i = 0; i < count; ++i)
    sprintf(into + strlen(into), i ? ",%lld" : "%lld", (long long)values[i]);
  strcat(into, ")");
}

aclTensor *aclCreateTensor(const int64_t *shape, uint64_t rank, int dtype, const int64_t *strides,
                           int64_t offset, int format, const int64_t *storage,
                           uint64_t storage_rank, void *data) {
  Made *one = made('t', "aclCreateTensor");
  if (!one) return NULL;
  sprintf(one->text, "tensor %d ", dtype);
  numbers(one->text, shape, rank);
  numbers(one->text, strides, rank);
  sprintf(one->text + strlen(one->text), "+%lld f%d of ", (long long)offset, format);
  numbers(one->text, storage, storage_rank);
  sprintf(one->text + strlen(one->text), " at %p", data);
  return one;
}

aclTensorList *aclCreateTensorList(const aclTensor *const *members, uint64_t count) {
  Made *one = made('l', "aclCreateTensorList");
  if (!one) return NULL;
  one->count = (int)count;
  for (uint64_t i = 0; i < count; ++i) one->members[i] = (Made *)members[i];
  sprintf(one->text, "list of %d", one->count);
  return one;
}

aclIntArray *aclCreateIntArray(const int64_t *values, uint64_t count) {
  Made *one = made('i', "aclCreateIntArray");
  if (one) numbers(strcpy(one->text, "ints ") + 0, values, count);
  return one;
}

aclScalar *aclCreateScalar(void *value, int dtype) {
  Made *one = made('s', "aclCreateScalar");
  if (!one) return NULL;
  if (dtype == 11) sprintf(one->text, "scalar %d %g", dtype, *(double *)value);
  else if (dtype == 9) sprintf(one->text, "scalar %d %lld", dtype, *(long long *)value);
  else sprintf(one->text, "scalar %d %d", dtype, *(unsigned char *)value);
  return one;
}

int aclDestroyTensor(const aclTensor *one) { return destroy((Made *)one, 't', "aclDestroyTensor"); }
int aclDestroyTensorList(const aclTensorList *one) {
  return destroy((Made *)one, 'l', "aclDestroyTensorList");
}
int aclDestroyIntArray(const aclIntArray *one) {
  return destroy((Made *)one, 'i', "aclDestroyIntArray");
}
int aclDestroyScalar(const aclScalar *one) { return destroy((Made *)one, 's', "aclDestroyScalar"); }

int aclDestroyAclOpExecutor(aclOpExecutor *executor) {
  --executors;
  stub_say("aclDestroyAclOpExecutor %s\n", (const char *)executor);
  return stub_status("aclDestroyAclOpExecutor");
}

void stub_operand(const char *name, const void *operand) {
  const Made *one = operand;
  stub_say("  %s = %s\n", name, one ? one->magic == MAGIC ? one->text : "dead" : "null");
  for (int i = 0; one && i < one->count; ++i)
    stub_say("  %s[%d] = %s\n", name, i, one->members[i]->text);
}

int stub_first(const char *name, uint64_t size, uint64_t *workspace, aclOpExecutor **executor) {
  *workspace = size;
  *executor = (aclOpExecutor *)name;
  ++executors;
  return stub_status(name);
}

int stub_second(const char *name, void *workspace, uint64_t size, aclOpExecutor *executor,
                aclrtStream stream) {
  stub_say("%s workspace %s size %llu executor %s stream %p alive %d\n", name,
           workspace ? "given" : "null", (unsigned long long)size, (const char *)executor, stream,
           alive);
  --executors;
  if (workspace) memset(workspace, 0xA5, size);
  return stub_status(name);
}

PHASES(aclnnAdd, const aclTensor *self, const aclTensor *other, const aclScalar *alpha,
       aclTensor *out) {
  stub_say("aclnnAdd\n");
  OPERAND(self) OPERAND(other) OPERAND(alpha) OPERAND(out)
  FIRST(aclnnAdd, 0)
}
