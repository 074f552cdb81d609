"""The workload reward: a language model with one score for a prompt and an answer, learnt from pairs.

isobatch auto --task reward --data pairs.jsonl --model FOLDER
isobatch predict RUN "a prompt" "an answer"

Bradley and Terry 1952; Ouyang et al. 2022, equation 1; the centre: Eisenstein et al. 2023. As TRL computes
them (trl/trainer/reward_trainer.py).

Letters: B pairs, 2 answers of each: the chosen one, then the rejected one; T tokens of a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from isobatch.core.errors import UserError, refuse
from isobatch.core.number_ranges import Rate
from isobatch.models import hub, lora, saving
from isobatch.models.base import Batch, Loss, ModelSize
from isobatch.models.causal_lm import adapters
from isobatch.models.causal_lm.model_sizes import PRESETS
from isobatch.models.model_card import ModelDescription, usage_lines
from isobatch.models.preference.task import Measured, PairTask, figures_of, first_minus_second

if TYPE_CHECKING:
    import numpy as np
    from torch import nn

    from isobatch.core.facts import Facts
    from isobatch.models.protocols import Predictor

HEAD = "score"
"""The name that transformers gives the layer with the score."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardOptions(adapters.AdapterOptions):
    """The flags of reward models."""

    center: Rate = 0.0
    """Weight of the mean of (chosen + rejected score)^2, which keeps scores around 0; TRL's
    center_rewards_coefficient, there often 0.01."""
    remote_code: bool = False
    """Run the Python code that a loaded model brings along, where transformers lacks its architecture."""


class RewardModel(PairTask):
    """A language model whose head is one score, read at the last token that is no padding.

    loss = the mean over pairs of -log sigmoid(chosen score - rejected score), and `--center` times
    that of (chosen + rejected)^2. The score's layer starts at zero, unless the model has one, so that no draw
    of numbers has a part in it.

    Metrics of each step and of held-out pairs, means over pairs. `reward_accuracy`: how often the chosen
    answer has the larger score; `reward_margin`: by how much; `chosen_reward`, `rejected_reward`.
    """

    Options: ClassVar = RewardOptions
    follow_ups: ClassVar = ('predict {run} "a prompt" "an answer"', "verify {run}", "report {run}")
    figures: ClassVar = ("reward_accuracy", "reward_margin", "chosen_reward", "rejected_reward")
    data: ClassVar = "data.preferences.dataset:Preferences"
    defaults: ClassVar = {**PairTask.defaults, "lr": 1e-5}
    adapter_lr: ClassVar = 1e-4

    def unread(self) -> Mapping[str, str]:
        return {**super().unread(), "label_smoothing": "a reward model has none"}

    def check(self) -> None:
        bits, tables = self.options.load_bits, self.options.also_train
        whole = f"--load-bits {bits}: a reward model is trained on whole weights: use --adapter lora"
        always = "--also-train: the score's layer trains always, and there is no other head"
        refuse({whole: bits != 16, always: tables})
        super().check()

    def build_model(self, facts: Facts) -> nn.Module:
        import torch
        from transformers import GPT2ForSequenceClassification
        from transformers.models.auto import modeling_auto

        options, name, revision = self.options, self.model_name, self.recipe.revision
        config = self.transformers_config(facts)
        config.num_labels, config.pad_token_id = 1, pad_id(facts.extra)
        if name in PRESETS:
            model: Any = GPT2ForSequenceClassification(config)
            torch.nn.init.zeros_(model.score.weight)
            return model
        known = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
        if config.model_type not in known and not options.remote_code:
            raise UserError(
                f"--model {name}: transformers has no {config.model_type} with a score: give one of another"
                " family, such as Llama, Qwen, Gemma or Mistral"
            )
        path, rounds = hub.fetch_weights(name, revision), options.frozen_dtype == "bf16"
        code = hub.remote_code_kwargs(options.remote_code)
        model = open_scorer(path, revision, "auto" if rounds else torch.float32, config=config, **code)
        if options.adapter != "none":
            adapters.add_adapter(model, options, name, revision, [HEAD])
            model.peft_config["default"].task_type = "SEQ_CLS"
        return model

    def model_size(self, facts: Facts) -> ModelSize:
        """That of the language model, whose head of its own, if it has one, is a row."""
        size, config = self.network_size(facts), self.transformers_config(facts)
        head = 0 if config.get_text_config().tie_word_embeddings else size.vocabulary * size.hidden
        trains_head = head if self.options.adapter == "none" else 0
        return dataclasses.replace(
            size,
            parameters=size.parameters - head + size.hidden,
            trainable=size.trainable - trains_head + size.hidden,
            vocabulary=0,
            head_bytes=0,
            packs=False,
        )

    def losses_and_sums(self, model: nn.Module, batch: Batch, host: Batch | None, trains: bool) -> Measured:
        """batch: tokens (B, 2, T), row_length (B, 2)."""
        import torch
        from torch.nn import functional as F

        from isobatch.models.causal_lm.chunked_cross_entropy import run_model

        tokens_B2T, length_B2 = batch["tokens"].long(), batch["row_length"]
        behind = torch.arange(tokens_B2T.shape[-1], device=tokens_B2T.device) >= length_B2[..., None]
        unwrapped: Any = getattr(model, "module", model)
        pad = int(unwrapped.config.pad_token_id)
        scores = run_model(model, tokens_B2T.masked_fill(behind, pad).flatten(0, 1))
        scores_B2 = scores.float().view(length_B2.shape)
        centre_B = self.options.center * scores_B2.sum(-1).square()
        losses_B = centre_B - F.logsigmoid(first_minus_second(scores_B2))
        known_B2 = scores_B2.detach()
        return {"loss": Loss(losses_B.sum(), "sample")}, figures_of(known_B2, known_B2)

    def export(self, model: Any, folder: Path, facts: Facts) -> None:
        """A folder for AutoModelForSequenceClassification and AutoTokenizer; an adapter's for PeftModel."""
        if self.options.adapter == "none":
            saving.save(model, facts, folder)
        else:
            lora.save_adapter(model, folder, [HEAD])
            saving.save_tokenizer(model.config.to_dict(), facts, folder)

    def describe_model(self, final: Path, facts: Facts) -> ModelDescription:
        adapted = (final / lora.CONFIG_FILE).is_file()
        return ModelDescription(
            title="Adapter of a reward model" if adapted else "Reward model",
            summary="Gives a prompt with an answer a score: the larger, the better the answer.",
            usage=usage_lines(__file__),
            hub_fields={"library_name": "peft" if adapted else "transformers"}
            | {"pipeline_tag": "text-classification"},
        )

    def open_scorer(self, final: Path, facts: Facts) -> Predictor:
        """The model in `final`, read once: rows of tokens -> `reward` of each."""
        import torch

        base, revision = lora.base_model_of(final) if (final / lora.CONFIG_FILE).is_file() else (final, None)
        known = {"num_labels": 1, "pad_token_id": pad_id(facts.extra)}
        code = hub.remote_code_kwargs(self.options.remote_code)
        model = open_scorer(str(base), revision, torch.float32, **known, **code)
        if base is not final:
            model = lora.put_adapter(model, final, str(base))
        model.eval()

        @torch.no_grad()
        def score(rows: Sequence[np.ndarray]) -> list[dict[str, Any]]:
            """One row after the other: beside others padding would change float sums."""
            tokens = (torch.as_tensor(row.astype("int64"))[None] for row in rows)
            return [{"reward": float(model(input_ids=one, use_cache=False).logits)} for one in tokens]

        return score


def open_scorer(path: str, revision: str | None, dtype: Any, **more: Any) -> Any:
    """A saved model with a score; one that it has not yet is 0 of everything.

    `more`: as of `from_pretrained`, its `config` or values that change it.
    """
    import torch
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.disable_progress_bar()
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # else a warning that the score is new
    try:
        model, found = AutoModelForSequenceClassification.from_pretrained(
            path, revision=revision or "main", dtype=dtype, output_loading_info=True, **more
        )
    finally:
        logging.set_verbosity(level)
    if f"{HEAD}.weight" in found["missing_keys"]:
        torch.nn.init.zeros_(model.get_submodule(HEAD).weight)
    return model


def pad_id(extra: Mapping[str, Any]) -> int:
    """The token of padding: the tokenizer's, or its end token. A score is read before it."""
    found = extra.get("pad") if extra.get("pad") is not None else extra.get("eos")
    return int(found or 0)
