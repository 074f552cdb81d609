"""A user's own hooks: ./file.py:Class of --hook, or what `isobatch.train` was given."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import sys
from collections.abc import Iterator, Sequence

from isobatch.core.errors import UserError
from isobatch.core.package import ROOT
from isobatch.core.recipe import HOOK_CODE, Recipe
from isobatch.engine.task_files import import_error, is_task_file, load_class, task_file, task_file_hash
from isobatch.engine.train.hooks import Hook, name_of

BUILT_IN = ROOT / "engine" / "hooks"
"""The folder of ours, each in a file that has its name."""
_given: dict[str, Hook | type[Hook]] = {}
"""Word of --hook -> what this process has for it: no file is imported for that."""


@contextlib.contextmanager
def hooks_given(hooks: Sequence[Hook | type[Hook]]) -> Iterator[tuple[str, ...]]:
    """Within it these hooks are those of the words that it gives: a class's file, an object's name."""
    words = tuple(map(_word_for, hooks))
    _given.update(zip(words, hooks, strict=True))
    try:
        yield words
    finally:
        _given.clear()


def _word_for(hook: Hook | type[Hook]) -> str:
    kind = hook if isinstance(hook, type) else type(hook)
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return f"{file}:{kind.__qualname__}" if hook is kind and file else kind.name or kind.__name__.lower()


def load_hooks(words: Sequence[str]) -> list[Hook]:
    """The hooks of --hook, in this order. Raises UserError or UserCodeError."""
    found = [_load_hook(word) for word in words]
    taken = {path.stem.replace("_", "") for path in BUILT_IN.glob("*.py")}
    for word, name in zip(words, map(name_of, found), strict=True):
        if name in taken or not name.isidentifier():
            said = "another hook is called" if name in taken else "no word is"
            raise UserError(f"--hook {word}: {said} {name}: give its class another `name`")
        taken.add(name)
    methods = [method for method in dir(Hook) if method[0] != "_"]
    for word, hook in zip(words, found, strict=True):
        for own in vars(type(hook)).keys() - set(methods):
            if near := difflib.get_close_matches(own, methods, cutoff=0.85):
                raise UserError(f"--hook {word}: nothing calls {own}; did you mean {near[0]}?")
    return found


def _load_hook(word: str) -> Hook:
    given = _given.get(word)
    if isinstance(given, Hook):
        return given
    if given is None and not is_task_file(word):
        raise UserError(
            f"--hook {word}: is no file; several processes, or a resume, need ./file.py:Class, made without"
            " arguments"
        )
    kind = given or load_class(f"--hook {word}", word, Hook)
    try:
        return kind()
    except Exception as error:
        raise import_error(f"--hook {word}", task_file(word).resolve(), error) from None


def with_learning_hooks(recipe: Recipe, words: Sequence[str]) -> Recipe:
    """The recipe with the code of those hooks that change what is learnt. Raises as `load_hooks`."""
    code = {
        name_of(hook): task_file_hash(word)
        for word, hook in zip(words, load_hooks(words), strict=True)
        if hook.changes_learning
    }
    options = {name: value for name, value in recipe.options.items() if name != HOOK_CODE}
    return dataclasses.replace(recipe, options=options | ({HOOK_CODE: code} if code else {}))
