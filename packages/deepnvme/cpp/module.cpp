// The Python face of the engine: conversions, lifetimes, and where the GIL is released. No logic of its own.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "aligned_memory.hpp"
#include "backend.hpp"
#include "bounce_pool.hpp"
#include "crc32c.hpp"
#include "dlpack.hpp"
#include "engine.hpp"
#include "file.hpp"
#include "io_error.hpp"
#include "probe.hpp"
#include "request.hpp"

namespace py = pybind11;
using namespace pybind11::literals;

namespace deepnvme {
namespace {

// Signals are looked for this often while a thread waits: Python runs handlers in the main thread only, and another
// thread may have received the signal. One that arrives here ends the wait at once.
constexpr auto kSignalPeriod = std::chrono::milliseconds(50);

using ErrorTuple = std::tuple<int, std::string, std::string, uint64_t, uint64_t, uint64_t, std::string>;

// What errors.py makes an OSError of, or None.
std::optional<ErrorTuple> error_tuple(const IoError& e) {
  if (!e) return std::nullopt;
  return ErrorTuple{e.code, e.operation, e.path, e.offset, e.nbytes, e.moved, e.note};
}

// -- waiting --------------------------------------------------------------------------------------------------------

// Called when a signal handler raised (KeyboardInterrupt): the exception leaves only when nothing is under way any
// more, so that no buffer is written into behind a program that believes it has stopped. A second one leaves at once.
[[noreturn]] void drain_and_raise(Engine& engine) {
  py::error_already_set interrupt;
  for (;;) {
    bool idle;
    {
      py::gil_scoped_release released;
      idle = engine.wait_idle(kSignalPeriod);
    }
    if (idle) throw interrupt;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
}

bool wait(Engine& engine, const Request& request, std::optional<double> timeout) {
  using Clock = std::chrono::steady_clock;
  if (request.completion.is_set()) return true;
  const auto deadline =
      timeout ? Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(*timeout))
              : Clock::time_point::max();
  for (;;) {
    const auto now = Clock::now();
    if (now >= deadline) return request.completion.is_set();
    bool set;
    {
      py::gil_scoped_release released;
      set = request.completion.wait_for(std::min<std::chrono::nanoseconds>(deadline - now, kSignalPeriod));
    }
    if (set) return true;
    if (PyErr_CheckSignals() != 0) drain_and_raise(engine);
  }
}

// Joining the workers waits for the drive: other Python threads run meanwhile.
struct DeleteWithoutGil {
  void operator()(Engine* engine) const {
    if (PyGILState_Check()) {
      py::gil_scoped_release released;
      delete engine;
    } else {
      delete engine;
    }
  }
};

// -- host memory ------------------------------------------------------------------------------------------------------

// A typed window into aligned memory. Python's Buffer derives from it, so that the buffer protocol works on every
// Python version.
struct TypedMemory {
  std::shared_ptr<AlignedMemory> memory;
  size_t start;
  std::vector<py::ssize_t> shape;
  py::ssize_t itemsize;
  std::string format;  // struct-style
  DLDataType dtype;
  bool released = false;  // given back to its pool: no new view may be taken

  TypedMemory(std::shared_ptr<AlignedMemory> memory, size_t start, std::vector<py::ssize_t> shape,
              py::ssize_t itemsize, std::string format, uint8_t dlpack_code)
      : memory(std::move(memory)),
        start(start),
        shape(std::move(shape)),
        itemsize(itemsize),
        format(std::move(format)),
        dtype{dlpack_code, static_cast<uint8_t>(8 * itemsize), 1} {
    if (start + nbytes() > this->memory->nbytes()) throw py::value_error("the window exceeds the memory");
  }

  size_t nbytes() const {
    size_t n = static_cast<size_t>(itemsize);
    for (py::ssize_t extent : shape) n *= static_cast<size_t>(extent);
    return n;
  }
  std::byte* data() const { return memory->data() + start; }
  std::vector<py::ssize_t> byte_strides() const {
    std::vector<py::ssize_t> strides(shape.size());
    py::ssize_t stride = itemsize;
    for (size_t i = shape.size(); i-- > 0; stride *= shape[i]) strides[i] = stride;
    return strides;
  }
};

// A DLPack tensor that keeps its Python owner alive.
struct Exported {
  DLManagedTensor managed;
  std::vector<int64_t> shape;
  PyObject* owner;
};

void delete_exported(DLManagedTensor* managed) {
  auto* exported = static_cast<Exported*>(managed->manager_ctx);
  // A consumer may let go from a thread of its own, or after the interpreter has ended; then the owner is gone too.
  if (Py_IsInitialized()) {
    py::gil_scoped_acquire acquired;
    Py_DECREF(exported->owner);
  }
  delete exported;
}

py::capsule to_dlpack(py::object self) {
  const auto& typed = self.cast<const TypedMemory&>();
  auto* exported = new Exported{{}, {typed.shape.begin(), typed.shape.end()}, self.inc_ref().ptr()};
  exported->managed.dl_tensor = {typed.data(),
                                 {kDLCPU, 0},
                                 static_cast<int32_t>(exported->shape.size()),
                                 typed.dtype,
                                 exported->shape.data(),
                                 nullptr,  // row-major
                                 0};
  exported->managed.manager_ctx = exported;
  exported->managed.deleter = delete_exported;
  return py::capsule(&exported->managed, "dltensor", [](PyObject* capsule) {
    // A consumer renames the capsule and then owns the tensor.
    if (PyCapsule_IsValid(capsule, "dltensor")) {
      delete_exported(static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor")));
    }
  });
}

// (address, shape, byte strides, itemsize, read-only) of a capsule, which stays unconsumed and must be kept alive.
py::tuple describe_dlpack(const py::capsule& capsule) {
  const DLTensor* tensor;
  bool read_only = false;
  if (std::strcmp(capsule.name(), "dltensor_versioned") == 0) {
    const auto* managed = capsule.get_pointer<DLManagedTensorVersioned>();
    tensor = &managed->dl_tensor;
    read_only = managed->flags & kDLReadOnly;
  } else {
    tensor = &capsule.get_pointer<DLManagedTensor>()->dl_tensor;
  }
  const int64_t itemsize = (tensor->dtype.bits * tensor->dtype.lanes + 7) / 8;
  const std::vector<int64_t> shape(tensor->shape, tensor->shape + tensor->ndim);
  std::vector<int64_t> strides(shape.size());
  int64_t dense = 1;
  for (size_t i = shape.size(); i-- > 0; dense *= shape[i]) {
    strides[i] = (tensor->strides ? tensor->strides[i] : dense) * itemsize;
  }
  return py::make_tuple(reinterpret_cast<uintptr_t>(tensor->data) + tensor->byte_offset, py::tuple(py::cast(shape)),
                        py::tuple(py::cast(strides)), itemsize, read_only);
}

// The same for an object with the buffer protocol, which must be kept from changing its size (by a memoryview).
py::tuple describe_buffer(const py::buffer& buffer) {
  const py::buffer_info info = buffer.request();
  return py::make_tuple(reinterpret_cast<uintptr_t>(info.ptr), py::tuple(py::cast(info.shape)),
                        py::tuple(py::cast(info.strides)), info.itemsize, info.readonly);
}

// -- files ------------------------------------------------------------------------------------------------------------

std::shared_ptr<File> make_file(const std::vector<std::tuple<int, int, std::string>>& descriptors, uint64_t stripe,
                                size_t memory_alignment, size_t offset_alignment) {
  std::vector<FileMember> members;
  for (const auto& [cached, direct, path] : descriptors) {
    members.push_back({UniqueFd(cached), UniqueFd(direct), path});
  }
  return std::make_shared<File>(std::move(members), stripe, Alignment{memory_alignment, offset_alignment});
}

}  // namespace
}  // namespace deepnvme

PYBIND11_MODULE(_core, m) {
  using namespace deepnvme;
  m.doc() = "The compiled part of deepnvme; see _core.pyi.";

  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const SystemError& e) {
      // From arguments, so that Python picks the subclass (PermissionError, ...) that belongs to the errno.
      PyErr_SetObject(PyExc_OSError, py::make_tuple(e.code(), e.what()).ptr());
    }
  });

  py::class_<AlignedMemory, std::shared_ptr<AlignedMemory>>(m, "AlignedMemory")
      .def(py::init<size_t>(), "nbytes"_a)
      .def_property_readonly("nbytes", &AlignedMemory::nbytes)
      .def_property_readonly("huge_pages", &AlignedMemory::huge_pages)
      .def("lock", &AlignedMemory::lock, py::call_guard<py::gil_scoped_release>());

  py::class_<TypedMemory>(m, "TypedMemory", py::buffer_protocol(), py::dynamic_attr())
      .def(py::init<std::shared_ptr<AlignedMemory>, size_t, std::vector<py::ssize_t>, py::ssize_t, std::string, uint8_t>(),
           "memory"_a, "start"_a, "shape"_a, "itemsize"_a, "format"_a, "dlpack_code"_a)
      .def_property_readonly("address", [](const TypedMemory& t) { return reinterpret_cast<uintptr_t>(t.data()); })
      .def_property_readonly("nbytes", &TypedMemory::nbytes)
      .def_property_readonly("itemsize", [](const TypedMemory& t) { return t.itemsize; })
      .def_property_readonly("shape", [](const TypedMemory& t) { return py::tuple(py::cast(t.shape)); })
      .def_property_readonly("huge_pages", [](const TypedMemory& t) { return t.memory->huge_pages(); })
      .def_readwrite("released", &TypedMemory::released)
      .def("to_dlpack", &to_dlpack)
      .def_buffer([](TypedMemory& t) {
        if (t.released) throw py::buffer_error("the Buffer was given back to its Pool");
        return py::buffer_info(t.data(), t.itemsize, t.format, static_cast<py::ssize_t>(t.shape.size()), t.shape,
                               t.byte_strides());
      });

  m.def("describe_dlpack", &describe_dlpack);
  m.def("describe_buffer", &describe_buffer);

  py::class_<File, std::shared_ptr<File>>(m, "File")
      .def(py::init(&make_file), "descriptors"_a, "stripe"_a, "memory_alignment"_a, "offset_alignment"_a)
      .def_property_readonly("direct", &File::direct)
      .def_property_readonly("path", &File::path)
      .def("filenos",
           [](const File& file) {
             std::vector<int> fds;
             for (const FileMember& member : file.members()) fds.push_back(member.cached.get());
             return fds;
           })
      .def("reserve",
           [](File& file, uint64_t nbytes) {
             py::gil_scoped_release released;
             return error_tuple(file.reserve(nbytes));
           })
      .def("sync", [](const File& file) {
        py::gil_scoped_release released;
        return error_tuple(file.sync());
      });

  py::class_<Request, std::shared_ptr<Request>>(m, "Request")
      .def_readonly("id", &Request::id)
      .def_property_readonly("nbytes", [](const Request& r) { return r.transfer.nbytes; })
      .def("done", [](const Request& r) { return r.completion.is_set(); })
      .def("failed", &Request::failed)
      .def("cancelled", &Request::was_cancelled)
      .def("moved", &Request::moved)
      .def("crc", &Request::crc)
      .def("error", [](const Request& r) { return error_tuple(r.error()); })
      .def("want_notification", &Request::want_notification);

  py::class_<Engine, std::shared_ptr<Engine>>(m, "Engine")
      .def(py::init([](const std::string& backend, unsigned depth, size_t block, unsigned threads, size_t bounce) {
             const EngineSettings settings{backend, depth, block, threads, bounce};
             return std::shared_ptr<Engine>(new Engine(settings), DeleteWithoutGil{});
           }),
           "backend"_a, "depth"_a, "block"_a, "threads"_a, "bounce"_a)
      .def(
          "submit",
          [](Engine& engine, bool writes, std::shared_ptr<File> file, uintptr_t address, size_t nbytes,
             uint64_t offset, bool checksum,
             const std::vector<std::pair<std::shared_ptr<Request>, bool>>& after) {
            std::vector<Engine::Order> orders;
            for (const auto& [earlier, must_succeed] : after) orders.push_back({earlier, must_succeed});
            py::gil_scoped_release released;
            return engine.submit(writes ? Direction::write : Direction::read, std::move(file), address, nbytes,
                                 offset, checksum, orders);
          },
          "writes"_a, "file"_a, "address"_a, "nbytes"_a, "offset"_a, "checksum"_a = false,
          "after"_a = std::vector<std::pair<std::shared_ptr<Request>, bool>>{})
      .def("wait", &wait, "request"_a, "timeout"_a)
      .def("cancel", &Engine::cancel)
      .def("take_finished", &Engine::take_finished)
      .def("wait_notifications", &Engine::wait_notifications, py::call_guard<py::gil_scoped_release>())
      .def("under_way", &Engine::under_way)
      .def("close", &Engine::close, py::call_guard<py::gil_scoped_release>())
      .def("latencies",
           [](const Engine& engine, bool writes) {
             return engine.latencies(writes ? Direction::write : Direction::read).counts();
           })
      .def("counters", [](const Engine& engine) {
        const Counters& c = engine.counters();
        return py::dict("requests"_a = c.requests.load(), "finished"_a = c.finished.load(),
                        "failed"_a = c.failed.load(), "cancelled"_a = c.cancelled.load(),
                        "bytes_read"_a = c.bytes_read.load(), "bytes_written"_a = c.bytes_written.load(),
                        "bounced_bytes"_a = c.bounced_bytes.load(), "cached_bytes"_a = c.cached_bytes.load(),
                        "pieces"_a = c.pieces.load(), "resumed"_a = c.resumed.load());
      });

  m.def("backend_names", [] {
    std::vector<std::string> names;
    for (const BackendKind& kind : backend_kinds()) names.emplace_back(kind.name);
    return names;
  });
  m.def("try_backend", [](const std::string& name) {
    py::gil_scoped_release released;
    backend_kind(name).make({.depth = 1, .threads = 1});
  });
  m.def("direct_alignment", [](int fd) -> std::optional<std::pair<size_t, size_t>> {
    const auto alignment = direct_alignment(fd);
    if (!alignment) return std::nullopt;
    return std::pair{alignment->memory, alignment->offset};
  });

  m.def(
      "crc32c",
      [](uint32_t value, uintptr_t address, size_t nbytes) {
        py::gil_scoped_release released;
        return crc32c(value, reinterpret_cast<const void*>(address), nbytes);
      },
      "value"_a, "address"_a, "nbytes"_a);
  m.def("bounce_pages", [](size_t nbytes) {
    BouncePool pool(nbytes);
    return pool.take(1) ? pool.pages() : "no memory";
  });
  m.def("crc32c_kernels", [] {
    std::vector<std::string> names;
    for (const Crc32cKernel& kernel : crc32c_kernels()) names.emplace_back(kernel.name);
    return names;
  });
  m.def("crc32c_by", [](const std::string& name, uint32_t value, uintptr_t address, size_t nbytes) {
    for (const Crc32cKernel& kernel : crc32c_kernels()) {
      if (name == kernel.name) return ~kernel.raw(~value, reinterpret_cast<const void*>(address), nbytes);
    }
    throw py::value_error("no crc32c kernel " + name + " on this CPU");
  });
}
