"""The backward of a program, compiled for the tangents that are missing when autograd's engine asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from aotautograd.compilers import Compilers, begin, example_values, show
from aotautograd.missing_tangents import BackwardVariant, BackwardVariants
from aotautograd.other_sizes import Taken, compiled_later
from aotautograd.outlines import spelt
from aotautograd.schemas import (
    BackwardGraph,
    BackwardOutline,
    Begun,
    Compiled,
    GradientInfo,
    Partition,
    ProgramMetadata,
)
from aotautograd.stages import StagedBackward, cut, for_turns, stages_of, turns_of
from primtorch.ambient import unset
from primtorch.interrupts import pass_on_interrupt
from primtorch.memory import memory_of
from primtorch.withheld import COLLECTOR


class FirstBackward:
    """Compiles a partition's backward at its first use for each set of missing tangents, whatever the program has set
    by then.

    Args:
        parts: whose backward is that of `graph`, traced here or by another process.
        taken: what the forward's trace took for granted of sizes.
        default_dtype: under which the forward was traced.
    """

    def __init__(
        self,
        graph: BackwardGraph,
        parts: Partition,
        metadata: ProgramMetadata,
        compilers: Compilers,
        taken: Taken,
        default_dtype: torch.dtype,
    ) -> None:
        self.parts = parts
        self.metadata = metadata
        self.stages = stages_of(metadata.gradients, compilers.stages)
        self.turns = turns_of(metadata.gradients, compilers.stages)
        self.compilers = replace(compilers, backward=compiled_later(compilers.backward, taken, "a backward"))
        self.beginner = compilers.backward if taken.env is None and not self.stages else None
        self.begun: tuple[tuple[int, ...], Begun] | None = None
        self.variants = BackwardVariants(parts, metadata, graph.behind)
        self.default_dtype = default_dtype

    @COLLECTOR.off()
    def begin(self) -> None:
        """Begins with the backward that is likely: a program's loss is what its backward starts from. Nothing is asked
        of sizes ahead of a call that needs it, and what fails fails where it is needed."""
        if self.beginner is None:
            return
        missing = self._all_but_losses()
        try:
            with unset(self.default_dtype):
                self.begun = missing, begin(self.beginner, self.variants(missing).module)
        except Exception as error:
            pass_on_interrupt(error)

    def _all_but_losses(self) -> tuple[int, ...]:
        """Results of some dims, where there are others without."""
        names = set(self.parts.tangent_names)
        dims = [n.meta["val"].dim() for n in self.parts.backward.graph.nodes if n.name in names]
        return tuple(place for place, count in enumerate(dims) if count) if 0 in dims else ()

    @COLLECTOR.off()
    def compile(self, missing: Sequence[int]) -> tuple[Compiled, tuple[int, ...], tuple[GradientInfo, ...]]:
        """See `Behind.compile_backward`."""
        variant = self.variants(missing)
        if missing:
            show(self.compilers.dump, "backward_without_" + "_".join(map(str, missing)), variant.module)
        made = for_turns(variant.made_gradients, self.turns)
        with unset(self.default_dtype):
            if self.stages:
                return self._staged(variant, made), variant.zeros, made
            begun, self.begun = self.begun, None
            if begun is not None and begun[0] == tuple(missing):
                compiled = begun[1]()
            else:
                compiled = self.compilers.backward(variant.module, example_values(variant.module))
            self._keep(tuple(missing), variant, compiled)
        return compiled, variant.zeros, made

    def needs(self, missing: Sequence[int], earlier: Sequence[int]) -> tuple[Sequence[int], Sequence[int], bool]:
        """See `BackwardVariants.needs`."""
        return self.variants.needs(missing, earlier)

    def _keep(self, missing: tuple[int, ...], variant: BackwardVariant, compiled: Compiled) -> None:
        if self.compilers.shelf is not None:
            reads, keeps, refused = self.variants.needs(missing, ())
            needs = (tuple(reads), tuple(keeps), refused)
            outline = spelt(BackwardOutline(variant.zeros, variant.made_gradients, needs))
            self.compilers.shelf.keep_backward(missing, outline, compiled)

    def _staged(self, variant: BackwardVariant, made: Sequence[GradientInfo]) -> Compiled:
        """A `StagedBackward`, which gives a run of the stages where others give their results."""
        placeholders = [n for n in self.parts.forward.graph.nodes if n.op == "placeholder"]
        place_of = dict(zip(placeholders, self.metadata.placeholders, strict=True))
        stage_of: dict[object, int] = dict(zip(self.metadata.gradients, self.stages, strict=True))
        saved = zip(self.parts.saved_placeholders, self.parts.saved_values, strict=True)
        read = {name: place_of.get(memory_of(value)) for name, value in saved}
        readers = {name: stage_of[place] for name, place in read.items() if place in stage_of}
        graphs = cut(variant.module, made, self.stages, readers)
        for number, stage in enumerate(graphs):
            if stage is not None:
                show(self.compilers.dump, f"backward_stage_{number}", stage.module)
        staged: Compiled = StagedBackward(
            variant.module, graphs, self.compilers.backward, made, self.stages, example_values
        )
        return staged
