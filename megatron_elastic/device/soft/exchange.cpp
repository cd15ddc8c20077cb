// softccl's transport: members of a group copy through a file that all have mapped, inside kernels of a stream.
#include <ATen/core/Tensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <torch/library.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <ctime>

#include "runtime.h"

namespace soft {
namespace {

constexpr int64_t kSlot = int64_t{1} << 20; // bytes of a member's contribution to one round
constexpr long kLook = 10'000'000; // ns between looks at what no peer announces

enum class Kind : int64_t { all_reduce, reduce_scatter, all_gather, all_to_all, broadcast, barrier, reduce };
enum class Reduce : int64_t { sum, product, minimum, maximum };

struct alignas(64) Member {
  std::atomic<uint32_t> posted, taken; // rounds that it has contributed to, and that it has read
};
struct Header { // of a contribution; equal for all members of a round
  int64_t kind, bytes;
  bool operator==(const Header&) const = default;
};

struct Exchange {
  int64_t rank, size;
  Clock::duration patience; // for one round
  char* base;
  uint32_t round = 0; // of the stream's thread alone
  std::atomic<bool> aborted{false};
  std::mutex mutex;
  std::string error; // guarded by mutex

  Member& member(int64_t peer) const {
    return reinterpret_cast<Member*>(base)[peer];
  }
  char* slot(int64_t peer) const {
    return base + size * sizeof(Member) + peer * (kSlot + sizeof(Header));
  }
  static int64_t bytes(int64_t size) {
    return size * static_cast<int64_t>(sizeof(Member) + sizeof(Header) + kSlot);
  }
  void stop(const std::string& why) {
    std::lock_guard lock(mutex);
    if (!aborted.exchange(true)) {
      error = why;
    }
  }
};

std::mutex exchanges_mutex;
std::map<int64_t, std::shared_ptr<Exchange>>& exchanges() {
  static auto& all = *new std::map<int64_t, std::shared_ptr<Exchange>>;
  return all;
}

std::shared_ptr<Exchange> exchange_at(int64_t id) {
  std::lock_guard lock(exchanges_mutex);
  const auto found = exchanges().find(id);
  TORCH_CHECK(found != exchanges().end(), "softccl: this communicator has been closed");
  return found->second;
}

void futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* limit) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, limit, nullptr, 0);
}

void announce(std::atomic<uint32_t>& word, uint32_t value) {
  word.store(value, std::memory_order_release);
  futex(word, FUTEX_WAKE, INT_MAX, nullptr);
}

// Until a peer's word has come to `value`. False if the exchange was aborted, took too long, or the device failed.
bool await(Exchange& exchange, std::atomic<uint32_t>& word, uint32_t value, int device) {
  const timespec limit{0, kLook};
  const auto deadline = Clock::now() + exchange.patience;
  while (true) {
    if (exchange.aborted.load() || failed(device)) {
      return false;
    }
    const auto now = word.load(std::memory_order_acquire);
    if (static_cast<int32_t>(now - value) >= 0) {
      return true;
    }
    if (Clock::now() > deadline) {
      exchange.stop("member " + std::to_string(exchange.rank) + " has waited for another longer than the limit");
      return false;
    }
    futex(word, FUTEX_WAIT, now, &limit);
  }
}

// One round: everybody contributes, then everybody reads.
bool exchange_once(Exchange& exchange, int device, const Header& header, const std::function<void(char*)>& contribute,
    const std::function<void()>& read) {
  const auto round = ++exchange.round;
  for (int64_t peer = 0; peer < exchange.size; peer++) {
    if (!await(exchange, exchange.member(peer).taken, round - 1, device)) {
      return false;
    }
  }
  char* mine = exchange.slot(exchange.rank);
  std::memcpy(mine, &header, sizeof header);
  contribute(mine + sizeof header);
  announce(exchange.member(exchange.rank).posted, round);
  for (int64_t peer = 0; peer < exchange.size; peer++) {
    if (!await(exchange, exchange.member(peer).posted, round, device)) {
      return false;
    }
    Header theirs;
    std::memcpy(&theirs, exchange.slot(peer), sizeof theirs);
    if (theirs != header) {
      exchange.stop("member " + std::to_string(exchange.rank) + " is in operation " + std::to_string(header.kind) + " of " +
          std::to_string(header.bytes) + " bytes, member " + std::to_string(peer) + " in operation " +
          std::to_string(theirs.kind) + " of " + std::to_string(theirs.bytes));
      return false;
    }
  }
  read();
  announce(exchange.member(exchange.rank).taken, round);
  return true;
}

void reduce_into(const at::Tensor& sum, const at::Tensor& other, Reduce how) {
  switch (how) {
    case Reduce::sum:
      sum.add_(other);
      break;
    case Reduce::product:
      sum.mul_(other);
      break;
    case Reduce::minimum:
      sum.copy_(sum.minimum(other));
      break;
    case Reduce::maximum:
      sum.copy_(sum.maximum(other));
      break;
  }
}

// A kernel. `input` is cut into as many parts as the operation sends to different members; each round moves as much of
// every part as fits a slot. Sums are taken in the order of the members.
bool collective(Exchange& exchange, int device, Kind kind, Reduce how, int64_t root, const at::Tensor& input,
    const at::Tensor& output) {
  const bool parted = kind == Kind::reduce_scatter || kind == Kind::all_to_all;
  const bool reduces = kind == Kind::all_reduce || kind == Kind::reduce_scatter || kind == Kind::reduce;
  const int64_t parts = parted ? exchange.size : 1, width = input.itemsize();
  const int64_t whole = input.numel() / parts, most = std::max<int64_t>(1, kSlot / (parts * width));
  const auto* from = static_cast<const char*>(input.data_ptr());
  auto* to = static_cast<char*>(output.data_ptr());
  for (int64_t begin = 0; begin == 0 || begin < whole; begin += most) {
    const int64_t count = std::min(most, whole - begin), bytes = count * width;
    const auto part_of = [&](int64_t peer) {
      return exchange.slot(peer) + sizeof(Header) + (parted ? exchange.rank * bytes : 0);
    };
    const auto contribute = [&](char* slot) {
      for (int64_t part = 0; bytes > 0 && part < parts && (kind != Kind::broadcast || exchange.rank == root); part++) {
        std::memcpy(slot + part * bytes, from + (part * whole + begin) * width, bytes);
      }
    };
    const auto read = [&] {
      if (bytes == 0 || (kind == Kind::reduce && exchange.rank != root)) {
        return;
      }
      if (reduces) {
        const auto sum = at::from_blob(to + begin * width, {count}, output.options());
        sum.copy_(at::from_blob(part_of(0), {count}, output.options()));
        for (int64_t peer = 1; peer < exchange.size; peer++) {
          reduce_into(sum, at::from_blob(part_of(peer), {count}, output.options()), how);
        }
      } else if (kind == Kind::broadcast) {
        std::memcpy(to + begin * width, part_of(root), bytes);
      } else {
        for (int64_t peer = 0; peer < exchange.size; peer++) {
          std::memcpy(to + (peer * whole + begin) * width, part_of(peer), bytes);
        }
      }
    };
    if (!exchange_once(exchange, device, {static_cast<int64_t>(kind), bytes}, contribute, read)) {
      return false;
    }
  }
  return true;
}

int64_t open_exchange(int64_t file, int64_t rank, int64_t size, double timeout) {
  TORCH_CHECK(size > 0 && rank >= 0 && rank < size, "softccl: member ", rank, " of ", size);
  const auto bytes = Exchange::bytes(size);
  TORCH_CHECK(ftruncate(static_cast<int>(file), bytes) == 0, "softccl: no ", bytes, " bytes of shared memory: ",
      std::strerror(errno));
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, static_cast<int>(file), 0);
  TORCH_CHECK(base != MAP_FAILED, "softccl: cannot map ", bytes, " bytes: ", std::strerror(errno));
  auto made = std::shared_ptr<Exchange>(new Exchange, [](Exchange* it) {
    munmap(it->base, Exchange::bytes(it->size));
    delete it;
  });
  made->rank = rank;
  made->size = size;
  made->patience = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout));
  made->base = static_cast<char*>(base);
  static int64_t last = 0;
  std::lock_guard lock(exchanges_mutex);
  exchanges()[++last] = made;
  return last;
}

// Enqueue on the current stream. Both tensors are contiguous, on the current device.
void run_exchange(int64_t id, int64_t kind, int64_t how, int64_t root, const at::Tensor& input, const at::Tensor& output) {
  const auto exchange = exchange_at(id);
  const int device = current_device();
  for (const auto& tensor : {input, output}) {
    TORCH_CHECK(tensor.numel() == 0 || device_of(tensor.data_ptr()) == device, "softccl: a tensor on ", tensor.device(),
        " was given while the current device is soft:", device, "; is a device guard missing?");
    TORCH_CHECK(tensor.is_contiguous(), "softccl: tensors must be contiguous");
  }
  const auto plain = [](const at::Tensor& tensor) {
    return tensor.numel() == 0 ? at::empty({0}, tensor.options().device(at::kCPU))
                               : at::from_blob(shadow(tensor.data_ptr()), {tensor.numel()}, tensor.options().device(at::kCPU));
  };
  launch(device, current_stream(device), [=, from = plain(input), to = plain(output)] {
    const at::AutoDispatchBelowADInplaceOrView below;
    if (!collective(*exchange, device, static_cast<Kind>(kind), static_cast<Reduce>(how), root, from, to)) {
      poison(to.data_ptr(), to.nbytes()); // whatever was there, nobody shall take it for a result
    }
  });
}

TORCH_LIBRARY_FRAGMENT(soft, m) {
  m.def("exchange_open(int file, int rank, int size, float timeout) -> int", open_exchange);
  m.def("exchange_run(int id, int kind, int how, int root, Tensor input, Tensor(a!) output) -> ()",
      [](int64_t id, int64_t kind, int64_t how, int64_t root, const at::Tensor& input, at::Tensor output) {
        run_exchange(id, kind, how, root, input, output);
      });
  m.def("exchange_abort(int id, str why) -> ()", [](int64_t id, const std::string& why) { exchange_at(id)->stop(why); });
  m.def("exchange_error(int id) -> str", [](int64_t id) {
    const auto exchange = exchange_at(id);
    std::lock_guard lock(exchange->mutex);
    return exchange->error;
  });
  m.def("exchange_close(int id) -> ()", [](int64_t id) {
    std::lock_guard lock(exchanges_mutex);
    exchanges().erase(id);
  });
}

} // namespace
} // namespace soft
