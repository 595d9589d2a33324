// The table of backends, best first, and what helps when one cannot run.

#include <cerrno>
#include <cstring>

#include "backend.hpp"
#include "io_error.hpp"

namespace deepnvme {
namespace {

std::string remedy(const char* name, int code) {
  const bool io_uring = std::strcmp(name, "io_uring") == 0;
  if (code == EPERM || code == EACCES) {
    return std::string("a container profile (seccomp) ") + (io_uring ? "or the sysctl kernel.io_uring_disabled " : "") +
           "forbids it; run the container with a profile that allows " + (io_uring ? "io_uring_setup" : "io_setup") +
           ", for example --security-opt seccomp=PROFILE.json" +
           (io_uring ? ", or set kernel.io_uring_disabled=0" : "");
  }
  if (code == ENOSYS) {
    return io_uring ? "the kernel has no usable io_uring (5.6 or later is needed), or a container profile hides it"
                    : "the kernel was built without AIO, or a container profile hides it";
  }
  if (code == EAGAIN && !io_uring) return "lower queue_depth, or raise the limit: sysctl -w fs.aio-max-nr=1048576";
  if (code == ENOMEM) return "the locked-memory limit is used up; raise it (ulimit -l) or lower queue_depth";
  if (code == EMFILE || code == ENFILE) return "the descriptor limit is reached; raise it (ulimit -n) or close files";
  return "";
}

}  // namespace

const std::vector<BackendKind>& backend_kinds() {
  static const std::vector<BackendKind> kinds = {
      {"io_uring", make_io_uring_backend},
      {"libaio", make_libaio_backend},
      {"threads", make_thread_backend},
  };
  return kinds;
}

const BackendKind& backend_kind(const std::string& name) {
  for (const BackendKind& kind : backend_kinds()) {
    if (name == kind.name) return kind;
  }
  throw SystemError(EINVAL, "unknown backend " + name);
}

std::unique_ptr<Backend> BackendKind::make(const BackendSettings& settings) const try {
  return make_plain(settings);
} catch (const SystemError& e) {
  const std::string help = remedy(name, e.code());
  if (help.empty()) throw;
  throw SystemError(e, help);
}

}  // namespace deepnvme
