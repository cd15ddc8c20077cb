// What torch asks of a device: guard, hooks, allocators, generators.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>
#include <deque>

#include "generator.h"
#include "runtime.h"

namespace soft {
namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

// ---- device, streams, events -----------------------------------------------------------------------------------

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kDevice;
  }
  c10::Device getDevice() const override {
    return {kDevice, static_cast<c10::DeviceIndex>(current_device())};
  }
  void setDevice(c10::Device device) const override {
    set_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < device_count() && !in_bad_fork()) {
      set_device(device.index());
    }
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    if (device.index() != before.index()) {
      setDevice(device);
    }
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return in_bad_fork() ? 0 : static_cast<c10::DeviceIndex>(device_count());
  }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override {
    return {};
  }

  c10::Stream getStream(c10::Device device) const override {
    const int index = index_of(device);
    return stream(index, current_stream(index));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream(index_of(device), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    const int index = index_of(device);
    return stream(index, new_stream(index));
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const auto before = stream(next.device_index(), current_stream(next.device_index()));
    set_current_stream(next.device_index(), next.id());
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream s) const override {
    return reinterpret_cast<void*>(s.id());
  }
  bool queryStream(const c10::Stream& s) const override {
    return query_stream(s.device_index(), s.id());
  }
  void synchronizeStream(const c10::Stream& s) const override {
    synchronize_stream(s.device_index(), s.id(), "Stream.synchronize");
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    synchronize_device(device, "synchronize");
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const override {
    record_stream(data.get(), s.id());
  }

  void record(void** event, const c10::Stream& s, const c10::DeviceIndex device, const c10::EventFlag) const override {
    TORCH_CHECK(device < 0 || device == s.device_index(), "soft: an event of device ", static_cast<int>(device),
        " was recorded on a stream of device ", static_cast<int>(s.device_index()), "; is a device guard missing?");
    check(s.device_index());
    if (*event == nullptr) {
      *event = new MarkPtr;
    }
    *static_cast<MarkPtr*>(*event) = mark(s.device_index(), s.id());
  }
  void block(void* event, const c10::Stream& s) const override {
    if (event != nullptr) {
      check(s.device_index());
      wait_in_stream(s.device_index(), s.id(), *static_cast<MarkPtr*>(event));
    }
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || query(*static_cast<MarkPtr*>(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      synchronize(*static_cast<MarkPtr*>(event), "Event.synchronize");
    }
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    TORCH_CHECK(first != nullptr && second != nullptr, "soft: both events must be recorded before the time between ",
        "them is asked for");
    const auto& begin = *static_cast<MarkPtr*>(first);
    const auto& end = *static_cast<MarkPtr*>(second);
    TORCH_CHECK(query(begin) && query(end), "soft: both events must be over before the time between them is asked for");
    return std::chrono::duration<double, std::milli>(end->when - begin->when).count();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<MarkPtr*>(event);
  }

 private:
  static int index_of(c10::Device device) {
    return device.has_index() ? device.index() : current_device();
  }
  static c10::Stream stream(int device, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, static_cast<c10::DeviceIndex>(device)), id);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ---- memory ----------------------------------------------------------------------------------------------------

struct DeviceMemory final : public c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const int device = current_device();
    void* address = soft::allocate(device, bytes);
    return {address, address, release, {kDevice, static_cast<c10::DeviceIndex>(device)}};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return release;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    const int device = device_of(to);
    counters(device).on_device += static_cast<int64_t>(bytes);
    launch(device, current_stream(device), [to, from, bytes] { std::memcpy(shadow(to), shadow(from), bytes); });
  }

  bool initialized() override {
    return initialised();
  }
  void emptyCache(c10::MempoolId_t) override {
    for (int device = 0; initialised() && device < device_count(); device++) {
      empty_cache(device);
    }
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    record_stream(data.get(), stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    const auto now = memory(device);
    const auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    stats.allocated_bytes[all].current = now.allocated;
    stats.allocated_bytes[all].peak = now.peak_allocated;
    stats.reserved_bytes[all].current = now.reserved;
    stats.reserved_bytes[all].peak = now.peak_reserved;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    reset_peaks(device);
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const auto now = memory(device);
    return {now.limit - now.reserved, now.limit};
  }
};

DeviceMemory device_memory;
REGISTER_ALLOCATOR(kDevice, &device_memory)

struct HostMemory final : public at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = allocate_pinned(bytes);
    return {pointer, pointer, release_pinned, c10::DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return release_pinned;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  // A copy in the queue holds its host tensor until it has run, so nothing has to be remembered here.
  bool record_event(void*, void*, c10::Stream) override {
    return true;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override {
    return {};
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

HostMemory host_memory;
REGISTER_HOST_ALLOCATOR(kDevice, &host_memory)

// ---- hooks -----------------------------------------------------------------------------------------------------

struct Hooks final : public at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return !in_bad_fork();
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return initialised();
  }
  c10::DeviceIndex deviceCount() const override {
    return in_bad_fork() ? 0 : static_cast<c10::DeviceIndex>(device_count());
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    set_device(device);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device());
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = getCurrentDevice();
    set_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device < 0 ? current_device() : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? getCurrentDevice() : device);
  }
  c10::Device getDeviceFromPtr(void* data) const override {
    const int device = device_of(data);
    TORCH_CHECK(device >= 0, "soft: ", data, " is no address of a device");
    return {kDevice, static_cast<c10::DeviceIndex>(device)};
  }
  bool isPinnedPtr(const void* data) const override {
    return is_pinned(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &host_memory;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto data = device_memory.allocate(bytes);
    if (const auto kept = std::min(bytes, storage.nbytes()); kept > 0) {
      device_memory.copy_data(data.get(), storage.data(), kept);
    }
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(bytes);
  }
};

const bool hooked = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

} // namespace

// ---- random numbers --------------------------------------------------------------------------------------------

// Where a sequence of draws stood at some point of the queue; known once that has been reached.
class Snapshot {
 public:
  void take(const at::Generator& generator) {
    std::lock_guard lock(mutex_);
    generator_ = generator.clone();
    taken_.notify_all();
  }
  at::Generator copy() {
    std::unique_lock lock(mutex_);
    taken_.wait(lock, [&] { return generator_.defined(); });
    return generator_.clone();
  }

 private:
  std::mutex mutex_;
  std::condition_variable taken_;
  at::Generator generator_;
};

// Draws happen in the order in which they were launched, on whatever streams, so a draw waits for its turn.
class Engine {
 public:
  explicit Engine(uint64_t seed) : generator_(at::detail::createCPUGenerator(seed)) {}
  explicit Engine(std::shared_ptr<Snapshot> begin) : begin_(std::move(begin)) {}

  uint64_t take_turn() {
    return turns_++;
  }
  void draw(uint64_t turn, const std::function<void(const at::Generator&)>& use) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return drawn_ == turn; });
    if (!generator_.defined()) {
      generator_ = begin_->copy();
    }
    use(generator_);
    drawn_++;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  at::Generator generator_;
  std::shared_ptr<Snapshot> begin_;
  std::atomic<uint64_t> turns_{0};
  uint64_t drawn_ = 0;
};

namespace {

// States that were asked for, by (device, seed, offset). The newest are kept.
struct Known {
  std::mutex mutex;
  std::map<std::tuple<int, uint64_t, uint64_t>, std::shared_ptr<Snapshot>> snapshots;
  std::deque<std::tuple<int, uint64_t, uint64_t>> order;
};
constexpr size_t kKnown = 1024;

Known& known() {
  static Known& it = *new Known;
  return it;
}

} // namespace

Generator::Generator(c10::DeviceIndex device)
    : GeneratorImpl({kDevice, device}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {
  engine_ = std::make_shared<Engine>(seed_);
}

void Generator::set_current_seed(uint64_t seed) {
  go_to(seed, 0);
}

void Generator::set_offset(uint64_t offset) {
  go_to(seed_, offset);
}

uint64_t Generator::get_offset() const {
  return offset_;
}

uint64_t Generator::current_seed() const {
  return seed_;
}

uint64_t Generator::seed() {
  go_to(c10::detail::getNonDeterministicRandom(), 0);
  return seed_;
}

void Generator::go_to(uint64_t seed, uint64_t offset) {
  if (offset == 0) {
    engine_ = std::make_shared<Engine>(seed);
  } else {
    std::lock_guard lock(known().mutex);
    const auto found = known().snapshots.find({device_.index(), seed, offset});
    TORCH_CHECK(found != known().snapshots.end(), "soft: a generator goes to offset 0 of any seed, and to states that ",
        "get_state has told in this process (the last ", kKnown, "), not to seed ", seed, ", offset ", offset);
    engine_ = std::make_shared<Engine>(found->second);
  }
  seed_ = seed;
  offset_ = offset;
}

void Generator::set_state(const c10::TensorImpl& state) {
  TORCH_CHECK(state.device().is_cpu() && state.numel() == 2 * sizeof(uint64_t) && state.itemsize() == 1,
      "soft: the state of a generator is 16 bytes on the CPU, seed and offset");
  uint64_t words[2];
  std::memcpy(words, state.data(), sizeof words);
  go_to(words[0], words[1]);
}

c10::intrusive_ptr<c10::TensorImpl> Generator::get_state() const {
  if (offset_ > 0) {
    std::lock_guard lock(known().mutex);
    const auto key = std::make_tuple(static_cast<int>(device_.index()), seed_, offset_);
    if (known().snapshots.find(key) == known().snapshots.end()) {
      const auto here = known().snapshots[key] = std::make_shared<Snapshot>();
      known().order.push_back(key);
      if (known().order.size() > kKnown) {
        known().snapshots.erase(known().order.front());
        known().order.pop_front();
      }
      enqueue(device_.index(), current_stream(device_.index()), [engine = engine_, turn = engine_->take_turn(), here] {
        engine->draw(turn, [&](const at::Generator& generator) { here->take(generator); });
      });
    }
  }
  auto state = at::detail::empty_cpu({2 * sizeof(uint64_t)}, at::kByte);
  const uint64_t words[2] = {seed_, offset_};
  std::memcpy(state.mutable_data_ptr(), words, sizeof words);
  return state.getIntrusivePtr();
}

std::function<void(const std::function<void(const at::Generator&)>&)> Generator::next() {
  std::lock_guard lock(mutex_);
  offset_++;
  const auto turn = engine_->take_turn();
  return [engine = engine_, turn](const std::function<void(const at::Generator&)>& use) { engine->draw(turn, use); };
}

c10::GeneratorImpl* Generator::clone_impl() const {
  auto* made = new Generator(device_.index());
  made->set_state(*get_state());
  return made;
}

const at::Generator& default_generator(int device) {
  static auto& generators = *new std::map<int, at::Generator>;
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  auto& generator = generators[device];
  if (!generator.defined()) {
    generator = at::make_generator<Generator>(device);
  }
  return generator;
}

Generator& generator_of(const at::Generator& generator) {
  auto* made = dynamic_cast<Generator*>(generator.unsafeGetGeneratorImpl());
  TORCH_CHECK(made != nullptr, "Expected a 'soft' device type for generator but found '", generator.device().type(), "'");
  return *made;
}

} // namespace soft
