"""The plan: rows sorted by expert."""
