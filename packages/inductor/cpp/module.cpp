// Python's view of the executor: a builder that `native.py` fills, and the callable that it makes. The one file of this
// folder that knows Python.
#include "builder.h"

#include <pybind11/complex.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Layout.h>
#include <torch/csrc/MemoryFormat.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torchinductor/program.h>

namespace py = pybind11;

namespace inductor {
namespace {

// ---- what Python hands over -----------------------------------------------------------------------------------------

c10::ScalarType scalar_type(py::handle dtype) {
  if (dtype.is_none()) return c10::ScalarType::Undefined;
  return reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
}

c10::Device device_of(py::handle device) { return reinterpret_cast<THPDevice*>(device.ptr())->device; }

const at::Tensor& tensor_of(py::handle object) { return THPVariable_Unpack(object.ptr()); }

// A value as it comes; see Builder::aten.
c10::IValue plain_value(py::handle object) {
  PyObject* raw = object.ptr();
  if (object.is_none()) return {};
  if (THPDtype_Check(raw)) return static_cast<int64_t>(scalar_type(object));
  if (THPDevice_Check(raw)) return device_of(object);
  if (THPLayout_Check(raw)) return static_cast<int64_t>(reinterpret_cast<THPLayout*>(raw)->layout);
  if (THPMemoryFormat_Check(raw)) return static_cast<int64_t>(reinterpret_cast<THPMemoryFormat*>(raw)->memory_format);
  if (PyBool_Check(raw)) return raw == Py_True;
  if (PyLong_Check(raw)) return object.cast<int64_t>();
  if (PyFloat_Check(raw)) return PyFloat_AS_DOUBLE(raw);
  if (PyComplex_Check(raw)) return c10::complex<double>(PyComplex_RealAsDouble(raw), PyComplex_ImagAsDouble(raw));
  if (PyUnicode_Check(raw)) return object.cast<std::string>();
  if (THPVariable_Check(raw)) return tensor_of(object);
  if (PyList_Check(raw)) {
    std::vector<c10::IValue> items;
    for (py::handle item : object) items.push_back(plain_value(item));
    return c10::ivalue::Tuple::create(std::move(items));
  }
  throw py::type_error(std::string("an ATen argument cannot be prepared from a ") + Py_TYPE(raw)->tp_name);
}

// Prepared arguments come as tagged tuples: ("fixed", x), ("slot", i), ("value", i), ("float", i), ("list", [...]).
Argument argument_of(const py::tuple& tagged) {
  const auto tag = tagged[0].cast<std::string>();
  Argument argument;
  if (tag == "fixed") {
    argument.fixed = plain_value(tagged[1]);
  } else if (tag == "list") {
    argument.kind = Argument::Kind::List;
    for (py::handle item : tagged[1]) argument.items.push_back(argument_of(py::reinterpret_borrow<py::tuple>(item)));
  } else {
    argument.kind = tag == "slot"  ? Argument::Kind::Slot
        : tag == "value" ? Argument::Kind::Value
                         : Argument::Kind::FloatValue;
    argument.index = tagged[1].cast<int32_t>();
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

std::vector<Destination> destinations_of(const py::list& items) {
  std::vector<Destination> destinations;
  for (py::handle item : items) destinations.push_back(destination_of(item));
  return destinations;
}

// A Python object that C++ shares; it is released with the GIL held.
std::shared_ptr<py::object> hold(py::object object) {
  return {new py::object(std::move(object)), [](py::object* held) {
            py::gil_scoped_acquire gil;
            delete held;
          }};
}

PythonCall python_call(py::object callable) {
  return [held = hold(std::move(callable))](const std::vector<at::Tensor>& tensors, c10::ArrayRef<int64_t> numbers) {
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
    if (tensor.key_set().has(c10::DispatchKey::Python) && tensor.numel() != 0 && tensor.storage().data() == nullptr) {
      throw py::type_error(expected(program, i) + " must be a tensor with memory of its own, not a " + Py_TYPE(item)->tp_name +
                           ": keep what makes it, or gives it as a gradient, and what takes it in one compiled function, or "
                           "neither in any, with torchcompile.disable");
    }
    frame.slots[input.index] = input.claimed ? alias_of(tensor) : tensor;
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

py::object compiled(std::shared_ptr<const Program> program) {
  auto* self = PyObject_New(CompiledProgram, &program_type);
  if (self == nullptr) throw py::error_already_set();
  self->vectorcall = program_vectorcall;
  self->program = new std::shared_ptr<const Program>(std::move(program));
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(self));
}

// ---- the builder ----------------------------------------------------------------------------------------------------

void bind_builder(py::module_& m) {
  using Slots = std::vector<int32_t>;
  py::class_<Builder>(m, "Builder")
      .def(py::init<>())
      .def("input_tensor",
           [](Builder& self, std::string name, int32_t slot, py::handle dtype, py::handle device, int64_t dim) {
             self.input_tensor(std::move(name), slot, scalar_type(dtype), device_of(device), dim);
           })
      .def("input_symbol", &Builder::input_symbol)
      .def("stream",
           [](Builder& self, py::object getter, int64_t device) {
             self.stream([held = hold(std::move(getter)), device] {
               return reinterpret_cast<void*>((*held)(device).cast<uint64_t>());
             });
           })
      .def("tune_products", &Builder::tune_products)
      .def("constant", [](Builder& self, int32_t slot, py::handle tensor) { self.constant(slot, tensor_of(tensor)); })
      .def("value", &Builder::value)
      .def("label", &Builder::label)
      .def("alloc",
           [](Builder& self, int32_t dst, const Sizes& shape, const Sizes& strides, py::handle dtype, py::handle device,
              std::string name) { self.alloc(dst, shape, strides, scalar_type(dtype), device_of(device), std::move(name)); })
      .def("free", &Builder::free)
      .def("view",
           [](Builder& self, int32_t dst, int32_t src, const Sizes& shape, const Sizes& strides, const Size& offset,
              py::handle dtype, std::string name) {
             self.view(dst, src, shape, strides, offset, scalar_type(dtype), std::move(name));
           })
      .def("claim",
           [](Builder& self, int32_t dst, int32_t src, const Sizes& shape, const Sizes& strides, py::handle dtype,
              py::handle device, std::string name) {
             self.claim(dst, src, shape, strides, scalar_type(dtype), device_of(device), std::move(name));
           })
      .def("kernel",
           [](Builder& self, uint64_t address, Slots buffers, const Sizes& symbols, std::string name) {
             self.kernel(reinterpret_cast<KernelFunction>(address), std::move(buffers), symbols, std::move(name));
           })
      .def("triton",
           [](Builder& self, std::shared_ptr<TritonKernel> handle, const Sizes& grid, Slots buffers, Slots written,
              const Sizes& symbols, py::handle device, std::string name) {
             self.triton(std::move(handle), grid, std::move(buffers), std::move(written), symbols, device_of(device), std::move(name));
           })
      .def("aten",
           [](Builder& self, const std::string& op, const std::string& overload, const py::list& arguments,
              const py::list& destinations, Slots refreshed, std::string name) {
             std::vector<Argument> given;
             for (py::handle item : arguments) given.push_back(argument_of(py::reinterpret_borrow<py::tuple>(item)));
             self.aten(op, overload, given, destinations_of(destinations), std::move(refreshed), std::move(name));
           })
      .def("python",
           [](Builder& self, py::object callable, Slots slots, const Sizes& integers, const py::list& destinations,
              std::string name) {
             self.python(python_call(std::move(callable)), std::move(slots), integers, destinations_of(destinations), std::move(name));
           })
      .def("read_scalar", &Builder::read_scalar)
      .def("require", &Builder::require)
      .def("expect",
           [](Builder& self, int32_t slot, const Sizes& shape, const Sizes& strides, std::string source, py::object mended) {
             self.expect(slot, shape, strides, std::move(source),
                         [held = hold(std::move(mended))](const std::string& text) { (*held)(text); });
           })
      .def("output_none", [](Builder& self) { self.output({}); })
      .def("output_slot", [](Builder& self, int64_t slot) { self.output({Output::Kind::Slot, slot}); })
      .def("output_size", &Builder::output_size)
      .def("output_float", [](Builder& self, double number) { self.output({Output::Kind::Float, 0, number}); })
      .def("output_float_value", [](Builder& self, int64_t value) { self.output({Output::Kind::FloatValue, value}); })
      .def("build", [](Builder& self, int32_t slots, int32_t symbols) { return compiled(self.build(slots, symbols)); });
}

// ---- programs in folders --------------------------------------------------------------------------------------------

py::object python_value(const c10::IValue& value) {
  if (value.isTensor()) return py::reinterpret_steal<py::object>(THPVariable_Wrap(value.toTensor()));
  if (value.isBool()) return py::bool_(value.toBool());
  if (value.isInt()) return py::int_(value.toInt());
  if (value.isDouble()) return py::float_(value.toDouble());
  if (value.isComplexDouble()) return py::cast(static_cast<std::complex<double>>(value.toComplexDouble()));
  if (value.isString()) return py::str(value.toStringRef());
  return py::none();
}

void bind_saved_program(py::module_& m) {
  using torchinductor::Program;
  py::register_exception<torchinductor::LoadError>(m, "LoadError", PyExc_RuntimeError);
  py::class_<Program>(m, "SavedProgram")
      .def(py::init([](const std::string& folder) { return Program::load(folder); }), py::call_guard<py::gil_scoped_release>())
      .def("__call__", [](const Program& self, const py::list& given) {
        std::vector<c10::IValue> inputs, results;
        for (py::handle item : given) inputs.push_back(plain_value(item));
        {
          py::gil_scoped_release no_gil;
          results = self.run(inputs);
        }
        py::list found;
        for (const c10::IValue& result : results) found.append(python_value(result));
        return found;
      });
}

// (rows, columns, leading dimension, batch stride, transposed)
py::tuple matrix_tuple(const ColumnMajor& matrix) {
  return py::make_tuple(matrix.rows, matrix.columns, matrix.leading, matrix.batch_stride, matrix.transposed);
}

// None for ATen, else (workspace, the algorithm's words).
py::object choice_of(ProductChoices& self, const std::string& key) {
  const auto found = self.find(key);
  if (!found) throw py::key_error(key);
  return found->aten ? py::object(py::none()) : py::object(py::make_tuple(found->workspace, found->algorithm));
}

void remember_choice(ProductChoices& self, const std::string& key, const std::optional<std::pair<uint64_t, std::array<uint64_t, 8>>>& choice) {
  self.remember(key, choice ? ProductChoice{false, choice->second, choice->first} : ProductChoice{});
}

py::object layout_tuple(py::handle a, py::handle b, py::handle added) {
  const auto given = added.is_none() ? std::nullopt : std::optional<at::Tensor>(tensor_of(added));
  const auto layout = product_layout(tensor_of(a), tensor_of(b), given);
  if (!layout) return py::none();
  const py::object matrix = layout->added ? py::object(matrix_tuple(*layout->added)) : py::object(py::none());
  return py::make_tuple(
      matrix_tuple(layout->left), matrix_tuple(layout->right), matrix_tuple(layout->out), matrix, layout->row, layout->batch);
}

}  // namespace
}  // namespace inductor

PYBIND11_MODULE(_C, m) {
  using namespace inductor;
  m.doc() = "Runs a compiled graph's program.";
  m.def("product_layout", &layout_tuple);
  py::class_<ProductChoices>(m, "ProductChoices")
      .def(py::init<std::string>())
      .def("find", &choice_of)
      .def("remember", &remember_choice);
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
  bind_builder(m);
  bind_saved_program(m);
}
