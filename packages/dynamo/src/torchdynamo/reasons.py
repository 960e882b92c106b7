"""The table of graph-break reasons: what stops capture, why, and what the user can do."""

from __future__ import annotations

from typing import ClassVar

from primtorch.frozen import record
from primtorch.ledger import Effect, Event, Kind, kinds
from torchdynamo.interpreter.protocol import Escape
from torchdynamo.schemas import GraphBreak


@record
class Reason(Kind):
    """One way in which a program leaves the graph."""

    effect: Effect = Effect.BREAK


_TABLE = (
    Reason(
        "print",
        "printing is an effect that has to happen at every call",
        "remove the call, or move it outside of the compiled function",
    ),
    Reason(
        "tensor_to_number",
        "the program needs a tensor's value as a Python number: it branches on it, shows it, or hands it to C code",
        "keep the value in a tensor, or compute it outside of the compiled function",
    ),
    Reason(
        "tensor_repr",
        "the program formats a tensor's values as text",
        "format the tensor outside of the compiled function",
    ),
    Reason(
        "data_dependent_branch",
        "a branch depends on a tensor's value",
        "use torch.where, or branch outside of the compiled function",
    ),
    Reason(
        "data_dependent_shape",
        "the operator's output size depends on a tensor's values",
        "use an operator with a fixed output size (a mask with torch.where instead of boolean indexing)",
    ),
    Reason(
        "numpy",
        "NumPy works outside of the graph where torch has no such function, or not with these arguments; where torch"
        " cannot have the memory of an array (text, objects, negative strides, read only); and for random numbers and"
        " files",
        "use the torch function of the same meaning, or keep the array as a tensor",
    ),
    Reason(
        "c_function",
        "a C function that capture does not know to be pure",
        "use a Python or torch function, or mark it with torchdynamo.allow_in_graph if it works on tensors alone",
    ),
    Reason(
        "float_of_each_call",
        "C code needs the value of a float that is another one at each call (json.dumps, decimal.Decimal): it is given"
        " the value behind the graph",
        "format the number (an f-string, %, str, round), which needs no break, or do this outside of the compiled"
        " function",
    ),
    Reason(
        "list_of_each_length",
        "the program reads a list, a tuple or a dict that had another length in every version so far, or an item by a"
        " number or a text that each round of a loop has another of: it is read behind the graph, so that the next one"
        " needs no further version",
        "keep what is in the list in a tensor, or read the list outside of the compiled function",
    ),
    Reason(
        "loop_of_each_length",
        "a loop (over a list, a tuple, a dict, a range or rows, or as long as a number says) had another number of"
        " rounds in each version so far: from now on a round is a graph of its own, with code that all rounds share, so"
        " that the next number of rounds needs no further version",
        "keep what is looped over in one tensor, or the number of rounds the same; fullgraph=True keeps all rounds in"
        " one graph, with a version for each number of them up to recompile_limit",
    ),
    Reason(
        "repeated_modules",
        "a loop goes over many modules that are built alike, in a model that is compiled in rounds (one that"
        " DistributedDataParallel replicates, by the option `replicated_rounds`): a round is a graph of its own, which"
        " all rounds share, so that a model of more layers takes hardly longer to compile",
        "options={'replicated_rounds': 0} has all rounds in one graph, as fullgraph=True has",
    ),
    Reason(
        "operator_without_meta",
        "the operator has no shape rule for tensors without data",
        "register a fake implementation for the operator",
    ),
    Reason(
        "symbolic_size",
        "the operator's own code in C++ reads sizes as numbers, and one of them is a symbol",
        "keep the size from varying, or mark it with torchdynamo.mark_static",
    ),
    Reason(
        "generator",
        "a generator is still running where its state would be needed, or is given up there",
        "exhaust the generator inside of the compiled function, or return a list",
    ),
    Reason(
        "coroutine",
        "a coroutine or an asynchronous generator (`async def`) is made, run or awaited: it runs outside of the graph,"
        " as it was written, since an event loop may go on with something else wherever it waits",
        "compile the functions that it calls, and leave `async def` around them",
    ),
    Reason(
        "autograd_function",
        "the forward or backward of a torch.autograd.Function cannot be captured as a graph of its own",
        "see the detail; keep side effects out of its backward, or register it as an operator with torch.library",
    ),
    Reason(
        "checkpoint",
        "a function under torch.utils.checkpoint cannot become a graph of its own",
        "see the detail; pass use_reentrant=False without context_fn, and keep the function free of breaks and"
        " of changes to what is outside of it",
    ),
    Reason(
        "nested_graph",
        "the body of a checkpoint or of an autograd function has to be a graph of its own, and it shares more than"
        " tensors with what is around it",
        "return what the rest of the program needs from the body",
    ),
    Reason("disabled", "the function was marked with torchdynamo.disable", "remove the mark to capture the function"),
    Reason(
        "constant_result",
        "a function marked with torchdynamo.assume_constant_result takes a tensor, whose values capture does not know",
        "pass what does not change between calls, or remove the mark",
    ),
    Reason("graph_break", "torchdynamo.graph_break() asks for a break here", "remove the call"),
    Reason(
        "backward",
        "autograd's engine is run where the graph does not hold all of it: it goes on into a history that began"
        " outside, calls a hook, keeps a history of gradients (backward with create_graph), or raises",
        "see the detail; pass tensors without a history, or take the derivative outside of the compiled function",
    ),
    Reason(
        "tensor_hook",
        "a hook on a tensor runs when its gradient is there, which a graph has no place for",
        "register the hook outside of the compiled function",
    ),
    Reason(
        "module_hook",
        "a module has backward hooks, which autograd calls on its real inputs and outputs",
        "remove the hooks, or write what they do as a torch.autograd.Function",
    ),
    Reason(
        "distributed",
        "processes talk to each other (a collective, the forward of DistributedDataParallel): at each call,"
        " and in the same order in all of them",
        "call it outside of the compiled function, or take a collective of tensors, which graphs hold"
        " (docs/distributed.md lists them); what DistributedDataParallel holds is compiled all the same",
    ),
    Reason(
        "class",
        "the program makes a class that outlives the graph: there is a new one at each call",
        "define the class outside of the compiled function",
    ),
    Reason(
        "function_transform",
        "a function under a transform of torch.func cannot become a graph of its own (it breaks the graph, writes to a"
        " tensor that was made before, or returns something else than tensors), or the transform is none that graphs"
        " take (functionalize, linearize at what requires a gradient, dual levels)",
        "compile the function that is transformed, or transform it outside of the compiled function",
    ),
    Reason(
        "higher_order_operator",
        "a function given to an operator (torch.cond, scan, while_loop) cannot become a graph of its own: it writes to"
        " a tensor or changes an object that was there before, breaks the graph, returns what it is given, or results"
        " that are not alike; or the operator is called as graphs do not take it (the highest scores of"
        " flex_attention)",
        "see the detail; let the function compute new tensors of its arguments and of what it reads, or call the"
        " operator outside of the compiled function",
    ),
    Reason(
        "tensor_metadata_write",
        "the program changes a tensor's storage or metadata in place",
        "make a new tensor instead of changing `.data`, `.grad` or the size of this one",
    ),
    Reason(
        "leaf",
        "the program makes a tensor that requires a gradient of its own, and what depends on it leaves the graph:"
        " derivatives by it may be taken behind the graph, so that it has to be an input of one",
        "take the derivatives within the function, or make the tensor outside of it",
    ),
    Reason(
        "write_through_gaps",
        "the program writes to a tensor through a view that leaves gaps (unfold with a step above its size, as_strided"
        " of a view), or reads such memory after a write: graphs have values, not memory",
        "write to the base by slices or an index, or clone first",
    ),
    Reason(
        "sparse_gradient",
        "the gradient of the operator is a sparse tensor (sparse=True), and the values of a graph are dense",
        "leave out sparse=True where a dense gradient will do; under no_grad the call stays in the graph",
    ),
    Reason(
        "operator_view",
        "an operator of somebody's own gives back memory of its argument: how that lies no graph knows",
        "return a new tensor from the operator, or make it of torch's own views (CompositeImplicitAutograd)",
    ),
    Reason(
        "tensor_subclass",
        "a tensor's class changes what operators or attributes mean (`__torch_dispatch__`, `__getattr__`, a method in"
        " the place of torch's)",
        "keep the class to `__torch_function__`, say how a wrapper is taken apart (`__tensor_flatten__`, or"
        " torchcompile.register_flattening), pass plain tensors, or unwrap it outside of the compiled function",
    ),
    Reason(
        "special_tensor",
        "a tensor is used that can be no input of a graph: it is sparse, nested of the strided layout, quantised to"
        " parts of a byte, conjugated or negated where it is read, or a view whose history autograd refuses to make;"
        " what only hands it on stays in the graph. Of a nested tensor of the jagged layout a row is asked for, or a"
        " number of its lengths, it is written to, or torch refuses the call. Of a quantised tensor an operator is"
        " called that graphs do not hold",
        "make a dense tensor of it (to_dense, to_padded_tensor, dequantize, resolve_conj) outside of the compiled"
        " function",
    ),
    Reason(
        "random_state",
        "the program reads or writes a random generator's state",
        "seed outside of the compiled function",
    ),
    Reason(
        "rebuild",
        "a value made during capture has to outlive the graph, and generated code cannot make it again",
        "return plain containers, dataclasses or tensors",
    ),
    Reason(
        "external_write",
        "the program writes to an object in a way that cannot be replayed",
        "write plain attributes or items",
    ),
    Reason(
        "exception",
        "an exception leaves the compiled function, or its handler leaves the graph: it is raised for real",
        "test for the condition instead of raising, where it is met often",
    ),
    Reason(
        "loop",
        "a loop's body breaks the graph: after a few rounds its iterator is advanced for real, so that the same"
        " compiled code serves every round",
        "move what breaks out of the loop",
    ),
    Reason(
        "frame_reader",
        "text is executed as code (eval, exec), which reads and writes the variables of the function around it",
        "write the code out, or call it outside of the compiled function",
    ),
    Reason(
        "import",
        "a module that is not loaded is imported: its code runs once, for real, before what follows in the program",
        "import it outside of the compiled function; once it is loaded, an import does not break the graph",
    ),
    Reason(
        "compiler",
        "the program calls a compiler (compile, optimize, report), which is no part of it",
        "compile outside of the compiled function",
    ),
    Reason("opcode", "the interpreter has no handler for this instruction", "rewrite the statement"),
    Reason(
        "overlapping_inputs",
        "the program writes to a tensor whose memory another of its inputs shares, or whose elements share some",
        "pass tensors that do not overlap, or write to a clone",
    ),
    Reason("ambient_state", "the program changes process-wide state", "change it outside of the compiled function"),
    Reason("unsupported_read", "the object cannot be read in a way that a guard can check", "pass plain Python data"),
)

REASONS = kinds(*_TABLE)
IN_ROUNDS = frozenset({"loop_of_each_length", "repeated_modules"})  # the graph ends at a loop's head
OF_EACH_LENGTH = IN_ROUNDS | {"list_of_each_length"}  # in the place of a version for each


class BreakGraph(Escape):
    """Capture cannot continue past the current instruction.

    No handler of the captured program sees it.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        if reason not in REASONS:
            raise KeyError(f"unknown break reason {reason!r}; known: {', '.join(REASONS)}")
        self.reason = reason
        self.detail = detail


class OutlivesGraph(BreakGraph):
    """What capture made is seen behind the graph. Capture begins anew, and the graph ends before it is made.

    Attributes:
        ordinal: which of its kind that came about during capture it is.
    """

    of: ClassVar[str]  # a reason

    def __init__(self, detail: str, ordinal: int) -> None:
        super().__init__(self.of, detail)
        self.ordinal = ordinal


class GeneratorOutlivesGraph(OutlivesGraph):
    """A generator that has started would have to go on behind the graph: it has to be started for real."""

    of = "generator"


class ClassOutlivesGraph(OutlivesGraph):
    """A class that the program makes is seen behind the graph: it has to be made at each call."""

    of = "class"


class LeafOutlivesGraph(OutlivesGraph):
    """What leaves the graph has a history that begins at a tensor of the program's own: it has to be an input."""

    of = "leaf"


class WorkOutlivesGraph(OutlivesGraph):
    """What stands for a collective that the graph has begun leaves the graph: it has to be begun for real."""

    of = "distributed"


class GivesUp(OutlivesGraph):
    """An exception leaves what it closes, or is kept: it has to be raised for real. `ordinal` is that of its raise, or
    -1 where it was raised before capture began."""

    of = "exception"


class Uninitialized(BreakGraph):
    """A parameter of a lazy module that its first call is to make."""

    def __init__(self, detail: str) -> None:
        super().__init__("tensor_subclass", detail)


def describe(graph_break: GraphBreak) -> str:
    """The reason, its detail, where it happened and the remedy, as text for a person."""
    return str(Event(REASONS[graph_break.reason], "", graph_break.detail, graph_break.user_frames))
