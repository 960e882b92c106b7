#include "program_file.h"

#include <ATen/Context.h>
#include <ATen/core/ivalue_inl.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <dlfcn.h>
#include <sys/utsname.h>
#include <torch/version.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>

#include "builder.h"

namespace inductor {
namespace {

using torchinductor::LoadError;

constexpr int64_t kFormat = 2;
constexpr char kMagic[] = "TCPROGRM";
constexpr int64_t kMostKept = 1 << 16;  // values that a size program reads again
constexpr int kMostNested = 16;
constexpr size_t kHead = 8 + 3 * sizeof(int64_t);

// The CRC-32 of zlib, eight bytes a step: parameters are gigabytes.
uint32_t crc32(const char* data, size_t size) {
  static const auto tables = [] {
    std::array<std::array<uint32_t, 256>, 8> made{};
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t c = i;
      for (int k = 0; k < 8; ++k) c = (c >> 1) ^ (0xedb88320u & (0u - (c & 1u)));
      made[0][i] = c;
    }
    for (size_t t = 1; t < 8; ++t) {
      for (uint32_t i = 0; i < 256; ++i) made[t][i] = (made[t - 1][i] >> 8) ^ made[0][made[t - 1][i] & 255];
    }
    return made;
  }();
  uint32_t crc = ~0u;
  const auto* bytes = reinterpret_cast<const unsigned char*>(data);
  for (; size >= 8; size -= 8, bytes += 8) {
    uint32_t low, high;
    std::memcpy(&low, bytes, 4);
    std::memcpy(&high, bytes + 4, 4);
    low ^= crc;
    crc = tables[7][low & 255] ^ tables[6][low >> 8 & 255] ^ tables[5][low >> 16 & 255] ^ tables[4][low >> 24] ^
        tables[3][high & 255] ^ tables[2][high >> 8 & 255] ^ tables[1][high >> 16 & 255] ^ tables[0][high >> 24];
  }
  for (; size > 0; --size, ++bytes) crc = (crc >> 8) ^ tables[0][(crc ^ *bytes) & 255];
  return ~crc;
}

std::string content_of(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) throw LoadError(path + " cannot be read");
  std::ostringstream content;
  content << stream.rdbuf();
  return std::move(content).str();
}

// What of a file is shown to a person.
std::string plain_text(std::string text) {
  for (char& letter : text) {
    if (letter != '\n' && (letter < ' ' || letter > '~')) letter = '?';
  }
  return text;
}

// ---- fields ---------------------------------------------------------------------------------------------------------

// Takes field after field, none beyond the end.
class Fields {
 public:
  Fields(const char* data, size_t size, std::string path) : next_(data), end_(data + size), path_(std::move(path)) {}

  [[noreturn]] void refuse(const std::string& why) const { throw LoadError(path_ + " is torn: " + plain_text(why)); }

  int64_t integer() {
    int64_t value;
    std::memcpy(&value, take(sizeof value), sizeof value);
    return value;
  }
  // An integer from `least` to below `end`.
  int32_t index(int64_t end, int64_t least = 0) {
    const int64_t value = integer();
    if (value < least || value >= end) refuse(std::to_string(value) + " is no index below " + std::to_string(end));
    return static_cast<int32_t>(value);
  }
  bool flag() { return index(2) != 0; }
  std::string text() {
    const size_t size = count();
    return {take(size), size};
  }
  // How many items follow, each of at least a byte.
  size_t count() {
    const int64_t value = integer();
    if (value < 0 || value > end_ - next_) refuse("it ends too early");
    return static_cast<size_t>(value);
  }
  template <class Item>
  auto list(Item item) {
    if (depth_ == kMostNested) refuse("lists are nested too deeply");
    ++depth_;
    std::vector<decltype(item())> items;
    for (size_t left = count(); left > 0; --left) items.push_back(item());
    --depth_;
    return items;
  }
  std::vector<int64_t> integers() {
    return list([this] { return integer(); });
  }
  c10::ScalarType dtype() {
    const std::string name = text();
    const auto& known = c10::getStringToDtypeMap();
    const auto found = known.find(name);
    if (found == known.end()) refuse("there is no dtype " + name);
    return found->second;
  }
  bool at_end() const { return next_ == end_; }

 private:
  const char* take(size_t size) {
    if (size > static_cast<size_t>(end_ - next_)) refuse("it ends too early");
    return std::exchange(next_, next_ + size);
  }

  const char* next_;
  const char* end_;
  std::string path_;
  int depth_ = 0;
};

// ---- what the file is bound to --------------------------------------------------------------------------------------

std::set<std::string> processor_features() {
  std::ifstream stream("/proc/cpuinfo");
  for (std::string line; std::getline(stream, line);) {
    if (line.rfind("flags", 0) != 0 && line.rfind("Features", 0) != 0) continue;
    std::istringstream words(line.substr(line.find(':') + 1));
    return {std::istream_iterator<std::string>(words), {}};
  }
  return {};
}

std::string machine() {
  utsname names{};
  return uname(&names) == 0 ? names.machine : "unknown";
}

void check_bound(Fields& fields, const std::string& folder) {
  std::vector<std::string> differences;
  const auto compare = [&](const char* what, const std::string& there, std::string here) {
    if (there != here) differences.push_back(std::string(what) + ": " + plain_text(there) + " there, " + here + " here");
  };
  const std::string torch = TORCH_VERSION;
  compare("torch", fields.text(), torch.substr(0, torch.find('+')));
  compare("machine", fields.text(), machine());
  const auto needed = fields.list([&] { return fields.text(); });
  const auto here = processor_features();
  std::string missing;
  for (const std::string& feature : needed) {
    if (here.count(feature) == 0) missing += " " + plain_text(feature);
  }
  if (!missing.empty()) differences.push_back("processor features that are missing here:" + missing);
  if (differences.empty()) return;
  std::string told = differences[0];
  for (size_t i = 1; i < differences.size(); ++i) told += "; " + differences[i];
  throw LoadError(folder + " does not fit: " + told);
}

// ---- tensors and kernels --------------------------------------------------------------------------------------------

std::vector<at::Tensor> read_memories(Fields& fields, const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) throw LoadError(path + " cannot be read");
  stream.seekg(0, std::ios::end);
  const int64_t size = stream.tellg();
  return fields.list([&] {
    const int64_t start = fields.integer(), bytes = fields.integer(), crc = fields.integer();
    if (start < 0 || bytes < 0 || start > size || bytes > size - start) throw LoadError(path + " is torn: it ends too early");
    at::Tensor memory = at::empty({bytes}, at::kByte);  // of an address that suits every dtype
    auto* data = static_cast<char*>(memory.mutable_data_ptr());
    stream.seekg(start);
    if (!stream.read(data, bytes) || crc32(data, bytes) != crc) throw LoadError(path + " is torn: its bytes are not those that were written");
    return memory;
  });
}

at::Tensor read_tensor(Fields& fields, const std::vector<at::Tensor>& memories) {
  const at::Tensor& memory = memories[fields.index(static_cast<int64_t>(memories.size()))];
  const auto dtype = fields.dtype();
  const auto sizes = fields.integers(), strides = fields.integers();
  const int64_t offset = fields.integer();
  bool fits = sizes.size() == strides.size() && offset >= 0, empty = false;
  int64_t last = offset, reach = 0;
  for (size_t i = 0; fits && i < sizes.size(); ++i) {
    empty |= sizes[i] == 0;
    fits = sizes[i] >= 0 && strides[i] >= 0 && !__builtin_mul_overflow(std::max<int64_t>(sizes[i] - 1, 0), strides[i], &reach) &&
        !__builtin_add_overflow(last, reach, &last);
  }
  int64_t bytes = 0;
  fits = fits && !__builtin_mul_overflow(last + !empty, static_cast<int64_t>(c10::elementSize(dtype)), &bytes);
  if (!fits || bytes > memory.numel()) fields.refuse("a tensor reaches beyond its memory");
  at::Tensor tensor = at::empty({0}, dtype);
  tensor.set_(memory.storage(), offset, sizes, strides);
  return tensor;
}

std::shared_ptr<void> open_library(Fields& fields, const std::string& folder) {
  const std::string name = fields.text();
  const auto in_name = [](unsigned char letter) { return std::isalnum(letter) || letter == '.' || letter == '_' || letter == '-'; };
  if (!std::all_of(name.begin(), name.end(), in_name)) fields.refuse(name + " is no name of a library");
  const std::string path = folder + "/" + name;
  const int64_t crc = fields.integer();
  const std::string content = content_of(path);
  if (crc32(content.data(), content.size()) != crc) throw LoadError(path + " is torn: its bytes are not those that were written");
  void* handle = dlopen(std::filesystem::absolute(path).c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) throw LoadError(path + " cannot be loaded: " + dlerror());
  return {handle, dlclose};
}

// ---- the program ----------------------------------------------------------------------------------------------------

// A value as it comes; see Builder::aten.
c10::IValue plain_value(Fields& fields, const ProgramFile& file) {
  const std::string kind = fields.text();
  if (kind == "none") return {};
  if (kind == "bool") return fields.flag();
  if (kind == "int") return fields.integer();
  if (kind == "float") return bits_float(fields.integer());
  if (kind == "complex") {
    const double real = bits_float(fields.integer());
    return c10::complex<double>(real, bits_float(fields.integer()));
  }
  if (kind == "text") return fields.text();
  if (kind == "dtype") return static_cast<int64_t>(fields.dtype());
  if (kind == "cpu") return c10::Device(c10::DeviceType::CPU);
  if (kind == "tensor") return file.tensors[fields.index(static_cast<int64_t>(file.tensors.size()))];
  if (kind == "list") return c10::ivalue::Tuple::create(fields.list([&] { return plain_value(fields, file); }));
  fields.refuse("there are no values of kind " + kind);
}

using Steps = std::vector<std::pair<std::string, int64_t>>;

// Steps of a size program over so many symbols.
Steps size_steps(Fields& fields, int64_t symbols) {
  return fields.list([&] {
    std::string op = fields.text();
    const bool keeps = op == "keep" || op == "kept";
    const int64_t argument = op == "sym" ? fields.index(symbols) : keeps ? fields.index(kMostKept) : fields.integer();
    return std::pair(std::move(op), argument);
  });
}

// The calls of a builder, as `ProgramWriter` wrote them.
class Calls {
 public:
  Calls(Fields& fields, const ProgramFile& file)
      : fields_(fields), file_(file), slots_(fields.index(INT32_MAX)), symbols_(fields.index(INT32_MAX)) {}

  std::shared_ptr<Program> read() {
    const size_t calls = fields_.count();
    for (size_t call = 0; call < calls; ++call) one(fields_.text());
    return builder_.build(slots_, symbols_);
  }

 private:
  int32_t slot() { return fields_.index(slots_); }
  int32_t value() { return fields_.index(values_); }
  std::vector<int32_t> slots() {
    return fields_.list([this] { return slot(); });
  }
  Size size() {
    const bool is_value = fields_.flag();
    return {is_value, is_value ? value() : fields_.integer()};
  }
  Sizes sizes() {
    return fields_.list([this] { return size(); });
  }
  std::vector<int32_t> values() {
    return fields_.list([this] { return value(); });
  }
  c10::ScalarType optional_dtype() { return fields_.flag() ? fields_.dtype() : c10::ScalarType::Undefined; }

  Argument argument() {
    const std::string tag = fields_.text();
    Argument argument;
    if (tag == "fixed") {
      argument.fixed = plain_value(fields_, file_);
    } else if (tag == "list") {
      argument.kind = Argument::Kind::List;
      argument.items = fields_.list([this] { return this->argument(); });
    } else if (tag == "slot") {
      argument.kind = Argument::Kind::Slot;
      argument.index = slot();
    } else if (tag == "value" || tag == "float") {
      argument.kind = tag == "value" ? Argument::Kind::Value : Argument::Kind::FloatValue;
      argument.index = value();
    } else {
      fields_.refuse("there are no arguments of kind " + tag);
    }
    return argument;
  }

  Destination destination() {
    const std::string tag = fields_.text();
    Destination destination;
    if (tag == "slot") {
      destination.kind = Destination::Kind::Slot;
      destination.index = slot();
    } else if (tag == "list") {
      destination.kind = Destination::Kind::List;
      destination.items = fields_.list([this] { return this->destination(); });
    } else if (tag != "drop") {
      fields_.refuse("there are no destinations of kind " + tag);
    }
    return destination;
  }

  KernelFunction function() {
    const std::string name = fields_.text();
    for (const auto& library : file_.libraries) {
      if (void* found = dlsym(library.get(), name.c_str())) return reinterpret_cast<KernelFunction>(found);
    }
    fields_.refuse("no library has the kernel " + name);
  }

  // Arguments are read in the order of the file before the call is made.
  void one(const std::string& name) {
    if (name == "input_tensor") {
      auto input = fields_.text();
      const int32_t to = slot();
      const auto dtype = fields_.dtype();
      builder_.input_tensor(std::move(input), to, dtype, c10::DeviceType::CPU, fields_.integer());
    } else if (name == "input_symbol") {
      auto input = fields_.text();
      builder_.input_symbol(std::move(input), fields_.index(symbols_, -1));
    } else if (name == "constant") {
      const int32_t to = slot();
      builder_.constant(to, file_.tensors[fields_.index(static_cast<int64_t>(file_.tensors.size()))]);
    } else if (name == "value") {
      const auto steps = size_steps(fields_, symbols_);
      builder_.value(steps, fields_.flag());
      ++values_;
    } else if (name == "label") {
      if (!labelled_) fields_.refuse("a label of no instruction");
      builder_.label(fields_.text());
    } else if (name.rfind("output", 0) == 0) {
      output(name);
    } else {
      instruction(name, fields_.text());
      labelled_ = true;
    }
  }

  void output(const std::string& name) {
    if (name == "output_none") {
      builder_.output({});
    } else if (name == "output_slot") {
      builder_.output({Output::Kind::Slot, slot()});
    } else if (name == "output_size") {
      builder_.output_size(size());
    } else if (name == "output_float") {
      builder_.output({Output::Kind::Float, 0, bits_float(fields_.integer())});
    } else if (name == "output_float_value") {
      builder_.output({Output::Kind::FloatValue, value()});
    } else {
      fields_.refuse("there is no call " + name);
    }
  }

  void instruction(const std::string& call, std::string text) {
    if (call == "alloc") {
      const int32_t dst = slot();
      const auto shape = sizes(), strides = sizes();
      ranks_agree(shape, strides);
      builder_.alloc(dst, shape, strides, fields_.dtype(), c10::DeviceType::CPU, std::move(text));
    } else if (call == "free") {
      builder_.free(slot(), std::move(text));
    } else if (call == "view") {
      const int32_t dst = slot(), src = slot();
      const auto shape = sizes(), strides = sizes();
      ranks_agree(shape, strides);
      const auto offset = size();
      builder_.view(dst, src, shape, strides, offset, optional_dtype(), std::move(text));
    } else if (call == "kernel") {
      const auto kernel = function();
      const auto buffers = slots();
      builder_.kernel(kernel, buffers, sizes(), std::move(text));
    } else if (call == "aten") {
      const auto op = fields_.text(), overload = fields_.text();
      const auto arguments = fields_.list([this] { return argument(); });
      const auto destinations = fields_.list([this] { return destination(); });
      builder_.aten(op, overload, arguments, destinations, values(), std::move(text));
    } else if (call == "read_scalar") {
      const int32_t symbol = fields_.index(symbols_), src = slot();
      builder_.read_scalar(symbol, src, values(), std::move(text));
    } else if (call == "require") {
      const int32_t value = fields_.index(values_);
      builder_.require(value, std::move(text), fields_.text());
    } else if (call == "expect") {
      const int32_t of = slot();
      const auto shape = sizes(), strides = sizes();
      ranks_agree(shape, strides);
      builder_.expect(of, shape, strides, text, [text](const std::string& told) {
        TORCH_WARN(text, " ", told, ": its result was copied");
      });
    } else {
      fields_.refuse("there is no call " + call);
    }
  }

  void ranks_agree(const Sizes& shape, const Sizes& strides) const {
    if (shape.size() != strides.size()) fields_.refuse("sizes and strides are of different length");
  }

  Fields& fields_;
  const ProgramFile& file_;
  const int32_t slots_, symbols_;
  int64_t values_ = 0;
  bool labelled_ = false;
  Builder builder_;
};

// ---- the call -------------------------------------------------------------------------------------------------------

SizeProgram read_number(Fields& fields, size_t measures) {
  SizeProgram program;
  for (const auto& [name, argument] : size_steps(fields, static_cast<int64_t>(measures))) {
    const auto op = primtorch::size_program::operation(name);
    if (!op || !program.push(*op, argument)) fields.refuse("not a size program: " + name);
  }
  if (!program.leaves_one_value()) fields.refuse("a size program leaves no value");
  return program;
}

torchinductor::Input read_input(Fields& fields) {
  torchinductor::Input input;
  input.name = fields.text();
  input.kind = static_cast<torchinductor::Input::Kind>(fields.index(3));
  if (input.kind != torchinductor::Input::Kind::Tensor || !fields.flag()) return input;
  input.dtype = fields.dtype();
  input.sizes = fields.integers();
  input.strides = fields.integers();
  if (input.sizes.size() != input.strides.size()) fields.refuse("sizes and strides are of different length");
  return input;
}

Call read_call(Fields& fields, const ProgramFile& file) {
  Call call;
  call.inputs = fields.list([&] { return read_input(fields); });
  const auto input = [&] { return fields.index(static_cast<int64_t>(call.inputs.size())); };
  const auto output = [&] { return fields.index(static_cast<int64_t>(file.program->outputs.size())); };
  const auto pairs = [&] {
    return fields.list([&] {
      const int32_t first = input();
      return std::pair(first, input());
    });
  };
  call.measures = fields.list([&] {
    Measure measure{static_cast<Measure::Kind>(fields.index(4)), input()};
    const auto& of = call.inputs[measure.input];
    const bool reads_dim = measure.kind == Measure::Kind::Size || measure.kind == Measure::Kind::Stride;
    measure.dim = fields.index(reads_dim ? static_cast<int64_t>(of.sizes.size()) : 1);
    if ((measure.kind == Measure::Kind::Number) == (of.kind == torchinductor::Input::Kind::Tensor)) fields.refuse("a measure of another kind");
    return measure;
  });
  const auto number = [&] { return read_number(fields, call.measures.size()); };
  call.relations = fields.list([&] {
    Relation relation{number(), {}};
    relation.text = fields.text();
    return relation;
  });
  call.same = pairs();
  call.different = pairs();
  call.apart = pairs();
  call.feeds = fields.list([&] {
    if (fields.flag()) return Feed{input(), {}};
    return Feed{-1, number()};
  });
  if (call.feeds.size() != file.program->inputs.size()) fields.refuse("another number of inputs than the program takes");
  for (size_t i = 0; i < call.feeds.size(); ++i) {
    const Input& of = file.program->inputs[i];
    const int32_t fed = call.feeds[i].input;
    const auto* given = fed < 0 ? nullptr : &call.inputs[fed];
    const bool fits = of.is_symbol ? given == nullptr
                                   : given != nullptr && given->dtype == of.dtype && static_cast<int64_t>(given->sizes.size()) == of.dim;
    if (!fits) fields.refuse("an input of another kind than the program takes");
  }
  call.written = fields.list([&] {
    Written written{fields.flag()};
    written.index = written.is_input ? input() : fields.index(static_cast<int64_t>(file.tensors.size()));
    written.output = output();
    return written;
  });
  call.met = fields.list(output);
  call.conditions = fields.text();
  call.results = fields.list([&] {
    Result result{static_cast<Result::Kind>(fields.index(5))};
    switch (result.kind) {
      case Result::Kind::Output: result.index = output(); break;
      case Result::Kind::Input: result.index = input(); break;
      case Result::Kind::Integer: case Result::Kind::Float: result.number = number(); break;
      case Result::Kind::Fixed: result.fixed = plain_value(fields, file); break;
    }
    return result;
  });
  return call;
}

// What follows the head of `program.bin`.
ProgramFile read_body(Fields& fields, const std::string& folder) {
  check_bound(fields, folder);
  const c10::NoGradGuard no_grad;
  ProgramFile file;
  const auto memories = read_memories(fields, folder + "/tensors.bin");
  file.tensors = fields.list([&] { return read_tensor(fields, memories); });
  file.libraries = fields.list([&] { return open_library(fields, folder); });
  file.program = Calls(fields, file).read();
  file.call = read_call(fields, file);
  if (!fields.at_end()) fields.refuse("something follows its end");
  return file;
}

}  // namespace

ProgramFile read_program(const std::string& folder) {
  const std::string path = folder + "/program.bin", content = content_of(path);
  if (content.compare(0, 8, kMagic) != 0) throw LoadError(path + " is no program of torchcompile.save_cpp");
  Fields head(content.data() + 8, content.size() - 8, path);
  const int64_t format = head.integer();
  if (format != kFormat) {
    throw LoadError(path + " is of format " + std::to_string(format) + "; this library reads format " + std::to_string(kFormat));
  }
  const int64_t bytes = head.integer(), crc = head.integer();
  if (bytes != static_cast<int64_t>(content.size() - kHead) || crc32(content.data() + kHead, content.size() - kHead) != crc) {
    head.refuse("its bytes are not those that were written");
  }
  Fields fields(content.data() + kHead, content.size() - kHead, path);
  try {
    return read_body(fields, folder);
  } catch (const LoadError&) {
    throw;
  } catch (const std::exception& error) {  // an operator that this process does not have, or not with this schema
    throw LoadError(path + " does not fit: " + plain_text(error.what()));
  }
}

}  // namespace inductor
