// The late device for torch: guard, allocators, generator, kernels, and what Python asks of it (`torch.ops.late`).
//
// A kernel's outputs are sized by the operator's meta kernel and allocated at once. The operator's CPU kernel is queued on
// the current stream with raw addresses: a queued kernel keeps no memory alive, as on a GPU.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include "memory.h"
#include "streams.h"

namespace late {

using at::Tensor;
using c10::Device;
using c10::IValue;

constexpr auto kLate = c10::DeviceType::PrivateUse1;

void prepare_thread() { at::set_num_threads(1); }

Device device_at(int index) { return Device(kLate, static_cast<c10::DeviceIndex>(index)); }

bool is_late(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kLate; }

// Memory

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* address = bytes ? take_memory(bytes, current_stream()) : nullptr;
    return {address, address, &free_memory, device_at(current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_memory; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    const int stream = current_stream();
    const auto start = [](const void* address) { return reinterpret_cast<uintptr_t>(address); };
    launch(stream, "a copy of a storage", {{start(from), start(from) + bytes, false}, {start(to), start(to) + bytes, true}},
           [=] { std::memcpy(to, from, bytes); });
  }
};

struct PageLockedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* address = take_memory(bytes, kHost);
    return {address, address, &free_memory, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_memory; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

DeviceAllocator device_allocator;
PageLockedAllocator page_locked_allocator;
REGISTER_ALLOCATOR(kLate, &device_allocator);

// Streams and events

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream wrapped(int id) { return c10::Stream(c10::Stream::UNSAFE, device_at(id / kStreamsEach), id); }
  static int index_of(Device device) { return device.has_index() ? device.index() : current_device; }

  c10::DeviceType type() const override { return kLate; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  Device getDevice() const override { return device_at(current_device); }
  void setDevice(Device device) const override {
    TORCH_CHECK(index_of(device) < kDevices, "expected an index below ", kDevices, ", found ", device);
    current_device = index_of(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = index_of(device); }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }

  c10::Stream getStream(Device device) const override { return wrapped(current_streams[index_of(device)]); }
  c10::Stream getDefaultStream(Device device) const override { return wrapped(index_of(device) * kStreamsEach); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(Device device, int) const override { return wrapped(new_stream(index_of(device))); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return wrapped(std::exchange(current_streams[stream.device_index()], static_cast<int>(stream.id())));
  }
  bool queryStream(const c10::Stream& stream) const override {
    const MarkPtr mark = late::record(static_cast<int>(stream.id()));
    return query(mark);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    count_asked_wait("stream.synchronize");
    wait_on_host(static_cast<int>(stream.id()));
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    count_asked_wait("synchronize");
    for (int id = device * kStreamsEach; id < (device + 1) * kStreamsEach; ++id) wait_on_host(id);
  }

  // An event is a MarkPtr, made when it is first recorded.
  static MarkPtr& mark_of(void* event) { return *static_cast<MarkPtr*>(event); }
  static bool query(const MarkPtr& mark) {
    if (!mark->is_set()) return false;
    join(host_clock, mark->clock);
    return true;
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new MarkPtr;
    mark_of(*event) = late::record(static_cast<int>(stream.id()));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) wait_on_stream(static_cast<int>(stream.id()), mark_of(event));
  }
  bool queryEvent(void* event) const override { return !event || query(mark_of(event)); }
  void synchronizeEvent(void* event) const override {
    count_asked_wait("event.synchronize");
    if (event) wait_on_host(mark_of(event));
  }
  double elapsedTime(void* before, void* after, c10::DeviceIndex) const override {
    TORCH_CHECK(before && after && query(mark_of(before)) && query(mark_of(after)), "an event is yet to come");
    return std::chrono::duration<double, std::milli>(mark_of(after)->at - mark_of(before)->at).count();
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<MarkPtr*>(event); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_use(data.get(), static_cast<int>(stream.id()));
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Random numbers

// A seed, and an offset that each launch moves on: the host knows the state without waiting for the device.
struct Generator final : c10::GeneratorImpl {
  uint64_t seed_ = c10::detail::getNonDeterministicRandom(), offset_ = 0;

  explicit Generator(int device) : GeneratorImpl(device_at(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  static c10::DeviceType device_type() { return kLate; }
  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    Tensor state = at::empty({2}, at::kLong);
    state.mutable_data_ptr<int64_t>()[0] = static_cast<int64_t>(seed_);
    state.mutable_data_ptr<int64_t>()[1] = static_cast<int64_t>(offset_);
    return state.view(at::kByte).getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16, "expected a state of 16 bytes, found ", state.numel());
    std::memcpy(&seed_, state.data(), 8);
    std::memcpy(&offset_, static_cast<const char*>(state.data()) + 8, 8);
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->seed_ = seed_, copy->offset_ = offset_;
    return copy;
  }

  // The generator that the host's kernel draws from, for one launch.
  at::Generator for_launch() {
    std::lock_guard<std::mutex> guard(mutex_);
    const uint64_t seed = (seed_ ^ (offset_ + 1) * 0x9E3779B97F4A7C15u) * 0xBF58476D1CE4E5B9u;
    offset_ += 4;
    return at::detail::createCPUGenerator(seed);
  }
};

at::Generator& default_generator(int device) {
  static auto* all = new std::array<at::Generator, kDevices>{
      at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
  return (*all)[device < 0 ? current_device : device];
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device); }
  void setCurrentDevice(c10::DeviceIndex device) const override { Guard().setDevice(device_at(device)); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : Guard().exchangeDevice(device_at(device)).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current_device : device);
  }
  Device getDeviceFromPtr(void* address) const override {
    std::lock_guard<std::mutex> guard(ledger());
    const Block* block = memory().find(reinterpret_cast<uintptr_t>(address));
    TORCH_CHECK(block && block->stream != kHost, "expected memory of the late device");
    return device_at(block->stream / kStreamsEach);
  }
  bool isPinnedPtr(const void* address) const override { return is_page_locked(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &page_locked_allocator; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    if (bytes == impl->nbytes()) return;
    c10::DeviceGuard guard(impl->device());
    c10::DataPtr made = device_allocator.allocate(bytes);
    if (const size_t kept = std::min(bytes, impl->nbytes())) device_allocator.copy_data(made.get(), impl->data(), kept);
    impl->set_data_ptr_noswap(std::move(made));
    impl->set_nbytes(bytes);
  }
};

// Tensors without kernels

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &device_allocator,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

Tensor as_strided(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

const Tensor& resize_tensor(const Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format && *format != c10::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  const size_t bytes = (self.numel() + self.storage_offset()) * self.itemsize();
  if (bytes > self.storage().nbytes()) Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}

Tensor& set_whole_storage(Tensor& self, at::Storage storage) {
  const auto count = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_storage(self, std::move(storage), 0, {count}, {1});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

void record_stream(Tensor& self, c10::Stream stream) { record_use(self.storage().data(), static_cast<int>(stream.id())); }

// Kernels

Bytes bytes_of(const Tensor& tensor, bool written) {
  const auto start = reinterpret_cast<uintptr_t>(tensor.data_ptr());
  if (!tensor.numel()) return {start, start, written};
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  return {start, start + (last + 1) * tensor.itemsize(), written};
}

// The same bytes as a tensor of the host, without a reference to their owner.
Tensor on_host(const Tensor& tensor) {
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

// The tensor on_host(), and its bytes noted as used. One of the host goes with the launch, as a kernel's arguments do.
Tensor argument(const Tensor& tensor, bool written, std::vector<Bytes>& uses) {
  if (!tensor.defined()) return tensor;
  if (!is_late(tensor)) {
    TORCH_CHECK(!written, "a kernel of the late device cannot write to the host's memory");
    return tensor.clone();
  }
  uses.push_back(bytes_of(tensor, written));
  return on_host(tensor);
}

struct BelowAutograd {
  at::AutoDispatchBelowADInplaceOrView below;
  at::NoGradGuard no_grad;
};

using OnTensor = std::function<Tensor(const Tensor&)>;

IValue each_tensor(const IValue& value, const OnTensor& change, Device device) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> changed;
    for (const Tensor& one : value.toTensorVector()) changed.push_back(change(one));
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> changed;
    for (const std::optional<Tensor>& one : value.toOptionalTensorVector())
      changed.push_back(one && one->defined() ? std::optional<Tensor>(change(*one)) : one);
    return changed;
  }
  if (value.isDevice()) return device;
  return value;
}

bool writes(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

// An operator's call: its arguments, and for each value that it returns which argument that is, or -1 for a new one.
struct Call {
  const c10::OperatorHandle& op;
  const c10::FunctionSchema& schema;
  std::vector<IValue> arguments;
  std::vector<int> returned;
  bool returns_numbers = false;

  Call(const c10::OperatorHandle& op, torch::jit::Stack& stack) : op(op), schema(op.schema()) {
    arguments = torch::jit::pop(stack, schema.arguments().size());
    for (const c10::Argument& one : schema.returns()) {
      returned.push_back(-1);
      if (!one.alias_info()) {
        returns_numbers |= !one.type()->isSubtypeOf(*c10::TensorType::get()) &&
            !one.type()->isSubtypeOf(*c10::ListType::ofTensors());
        continue;
      }
      TORCH_CHECK_NOT_IMPLEMENTED(writes(one), "the late device has no view ", schema.operator_name());
      for (size_t i = 0; i < arguments.size(); ++i)
        if (writes(schema.arguments()[i]) &&
            schema.arguments()[i].alias_info()->beforeSets() == one.alias_info()->beforeSets())
          returned.back() = static_cast<int>(i);
    }
  }

  Device device() const {
    std::optional<Device> found;
    const OnTensor look = [&](const Tensor& tensor) { if (!found && is_late(tensor)) found = tensor.device(); return tensor; };
    for (const IValue& one : arguments) {
      each_tensor(one, look, device_at(current_device));
      if (!found && one.isDevice()) found = one.toDevice();
    }
    return found && found->type() == kLate && found->has_index() ? *found : device_at(current_device);
  }

  bool grows(size_t i) const {  // an `out=` that the operator sizes
    return writes(schema.arguments()[i]) && arguments[i].isTensor() && arguments[i].toTensor().defined() &&
        arguments[i].toTensor().numel() == 0;
  }

  // The new values, not filled yet; none where only the kernel knows their sizes.
  std::optional<std::vector<IValue>> outputs(Device device) const {
    std::vector<IValue> made(returned.size());
    bool needed = std::find(returned.begin(), returned.end(), -1) != returned.end();
    for (size_t i = 0; i < arguments.size(); ++i) needed |= grows(i);
    if (!needed) return made;
    if (returns_numbers) return std::nullopt;
    const OnTensor to_meta = [](const Tensor& tensor) {
      return tensor.defined() ? at::empty_strided(tensor.sizes(), tensor.strides(), tensor.scalar_type(), at::kStrided, at::kMeta, false) : tensor;
    };
    const OnTensor to_late = [&](const Tensor& tensor) {
      return tensor.defined() ? at::empty_strided(tensor.sizes(), tensor.strides(), tensor.scalar_type(), at::kStrided, device, false) : tensor;
    };
    torch::jit::Stack stack;
    for (const IValue& one : arguments) stack.push_back(each_tensor(one, to_meta, at::kMeta));
    const std::vector<IValue> meta = stack;
    try {
      op.callBoxed(&stack);
    } catch (const std::exception&) {
      return std::nullopt;
    }
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (grows(i)) resize_tensor(arguments[i].toTensor(), meta[i].toTensor().sizes(), std::nullopt);
    }
    for (size_t i = 0; i < made.size(); ++i) if (returned[i] < 0) made[i] = each_tensor(stack[i], to_late, device);
    return made;
  }

  // Arguments of the host's kernel.
  std::vector<IValue> on_host_side(std::vector<Bytes>& uses) const {
    std::vector<IValue> found;
    for (size_t i = 0; i < arguments.size(); ++i) {
      const bool written = writes(schema.arguments()[i]);
      const OnTensor take = [&](const Tensor& tensor) { return argument(tensor, written, uses); };
      found.push_back(each_tensor(arguments[i], take, at::kCPU));
      if (const auto optional = schema.arguments()[i].type()->cast<c10::OptionalType>();
          optional && optional->getElementType()->kind() == c10::TypeKind::GeneratorType) {
        at::Generator drawn = found[i].isNone() ? default_generator(-1) : found[i].toGenerator();
        found[i] = IValue(at::check_generator<Generator>(drawn)->for_launch());
      }
    }
    return found;
  }
};

void run_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  BelowAutograd below;
  Call call(op, *stack);
  const Device device = call.device();
  c10::DeviceGuard guard(device);
  const std::string name = c10::toString(op.operator_name());
  const auto made = call.outputs(device);
  std::vector<Bytes> uses;
  std::vector<IValue> arguments = call.on_host_side(uses);
  const auto push_results = [&](const std::vector<IValue>& results) {
    for (size_t i = 0; i < results.size(); ++i)
      stack->push_back(call.returned[i] < 0 ? results[i] : call.arguments[call.returned[i]]);
  };
  if (!made) {  // the host has to wait, and look
    count_hidden_wait(name + " looks at its result");
    launch(current_stream(), name, uses, [] {});
    wait_on_host(current_stream());
    op.callBoxed(&arguments);
    for (IValue& one : arguments)
      one = each_tensor(one, [&](const Tensor& tensor) { return tensor.defined() ? tensor.to(device, true) : tensor; }, device);
    push_results(arguments);
    return;
  }
  std::vector<IValue> results;
  const OnTensor result = [&](const Tensor& tensor) { return argument(tensor, true, uses); };
  for (const IValue& one : *made) results.push_back(each_tensor(one, result, at::kCPU));
  launch(current_stream(), name, uses, [op, arguments, results, returned = call.returned]() mutable {
    BelowAutograd below;
    op.callBoxed(&arguments);
    for (size_t i = 0; i < results.size(); ++i) {
      if (returned[i] >= 0) continue;
      if (results[i].isTensor()) {
        if (results[i].toTensor().defined()) results[i].toTensor().copy_(arguments[i].toTensor());
        continue;
      }
      const auto to = results[i].toTensorVector(), from = arguments[i].toTensorVector();
      for (size_t k = 0; k < to.size(); ++k) to[k].copy_(from[k]);
    }
  });
  push_results(*made);
}

at::Scalar local_scalar(const Tensor& self) {
  c10::DeviceGuard guard(self.device());
  count_hidden_wait("item");
  launch(current_stream(), "item", {bytes_of(self, false)}, [] {});
  wait_on_host(current_stream());
  return at::native::_local_scalar_dense_cpu(on_host(self));
}

Tensor copy_from(const Tensor& source, const Tensor& destination, bool non_blocking) {
  c10::DeviceGuard guard(is_late(source) ? source.device() : destination.device());
  const int stream = current_stream();
  const bool between = is_late(source) && is_late(destination) && source.device() != destination.device();
  const int other = between ? current_streams[destination.device().index()] : stream;
  if (between) wait_on_stream(stream, record(other));
  std::string waits;
  if (!is_late(source) && !non_blocking) waits = "copy from the host";
  if (!is_late(destination)) {
    if (!non_blocking) waits = "copy to the host";
    else if (!is_page_locked(destination.data_ptr())) waits = "copy to pageable memory";
  }
  if (!waits.empty()) count_hidden_wait(waits);
  // What is not page-locked is taken at once, as it may go.
  const Tensor from = is_late(source) || is_page_locked(source.data_ptr()) ? on_host(source) : source.clone();
  const Tensor to = on_host(destination);
  launch(stream, "copy_", {bytes_of(source, false), bytes_of(destination, true)}, [from, to] {
    BelowAutograd below;
    to.copy_(from);
  });
  if (between) wait_on_stream(other, record(stream));
  if (!waits.empty()) wait_on_host(stream);
  return destination;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& destination) {
  if (destination.sizes() != source.sizes()) destination.resize_(source.sizes());
  return copy_from(source, destination, false);
}

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (train && !*train) return {input.clone(), at::ones_like(input, at::kBool)};
  Tensor mask = at::empty_like(input, at::kBool).bernoulli_(1 - p);
  return {input * mask * (p < 1 ? 1 / (1 - p) : 0.0), mask};
}

// Operators that backends of their own have under another name.
void run_as(const char* name, const char* overload, torch::jit::Stack* stack) {
  run_operator(c10::Dispatcher::singleton().findSchemaOrThrow(name, overload), stack);
}

void convolution(const c10::OperatorHandle&, torch::jit::Stack* stack) { run_as("aten::convolution", "", stack); }

void convolution_backward(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  std::vector<IValue> arguments = torch::jit::pop(*stack, 10);
  const Tensor gradient = arguments[0].toTensor();
  const IValue bias = arguments[9].toBoolList().get(2) ? IValue(std::vector<int64_t>{gradient.size(1)}) : IValue();
  arguments.insert(arguments.begin() + 3, bias);
  for (IValue& one : arguments) stack->push_back(std::move(one));
  run_as("aten::convolution_backward", "", stack);
}

// The host's kernel wants means of the input's type, while those of the meta kernel are in full precision.
void batch_norm_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  std::vector<IValue> arguments = torch::jit::pop(*stack, 10);
  const Tensor input = arguments[1].toTensor();
  const auto weight = arguments[2].toOptional<Tensor>();
  for (const size_t i : {5, 6})
    if (const auto mean = arguments[i].toOptional<Tensor>(); mean && weight && weight->scalar_type() == input.scalar_type())
      arguments[i] = mean->to(input.scalar_type());
  for (IValue& one : arguments) stack->push_back(std::move(one));
  run_operator(op, stack);
}

int64_t attention_of_its_parts(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                               std::optional<double>, bool) {
  return static_cast<int64_t>(sdp::SDPBackend::math);
}

}  // namespace late

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &late::attention_of_its_parts)
}

namespace late {

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("unfold", at::native::unfold);
  m.impl("resize_", resize_tensor);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("record_stream", record_stream);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("native_dropout", native_dropout);
  m.impl("native_batch_norm_backward", torch::CppFunction::makeFromBoxedFunction<&batch_norm_backward>());
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_operator>()); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(conv2d, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
  KERNEL_PRIVATEUSEONE(cross_entropy_loss, fp32)
  KERNEL_PRIVATEUSEONE(mse_loss, fp32)
}

// What Python asks

void set_delays(int64_t compute_us, int64_t others_us) {
  for (int id = 0; id < kStreams; ++id) stream_of(id).delay_us = id % kStreamsEach ? others_us : compute_us;
}

c10::Dict<std::string, int64_t> take_waits() {
  std::lock_guard<std::mutex> guard(ledger());
  c10::Dict<std::string, int64_t> found;
  for (const auto& [reason, count] : host_waits()) found.insert(reason, count);
  host_waits().clear();
  return found;
}

std::vector<std::string> races() {
  std::lock_guard<std::mutex> guard(ledger());
  return memory().races;
}

// Marks that the host sets.
std::map<int64_t, MarkPtr> held;

// Keep a stream from later work until go_on().
int64_t hold(int64_t stream) {
  static int64_t last = 0;
  auto mark = std::make_shared<Mark>();
  wait_on_stream(static_cast<int>(stream), mark);
  std::lock_guard<std::mutex> guard(ledger());
  held[++last] = mark;
  return last;
}

void go_on(int64_t held_by) {
  MarkPtr mark;
  {
    std::lock_guard<std::mutex> guard(ledger());
    mark = held.extract(held_by).mapped();
  }
  mark->set();
}

std::vector<int64_t> memory_sizes() {
  std::lock_guard<std::mutex> guard(ledger());
  return {memory().reserved, memory().most_waiting};
}

TORCH_LIBRARY(late, m) {
  m.def("register_hooks", [] { at::RegisterPrivateUse1HooksInterface(new Hooks); });
  m.def("device_count", [] { return static_cast<int64_t>(kDevices); });
  m.def("set_delays", set_delays);
  m.def("take_waits", take_waits);
  m.def("forbid_waits", [](bool forbidden) { waits_are_errors = forbidden; });
  m.def("races", races);
  m.def("memory_sizes", memory_sizes);
  m.def("hold", hold);
  m.def("go_on", go_on);
  m.def("lock_pages", [](int64_t address, int64_t bytes) { lock_pages(static_cast<uintptr_t>(address), bytes); });
  m.def("unlock_pages", [](int64_t address) { return unlock_pages(static_cast<uintptr_t>(address)); });
  m.def("rng_state", [](int64_t device) { return default_generator(static_cast<int>(device)).get_state(); });
  m.def("set_rng_state", [](const Tensor& state, int64_t device) {
    default_generator(static_cast<int>(device)).set_state(state);
  });
  m.def("manual_seed", [](int64_t seed) {
    for (int device = 0; device < kDevices; ++device) default_generator(device).set_current_seed(seed);
  });
}

}  // namespace late
