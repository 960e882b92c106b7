"""What the wiring of the stages writes to the ledger."""

from __future__ import annotations

import aotautograd.events
import torchdynamo.events
import torchinductor.events
from primtorch.ledger import Effect, Kind, kinds
from torchdynamo.reasons import REASONS

NO_COMPILER = Kind(
    "no_compiler",
    "there is no compiler that could build the graph's kernels: the graph runs by PyTorch's own",
    "install g++ or clang++, or name one by the environment variable CXX or options={'cxx': path}",
    Effect.FALLBACK,
)
KERNELS_NOT_BUILT = Kind(
    "kernels_not_built",
    "the kernels' source could not be compiled, or what the compiler makes could not be written: the graph runs by"
    " PyTorch's own kernels",
    "see the detail: name another compiler by the environment variable CXX or options={'cxx': ...}, another folder by"
    " options={'cache': ...}, or make room on the disk",
    Effect.FALLBACK,
)
GRAPH_NOT_COMPILED = Kind(
    "graph_not_compiled",
    "the back end raised an error: the graph runs as it was captured, by PyTorch's own kernels",
    "report it with the program; options={'strict': True} raises the error with its traceback",
    Effect.FALLBACK,
)
NOT_IN_ARTIFACT = Kind(
    "not_in_artifact",
    "what torchcompile.load took from its file does not fit, and recompile=True asks for compilation: the graph is"
    " compiled here",
    "save a file with this machine, these versions and these shapes",
    Effect.RECOMPILE,
)
PIECE_MENDED = Kind(
    "piece_mended",
    "a registered back end gave a piece of a graph in other strides than the graph says, or two values in one memory"
    " that are two in the graph: the result is copied",
    "let the back end give what the meta['val'] of the piece's outputs says, each in memory of its own",
    Effect.MENDED,
)
EAGER_IS_FASTER = Kind(
    "eager_is_faster",
    "options={'never_slower': True}: a graph whose gain was in doubt was timed beside eager on the inputs of its second"
    " call, and eager was faster: it runs by PyTorch's own kernels for as long as its guards hold",
    "none is needed; leave never_slower out to have it compiled always",
    Effect.CHOSEN,
)
NOT_VERIFIED = Kind(
    "not_verified",
    "options={'verify': True}: a graph or a call could not be held to eager: eager raised an error or ended the"
    " process, random numbers were drawn, or an object of a class of the program's own came in or out, whose changes"
    " nobody can undo or compare",
    "set dropout to 0, or compile a part that takes and gives tensors, numbers and containers of them",
    Effect.UNVERIFIED,
)

KINDS = kinds(
    NO_COMPILER, KERNELS_NOT_BUILT, GRAPH_NOT_COMPILED, NOT_IN_ARTIFACT, PIECE_MENDED, EAGER_IS_FASTER, NOT_VERIFIED
)  # fmt: skip

# Every table of kinds, in the order of the stages.
TABLES = (REASONS, torchdynamo.events.KINDS, aotautograd.events.KINDS, torchinductor.events.KINDS, KINDS)
