from collections.abc import Callable, Sequence
from typing import Any

from aotautograd.schemas import CallPlan, HistoryPlan

BACKWARD_TWICE: str  # what autograd raises where a backward finds freed what it reads

def wrap(call: CallPlan, history: HistoryPlan | None) -> Callable[..., Sequence[Any]]:
    """The compiled forward as a function of the program's flat inputs.

    It runs without grad mode and autocast. With a `history` it returns the forward's outputs without what was kept;
    they lead to a `CompiledProgramBackward` if grad mode is on and an input requires a gradient. Raises
    UnsupportedTransform under torch.func and for forward-mode tangents, InputMismatch for another number of inputs.
    """

class CompiledProgramBackward:
    """The `grad_fn` of a compiled program's outputs, and the nodes between it and the inputs."""

    saved_tensors: list[Any]
