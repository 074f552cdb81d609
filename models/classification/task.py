"""The workload classifier: any transformers encoder with a classification head, on texts or pairs of texts.

python -m launch auto --task classifier --data FOLDER --model distilbert/distilbert-base-uncased
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from isobatch.core import number_ranges
from isobatch.core.errors import UserError
from isobatch.core.package import table_beside
from isobatch.core.recipe import DEMO, Recipe
from isobatch.models import hub, saving
from isobatch.models.base import Batch, Loss, ModelSize, Rows, StepContext, Sum, Task
from isobatch.models.encoder import baselines as simple
from isobatch.models.encoder import calibration, drift, encoders, evaluation, int8, prediction, problems
from isobatch.models.encoder import export as exporting
from isobatch.models.encoder.last_layer import compute_first_alone
from isobatch.models.encoder.report import ClassifierReport
from isobatch.models.model_card import ModelDescription, usage_lines

if TYPE_CHECKING:
    from torch import Tensor, nn

    from isobatch.core.facts import Facts
    from isobatch.models.protocols import Batches

SITUATIONS = table_beside(__file__, "situations")
"""Workload -> situation -> values of the recipe."""
PRESETS: Mapping[str, Mapping[str, Any]] = SITUATIONS["presets"]
"""Sizes of BERTs to train from scratch."""
SEEN = 200
"""Samples of a class in training, on the mean, that a new head needs at least."""
FROM_SCRATCH = 0.128
"""The learning rate of a model with random weights, times its width: Adam's is to fall with the width (Yang
et al. 2021, "Tuning Large Neural Networks via Zero-Shot Hyperparameter Transfer"); 1e-3 for the demo's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassifierOptions:
    """The flags of every workload that trains a classifier."""

    best_metric: Literal[
        "auto", "accuracy", "f1", "f1_macro", "f1_micro", "mcc", "subset_accuracy", "spearman", "pearson",
        "mae", "rmse", "loss",
    ] = "auto"  # fmt: skip
    """What --patience and the best checkpoint follow. auto: accuracy of classes, f1_micro of multi-label and
    of entities, spearman of scores. f1 is that of the second of two classes, f1_macro the mean over classes,
    labels or types, f1_micro that of all together, mcc Matthews' correlation."""
    focal: number_ranges.Rate = 0.0
    """gamma of the focal loss: samples that are answered well count less, by (1 - p)^gamma; 2 is usual, 0 is
    cross-entropy."""
    regression_loss: Literal["mse", "huber"] = "mse"
    """Of scores: the squared error, or Huber's with delta 1, which outliers move less."""
    head_rate: number_ranges.AboveZero = 10.0
    """What --lr is multiplied by for new parameters, which the checkpoint does not have: a head's where the
    model was trained without one or for other classes; they must go far where the others are to stay near."""


class Classifier(Task):
    """A class, any number of labels, or a score of each sample, or a tag of each word, by the logits of the
    model's own head. Losses and metrics are those of models/encoder/problems.py.
    """

    Options: ClassVar[type] = ClassifierOptions
    data: ClassVar[type | str | None] = "data.labelled.dataset:Labelled"
    defaults, fast, demo = (SITUATIONS["classifier"][name] for name in ("defaults", "fast", "demo"))
    measured_files: ClassVar[tuple[str, ...]] = (calibration.FILE,)
    follow_ups: ClassVar = ('predict {run} "a" "b"', "report {run}", "auto --task pruning --teacher {run}")
    exports: ClassVar[tuple[str, ...]] = ("hf", "dense", "onnx", int8.DYNAMIC, int8.STATIC)
    forms: ClassVar[tuple[str, ...]] = ("torch", *exporting.ONNX_FILES)

    def __init__(self, recipe: Recipe, options: Any) -> None:
        super().__init__(recipe, options)
        self.monitor = self._monitor(problems.Classes)
        self._new_parameters = set[str]()
        """The names of those that the checkpoint from which training begins does not have."""

    def _monitor(self, problem: type[problems.Problem] | problems.Problem) -> tuple[str, str]:
        name = problem.headline if self.options.best_metric == "auto" else self.options.best_metric
        return name, "min" if name in ("loss", "mae", "rmse") else "max"

    def monitor_of(self, facts: Facts) -> tuple[str, str]:
        return self._monitor(problems.of_facts(facts))

    @classmethod
    def complete(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """A model from scratch has a learning rate of its own; one that reads less limits --max-length."""
        layer = {**cls.defaults, **(cls.demo if values.get("data", DEMO) == DEMO else {})}
        sizes = PRESETS.get(str(values.get("model", layer["model"])))
        if sizes is not None:
            return {"lr": FROM_SCRATCH / sizes.get("hidden_size", 768)}
        usual = {**layer, **(cls.fast if values.get("mode") == "fast" else {})}
        return hub.shorter_length(values, usual, saving.max_input_tokens)

    @property
    def _model_name(self) -> str:
        return str(self.recipe.model)

    def unread(self) -> Mapping[str, str]:
        found = hub.unread_revision(self._model_name, self.recipe.tokenizer)
        return found | ({"noise": "there is no dropout"} if self.recipe.dropout == 0 else {})

    def check(self) -> None:
        name, length = self._model_name, self.recipe.max_length
        if length < 3:
            raise UserError(f"--max-length {length}: a text needs at least 3 tokens, two of them special")
        if self.options.focal and self.recipe.label_smoothing:
            raise UserError("--focal: is of labels as they are: leave out --label-smoothing, or --focal")
        if (metric := self.options.best_metric) not in ("auto", "accuracy") and not self.recipe.patience:
            raise UserError(
                f"--best-metric {metric}: it chooses the best checkpoint with --load-best-model-at-end, or"
                " with --patience 3, which stops early too"
            )
        read = (self.recipe.revision, self.recipe.tokenizer)
        if name not in PRESETS and (config := hub.check_model(name, *read, PRESETS)) is not None:
            encoders.check_type(name, config)
            hub.check_length(name, saving.max_input_tokens(config), length)

    def _initial_config(self) -> dict[str, Any] | None:
        """The config.json of --model, or as much as a preset sets; None if it is not in the cache yet."""
        if self._model_name in PRESETS:
            return {"model_type": "bert", **PRESETS[self._model_name]}
        if hub.is_id(self._model_name) and hub.snapshot(self._model_name, self.recipe.revision) is None:
            return None
        return hub.load_config(self._model_name, self.recipe.revision)

    def _classifier_config(self, facts: Facts) -> Any:
        """The transformers config with this data's classes, and with the recipe's dropout if it has one."""
        from transformers import AutoConfig, BertConfig

        labels, problem = facts.extra["labels"], problems.of_facts(facts)
        huber = self.options.regression_loss == "huber"
        problem.check(self.options.best_metric, self.recipe.label_smoothing, huber, self.options.focal)
        if self.options.best_metric == "f1" and len(labels) != 2:
            raise UserError(f"--best-metric f1: the data has {len(labels)} classes: f1_macro is their mean")
        named: dict[str, Any] = {"id2label": dict(enumerate(labels)), "problem_type": problem.problem_type}
        named["label2id"] = {label: number for number, label in named["id2label"].items()}
        name, pad = self._model_name, facts.extra["pad"] or 0
        if name in PRESETS:
            sizes = {**PRESETS[name], "vocab_size": facts.extra["vocabulary"], "pad_token_id": pad}
            config = BertConfig(**sizes, **named)
        else:
            named |= {"revision": self.recipe.revision or "main", **hub.remote_code_kwargs(False)}
            hub.load_config(name, self.recipe.revision)  # where it is gone, this says so in a line
            config = AutoConfig.from_pretrained(hub.local_path_or_id(name, self.recipe.revision), **named)
            hub.check_vocabulary(name, config.vocab_size, facts.extra["vocabulary"])
            if config.model_type not in saving.POSITIONS_AFTER_PADDING:  # a decoder reads the token before it
                config.pad_token_id = pad
        # Columns that were read and how long texts were: for a copy away from its run.
        columns = {name: self.recipe.options.get(name) for name in prediction.COLUMNS}
        config.isobatch = {**columns, "max_length": self.recipe.max_length, "problem": problem.name}
        if self.recipe.dropout is not None:
            for field, value in config.to_dict().items():
                if isinstance(value, float | int) and "dropout" in field:
                    setattr(config, field, self.recipe.dropout)
        return config

    def fetch(self) -> None:
        if self._model_name not in PRESETS:
            hub.fetch_weights(self._model_name, self.recipe.revision)

    def build_model(self, facts: Facts) -> nn.Module:
        """With --class-weights it holds them, (C,), in a buffer that is no part of what is saved."""
        import torch

        model = self._initial_model(facts)
        compute_first_alone(model)
        if (weights := facts.extra.get(problems.CLASS_WEIGHTS)) is not None:
            model.register_buffer(problems.CLASS_WEIGHTS, torch.tensor(weights), persistent=False)
        return model

    def fewest_steps(self, facts: Facts) -> int:
        """--least-steps, and with them so many that each class of many is seen SEEN times."""
        if not (least := super().fewest_steps(facts)):
            return 0
        labels = facts.extra.get("labels") or ()  # a received run's facts may lack them
        return max(least, math.ceil(SEEN * len(labels) / self.recipe.batch_size))

    def rate_share(self, name: str) -> float:
        """Parameters that the checkpoint does not have learn at --head-rate times the rate of the others."""
        return float(self.options.head_rate) if name in self._new_parameters else 1.0

    def _initial_model(self, facts: Facts) -> Any:
        import torch
        from transformers import AutoConfig
        from transformers.utils import logging

        config, head = self._classifier_config(facts), problems.of_facts(facts).head
        if self._model_name in PRESETS:
            return encoders.new_classifier(config, head)
        logging.disable_progress_bar()
        folder = hub.fetch_weights(self._model_name, self.recipe.revision)
        saved = AutoConfig.from_pretrained(folder, **hub.remote_code_kwargs(False))
        model, found = encoders.classifier_class(config, head).from_pretrained(
            folder,
            config=config,
            revision=self.recipe.revision or "main",
            dtype=torch.float32,
            **hub.remote_code_kwargs(False),
            ignore_mismatched_sizes=saved.num_labels != config.num_labels,
            output_loading_info=True,
        )
        self._new_parameters = {*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])}
        return model

    def model_size(self, facts: Facts) -> ModelSize:
        """Counted on a model without storage (device meta)."""
        import torch

        config = self._classifier_config(facts)
        with torch.device("meta"):
            model = encoders.new_classifier(config, problems.of_facts(facts).head)
        total = sum(p.numel() for p in model.parameters())
        dropouts = [value for name, value in vars(config).items() if "dropout" in name]
        return ModelSize(
            parameters=total,
            trainable=total,
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            intermediate=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
            keyed_dropout=self.recipe.noise == "keyed"
            and any(isinstance(value, float) and value > 0 for value in dropouts),
        )

    def loss(self, model: nn.Module, batch: Batch, step: StepContext) -> dict[str, Loss]:
        """batch: tokens (B, T), length (B,), label (B,), and for pairs types (B, T)."""
        return {"loss": self.label_loss(model, self.logits(model, batch), batch)}

    def label_loss(self, model: Any, logits: Tensor, batch: Batch) -> Loss:
        """The problem's loss, with the recipe's weights and smoothing."""
        weights = getattr(model, problems.CLASS_WEIGHTS, None)
        huber, focal = self.options.regression_loss == "huber", self.options.focal
        terms = problems.LossTerms(weights, self.recipe.label_smoothing, huber, focal)
        return problems.of_model(model).loss(logits, batch, terms)

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """(B, C) in fp32; tokens beyond a sample's length are masked."""
        return self.forward(model, batch).logits.float()

    def forward(self, model: nn.Module, batch: Batch, hidden_states: bool = False) -> Any:
        """The model's output; with `hidden_states` it has the states of all tokens after each layer."""
        import torch

        tokens_BT = batch["tokens"].long()
        is_token_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device) < batch["length"][:, None]
        inputs = {"input_ids": tokens_BT, "attention_mask": is_token_BT.long()}
        if "types" in batch and getattr(model.config, "type_vocab_size", 0) > 1:
            inputs["token_type_ids"] = batch["types"].long()
        return model(**inputs, output_hidden_states=hidden_states)

    def evaluate(self, model: nn.Module, batch: Batch, step: StepContext) -> dict[str, Sum | Rows]:
        return problems.of_model(model).parts(self.logits(model, batch), batch)

    def metrics(self, parts: Mapping[str, Any], split: str, facts: Facts) -> dict[str, Any]:
        return problems.of_facts(facts).metrics(parts)

    def export(self, model: nn.Module, folder: Path, facts: Facts) -> None:
        """A folder for AutoModelForSequenceClassification and AutoTokenizer, with the classes' names."""
        saving.save(model, facts, folder)
        encoders.write_layer_sizes(model, folder)

    def describe_model(self, final: Path, facts: Facts) -> ModelDescription:
        """The lines for transformers; a pruned model needs the code beside it."""
        pruned = encoders.is_pruned(json.loads((final / "config.json").read_text(encoding="utf-8")))
        remark = (
            "its layers have different sizes, which modeling_pruned.py beside it knows: read that file before"
            " you trust it, or let `isobatch export RUN --to dense` write a folder that needs no code"
        )
        names, problem = facts.extra["labels"], problems.of_facts(facts)
        shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
        words: dict[str, Any] = {"head": problem.head, "problem": problem.name, "file": calibration.FILE}
        words |= {"text": evaluation.example_texts(facts), "length": self.recipe.max_length}
        return ModelDescription(
            title="Text classifier" + (", pruned" if pruned else ""),
            summary=problem.description.format(count=len(names), labels=shown),
            usage=usage_lines(__file__, code=", trust_remote_code=True" if pruned else "", **words),
            remark=remark if pruned else "",
            hub_fields={"library_name": "transformers", "pipeline_tag": problem.pipeline},
        )

    def final_metrics(self, model: nn.Module, final: Path, facts: Facts, batches: Batches) -> dict[str, Any]:
        return self.settle(evaluation.torch_runner(model), final, facts, batches)

    def final_remark(self, metrics: Mapping[str, Any]) -> str:
        """That one class is all that it answers, where labels are several."""
        columns = zip(*metrics.get("confusion", ()), strict=True)
        answered = [n for n, column in zip(metrics.get("classes", ()), columns, strict=True) if any(column)]
        way = "try more --epochs, another --lr, or --class-weights balanced where classes differ in size"
        alone = len(answered) == 1 and metrics["accuracy"] < 1
        return f"every answer is {answered[0]}, so it has learnt nothing yet: {way}" if alone else ""

    def settle(self, run: evaluation.Runner, final: Path, facts: Facts, batches: Batches) -> dict[str, Any]:
        """Keep in `final` what the validation split says of how to answer; metrics of the test split."""
        seen = drift.training_pieces(Path(facts.folder), facts.extra["vocabulary"], facts.extra.get("unk"))
        profile = drift.Profile(seen, self.recipe.max_length)
        found = evaluation.predict(run, profile.counting(batches("valid")))
        kept = problems.of_facts(facts).settle(found, profile)
        kept.save(final)
        if "test" not in facts.samples:  # thresholds say nothing on what chose them
            return kept.metrics(found) if kept.confidences else {}
        return problems.of_folder(final).settled_metrics(lambda: evaluation.predict(run, batches()))

    def kept_metrics(self, model: Any, final: Path, batches: Batches, facts: Any) -> Mapping[str, Any]:
        """`model` may be an ONNX file in `final`."""
        run = evaluation.onnx_runner(model) if isinstance(model, Path) else evaluation.torch_runner(model)
        found, settled = evaluation.predict(run, batches()), problems.of_folder(final)
        problem = type(settled)(settled.labels)
        evidence = problem.evidence(found)
        # All of one pass: the loop's own may be in half precision.
        metrics: dict[str, Any] = {"samples": len(evidence), problem.headline: 0.0}
        metrics[f"{problem.headline} within (95 %)"] = "{:.4f} to {:.4f}".format(*problem.interval(evidence))
        if unknown := facts and problem.has_confidence and facts.extra["unknown"]:
            score, count = problem.score(evidence), len(evidence) + unknown
            of_all = f"{score:.4g} of the others, {score * len(evidence) / count:.4g} of all, these as wrong"
            metrics["with an unknown label"] = f"{unknown:,} of {count:,} rows: accuracy {of_all}"
        metrics |= problem.figures(evidence) | settled.settled_metrics(lambda: found)
        answering = settled.kept.answering(found)
        metrics |= {"answering": answering} if answering else {}
        sure, labels = calibration.answering_table("", answering), problem.table("", problem.detail(evidence))
        for table in (sure, labels):
            for name, *cells in table.rows[: problems.MOST_ANSWERS]:
                said = (" ".join(one) for one in zip(table.head[1:5], cells, strict=False) if one[1])
                metrics[f"{table.head[0]} {name}"] = ", ".join(said)
        if metrics.get("temperature") == 1 and (known := settled.kept.confidences):
            metrics["temperature is 1 as of"] = f"too few rows ({int(known.answered[-1]):,}), all right"
        for one in simple.standings(problem, found, simple.measured(facts, batches) if facts else ()):
            metrics[f"{problem.headline} of {one['name']}"] = one["score"]
            metrics[f"beside {one['name']} the model is"] = one["verdict"]
        if facts and problem.has_confidence and not found.is_correct.all():
            way = "predict RUN --file FILE --out ANSWERS.csv, sorted by probability"
            metrics["labels to doubt"] = f"where the surest predictions are others: {way}"
        return metrics

    def report(self) -> ClassifierReport:
        return ClassifierReport(self.variants)

    def open_predictor(self, final: Path, exports: Path, form: str) -> prediction.TextClassifier:
        """Samples are texts, or (text, text) for pairs. onnx and onnx-int4 import no torch."""
        if form != "torch":
            return prediction.open_onnx(self._onnx_file(final, exports, form))
        model = self._open_trained(final)
        run, encode = (evaluation.torch_runner(model, states) for states in (False, True))
        return prediction.TextClassifier.open(final, run, encode)

    def _open_trained(self, final: Path) -> Any:
        return encoders.open_classifier(str(final))

    def _onnx_file(self, final: Path, exports: Path, form: str) -> Path:
        """Raises UserError where this form was not written."""
        name = exporting.ONNX_FILES[form]
        found = next((f for f in (final / name, exports / form / name) if f.is_file()), None)
        if found is None:
            way_out = f"`export {final.parent} --to {form}` writes it"
            if form not in self.exports:
                way_out = f"`auto --task qat --pruned {final.parent}` makes a model that has it"
            raise UserError(f"--form {form}: {final.parent} has no {name}: {way_out}")
        return found

    def variants(self, final: Path, exports: Path) -> dict[str, Path]:
        """Name of a way to run the model -> the file that a program which does must ship: torch, and
        onnxruntime for each ONNX export that was made.
        """
        return {"torch fp32": final / "model.safetensors", **onnx_variants(exports)}

    def export_as(
        self, kind: str, final: Path, folder: Path, facts: Facts, batches: Batches
    ) -> Mapping[str, Any]:
        """hf: as final/. dense: unpruned sizes, for any transformers. onnx: fp32, for onnxruntime; the others
        have 8 bits.
        """
        int8.check_calibration(kind, facts)
        model = encoders.open_classifier(str(final))
        if kind in (int8.DYNAMIC, int8.STATIC):
            return int8.export_int8(kind, model, final, folder, batches)
        if kind == "onnx":
            run = exporting.tokenizer_runner(exporting.export_onnx(model, final, folder))
        elif kind == "dense":
            exporting.export_dense(model, final, folder)
        else:
            code = (file.name for file in final.glob("*.py"))
            exporting.copy_beside(final, folder, "model.safetensors", *code)
        if kind != "onnx":
            run = evaluation.open_runner(folder)
        trained = evaluation.predict(evaluation.torch_runner(model), batches())
        exported = evaluation.predict(run, batches())
        return exporting.check_agreement(kind, problems.of_model(model), trained, exported)


def onnx_variants(exports: Path) -> dict[str, Path]:
    """The ONNX exports that exist in `exports`."""
    forms = exporting.ONNX_FORMS.items()
    files = {f"onnxruntime {name}": exports / form / file for form, (file, name) in forms}
    return {name: file for name, file in files.items() if file.is_file()}
