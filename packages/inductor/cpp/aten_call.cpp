// Calls an ATen operator through its boxed entry point, with the arguments that were prepared when the program was built.
#include "program.h"

#include <ATen/core/List.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue_inl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace inductor {
namespace {

c10::IValue build(const Argument& argument, const Frame& frame) {
  switch (argument.kind) {
    case Argument::Kind::Fixed:
      return argument.fixed;
    case Argument::Kind::Slot:
      return frame.slots[argument.index];
    case Argument::Kind::Value:
      return frame.values[argument.index];
    case Argument::Kind::FloatValue:
      return bits_float(frame.values[argument.index]);
    case Argument::Kind::List:
      break;
    case Argument::Kind::Tensors: {
      c10::List<at::Tensor> list;
      list.reserve(argument.items.size());
      for (const Argument& item : argument.items) list.push_back(frame.slots[item.index]);
      return list;
    }
    case Argument::Kind::OptionalTensors: {
      c10::List<std::optional<at::Tensor>> list;
      list.reserve(argument.items.size());
      for (const Argument& item : argument.items) {
        const bool present = item.kind == Argument::Kind::Slot && frame.slots[item.index].defined();
        list.push_back(present ? std::optional<at::Tensor>(frame.slots[item.index]) : std::nullopt);
      }
      return list;
    }
    case Argument::Kind::Integers: {
      c10::List<int64_t> list;
      list.reserve(argument.items.size());
      for (const Argument& item : argument.items) {
        list.push_back(item.kind == Argument::Kind::Value ? frame.values[item.index] : item.fixed.toInt());
      }
      return list;
    }
    case Argument::Kind::Numbers: {
      c10::List<at::Scalar> list;
      list.reserve(argument.items.size());
      for (const Argument& item : argument.items) list.push_back(build(item, frame).toScalar());
      return list;
    }
  }
  return {};
}

void store(const Destination& destination, c10::IValue& value, Frame& frame) {
  switch (destination.kind) {
    case Destination::Kind::Drop:
      return;
    case Destination::Kind::Slot:
      frame.slots[destination.index] = std::move(value).toTensor();
      return;
    case Destination::Kind::Symbol:
      frame.symbols[destination.index] = value.toInt();
      return;
    case Destination::Kind::List: {
      const c10::List<at::Tensor> list = value.toTensorList();
      TORCH_CHECK(list.size() == destination.items.size(), "returned ", list.size(), " tensors, not ", destination.items.size());
      for (size_t i = 0; i < list.size(); ++i) {
        c10::IValue item(list.get(i));
        store(destination.items[i], item, frame);
      }
    }
  }
}

// As eager calls a kernel outside of ATen: what it runs under grad mode is derived. Under none, as here, a formula that
// the operator itself has for autograd lets the call pass.
void call_foreign(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const auto keys = c10::impl::tls_local_dispatch_key_set();
  const c10::impl::ForceDispatchKeyGuard with_autograd(
      keys.included_, keys.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  const at::NoGradGuard nothing_derived;
  op.callBoxed(stack);
}

void call(const Instruction& in, Frame& frame) {
  torch::jit::Stack stack;
  stack.reserve(std::max(in.arguments.size(), in.destinations.size()));
  for (const Argument& argument : in.arguments) stack.push_back(build(argument, frame));
  in.foreign ? call_foreign(*in.op, stack) : in.op->callBoxed(stack);
  const size_t count = std::min(stack.size(), in.destinations.size());
  for (size_t i = 0; i < count; ++i) store(in.destinations[i], stack[i], frame);
}

}  // namespace

void run_aten(const Instruction& in, Frame& frame) {
  if (in.product && in.product->run(in, frame, [&] { call(in, frame); })) return;
  call(in, frame);
}

}  // namespace inductor
