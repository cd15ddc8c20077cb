// The software device itself: memory, streams, marks, faults, counters. Knows nothing of tensors.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <vector>

namespace soft {

using Clock = std::chrono::steady_clock;
using Task = std::function<void()>;

// Codes of AcceleratorError.
enum class Fault : int32_t { none = 0, failed = 1, lost = 2, access = 3 };

// Every figure since the last reset. A synchronisation is a wait of the host for the device.
struct Counters {
  std::atomic<int64_t> launches{0}, synchronisations{0}, to_device{0}, to_host{0}, on_device{0};
};

// A point in a stream: done once all that was queued before it is.
struct Mark {
  int device = 0;
  int64_t stream = 0;
  uint64_t position = 0;
  bool done = false; // guarded by the runtime's mutex
  Clock::time_point when;
};
using MarkPtr = std::shared_ptr<Mark>;

int device_count();
int current_device();
void set_device(int device);
// The calling thread's stream on a device; 0 is the default stream.
int64_t current_stream(int device);
void set_current_stream(int device, int64_t stream);
int64_t new_stream(int device);

// Queue a kernel: counted, not run any more once the device has failed.
void launch(int device, int64_t stream, Task kernel);
// Queue what is no kernel. `always`: it is run on a failed device, too, since somebody waits for it.
void enqueue(int device, int64_t stream, Task task, bool always = false);

MarkPtr mark(int device, int64_t stream);
void wait_in_stream(int device, int64_t stream, const MarkPtr& mark);
bool query(const MarkPtr& mark);
bool query_stream(int device, int64_t stream);
// The host waits; counted. `why` says for what, as in `synchronised_by`.
void synchronize(const MarkPtr& mark, const std::string& why);
void synchronize_stream(int device, int64_t stream, const std::string& why);
void synchronize_device(int device, const std::string& why);

// ---- memory: addresses that tensors carry have no pages; kernels find the bytes at shadow(address) -------------

void* allocate(int device, size_t bytes);
void release(void* address);
void record_stream(void* address, int64_t stream);
// Which device an address belongs to, or -1.
int device_of(const void* address);
void* shadow(const void* address);
// What memory holds that nobody has written: NaN in every floating type, no sensible number in any other.
void poison(void* bytes, size_t size);
void empty_cache(int device);
struct Memory {
  int64_t allocated = 0, reserved = 0, peak_allocated = 0, peak_reserved = 0, limit = 0;
};
Memory memory(int device);
void reset_peaks(int device);
void set_limit(int device, int64_t bytes);

void* allocate_pinned(size_t bytes);
void release_pinned(void* pointer);
bool is_pinned(const void* pointer);

// ---- faults and figures ----------------------------------------------------------------------------------------

// Raise what has become of the device, if it has failed, or of a process that was forked from one that used it.
void check(int device);
void fail(int device, Fault fault, const std::string& message);
bool failed(int device);
// Queue a kernel that never ends, but by the next `abort_kernels`, or with the process.
void hang(int device, int64_t stream);
void abort_kernels(int device);
// Kernels start this long after their launch, unless the host waits for them: reading early then reads garbage surely.
void set_delay(double seconds);
Counters& counters(int device);
std::vector<std::string> synchronised_by(int device);
void reset_counters(int device);
bool initialised();
bool in_bad_fork();

} // namespace soft
