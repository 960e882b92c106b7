#include "cuda_products.h"

#include "program.h"

#include <ATen/Context.h>
#include <dlfcn.h>

#include <algorithm>
#include <mutex>

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
  Status (*multiply)(
      void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*, void*, void*, void*, const void*,
      void*, size_t, void*);
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
        find(torch, "cublasLtMatmulAlgoGetHeuristic", found.heuristic) && find(torch, "cublasLtMatmul", found.multiply);
    if (!whole) return std::nullopt;
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
  const at::BlasBackend preferred = context.blasPreferredBackend();
  if (preferred != at::BlasBackend::Default && preferred != at::BlasBackend::Cublaslt) return true;
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

// One answer of the library, and what it was asked.
struct CudaProduct::Plan {
  ProductLayout layout;
  at::ScalarType type = at::ScalarType::Undefined;
  int compute = 0;
  std::array<uint32_t, 4> alignments{};  // of b, a, what is added, and the result

  const Library& library;
  Owned descriptor{library.descriptor_destroy};
  Owned left{library.layout_destroy}, right{library.layout_destroy}, added{library.layout_destroy}, out{library.layout_destroy};
  lt::Heuristic answer{};
  bool possible = false;

  explicit Plan(const Library& found) : library(found) {}

  bool is_for(const ProductLayout& wanted, at::ScalarType of, int by, const std::array<uint32_t, 4>& aligned) const {
    return type == of && compute == by && alignments == aligned && layout == wanted;
  }

  bool make(Owned& place, const ColumnMajor& matrix) {
    if (library.layout_create(place.place(), element_type(type), matrix.rows, matrix.columns, matrix.leading) != 0) return false;
    if (layout.batch == 1) return true;
    const auto count = static_cast<int32_t>(layout.batch);
    return library.layout_set(place.get(), lt::BatchCount, &count, sizeof count) == 0 &&
        library.layout_set(place.get(), lt::BatchStride, &matrix.batch_stride, sizeof matrix.batch_stride) == 0;
  }

  bool describe() {
    if (library.descriptor_create(descriptor.place(), compute, lt::Float) != 0) return false;
    const auto set = [&](int what, int32_t value) { return library.descriptor_set(descriptor.get(), what, &value, sizeof value) == 0; };
    return set(lt::TransposeA, layout.left.transposed) && set(lt::TransposeB, layout.right.transposed) &&
        (!layout.row || set(lt::Epilogue, lt::kEpilogueBias)) && make(left, layout.left) && make(right, layout.right) &&
        make(out, layout.out) && (!layout.added || make(added, *layout.added));
  }

  void ask(void* handle, const void* bias) {
    if (!describe()) return;
    if (layout.row && !point_at(bias)) return;
    Owned preference{library.preference_destroy};
    if (library.preference_create(preference.place()) != 0) return;
    const auto set = [&](int what, const auto& value) {
      return library.preference_set(preference.get(), what, &value, sizeof value) == 0;
    };
    const bool asked = set(lt::MaxWorkspace, kWorkspace) && set(lt::AlignmentA, alignments[0]) && set(lt::AlignmentB, alignments[1]) &&
        set(lt::AlignmentC, layout.added ? alignments[2] : alignments[3]) && set(lt::AlignmentD, alignments[3]);
    int count = 0;
    possible = asked &&
        library.heuristic(handle, descriptor.get(), left.get(), right.get(), third(), out.get(), preference.get(), 1, &answer, &count) == 0 &&
        count == 1 && answer.status == 0;
  }

  bool point_at(const void* bias) { return library.descriptor_set(descriptor.get(), lt::BiasPointer, &bias, sizeof bias) == 0; }
  void* third() const { return layout.added ? added.get() : out.get(); }
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

bool CudaProduct::run(const Instruction& in, Frame& frame) {
  const at::Tensor &a = frame.slots[slots_[0]], &b = frame.slots[slots_[1]];
  if (!a.defined() || !a.is_cuda() || !is_plain(a, a) || !is_plain(b, a) || a.device().index() >= kMaxDevices) return false;
  std::optional<at::Tensor> added;
  if (slots_[2] >= 0) added = frame.slots[slots_[2]];
  if (added && !is_plain(*added, a)) return false;
  const Library* found = library();
  if (found == nullptr || left_to_aten(*found)) return false;
  const auto compute = compute_type(a.scalar_type());
  if (!compute) return false;
  const auto layout = product_layout(a, b, added);
  if (!layout || !layout->pays()) return false;
  at::DimVector shape(a.sizes().begin(), a.sizes().end()), strides(a.dim(), 1);
  shape.back() = layout->out.rows;
  strides[a.dim() - 2] = layout->out.leading;
  if (a.dim() == 3) strides[0] = layout->out.rows * layout->out.columns;
  at::Tensor out = allocate_cuda(shape, strides, a.scalar_type(), a.device());
  const void *first = b.const_data_ptr(), *second = a.const_data_ptr(), *third = added ? added->const_data_ptr() : nullptr;
  if (layout->row && alignment(third) < 16) return false;
  const std::array<uint32_t, 4> alignments{
      alignment(first), alignment(second), layout->added ? alignment(third) : 0, alignment(out.const_data_ptr())};

  Device& here = device(a.device().index());
  const std::lock_guard<std::mutex> lock(here.mutex);
  if (here.handle == nullptr && found->create(&here.handle) != 0) return false;
  if (plan_ == nullptr || !plan_->is_for(*layout, a.scalar_type(), *compute, alignments)) {
    plan_ = std::make_unique<Plan>(*found);
    plan_->layout = *layout, plan_->type = a.scalar_type(), plan_->compute = *compute, plan_->alignments = alignments;
    plan_->ask(here.handle, third);
  }
  if (!plan_->possible || (layout->row && !plan_->point_at(third))) return false;
  at::Tensor workspace;
  if (plan_->answer.workspace > 0) {
    workspace = allocate_cuda({static_cast<int64_t>(plan_->answer.workspace)}, {1}, at::kByte, a.device());
  }
  const float one = 1, zero = 0;
  void* target = out.data_ptr();
  plan_->possible = found->multiply(
      here.handle, plan_->descriptor.get(), &one, first, plan_->left.get(), second, plan_->right.get(), layout->added ? &one : &zero,
      layout->added ? third : target, plan_->third(), target, plan_->out.get(), plan_->answer.algorithm,
      workspace.defined() ? workspace.data_ptr() : nullptr, plan_->answer.workspace, frame.stream) == 0;
  if (!plan_->possible) return false;  // ATen says what is wrong
  frame.slots[in.destinations[0].index] = std::move(out);
  return true;
}

}  // namespace inductor
