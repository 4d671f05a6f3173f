// scale * x + 1: the smallest handler there is, for a test of the transport.

#include <cstdint>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

static ffi::Error affine(ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y, float scale) {
  if (x.element_type() != ffi::F32) {
    return ffi::Error::InvalidArgument("affine takes float32");
  }
  const float* in = x.typed_data<float>();
  float* out = y->typed_data<float>();
  for (int64_t i = 0; i < int64_t(x.element_count()); ++i) out[i] = scale * in[i] + 1;
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(deepinfer_test_affine, affine,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("scale"));
