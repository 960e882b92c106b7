#include "cuda_products.h"

#include "program.h"

#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <algorithm>
#include <iterator>
#include <mutex>
#include <sstream>

namespace inductor {
namespace {

// ---- cuBLASLt's interface, as far as it is used: constants and layouts of its C header, which do not change. ----

using Status = int;

namespace lt {
enum Type : int { Float = 0, Half = 2, BFloat16 = 14 };
enum Compute : int { Compute32 = 68, ComputeTensorFloat32 = 77 };
enum Descriptor : int { TransposeA = 3, TransposeB = 4, Epilogue = 7, BiasPointer = 8 };
enum Layout : int { BatchCount = 5, BatchStride = 6 };
enum Preference : int { MaxWorkspace = 1, AlignmentA = 5, AlignmentB = 6, AlignmentC = 7, AlignmentD = 8 };
constexpr int32_t kEpilogueBias = 4;

struct Heuristic {
  uint64_t algorithm[8];
  size_t workspace;
  Status status;
  float waves;
  int reserved[4];
};
}  // namespace lt

struct Library {
  Status (*create)(void**);
  Status (*descriptor_create)(void**, int compute, int scale);
  Status (*descriptor_set)(void*, int, const void*, size_t);
  Status (*descriptor_destroy)(void*);
  Status (*layout_create)(void**, int type, uint64_t rows, uint64_t columns, int64_t leading);
  Status (*layout_set)(void*, int, const void*, size_t);
  Status (*layout_destroy)(void*);
  Status (*preference_create)(void**);
  Status (*preference_set)(void*, int, const void*, size_t);
  Status (*preference_destroy)(void*);
  Status (*heuristic)(void*, void*, void*, void*, void*, void*, void*, int, lt::Heuristic*, int*);
  Status (*check)(void*, void*, void*, void*, void*, void*, const void*, lt::Heuristic*);
  size_t (*version)();
  Status (*multiply)(
      void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*, void*, void*, void*, const void*,
      void*, size_t, void*);
  // The memory that torch lends cuBLASLt on the current stream, and its size; null where this torch does not say.
  void* (*workspace)();
  size_t (*workspace_size)();
  // Whether torch tunes products itself, which only ATen's own calls let it; null where this torch does not say.
  void* (*tuning_context)();
  bool (*is_tuning)(const void*);
};

template <class F>
bool find(void* library, const char* name, F& function) {
  function = reinterpret_cast<F>(dlsym(library, name));
  return function != nullptr;
}

// The library that torch's own CUDA part is linked with; null where there is none.
const Library* library() {
  static const std::optional<Library> loaded = []() -> std::optional<Library> {
    void* torch = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    if (torch == nullptr) return std::nullopt;
    Library found{};
    const bool whole = find(torch, "cublasLtCreate", found.create) &&
        find(torch, "cublasLtMatmulDescCreate", found.descriptor_create) &&
        find(torch, "cublasLtMatmulDescSetAttribute", found.descriptor_set) &&
        find(torch, "cublasLtMatmulDescDestroy", found.descriptor_destroy) &&
        find(torch, "cublasLtMatrixLayoutCreate", found.layout_create) &&
        find(torch, "cublasLtMatrixLayoutSetAttribute", found.layout_set) &&
        find(torch, "cublasLtMatrixLayoutDestroy", found.layout_destroy) &&
        find(torch, "cublasLtMatmulPreferenceCreate", found.preference_create) &&
        find(torch, "cublasLtMatmulPreferenceSetAttribute", found.preference_set) &&
        find(torch, "cublasLtMatmulPreferenceDestroy", found.preference_destroy) &&
        find(torch, "cublasLtMatmulAlgoGetHeuristic", found.heuristic) &&
        find(torch, "cublasLtMatmulAlgoCheck", found.check) && find(torch, "cublasLtGetVersion", found.version) &&
        find(torch, "cublasLtMatmul", found.multiply);
    if (!whole) return std::nullopt;
    find(torch, "_ZN2at4cuda22getCUDABlasLtWorkspaceEv", found.workspace);
    find(torch, "_ZN2at4cuda26getCUDABlasLtWorkspaceSizeEv", found.workspace_size);
    find(torch, "_ZN2at4cuda7tunable16getTuningContextEv", found.tuning_context);
    find(torch, "_ZNK2at4cuda7tunable13TuningContext18IsTunableOpEnabledEv", found.is_tuning);
    return found;
  }();
  return loaded ? &*loaded : nullptr;
}

// A device's handle. The mutex guards it and the plans of all that run there.
struct Device {
  std::mutex mutex;
  void* handle = nullptr;
};

constexpr int kMaxDevices = 64;

Device& device(int index) {
  static std::array<Device, kMaxDevices> devices;
  return devices[index];
}

// An object of the library, freed with its owner.
class Owned {
 public:
  using Destroy = Status (*)(void*);
  explicit Owned(Destroy destroy) : destroy_(destroy) {}
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() {
    if (object_ != nullptr) destroy_(object_);
  }
  void** place() { return &object_; }
  void* get() const { return object_; }

 private:
  Destroy destroy_;
  void* object_ = nullptr;
};

// ---- What is asked for. ----

std::optional<ColumnMajor> column_major(const at::Tensor& matrix) {
  const int64_t dims = matrix.dim(), rows = matrix.size(dims - 2), columns = matrix.size(dims - 1);
  const int64_t down = matrix.stride(dims - 2), along = matrix.stride(dims - 1);
  if (rows < 1 || columns < 1) return std::nullopt;
  ColumnMajor found;
  found.batch_stride = dims == 3 && matrix.size(0) > 1 ? matrix.stride(0) : 0;
  const bool by_rows = (along == 1 || columns == 1) && (rows == 1 || down >= columns);
  const bool by_columns = (down == 1 || rows == 1) && (columns == 1 || along >= rows);
  if (by_rows) {
    found.rows = columns, found.columns = rows, found.leading = rows == 1 ? columns : down;
  } else if (by_columns) {
    found.rows = rows, found.columns = columns, found.leading = columns == 1 ? rows : along, found.transposed = true;
  } else {
    return std::nullopt;
  }
  return found;
}

// Whether each row of the result gets the same contiguous row.
bool is_row(const at::Tensor& added, int64_t columns) {
  const int64_t dims = added.dim();
  if (dims < 1 || added.size(dims - 1) != columns || (columns > 1 && added.stride(dims - 1) != 1)) return false;
  for (int64_t dim = 0; dim < dims - 1; ++dim) {
    if (added.size(dim) != 1 && added.stride(dim) != 0) return false;
  }
  return true;
}

// What of torch's settings decides how numbers of a type are multiplied; nothing where only ATen heeds them.
std::optional<int> compute_type(at::ScalarType type) {
  const at::Context& context = at::globalContext();
  constexpr auto usual = at::CuBLASReductionOption::AllowReducedPrecisionWithSplitK;
  switch (type) {
    case at::kFloat:
      switch (context.float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL)) {
        case at::Float32Precision::TF32:
          return lt::ComputeTensorFloat32;
        case at::Float32Precision::NONE:
        case at::Float32Precision::IEEE:
          return lt::Compute32;
        default:
          return std::nullopt;
      }
    case at::kHalf:
      if (context.allowFP16ReductionCuBLAS() != usual || context.allowFP16AccumulationCuBLAS()) return std::nullopt;
      return lt::Compute32;
    case at::kBFloat16:
      if (context.allowBF16ReductionCuBLAS() != usual) return std::nullopt;
      return lt::Compute32;
    default:
      return std::nullopt;
  }
}

int element_type(at::ScalarType type) {
  return type == at::kFloat ? lt::Float : type == at::kHalf ? lt::Half : lt::BFloat16;
}

bool left_to_aten(const Library& library) {
  at::Context& context = at::globalContext();
  if (context.deterministicAlgorithms()) return true;  // ATen asks for a fixed workspace then
  // Cublas is also what Default becomes, and no refusal of cuBLASLt: ATen itself adds rows by it then.
  if (context.blasPreferredBackend() == at::BlasBackend::Ck) return true;
  return library.tuning_context != nullptr && library.is_tuning != nullptr && library.is_tuning(library.tuning_context());
}

// The largest power of two that divides an address, up to what the library asks about.
uint32_t alignment(const void* address) {
  const auto number = reinterpret_cast<uintptr_t>(address) | 256;
  return static_cast<uint32_t>(number & (~number + 1));
}

bool is_plain(const at::Tensor& tensor, const at::Tensor& like) {
  return tensor.defined() && tensor.device() == like.device() && tensor.scalar_type() == like.scalar_type() && !tensor.is_neg() &&
      tensor.layout() == at::kStrided;
}

constexpr double kLarge = 3e9;  // multiplications that take a large GPU about as long as ATen takes the host
constexpr size_t kWorkspace = size_t{32} << 20;  // bytes at most; what ATen gives the library on a Hopper GPU

}  // namespace

std::optional<ProductLayout> product_layout(const at::Tensor& a, const at::Tensor& b, const std::optional<at::Tensor>& added) {
  const int64_t dims = a.dim();
  if ((dims != 2 && dims != 3) || b.dim() != dims || a.size(dims - 1) != b.size(dims - 2)) return std::nullopt;
  if (dims == 3 && (a.size(0) != b.size(0) || a.size(0) < 1)) return std::nullopt;
  const int64_t rows = a.size(dims - 2), columns = b.size(dims - 1);
  if (rows == 1 || columns == 1) return std::nullopt;  // ATen has kernels for vectors
  const auto left = column_major(b), right = column_major(a);
  if (!left || !right) return std::nullopt;
  ProductLayout layout{*left, *right, {columns, rows, columns, rows * columns, false}, std::nullopt, false, 1};
  if (dims == 3) layout.batch = a.size(0);
  if (layout.batch == 1) layout.out.batch_stride = 0;
  if (!added) return layout;
  layout.row = is_row(*added, columns);
  if (layout.row) return layout;
  if (added->dim() != dims || added->size(dims - 2) != rows || added->size(dims - 1) != columns) return std::nullopt;
  if (dims == 3 && added->size(0) != layout.batch) return std::nullopt;
  layout.added = column_major(*added);
  if (!layout.added || layout.added->transposed) return std::nullopt;
  return layout;
}

bool ProductLayout::pays() const {
  const double depth = static_cast<double>(right.transposed ? right.columns : right.rows);
  return row || static_cast<double>(batch) * out.rows * out.columns * depth <= kLarge;
}

namespace {

// All that decides which kernels there are and how fast they are, but for the device.
struct Request {
  ProductLayout layout;
  at::ScalarType type = at::ScalarType::Undefined;
  int compute = 0;
  std::array<uint32_t, 4> alignments{};  // of what is on the left, on the right, added, and of the result

  bool operator==(const Request&) const = default;
};

struct Operands {
  const void *left, *right, *added;
  void* out;
  at::Device device;
  void* stream;
};

// A request's name in a file of choices.
std::string key_of(const Request& request, const Library& library, int device) {
  std::string name = device_name(device);
  std::replace(name.begin(), name.end(), ' ', '-');
  std::ostringstream key;
  key << name << "/cublaslt-" << library.version() << '/' << c10::toString(request.type) << '-' << request.compute;
  const ProductLayout& layout = request.layout;
  for (const ColumnMajor& matrix : {layout.left, layout.right, layout.added.value_or(ColumnMajor{})}) {
    key << '/' << matrix.rows << 'x' << matrix.columns << ':' << matrix.leading << '+' << matrix.batch_stride << (matrix.transposed ? "t" : "");
  }
  key << '/' << layout.batch << (layout.row ? "row" : "");
  for (const uint32_t alignment : request.alignments) key << '/' << alignment;
  return key.str();
}

constexpr int kAnswers = 8;         // of the library, that are timed
constexpr size_t kKeptPlans = 64;   // of products that are written in groups of rows
constexpr double kNotWorth = 0.98;  // of the time of what is done where nothing is measured

}  // namespace

// What the library was asked, and what is done.
struct CudaProduct::Plan {
  const Library& library;
  const Request request;
  Owned descriptor{library.descriptor_destroy};
  Owned left{library.layout_destroy}, right{library.layout_destroy}, added{library.layout_destroy}, out{library.layout_destroy};
  ProductChoice chosen;

  Plan(const Library& found, const Request& wanted) : library(found), request(wanted) {}

  bool make(Owned& place, const ColumnMajor& matrix) {
    const int type = element_type(request.type);
    if (library.layout_create(place.place(), type, matrix.rows, matrix.columns, matrix.leading) != 0) return false;
    if (request.layout.batch == 1) return true;
    const auto count = static_cast<int32_t>(request.layout.batch);
    return library.layout_set(place.get(), lt::BatchCount, &count, sizeof count) == 0 &&
        library.layout_set(place.get(), lt::BatchStride, &matrix.batch_stride, sizeof matrix.batch_stride) == 0;
  }

  bool describe() {
    if (library.descriptor_create(descriptor.place(), request.compute, lt::Float) != 0) return false;
    const ProductLayout& layout = request.layout;
    const auto set = [&](int what, int32_t value) { return library.descriptor_set(descriptor.get(), what, &value, sizeof value) == 0; };
    return set(lt::TransposeA, layout.left.transposed) && set(lt::TransposeB, layout.right.transposed) &&
        (!layout.row || set(lt::Epilogue, lt::kEpilogueBias)) && make(left, layout.left) && make(right, layout.right) &&
        make(out, layout.out) && (!layout.added || make(added, *layout.added));
  }

  bool point_at(const void* row) { return library.descriptor_set(descriptor.get(), lt::BiasPointer, &row, sizeof row) == 0; }
  void* third() const { return request.layout.added ? added.get() : out.get(); }

  // The library's first answers, the one that it deems the fastest in front.
  std::vector<ProductChoice> ask(void* handle, int most) {
    Owned preference{library.preference_destroy};
    if (library.preference_create(preference.place()) != 0) return {};
    const auto set = [&](int what, const auto& value) {
      return library.preference_set(preference.get(), what, &value, sizeof value) == 0;
    };
    const auto& aligned = request.alignments;
    if (!set(lt::MaxWorkspace, kWorkspace) || !set(lt::AlignmentA, aligned[0]) || !set(lt::AlignmentB, aligned[1]) ||
        !set(lt::AlignmentC, request.layout.added ? aligned[2] : aligned[3]) || !set(lt::AlignmentD, aligned[3])) {
      return {};
    }
    std::array<lt::Heuristic, kAnswers> answers{};
    int count = 0;
    const Status asked = library.heuristic(
        handle, descriptor.get(), left.get(), right.get(), third(), out.get(), preference.get(), most, answers.data(), &count);
    std::vector<ProductChoice> found;
    for (int i = 0; asked == 0 && i < count; ++i) {
      if (answers[i].status == 0) found.push_back({false, std::to_array(answers[i].algorithm), answers[i].workspace});
    }
    return found;
  }

  // Whether an algorithm from a file is one of this library for this request, within the workspace that it says.
  bool takes(void* handle, const ProductChoice& choice) const {
    if (choice.aten) return true;
    lt::Heuristic answer{};
    return library.check(handle, descriptor.get(), left.get(), right.get(), third(), out.get(), choice.algorithm.data(), &answer) == 0 &&
        answer.status == 0 && answer.workspace <= choice.workspace && choice.workspace <= kWorkspace;
  }

  bool multiply(void* handle, const ProductChoice& choice, const Operands& on) {
    const float one = 1, zero = 0;
    const bool adds = request.layout.added.has_value();
    at::Tensor own;
    void* workspace = choice.workspace > 0 ? lent(choice.workspace, on.stream) : nullptr;
    if (choice.workspace > 0 && workspace == nullptr) {
      own = allocate_cuda({static_cast<int64_t>(choice.workspace)}, {1}, at::kByte, on.device);
      workspace = own.data_ptr();
    }
    return library.multiply(
               handle, descriptor.get(), &one, on.left, left.get(), on.right, right.get(), adds ? &one : &zero,
               adds ? on.added : on.out, third(), on.out, out.get(), choice.algorithm.data(),
               workspace, choice.workspace, on.stream) == 0;
  }

  // What torch's own calls on this stream work in, which then are behind or before this one; null where that is smaller.
  // What a graph records has memory of the graph's own.
  void* lent(size_t bytes, void* stream) const {
    const bool known = library.workspace != nullptr && library.workspace_size != nullptr;
    if (!known || is_capturing(stream) || library.workspace_size() < bytes) return nullptr;
    return library.workspace();
  }

  // What is done where nothing is measured.
  ProductChoice usual(void* handle) {
    const auto answers = request.layout.pays() ? ask(handle, 1) : std::vector<ProductChoice>();
    return answers.empty() ? ProductChoice{} : answers[0];
  }

  ProductChoice measured(void* handle, const Operands& on, const std::function<void()>& aten) {
    std::vector<ProductChoice> choices = ask(handle, kAnswers);
    choices.insert(choices.begin(), ProductChoice{});
    std::vector<std::function<bool()>> candidates{[&] { return aten(), true; }};
    for (size_t i = 1; i < choices.size(); ++i) {
      candidates.emplace_back([&, i] { return multiply(handle, choices[i], on); });
    }
    const auto seconds = least_seconds(on.stream, candidates);
    const size_t usual = request.layout.pays() && choices.size() > 1 ? 1 : 0;
    const size_t best = std::min_element(seconds.begin(), seconds.end()) - seconds.begin();
    return choices[seconds[best] < kNotWorth * seconds[usual] ? best : usual];
  }

  void choose(void* handle, ProductChoices* choices, const Operands& on, const std::function<void()>& aten) {
    if (!describe() || (request.layout.row && !point_at(on.added))) return;  // ATen's call stays
    if (choices == nullptr || is_capturing(on.stream)) {
      chosen = usual(handle);
      return;
    }
    const std::string key = key_of(request, library, on.device.index());
    const auto known = choices->find(key);
    if (known && takes(handle, *known)) {
      chosen = *known;
      return;
    }
    chosen = measured(handle, on, aten);
    choices->remember(key, chosen);
  }
};

CudaProduct::~CudaProduct() = default;

std::shared_ptr<CudaProduct> CudaProduct::of(const std::string& op, const std::vector<Argument>& arguments) {
  const bool plain = op == "aten::mm" || op == "aten::bmm";
  if (!plain && op != "aten::addmm" && op != "aten::baddbmm") return nullptr;
  const size_t tensors = plain ? 2 : 3;
  if (arguments.size() < tensors) return nullptr;
  std::shared_ptr<CudaProduct> product(new CudaProduct);
  for (size_t i = 0; i < tensors; ++i) {
    if (arguments[i].kind != Argument::Kind::Slot) return nullptr;
    product->slots_[plain ? i : (i + 2) % 3] = arguments[i].index;
  }
  if (plain) product->slots_[2] = -1;
  for (size_t i = tensors; i < arguments.size(); ++i) {  // beta, alpha
    const Argument& scale = arguments[i];
    if (scale.kind != Argument::Kind::Fixed || !scale.fixed.isScalar() || !scale.fixed.toScalar().equal(1)) return nullptr;
  }
  return product;
}

bool CudaProduct::run(const Instruction& in, Frame& frame, const std::function<void()>& aten) {
  const at::Tensor &a = frame.slots[slots_[0]], &b = frame.slots[slots_[1]];
  if (!a.defined() || !a.is_cuda() || !is_plain(a, a) || !is_plain(b, a) || a.device().index() >= kMaxDevices) return false;
  std::optional<at::Tensor> added;
  if (slots_[2] >= 0) added = frame.slots[slots_[2]];
  if (added && !is_plain(*added, a)) return false;
  const Library* found = library();
  if (found == nullptr || left_to_aten(*found)) return false;
  const auto compute = compute_type(a.scalar_type());
  const auto layout = product_layout(a, b, added);
  if (!compute || !layout || (!choices_ && !layout->pays())) return false;

  at::DimVector shape(a.sizes().begin(), a.sizes().end()), strides(a.dim(), 1);
  shape.back() = layout->out.rows;
  strides[a.dim() - 2] = layout->out.leading;
  if (a.dim() == 3) strides[0] = layout->out.rows * layout->out.columns;
  at::Tensor out = allocate_cuda(shape, strides, a.scalar_type(), a.device());
  const Operands on{
      b.const_data_ptr(), a.const_data_ptr(), added ? added->const_data_ptr() : nullptr, out.data_ptr(), a.device(), frame.stream};
  if (layout->row && alignment(on.added) < 16) return false;
  const Request request{
      *layout, a.scalar_type(), *compute,
      {alignment(on.left), alignment(on.right), layout->added ? alignment(on.added) : 0, alignment(on.out)}};

  Device& here = device(a.device().index());
  const std::lock_guard<std::mutex> lock(here.mutex);
  if (here.handle == nullptr && found->create(&here.handle) != 0) return false;
  if (plan_ == nullptr || !(plan_->request == request)) {
    plan_ = std::make_unique<Plan>(*found, request);
    plan_->choose(here.handle, choices_.get(), on, aten);
  }
  ProductChoice& chosen = plan_->chosen;
  if (chosen.aten || (layout->row && !plan_->point_at(on.added))) return false;
  if (!plan_->multiply(here.handle, chosen, on)) {
    chosen.aten = true;  // which says what is wrong
    return false;
  }
  frame.slots[in.destinations[0].index] = std::move(out);
  return true;
}

bool CudaProduct::write(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, const at::Tensor& row) {
  if (!a.is_cuda() || a.device().index() >= kMaxDevices || out.dim() != 2 || out.stride(1) != 1) return false;
  if (!is_plain(a, a) || !is_plain(b, a) || !is_plain(row, a) || !is_plain(out, a)) return false;
  const Library* found = library();
  if (found == nullptr || left_to_aten(*found)) return false;
  const auto compute = compute_type(a.scalar_type());
  auto layout = product_layout(a, b, row);
  if (!compute || !layout || !layout->row || out.stride(0) < layout->out.rows) return false;
  layout->out.leading = out.stride(0);
  const c10::impl::VirtualGuardImpl guard(a.device().type());
  void* stream = guard.getStream(a.device()).native_handle();
  const Operands on{b.const_data_ptr(), a.const_data_ptr(), row.const_data_ptr(), out.data_ptr(), a.device(), stream};
  if (alignment(on.added) < 16) return false;
  const Request request{
      *layout, a.scalar_type(), *compute, {alignment(on.left), alignment(on.right), 0, alignment(on.out)}};

  Device& here = device(a.device().index());
  const std::lock_guard<std::mutex> lock(here.mutex);
  if (here.handle == nullptr && found->create(&here.handle) != 0) return false;
  // As long as the process: the library may be gone when others of its objects are freed at the end.
  static auto& plans = *new std::array<std::vector<std::unique_ptr<Plan>>, kMaxDevices>;
  auto& known = plans[a.device().index()];
  auto plan = std::find_if(known.begin(), known.end(), [&](const auto& one) { return one->request == request; });
  if (plan == known.end()) {
    if (known.size() >= kKeptPlans) known.clear();
    known.push_back(std::make_unique<Plan>(*found, request));
    plan = std::prev(known.end());
    (*plan)->choose(here.handle, nullptr, on, [] {});
  }
  ProductChoice& chosen = (*plan)->chosen;
  if (chosen.aten || !(*plan)->point_at(on.added)) return false;
  if ((*plan)->multiply(here.handle, chosen, on)) return true;
  chosen.aten = true;
  return false;
}

}  // namespace inductor
