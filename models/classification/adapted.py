"""The workload classifier as users choose it: all weights train, or an adapter and the classification head.

isobatch auto --task classifier --data FOLDER --model FOLDER --adapter lora
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from isobatch.core import atomic_files
from isobatch.models import lora, saving
from isobatch.models.classification.task import PRESETS, Classifier, ClassifierOptions, summary_of
from isobatch.models.encoder import encoders, evaluation
from isobatch.models.encoder import export as exporting
from isobatch.models.model_card import ModelDescription

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from isobatch.core.facts import Facts
    from isobatch.models.base import Batch

PEFT_USAGE = """\
import json
from peft import AutoPeftModelForSequenceClassification
from transformers import AutoTokenizer

names, tokenizer = list(json.load(open("labels.json"))), AutoTokenizer.from_pretrained(".")
model = AutoPeftModelForSequenceClassification.from_pretrained(".", num_labels=len(names)).eval()
inputs = tokenizer({text}, truncation=True, max_length={length}, return_tensors="pt")
print(names[int(model(**inputs).logits.argmax())])
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptedClassifierOptions(lora.LoRAOptions, ClassifierOptions):
    """The flags of the classifier, among them those of its adapter."""

    adapter: Literal["none", "lora", "dora"] = "none"
    """Train few weights beside the model's own, which stay as they are, and the classification head."""


class AdaptedClassifier(Classifier):
    """A classifier of which all weights train, or with --adapter few of them and the head.

    final/ of an adapter opens in peft, and in transformers where peft is installed.
    """

    Options: ClassVar[type] = AdaptedClassifierOptions

    @property
    def _is_adapted(self) -> bool:
        return bool(self.options.adapter != "none")

    @property
    def exports(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("merged", "onnx") if self._is_adapted else super().exports

    def unread(self) -> Mapping[str, str]:
        keeps = self._is_adapted and self.options.lora_dropout
        return {name: why for name, why in super().unread().items() if not (keeps and name == "noise")}

    def check(self) -> None:
        super().check()
        lora.check_options(self.options, pretrained=self._model_name not in PRESETS)

    def adapt(self, model: Any) -> None:
        if self._is_adapted:
            name, revision, head = self._model_name, self.recipe.revision, head_modules(model)
            lora.add_adapter(model, self.options, name, revision, task_type="SEQ_CLS", head=head)

    def _has_dropout(self, config: Any) -> bool:
        return super()._has_dropout(config) or (self._is_adapted and self.options.lora_dropout > 0)

    def export(self, model: Any, folder: Path, facts: Facts) -> None:
        """Of an adapter: the folder that peft opens, with the head, the classes' names and the tokenizer."""
        if not self._is_adapted:
            return super().export(model, folder, facts)
        lora.save_adapter(model, folder, head_modules(model))
        names = {name: number for number, name in enumerate(facts.extra["labels"])}
        atomic_files.write_json(folder / encoders.LABELS_FILE, names)
        saving.save_tokenizer(model.config.to_dict(), facts, folder)
        return None

    def export_as(
        self, kind: str, final: Path, folder: Path, facts: Facts, batches: Callable[[], Iterable[Batch]]
    ) -> Mapping[str, Any]:
        """merged: base and adapter as one model, for plain transformers; the others as of any classifier."""
        if not self._is_adapted:
            return super().export_as(kind, final, folder, facts, batches)
        if kind != "merged":
            with tempfile.TemporaryDirectory() as merged_folder:
                saving.save(encoders.open_classifier(str(final)), facts, Path(merged_folder))
                return super().export_as(kind, Path(merged_folder), folder, facts, batches)
        saving.save(encoders.open_classifier(str(final)), facts, folder)
        trained, merged = (
            evaluation.predict(evaluation.torch_runner(model), batches())
            for model in (encoders.open_adapted(final), encoders.open_classifier(str(folder)))
        )
        return exporting.check_agreement(kind, trained, merged)

    def describe_model(self, final: Path, facts: Facts) -> ModelDescription:
        if not (final / lora.CONFIG_FILE).is_file():
            return super().describe_model(final, facts)
        text = evaluation.example_texts(facts)
        return ModelDescription(
            title="Text classifier, an adapter",
            summary=summary_of(facts.extra["labels"]),
            usage=PEFT_USAGE.format(text=text, length=self.recipe.max_length),
            remark="beside the base model; `isobatch export RUN --to merged` writes both as one",
            hub_fields={"library_name": "peft", "pipeline_tag": "text-classification"},
        )


def head_modules(model: Any) -> list[str]:
    """Names of the modules of a classifier that are its head: what is outside the encoder, and its pooler."""
    prefix = model.base_model_prefix
    pooler = f"{prefix}.pooler"
    names = [*(name for name, _ in model.named_children() if name != prefix), pooler]
    modules = dict(model.named_modules())
    return [name for name in names if name in modules and any(True for _ in modules[name].parameters())]
