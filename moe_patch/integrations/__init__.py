"""Switches for other training stacks: Hugging Face Trainer and axolotl.

The rest of the package imports nothing from here; each module imports its host library.
"""
