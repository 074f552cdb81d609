"""Tokenizers: opened from files of several kinds, or trained on the text. Without transformers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch.core import hub_cache
from isobatch.core.errors import UserError
from isobatch.core.hub_cache import explain_hub_error

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BATCH_CHARACTERS = 1 << 20
TRAINING_CHARACTERS = 20_000_000
END = "<|endoftext|>"
FILES = ("tokenizer.json", "encoder.json", "vocab.json", "vocab.bpe", "merges.txt", "vocab.txt")
SETTINGS = ("special_tokens_map.json", "tokenizer_config.json")
CHAT_TEMPLATE = "chat_template.jinja"
BERT_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
USUAL = {
    "eos": (END, "</s>", "<|end_of_text|>", "<eos>", "[SEP]"),
    "bos": (END, "<s>", "<|begin_of_text|>", "<bos>", "[CLS]"),
    "pad": ("<pad>", "[PAD]", "<|pad|>"),
    "unk": ("<unk>", "[UNK]"),
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tokenizer comes from: a folder or file, a hub id, or (neither) training."""

    path: Path | None = None
    hub_id: str | None = None
    revision: str | None = None

    def identity(self) -> Any:
        """What the tokens depend on, in JSON form; hashes of the content where there are files."""
        if self.path is not None:
            return {f.name: file_hash(f) for f in (_kind(self.path)[1] + _settings(self.path))}
        return [self.hub_id, self.revision] if self.hub_id else "trained"


def file_hash(file: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def locate(tokenizer: str | None, model: str | None, revision: str | None) -> Place:
    """--tokenizer, else the model's own where --model is a folder or hub id with one, else training."""
    if tokenizer is not None:
        path = Path(tokenizer).expanduser()
        if path.exists():
            _kind(path)
            return Place(path=path)
        return _on_hub("--tokenizer", tokenizer, None)
    if model is not None and (folder := Path(model).expanduser()).is_dir():
        return Place(path=folder) if _present(folder) else Place()
    # Names of one word are presets, which bring no tokenizer.
    return _on_hub("--model", model, revision) if model and "/" in model else Place()


def _on_hub(flag: str, name: str, revision: str | None) -> Place:
    if not hub_cache.is_id(name):
        raise UserError(f"{flag} {name}: there is no such folder or file")
    if folder := hub_cache.snapshot("models", name, revision):
        return Place(path=folder) if _present(folder) else Place(hub_id=name, revision=revision)
    if not hub_cache.is_reachable():
        raise UserError(
            f"{flag} {name}: no such folder, not in the cache {hub_cache.cache_home()}, and the hub cannot be"
            " reached: give a folder, set HF_HOME to a cache that holds it, or run `prepare` on a machine"
            " with internet"
        )
    return Place(hub_id=name, revision=revision)


def _present(path: Path) -> list[Path]:
    return [path / n for n in FILES if (path / n).is_file()] if path.is_dir() else [path]


def _settings(path: Path) -> list[Path]:
    folder = path if path.is_dir() else path.parent
    return [folder / n for n in SETTINGS if (folder / n).is_file()]


def _kind(path: Path) -> tuple[str, list[Path]]:
    """json, bpe or wordpiece, with its files."""
    names = {f.name: f for f in _present(path)}
    if path.is_file() and (path.name not in FILES or path.name in ("tokenizer.json", "vocab.txt")):
        names = {{".json": "tokenizer.json", ".txt": "vocab.txt"}.get(path.suffix, ""): path}
    elif path.is_file():
        names = {f.name: f for f in _present(path.parent) if f.name not in ("tokenizer.json", "vocab.txt")}
    if "tokenizer.json" in names:
        return "json", [names["tokenizer.json"]]
    pair = [names[n] for n in ("encoder.json", "vocab.json") if n in names][:1]
    pair += [names[n] for n in ("vocab.bpe", "merges.txt") if n in names][:1]
    if len(pair) == 2:
        return "bpe", pair
    if "vocab.txt" in names:
        return "wordpiece", [names["vocab.txt"]]
    raise UserError(
        f"--tokenizer {path}: holds no tokenizer: wanted tokenizer.json, vocab.json with merges.txt "
        "(or encoder.json with vocab.bpe), or vocab.txt"
    )


def open_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a folder or file, without truncation or padding."""
    from tokenizers import Tokenizer

    kind, files = _kind(path)
    try:
        if kind == "bpe":
            tokenizer = _byte_level(files[0], files[1])
        else:
            tokenizer = Tokenizer.from_file(str(files[0])) if kind == "json" else _word_pieces(files[0])
    except Exception as error:  # the library raises bare Exception for every fault in a file
        raise UserError(f"--tokenizer {path}: cannot be read: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _byte_level(vocabulary: Path | None, merges: Path | None) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    model = models.BPE.from_file(str(vocabulary), str(merges)) if vocabulary else models.BPE()
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if tokenizer.token_to_id(END) is not None:
        tokenizer.add_special_tokens([END])
    return tokenizer


def _word_pieces(file: Path) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocabulary = {token: i for i, token in enumerate(file.read_text(encoding="utf-8").splitlines())}
    # Nothing beside a vocabulary says whether it is cased; only a cased one has tokens that begin with A-Z.
    lowercase = not any("A" <= token[:1] <= "Z" for token in vocabulary)
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([t for t in BERT_TOKENS if t in vocabulary])
    return tokenizer


def download(name: str, revision: str | None) -> Path:
    """The cached folder of a hub tokenizer, after fetching it."""
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=[*FILES, *SETTINGS, CHAT_TEMPLATE])
        )
    except Exception as error:  # network, missing repository, gated: all are one line to the user
        raise UserError(f"the tokenizer of {name}: {explain_hub_error(error, revision)}") from None


def train(texts: Iterable[str], size: int) -> Tokenizer:
    """A byte-level BPE of at most `size` tokens, from the first 20 million characters."""
    from tokenizers import pre_tokenizers, trainers

    tokenizer = _byte_level(None, None)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first(texts, TRAINING_CHARACTERS), trainer)
    return tokenizer


def train_lowercase(texts: Iterable[str], size: int) -> Tokenizer:
    """A lowercase BPE for encoders of at most `size` tokens, from the first 20 million characters.

    Not WordPiece: its trainer numbers the alphabet in the order of a hash map, so that no two runs of it
    agree (tokenizers 0.22).
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=list(BERT_TOKENS), show_progress=False)
    tokenizer.train_from_iterator(_first(texts, TRAINING_CHARACTERS), trainer)
    return tokenizer


def require_template(tokenizer: Tokenizer) -> None:
    """An encoder reads [CLS] text [SEP], or <s> text </s>: see to it where the file does not say so."""
    from tokenizers import processors

    if tokenizer.num_special_tokens_to_add(False):
        return
    known = {t: i for t in ("[CLS]", "[SEP]", "<s>", "</s>") if (i := tokenizer.token_to_id(t)) is not None}
    pairs = [pair for pair in (("[CLS]", "[SEP]"), ("<s>", "</s>")) if all(t in known for t in pair)]
    if not pairs:
        return
    first, last = pairs[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}",
        pair=f"{first} $A {last} $B:1 {last}:1",
        special_tokens=[(first, known[first]), (last, known[last])],
    )


def _first(texts: Iterable[str], characters: int) -> Iterator[str]:
    for text in texts:
        yield text[:characters]
        characters -= len(text)
        if characters <= 0:
            return


def size(tokenizer: Tokenizer) -> int:
    """One more than the largest id: the rows an embedding needs. Some vocabularies have holes."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def special_ids(tokenizer: Tokenizer, path: Path | None) -> dict[str, int | None]:
    """Ids of eos, bos, pad and unk: as the settings beside the tokenizer say, else by their usual names."""
    declared: dict[str, Any] = {}
    for file in _settings(path) if path else []:
        declared |= {k: v for k, v in json.loads(file.read_text(encoding="utf-8")).items() if v}
    named = {role: declared.get(f"{role}_token") for role in USUAL}
    names = {r: (v["content"] if isinstance(v, dict) else v,) if v else USUAL[r] for r, v in named.items()}
    return {
        r: next((i for n in ns if (i := tokenizer.token_to_id(n)) is not None), None)
        for r, ns in names.items()
    }


def encode(tokenizer: Tokenizer, texts: Iterable[str], after: list[int], kind: type) -> Iterator[np.ndarray]:
    """Token ids of each text, with `after` behind it; a megabyte of text at a time, on all cores."""
    for batch in _batches(texts):
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            yield np.array(encoding.ids + after, kind)


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
