#include "runtime.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace soft {
namespace {

constexpr size_t kGrain = 512; // what every allocation is rounded up to, as CUDA's allocator does
constexpr size_t kSegment = size_t{2} << 20; // what is taken from the device at least
constexpr size_t kSpace = size_t{1} << 36; // addresses of a device; memory is used only where it is written
constexpr int64_t kNobody = -1; // stream of what no stream has taken yet

struct Entry {
  Task task;
  Clock::time_point not_before;
  bool always;
};

struct Stream {
  std::deque<Entry> queue;
  uint64_t issued = 0, finished = 0;
  uint64_t demanded = 0; // somebody waits for everything up to here
  std::condition_variable wake;
  bool running = false;
};

struct Block {
  size_t size;
  int64_t stream;
  bool used;
  std::set<int64_t> others; // streams that use it besides its own
};

struct Device {
  char* base = nullptr; // addresses without pages
  char* shadow = nullptr; // the bytes
  std::map<size_t, Block> blocks; // offset -> block, adjacent ones in order; all of the space
  std::set<std::tuple<int64_t, size_t, size_t>> unused; // (stream, size, offset)
  Memory memory;
  std::vector<std::unique_ptr<Stream>> streams;
  std::atomic<Fault> fault{Fault::none};
  std::string message;
  uint64_t aborts = 0;
  Counters counters;
  std::map<std::string, int64_t> synchronised_by;
};

struct Runtime {
  std::mutex mutex; // guards all below, but what is atomic
  std::condition_variable changed;
  bool started = false, forked = false;
  std::vector<std::unique_ptr<Device>> devices;
  std::map<const char*, size_t> pinned;
  Clock::duration delay{0};
  struct sigaction previous {};
};

// Threads of streams outlive static objects.
Runtime& runtime() {
  static Runtime& it = *new Runtime;
  return it;
}

thread_local int the_device = 0;
thread_local std::vector<int64_t> the_streams;

int64_t from_environment(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoll(text);
}

void on_segmentation_fault(int number, siginfo_t* info, void*) {
  const int device = device_of(info->si_addr);
  if (device >= 0) {
    char text[256];
    const auto offset = static_cast<const char*>(info->si_addr) - runtime().devices[device]->base;
    const int length = std::snprintf(text, sizeof text,
        "host access to memory of device soft:%d (address %p, byte %td of the device): a raw pointer of a tensor on the "
        "device was read or written by the host; copy the tensor to the CPU first\n", device, info->si_addr, offset);
    [[maybe_unused]] const auto written = write(STDERR_FILENO, text, std::min<size_t>(length, sizeof text - 1));
  }
  sigaction(number, &runtime().previous, nullptr); // the access is tried again, under who was here before
}

void take_device(int index) {
  const char* directory = std::getenv("SOFT_EXCLUSIVE");
  if (directory == nullptr) {
    return;
  }
  const std::string path = std::string(directory) + "/soft" + std::to_string(index);
  const int file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600); // held until the process ends
  TORCH_CHECK(file >= 0, "soft: cannot open ", path, ": ", std::strerror(errno), "; is SOFT_EXCLUSIVE a directory?");
  if (flock(file, LOCK_EX | LOCK_NB) != 0) {
    close(file);
    TORCH_CHECK(false, "device soft:", index, " is in use by another process, and SOFT_EXCLUSIVE lends each device to ",
        "one: was the device set to this rank's own?");
  }
}

// With the mutex held.
void start() {
  auto& it = runtime();
  if (it.started) {
    return;
  }
  it.started = true;
  const auto limit = from_environment("SOFT_MEMORY", int64_t{1} << 30);
  for (int index = 0; index < device_count(); index++) {
    it.devices.push_back(std::make_unique<Device>());
    it.devices.back()->memory.limit = std::min<int64_t>(limit, kSpace);
  }
  static std::once_flag once;
  std::call_once(once, [] {
    pthread_atfork(nullptr, nullptr, [] { runtime().forked = runtime().started; });
    struct sigaction action {};
    action.sa_sigaction = on_segmentation_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, &runtime().previous);
  });
}

void check_process() {
  TORCH_CHECK(!runtime().forked, "soft cannot be used in a process forked from one that had used it: its streams are ",
      "threads, which stay behind. Touch the device only after the fork, or start the process with spawn");
}

Device& device_at(int index) {
  auto& it = runtime();
  check_process();
  {
    std::lock_guard lock(it.mutex);
    start();
  }
  TORCH_CHECK(index >= 0 && index < static_cast<int>(it.devices.size()), "soft: there is no device ", index, ", only ",
      it.devices.size());
  return *it.devices[index];
}

// The first use of a device: its addresses and its default stream. With the mutex held.
void open_device(Device& device, int index) {
  if (device.base != nullptr) {
    return;
  }
  take_device(index);
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* base = mmap(nullptr, kSpace, PROT_NONE, flags, -1, 0);
  void* shadow = mmap(nullptr, kSpace, PROT_READ | PROT_WRITE, flags, -1, 0);
  TORCH_CHECK(base != MAP_FAILED && shadow != MAP_FAILED, "soft: no room for the addresses of a device: ",
      std::strerror(errno), "; is there a limit to this process's address space?");
  device.base = static_cast<char*>(base);
  device.shadow = static_cast<char*>(shadow);
  device.blocks[0] = Block{kSpace, kNobody, false, {}};
  device.unused.insert({kNobody, kSpace, 0});
  device.streams.push_back(std::make_unique<Stream>());
}

Device& opened(int index) {
  auto& device = device_at(index);
  std::lock_guard lock(runtime().mutex);
  open_device(device, index);
  return device;
}

void run(Device& device, Stream& stream) {
  auto& it = runtime();
  std::unique_lock lock(it.mutex);
  while (true) {
    stream.wake.wait(lock, [&] { return !stream.queue.empty(); });
    while (stream.demanded <= stream.finished && Clock::now() < stream.queue.front().not_before) {
      stream.wake.wait_until(lock, stream.queue.front().not_before);
    }
    Entry entry = std::move(stream.queue.front());
    stream.queue.pop_front();
    if (entry.always || device.fault.load() == Fault::none) {
      lock.unlock();
      entry.task();
      entry.task = nullptr; // what it held goes before anybody is told
      lock.lock();
    }
    stream.finished++;
    it.changed.notify_all();
  }
}

// With the mutex held. Streams wait for one another, so what one is asked for all are.
void demand(Device&) {
  for (auto& device : runtime().devices) {
    for (auto& stream : device->streams) {
      stream->demanded = stream->issued;
      stream->wake.notify_one();
    }
  }
}

Stream& stream_at(Device& device, int64_t id) {
  TORCH_CHECK(id >= 0 && id < static_cast<int64_t>(device.streams.size()), "soft: there is no stream ", id);
  return *device.streams[id];
}

void push(Device& device, int64_t id, Task task, bool always) {
  auto& it = runtime();
  std::lock_guard lock(it.mutex);
  auto& stream = stream_at(device, id);
  stream.queue.push_back({std::move(task), Clock::now() + it.delay, always});
  stream.issued++;
  if (!stream.running) {
    stream.running = true;
    std::thread(run, std::ref(device), std::ref(stream)).detach();
  }
  stream.wake.notify_one();
}

void wait_on_host(Device& device, int index, const std::string& why, const std::function<bool()>& done) {
  auto& it = runtime();
  {
    std::unique_lock lock(it.mutex);
    device.counters.synchronisations++;
    device.synchronised_by[gettid() == getpid() ? why : why + ", in another thread"]++;
    demand(device);
    it.changed.wait(lock, done);
  }
  check(index);
}

} // namespace

int device_count() {
  // No lock: also asked in a child of a fork, in which nobody may be left to open it.
  static const auto count = static_cast<int>(std::clamp<int64_t>(from_environment("SOFT_DEVICES", 1), 1, 64));
  return count;
}

int current_device() {
  return the_device;
}

void set_device(int device) {
  device_at(device);
  the_device = device;
}

int64_t current_stream(int device) {
  return static_cast<size_t>(device) < the_streams.size() ? the_streams[device] : 0;
}

void set_current_stream(int device, int64_t stream) {
  if (the_streams.size() <= static_cast<size_t>(device)) {
    the_streams.resize(device + 1, 0);
  }
  the_streams[device] = stream;
}

int64_t new_stream(int index) {
  auto& device = opened(index);
  std::lock_guard lock(runtime().mutex);
  device.streams.push_back(std::make_unique<Stream>());
  return static_cast<int64_t>(device.streams.size()) - 1;
}

void enqueue(int index, int64_t stream, Task task, bool always) {
  push(opened(index), stream, std::move(task), always);
}

void launch(int index, int64_t stream, Task kernel) {
  check(index);
  auto& device = opened(index);
  device.counters.launches++;
  push(device, stream, [index, kernel = std::move(kernel)] {
    try {
      kernel();
    } catch (const c10::Error& error) {
      fail(index, Fault::failed, std::string("a kernel failed: ") + error.what_without_backtrace());
    } catch (const std::exception& error) {
      fail(index, Fault::failed, std::string("a kernel failed: ") + error.what());
    }
  }, false);
}

MarkPtr mark(int index, int64_t stream) {
  auto& device = opened(index);
  auto made = std::make_shared<Mark>();
  made->device = index;
  made->stream = stream;
  push(device, stream, [made] {
    std::lock_guard lock(runtime().mutex);
    made->when = Clock::now();
    made->done = true;
  }, true);
  return made;
}

void wait_in_stream(int index, int64_t stream, const MarkPtr& mark) {
  if (mark->device == index && mark->stream == stream) {
    return;
  }
  auto& device = opened(index);
  push(device, stream, [&device, mark] {
    std::unique_lock lock(runtime().mutex);
    runtime().changed.wait(lock, [&] { return mark->done || device.fault.load() != Fault::none; });
  }, false);
}

bool query(const MarkPtr& mark) {
  check(mark->device);
  auto& device = opened(mark->device);
  std::lock_guard lock(runtime().mutex);
  demand(device); // who asks again and again must see it end
  return mark->done;
}

bool query_stream(int index, int64_t id) {
  check(index);
  auto& device = opened(index);
  std::lock_guard lock(runtime().mutex);
  demand(device);
  auto& stream = stream_at(device, id);
  return stream.finished == stream.issued;
}

void synchronize(const MarkPtr& mark, const std::string& why) {
  check(mark->device);
  wait_on_host(opened(mark->device), mark->device, why, [mark] { return mark->done; });
}

void synchronize_stream(int index, int64_t stream, const std::string& why) {
  check(index);
  const auto end = mark(index, stream);
  wait_on_host(opened(index), index, why, [end] { return end->done; });
}

void synchronize_device(int index, const std::string& why) {
  check(index);
  auto& device = opened(index);
  std::vector<uint64_t> ends;
  {
    std::lock_guard lock(runtime().mutex);
    for (auto& stream : device.streams) {
      ends.push_back(stream->issued);
    }
  }
  wait_on_host(device, index, why, [&device, ends] {
    for (size_t i = 0; i < ends.size(); i++) {
      if (device.streams[i]->finished < ends[i]) {
        return false;
      }
    }
    return true;
  });
}

// ---- memory ----------------------------------------------------------------------------------------------------

namespace {

// With the mutex held: a free block of a stream that is large enough, the smallest such.
std::map<size_t, Block>::iterator find(Device& device, int64_t stream, size_t size) {
  const auto found = device.unused.lower_bound({stream, size, 0});
  if (found == device.unused.end() || std::get<0>(*found) != stream) {
    return device.blocks.end();
  }
  return device.blocks.find(std::get<2>(*found));
}

void forget(Device& device, std::map<size_t, Block>::iterator at) {
  device.unused.erase({at->second.stream, at->second.size, at->first});
}

// Make `at` unused, one with unused neighbours of the same stream.
void make_unused(Device& device, std::map<size_t, Block>::iterator at) {
  at->second.used = false;
  at->second.others.clear();
  const auto joins = [&](const Block& other) { return !other.used && other.stream == at->second.stream; };
  if (const auto next = std::next(at); next != device.blocks.end() && joins(next->second)) {
    forget(device, next);
    at->second.size += next->second.size;
    device.blocks.erase(next);
  }
  if (at != device.blocks.begin()) {
    if (const auto before = std::prev(at); joins(before->second)) {
      forget(device, before);
      before->second.size += at->second.size;
      device.blocks.erase(at);
      at = before;
    }
  }
  device.unused.insert({at->second.stream, at->second.size, at->first});
}

// Take an unused block, the first `size` bytes of it.
void take(Device& device, std::map<size_t, Block>::iterator at, size_t size) {
  forget(device, at);
  at->second.used = true;
  if (at->second.size > size) {
    const auto rest = device.blocks.emplace(at->first + size, Block{at->second.size - size, at->second.stream, false, {}});
    at->second.size = size;
    make_unused(device, rest.first);
  }
}

// Give all unused memory of streams back. All streams must have ended what they did. With the mutex held.
void give_back(Device& device) {
  for (bool again = true; again;) {
    again = false;
    for (auto at = device.blocks.begin(); at != device.blocks.end(); at++) {
      if (!at->second.used && at->second.stream != kNobody) {
        forget(device, at);
        madvise(device.shadow + at->first, at->second.size, MADV_DONTNEED);
        device.memory.reserved -= static_cast<int64_t>(at->second.size);
        at->second.stream = kNobody;
        make_unused(device, at);
        again = true;
        break;
      }
    }
  }
}

bool reserve(Device& device, int index, int64_t stream, size_t size) {
  auto segment = (size + kSegment - 1) / kSegment * kSegment;
  auto& memory = device.memory;
  const auto fits = [&](size_t bytes) { return memory.reserved + static_cast<int64_t>(bytes) <= memory.limit; };
  if (!fits(segment)) {
    segment = size;
  }
  const auto at = fits(segment) ? find(device, kNobody, segment) : device.blocks.end();
  if (at == device.blocks.end()) {
    return false;
  }
  take(device, at, segment);
  at->second.stream = stream;
  memory.reserved += static_cast<int64_t>(segment);
  memory.peak_reserved = std::max(memory.peak_reserved, memory.reserved);
  auto& queue = stream_at(device, stream); // as push() does, which takes the mutex
  char* bytes = device.shadow + at->first;
  queue.queue.push_back({[bytes, segment] { poison(bytes, segment); }, Clock::now(), false});
  queue.issued++;
  if (!queue.running) {
    queue.running = true;
    std::thread(run, std::ref(device), std::ref(queue)).detach();
  }
  queue.wake.notify_one();
  make_unused(device, at);
  return true;
}

std::string mebibytes(int64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f MiB", static_cast<double>(bytes) / (1 << 20));
  return text;
}

} // namespace

void* allocate(int index, size_t bytes) {
  if (bytes == 0) {
    return nullptr;
  }
  check(index);
  auto& it = runtime();
  auto& device = opened(index);
  const auto size = (bytes + kGrain - 1) / kGrain * kGrain;
  const auto stream = current_stream(index);
  std::unique_lock lock(it.mutex);
  // A limit that has been set lower than what is reserved holds for what is reserved, too.
  const bool within = device.memory.allocated + static_cast<int64_t>(size) <= device.memory.limit;
  auto at = within ? find(device, stream, size) : device.blocks.end();
  if (at == device.blocks.end() && !reserve(device, index, stream, size)) {
    // As CUDA's allocator does: what other streams keep is given back, for which all must have ended.
    lock.unlock();
    synchronize_device(index, "memory is short");
    lock.lock();
    give_back(device);
    if (!reserve(device, index, stream, size)) {
      const auto& memory = device.memory;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "soft out of memory. Tried to allocate ", mebibytes(size), ". Device ",
          index, " has a total capacity of ", mebibytes(memory.limit), " of which ",
          mebibytes(memory.limit - memory.reserved), " is free. ", mebibytes(memory.allocated), " is allocated by PyTorch");
    }
  }
  at = find(device, stream, size);
  take(device, at, size);
  device.memory.allocated += static_cast<int64_t>(size);
  device.memory.peak_allocated = std::max(device.memory.peak_allocated, device.memory.allocated);
  return device.base + at->first;
}

void release(void* address) {
  const int index = device_of(address);
  if (index < 0 || runtime().forked) {
    return; // also in a forked child, which has no streams
  }
  auto& it = runtime();
  auto& device = *it.devices[index];
  std::unique_lock lock(it.mutex);
  const auto at = device.blocks.find(static_cast<char*>(address) - device.base);
  const auto offset = at->first;
  const auto size = at->second.size;
  const auto stream = at->second.stream;
  const auto others = at->second.others;
  device.memory.allocated -= static_cast<int64_t>(size);
  char* bytes = device.shadow + offset;
  if (others.empty()) {
    // The stream comes to the poison before anything that a new owner on the same stream does.
    make_unused(device, at);
    lock.unlock();
    push(device, stream, [bytes, size] { poison(bytes, size); }, false);
    return;
  }
  lock.unlock();
  auto users = std::make_shared<std::atomic<size_t>>(others.size() + 1);
  const auto end = [&device, offset, bytes, size, users] {
    if (--*users == 0) {
      poison(bytes, size);
      std::lock_guard inside(runtime().mutex);
      make_unused(device, device.blocks.find(offset));
    }
  };
  push(device, stream, end, true);
  for (const auto other : others) {
    push(device, other, end, true);
  }
}

void record_stream(void* address, int64_t stream) {
  const int index = device_of(address);
  if (index < 0) {
    return;
  }
  auto& device = *runtime().devices[index];
  std::lock_guard lock(runtime().mutex);
  const auto at = device.blocks.find(static_cast<char*>(address) - device.base);
  if (at != device.blocks.end() && at->second.stream != stream) {
    at->second.others.insert(stream);
  }
}

int device_of(const void* address) {
  auto& it = runtime();
  const auto* byte = static_cast<const char*>(address);
  for (size_t index = 0; index < it.devices.size(); index++) {
    const auto* base = it.devices[index]->base;
    if (base != nullptr && byte >= base && byte < base + kSpace) {
      return static_cast<int>(index);
    }
  }
  return -1;
}

void* shadow(const void* address) {
  const int index = device_of(address);
  if (index < 0) {
    return nullptr;
  }
  auto& device = *runtime().devices[index];
  return device.shadow + (static_cast<const char*>(address) - device.base);
}

void poison(void* bytes, size_t size) {
  std::fill_n(static_cast<uint16_t*>(bytes), size / 2, uint16_t{0xFFF7});
  if (size % 2 != 0) {
    static_cast<char*>(bytes)[size - 1] = static_cast<char>(0xF7);
  }
}

void empty_cache(int index) {
  synchronize_device(index, "empty_cache");
  std::lock_guard lock(runtime().mutex);
  give_back(*runtime().devices[index]);
}

Memory memory(int index) {
  auto& device = device_at(index);
  std::lock_guard lock(runtime().mutex);
  return device.memory;
}

void reset_peaks(int index) {
  auto& device = device_at(index);
  std::lock_guard lock(runtime().mutex);
  device.memory.peak_allocated = device.memory.allocated;
  device.memory.peak_reserved = device.memory.reserved;
}

void set_limit(int index, int64_t bytes) {
  TORCH_CHECK(bytes >= 0 && bytes <= static_cast<int64_t>(kSpace), "soft: a device has from 0 to ", kSpace,
      " bytes of memory, not ", bytes);
  auto& device = device_at(index);
  std::lock_guard lock(runtime().mutex);
  device.memory.limit = bytes;
}

void* allocate_pinned(size_t bytes) {
  check_process();
  void* pointer = nullptr;
  TORCH_CHECK(posix_memalign(&pointer, 4096, std::max<size_t>(bytes, 1)) == 0, "soft: no ", bytes,
      " bytes of pinned host memory");
  std::lock_guard lock(runtime().mutex);
  runtime().pinned[static_cast<const char*>(pointer)] = bytes;
  return pointer;
}

void release_pinned(void* pointer) {
  {
    std::lock_guard lock(runtime().mutex);
    runtime().pinned.erase(static_cast<const char*>(pointer));
  }
  std::free(pointer);
}

bool is_pinned(const void* pointer) {
  auto& it = runtime();
  const auto* byte = static_cast<const char*>(pointer);
  std::lock_guard lock(it.mutex);
  auto after = it.pinned.upper_bound(byte);
  if (after == it.pinned.begin()) {
    return false;
  }
  after--;
  return byte < after->first + std::max<size_t>(after->second, 1);
}

// ---- faults and figures ----------------------------------------------------------------------------------------

void check(int index) {
  auto& device = device_at(index);
  const auto fault = device.fault.load();
  if (fault == Fault::none) {
    return;
  }
  std::string message;
  {
    std::lock_guard lock(runtime().mutex);
    message = device.message;
  }
  throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, static_cast<int32_t>(fault),
      "soft error: " + message + " (device soft:" + std::to_string(index) +
          "; every call fails until this process ends. Kernels run later than they are launched, so the stack may be "
          "that of a later call)");
}

void fail(int index, Fault fault, const std::string& message) {
  auto& it = runtime();
  auto& device = *it.devices[index];
  std::lock_guard lock(it.mutex);
  if (device.fault.load() == Fault::none) {
    device.message = message;
    device.fault.store(fault);
  }
  it.changed.notify_all();
}

bool failed(int index) {
  return device_at(index).fault.load() != Fault::none;
}

void hang(int index, int64_t stream) {
  auto& device = device_at(index);
  uint64_t before;
  {
    std::lock_guard lock(runtime().mutex);
    before = device.aborts;
  }
  launch(index, stream, [&device, before] {
    std::unique_lock lock(runtime().mutex);
    runtime().changed.wait(lock, [&] { return device.aborts != before || device.fault.load() != Fault::none; });
  });
}

void abort_kernels(int index) {
  auto& device = device_at(index);
  std::lock_guard lock(runtime().mutex);
  device.aborts++;
  runtime().changed.notify_all();
}

void set_delay(double seconds) {
  std::lock_guard lock(runtime().mutex);
  runtime().delay = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

Counters& counters(int index) {
  return device_at(index).counters;
}

std::vector<std::string> synchronised_by(int index) {
  auto& device = device_at(index);
  std::lock_guard lock(runtime().mutex);
  std::vector<std::string> lines;
  for (const auto& [why, times] : device.synchronised_by) {
    lines.push_back(why + "=" + std::to_string(times));
  }
  return lines;
}

void reset_counters(int index) {
  auto& device = device_at(index);
  std::lock_guard lock(runtime().mutex);
  auto& counters = device.counters;
  for (auto* each : {&counters.launches, &counters.synchronisations, &counters.to_device, &counters.to_host,
           &counters.on_device}) {
    each->store(0);
  }
  device.synchronised_by.clear();
}

bool initialised() {
  return runtime().started;
}

bool in_bad_fork() {
  return runtime().forked;
}

} // namespace soft
