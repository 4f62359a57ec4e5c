"""The output folder: checked first, filled in a temporary place, moved into place at the end."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from moe_patch.errors import UnsupportedOptionError

# Written last into every finished run. Only folders that hold this file are ever replaced.
MARKER = "run.json"


class OutputFolder:
    """The folder for a run's results.

    Args:
        path: the folder; it must not exist, be empty, or (with ``overwrite``) hold a finished run.
        overwrite: replace a finished run or the remains of an interrupted one, but never its
            checkpoints.

    Raises:
        UnsupportedOptionError: the path is the root of a file system.
    """

    def __init__(self, path: str | Path, overwrite: bool = False) -> None:
        self.path = Path(path).absolute()
        if not self.path.name:
            raise UnsupportedOptionError(f"output_dir {self.path}: name a folder, not a root")
        self.partial = self.path.with_name(f".{self.path.name}.partial")
        self.overwrite = overwrite

    def check(self, reads: str | Path | None = None) -> None:
        """Raise UnsupportedOptionError if the path is taken or cannot be written.

        Args:
            reads: a path that the run reads from; it must not be inside the folder to be replaced.
        """
        where = f"output_dir {self.path}"
        if reads is not None and Path(reads).resolve().is_relative_to(self.path.resolve()):
            raise UnsupportedOptionError(
                f"{where}: {reads} is inside it, and would be deleted when this run ends; move it "
                "out first, or name another folder"
            )
        try:
            taken = self.path.exists() and any(self.path.iterdir())
            if taken and not self.overwrite:
                raise UnsupportedOptionError(
                    f"{where} is not empty; name another, or pass --overwrite to replace a run"
                )
            if taken and not (self.path / MARKER).is_file():
                raise UnsupportedOptionError(
                    f"{where} holds no {MARKER}, so it is not a run of this "
                    "command and is left alone"
                )
            if self._has_work():
                raise UnsupportedOptionError(
                    f"{where}: {self.partial} holds checkpoints or weights of an interrupted run; "
                    "move them (to continue from a checkpoint: training.resume_from_checkpoint) or "
                    "delete them"
                )
            if self.partial.exists() and not self.overwrite:
                raise UnsupportedOptionError(
                    f"{where}: {self.partial} is in use or was left by an interrupted run; "
                    "delete it, or pass --overwrite"
                )
            # Permission bits are unreliable (root, read-only mounts), so try a write.
            existing = next(p for p in self.path.parents if p.exists())
            os.rmdir(tempfile.mkdtemp(prefix=".moe_patch-", dir=existing))
        except OSError as error:
            raise UnsupportedOptionError(f"{where} cannot be written: {error}") from error

    @contextmanager
    def open(self, main: bool = True, barrier: Callable[[], None] = lambda: None) -> Iterator[Path]:
        """Yield a folder to write to. It becomes ``path`` if the block ends without an error.

        After an error it is deleted, unless it holds checkpoints or saved weights: these may be
        hours of work.

        Args:
            main: whether this is the one process, of all that share the folder, that manages it.
            barrier: waits for all of these processes.
        """
        if main:
            if self.partial.exists():
                shutil.rmtree(self.partial)
            self.partial.mkdir(parents=True)
        barrier()
        try:
            yield self.partial
        except BaseException:
            if main:
                self._discard()
            raise
        barrier()
        if main:
            self._publish()

    def _has_work(self) -> bool:
        return any(self.partial.glob("checkpoints/checkpoint-*")) or any(
            self.partial.glob("*/*.safetensors")
        )

    def _discard(self) -> None:
        if self._has_work():
            print(f"moe_patch: the trained weights are kept in {self.partial}", file=sys.stderr)
        else:
            shutil.rmtree(self.partial)

    def _publish(self) -> None:
        checkpoints = self.partial / "checkpoints"
        if checkpoints.is_dir() and not any(checkpoints.iterdir()):
            checkpoints.rmdir()
        if not self.path.exists():
            self.partial.rename(self.path)
            return
        old = self.path.with_name(f".{self.path.name}.old")
        self.path.rename(old)
        self.partial.rename(self.path)
        shutil.rmtree(old)
