"""Read the routing that vLLM and SGLang return into a :class:`RoutingTrace`.

    layers = EngineLayers.of(model)
    outputs = [EngineRows(o.routed_experts, len(prompt) + len(o.token_ids)) for prompt, o in made]
    placed = engine_trace(layers, outputs, attention_mask)
    with replay_routing(model, placed.trace): ...

Formats, for a request of n tokens (prompt and completion). The last sampled token is not forwarded,
so no engine has a row for it.

- vLLM 0.33.0, with ``enable_return_routed_experts``. ``CompletionOutput.routed_experts``
  (vllm/outputs.py) is a NumPy array [n - 1 - first, num_hidden_layers, K] in uint8 up to 256
  experts, else uint16 (fused_moe/routed_experts_capturer.py). ``first`` is
  ``SamplingParams.routed_experts_prompt_start``. Over HTTP a choice's ``routed_experts`` is the
  array as base64 of an .npy file (entrypoints/openai/completion/serving.py, utils/serial_utils.py).
- SGLang 0.5.23, with ``return_routed_experts``. ``meta_info["routed_experts"]`` is base64 of int32
  [n - 1 - first, num_hidden_layers, K] without a shape (srt/state_capturer/routed_experts.py and
  base.py, managers/tokenizer_manager.py). ``first`` is ``routed_experts_start_len``.

Both have a column for every decoder layer. Columns of dense layers are never written and hold
zeros, and layers for multi-token prediction have none. A row that was never written is zero in all
layers: a cached prompt token whose routing was not kept. Such tokens are left to the router and
counted. With K = 1 that cannot be told from expert 0: request rows from ``first`` on instead.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moe_patch.errors import UnsupportedModelError, UnsupportedOptionError
from moe_patch.patching.backends import whole_shape
from moe_patch.patching.discover import FoundBlock
from moe_patch.schema import check_choice
from moe_patch.signals.replay import replayable
from moe_patch.signals.trace import RoutingTrace

ENGINES = ("vllm", "sglang")


@dataclass(frozen=True)
class EngineLayers:
    """A model's MoE layers among the columns that an engine returns.

    Attributes:
        paths: block paths, in model order.
        columns: each block's decoder layer.
        total: number of decoder layers, dense ones included.
        experts: E of each block, with experts that have no weights (LongCat-Flash).
        top_k: K of the model.
    """

    paths: tuple[str, ...]
    columns: tuple[int, ...]
    total: int
    experts: tuple[int, ...]
    top_k: int

    @classmethod
    def of(cls, model: nn.Module) -> EngineLayers:
        """Read the layers of a patched model; call it before the model is sharded or wrapped.

        Raises:
            PatchStateError: there is no patched MoE block.
            UnsupportedModelError: routing cannot be replayed, a decoder layer has several MoE
                blocks, or K differs between layers.
        """
        blocks = replayable(model, "EngineLayers.of")
        columns = tuple(_column(block) for block in blocks)
        shapes = [_shape_of(block) for block in blocks]
        config: Any = model.config
        total = config.get_text_config(decoder=True).num_hidden_layers
        ks = {k for _, k in shapes}
        if len(set(columns)) != len(columns) or max(columns) >= total or len(ks) != 1:
            raise UnsupportedModelError(
                f"EngineLayers.of: {type(model).__name__} has MoE blocks in decoder layers "
                f"{columns} of {total}, with K = {sorted(ks)}; accepted: one block per layer and "
                "one K, because an engine returns [tokens, layers, K]"
            )
        paths = tuple(block.path for block in blocks)
        return cls(paths, columns, total, tuple(e for e, _ in shapes), ks.pop())


@dataclass(frozen=True)
class EngineRows:
    """The routing of one sequence, as an engine returned it.

    Attributes:
        data: array, tensor or base64 text of the engine; see the module's docstring for shapes.
        tokens: length of the engine's sequence, prompt and completion.
        engine: "vllm" or "sglang".
        first: position of the first row in the engine's sequence.
        cut: how many of the engine's tokens the trainer dropped on the left and on the right.
    """

    data: Any
    tokens: int
    engine: str = "vllm"
    first: int = 0
    cut: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class EngineTrace:
    """A trace for a batch, and how much of the batch it does not cover.

    Attributes:
        trace: [batch * sequence, L, K]; padding and tokens without a row have negative ids.
        tokens: real tokens per sequence.
        free: how many of them have no row and are left to the router, per sequence. At least one,
            the last, unless the trainer cut it.
    """

    trace: RoutingTrace
    tokens: tuple[int, ...]
    free: tuple[int, ...]


def engine_trace(
    layers: EngineLayers,
    outputs: Sequence[EngineRows],
    mask: Any,
    lengths: Sequence[int] | None = None,
) -> EngineTrace:
    """Place an engine's rows in a batch of the trainer.

    Args:
        layers: the trainer's layers.
        outputs: one per sequence, in the order of the batch.
        mask: [batch, sequence], true for real tokens; padding may be left, right or both.
        lengths: real tokens per sequence, for a packed batch; None means one sequence per row.

    Raises:
        UnsupportedOptionError: a number of tokens, rows or layers, K or an id does not fit. The
            message names the sequence, and for an id the layer.
    """
    mask_BS = torch.as_tensor(mask).bool()
    counts = mask_BS.sum(-1).tolist() if lengths is None else list(lengths)
    if len(counts) != len(outputs) or sum(counts) != int(mask_BS.sum()):
        raise UnsupportedOptionError(
            f"engine_trace: the batch has {int(mask_BS.sum())} tokens in sequences of lengths "
            f"{counts}, but the engine returned {len(outputs)} sequences; accepted: one output "
            "per sequence"
        )
    ids_TLK = torch.full((mask_BS.numel(), len(layers.paths), layers.top_k), -1, dtype=torch.int32)
    positions = mask_BS.reshape(-1).nonzero().squeeze(1).split(counts)
    free = []
    for index, (output, at_N) in enumerate(zip(outputs, positions, strict=True)):
        where = f"engine_trace: sequence {index}"
        rows_NLK = _placed(layers, output, at_N.shape[0], where)
        ids_TLK[at_N] = rows_NLK
        free.append(int((rows_NLK[:, 0, 0] < 0).sum()))
    widths = set(layers.experts)
    experts = widths.pop() if len(widths) == 1 else 0
    trace = RoutingTrace(ids_TLK, None, layers.paths, experts)
    return EngineTrace(trace, tuple(counts), tuple(free))


def _placed(layers: EngineLayers, output: EngineRows, count: int, where: str) -> Tensor:
    """Return the ids of a sequence's ``count`` tokens in the batch, [count, L, K], or -1."""
    left, right = output.cut
    if min(left, right, output.first) < 0 or output.tokens - left - right != count:
        raise UnsupportedOptionError(
            f"{where}: the batch has {count} tokens, but the engine has {output.tokens} before "
            f"the cut of {output.cut} (left, right); accepted: the same tokens on both sides"
        )
    ids_RLK = _checked(layers, _read(layers, output, where), where)
    full_NLK = ids_RLK.new_full((output.tokens, *ids_RLK.shape[1:]), -1)
    full_NLK[output.first : output.tokens - 1] = ids_RLK
    return full_NLK[left : output.tokens - right]


def _read(layers: EngineLayers, output: EngineRows, where: str) -> Tensor:
    """Return the rows of the MoE layers, int32 [R, L, K]."""
    check_choice(f"{where}: engine", output.engine, ENGINES)
    if output.data is None:
        raise UnsupportedOptionError(
            f"{where}: the engine returned no routing; vLLM needs enable_return_routed_experts; "
            "SGLang needs enable_return_routed_experts, and return_routed_experts in the request"
        )
    array = torch.as_tensor(_decoded(output, where))
    rows, K = output.tokens - 1 - output.first, layers.top_k
    if array.dim() == 1:  # SGLang's text has no shape
        per_row = array.numel() // (rows * K) if rows > 0 else layers.total
        fits = array.numel() == rows * per_row * K
        array = array.reshape(rows, per_row, K) if fits else array
    accepted = {
        layers.total: list(layers.columns),
        len(layers.paths): list(range(len(layers.paths))),
    }
    shape = tuple(array.shape)
    if len(shape) != 3 or shape[0] != rows or shape[2] != K or shape[1] not in accepted:
        raise UnsupportedOptionError(
            f"{where}: routing of shape {shape}; accepted: [{rows}, {layers.total}, {K}], or "
            f"{len(layers.paths)} MoE layers ({layers.paths[0]} to {layers.paths[-1]}) instead of "
            f"{layers.total} layers; the first {output.first} tokens and the last one have no row"
        )
    if array.dtype.is_floating_point or array.dtype == torch.bool:
        raise UnsupportedOptionError(f"{where}: ids are {array.dtype}; accepted: integers")
    return array.to(torch.int32)[:, accepted[shape[1]]]


def _decoded(output: EngineRows, where: str) -> Any:
    """Return an array or tensor; text is decoded by the engine's own encoding."""
    if not isinstance(output.data, str):
        return output.data
    try:
        raw = base64.b64decode(output.data, validate=True)
        if output.engine == "sglang":
            return np.frombuffer(raw, dtype="<i4").copy()
        return np.load(io.BytesIO(raw), allow_pickle=False)
    except (binascii.Error, ValueError, EOFError) as error:
        accepted = "base64 of int32" if output.engine == "sglang" else "base64 of an .npy file"
        raise UnsupportedOptionError(
            f"{where}: routed_experts cannot be decoded ({error}); accepted: {accepted}"
        ) from error


def _checked(layers: EngineLayers, ids_RLK: Tensor, where: str) -> Tensor:
    """Return the ids with -1 in rows that were never written, and refuse all others that are no
    K different experts."""
    missing_R = (ids_RLK < 0).flatten(1).all(-1)
    if layers.top_k > 1:
        missing_R |= (ids_RLK == 0).flatten(1).all(-1)
    ids_RLK = ids_RLK.masked_fill(missing_R[:, None, None], -1)
    highest_L = torch.tensor(layers.experts, dtype=torch.int32)
    outside_RLK = (ids_RLK < 0) | (ids_RLK >= highest_L[:, None])
    order_RLK = ids_RLK.sort(-1).values
    twice_RL = (order_RLK[..., 1:] == order_RLK[..., :-1]).any(-1)
    bad_RL = (outside_RLK.any(-1) | twice_RL) & ~missing_R[:, None]
    if bad_RL.any():
        row, layer = (int(i) for i in bad_RL.nonzero()[0])
        ids = ids_RLK[row, layer].tolist()
        raise UnsupportedOptionError(
            f"{where}, {layers.paths[layer]}: row {row} has the ids {ids}; "
            f"accepted: {layers.top_k} different ids below {layers.experts[layer]}"
        )
    return ids_RLK


def _column(block: FoundBlock) -> int:
    """Return a block's decoder layer, the first number in its path."""
    for part in block.plain_path.split("."):
        if part.isdigit():
            return int(part)
    raise UnsupportedModelError(
        f"EngineLayers.of: {block.path}: the path has no layer number; accepted: blocks in a list "
        "of decoder layers"
    )


def _shape_of(block: FoundBlock) -> tuple[int, int]:
    """Return the router's number of logits and its K."""
    router = block.routers[0][1]
    shapes = (whole_shape(parameter) for parameter in router.parameters())
    experts = next(shape[0] for shape in shapes if len(shape) == 2)
    spec = block.spec_of(router)
    chosen = spec.route_spec(router, experts, "lower")
    if chosen is None:
        raise UnsupportedModelError(
            f"EngineLayers.of: {block.path}: {spec.decided_by} decides K at each call; accepted: "
            "families with a fixed K"
        )
    return experts, chosen.top_k
