"""Fake tensors: a tensor's metadata in a wrapper without data, on which programs run to learn shapes."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx.immutable_collections import immutable_list
from torch.multiprocessing.reductions import StorageWeakRef

from primtorch.arguments import TensorLike
from primtorch.call_forms import Form, form_of, is_described
from primtorch.dispatch_mode import DispatchMode
from primtorch.effects import may_refuse
from primtorch.errors import DataDependentValue, FakeTensorError, NoFormula, PrimTorchError, format_frames
from primtorch.fake.asking import AskedRules
from primtorch.fake.composites import symbolic_keys
from primtorch.fake.recipe import NotRepeatable, Recipe, call_key, recipe_of, storage_bytes
from primtorch.fake.registered import run_registered
from primtorch.fake.table import RULES, Rule, RuleTable, is_composite
from primtorch.layout import is_contiguous
from primtorch.operators.build import Fresh, refuse_fresh
from primtorch.schemas import UserFrame, calling_frames, frames_of
from primtorch.spec import Size, TensorSpec
from primtorch.symbolic import size_of_data
from primtorch.symbolic.shape_env import ShapeEnv
from primtorch.wrappers import wrappers_in

_wrap = torch.Tensor._make_wrapper_subclass
_DATA: Any = torch._C.TensorBase.data  # type: ignore[attr-defined]


ASKED = AskedRules(RULES)
_ASKED_OF_DERIVATIVES = AskedRules(RULES, mixed=True)


class Memory:
    """Stands for the storage that a fake tensor and its views share.

    `constant` is the value of a fresh tensor that the program made from a Python number, until something writes to it.
    `counts` are the symbols for how many elements are not zero, by the identity of a description, until then.
    `real` refers weakly to the storage that an input's fake stands for.
    """

    __slots__ = ("__weakref__", "constant", "counts", "real")

    def __init__(self, real: StorageWeakRef | None = None) -> None:
        self.constant: torch.Tensor | None = None
        self.counts: dict[int, tuple[TensorSpec, Size]] = {}
        self.real = real


class FakeTensor(torch.Tensor):
    """A tensor without data. Its operators compute shape, strides, dtype and device by the table of formulas.

    `spec` is its metadata. Torch holds it too; formulas read it here, because a question to torch takes as long as a
    short formula.
    """

    fake_mode: FakeMode
    spec: TensorSpec
    symbolic: bool
    _memory: Memory | None

    @staticmethod
    def __new__(
        cls,
        spec: TensorSpec,
        mode: FakeMode,
        memory: Memory | None = None,
        requires_grad: bool = False,
        nbytes: Size | None = None,
    ) -> FakeTensor:
        if nbytes is None:
            for size in spec.shape:
                if type(size) is not int:
                    nbytes = storage_bytes(spec)
                    break
        # By position, for torch parses names slowly: memory format, dtype, layout, device, pinned, requires_grad.
        described = spec.shape, spec.strides, spec.offset, None, spec.dtype, torch.strided, spec.device
        if nbytes is None:
            self: FakeTensor = _wrap(cls, *described, False, requires_grad)
        else:  # torch would compute the storage's size, and over symbols that is five times the cost of the rest
            keys = symbolic_keys()
            self = _wrap(cls, *described, False, requires_grad, storage_size=nbytes, _extra_dispatch_keys=keys)
        self.fake_mode = mode
        self.spec = spec
        self.symbolic = nbytes is not None or self._has_symbolic_sizes_strides  # type: ignore[attr-defined]
        self._memory = memory
        return self

    @property
    def memory(self) -> Memory:
        """What the tensor and its views share. Made when somebody asks: few results are viewed or written."""
        if self._memory is None:
            self._memory = Memory()
        return self._memory

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """The tensor without history. Setting it gives this tensor the other's metadata and memory."""
        return _DATA.__get__(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """The tensor without history. Setting it gives this tensor the other's metadata and memory."""
        _DATA.__set__(self, value)
        self._tell_spec()
        self._memory = value.memory if isinstance(value, FakeTensor) else None
        self.fake_mode.moved += 1

    def _tell_spec(self) -> None:
        """The metadata as torch has it, after it was changed there."""
        self.spec = TensorSpec.of(self)
        self.symbolic = self._has_symbolic_sizes_strides  # type: ignore[attr-defined]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if len(types) > 1 and wrappers_in(types):
            return NotImplemented
        for arg in args:
            if isinstance(arg, FakeTensor):
                return propagate(arg.fake_mode, func, args, kwargs or {})
        return propagate(_mode_among((args, kwargs)), func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return self.fake_mode.text_of(self)

    def __deepcopy__(self, memo: dict[int, FakeTensor]) -> FakeTensor:
        copied = memo.get(id(self))
        if copied is None:
            copied = FakeTensor(self.spec, self.fake_mode, None, self.requires_grad)
            if getattr(self, "_is_param", False):
                copied._is_param = True
            memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: object) -> tuple[Callable[..., FakeTensor], tuple[object, ...]]:
        spec = self.spec
        if any(type(s) is not int for s in (*spec.shape, *spec.strides, spec.offset)):
            raise FakeTensorError(f"{self!r} has symbolic sizes and cannot be pickled: they belong to a live ShapeEnv")
        return _unpickle, (spec, self.requires_grad)

    def new(self, *args: object, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        """`Tensor.new`, which would read the sizes of a tensor as numbers."""
        return torch.Tensor.new(self._without_sizes(), *args, **kwargs)  # type: ignore[attr-defined,no-any-return]

    def new_tensor(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """`Tensor.new_tensor`, which would read the sizes of a tensor as numbers."""
        return torch.Tensor.new_tensor(self._without_sizes(), *args, **kwargs)

    def _without_sizes(self) -> FakeTensor:
        """Of this type and device that bears no dispatch key beside theirs: by its keys torch knows what to make."""
        if not self.symbolic:
            return self
        return FakeTensor(TensorSpec((), (), self.spec.dtype, self.spec.device), self.fake_mode)

    def tolist(self) -> Any:
        """Raises DataDependentValue: there is no data."""
        raise DataDependentValue(
            "Tensor.tolist()",
            "a fake tensor has no data",
            "Keep this call out of the compiled region.",
            self.fake_mode.user_frames(),
        )

    def numpy(self, *, force: bool = False) -> Any:
        """Raises DataDependentValue: there is no data."""
        raise DataDependentValue(
            "Tensor.numpy()",
            "a fake tensor has no data",
            "Keep this call out of the compiled region.",
            self.fake_mode.user_frames(),
        )


def _unpickle(spec: TensorSpec, requires_grad: bool) -> FakeTensor:
    return FakeTensor(spec, FakeMode(), None, requires_grad)


def _mode_among(tree: object) -> FakeMode:
    stack = [tree]
    while stack:
        item = stack.pop()
        if isinstance(item, FakeTensor):
            return item.fake_mode
        if isinstance(item, tuple | list):
            stack.extend(item)
        elif isinstance(item, dict):
            stack.extend(item.values())
    raise FakeTensorError("an operator was dispatched to fake tensors without one among its arguments")


class _Computed(torch.autograd.Function):
    """A result of autograd that is no view, so that programs may write to it; its history is never run."""

    @staticmethod
    def forward(ctx: object, leaf: torch.Tensor, spec: TensorSpec, mode: FakeMode) -> torch.Tensor:
        return FakeTensor(spec, mode, None, False)

    @staticmethod
    def backward(ctx: object, *gradients: object) -> object:
        return gradients[0], None, None


_WANTS_SIZES = ("on tensor with symbolic sizes/strides", "expected to contain only concrete integers")
_WANTS_DATA = "its data is not allocated yet"
"""What torch's C++ says where it asks for the value of a symbolic size, or for an element."""


def wants_sizes(error: BaseException) -> bool:
    """Whether torch's C++ raised this for a size that it reads as a number, and that is a symbol."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WANTS_SIZES)


class FakeMode(DispatchMode):
    """Makes fake tensors; as a context manager, makes every operator fake, factory functions included.

    Args:
        shape_env: holds symbolic sizes; without one, an operator whose output size depends on data raises
            DataDependentShape.
    """

    rules: RuleTable | AskedRules = RULES
    """`ASKED` for who propagates a program that eager has not run; a captured graph is not asked about again."""

    def __init__(self, shape_env: ShapeEnv | None = None) -> None:
        self.shape_env = shape_env
        self.recipes: dict[tuple[object, ...], Recipe] = {}
        """Results of operators over symbolic sizes by their arguments: what is known of symbols only grows."""
        self.results: dict[Form, tuple[Rule, object]] = {}
        """What formulas gave for sizes that are numbers, with the rule whose identity the form has."""
        self.refusable = 0
        """How many calls came that eager may refuse for what is in their tensors."""
        self.moved = 0
        """How often a fake was given another one's memory."""
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], FakeTensor]] = {}
        self._memories: weakref.WeakValueDictionary[int, Memory] = weakref.WeakValueDictionary()

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """A block in which what eager refuses for its dtypes is refused: a derivative of a program that was not."""
        before, self.rules = self.rules, _ASKED_OF_DERIVATIVES
        try:
            yield
        finally:
            self.rules = before

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)
        if error is not None and (wants_sizes(error) or _WANTS_DATA in str(error)):
            error.add_note(
                "A C++ program of operators was called that reads sizes or elements as numbers: a size is a symbol "
                "here, or the tensor has no data. Fix the size (int(x.shape[0]) guards it), give such arguments as "
                "numbers, or keep the call out of the compiled region." + format_frames(frames_of(traceback)[-1:])
            )

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if wrappers_in(types):  # what it does with its parts comes here again
            return NotImplemented
        self.refusable += may_refuse(func, args)
        return propagate(self, func, args, kwargs or {})

    def text_of(self, fake: FakeTensor) -> str:
        """What `repr` of a fake is, also within that of a container."""
        grad = ", requires_grad=True" if fake.requires_grad else ""
        return f"FakeTensor({fake.spec!r}{grad})"

    def user_frames(self) -> tuple[UserFrame, ...]:
        """The user's lines, outermost first: as the ShapeEnv's owner tells them, else those of the Python stack."""
        told = self.shape_env.user_frame() if self.shape_env is not None else ()
        return told or calling_frames()

    def fresh_size(self, maximum: Size | None, minimum: Size = 0) -> Size:
        """A size that depends on data, as an unbacked symbol."""
        if self.shape_env is None:
            return refuse_fresh(maximum, minimum)
        return size_of_data(self.shape_env, minimum, maximum)

    def from_spec(self, spec: TensorSpec, *, requires_grad: bool = False) -> FakeTensor:
        """A fresh fake tensor of this description."""
        if spec.device.type == "cuda" and not torch.cuda.is_available():
            raise FakeTensorError(
                f"{spec}: this torch has no CUDA device, and autograd aborts on a tensor that claims one"
            )
        return FakeTensor(spec, self, None, requires_grad)

    def computed(self, spec: TensorSpec, requires_grad: bool = False) -> FakeTensor:
        """A fake of this description that is no leaf, where it requires a gradient."""
        fake = self.from_spec(spec)
        if requires_grad:
            with torch.enable_grad():
                fake = _Computed.apply(fake.requires_grad_(), spec, self)
        return fake

    def from_tensor(
        self,
        t: torch.Tensor,
        *,
        dynamic: Mapping[int, torch.SymInt] | None = None,
        strides: Mapping[int, torch.SymInt] | None = None,
    ) -> FakeTensor:
        """The fake of a tensor: same shape, strides, dtype, device, requires_grad, is_leaf. One fake for one tensor.

        Args:
            dynamic: for each dim that varies, its symbol. Strides that are products of other dims' sizes follow.
            strides: symbols for strides that vary for themselves.
        """
        if isinstance(t, FakeTensor):
            return t
        known = self._known.get(id(t))
        if known is not None and known[0]() is t:
            return known[1]
        shape: list[Size] = list(t.shape)
        steps: tuple[Size, ...] = t.stride()
        if dynamic or strides:
            for dim, symbol in (dynamic or {}).items():
                shape[dim] = symbol
            steps = symbolic_strides(tuple(t.shape), t.stride(), shape, strides or {})
        spec = TensorSpec(tuple(shape), steps, t.dtype, t.device, t.storage_offset())
        fake = FakeTensor(spec, self, self._memory_of(t), t.requires_grad and t.is_leaf)
        if t.requires_grad and not t.is_leaf:
            with torch.enable_grad():
                fake = _Computed.apply(fake.requires_grad_(), spec, self)
        if isinstance(t, torch.nn.Parameter):
            fake._is_param = True
        key = id(t)
        self._known[key] = (weakref.ref(t, lambda _: self._known.pop(key, None)), fake)
        return fake

    def release(self) -> None:
        """Forgets which fake stands for which tensor: nothing of this mode refers to the tensors any more."""
        self._known.clear()

    def _memory_of(self, t: torch.Tensor) -> Memory | None:
        """One for all tensors over one storage. Its weak reference keeps the storage's address from another use."""
        if type(t) not in (torch.Tensor, torch.nn.Parameter) or torch._is_functional_tensor(t):
            return None
        real = StorageWeakRef(t.untyped_storage())
        memory = self._memories.get(real.cdata)
        if memory is None:
            memory = self._memories[real.cdata] = Memory(real)
        return memory


def symbolic_strides(
    sizes: Sequence[int],
    strides: Sequence[int],
    symbols: Sequence[Size],
    free: Mapping[int, Size] = MappingProxyType({}),
) -> tuple[Size, ...]:
    """Strides over symbolic sizes: each stride that equals size * stride of a dim further in becomes that product, but
    for those that are `free`."""
    if is_contiguous(tuple(sizes), tuple(strides)):
        order = list(range(len(sizes) - 1, -1, -1))
    else:
        order = sorted(range(len(sizes)), key=lambda d: (strides[d], sizes[d] != 1, -d))
    out: list[Size] = list(strides)
    reach: dict[int, Size] = {1: 1}
    for d in order:
        out[d] = free[d] if d in free else reach.get(strides[d], strides[d])
        reach[strides[d] * sizes[d]] = out[d] * symbols[d]
    return tuple(out)


def propagate(mode: FakeMode, func: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
    """The fake result of an operator on fake tensors."""
    try:
        return _propagate(mode, func, args, kwargs)
    except PrimTorchError as error:
        error.locate(mode.user_frames())
        raise


def _propagate(mode: FakeMode, func: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
    special = _SPECIAL_BY_IDENTITY.get(id(func))
    if special is not None:
        return special(mode, *args, **kwargs)
    try:
        rule = mode.rules.of(func)
    except NoFormula:
        if not is_composite(func):
            raise
        with mode:
            return func.decompose(*args, **kwargs)
    if rule.registered:
        _written(rule.mutates, args, kwargs)
        return run_registered(mode, func, args, kwargs)
    if rule.mutates or rule.restrides:
        return _propagate_write(mode, rule, args, kwargs)
    described, symbolic = _described(args)
    if kwargs:
        values, _ = _described(kwargs.values())
        kwargs = dict(zip(kwargs, values, strict=True))
    if rule.fresh:
        out = rule.formula(*described, **kwargs, fresh=_sizes_of_data(mode, args))
    elif symbolic:
        return _propagate_symbols(mode, func, rule, described, kwargs, _shared_memory(rule, args))
    else:
        out = _propagate_numbers(mode, rule, described, kwargs)
    if type(out) is TensorSpec and rule.alias is None:
        return FakeTensor(out, mode)
    return _wrapped(out, mode, _shared_memory(rule, args))


def _described(args: Iterable[Any]) -> tuple[list[object], bool]:
    """Arguments with descriptors for fake tensors, and whether a size or a number among them is symbolic."""
    described: list[object] = []
    symbolic = False
    for arg in args:
        kind = type(arg)
        if kind is FakeTensor:
            described.append(arg.spec)
            symbolic = symbolic or arg.symbolic
        elif kind in _SEQUENCES:
            parts, among = _described(arg)
            described.append(kind(parts))
            symbolic = symbolic or among
        else:
            described.append(arg)
            symbolic = symbolic or kind is torch.SymInt
    return described, symbolic


def _sizes_of_data(mode: FakeMode, args: Sequence[object]) -> Fresh:
    """Sizes for a call with these arguments: one tensor has one number of elements that are not zero."""

    def fresh(maximum: Size | None, minimum: Size = 0, of: TensorLike | None = None) -> Size:
        given = (part for arg in args for part in (arg if isinstance(arg, list | tuple) else (arg,)))
        fakes = (part for part in given if isinstance(part, FakeTensor))
        counted = next((fake for fake in fakes if of is not None and (fake is of or fake.spec is of)), None)
        if counted is None:
            return mode.fresh_size(maximum, minimum)
        counts = counted.memory.counts
        if id(counted.spec) not in counts:
            counts[id(counted.spec)] = counted.spec, mode.fresh_size(maximum, minimum)
        return counts[id(counted.spec)][1]

    return fresh


_SEQUENCES = frozenset({list, tuple, torch.Size, immutable_list})


def _propagate_write(mode: FakeMode, rule: Rule, args: tuple[Any, ...], kwargs: Mapping[str, object]) -> object:
    """The result of an operator that writes to arguments or gives its first one another shape."""
    if rule.overlap is not None:
        rule.overlap(args, kwargs)
    if rule.fresh:
        out = rule.formula(*args, **kwargs, fresh=_sizes_of_data(mode, args))
    else:
        out = rule.formula(*args, **kwargs)
    if rule.restrides:
        return _restride(args[0], out)
    _written(rule.mutates, args, kwargs)
    if rule.outs:
        return _resized(rule.outs, out, kwargs)
    return _wrapped(out, mode, _shared_memory(rule, args))


def _propagate_numbers(mode: FakeMode, rule: Rule, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    """What the formula gives. The layers of a model call it with the same few layouts."""
    form = form_of(id(rule), args, kwargs)
    if form is None:
        return rule.formula(*args, **kwargs)
    known = mode.results.get(form)
    if known is not None:
        return known[1]
    out = rule.formula(*args, **kwargs)
    if is_described(out):
        mode.results[form] = rule, out  # which keeps the rule, and so its identity, from another use
    return out


def _propagate_symbols(
    mode: FakeMode,
    func: OpOverload,
    rule: Rule,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    memory: Memory | None,
) -> object:
    """As `propagate`, computing the result once for each combination of symbolic arguments."""
    try:
        key = call_key(func, args, kwargs)
        recipe = mode.recipes.get(key)
    except (NotRepeatable, TypeError):  # an argument that does not hash
        return _wrapped(rule.formula(*args, **kwargs), mode, memory)
    if recipe is None:
        recipe = mode.recipes[key] = recipe_of(rule.formula(*args, **kwargs))
    return _built(recipe, mode, memory)


def _built(recipe: Recipe, mode: FakeMode, memory: Memory | None) -> object:
    if recipe.spec is not None:
        return FakeTensor(recipe.spec, mode, memory, False, recipe.nbytes)
    if recipe.kind is not None:
        return recipe.kind([_built(part, mode, memory) for part in recipe.parts])
    return recipe.value


def _shared_memory(rule: Rule, args: Sequence[object]) -> Memory | None:
    """The memory of the argument that the result is a view of."""
    if rule.alias is None or rule.alias >= len(args):
        return None
    base = args[rule.alias]
    return base.memory if isinstance(base, FakeTensor) else None


def _wrapped(out: object, mode: FakeMode, memory: Memory | None) -> object:
    if type(out) is TensorSpec:
        return FakeTensor(out, mode, memory)
    if isinstance(out, tuple | list):
        return type(out)(_wrapped(o, mode, memory) for o in out)
    return out


def _written(mutates: Sequence[int | str], args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    for where in mutates:
        if isinstance(where, str):
            target = kwargs.get(where)
        else:
            target = args[where] if where < len(args) else None
        for one in target if isinstance(target, list | tuple) else (target,):
            if isinstance(one, FakeTensor):
                one.memory.constant = None
                one.memory.counts.clear()
            elif isinstance(one, torch.Tensor):
                raise FakeTensorError(
                    f"an operator would write fake data to a real tensor of shape {list(one.shape)}. "
                    "Make a fake of it first with FakeMode.from_tensor."
                )


def _resized(outs: Sequence[str], results: Any, kwargs: Mapping[str, object]) -> object:
    """The out= tensors of a call, each in its result's shape."""
    if results is None:  # a list of pieces has none
        return None
    targets = [kwargs[name] for name in outs]
    for target, result in zip(targets, (results,) if len(outs) == 1 else results, strict=True):
        if type(result) is TensorSpec and isinstance(target, FakeTensor):
            _restride(target, result)
    return targets[0] if len(outs) == 1 else tuple(targets)


def _restride(target: FakeTensor, spec: TensorSpec) -> FakeTensor:
    """Give a fake tensor another shape in place."""
    with torch._C._PreserveDispatchKeyGuard(), torch._C._DisableTorchDispatch():
        torch._C._set_meta_in_tls_dispatch_include(True)  # includes two keys, of which its counterpart takes one back
        torch.ops.aten.set_.source_Storage_storage_offset(
            target, target.untyped_storage(), spec.offset, spec.shape, spec.strides
        )
    target._tell_spec()
    return target


def _item(mode: FakeMode, x: torch.Tensor) -> object:
    if not isinstance(x, FakeTensor):
        return x.item()
    if x.memory.constant is not None:
        return x.memory.constant.item()
    whole = not (x.dtype.is_floating_point or x.dtype.is_complex or x.dtype is torch.bool)
    if whole and mode.shape_env is not None:
        return mode.shape_env.unbacked(min=-(2**63))
    if x.dtype.is_floating_point and mode.shape_env is not None:
        return mode.shape_env.unbacked_float()
    raise DataDependentValue(
        f"Tensor.item() of a {str(x.dtype).removeprefix('torch.')} tensor",
        "its value is known only when the program runs",
        "Keep the value in a tensor, or keep this part out of the compiled region.",
        mode.user_frames(),
    )


def _lift_fresh(mode: FakeMode, x: torch.Tensor) -> FakeTensor:
    """A tensor that the program has just made from Python numbers; a single number stays known."""
    if isinstance(x, FakeTensor):
        return x
    fake = FakeTensor(TensorSpec.of(x), mode)
    if x.numel() == 1:
        fake.memory.constant = x
    return fake


def _whole(size: Size) -> int:
    """A size that a C++ kernel asks for as a number: one that is symbolic gets fixed, with a guard that says so."""
    return int(size)


_aten = torch.ops.aten
METADATA: dict[OpOverload, Callable[..., object]] = {
    # Kernels that know no symbolic sizes ask for the numbers. They ask the tensor, which asks the dispatcher.
    _aten.size.default: lambda mode, x: [_whole(s) for s in x.shape],
    _aten.size.int: lambda mode, x, dim: _whole(x.shape[dim]),
    _aten.stride.default: lambda mode, x: [_whole(s) for s in x.stride()],
    _aten.stride.int: lambda mode, x, dim: _whole(x.stride(dim)),
    _aten.numel.default: lambda mode, x: _whole(x.numel()),
    _aten.storage_offset.default: lambda mode, x: _whole(x.storage_offset()),
    _aten.sym_size.default: lambda mode, x: list(x.shape),
    _aten.sym_size.int: lambda mode, x, dim: x.shape[dim],
    _aten.sym_stride.default: lambda mode, x: list(x.stride()),
    _aten.sym_stride.int: lambda mode, x, dim: x.stride(dim),
    _aten.sym_numel.default: lambda mode, x: x.numel(),
    _aten.sym_storage_offset.default: lambda mode, x: x.storage_offset(),
    _aten.dim.default: lambda mode, x: x.dim(),
}
"""Questions about a tensor, which may be one of functorch's that stands for a fake."""
_SPECIAL: dict[OpOverload, Callable[..., object]] = {
    _aten._local_scalar_dense.default: _item,
    _aten.lift_fresh.default: _lift_fresh,
    **METADATA,
}
_SPECIAL_BY_IDENTITY = {id(op): special for op, special in _SPECIAL.items()}


def register_special(op: OpOverload, special: Callable[..., object]) -> None:
    """Makes `special(mode, *args, **kwargs)`, which takes and gives fake tensors, all that is known of an operator."""
    _SPECIAL[op] = special
    _SPECIAL_BY_IDENTITY[id(op)] = special
