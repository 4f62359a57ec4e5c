"""Parts of frameworks.py; tiny.py, compare.py and site/ run in a framework's Python."""
