"""Launches a kernel as Triton would, at a fraction of the host's time.

At every launch Triton classifies every argument and builds the key of the compiled kernel anew: 10
to 20 µs, as long as a kernel takes that decodes one token. Here the caller says which arguments can
make a difference, and the compiled kernel is launched directly, as in Triton's own tutorials. A
tensor descriptor is encoded once for an address and a shape: they come back at every training step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction, driver

from moe_patch.kernels.common.cache import compiling
from moe_patch.kernels.common.notes import NOTES, Launch
from moe_patch.kernels.common.versions import tested

# What is compiled anew for, and what a compiled kernel takes, differ between releases and on HIP.
_RELEASE = tested()
_DIRECT = torch.version.hip is None and _RELEASE.direct
# A size class of T adds a few kernels; a program that passes this many has no use for a cache.
_MOST = 1024
# Descriptors kept of each operand: where the addresses do not come back, they need not stay.
_MOST_ENCODED = 256


class Constants(dict[str, Any]):
    """Compile-time arguments and Triton's options, made once and known by their identity.

    A launch then spends no time on them: make them in a function with ``functools.cache``.
    """

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return self is other


class Box(NamedTuple):
    """What a tensor descriptor holds. To make one takes the host longer than all else of a launch.

    Attributes:
        base: what is copied from or to; its address a multiple of 16 bytes.
        shape, strides: of what is seen of it, in elements; the last stride is 1.
        block_shape: what is copied at a time.
        layout: Gluon's layout in shared memory; None for a kernel in plain Triton.
        first: the column of ``base`` at which the descriptor begins: a slice costs more.
    """

    base: Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block_shape: tuple[int, ...]
    layout: Any = None
    first: int = 0

    def descriptor(self) -> Any:
        """Triton's descriptor, which checks what it is given."""
        base = self.base[..., self.first :] if self.first else self.base
        held = (base, list(self.shape), list(self.strides), list(self.block_shape))
        if self.layout is None:
            from triton.tools.tensor_descriptor import TensorDescriptor

            return TensorDescriptor(*held)
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as OfGluon

        return OfGluon(*held, self.layout)


class _Compiled(NamedTuple):
    """A compiled kernel and how it is launched.

    Attributes:
        kernel: as Triton made it.
        tail: its compile-time arguments, which a launch takes as well.
        launch: the function in C; None where only Triton's own way will do.
        settings: what that function takes between the stream and the kernel's own arguments.
        as_tuple: it takes those as one tuple.
        described: of each tensor descriptor, the last first: the operand it is, what Triton needs
            to know to encode it, and what was encoded.
    """

    kernel: CompiledKernel
    tail: tuple
    launch: Callable[..., None] | None
    settings: tuple
    as_tuple: bool
    described: tuple[tuple[int, Any, dict], ...]


class Launcher:
    """A kernel and what was compiled of it, by all that Triton compiles anew for.

    Triton's settings (``TRITON_DEBUG`` and the like) count when a key is first seen.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        # Under the interpreter kernels are of another type, and there is no driver.
        self._direct = _DIRECT and isinstance(kernel, JITFunction)
        self._driver: object = None
        self._compiled: dict[Hashable, _Compiled] = {}

    def __call__(
        self,
        grid: tuple[int, ...],
        operands: Sequence[Any],
        varying: tuple[int, ...],
        fixed: tuple[int | float, ...],
        made: Constants | None = None,
        **constants: Any,
    ) -> None:
        """``kernel[grid](*operands, *varying, *fixed, **constants)``.

        Args:
            grid: one to three sizes.
            operands: tensors and :class:`Box` on the current device; the last is a tensor.
            varying: int32 values the kernel was declared not to specialise on.
            fixed: all other numbers; each value of them has an entry of its own in the cache.
            made: compile-time arguments and Triton's options.
            constants: the same where they are not made beforehand, in one order at every call.
        """
        notes = NOTES.launches
        if not self._direct:
            if notes is not None:
                notes.append(None)
            constants = constants if made is None else made
            compiling(self._kernel[grid], *_described(operands), *varying, *fixed, **constants)
            return
        active = compiling(_active_driver) if self._driver is None else driver.active
        if active is not self._driver:
            self._driver, self._compiled = active, {}
        device = operands[-1].get_device()
        kinds, handles = _read(operands, device)
        kinds += device, fixed, tuple(constants.values()) if made is None else made
        key = tuple(kinds)
        found = self._compiled.get(key)
        if found is not None:
            compiled, tail, launch, settings, as_tuple, described = found
            stream, sizes = active.get_current_stream(device), (*grid, 1, 1)[:3]
            if notes is not None:
                told = found, sizes, operands, (*varying, *fixed)
                notes.append(None if launch is None else Launch(*told))
            if launch is None or hooked():
                compiled[sizes](*_described(operands), *varying, *fixed, *tail, stream=stream)
                return
            # The same, without what only hooks read.
            for at, kind, encoded in described:
                handles[at : at + 1] = encode(operands[at], handles[at], kind, encoded)
            if as_tuple:
                launch(*sizes, stream, *settings, (*handles, *varying, *fixed, *tail))
            else:
                launch(*sizes, stream, *settings, *handles, *varying, *fixed, *tail)
            return
        if notes is not None:
            notes.append(None)
        self._first(key, grid, operands, (*varying, *fixed), constants if made is None else made)

    def _first(
        self,
        key: Hashable,
        grid: tuple[int, ...],
        operands: Sequence[Any],
        numbers: tuple[int | float, ...],
        constants: dict[str, Any],
    ) -> None:
        """Compile, launch, and keep how it is launched again."""
        compiled = compiling(self._kernel[grid], *_described(operands), *numbers, **constants)
        device = operands[-1].get_device()
        # Triton takes some tensors of the host (pinned, empty): another of them it might refuse.
        here = all(o.get_device() == device for o in operands if isinstance(o, Tensor))
        if compiled is not None and here and len(self._compiled) < _MOST:
            names = self._kernel.arg_names[len(operands) + len(numbers) :]
            tail = tuple(constants[name] for name in names)
            self._compiled[key] = _Compiled(compiled, tail, *_launch_in_c(compiled, operands))


def _active_driver() -> Any:
    """Return Triton's driver, a part of which is compiled once a process."""
    return driver.active


# What a launch needs of Triton's launcher; a release that lacks one of them launches by itself.
_READ = (
    "launch", "global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl"
)  # fmt: skip
_READ_FOR_TUPLE = "arg_annotations", "kernel_signature"
_BY_TRITON = None, (), False, ()


def _launch_in_c(
    compiled: CompiledKernel, operands: Sequence[Any]
) -> tuple[Callable[..., None] | None, tuple, bool, tuple[tuple[int, Any, dict], ...]]:
    """The last four fields of :class:`_Compiled`: what Triton's launcher does at every call.

    Returns:
        No function in C if the kernel needs memory of Triton, if it was instrumented, if a device
        takes descriptors apart, or if this release lacks a private name: then Triton launches,
        which takes the host longer.
    """
    try:
        from triton.backends.nvidia.driver import CudaLauncher, make_tensordesc_arg  # noqa: F401
    except ImportError:
        return _BY_TRITON
    run, names = compiled.run, _READ + _READ_FOR_TUPLE * _RELEASE.as_tuple
    if type(run) is not CudaLauncher or not all(hasattr(run, name) for name in names):
        return _BY_TRITON
    launch, kinds = run.launch, getattr(compiled.metadata, "tensordesc_meta", None) or ()
    places = [at for at, operand in enumerate(operands) if isinstance(operand, Box)]
    if _needs_triton(run) or len(places) != len(kinds):
        return _BY_TRITON
    if places and (launch := _below_encoding(launch)) is None:
        return _BY_TRITON
    described = tuple((at, kind, {}) for at, kind in zip(places, kinds, strict=True))
    return launch, _settings(compiled), _RELEASE.as_tuple, described[::-1]


def _needs_triton(run: Any) -> bool:
    """Whether its launcher allocates memory for each launch, or adds an argument of its own."""
    instrumented = getattr(run, "gsan_enabled", False)  # since 3.8
    return bool(run.global_scratch_size or run.profile_scratch_size or instrumented)


def _settings(compiled: CompiledKernel) -> tuple:
    """What the function in C takes between the stream and the kernel's own arguments."""
    run, memory, hooks = compiled.run, (None, None), (None, None, None)
    first = compiled.function, run.launch_cooperative_grid, run.launch_pdl
    if not _RELEASE.as_tuple:
        return *first, *memory, compiled.packed_metadata, *hooks
    own = run.arg_annotations, run.kernel_signature
    return *first, compiled.packed_metadata, *hooks, *memory, *own


def _below_encoding(launch: Any) -> Callable[..., None] | None:
    """The function in C: a variable in the closure of the one that encodes descriptors."""
    if not inspect.isfunction(launch):
        return None
    return inspect.getclosurevars(launch).nonlocals.get("launcher")


def hooked() -> bool:
    """Return whether a launch hook is set: Triton takes a chain, any function, or None."""
    runtime = triton.knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if hook.calls if type(hook) is triton.knobs.HookChain else hook is not None:
            return True
    return False


def _described(operands: Sequence[Any]) -> list[Any]:
    """The operands as Triton takes them."""
    return [each.descriptor() if isinstance(each, Box) else each for each in operands]


def encode(box: Box, key: Hashable, kind: Any, encoded: dict) -> list[Any]:
    """What the function in C takes for a descriptor; ``key`` is what tells it from others."""
    found = encoded.get(key)
    if found is None:
        from triton.backends.nvidia.driver import make_tensordesc_arg

        if len(encoded) >= _MOST_ENCODED:
            encoded.clear()
        found = encoded[key] = make_tensordesc_arg(box.descriptor(), kind, *_RELEASE.encoding)
    return found


def _read(operands: Sequence[Any], device: int) -> tuple[list[Hashable], list[Any]]:
    """What Triton compiles anew for, and what a launch takes: addresses.

    Of a box it takes what its descriptor is known by. Of a tensor Triton asks its address once
    more, and the driver about the address. A tensor that is elsewhere has a kind of its own, which
    is never kept: Triton is asked each time, and refuses most.
    """
    kinds: list[Hashable] = []
    handles: list[Any] = []
    for operand in operands:
        if type(operand) is Box:
            base, shape, strides, block_shape, _, first = operand
            dtype = base.dtype
            kinds.append((dtype, block_shape))
            handles.append((base.data_ptr() + first * dtype.itemsize, shape, strides))
            continue
        address, kind = operand.data_ptr(), operand.dtype
        if address & 15:
            kind = (kind,)
        kinds.append(kind if operand.get_device() == device else (kind, operand.device))
        handles.append(address)
    return kinds, handles
