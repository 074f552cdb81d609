"""Distillation from a larger language model: what it finds likely at each position, kept on disk once.

Of each position the K likeliest tokens are kept with their log-probabilities over the whole vocabulary, and
the logarithm of what all other tokens have together, the rest. The divergence is of these K + 1 classes:
nothing is renormalised, it is that of the whole vocabulary where K is all of it, and less otherwise.

Letters: B rows, T tokens of a row, N predicted tokens, V vocabulary, K likeliest tokens.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Any

from isobatch.core.errors import UserError, refuse
from isobatch.core.flags import spelling
from isobatch.core.measures import format_bytes
from isobatch.models import hub
from isobatch.models.base import Batch, ModelSize, Teacher
from isobatch.models.causal_lm import model_sizes

if TYPE_CHECKING:
    from torch import Tensor, nn

    from isobatch.core.facts import Facts

TOKENS_AT_A_TIME = 4096
"""Padded tokens that the teacher reads at a time, where a row has fewer."""
LEAST = -50.0
"""Of the rest's log-probability: what has none at all has this one, and no infinity comes of it."""
ENTRY_BYTES = 8
"""On disk, of a token's number and its log-probability."""
COPIES = 2
"""Tables of logits that are alive at most while a divergence is computed, over those of a cross-entropy
(measured: 6 and 3)."""
OPTIONS = ("kd_weight", "kd_top", "kd_direction", "temperature")


def check(options: Any, student: str) -> None:
    """Raise UserError where flags mean nothing without a teacher, or the teacher reads other tokens.

    `student`: the name of the model, or of the tokenizer, whose tokens are learnt.
    """
    if options.teacher is None:
        defaults = {field.name: field.default for field in dataclasses.fields(options)}
        typed = [spelling(name) for name in OPTIONS if getattr(options, name) != defaults[name]]
        refuse({f"{', '.join(typed)}: means nothing without a teacher: add --teacher FOLDER": typed})
        return
    path = hub.resolve_model(options.teacher, "--teacher")
    ours, theirs = (hub.tokenizer_vocabulary(name) for name in (student, path))
    if ours is not None and theirs is not None and not ours.items() <= theirs.items():
        raise UserError(
            f"--teacher {options.teacher}: its tokenizer is not that of {student}: both must read the same"
            " tokens; take a teacher of the same family, or let it write answers (`predict"
            " --file`) and learn those"
        )


def teacher(path: str, options: Any) -> Teacher:
    """The teacher in a folder, in fp32, as one that answers for each token."""
    width = 0

    def build(facts: Facts) -> nn.Module:
        nonlocal width
        from isobatch.models.causal_lm import adapters, chunked_cross_entropy

        config = _open_config(path, options)
        vocabulary = config.get_text_config().vocab_size
        # Of the same tokens models may have more or fewer empty rows behind them: those of no student count.
        width = facts.extra["vocabulary"]
        hub.check_vocabulary(path, vocabulary, width, "; give a teacher with this tokenizer")
        model = adapters.load_base_model(path, config, None, remote_code=options.remote_code)
        chunked_cross_entropy.make_head_bypassable(model)
        return model

    def answers(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return likeliest(model, batch["tokens"].long(), options.kd_top, options.temperature, width)

    identity = f"{hub.weights_hash(path)} top {options.kd_top} at {options.temperature}"
    return Teacher(identity, build, answers, per_token=True)


def _open_config(path: str, options: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path, **hub.remote_code_kwargs(options.remote_code))


def likeliest(model: Any, tokens_BT: Tensor, top: int, temperature: float, width: int) -> dict[str, Tensor]:
    """ids (B, T, K) int32, log_probs (B, T, K) and rest (B, T), fp32, of the first `width` tokens at each
    position.
    """
    import torch

    from isobatch.models.causal_lm import chunked_cross_entropy

    parts: list[tuple[Tensor, ...]] = []

    def keep(_: slice, logits_NV: Tensor) -> tuple[Tensor, Tensor]:
        log_p_NV = (logits_NV[:, :width] / temperature).log_softmax(-1)
        log_p_NK, ids_NK = log_p_NV.topk(min(top, width), -1)
        parts.append((ids_NK.int(), log_p_NK, rest_of(log_p_NV, ids_NK)))
        return logits_NV.new_zeros(()), logits_NV.new_zeros(())

    for some_BT in tokens_BT.split(max(1, TOKENS_AT_A_TIME // tokens_BT.shape[1])):
        every = torch.arange(some_BT.numel(), device=some_BT.device)
        chunked_cross_entropy.loss_of_logits(model, some_BT, every, keep)
    found = (torch.cat(values) for values in zip(*parts, strict=True))
    return {
        name: values.view(*tokens_BT.shape, *values.shape[1:])
        for name, values in zip(("ids", "log_probs", "rest"), found, strict=True)
    }


def rest_of(log_p_NV: Tensor, ids_NK: Tensor) -> Tensor:
    """(N,) log of what all tokens but these have together, at least LEAST."""
    if ids_NK.shape[1] == log_p_NV.shape[1]:
        return log_p_NV.new_full(log_p_NV.shape[:1], LEAST)
    return log_p_NV.scatter(1, ids_NK, float("-inf")).logsumexp(-1).clamp(min=LEAST)


def loss(
    model: Any, batch: Batch, targets_BT: Tensor, count: int | None, smoothing: float, options: Any
) -> tuple[Tensor, Tensor]:
    """(1 - w) times the sum of -log p of the targets, plus w T^2 times that of the divergence, in nats; and
    (3,): predicted tokens, the sum of -log p, the sum of the divergence.

    batch: tokens (B, T); teacher.ids, teacher.log_probs (B, T, K), teacher.rest (B, T).
    """
    import torch
    from torch.nn import functional as F

    from isobatch.models.causal_lm import chunked_cross_entropy

    rows = chunked_cross_entropy.predicted_rows(targets_BT.flatten(), count)
    targets_N = targets_BT.flatten().index_select(0, rows)
    known = (batch[f"teacher.{n}"].flatten(0, 1).index_select(0, rows) for n in ("ids", "log_probs", "rest"))
    ids_NK, log_p_NK, rest_N = known
    weight, temperature = options.kd_weight, options.temperature

    def compute(chunk: slice, logits_NV: Tensor) -> tuple[Tensor, Tensor]:
        nll = F.cross_entropy(logits_NV, targets_N[chunk], reduction="sum", label_smoothing=smoothing)
        log_q_NV, ids = (logits_NV / temperature).log_softmax(-1), ids_NK[chunk].long()
        log_q = torch.cat([log_q_NV.gather(1, ids), rest_of(log_q_NV, ids)[:, None]], 1)
        log_p = torch.cat([log_p_NK[chunk], rest_N[chunk, None]], 1)
        of, against = (log_p, log_q) if options.kd_direction == "forward" else (log_q, log_p)
        kl = (of.exp() * (of - against)).sum()
        tokens = kl.new_full((), float(len(logits_NV)))
        total = (1 - weight) * nll + weight * temperature**2 * kl
        return total, torch.stack([tokens, nll.detach(), kl.detach()])

    return chunked_cross_entropy.loss_of_logits(model, batch["tokens"].long(), rows, compute)


def size_with(size: ModelSize, path: str, options: Any, facts: Facts) -> ModelSize:
    """The student's size, with what its loss and its teacher take, and a word on the answers on disk.

    Raises UserError for data in a store.
    """
    if facts.is_streamed:
        raise UserError(f"--teacher {options.teacher}: answers data on this machine: copy it here")
    tokens = facts.samples["train"] * facts.mean_length
    disk = format_bytes(int(tokens * (ENTRY_BYTES * options.kd_top + 4)))
    said = f"the teacher's answers for {tokens:,.0f} tokens take {disk} on disk, beside the prepared data"
    remark = "; ".join(filter(None, (size.remark, said)))
    config, opened = hub.load_config(path, None, "--teacher"), partial(_open_config, path, options)
    teacher = model_sizes.shape_of(config, opened, options.remote_code).size
    return dataclasses.replace(size, logit_copies=COPIES, teacher_bytes=teacher.weight_bytes, remark=remark)
