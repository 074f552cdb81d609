"""Quantization-aware training: a classifier learns to do with 4-bit weights and 8-bit activations.

python -m launch auto --task qat --pruned runs/pruning-0123456789ab --data FOLDER
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from isobatch.models import saving
from isobatch.models.base import CHANGES_SHAPE, Batch, ModelSize, Phase
from isobatch.models.classification.distillation import DistillationOptions, Distilled
from isobatch.models.classification.task import onnx_forms
from isobatch.models.encoder import encoders, evaluation, onnx_graph
from isobatch.models.encoder import export as exporting
from isobatch.models.encoder.evaluation import ModelVariant

if TYPE_CHECKING:
    from torch import nn

CALIBRATION = 256
"""Training samples from which the activations' ranges are chosen."""
QUANTIZERS_FILE = "quantizers.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class QATOptions(DistillationOptions):
    """The fields of quantization-aware training."""

    pruned: str | None = None
    """The classifier to quantize, pruned or not: a run, a folder or a hub id. It is the teacher too."""
    bits: Literal[4, 8] = 4
    """Bits of a weight, with a scale per output channel; activations have 8, with one per tensor."""
    embedding_bits: Literal[4, 8, 32] = 8
    """Bits of a word embedding, with a scale per word; 32 leaves all embeddings as they are."""


class QAT(Distilled):
    """Rounds in the forward, learns the scales beside the weights, and exports the file that will run.

    Without --pruned or a finished classifier as --model, a phase of its own trains the baseline first.
    """

    Options: ClassVar[type] = QATOptions
    teaches: ClassVar[str] = "pruned"
    rounds: ClassVar[bool] = True
    exports: ClassVar[tuple[str, ...]] = ("hf", "dense", "onnx", "onnx-int4")
    defaults: ClassVar[Mapping[str, Any]] = {**Distilled.defaults, "epochs": [2], "batch_size": 16}
    fast: ClassVar[Mapping[str, Any]] = {
        "epochs": [1],
        "batch_size": 32,
        "train_fraction": 0.3,
        "max_length": 64,
        "distill_hidden": False,
    }
    demo: ClassVar[Mapping[str, Any]] = {**Distilled.demo, "epochs": [4], "batch_size": 32}

    def phases(self) -> list[Phase]:
        if self.teacher_word:
            return [Phase(name="qat")]
        return [Phase(name="train", early_stopping=False), Phase(name="qat", share=0.5)]

    def check(self) -> None:
        super().check()
        if (config := self._raw_config()) is not None:
            encoders.sizes_from_config(config, self._name)
            onnx_graph.check_activation(config)

    def model_size(self, facts: Any) -> ModelSize:
        """Two phases have two shapes, which shards could not follow."""
        return dataclasses.replace(
            super().model_size(facts), why_unshardable="" if self.teacher_word else CHANGES_SHAPE
        )

    def begin_phase(self, model: Any, phase: str, first: Callable[[int], Iterable[Batch]]) -> None:
        """Round from now on, in ranges chosen on the first training samples."""
        from isobatch.models.encoder import quantization

        if phase != "qat" or quantization.is_quantized(model):
            return
        quantization.quantize_model(model, self.options.bits, self.options.embedding_bits)
        model.to(next(model.parameters()).device)  # with the quantizers
        quantization.start_calibration(model)
        for batch in first(CALIBRATION):
            self.outputs(model, batch)
        quantization.finish_calibration(model)

    def export(self, model: nn.Module, folder: Path, facts: Any) -> None:
        """The ONNX file; and the rounded weights as a folder for AutoModel, with the scales beside them."""
        from safetensors.torch import save_file

        from isobatch.models.encoder import quantization

        saving.save(model, facts, folder, quantization.dequantized_state(model))
        encoders.write_layer_sizes(model, folder)
        form = {"bits": str(self.options.bits), "embedding_bits": str(self.options.embedding_bits)}
        extra = {k: v.contiguous() for k, v in quantization.quantizer_state(model).items()}
        save_file(extra, folder / QUANTIZERS_FILE, metadata=form)
        onnx_graph.write_onnx(
            open_quantized(folder), folder / exporting.ONNX_INT4_FILE, evaluation.has_text_pairs(facts)
        )

    def forms(self, final: Path, exports: Path) -> list[ModelVariant]:
        """The file that was trained for, and what was exported beside it."""
        file = final / exporting.ONNX_INT4_FILE
        others = [form for form in onnx_forms(final, exports) if form.file.name != file.name]
        return [ModelVariant("onnxruntime 4-bit", "onnx", file, file, final), *others]

    def export_as(
        self, kind: str, final: Path, folder: Path, facts: Any, batches: Callable[[], Iterable[Batch]]
    ) -> Mapping[str, Any]:
        """onnx-int4: the file in final/. The other forms have the rounded weights, and fp32 activations."""
        if kind != "onnx-int4":
            return super().export_as(kind, final, folder, facts, batches)
        file, pairs = folder / exporting.ONNX_INT4_FILE, evaluation.has_text_pairs(facts)
        model = open_quantized(final)
        onnx_graph.write_onnx(model, file, pairs)
        for name in exporting.SIDE_FILES:
            shutil.copy(final / name, folder)
        return exporting.check_int4(model, file, pairs, batches)

    def final_metrics(
        self, model: nn.Module, final: Path, facts: Any, batches: Callable[[], Iterable[Batch]]
    ) -> Mapping[str, Any]:
        """The exported file against the trained model, and against the model that it came from."""
        file = final / exporting.ONNX_INT4_FILE
        run = evaluation.onnx_runner(file, threads=1)
        found: dict[str, Any] = {
            "bits": self.options.bits,
            **exporting.check_int4(open_quantized(final), file, evaluation.has_text_pairs(facts), batches),
            "file_bytes": file.stat().st_size,
            **evaluation.latency_metrics(run, facts),
        }
        if (place := self._teacher_place()) is not None:
            baseline = evaluation.predict(evaluation.torch_runner(encoders.open_classifier(place)), batches())
            found |= evaluation.compare_with_baseline(evaluation.predict(run, batches()), baseline)
        return found


def open_quantized(folder: Path) -> Any:
    """The trained model of a finished run's final/, rounding as in training."""
    from safetensors import safe_open

    from isobatch.models.encoder import quantization

    model = encoders.open_classifier(str(folder))
    with safe_open(folder / QUANTIZERS_FILE, framework="pt") as file:
        form = file.metadata()
        quantization.quantize_model(model, int(form["bits"]), int(form["embedding_bits"]))
        model.load_state_dict({k: file.get_tensor(k) for k in file.keys()}, strict=False)  # noqa: SIM118
    return model.eval()
