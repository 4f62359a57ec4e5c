"""Read a user's text file: UTF-8 with or without a byte order mark, any line ends."""

from __future__ import annotations

import codecs
from pathlib import Path

from moe_patch.errors import UnsupportedOptionError

# UTF-32's little-endian mark begins with that of UTF-16, so it comes first.
MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)


def read_text(path: str | Path, what: str) -> str:
    r"""Read a text file, with ``\n`` at the end of every line and without a byte order mark.

    Args:
        path: the file.
        what: beginning of the error message, such as "data: cannot read".

    Raises:
        UnsupportedOptionError: the file cannot be read, is in another encoding, or is no text.
    """
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise UnsupportedOptionError(f"{what} {path}: {error}") from error
    for mark, name in MARKS:
        if raw.startswith(mark):
            raise UnsupportedOptionError(
                f"{what} {path}: it is {name}; accepted: UTF-8 (iconv -f {name} -t UTF-8)"
            )
    # English text in UTF-16 without a mark is valid UTF-8: every second byte is zero.
    if (at := raw.find(0)) >= 0:
        raise UnsupportedOptionError(
            f"{what} {path}: byte {at} is zero, as in UTF-16 or a binary file; accepted: UTF-8"
        )
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UnsupportedOptionError(
            f"{what} {path}: it is not UTF-8 ({error}); accepted: UTF-8"
        ) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")
