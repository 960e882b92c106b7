// The frame hook (PEP 523): a per-thread switch over the interpreter's evaluation function.
#pragma once

#include "refs.h"

namespace torchdynamo {

// While alive, frames of this thread are evaluated as they are.
class HookPause {
 public:
  HookPause();
  ~HookPause();
  HookPause(const HookPause&) = delete;
  HookPause& operator=(const HookPause&) = delete;

 private:
  PyObject* paused_;
};

// The next frame of this code on this thread is evaluated as it is, even with the hook on.
void let_pass(PyCodeObject* code);

int add_hook_functions(PyObject* module);

}  // namespace torchdynamo
