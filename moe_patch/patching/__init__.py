"""The code that runs once, in ``patch_model``: find blocks, check them, bind forwards."""
