"""After training: merge adapters into checkpoints, prove the result, export for other engines."""
