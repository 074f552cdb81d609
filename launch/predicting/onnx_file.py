"""An ONNX file of a classifier in place of a run: opened without torch."""

from __future__ import annotations

from pathlib import Path

from isobatch.core.errors import UserError
from isobatch.core.flags import flags_of
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.launch.predicting.answerer import Answerer, ModelOptions, trained_texts
from isobatch.launch.predicting.rows import TextReader
from isobatch.models.encoder import prediction


def open_onnx_answerer(where: str, options: ModelOptions) -> Answerer | None:
    """The classifier in an ONNX file, or in the folder of one; None where `where` is neither.

    Texts are cut as in training where the file lies in its run. Raises UserError.
    """
    path = Path(where).expanduser()
    file = None if (path / "recipe.json").is_file() else prediction.onnx_file(path)
    if file is None and path.suffix == ".onnx":
        raise UserError(f"{where}: there is no such file")
    if file is None:
        return None
    for flag in flags_of(ModelOptions, "predict").values():
        read = flag.name in ("text_column", "pair_column", "trust")
        if not read and getattr(options, flag.name) != flag.default:
            raise UserError(f"{flag.spelling}: changes nothing of an ONNX file; leave it out")
    run = _run_of(file)
    classifier = prediction.open_onnx(file, None if run is None else run.recipe.max_length)
    text, pair = (getattr(options, name) or classifier.columns[name] for name in prediction.COLUMNS)
    trained = None if run is None else trained_texts(run)
    return Answerer(classifier, TextReader(text, pair), trained=trained)


def _run_of(file: Path) -> RunFolder | None:
    """The run that a file lies in: in its final/, or in exports/onnx."""
    folders = list(file.absolute().parents)[1:3]
    found = next((f for f in folders if (f / "recipe.json").is_file()), None)
    return None if found is None else RunFolder.open(found)
