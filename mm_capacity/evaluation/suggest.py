"""Did-you-mean: one line that names the wrong value, the nearest right one and all of them."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import Any

from mm_capacity.errors import UserError

MAX_LISTED = 20


class UnknownNameError(UserError):
    """A name that is not one of the known ones: a slip of the user, not of the world."""


def unknown(kind: str, value: object, known: Collection[str]) -> UnknownNameError:
    """The error for a name that is not one of ``known``.

    Args:
        kind: what the name should have been, in the singular ("policy").
        value: what was given.
        known: every name that would have worked.
    """
    names = sorted(known)
    folded = {name.casefold(): name for name in reversed(names)}
    near = difflib.get_close_matches(str(value).casefold(), folded, n=1, cutoff=0.6)
    if not names:
        return UnknownNameError(f"unknown {kind} {value!r}: there is none")
    hint = f" - did you mean {folded[near[0]]!r}?" if near else "."
    listed = ", ".join(names[:MAX_LISTED])
    if len(names) > MAX_LISTED:
        listed += f", ... ({len(names)} in all)"
    return UnknownNameError(f"unknown {kind} {value!r}{hint} Known: {listed}")


def check_known(kind: str, value: Any, known: Collection[str]) -> str:
    """Returns ``value`` when it is known.

    Raises:
        UserError: it is not.
    """
    if not isinstance(value, str) or value not in known:
        raise unknown(kind, value, known)
    return value
