#include "hook.h"

// The interpreter's frame layout, and whether it collects garbage, are internal: this file alone depends on them.
#define Py_BUILD_CORE 1
#undef HAVE_STD_ATOMIC  // C's header of atomics is none of C++; the layouts are the same without
#undef _PyGC_FINALIZED  // Python 3.12: a macro, and a function of the internal header
#include "internal/pycore_frame.h"
#include "internal/pycore_interp.h"
#undef Py_BUILD_CORE

#include <cstdint>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "callable.h"

namespace torchdynamo {
namespace {

#if PY_VERSION_HEX < 0x030C0000
int get_extra(PyObject* code, Py_ssize_t index, void** out) { return _PyCode_GetExtra(code, index, out); }
int set_extra(PyObject* code, Py_ssize_t index, void* value) { return _PyCode_SetExtra(code, index, value); }
Py_ssize_t request_extra(freefunc release) { return _PyEval_RequestCodeExtraIndex(release); }
#else
int get_extra(PyObject* code, Py_ssize_t index, void** out) { return PyUnstable_Code_GetExtra(code, index, out); }
int set_extra(PyObject* code, Py_ssize_t index, void* value) { return PyUnstable_Code_SetExtra(code, index, value); }
Py_ssize_t request_extra(freefunc release) { return PyUnstable_Eval_RequestCodeExtraIndex(release); }
#endif

PyCodeObject* frame_code(_PyInterpreterFrame* frame) {
#if PY_VERSION_HEX >= 0x030D0000
  return reinterpret_cast<PyCodeObject*>(frame->f_executable);
#else
  return frame->f_code;
#endif
}

PyObject* frame_function(_PyInterpreterFrame* frame) {
#if PY_VERSION_HEX >= 0x030C0000
  return frame->f_funcobj;
#else
  return reinterpret_cast<PyObject*>(frame->f_func);
#endif
}

// ---------------------------------------------------------------------------------------------------------------
// Hook: a callback, and the callables that it gave out

struct HookObject {
  PyObject_HEAD
  PyObject* callback;
  PyObject* callables;  // list: owns what code objects only refer to weakly
  uint64_t id;
};

PyTypeObject* hook_type = nullptr;
uint64_t last_hook_id = 0;

HookObject* as_hook(PyObject* object) { return reinterpret_cast<HookObject*>(object); }

std::unordered_set<uint64_t> live_hooks;

// What one hook decided for one code object. Many functions may share a code object (closures made in a loop): each
// has its own callable.
struct Decision {
  Ref callable;        // weak reference, or none: the code is left alone
  bool below = false;  // and all that runs below it
};

// What has been decided on one code object.
struct Decisions {
  bool skipped = false;  // no hook asks about it
  std::unordered_map<uint64_t, std::vector<Decision>> by_hook;

  std::vector<Decision>& of(uint64_t hook) {
    auto [place, added] = by_hook.try_emplace(hook);
    if (!added) return place->second;
    std::erase_if(by_hook, [](const auto& entry) { return live_hooks.count(entry.first) == 0; });
    return by_hook[hook];
  }
};

Py_ssize_t extra_index = -1;

struct ThreadState {
  PyObject* hook = nullptr;             // owned; the hook that is on, if any
  PyCodeObject* pass = nullptr;         // borrowed, compared only
  _PyInterpreterFrame* handed_on = nullptr;  // borrowed, compared only: the frame that another evaluator has been given
};
thread_local ThreadState thread_state;

Py_ssize_t active_threads = 0;  // under the GIL: threads with a hook on
_PyFrameEvalFunction previous_evaluator = nullptr;

PyObject* evaluate(PyThreadState* tstate, _PyInterpreterFrame* frame, int throwflag);

// Makes `hook` (stolen, may be null) the thread's hook; the former one is returned, owned.
PyObject* exchange_hook(PyObject* hook) {
  PyObject* old = std::exchange(thread_state.hook, hook);
  if ((old != nullptr) == (hook != nullptr)) return old;
  PyInterpreterState* interpreter = PyInterpreterState_Get();
  active_threads += hook != nullptr ? 1 : -1;
  if (hook != nullptr && active_threads == 1) {
    _PyFrameEvalFunction current = _PyInterpreterState_GetEvalFrameFunc(interpreter);
    if (current != evaluate) {
      previous_evaluator = current;
      _PyInterpreterState_SetEvalFrameFunc(interpreter, evaluate);
    }
  } else if (active_threads == 0 && _PyInterpreterState_GetEvalFrameFunc(interpreter) == evaluate) {
    _PyInterpreterState_SetEvalFrameFunc(interpreter, previous_evaluator);
  }
  return old;
}

// ---------------------------------------------------------------------------------------------------------------
// Decisions on code objects

void release_decisions(void* value) { delete static_cast<Decisions*>(value); }

Decisions* decisions_of(PyCodeObject* code, bool create) {
  void* value = nullptr;
  if (code->co_extra != nullptr) get_extra(reinterpret_cast<PyObject*>(code), extra_index, &value);
  if (value == nullptr && create) {
    value = new Decisions();
    if (set_extra(reinterpret_cast<PyObject*>(code), extra_index, value) < 0) {
      release_decisions(value);
      return nullptr;
    }
  }
  return static_cast<Decisions*>(value);
}

bool same_environment(PyObject* a, PyObject* b) {
  if (a == b) return true;
  if (PyFunction_GET_GLOBALS(a) != PyFunction_GET_GLOBALS(b)) return false;
  PyObject *x = PyFunction_GET_CLOSURE(a), *y = PyFunction_GET_CLOSURE(b);
  if (x == y) return true;
  if (x == nullptr || y == nullptr || PyTuple_GET_SIZE(x) != PyTuple_GET_SIZE(y)) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(x); i++) {
    if (PyTuple_GET_ITEM(x, i) != PyTuple_GET_ITEM(y, i)) return false;
  }
  return true;
}

enum class Verdict { unknown, leave, leave_below, use };

// `*callable` gets a new reference when the verdict is `use`.
Verdict look_up(Decisions& decisions, uint64_t hook, PyObject* function, Ref* callable) {
  if (decisions.skipped) return Verdict::leave;
  auto found = decisions.by_hook.find(hook);
  if (found == decisions.by_hook.end()) return Verdict::unknown;
  std::vector<Decision>& own = found->second;
  for (size_t i = 0; i < own.size();) {
    Decision& decision = own[i];
    if (!decision.callable) return decision.below ? Verdict::leave_below : Verdict::leave;
    PyObject* target = weak_target(decision.callable.get());
    if (target == nullptr) {
      own.erase(own.begin() + static_cast<Py_ssize_t>(i));
      continue;
    }
    if (same_environment(callable_function(target), function)) {
      *callable = Ref::share(target);
      return Verdict::use;
    }
    i++;
  }
  return Verdict::unknown;
}

// Asks the callback. `leave` with an exception set when it raised.
Verdict decide(HookObject* hook, PyCodeObject* code, PyObject* function, Ref* callable) {
  Ref answer;
  {
    HookPause pause;
    answer = Ref::steal(PyObject_CallOneArg(hook->callback, function));
  }
  if (!answer) return Verdict::leave;
  Decision decision;
  decision.below = answer.get() == Py_False;
  bool alone = answer.get() == Py_None || decision.below;
  if (!alone) {
    if (!is_callable(answer.get())) {
      PyErr_Format(PyExc_TypeError, "the hook's callback must return a CompiledCallable, None or False, not %R", answer.get());
      return Verdict::leave;
    }
    decision.callable = Ref::steal(PyWeakref_NewRef(answer.get(), nullptr));
    if (!decision.callable || PyList_Append(hook->callables, answer.get()) < 0) return Verdict::leave;
  }
  Decisions* decisions = decisions_of(code, true);
  if (decisions == nullptr) return Verdict::leave;
  decisions->of(hook->id).push_back(std::move(decision));
  if (alone) return answer.get() == Py_False ? Verdict::leave_below : Verdict::leave;
  *callable = std::move(answer);
  return Verdict::use;
}

// ---------------------------------------------------------------------------------------------------------------
// Evaluation

#if PY_VERSION_HEX >= 0x030C0000
PyObjectArenaAllocator arena;

// Gives a frame's memory back to the thread's data stack.
void pop_frame(PyThreadState* tstate, _PyInterpreterFrame* frame) {
  PyObject** base = reinterpret_cast<PyObject**>(frame);
  _PyStackChunk* chunk = tstate->datastack_chunk;
  if (base != &chunk->data[0]) {
    tstate->datastack_top = base;
    return;
  }
  _PyStackChunk* below = chunk->previous;
  tstate->datastack_top = &below->data[below->top];
  tstate->datastack_chunk = below;
  arena.free(arena.ctx, chunk, chunk->size);
  tstate->datastack_limit = reinterpret_cast<PyObject**>(reinterpret_cast<char*>(below) + below->size);
}
#endif

// Ends a frame that was not evaluated. Up to 3.11 the caller does it; later it is the evaluator's duty.
void discard_frame([[maybe_unused]] PyThreadState* tstate, [[maybe_unused]] _PyInterpreterFrame* frame) {
#if PY_VERSION_HEX >= 0x030C0000
  int count = frame->stacktop;
  frame->stacktop = 0;
  for (int i = 0; i < count; i++) Py_XDECREF(frame->localsplus[i]);
  Py_XDECREF(frame->f_locals);
  PyObject *function = frame_function(frame), *code = reinterpret_cast<PyObject*>(frame_code(frame));
  pop_frame(tstate, frame);
  Py_DECREF(function);
  Py_DECREF(code);
#endif
}

bool is_function(PyCodeObject* code) {
  constexpr int kFunction = CO_OPTIMIZED | CO_NEWLOCALS;
  return (code->co_flags & kFunction) == kFunction;
}

bool suspends(PyCodeObject* code) {
  return (code->co_flags & (CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR)) != 0;
}

bool is_dead_reference(PyObject* object) {
  return object != nullptr && PyWeakref_CheckRef(object) && weak_target(object) == nullptr;
}

// Whether the interpreter calls the function of itself, in the middle of the program: while it collects garbage, within
// a tracer or a profiler, or as the callback (of a method: with `self`) of a weak reference that died.
bool is_asynchronous(PyThreadState* tstate, _PyInterpreterFrame* frame) {
  if (tstate->interp->gc.collecting || tstate->tracing) return true;
  int count = frame_code(frame)->co_argcount;
  return (count == 1 || count == 2) && is_dead_reference(frame->localsplus[count - 1]);
}

// Runs a frame as it is: by the evaluator that was there before this one. That one may hand on what it leaves alone to
// the one that it found itself, and where each was installed twice by turns each has found the other: a frame that
// comes back is evaluated by the interpreter.
PyObject* plain(PyThreadState* tstate, _PyInterpreterFrame* frame, int throwflag) {
  if (previous_evaluator == _PyEval_EvalFrameDefault) return _PyEval_EvalFrameDefault(tstate, frame, throwflag);
  _PyInterpreterFrame* outer = std::exchange(thread_state.handed_on, frame);
  PyObject* result = previous_evaluator(tstate, frame, throwflag);
  thread_state.handed_on = outer;
  return result;
}

PyObject* evaluate(PyThreadState* tstate, _PyInterpreterFrame* frame, int throwflag) {
  if (thread_state.handed_on == frame) return _PyEval_EvalFrameDefault(tstate, frame, throwflag);
  PyObject* hook = thread_state.hook;
  if (hook == nullptr || throwflag) return plain(tstate, frame, throwflag);
  PyCodeObject* code = frame_code(frame);
  if (thread_state.pass != nullptr && std::exchange(thread_state.pass, nullptr) == code) {
    return plain(tstate, frame, throwflag);
  }
  PyObject* function = frame_function(frame);
  if (!is_function(code) || !PyFunction_Check(function)) return plain(tstate, frame, throwflag);
  // The call that makes a generator or a coroutine is told to the callback; what it made is advanced as it is.
  if (suspends(code) && frame->owner == FRAME_OWNED_BY_GENERATOR) return plain(tstate, frame, throwflag);

  Ref callable;
  Decisions* decisions = decisions_of(code, false);
  Ref owner = Ref::share(hook);
  Verdict verdict = decisions != nullptr ? look_up(*decisions, as_hook(hook)->id, function, &callable) : Verdict::unknown;
  if (verdict == Verdict::unknown && is_asynchronous(tstate, frame)) {
    HookPause pause;
    return plain(tstate, frame, throwflag);  // undecided: the program may call it, too
  }
  if (verdict == Verdict::unknown) verdict = decide(as_hook(hook), code, function, &callable);
  PyObject* result = nullptr;
  if (verdict == Verdict::use && suspends(code)) {
    PyErr_Format(PyExc_TypeError, "the hook's callback must return None for %R, which suspends", function);
  } else if (verdict == Verdict::use) {
    bool eager = false;
    result = dispatch(callable.get(), function, frame->localsplus, flat_size(code), &eager);
    if (eager) return plain(tstate, frame, throwflag);
  } else if (!PyErr_Occurred()) {
    if (verdict == Verdict::leave) return plain(tstate, frame, throwflag);
    HookPause pause;
    return plain(tstate, frame, throwflag);
  }
  discard_frame(tstate, frame);
  return result;
}

// ---------------------------------------------------------------------------------------------------------------
// Python's view

int hook_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(as_hook(self)->callback);
  Py_VISIT(as_hook(self)->callables);
  return 0;
}

int hook_clear(PyObject* self) {
  Py_CLEAR(as_hook(self)->callback);
  Py_CLEAR(as_hook(self)->callables);
  return 0;
}

void hook_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  live_hooks.erase(as_hook(self)->id);
  hook_clear(self);
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* hook_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"callback", nullptr};
  PyObject* callback;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:Hook", const_cast<char**>(names), &callback)) return nullptr;
  Ref self = Ref::steal(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  as_hook(self.get())->callback = Py_NewRef(callback);
  as_hook(self.get())->callables = PyList_New(0);
  as_hook(self.get())->id = ++last_hook_id;
  live_hooks.insert(last_hook_id);
  return as_hook(self.get())->callables != nullptr ? self.release() : nullptr;
}

PyObject* get_callback(PyObject* self, void*) { return Py_NewRef(as_hook(self)->callback); }
PyObject* get_callables(PyObject* self, void*) { return Py_NewRef(as_hook(self)->callables); }

PyGetSetDef hook_getset[] = {
    {"callback", get_callback, nullptr, "called as callback(function) for each function not seen before: a CompiledCallable runs in its place; None: it runs "
     "as it is; False: with all that it calls", nullptr},
    {"callables", get_callables, nullptr, "the callables that the callback gave; the list owns them", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyType_Slot hook_slots[] = {
    {Py_tp_doc, const_cast<char*>("Hook(callback)\n\nWhat set_hook and hook_enabled switch on.")},
    {Py_tp_new, reinterpret_cast<void*>(hook_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(hook_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(hook_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(hook_clear)},
    {Py_tp_getset, hook_getset},
    {0, nullptr}};

PyType_Spec hook_spec = {"torchdynamo._C.Hook", sizeof(HookObject), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, hook_slots};

bool valid_hook(PyObject* hook) {
  if (hook == Py_None || Py_TYPE(hook) == hook_type) return true;
  PyErr_Format(PyExc_TypeError, "a Hook or None is needed, not %R", hook);
  return false;
}

PyObject* set_hook(PyObject*, PyObject* hook) {
  if (!valid_hook(hook)) return nullptr;
  PyObject* old = exchange_hook(hook == Py_None ? nullptr : Py_NewRef(hook));
  return old != nullptr ? old : Py_NewRef(Py_None);
}

// with hook_enabled(hook): one use at a time.
struct RegionObject {
  PyObject_HEAD
  PyObject* hook;  // null once None was given
  PyObject* outer;
  bool entered;
};

PyTypeObject* region_type = nullptr;

RegionObject* as_region(PyObject* object) { return reinterpret_cast<RegionObject*>(object); }

int region_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(as_region(self)->hook);
  Py_VISIT(as_region(self)->outer);
  return 0;
}

int region_clear(PyObject* self) {
  Py_CLEAR(as_region(self)->hook);
  Py_CLEAR(as_region(self)->outer);
  return 0;
}

void region_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  region_clear(self);
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* region_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* hook;
  if (!PyArg_ParseTuple(args, "O:hook_enabled", &hook) || !valid_hook(hook)) return nullptr;
  PyObject* self = type->tp_alloc(type, 0);
  if (self != nullptr && hook != Py_None) as_region(self)->hook = Py_NewRef(hook);
  return self;
}

PyObject* region_enter(PyObject* self, PyObject*) {
  if (as_region(self)->entered) return PyErr_Format(PyExc_RuntimeError, "this hook_enabled region is already entered");
  as_region(self)->entered = true;
  as_region(self)->outer = exchange_hook(Py_XNewRef(as_region(self)->hook));
  return Py_NewRef(self);
}

PyObject* region_exit(PyObject* self, PyObject* const*, Py_ssize_t) {
  if (!as_region(self)->entered) return PyErr_Format(PyExc_RuntimeError, "this hook_enabled region is not entered");
  as_region(self)->entered = false;
  PyObject* inner = exchange_hook(std::exchange(as_region(self)->outer, nullptr));
  Py_XDECREF(inner);
  Py_RETURN_FALSE;
}

PyMethodDef region_methods[] = {
    {"__enter__", region_enter, METH_NOARGS, nullptr},
    {"__exit__", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(region_exit)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot region_slots[] = {
    {Py_tp_doc, const_cast<char*>("hook_enabled(hook)\n\nContext manager: this thread's frames go through the hook; "
                                  "None switches it off.")},
    {Py_tp_new, reinterpret_cast<void*>(region_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(region_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(region_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(region_clear)},
    {Py_tp_methods, region_methods},
    {0, nullptr}};

PyType_Spec region_spec = {"torchdynamo._C.hook_enabled", sizeof(RegionObject), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                           region_slots};

bool valid_code(PyObject* code) {
  if (PyCode_Check(code)) return true;
  PyErr_Format(PyExc_TypeError, "a code object is needed, not %R", code);
  return false;
}

PyObject* skip_code(PyObject*, PyObject* code) {
  if (!valid_code(code)) return nullptr;
  Decisions* decisions = decisions_of(reinterpret_cast<PyCodeObject*>(code), true);
  if (decisions == nullptr) return nullptr;
  decisions->skipped = true;
  Py_RETURN_NONE;
}

PyObject* forget_code(PyObject*, PyObject* code) {
  if (!valid_code(code)) return nullptr;
  if (Decisions* decisions = decisions_of(reinterpret_cast<PyCodeObject*>(code), false)) *decisions = Decisions();
  Py_RETURN_NONE;
}

PyMethodDef functions[] = {
    {"set_hook", set_hook, METH_O, "set_hook(hook | None) -> Hook | None\n\nThis thread's hook; returns the former one."},
    {"skip_code", skip_code, METH_O, "skip_code(code)\n\nNo hook ever asks about this code."},
    {"forget_code", forget_code, METH_O, "forget_code(code)\n\nUndoes every decision taken on this code."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

// The evaluator is taken out where no other thread needs it: while one is installed, the interpreter calls Python
// functions through C, without its specialised instructions.
HookPause::HookPause() : paused_(exchange_hook(nullptr)) {}

HookPause::~HookPause() { Py_XDECREF(exchange_hook(paused_)); }

void let_pass(PyCodeObject* code) {
  if (thread_state.hook != nullptr) thread_state.pass = code;
}

int add_hook_functions(PyObject* module) {
#if PY_VERSION_HEX >= 0x030C0000
  PyObject_GetArenaAllocator(&arena);
#endif
  extra_index = request_extra(release_decisions);
  previous_evaluator = _PyEval_EvalFrameDefault;
  hook_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&hook_spec));
  region_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&region_spec));
  if (extra_index < 0 || hook_type == nullptr || region_type == nullptr) return -1;
  if (PyModule_AddObjectRef(module, "Hook", reinterpret_cast<PyObject*>(hook_type)) < 0) return -1;
  if (PyModule_AddObjectRef(module, "hook_enabled", reinterpret_cast<PyObject*>(region_type)) < 0) return -1;
  return PyModule_AddFunctions(module, functions);
}

}  // namespace torchdynamo
