"""Tests of models/causal_lm/gguf_export.py and gguf_vocabulary.py: files read back, and run in llama.cpp.

That needs node-llama-cpp of npm: ISOBATCH_LLAMA_CPP is the folder with its node_modules.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers as hf
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers import models as tokenizer_models

from isobatch.core.errors import UserError
from isobatch.models.causal_lm import gguf_vocabulary as vocabulary
from isobatch.tests.tiny_models import WORDS

gguf = pytest.importorskip("gguf")
from isobatch.models.causal_lm import gguf_export  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPT = "Hello, it's 12345 o'clock: naïve cafés; 日本語 DON'T\n\n  x = [1, 2];\tthe cat sat on the mat and"
MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256))]
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2}
GEMMA = {**SHAPE, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 16}
REGEX = {name: steps[0][0] for steps, names in vocabulary.PRE_TOKENIZERS.items() for name in names}
"""llama.cpp's name -> how it splits words."""
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def byte_level(regex: str | None = None, ignore_merges: bool = False, **more: Any) -> Tokenizer:
    made = Tokenizer(tokenizer_models.BPE(ignore_merges=ignore_merges))
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex is None)
    first = more.get("first") or (pre_tokenizers.Split(Regex(regex), "isolated") if regex else None)
    made.pre_tokenizer = pre_tokenizers.Sequence([first, split]) if first else split
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=MARKS, initial_alphabet=alphabet)
    made.train_from_iterator([WORDS, PROMPT] * 3, trainer)
    return made


def sentence_pieces(space_first: bool) -> Tokenizer:
    """As transformers converts SentencePiece's: with every split of a token among the merges."""
    made = Tokenizer(tokenizer_models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    steps = [normalizers.Prepend("▁")] if space_first else []
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    made.pre_tokenizer = pre_tokenizers.Split(Regex("▁[^▁]*"), "isolated")
    made.train_from_iterator([WORDS] * 3, trainers.BpeTrainer(vocab_size=420, special_tokens=PIECES))
    parts = json.loads(made.to_str())
    known, first = parts["model"]["vocab"], {}
    for rank, pair in enumerate(parts["model"]["merges"]):
        first.setdefault("".join(pair), rank)
    splits = [(rank, token[:n], token[n:]) for token, rank in first.items() for n in range(1, len(token))]
    parts["model"]["merges"] = [[a, b] for _, a, b in sorted(splits) if a in known and b in known]
    parts["pre_tokenizer"], parts["added_tokens"] = None, parts["added_tokens"][:3]
    made = Tokenizer.from_str(json.dumps(parts))
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


def begun(tokenizer: Tokenizer) -> Tokenizer:
    mark = (MARKS[1], 1)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{MARKS[1]} $A", special_tokens=[mark])
    return tokenizer


FAMILIES: dict[str, Callable[[], tuple[Any, Tokenizer]]] = {
    "llama 2": lambda: (hf.LlamaConfig(**SHAPE), sentence_pieces(True)),
    "llama 3": lambda: (
        hf.LlamaConfig(**SHAPE, attention_bias=True, rope_parameters=LLAMA3),
        begun(byte_level(REGEX["llama-bpe"], ignore_merges=True)),
    ),
    "smollm": lambda: (
        hf.LlamaConfig(**SHAPE, tie_word_embeddings=True),
        byte_level(first=pre_tokenizers.Digits(individual_digits=True)),
    ),
    "mistral": lambda: (hf.MistralConfig(**SHAPE, sliding_window=None), sentence_pieces(True)),
    "nemo": lambda: (hf.MistralConfig(**SHAPE, head_dim=32), byte_level(REGEX["tekken"], True)),
    "qwen2": lambda: (hf.Qwen2Config(**SHAPE, tie_word_embeddings=True), byte_level(REGEX["qwen2"])),
    "qwen3": lambda: (hf.Qwen3Config(**SHAPE, head_dim=32), byte_level(REGEX["qwen2"])),
    "gemma": lambda: (hf.GemmaConfig(**SHAPE, head_dim=16), sentence_pieces(False)),
    "gemma2": lambda: (hf.Gemma2Config(**GEMMA), sentence_pieces(False)),
    "gemma3": lambda: (hf.Gemma3TextConfig(**GEMMA | {"num_hidden_layers": 6}), sentence_pieces(False)),
    "gpt2": lambda: (hf.GPT2Config(n_positions=512, n_embd=64, n_layer=2, n_head=4), byte_level()),
}


def saved(family: str, folder: Path, drawn: float = 6.0, **changed: Any) -> Any:
    """A tiny model with weights so large that what it writes varies."""
    torch.manual_seed(0)
    config, tokenizer = FAMILIES[family]()
    config.update({"vocab_size": tokenizer.get_vocab_size() + 5, **changed})
    model = hf.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p * drawn if p.ndim > 1 else p + torch.randn_like(p) * 0.2)
    model.save_pretrained(folder)
    is_bytes = tokenizer.token_to_id(MARKS[1]) is not None
    names = dict(zip(("bos_token", "eos_token"), MARKS[1:] if is_bytes else PIECES[1:3], strict=True))
    hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    return model.eval()


def turned(weight: Any, heads: int) -> Any:
    """Rows of a head's two halves in turn, as llama.cpp keeps a Llama's queries and keys."""
    found = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return found.swapaxes(1, 2).reshape(weight.shape)


@pytest.mark.parametrize("kind", gguf_export.WORST)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_is_read_back(family: str, kind: str, tmp_path: Path) -> None:
    model = saved(family, tmp_path / "a model")
    figures = gguf_export.write(tmp_path / "a model", tmp_path / "x.gguf", kind, "--to gguf")
    assert figures["max_weight_difference"] <= (
        most := {"F32": 0, "F16": 5e-4, "BF16": 4e-3, "Q8_0": 5e-3}[kind]
    )
    reader, config = gguf.GGUFReader(tmp_path / "x.gguf"), model.config
    found = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[gguf_export.check(config, "").arch.upper()], 9)
    for name, weight in model.named_parameters():
        stem, _, part = name.rpartition(".")
        wanted = weight.detach().numpy()
        if config.model_type in ("llama", "mistral") and stem.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if "q_proj" in stem else config.num_key_value_heads
            wanted = turned(wanted, heads)
        if config.model_type == "gpt2" and wanted.ndim == 2 and ".c_" in name:
            wanted = wanted.T
        wanted = wanted + 1 if "gemma" in config.model_type and "norm" in stem else wanted
        off = abs(found.pop(f"{names.get_name(stem)}.{part}") - wanted).max()
        assert off <= most * max(1e-9, abs(wanted).max()) * 1.01, name
    assert set(found) <= {"rope_freqs.weight"}


CANNOT = [(1e6, "take gguf-bf16"), (math.nan, "no number"), (math.inf, "no number")]


@pytest.mark.parametrize(("number", "says"), CANNOT)
def test_weights_that_the_file_cannot_hold_are_refused(number: float, says: str, tmp_path: Path) -> None:
    model = saved("qwen2", tmp_path)
    model.model.embed_tokens.weight.data[0, 0] = number
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"token_embd.weight is beyond what F16 holds.*{says}"):
        gguf_export.write(tmp_path, tmp_path / "x.gguf", "F16", "--to gguf")


@pytest.mark.parametrize(("left", "says"), [(None, "holds no model.safetensors"), (300, "cannot be read")])
def test_weights_that_are_not_there_are_no_model(left: int | None, says: str, tmp_path: Path) -> None:
    saved("qwen2", tmp_path)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    weights.unlink()
    if left:
        weights.write_bytes(whole[:left])
    with pytest.raises(UserError, match=f"^--to gguf: .*{says}"):
        gguf_export.write(tmp_path, tmp_path / "x.gguf", "F16", "--to gguf")


def test_the_end_token_that_was_learnt_and_the_template_are_in_the_file(tmp_path: Path) -> None:
    saved("qwen2", tmp_path, eos_token_id=[2, 0])
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    gguf_export.write(tmp_path, tmp_path / "x.gguf", "F16", "--to gguf")
    fields = gguf.GGUFReader(tmp_path / "x.gguf").fields
    wanted = {"eos_token_id": 2, "eot_token_id": 0, "add_bos_token": False, "pre": "qwen2"}
    assert {name: fields[f"tokenizer.ggml.{name}"].contents() for name in wanted} == wanted
    assert fields["tokenizer.chat_template"].contents() == "{{ messages }}"


@pytest.mark.parametrize(
    ("family", "changed", "said"),
    [
        ("gpt2", {"activation_function": "relu"}, "no gpt2 with the activation relu"),
        ("qwen3", {"attention_bias": True}, "no qwen3 with attention_bias"),
        ("qwen2", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
        ("gemma2", {"query_pre_attn_scalar": 7}, "query_pre_attn_scalar 7"),
        ("gemma3", {"layer_types": ["full_attention"] * 6}, "windows in these layers"),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(
    family: str, changed: dict[str, Any], said: str, tmp_path: Path
) -> None:
    saved(family, tmp_path, **changed)
    with pytest.raises(UserError, match=rf"--to gguf.*{said}"):
        gguf_export.write(tmp_path, tmp_path / "x.gguf", "F16", "--to gguf")
    assert not (tmp_path / "x.gguf").exists()


@pytest.mark.parametrize("regex", [r"\p{L}+", REGEX["qwen2"].replace(r"\p{N}", r"\p{N}{1,2}")])
def test_a_tokenizer_that_llama_cpp_does_not_know_is_refused(regex: str, tmp_path: Path) -> None:
    saved("qwen2", tmp_path, vocab_size=600)
    hf.PreTrainedTokenizerFast(tokenizer_object=byte_level(regex)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"--to gguf: llama.cpp has no name for how"):
        gguf_export.write(tmp_path, tmp_path / "x.gguf", "F16", "--to gguf")


def test_an_architecture_that_is_not_known_is_refused() -> None:
    with pytest.raises(UserError, match="models of type opt cannot be written as GGUF here, only llama"):
        gguf_export.check(hf.OPTConfig(), "--to gguf")


GREEDY = """
import {getLlama} from "node-llama-cpp";
const [prompt, count, ...files] = process.argv.slice(2);
const llama = await getLlama({build: "never", gpu: false, logLevel: "error", maxThreads: 1});
for (const file of files) {
  const model = await llama.loadModel({modelPath: file});
  const context = await model.createContext({contextSize: 256, threads: 1});
  const tokens = model.tokenize(prompt, true), made = [];
  if (model.tokens.shouldPrependBosToken) tokens.unshift(model.tokens.bos);
  for await (const token of context.getSequence().evaluate(tokens, {temperature: 0, yieldEogToken: true})) {
    made.push(token);
    if (made.length >= Number(count) || model.isEogToken(token)) break;
  }
  console.log("RESULT " + JSON.stringify([tokens, made]));
  await context.dispose();
}
await llama.dispose();
"""


@pytest.mark.skipif("ISOBATCH_LLAMA_CPP" not in os.environ, reason="ISOBATCH_LLAMA_CPP names no llama.cpp")
def test_llama_cpp_reads_and_writes_the_same_tokens(tmp_path: Path) -> None:
    wanted, files = [], []
    for family in FAMILIES:
        model, folder = saved(family, tmp_path / family, drawn=9.0), tmp_path / family
        files.append(str(folder / "x.gguf"))
        gguf_export.write(folder, folder / "x.gguf", "F32", "--to gguf")
        ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(PROMPT).ids
        more = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
        made = model.generate(torch.tensor([ids]), **more)[0].tolist()
        wanted.append([ids, made[len(ids) :]])
    home = Path(os.environ["ISOBATCH_LLAMA_CPP"])
    script = home / "isobatch-greedy.mjs"
    script.write_text(GREEDY, encoding="utf-8")
    words = ["node", str(script), PROMPT, "16", *files]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    script.unlink()
    found = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert sum(len({*made}) > 2 for _, made in wanted) > len(FAMILIES) // 2
    assert dict(zip(FAMILIES, found, strict=True)) == dict(zip(FAMILIES, wanted, strict=True))
