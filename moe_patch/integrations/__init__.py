"""How other training stacks switch the patch on: Hugging Face Trainer and axolotl.

Nothing here is imported by the rest of the package; each module imports its host library.
"""
