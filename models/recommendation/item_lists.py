"""A trained recommender for commands: `Recommendations` whose errors are the user's, in one line."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from isobatch.core.errors import UserError
from isobatch.models import hub
from isobatch.models.recommendation import recommendations

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


class RecommendationLists:
    """See `models/protocols.py::ItemLists`."""

    def __init__(self, final: Path, by: str = recommendations.MODEL) -> None:
        with hub.reading(final), _users_errors(f"--by {by}: "):
            self._found = recommendations.open_recommendations(final, by)
        self.by = self._found.by

    @property
    def users(self) -> list[str]:
        return self._found.users

    def recommend(self, user: str, top: int) -> list[dict[str, Any]]:
        with _users_errors():
            return self._found.recommend(user, top)

    def for_items(self, items: Sequence[str], top: int) -> list[dict[str, Any]]:
        with _users_errors():
            return self._found.for_items(items, top)

    def restrict(self, only: Sequence[str] | None, without: Sequence[str], with_seen: bool) -> list[str]:
        return self._found.restrict(only, without, with_seen)

    @property
    def offered(self) -> int:
        return self._found.offered

    def knows_item(self, item: str) -> bool:
        return self._found.knows_item(item)

    def knows_user(self, user: str) -> bool:
        return self._found.knows_user(user)

    def remarks(self, items: Sequence[str]) -> list[str]:
        with _users_errors():
            return self._found.remarks(items)

    def split_items(self, text: str) -> list[str]:
        return self._found.split_items(text)

    def split_users(self, text: str) -> list[str]:
        return self._found.split_users(text)

    def similar_to_all(self, top: int) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        return self._found.similar_to_all(top)

    def recommend_to_all(self, top: int) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        return self._found.recommend_to_all(top)

    def similar(self, item: str, top: int) -> list[dict[str, Any]]:
        with _users_errors():
            return self._found.similar(item, top)


@contextlib.contextmanager
def _users_errors(before: str = "") -> Iterator[None]:
    try:
        yield
    except recommendations.RecommendationError as error:
        raise UserError(f"{before}{error}") from None
