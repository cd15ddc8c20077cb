// Operators: any that torch's CPU has, run in the queue on tensors that alias the device's bytes.
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <exception>
#include <optional>
#include <set>

#include "generator.h"
#include "runtime.h"

namespace soft {
namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
const std::set<std::string> kIndexed = {"aten::index", "aten::index_put_", "aten::_index_put_impl_"};

bool on_soft(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kDevice;
}

// ---- making and viewing tensors --------------------------------------------------------------------------------

c10::Device full(std::optional<c10::Device> device) {
  TORCH_CHECK(!device || device->type() == kDevice, "soft was asked for a tensor on ", *device);
  return {kDevice, static_cast<c10::DeviceIndex>(device && device->has_index() ? device->index() : current_device())};
}

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<at::ScalarType> type,
    std::optional<at::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(full(device));
  return at::detail::empty_strided_generic(sizes, strides, c10::GetAllocator(kDevice),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type.value_or(at::get_default_dtype_as_scalartype()));
}

at::Tensor empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> type, std::optional<at::Layout>,
    std::optional<c10::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(full(device));
  return at::detail::empty_generic(sizes, c10::GetAllocator(kDevice),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type.value_or(at::get_default_dtype_as_scalartype()), format);
}

at::Tensor empty_like_meta(const at::Tensor& shape, c10::Device device) {
  return empty_strided(shape.sizes(), shape.strides(), shape.scalar_type(), std::nullopt, device, std::nullopt);
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  if (format && *format != at::MemoryFormat::Preserve) {
    impl->empty_tensor_restride(*format);
  }
  const auto bytes = (self.storage_offset() + self.numel()) * self.itemsize();
  if (static_cast<size_t>(bytes) > self.storage().nbytes()) {
    const c10::DeviceGuard guard(self.device());
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  }
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef sizes,
    c10::IntArrayRef strides) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  if (strides.data() == nullptr || strides.empty()) {
    self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  } else {
    self.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  }
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {count}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

// A tensor of the CPU over the same bytes: for kernels, never for the host.
at::Tensor alias(const at::Tensor& tensor) {
  const auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  if (tensor.numel() == 0) {
    return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  }
  return at::from_blob(shadow(tensor.data_ptr()), tensor.sizes(), tensor.strides(), options);
}

// ---- copies ----------------------------------------------------------------------------------------------------

// Enqueue `kernel` with this thread's number of CPU threads and below autograd.
void launch_on(c10::Device device, Task kernel) {
  launch(device.index(), current_stream(device.index()), [kernel = std::move(kernel), threads = at::get_num_threads()] {
    const at::AutoDispatchBelowADInplaceOrView below;
    if (at::get_num_threads() != threads) {
      at::set_num_threads(threads); // else sums are cut into other pieces than on the CPU
    }
    kernel();
  });
}

bool dense(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense();
}

void copy_to_device(const at::Tensor& to, const at::Tensor& from, bool asynchronous) {
  counters(to.device().index()).to_device += to.nbytes();
  // What is not pinned is staged before the call returns, so the host may change it at once; pinned memory must wait.
  const auto source = asynchronous && !from.is_pinned(to.device()) ? from.clone() : from;
  launch_on(to.device(), [to = alias(to), source] { to.copy_(source); });
  if (!asynchronous) {
    synchronize_stream(to.device().index(), current_stream(to.device().index()), "copy to the device");
  }
}

void copy_to_host(const at::Tensor& to, const at::Tensor& from, bool asynchronous) {
  counters(from.device().index()).to_host += to.nbytes();
  const bool later = asynchronous && to.is_pinned(from.device());
  if (later && dense(to)) {
    poison(to.data_ptr(), to.nbytes()); // who reads too early must not find what was there before
  }
  launch_on(from.device(), [to, source = alias(from)] { to.copy_(source); });
  if (!later) {
    synchronize_stream(from.device().index(), current_stream(from.device().index()), "copy to the host");
  }
}

void copy_on_device(const at::Tensor& to, const at::Tensor& from) {
  const int here = from.device().index(), there = to.device().index();
  counters(here).on_device += to.nbytes();
  if (here != there) {
    wait_in_stream(here, current_stream(here), mark(there, current_stream(there)));
  }
  launch_on(from.device(), [to = alias(to), source = alias(from)] { to.copy_(source); });
  if (here != there) {
    wait_in_stream(there, current_stream(there), mark(here, current_stream(here)));
  }
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool asynchronous) {
  const auto source = from.sizes() == to.sizes() ? from : from.expand(to.sizes());
  const c10::DeviceGuard guard(on_soft(to) ? to.device() : from.device());
  if (to.numel() == 0) {
    return to;
  }
  if (on_soft(to) && on_soft(from)) {
    copy_on_device(to, source);
  } else if (on_soft(to)) {
    TORCH_CHECK(from.device().is_cpu(), "soft: no copy from ", from.device(), " to ", to.device());
    copy_to_device(to, source, asynchronous);
  } else {
    TORCH_CHECK(to.device().is_cpu(), "soft: no copy from ", from.device(), " to ", to.device());
    copy_to_host(to, source, asynchronous);
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (from.sizes() != to.sizes()) {
    to.resize_(from.sizes());
  }
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  auto value = at::empty({}, at::TensorOptions().dtype(self.dtype()));
  counters(self.device().index()).to_host += static_cast<int64_t>(self.itemsize());
  launch_on(self.device(), [value, source = alias(self)] { value.copy_(source.view(c10::IntArrayRef{})); });
  synchronize_stream(self.device().index(), current_stream(self.device().index()), "item");
  return value.item();
}

void record_stream_of(at::Tensor& self, c10::Stream stream) {
  record_stream(self.storage().mutable_data(), stream.id());
}

// As torch's CPU has it, so that the same draws give the same bits; the fused one scales in another order.
at::Tensor dropout(const at::Tensor& input, double p, bool train) {
  TORCH_CHECK(p >= 0 && p <= 1, "dropout probability has to be between 0 and 1, but got ", p);
  if (p == 0 || !train || input.numel() == 0) {
    return input;
  }
  auto noise = at::empty_like(input, at::MemoryFormat::Contiguous).bernoulli_(1 - p);
  return input.mul(p == 1 ? noise : noise.div_(1 - p));
}

// ---- any other operator ----------------------------------------------------------------------------------------

using Map = std::function<at::Tensor(const at::Tensor&)>;

// The same value with each tensor in it replaced.
c10::IValue mapped(const c10::IValue& value, const Map& map) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? c10::IValue(map(value.toTensor())) : value;
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& each : value.toTensorVector()) {
      made.push_back(each.defined() ? map(each) : each);
    }
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (const std::optional<at::Tensor>& each : value.toOptionalTensorVector()) {
      made.push_back(each && each->defined() ? std::optional(map(*each)) : each);
    }
    return made;
  }
  return value;
}

void visit(const c10::IValue& value, const std::function<void(const at::Tensor&)>& look) {
  mapped(value, [&](const at::Tensor& tensor) {
    look(tensor);
    return tensor;
  });
}

c10::IValue with_device(c10::IValue value, c10::DeviceType type) {
  return value.isDevice() && value.toDevice().type() == kDevice ? c10::IValue(c10::Device(type)) : value;
}

struct Call {
  const c10::OperatorHandle& op;
  std::string name; // as aten::add.Tensor
  std::vector<c10::IValue> arguments; // as they came
  c10::Device device;
};

bool writes(const c10::AliasInfo* alias) {
  return alias != nullptr && alias->isWrite();
}

// The device that all tensors are on. Raises if there are several, or if a tensor of the CPU is more than a number.
c10::Device device_of(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments) {
  std::optional<c10::Device> found;
  for (const auto& argument : arguments) {
    visit(argument, [&](const at::Tensor& tensor) {
      if (on_soft(tensor)) {
        TORCH_CHECK(!found || *found == tensor.device(), "Expected all tensors to be on the same device, but found at ",
            "least two devices, ", *found, " and ", tensor.device(), "! (", op.schema().name(), ")");
        found = tensor.device();
      }
    });
  }
  for (const auto& argument : arguments) {
    if (!found && argument.isDevice()) {
      found = full(argument.toDevice());
    }
    visit(argument, [&](const at::Tensor& tensor) {
      TORCH_CHECK(on_soft(tensor) || (tensor.device().is_cpu() && (tensor.dim() == 0 || kIndexed.count(op.schema().name()))),
          "Expected all tensors to be on the same device, but found at least two devices, ", *found, " and ",
          tensor.device(), "! (", op.schema().name(), ")");
    });
  }
  return found ? *found : full(std::nullopt);
}

// What a kernel gets: aliases of the device's tensors, copies of the host's, the CPU's generator in its turn.
struct Prepared {
  c10::OperatorHandle op;
  std::vector<c10::IValue> arguments;
  std::optional<size_t> generator;
  std::function<void(const std::function<void(const at::Generator&)>&)> turn;

  std::vector<c10::IValue> operator()() {
    auto stack = arguments;
    if (!generator) {
      op.callBoxed(&stack);
      return stack;
    }
    turn([&](const at::Generator& cpu) {
      stack[*generator] = cpu;
      op.callBoxed(&stack);
    });
    return stack;
  }
};

Prepared prepare(const Call& call) {
  Prepared made{call.op, {}, std::nullopt, nullptr};
  const auto& arguments = call.op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); i++) {
    const auto& type = *arguments[i].type();
    const auto* optional = type.castRaw<c10::OptionalType>();
    if ((optional != nullptr ? *optional->getElementType() : type).kind() == c10::TypeKind::GeneratorType) {
      made.generator = i;
    }
    made.arguments.push_back(with_device(mapped(call.arguments[i], [](const at::Tensor& tensor) {
      return on_soft(tensor) ? alias(tensor) : tensor.clone();
    }), c10::DeviceType::CPU));
  }
  if (made.generator) {
    const auto& given = call.arguments[*made.generator];
    made.turn = generator_of(given.isNone() ? default_generator(call.device.index()) : given.toGenerator()).next();
  } else {
    TORCH_CHECK_NOT_IMPLEMENTED(!call.op.hasTag(at::Tag::nondeterministic_seeded), call.name, " is not there on soft: it ",
        "draws from a generator that it does not name");
  }
  return made;
}

// Norms keep mean and deviation in the parameters' type on the CPU, and in float on devices, the meta device among them.
void type_as_on_cpu(const Call& call, std::vector<c10::IValue>& shapes) {
  if (call.name != "aten::native_layer_norm" && call.name != "aten::native_group_norm") {
    return;
  }
  const auto& input = call.arguments[0].toTensor();
  for (const auto& argument : call.arguments) {
    if (argument.isTensor() && argument.toTensor().defined() && argument.toTensor().dtype() != input.dtype()) {
      return;
    }
  }
  for (const size_t i : {1, 2}) {
    shapes[i] = shapes[i].toTensor().to(input.scalar_type());
  }
}

// The results' shapes, from the meta device. Nothing if it does not know them.
std::optional<std::vector<c10::IValue>> inferred(const Call& call) {
  std::vector<c10::IValue> stack;
  for (const auto& argument : call.arguments) {
    stack.push_back(with_device(mapped(argument, [](const at::Tensor& tensor) {
      return on_soft(tensor) ? at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta))
                             : tensor;
    }), c10::DeviceType::Meta));
    if (stack.back().isGenerator()) {
      stack.back() = c10::IValue();
    }
  }
  try {
    const at::AutoDispatchBelowADInplaceOrView below;
    call.op.callBoxed(&stack);
    type_as_on_cpu(call, stack);
  } catch (const std::exception&) {
    return std::nullopt; // the CPU's kernel says what is wrong, if something is
  }
  return stack;
}

const c10::IValue& written(const Call& call, const c10::Argument& result) {
  const auto& arguments = call.op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); i++) {
    if (writes(arguments[i].alias_info()) && arguments[i].alias_info()->beforeSets() == result.alias_info()->beforeSets()) {
      return call.arguments[i];
    }
  }
  TORCH_INTERNAL_ASSERT(false, call.name, ": which argument is the result?");
}

// Fill `targets` from what the CPU's kernel returned.
void deliver(const std::string& name, const std::vector<c10::IValue>& results, const std::vector<c10::IValue>& targets) {
  for (size_t i = 0; i < targets.size(); i++) {
    std::vector<at::Tensor> from, to;
    visit(results[i], [&](const at::Tensor& tensor) { from.push_back(tensor); });
    visit(targets[i], [&](const at::Tensor& tensor) { to.push_back(tensor); });
    if (targets[i].isNone()) {
      continue; // written in place
    }
    TORCH_CHECK(from.size() == to.size(), name, ": soft expected ", to.size(), " tensors, and got ", from.size());
    for (size_t j = 0; j < to.size(); j++) {
      TORCH_CHECK(from[j].sizes() == to[j].sizes() && from[j].dtype() == to[j].dtype(), name, ": soft expected ",
          to[j].sizes(), " ", to[j].dtype(), ", and got ", from[j].sizes(), " ", from[j].dtype());
      to[j].copy_(from[j]);
    }
  }
}

// With known shapes: allocate the results, launch, return at once.
std::vector<c10::IValue> run_later(const Call& call, const std::vector<c10::IValue>& shapes) {
  std::vector<c10::IValue> results, targets;
  const auto& returns = call.op.schema().returns();
  for (size_t i = 0; i < returns.size(); i++) {
    if (writes(returns[i].alias_info())) {
      const auto& argument = written(call, returns[i]);
      if (argument.isTensor() && argument.toTensor().sizes() != shapes[i].toTensor().sizes()) {
        resize(argument.toTensor(), shapes[i].toTensor().sizes(), std::nullopt);
      }
      results.push_back(argument);
      targets.emplace_back();
      continue;
    }
    const auto made = mapped(shapes[i], [&](const at::Tensor& shape) { return empty_like_meta(shape, call.device); });
    results.push_back(made);
    targets.push_back(mapped(made, alias));
  }
  launch_on(call.device, [name = call.name, kernel = prepare(call), targets]() mutable {
    deliver(name, kernel(), targets);
  });
  return results;
}

// With results that only the kernel knows: wait for it, and raise what it raises.
std::vector<c10::IValue> run_now(const Call& call) {
  auto kernel = prepare(call);
  const auto& arguments = call.op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); i++) {
    if (arguments[i].is_out()) { // may get another size, which an alias cannot
      kernel.arguments[i] = mapped(kernel.arguments[i], [](const at::Tensor& tensor) {
        return at::empty({0}, tensor.options());
      });
    }
  }
  std::vector<c10::IValue> values;
  std::exception_ptr raised;
  launch_on(call.device, [&] {
    try {
      values = kernel();
    } catch (...) {
      raised = std::current_exception();
    }
  });
  synchronize_stream(call.device.index(), current_stream(call.device.index()), call.name);
  if (raised) {
    std::rethrow_exception(raised);
  }
  std::vector<c10::IValue> results, targets;
  const auto& returns = call.op.schema().returns();
  for (size_t i = 0; i < returns.size(); i++) {
    if (!writes(returns[i].alias_info())) {
      results.push_back(mapped(values[i], [&](const at::Tensor& value) { return empty_like_meta(value, call.device); }));
      targets.push_back(mapped(results.back(), alias));
      continue;
    }
    const auto& argument = written(call, returns[i]);
    results.push_back(argument);
    if (argument.isTensor() && call.op.schema().overload_name().find("out") != std::string::npos) {
      resize(argument.toTensor(), values[i].toTensor().sizes(), std::nullopt);
      targets.push_back(alias(argument.toTensor()));
    } else {
      targets.emplace_back();
    }
  }
  launch_on(call.device, [name = call.name, values, targets] { deliver(name, values, targets); });
  return results;
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  std::vector<c10::IValue> arguments(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
  const auto device = device_of(op, arguments);
  const c10::DeviceGuard guard(device);
  check(device.index());
  auto name = schema.name();
  if (!schema.overload_name().empty()) {
    name += "." + schema.overload_name();
  }
  const Call call{op, std::move(name), std::move(arguments), device};
  bool tells_host = false;
  for (const auto& result : schema.returns()) {
    const auto& type = *result.type();
    tells_host |= !type.isSubtypeOf(*c10::TensorType::get()) && !type.isSubtypeOf(*c10::ListType::ofTensors());
    TORCH_CHECK_NOT_IMPLEMENTED(result.alias_info() == nullptr || result.alias_info()->isWrite(), call.name,
        " is not there on soft: it is a view");
  }
  const auto shapes = tells_host ? std::nullopt : inferred(call);
  auto results = shapes ? run_later(call, *shapes) : run_now(call);
  torch::jit::drop(*stack, count);
  stack->insert(stack->end(), results.begin(), results.end());
}

// ---- for Python ------------------------------------------------------------------------------------------------

// A kernel of the user's, on the current stream of the current device, as a compiled one would be launched: nobody
// looks whose the tensors are, but the device does.
void launch_user(int64_t function, const std::vector<at::Tensor>& tensors) {
  const int device = current_device();
  for (const auto& tensor : tensors) {
    if (!on_soft(tensor) || tensor.device().index() != device) {
      launch(device, current_stream(device), [device, where = tensor.device().str()] {
        fail(device, Fault::access, "illegal memory access: a kernel on device " + std::to_string(device) +
            " was given memory of " + where + "; is a device guard missing, or a copy to the device?");
      });
      return;
    }
  }
  launch(device, current_stream(device), [device, function] {
    if (reinterpret_cast<int (*)()>(function)() != 0) {
      fail(device, Fault::failed, "a kernel written in Python raised");
    }
  });
}

void inject(int64_t device, const std::string& fault) {
  const int index = static_cast<int>(device);
  if (fault == "error") {
    launch(index, current_stream(index), [index] { fail(index, Fault::failed, "an injected fault of a kernel"); });
  } else if (fault == "lost") {
    check(index);
    fail(index, Fault::lost, "the device is lost (injected)");
  } else if (fault == "hang") {
    hang(index, current_stream(index));
  } else {
    TORCH_CHECK_VALUE(false, "soft: fault must be error, hang or lost, not ", fault);
  }
}

std::vector<int64_t> memory_figures(int64_t device) {
  const auto now = memory(static_cast<int>(device));
  return {now.allocated, now.reserved, now.peak_allocated, now.peak_reserved, now.limit};
}

std::vector<int64_t> counter_figures(int64_t device) {
  const auto& now = counters(static_cast<int>(device));
  return {now.launches, now.synchronisations, now.to_device, now.to_host, now.on_device};
}

TORCH_LIBRARY(soft, m) {
  m.def("device_count() -> int", [] { return static_cast<int64_t>(in_bad_fork() ? 0 : device_count()); });
  m.def("current_device() -> int", [] { return static_cast<int64_t>(current_device()); });
  m.def("set_device(int device) -> ()", [](int64_t device) { set_device(static_cast<int>(device)); });
  m.def("synchronize(int device) -> ()", [](int64_t device) { synchronize_device(static_cast<int>(device), "synchronize"); });
  m.def("initialised() -> bool", [] { return initialised(); });
  m.def("in_bad_fork() -> bool", [] { return in_bad_fork(); });
  m.def("check(int device) -> ()", [](int64_t device) { check(static_cast<int>(device)); });
  m.def("memory(int device) -> int[]", memory_figures);
  m.def("reset_peaks(int device) -> ()", [](int64_t device) { reset_peaks(static_cast<int>(device)); });
  m.def("set_limit(int device, int bytes) -> ()", [](int64_t device, int64_t bytes) {
    set_limit(static_cast<int>(device), bytes);
  });
  m.def("empty_cache(int device) -> ()", [](int64_t device) { empty_cache(static_cast<int>(device)); });
  m.def("counters(int device) -> int[]", counter_figures);
  m.def("synchronised_by(int device) -> str[]", [](int64_t device) { return synchronised_by(static_cast<int>(device)); });
  m.def("reset_counters(int device) -> ()", [](int64_t device) { reset_counters(static_cast<int>(device)); });
  m.def("set_delay(float seconds) -> ()", [](double seconds) { set_delay(seconds); });
  m.def("inject(int device, str fault) -> ()", inject);
  m.def("abort_kernels(int device) -> ()", [](int64_t device) { abort_kernels(static_cast<int>(device)); });
  m.def("default_generator(int device) -> Generator?", [](int64_t device) {
    return default_generator(static_cast<int>(device));
  });
  m.def("launch(int function, Tensor[] tensors) -> ()", launch_user);
  m.def("_alias(Tensor tensor) -> Tensor", alias);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("is_set_to", at::native::is_set_to);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("record_stream", record_stream_of);
  m.impl("dropout", dropout);
  // These have kernels on the CPU, but others, in other operations, for devices that bring none.
  for (const auto* name : {"native_layer_norm", "native_group_norm", "silu_backward", "mish_backward"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("dropout", dropout);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

} // namespace
} // namespace soft
