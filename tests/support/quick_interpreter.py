"""A faster Triton interpreter for tests, with the same results.

Triton's CPU interpreter computes with NumPy, but spends nine tenths of its time on types. It builds
a type and a shape anew for each intermediate result. :func:`quicken` remembers what follows from
types alone. The arithmetic and the checks of types stay Triton's own, and so does every error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np


def quicken(checked: bool) -> None:
    """Skip the parts of the interpreter that take most of its time and show nothing here.

    Unchanged, the interpreter

    - replaces Triton's language by its own at every call of a function, where once is enough;
    - builds types, shapes and constants again for every tensor;
    - calls the function of a reduction for every single element;
    - computes each integer sum and product once more in int64, to detect an overflow.

    Args:
        checked: keep the check for overflow.
    """
    from triton.runtime import interpreter

    if not checked:
        builder = interpreter.interpreter_builder
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._get_np_dtype = _remembered(interpreter._get_np_dtype)
    interpreter.ReduceOps.generic_reduce = _reduce_slices
    _remember_types(interpreter.tl.core)
    _remember_operands(interpreter)
    if not hasattr(interpreter, "_LangPatchScope"):  # before 3.6
        return
    _replace_once(interpreter)


def _replace_once(interpreter: Any) -> None:
    """Replace Triton's language once for each module of kernels; call its functions directly."""
    replace = interpreter._patch_lang
    modules = (interpreter.tl, interpreter.tl.core)
    replaced: set[frozenset[int]] = set()
    # Keep the globals alive, so that no other dict can get the id of one.
    known: dict[int, dict[str, Any]] = {}

    def replace_once(fn: Any) -> Any:
        if id(fn.__globals__) not in known:
            known[id(fn.__globals__)] = fn.__globals__
            values = fn.__globals__.values()
            seen = frozenset(id(v) for v in values if any(v is m for m in modules))
            if seen not in replaced:
                replaced.add(seen)
                replace(fn)
        return interpreter._LangPatchScope()

    def replace_builtin(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)
        semantic = interpreter.interpreter_semantic

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(obj, name, call)

    interpreter._patch_lang = replace_once
    interpreter._patch_attr = replace_builtin


def _remembered(np_dtype_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Cache a function of a Triton dtype by the name of its scalar."""
    found: dict[str, Any] = {}

    def remembered(tt_dtype: Any) -> Any:
        scalar = tt_dtype.scalar
        if scalar.name not in found:
            found[scalar.name] = np_dtype_of(scalar)
        return found[scalar.name]

    return remembered


def _remember_types(core: Any) -> None:
    """Cache the attributes of block types and tensors, which follow from element and shape."""
    constexpr, unwrap = core.constexpr, core._unwrap_if_constexpr
    make_block, make_tensor, equal = (
        core.block_type.__init__, core.tensor.__init__, core.dtype.__eq__
    )  # fmt: skip
    blocks: dict[tuple, dict[str, Any]] = {}
    tensors: dict[str, dict[str, Any]] = {}
    plain = {int, float, bool, str, type(None), core.tensor}

    def quick_unwrap(value: Any) -> Any:
        kind = type(value)
        if kind is constexpr:
            return value.value
        return value if kind in plain else unwrap(value)

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *[s.value if type(s) is constexpr else s for s in shape])
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = dict(vars(self))
        vars(self).update(blocks[key], element_ty=element_ty)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in tensors:
            make_tensor(self, handle, type)
            tensors[type.name] = dict(vars(self), handle=None)
        vars(self).update(tensors[type.name], handle=handle, type=type, dtype=type.scalar)

    core._unwrap_if_constexpr = quick_unwrap
    core.block_type.__init__ = block
    core.tensor.__init__ = tensor
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)


def _remember_operands(interpreter: Any) -> None:
    """Return operands of one type at once; cache broadcast types and constants."""
    core, semantic = interpreter.tl.core, type(interpreter.interpreter_semantic)
    check, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
    tensor = core.tensor
    constants: dict[tuple, Any] = {}
    types: dict[tuple[str, str], tuple] = {}

    def quick_check(
        self: Any, lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True, div_or_mod: bool = False,
    ) -> tuple:  # fmt: skip
        options = allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
        kinds = type(lhs), type(rhs)
        if div_or_mod or tensor not in kinds:
            return check(self, lhs, rhs, *options)
        if kinds == (tensor, tensor):
            one, other = lhs.dtype, rhs.dtype
            is_offset = allow_lhs_ptr and one.is_ptr() and other.is_int()
            if is_offset or (one.name == other.name and not one.is_ptr()):
                return quick_broadcast(self, lhs, rhs)
            return check(self, lhs, rhs, *options)
        block, place = (lhs, 1) if kinds[0] is tensor else (rhs, 0)
        number = (lhs, rhs)[place]
        if type(number) not in (int, float) or block.dtype.is_ptr():
            return check(self, lhs, rhs, *options)
        # Zero has two signs, which compare equal.
        key = (block.type.name, place, type(number), number or repr(number), *options)
        if key not in constants:
            both = check(self, lhs, rhs, *options)
            if both[1 - place] is not block:
                return both
            both[place].handle.data.flags.writeable = False
            constants[key] = both[place]
        return (block, constants[key]) if place else (constants[key], block)

    def quick_broadcast(self: Any, lhs: Any, rhs: Any) -> tuple:
        key = lhs.type.name, rhs.type.name
        if key[0] == key[1]:
            return lhs, rhs
        if key not in types:
            both = broadcast(self, lhs, rhs)
            types[key] = tuple(
                None if new is old else (new.type, new.handle.data.shape)
                for new, old in zip(both, (lhs, rhs), strict=True)
            )
            return both
        left, right = types[key]
        return _spread(lhs, left), _spread(rhs, right)

    def _spread(value: Any, wanted: tuple | None) -> Any:
        if wanted is None:
            return value
        block_type, shape = wanted
        old = value.handle
        data = np.empty(shape, old.data.dtype)
        data[...] = old.data
        return tensor(interpreter.TensorHandle(data, old.dtype.scalar), block_type)

    semantic.binary_op_type_checking_impl = quick_check
    semantic.broadcast_impl_value = quick_broadcast


def _reduce_slices(reduction: Any, inputs: tuple) -> list[Any]:
    """Reduce as ReduceOps.generic_reduce does, in the same order, over whole slices at once."""
    whole = reduction.axis is None
    parts, axis = reduction.unravel(inputs, reduction.axis)
    shape = parts[0].handle.data.shape

    def slices(index: int) -> tuple:
        return tuple(
            reduction.to_tensor(np.take(part.handle.data, index, axis), part.dtype)
            for part in parts
        )

    found = slices(0)
    for index in range(1, shape[axis]):
        combined = reduction.combine_fn.fn(*found, *slices(index))
        found = combined if isinstance(combined, tuple) else (combined,)
    results = []
    for one, part in zip(found, parts, strict=True):
        data = one.handle.data.reshape(shape[:axis] + shape[axis + 1 :])
        if reduction.keep_dims:
            kept = inputs[0].handle.data.ndim
            data = data.reshape((1,) * kept) if whole else np.expand_dims(data, axis)
        results.append(reduction.to_tensor(data if data.ndim else data.item(), part.dtype))
    return results
