"""The workload classifier as users choose it: all weights train, or an adapter and the classification head.

isobatch auto --task classifier --data FOLDER --model FOLDER --adapter lora
"""

from __future__ import annotations

import dataclasses
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.core.flags import flags_of
from isobatch.models import lora, saving
from isobatch.models.classification.task import (
    PRESETS,
    Classifier,
    ClassifierOptions,
    onnx_variants,
    summary_of,
)
from isobatch.models.encoder import encoders, evaluation
from isobatch.models.encoder import export as exporting
from isobatch.models.encoder.evaluation import ModelVariant
from isobatch.models.model_card import ModelDescription

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import nn

    from isobatch.core.facts import Facts
    from isobatch.models.base import Batch, ModelSize

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
        found = dict(super().unread())
        if self._is_adapted and self.options.lora_dropout:
            found.pop("noise", None)
        return found

    def check(self) -> None:
        super().check()
        if self._is_adapted and self._model_name in PRESETS:
            raise UserError(
                f"--adapter {self.options.adapter}: a model from scratch has nothing to adapt; give --model a"
                " folder or hub id"
            )
        for flag in flags_of(AdaptedClassifierOptions, "").values():
            given = getattr(self.options, flag.name) != flag.default
            if given and not self._is_adapted and flag.name.startswith("lora_"):
                raise UserError(
                    f"{flag.spelling}: means nothing without an adapter: add --adapter lora, or leave it out"
                )

    def build_model(self, facts: Facts) -> nn.Module:
        model = super().build_model(facts)
        if self._is_adapted:
            self._add_adapter(model)
        return model

    def _add_adapter(self, model: nn.Module) -> None:
        folder = Path(self._model_name).expanduser()
        base = str(folder.resolve()) if folder.is_dir() else self._model_name
        head = head_modules(model)
        lora.add_adapter(model, self.options, base, self.recipe.revision, task_type="SEQ_CLS", head=head)

    def model_size(self, facts: Facts) -> ModelSize:
        """Counted on a model without storage (device meta), with its adapter."""
        import torch

        size = super().model_size(facts)
        if not self._is_adapted:
            return size
        with torch.device("meta"):
            model = encoders.new_classifier(self._classifier_config(facts))
            self._add_adapter(model)
        counts = [(p.numel(), p.requires_grad) for p in model.parameters()]
        total, trainable = sum(n for n, _ in counts), sum(n for n, trains in counts if trains)
        adapted = [m for m in model.modules() if hasattr(m, "lora_A")]
        share = f"{trainable:,} of {total:,} parameters ({trainable / total:.2%})"
        return dataclasses.replace(
            size,
            parameters=total,
            trainable=trainable,
            adapter_inputs=sum(m.in_features for m in adapted) // max(size.layers, 1),
            keyed_dropout=self.recipe.noise == "keyed"
            and (size.keyed_dropout or self.options.lora_dropout > 0),
            remark=f"{self.options.adapter} on {len(adapted)} matrices, and the head, train {share}",
        )

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

    def variants(self, final: Path, exports: Path) -> list[ModelVariant]:
        if not self._is_adapted:
            return super().variants(final, exports)
        file = final / lora.ADAPTER_FILE
        return [ModelVariant("torch fp32", "torch", final, file, final), *onnx_variants(final, exports)]

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
