"""The workload causal-lm: training a GPT-2 from scratch, or fine-tuning any decoder that transformers opens.

isobatch auto --task causal-lm --data FOLDER --model small
isobatch auto --task causal-lm --data FOLDER --model openai-community/gpt2
isobatch auto --task causal-lm --data FOLDER --model FOLDER --adapter qlora
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from isobatch.core.errors import NotHereError, UserError
from isobatch.core.extras import need
from isobatch.core.number_ranges import AboveZero, Count, Positive, Share
from isobatch.core.package import table_beside
from isobatch.models import hub, lora, saving
from isobatch.models.base import Batch, Loss, ModelSize, Rows, StepContext, Sum, Task, Teacher
from isobatch.models.causal_lm import adapters, answers, distillation, generation, known_models, model_sizes
from isobatch.models.causal_lm.adapter_sizes import with_smaller
from isobatch.models.causal_lm.generation import Sampling, TextStream
from isobatch.models.causal_lm.model_sizes import PRESETS
from isobatch.models.causal_lm.perplexity import metrics as perplexity_metrics
from isobatch.models.model_card import ModelDescription, usage_lines

if TYPE_CHECKING:
    from torch import Tensor, nn

    from isobatch.core.facts import Facts
    from isobatch.core.recipe import Recipe
    from isobatch.models.causal_lm.answers import HeldOutPrompt

SITUATIONS = table_beside(__file__, "situations")
MAX_LENGTH_WITH_ATTENTION_DROPOUT = 512
"""Above this length attention dropout is 0: keyed noise rules out the fused attention kernel."""
FINETUNING_LR, ADAPTER_LR = 5e-5, 2e-4
"""Peak rates for a loaded model: of Hugging Face's Trainer, and of adapters (Dettmers et al. 2023)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CausalLMOptions(adapters.AdapterOptions):
    """The flags of causal language models."""

    generate_tokens: Count = 60
    """Length of the sample at the end of training; 0 for none."""
    answers: Count = 0
    """Held-out prompts that are answered in each evaluation, for exact_match and, where tools are called,
    valid_tool_calls; 0 for none."""
    remote_code: bool = False
    """Run the Python code that a loaded model brings along, where transformers lacks its architecture."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DistilledOptions(CausalLMOptions):
    """The flags of causal-lm: those of causal language models, and of their distillation."""

    teacher: str | None = None
    """A larger language model with the same tokenizer to learn from: a run, a folder or a hub id."""
    kd_weight: Share = 0.5
    """Part of the loss that comes from the teacher; the rest is from the tokens of the data."""
    kd_top: Positive = 64
    """Likeliest tokens of the teacher that are kept of each position; all others are one more."""
    kd_direction: Literal["forward", "reverse"] = "forward"
    """forward: KL(teacher || student), which covers all that the teacher might say; reverse: KL(student ||
    teacher), which keeps to what it would most likely say (Gu et al. 2024)."""
    temperature: AboveZero = 1.0
    """Softens both models' probabilities (Hinton et al. 2015)."""


class OnLanguageModel(Task):
    """A task whose network is a causal language model, or made from one."""

    def __init__(self, recipe: Recipe, options: Any) -> None:
        super().__init__(recipe, options)
        self.measures_before = self.model_name not in PRESETS

    @property
    def model_name(self) -> str:
        return self.recipe.model or "small"

    @classmethod
    def complete(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """What --adapter implies; and a model that reads less than the usual --max-length limits it."""
        implied = adapters.implied_options(values)
        if values.get("model") not in PRESETS:
            implied |= hub.shorter_length(values, cls.defaults, model_sizes.context_length)
        return implied

    def unread(self) -> Mapping[str, str]:
        found = hub.unread_revision(self.model_name, self.recipe.tokenizer)
        dropout = self.recipe.dropout
        if self.options.adapter == "none" and (dropout == 0 or (not dropout and self.model_name in PRESETS)):
            found["noise"] = "there is no dropout"
        return found

    def rate_share(self, name: str) -> float:
        return self.options.lora_plus if ".lora_B." in name else 1.0

    def check(self) -> None:
        name = self.model_name
        adapters.check_options(self.options, pretrained=name not in PRESETS)
        if self.recipe.optimizer == "muon" and self.options.adapter != "none":
            raise UserError(
                f"--optimizer muon: --adapter {self.options.adapter} trains matrices of a low rank, and whole"
                " orthogonal steps are for whole matrices: use adamw"
            )
        if self.options.load_bits != 16:
            need("bitsandbytes", f"--load-bits {self.options.load_bits}")
        if self.recipe.max_length < 2:
            raise UserError(f"--max-length {self.recipe.max_length}: a block needs at least 2 tokens")
        if name in PRESETS:
            self._check_context(PRESETS[name].config(0, self.recipe.max_length))
        elif config := hub.check_model(name, self.recipe.revision, self.recipe.tokenizer, PRESETS):
            self._check_config(config)

    def check_for_plan(self) -> None:
        adapters.check_options(self.options, pretrained=self.model_name not in PRESETS)
        if self.model_name not in PRESETS:
            self._check_config(known_models.load_config(self.model_name, self.recipe.revision))

    def _check_config(self, config: Mapping[str, Any]) -> None:
        if config.get("model_type") not in model_sizes.LINEAR_HEAD_TYPES or "auto_map" in config:
            hub.check_architecture(self.model_name, config, self.options.remote_code, self.recipe.revision)
        self._check_context(config)

    def _check_context(self, config: Mapping[str, Any]) -> None:
        hub.check_length(self.model_name, model_sizes.context_length(config), self.recipe.max_length)

    def _raw_config(self, facts: Facts) -> dict[str, Any]:
        """The model's config.json as a mapping, checked against the tokenizer and the block length."""
        name, vocabulary = self.model_name, facts.extra["vocabulary"]
        if name in PRESETS:
            return PRESETS[name].config(vocabulary, self.recipe.max_length)
        assumed = facts.extra.get("assumed")
        config = (known_models if assumed else hub).load_config(name, self.recipe.revision)
        self._check_config(config)
        if not assumed:
            more = "; for new tokens give a copy of the model whose embeddings transformers has resized"
            hub.check_vocabulary(name, config.get("vocab_size"), vocabulary, more)
        return config

    def fetch(self) -> None:
        if self.model_name not in PRESETS:
            hub.fetch_weights(self.model_name, self.recipe.revision)

    def transformers_config(self, facts: Facts) -> Any:
        """The model's config, as an object of transformers, with the recipe's dropout."""
        from transformers import AutoConfig, GPT2Config

        values, revision, runs_code = self._raw_config(facts), self.recipe.revision, self.options.remote_code
        if self.model_name in PRESETS:
            ids: dict[str, Any] = {f"{role}_token_id": facts.extra.get(role) for role in ("eos", "bos")}
            config: Any = GPT2Config(**values, **ids, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        elif facts.extra.get("assumed"):
            config = known_models.transformers_config(self.model_name, revision, runs_code)
        else:
            path = hub.local_path_or_id(self.model_name, revision)
            code = hub.remote_code_kwargs(runs_code)
            config = AutoConfig.from_pretrained(path, revision=revision or "main", **code)
        # Dropout is the recipe's, but 0 for attention in long blocks.
        is_long = self.recipe.max_length > MAX_LENGTH_WITH_ATTENTION_DROPOUT
        for name, value in config.to_dict().items():
            if isinstance(value, float | int) and ("pdrop" in name or "dropout" in name):
                asked = 0.0 if is_long and "att" in name else self.recipe.dropout
                setattr(config, name, value if asked is None else asked)
        return config

    def network_size(self, facts: Facts) -> ModelSize:
        """From the config's numbers for GPT-2 and Llama-like models; others are built without storage."""
        config, opened = self._raw_config(facts), partial(self.transformers_config, facts)
        shape = model_sizes.shape_of(config, opened, self.options.remote_code)
        if self.model_name in PRESETS:
            return shape.size
        return with_smaller(shape, self.options)


class LanguageModelTask(OnLanguageModel):
    """A causal language model, whatever it learns by: what it is exported as, and what it writes."""

    follow_ups: ClassVar = ('chat {run} "Hello"', "export {run} --to gguf", "verify {run}")
    exports: ClassVar = ("merged", "adapter", "gguf", "gguf-f32", "gguf-bf16", "gguf-q8_0", "gguf-adapter")

    def answer(self, model: nn.Module, prompt: HeldOutPrompt, facts: Facts) -> dict[str, Any]:
        return answers.answer(model, prompt, facts)

    def answer_figures(self, rows: Iterable[Mapping[str, Any]]) -> Mapping[str, float]:
        return answers.figures(rows)

    def build_model(self, facts: Facts) -> nn.Module:
        return self.build_model_on(facts, "cpu")

    def build_model_on(self, facts: Facts, device: Any) -> nn.Module:
        from transformers import GPT2LMHeadModel

        from isobatch.models.causal_lm import chunked_cross_entropy

        config, options, revision = self.transformers_config(facts), self.options, self.recipe.revision
        self._num_sets = len(facts.extra.get("sets") or [])
        if self.model_name in PRESETS:
            model: nn.Module = GPT2LMHeadModel(config)
        else:
            path, rounds = hub.fetch_weights(self.model_name, revision), options.frozen_dtype == "bf16"
            kind = options.load_bits, options.remote_code, device, rounds
            model = adapters.load_base_model(path, config, revision, *kind)
            if options.adapter != "none":
                adapters.add_adapter(model, options, self.model_name, revision)
        chunked_cross_entropy.make_head_bypassable(model)
        return model

    def model_size(self, facts: Facts) -> ModelSize:
        size = self.network_size(facts)
        if count := self.options.answers:
            answers.check(count, facts)
            why = f"--answers {count} writes texts of any length on each process by itself"
            size = dataclasses.replace(size, why_whole_weights=why)
        return size

    @property
    def answers(self) -> int:
        return self.options.answers

    def prompts(self, rows: Iterable[Batch], facts: Facts) -> list[HeldOutPrompt]:
        return answers.held_out_prompts(rows, self.answers, facts)

    def export(self, model: Any, folder: Path, facts: Facts) -> None:
        """A folder for AutoModelForCausalLM and AutoTokenizer; an adapter's for PeftModel."""
        if self.options.adapter == "none":
            saving.save(model, facts, folder)
            generation.save_config(model, facts, folder)
        else:
            lora.save_adapter(model, folder, lora.modules_named(model, self.options.also_train or ()))
            saving.save_tokenizer(model.config.to_dict(), facts, folder)

    def describe_model(self, final: Path, facts: Facts) -> ModelDescription:
        """The lines for transformers, or for peft where it is an adapter."""
        adapted = (final / lora.CONFIG_FILE).is_file()
        chats = bool(facts.extra.get("template"))
        code = ", trust_remote_code=True" if self.options.remote_code else ""
        library = "peft" if adapted else "transformers"
        return ModelDescription(
            title="Adapter of a language model" if adapted else "Language model",
            summary=("Answers in a conversation." if chats else "Continues a text.")
            + (" It needs the model that it was trained on." if adapted else ""),
            usage=usage_lines(__file__, code=code, chats=chats),
            hub_fields={"library_name": library, "pipeline_tag": "text-generation"},
        )

    def export_as(
        self, kind: str, final: Path, folder: Path, facts: Facts, batches: Callable[[], Iterable[Batch]]
    ) -> Mapping[str, Any]:
        if kind.startswith("gguf") and (kind != "gguf-adapter" or self.options.adapter != "none"):
            return self._export_gguf(kind, final, folder, facts, batches)
        if self.options.adapter == "none":
            whole = "final/ is the whole model: --to gguf"
            raise UserError(f"export to {kind}: the run trained no adapter: {whole}")
        reopened = partial(adapters.open_adapted_model, remote_code=self.options.remote_code)
        if kind == "adapter":
            for file in final.iterdir():
                if file.suffix in (".json", ".jinja", ".safetensors"):
                    shutil.copy(file, folder)
            trained = adapters.first_logits(reopened(final).eval(), batches())
            return adapters.check_same_logits(trained, reopened(folder).eval())
        model = reopened(final, as_stored=True).eval()
        trained = adapters.first_logits(model, batches())
        merged = model.merge_and_unload().to(model.config.dtype)
        saving.save(merged, facts, folder, whole=False)
        generation.save_config(merged, facts, folder)
        return adapters.check_same_logits(trained, merged)

    def _export_gguf(
        self, kind: str, final: Path, folder: Path, facts: Facts, batches: Callable[[], Iterable[Batch]]
    ) -> Mapping[str, Any]:
        """One file of GGUF: of the whole model, which is merged first, or of the adapter alone."""
        need("gguf", f"--to {kind}")
        from transformers import AutoConfig

        from isobatch.models.causal_lm import gguf_export

        numbers, source = kind.removeprefix("gguf").strip("-") or "f16", final
        file = folder / f"model-{numbers}.gguf"
        if kind == "gguf-adapter":
            return {**gguf_export.write_adapter(final, file, f"--to {kind}"), "file": file.name}
        if self.options.adapter != "none":
            base, revision = lora.base_model_of(final)
            gguf_export.check(AutoConfig.from_pretrained(base, revision=revision or "main"), f"--to {kind}")
            source = folder / "merged"
            source.mkdir()
            self.export_as("merged", final, source, facts, batches)
        figures = gguf_export.write(source, file, numbers.upper(), f"--to {kind}")
        shutil.rmtree(folder / "merged", ignore_errors=True)
        return {**figures, "file": file.name}

    def writer(self, final: Path, bits: int | None = None) -> Callable[[Any, Sampling], TextStream]:
        """The model that is read once from `final`, as a function that streams text.

        `bits` of its matrices; by default those of training.
        """
        bits = bits or self.options.load_bits
        return partial(TextStream, *generation.open_for_generation(final, bits, self.options.remote_code))

    def sample(self, model: nn.Module, facts: Facts, folder: Path) -> str | None:
        """A continuation of a prompt; for a model trained on conversations, answers to held-out prompts."""
        options, template = self.options, facts.extra.get("template") or {}
        if options.generate_tokens == 0:
            return None
        likeliest: dict[str, Any] = {"temperature": 0.0} if template else {}  # as `predict` answers
        most, end = options.generate_tokens, template.get("end_id")
        sampling = Sampling(max_new_tokens=most, seed=self.recipe.seed, stop_token_id=end, **likeliest)
        prompts = facts.extra.get("prompts") or [(str(facts.extra.get("prompt", "")), None)]
        shown, was_training, tokenizer = [], model.training, saving.load_tokenizer(facts)
        model.eval()
        for prompt, reference in prompts:
            written = "".join(stream := TextStream(model, tokenizer, prompt, sampling)).rstrip()
            text = prompt + (written + "…" * stream.is_full if written else "(empty answer)")
            shown.append(text if reference is None else f"{text.strip()}\n[reference: {reference.strip()}]")
        model.train(was_training)
        return "\n\n".join(shown)


class CausalLM(LanguageModelTask):
    """Next-token prediction on independent blocks of tokens.

    The defaults suit training from scratch, and a loaded model has a lower rate.

    Metrics. Blocks are independent and the first token of each is not predicted, as in Hugging Face's
    run_clm; with --stride they overlap, and all tokens but the very first are predicted. `loss` is the mean
    in nats per predicted token. `word_perplexity` and `bits_per_byte` divide the nats of all predicted tokens
    of the split by its words (split at white space, and a line's end is one; left out for scripts without
    spaces) and by its UTF-8 bytes: the first token of a block costs nothing, so compare at equal --max-length
    or with --stride. With --teacher each step has `nll` and `kl`, means per predicted token. `stride` is that
    of the measurement. If a fraction of the blocks is evaluated, the mean
    is of this fraction, the tokens per word and per byte are of the whole split.
    """

    Options: ClassVar[type] = DistilledOptions
    data: ClassVar[type | str | None] = "data.text.dataset:Text"
    streamed: ClassVar = "data.streaming.text:StreamedText"
    defaults, fast, demo = (SITUATIONS[kind] for kind in ("defaults", "fast", "demo"))

    @classmethod
    def complete(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """As of any, and a loaded model's rate and its teacher's place."""
        implied = {**super().complete(values)}
        is_loaded = values.get("model", cls.defaults.get("model")) not in PRESETS
        if is_loaded and "lr" not in cls.defaults and "lr" not in values:
            implied["lr"] = FINETUNING_LR if values.get("adapter", "none") == "none" else ADAPTER_LR
        if (teacher := values.get("teacher")) is not None:
            path = Path(str(teacher)).expanduser()
            implied["teacher"] = str(path.resolve()) if path.is_dir() else teacher
            if not is_loaded and "tokenizer" not in values:
                with contextlib.suppress(NotHereError):  # where it is, this is asked again
                    implied["tokenizer"] = hub.resolve_model(implied["teacher"], "--teacher")
        return implied

    def check(self) -> None:
        distillation.check(self.options, self.recipe.tokenizer or self.model_name)
        super().check()

    def check_for_plan(self) -> None:
        self._teacher_path()  # raises where there is none
        super().check_for_plan()

    def fetch(self) -> None:
        super().fetch()
        if (path := self._teacher_path()) is not None:
            hub.fetch_weights(path, None, "--teacher")

    def _teacher_path(self) -> str | None:
        name = self.options.teacher
        return None if name is None else hub.resolve_model(name, "--teacher")

    def teacher(self) -> Teacher | None:
        path = self._teacher_path()
        return None if path is None else distillation.teacher(path, self.options)

    def model_size(self, facts: Facts) -> ModelSize:
        size, path = super().model_size(facts), self._teacher_path()
        return size if path is None else distillation.size_with(size, path, self.options, facts)

    def loss(self, model: nn.Module, batch: Batch, step: StepContext) -> dict[str, Loss]:
        """batch: tokens (B, T), length (B,). Cross-entropy in nats, summed over the predicted tokens."""
        from isobatch.models.causal_lm import chunked_cross_entropy

        count = None if step.host is None else int(step.host["token.weight"].numpy().sum())
        targets, smoothing = _targets(batch), self.recipe.label_smoothing
        if "teacher.ids" in batch:
            total, figures = distillation.loss(model, batch, targets, count, smoothing, self.options)
            step.record("distillation", figures)
        else:
            tokens = batch["tokens"].long()
            total = chunked_cross_entropy.next_token_loss(model, tokens, targets, count, smoothing)
        return {"loss": Loss(total, "token")}

    def step_figures(self, recorded: Mapping[str, Any]) -> Mapping[str, float]:
        if "distillation" not in recorded:
            return {}
        tokens, nll, kl = recorded["distillation"].tolist()
        return {"nll": nll / tokens, "kl": kl / tokens}

    def evaluate(self, model: nn.Module, batch: Batch, step: StepContext) -> dict[str, Sum | Rows]:
        """`nll`; in a mixture `nll.N` of each dataset, even if this batch has no row of it."""
        if "set" not in batch:
            return {"nll": self._nll_part(model, batch)}
        parts: dict[str, Sum | Rows] = {}
        for number in range(self._num_sets):
            rows = {name: values[batch["set"] == number] for name, values in batch.items()}
            parts[f"nll.{number}"] = self._nll_part(model, rows) if len(rows["set"]) else Sum(0.0, 0)
        return parts

    def _nll_part(self, model: nn.Module, batch: Batch) -> Sum:
        from isobatch.models.causal_lm import chunked_cross_entropy

        targets = _targets(batch)
        nll = chunked_cross_entropy.next_token_loss(model, batch["tokens"].long(), targets)
        return Sum(nll, (targets != chunked_cross_entropy.IGNORE_INDEX).sum())

    def metrics(self, parts: Mapping[str, Any], split: str, facts: Facts) -> dict[str, Any]:
        stride = self.recipe.options.get("stride") or self.recipe.max_length
        return perplexity_metrics(parts, split, facts.extra, stride)


def _targets(batch: Batch) -> Tensor:
    """(B, T) int64: the next token at each position that predicts one, IGNORE_INDEX elsewhere."""
    import torch

    from isobatch.models.causal_lm.chunked_cross_entropy import IGNORE_INDEX

    tokens_BT, length_B = batch["tokens"], batch["length"]
    shifted = torch.nn.functional.pad(tokens_BT[:, 1:].long(), (0, 1), value=IGNORE_INDEX)
    ignored = torch.arange(tokens_BT.shape[1], device=tokens_BT.device) >= (length_B - 1)[:, None]
    if "learn" in batch:
        ignored = ignored | torch.nn.functional.pad(batch["learn"][:, 1:] == 0, (0, 1), value=True)
    return shifted.masked_fill(ignored, IGNORE_INDEX)
