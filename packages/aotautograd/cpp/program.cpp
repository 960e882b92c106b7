#include "program.h"

#include <pybind11/stl.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>

namespace aotautograd {
namespace {

template <typename T>
std::vector<T> numbers(py::handle record, const char* name) {
  return record.attr(name).cast<std::vector<T>>();
}

TangentLayout read_layout(py::handle record) {
  const py::object dtype = record.attr("dtype"), device = record.attr("device");
  TangentLayout layout{reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type,
                       reinterpret_cast<THPDevice*>(device.ptr())->device,
                       !record.attr("sizes").is_none(),
                       {},
                       {}};
  if (layout.known) {
    layout.sizes = numbers<int64_t>(record, "sizes");
    layout.strides = numbers<int64_t>(record, "strides");
  }
  return layout;
}

void read_sets(py::handle records, History& history) {
  history.places.resize(history.differentiable.size());
  for (py::handle record : records) {
    GradientSet set{numbers<uint32_t>(record, "tangents"), numbers<uint32_t>(record, "gradients"),
                    record.attr("stage").cast<uint32_t>(), record.attr("follows").cast<int32_t>()};
    history.stages = std::max(history.stages, set.stage + 1);
    for (size_t place = 0; place < set.gradients.size(); place++) {
      history.places[set.gradients[place]] = PlaceInSet{history.sets.size(), place};
    }
    history.sets.push_back(std::move(set));
  }
}

History read_history(py::handle record) {
  History history;
  history.backward = record.attr("backward");
  history.needs = record.attr("needs");
  history.gradients = record.attr("gradients");
  history.layouts = record.attr("layouts");
  history.differentiable = numbers<int32_t>(record, "differentiable");
  for (py::handle kind : record.attr("outputs")) {
    const auto name = kind.cast<std::string>();
    history.outputs.push_back(name == "symbol"     ? OutputKind::Symbol
                              : name == "constant" ? OutputKind::Constant
                                                   : OutputKind::Differentiable);
  }
  history.tangents = numbers<uint32_t>(record, "tangents");
  // Each differentiable output has a tangent, in their order.
  for (uint32_t i = 0; i < history.tangents.size(); i++) TORCH_INTERNAL_ASSERT(history.tangents[i] == i);
  for (py::handle layout : record.attr("expected")) history.expected.push_back(read_layout(layout));
  history.held = numbers<int32_t>(record, "held");
  history.held_count = static_cast<size_t>(std::count(history.held.begin(), history.held.end(), kHeld));
  for (const int32_t place : history.held) {
    if (place >= 0) history.held_saved.push_back(static_cast<size_t>(place));
  }
  std::sort(history.held_saved.begin(), history.held_saved.end());
  history.saved = record.attr("saved").cast<size_t>();
  const py::object sets = record.attr("sets");
  history.one_node = sets.is_none();
  if (!history.one_node) read_sets(sets, history);
  history.leading = record.attr("leading").cast<std::vector<std::vector<uint32_t>>>();
  history.cut = record.attr("cut");
  history.apart = record.attr("apart");
  history.interrupted = record.attr("interrupted");
  return history;
}

}  // namespace

std::vector<GradientSource> read_sources(py::handle records) {
  std::vector<GradientSource> sources;
  for (py::handle record : records) {
    const py::object views = record.attr("views");
    sources.push_back({record.attr("from_tangent").cast<bool>(), record.attr("slot").cast<size_t>(),
                       views.is_none() ? py::object() : views, record.attr("cloned").cast<bool>()});
  }
  return sources;
}

std::shared_ptr<const Program> read_program(py::handle call, py::handle history) {
  auto program = std::make_shared<Program>();
  program->forward = call.attr("forward");
  program->boxed = call.attr("boxed").cast<bool>();
  program->flat_inputs = call.attr("flat_inputs").cast<size_t>();
  for (py::handle place : call.attr("places")) {
    const auto [input, dim] = place.cast<std::pair<int32_t, int32_t>>();
    program->places.push_back({input, dim});
  }
  program->conjugated = numbers<int32_t>(call, "conjugated");
  if (!history.is_none()) program->history = read_history(history);
  return program;
}

const Backward& Program::backward(const std::vector<uint32_t>& missing) const {
  const auto found = backwards_.find(missing);
  if (found != backwards_.end()) return found->second;
  const py::object made = history->backward(py::cast(missing));
  Backward backward{made.attr("compiled"), made.attr("boxed").cast<bool>(),
                    std::vector<bool>(history->tangents.size(), true), read_sources(made.attr("sources"))};
  for (const uint32_t i : missing) backward.takes[i] = false;
  for (const size_t i : numbers<size_t>(made, "zeros")) backward.takes[i] = true;
  return backwards_.emplace(missing, std::move(backward)).first->second;
}

const Needs& Program::needs(const std::vector<uint32_t>& missing, const std::vector<uint32_t>& earlier) const {
  const auto key = std::make_pair(missing, earlier);
  const auto found = needs_.find(key);
  if (found != needs_.end()) return found->second;
  const py::tuple made = history->needs(py::cast(missing), py::cast(earlier));
  Needs needs{made[0].cast<std::vector<size_t>>(), made[1].cast<std::vector<size_t>>(), made[2].cast<bool>()};
  return needs_.emplace(key, std::move(needs)).first->second;
}

int Program::traverse(visitproc visit, void* arg) const {
  Py_VISIT(forward.ptr());
  if (!history) return 0;
  for (const py::object* held : {&history->backward, &history->needs, &history->gradients, &history->layouts, &history->cut,
                                 &history->apart, &history->interrupted}) {
    Py_VISIT(held->ptr());
  }
  for (const auto& [missing, backward] : backwards_) {
    Py_VISIT(backward.compiled.ptr());
    for (const GradientSource& source : backward.sources) Py_VISIT(source.views.ptr());
  }
  return 0;
}

py::object call_compiled(const py::object& compiled, bool boxed, py::list inputs) {
  PyObject* result = boxed ? PyObject_CallOneArg(compiled.ptr(), inputs.ptr())
                           : PyObject_Vectorcall(compiled.ptr(), PySequence_Fast_ITEMS(inputs.ptr()),
                                                 static_cast<size_t>(PyList_GET_SIZE(inputs.ptr())), nullptr);
  if (result == nullptr) throw python_error();
  return py::reinterpret_steal<py::object>(result);
}

void raise(const char* error, const std::string& message) {
  const py::object type = py::module_::import("aotautograd.errors").attr(error);
  PyErr_SetObject(type.ptr(), py::str(message).ptr());
  throw python_error();
}

}  // namespace aotautograd
