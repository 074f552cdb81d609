"""Tokenizers, by the library of that name: found, opened from files of three formats, or trained on text."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer

from isobatch.core import hub_cache
from isobatch.core.errors import UserError, explain_errors, nearest_file
from isobatch.core.package import table_beside
from isobatch.data.digests import file_hash

TRAINING_CHARACTERS = 20_000_000
END_OF_TEXT = "<|endoftext|>"
_NAMES = table_beside(__file__)
FORMATS = {kind: [names.split() for names in files] for kind, files in _NAMES["files"].items()}
"""Format -> the names of each of its files."""
TOKENIZER_FILES = tuple(name for files in FORMATS.values() for names in files for name in names)
SETTINGS_FILES = ("special_tokens_map.json", "tokenizer_config.json")
CHAT_TEMPLATE_FILE = "chat_template.jinja"
BERT_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
USUAL_SPECIAL_TOKENS = {role: tokens.split() for role, tokens in _NAMES["tokens"].items()}


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """Where a tokenizer comes from: a folder or file, or a hub id; with neither it is to be trained."""

    path: Path | None = None
    hub_id: str | None = None
    revision: str | None = None
    model: Path | None = None
    """The folder with the config.json beside which transformers opens it."""

    def identity(self) -> Any:
        """What the tokens depend on, as JSON: file name -> hash, [hub id, revision], or "trained"."""
        if self.path is not None:
            settings = settings_files(self.path, (*SETTINGS_FILES, CHAT_TEMPLATE_FILE))
            files = _format_and_files(self.path)[1] + settings
            config = (self.model / "config.json").read_text(encoding="utf-8") if self.model else "{}"
            kind = {name: value for name, value in json.loads(config).items() if name == "model_type"}
            return {f.name: file_hash(f) for f in files} | kind
        return [self.hub_id, self.revision] if self.hub_id else "trained"


def locate(tokenizer: str | None, model: str | None, revision: str | None) -> TokenizerSource:
    """The source that --tokenizer names, else the model's own tokenizer, else one to be trained.

    Raises UserError where the named one is neither a file, a folder nor a hub id that can be had.
    """
    folder = Path(tokenizer or model or "").expanduser()
    found = TokenizerSource()
    if tokenizer is not None and folder.exists():
        _format_and_files(folder)
        found = TokenizerSource(folder)
    elif tokenizer is not None:
        found = _hub_source("--tokenizer", tokenizer, None)
    elif model is not None and folder.is_dir():
        found = TokenizerSource(folder if _existing_files(folder) else None)
    elif model and "/" in model:  # without a slash it is a built-in preset, which has no tokenizer
        found = _hub_source("--model", model, revision)
    return dataclasses.replace(found, model=_config_folder(found.path, model, revision))


def _config_folder(path: Path | None, model: str | None, revision: str | None) -> Path | None:
    """The model's folder, else the tokenizer's, if it holds a config.json."""
    if path is None or not path.is_dir():
        return None
    cached = hub_cache.snapshot("models", model, revision) if model and hub_cache.is_id(model) else None
    folders = (Path(model).expanduser() if model else None, cached, path)
    return next((f for f in folders if f is not None and (f / "config.json").is_file()), None)


def _hub_source(flag: str, name: str, revision: str | None) -> TokenizerSource:
    if not hub_cache.is_id(name):
        raise UserError(f"{flag} {name}: there is no such folder or file{nearest_file(name)}")
    if folder := hub_cache.snapshot("models", name, revision):
        if _existing_files(folder):
            return TokenizerSource(path=folder)
    else:
        hub_cache.require_hub(flag, name)
    return TokenizerSource(hub_id=name, revision=revision)


def _existing_files(path: Path) -> list[Path]:
    return [path / n for n in TOKENIZER_FILES if (path / n).is_file()] if path.is_dir() else [path]


def settings_files(path: Path, names: Iterable[str] = SETTINGS_FILES) -> list[Path]:
    """The files of these names that lie beside a tokenizer."""
    folder = path if path.is_dir() else path.parent
    return [folder / n for n in names if (folder / n).is_file()]


def _format_and_files(path: Path) -> tuple[str, list[Path]]:
    """The format (json, bpe or wordpiece) and the files that hold the vocabulary."""
    names = {f.name: f for f in _existing_files(path)}
    pair = [name for part in FORMATS["bpe"] for name in part]
    if path.is_file() and path.name in pair:
        names = {f.name: f for f in _existing_files(path.parent) if f.name in pair}
    elif path.is_file():
        names = {{".json": "tokenizer.json", ".txt": "vocab.txt"}.get(path.suffix, ""): path}
    for file_format, parts in FORMATS.items():
        found = [next((names[n] for n in part if n in names), None) for part in parts]
        if None not in found:
            return file_format, [file for file in found if file]
    raise UserError(
        f"--tokenizer {path}: holds no tokenizer: wanted tokenizer.json, vocab.json with merges.txt "
        "(or encoder.json with vocab.bpe), or vocab.txt"
    )


def open_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a folder or file, without truncation or padding.

    Raises UserError where there is none or it cannot be read.
    """
    file_format, files = _format_and_files(path)
    with explain_errors(f"--tokenizer {path}: cannot be read", Exception):  # the library's for every fault
        if file_format == "bpe":
            tokenizer = _byte_level_bpe(files[0], files[1])
        else:
            tokenizer = Tokenizer.from_file(str(files[0])) if file_format == "json" else _wordpiece(files[0])
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def open_as_transformers(path: Path, model: Path | None) -> Tokenizer:
    """The tokenizer in a folder as AutoTokenizer opens it beside a model's config.json.

    For some model types that is another than its tokenizer.json says, and other programs encode by it.
    """
    tokenizer = open_tokenizer(path)
    if model is None:
        return tokenizer
    from transformers import AutoConfig, AutoTokenizer

    try:
        opened = AutoTokenizer.from_pretrained(path, config=AutoConfig.from_pretrained(model))
        theirs: Tokenizer = opened.backend_tokenizer
    except Exception:  # it needs code that came along or a library that is not here, or is none of this kind
        return tokenizer
    if theirs.get_vocab_size() < tokenizer.get_vocab_size():  # it knows none of the folder's files
        return tokenizer
    theirs.no_truncation()
    theirs.no_padding()
    ours, other = (json.loads(one.to_str()) for one in (tokenizer, theirs))
    decisive = ("normalizer", "pre_tokenizer", "model", "post_processor")
    return tokenizer if all(ours[part] == other[part] for part in decisive) else theirs


def _byte_level_bpe(vocabulary: Path | None, merges: Path | None) -> Tokenizer:
    model = models.BPE.from_file(str(vocabulary), str(merges)) if vocabulary else models.BPE()
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if tokenizer.token_to_id(END_OF_TEXT) is not None:
        tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def _wordpiece(file: Path) -> Tokenizer:
    vocabulary = {token: i for i, token in enumerate(file.read_text(encoding="utf-8").splitlines())}
    # The file does not say whether it is cased; only a cased vocabulary has tokens that begin with A-Z.
    lowercase = not any("A" <= token[:1] <= "Z" for token in vocabulary)
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([t for t in BERT_TOKENS if t in vocabulary])
    return tokenizer


def download(name: str, revision: str | None) -> Path:
    """Fetch a hub tokenizer; returns its folder in the cache. Raises UserError where that fails."""
    from huggingface_hub import snapshot_download

    wanted = [*TOKENIZER_FILES, *SETTINGS_FILES, CHAT_TEMPLATE_FILE, "config.json"]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=wanted))
    except Exception as error:  # network, missing repository, gated: each becomes one line for the user
        raise UserError(f"the tokenizer of {name}: {hub_cache.explain_hub_error(error, revision)}") from None


def train_byte_level_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE, as of GPT-2, of at most `vocab_size` tokens.

    It reads the first 20 million characters. The same texts give the same tokenizer.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return _trained(_byte_level_bpe(None, None), texts, vocab_size, [END_OF_TEXT], initial_alphabet=alphabet)


def _trained(
    tokenizer: Tokenizer, texts: Iterable[str], vocab_size: int, special_tokens: list[str], **more: Any
) -> Tokenizer:
    trainer = BpeTrainer(vocab_size=vocab_size, special_tokens=special_tokens, show_progress=False, **more)
    tokenizer.train_from_iterator(_first_characters(texts, TRAINING_CHARACTERS), trainer)
    return tokenizer


def train_lowercase_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a lowercase BPE with BERT's special tokens, of at most `vocab_size` tokens.

    It reads the first 20 million characters. It is not WordPiece, because that trainer numbers the alphabet
    in the order of a hash map: two runs give different ids (tokenizers 0.22).
    """
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return _trained(tokenizer, texts, vocab_size, list(BERT_TOKENS))


def ensure_special_tokens(tokenizer: Tokenizer) -> None:
    """Make the tokenizer write [CLS] text [SEP] (or <s> text </s>) where it adds no special tokens itself.

    A tokenizer that already adds some, or that has neither pair of tokens, stays as it is.
    """
    if tokenizer.num_special_tokens_to_add(False):
        return
    for first, last in (("[CLS]", "[SEP]"), ("<s>", "</s>")):
        ids = [tokenizer.token_to_id(token) for token in (first, last)]
        if None not in ids:
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{first} $A {last}",
                pair=f"{first} $A {last} $B:1 {last}:1",
                special_tokens=[(first, ids[0]), (last, ids[1])],
            )
            return


def prepend_space(tokenizer: Tokenizer) -> None:
    """Let it take a text or a word as if a space stood before it, where spaces are in tokens.

    A byte-level one, such as RoBERTa's, else takes words that are given one by one as if they were glued.
    """
    if '"type":"ByteLevel","add_prefix_space":false' in tokenizer.to_str():
        own = [tokenizer.normalizer] if tokenizer.normalizer else []
        tokenizer.normalizer = normalizers.Sequence([*own, normalizers.Prepend(" ")])


def _first_characters(texts: Iterable[str], characters: int) -> Iterator[str]:
    """Texts up to that many characters in all; the last one is cut."""
    for text in texts:
        yield text[:characters]
        characters -= len(text)
        if characters <= 0:
            return


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """The rows that an embedding table needs: the largest id + 1, because some vocabularies skip ids."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def token_dtype(tokenizer: Tokenizer) -> type:
    """uint16 where it holds every token id, else int32."""
    return np.uint16 if vocabulary_size(tokenizer) <= 1 << 16 else np.int32


def special_token_ids(tokenizer: Tokenizer, path: Path | None) -> dict[str, int | None]:
    """Role (eos, bos, pad, unk) -> id; None for a token that the vocabulary lacks.

    The settings files beside the tokenizer name the tokens; otherwise the usual names are looked up.
    """
    declared: dict[str, Any] = {}
    for file in settings_files(path) if path else []:
        declared |= {k: v for k, v in json.loads(file.read_text(encoding="utf-8")).items() if v}
    found: dict[str, int | None] = {}
    for role, usual in USUAL_SPECIAL_TOKENS.items():
        named = declared.get(f"{role}_token")
        names = (named["content"] if isinstance(named, dict) else named,) if named else usual
        found[role] = next((i for n in names if (i := tokenizer.token_to_id(n)) is not None), None)
    return found
