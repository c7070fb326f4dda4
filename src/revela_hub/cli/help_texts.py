"""Tables for help texts: placeholders of values, texts for options of transformers, and those of its options that have no effect here."""

# What messages call the values of an option, by the name of the function that reads them.
KINDS = {"int": "a whole number", "float": "a number", "string_to_bool": "true or false"}

# The placeholder of a text option, by the option's name. `option(..., metavar=...)` overrides it.
METAVARS = {
    name: metavar
    for metavar, names in {
        "FOLDER": "output_dir cache_dir models_dir checkpoint index eval_corpus beir held_out",
        "MODEL": "model models sparse_model rerank retriever lm"
        " encoder query_encoder backbone reader pseudo_labels query_generator base",
        "PATH": "data corpus plain_text space_corpus labels",
        "FILE": "output mixture pairs card config example_queries space_queries report",
        "TEXT": "prompt query_prompt document_prompt query_prefix query_instruction",
        "COLUMN": "text_column anchor_column positive_column",
        "LANGUAGE": "language languages bm25_stopwords",
        "URL": "endpoint milvus_uri",
        "NAME": "task tasks split eval_split tag collection"
        " bm25_stemmer endpoint_model attn_implementation lr_scheduler_type batch_sampler optim report_to",
        "OWNER/NAME": "repo_id hub_model_id",
        "KIND": "kind query_kinds contexts forms",
        "VARIABLE": "api_key_env",
        "TIME": "budget",
        "DEVICE": "device",
        "TOPIC": "domains",
        "PATTERN": "exclude",
        "JSON": "extra_body",
        "MODE": "mode",
        "PART": "part parts",
        "TYPE": "precision",
        "FOLDER|auto|none": "probe",
        "QUERY": "query",
        "FOLDER|last": "resume_from_checkpoint",
        "REVISION": "revision",
    }.items()
    for name in names.split()
}

# The help texts of the options of transformers' TrainingArguments that most runs set; --help-all shows the others.
TRAINER_OPTIONS = {
    "activation_checkpointing": "Recompute activations in the backward pass to save memory.",
    "bf16": "Train under bf16 autocast.",
    "dataloader_num_workers": "Number of processes that load data.",
    "eval_steps": "Evaluate every N steps, or every fraction N < 1 of the run.",
    "eval_strategy": "When to evaluate during training.",
    "fp16": "Train under fp16 autocast.",
    "gradient_accumulation_steps": "Number of batches per training step.",
    "hub_model_id": "Repository that --push_to_hub uploads to.",
    "hub_private_repo": "Make a new repository private.",
    "learning_rate": "Peak learning rate.",
    "logging_steps": "Log every N steps.",
    "lr_scheduler_type": "Learning-rate schedule.",
    "max_grad_norm": "Maximum gradient norm; 0 disables clipping.",
    "max_steps": "Number of training steps; overrides --num_train_epochs if positive.",
    "num_train_epochs": "Number of epochs.",
    "output_dir": "Output folder.",
    "per_device_train_batch_size": "Batch size per device.",
    "push_to_hub": "Upload the exported model to the Hugging Face Hub.",
    "report_to": "Where to report metrics, e.g. tensorboard or wandb.",
    "resume_from_checkpoint": "Resume from a checkpoint folder, or from the newest complete one (last).",
    "save_steps": "Save a checkpoint every N steps, or every fraction N < 1 of the run.",
    "save_strategy": "When to save checkpoints.",
    "save_total_limit": "Maximum number of checkpoints to keep.",
    "seed": "Random seed.",
    "torch_compile": "Compile the model with torch.compile.",
    "use_cpu": "Train on the CPU even if a GPU is available.",
    "warmup_steps": "Linear warm-up: number of steps, or a fraction below 1 of all steps.",
    "weight_decay": "Weight decay of AdamW.",
}

# Options of transformers that have no effect on these commands: they belong to evaluations of the loss, to scripts, or to uploads during
# training. They are accepted with a note, but not listed. Trainers set `router_mapping` themselves.
WITHOUT_EFFECT = frozenset(
    """batch_eval_metrics bf16_full_eval do_eval do_predict do_train eval_accumulation_steps eval_do_concat_batches
    eval_use_gather_object fp16_full_eval greater_is_better hub_always_push hub_strategy include_for_metrics label_names local_rank
    logging_nan_inf_filter per_device_eval_batch_size prediction_loss_only remove_unused_columns router_mapping""".split()
)
