"""Launch kernels as Triton does, in a fraction of the host's time.

At every launch, Triton classifies all arguments and rebuilds the key of the compiled kernel. That
takes 10 to 20 µs, as long as a kernel for decoding one token. Here the caller states which
arguments affect compilation, and the compiled kernel is launched directly, as in Triton's own
tutorials. A tensor descriptor is encoded once per address and shape, which repeat in every training
step.
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

# Compilation keys and the arguments of a compiled kernel differ between releases and on HIP.
_RELEASE = tested()
_DIRECT = torch.version.hip is None and _RELEASE.direct
# Limit on cached kernels. A size class of T adds a few; a program with more gains nothing here.
_MOST = 1024
# Limit on cached descriptors per operand, for programs whose addresses never repeat.
_MOST_ENCODED = 256


class Constants(dict[str, Any]):
    """Compile-time arguments and Triton's options, compared and hashed by identity.

    Create them in a function with ``functools.cache``, so that a launch spends no time on them.
    """

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return self is other


class Box(NamedTuple):
    """Contents of a tensor descriptor. Creating the descriptor is the slowest part of a launch.

    Attributes:
        base: the tensor to copy from or to; its address is a multiple of 16 bytes.
        shape, strides: shape and strides of the view, in elements; the last stride is 1.
        block_shape: shape of one copy.
        layout: Gluon's layout in shared memory; None for a kernel in plain Triton.
        first: column of ``base`` at which the view begins; slicing ``base`` would cost more.
    """

    base: Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block_shape: tuple[int, ...]
    layout: Any = None
    first: int = 0

    def descriptor(self) -> Any:
        """Create Triton's descriptor, which checks its arguments."""
        base = self.base[..., self.first :] if self.first else self.base
        held = (base, list(self.shape), list(self.strides), list(self.block_shape))
        if self.layout is None:
            from triton.tools.tensor_descriptor import TensorDescriptor

            return TensorDescriptor(*held)
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as OfGluon

        return OfGluon(*held, self.layout)


class _Compiled(NamedTuple):
    """A compiled kernel and the data to launch it.

    Attributes:
        kernel: the compiled kernel from Triton.
        tail: its compile-time arguments, which are also launch arguments.
        launch: the launch function in C; None if only Triton's own launch works.
        settings: arguments of that function between the stream and the kernel's own arguments.
        as_tuple: the function takes the kernel's own arguments as one tuple.
        described: for each tensor descriptor, the last first: the index of its operand, Triton's
            metadata to encode it, and a cache of encoded descriptors.
    """

    kernel: CompiledKernel
    tail: tuple
    launch: Callable[..., None] | None
    settings: tuple
    as_tuple: bool
    described: tuple[tuple[int, Any, dict], ...]


class Launcher:
    """A kernel with a cache of its compiled variants, keyed by all that triggers recompilation.

    Triton's settings (``TRITON_DEBUG`` and the like) are read when a key first occurs.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        # Under the interpreter, kernels have another type and there is no driver.
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
        """Launch ``kernel[grid](*operands, *varying, *fixed, **constants)``.

        Args:
            grid: one to three sizes.
            operands: tensors and :class:`Box` on the current device; the last is a tensor.
            varying: int32 values listed in the kernel's ``do_not_specialize``.
            fixed: all other numbers; each combination of values has its own cache entry.
            made: compile-time arguments and Triton's options, created beforehand.
            constants: compile-time arguments and options if ``made`` is None, always in one order.
        """
        if not self._direct:
            self._through_triton(grid, operands, (*varying, *fixed), made or constants)
            return
        notes = NOTES.launches
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
                note = Launch(found, sizes, operands, (*varying, *fixed))
                notes.append(None if launch is None else note)
            if launch is None or hooked():
                compiled[sizes](*_described(operands), *varying, *fixed, *tail, stream=stream)
                return
            # Launch directly, without the metadata that only hooks read.
            for at, kind, encoded in described:
                handles[at : at + 1] = encode(operands[at], handles[at], kind, encoded)
            if as_tuple:
                launch(*sizes, stream, *settings, (*handles, *varying, *fixed, *tail))
            else:
                launch(*sizes, stream, *settings, *handles, *varying, *fixed, *tail)
            return
        self._first(key, grid, operands, (*varying, *fixed), constants if made is None else made)

    def _through_triton(
        self, grid: tuple[int, ...], operands: Sequence[Any], numbers: tuple, constants: dict
    ) -> CompiledKernel:
        """Launch as Triton does, which a recording cannot replay."""
        if NOTES.launches is not None:
            NOTES.launches.append(None)
        return compiling(self._kernel[grid], *_described(operands), *numbers, **constants)

    def _first(
        self,
        key: Hashable,
        grid: tuple[int, ...],
        operands: Sequence[Any],
        numbers: tuple[int | float, ...],
        constants: dict[str, Any],
    ) -> None:
        """Compile and launch, and cache how to launch again."""
        compiled = self._through_triton(grid, operands, numbers, constants)
        device = operands[-1].get_device()
        # Do not cache for host tensors: Triton accepts some (pinned, empty) and refuses others.
        here = all(o.get_device() == device for o in operands if isinstance(o, Tensor))
        if compiled is not None and here and len(self._compiled) < _MOST:
            names = self._kernel.arg_names[len(operands) + len(numbers) :]
            tail = tuple(constants[name] for name in names)
            self._compiled[key] = _Compiled(compiled, tail, *_launch_in_c(compiled, operands))


def _active_driver() -> Any:
    """Return Triton's driver, a part of which is compiled once per process."""
    return driver.active


# Attributes of Triton's launcher that a direct launch reads. If one is missing, Triton launches.
_READ = (
    "launch", "global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl"
)  # fmt: skip
_READ_FOR_TUPLE = "arg_annotations", "kernel_signature"
_BY_TRITON = None, (), False, ()


def _launch_in_c(
    compiled: CompiledKernel, operands: Sequence[Any]
) -> tuple[Callable[..., None] | None, tuple, bool, tuple[tuple[int, Any, dict], ...]]:
    """Return the last four fields of :class:`_Compiled`, read from Triton's launcher.

    Returns:
        None for the function in C if only Triton can launch, which is slower. Reasons: the kernel
        needs scratch memory, it is instrumented, its device has no tensor descriptors, or this
        release lacks a private name.
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
    """Return whether Triton's launcher allocates memory for each launch or adds an argument."""
    instrumented = getattr(run, "gsan_enabled", False)  # since 3.8
    return bool(run.global_scratch_size or run.profile_scratch_size or instrumented)


def _settings(compiled: CompiledKernel) -> tuple:
    """Return the C function's arguments between the stream and the kernel's own arguments."""
    run, memory, hooks = compiled.run, (None, None), (None, None, None)
    first = compiled.function, run.launch_cooperative_grid, run.launch_pdl
    if not _RELEASE.as_tuple:
        return *first, *memory, compiled.packed_metadata, *hooks
    own = run.arg_annotations, run.kernel_signature
    return *first, compiled.packed_metadata, *hooks, *memory, *own


def _below_encoding(launch: Any) -> Callable[..., None] | None:
    """Return the function in C, from the closure of the function that encodes descriptors."""
    if not inspect.isfunction(launch):
        return None
    return inspect.getclosurevars(launch).nonlocals.get("launcher")


def hooked() -> bool:
    """Return whether a launch hook is set: Triton accepts a chain, any function, or None."""
    runtime = triton.knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if hook.calls if type(hook) is triton.knobs.HookChain else hook is not None:
            return True
    return False


def _described(operands: Sequence[Any]) -> list[Any]:
    """Convert each Box of the operands to Triton's descriptor."""
    return [each.descriptor() if isinstance(each, Box) else each for each in operands]


def encode(box: Box, key: Hashable, kind: Any, encoded: dict) -> list[Any]:
    """Return the C function's arguments for a descriptor, cached by ``key``."""
    found = encoded.get(key)
    if found is None:
        from triton.backends.nvidia.driver import make_tensordesc_arg

        if len(encoded) >= _MOST_ENCODED:
            encoded.clear()
        found = encoded[key] = make_tensordesc_arg(box.descriptor(), kind, *_RELEASE.encoding)
    return found


def _read(operands: Sequence[Any], device: int) -> tuple[list[Hashable], list[Any]]:
    """Return (kinds, handles): the properties that trigger recompilation, and the addresses.

    The handle of a Box is the key of its cached descriptor. A tensor on another device gets a
    distinct kind, which is never cached: Triton handles each such launch, and refuses most.
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
