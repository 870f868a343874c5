"""Changes to models and to tables of libraries, each with its undo.

Tables are shared by loaded models, which may be unloaded in any order: a `SharedPatch` there ends with the last of its users.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, MutableMapping
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

_sharing = threading.RLock()  # the garbage collector may unload a model in any thread at any time


class SharedPatch:
    """A replacement for an entry of a table, which all users share."""

    def __init__(self, before: Any):
        self.before = before  # the replaced value; None if there was no entry
        self.users = 0  # `Patches` that are not closed


Shared = TypeVar("Shared", bound=SharedPatch)


class Patches:
    """Changes that `close`, or the end of a `with` block, undoes. A deep copy undoes the same changes of a copied model."""

    def __init__(self) -> None:
        self._undo: list[partial] = []  # not closures, which deepcopy does not copy

    def callback(self, undo: Callable, *args: Any) -> None:
        """Call `undo(*args)` at the end."""
        self._undo.append(partial(undo, *args))

    def add_hooks(self, *handles: Any) -> None:
        """Remove hooks at the end, such as those of `module.register_forward_hook(...)`."""
        for handle in handles:
            self.callback(handle.remove)

    def set_attr(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of an instance or a Python module. The undo restores the owner's previous one, or uncovers its class's."""
        undo = (setattr, owner, name, vars(owner)[name]) if name in vars(owner) else (_drop_attr, owner, name)
        self.callback(*undo)
        setattr(owner, name, value)

    def share_item(self, table: MutableMapping[Any, Any], key: Any, kind: type[Shared]) -> Shared:
        """Set `table[key]` to `kind(table.get(key))`, or use the one that is there already; return it."""
        with _sharing:
            found = table.get(key)
            patch = found if isinstance(found, kind) else kind(found)
            patch.users += 1
            table[key] = patch
        self.callback(_leave, table, key, patch)
        return patch

    def close(self) -> None:
        """Undo all changes, the last one first, also if one cannot be undone. Safe to call twice."""
        with ExitStack() as stack:
            for undo in self._undo:
                stack.callback(undo)
            self._undo = []

    def __enter__(self) -> Patches:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


def _drop_attr(owner: Any, name: str) -> None:
    vars(owner).pop(name, None)


def _leave(table: MutableMapping[Any, Any], key: Any, patch: SharedPatch) -> None:
    with _sharing:
        patch.users -= 1
        if patch.users or table.get(key) is not patch:
            return  # in use, or replaced by a later patch, whose undo skips this one
        before = patch.before
        while isinstance(before, SharedPatch) and not before.users:
            before = before.before
        if before is None or not isinstance(table, dict):
            del table[key]  # transformers' tables then show the built-in entry; another one is set again below
        if table.get(key) is not before:
            table[key] = before
