"""Learning from a teacher: a finished classifier whose answers to the training samples are kept on disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from isobatch.core.errors import UserError
from isobatch.core.number_ranges import Share, Temperature
from isobatch.models import hub
from isobatch.models.base import Batch, Loss, StepContext, Teacher
from isobatch.models.classification.task import Classifier
from isobatch.models.encoder import encoders

if TYPE_CHECKING:
    from torch import Tensor, nn

RUN_FILES = ("recipe.json", "facts.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillationOptions:
    """The fields of learning from a teacher."""

    teacher: str | None = None
    """The classifier to learn from: a run, a folder or a hub id."""
    temperature: Temperature = 2.0
    """Softens both models' probabilities (Hinton et al. 2015)."""
    kd_weight: Share = 0.5
    """Part of the loss that comes from the teacher's logits; the rest is from the labels."""
    distill_hidden: bool = True
    """Also follow the teacher's first token through its layers (Sun et al. 2019, patient distillation)."""


class Distilled(Classifier):
    """A classifier that learns from labels and, where there is one, from a teacher.

    loss = (1 - w) CE(labels) + w T^2 KL(teacher || student at temperature T) + hidden, where `hidden` is the
    mean over layers of the squared distance between the normalised states of the first token.
    """

    Options: ClassVar[type] = DistillationOptions
    teaches: ClassVar[str] = "teacher"
    """The option that names the model to begin with."""

    @classmethod
    def complete(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """The model to begin with is the teacher, or what `teaches` says, unless --model says otherwise."""
        found: dict[str, Any] = {}
        for name in ("teacher", "pruned"):
            if values.get(name) is not None and Path(values[name]).expanduser().is_dir():
                found[name] = str(Path(values[name]).expanduser().resolve())  # a run may be verified anywhere
        given = found.get(cls.teaches, values.get(cls.teaches))
        return found if given is None else {**found, "model": saved_model(str(given), f"--{cls.teaches}")}

    @property
    def teacher_word(self) -> str | None:
        """Whom to learn from: --teacher, else the finished classifier that the run begins with, if any."""
        if self.options.teacher is not None:
            return str(self.options.teacher)
        return self._name if is_finished(self._name, self.recipe.revision) else None

    @property
    def _teacher_flag(self) -> str:
        """The flag by which the user named the teacher, and what was given."""
        for name in ("teacher", "pruned"):
            if (given := getattr(self.options, name, None)) is not None:
                return f"--{name} {given}"
        return f"--model {self._name}"

    def check(self) -> None:
        super().check()
        place = self._teacher_place()
        if place is None:
            return
        if hub.snapshot(place) is None and hub.is_id(place) and not Path(place).is_dir():
            return
        if not is_finished(place, None):
            raise UserError(
                f"{self._teacher_flag}: has no classification head: train one with `auto --task classifier`"
            )
        if place == self._name:
            return
        if _vocabulary(place) != _vocabulary(self._name):
            raise UserError(
                f"{self._teacher_flag}: its tokenizer is not that of {self._name}: teacher and"
                " student must read the same tokens"
            )
        if self.options.distill_hidden and self._widths_differ(place):
            raise UserError(
                f"--distill-hidden on: {self.teacher_word} and {self._name} have states of different"
                " width: use --distill-hidden off"
            )

    def fetch(self) -> None:
        super().fetch()
        if (place := self._teacher_place()) is not None:
            hub.fetch_weights(place, None, "--teacher")

    def _teacher_place(self) -> str | None:
        return None if self.teacher_word is None else saved_model(self.teacher_word, "--teacher")

    def _widths_differ(self, place: str) -> bool:
        mine, its = self._raw_config(), hub.load_config(place, None)
        return width(mine) != width(its)

    def _config(self, facts: Any) -> Any:
        if (place := self._teacher_place()) is not None:
            _refuse_other_labels(place, self._teacher_flag, facts.extra["labels"])
        return super()._config(facts)

    def teacher(self) -> Teacher | None:
        place, hidden = self._teacher_place(), self.options.distill_hidden
        if place is None:
            return None

        def answers(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
            logits, states = self.answer(model, batch, hidden)
            return {"logits": logits} | ({"states": states.half()} if states is not None else {})

        identity = f"{weights_hash(place)} {'states' if hidden else 'logits'}"
        return Teacher(identity, lambda facts: encoders.open_classifier(place), answers)

    def answer(self, model: nn.Module, batch: Batch, states: bool) -> tuple[Tensor, Tensor | None]:
        """Logits (B, C), and the first token's state after each layer (B, L, H) where asked."""
        import torch

        found = self.outputs(model, batch, states)
        if not states:
            return found.logits.float(), None
        return found.logits.float(), torch.stack([h[:, 0] for h in found.hidden_states[1:]], dim=1)

    def loss(self, model: nn.Module, batch: Batch, step: StepContext) -> dict[str, Loss]:
        """batch: as a classifier's, and teacher.logits (B, C), teacher.states (B, L, H)."""
        from torch.nn import functional as F

        if "teacher.logits" not in batch:
            return super().loss(model, batch, step)
        weight, hidden = self.options.kd_weight, "teacher.states" in batch
        logits_BC, states = self.answer(model, batch, hidden)
        labels = F.cross_entropy(logits_BC, batch["label"], reduction="sum") * (1 - weight)
        logits = softened(logits_BC, batch["teacher.logits"], self.options.temperature) * weight
        found = {"labels": Loss(labels, "sample"), "distillation": Loss(logits, "sample")}
        if states is not None:
            found["hidden"] = Loss(followed(states, batch["teacher.states"]), "sample")
        return found


def softened(student_BC: Tensor, teacher_BC: Tensor, temperature: float) -> Tensor:
    """Sum over samples of T^2 KL(teacher || student), both softened by T (Hinton et al. 2015)."""
    from torch.nn import functional as F

    student, teacher = (F.log_softmax(x / temperature, -1) for x in (student_BC, teacher_BC.float()))
    return F.kl_div(student, teacher, reduction="sum", log_target=True) * temperature**2


def followed(student_BLH: Tensor, teacher_BMH: Tensor) -> Tensor:
    """Sum over samples of the mean over layers of |s/|s| - t/|t||^2 (Sun et al. 2019).

    A teacher with more layers is followed at evenly spaced ones, the last always.
    """
    import torch
    from torch.nn import functional as F

    count, most = student_BLH.shape[1], teacher_BMH.shape[1]
    places = -(-torch.arange(1, count + 1, device=student_BLH.device) * most // count) - 1
    student, teacher = F.normalize(student_BLH, dim=-1), F.normalize(teacher_BMH.float()[:, places], dim=-1)
    return (student - teacher).square().sum(-1).mean(-1).sum()


def saved_model(word: str, flag: str) -> str:
    """The folder of a finished run's model; else the word itself, a folder or a hub id."""
    folder = Path(word).expanduser()
    if not all((folder / name).is_file() for name in RUN_FILES):
        if folder.is_dir():
            return word
        if not hub.is_id(word):
            raise UserError(f"{flag} {word}: is no run, folder or hub id (owner/name)")
        hub.require_available(word, None, flag)
        return word
    if not (folder / "final" / "config.json").is_file():
        raise UserError(f"{flag} {word}: that run has no final/ yet: finish it with `resume {word}`")
    return str(folder / "final")


def is_finished(name: str, revision: str | None) -> bool:
    """Whether a saved model is a classifier, not an encoder without a head."""
    if not (Path(hub.local_path_or_id(name, revision)) / "config.json").is_file():
        return False
    kinds = hub.load_config(name, revision).get("architectures") or []
    return any(str(kind).endswith("ForSequenceClassification") for kind in kinds)


def weights_hash(place: str) -> str:
    """Of a folder's weights and configuration; a hub id stands for itself."""
    folder = Path(hub.local_path_or_id(place, None))
    if not folder.is_dir():
        return place
    digest = hashlib.sha256()
    for file in sorted([*folder.glob("*.safetensors"), folder / "config.json"]):
        with file.open("rb") as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()[:16]


def width(config: Mapping[str, Any] | None) -> Any:
    """Of the hidden states, by whatever name."""
    return (config or {}).get("hidden_size") or (config or {}).get("dim")


def _refuse_other_labels(place: str, flag: str, labels: list[str]) -> None:
    named = hub.load_config(place, None).get("id2label") or {}
    found = [named[k] for k in sorted(named, key=int)]
    if found != list(labels):
        raise UserError(
            f"{flag}: knows the classes {', '.join(found[:8]) or 'LABEL_0, LABEL_1'}, and the data"
            f" has {', '.join(labels[:8])}: give a classifier trained on this data"
        )


def _vocabulary(name: str) -> Any:
    """What tells tokenizers apart: the tokens; None where that cannot be seen here."""
    file = Path(hub.local_path_or_id(name, None)) / "tokenizer.json"
    if not file.is_file():
        return None
    return json.loads(file.read_text(encoding="utf-8"))["model"].get("vocab")
