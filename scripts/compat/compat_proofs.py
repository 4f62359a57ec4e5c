"""The proofs behind docs/compatibility.md, and that page's other text. Data only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Proof:
    """One line of the table.

    Attributes:
        row: the row of the table that it belongs to.
        shows: what the tests show, in words.
        file, select: a test file and the -k expression in it ("" = the whole file).
        world: number of processes, or of cards, that the tests use.
        on: "cpu", "card" (``world`` CUDA devices), or "ranks" (one CUDA device for each of
            ``world`` processes if there are as many, else the CPU).
        needs: a distribution that the tests need in addition; the row keeps its version.
        good: the result if the tests pass, "pass" or "refused" (by name, at patch time).
    """

    row: str
    shows: str
    file: str
    select: str = ""
    world: int = 1
    on: str = "cpu"
    needs: str | None = None
    good: str = "pass"

    @property
    def test(self) -> str:
        """Return the selection as one text."""
        return f"tests/{self.file}" + (f" -k '{self.select}'" if self.select else "")


PROOFS = (
    Proof("checkpointing", "exact ties, 20 steps, both kinds; early stop; a raising forward; "
          "selective", "stack/test_checkpointing.py"),
    Proof("checkpointing", "adapters, both wrap orders", "lora/test_training.py", "checkpointing"),
    Proof("checkpointing", "frozen base", "patching/test_block_training.py", "checkpointing"),
    Proof("checkpointing", "exact ties, 50 steps in bf16, both kinds; memory at step 50 as at "
          "step 5", "stack/test_stacks_gpu.py", "checkpointed or memory", on="card"),
    Proof("checkpointing", "selective: a policy keeps router and experts",
          "stack/test_stacks_gpu.py", "selective", on="card"),
    Proof("checkpointing", "frozen experts need no memory for their gradients",
          "ops/test_experts_memory_gpu.py", on="card"),
    Proof("compile", "fullgraph block and model, at most 2 compilations for dynamic T, patch "
          "before and after", "stack/test_compile.py"),
    Proof("compile", "blocks with adapters", "lora/test_training.py", "compiled"),
    Proof("compile", "blocks of special families", "families/test_irregular_contracts.py",
          "compiles"),
    Proof("compile", "inductor: fullgraph block and model; then no host sync (sync debug mode)",
          "stack/test_compile_gpu.py", "inductor", on="card"),
    Proof("autocast", "casts after patching, bias dtypes, training under autocast",
          "stack/test_dtypes.py"),
    Proof("autocast", "mixed dtypes in one block", "patching/test_block_training.py",
          "mixed_dtypes or autocast"),
    Proof("autocast", "adapters", "lora/test_training.py", "autocast"),
    Proof("autocast", "mixed dtypes, training under autocast, casts and moves after patching",
          "stack/test_stacks_gpu.py", "autocast or cast", on="card"),
    Proof("ddp", "ranks that use different experts equal one process; full and LoRA",
          "stack/test_ranks.py", "ddp_without", world=2, on="ranks"),
    Proof("ddp", "saved and resumed; full and LoRA", "stack/test_ranks.py", "resume and ddp",
          world=2, on="ranks"),
    Proof("ddp", "experts in NF4, FP8 and MXFP4 with LoRA and checkpointing",
          "stack/test_packed_ranks.py", "ddp", world=2, on="ranks"),
    Proof("ddp", "the training command under torchrun", "train/test_train.py", "two_processes",
          world=2),
    Proof("ddp", "accelerate launch with configs/accelerate/ddp_cpu.yaml", "stack/test_launch.py",
          "ddp_cpu", world=2),
    Proof("ddp", "accelerate launch with configs/accelerate/ddp_cpu.yaml, saved and resumed; LoRA",
          "stack/test_launch.py", "resumed_by and ddp", world=2),
    Proof("ddp", "accelerate launch with configs/accelerate/ddp.yaml; full",
          "stack/test_launch.py", "cards and ddp and full", world=2, on="card"),
    Proof("ddp", "accelerate launch with configs/accelerate/ddp.yaml; LoRA",
          "stack/test_launch.py", "cards and ddp and lora", world=2, on="card"),
    Proof("ddp", "accelerate launch with configs/accelerate/ddp.yaml, saved and resumed; full",
          "stack/test_launch.py", "resumed_on and ddp and full", world=2, on="card"),
    Proof("ddp", "accelerate launch with configs/accelerate/ddp.yaml, saved and resumed; LoRA",
          "stack/test_launch.py", "resumed_on and ddp and lora", world=2, on="card"),
    Proof("ddp", "a killed rank: the other ends within the limit of its group, or by torchrun",
          "stack/test_lost_rank_gpu.py", world=2, on="card"),
    Proof("fsdp2", "ranks that use different experts equal one process: units of layers, of "
          "experts, of accelerate's plugin; full and LoRA; whole saved state",
          "stack/test_ranks.py", "fsdp2 and not resume and not mixed", world=2, on="ranks"),
    Proof("fsdp2", "saved and resumed; full and LoRA", "stack/test_ranks.py", "resume and fsdp2",
          world=2, on="ranks"),
    Proof("fsdp2", "bf16 policy over fp32 masters", "stack/test_ranks.py", "fsdp2_mixed",
          world=2, on="ranks"),
    Proof("fsdp2", "through transformers' distributed config", "stack/test_parallel.py",
          "fsdp and ranks2", world=2, on="ranks"),
    Proof("fsdp2", "through transformers' distributed config, four ranks",
          "stack/test_parallel.py", "fsdp and ranks4", world=4, on="ranks"),
    Proof("fsdp2", "accelerate launch with configs/accelerate/fsdp2.yaml; full",
          "stack/test_launch.py", "cards and fsdp2 and full", world=2, on="card"),
    Proof("fsdp2", "accelerate launch with configs/accelerate/fsdp2.yaml; LoRA",
          "stack/test_launch.py", "cards and fsdp2 and lora", world=2, on="card"),
    Proof("fsdp2", "accelerate launch with configs/accelerate/fsdp2.yaml, saved and resumed; full",
          "stack/test_launch.py", "resumed_on and fsdp2 and full", world=2, on="card"),
    Proof("fsdp2", "accelerate launch with configs/accelerate/fsdp2.yaml, saved and resumed; LoRA",
          "stack/test_launch.py", "resumed_on and fsdp2 and lora", world=2, on="card"),
    Proof("fsdp2", "experts in NF4, FP8 and MXFP4 with LoRA and checkpointing: steps equal one "
          "process, also with parts in host memory; states, refusals; even and uneven shards",
          "stack/test_packed_ranks.py", "test", world=2, on="ranks"),
    Proof("fsdp2", "packed experts on one card: bytes at each moment, equal bits, also with parts "
          "in host memory", "stack/test_packed_gpu.py", "card", on="card"),
    Proof("fsdp2", "packed experts: bytes held, gathered and sent are those of moe-patch plan",
          "stack/test_packed_bytes.py", "plan", world=2, on="ranks"),
    Proof("fsdp2", "packed experts on four ranks: steps, bytes, copies of divided models, resumed "
          "on two ranks and from two", "stack/test_packed_four.py", "test", world=4),
    Proof("fsdp2", "packed experts under accelerate launch with configs/accelerate/fsdp2.yaml, but "
          "on the CPU; saved and resumed", "stack/test_packed_launch.py", "cpu", world=2),
    Proof("fsdp2", "packed experts under accelerate launch with configs/accelerate/fsdp2.yaml, "
          "saved and resumed", "stack/test_packed_launch.py", "cards", world=2, on="card"),
    Proof("fsdp2", "packed experts loaded by rank 0 and sent by accelerate; the training command",
          "stack/test_packed_loading.py", "rank_0 or training", world=2, on="ranks"),
    Proof("fsdp2", "packed experts: a rank killed in forward, backward and save",
          "stack/test_packed_killed.py", "error", world=2, on="ranks"),
    Proof("zero3", "partitioned weights are not read when patched", "stack/test_loading.py",
          "no_size"),
    Proof("zero3", "accelerate launch with configs/accelerate/zero3.yaml, but on the CPU; full and "
          "LoRA", "stack/test_launch.py", "zero3_on_two_processes", world=2, needs="deepspeed"),
    Proof("zero3", "the same, saved and resumed", "stack/test_launch.py", "resumed_by and zero3",
          world=2, needs="deepspeed"),
    Proof("zero3", "ranks that use different experts equal one process; full and LoRA; patched "
          "before and after partitioning", "stack/test_zero3.py", "five_steps", world=2,
          on="ranks", needs="deepspeed"),
    Proof("zero3", "leaf modules; patched after a partitioning from_pretrained",
          "stack/test_zero3.py", "leaf or from_pretrained", world=2, on="ranks",
          needs="deepspeed"),
    Proof("zero3", "saved and resumed; full and LoRA", "stack/test_zero3.py", "resume", world=2,
          on="ranks", needs="deepspeed"),
    Proof("zero3", "accelerate launch with configs/accelerate/zero3.yaml; full",
          "stack/test_launch.py", "cards and zero3 and full", world=2, on="card",
          needs="deepspeed"),
    Proof("zero3", "accelerate launch with configs/accelerate/zero3.yaml; LoRA",
          "stack/test_launch.py", "cards and zero3 and lora", world=2, on="card",
          needs="deepspeed"),
    Proof("zero3", "accelerate launch with configs/accelerate/zero3.yaml, saved and resumed; full",
          "stack/test_launch.py", "resumed_on and zero3 and full", world=2, on="card",
          needs="deepspeed"),
    Proof("zero3", "accelerate launch with configs/accelerate/zero3.yaml, saved and resumed; LoRA",
          "stack/test_launch.py", "resumed_on and zero3 and lora", world=2, on="card",
          needs="deepspeed"),
    Proof("ep", "all-to-all and all-reduce with sentinels, with FSDP; generate",
          "stack/test_parallel.py", "ep and ranks2", world=2, on="ranks"),
    Proof("ep", "four ranks", "stack/test_parallel.py", "ep and ranks4", world=4, on="ranks"),
    Proof("ep", "adapters on experts equal PEFT's in one process: loss, gradients, files, generate",
          "stack/test_expert_adapters.py", "not four", world=2, on="ranks"),
    Proof("ep", "adapters on experts, four ranks", "stack/test_expert_adapters.py", "four",
          world=4, on="ranks"),
    Proof("ep", "a killed rank: the others end with an error",
          "stack/test_expert_adapters_killed.py", world=2, on="ranks"),
    Proof("ep", "closures around the experts' forward, adapters", "lora/test_training.py",
          "closure or local_weight"),
    Proof("tp", "loss, gradients, generate", "stack/test_parallel.py", "tp and ranks2",
          world=2, on="ranks"),
    Proof("tp", "four ranks", "stack/test_parallel.py", "tp and ranks4", world=4, on="ranks"),
    Proof("tp", "experts that transformers does not decorate (llama4)",
          "stack/test_parallel.py", "refused and llama4", world=2, on="ranks", good="refused"),
    Proof("device_map", "meta before weights load, disk, from_pretrained", "stack/test_loading.py",
          "not no_size"),
    Proof("device_map", "cpu_offload", "patching/test_wrappers.py", "cpu_offload"),
    Proof("device_map", "a layer offloaded to the host", "stack/test_stacks_gpu.py", "offloaded",
          on="card"),
    Proof("device_map", "blocks on another card than the current one", "stack/test_stacks_gpu.py",
          "two_cards or another_card", world=2, on="card"),
    Proof("generate", "greedy, sampling, beam, static cache, no cache, compiled decoding",
          "stack/test_generate.py"),
    Proof("generate", "each experts implementation", "patching/test_wrappers.py", "generate"),
    Proof("generate", "the same tokens, every step on our kernels (profiler)",
          "stack/test_compile_gpu.py", "tokens_equal", on="card"),
    Proof("generate", "decoding compiled into CUDA graphs; captured blocks at T = 1 and 8",
          "stack/test_compile_gpu.py", "compiled_decoding or captured", on="card"),
    Proof("trainer", "MoePatchCallback: losses, best model, resume, accumulation; EMA",
          "integrations/test_trainer.py"),
    Proof("trainer", "the training command: resume", "train/test_train.py", "resume"),
    Proof("trl", "SFT, DPO and GRPO with MoePatchCallback; full and LoRA",
          "integrations/test_trl.py", needs="trl"),
    Proof("axolotl", "the plugin against the documented interface", "integrations/test_axolotl.py",
          "not own_manager"),
    Proof("axolotl", "axolotl's own plugin manager loads and calls the plugin",
          "integrations/test_axolotl.py", "own_manager", needs="axolotl"),
    Proof("lifecycle", "patch, undo, hooks, shared configs", "patching/test_lifecycle.py"),
    Proof("lifecycle", "every family", "patching/test_lifecycle_all.py"),
    Proof("lifecycle", "no class, module or setting outside of the model changes",
          "stack/test_process.py"),
    Proof("lifecycle", "deepcopy, pickle, saved files", "patching/test_copies.py"),
    Proof("lifecycle", "hooks fire once, and steer as without the patch",
          "families/test_families.py", "fire_once or replaces_ids"),
    Proof("lifecycle", "patch, train, undo, continue; copies; EMA", "stack/test_stacks_gpu.py",
          "undo or copies", on="card"),
    Proof("conflicts", "forwards replaced as Liger and hub kernels do (stand-ins), nn.DataParallel",
          "stack/test_conflicts.py", "not own_library", good="refused"),
    Proof("conflicts", "Liger's own functions", "stack/test_conflicts.py",
          "own_library and liger", needs="liger-kernel", good="refused"),
    Proof("conflicts", "the kernels library's own functions", "stack/test_conflicts.py",
          "own_library and kernels", needs="kernels", good="refused"),
    Proof("conflicts", "whole adapters on divided experts, which PEFT alone cannot run",
          "stack/test_parallel.py", "refused and qwen3_moe", world=2, on="ranks", good="refused"),
    Proof("conflicts", "adapters and experts under tensor parallelism, adapters that differ",
          "stack/test_expert_adapters_refused.py", world=2, on="ranks", good="refused"),
    Proof("conflicts", "experts kept as a ModuleList", "patching/test_refusals.py", "module_list",
          good="refused"),
)  # fmt: skip

NOT_RUN = (
    (
        "ep",
        "LoRA on four and eight cards, ep_fsdp2",
        "machines of more than two cards were not lent",
    ),
)

INTRODUCTION = """\
# Compatibility

Written by `scripts/compat/compat.py` from `benchmarks/results/compat.jsonl`; do not edit.

`refused`: an error that names the module, when the model is patched; for adapters under expert
parallelism, at the first call. `ranks`: processes, each on its own card where `on` names cards. A
`+` after the commit: with changes that were not committed.

`python scripts/compat/compat.py` runs what a machine can run; `--on card` takes what uses its
CUDA devices alone, `--world 2` what uses two of them or two processes, `--together` one process
for all."""

NOTES = """\
## Notes

- **What a step on two cards loses** against half of one card's time, in the rows of a step of
  65,536 tokens. DDP loses 2%. FSDP2 loses 27%: NCCL runs alone for 63 to 92 ms, and other kernels
  take 143 to 184 ms longer. Probable causes, not measured: copies of gathered weights, and NCCL's
  share of the memory for 284 to 431 ms. A layer's experts are gathered twice for each of a card's
  four batches. Expert parallelism loses 45%. Nothing runs for 187 to 227 ms (half of one card's:
  20), probably because the card waits for the host: transformers' all-to-all reads the numbers of
  tokens there in every layer
  (`tolist` in `distributed/expert_parallel.py`). NCCL runs alone for 166 to 169 ms, and other
  kernels take 156 to 160 ms longer. The two cards' own work differs by 1%. An earlier run on
  other machines lost 34% and 53% (df0692c).
- **QLoRA on 12 layers is bound by the host**: a step of 4096 tokens took 169 to 247 ms on different
  machines, nearly all of it in Python. Compare rows of one run only.
- **Launch lines** for several processes are the first line of each file in `configs/accelerate/`.
- **Several processes with gloo** (CPU) may end in `terminate called without an active exception`,
  after all results were written. A thread of gloo drops a tensor while the interpreter shuts down
  (pytorch#179291). It happened with DeepSpeed on a loaded machine; NCCL has no such thread.
- **DeepSpeed, TRL, axolotl, Liger and the kernels library** are no dependencies. Their proofs run
  where they are installed; `with` names the version.
- **axolotl** pins another transformers than the one tested here. Most tests therefore use its
  documented hooks. Its own runs, and those of other frameworks, are in [frameworks](frameworks.md).
- **An `experts_implementation` that the user chose** is no error. The patch wins until undo, and
  one warning says so, naming both.
- **Other code in a block's place** is refused by name. It may be a method of another class bound to
  a module, or a function assigned to the module or its class, compiled or not. A wrapper (closure,
  partial) that holds the own forward stays, and is compared with the patched block where possible.
- **Two PeftModels that adapt one parameter**, attached before and after a patch or otherwise: PEFT
  0.18 allows it. A call would lose one adapter, so it is refused by name. PEFT 0.20 refuses it.
- **Weights in a tensor subclass of another library** (torchao's int8 and float8) are refused by
  name in experts, when patching and in a later call. Elsewhere in a block they
  only prevent the self-check. **Pruned and parametrised expert weights** (`torch.nn.utils.prune`,
  weight norm, fake quantisation) are patched. The report says that the self-check left them out.
- **axolotl keys** refused beside the plugin: `use_scattermoe`, `use_sonicmoe`, `expert_backend` and
  `experts_implementation` with one of these, `expert_parallel_size` above 1, `dense_mixer`,
  `liger_glu_activation` (once `liger_swiglu`).
- **Trainer**: `Trainer(..., callbacks=[MoePatchCallback()])` patches before wrapping. With
  `use_liger_kernel` pass `liger_kernel_config={"swiglu": False}`: Liger would replace the experts.
- **Adapters on experts under expert parallelism**: `moe_patch.expert_parallel` (docs/lora.md).
  PEFT 0.21.2 alone cannot attach them to transformers 5.24's sharded experts. With FSDP it attaches
  them and fails in its own forward. Under tensor parallelism they are refused by name.
- **Expert parallelism before `ep_size`** (transformers 5.17): transformers wraps the router as
  well. The router stays its own, and the experts are ours (tier `experts`).
- **A release whose classes a family's entry does not describe**: router and block stay
  transformers', and the experts are ours (tier `experts`). The classes may have other arguments,
  return other values, or lack attributes. One warning and the report give the reason.
- **transformers 5.9 to 5.12**: routers of DeepSeek, GLM-4.5 and the families that copy them make
  logits, and the block chooses. The patch is in the block's `route_tokens_to_experts` (tier
  `full`). `update_expert_bias`, `moe-patch inspect` and `warmup` work, and so does all that
  `record` takes from the experts. What needs a router that chooses is refused by name: recorded
  logits, `smk_loss`, replayed decisions and `router_losses`. Where there is a correction bias, PEFT
  cannot put an adapter on the router. `DistributedConfig` has no sizes of meshes before 5.13.
  Tiers below `full` there: jamba and lfm2_moe reach `experts`. aria, dbrx, granitemoe and
  longcat_flash are refused, because their experts cannot be run. DeepSeek-V2 with
  `group_limited_greedy` does not run in transformers itself before 5.13.
- **PEFT 0.18 to 0.20**: adapters are fused if they were there before the patch, or if `patch_model`
  was called again. Otherwise PEFT's merged weight is read, and the report says so. 0.18 lays
  factors of untransposed experts out differently (`convert_adapter` rewrites a file). It takes one
  adapter with `target_parameters` (so does 0.19), and fails on a single expert.
- **Training under expert parallelism needs transformers 5.17.** 5.16 does not sum the gradients of
  the routing weights over the ranks, with or without a patch. Loss and logits are right there, but
  the gradients of everything before the last experts are not.
- **Behaviour of transformers 5.24 that a patch does not change**, seen on unpatched twins:
  - Under reentrant checkpointing the auxiliary loss loses its gradient.
  - A static cache fails with `output_router_logits`.
  - Its eager experts fail on the sentinel ids of all-reduce expert parallelism; ours take them.
  - After `generate` under its FSDP config, the next step has no right gradient for `norm` and
    `lm_head`.
  - Trainer restores a checkpoint of a full fine-tuning by the names in its files, which are of
    single experts. So the merged experts stay as they are on resume and with
    `load_best_model_at_end`, with one warning about missing keys.
  - Whole models with sliding windows (mixtral, gpt_oss) compile three times for changing lengths.
  - deepseek_v3's forward takes a lock, so it is no full graph; its blocks are.
"""
