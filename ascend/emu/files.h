// Operands of a kernel from files, for programs without XLA.

#pragma once

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <list>

#include "core.h"

namespace emu {

class Files {
 public:
  Arrays arrays;

  void operand(std::vector<int64_t> shape, const char* path) {
    std::ifstream file(path, std::ios::binary);
    held_.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    append(std::move(shape), false);
  }
  void result(std::vector<int64_t> shape, size_t width) {
    size_t bytes = width;
    for (int64_t size : shape) bytes *= size_t(size);
    held_.emplace_back(bytes);
    append(std::move(shape), true);
  }

 private:
  void append(std::vector<int64_t> shape, bool written) {
    arrays.memory.push_back({held_.back().data(), held_.back().size(), written});
    arrays.shapes.push_back(std::move(shape));
  }

  std::list<std::vector<unsigned char>> held_;
};

}  // namespace emu
