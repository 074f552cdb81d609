"""A tokenizer of the `tokenizers` library as metadata of a GGUF file, where llama.cpp splits texts alike.

llama.cpp knows how words are split by a name (src/llama-vocab.cpp), and a wrong one changes tokens without a
word: so the name is found by what the tokenizer does, and a tokenizer that it has no name for is refused.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isobatch.core.errors import UserError
from isobatch.core.package import table_beside
from isobatch.models.causal_lm.generation import end_ids

_SPLITS = table_beside(__file__, "gguf_splits")["splits"]
PRE_TOKENIZERS = {tuple(map(tuple, row["steps"])): row["names"] for row in _SPLITS}
"""How words are split -> llama.cpp's names for it: without and with `ignore_merges`; empty without one."""
SPACE = "\u2581"
"""What SentencePiece writes for a space."""
REPLACED = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
NORMALIZED = {1: [REPLACED], 2: [{"type": "Prepend", "prepend": SPACE}, REPLACED]}
"""The steps of SentencePiece's normalizer, by how many there are: with two a space is put before a text."""


def add(writer: Any, folder: Path, config: Any, place: str) -> None:
    """Add the tokenizer in a model's folder, its special tokens and its chat template to a GGUFWriter.

    The model's first end token is eos, a second and third stop too. Raises UserError, which begins with
    `place`, where llama.cpp would make other tokens.
    """
    from gguf import SpecialVocab, TokenType
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    parts = json.loads(tokenizer.to_str())
    of_bytes = not parts["model"].get("byte_fallback")
    logging.getLogger("gguf.vocab").setLevel(logging.ERROR)
    special = SpecialVocab(folder, load_merges=of_bytes, n_vocab=config.vocab_size)
    known = special.special_token_ids
    ends = [one for one in dict.fromkeys([*end_ids(config), known.get("eos")]) if one is not None]
    known |= dict(zip(("eos", "eot", "eom"), ends, strict=False))
    before, after = added_by(tokenizer)
    added = {row["id"]: row for row in parts["added_tokens"]}
    swallows = any(row["lstrip"] or row["rstrip"] for row in added.values())
    if swallows or before not in ([], [known.get("bos")]) or after not in ([], [known.get("eos")]):
        raise _unknown(place, "its special tokens")
    special.add_special_token = {"bos": bool(before), "eos": bool(after)}
    writer.add_tokenizer_model("gpt2" if of_bytes else "llama")
    words = {number: token for token, number in tokenizer.get_vocab().items()}
    writer.add_token_list([words.get(n, f"[unused{n}]") for n in range(config.vocab_size)])
    kinds = dict.fromkeys(range(config.vocab_size), TokenType.UNUSED) | dict.fromkeys(words, TokenType.NORMAL)
    kinds |= {n: TokenType.CONTROL if row["special"] else TokenType.USER_DEFINED for n, row in added.items()}
    if of_bytes:
        writer.add_tokenizer_pre(_pre_tokenizer(parts, place))
    else:
        kinds |= {n: TokenType.BYTE for n, word in words.items() if _is_byte(word)}
        kinds |= {n: TokenType.UNKNOWN for n, word in words.items() if word == parts["model"]["unk_token"]}
        ranks = _ranks(parts, place)
        writer.add_tokenizer_pre("default")
        writer.add_token_scores([-float(ranks.get(words.get(n, ""), len(ranks))) for n in sorted(kinds)])
        writer.add_add_space_prefix(_begins_with_space(parts, special.chat_template, place))
    writer.add_token_types([kinds[n] for n in sorted(kinds)])
    special.add_to_gguf(writer, quiet=True)


def added_by(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The ids that a tokenizer puts before and behind a text."""
    bare, ids = tokenizer.encode("a", add_special_tokens=False).ids, tokenizer.encode("a").ids
    first = next(n for n in range(len(ids)) if ids[n : n + len(bare)] == bare)
    return ids[:first], ids[first + len(bare) :]


def _pre_tokenizer(parts: Mapping[str, Any], place: str) -> str:
    """llama.cpp's name for how a byte-level BPE, as of GPT-2, Llama 3 and Qwen, splits words."""
    found, steps = parts["pre_tokenizer"] or {"type": "none"}, []
    for step in found.get("pretokenizers", [found]):
        kind = step["type"] if not step.get("add_prefix_space") and not step.get("invert") else "other"
        if kind == "Split":
            steps.append((step["pattern"].get("Regex"), step["behavior"]))
        else:
            steps.append((kind, step.get("use_regex", step.get("individual_digits"))))
    name = PRE_TOKENIZERS.get(tuple(steps), ("", ""))[bool(parts["model"].get("ignore_merges"))]
    # NFC changes only texts that are not in that form, and llama.cpp never does.
    if not name or parts["model"]["type"] != "BPE" or parts["normalizer"] not in (None, {"type": "NFC"}):
        raise _unknown(place, f"{parts['model']['type']}, {parts['normalizer']}, {steps}")
    return name


def _ranks(parts: Mapping[str, Any], place: str) -> dict[str, int]:
    """Token -> the rank of its first merge, in a BPE of SentencePiece, as of Llama 2, Mistral and Gemma.

    llama.cpp joins the two neighbours whose union ranks first, and takes any two that make a token: so the
    merges have to be all that there can be.
    """
    vocabulary, special = parts["model"]["vocab"], {row["content"] for row in parts["added_tokens"]}
    vocabulary = {token for token in vocabulary if token not in special and not _is_byte(token)}
    merges = [tuple(m.split(" ") if isinstance(m, str) else m) for m in parts["model"]["merges"]]
    splits = {(token[:n], token[n:]) for token in vocabulary for n in range(1, len(token))}
    if not {pair for pair in splits if vocabulary.issuperset(pair)} <= {*merges}:
        raise _unknown(place, "not all merges of SentencePiece")
    return {"".join(pair): rank for rank, pair in reversed([*enumerate(merges)])}


def _begins_with_space(parts: Mapping[str, Any], template: Any, place: str) -> bool:
    """Whether a space is put before a text, which llama.cpp does behind special tokens too."""
    found, split = parts["normalizer"] or {}, parts["pre_tokenizer"] or {}
    steps = found.get("normalizers", [found] if found else [])
    if split.get("type") == "Metaspace" and not split.get("split") and not steps:
        # A prompt that begins with a special token gets none: those of a template with bos_token.
        at_first = split["prepend_scheme"] == "first" and "bos_token" not in str(template)
        return bool(at_first or split["prepend_scheme"] == "always")
    splits = split and split.get("behavior") != "MergedWithPrevious"  # at spaces, of which none is left
    if splits or steps != NORMALIZED.get(len(steps)):
        raise _unknown(place, f"{steps}, {split}")
    return len(steps) == 2


def _is_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _unknown(place: str, what: str) -> UserError:
    return UserError(
        f"{place}: llama.cpp has no name for how this tokenizer splits texts ({what[:200]}), so would make"
        " other tokens: use the model in transformers, or begin with one whose tokenizer llama.cpp knows"
    )
