"""A lint of models/: what is learnt may not depend on how many samples a micro-batch happens to have.

Refused in functions that compute with tensors, where the value comes from a tensor that they are given:
numel(), shape[0], size(0), len(), and means and other statistics over all elements or over the samples;
everywhere: losses of torch that take the mean, and batch norms.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
STATISTICS = {"mean", "nanmean", "var", "std", "median", "quantile", "norm", "softmax", "log_softmax"}
"""Methods that see the whole batch without a dimension, or with the first."""
MEAN_LOSSES = {
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "cosine_embedding_loss", "cross_entropy"),
    *("gaussian_nll_loss", "huber_loss", "kl_div", "l1_loss", "mse_loss", "nll_loss", "smooth_l1_loss"),
}
PARTS = "the count is one part of a sum, and all parts are added up"
TABLE = "counts rows of weights, ids or a catalogue, no samples"
PLACES = "numbers the rows, to pick from each its own"
EVERY_PART = "cuts the work into parts, and every part is computed"
HELD_OUT = "measures samples that were collected first, always the same"
ALLOWED = {
    "base.py:evaluate": PARTS,
    "encoder/evaluation.py:_tokens_of": "finds samples in the batches of a report; nothing is learnt there",
    "causal_lm/adapters.py:check_same_logits": "stops after enough samples; an export learns nothing",
    "causal_lm/chunked_cross_entropy.py:predicted_rows": PLACES,
    "causal_lm/chunked_cross_entropy.py:forward": EVERY_PART,
    "causal_lm/label_accuracy.py:_ends_with": "the length of a label",
    "causal_lm/label_accuracy.py:_with_answer": "the length of a label",
    "causal_lm/resize_embeddings.py:_remap_rows": TABLE,
    "causal_lm/task.py:evaluate": PARTS,
    "classification/task.py:evaluate": PARTS,
    "encoder/quantization.py:_subsample": "the calibration's batches have a size of their own",
    "encoder/weight_surgery.py:keep_outputs": TABLE,
    "encoder/weight_surgery.py:keep_inputs": TABLE,
    "causal_lm/chunked_cross_entropy.py:token_log_probs": PLACES,
    "causal_lm/chunked_cross_entropy.py:logit_chunks": EVERY_PART,
    "preference/losses.py:sums_of_figures": PARTS,
    "preference/task.py:evaluate": PARTS,
    "preference/task.py:_reference_answers": EVERY_PART,
    "recommendation/baselines.py:ease_weights": TABLE,
    "recommendation/baselines.py:largest": TABLE,
    "recommendation/baselines.py:paired_interval": HELD_OUT,
    "recommendation/baselines.py:training_matrix": PLACES,
    "recommendation/losses.py:sampled_softmax": "the step's negatives are the same for every micro-batch",
    "recommendation/losses.py:in_batch_softmax": "cohorts are cut by the recipe, and never in two",
    "recommendation/network.py:forward": EVERY_PART,
    "recommendation/network.py:_fused_vectors": EVERY_PART,
    "recommendation/network.py:interactions": PLACES,
    "recommendation/ranking.py:chunks": EVERY_PART,
    "recommendation/ranking.py:metric_parts": EVERY_PART,
    "recommendation/ranking.py:rank_metrics": PARTS,
    "recommendation/ranking.py:new_items": PLACES,
    "recommendation/text_encoder.py:forward": EVERY_PART,
    "recommendation/text_encoder.py:_pool": PLACES,
    "sequence_vae/generation.py:decode": "writes texts, and learns nothing",
    "sequence_vae/generation.py:importance_weighted_nll": EVERY_PART,
    "sequence_vae/generation.py:_log_likelihood": "the number of draws, which a flag gives",
    "sequence_vae/monitor.py:mutual_information": HELD_OUT,
    "sequence_vae/task.py:loss": PARTS,
    "sequence_vae/task.py:evaluate": PARTS,
}
"""File:function -> why the number of samples decides nothing of what is learnt there."""


class Finding(NamedTuple):
    """A use of the batch's shape: `place` is file:function."""

    place: str
    line: int
    code: str


def _names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _is_tensor(annotation: ast.expr | None) -> bool:
    return annotation is not None and bool(_names(annotation) & {"Tensor", "Batch"})


class _Function(ast.NodeVisitor):
    """Finds uses of the batch's shape in one function. `given`: names whose value comes from a batch."""

    def __init__(self, place: str, function: ast.FunctionDef) -> None:
        self.place, self.found = place, list[Finding]()
        arguments = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
        self.given = {a.arg for a in arguments if _is_tensor(a.annotation)}
        for statement in function.body:
            self.visit(statement)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """A function inside another is looked at by itself."""

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        if self._from_batch(node.value):
            self.given |= {n for target in node.targets for n in _names(target)}

    def visit_For(self, node: ast.For) -> None:
        if self._from_batch(node.iter):
            self.given |= _names(node.target)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        of_shape = isinstance(node.value, ast.Attribute) and node.value.attr == "shape"
        if of_shape and ast.unparse(node.slice) == "0" and self._from_batch(node):
            self._report(node)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if self._counts_samples(node) or _takes_a_mean(node):
            self._report(node)
        self.generic_visit(node)

    def _from_batch(self, node: ast.expr) -> bool:
        return bool(_names(node) & self.given)

    def _counts_samples(self, node: ast.Call) -> bool:
        if isinstance(node.func, ast.Name):
            return node.func.id == "len" and self._from_batch(node.args[0])
        if not (isinstance(node.func, ast.Attribute) and self._from_batch(node.func.value)):
            return False
        values = [*node.args, *(k.value for k in node.keywords if k.arg == "dim")]
        dims = [ast.unparse(value) for value in values]
        if node.func.attr in ("numel", "nelement"):
            return True
        if node.func.attr == "size":
            return dims in ([], ["0"])
        return node.func.attr in STATISTICS and dims[:1] in ([], ["0"])

    def _report(self, node: ast.expr) -> None:
        self.found.append(Finding(self.place, node.lineno, ast.unparse(node)))


def _takes_a_mean(node: ast.Call) -> bool:
    if not isinstance(node.func, ast.Attribute):
        return False
    module, name = ast.unparse(node.func.value), node.func.attr
    if name.startswith(("BatchNorm", "SyncBatchNorm")):
        return True
    reduction = {k.arg: ast.unparse(k.value) for k in node.keywords}.get("reduction", "'mean'")
    is_loss = name in MEAN_LOSSES and module in ("F", "functional", "nn.functional")
    return is_loss and reduction not in ("'sum'", "'none'")


def findings(source: str, file: str) -> Iterator[Finding]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            yield from _Function(f"{file}:{node.name}", node).found


def all_findings() -> list[Finding]:
    folder = ROOT / "models"
    files = sorted(folder.rglob("*.py"))
    return [f for p in files for f in findings(p.read_text(), p.relative_to(folder).as_posix())]


def test_the_shape_of_a_batch_decides_nothing_that_is_learnt() -> None:
    refused = [f for f in all_findings() if f.place not in ALLOWED]
    assert not refused, (
        f"models/{refused[0].place}, line {refused[0].line}: {refused[0].code}: does the cut decide what is"
        " learnt here? If it does not, add the function to ALLOWED, with the reason"
    )


def test_what_is_allowed_is_still_there() -> None:
    assert {f.place for f in all_findings()} == ALLOWED.keys()


@pytest.mark.parametrize(
    "line",
    [
        "x = x / x.numel()",
        "x = x / x.shape[0]",
        "x = x / x.size(0)",
        "y = x.float()\n    x = x / len(y)",
        "x = x.square().mean()",
        "x = (x - x.mean(0)) / x.std(dim=0)",
        "x = F.cross_entropy(x, x)",
        "x = nn.BatchNorm1d(3)(x)",
        "for y in x.split(2):\n        x = x + y / len(y)",
    ],
)
def test_every_form_is_found(line: str) -> None:
    function = f"def f(x: Tensor) -> Tensor:\n    {line}\n    return x"
    assert list(findings(function, "file.py"))


@pytest.mark.parametrize(
    "line", ["x = x.mean(-1) / x.shape[-1]", "x = F.cross_entropy(x, x, reduction='sum')"]
)
def test_features_and_sums_are_no_finding(line: str) -> None:
    assert not list(findings(f"def f(x: Tensor) -> Tensor:\n    {line}\n    return x", "file.py"))
