"""The command's name, and its exit statuses; the head of the package says what they mean."""

PROGRAM = "moe-patch"
CHECK_FAILED = 1
UNUSABLE = 2
INTERRUPTED = 130
