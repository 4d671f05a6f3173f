// A generated kernel as a handler of XLA: operands, results, and a first operand [3] int32 that holds
// the schedule and up to two lines of the generated source that are left out (0: none).

#pragma once

#include "core.h"
#include "xla/ffi/api/ffi.h"

namespace emu {

namespace ffi = xla::ffi;

inline void append(Arrays& arrays, const ffi::AnyBuffer& buffer, bool written) {
  auto* first = static_cast<unsigned char*>(buffer.untyped_data());
  arrays.memory.push_back({first, buffer.size_bytes(), written});
  arrays.shapes.emplace_back(buffer.dimensions().begin(), buffer.dimensions().end());
}

template <typename Kernel>
ffi::Error handle(const char* name, int blocks, ffi::RemainingArgs operands, ffi::RemainingRets results,
                  Kernel kernel) {
  const int32_t* told = operands.get<ffi::AnyBuffer>(0).value().typed_data<int32_t>();
  const Control control{told[0], {told[1], told[2]}};
  Arrays arrays;
  for (size_t i = 1; i < operands.size(); ++i) {
    append(arrays, operands.get<ffi::AnyBuffer>(i).value(), false);
  }
  for (size_t i = 0; i < results.size(); ++i) {
    append(arrays, *results.get<ffi::AnyBuffer>(i).value(), true);
  }
  try {
    launch(arrays, blocks, control, kernel);
  } catch (const Fault& fault) {
    core = nullptr;
    return ffi::Error::Internal(std::string(name) + ": " + fault.what());
  }
  return ffi::Error::Success();
}

}  // namespace emu

// name: of the symbol; form: for messages; the rest: the kernel's call, `at` being its Arrays.
#define EMU_HANDLER(name, form, blocks, ...)                                                      \
  static xla::ffi::Error name##_run(xla::ffi::RemainingArgs operands, xla::ffi::RemainingRets results) { \
    return emu::handle(form, blocks, operands, results,                                           \
                       [](const emu::Arrays& at) { __VA_ARGS__; });                               \
  }                                                                                               \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, name##_run,                                                 \
                                xla::ffi::Ffi::Bind().RemainingArgs().RemainingRets())
