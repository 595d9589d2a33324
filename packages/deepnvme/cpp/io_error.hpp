// What went wrong with an I/O, with everything a person needs to find it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace deepnvme {

// Why a request ended. `code` is an errno; 0 means that it did not fail.
struct IoError {
  int code = 0;
  const char* operation = "";  // "read", "write", "reserve"
  std::string path;
  uint64_t offset = 0;  // of the request, in bytes
  size_t nbytes = 0;    // of the request
  size_t moved = 0;     // bytes known to be there when it failed
  std::string note;     // what to try, when something can be said

  explicit operator bool() const { return code != 0; }
};

// A system call that failed outside of any request: setting up a ring, mapping memory. what() ends with the errno's
// own text, and with what to try if that is known.
class SystemError : public std::runtime_error {
 public:
  SystemError(int code, const std::string& text) : std::runtime_error(text + ": " + std::strerror(code)), code_(code) {}
  SystemError(const SystemError& e, const std::string& remedy)
      : std::runtime_error(std::string(e.what()) + ": " + remedy), code_(e.code_) {}
  int code() const { return code_; }

 private:
  int code_;
};

}  // namespace deepnvme
