"""Downloads a checkpoint from the Hugging Face hub: python scripts/download.py ORGANISATION/NAME

Only the files that a run needs are fetched. They gather in a hidden folder beside the final one, which is renamed when all
are there: run again after an interruption, and it goes on where it stopped. A token is taken from HF_TOKEN.
"""

import argparse
import os
import re
import shutil
import sys
from fnmatch import fnmatchcase
from pathlib import Path

TOKENIZER = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
             "generation_config.json", "chat_template.jinja")  # fmt: skip
# The first line that finds something is taken: safetensors before .bin, and one file before shards. So a repository that
# holds its weights twice (pytorch_model*.bin, consolidated.*, original/) is not fetched twice.
WEIGHTS = (
    ("model.safetensors",),
    ("model-*.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin",),
    ("pytorch_model-*.bin", "pytorch_model.bin.index.json"),
)
ORIGINAL = ("params.json", "consolidated*.pth", "tokenizer.model")  # Meta's own format, at the root or below original/


def matching(files: list[str], patterns: tuple[str, ...]) -> list[str]:
    """The files that match, where a pattern stays within its folder."""
    return [f for f in files if any(fnmatchcase(f, p) and f.count("/") == p.count("/") for p in patterns)]


def needed(files: list[str], original: bool) -> list[str]:
    """Which of a repository's files a run needs. ValueError if there are no weights of the wanted format."""
    if original:
        below = "original/" if "original/params.json" in files else ""
        weights = matching(files, tuple(below + pattern for pattern in ORIGINAL))
        if not matching(weights, (f"{below}*.pth",)) or f"{below}params.json" not in weights:
            raise ValueError("holds no params.json with consolidated*.pth: leave out --original")
    else:
        weights = next((found for patterns in WEIGHTS if (found := matching(files, patterns))), [])
        if not weights or "config.json" not in files:
            raise ValueError("holds no config.json with model*.safetensors or pytorch_model*.bin"
                             + (": try --original" if matching(files, ("*.pth", "original/*.pth")) else ""))  # fmt: skip
        weights = ["config.json", *weights]
    return sorted({*weights, *matching(files, TOKENIZER)})


def download(repo: str, out: Path, revision: str | None, original: bool) -> None:
    """Fetch what is needed to a folder that is complete or not there. ImportError without huggingface_hub, ValueError for
    what the repository lacks, OSError where files could not be fetched; beyond these, what the library raises."""
    from huggingface_hub import model_info, snapshot_download

    token = os.environ.get("HF_TOKEN") or None  # None: the one that `hf auth login` stored, if any
    info = model_info(repo, revision=revision, files_metadata=True, token=token)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings}
    files = needed(list(sizes), original)
    partial = out.with_name(f".{out.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    left = sum(sizes[f] for f in files if not (partial / f).is_file())
    print(f"{repo}: {len(files)} files, {left / 1e9:.2f} GB to download to {out}", file=sys.stderr)
    if left > (free := shutil.disk_usage(partial).free):
        raise OSError(f"{left / 1e9:.2f} GB are left to download, the disk of {out} has {free / 1e9:.2f} GB free")
    # The very commit that was looked at. Without a connection the library may return what is there with a mere warning.
    snapshot_download(repo, revision=info.sha, local_dir=partial, allow_patterns=files, token=token)
    missing = [f for f in files if not (partial / f).is_file()]
    if missing:
        raise OSError(f"{len(missing)} files did not arrive, the first is {missing[0]}")
    shutil.rmtree(partial / ".cache", ignore_errors=True)  # the library's notes for resuming
    partial.rename(out)


def explain(error: Exception, repo: str) -> tuple[int, str]:
    """Exit status, and one line that says what to do."""
    kinds = [kind.__name__ for kind in type(error).__mro__]  # names, since the library moves its classes about
    message = next(iter(str(error).split("\n")), "")[:300]
    if isinstance(error, ImportError):
        return 2, f"huggingface_hub is not installed ({message}): {sys.executable} -m pip install huggingface_hub"
    if "GatedRepoError" in kinds:
        return 2, f"is gated: ask for access at https://huggingface.co/{repo}, then set HF_TOKEN to a token that may read it"
    if "RepositoryNotFoundError" in kinds:
        return 2, "not found: check the name; if the repository is private, set HF_TOKEN to a token that may read it"
    if "RevisionNotFoundError" in kinds:
        return 2, "has no such --revision"
    if isinstance(error, ValueError) and "HTTPError" not in kinds:
        return 2, message
    return 1, f"{type(error).__name__}: {message or 'no message'}; run the same command again, it goes on where it stopped"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="download.py", description=__doc__.splitlines()[0])
    parser.add_argument("repo", metavar="REPO", help="ORGANISATION/NAME, such as meta-llama/Llama-3.1-8B-Instruct")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="must not exist yet (default: checkpoints/REPO)")
    parser.add_argument("--revision", help="a branch, tag or commit (default: the repository's main branch)")
    parser.add_argument("--original", action="store_true", help="Meta's own format: params.json, consolidated*.pth")
    args = parser.parse_args(argv)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", args.repo) or ".." in args.repo:
        print(f"{args.repo}: not of the form ORGANISATION/NAME", file=sys.stderr)
        return 2
    out = Path(os.path.abspath(args.out or Path("checkpoints", args.repo)))
    if out.exists():
        print(f"{out}: there already; remove it or name another folder with --out", file=sys.stderr)
        return 2
    try:
        download(args.repo, out, args.revision, args.original)
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # the library's own errors, and those of the HTTP client that it happens to use
        status, line = explain(error, args.repo)
        print(f"{args.repo}: {line}", file=sys.stderr)
        return status
    print(f"wrote {out}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
