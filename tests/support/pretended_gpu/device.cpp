// A pretended CUDA device on a CPU build of PyTorch.
//
// It registers what a CUDA build registers: an allocator, a device guard, hooks, kernels for the dispatch key CUDA
// and a process group. Tensors then say device cuda:N, autograd runs a thread per device, and mixed devices are
// errors. The memory is main memory, and an operator runs its CPU kernel on it.

#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/extension.h>
#include <torch/library.h>

#include <atomic>
#include <map>
#include <mutex>
#include <set>

using c10::IValue;
using torch::jit::Stack;

constexpr int MAX_DEVICES = 64;
static std::atomic<int> num_devices{1};
static thread_local int current_device = 0;
static thread_local int64_t current_stream[MAX_DEVICES] = {};

static int index_of(std::optional<c10::Device> device) {
  int index = device.has_value() && device->index() >= 0 ? device->index() : current_device;
  TORCH_CHECK(index < num_devices, "CUDA error: invalid device ordinal ", index);
  return index;
}

struct OnDevice {
  int before;
  explicit OnDevice(int index) : before(current_device) { current_device = index; }
  ~OnDevice() { current_device = before; }
};

// ---------------------------------------------------------------------------------------------- what Python is told

// Python's function(what, detail) for a wait of the host for the device; None while nobody counts.
static py::object* on_wait = nullptr;

static void tell_wait(const char* kind) {
  if (!on_wait) return;
  py::gil_scoped_acquire gil;
  (*on_wait)(kind);
}

static void set_callback(py::object*& place, py::object function) {
  delete place;
  place = function.is_none() ? nullptr : new py::object(std::move(function));
}

// ------------------------------------------------------------------------------------------------------- memory

static std::atomic<int64_t> allocated[MAX_DEVICES], peak[MAX_DEVICES];

static void count_bytes(int device, int64_t size) {
  int64_t now = (allocated[device] += size);
  if (now > peak[device]) peak[device] = now;
}

struct Block {
  int device;
  size_t size;
  void* memory;
};

struct DeviceAllocator final : c10::Allocator {
  static void release(void* context) {
    auto* block = static_cast<Block*>(context);
    count_bytes(block->device, -int64_t(block->size));
    std::free(block->memory);
    delete block;
  }
  c10::DataPtr allocate(size_t size) override {
    void* memory = nullptr;
    if (size && posix_memalign(&memory, 512, size)) throw std::bad_alloc();
    count_bytes(current_device, size);
    return {memory, new Block{current_device, size, memory}, &release, c10::Device(c10::kCUDA, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};
static DeviceAllocator device_allocator;

static std::mutex pinned_mutex;
static std::map<const char*, size_t> pinned;  // blocks of pinned main memory

struct PinnedAllocator final : c10::Allocator {
  static void release(void* memory) {
    {
      std::lock_guard<std::mutex> guard(pinned_mutex);
      pinned.erase(static_cast<const char*>(memory));
    }
    std::free(memory);
  }
  c10::DataPtr allocate(size_t size) override {
    void* memory = nullptr;
    size = std::max<size_t>(size, 1);
    if (posix_memalign(&memory, 512, size)) throw std::bad_alloc();
    std::lock_guard<std::mutex> guard(pinned_mutex);
    pinned[static_cast<const char*>(memory)] = size;
    return {memory, memory, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};
static PinnedAllocator pinned_allocator;

static bool is_pinned(const void* address) {
  std::lock_guard<std::mutex> guard(pinned_mutex);
  auto block = pinned.upper_bound(static_cast<const char*>(address));
  if (block == pinned.begin()) return false;
  --block;
  return static_cast<const char*>(address) < block->first + block->second;
}

// ------------------------------------------------------------------------------------------- device guard, hooks

static std::atomic<int64_t> next_stream{1};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Device device_of(int index) { return {c10::kCUDA, static_cast<c10::DeviceIndex>(index)}; }
  static c10::Stream stream_of(c10::Device device, int64_t id) {
    int index = device.index() < 0 ? current_device : device.index();
    return c10::Stream(c10::Stream::UNSAFE, device_of(index), id);
  }
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    current_device = device.index();
    return before;
  }
  c10::Device getDevice() const override { return device_of(current_device); }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    return stream_of(device, current_stream[device.index() < 0 ? current_device : device.index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(device, 0); }
  c10::Stream getNewStream(c10::Device device, int = 0) const override { return stream_of(device, next_stream++); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool = false) const override { return getNewStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    current_stream[stream.device_index()] = stream.id();
    return before;
  }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(1);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  c10::DeviceIndex deviceCount() const noexcept override { return num_devices; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 1.0; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

namespace at {
struct PretendedHooks : public CUDAHooksInterface {
  explicit PretendedHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  DeviceIndex current_device() const override { return ::current_device; }
  DeviceIndex getCurrentDevice() const override { return ::current_device; }
  DeviceIndex deviceCount() const override { return num_devices; }
  void setCurrentDevice(DeviceIndex index) const override { ::current_device = index; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    auto before = ::current_device;
    ::current_device = index;
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return index < 0 ? ::current_device : exchangeDevice(index);
  }
  int getNumGPUs() const override { return num_devices; }
  std::string showConfig() const override { return "pretended"; }
  Device getDeviceFromPtr(void*) const override { return Device(kCUDA, ::current_device); }
  void deviceSynchronize(DeviceIndex) const override {}
};
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, PretendedHooks)
}  // namespace at

// ----------------------------------------------------------------------------- the same memory, seen as the other's

static const c10::DispatchKeySet CPU_KEYS{c10::DispatchKey::CPU};
static const c10::DispatchKeySet CUDA_KEYS{c10::DispatchKey::CUDA};

static at::Tensor build_view(at::Storage storage, c10::DispatchKeySet keys, const at::Tensor& like) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return tensor;
}

// Aliases in main memory of the storages of one call.
struct Aliases {
  std::map<c10::StorageImpl*, at::Storage> alias_of;     // of a device's storage
  std::map<c10::StorageImpl*, at::Storage> original_of;  // of an alias

  at::Tensor to_cpu(const at::Tensor& tensor) {
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    auto found = alias_of.find(storage);
    if (found == alias_of.end()) {
      at::Storage original = tensor.storage();
      auto release = [](void* holder) { delete static_cast<at::Storage*>(holder); };
      c10::DataPtr memory{original.mutable_data(), new at::Storage(original), release, c10::Device(c10::kCPU)};
      auto by_size = c10::Storage::use_byte_size_t();
      at::Storage alias(by_size, original.nbytes(), std::move(memory), c10::GetAllocator(c10::kCPU), true);
      original_of[alias.unsafeGetStorageImpl()] = original;
      found = alias_of.emplace(storage, alias).first;
    }
    auto alias = build_view(found->second, CPU_KEYS, tensor);
    if (tensor.is_neg()) alias._set_neg(true);
    if (tensor.is_conj()) alias._set_conj(true);
    return alias;
  }

  std::vector<at::Tensor> to_cpu(const std::vector<at::Tensor>& tensors) {
    std::vector<at::Tensor> aliases;
    for (auto& tensor : tensors) aliases.push_back(to_cpu(tensor));
    return aliases;
  }

  // A result of a CPU kernel becomes the device's: what it shares a storage with, or memory of its own.
  at::Tensor to_device(const at::Tensor& tensor, int device);
};

struct Adopted {
  at::Storage storage;
  int device;
  size_t size;
};

static at::Storage adopt_storage(const at::Storage& storage, int device) {
  count_bytes(device, storage.nbytes());
  auto release = [](void* context) {
    auto* adopted = static_cast<Adopted*>(context);
    count_bytes(adopted->device, -int64_t(adopted->size));
    delete adopted;
  };
  auto* adopted = new Adopted{storage, device, storage.nbytes()};
  c10::DataPtr memory{storage.mutable_data(), adopted, release, c10::Device(c10::kCUDA, device)};
  auto by_size = c10::Storage::use_byte_size_t();
  return at::Storage(by_size, storage.nbytes(), std::move(memory), &device_allocator, true);
}

at::Tensor Aliases::to_device(const at::Tensor& tensor, int device) {
  if (!tensor.defined() || !tensor.device().is_cpu()) return tensor;
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  auto found = original_of.find(storage);
  if (found == original_of.end()) found = original_of.emplace(storage, adopt_storage(tensor.storage(), device)).first;
  return build_view(found->second, CUDA_KEYS, tensor);
}

// ------------------------------------------------------------------------- every operator that has no kernel below

static std::set<std::string> cuda_kernels;  // operators that have a CUDA kernel; empty: all

static bool starts_with(const std::string& text, const char* prefix) { return text.rfind(prefix, 0) == 0; }

// A CUDA build multiplies matrices of floating-point numbers only.
static void require_kernel_for_type(const std::string& name, const at::Tensor& tensor) {
  static const std::set<std::string> products{"aten::mm",  "aten::addmm",   "aten::bmm", "aten::baddbmm",
                                              "aten::mv",  "aten::addmv",   "aten::dot", "aten::_addmm_activation",
                                              "aten::addbmm"};
  if (!products.count(name.substr(0, name.find('.')))) return;
  TORCH_CHECK_NOT_IMPLEMENTED(at::isFloatingType(tensor.scalar_type()) || at::isComplexType(tensor.scalar_type()), "\"",
                              name, "_cuda\" not implemented for '", c10::toString(tensor.scalar_type()), "'");
}

// Of operators whose result has a size that only the device knows.
static bool waits_for_size(const std::string& name, const Stack& stack, size_t base) {
  static const std::set<std::string> always{"aten::nonzero",  "aten::masked_select",      "aten::equal",   "aten::_unique2",
                                            "aten::bincount", "aten::unique_consecutive", "aten::_unique", "aten::unique_dim"};
  if (always.count(name.substr(0, name.find('.')))) return true;
  if (starts_with(name, "aten::repeat_interleave")) return stack[base + 1].isNone();
  return false;
}

// Put what a function makes of a tensor, or of each in a list, in its place; false for anything else.
template <class Function>
bool change_tensors(IValue& value, Function function) {
  if (value.isTensor()) {
    value = function(value.toTensor());
    return true;
  }
  if (!value.isTensorList()) return false;
  c10::List<at::Tensor> list;
  for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(function(tensor));
  value = list;
  return true;
}

static void run_cpu_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const auto& schema = op.schema();
  const std::string overload = schema.overload_name();
  const std::string name = schema.name() + (overload.empty() ? "" : "." + overload);
  TORCH_CHECK_NOT_IMPLEMENTED(cuda_kernels.empty() || cuda_kernels.count(name), "Could not run '", name,
                              "' with arguments from the 'CUDA' backend: it has no CUDA kernel.");
  const size_t num_arguments = schema.arguments().size(), base = stack->size() - num_arguments;
  const bool indexes = starts_with(name, "aten::index") || starts_with(name, "aten::_index_put") ||
                       starts_with(name, "aten::_unsafe_index");
  const bool steps = starts_with(name, "aten::_fused_adam");

  auto for_each = [&](auto function) {
    for (size_t i = 0; i < num_arguments; i++) {
      const IValue& value = (*stack)[base + i];
      if (value.isTensor()) {
        function(value.toTensor(), i);
      } else if (value.isList()) {
        for (const IValue& element : value.toListRef())
          if (element.isTensor()) function(element.toTensor(), i);
      }
    }
  };
  int device = -1;
  for_each([&](const at::Tensor& tensor, size_t) {
    if (!tensor.defined() || !tensor.device().is_cuda()) return;
    TORCH_CHECK(device < 0 || device == tensor.device().index(), "Expected all tensors to be on the same device, but found "
                "at least two devices, cuda:", device, " and ", tensor.device(), "! (", name, ")");
    device = tensor.device().index();
    require_kernel_for_type(name, tensor);
  });
  for_each([&](const at::Tensor& tensor, size_t i) {
    if (!tensor.defined() || device < 0) return;
    const bool is_index = indexes && i >= 1 && tensor.dim() > 0;
    if (is_index && (tensor.device().is_cpu() || tensor.scalar_type() == at::kBool)) tell_wait("index");
    if (!tensor.device().is_cpu() || is_index) return;
    // A number may lie in main memory, but for the states of a fused optimizer.
    if (tensor.dim() == 0 && (!steps || schema.arguments()[i].name() == "lr")) return;
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, cuda:", device,
                " and cpu! (", name, ", argument ", schema.arguments()[i].name(), ")");
  });
  if (device < 0) device = current_device;
  if (waits_for_size(name, *stack, base)) tell_wait(name.c_str() + sizeof("aten::") - 1);

  Aliases aliases;
  std::vector<at::Tensor> originals, replaced;
  auto replace = [&](const at::Tensor& tensor) -> at::Tensor {
    if (!tensor.defined() || !tensor.device().is_cuda()) return tensor;
    originals.push_back(tensor);
    replaced.push_back(aliases.to_cpu(tensor));
    return replaced.back();
  };
  for (size_t i = 0; i < num_arguments; i++) {
    IValue& value = (*stack)[base + i];
    if (change_tensors(value, replace)) continue;
    if (value.isList()) {  // of optional tensors
      c10::impl::GenericList list(value.toList().elementType());
      for (const IValue& element : value.toListRef())
        list.push_back(element.isTensor() ? IValue(replace(element.toTensor())) : element);
      value = list;
    } else if (value.isDevice()) {
      value = c10::Device(c10::kCPU);
    } else if (value.isGenerator()) {
      TORCH_CHECK(value.toGenerator().device().is_cuda(),
                  "Expected a 'cuda' device type for generator but found 'cpu' (", name, ")");
      value = IValue();
    }
  }
  op.redispatchBoxed(CPU_KEYS, stack);

  // The kernel may have resized what it wrote to.
  for (size_t i = 0; i < originals.size(); i++) {
    auto& original = originals[i];
    auto& alias = replaced[i];
    if (alias.storage().data() != original.storage().data()) {
      auto moved = adopt_storage(at::Storage(alias.storage()), device);
      auto* storage = original.storage().unsafeGetStorageImpl();
      storage->set_data_ptr_noswap(std::move(moved.unsafeGetStorageImpl()->mutable_data_ptr()));
      storage->set_nbytes(alias.storage().nbytes());
    }
    if (!alias.sizes().equals(original.sizes()) || !alias.strides().equals(original.strides()) ||
        alias.storage_offset() != original.storage_offset())
      original.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
  }
  auto give_back = [&](const at::Tensor& tensor) -> at::Tensor {
    if (!tensor.defined()) return tensor;
    for (size_t i = 0; i < replaced.size(); i++)
      if (replaced[i].is_same(tensor)) return originals[i];
    return aliases.to_device(tensor, device);
  };
  const size_t num_returns = schema.returns().size(), returns_base = stack->size() - num_returns;
  for (size_t i = 0; i < num_returns; i++) {
    change_tensors((*stack)[returns_base + i], give_back);
  }
}
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_cpu_kernel>()); }

// -------------------------------------------------------------------- the few operators that a device has itself

using Format = std::optional<at::MemoryFormat>;
using Type = std::optional<at::ScalarType>;

static at::Tensor empty(c10::IntArrayRef size, Type type, std::optional<at::Layout>, std::optional<at::Device> device,
                        std::optional<bool>, Format format) {
  OnDevice on(index_of(device));
  return at::detail::empty_generic(size, &device_allocator, CUDA_KEYS, c10::dtype_or_default(type), format);
}

static at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, Type type, std::optional<at::Layout>,
                                std::optional<at::Device> device, std::optional<bool>) {
  OnDevice on(index_of(device));
  auto chosen = c10::dtype_or_default(type);
  return at::detail::empty_strided_generic(size, stride, &device_allocator, CUDA_KEYS, chosen);
}

static at::Tensor as_strided(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride,
                             std::optional<int64_t> offset) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(self.storage()),
                                                       self.key_set(), self.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset.value_or(self.storage_offset()));
  return view;
}

template <typename Function>
static at::Tensor view_by(const at::Tensor& self, Function function) {
  Aliases aliases;
  c10::impl::ExcludeDispatchKeyGuard below_autograd(c10::autograd_dispatch_keyset);
  return build_view(self.storage(), CUDA_KEYS, function(aliases.to_cpu(self)));
}
static at::Tensor view(const at::Tensor& self, c10::IntArrayRef size) {
  return view_by(self, [&](const at::Tensor& alias) { return alias.view(size); });
}
static at::Tensor view_dtype(const at::Tensor& self, at::ScalarType type) {
  return view_by(self, [&](const at::Tensor& alias) { return alias.view(type); });
}
static at::Tensor unfold(const at::Tensor& self, int64_t dim, int64_t size, int64_t step) {
  return view_by(self, [&](const at::Tensor& alias) { return alias.unfold(dim, size, step); });
}
static at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return ::as_strided(self, size, stride, self.storage_offset());
}

static at::Tensor& set_storage(at::Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size,
                               c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  std::vector<int64_t> strides(stride.begin(), stride.end());
  if (stride.size() != size.size()) {
    strides.assign(size.size(), 1);
    for (int64_t i = int64_t(size.size()) - 2; i >= 0; i--) strides[i] = strides[i + 1] * std::max<int64_t>(size[i + 1], 1);
  }
  impl->set_sizes_and_strides(size, strides, offset);
  return self;
}
static at::Tensor& set_whole_storage(at::Tensor& self, at::Storage storage) {
  int64_t size = storage.nbytes() / self.dtype().itemsize();
  return set_storage(self, std::move(storage), 0, {size}, {1});
}
static at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
static at::Tensor& set_empty(at::Tensor& self) { return set_tensor(self, at::empty({0}, self.options())); }

static void resize_storage(const at::Storage& storage, size_t size) {
  auto* impl = storage.unsafeGetStorageImpl();
  OnDevice on(impl->device().index());
  auto fresh = device_allocator.allocate(size);
  if (size && impl->nbytes()) std::memcpy(fresh.get(), impl->data(), std::min(size, impl->nbytes()));
  impl->set_data_ptr_noswap(std::move(fresh));
  impl->set_nbytes(size);
}
static const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size, Format) {
  int64_t numel = 1;
  for (auto length : size) numel *= length;
  size_t needed = (numel + self.storage_offset()) * self.dtype().itemsize();
  if (numel && self.storage().nbytes() < needed) resize_storage(self.storage(), needed);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

static at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  Aliases aliases;
  const bool to_device = self.device().is_cuda(), from_device = source.device().is_cuda();
  if (to_device != from_device && source.numel()) {
    const bool is_async = non_blocking && is_pinned((to_device ? source : self).storage().data());
    if (!is_async) tell_wait(to_device ? "to device" : "to host");
  }
  c10::impl::ExcludeDispatchKeyGuard below_autograd(c10::autograd_dispatch_keyset);
  (to_device ? aliases.to_cpu(self) : self).copy_(from_device ? aliases.to_cpu(source) : source);
  return self;
}

static at::Scalar read_number(const at::Tensor& self) {
  Aliases aliases;
  c10::impl::ExcludeDispatchKeyGuard below_autograd(c10::autograd_dispatch_keyset);
  tell_wait("item");
  return at::_local_scalar_dense(aliases.to_cpu(self));
}

static void record_stream(at::Tensor&, at::Stream) {}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("view.dtype", &view_dtype);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("unfold", &unfold);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_empty);
  m.impl("resize_", &resize);
  m.impl("copy_", &copy);
  m.impl("_local_scalar_dense", &read_number);
  m.impl("record_stream", &record_stream);
}

// ----------------------------------------------------------------------------------------------------- collectives

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// A collective that is over: the collectives of this process group are blocking.
struct Done final : c10d::Work {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  Tensors tensors;
  explicit Done(Tensors results) : tensors(std::move(results)) {
    std::vector<c10::Device> devices;
    if (!tensors.empty()) devices.push_back(tensors[0].device());
    future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
    future->markCompleted(IValue(tensors));
  }
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  void synchronize() override {}
  Tensors result() override { return tensors; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
};

// What NCCL takes, carried out by another process group in main memory: tensors of the device, contiguous ones.
struct PretendedNCCL final : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> inner;
  py::object on_collective;  // function(what, tensors), before it begins

  PretendedNCCL(c10::intrusive_ptr<c10d::Backend> backend, int rank, int size, py::object function)
      : Backend(rank, size), inner(std::move(backend)), on_collective(std::move(function)) {}
  ~PretendedNCCL() override {
    // The group may be destroyed by a thread without Python's lock, or after Python.
    py::handle function = on_collective.release();
    if (!Py_IsInitialized()) return;
    py::gil_scoped_acquire gil;
    function.dec_ref();
  }
  const std::string getBackendName() const override { return "nccl"; }
  bool supportsSplitting() const override { return false; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void setTimeout(std::chrono::milliseconds) override {}

  void begin(const std::string& what, const Tensors& tensors) {
    std::string shapes;
    for (auto& tensor : tensors) {
      TORCH_CHECK(tensor.is_cuda(), "No backend type associated with device type cpu (", what, ")");
      TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous (", what, ")");
      shapes += c10::str(" ", c10::toString(tensor.scalar_type()), tensor.sizes());
    }
    py::gil_scoped_acquire gil;
    on_collective(what, shapes);
  }
  static WorkPtr done(Tensors tensors) { return c10::make_intrusive<Done>(std::move(tensors)); }
  static bool averages(const c10d::ReduceOp& op) { return op == c10d::ReduceOp::AVG; }
  static c10d::ReduceOp without_average(const c10d::ReduceOp& op) {
    return averages(op) ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;  // gloo has no average
  }
  static std::string name(const c10d::ReduceOp& op) {
    static const char* names[] = {"sum", "avg", "product", "min", "max"};
    int number = static_cast<c10d::ReduceOp::RedOpType>(op);
    return number < 5 ? names[number] : c10::str("op ", number);
  }
  void divide(Tensors& tensors, const c10d::ReduceOp& op) {
    if (averages(op))
      for (auto& tensor : tensors) tensor.div_(getSize());
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    begin(c10::str("broadcast from ", options.rootRank), tensors);
    Aliases aliases;
    auto own = aliases.to_cpu(tensors);
    inner->broadcast(own, options)->wait();
    return done(tensors);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    begin("all_reduce " + name(options.reduceOp), tensors);
    Aliases aliases;
    auto own = aliases.to_cpu(tensors);
    auto summed = options;
    summed.reduceOp = without_average(options.reduceOp);
    inner->allreduce(own, summed)->wait();
    divide(own, options.reduceOp);
    return done(tensors);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    c10d::AllreduceOptions single;
    single.reduceOp = options.reduceOp;
    for (auto& tensor : tensors) {
      Tensors one{tensor};
      allreduce(one, single);
    }
    return done(tensors);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    begin(c10::str("reduce ", name(options.reduceOp), " to ", options.rootRank), tensors);
    Aliases aliases;
    auto own = aliases.to_cpu(tensors);
    auto summed = options;
    summed.reduceOp = without_average(options.reduceOp);
    inner->reduce(own, summed)->wait();
    divide(own, options.reduceOp);
    return done(tensors);
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    Tensors all = inputs;
    for (auto& output : outputs) all.insert(all.end(), output.begin(), output.end());
    begin("all_gather", all);
    Aliases aliases;
    std::vector<Tensors> own;
    for (auto& output : outputs) own.push_back(aliases.to_cpu(output));
    auto given = aliases.to_cpu(inputs);
    inner->allgather(own, given, options)->wait();
    return done(outputs.empty() ? Tensors{} : outputs[0]);
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    begin("all_gather_into_tensor", {input, output});
    Aliases aliases;
    Tensors given{aliases.to_cpu(input).clone().view({-1})};
    std::vector<Tensors> gathered(1);
    for (int i = 0; i < getSize(); i++) gathered[0].push_back(at::empty_like(given[0]));
    inner->allgather(gathered, given, options)->wait();
    aliases.to_cpu(output).view({-1}).copy_(at::cat(gathered[0]));
    return done({output});
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    for (size_t i = 0; i < outputs.size(); i++) _allgather_base(outputs[i], inputs[i], options);
    return done(outputs);
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    begin(c10::str("gather to ", options.rootRank), inputs);
    Aliases aliases;
    std::vector<Tensors> own;
    for (auto& output : outputs) own.push_back(aliases.to_cpu(output));
    auto given = aliases.to_cpu(inputs);
    inner->gather(own, given, options)->wait();
    return done(inputs);
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    begin(c10::str("scatter from ", options.rootRank), outputs);
    Aliases aliases;
    std::vector<Tensors> given;
    for (auto& input : inputs) given.push_back(aliases.to_cpu(input));
    auto own = aliases.to_cpu(outputs);
    inner->scatter(own, given, options)->wait();
    return done(outputs);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    begin("reduce_scatter_tensor " + name(options.reduceOp), {input, output});
    Aliases aliases;
    Tensors own{aliases.to_cpu(input).clone()};
    c10d::AllreduceOptions summed;
    summed.reduceOp = without_average(options.reduceOp);
    inner->allreduce(own, summed)->wait();
    divide(own, options.reduceOp);
    auto result = aliases.to_cpu(output).view({-1});
    result.copy_(own[0].view({-1}).narrow(0, int64_t(getRank()) * result.numel(), result.numel()));
    return done({output});
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    Tensors flat;
    for (auto& tensor : inputs[0]) flat.push_back(tensor.reshape({-1}));
    auto input = at::cat(flat);
    return _reduce_scatter_base(outputs[0], input, options);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    for (size_t i = 0; i < outputs.size(); i++) _reduce_scatter_base(outputs[i], inputs[i], options);
    return done(outputs);
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override {
    begin("all_to_all_single", {input, output});
    Aliases aliases;
    auto own = aliases.to_cpu(output), given = aliases.to_cpu(input);
    inner->alltoall_base(own, given, output_sizes, input_sizes, options)->wait();
    return done({output});
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    begin(c10::str("send to ", to), tensors);
    Aliases aliases;
    auto own = aliases.to_cpu(tensors);
    inner->send(own, to, tag)->wait();
    return done(tensors);
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    begin(c10::str("recv from ", from), tensors);
    Aliases aliases;
    auto own = aliases.to_cpu(tensors);
    inner->recv(own, from, tag)->wait();
    return done(tensors);
  }
  WorkPtr barrier(const c10d::BarrierOptions&) override {
    begin("barrier", {});
    inner->barrier(c10d::BarrierOptions())->wait();
    return done({});
  }
};

namespace c10d {
struct PretendedTimer final : Timer {  // of DDP's reducer
  explicit PretendedTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    auto from = getTimeRef(start), to = getTimeRef(end);
    if (from < 0 || to < 0) return std::nullopt;
    return to - from;
  }
};
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, PretendedTimer)
}  // namespace c10d

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  c10::SetAllocator(c10::kCUDA, &device_allocator);
  m.def("build_process_group", [](const c10::intrusive_ptr<c10d::Backend>& inner, int rank, int size,
                                  py::object on_collective) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<PretendedNCCL>(inner, rank, size, std::move(on_collective));
  });
  m.def("set_on_wait", [](py::object function) { set_callback(on_wait, std::move(function)); });
  m.def("set_cuda_kernels", [](std::set<std::string> names) { cuda_kernels = std::move(names); });
  m.def("set_device_count", [](int count) { num_devices = count; });
  m.def("device_count", [] { return num_devices.load(); });
  m.def("get_device", [] { return current_device; });
  m.def("set_device", [](int index) { current_device = index_of(c10::Device(c10::kCUDA, index)); });
  m.def("allocated", [](int device) { return allocated[device].load(); });
  m.def("peak", [](int device) { return peak[device].load(); });
  m.def("reset_peak", [](int device) { peak[device] = allocated[device].load(); });
  m.def("resize_storage", [](at::Tensor tensor, int64_t size) { resize_storage(tensor.storage(), size); });
}
