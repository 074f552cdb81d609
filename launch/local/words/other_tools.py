"""Words of other tools (transformers' Trainer, TRL, axolotl, LLaMA-Factory, Lightning) as data.

SYNONYMS are other names for the same value, understood without a remark. WORDS are what a word is by the form
of its value, VALUES the values that one of our own flags has in other tools.
"""

from __future__ import annotations

_NAMES = {
    "epochs": "num_epochs num_train_epochs max_epochs",
    "steps": "max_steps",
    "lr": "learning_rate",
    "warmup": "warmup_steps",
    "schedule": "lr_scheduler_type",
    "optimizer": "optim",
    "adam_eps": "adam_epsilon",
    "label_smoothing": "label_smoothing_factor",
    "clip": "max_grad_norm gradient_clip_val",
    "per_device_batch_size": "per_device_train_batch_size micro_batch_size",
    "gradient_accumulation_steps": "accumulate_grad_batches",
    "max_length": "max_sequence_length max_seq_length block_size sequence_len cutoff_len",
    "workers": "num_workers dataloader_num_workers",
    "prefetch": "prefetch_factor dataloader_prefetch_factor",
    "pin_memory": "dataloader_pin_memory",
    "processes": "devices num_processes gpus",
    "precision": "mixed_precision",
    "compile": "compile_model torch_compile",
    "activation_checkpointing": "gradient_checkpointing",
    "out": "output_dir default_root_dir",
    "name": "run_name",
    "tracker": "report_to logger",
    "log_every": "logging_steps log_every_n_steps",
    "save_every": "save_steps",
    "keep": "save_total_limit",
    "anomaly": "detect_anomaly",
    "eval_every": "eval_steps",
    "patience": "early_stopping_patience",
    "best_metric": "metric_for_best_model",
    "valid": "val_set_size validation_file",
    "model": "model_name_or_path base_model text_model gpt2_model_name",
    "tokenizer": "tokenizer_name",
    "pruned": "pruned_model_path",
    "data": "dataset dataset_name datasets train_file",
    "data_config": "dataset_config_name",
    "text_column": "dataset_text_field",
    "template": "chat_template",
    "dpo_loss": "loss_type",
    "remote_code": "trust_remote_code",
    "lora_r": "lora_rank r",
    "lora_bias": "bias",
    "lora_targets": "lora_target_modules",
    "generate_tokens": "max_new_tokens",
}
SYNONYMS = {word: ours for ours, words in _NAMES.items() for word in words.split()}
"""Names in other tools -> our flag, which takes the same values."""
OF_FINISHED_MODELS = {
    "generate_tokens": "tokens",
    "data": "file",
    "top_k": "top",
}
"""Flags of training -> what commands that use a finished model call the same."""

ON, OFF, ANY = "true|on|yes|1", "false|off|no|0", "(?s).*"
SHARE, WHOLE, ZERO = r"0\.\d+|1\.0+", r"\d+", r"0|0\.0+"
"""Forms of values, as patterns of the whole text in lower case."""
_ALWAYS_SO = "# it is always so here"
_PLANNED = "# the plan decides it"
NEVER = "9999ep"
"""An --eval-every beyond the end of any run: it evaluates at its end alone."""

_RULES: dict[str, str | dict[str, str]] = {
    "fast": {ON: "mode fast", OFF: ""},
    "full": {ON: "mode full", OFF: ""},
    "fast_dev_run": {ON: "steps 3", OFF: "", WHOLE: "steps {}"},
    "bf16": {ON: "precision bf16", OFF: ""},
    "fp16": {ON: "precision fp16", OFF: ""},
    "use_amp": {ON: "precision 16-mixed", OFF: "precision fp32"},
    "load_in_8bit": {ON: "load_bits 8", OFF: ""},
    "load_in_4bit": {ON: "load_bits 4", OFF: ""},
    "accelerator": {"gpu|cuda": "device cuda", "cpu": "device cpu", "mps": "device mps", "auto": _PLANNED},
    "use_cpu": {ON: "device cpu", OFF: ""},
    "attn_implementation": {"sdpa|eager": "attention {}", "flash_attention_2": "attention flash"},
    "packing sample_packing": {ON: "pack on", OFF: "pack off"},
    "device_map auto_find_batch_size per_device_eval_batch_size local_rank": _PLANNED,
    "device_ids": "! --processes says how many GPUs, and CUDA_VISIBLE_DEVICES=0,1 which",
    "deepspeed": "! use --strategy zero1, zero2 or zero3; a DeepSpeed config goes to accelerate",
    "fsdp": "! use --strategy fsdp2",
    "sync_batchnorm enable_model_summary": "# models here have nothing of the kind",
    "use_dynamic_padding persistent_workers dataloader_persistent_workers": _ALWAYS_SO,
    "remove_unused_columns overwrite_output_dir logging_first_step save_safetensors": _ALWAYS_SO,
    "shuffle": {ON: _ALWAYS_SO, OFF: "! samples are always shuffled, as --seed gives: leave it out"},
    "drop_last dataloader_drop_last": {OFF: _ALWAYS_SO, ON: "! every sample is learnt: leave it out"},
    "warmup_ratio": {ZERO: "warmup 0", SHARE: "warmup {%}"},
    "evaluation_strategy eval_strategy": {
        "no": f"eval_every {NEVER} # the end of the run evaluates anyway",
        "steps": "# --eval-steps says how often, by default once an epoch",
        "epoch": "eval_every 1ep",
    },
    "val_check_interval": {SHARE: "eval_every {}ep", WHOLE: "eval_every {} # in optimizer steps"},
    "limit_val_batches": {SHARE: "eval_fraction {}"},
    "load_best_model_at_end": {ON: "?patience 9999 # it keeps the best", OFF: ""},
    "do_train do_eval": "# `auto` does it",
    "task_type num_labels": "# --task and the data say it",
    "verbose": {ON: _ALWAYS_SO, OFF: "quiet on"},
    "use_peft": {ON: "?adapter lora", OFF: ""},
    "use_dora": {ON: "adapter dora", OFF: ""},
    "target_modules": "lora_targets {}",
    # Recommenders and sequence VAEs
    "use_cache": {ON: "text_cache on", OFF: "text_cache off"},
    "freeze_gpt2": {ON: "text frozen", OFF: "text lora # --text full trains all of the encoder"},
    "fast_detection": {ON: "monitor fast", OFF: ""},
    "disable_metrics_monitoring": {ON: "monitor off", OFF: ""},
    "update_frequency": {WHOLE: "monitor_every {}"},
    "plot_frequency": {WHOLE: "plot_every {}"},
    "window_size": {WHOLE: "monitor_window {}"},
}
WORDS = {
    word: rule if isinstance(rule, dict) else {ANY: rule}
    for words, rule in _RULES.items()
    for word in words.split()
}
"""Word -> form of its value -> what it is here; the first form counts that the value has.

`flag value ...` sets flags of ours, in which {} stands for the word's own value, {%} for it in percent.
Behind `#` stands a remark, or why it has no effect; behind `!` what to use instead. Nothing: no effect,
unsaid. What begins with `?` gives way to any other word for the same flag.
"""
VALUES: dict[str, dict[str, str]] = {
    "strategy": {
        "dp": "! DataParallel is slower than one process per GPU: use ddp",
        "deepspeed_stage_1": "strategy zero1",
        "deepspeed|deepspeed_stage_2": "strategy zero2",
        "deepspeed_stage_3": "strategy zero3",
        "deepspeed_stage_3_offload": "strategy zero3-offload",
        "fsdp": "strategy fsdp2",
    },
    "precision": {"16": "precision 16-mixed", "no|32-true": "precision fp32"},
    "processes": {"auto|-1": _PLANNED},
    "mode": {"reduce-overhead": "compile reduce-overhead"},
    "optimizer": {
        "adamw_(torch|hf|torch_fused)": "optimizer adamw",
        "adamw_bnb_8bit|adamw_8bit": "optimizer adamw8bit",
        "paged_adamw_8bit": "optimizer paged-adamw8bit",
    },
}
"""Our flag -> form of its value in other tools -> what it is here, as in WORDS; any other stays."""
