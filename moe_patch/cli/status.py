"""The command's name and exit statuses; moe_patch/cli/__init__.py explains them."""

PROGRAM = "moe-patch"
CHECK_FAILED = 1
UNUSABLE = 2
INTERRUPTED = 130
