"""Knowledge distillation: a classifier that learns from a finished classifier beside the labels.

The teacher's outputs for the training samples are computed once and kept on disk.

Letters: B samples, C classes, L layers of the student, M layers of the teacher, H hidden width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from isobatch.core.errors import NotHereError, UserError, refuse
from isobatch.core.number_ranges import AboveZero, Share
from isobatch.models import hub
from isobatch.models.base import Batch, Loss, StepContext, Teacher
from isobatch.models.classification.task import Classifier, ClassifierOptions
from isobatch.models.encoder import encoders, evaluation, problems

if TYPE_CHECKING:
    from torch import Tensor, nn

    from isobatch.core.facts import Facts
    from isobatch.models.protocols import Batches


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillationOptions(ClassifierOptions):
    """The flags of distillation."""

    teacher: str | None = None
    """The classifier to learn from: a run, a folder or a hub id."""
    temperature: AboveZero = 2.0
    """Softens both models' probabilities (Hinton et al. 2015)."""
    kd_weight: Share = 0.5
    """Part of the loss that comes from the teacher's logits; the rest is from the labels."""
    distill_hidden: bool = True
    """Also follow the teacher's first token through its layers (Sun et al. 2019, patient distillation). Where
    words are tagged, the first token says nothing of them: then on is off."""


class DistilledClassifier(Classifier):
    """A classifier that learns from labels and, if there is one, from a teacher.

    loss = (1 - w) L(labels) + w S(teacher) + hidden. L and S are the problem's own losses, of classes CE and
    T^2 KL(teacher || student at temperature T); `hidden` is the mean over layers of the squared distance
    between the normalised states of the first token.
    """

    Options: ClassVar[type] = DistillationOptions
    initial_model_option: ClassVar[str] = "teacher"
    """The option that names the model whose weights training starts from."""

    @classmethod
    def complete(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """--model defaults to the model of `initial_model_option`; folders become whole paths."""
        folders = {n: Path(v).expanduser() for n in ("teacher", "pruned") if (v := values.get(n)) is not None}
        found = {name: str(path.resolve()) for name, path in folders.items() if path.is_dir()}
        asked = cls.initial_model_option
        if (given := found.get(asked, values.get(asked))) is not None:
            with contextlib.suppress(NotHereError):  # where it is, this is asked again
                found["model"] = hub.resolve_model(str(given), f"--{asked}")
        return {**super().complete({**values, **found}), **found}

    @property
    def teacher_name(self) -> str | None:
        """--teacher, else --model if it is a finished classifier, else None: no teacher."""
        if self.options.teacher is not None:
            return str(self.options.teacher)
        return self._model_name if is_classifier(self._model_name, self.recipe.revision) else None

    def check(self) -> None:
        if given := getattr(self.options, self.initial_model_option):
            hub.resolve_model(given, f"--{self.initial_model_option}")
        if (config := self._initial_config()) is not None:
            encoders.sizes_from_config(config, self._model_name)
        super().check()
        path, student = self._teacher_path(), self._model_name
        if path is None or (hub.is_id(path) and not Path(path).is_dir() and hub.snapshot(path) is None):
            return
        teacher = hub.load_config(path, None, "--teacher")
        widths = {one.get("hidden_size") or one.get("dim") for one in (config or {}, teacher)}
        differs = path != student and hub.tokenizer_vocabulary(student) != hub.tokenizer_vocabulary(path)
        headless = "has no classification head: train one with `auto --task classifier`"
        strange = f"its tokenizer is not that of {student}: both must read the same tokens"
        wider = f"{self.teacher_name} and {student} have states of different width: use --distill-hidden off"
        wrong = {
            f"the teacher {path} {headless}": not is_classifier(path, None),
            f"the teacher {path}: {strange}": differs,
            f"--distill-hidden on: {wider}": self.options.distill_hidden and len(widths) > 1,
        }
        refuse(wrong)

    def fetch(self) -> None:
        super().fetch()
        if (path := self._teacher_path()) is not None:
            hub.fetch_weights(path, None, "--teacher")

    def _teacher_path(self) -> str | None:
        return None if self.teacher_name is None else hub.resolve_model(self.teacher_name, "--teacher")

    def _classifier_config(self, facts: Facts) -> Any:
        """Raises UserError unless the teacher has exactly this data's labels, in this order."""
        if (path := self._teacher_path()) is not None:
            usual = {"id2label": {0: "LABEL_0", 1: "LABEL_1"}}  # transformers leaves them out
            here, there = problems.of_facts(facts), problems.of_config(usual | hub.load_config(path, None))
            if (here.name, here.labels) != (there.name, there.labels):
                raise UserError(
                    f"the teacher {path} knows the classes {', '.join(there.labels[:8])}, and the data has"
                    f" {', '.join(here.labels[:8])}: give a classifier trained on this data"
                )
        return super()._classifier_config(facts)

    def fewest_steps(self, facts: Facts) -> int:
        """A student that begins with a trained head needs no more than --least-steps."""
        return int(self.recipe.least_steps) if self.teacher_name else super().fewest_steps(facts)

    def teacher(self) -> Teacher | None:
        path = self._teacher_path()
        if path is None:
            return None
        per_token = problems.of_config(hub.load_config(path, None)).per_token
        hidden = self.options.distill_hidden and not per_token

        def answers(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
            logits, states = self.logits_and_states(model, batch, hidden)
            return {"logits": logits} | ({"states": states.half()} if states is not None else {})

        identity = f"{hub.weights_hash(path)} {'states' if hidden else 'logits'}"
        return Teacher(identity, lambda _: encoders.open_classifier(path), answers, per_token=per_token)

    def against_teacher(self, run: evaluation.Runner, batches: Batches) -> dict[str, float]:
        """Accuracy of the teacher, and how the finished model stands to it; nothing without one."""
        if (path := self._teacher_path()) is None:
            return {}
        mine = evaluation.predict(run, batches())
        teacher = evaluation.predict(evaluation.open_runner(path), batches())
        problem = problems.of_config(hub.load_config(path, None))
        ours, theirs = problem.evidence(mine), problem.evidence(teacher)
        found = {f"baseline_{problem.headline}": problem.score(theirs)}
        return found | {problem.test_name: problem.difference(ours, theirs).p}

    def logits_and_states(self, model: nn.Module, batch: Batch, states: bool) -> tuple[Tensor, Tensor | None]:
        """Logits (B, C) and, if `states`, the first token's state after each layer (B, L, H)."""
        import torch

        found = self.forward(model, batch, states)
        first = torch.stack([h[:, 0] for h in found.hidden_states[1:]], dim=1) if states else None
        return found.logits.float(), first

    def loss(self, model: nn.Module, batch: Batch, step: StepContext) -> dict[str, Loss]:
        """batch: a classifier's, and from the teacher teacher.logits (B, C), teacher.states (B, M, H)."""
        if "teacher.logits" not in batch:
            return super().loss(model, batch, step)
        weight, hidden = self.options.kd_weight, "teacher.states" in batch
        logits_BC, states = self.logits_and_states(model, batch, hidden)
        nll = self.label_loss(model, logits_BC, batch)
        temperature, teacher = self.options.temperature, batch["teacher.logits"]
        soft = problems.of_model(model).soft_loss(logits_BC, teacher, batch, temperature)
        found = {"labels": Loss(nll.sum * (1 - weight), nll.unit)}
        found["distillation"] = Loss(soft.sum * weight, soft.unit)
        if states is not None:
            found["hidden"] = Loss(hidden_state_loss(states, batch["teacher.states"]), "sample")
        return found


def hidden_state_loss(student_BLH: Tensor, teacher_BMH: Tensor) -> Tensor:
    """Sum over samples of the mean over layers of |s/|s| - t/|t||^2 (Sun et al. 2019).

    Each student layer is matched with one of the teacher's, evenly spaced, the last with the last.
    """
    import torch
    from torch.nn import functional as F

    ours, theirs = student_BLH.shape[1], teacher_BMH.shape[1]
    matched_layers = -(-torch.arange(1, ours + 1, device=student_BLH.device) * theirs // ours) - 1
    student = F.normalize(student_BLH, dim=-1)
    teacher = F.normalize(teacher_BMH.float()[:, matched_layers], dim=-1)
    return (student - teacher).square().sum(-1).mean(-1).sum()


def is_classifier(name: str, revision: str | None) -> bool:
    """Whether a saved model has a classification head."""
    if not (Path(hub.local_path_or_id(name, revision)) / "config.json").is_file():
        return False
    architectures = hub.load_config(name, revision).get("architectures") or []
    heads = tuple(f"For{problem.head}" for problem in problems.PROBLEMS.values())
    return any(str(kind).endswith(heads) for kind in architectures)
