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
    "schedule": "lr_scheduler_type lr_scheduler",
    "optimizer": "optim",
    "adam_eps": "adam_epsilon",
    "label_smoothing": "label_smoothing_factor",
    "clip": "max_grad_norm gradient_clip_val",
    "seed": "seed_everything",
    "batch_size": "train_batch_size",
    "per_device_batch_size": "per_device_train_batch_size micro_batch_size",
    "gradient_accumulation_steps": "accumulate_grad_batches",
    "max_length": "max_sequence_length max_seq_length block_size sequence_len cutoff_len",
    "workers": "num_workers dataloader_num_workers",
    "prefetch": "prefetch_factor dataloader_prefetch_factor",
    "pin_memory": "dataloader_pin_memory",
    "processes": "devices num_processes gpus num_gpus n_gpu",
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
    "hang_timeout": "ddp_timeout",
    "eval_every": "eval_steps",
    "patience": "early_stopping_patience",
    "best_metric": "metric_for_best_model",
    "valid": "val_set_size val_size validation_file eval_file",
    "model": "model_name_or_path base_model text_model gpt2_model_name",
    "tokenizer": "tokenizer_name",
    "pruned": "pruned_model_path",
    "sparsity": "pruning_ratio target_sparsity",
    "data": "dataset dataset_name datasets dataset_dir train_file",
    "data_config": "dataset_config_name dataset_config",
    "text_column": "dataset_text_field text_column_name text_field",
    "label_column": "label_column_name label_field target_column",
    "question_column": "field_instruction prompt_column",
    "answer_column": "field_output response_column",
    "template": "chat_template",
    "dpo_loss": "loss_type",
    "remote_code": "trust_remote_code",
    "lora_r": "lora_rank r",
    "lora_bias": "bias",
    "lora_targets": "lora_target lora_target_modules",
    "generate_tokens": "max_new_tokens",
}
SYNONYMS = {word: ours for ours, words in _NAMES.items() for word in words.split()}
"""Names in other tools -> our flag, which takes the same values."""
OF_FINISHED_MODELS = {
    "generate_tokens": "tokens",
    "generate_prompt": "prompt",
    "data": "file",
    "top_k": "top",
}
"""Flags of training -> what commands that use a finished model call the same."""

ON, OFF, ANY = "true|on|yes|1", "false|off|no|0", "(?s).*"
SHARE, WHOLE, ZERO = r"0\.\d+|1\.0+", r"\d+", r"0|0\.0+"
FORMS = {
    ON: "on",
    OFF: "off",
    ANY: "a value",
    SHARE: "a share such as 0.1",
    WHOLE: "a whole number",
    ZERO: "0",
}
"""Forms of values, as patterns of the whole text in lower case -> what messages call them."""
_ALWAYS_SO = "# it is always so here"
_PLANNED = "# the plan decides it"
_HEAD, _TABLES = "head|lm_head|embed_out", "embeddings|embed_tokens|wte|word_embeddings|embed_in"
_WHOLE = {
    rf"\W*({_TABLES})\W*": "also_train embeddings",
    rf"\W*({_HEAD})\W*": "also_train head",
    rf"\W*(({_TABLES})\W+({_HEAD})|({_HEAD})\W+({_TABLES}))\W*": "also_train embeddings,head",
}
"""What trains whole beside an adapter, by the modules' names in models."""
NEVER = "9999ep"
"""An --eval-every beyond the end of any run: it evaluates at its end alone."""

_RULES: dict[str, str | dict[str, str]] = {
    "fast": {ON: "mode fast", OFF: ""},
    "full": {ON: "mode full", OFF: ""},
    "bf16": {ON: "precision bf16", OFF: ""},
    "fp16": {ON: "precision fp16", OFF: ""},
    "use_amp": {ON: "precision 16-mixed", OFF: "precision fp32"},
    "torch_dtype dtype": {
        "bfloat16|bf16": "precision bf16 # weights and moments stay in fp32",
        "float16|fp16|half": "precision fp16 # weights and moments stay in fp32",
        "float32|fp32": "precision fp32",
        "auto": _PLANNED,
    },
    "load_in_8bit": {ON: "load_bits 8", OFF: ""},
    "load_in_4bit": {ON: "load_bits 4", OFF: ""},
    "quantization_bit": {"8|4": "load_bits {}"},
    "torch_compile_mode": {"reduce-overhead": "compile reduce-overhead", "default": "compile on"},
    # Machines
    "accelerator": {"gpu|cuda": "device cuda", "cpu": "device cpu", "mps": "device mps", "auto": _PLANNED},
    "use_cuda cuda": {ON: "device cuda", OFF: "device cpu"},
    "use_cpu no_cuda": {ON: "device cpu", OFF: ""},
    "attn_implementation flash_attn": {
        "sdpa|eager": "attention {}",
        "flash_attention_2|fa2": "attention flash",
        "auto|disabled": _PLANNED,
    },
    "flash_attention": {ON: "attention flash", OFF: ""},
    "packing sample_packing": {ON: "pack on", OFF: "pack off"},
    "device_map auto_find_batch_size auto_scale_batch_size benchmark": _PLANNED,
    "per_device_eval_batch_size eval_batch_size preprocessing_num_workers local_rank": _PLANNED,
    "device_ids": "! --processes says how many GPUs, and CUDA_VISIBLE_DEVICES=0,1 which",
    "num_nodes": {"1": _PLANNED, ANY: "! `submit --to slurm --nodes N`, or the launcher, forms the nodes"},
    "deepspeed": "! use --strategy zero1, zero2 or zero3; a DeepSpeed config goes to accelerate",
    "fsdp": "! use --strategy fsdp2",
    "sync_batchnorm enable_model_summary": "# models here have nothing of the kind",
    # Data
    "use_dynamic_padding persistent_workers dataloader_persistent_workers": _ALWAYS_SO,
    "logging_first_step save_safetensors use_liger_kernel deterministic tf32": _ALWAYS_SO,
    "ignore_data_skip remove_unused_columns overwrite_output_dir": _ALWAYS_SO,
    "shuffle": {ON: _ALWAYS_SO, OFF: "! samples are always shuffled, as --seed gives: leave it out"},
    "drop_last dataloader_drop_last": {OFF: _ALWAYS_SO, ON: "! every sample is learnt: leave it out"},
    "limit_train_batches": {SHARE: "train_fraction {}", WHOLE: "! use --steps, or --train-fraction 0.1"},
    "max_samples max_train_samples overfit_batches": "! --train-fraction 0.1 takes a share of the samples",
    "max_eval_samples": "! --eval-fraction 0.1 takes a share of the validation samples",
    "test_file": "! --data takes a folder with train, valid and test files",
    "special_tokens": "! --tokenizer FOLDER takes a tokenizer with yours",
    "train_on_inputs": {ON: "response_only off", OFF: "response_only on"},
    "assistant_only_loss completion_only_loss": {ON: "response_only on", OFF: "response_only off"},
    # Schedules, evaluation, checkpoints
    "warmup_ratio": {ZERO: "warmup 0", SHARE: "warmup {%}"},
    "evaluation_strategy eval_strategy": {
        "no": f"eval_every {NEVER} # the end of the run evaluates anyway",
        "steps": "# --eval-steps says how often, by default once an epoch",
        "epoch": "eval_every 1ep",
    },
    "val_check_interval": {SHARE: "eval_every {}ep", WHOLE: "eval_every {} # in optimizer steps"},
    "check_val_every_n_epoch": {WHOLE: "eval_every {}ep"},
    "limit_val_batches": {
        ZERO: f"eval_every {NEVER} # the end of the run evaluates anyway",
        SHARE: "eval_fraction {}",
        WHOLE: "! use --eval-fraction 0.1, a share",
    },
    "load_best_model_at_end": {ON: "? patience 9999 # it keeps the best", OFF: ""},
    "save_strategy": {
        "epoch": "save_every 1ep",
        "steps|no": "# --save-every says how often; a run always keeps what it would go on from",
    },
    "output_dir": "? out {parent} name {last}",
    "resume_from_checkpoint ckpt_path": {
        ON: "# a stopped run of the same recipe goes on by itself",
        OFF: "# it is so only with --resume never",
        ANY: "! `resume RUN` goes on with a run, from its newest checkpoint",
    },
    "push_to_hub hub_model_id": "! final/ is a folder as the hub takes it: hf upload NAME RUN/final",
    "checkpoint_dir": "! checkpoints lie in the run's folder, and --out moves that",
    "wandb_project": "! WANDB_PROJECT=name in the environment names it",
    "wandb": {ON: "tracker wandb", OFF: ""},
    "do_train do_eval do_predict enable_checkpointing plot_loss": "# `auto` does it; `report RUN` draws",
    "logging_dir logging_strategy": "# --log-every says how often; it lies in the run's folder",
    "greater_is_better task_type num_labels num_sanity_val_steps data_seed": "# task, data and --seed say it",
    "fast_dev_run": {ON: "steps 3", OFF: "", WHOLE: "steps {}"},
    "disable_tqdm": {ON: "quiet on", OFF: _ALWAYS_SO},
    "enable_progress_bar verbose": {ON: _ALWAYS_SO, OFF: "quiet on"},
    # What trains
    "use_peft": {ON: "? adapter lora", OFF: ""},
    "use_dora": {ON: "adapter dora", OFF: ""},
    "finetuning_type": {"lora": "? adapter lora", "full": _ALWAYS_SO, "freeze": "! use --adapter lora"},
    "stage": {
        "sft|pt": "# --task says it",
        ANY: "! --task dpo trains on preferences; `describe` lists tasks",
    },
    "target_modules": "lora_targets {}",
    "modules_to_save lora_modules_to_save additional_target": {
        **_WHOLE,
        ANY: "! beside an adapter --also-train embeddings,head trains those tables whole, nothing else",
    },
    "neftune_noise_alpha": "! embeddings get no noise here: leave it out",
    "target_size target": "! --sparsity 0.5, and --bits 4 of qat, say how small a model becomes",
    "freeze_layers": "! --adapter lora trains few parameters",
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

`flag value ...` sets flags of ours, in which {} stands for the word's own value, {%} for it in percent,
{parent} and {last} for the parts of a path; `?` before it: where the user sets none of them. Behind `#`
stands a remark, or why it has no effect; behind `!` what to use instead. Nothing: it has no effect, unsaid.
"""
VALUES: dict[str, dict[str, str]] = {
    "also_train": _WHOLE,
    "lora_targets": {"all": "lora_targets all-linear"},
    "strategy": {
        "dp": "! DataParallel is slower than one process per GPU: use ddp",
        "ddp_spawn|ddp_find_unused_parameters_(true|false)": "strategy ddp",
        "deepspeed_stage_1": "strategy zero1",
        "deepspeed|deepspeed_stage_2": "strategy zero2",
        "deepspeed_stage_3": "strategy zero3",
        "deepspeed_stage_3_offload": "strategy zero3-offload",
        "fsdp": "strategy fsdp2",
    },
    "precision": {
        "16": "precision 16-mixed",
        "no|32-true": "precision fp32",
        "16-true|bf16-true": "! weights stay in fp32 here: use 16-mixed or bf16-mixed",
    },
    "processes": {
        "auto|-1": _PLANNED,
        r"\[?\d+(, *\d+)+\]?": "! give their number; CUDA_VISIBLE_DEVICES=0,1 says which GPUs",
    },
    "best_metric": {
        f"eval_{name}": f"best_metric {name}" for name in ("accuracy", "f1", "f1_macro", "mcc", "loss")
    },
    "mode": {"reduce-overhead": "compile reduce-overhead"},
    "schedule": {"constant_with_warmup": "schedule constant"},
    "optimizer": {
        "adamw_(torch|hf|torch_fused|apex_fused)": "optimizer adamw",
        "adamw_bnb_8bit|adamw_8bit": "optimizer adamw8bit",
        "paged_adamw_8bit": "optimizer paged-adamw8bit",
    },
}
"""Our flag -> form of its value in other tools -> what it is here, as in WORDS; any other stays."""
