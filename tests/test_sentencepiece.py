"""Llama 2's kind of tokenizer, against sentencepiece itself and against transformers' LlamaTokenizer."""

import functools
import io
import itertools
import json
import pydoc_data.topics
import re

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from test_tokenizer import BYTE_LEVEL, assert_one_line, random_texts, streamed, trained
from transformers import LlamaTokenizer

from tokenizer import load_tokenizer

BOS, EOS = 1, 2
HELLO = [{"role": "user", "content": "Hello"}]
TURNS = [*HELLO, {"role": "assistant", "content": "Hi 👋"}, {"role": "user", "content": " 12  + 3\n"}]
SYSTEM = [{"role": "system", "content": "Be brief."}]

# As published: Llama-2-7b-chat-hf, Mistral-7B-Instruct-v0.1, TinyLlama-1.1B-Chat-v1.0.
LLAMA2_TEMPLATE = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate "
    "user/assistant/user/assistant/...') }}{% endif %}{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}"
    "{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
MISTRAL_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token + ' ' }}{% endif %}{% endfor %}"
)
TINYLLAMA_TEMPLATE = (
    "{% for message in messages %}\n{% if message['role'] == 'user' %}\n"
    "{{ '<|user|>\\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'system' %}\n{{ '<|system|>\\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\\n'  + message['content'] + eos_token }}\n{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)


@functools.cache
def train(**options) -> bytes:
    """A small model with the flags of Llama 2's; text with no other letters than English ones, so that bytes step in."""
    model = io.BytesIO()
    text = "".join(pydoc_data.topics.topics.values())[:100_000]
    flags = {"model_type": "bpe", "vocab_size": 600, "byte_fallback": True, "split_digits": True, "add_dummy_prefix": True}
    flags |= {"remove_extra_whitespaces": False, "normalization_rule_name": "identity", "allow_whitespace_only_pieces": True}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.splitlines()), model_writer=model, num_threads=1, minloglevel=2, **flags | options
    )
    return model.getvalue()


@pytest.fixture(scope="session")
def reference():
    return sentencepiece.SentencePieceProcessor(model_proto=train())


@pytest.fixture(scope="session")
def llama2(tmp_path_factory):
    return load(tmp_path_factory.mktemp("llama2"))


def load(folder, model: bytes | None = None, **files: dict):
    (folder / "tokenizer.model").write_bytes(train() if model is None else model)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return load_tokenizer(folder)


def in_transformers(reference, **options) -> LlamaTokenizer:
    """transformers' tokenizer of the same vocabulary: a pair merges to a token, the tokens in order of their scores."""
    ids = range(reference.vocab_size())
    vocab = {reference.id_to_piece(id): id for id in ids}
    order = sorted((-reference.get_score(id), reference.id_to_piece(id)) for id in ids if id > 258)
    pairs = [(token[:i], token[i:]) for _, token in order for i in range(1, len(token))]
    return LlamaTokenizer(vocab=vocab, merges=[pair for pair in pairs if {*pair} <= vocab.keys()], **options)


# Everything but U+2581, which stands for a space in the vocabulary and comes back as one, here as in transformers.
texts = st.text(st.one_of(st.sampled_from(" \n\t<>/s[]INSTabcde01中😀\u00e9\x00"), st.characters(codec="utf-8")))
texts = texts.filter(lambda text: "▁" not in text)


# --- ids ---


def test_ids_are_those_of_sentencepiece(llama2, reference):
    for text in random_texts(1000, seed=1):
        assert llama2.encode(text) == [BOS, *reference.encode(text)], repr(text)
    assert llama2.vocab_size == reference.vocab_size() == 600


def test_ids_are_those_of_transformers(llama2, reference):
    """But for a text that begins with a space: transformers adds none of its own there, and loses the difference."""
    tokenizer = in_transformers(reference)
    for text in [text for text in random_texts(1000, seed=2) if text.lstrip(" ▁") == text]:
        assert llama2.encode(text) == [BOS, *tokenizer.encode(text, add_special_tokens=False)], repr(text)
    assert tokenizer.encode(" a") == tokenizer.encode("a")
    assert llama2.encode(" a") != llama2.encode("a")


@pytest.mark.parametrize("text", ["<s>", "</s>", "<unk>", "[INST]", "<0x41>", "a</s>b<s>", "▁<s>", " </s>"])
def test_special_strings_in_text_are_text(llama2, text):
    bos, *ids = llama2.encode(text)
    assert bos == BOS
    assert all(llama2.token_bytes(id) for id in ids)
    assert llama2.decode([bos, *ids]) == text.replace("▁", " ")


@pytest.mark.parametrize("settings", [{}, {"tokenizer_config": {}}, {"tokenizer_config": {"add_bos_token": True}}])
def test_one_bos_unless_the_settings_say_otherwise(tmp_path, settings):
    tokenizer = load(tmp_path, **settings)
    assert (tokenizer.bos_id, tokenizer.add_bos, tokenizer.stop_ids) == (BOS, True, {EOS})
    for text in ("", "Hi", "<s>", "<s>Hi"):
        assert tokenizer.encode(text)[0] == BOS
        assert tokenizer.encode(text).count(BOS) == 1
    without = load(tmp_path, tokenizer_config={"add_bos_token": False})
    assert without.encode("<s>Hi") == tokenizer.encode("<s>Hi")[1:]


def test_a_million_spaces(llama2, capfd):
    text = " " * 1_000_000 + "x"
    assert llama2.decode(llama2.encode(text)) == text
    assert capfd.readouterr() == ("", "")


# --- decoding and streams ---


def test_a_continuation_keeps_its_first_space(llama2):
    """transformers#22710: every token decoded as a text of its own lost its space, so words ran together."""
    prompt, whole = llama2.encode("the value is"), llama2.encode("the value is a list")
    assert whole[: len(prompt)] == prompt
    rest = whole[len(prompt) :]
    assert "".join(streamed(llama2, rest)) == llama2.decode(rest) == " a list"
    assert streamed(llama2, rest)[0].startswith(" ")
    assert "".join(streamed(llama2, whole)) == llama2.decode(whole) == "the value is a list"
    two = llama2.encode("  a list")[1:]  # the model's own space, and two of the text
    assert llama2.decode(two) == "   a list"


@pytest.mark.parametrize(
    "text", ["", " ", "   ", " a", "  a", "\n", "\n a", "\t\ta", " \n", "a  b   c", "中文 😀", " 😀 ", "\r\n\x00"]
)
def test_white_space_and_bytes_come_back(llama2, text):
    assert llama2.decode(llama2.encode(text)) == "".join(streamed(llama2, llama2.encode(text))) == text


@given(text=texts)
def test_round_trip(llama2, reference, text):
    ids = llama2.encode(text)
    assert llama2.decode(ids) == "".join(streamed(llama2, ids)) == reference.decode(ids) == text


@given(text=texts, cut=st.integers(2, 30))
def test_a_prompt_and_its_continuation_join_to_the_text(llama2, text, cut):
    """Wherever a text is cut in two between its tokens, BOS and one more before: each space is in one of the parts."""
    ids = llama2.encode(text)
    start, rest = llama2.stream(), llama2.stream()
    shown = "".join(map(start.push, ids[:cut]))
    if not start.flush():  # no character is cut
        assert shown + "".join(map(rest.push, ids[cut:])) + rest.flush() == text


@given(
    ids=st.lists(st.one_of(st.integers(0, 2), st.integers(3, 258), st.integers(200, 599), st.integers(-3, 700)), max_size=30)
)
def test_a_stream_joins_to_the_full_decode(llama2, ids):
    data = b"".join(map(llama2.token_bytes, ids))
    expected = data.removeprefix(b" ") if ids[:1] == [BOS] else data
    assert "".join(streamed(llama2, ids)) == llama2.decode(ids) == expected.decode(errors="replace")


def test_what_a_token_renders_as(llama2, reference):
    piece = {reference.id_to_piece(id): llama2.token_bytes(id) for id in range(600)}
    assert (piece["<0xE6>"], piece["<0x0A>"], piece["▁the"], piece["▁"]) == (b"\xe6", b"\n", b" the", b" ")
    assert {llama2.token_bytes(id) for id in (0, BOS, EOS, 600, -1)} == {b""}
    assert llama2.text_ids() == list(range(3, 600))


@pytest.mark.parametrize("text", ["日本語のテキスト", "😀👍🏽👨‍👩‍👧", "naïve café"])
def test_no_broken_character_in_a_stream(llama2, text):
    parts = streamed(llama2, llama2.encode(text))
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)
    *parts, last = streamed(llama2, llama2.encode(text + "😀")[:-1])
    assert ("".join(parts), last) == (text, "\ufffd")


def test_a_model_without_a_space_of_its_own(tmp_path):
    tokenizer = load(tmp_path, train(add_dummy_prefix=False))
    for text in ("a", " a", "  a"):
        assert tokenizer.decode(tokenizer.encode(text)) == "".join(streamed(tokenizer, tokenizer.encode(text))) == text


# --- chat ---


@pytest.mark.parametrize("legacy", [False, True, None])
@pytest.mark.parametrize(
    "template", [LLAMA2_TEMPLATE, MISTRAL_TEMPLATE, TINYLLAMA_TEMPLATE, "x {{ bos_token }} y", " x<s>  y"]
)
def test_chats_agree_with_transformers(tmp_path, reference, template, legacy):
    config = {"chat_template": template, "bos_token": "<s>", "eos_token": {"content": "</s>"}}
    tokenizer = load(tmp_path, tokenizer_config=config if legacy is None else config | {"legacy": legacy})
    transformers = in_transformers(reference, legacy=bool(legacy))
    for messages in (HELLO, TURNS, SYSTEM + HELLO, SYSTEM + TURNS):
        if messages[0] in SYSTEM and template == MISTRAL_TEMPLATE:
            with pytest.raises(ValueError, match="must alternate"):
                tokenizer.encode_chat(messages)
            continue
        for prompt in (True, False):
            text = transformers.apply_chat_template(
                messages, chat_template=template, add_generation_prompt=prompt, tokenize=False
            )
            expected = transformers.encode(text, add_special_tokens=False)
            assert tokenizer.encode_chat(messages, add_generation_prompt=prompt) == expected


def test_a_template_file_alone_knows_bos_and_eos(tmp_path):
    """Their strings are the model's own where no settings name them."""
    (tmp_path / "chat_template.jinja").write_text(TINYLLAMA_TEMPLATE + "{{ bos_token }}", encoding="utf-8")
    ids = load(tmp_path).encode_chat(HELLO)
    assert [id for id in ids if id < 3] == [EOS, BOS]


@pytest.mark.parametrize("legacy, start", [(False, ["<s>", "["]), (True, ["<s>", "▁["])])
def test_a_space_of_the_models_own_after_a_special_token(tmp_path, legacy, start):
    """Meta's code put one after <s>; transformers does so where the settings say "legacy", which thus decides."""
    model = train(user_defined_symbols="▁[")
    tokenizer = load(tmp_path, model, tokenizer_config={"chat_template": LLAMA2_TEMPLATE, "legacy": legacy})
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
    assert [pieces.id_to_piece(id) for id in tokenizer.encode_chat(HELLO)[:2]] == start


@pytest.mark.parametrize("content", ["</s>", "<s>[INST] x [/INST]</s>", "a<unk>", "</</s>s>", "</s\U000f0000>"])
@pytest.mark.parametrize("template", [LLAMA2_TEMPLATE, MISTRAL_TEMPLATE, TINYLLAMA_TEMPLATE])
def test_special_strings_in_a_message_are_text(tmp_path, template, content):
    tokenizer = load(tmp_path, tokenizer_config={"chat_template": template})
    plain, ids = (tokenizer.encode_chat([{"role": "user", "content": text}]) for text in ("Hello", content))
    assert [id for id in ids if id < 3] == [id for id in plain if id < 3]
    assert tokenizer.decode(ids) == tokenizer.decode(plain).replace("Hello", content)


def test_control_tokens_of_the_model_come_from_the_template_only(tmp_path):
    """Mistral v0.3 has [INST] as such a token."""
    model = train(control_symbols="[INST],[/INST]")
    tokenizer = load(tmp_path, model, tokenizer_config={"chat_template": MISTRAL_TEMPLATE})
    ids = tokenizer.encode_chat([{"role": "user", "content": "a [/INST] b"}])
    assert ids[:2] == [BOS, 3]
    assert [id for id in ids if not tokenizer.token_bytes(id)] == [BOS, 3, 4]
    assert tokenizer.decode(ids) == "a [/INST] b "  # the space before is the one left out after BOS
    assert not {3, 4} & {*tokenizer.encode("[INST] a [/INST]")}


def test_no_template_is_made_up(tmp_path, llama2):
    """Nothing tells Llama 2's chat model from its base, from Mistral or from TinyLlama: all have this tokenizer."""
    with pytest.raises(ValueError, match=r"chat template.*none.*chat_template\.jinja") as error:
        llama2.encode_chat(HELLO)
    assert_one_line(error)


@pytest.mark.parametrize("where", ["added_tokens", "tokenizer_config"])
def test_chatml_is_the_fallback_where_its_tokens_were_added(tmp_path, where):
    tokens = {"<|im_start|>": 601, "<|im_end|>": 602}
    if where == "tokenizer_config":
        tokens = {"added_tokens_decoder": {str(id): {"content": token, "special": True} for token, id in tokens.items()}}
    tokenizer = load(tmp_path, **{where: tokens})
    ids = tokenizer.encode_chat([{"role": "user", "content": "a<|im_end|>"}])
    assert [id for id in ids if id > 599] == [601, 602, 601]
    assert tokenizer.decode(ids) == "user\na<|im_end|>\nassistant\n"
    assert tokenizer.vocab_size == 603
    assert tokenizer.stop_ids == {EOS, 602}
    assert not {601, 602} & {*tokenizer.encode("<|im_start|>")}
    assert tokenizer.decode([600, 601, 602]) == ""


def test_added_tokens_that_are_not_special_are_shown(tmp_path):
    config = {"added_tokens_decoder": {"600": {"content": "<think>", "special": False}, "3": {"content": "<pad>"}}}
    tokenizer = load(tmp_path, tokenizer_config=config | {"eos_token": "<pad>"}, added_tokens={"<think>": 600})
    assert tokenizer.decode([600, 3]) == "<think>"
    assert tokenizer.stop_ids == {EOS, 3}


def test_a_word_that_is_listed_as_an_added_token_stays_a_word(tmp_path, reference):
    id = reference.piece_to_id("▁the")
    listed = {"added_tokens_decoder": {str(id): {"content": "▁the", "special": False}}}
    tokenizer = load(tmp_path, tokenizer_config=listed)
    assert tokenizer.encode("the the") == [BOS, id, id]
    assert tokenizer.decode([BOS, id, id]) == "the the"


def test_special_strings_that_the_model_finds_in_any_text(tmp_path):
    """Yi has <|im_end|> as a "user-defined" piece: sentencepiece makes its id of a message that holds the string."""
    model = train(user_defined_symbols="<|im_end|>,<think>")
    assert 3 in sentencepiece.SentencePieceProcessor(model_proto=model).encode("a<|im_end|>")
    tokenizer = load(tmp_path, model, added_tokens={"<|im_end|>": 3})
    for text in ("a<|im_end|>", "<|im_end|>", " <|im_end|><|im_end|> b", "<think>"):
        assert 3 not in tokenizer.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}<|im_end|>")
    ids = load_tokenizer(tmp_path).encode_chat([{"role": "user", "content": "<|im_end|>x"}])
    assert (ids.count(3), ids[-1]) == (1, 3)


# --- files ---


def test_sentencepiece_and_tiktoken_are_told_apart_by_bytes(tmp_path, llama2):
    other = load(tmp_path)
    assert other.encode("Hi") == llama2.encode("Hi")
    assert load_tokenizer(tmp_path / "tokenizer.model").encode("Hi") == llama2.encode("Hi")


def test_tokenizer_model_is_preferred_to_a_tokenizer_json(tmp_path):
    """Llama 2's folders have both; its tokenizer.json alone is refused, with the file to add."""
    unigram = trained(BYTE_LEVEL)
    unigram["model"]["type"] = "Unigram"
    assert load(tmp_path, tokenizer=unigram).vocab_size == 600
    (tmp_path / "tokenizer.model").unlink()
    with pytest.raises(ValueError, match=r"tokenizer\.json: .*Unigram.*add its tokenizer\.model") as error:
        load_tokenizer(tmp_path)
    assert_one_line(error)


def test_llama2s_own_tokenizer_json_names_the_file_to_add(tmp_path, reference):
    for legacy in (True, False):
        config = json.loads(in_transformers(reference, legacy=legacy).backend_tokenizer.to_str())
        (tmp_path / "tokenizer.json").write_text(json.dumps(config), encoding="utf-8")
        with pytest.raises(ValueError, match=r"sentencepiece.*add its tokenizer\.model"):
            load_tokenizer(tmp_path)


def damaged() -> list[bytes]:
    model = train()
    cuts = [model[:length] for length in itertools.chain(range(3, 60), range(60, len(model), 97))]
    bad_letter = model.replace("▁the".encode(), b"\xff\xff\xffthe", 1)
    return [*cuts, bad_letter, b"\n\x05\n" + b"\xff" * 50, b"\n\xff\n" + bytes(99), model[:40] + b"\xff" * 9 + model[40:]]


def test_a_damaged_model_is_one_line(tmp_path, capfd):
    for data in damaged():
        with pytest.raises(ValueError) as error:
            load(tmp_path, data)
        assert_one_line(error, str(tmp_path / "tokenizer.model"), "damaged", "download")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name, content, reason", [
    ("tokenizer_config", {"bos_token": "<nope>"}, "'<nope>' is not among the special tokens"),
    ("tokenizer_config", {"added_tokens_decoder": {"x": {"content": "y"}}}, "no whole number"),
    ("tokenizer_config", {"added_tokens_decoder": {"99999999": {"content": "y"}}}, "below 2^24"),
    ("tokenizer_config", {"added_tokens_decoder": {"600": "y"}}, "damaged"),
    ("tokenizer_config", {"added_tokens_decoder": {"600": {"content": 5}}}, "not a text"),
    ("tokenizer_config", {"added_tokens_decoder": []}, "vocab"),
    ("tokenizer_config", [], "tokenizer_config.json"),
    ("added_tokens", {"<a>": "600"}, "no whole number"),
    ("added_tokens", {"<a>": -1}, "no whole number"),
    ("added_tokens", {"<a>": True}, "no whole number"),
    ("added_tokens", {"<a>": None}, "no whole number"),
    ("added_tokens", [], "added_tokens.json"),
])  # fmt: skip
def test_bad_settings_are_one_line(tmp_path, name, content, reason):
    if reason == "vocab":  # nothing added
        assert load(tmp_path, **{name: content}).vocab_size == 600
        return
    with pytest.raises(ValueError, match=re.escape(reason)) as error:
        load(tmp_path, **{name: content})
    assert_one_line(error, str(tmp_path))
