"""Predictions of a finished classifier for new texts or pairs, by any runtime; with ONNX without torch.

Letters: B samples of a batch, T tokens, C classes, n texts.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from isobatch.core.errors import UserError, explain_errors
from isobatch.core.terminal import rendered
from isobatch.models import hub, saving
from isobatch.models.encoder import drift, evaluation, problems
from isobatch.models.encoder.calibration import DOUBT
from isobatch.models.encoder.class_metrics import softmax, wilson_interval
from isobatch.models.encoder.drift import Profile
from isobatch.models.encoder.evaluation import Runner
from isobatch.models.encoder.export import ONNX_FILES

TextOrPair = str | tuple[str, str]
WIDTH_MULTIPLE = 8
"""A text is padded to the next multiple of so many tokens: its width does not depend on its batch."""
TOKENS_AT_A_TIME = 8192
"""Most tokens of a batch, padding included."""
COLUMNS = ("text_column", "pair_column")
"""Names in config.json's `isobatch` of what was read in training; null for the usual names."""
TOKENIZER_FILE, CONFIG_FILE = "tokenizer.json", "config.json"


@dataclass(frozen=True, slots=True)
class TextClassifier:
    """A classifier with its tokenizer and the problem it was trained on."""

    file: Path
    """The ONNX file, or the folder of a model in torch."""
    run: Runner
    tokenizer: Any
    problem: problems.Problem
    max_length: int
    pad: int
    columns: dict[str, str | None]
    """The columns that it read in training, by the names in COLUMNS."""
    profile: Profile | None
    """Of the texts that were answered; None where nothing is known of those of validation."""
    encode: Runner | None = None
    """The same inputs -> (B, H), what the texts are like; of a model in torch."""
    threshold: float | None = None
    """The least probability of an answer that is given."""
    shown: str = ""
    """How well those answers did that validation gives from it on."""
    neighbours: Callable[[np.ndarray], list[list[dict[str, Any]]]] | None = None
    """What `encode` gives of texts -> the training texts nearest to each."""

    @classmethod
    def open(cls, file: Path, run: Runner, encode: Runner | None = None) -> TextClassifier:
        """With the tokenizer, the classes and the calibration in the folder, or beside the file. Texts are
        cut as in training, of another's model to what it reads. Raises UserError where they are damaged.
        """
        folder = file if file.is_dir() else file.parent
        from tokenizers import Tokenizer

        with hub.reading(folder):
            config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
            problem = problems.of_folder(folder)
            pad = int(config.get("pad_token_id") or 0)
            read = config.get("isobatch") or {}
            most = read.get("max_length") or saving.max_input_tokens(config) or 512
            columns = {name: read.get(name) for name in COLUMNS}
            # The library raises bare Exception for every fault in a file.
            with explain_errors(f"{folder / TOKENIZER_FILE} cannot be read", Exception):
                tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        tokenizer.no_padding()
        tokenizer.enable_truncation(most, strategy="longest_first")
        then = problem.kept.profile
        profile = then and Profile(then.seen, then.longest)
        return cls(file, run, tokenizer, problem, most, pad, columns, profile, encode)

    def abstaining(self, precision: float) -> TextClassifier:
        """It gives only answers of which validation shows that so many are right. Raises UserError."""
        known = self.problem.kept.confidences
        if known is None:
            old, other = "it is of an earlier version: train it again", "its answers are not one class a text"
            why = old if self.problem.has_confidence else f"{other}: leave it out"
            raise UserError(f"--precision {precision:g}: the model has no confidences of validation: {why}")
        if (threshold := known.threshold(precision)) is None:
            raise UserError(rendered(__file__, "unshown", precision=precision, known=known, doubt=DOUBT))
        place = int((known.confidence >= threshold).sum()) - 1
        answered, wrong = (int(of[place]) for of in (known.answered, known.wrong))
        low, high = wilson_interval(answered - wrong, answered)
        of_rows = f"{low:.1%} to {high:.1%} of {answered:,} held-out rows"
        shown = f", above which {of_rows} are right (95 %)"
        if self.file.suffix == ".onnx":
            measure = "`isobatch evaluate` of this file, in its run, measures it"
            shown = f". The trained model is right there on {of_rows} (95 %); {measure}"
        return replace(self, threshold=threshold, shown=shown)

    def cut(self, threshold: float) -> TextClassifier:
        """It gives only answers, of several labels a text only labels, of at least this probability. Raises
        UserError where an answer has none.
        """
        problem = self.problem
        if problem.has_confidence:
            return replace(self, threshold=threshold)
        if not problem.has_thresholds:
            raise UserError(f"--threshold {threshold:g}: the answers of {problem.name} have no probability")
        kept = replace(problem.kept, thresholds=threshold)
        return replace(self, problem=type(problem)(problem.labels, kept))

    def __call__(self, texts: Sequence[TextOrPair]) -> list[dict[str, Any]]:
        """What the problem says of each text; whether it is `abstained` where that is asked, then without a
        `prediction`; and its `neighbours`.
        """
        encodings = self.problem.encode(self.tokenizer, texts)
        if self.profile:
            self.profile.add_texts([encoding.ids for encoding in encodings])
        # (C,) fp32 of each text, or what the problem picks of (T, C).
        rows = zip(encodings, self._rows(self.run, encodings), strict=True)
        logits = [self.problem.pick(*one) / self.problem.kept.temperature for one in rows]
        if self.profile and self.problem.has_confidence and logits:
            self.profile.add_answers(softmax(np.array(logits)))
        answers = self.problem.answers(logits, texts)
        for answer in answers if self.threshold is not None else ():
            answer["abstained"] = answer["probability"] < self.threshold
            answer["prediction"] = None if answer["abstained"] else answer["prediction"]
        if self.encode and self.neighbours and texts:
            near = self.neighbours(np.array(self._rows(self.encode, encodings)))
            answers = [{**a, "neighbours": found} for a, found in zip(answers, near, strict=True)]
        return answers

    def drift(self) -> list[str]:
        """In what all texts so far differ from those of validation."""
        then = self.problem.kept.profile
        if not (self.profile and self.profile.counts and then):
            return []
        return drift.differences(self.profile.counts, then.counts, self.problem.labels)

    def represent(self, texts: Sequence[TextOrPair]) -> np.ndarray:
        """(n, H): what each is like, of a model in torch."""
        assert self.encode is not None, "the caller has asked"
        return np.array(self._rows(self.encode, self.problem.encode(self.tokenizer, texts)))

    def _rows(self, run: Runner, encodings: Sequence[Any]) -> list[np.ndarray]:
        """What `run` gives of each, in order; the encodings are padded."""
        lengths = (max(len(encoding.ids), 1) for encoding in encodings)
        widths = [min(-(-n // WIDTH_MULTIPLE) * WIDTH_MULTIPLE, self.max_length) for n in lengths]
        found: dict[int, np.ndarray] = {}
        for places in batches_of_one_width(widths):
            batch = [encodings[place] for place in places]
            found |= zip(places, run(self._inputs(batch, widths[places[0]])), strict=True)
        return [found[place] for place in range(len(encodings))]

    def _inputs(self, encodings: Sequence[Any], width: int) -> dict[str, np.ndarray]:
        """Each (B, width) int64, padded on the right."""
        for encoding in encodings:
            encoding.pad(width, pad_id=self.pad)
        rows = [(e.ids, e.attention_mask, e.type_ids) for e in encodings]
        names = ("input_ids", "attention_mask", "token_type_ids")
        return dict(zip(names, np.array(rows, np.int64).swapaxes(0, 1), strict=True))


def batches_of_one_width(widths: Sequence[int]) -> Iterator[list[int]]:
    """Places of the samples of a batch, all of one width; at most TOKENS_AT_A_TIME tokens each."""
    by_width = sorted(range(len(widths)), key=widths.__getitem__)
    for width, group in itertools.groupby(by_width, widths.__getitem__):
        places, count = [*group], max(1, TOKENS_AT_A_TIME // max(width, 1))
        for start in range(0, len(places), count):
            yield places[start : start + count]


def onnx_file(path: Path) -> Path | None:
    """The ONNX classifier that a path names, itself or as its folder; None where there is none."""
    if path.is_dir():
        return next((path / name for name in [*ONNX_FILES.values()][::-1] if (path / name).is_file()), None)
    return path if path.suffix == ".onnx" and path.is_file() else None


def open_onnx(file: Path) -> TextClassifier:
    """An ONNX file of `export`, with the tokenizer and the classes' names beside it: no torch is imported.

    Raises UserError where one of them is missing or damaged.
    """
    for name in (TOKENIZER_FILE, CONFIG_FILE):
        if not (file.parent / name).is_file():
            raise UserError(f"{file}: needs {name} beside it, as `export` writes them: copy the whole folder")
    return TextClassifier.open(file, evaluation.onnx_runner(file))
