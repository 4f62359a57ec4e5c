"""What the router does, seen from outside: per-row signals, losses on them, replay and balance.

    runtime/taps.py      READ FIRST. What one layer records, and how the forwards find it
    recorder.py  record(model): puts slots on the modules of a patched model and takes them away
    rows.py      the norms where the experts run the module's own code between grouped products
    losses.py    delta_sc, smk_loss, gate_accuracy
    updates.py   the update filter: gradients of the experts with the lowest or highest scores
    trace.py     which experts every token used, in memory and in a file
    saved.py     a recorder in a file, for moe_patch.signals.plots and scores in another process
    replay.py    record_routing and replay_routing: the same experts once more
    balance.py   expert load, its measures, the correction-bias update, logging in a Trainer

Nothing is imported here: the forwards need runtime/taps.py, which lies far below the recorder.
"""
