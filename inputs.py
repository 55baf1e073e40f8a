"""What a command asks for: the prompt's token ids, and lengths that fit the model."""

import sys
from pathlib import Path

import torch

from model import ModelArgs
from tokenizer import Tokenizer


def read_prompt(args) -> str:
    if args.prompt_file is None:
        text = args.prompt if args.prompt is not None else "Hello, my name is"
        if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):  # how Python passes on stray bytes
            raise ValueError("--prompt: not UTF-8")
        return text
    if args.prompt_file == "-" and sys.stdin is None:
        raise ValueError("--prompt_file -: stdin is closed")
    try:
        data = sys.stdin.buffer.read() if args.prompt_file == "-" else Path(args.prompt_file).read_bytes()
        return data.decode("utf-8")
    except OSError as e:
        raise ValueError(f"--prompt_file {args.prompt_file}: {e.strerror}") from None
    except UnicodeDecodeError as e:
        raise ValueError(f"--prompt_file {args.prompt_file}: not UTF-8 at byte {e.start}") from None


def prompt_ids(args, model_args: ModelArgs, tokenizer: Tokenizer | None) -> list[int]:
    """The prompt's token ids. ValueError for an empty one and for ids that the model does not have."""
    if tokenizer is None and (args.chat or args.prompt is not None or args.prompt_file is not None):
        raise ValueError("--random_weights has no tokenizer: use --prompt_tokens N")
    if args.system is not None and not args.chat:
        raise ValueError("--system needs --chat")
    if args.prompt_tokens is not None and args.chat:
        raise ValueError("--prompt_tokens and --chat do not go together")
    if tokenizer is None or args.prompt_tokens is not None:
        if (args.prompt_tokens or 0) > model_args.block_size:  # before so many are made
            limit = f"the model's context is {model_args.block_size} (block_size)"
            raise ValueError(f"--prompt_tokens {args.prompt_tokens}: {limit}")
        usable = torch.tensor(tokenizer.text_ids() if tokenizer else range(model_args.vocab_size))
        generator = torch.Generator().manual_seed(0)
        usable = usable[usable < model_args.vocab_size]
        return usable[torch.randint(len(usable), (args.prompt_tokens or 6,), generator=generator)].tolist()
    text = read_prompt(args)
    if args.chat:
        system = [{"role": "system", "content": args.system}] if args.system is not None else []
        ids = tokenizer.encode_chat([*system, {"role": "user", "content": text}])
    else:
        ids = tokenizer.encode(text)
    if not ids:
        raise ValueError("the prompt is empty: zero tokens, nothing to continue (this tokenizer adds no BOS)")
    if max(ids) >= model_args.vocab_size:
        raise ValueError(f"the tokenizer gave id {max(ids)}, the model has only {model_args.vocab_size}: they do not match")
    return ids


def fit_lengths(args, model_args: ModelArgs, T: int) -> str | None:
    """Settle --cache_size and --max_new_tokens for a prompt of T tokens, or raise what does not fit. Returns a note."""
    limit, new = model_args.block_size, args.max_new_tokens
    if T > limit:
        raise ValueError(f"the prompt's {T} tokens exceed the model's context of {limit} (block_size): shorten the prompt")
    if args.cache_size is not None:
        if T + new > args.cache_size:
            raise ValueError(
                f"--cache_size {args.cache_size} is too small: {T} prompt tokens + --max_new_tokens {new} need {T + new}"
            )
        if T + new > limit:
            raise ValueError(
                f"{T} prompt tokens + --max_new_tokens {new} = {T + new} exceed the model's context of {limit} "
                f"(block_size): use --max_new_tokens {limit - T}"
            )
        return None
    args.max_new_tokens = min(new, limit - T)
    args.cache_size = T + args.max_new_tokens
    if args.max_new_tokens == new:
        return None
    return f"note: --max_new_tokens {new} stops at {limit - T}, where the model's context of {limit} ends (block_size)"
