/* What the stand-ins for CANN's libraries share; types are named as in CANN's headers. */
#include <stdbool.h>
#include <stdint.h>

typedef void aclTensor, aclTensorList, aclIntArray, aclScalar, aclOpExecutor;
typedef void *aclrtStream;

void stub_say(const char *format, ...);
void stub_operand(const char *name, const void *operand);
int stub_first(const char *, uint64_t, uint64_t *, aclOpExecutor **);
int stub_second(const char *, void *, uint64_t, aclOpExecutor *, aclrtStream);

#define OPERAND(name) stub_operand(#name, name);
#define NUMBER(name) stub_say("  " #name " = %lld\n", (long long)name);
#define REAL(name) stub_say("  " #name " = %g\n", name);
#define TEXT(name) stub_say("  " #name " = '%s'\n", name);
#define FIRST(name, size) return stub_first(#name "GetWorkspaceSize", size, workspaceSize, executor);

/* Both phases of an operation; the body that follows is that of the first. */
#define PHASES(name, ...)                                                                        \
  int name(void *workspace, uint64_t size, aclOpExecutor *executor, aclrtStream stream) {        \
    return stub_second(#name, workspace, size, executor, stream);                                \
  }                                                                                              \
  int name##GetWorkspaceSize(__VA_ARGS__, uint64_t *workspaceSize, aclOpExecutor **executor)
