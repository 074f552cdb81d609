"""Causal language models: GPT-2s trained from scratch, or any decoder that transformers opens, fine-tuned.

python -m launch auto --task causal-lm --data FOLDER --model small
python -m launch auto --task causal-lm --data FOLDER --model openai-community/gpt2 --preset finetune
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from models import decoders, hub, saving
from models.base import Batch, Loss, ModelError, Rows, Shape, Step, Sum, Task
from models.decoders import PRESETS
from models.generation import continuation

if TYPE_CHECKING:
    from torch import Tensor, nn

IGNORED = -100
LONGEST_WITH_ATTENTION_DROPOUT = 512
"""Above it attention dropout is 0: keyed noise would take the kernel's speed and memory."""
LARGEST_EXPONENT = 700.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CausalLMOptions:
    """The fields of causal language models."""

    generate_prompt: str | None = None
    """What the sample at the end of training starts with; by default the validation text's first words."""
    generate_tokens: int = 60
    """Length of that sample; 0 for none."""


class CausalLM(Task):
    """Next-token prediction on independent blocks of tokens.

    The defaults suit training from scratch; `--preset finetune` has those for a loaded model.

    Convention of the metrics: blocks are independent and the first token of each is not predicted, as in
    Hugging Face's run_clm. `loss` is the mean over predicted tokens. `word_perplexity` and `bits_per_byte`
    spread that mean over ALL tokens of the split's text (first ones included, so that the block length does
    not flatter it), then over its words (separated by white space; ends of lines are none) or UTF-8 bytes.
    With a fraction of the blocks evaluated, the mean is the fraction's, the ratios are the whole split's.
    """

    Options: ClassVar[type] = CausalLMOptions
    defaults: ClassVar[Mapping[str, Any]] = {
        "model": "small",
        "max_length": 256,
        "weight_decay": 0.1,
        "warmup": "0.05ep",
        "schedule": "cosine",
    }
    fast: ClassVar[Mapping[str, Any]] = {"max_length": 128, "train_fraction": 0.25, "eval_fraction": 0.25}
    demo: ClassVar[Mapping[str, Any]] = {"model": "tiny", "max_length": 128, "batch_size": 16, "lr": 3e-3}
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "finetune": {
            "model": "openai-community/gpt2",
            "batch_size": 8,
            "max_length": 512,
            "lr": 5e-5,
            "weight_decay": 0.01,
            "schedule": "linear",
        }
    }

    @property
    def _name(self) -> str:
        return self.recipe.model or "small"

    def check(self) -> None:
        name = self._name
        if self.recipe.max_length < 2:
            raise ModelError(f"--max-length {self.recipe.max_length}: a block needs at least 2 tokens")
        if self.options.generate_tokens < 0:
            raise ModelError(f"--generate-tokens {self.options.generate_tokens}: must be at least 0")
        folder = Path(name).expanduser()
        if name in PRESETS:
            self._check_context(PRESETS[name].config(0, self.recipe.max_length))
        elif folder.is_dir():
            hub.check_folder(folder, self.recipe.tokenizer)
            self._check_context(hub.config(str(folder), None))
        elif hub.is_id(name):
            hub.require(name, self.recipe.revision)
            if hub.snapshot(name, self.recipe.revision):
                self._check_context(hub.config(name, self.recipe.revision))
        else:
            close = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.5)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise ModelError(
                f"--model {name}: is no preset{hint}, folder or hub id (owner/name, such as "
                f"openai-community/gpt2); presets: {', '.join(PRESETS)}"
            )

    def _check_context(self, config: Mapping[str, Any]) -> None:
        longest = decoders.context(config)
        if longest is not None and self.recipe.max_length > longest:
            raise ModelError(
                f"--max-length {self.recipe.max_length}: {self._name} reads at most {longest} tokens"
            )

    def _config(self, facts: Any) -> dict[str, Any]:
        """The model's config.json as a mapping, checked against the tokenizer and the block length."""
        name, vocabulary = self._name, facts.extra["vocabulary"]
        if name in PRESETS:
            return PRESETS[name].config(vocabulary, self.recipe.max_length)
        config = hub.config(name, self.recipe.revision)
        self._check_context(config)
        hub.check_vocabulary(name, config.get("vocab_size"), vocabulary)
        return config

    def build_model(self, facts: Any) -> nn.Module:
        import torch
        from transformers import AutoModelForCausalLM, GPT2LMHeadModel

        config = self._transformers_config(facts)
        if self._name in PRESETS:
            return GPT2LMHeadModel(config)
        where = hub.place(self._name, self.recipe.revision)
        revision = self.recipe.revision or "main"
        return AutoModelForCausalLM.from_pretrained(
            where, config=config, revision=revision, dtype=torch.float32
        )

    def _transformers_config(self, facts: Any) -> Any:
        from transformers import AutoConfig, GPT2Config

        numbers = self._config(facts)
        if self._name in PRESETS:
            ids = {f"{role}_token_id": facts.extra.get(role) for role in ("eos", "bos")}
            config = GPT2Config(**numbers, **ids, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        else:
            where = hub.place(self._name, self.recipe.revision)
            config = AutoConfig.from_pretrained(where, revision=self.recipe.revision or "main")
        for name, value in self._dropouts(config.to_dict()).items():
            setattr(config, name, value)
        return config

    def _dropouts(self, config: Mapping[str, Any]) -> dict[str, float]:
        """The dropout fields to set: all to the recipe's, attention's to 0 for long blocks."""
        names = [
            k for k, v in config.items() if isinstance(v, float | int) and ("pdrop" in k or "dropout" in k)
        ]
        chosen = self.recipe.dropout
        values = {} if chosen is None else dict.fromkeys(names, chosen)
        if self.recipe.max_length > LONGEST_WITH_ATTENTION_DROPOUT:
            values |= {name: 0.0 for name in names if "att" in name}
        return values

    def shape(self, facts: Any) -> Shape:
        """Counted from the config's numbers; other architectures are built without storage."""
        return decoders.shape_of(self._config(facts)) or self._counted(facts)

    def _counted(self, facts: Any) -> Shape:
        import torch
        from transformers import AutoModelForCausalLM

        config = self._transformers_config(facts).get_text_config()
        with torch.device("meta"):
            count = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
        hidden = config.hidden_size
        inner = getattr(config, "intermediate_size", None) or 4 * hidden
        layers, heads = config.num_hidden_layers, config.num_attention_heads
        return decoders.shape(count, layers, hidden, heads, inner, config.vocab_size)

    def loss(self, model: nn.Module, batch: Batch, step: Step) -> dict[str, Loss]:
        """batch: tokens (B, T), length (B,). Cross-entropy in nats, summed over the predicted tokens."""
        return {"loss": Loss(self._nll(model, batch), "token")}

    def _nll(self, model: nn.Module, batch: Batch) -> Tensor:
        from torch.nn import functional as F

        # No attention mask: padding is on the right, and a token sees none to its right, so real positions
        # never see it and the others' targets are ignored. It keeps SDPA on its causal path without a mask.
        logits_BTV = model(input_ids=batch["tokens"].long(), use_cache=False).logits
        targets_BT = _targets(batch["tokens"], batch["length"])
        # The last position keeps its logits and an ignored target: slicing logits would copy them all.
        return F.cross_entropy(
            logits_BTV.flatten(0, 1).float(), targets_BT.flatten(), ignore_index=IGNORED, reduction="sum"
        )

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Sum | Rows]:
        return {"nll": Sum(self._nll(model, batch), (batch["length"] - 1).sum())}

    def metrics(self, parts: Mapping[str, Any], split: str, facts: Any) -> dict[str, float]:
        loss = float(parts["nll"].value) / float(parts["nll"].weight)
        found = {"loss": loss, "perplexity": _exp(loss)}
        if text := facts.extra.get("splits", {}).get(split):
            nats = loss * text["tokens"]
            found["word_perplexity"] = _exp(nats / max(1, text["words"]))
            found["bits_per_byte"] = nats / (math.log(2) * text["bytes"])
        return found

    def export(self, model: nn.Module, folder: Path, facts: Any) -> None:
        """A folder for AutoModelForCausalLM and AutoTokenizer."""
        saving.save(model, facts, folder)
        configured: Any = model
        configured.generation_config.save_pretrained(folder)

    def generate(self, final: Path, prompt: str, *, tokens: int, temperature: float, seed: int) -> str:
        from models.generation import generate

        return generate(final, prompt, tokens=tokens, temperature=temperature, seed=seed)

    def sample(self, model: nn.Module, facts: Any, folder: Path) -> str | None:
        if self.options.generate_tokens == 0:
            return None
        prompt = self.options.generate_prompt or facts.extra.get("prompt", "")
        return continuation(
            model, saving.tokenizer(facts), prompt, self.options.generate_tokens, 0.8, self.recipe.seed
        )


def _targets(tokens_BT: Tensor, length_B: Tensor) -> Tensor:
    """(B, T): the next token at each position that has one, IGNORED elsewhere."""
    import torch

    width = tokens_BT.shape[1]
    shifted = torch.nn.functional.pad(tokens_BT[:, 1:].long(), (0, 1), value=IGNORED)
    position = torch.arange(width, device=tokens_BT.device)
    return shifted.masked_fill(position >= (length_B - 1)[:, None], IGNORED)


def _exp(value: float) -> float:
    """exp, finite for any loss: a diverged model must not make JSON that others cannot read."""
    return math.exp(min(value, LARGEST_EXPONENT))
