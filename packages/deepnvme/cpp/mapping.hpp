// A memory mapping that unmaps itself.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <utility>

namespace deepnvme {

class Mapping {
 public:
  Mapping() = default;
  // Takes over what mmap returned; `address` may be MAP_FAILED, which leaves the mapping empty.
  Mapping(void* address, size_t nbytes)
      : address_(address == MAP_FAILED ? nullptr : address), nbytes_(address_ ? nbytes : 0) {}
  Mapping(Mapping&& other) noexcept
      : address_(std::exchange(other.address_, nullptr)), nbytes_(std::exchange(other.nbytes_, 0)) {}
  Mapping& operator=(Mapping&& other) noexcept {
    if (this != &other) {
      unmap();
      address_ = std::exchange(other.address_, nullptr);
      nbytes_ = std::exchange(other.nbytes_, 0);
    }
    return *this;
  }
  ~Mapping() { unmap(); }

  std::byte* data() const { return static_cast<std::byte*>(address_); }
  size_t nbytes() const { return nbytes_; }
  explicit operator bool() const { return address_ != nullptr; }

  template <class T>
  T* at(size_t byte_offset) const {
    return reinterpret_cast<T*>(data() + byte_offset);
  }

 private:
  void unmap() noexcept {
    if (address_) ::munmap(address_, nbytes_);
  }

  void* address_ = nullptr;
  size_t nbytes_ = 0;
};

}  // namespace deepnvme
