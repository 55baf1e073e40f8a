"""Token ids, text and streams, against the `tokenizers` library and published facts about Llama 3."""

import base64
import json
import random
import zipfile
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers

from tokenizer import LLAMA3_PATTERN, TOKENIZERS, Settings, Tokenizer, load_tokenizer

ROOT = Path(__file__).resolve().parent.parent
SMOLLM2 = ROOT / "checkpoints" / "SmolLM2-135M-Instruct"

# Single characters and runs that meet every branch of the splitting patterns and, for SmolLM2, its missing bytes:
# control bytes 04, 06, 13, 14, 16, 1d, and f1, f2 of planes 4 to 11.
SNIPPETS = [
    *" .,;:!?-_=+*/()[]{}@#\"\\'aAsStTxyzéßñ0123456789²½٣",
    *"\x00\x04\x06\x13\x14\x16\x1d\x1f\x7f\x85\xa0\u3000\u2009\u200b\ufe0f\U00040000\U00090000\U0010ffff",
    *("  ", "   ", "\t", "\t\t", "\n", "\n\n", "\r\n", " \n ", "'s", "'RE", "'ll", " the", "def f(x):", "return"),
    *("中文", "日本語", "한국어", "ไทย", "हिन्दी", "👨‍👩‍👧", "🇩🇪", "👍🏽", "e\u0301", "ſ", "://", "2024", "<|", "|>"),
]
TEXTS = [
    "",
    " ",
    "Hello, my name is",
    "a  1",
    "a   b  12  c",
    "   \n\n  x",
    "for i in range(10):\r\n\tprint(f'{i:>3}')\r\n",
    "can't won't I'LL",
    "\x16a\x04b\x1dthe\x06re",
    "x" * 5000,
    "ab" * 3000 + " " * 3000 + "1" * 3000,
    "".join(map(chr, range(0x800))),
    "\U00040000 \U00090000\U0010ffff",
]


def random_texts(number: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return TEXTS + ["".join(rng.choices(SNIPPETS, k=rng.randint(1, 30))) for _ in range(number)]


def assert_same_ids(tokenizer, reference: tokenizers.Tokenizer, texts: list[str]) -> None:
    for text, expected in zip(texts, reference.encode_batch(texts, add_special_tokens=False)):
        assert tokenizer.encode(text)[int(tokenizer.add_bos) :] == expected.ids, repr(text)


@pytest.fixture(scope="session")
def smollm2():
    if not (SMOLLM2 / "tokenizer.json").is_file():
        pytest.fail(f"{SMOLLM2} is not there: run bash scripts/test.sh once, which fetches it")
    return load_tokenizer(SMOLLM2)


@pytest.fixture(scope="session")
def llama3_folder(tmp_path_factory):
    wheels = sorted((ROOT / ".cache" / "wheels").glob("llama_models-*.whl"))
    if not wheels:
        pytest.fail("no llama_models wheel in .cache/wheels: run bash scripts/test.sh once, which fetches it")
    folder = tmp_path_factory.mktemp("llama3")
    with zipfile.ZipFile(wheels[-1]) as wheel:
        (folder / "tokenizer.model").write_bytes(wheel.read("llama_models/llama3/tokenizer.model"))
    return folder


@pytest.fixture(scope="session")
def llama3(llama3_folder):
    return load_tokenizer(llama3_folder)


def tiktoken_lines(tokens: list[bytes]) -> bytes:
    return b"".join(base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(tokens))


BYTES = [bytes([i]) for i in range(256)]


@pytest.fixture
def bytes_only(tmp_path):
    """Llama 3's format with a vocabulary of bytes: BOS is 256."""
    (tmp_path / "tokenizer.model").write_bytes(tiktoken_lines(BYTES))
    return load_tokenizer(tmp_path)


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
SPLIT = {"type": "Split", "pattern": {"Regex": LLAMA3_PATTERN}, "behavior": "Isolated", "invert": False}
PRE_TOKENIZERS = {
    "gpt2": BYTE_LEVEL,
    "digits": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL]},
    "split": {"type": "Sequence", "pretokenizers": [SPLIT, BYTE_LEVEL | {"use_regex": False}]},
    # leaves gaps, which are pieces too
    "gaps": {
        "type": "Sequence",
        "pretokenizers": [SPLIT | {"pattern": {"Regex": r"[a-z]+"}}, BYTE_LEVEL | {"use_regex": False}],
    },
}


def trained(pre_tokenizer: dict, seed: int = 0) -> dict:
    """The `tokenizer.json` of a small BPE that lacks the bytes of some characters, its ids in random order."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    config = json.loads(tokenizer.to_str()) | {"pre_tokenizer": pre_tokenizer}
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(config))
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<s>", "</s>"], show_progress=False)
    texts = [text for text in random_texts(400, seed=5) if not set(text) & set("\x04\x13xz;\U00040000")]
    tokenizer.train_from_iterator(texts, trainer)
    config = json.loads(tokenizer.to_str())
    order = list(range(len(config["model"]["vocab"])))
    random.Random(seed).shuffle(order)
    config["model"]["vocab"] = {token: order[id] for token, id in config["model"]["vocab"].items()}
    for token in config["added_tokens"]:
        token["id"] = order[token["id"]]
    return config


def load(folder: Path, config: dict, **files: dict):
    for name, content in {"tokenizer": config, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return load_tokenizer(folder)


# --- ids ---


def test_smollm2_ids_are_those_of_the_tokenizers_library(smollm2):
    reference = tokenizers.Tokenizer.from_file(str(SMOLLM2 / "tokenizer.json"))
    assert_same_ids(smollm2, reference, random_texts(3000, seed=1))


def test_smollm2_keeps_spaces_before_a_digit_in_one_piece(smollm2):
    """GPT-2's pattern splits the last space off, but here the digit was cut away before the pattern looked ahead."""
    assert [smollm2.token_bytes(id) for id in smollm2.encode("a  1")] == [b"a", b"  ", b"1"]
    assert [smollm2.token_bytes(id) for id in smollm2.encode("a  b")] == [b"a", b" ", b" b"]


def test_smollm2_drops_its_missing_bytes_before_merging(smollm2):
    """tiktoken panics on a byte that is no token; the `tokenizers` library drops it, so that neighbours merge."""
    assert smollm2.encode("=\x04=") == smollm2.encode("==") != 2 * smollm2.encode("=")
    assert smollm2.encode("\x04") == []


def test_llama3_ids_are_those_of_its_hugging_face_conversion(llama3, llama3_folder, tmp_path):
    from transformers.convert_slow_tokenizer import TikTokenConverter

    path = str(llama3_folder / "tokenizer.model")
    reference = TikTokenConverter(path, pattern=LLAMA3_PATTERN).converted()
    texts = random_texts(2000, seed=2)
    assert_same_ids(llama3, reference, texts)
    reference.save(str(tmp_path / "tokenizer.json"))
    assert_same_ids(load_tokenizer(tmp_path), reference, texts)


def test_llama3_ids_as_published(llama3):
    assert llama3.encode("hello world") == [128000, 15339, 1917]
    assert llama3.vocab_size == 128256
    assert (llama3.bos_id, llama3.add_bos) == (128000, True)


@pytest.mark.parametrize("merges_as", ["pairs", "strings"])
@pytest.mark.parametrize("kind", PRE_TOKENIZERS)
def test_ids_that_do_not_follow_the_merges(tmp_path, kind, merges_as):
    """tiktoken takes a token's rank for its id, which holds only where the vocabulary is sorted by merges."""
    config = trained(PRE_TOKENIZERS[kind])
    if merges_as == "strings":
        config["model"]["merges"] = [" ".join(pair) for pair in config["model"]["merges"]]
    reference = tokenizers.Tokenizer.from_str(json.dumps(config))
    vocab = config["model"]["vocab"]
    results = [vocab["".join(pair).replace(" ", "")] for pair in config["model"]["merges"]]
    assert results != sorted(results)
    assert_same_ids(load(tmp_path, config), reference, random_texts(300, seed=3))


def test_ignore_merges_takes_a_whole_piece_that_no_merge_makes(tmp_path):
    config = trained(BYTE_LEVEL)
    config["model"]["vocab"]["SSS"] = 600
    for ignore_merges in (True, False):
        config["model"]["ignore_merges"] = ignore_merges
        reference = tokenizers.Tokenizer.from_str(json.dumps(config))
        tokenizer = load(tmp_path, config)
        assert (tokenizer.encode("SSS") == [600]) is ignore_merges
        assert_same_ids(tokenizer, reference, ["SSS", "SSSS", "a SSS"])
        assert tokenizer.decode([600]) == "SSS"


def test_the_first_of_several_merges_to_a_token_counts(tmp_path):
    """Llama 3's `tokenizer.json` has 280,000 merges for 128,000 tokens: every way to make each one."""
    config = trained(BYTE_LEVEL)
    config["added_tokens"] = []
    config["model"]["merges"] = [["a", "b"], ["ab", "c"], ["c", "d"], ["b", "c"], ["a", "bc"]]
    config["model"]["vocab"] = {token: id for id, token in enumerate(["a", "b", "c", "d", "ab", "abc", "cd", "bc"])}
    tokenizer = load(tmp_path, config)
    assert tokenizer.encode("abcd") == [5, 3]
    assert_same_ids(tokenizer, tokenizers.Tokenizer.from_str(json.dumps(config)), ["abcd", "bcd", "abcabcd", "dcba"])


def test_a_million_spaces_neither_panic_nor_print(smollm2, llama3, capfd):
    """tiktoken's own splitting overflows its stack there, and prints a page of Rust frames."""
    for tokenizer in (smollm2, llama3):
        for text in (" " * 1_000_000 + "x", "\n" * 1_000_000 + "x"):
            assert tokenizer.decode(tokenizer.encode(text)) == text
    assert capfd.readouterr() == ("", "")


# --- plain text, BOS, stop ids ---


@pytest.mark.parametrize("text", ["<|eot_id|>", "a<|begin_of_text|>b", "<|im_end|>", "<|endoftext|>"])
def test_special_strings_in_text_are_text(smollm2, llama3, text):
    """A prompt that held `<|eot_id|>` raised an error, or ended the turn, in other programs."""
    for tokenizer in (smollm2, llama3):
        ids = tokenizer.encode(text)[int(tokenizer.add_bos) :]
        assert len(ids) > 2
        assert all(tokenizer.token_bytes(id) for id in ids)
        assert tokenizer.decode(ids) == text


def test_one_bos_whatever_the_text_starts_with(llama3, smollm2):
    """A text that starts with BOS as a string must neither swallow the BOS nor double it."""
    for text in ("", "Hi", "<|begin_of_text|>", "<|begin_of_text|>Hi"):
        assert llama3.encode(text).count(128000) == 1
        assert llama3.encode(text)[0] == 128000
    assert not smollm2.add_bos
    assert smollm2.bos_id == 1
    assert 1 not in smollm2.encode("<|im_start|>Hi")


def test_several_stop_ids(llama3, smollm2):
    """Llama 3 ends a turn, a message or a text by three different ids; one alone lets chats run on."""
    assert llama3.stop_ids == {128001, 128008, 128009}
    assert smollm2.stop_ids == {0, 2}


@pytest.mark.parametrize("eos, expected", [(7, {7}), ([7, 9], {7, 9}), (None, set())])
def test_stop_ids_of_generation_config(tmp_path, eos, expected):
    config = trained(BYTE_LEVEL)
    end = next(token["id"] for token in config["added_tokens"] if token["content"] == "</s>")
    settings = {"eos_token": {"content": "</s>", "lstrip": False}}
    tokenizer = load(tmp_path, config, tokenizer_config=settings, generation_config={"eos_token_id": eos})
    assert tokenizer.stop_ids == expected | {end}


@pytest.mark.parametrize("template, setting, expected", [
    (False, None, False), (False, True, True), (True, None, True), (True, False, False)
])  # fmt: skip
def test_bos_by_template_processing_unless_the_settings_say_otherwise(tmp_path, template, setting, expected):
    config = trained(BYTE_LEVEL)
    bos = next(token["id"] for token in config["added_tokens"] if token["content"] == "<s>")
    if template:
        single = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        config["post_processor"] = {
            "type": "Sequence",
            "processors": [BYTE_LEVEL, {"type": "TemplateProcessing", "single": single, "pair": []}],
        }
    tokenizer = load(tmp_path, config, tokenizer_config={"bos_token": "<s>", "add_bos_token": setting})
    assert tokenizer.add_bos is expected
    assert tokenizer.encode("ab").count(bos) == expected


@pytest.mark.parametrize("text", ["\ud83d", "ab\udc00c"])
def test_lone_surrogates_are_refused(smollm2, text):
    with pytest.raises(ValueError, match=f"lone surrogate at character {len(text) // 2}"):
        smollm2.encode(text)


# --- decoding and streams ---


def streamed(tokenizer, ids: list[int]) -> list[str]:
    stream = tokenizer.stream()
    return [stream.push(id) for id in ids] + [stream.flush()]


def test_ids_outside_the_vocabulary_and_special_tokens_render_as_nothing(llama3, smollm2):
    """A model's vocabulary may be padded beyond the tokenizer's, and random weights do pick such ids."""
    for tokenizer in (llama3, smollm2):
        outside = [tokenizer.vocab_size, 10**9, -1]
        ids = [*tokenizer.stop_ids, *outside, *tokenizer.encode("hello"), *outside]
        assert tokenizer.decode(ids) == "".join(streamed(tokenizer, ids)) == "hello"
        assert {tokenizer.token_bytes(id) for id in outside} == {b""}


@given(text=st.text())
def test_round_trip(llama3, text):
    ids = llama3.encode(text)
    assert llama3.decode(ids) == text
    assert "".join(streamed(llama3, ids)) == text


@given(ids=st.lists(st.one_of(st.integers(0, 300), st.integers(0, 49151), st.integers(-3, 60000)), max_size=40))
def test_a_stream_joins_to_the_full_decode(smollm2, ids):
    """Most ids up to 300 are single bytes, so characters are cut in many ways."""
    assert "".join(streamed(smollm2, ids)) == smollm2.decode(ids)


# A lead byte of each length, bytes that continue a character, and anything else.
@given(ids=st.lists(st.sampled_from([0x41, 0xC3, 0xE2, 0xF0, 0x9F, 0x98, 0x80, 0xFF, 256]), max_size=12))
def test_a_stream_of_cut_characters_joins_to_the_full_decode(ids):
    tokenizer = Tokenizer([*BYTES, b""], {"<s>": 256}, Settings(None, None, False, frozenset(), None))
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("text", ["日本語のテキスト", "😀👍🏽👨‍👩‍👧", "naïve café"])
def test_no_broken_character_in_a_stream(bytes_only, text):
    """Other programs decoded token by token, and showed U+FFFD for every character of several tokens."""
    parts = streamed(bytes_only, bytes_only.encode(text))
    assert "".join(parts) == text
    assert [part for part in parts if part] == list(text)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_cut_emoji_is_one_replacement_at_the_very_end(bytes_only, cut):
    *parts, last = streamed(bytes_only, bytes_only.encode("ok 😀")[:-cut])
    assert ("".join(parts), last) == ("ok ", "\ufffd")


def test_a_special_token_inside_a_character_does_not_break_it(bytes_only):
    first, *rest = "é".encode()
    assert "".join(streamed(bytes_only, [first, 256, *rest])) == "é" == bytes_only.decode([first, 256, *rest])


def test_added_tokens_that_are_not_special_are_shown(tmp_path):
    config = trained(BYTE_LEVEL)
    config["added_tokens"].append(config["added_tokens"][0] | {"id": 700, "content": "<think>", "special": False})
    assert load(tmp_path, config).decode([700]) == "<think>"


# --- files ---


def test_the_contents_of_files_read_as_the_files_do(tmp_path):
    """What a GGUF file says of its tokenizer is never written to a folder."""
    files = {"tokenizer": trained(BYTE_LEVEL), "tokenizer_config": {"bos_token": "<s>", "add_bos_token": True}}
    files |= {"generation_config": {"eos_token_id": 7}}
    written = load(tmp_path, files["tokenizer"], **files)
    given = load_tokenizer({f"{name}.json": content for name, content in files.items()})
    for text in random_texts(50, seed=4):
        assert given.encode(text) == written.encode(text)
    assert (given.bos_id, given.stop_ids) == (written.bos_id, written.stop_ids) != (None, frozenset())
    assert load_tokenizer({"tokenizer.json": files["tokenizer"]}).bos_id is None


@pytest.mark.parametrize("source, reason", [
    ({}, "no tokenizer in the file given"), ({"tokenizer_config.json": {}}, "no tokenizer in the file given"),
    ({"tokenizer.json": []}, "tokenizer.json"), ({"tokenizer.json": {"model": None}}, "tokenizer.json"),
    ({"tokenizer.json": trained(BYTE_LEVEL), "tokenizer_config.json": 5}, "tokenizer_config.json"),
])  # fmt: skip
def test_damaged_contents_are_one_line(source, reason):
    with pytest.raises(ValueError) as error:
        load_tokenizer(source)
    assert_one_line(error, reason)


def test_a_file_stands_for_itself_or_for_its_folder(tmp_path):
    """Of two tokenizers the one that was asked for; a file of weights has its tokenizer beside it."""
    as_json = load(tmp_path, trained(BYTE_LEVEL), tokenizer_config={"bos_token": "<s>"}).vocab_size
    (tmp_path / "tokenizer.model").write_bytes(tiktoken_lines(BYTES))
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "model.pth").write_bytes(b"")
    sizes = {
        name: load_tokenizer(tmp_path / name).vocab_size for name in ("tokenizer.json", "tokenizer.model", "model.pth", "")
    }
    assert sizes == {"tokenizer.json": as_json, "tokenizer.model": 512, "model.pth": 512, "": 512}
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    assert load_tokenizer(str(tmp_path / "tokenizer.json")).bos_id is not None


def test_tokenizer_json_stands_in_for_an_unreadable_tokenizer_model(tmp_path):
    """Clones without git-lfs have a pointer of three lines there."""
    (tmp_path / "tokenizer.model").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert load(tmp_path, trained(BYTE_LEVEL)).vocab_size == 600
    (tmp_path / "tokenizer.json").write_text("{")
    for source in (tmp_path, tmp_path / "tokenizer.model"):
        with pytest.raises(ValueError, match=r"tokenizer\.model: damaged"):
            load_tokenizer(source)


def test_special_tokens_follow_however_many_tokens_the_file_has(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(tiktoken_lines([*BYTES, b"ab", b"abc"]))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.encode("abcab") == [258, 257, 256]
    assert tokenizer.vocab_size == 258 + 256
    assert tokenizer.stop_ids == {259, 266, 267}


def test_a_folder_without_a_tokenizer_is_told_what_was_looked_for(tmp_path):
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ValueError, match=f"no tokenizer in .*looked for {' and '.join(TOKENIZERS)}"):
            load_tokenizer(folder)


def assert_one_line(error: pytest.ExceptionInfo, *parts: str) -> None:
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


GOOD = tiktoken_lines([*BYTES, b"ab"])


@pytest.mark.parametrize("data", [
    b"", b"\n", b"\x00\xff\xfe", b"{}", GOOD[:300], GOOD[:-3] + b"\n", GOOD[100:], GOOD + b"YWI= 257\n",
    GOOD + b"YWJj 300\n", GOOD + b"YWJj -1\n", GOOD + b"Y!WJj 257\n", GOOD + b"YWJj\n", GOOD + b"\xe2\x82 257\n",
])  # fmt: skip
def test_a_damaged_tokenizer_model_is_one_line(tmp_path, data, capfd):
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(ValueError) as error:
        load_tokenizer(tmp_path)
    assert_one_line(error, str(tmp_path / "tokenizer.model"), "damaged", "download")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"{}", b'{"model": null}', b"\xff\xfe", b"[" * 100_000])
def test_a_damaged_tokenizer_json_is_one_line(tmp_path, data):
    (tmp_path / "tokenizer.json").write_bytes(data)
    with pytest.raises(ValueError) as error:
        load_tokenizer(tmp_path)
    assert_one_line(error, str(tmp_path / "tokenizer.json"), "damaged")


def _set(*keys_and_value):
    """A change to a `tokenizer.json`: _set("model", "type", "Unigram")."""
    *keys, last, value = keys_and_value

    def change(config: dict) -> None:
        for key in keys:
            config = config[key]
        config[last] = value

    return change


PREFIX_SPACE = BYTE_LEVEL | {"add_prefix_space": True}
ADDS_END = {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A"}}, {"SpecialToken": {"id": "</s>"}}]}


@pytest.mark.parametrize("change, reason", [
    (_set("model", "type", "Unigram"), "Unigram"),
    (_set("normalizer", {"type": "NFC"}), "NFC"),
    (_set("pre_tokenizer", {"type": "Metaspace", "replacement": "_"}), "Metaspace"),
    (_set("pre_tokenizer", PREFIX_SPACE), "'add_prefix_space': True"),
    (_set("pre_tokenizer", BYTE_LEVEL | {"use_regex": False}), "'use_regex': False"),
    (_set("pre_tokenizer", None), "null"),
    (_set("pre_tokenizer", {"type": "Sequence", "pretokenizers": [SPLIT | {"invert": True}, BYTE_LEVEL]}), "Split"),
    (_set("post_processor", {"type": "BertProcessing"}), "BertProcessing"),
    (_set("post_processor", ADDS_END), "TemplateProcessing"),
    (_set("model", "byte_fallback", True), "byte_fallback"),
    (_set("model", "end_of_word_suffix", "</w>"), "end_of_word_suffix"),
    (_set("model", "byte_fallback", True), "add its tokenizer.model"),
    (_set("pre_tokenizer", {"type": "Sequence", "pretokenizers": [{"type": "Metaspace"}]}), "add its tokenizer.model"),
    (_set("model", "dropout", 0.1), "dropout"),
    (_set("model", "unk_token", "<s>"), "unk_token"),
    (_set("model", "merges", [["a", "QQQ"]]), "QQQ"),
    (_set("model", "merges", [3]), "damaged"),
    (_set("model", "merges", ["a b c"]), "damaged"),
    (_set("model", "vocab", {}), "damaged"),
    (_set("model", "vocab", "a", 10**12), "below 2^24"),
    (_set("model", "vocab", "a", -1), "damaged"),
    (_set("model", "vocab", "a", "7"), "damaged"),
    (_set("model", "vocab", "日", 900), "damaged"),
    (_set("added_tokens", [{"content": "<s>"}]), "damaged"),
    (_set("added_tokens", 0, "id", 300), "damaged"),
    (_set("added_tokens", 0, "content", 5), "damaged"),
])  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(tmp_path, change, reason):
    config = trained(BYTE_LEVEL)
    change(config)
    with pytest.raises(ValueError) as error:
        load(tmp_path, config)
    assert_one_line(error, str(tmp_path / "tokenizer.json"), reason)


@pytest.mark.parametrize("regex, reason", [("(", "pattern is damaged"), ("a*", "empty text")])
def test_a_bad_pattern_is_one_line(tmp_path, regex, reason):
    split = SPLIT | {"pattern": {"Regex": regex}}
    pre_tokenizer = {"type": "Sequence", "pretokenizers": [split, BYTE_LEVEL | {"use_regex": False}]}
    with pytest.raises(ValueError) as error:
        load(tmp_path, trained(BYTE_LEVEL) | {"pre_tokenizer": pre_tokenizer})
    assert_one_line(error, reason)


@pytest.mark.parametrize("name, content, reason", [
    ("tokenizer_config", {"bos_token": 5}, "bos_token"),
    ("tokenizer_config", {"bos_token": {}}, "content"),
    ("tokenizer_config", {"eos_token": "<nope>"}, "'<nope>' is not among the special tokens"),
    ("tokenizer_config", {"add_bos_token": True}, "no bos_token is named"),
    ("tokenizer_config", {"chat_template": 5}, "chat_template"),
    ("tokenizer_config", [], "tokenizer_config.json"),
    ("generation_config", {"eos_token_id": "2"}, "eos_token_id"),
    ("generation_config", {"eos_token_id": [True]}, "eos_token_id"),
])  # fmt: skip
def test_bad_settings_are_one_line(tmp_path, name, content, reason):
    with pytest.raises(ValueError) as error:
        load(tmp_path, trained(BYTE_LEVEL), **{name: content})
    assert_one_line(error, reason)
