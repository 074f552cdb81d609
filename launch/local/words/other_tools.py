"""Words of other tools (transformers, TRL, peft, axolotl, LLaMA-Factory, Lightning, ultralytics, DataLoader).

A name for the same value is in SYNONYMS; it is understood without a remark. A word whose meaning follows from
its value is in WORDS, and a value that one of our own flags has in other tools is in VALUES: each says in one
line what it became, that it has no effect, or, where its meaning cannot be had, what to use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from isobatch.launch.local.words.meanings import (
    ANY,
    NEVER,
    NO_PATIENCE_ENDS,
    OFF,
    ON,
    SHARE,
    WHOLE,
    ZERO,
    Meaning,
    no_effect,
    refused,
    switch,
    to,
    unless_given,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

OF_FINISHED_MODELS = {
    "generate_tokens": "tokens",
    "generate_prompt": "prompt",
    "data": "file",
    "top_k": "top",
}
"""Flags of training -> what commands that use a finished model call the same."""

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
    "logger": "tracker",
    "logging_steps": "log_every",
    "log_every_n_steps": "log_every",
    "save_steps": "save_every",
    "save_total_limit": "keep",
    "detect_anomaly": "anomaly",
    "eval_steps": "eval_every",
    "early_stopping_patience": "patience",
    "metric_for_best_model": "best_metric",
    "val_set_size": "valid",
    "val_size": "valid",
    "validation_file": "valid",
    "eval_file": "valid",
    "model_name_or_path": "model",
    "text_model": "model",
    "gpt2_model_name": "model",
    "tokenizer_name": "tokenizer",
    "dataset": "data",
    "dataset_name": "data",
    "dataset_config_name": "data_config",
    "pruned_model_path": "pruned",
    "loss_type": "dpo_loss",
    "trust_remote_code": "remote_code",
    "per_device_train_batch_size": "per_device_batch_size",
    "accumulate_grad_batches": "gradient_accumulation_steps",
    "lora_rank": "lora_r",
    "base_model": "model",
    "sequence_len": "max_length",
    "cutoff_len": "max_length",
    "micro_batch_size": "per_device_batch_size",
    "train_batch_size": "batch_size",
    "lr0": "lr",
    "lrf": "lr_floor",
    "lr_scheduler": "schedule",
    "lora_target": "lora_targets",
    "datasets": "data",
    "dataset_dir": "data",
    "train_file": "data",
    "dataset_config": "data_config",
    "dataset_text_field": "text_column",
    "text_column_name": "text_column",
    "label_column_name": "label_column",
    "chat_template": "template",
    "gpus": "processes",
    "num_gpus": "processes",
    "n_gpu": "processes",
    "save_dir": "out",
    "project": "out",
    "ddp_timeout": "hang_timeout",
    "max_new_tokens": "generate_tokens",
    "lora_target_modules": "lora_targets",
    "target_column": "label_column",
    "label_field": "label_column",
    "text_field": "text_column",
    "pruning_ratio": "sparsity",
    "target_sparsity": "sparsity",
    "input": "data",
    "input_file": "data",
    "embedding_size": "dim",
    "embedding_dim": "dim",
    "factors": "dim",
    "num_factors": "dim",
    "no_components": "dim",
    "reg_weight": "l2",
    "regularization": "l2",
    "iterations": "epochs",
    "stopping_step": "patience",
    "neg_sampling_num": "negatives",
    "user_id_field": "user_column",
    "item_id_field": "item_column",
    "time_field": "time_column",
    "rating_field": "rating_column",
    "topk": "top_k",
    "item_alpha": "l2",
    "user_alpha": "l2",
    "random_state": "seed",
    "field_instruction": "question_column",
    "field_output": "answer_column",
    "prompt_column": "question_column",
    "response_column": "answer_column",
    "seed_everything": "seed",
}
"""Names in other tools -> our flag, which takes the same values."""

ELSEWHERE = {
    "valid": "it holds out the last 5 % of the rows, or what lies in a file named valid",
    "also_train": "beside an adapter the head trains whole, and nothing else",
}
"""Our flag -> what to know where a word of another tool stands for it, and the task lacks it."""
_ALWAYS_SO = (no_effect("it is always so here"),)
_EVALUATION = (
    to("no", "the end of the run evaluates anyway", eval_every=NEVER),
    no_effect("--eval-steps (here --eval-every) says how often, by default once an epoch", "steps"),
    to("epoch", eval_every="1ep"),
)
_EVALUATION_BATCH = (no_effect("the plan sizes the batches of evaluations, which change no result"),)
_AUTO_TRAINS = (no_effect("`auto` trains, evaluates and exports"),)
_BATCH_FINDER = (no_effect("the plan sizes micro-batches; the global batch is the recipe's and stays"),)
_EXACT = (no_effect("samples, order and noise are the same on any machine; `verify` proves it"),)
_ON_THE_HUB = (refused("final/ is a folder as the hub takes it: hf upload NAME RUN/final"),)
_RESUMES = (
    no_effect("a stopped run of the same recipe goes on by itself", ON),
    no_effect("it is so only with --resume never", OFF),
    refused("`resume RUN` goes on with a run, from its newest checkpoint"),
)
_DTYPE = (
    to("bfloat16|bf16", "weights and moments stay in fp32", precision="bf16"),
    to("float16|fp16|half", "weights and moments stay in fp32", precision="fp16"),
    to("float32|fp32", precision="fp32"),
    no_effect("the plan takes what the machine computes well", "auto"),
)
_ATTENTION = (
    to("sdpa|eager", attention="{}"),
    to("flash_attention_2|fa2", attention="flash"),
    no_effect("the plan takes torch's fused kernel", "auto|disabled"),
)
_ANSWERS_ALONE = (to(ON, response_only="on"), to(OFF, response_only="off"))
_PACKING = (to(ON, pack="on"), to(OFF, pack="off"))
_EMBEDDINGS, _HEAD = "(embeddings|embed_tokens|wte|word_embeddings|embed_in)", "(head|lm_head|embed_out)"
_WHOLE_TABLES = (
    to(rf"\W*{_EMBEDDINGS}\W*", also_train="embeddings"),
    to(rf"\W*{_HEAD}\W*", also_train="head"),
    to(rf"\W*({_EMBEDDINGS}\W+{_HEAD}|{_HEAD}\W+{_EMBEDDINGS})\W*", also_train="embeddings,head"),
    refused("beside an adapter --also-train embeddings,head trains those tables whole, and nothing else"),
)
"""What trains whole beside an adapter, by the modules' names in models."""
_HOW_SMALL = "the size follows from --sparsity 0.5, and from --bits 4 of qat"
_SHARE_OF_SAMPLES = (refused("--train-fraction 0.1 takes a share of the samples"),)
_DROP_LAST = (
    no_effect("every sample is learnt, and the last batch of an epoch may be smaller", OFF),
    refused("every sample of an epoch is learnt here: leave it out", ON),
)
WORDS: Mapping[str, tuple[Meaning, ...]] = {
    "fast": switch(None, mode="fast"),
    "full": switch(None, mode="full"),
    "bf16": switch(None, precision="bf16"),
    "fp16": switch(None, precision="fp16"),
    "use_amp": (to(ON, precision="16-mixed"), to(OFF, precision="fp32")),
    "load_in_8bit": switch(load_bits="8"),
    "load_in_4bit": switch(load_bits="4"),
    "torch_compile_mode": (to("reduce-overhead", compile="reduce-overhead"), to("default", compile="on")),
    # Devices
    "accelerator": (
        to("gpu|cuda", device="cuda"),
        to("cpu", device="cpu"),
        to("mps", device="mps"),
        no_effect("the plan takes what there is", "auto"),
        refused("isobatch trains on NVIDIA GPUs, Apple GPUs and CPUs: leave it out", "tpu"),
    ),
    "cuda": (to(ON, device="cuda"), to(OFF, device="cpu")),
    "use_cpu": switch(device="cpu"),
    "device_map": (no_effect("the plan places the model (--device, --strategy)"),),
    "device_ids": (refused("--processes says how many GPUs, and CUDA_VISIBLE_DEVICES=0,1 which"),),
    "num_nodes": (
        no_effect("it is so where no launcher says otherwise", "1"),
        refused("the launcher forms the nodes: `slurm --nodes N`, or `accelerate launch` on each"),
    ),
    "deepspeed": (refused("use --strategy zero1, zero2 or zero3; a DeepSpeed config goes to accelerate"),),
    "fsdp": (refused("use --strategy fsdp2"),),
    "sync_batchnorm": (no_effect("models here have no batch norm, so there is nothing to synchronize"),),
    # Data
    "use_dynamic_padding": _ALWAYS_SO,
    "persistent_workers": _ALWAYS_SO,
    "dataloader_persistent_workers": _ALWAYS_SO,
    "shuffle": (
        no_effect("samples are always shuffled, in the order that --seed gives", ON),
        refused("samples are always shuffled, in the order that --seed gives: leave it out", OFF),
    ),
    "drop_last": _DROP_LAST,
    "dataloader_drop_last": _DROP_LAST,
    "limit_train_batches": (
        to(SHARE, train_fraction="{}"),
        refused("the length of a run is --steps, and --train-fraction 0.1 a share of the data", WHOLE),
    ),
    # Schedules and evaluation
    "warmup_ratio": (to(ZERO, warmup="0"), to(SHARE, warmup="{%}")),
    "evaluation_strategy": _EVALUATION,
    "eval_strategy": _EVALUATION,
    "val_check_interval": (
        to(SHARE, eval_every="{}ep"),
        to(WHOLE, "in optimizer steps", eval_every="{}"),
    ),
    "check_val_every_n_epoch": (to(WHOLE, eval_every="{}ep"),),
    "limit_val_batches": (
        to(ZERO, "the end of the run evaluates anyway", eval_every=NEVER),
        to(SHARE, eval_fraction="{}"),
        refused("batches of evaluations have no fixed size: use --eval-fraction 0.1, a share", WHOLE),
    ),
    "per_device_eval_batch_size": _EVALUATION_BATCH,
    "eval_batch_size": _EVALUATION_BATCH,
    "load_best_model_at_end": (
        unless_given(ON, "final/ is the best checkpoint, and nothing stops early", patience=NO_PATIENCE_ENDS),
        to(OFF, None),
    ),
    "save_strategy": (
        to("epoch", save_every="1ep"),
        no_effect("--save-steps (here --save-every) says how often, by default every 10 minutes", "steps"),
        no_effect("a run always keeps the checkpoint that it would go on from", "no"),
    ),
    "enable_checkpointing": (no_effect("a run always keeps the checkpoint that it would go on from"),),
    # Transformers' Trainer and TRL
    "overwrite_output_dir": (no_effect("another recipe is another folder; --again runs the same once more"),),
    **dict.fromkeys(("do_train", "do_eval", "do_predict"), _AUTO_TRAINS),
    **dict.fromkeys(("push_to_hub", "hub_model_id"), _ON_THE_HUB),
    **dict.fromkeys(("resume_from_checkpoint", "ckpt_path"), _RESUMES),
    **dict.fromkeys(("auto_find_batch_size", "auto_scale_batch_size"), _BATCH_FINDER),
    **dict.fromkeys(("torch_dtype", "dtype"), _DTYPE),
    **dict.fromkeys(("attn_implementation", "flash_attn"), _ATTENTION),
    **dict.fromkeys(("assistant_only_loss", "completion_only_loss"), _ANSWERS_ALONE),
    **dict.fromkeys(("packing", "sample_packing"), _PACKING),
    "test_file": (refused("--data takes a folder with train, valid and test files"),),
    "train_on_inputs": (to(ON, response_only="off"), to(OFF, response_only="on")),
    "ignore_data_skip": (no_effect("a resumed run repeats and skips no sample, and waits for none"),),
    "greater_is_better": (no_effect("the metric says it"),),
    "remove_unused_columns": (no_effect("a task reads the columns that it needs"),),
    "local_rank": (no_effect("the launcher says it"),),
    "tf32": (no_effect("fp32 is exact here; --precision bf16 is faster"),),
    "data_seed": (no_effect("--seed decides the order, too"),),
    "save_safetensors": _ALWAYS_SO,
    "logging_dir": (no_effect("what a tracker writes lies in the run's folder"),),
    "logging_strategy": (no_effect("--log-every says how often, by default every step"),),
    "logging_first_step": _ALWAYS_SO,
    "use_liger_kernel": (no_effect("the head's logits are made in chunks anyway"),),
    "neftune_noise_alpha": (refused("embeddings get no noise here: leave it out"),),
    "preprocessing_num_workers": (no_effect("data is prepared once, and kept"),),
    "output_dir": (unless_given(ANY, "", out="{parent}", name="{last}"),),
    **dict.fromkeys(("modules_to_save", "lora_modules_to_save", "additional_target"), _WHOLE_TABLES),
    "special_tokens": (refused("a tokenizer has its own: --tokenizer FOLDER takes one with yours"),),
    "num_labels": (no_effect("the data says it"),),
    "freeze_layers": (refused("no layer is frozen by its number; --adapter lora trains few parameters"),),
    "checkpoint_dir": (refused("checkpoints lie in the run's folder, and --out moves that"),),
    "no_cuda": switch(device="cpu"),
    "use_cuda": (to(ON, device="cuda"), to(OFF, device="cpu")),
    # axolotl, LLaMA-Factory
    "use_peft": (unless_given(ON, None, adapter="lora"), to(OFF, None)),  # peft has --use_dora beside it
    "use_dora": switch(adapter="dora"),
    "finetuning_type": (
        to("lora", adapter="lora"),
        no_effect("all parameters train where there is no --adapter", "full"),
        refused("use --adapter lora", "freeze"),
    ),
    "stage": (
        no_effect("--task says it", "sft|pt"),
        refused("--task dpo trains on preferences", "dpo"),
        refused("--task says what is trained: `tasks` lists them"),
    ),
    "quantization_bit": (to("8|4", load_bits="{}"),),
    "flash_attention": switch(attention="flash"),
    "plot_loss": (no_effect("`report RUN` draws it"),),
    "max_samples": _SHARE_OF_SAMPLES,
    "max_train_samples": _SHARE_OF_SAMPLES,
    "max_eval_samples": (refused("--eval-fraction 0.1 takes a share of the validation samples"),),
    # Compression
    "target_size": (refused(_HOW_SMALL),),
    "target": (refused(_HOW_SMALL, r"\d.*"), to(label_column="{}")),
    "overfit_batches": _SHARE_OF_SAMPLES,
    "wandb": switch(tracker="wandb"),
    "wandb_project": (refused("WANDB_PROJECT=name in the environment names it"),),
    # Lightning, ultralytics
    "num_sanity_val_steps": (no_effect("nothing is evaluated before the first step"),),
    "deterministic": _EXACT,
    "benchmark": (no_effect("the plan chooses the kernels"),),
    "fast_dev_run": (to(ON, steps="3"), to(OFF, None), to(WHOLE, steps="{}")),
    "imgsz": (refused("images are for a task of your own (--task ./file.py:Class)"),),
    "amp": (to(ON, precision="16-mixed"), to(OFF, precision="fp32")),
    "exist_ok": (no_effect("another recipe is another folder"),),
    "val": (no_effect("it is so by default", ON), to(OFF, "the end of the run evaluates", eval_every=NEVER)),
    "cos_lr": switch(schedule="cosine"),
    # What is shown
    "disable_tqdm": (to(ON, quiet="on"), no_effect("it is so by default", OFF)),
    "enable_model_summary": (no_effect("there is no model summary to switch"),),
    "enable_progress_bar": (no_effect("it is so by default", ON), to(OFF, quiet="on")),
    "verbose": (no_effect("it is so by default", ON), to(OFF, quiet="on")),
    # Adapters
    "r": (to(lora_r="{}"),),
    "target_modules": (to(lora_targets="{}"),),
    "bias": (to(lora_bias="{}"),),
    "task_type": (no_effect("--task says it"),),
    # Recommenders
    "use_cache": (to(ON, text_cache="on"), to(OFF, text_cache="off")),
    "alpha": (refused("an interaction counts once here, whatever its weight; LoRA's is --lora-alpha"),),
    **dict.fromkeys(
        ("user_features", "item_features"),
        (refused("tables users.csv and items.csv with texts, beside the interactions, are read"),),
    ),
    **dict.fromkeys(("n_jobs", "num_threads"), (no_effect("training takes all cores that it may use"),)),
    "valid_metric": (refused("ndcg at --top-k of the validation split chooses the best checkpoint"),),
    "train_neg_sample_args": (refused("--negatives 4 is how many items a pair is trained against"),),
    **dict.fromkeys(
        ("filter_already_liked_items", "remove_seen"),
        (no_effect("it is so by default", ON), to(OFF, with_seen="on")),
    ),
    "freeze_gpt2": (to(ON, text="frozen"), to(OFF, "--text full trains all of the encoder", text="lora")),
    # Sequence VAEs
    "fast_detection": switch(monitor="fast"),
    "disable_metrics_monitoring": switch(monitor="off"),
    "update_frequency": (to(WHOLE, monitor_every="{}"),),
    "plot_frequency": (to(WHOLE, plot_every="{}"),),
    "window_size": (to(WHOLE, monitor_window="{}"),),
}
"""Words of other tools -> their meanings; the first counts whose form the value has."""
VALUES: Mapping[str, tuple[Meaning, ...]] = {
    "also_train": _WHOLE_TABLES[:3],
    "lora_targets": (to("all", lora_targets="all-linear"),),
    "loss": (
        refused("--loss bpr ranks pairs, without WARP's search for a violator", r"warp|warp-kos|k-os"),
        refused("--loss bpr is the smooth pairwise loss", r"hinge|adaptive_hinge|max_margin"),
        to("logistic|pointwise", loss="bce"),
    ),
    "model": (
        refused("use --preset ids --loss bpr", r"bpr(mf)?|vbpr|lightfm"),
        refused("use --preset ids, a product of vectors", r"i?als|w?mf|w?rmf|svd(pp|\+\+)?|fm|nmf|pmf"),
        refused("use --text off --loss bce --head neumf; mlp or dot are its halves", r"ncf|neumf|gmf"),
        refused(
            "every run fits it beside its model: `recommend RUN --by ease`", r"ease|slim(elastic)?|ease_?r"
        ),
        refused("every run fits it beside its model: `recommend RUN --by knn`", r"(item|i)-?_?knn"),
        refused(
            "every run has it beside its model: `recommend RUN --by popularity`", r"(most)?-?_?pop(ular)?"
        ),
        refused(
            "no model here reads the order of items; --preset ids is the nearest", r"sasrec|gru4rec|bert4rec"
        ),
        refused("no graph is read here; --preset ids is the nearest", r"lightgcn|ngcf"),
    ),
    "strategy": (
        refused("DataParallel is slower than one process per GPU: use ddp", "dp"),
        to("ddp_spawn|ddp_find_unused_parameters_(true|false)", strategy="ddp"),
        to("deepspeed_stage_1", strategy="zero1"),
        to("deepspeed|deepspeed_stage_2", strategy="zero2"),
        to("deepspeed_stage_3", strategy="zero3"),
        to("deepspeed_stage_3_offload", strategy="zero3-offload"),
        to("fsdp", strategy="fsdp2"),
    ),
    "precision": (
        to("16", precision="16-mixed"),
        to("no|32-true", precision="fp32"),
        refused("weights stay in fp32 here: use 16-mixed or bf16-mixed", "16-true|bf16-true"),
    ),
    "processes": (
        no_effect("the plan takes as many as are of use", "auto|-1"),
        refused("give their number; CUDA_VISIBLE_DEVICES=0,1 says which GPUs", r"\[?\d+(, *\d+)+\]?"),
    ),
    "best_metric": tuple(
        to(f"eval_{name}", best_metric=name) for name in ("accuracy", "f1", "f1_macro", "mcc", "loss")
    ),
    "mode": (to("reduce-overhead", compile="reduce-overhead"),),
    "schedule": (to("constant_with_warmup", schedule="constant"),),
    "optimizer": (
        to("adamw_(torch|hf|torch_fused|apex_fused)", optimizer="adamw"),
        to("adamw_bnb_8bit|adamw_8bit", optimizer="adamw8bit"),
        to("paged_adamw_8bit", optimizer="paged-adamw8bit"),
    ),
}
"""Our flag -> values that it has in other tools; any other value stays as it is."""
PRECISER = {("lora", "dora"), ("lora", "qlora")}
"""Values of which the second says the first more precisely: where two words set a flag to both, it counts."""
