"""What capture writes to the ledger beside the reasons of graph breaks, and the errors of `fullgraph=True`."""

from __future__ import annotations

import types

from primtorch.ledger import Effect, Event, Kind, kinds
from primtorch.schemas import UserFrame
from torchdynamo.errors import InternalError, RecompileLimitExceeded, TorchDynamoError, Unsupported
from torchdynamo.handed_on import body_of

CAPTURE_FAULT = Kind(
    "capture_fault",
    "capture raised an error of its own: the function runs eagerly from then on",
    "report it with the program; strict=True raises the error with its traceback",
    Effect.FALLBACK,
)
RECOMPILE_LIMIT = Kind(
    "recompile_limit",
    "the function has as many compiled versions as the limit allows, and none fits: it runs eagerly from then on",
    "make the values that change arguments of tensor type, mark sizes with mark_dynamic, or raise recompile_limit",
    Effect.FALLBACK,
)
RECOMPILE_REFUSED = Kind(
    "recompile_refused",
    'no compiled version fits, and on_recompile="eager" asks for eager runs of such calls',
    "make the values that change arguments of tensor type, or mark sizes with mark_dynamic",
    Effect.FALLBACK,
)
TRANSFORMED_CALL = Kind(
    "transformed_call",
    "the compiled function is called inside of a torch.func transform, whose tensors carry more than a graph does: such"
    " calls run eagerly",
    "compile the function that applies the transform",
    Effect.FALLBACK,
)
FORWARD_DERIVATIVES = Kind(
    "forward_derivatives",
    "the compiled function is called inside of forward-mode differentiation, whose derivatives travel with the tensors,"
    " where a graph has no place for them: such calls run eagerly",
    "take the derivative by torch.autograd.grad, or outside of the compiled function",
    Effect.FALLBACK,
)
FUNCTION_MODE = Kind(
    "function_mode",
    "a torch-function mode of the program's own sees each call of torch, and may answer it in its own way: calls under"
    " it run eagerly",
    "leave the mode where compiled code is called, or do in the function itself what the mode does",
    Effect.FALLBACK,
)
DISABLED_OVERRIDES = Kind(
    "disabled_overrides",
    "torch functions are disabled (torch._C.DisableTorchFunction), by which capture sees the calls: they run eagerly",
    "enable them where compiled code is called",
    Effect.FALLBACK,
)
FOREIGN_TRACER = Kind(
    "foreign_tracer",
    "something else records or counts each operator (make_fx, torch.export, torch.jit.trace, a dispatch mode), from"
    " which compiled code would hide them: it sees the function as it was written",
    "nothing to do: compiled code is used again when it has ended",
    Effect.PLAIN,
)
WITHIN_OPERATOR = Kind(
    "within_operator",
    "the calls of this thread go past what graphs are traced with, as they do in a function that implements operators"
    " (__torch_dispatch__): the compiled function runs eagerly there",
    "compile what calls the operators",
    Effect.FALLBACK,
)
UNSPLIT_FRAME = Kind(
    "unsplit_frame",
    "the graph broke where the function cannot be left and entered again: it runs eagerly as a whole, and what it"
    " calls is captured",
    "move what breaks into a function of its own, outside of with, try and the like",
    Effect.FALLBACK,
)
SUSPENDING_FRAME = Kind(
    "suspending_frame",
    "a generator, a comprehension or a coroutine that is run where the graph broke: capture may not advance it, or"
    " what it iterates over, so that its own operations run eagerly; functions that it calls are captured",
    "move its operations into a function, or remove the break around it",
    Effect.FALLBACK,
)
UNSTARTED_GENERATOR = Kind(
    "unstarted_generator",
    "a generator or coroutine leaves the compiled function before it starts: its body runs eagerly, where it is"
    " advanced",
    "return a list, or compile the functions that the body calls",
    Effect.FALLBACK,
)
DISABLED_FUNCTION = Kind(
    "disabled_function",
    "the function is marked to run as it is",
    "remove the mark (torchdynamo.disable, skip_frame, torch.compiler.disable) to capture the function",
    Effect.FALLBACK,
)
LIBRARY_CODE = Kind(
    "library_code",
    "Python code of torch that was called where the graph broke: it is part of the break",
    "remove the break",
    Effect.PLAIN,
)
LOOPED_BATCH = Kind(
    "looped_batch",
    "vmap has no batching rule for an operator: the graph calls it once for each element of the batch",
    "give the operator a rule (torch.library.register_vmap), or call what takes a batch as it is",
    Effect.PLAIN,
)
NOTHING_TO_COMPILE = Kind(
    "nothing_to_compile",
    "a function that was called where the graph broke has no tensor operation",
    "nothing to do",
    Effect.PLAIN,
)
LAZY_MODULE = Kind(
    "lazy_module",
    "a lazy module makes its parameters at its first call: that call runs as it was written, and the next is captured",
    "nothing to do",
    Effect.PLAIN,
)
PROGRAM_RAISED = Kind(
    "program_raised",
    "the program raised an exception while it was captured, where nothing had run yet: the call ran eagerly, so that"
    " the exception and all that came before are eager's",
    "test for the condition instead of raising, where it is met often",
    Effect.RERUN,
)
GRAPH_RAISED = Kind(
    "graph_raised",
    "a compiled graph raised an exception, before anything else that the function does: the call ran again, eagerly, so"
    " that the program's handlers and the exits of its blocks meet the exception where eager's do",
    "test for the condition instead of raising, where it is met often",
    Effect.RERUN,
)
CONDITION_NOT_MET = Kind(
    "condition_not_met",
    "a condition on data, behind which the program raises, was not met: the graph had taken it for met, before"
    " anything else that the function does, and the call ran again, eagerly, and raised",
    "nothing to do, unless this is met often: then test for it outside of the compiled function",
    Effect.PLAIN,
)
RAISE_WAS_HANDLED = Kind(
    "raise_was_handled",
    "what the graph took for granted of the data was not so: a condition behind which the program raises, and the"
    " program handled its own exception; or that there is no NaN among the numbers that it sorts. The call ran again,"
    " eagerly",
    "choose by torch.where, sort by torch.sort, or test for the condition outside of the compiled function",
    Effect.RERUN,
)
RAISED_AT_ENTRY = Kind(
    "raised_at_entry",
    "a compiled graph raised an exception and the call could not run again (the graph had written to an input, or the"
    " exception is no operator's): it is raised where the function, or its part behind a break, was entered",
    "nothing to do, unless the program handles the exception between that place and the operator: let the graph break"
    " before the handler",
    Effect.PLAIN,
)
RECOMPILED = Kind(
    "recompiled",
    "a call did not fit the compiled versions of the function: it was compiled once more",
    "make the values that change arguments of tensor type, or mark sizes with mark_dynamic",
    Effect.RECOMPILE,
)

STANCE = Kind(
    "stance",
    "the stance asks for it (set_stance): the function runs eagerly, where nothing compiled fits the call or at every"
    " call",
    "nothing to do, or set_stance('default')",
    Effect.FALLBACK,
)
STANCE_REFUSES = Kind(
    "stance_refuses",
    "nothing compiled fits a call, and set_stance('fail_on_recompile') asks for an error where that is so",
    "call the function under set_stance('default') first, with each kind of arguments that will come",
    Effect.FALLBACK,
)

KINDS = kinds(
    CAPTURE_FAULT, RECOMPILE_LIMIT, RECOMPILE_REFUSED, TRANSFORMED_CALL, FORWARD_DERIVATIVES, FUNCTION_MODE,
    DISABLED_OVERRIDES, FOREIGN_TRACER, WITHIN_OPERATOR, UNSPLIT_FRAME, SUSPENDING_FRAME, UNSTARTED_GENERATOR,
    DISABLED_FUNCTION, LIBRARY_CODE, LOOPED_BATCH, NOTHING_TO_COMPILE, LAZY_MODULE, PROGRAM_RAISED,
    GRAPH_RAISED, CONDITION_NOT_MET, RAISE_WAS_HANDLED, RAISED_AT_ENTRY, RECOMPILED, STANCE,
    STANCE_REFUSES,
)  # fmt: skip

_ERRORS: dict[str, type[TorchDynamoError]] = {
    CAPTURE_FAULT.id: InternalError,
    RECOMPILE_LIMIT.id: RecompileLimitExceeded,
    RECOMPILE_REFUSED.id: RecompileLimitExceeded,
    STANCE_REFUSES.id: RecompileLimitExceeded,
}


def refusal(event: Event) -> TorchDynamoError:
    """The error of `fullgraph=True` for an event of any package."""
    return _ERRORS.get(event.kind.id, Unsupported)(str(event))


def frame_of(code: types.CodeType) -> UserFrame:
    """Where a function is defined."""
    return UserFrame(code.co_filename, code.co_firstlineno, code.co_name)


def of_function(kind: Kind, function: types.FunctionType, detail: str = "") -> Event:
    """An event of a function as a whole; of one that only hands on its arguments, at the line of what it calls."""
    return Event(kind, function.__qualname__, detail, (frame_of(body_of(function).__code__),))
