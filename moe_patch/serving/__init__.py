"""Tools for after training: merge adapters, verify the result, export to other engines."""
