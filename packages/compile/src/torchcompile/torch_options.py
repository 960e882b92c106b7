"""Options by the names that torch.compile's inductor has for them: what each means here, or what to write instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from types import MappingProxyType
from typing import Any

from primtorch.frozen import record
from torchcompile.errors import InvalidArgument


@record
class Counterpart:
    """One of torch's options.

    Attributes:
        ours: the option here that it sets; None where it sets none.
        values: torch's value -> ours, where they differ; a value that it lacks is passed on where `open`.
        taken: values that ask for what is done here anyway.
        instead: what to write where a value is not taken.
    """

    ours: str | None = None
    values: Mapping[object, object] = field(default_factory=dict)
    open: bool = False
    taken: tuple[object, ...] = ()
    instead: str = ""


_EITHER = (True, False)
_A_HINT = Counterpart(taken=_EITHER, instead="it takes True or False")

TORCH_OPTIONS: Mapping[str, Counterpart] = MappingProxyType(
    {
        "max_autotune": Counterpart("tune_products", open=True),
        "max_autotune_gemm": Counterpart("tune_products", open=True),
        "triton.cudagraphs": Counterpart("cuda_graphs", open=True),
        "fallback_random": Counterpart("eager_random", open=True),
        "emulate_precision_casts": Counterpart("precision", {True: "eager", False: "fused"}),
        "trace.enabled": Counterpart("dump", {True: "torchcompile_dump", False: None}),
        "trace.debug_dir": Counterpart("dump", open=True),
        "force_disable_caches": Counterpart("cache", {True: None}, taken=(False,)),
        "fx_graph_cache": Counterpart("cache", {False: None}, taken=(True,)),
        "activation_memory_budget": Counterpart("memory_budget", open=True),
        "recompile_limit": Counterpart("recompile_limit", open=True),
        "epilogue_fusion": Counterpart(taken=(True,), instead="what follows is always fused where it can be"),
        "prologue_fusion": _A_HINT,
        "shape_padding": _A_HINT,
        "coordinate_descent_tuning": _A_HINT,
        "max_autotune_pointwise": _A_HINT,
        "layout_optimization": _A_HINT,
        "combo_kernels": _A_HINT,
        "aggressive_fusion": _A_HINT,
        "allow_buffer_reuse": _A_HINT,
        "cpp_wrapper": _A_HINT,
        "size_asserts": _A_HINT,
        "keep_output_stride": Counterpart(taken=(True,), instead="results have eager's strides, always"),
        "cpp.cxx": Counterpart(instead="write options={'cxx': ...}, or set the environment variable CXX"),
        "cpp.threads": Counterpart(instead="set torch.set_num_threads or OMP_NUM_THREADS: kernels follow it"),
        "guard_filter_fn": Counterpart(
            instead="every guard is checked: without one, compiled code would run where it does not hold. Checks cost "
            "about a microsecond a call; mark values that do not matter with torchcompile.assume_constant_result"
        ),
        "freezing": Counterpart(taken=(False,), instead="parameters are inputs of compiled code: leave it out"),
        "use_aoti": Counterpart(taken=(False,), instead="use torchcompile.export and torchcompile.save_cpp"),
        "trace.graph_diagram": Counterpart(
            taken=(False,), instead="write options={'dump': folder}: every stage as readable text"
        ),
        "nan_asserts": Counterpart(taken=(False,), instead="use torch.autograd.set_detect_anomaly"),
        **dict.fromkeys(
            (
                "pre_grad_custom_pass", "joint_custom_pre_pass", "joint_custom_post_pass", "post_grad_custom_pre_pass",
                "post_grad_custom_post_pass",
            ),
            Counterpart(taken=(None,), instead="write a back end that rewrites the graph: docs/writing_a_backend.md"),
        ),
    }
)  # fmt: skip


OF_TORCH = "Options of torch.compile that the migration page does not name tune its own code generator: leave them out."
_NAMESPACES = ("triton.", "cpp.", "trace.", "cuda.", "cutlass.", "rocm.", "xpu.", "halide.", "aot_inductor.")


def translated(options: Mapping[str, object], known: Mapping[str, object]) -> dict[str, object]:
    """`options` by the names of this package. Names that it has itself mean its own.

    Raises:
        InvalidArgument: one of torch's that has no counterpart here, with what to write instead.
    """
    found: dict[str, object] = {}
    for name, value in options.items():
        counterpart = TORCH_OPTIONS.get(name)
        if counterpart is None and name.startswith(_NAMESPACES):
            raise InvalidArgument(
                f"option {name!r} of torch.compile tunes its own code generator, which is not used here: leave it out"
            )
        if name in known or counterpart is None:
            found[name] = value
        elif _is_in(value, counterpart.values):
            found[str(counterpart.ours)] = counterpart.values[value]
        elif _is_in(value, counterpart.taken):
            continue
        elif counterpart.open:
            found[str(counterpart.ours)] = value
        else:
            instead = (
                counterpart.instead or f"it takes {', '.join(map(repr, (*counterpart.values, *counterpart.taken)))}"
            )
            raise InvalidArgument(f"option {name!r} of torch.compile is not taken with {value!r}: {instead}")
    return found


def _is_in(value: object, values: Any) -> bool:
    return isinstance(value, (bool, str, int, type(None))) and value in values
