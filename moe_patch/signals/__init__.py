"""Signals of the router: per-row norms, losses on them, replay and balance.

    recorder.py      READ FIRST. record(model): puts taps on the modules of a patched model
    losses.py        delta_sc, smk_loss, gate_accuracy
    updates.py       the update filter: gradients of the experts with the lowest or highest scores
    trace.py         the experts that every token used, in memory and in a file
    engines.py       the same from what vLLM and SGLang return
    saved.py         a recorder in a file, for plots and for scores in another process
    replay.py        record_routing and replay_routing: the same experts once more
    layer_replay.py  the replay of one router
    balance.py       expert load, its measures, the correction-bias update, logging in a Trainer
    plots.py         charts of load, routing and scores

Nothing is imported here. The parts that run in a forward are runtime/taps.py (the record of one
layer) and runtime/row_norms.py.
"""
