"""Words of other tools (transformers, peft, Lightning, torch's DataLoader ...) and what they become here.

A name for the same value is in SYNONYMS; it is understood without a remark. A word whose meaning follows from
its value is in WORDS, and a value that one of our own flags has in other tools is in VALUES: each says in one
line what it became, that it has no effect, or, where its meaning cannot be had, what to use. A flag of the
command or of the task always comes before a word of the same name.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import NamedTuple

from isobatch.core.errors import UserError
from isobatch.core.flags import BareValue

SYNONYMS = {
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "max_epochs": "epochs",
    "max_steps": "steps",
    "learning_rate": "lr",
    "warmup_steps": "warmup",
    "lr_scheduler_type": "schedule",
    "optim": "optimizer",
    "adam_epsilon": "adam_eps",
    "label_smoothing_factor": "label_smoothing",
    "max_grad_norm": "clip",
    "gradient_clip_val": "clip",
    "num_workers": "workers",
    "dataloader_num_workers": "workers",
    "prefetch_factor": "prefetch",
    "dataloader_prefetch_factor": "prefetch",
    "dataloader_pin_memory": "pin_memory",
    "max_sequence_length": "max_length",
    "max_seq_length": "max_length",
    "block_size": "max_length",
    "devices": "processes",
    "num_processes": "processes",
    "mixed_precision": "precision",
    "compile_model": "compile",
    "torch_compile": "compile",
    "gradient_checkpointing": "activation_checkpointing",
    "output_dir": "out",
    "default_root_dir": "out",
    "run_name": "name",
    "report_to": "tracker",
    "logging_steps": "log_every",
    "log_every_n_steps": "log_every",
    "save_steps": "save_every",
    "save_total_limit": "keep",
    "detect_anomaly": "anomaly",
    "eval_steps": "eval_every",
    "early_stopping_patience": "patience",
    "metric_for_best_model": "best_metric",
    "model_name_or_path": "model",
    "text_model": "model",
    "gpt2_model_name": "model",
    "tokenizer_name": "tokenizer",
    "dataset": "data",
    "dataset_name": "data",
    "dataset_config_name": "data_config",
    "pruned_model_path": "pruned",
    "trust_remote_code": "remote_code",
    "per_device_train_batch_size": "per_device_batch_size",
    "accumulate_grad_batches": "gradient_accumulation_steps",
    "lora_rank": "lora_r",
    "lora_target_modules": "lora_targets",
}
"""Names in other tools -> our flag, which takes the same values."""


class Form(NamedTuple):
    """A form of values: a pattern for the whole text in lower case, and what messages call it."""

    pattern: str
    name: str


ON, OFF = Form("true|on|yes|1", "on"), Form("false|off|no|0", "off")
SHARE = Form(r"0\.\d+|1\.0+", "a share such as 0.1")
WHOLE = Form(r"\d+", "a whole number")
ZERO = Form(r"0|0\.0+", "0")
ANY = Form("(?s).*", "a value")
NEVER = "9999ep"
"""An --eval-every beyond the end of any run: it evaluates at its end alone."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a word is here where its value has a form."""

    form: Form
    flags: Mapping[str, str] | None = field(default_factory=dict)
    """Our flags and their values, in which {} stands for the word's own and {%} for it as a share in percent;
    None: it is refused."""
    remark: str | None = ""
    """Why it has no effect, what to use in its place, or what to know; None: nothing is said."""

    def flags_for(self, value: str) -> dict[str, str]:
        """Our flags and their values for this value of the word."""
        return {name: _filled(template, value) for name, template in (self.flags or {}).items()}

    def line(self, name: str, value: str) -> str:
        """What the user reads who wrote the word; empty where nothing is said."""
        if self.remark is None:
            return ""
        ours = " ".join(f"{spelling(k)} {v}" for k, v in self.flags_for(value).items())
        if not ours:
            return f"{_as_written(name, value)} has no effect: {self.remark}"
        return f"{_as_written(name, value)} is {ours}" + (f": {self.remark}" if self.remark else "")


def _to(form: Form | str = ANY, remark: str | None = "", **flags: str) -> Meaning:
    return Meaning(_form(form), flags, remark)


def _no_effect(remark: str, form: Form | str = ANY) -> Meaning:
    return Meaning(_form(form), {}, remark)


def _refused(remark: str, form: Form | str = ANY) -> Meaning:
    return Meaning(_form(form), None, remark)


def _switch(remark: str | None = "", **flags: str) -> tuple[Meaning, Meaning]:
    """These flags where the word is on, and nothing where it is off."""
    return _to(ON, remark, **flags), _to(OFF, None)


def _form(form: Form | str) -> Form:
    return form if isinstance(form, Form) else Form(form, form.replace("|", " or "))


_ALWAYS_SO = (_no_effect("it is always so here"),)
_EVALUATION = (
    _to("no", "the end of the run evaluates anyway", eval_every=NEVER),
    _no_effect("--eval-steps (here --eval-every) says how often, by default once an epoch", "steps"),
    _to("epoch", eval_every="1ep"),
)
_EVALUATION_BATCH = (_no_effect("the plan sizes the batches of evaluations, which change no result"),)
_DROP_LAST = (
    _no_effect("every sample is learnt, and the last batch of an epoch may be smaller", OFF),
    _refused("every sample of an epoch is learnt here: leave it out", ON),
)
WORDS: Mapping[str, tuple[Meaning, ...]] = {
    "fast": _switch(None, mode="fast"),
    "full": _switch(None, mode="full"),
    "bf16": _switch(None, precision="bf16"),
    "fp16": _switch(None, precision="fp16"),
    "use_amp": (_to(ON, precision="16-mixed"), _to(OFF, precision="fp32")),
    "load_in_8bit": _switch(load_bits="8"),
    "load_in_4bit": _switch(load_bits="4"),
    "torch_compile_mode": (_to("reduce-overhead", compile="reduce-overhead"), _to("default", compile="on")),
    # Devices
    "accelerator": (
        _to("gpu|cuda", device="cuda"),
        _to("cpu", device="cpu"),
        _to("mps", device="mps"),
        _no_effect("the plan takes what there is", "auto"),
        _refused("isobatch trains on NVIDIA GPUs, Apple GPUs and CPUs: leave it out", "tpu"),
    ),
    "cuda": (_to(ON, device="cuda"), _to(OFF, device="cpu")),
    "use_cpu": _switch(device="cpu"),
    "device_map": (_no_effect("the plan places the model (--device, --strategy)"),),
    "device_ids": (_refused("--processes says how many GPUs, and CUDA_VISIBLE_DEVICES=0,1 which"),),
    "num_nodes": (
        _no_effect("it is so where no launcher says otherwise", "1"),
        _refused("the launcher forms the nodes: `slurm --nodes N`, or `accelerate launch` on each"),
    ),
    "deepspeed": (_refused("use --strategy zero1, zero2 or zero3; a DeepSpeed config goes to accelerate"),),
    "fsdp": (_refused("use --strategy fsdp2"),),
    "sync_batchnorm": (_no_effect("models here have no batch norm, so there is nothing to synchronize"),),
    # Data
    "use_dynamic_padding": _ALWAYS_SO,
    "persistent_workers": _ALWAYS_SO,
    "dataloader_persistent_workers": _ALWAYS_SO,
    "shuffle": (
        _no_effect("samples are always shuffled, in the order that --seed gives", ON),
        _refused("samples are always shuffled, in the order that --seed gives: leave it out", OFF),
    ),
    "drop_last": _DROP_LAST,
    "dataloader_drop_last": _DROP_LAST,
    "limit_train_batches": (
        _to(SHARE, train_fraction="{}"),
        _refused("the length of a run is --steps, and --train-fraction 0.1 a share of the data", WHOLE),
    ),
    # Schedules and evaluation
    "warmup_ratio": (_to(ZERO, warmup="0"), _to(SHARE, warmup="{%}")),
    "evaluation_strategy": _EVALUATION,
    "eval_strategy": _EVALUATION,
    "val_check_interval": (
        _to(SHARE, eval_every="{}ep"),
        _to(WHOLE, "in optimizer steps", eval_every="{}"),
    ),
    "check_val_every_n_epoch": (_to(WHOLE, eval_every="{}ep"),),
    "limit_val_batches": (
        _to(ZERO, "the end of the run evaluates anyway", eval_every=NEVER),
        _to(SHARE, eval_fraction="{}"),
        _refused("batches of evaluations have no fixed size: use --eval-fraction 0.1, a share", WHOLE),
    ),
    "per_device_eval_batch_size": _EVALUATION_BATCH,
    "eval_batch_size": _EVALUATION_BATCH,
    "load_best_model_at_end": (_no_effect("final/ is the best checkpoint where there is --patience"),),
    "save_strategy": (
        _to("epoch", save_every="1ep"),
        _no_effect("--save-steps (here --save-every) says how often, by default every 10 minutes", "steps"),
        _no_effect("a run always keeps the checkpoint that it would go on from", "no"),
    ),
    "enable_checkpointing": (_no_effect("a run always keeps the checkpoint that it would go on from"),),
    # What is shown
    "enable_model_summary": (_no_effect("there is no model summary to switch"),),
    "enable_progress_bar": (_no_effect("it is so by default", ON), _to(OFF, quiet="on")),
    "verbose": (_no_effect("it is so by default", ON), _to(OFF, quiet="on")),
    # Adapters
    "r": (_to(lora_r="{}"),),
    "target_modules": (_to(lora_targets="{}"),),
    "bias": (_to(lora_bias="{}"),),
    "task_type": (_no_effect("--task says it"),),
    # Recommenders
    "use_cache": (_to(ON, text_cache="on"), _to(OFF, text_cache="off")),
    "freeze_gpt2": (_to(ON, text="frozen"), _to(OFF, "--text full trains all of the encoder", text="lora")),
    # Sequence VAEs
    "fast_detection": _switch(monitor="fast"),
    "disable_metrics_monitoring": _switch(monitor="off"),
    "update_frequency": (_to(WHOLE, monitor_every="{}"),),
    "plot_frequency": (_to(WHOLE, plot_every="{}"),),
    "window_size": (_to(WHOLE, monitor_window="{}"),),
}
"""Words of other tools -> their meanings; the first counts whose form the value has."""
VALUES: Mapping[str, tuple[Meaning, ...]] = {
    "strategy": (
        _refused("DataParallel is slower than one process per GPU: use ddp", "dp"),
        _to("ddp_spawn|ddp_find_unused_parameters_(true|false)", strategy="ddp"),
        _to("deepspeed_stage_1", strategy="zero1"),
        _to("deepspeed|deepspeed_stage_2", strategy="zero2"),
        _to("deepspeed_stage_3", strategy="zero3"),
        _to("deepspeed_stage_3_offload", strategy="zero3-offload"),
        _to("fsdp", strategy="fsdp2"),
    ),
    "precision": (
        _to("16", precision="16-mixed"),
        _to("no|32-true", precision="fp32"),
        _refused("weights stay in fp32 here: use 16-mixed or bf16-mixed", "16-true|bf16-true"),
    ),
    "processes": (
        _no_effect("the plan takes as many as are of use", "auto|-1"),
        _refused("give their number; CUDA_VISIBLE_DEVICES=0,1 says which GPUs", r"\[?\d+(, *\d+)+\]?"),
    ),
    "mode": (_to("reduce-overhead", compile="reduce-overhead"),),
    "schedule": (_to("constant_with_warmup", schedule="constant"),),
    "optimizer": (
        _to("adamw_(torch|hf|torch_fused|apex_fused)", optimizer="adamw"),
        _to("adamw_bnb_8bit|adamw_8bit", optimizer="adamw8bit"),
        _to("paged_adamw_8bit", optimizer="paged-adamw8bit"),
    ),
}
"""Our flag -> values that it has in other tools; any other value stays as it is."""


class Translation(NamedTuple):
    """Flags in our words."""

    flags: dict[str, str]
    """Our name -> value; names that nobody knows are among them."""
    written: dict[str, str]
    """Our name -> the name that the user wrote."""
    notes: list[str]
    """A line for each word whose meaning is not plain."""


def translate(flags: Mapping[str, str], own: Container[str]) -> Translation:
    """Flags as they were written in our words. `own`: names of the command's and the task's flags.

    Raises UserError for a word whose meaning cannot be had, and where two words set one flag.
    """
    found = Translation({}, {}, [])
    for name, value in flags.items():
        meaning = _meaning(name, value, own)
        if meaning is None:
            ours = {our_name(name, own): value}
        else:
            ours = meaning.flags_for(value)
            found.notes.extend(filter(None, [meaning.line(name, value)]))
        for key, text in ours.items():
            if key in found.written:
                first = spelling(found.written[key])
                raise UserError(f"{spelling(name)} and {first} say the same thing: give one of them")
            found.flags[key], found.written[key] = text, name
    return found


def _meaning(name: str, value: str, own: Container[str]) -> Meaning | None:
    """The meaning of a word with this value; None where name and value mean what they mean here."""
    is_foreign = name not in own and name in WORDS
    meanings = WORDS[name] if is_foreign else VALUES.get(our_name(name, own), ())
    for meaning in meanings:
        if re.fullmatch(meaning.form.pattern, value.lower()):
            if meaning.flags is None:
                raise UserError(f"{_as_written(name, value)}: {meaning.remark}")
            return meaning
    if not is_foreign:
        return None
    if isinstance(value, BareValue):
        raise UserError(f"{spelling(name)}: needs a value")
    forms = " nor ".join(m.form.name for m in meanings)
    raise UserError(f"{spelling(name)} {value}: is neither {forms}")


def our_name(name: str, own: Container[str]) -> str:
    """Our name of a flag that a word names; the word itself where it names none. `own`: as in `translate`."""
    return name if name in own else SYNONYMS.get(name, name)


def _filled(template: str, value: str) -> str:
    """The template with the value in place of {} or {%}; a list as Python writes it becomes a,b."""
    if template == "{%}":
        return f"{(Decimal(value) * 100).normalize():f}%"
    if items := re.fullmatch(r"[\[(](.*)[\])]", value):
        value = ",".join(word.strip(" '\"") for word in items[1].split(",") if word.strip())
    return value if template == "{}" else template.replace("{}", value)


def _as_written(name: str, value: str) -> str:
    return spelling(name) if isinstance(value, BareValue) else f"{spelling(name)} {value}"


def words_for(known: Iterable[str]) -> set[str]:
    """Words of other tools that a command with these flags takes or answers."""
    names = set(known)
    words = {name for name, meanings in WORDS.items() if _flags_set_by(meanings) <= names}
    return words | {name for name, ours in SYNONYMS.items() if ours in names}


def _flags_set_by(meanings: Iterable[Meaning]) -> set[str]:
    return {name for meaning in meanings for name in meaning.flags or ()}


def spelling(name: str) -> str:
    """A flag as it is typed: `--batch-size`."""
    return "--" + name.replace("_", "-")
