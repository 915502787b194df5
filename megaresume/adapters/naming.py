"""An adapter's name as a part of a path and of a parameter's name, and back.

Lower-case letters, digits, `_` and `-` stand for themselves; every other byte of the name's UTF-8 form is written as
`%` and two lower-case digits. So no name leaves the directory it is given, none holds a dot (which ends a part of a
parameter's name), and two names are apart on every file system, one that ignores case included. Pure.
"""

from __future__ import annotations

import re

from megaresume.errors import ConfigurationError

MAX_ENCODED = 200  # bytes: most file systems take 255, and temporary names need a few more

_PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789_-")
_ENCODED = re.compile(r"(?:[a-z0-9_-]|%[0-9a-f]{2})+")

_RULE = (
    "a name is text of at least one character; a to z, 0 to 9, _ and - count one byte each, every other byte of its "
    f"UTF-8 form counts three, {MAX_ENCODED} in all at most"
)


def encode_name(name: str) -> str:
    """The part of a path and of parameters' names that stands for an adapter. ConfigurationError by the rule above."""
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"adapter name {name!r}: {_RULE}")
    try:
        data = name.encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigurationError(f"adapter name {name!a} is not Unicode text: {_RULE}") from None
    encoded = "".join(chr(byte) if byte in _PLAIN else f"%{byte:02x}" for byte in data)
    if len(encoded) > MAX_ENCODED:
        raise ConfigurationError(f"adapter name {name[:40]!r}...: takes {len(encoded)} bytes on disk; {_RULE}")
    return encoded


def decode_name(encoded: str) -> str | None:
    """The adapter's name, or None for a string that `encode_name` would not have given."""
    if not _ENCODED.fullmatch(encoded):
        return None
    data = re.sub(r"%(..)", lambda match: chr(int(match[1], 16)), encoded).encode("latin-1")
    try:
        name = data.decode("utf-8")
        return name if encode_name(name) == encoded else None
    except (UnicodeDecodeError, ConfigurationError):
        return None
