"""Text to token ids and back: Llama 3's tokenizer (tiktoken), Hugging Face's byte-level BPE, Llama 2's (sentencepiece).

Special tokens (`<|eot_id|>` and its like) enter by `encode_chat` alone, written there by the template. In text, in a
message too, their strings are ordinary characters. Every error is a ValueError of one line.

A sentencepiece model puts one space of its own before a text ("Hi" becomes the token "▁Hi"). Ids that start with BOS are
a whole text: `decode` and `stream` leave that space out. Ids without BOS continue a text, and there a first space is real:
after "My name is" comes " John".
"""

import base64
import codecs
import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import jinja2
import jinja2.sandbox
import regex
import sentencepiece
import tiktoken

# Any of these, where the vocabulary has it, ends a generation, besides what the checkpoint's own files name.
STOP_TOKENS = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>", "<|im_end|>", "<|endoftext|>")

# Llama 3.1's special tokens by their place after the others, 256 in all; the rest is reserved, and numbered.
LLAMA3_SPECIAL = {0: "begin_of_text", 1: "end_of_text", 4: "finetune_right_pad_id", 6: "start_header_id"}
LLAMA3_SPECIAL |= {7: "end_header_id", 8: "eom_id", 9: "eot_id", 10: "python_tag"}

# How text is cut into pieces before merging. Llama 3's is published in Meta's llama3/tokenizer.py.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# GPT-2's after every digit was set apart. The text ahead of a digit ends there, so spaces before one stay together:
# "a  1" is "a", "  ", "1", while "a  b" is "a", " ", " b".
DIGITS_PATTERN = r"'(?:[sdmt]|ll|ve|re)|\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})|\s+(?!\S)|\s+"

LLAMA3_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
CHATML_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# For checkpoints that bring no template: the token that tells the format, and its template.
FALLBACK_TEMPLATES = {"<|start_header_id|>": LLAMA3_TEMPLATE, "<|im_start|>": CHATML_TEMPLATE}


# --- the interface ---


@dataclass(frozen=True)
class Settings:
    """How a tokenizer is to be used, as the files beside it say."""

    bos_token: str | None
    eos_token: str | None
    add_bos: bool
    stop_ids: frozenset[int]  # those that generation_config.json names
    chat_template: str | None


class Tokenizer:
    """What the rest of the program knows of a tokenizer. A reader's class adds `_encode_text`.

    own_space: what the tokenizer itself puts before a text.

    vocab_size: number of ids, holes included.      stop_ids: any of these ids ends a generation.
    bos_id: id of the token that starts a text, or None.    add_bos: whether `encode` puts it there.
    """

    own_space = b""

    def __init__(self, pieces: Sequence[bytes], special_ids: Mapping[str, int], settings: Settings):
        """pieces: what each id renders as, b"" for special tokens. special_ids: strings that templates may write."""
        self._pieces, self._special_ids, self._settings = pieces, dict(special_ids), settings
        if not all(isinstance(token, str) for token in special_ids):
            raise ValueError(_damaged("an added token is not a text"))
        self.vocab_size = len(pieces)
        self.bos_id = self._id_of(settings.bos_token, "bos_token")
        self.add_bos = settings.add_bos
        if self.add_bos and self.bos_id is None:
            raise ValueError("a text must start with BOS (add_bos_token), but no bos_token is named: name it there too")
        named = {self._special_ids.get(token) for token in STOP_TOKENS} | {self._id_of(settings.eos_token, "eos_token")}
        self.stop_ids = settings.stop_ids | named - {None}

    def _id_of(self, token: str | None, name: str) -> int | None:
        if token is not None and token not in self._special_ids:
            raise ValueError(f"{name} {token!r} is not among the special tokens: correct it in tokenizer_config.json")
        return self._special_ids.get(token)

    def _encode_text(self, text: str) -> list[int]:
        raise NotImplementedError

    def _encode_part(self, text: str, first: bool) -> list[int]:
        """Ids of the text before (first), between and after the special tokens that a template wrote."""
        return self._encode_text(text)

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, after one BOS if `add_bos`. Strings of special tokens are text, like any other.

        Raises ValueError for a lone surrogate, which no encoding of text can hold.
        """
        _check_text(text)
        return [self.bos_id] * self.add_bos + self._encode_text(text)

    def token_bytes(self, id: int) -> bytes:
        """The UTF-8 bytes of one token; none for special tokens and for ids outside a vocabulary (padded models)."""
        return self._pieces[id] if 0 <= id < self.vocab_size else b""

    def text_ids(self) -> list[int]:
        """All ids that stand for text: no special tokens, no holes."""
        return [id for id, piece in enumerate(self._pieces) if piece]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids; bytes that are not UTF-8 become U+FFFD."""
        ids = list(ids)
        data = b"".join(map(self.token_bytes, ids))
        return data.removeprefix(self._space_after(ids[:1])).decode("utf-8", errors="replace")

    def _space_after(self, first_ids: Sequence[int]) -> bytes:
        """What to leave out at the start of text whose first id is given."""
        return self.own_space if self.bos_id in first_ids else b""

    def stream(self) -> "TextStream":
        """A new reader of ids that come one at a time."""
        return TextStream(self)

    def encode_chat(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation in the checkpoint's chat template, which alone decides about BOS.

        messages: dicts of "role" and "content". Special tokens come from the template only: the same strings inside a
        message are text. Raises ValueError where there is no template or where it refuses the messages.
        """
        if not messages or any(set(m) != {"role", "content"} or {*map(type, m.values())} != {str} for m in messages):
            raise ValueError("a chat is one or more messages, each with the two strings 'role' and 'content'")
        text = "".join(text for message in messages for text in message.values())
        _check_text(text)
        # A special string in a message is broken up by a private-use character for as long as the template works:
        # "<|eot_id|>" -> "<\U000f0000|eot_id|>". The look-ahead also finds strings that overlap.
        mark = chr(min(set(range(0xF0000, 0x10FFFE)) - set(map(ord, set(text)))))
        special = "|".join(re.escape(token) for token in sorted(self._special_ids, key=len, reverse=True)) or "(?!)"
        starts = re.compile(f"(?=(?:{special})).", re.DOTALL)
        marked = [{key: starts.sub(rf"\g<0>{mark}", text) for key, text in m.items()} for m in messages]
        tokens = {"bos_token": self._settings.bos_token or "", "eos_token": self._settings.eos_token or ""}
        tokens |= {"tools": None, "documents": None}  # defined, since templates ask `tools is not none`
        try:
            chat = self._template.render(messages=marked, add_generation_prompt=add_generation_prompt, **tokens)
        except Exception as error:  # a template is somebody's program: it can raise anything
            raise ValueError(f"the chat template failed: {_one_line(error)}") from error
        ids = []
        for i, part in enumerate(re.split(f"({special})", chat)):  # text and special strings in turns
            ids += [self._special_ids[part]] if i % 2 else self._encode_part(part.replace(mark, ""), first=i == 0)
        return ids

    @functools.cached_property
    def _template(self) -> jinja2.Template:
        fallbacks = [source for token, source in FALLBACK_TEMPLATES.items() if token in self._special_ids]
        source = self._settings.chat_template or next(iter(fallbacks), None)
        if source is None:
            raise ValueError("this checkpoint has none: use a plain prompt, or add a chat_template.jinja")
        # Checkpoints are downloads, hence the sandbox; the settings are those templates are written for.
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.add_extension("jinja2.ext.loopcontrols")
        environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
        environment.globals.update(raise_exception=_raise_exception, strftime_now=lambda f: datetime.now().strftime(f))
        return environment.from_string(source)


class TextStream:
    """Turns ids that come one at a time into text; all of it joined is what `decode` makes of all the ids."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer, self._left_out = tokenizer, None
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, id: int) -> str:
        """The text that this token completes: a character appears once all its bytes are there."""
        if self._left_out is None:
            self._left_out = self._tokenizer._space_after([id])
        data = self._tokenizer.token_bytes(id)
        if data and self._left_out:
            data, self._left_out = data.removeprefix(self._left_out), b""
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was cut, or nothing."""
        return self._decoder.decode(b"", final=True)


class BytePairTokenizer(Tokenizer):
    """Byte-level BPE: cut the text into pieces by a pattern, then merge each piece's bytes by rank.

    ranks: rank of each mergeable token, 0 to n-1; the lowest merges first. ids: the token id of each rank (the two
    differ where a vocabulary is not sorted by merges). Bytes that are no token are dropped from a piece before its
    merges, as the `tokenizers` library does, so that their neighbours meet: SmolLM2 lacks 21 bytes.
    """

    def __init__(self, ranks: Mapping[bytes, int], ids: Sequence[int], pattern: str, *common):
        super().__init__(*common)
        self._ids = ids
        self._missing = bytes(byte for byte in range(256) if bytes([byte]) not in ranks)
        try:
            # What the pattern does not match is a piece of its own.
            self._pattern = regex.compile(rf"(?:{pattern})|(?:(?!{pattern})[\s\S])+")
        except regex.error as error:
            raise ValueError(f"its pre-tokenizer's pattern is damaged: {_one_line(error)}") from error
        if self._pattern.match(""):
            raise ValueError("its pre-tokenizer's pattern matches the empty text, which is not supported")
        # Only tiktoken's merging is used. Its own splitting panics, with a page on stderr, on a run of 10^6 spaces, and
        # its merging does so on an unknown byte or an empty piece.
        encoding = tiktoken.Encoding("bpe", pat_str=".", mergeable_ranks=dict(ranks), special_tokens={})
        self._merge = encoding._encode_single_piece  # the public calls take str, and dropped bytes leave no valid str

    def _encode_text(self, text: str) -> list[int]:
        ids, known = [], {}
        for match in self._pattern.finditer(text):
            piece = match.group()
            if piece not in known:
                data = piece.encode().translate(None, delete=self._missing)
                known[piece] = [self._ids[rank] for rank in self._merge(data)] if data else []
            ids += known[piece]
        return ids


class SentencePieceTokenizer(Tokenizer):
    """Llama 2's, Mistral's and TinyLlama's: sentencepiece itself cuts and merges.

    own_space_everywhere: whether a template's later parts, those after a special token, get a space of the model's own
    like the first one. transformers says no, unless "legacy" is true; nor does a part get one that begins with a space.
    """

    def __init__(self, model: bytes, own_space_everywhere: bool, *common):
        super().__init__(*common)
        self._own_space_everywhere = own_space_everywhere
        self._spaced = sentencepiece.SentencePieceProcessor(model_proto=model)
        # Protobuf merges messages that follow each other. This one says normalizer_spec.add_dummy_prefix = false.
        self._bare = sentencepiece.SentencePieceProcessor(model_proto=model + b"\x1a\x02\x18\x00")
        if self._spaced.encode("a", out_type=str)[0].startswith("▁"):
            self.own_space = b" "
        # Some models find special strings in any text ("user-defined" pieces): these are spelled in two parts instead.
        self._spelled = {
            id: self._bare.encode(token[0]) + self._bare.encode(token[1:])
            for token, id in self._special_ids.items()
            if not self._pieces[id] and self._bare.encode(token) == [id]
        }

    def _encode_text(self, text: str) -> list[int]:
        return self._spell(self._spaced.encode(text))

    def _encode_part(self, text: str, first: bool) -> list[int]:
        spaced = (first or self._own_space_everywhere) and not text.startswith((" ", "▁"))
        return self._spell((self._spaced if spaced else self._bare).encode(text))

    def _spell(self, ids: list[int]) -> list[int]:
        return [part for id in ids for part in self._spelled.get(id, (id,))] if self._spelled else ids


# --- readers ---

# What a reader gets: a path, or the content itself, for each file name.
Files = Mapping[str, Path | dict]


def load_tokenizer(source: str | Path | Files) -> Tokenizer:
    """The tokenizer of a checkpoint: the first file of `TOKENIZERS` that is there and can be read.

    source: a folder; a file of `TOKENIZERS`, read with the settings beside it; any other file, for the folder it is in;
    or the contents of JSON files by name, {"tokenizer.json": {...}, "tokenizer_config.json": {...}}.
    Raises ValueError where there is none, and for a file that is damaged or of a kind that is not read.
    """
    folder, files = Path("the file given"), source
    if not isinstance(source, Mapping):
        path = Path(source)
        folder = path.parent if path.is_file() else path
        names = [path.name] if path.is_file() and path.name in TOKENIZERS else TOKENIZERS
        files = {name: folder / name for name in (*names, *SETTINGS_FILES) if (folder / name).is_file()}
    failures = []
    for name in [name for name in TOKENIZERS if name in files]:
        try:
            return TOKENIZERS[name](files)
        except (LookupError, TypeError, AttributeError) as error:
            failures.append(f"{folder / name}: {_damaged(repr(error))}")
        except (ValueError, OSError) as error:
            failures.append(f"{folder / name}: {_one_line(error)}")
    looked = f"no tokenizer in {folder}: looked for {' and '.join(TOKENIZERS)}; download or convert it again"
    raise ValueError([*failures, looked][0])  # the first file that is there is the one to mend


def read_tokenizer_model(files: Files) -> Tokenizer:
    """Llama 3's `tokenizer.model`: lines of a token in base64, a space and its rank, which is its id too.

    Special tokens follow the ranks, as Meta published them for Llama 3.1. Llama 2's file of this name is another format.
    """
    data = files["tokenizer.model"].read_bytes()
    # A sentencepiece model is a protobuf: field 1 (byte 0x0a), a length, then field 1 again inside of it.
    if data[:1] == b"\n" and data[2:3] == b"\n":
        return read_sentencepiece(data, files)
    ranks = {}
    for place, line in enumerate(data.splitlines()):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise ValueError(_damaged(f"line {place + 1} is not a token in base64 and a rank")) from error
        if int(rank) != place or len(ranks) != place + 1:
            raise ValueError(_damaged(f"line {place + 1} has the rank {int(rank)}, or a token for the second time"))
    if not ranks.keys() >= {bytes([byte]) for byte in range(256)}:
        raise ValueError(_damaged(f"its {len(ranks)} tokens lack some single bytes"))
    reserved = (f"reserved_special_token_{i}" for i in range(256))
    special_ids = {f"<|{LLAMA3_SPECIAL.get(i) or next(reserved)}|>": len(ranks) + i for i in range(256)}
    settings = _read_settings(files, "<|begin_of_text|>", None, add_bos=True)
    pieces = [*ranks, *[b""] * len(special_ids)]
    return BytePairTokenizer(ranks, range(len(ranks)), LLAMA3_PATTERN, pieces, special_ids, settings)


def read_sentencepiece(data: bytes, files: Files) -> Tokenizer:
    """Llama 2's `tokenizer.model`, with the tokens that `tokenizer_config.json` and `added_tokens.json` add.

    A text starts with BOS unless the settings say otherwise. Special are what the model calls control tokens (BOS, EOS)
    and the added ones, if not said to be text.
    """
    try:
        model = sentencepiece.SentencePieceProcessor(model_proto=data)
        tokens = [model.id_to_piece(id) for id in range(model.vocab_size())]
    except (RuntimeError, UnicodeDecodeError) as error:
        raise ValueError(_damaged(f"sentencepiece: {error}")) from error
    pieces = [token.replace("▁", " ").encode() for token in tokens]
    special_ids = {}
    for id, token in enumerate(tokens):
        if model.is_byte(id):  # "<0xE6>"
            pieces[id] = bytes([int(token[1:-1], 16)])
        elif model.is_control(id) or model.is_unknown(id):
            pieces[id], special_ids[token] = b"", id

    config = _read_json(files, "tokenizer_config.json")
    added = {id: {"content": token} for token, id in _read_json(files, "added_tokens.json").items()}
    added |= {int(id) if id.isdecimal() else id: t for id, t in (config.get("added_tokens_decoder") or {}).items()}
    if not all(type(id) is int and 0 <= id < 1 << 24 for id in added):
        raise ValueError(_damaged("tokenizer_config.json or added_tokens.json: an id is no whole number below 2^24"))
    pieces += [b""] * (max(added, default=-1) + 1 - len(pieces))
    for id, token in added.items():
        pieces[id] = b"" if token.get("special", True) else token["content"].replace("▁", " ").encode()
        special_ids |= {token["content"]: id} if token["content"] else {}

    bos, eos = (tokens[id] if id >= 0 else None for id in (model.bos_id(), model.eos_id()))
    settings = _read_settings(files, bos, eos, add_bos=bos is not None)
    settings = replace(settings, stop_ids=settings.stop_ids | {model.eos_id()} - {-1})
    return SentencePieceTokenizer(data, bool(config.get("legacy")), pieces, special_ids, settings)


def read_tokenizer_json(files: Files) -> Tokenizer:
    """A Hugging Face `tokenizer.json` with byte-level BPE; every other kind is refused by its name."""
    config = _read_json(files, "tokenizer.json")
    model = config["model"]
    steps = _steps(config.get("pre_tokenizer"), "pretokenizers")
    for mark in [model.get("type"), *["byte_fallback"] * bool(model.get("byte_fallback")), *(s["type"] for s in steps)]:
        if mark in ("Unigram", "byte_fallback", "Metaspace"):
            raise ValueError(f"it is a sentencepiece tokenizer ({mark}): add its tokenizer.model, which is read instead")
    if model.get("type", "BPE") != "BPE":
        raise ValueError(f"its model is {model['type']}, and only BPE is read")
    if config.get("normalizer") is not None:
        raise ValueError(f"its normalizer {config['normalizer']['type']} is not supported, only null is")
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(option):
            raise ValueError(f"its BPE option {option} = {model[option]!r} is not supported")
    pattern = _pre_tokenizer_pattern(steps)
    added = {token["content"]: token for token in config.get("added_tokens") or [] if token["content"]}
    special_ids = {content: token["id"] for content, token in added.items()}
    vocab = {token: id for token, id in model["vocab"].items() if token not in added}
    ids = [*vocab.values(), *special_ids.values()]
    if {*map(type, ids)} != {int} or len(set(ids)) < len(ids) or not 0 <= min(ids) <= max(ids) < 1 << 24:
        raise ValueError(_damaged("its token ids are not different whole numbers below 2^24"))

    letters = _byte_letters()
    pieces = [b""] * (max(ids) + 1)
    for token, id in vocab.items():
        pieces[id] = bytes(letters[letter] for letter in token)
    for content, token in added.items():
        pieces[token["id"]] = b"" if token.get("special") else content.encode()

    # A rank is the place in this list: bytes, then merges in order. A token may be the result of several merges: the
    # first counts. What no merge makes can be a whole piece only where the merges are ignored for one (Llama 3).
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    for pair in merges:
        if len(pair) != 2 or not {*pair, "".join(pair)} <= vocab.keys():
            raise ValueError(_damaged(f"the merge {pair!r} is not of two tokens, or not to one"))
    by_rank = [letter for letter in letters if letter in vocab] + ["".join(pair) for pair in merges]
    if model.get("ignore_merges"):
        by_rank += sorted(vocab, key=vocab.get)
    by_rank = list(dict.fromkeys(by_rank))
    if model.get("unk_token") and not letters.keys() <= vocab.keys():
        raise ValueError(f"its unk_token {model['unk_token']!r} for missing bytes is not supported")

    ranks = {pieces[vocab[token]]: rank for rank, token in enumerate(by_rank)}
    bos_token = _post_processor_bos(config.get("post_processor"))
    settings = _read_settings(files, bos_token, None, add_bos=bos_token is not None)
    return BytePairTokenizer(ranks, [vocab[token] for token in by_rank], pattern, pieces, special_ids, settings)


# One reader for each file name, tried in this order.
TOKENIZERS = {"tokenizer.model": read_tokenizer_model, "tokenizer.json": read_tokenizer_json}
SETTINGS_FILES = ("tokenizer_config.json", "generation_config.json", "added_tokens.json", "chat_template.jinja")


def _steps(part: dict | None, key: str) -> list[dict]:
    """The members of a pre-tokenizer or post-processor, which may be absent, a single one or a sequence."""
    return [] if not part else part[key] if part["type"] == "Sequence" else [part]


def _pre_tokenizer_pattern(steps: list[dict]) -> str:
    """The pattern that cuts text as a chain of Hugging Face pre-tokenizers does."""
    match [{"use_regex": True} | step for step in steps]:
        case [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
            return GPT2_PATTERN
        case [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        ]:
            return DIGITS_PATTERN
        case [
            {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ]:
            return pattern
    options = {key: value for step in steps for key, value in step.items() if key not in ("type", "pattern")}
    names = " + ".join(step["type"] for step in steps) or "null"
    raise ValueError(f"its pre-tokenizer {names} with the options {options} is not supported")


def _post_processor_bos(post_processor: dict | None) -> str | None:
    """The special token that a post-processor puts before a text, if any; every other addition is refused."""
    bos_token = None
    for step in _steps(post_processor, "processors"):
        match step:
            case {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": str(token)}}, {"Sequence": _}]}:
                bos_token = token
            case {"type": "TemplateProcessing", "single": [{"Sequence": _}]} | {"type": "ByteLevel"}:
                pass  # adds nothing to the ids
            case _:
                raise ValueError(f"its post-processor {step['type']} adds something else than one BOS before the text")
    return bos_token


def _read_settings(files: Files, bos_token: str | None, eos_token: str | None, add_bos: bool) -> Settings:
    """What the files beside a tokenizer say. bos_token, eos_token, add_bos: what holds where they are silent."""
    config, generation = _read_json(files, "tokenizer_config.json"), _read_json(files, "generation_config.json")
    eos = generation.get("eos_token_id")
    stop_ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(type(id) is int for id in stop_ids):
        raise ValueError(_damaged(f"generation_config.json: eos_token_id is {eos!r}"))
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name: the one for plain conversations
        template = {item["name"]: item["template"] for item in template}.get("default")
    if "chat_template.jinja" in files:
        template = files["chat_template.jinja"].read_text(encoding="utf-8")
    bos, eos = (v["content"] if isinstance(v, dict) else v for v in (config.get("bos_token"), config.get("eos_token")))
    if not all(isinstance(text, str | None) for text in (bos, eos, template)):
        raise ValueError(_damaged("tokenizer_config.json: bos_token, eos_token or chat_template is not a text"))
    if config.get("add_bos_token") is not None:
        add_bos = bool(config["add_bos_token"])
    return Settings(bos or bos_token, eos or eos_token, add_bos, frozenset(stop_ids), template)


# --- small parts ---


def _read_json(files: Files, name: str) -> dict:
    """The object in a file; an empty one where there is no such file."""
    value = files.get(name, {})
    try:
        if isinstance(value, Path):
            value = json.loads(value.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(_damaged(f"{name}: {error}")) from error
    if not isinstance(value, dict):
        raise ValueError(_damaged(f"{name} holds a {type(value).__name__}, not an object"))
    return value


def _byte_letters() -> dict[str, int]:
    """GPT-2's letter for each byte, by letter: a printable byte is itself, the others are U+0100 and on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the text has a lone surrogate at character {error.start}: take it out") from error


def _one_line(error: object) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _damaged(reason: object) -> str:
    return f"damaged ({_one_line(reason)}); download or convert it again"


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
