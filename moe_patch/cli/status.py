"""Exit statuses; the head of the package says what they mean."""

CHECK_FAILED = 1
UNUSABLE = 2
INTERRUPTED = 130
