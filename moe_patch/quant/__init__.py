"""Experts stored in 4 or 8 bits: loading, quantising in place, state dicts and memory use.

    surgery.py            READ FIRST. quantize_experts and dequantize_experts, in place
    loading.py            load_quantized: packed while a checkpoint is read
    quantizer.py          the quantizer that transformers' loader calls
    stored.py             how a checkpoint is quantised, from its config
    fp8_loading.py        experts of an FP8 checkpoint, where transformers would dequantise
    fp8_checkpoint.py     experts of an FP8 checkpoint, as transformers loads them
    mxfp4_checkpoint.py   experts of an MXFP4 checkpoint
    packed_checkpoint.py  NF4 experts in this library's own files
    saving.py             save_pretrained of packed experts
    shard_files.py        safetensors files of a given size
    state.py              state dicts
    sharded_state.py      state dicts of experts that FSDP2 divides over ranks
    elsewhere.py          processes that leave loading to another one
    ties.py               parameters that share memory
    memory.py             bytes of the experts, now and in 4 or 8 bits

Nothing is imported here.
"""
