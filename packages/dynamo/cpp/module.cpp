// torchdynamo._C: guards, the compiled callable and the frame hook.
#include "callable.h"
#include "dict_version.h"
#include "guard_tree.h"
#include "hook.h"
#include "tensor_guard.h"

namespace {

PyMethodDef functions[] = {
    {"kernel_switches", torchdynamo::kernel_switches, METH_NOARGS,
     "kernel_switches() -> ((name, number), ...): what decides between kernels besides their arguments"},
    {"gradient_hooks", torchdynamo::gradient_hooks, METH_O,
     "gradient_hooks(tensor) -> bool: whether hooks run where a gradient comes to a tensor"},
    {"define_call", torchdynamo::define_call, METH_O,
     "define_call(function): what CompiledCallable.__call__ is to those who look it up"},
    {"force_eager", torchdynamo::force_eager, METH_O,
     "force_eager(bool): whether every compiled callable runs its function as it was written"},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "torchdynamo._C", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__C() {
  if (torchdynamo::add_dict_watcher() < 0) PyErr_Clear();  // others took them all: guards work, without records
  torchdynamo::Ref module = torchdynamo::Ref::steal(PyModule_Create(&definition));
  if (!module || torchdynamo::add_guard_tree_type(module.get()) < 0 || torchdynamo::add_callable_types(module.get()) < 0 ||
      torchdynamo::add_hook_functions(module.get()) < 0) {
    return nullptr;
  }
  return module.release();
}
