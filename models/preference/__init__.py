"""Preference training of language models: DPO and ORPO on pairs of answers, KTO on judged ones."""
