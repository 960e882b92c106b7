// aotautograd._C: the call of a compiled program, and the autograd nodes that it makes.
#include "backward_node.h"
#include "program.h"

#include <ATen/record_function.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <utility>

namespace aotautograd {
namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;

// What the callable has of its program. The program leads back to it by way of the compiler, which knows what it has
// compiled: Python's collector has to see what it holds.
struct HolderObject {
  PyObject_HEAD
  std::shared_ptr<const Program>* program;
};

HolderObject* as_holder(PyObject* self) { return reinterpret_cast<HolderObject*>(self); }

int holder_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  const auto* program = as_holder(self)->program;
  // Autograd's nodes hold it, too: while one does, what it holds is in use.
  return program != nullptr && program->use_count() == 1 ? (*program)->traverse(visit, arg) : 0;
}

int holder_clear(PyObject* self) {
  delete std::exchange(as_holder(self)->program, nullptr);
  return 0;
}

void holder_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  holder_clear(self);
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyType_Slot holder_slots[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(holder_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(holder_clear)},
    {Py_tp_dealloc, reinterpret_cast<void*>(holder_dealloc)},
    {0, nullptr},
};

PyType_Spec holder_spec = {"aotautograd._C.Program", sizeof(HolderObject), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, holder_slots};

// ---- before the forward ---------------------------------------------------------------------------------------------

void refuse_transforms(PyObject* const* flat, size_t count) {
  if (c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode)) {
    raise("UnsupportedTransform",
          "a compiled program was called under a transform of torch.func (vmap, grad, jvp, ...), which cannot see into "
          "it; compile the transformed function instead");
  }
  if (torch::autograd::ForwardADLevel::try_get_by_idx(0) == nullptr) return;
  for (size_t i = 0; i < count; i++) {
    if (THPVariable_Check(flat[i]) && torch::autograd::isFwGradDefined(THPVariable_Unpack(flat[i]))) {
      raise("UnsupportedTransform",
            "input " + std::to_string(i) +
                " of a compiled program carries a forward-mode tangent, and the program was compiled for reverse mode; "
                "call the original function under forward_ad.dual_level()");
    }
  }
}

PyObject* gather_one(const Program& program, PyObject* const* flat, Place place) {
  if (place.dim < 0) return Py_NewRef(flat[place.input]);
  return PyLong_FromLongLong(THPVariable_Unpack(flat[place.input]).size(place.dim));
}

// The forward's inputs.
py::list gather(const Program& program, PyObject* const* flat) {
  const size_t count = program.places.empty() ? program.flat_inputs : program.places.size();
  auto inputs = py::reinterpret_steal<py::list>(PyList_New(static_cast<Py_ssize_t>(count)));
  for (size_t i = 0; i < count; i++) {
    PyObject* input = program.places.empty() ? Py_NewRef(flat[i]) : gather_one(program, flat, program.places[i]);
    PyList_SET_ITEM(inputs.ptr(), static_cast<Py_ssize_t>(i), input);
  }
  if (program.conjugated.empty()) return inputs;
  for (size_t i = 0; i < count; i++) {  // a compiler reads memory, in which a lazy conjugation has not happened
    PyObject* input = PyList_GET_ITEM(inputs.ptr(), static_cast<Py_ssize_t>(i));
    if (!THPVariable_Check(input) || !THPVariable_Unpack(input).is_conj()) continue;
    PyList_SetItem(inputs.ptr(), static_cast<Py_ssize_t>(i), THPVariable_Wrap(THPVariable_Unpack(input).resolve_conj()));
  }
  return inputs;
}

// ---- the forward ----------------------------------------------------------------------------------------------------

py::object run_forward(const Program& program, py::list inputs) {
  at::RecordFunction record(at::RecordScope::FUNCTION);
  if (record.isActive()) record.before("CompiledProgram", static_cast<int64_t>(at::sequence_number::peek()));
  const c10::AutoGradMode without_grad(false);
  const c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
  return call_compiled(program.forward, program.boxed, std::move(inputs));
}

// ---- after the forward ----------------------------------------------------------------------------------------------

// Where an input's gradient goes. For a leaf whose accumulator is alive this is what gradient_edge does, inlined.
Edge edge_of(const at::Tensor& input) {
  const auto* meta = static_cast<const torch::autograd::AutogradMeta*>(input.unsafeGetTensorImpl()->autograd_meta());
  if (meta != nullptr && meta->requires_grad_ && !meta->is_view_ && !meta->grad_fn_) {
    const std::lock_guard<std::mutex> lock(meta->mutex_);
    if (auto accumulator = meta->grad_accumulator_.lock()) return Edge(std::move(accumulator), 0);
  }
  return torch::autograd::impl::gradient_edge(input);
}

// Where the gradients go; empty if no input requires one.
edge_list edges_of(const History& history, PyObject* const* flat) {
  edge_list edges;
  edges.reserve(history.differentiable.size());
  bool any = false;
  for (const int32_t input : history.differentiable) {
    edges.push_back(edge_of(THPVariable_Unpack(flat[input])));
    any |= edges.back().is_valid();
  }
  if (!any) edges.clear();
  return edges;
}

bool is_among(PyObject* tensor, PyObject* const* others, size_t count) {
  for (size_t i = 0; i < count; i++) {
    if (others[i] == tensor) return true;
  }
  return false;
}

// An output of its own: one that may get a history, and that the caller may write to. A view made in the forward could
// not be written; an alias with the same version counter can.
py::object own_output(PyObject* value, PyObject* const* flat, size_t inputs, PyObject* outputs, size_t place) {
  const at::Tensor& tensor = THPVariable_Unpack(value);
  const bool shared = Py_REFCNT(value) > 1 && (is_among(value, flat, inputs) ||
                                               is_among(value, PySequence_Fast_ITEMS(outputs), place));
  const bool plain = tensor.unsafeGetTensorImpl()->autograd_meta() == nullptr;
  if (shared || (!plain && (tensor.is_view() || tensor.requires_grad()))) {
    return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor.detach()));
  }
  return py::reinterpret_borrow<py::object>(value);
}

py::tuple as_tuple(PyObject* const* values, size_t count) {
  py::tuple found(count);
  for (size_t i = 0; i < count; i++) found[i] = py::reinterpret_borrow<py::object>(values[i]);
  return found;
}

// The program's outputs, connected to nodes if there is anything to differentiate by.
py::object with_history(const std::shared_ptr<const Program>& program, PyObject* const* flat, py::object held,
                        const py::object& values) {
  const History& history = *program->history;
  const size_t returned = history.outputs.size();
  const auto count = static_cast<size_t>(PySequence_Fast_GET_SIZE(values.ptr()));
  TORCH_CHECK(count >= returned + history.saved, "a compiled forward returned ", count, " values instead of ",
              returned + history.saved);
  PyObject** value = PySequence_Fast_ITEMS(values.ptr());
  edge_list edges = c10::GradMode::is_enabled() ? edges_of(history, flat) : edge_list();
  auto outputs = py::reinterpret_steal<py::object>(PyTuple_New(static_cast<Py_ssize_t>(returned)));
  std::optional<NodeMaker> nodes;
  std::shared_ptr<Call> call;
  if (!edges.empty()) {
    call = std::make_shared<Call>(program);
    nodes.emplace(call, std::move(edges));
  }
  for (size_t i = 0; i < returned; i++) {
    py::object output = py::reinterpret_borrow<py::object>(value[i]);
    if (history.outputs[i] != OutputKind::Symbol && THPVariable_Check(value[i])) {
      output = own_output(value[i], flat, program->flat_inputs, outputs.ptr(), i);
      if (nodes && history.outputs[i] == OutputKind::Differentiable) nodes->connect(THPVariable_Unpack(output.ptr()));
    }
    PyTuple_SET_ITEM(outputs.ptr(), static_cast<Py_ssize_t>(i), output.release().ptr());
  }
  if (nodes) nodes->finish();
  if (nodes) {
    try {
      call->keep(value + returned, count - returned, std::move(held), nodes->behind_results());
    } catch (...) {  // a hook raised: torch.utils.checkpoint has what it wants, say
      if (!history.interrupted.is_none()) {
        const py::error_scope raised;
        history.interrupted(as_tuple(flat, program->flat_inputs), outputs);
      }
      throw;
    }
  }
  return outputs;
}

// ---- the callable ---------------------------------------------------------------------------------------------------

PyObject* call(PyObject* self, PyObject* const* flat, Py_ssize_t count) {
  try {
    TORCH_CHECK(as_holder(self)->program != nullptr, "a compiled program was called that has been collected");
    const auto& program = *as_holder(self)->program;
    if (static_cast<size_t>(count) != program->flat_inputs) {
      raise("InputMismatch", "a compiled program of " + std::to_string(program->flat_inputs) + " inputs got " +
                                 std::to_string(count));
    }
    refuse_transforms(flat, static_cast<size_t>(count));
    py::list inputs = gather(*program, flat);
    if (!program->history) return run_forward(*program, std::move(inputs)).release().ptr();
    py::object held = held_inputs(*program->history, inputs);
    py::object results = run_forward(*program, std::move(inputs));
    auto values = py::reinterpret_steal<py::object>(PySequence_Fast(results.ptr(), "a compiled forward returned no sequence"));
    if (!values) throw python_error();
    results = py::object();
    return with_history(program, flat, std::move(held), values).release().ptr();
  } catch (const std::exception&) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

PyMethodDef call_definition = {"compiled_program", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call)),
                               METH_FASTCALL, "compiled_program(*flat inputs) -> what the forward returns"};

py::object wrap(py::object plan, py::object history) {
  static PyTypeObject* type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&holder_spec));
  if (type == nullptr) throw py::error_already_set();
  auto program = std::make_unique<std::shared_ptr<const Program>>(read_program(plan, history));
  const auto holder = py::reinterpret_steal<py::object>(type->tp_alloc(type, 0));
  if (!holder) throw py::error_already_set();
  as_holder(holder.ptr())->program = program.release();
  return py::reinterpret_steal<py::object>(PyCFunction_NewEx(&call_definition, holder.ptr(), nullptr));
}

}  // namespace
}  // namespace aotautograd

PYBIND11_MODULE(_C, module) {
  module.def("wrap", &aotautograd::wrap, py::arg("call"), py::arg("history"));
  module.attr("BACKWARD_TWICE") = torch::autograd::ERR_BACKWARD_TWICE;
  aotautograd::add_node_type(module);
}
