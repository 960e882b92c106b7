// What is fixed when a program is compiled: how a call finds its forward's inputs, and what its history needs.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

namespace aotautograd {

namespace py = pybind11;

// An input of the forward: a flat input of the program, or the size of one of its dimensions.
struct Place {
  int32_t input;
  int32_t dim;  // -1: the input itself
};

enum class OutputKind : uint8_t { Symbol, Constant, Differentiable };

// The layout that the backward was compiled for.
struct TangentLayout {
  at::ScalarType dtype;
  c10::Device device;
  bool known;  // else the sizes are symbolic: `History::layouts` computes them
  std::vector<int64_t> sizes, strides;
};

// Where a derivative of the backward finds an input of the forward.
constexpr int32_t kUnheld = -2;  // it does not read it, or the program wrote it
constexpr int32_t kHeld = -1;    // the node holds it; from 0 on: the number of the saved tensor that it is

// How a gradient is made: of what a backward returned, or of a tangent as it came.
struct GradientSource {
  bool from_tangent;
  size_t slot;
  py::object views;  // (that, the kept sizes) -> a view of it; null: that itself
  bool cloned;       // where it would become `.grad` itself, a copy does
};

// Gradients that the same tangents lead to: eager's autograd comes to their inputs when one of these tangents came.
// With stages, those of each stage are a set.
struct GradientSet {
  std::vector<uint32_t> tangents;
  std::vector<uint32_t> gradients;
  uint32_t stage;
  int32_t follows;  // the set of the same tangents whose turn is before; -1: none, results lead to it
};

// Where a gradient is among the sets.
struct PlaceInSet {
  size_t set;
  size_t place;
};

struct History {
  py::object backward;   // missing tangents -> BackwardPlan
  py::object needs;      // (missing tangents, tangents of earlier runs) -> (reads, keeps, spent): see Needs
  py::object gradients;  // (inputs, saved tensors, tangents, missing ones) -> (results with a history, sources)
  py::object layouts;                    // the kept sizes -> (sizes, strides) of each tangent
  std::vector<int32_t> differentiable;   // flat inputs that the gradients are for
  std::vector<OutputKind> outputs;       // of what the program returns: the rest is kept
  std::vector<uint32_t> tangents;        // for each tangent: its place among the differentiable outputs
  std::vector<TangentLayout> expected;   // for each tangent
  std::vector<int32_t> held;             // for each input of the forward
  size_t held_count = 0;                 // of them, how many the node holds
  std::vector<size_t> held_saved;        // those that are saved tensors, by their numbers in order
  size_t saved;                          // tensors among what is kept; sizes follow them
  bool one_node;                         // there is one tangent, and it leads to all gradients
  std::vector<GradientSet> sets;         // else: each gradient is in one, those that nothing leads to in none
  std::vector<std::optional<PlaceInSet>> places;  // else: of each gradient
  std::vector<std::vector<uint32_t>> leading;  // for each tangent: those whose results are computed from its result
  py::object cut;  // as `gradients`, where hooks are to see what comes to results from others: see HistoryPlan
  py::object apart;  // whether a tangent is for `gradients`, under whatever grad mode; None: none is
  py::object interrupted;  // (flat inputs, outputs), where keeping tensors raised; None: nothing is to be done
  uint32_t stages = 1;  // more than one: a backward gives what computes them, one after the other
};

// A backward compiled for calls in which some tangents do not come.
struct Backward {
  py::object compiled;
  bool boxed;
  std::vector<bool> takes;  // for each tangent: whether it is an input, as zeros if it is missing
  std::vector<GradientSource> sources;
};

// What a backward without some tangents does with the saved tensors, behind runs that have freed theirs; both lists are
// in order.
struct Needs {
  std::vector<size_t> reads;
  std::vector<size_t> keeps;  // what the backward of missing tangents reads where neither this one nor those passed
  bool spent;                 // whether it reads some where one of those has passed
};

struct Program {
  py::object forward;
  bool boxed;  // takes one list of inputs, which it may empty
  size_t flat_inputs;
  std::vector<Place> places;  // empty: the flat inputs as they are
  std::vector<int32_t> conjugated;  // flat inputs that may come lazily conjugated
  std::optional<History> history;   // none: the program is not differentiated

  const Backward& backward(const std::vector<uint32_t>& missing) const;
  const Needs& needs(const std::vector<uint32_t>& missing, const std::vector<uint32_t>& earlier) const;

  // Shows Python's collector the objects that it holds (a `tp_traverse`).
  int traverse(visitproc visit, void* arg) const;

 private:
  mutable std::map<std::vector<uint32_t>, Backward> backwards_;  // by missing tangents; the GIL protects them
  mutable std::map<std::pair<std::vector<uint32_t>, std::vector<uint32_t>>, Needs> needs_;
};

std::vector<GradientSource> read_sources(py::handle records);

std::shared_ptr<const Program> read_program(py::handle call, py::handle history);

// Calls a compiled graph with the list of its inputs. Returns a new reference, or throws python_error.
py::object call_compiled(const py::object& compiled, bool boxed, py::list inputs);

// Throws an error of aotautograd.errors.
[[noreturn]] void raise(const char* error, const std::string& message);

}  // namespace aotautograd
