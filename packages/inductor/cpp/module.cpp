// Python's view of the executor: a builder that `native.py` fills, and the callable that it makes.
#include "program.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Layout.h>
#include <torch/csrc/MemoryFormat.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstring>

namespace py = pybind11;

namespace inductor {
namespace {

// ---- what Python hands over -----------------------------------------------------------------------------------------

using PySize = std::pair<bool, int64_t>;  // (is an index into the value table, the index or the integer itself)

c10::ScalarType scalar_type(py::handle dtype) {
  if (dtype.is_none()) return c10::ScalarType::Undefined;
  return reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
}

c10::Device device_of(py::handle device) { return reinterpret_cast<THPDevice*>(device.ptr())->device; }

const at::Tensor& tensor_of(py::handle object) { return THPVariable_Unpack(object.ptr()); }

Dims dims_of(const std::vector<PySize>& sizes) {
  Dims dims;
  for (const auto& [is_value, number] : sizes) {
    if (is_value) dims.patches.emplace_back(static_cast<int32_t>(dims.fixed.size()), static_cast<int32_t>(number));
    dims.fixed.push_back(is_value ? 0 : number);
  }
  return dims;
}

// Prepared arguments come as tagged tuples: ("fixed", x), ("slot", i), ("value", i), ("list", [...]).
c10::IValue fixed_value(py::handle object, const c10::Type& type);

c10::IValue fixed_list(const py::list& items, const c10::Type& element) {
  const auto fill = [&](auto list, auto cast) {
    for (py::handle item : items) list.push_back(cast(item));
    return c10::IValue(std::move(list));
  };
  switch (element.kind()) {
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
      return fill(c10::List<int64_t>(), [](py::handle h) { return h.cast<int64_t>(); });
    case c10::TypeKind::FloatType:
      return fill(c10::List<double>(), [](py::handle h) { return h.cast<double>(); });
    case c10::TypeKind::BoolType:
      return fill(c10::List<bool>(), [](py::handle h) { return h.cast<bool>(); });
    case c10::TypeKind::StringType:
      return fill(c10::List<std::string>(), [](py::handle h) { return h.cast<std::string>(); });
    case c10::TypeKind::NumberType: {
      c10::List<at::Scalar> list;
      for (py::handle item : items) list.push_back(fixed_value(item, element).toScalar());
      return list;
    }
    case c10::TypeKind::TensorType:  // of tensors there are slots: this one is empty
      return fill(c10::List<at::Tensor>(), [](py::handle h) { return tensor_of(h); });
    default:
      throw py::type_error("an ATen argument of type List[" + element.str() + "] cannot be prepared");
  }
}

c10::IValue fixed_value(py::handle object, const c10::Type& type) {
  PyObject* raw = object.ptr();
  if (object.is_none()) {
    // A mandatory Tensor that is None is an undefined one: what ATen's attention kernels return for parts they lack.
    if (type.kind() == c10::TypeKind::TensorType) return at::Tensor();
    return {};
  }
  if (const auto* optional = type.castRaw<c10::OptionalType>()) return fixed_value(object, *optional->getElementType());
  if (const auto* list = type.castRaw<c10::ListType>()) {
    if (PyList_Check(raw)) return fixed_list(py::reinterpret_borrow<py::list>(object), *list->getElementType());
    return fixed_value(object, *list->getElementType());  // int[2] accepts a single int; the kernel broadcasts it
  }
  if (THPDtype_Check(raw)) return static_cast<int64_t>(scalar_type(object));
  if (THPDevice_Check(raw)) return device_of(object);
  if (THPLayout_Check(raw)) return static_cast<int64_t>(reinterpret_cast<THPLayout*>(raw)->layout);
  if (THPMemoryFormat_Check(raw)) return static_cast<int64_t>(reinterpret_cast<THPMemoryFormat*>(raw)->memory_format);
  if (PyBool_Check(raw)) return raw == Py_True;
  if (PyLong_Check(raw)) {
    if (type.kind() == c10::TypeKind::FloatType) return static_cast<double>(PyLong_AsLongLong(raw));
    return object.cast<int64_t>();
  }
  if (PyFloat_Check(raw)) return PyFloat_AS_DOUBLE(raw);
  if (PyComplex_Check(raw)) return c10::complex<double>(PyComplex_RealAsDouble(raw), PyComplex_ImagAsDouble(raw));
  if (PyUnicode_Check(raw)) return object.cast<std::string>();
  if (THPVariable_Check(raw)) return tensor_of(object);
  throw py::type_error("an ATen argument of type " + type.str() + " cannot be prepared from a " + Py_TYPE(raw)->tp_name);
}

Argument argument_of(const py::tuple& tagged, const c10::Type& type) {
  const auto tag = tagged[0].cast<std::string>();
  Argument argument;
  if (tag == "fixed") {
    argument.fixed = fixed_value(tagged[1], type);
  } else if (tag == "slot" || tag == "value" || tag == "float") {
    argument.kind = tag == "slot"  ? Argument::Kind::Slot
        : tag == "value" ? Argument::Kind::Value
                         : Argument::Kind::FloatValue;
    argument.index = tagged[1].cast<int32_t>();
  } else {
    const auto* unwrapped = &type;
    if (const auto* optional = type.castRaw<c10::OptionalType>()) unwrapped = optional->getElementType().get();
    const auto& element = *unwrapped->expectRef<c10::ListType>().getElementType();
    const bool tensors = element.kind() == c10::TypeKind::TensorType;
    const bool optional_tensors = element.kind() == c10::TypeKind::OptionalType;
    argument.kind = tensors ? Argument::Kind::Tensors
        : optional_tensors  ? Argument::Kind::OptionalTensors
                            : Argument::Kind::Integers;
    for (py::handle item : tagged[1]) argument.items.push_back(argument_of(py::reinterpret_borrow<py::tuple>(item), element));
  }
  return argument;
}

// Destinations: None, ("slot", i), ("symbol", i) or ("list", [...]).
Destination destination_of(py::handle object) {
  Destination destination;
  if (object.is_none()) return destination;
  const auto tagged = py::reinterpret_borrow<py::tuple>(object);
  const auto tag = tagged[0].cast<std::string>();
  if (tag == "list") {
    destination.kind = Destination::Kind::List;
    for (py::handle item : tagged[1]) destination.items.push_back(destination_of(item));
  } else {
    destination.kind = tag == "slot" ? Destination::Kind::Slot : Destination::Kind::Symbol;
    destination.index = tagged[1].cast<int32_t>();
  }
  return destination;
}

// A Python object that C++ shares; it is released with the GIL held.
std::shared_ptr<py::object> hold(py::object object) {
  return {new py::object(std::move(object)), [](py::object* held) {
            py::gil_scoped_acquire gil;
            delete held;
          }};
}

// ---- the builder ----------------------------------------------------------------------------------------------------

struct Builder {
  std::shared_ptr<Program> program = std::make_shared<Program>();

  Instruction& add(Opcode opcode, std::string name) {
    program->instructions.push_back(Instruction{.opcode = opcode});
    program->instructions.back().name = std::move(name);
    return program->instructions.back();
  }
  void uses(c10::Device device) {
    if (!device.is_cpu()) program->device = device;
  }

  void input_tensor(std::string name, int32_t slot, py::handle dtype, py::handle device, int64_t dim) {
    program->inputs.push_back({false, slot, scalar_type(dtype), device_of(device), dim, std::move(name)});
    uses(device_of(device));
  }
  void input_symbol(std::string name, int32_t symbol) {
    Input input;
    input.is_symbol = true;
    input.index = symbol;
    input.name = std::move(name);
    program->inputs.push_back(std::move(input));
  }
  void stream(py::object getter, int64_t device) {
    program->current_stream = [held = hold(std::move(getter)), device] {
      return reinterpret_cast<void*>((*held)(device).cast<uint64_t>());
    };
  }
  void constant(int32_t slot, py::handle tensor) { program->constants.emplace_back(slot, tensor_of(tensor)); }
  int64_t value(const std::vector<std::pair<std::string, int64_t>>& steps, bool initial) {
    SizeProgram sizes;
    for (const auto& [name, argument] : steps) {
      const auto op = primtorch::size_program::operation(name);
      if (!op || !sizes.push(*op, argument)) throw py::value_error("not a size program: " + name);
    }
    program->values.push_back(std::move(sizes));
    const auto index = static_cast<int64_t>(program->values.size()) - 1;
    if (initial) program->initial_values.push_back(static_cast<int32_t>(index));
    return index;
  }

  // What profilers call the instruction that was added last.
  void label(std::string text) { program->instructions.back().label = std::move(text); }

  void alloc(int32_t dst, const std::vector<PySize>& shape, const std::vector<PySize>& strides, py::handle dtype,
             py::handle device, std::string name) {
    Instruction& in = add(Opcode::Alloc, std::move(name));
    in.dst = dst;
    in.shape = dims_of(shape);
    in.strides = dims_of(strides);
    in.dtype = scalar_type(dtype);
    in.device = device_of(device);
    uses(in.device);
  }
  void free(int32_t slot, std::string name) { add(Opcode::Free, std::move(name)).src = slot; }
  void view(int32_t dst, int32_t src, const std::vector<PySize>& shape, const std::vector<PySize>& strides,
            const PySize& offset, py::handle dtype, std::string name) {
    Instruction& in = add(Opcode::View, std::move(name));
    in.dst = dst;
    in.src = src;
    in.shape = dims_of(shape);
    in.strides = dims_of(strides);
    in.offset = dims_of({offset});
    in.dtype = scalar_type(dtype);
  }
  void kernel(uint64_t address, std::vector<int32_t> buffers, const std::vector<PySize>& symbols, std::string name) {
    Instruction& in = add(Opcode::Kernel, std::move(name));
    in.kernel = reinterpret_cast<KernelFunction>(address);
    in.buffers = std::move(buffers);
    in.shape = dims_of(symbols);
  }
  void triton(std::shared_ptr<TritonKernel> handle, const std::vector<PySize>& grid, std::vector<int32_t> buffers,
              std::vector<int32_t> written, const std::vector<PySize>& symbols, py::handle device, std::string name) {
    if (handle->parameters().size() != buffers.size() + symbols.size()) {
      throw py::value_error(name + " takes " + std::to_string(handle->parameters().size()) + " arguments, not " +
                            std::to_string(buffers.size() + symbols.size()));
    }
    Instruction& in = add(Opcode::Triton, std::move(name));
    in.triton = std::move(handle);
    in.buffers = std::move(buffers);
    in.written = std::move(written);
    in.shape = dims_of(symbols);
    in.strides = dims_of(grid);
    in.device = device_of(device);
    uses(in.device);
  }
  void aten(const std::string& op, const std::string& overload, const py::list& arguments, const py::list& destinations,
            std::vector<int32_t> refreshed, std::string name) {
    const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(op.c_str(), overload.c_str());
    Instruction& in = add(Opcode::Aten, std::move(name));
    in.op = std::make_shared<c10::OperatorHandle>(handle);
    const auto& schema = handle.schema().arguments();
    for (size_t i = 0; i < arguments.size(); ++i) {
      in.arguments.push_back(argument_of(py::reinterpret_borrow<py::tuple>(arguments[i]), *schema[i].type()));
    }
    for (py::handle item : destinations) in.destinations.push_back(destination_of(item));
    in.refreshed = std::move(refreshed);
  }
  void python(py::object callable, std::vector<int32_t> slots, const std::vector<PySize>& integers,
              const py::list& destinations, std::string name) {
    Instruction& in = add(Opcode::Python, std::move(name));
    in.buffers = std::move(slots);
    in.shape = dims_of(integers);
    for (py::handle item : destinations) in.destinations.push_back(destination_of(item));
    auto held = hold(std::move(callable));
    in.python = [held](const std::vector<at::Tensor>& tensors, c10::ArrayRef<int64_t> numbers) {
      py::gil_scoped_acquire gil;
      py::list inputs, ints;
      for (const at::Tensor& tensor : tensors) inputs.append(py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor)));
      for (const int64_t number : numbers) ints.append(number);
      std::vector<at::Tensor> results;
      try {
        for (py::handle item : py::iter((*held)(inputs, ints))) {
          results.push_back(item.is_none() ? at::Tensor() : tensor_of(item));
        }
      } catch (py::error_already_set& error) {
        error.restore();
        python_error carried;  // the form in which torch's own code moves a Python exception through C++
        carried.persist();
        throw carried;
      }
      return results;
    };
  }
  void read_scalar(int32_t symbol, int32_t src, std::vector<int32_t> refreshed, std::string name) {
    Instruction& in = add(Opcode::ReadScalar, std::move(name));
    in.dst = symbol;
    in.src = src;
    in.refreshed = std::move(refreshed);
  }
  void expect(int32_t slot, const std::vector<PySize>& shape, const std::vector<PySize>& strides, std::string source,
              py::object mended) {
    Instruction& in = add(Opcode::Expect, std::move(source));
    in.mended = [held = hold(std::move(mended))](const std::string& text) { (*held)(text); };
    in.src = slot;
    in.shape = dims_of(shape);
    in.strides = dims_of(strides);
  }
  void output_none() { program->outputs.push_back({}); }
  void output_slot(int64_t slot) { program->outputs.push_back({Output::Kind::Slot, slot}); }
  void output_size(const PySize& size) {
    program->outputs.push_back({size.first ? Output::Kind::Value : Output::Kind::Integer, size.second});
  }
  void output_float_value(int64_t value) { program->outputs.push_back({Output::Kind::FloatValue, value}); }
  void output_float(double number) { program->outputs.push_back({Output::Kind::Float, 0, number}); }
};

// ---- the callable ---------------------------------------------------------------------------------------------------

struct CompiledProgram {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  std::shared_ptr<const Program>* program;
};

std::string expected(const Program& program, size_t position) {
  const Input& input = program.inputs[position];
  return "input " + std::to_string(position) + " (" + input.name + ")";
}

// Unpacks the list into slots and symbols; the checks are those that a kernel's memory safety rests on.
void bind(const Program& program, PyObject* list, Frame& frame) {
  if (!PyList_Check(list)) throw py::type_error("a compiled program takes one list of inputs");
  const auto count = static_cast<size_t>(PyList_GET_SIZE(list));
  if (count != program.inputs.size()) {
    throw py::value_error("the compiled program takes " + std::to_string(program.inputs.size()) + " inputs, not " + std::to_string(count));
  }
  for (size_t i = 0; i < count; ++i) {
    const Input& input = program.inputs[i];
    PyObject* item = PyList_GET_ITEM(list, i);
    if (input.is_symbol) {
      const int64_t number = PyLong_Check(item)   ? PyLong_AsLongLong(item)
                             : PyFloat_Check(item) ? float_bits(PyFloat_AS_DOUBLE(item))
                                                   : py::handle(item).cast<int64_t>();
      if (number == -1 && PyErr_Occurred()) throw py::error_already_set();
      if (input.index >= 0) frame.symbols[input.index] = number;
      continue;
    }
    if (item == Py_None) continue;  // an unused or undefined input: the slot stays empty
    if (!THPVariable_Check(item)) {
      throw py::type_error(expected(program, i) + " must be a tensor, not " + Py_TYPE(item)->tp_name);
    }
    const at::Tensor& tensor = THPVariable_Unpack(item);
    if (tensor.scalar_type() != input.dtype || tensor.device() != input.device || tensor.dim() != input.dim) {
      throw py::value_error(
          expected(program, i) + " must be a " + std::to_string(input.dim) + "-d " + c10::toString(input.dtype) + " tensor on " +
          input.device.str() + ", not a " + std::to_string(tensor.dim()) + "-d " + c10::toString(tensor.scalar_type()) + " tensor on " +
          tensor.device().str());
    }
    frame.slots[input.index] = tensor;
  }
}

PyObject* wrap_output(const Output& output, Frame& frame) {
  switch (output.kind) {
    case Output::Kind::Slot:
      return THPVariable_Wrap(frame.slots[output.index]);  // None where the tensor is undefined
    case Output::Kind::Value:
      return PyLong_FromLongLong(frame.values[output.index]);
    case Output::Kind::FloatValue:
      return PyFloat_FromDouble(bits_float(frame.values[output.index]));
    case Output::Kind::Integer:
      return PyLong_FromLongLong(output.index);
    case Output::Kind::Float:
      return PyFloat_FromDouble(output.number);
    case Output::Kind::None:
      break;
  }
  Py_RETURN_NONE;
}

PyObject* execute(const Program& program, PyObject* list, bool consume) {
  HANDLE_TH_ERRORS
  c10::SmallVector<at::Tensor, 64> slots(program.slots);
  c10::SmallVector<int64_t, 16> symbols(program.symbols, 0);
  c10::SmallVector<int64_t, 32> values(program.values.size(), 0);
  Frame frame{slots.data(), symbols.data(), values.data()};
  try {
    bind(program, list, frame);
    if (program.current_stream) frame.stream = program.current_stream();
  } catch (py::builtin_exception& error) {
    error.set_error();
    return nullptr;
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  }
  if (consume && PyList_SetSlice(list, 0, PyList_GET_SIZE(list), nullptr) != 0) return nullptr;
  for (const auto& [slot, tensor] : program.constants) frame.slots[slot] = tensor;
  {
    py::gil_scoped_release no_gil;
    run(program, frame);
  }
  try {
    for (const auto& [instruction, text] : frame.mended) instruction->mended(text);
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  }
  const auto count = static_cast<Py_ssize_t>(program.outputs.size());
  PyObject* result = PyList_New(count);
  for (Py_ssize_t i = 0; result != nullptr && i < count; ++i) {
    PyObject* item = wrap_output(program.outputs[i], frame);
    if (item == nullptr) Py_CLEAR(result);
    else PyList_SET_ITEM(result, i, item);
  }
  return result;
  END_HANDLE_TH_ERRORS
}

PyObject* program_vectorcall(PyObject* self, PyObject* const* args, size_t flags, PyObject* names) {
  if (PyVectorcall_NARGS(flags) != 1 || (names != nullptr && PyTuple_GET_SIZE(names) != 0)) {
    PyErr_SetString(PyExc_TypeError, "a compiled program takes one list of inputs");
    return nullptr;
  }
  const auto keep = *reinterpret_cast<CompiledProgram*>(self)->program;
  return execute(*keep, args[0], false);
}

PyObject* program_consume(PyObject* self, PyObject* list) {
  const auto keep = *reinterpret_cast<CompiledProgram*>(self)->program;
  return execute(*keep, list, true);
}

void program_dealloc(PyObject* self) {
  delete reinterpret_cast<CompiledProgram*>(self)->program;
  Py_TYPE(self)->tp_free(self);
}

PyMethodDef program_methods[] = {
    {"consume", program_consume, METH_O, "Runs on the inputs and empties their list first, so that a dead input's memory is reused."},
    {nullptr, nullptr, 0, nullptr}};

PyTypeObject program_type = [] {
  PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
  type.tp_name = "torchinductor._C.CompiledProgram";
  type.tp_doc = "A program that runs without Python between its instructions: program(inputs: list) -> list.";
  type.tp_basicsize = sizeof(CompiledProgram);
  type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL;
  type.tp_vectorcall_offset = offsetof(CompiledProgram, vectorcall);
  type.tp_call = PyVectorcall_Call;
  type.tp_dealloc = program_dealloc;
  type.tp_methods = program_methods;
  return type;
}();

py::object build(Builder& builder, int32_t slots, int32_t symbols) {
  builder.program->slots = slots;
  builder.program->symbols = symbols;
  auto* self = PyObject_New(CompiledProgram, &program_type);
  if (self == nullptr) throw py::error_already_set();
  self->vectorcall = program_vectorcall;
  self->program = new std::shared_ptr<const Program>(std::move(builder.program));
  builder.program = std::make_shared<Program>();
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(self));
}

}  // namespace
}  // namespace inductor

PYBIND11_MODULE(_C, m) {
  using namespace inductor;
  m.doc() = "Runs a compiled graph's program.";
  if (PyType_Ready(&program_type) != 0) throw py::error_already_set();
  m.add_object("CompiledProgram", reinterpret_cast<PyObject*>(&program_type));
  py::class_<TritonKernel, std::shared_ptr<TritonKernel>>(m, "TritonKernel")
      .def(py::init([](const py::bytes& binary, std::string name, std::string parameters, int scratch, int warps, int warp_size, int shared) {
             return std::make_shared<TritonKernel>(
                 std::string(binary), std::move(name), std::move(parameters), scratch, warps, warp_size, shared);
           }),
           py::arg("binary"), py::arg("name"), py::arg("parameters"), py::arg("scratch"), py::arg("warps"), py::arg("warp_size"),
           py::arg("shared"))
      .def("launch",
           [](TritonKernel& self, int device, uint64_t stream, const std::array<int64_t, 3>& grid, const std::vector<int64_t>& cells) {
             self.launch(device, reinterpret_cast<void*>(stream), grid.data(), cells.data());
           })
      .def_property_readonly("name", &TritonKernel::name)
      .def_property_readonly("parameters", &TritonKernel::parameters);
  py::class_<Builder>(m, "Builder")
      .def(py::init<>())
      .def("input_tensor", &Builder::input_tensor)
      .def("input_symbol", &Builder::input_symbol)
      .def("stream", &Builder::stream)
      .def("constant", &Builder::constant)
      .def("value", &Builder::value)
      .def("label", &Builder::label)
      .def("alloc", &Builder::alloc)
      .def("free", &Builder::free)
      .def("view", &Builder::view)
      .def("kernel", &Builder::kernel)
      .def("triton", &Builder::triton)
      .def("aten", &Builder::aten)
      .def("python", &Builder::python)
      .def("read_scalar", &Builder::read_scalar)
      .def("expect", &Builder::expect)
      .def("output_none", &Builder::output_none)
      .def("output_slot", &Builder::output_slot)
      .def("output_size", &Builder::output_size)
      .def("output_float", &Builder::output_float)
      .def("output_float_value", &Builder::output_float_value)
      .def("build", &build);
}
