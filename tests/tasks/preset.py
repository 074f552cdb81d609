"""A small task whose presets set values of the plan beside those of the recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from isobatch.tests.tasks import failing

if TYPE_CHECKING:
    from collections.abc import Mapping


class Line(failing.Line):
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "quick": {"lr": 0.02, "precision": "16-mixed", "workers": 1, "prefetch": 4},
        "plain": {"lr": 0.02},
        "strict": {"precision": "fp16"},
        "idle": {"dropout": 0.3},
        "misspelt": {"wokers": 1},
        "wrong": {"workers": "many"},
    }
