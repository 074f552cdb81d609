"""Hooks that fail, or ask for what they may not, at a known place."""

from __future__ import annotations

from typing import Any

import isobatch


class Raises(isobatch.Hook):
    def on_figures(self, figures: Any) -> Any:
        if figures.step == 19:
            raise ValueError("as it was told to")
        return set()


class StopsOnce(isobatch.Hook):
    """Asks for a stop after step 10, and not again once it was resumed."""

    done = False

    def due(self, step: int) -> bool:
        return step == 10

    def at_pause(self, state: Any, step: int, asked: Any) -> Any:
        return {"save", "stop"} if step == 10 and not self.done else set()

    def state(self) -> dict[str, Any]:
        return {"stopped": True}

    def load(self, state: dict[str, Any], tensors: Any) -> None:
        self.done = state["stopped"]


class Looks(isobatch.Hook):
    def on_gradients(self, state: Any, step: int) -> Any:
        grads = [p.grad for p in state.model.parameters() if p.grad is not None]
        return {"gradients_seen": len(grads)}
