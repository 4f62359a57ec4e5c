"""Read a user's text and YAML: UTF-8 with or without a byte order mark, any line ends."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

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


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads 1e-3 as a number, unlike YAML 1.1, and refuses duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        # A merge key (`<<: *anchor`) is no key of the result, and keys beside it override it.
        own = (key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge")
        keys = [self.construct_object(key) for key in own]
        twice = [key for i, key in enumerate(keys) if key in keys[:i]]
        if twice:
            raise yaml.constructor.ConstructorError(
                None, None, f"key {twice[0]!r} is given twice", node.start_mark
            )
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def parse_yaml(text: str, where: str) -> Any:
    """Parse the YAML node in ``text``.

    Raises:
        UnsupportedOptionError: a syntax error or a duplicate key (names the line).
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        # PyYAML spreads a position over several lines; the command line prints one.
        raise UnsupportedOptionError(f"{where}: {' '.join(str(error).split())}") from error


def parse_settings(items: Iterable[str]) -> dict[str, Any]:
    """Return the values of ``--set KEY=VALUE`` arguments by key; each value is a YAML node.

    Raises:
        UnsupportedOptionError: an argument is not of this form, or its value is no YAML.
    """
    settings = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not (key and equals):
            raise UnsupportedOptionError(f"--set {item}: expected KEY=VALUE")
        settings[key] = parse_yaml(value, f"--set {key}")
    return settings
