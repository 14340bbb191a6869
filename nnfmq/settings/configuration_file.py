"""Values of configuration files, by key; a process reads the files once.

* If `$NNFMQ_CONFIG` (or `nnfmq --config`) names a file, only that file is read. `/dev/null` reads none.
* Otherwise `/etc/nnfmq/nnfmq.toml` is read, then `$XDG_CONFIG_HOME/nnfmq/nnfmq.toml` (by default `~/.config`), whose
  values replace those of the first. Both may be missing.

A file in the current directory is not read unless it is named: the author of a downloaded folder would otherwise choose
the driver and its plug-ins. For the same reason a file must belong to this user or to root, and other users must not be
able to write to it.
"""

from __future__ import annotations

import os
import stat
from functools import cache

from nnfmq.hal.errors import InvalidArgument

__all__ = ["CONFIG_VARIABLE", "candidates", "file_values", "nearest"]

CONFIG_VARIABLE = "NNFMQ_CONFIG"
_SYSTEM_FILE = "/etc/nnfmq/nnfmq.toml"

FileValues = dict[str, tuple[object, str]]
"""Key → value, as TOML has it, and the path of its file."""


def candidates() -> tuple[str, ...]:
    """Return the absolute paths of the files that are read if they exist, in ascending order of precedence."""
    named = os.environ.get(CONFIG_VARIABLE)
    if named:
        return () if named == os.devnull else (os.path.abspath(named),)
    folder = os.environ.get("XDG_CONFIG_HOME", "")
    if not folder.startswith("/"):
        folder = os.path.expanduser("~/.config")  # stays relative if the user has no home directory
    user_files = (f"{folder}/nnfmq/nnfmq.toml",) if folder.startswith("/") else ()
    return (_SYSTEM_FILE, *user_files)


def file_values(known_keys: frozenset[str]) -> FileValues:
    """Return the values of all files. Reads them at the first call only.

    Raises:
        InvalidArgument: If a file cannot be read, is not TOML, has an unknown key, or can be written by other users; or
            if a file that is named does not exist.
    """
    return _read_all(candidates(), bool(os.environ.get(CONFIG_VARIABLE)), known_keys)


@cache
def _read_all(paths: tuple[str, ...], is_named: bool, known_keys: frozenset[str]) -> FileValues:
    values: FileValues = {}
    for path in paths:
        text = _read(path, is_named)
        if text is not None:
            values |= {key: (value, path) for key, value in _parse(path, text, known_keys).items()}
    return values


def _read(path: str, is_named: bool) -> bytes | None:
    """Return the content of a file; None if it does not exist and need not."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # O_NONBLOCK: a FIFO would block
    except OSError as error:
        if not is_named and not os.path.lexists(path):
            return None
        remedy = f"correct ${CONFIG_VARIABLE} or --config" if is_named else "make it readable or remove it"
        raise InvalidArgument(f"the configuration {path} cannot be read: {error.strerror}; {remedy}") from None
    with open(descriptor, "rb") as file:
        _check_owner(os.fstat(descriptor), path)
        return file.read()


def _check_owner(info: os.stat_result, path: str) -> None:
    if not stat.S_ISREG(info.st_mode):
        raise InvalidArgument(f"the configuration {path} is not a regular file; name a TOML file")
    if info.st_uid not in (os.getuid(), 0):
        raise InvalidArgument(
            f"the configuration {path} is not used: it belongs to uid {info.st_uid}, not to {os.getuid()} or root; "
            "copy it to a file of your own"
        )
    if info.st_mode & stat.S_IWOTH:
        raise InvalidArgument(
            f"the configuration {path} is not used: every user can write to it "
            f"(mode {stat.S_IMODE(info.st_mode):04o}); run chmod o-w {path}"
        )


def _parse(path: str, text: bytes, known_keys: frozenset[str]) -> dict[str, object]:
    import tomllib  # takes milliseconds, and most processes have no file

    try:
        values: dict[str, object] = tomllib.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and TOMLDecodeError are ValueErrors
        reason = "its values are nested too deep" if isinstance(error, RecursionError) else str(error)
        raise InvalidArgument(f"the configuration {path} is not valid TOML: {reason}") from None
    for key in sorted(values.keys() - known_keys):
        raise InvalidArgument(f"the configuration {path} has an unknown key {key!r}; {nearest(key, known_keys)}")
    return values


def nearest(name: str, known: frozenset[str]) -> str:
    """Return a hint for an unknown name: the most similar known one, or the command that lists all."""
    from difflib import get_close_matches

    by_lower_case = {one.lower(): one for one in sorted(known)}
    found = get_close_matches(name.lower(), by_lower_case, 1, 0.7)
    return f"did you mean {by_lower_case[found[0]]!r}?" if found else "`nnfmq config show` lists the known ones"
