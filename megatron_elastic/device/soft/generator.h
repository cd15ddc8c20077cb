// Random numbers of the device: what torch's CPU generator draws, drawn in the queue.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/GeneratorImpl.h>

#include <functional>
#include <memory>

namespace soft {

class Engine; // a sequence of draws, from one seed

// A generator whose state is a seed and the number of kernels that have drawn since. The host never waits for it.
class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(c10::DeviceIndex device);

  void set_current_seed(uint64_t seed) override;
  void set_offset(uint64_t offset) override;
  uint64_t get_offset() const override;
  uint64_t current_seed() const override;
  uint64_t seed() override;
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;

  // The next draw's turn: what the kernel calls with its use of the CPU's generator.
  std::function<void(const std::function<void(const at::Generator&)>&)> next();

 private:
  c10::GeneratorImpl* clone_impl() const override;
  void go_to(uint64_t seed, uint64_t offset);

  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
  std::shared_ptr<Engine> engine_;
};

const at::Generator& default_generator(int device);
Generator& generator_of(const at::Generator& generator);

} // namespace soft
