"""Llama: configurations, KV cache, mask and the transformer. Knows no tokenizer, no file, no weight scheme and no flag.

Shape letters: B batch, R rows of a tile, S tokens of a call, T prompt length, L cache slots, H query heads, K kv heads,
D head dim, V vocabulary. Weight names and the RoPE layout (pairs x[2i], x[2i+1]) are Meta's.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention import BLOCK, KV_CACHES, PREFILL_ROWS, TILE_HEIGHTS, round_up, scratch_bytes

# --- configuration ---


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's scaling of the RoPE frequencies (published with the model; `rope_type: llama3` at Hugging Face)."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def __post_init__(self):
        for f in fields(self):
            _check_positive(f"rope_scaling.{f.name}", getattr(self, f.name))
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError("model configuration: rope_scaling.low_freq_factor is not below high_freq_factor")


def _check_positive(name: str, value) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        raise ValueError(f"model configuration: {name} is {value!r}, not a positive number")


@dataclass(frozen=True)
class ModelArgs:
    """A Llama's shape. `block_size` is the length its weights were trained for, in tokens."""

    name: str = "llama"
    block_size: int = 2048
    vocab_size: int = 32000
    n_layer: int = 32
    n_head: int = 32
    n_local_heads: int = 0  # kv heads; 0 means n_head
    dim: int = 4096
    intermediate_size: int = 0  # 0 means Llama 2's rule: 2/3 of 4 * dim, rounded up to a multiple of 256
    head_dim: int = 0  # 0 means dim / n_head
    rope_base: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tie_word_embeddings: bool = False

    def __post_init__(self):
        derived = {
            "n_local_heads": lambda: self.n_head,
            "intermediate_size": lambda: round_up(int(8 * self.dim / 3), 256),
            "head_dim": lambda: self.dim // self.n_head,
        }
        for key in ("block_size", "vocab_size", "n_layer", "n_head", "dim", *derived):
            if getattr(self, key) == 0 and key in derived:
                object.__setattr__(self, key, derived[key]())
            value = getattr(self, key)
            if type(value) is not int or not 0 < value < 2**31:
                raise ValueError(f"model configuration: {key} is {value!r}, not a positive whole number")
        if type(self.tie_word_embeddings) is not bool:
            raise ValueError(f"model configuration: tie_word_embeddings is {self.tie_word_embeddings!r}, not true or false")
        for key in ("rope_base", "norm_eps"):
            _check_positive(key, getattr(self, key))
        if self.n_head % self.n_local_heads:
            raise ValueError(f"model configuration: {self.n_head} heads cannot share {self.n_local_heads} kv heads evenly")
        if self.head_dim % 2:
            raise ValueError(f"model configuration: head_dim {self.head_dim} is odd, RoPE needs pairs")

    @classmethod
    def from_name(cls, name: str) -> "ModelArgs":
        """A known configuration, by its exact name."""
        if name not in transformer_configs:
            raise ValueError(f"unknown model {name!r}; known: {', '.join(transformer_configs)}")
        return cls(name=name, **transformer_configs[name])

    @classmethod
    def from_dict(cls, config: dict) -> "ModelArgs":
        """Our own `config.json`: exactly these fields."""
        unknown = set(config) - {f.name for f in fields(cls)}
        if unknown:
            raise ValueError(f"model configuration: unknown field {', '.join(sorted(unknown))}")
        scaling = config.get("rope_scaling")
        try:
            return cls(**config | {"rope_scaling": RopeScaling(**scaling) if scaling else None})
        except TypeError as e:
            raise ValueError(f"model configuration: {e}") from None

    @classmethod
    def from_hf(cls, config: dict, name: str = "llama") -> "ModelArgs":
        """A Hugging Face `config.json`. A field that would change the function and is not built is refused."""
        if config.get("model_type") not in ("llama", "mistral"):
            raise ValueError(f"model_type {config.get('model_type')!r} is not a Llama; only llama and mistral are read")
        rope = config.get("rope_parameters") or {}  # transformers 5 keeps base and scaling here
        allowed = {
            "hidden_act": ("silu",),
            "attention_bias": (False,),
            "mlp_bias": (False,),
            "sliding_window": (None,),
            "quantization_config": (None,),
            "pretraining_tp": (None, 1),
        }
        for key, values in allowed.items():
            if config.get(key, values[0]) not in values:
                raise ValueError(f"config.json: {key} = {config[key]!r} is not supported")
        try:
            return cls(
                name=name,
                block_size=config["max_position_embeddings"],
                vocab_size=config["vocab_size"],
                n_layer=config["num_hidden_layers"],
                n_head=config["num_attention_heads"],
                n_local_heads=config.get("num_key_value_heads") or 0,
                dim=config["hidden_size"],
                intermediate_size=config["intermediate_size"],
                head_dim=config.get("head_dim") or 0,
                rope_base=float(config.get("rope_theta") or rope.get("rope_theta") or 10000.0),
                rope_scaling=_hf_rope_scaling(config.get("rope_scaling") or rope),
                norm_eps=config["rms_norm_eps"],
                tie_word_embeddings=config.get("tie_word_embeddings", False),
            )
        except KeyError as e:
            raise ValueError(f"config.json: field {e.args[0]} is missing") from None

    @classmethod
    def from_meta(cls, params: dict, name: str = "llama") -> "ModelArgs":
        """A Meta `params.json`. It names no context length and often no scaling factor: those of the known configuration
        with the same dim, layers and RoPE are taken."""
        try:
            dim = params["dim"]
            hidden = int((params.get("ffn_dim_multiplier") or 1) * int(8 * dim / 3))
            shape = dict(
                n_layer=params["n_layers"],
                n_head=params["n_heads"],
                n_local_heads=params.get("n_kv_heads") or 0,
                dim=dim,
                intermediate_size=round_up(hidden, params["multiple_of"]),
                rope_base=float(params.get("rope_theta") or 10000.0),
                norm_eps=params["norm_eps"],
            )
        except KeyError as e:
            raise ValueError(f"params.json: field {e.args[0]} is missing") from None
        scaled, factor = bool(params.get("use_scaled_rope")), params.get("rope_scaling_factor")
        twin = cls(block_size=131072 if scaled else 2048, rope_scaling=RopeScaling() if scaled else None)
        for known in map(cls.from_name, transformer_configs):
            same = all(getattr(known, k) == shape[k] for k in ("dim", "n_layer", "rope_base"))
            if same and (known.rope_scaling is not None) == scaled:
                twin = known
                break
        return cls(
            name=name,
            block_size=twin.block_size,
            vocab_size=params["vocab_size"] if params.get("vocab_size", -1) > 0 else 32000,
            rope_scaling=RopeScaling(factor=float(factor)) if scaled and factor else twin.rope_scaling,
            tie_word_embeddings=twin.tie_word_embeddings,
            **shape,
        )


def _hf_rope_scaling(scaling: dict) -> RopeScaling | None:
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"config.json: rope scaling {kind!r} is not supported, only llama3")
    try:
        return RopeScaling(
            factor=scaling["factor"],
            low_freq_factor=scaling["low_freq_factor"],
            high_freq_factor=scaling["high_freq_factor"],
            original_max_position=scaling["original_max_position_embeddings"],
        )
    except KeyError as e:
        raise ValueError(f"config.json: rope_scaling.{e.args[0]} is missing") from None


def _llama3(n_layer: int, n_head: int, dim: int, intermediate_size: int, block_size=8192, factor=None, **more) -> dict:
    scaling = RopeScaling(factor=factor) if factor else None
    return dict(
        block_size=block_size, vocab_size=128256, n_layer=n_layer, n_head=n_head, n_local_heads=8, dim=dim,
        intermediate_size=intermediate_size, rope_base=500000.0, rope_scaling=scaling, **more,
    )  # fmt: skip


def _smollm2(n_layer: int, n_head: int, n_local_heads: int, dim: int, intermediate_size: int, rope_base=100000.0) -> dict:
    return dict(
        block_size=8192, vocab_size=49152, n_layer=n_layer, n_head=n_head, n_local_heads=n_local_heads, dim=dim,
        intermediate_size=intermediate_size, rope_base=rope_base, tie_word_embeddings=True,
    )  # fmt: skip


_LLAMA31 = dict(block_size=131072, factor=8.0)
_LLAMA32 = dict(block_size=131072, factor=32.0, tie_word_embeddings=True)

transformer_configs = {
    "Llama-2-7B": dict(block_size=4096, n_layer=32, n_head=32, dim=4096),
    "Llama-2-13B": dict(block_size=4096, n_layer=40, n_head=40, dim=5120),
    "Llama-2-70B": dict(block_size=4096, n_layer=80, n_head=64, dim=8192, n_local_heads=8, intermediate_size=28672),
    "Llama-3-8B": _llama3(32, 32, 4096, 14336),
    "Llama-3-70B": _llama3(80, 64, 8192, 28672),
    "Llama-3.1-8B": _llama3(32, 32, 4096, 14336, **_LLAMA31),
    "Llama-3.1-70B": _llama3(80, 64, 8192, 28672, **_LLAMA31),
    "Llama-3.1-405B": _llama3(126, 128, 16384, 53248, **_LLAMA31),
    "Llama-3.2-1B": _llama3(16, 32, 2048, 8192, **_LLAMA32),
    "Llama-3.2-3B": _llama3(28, 24, 3072, 8192, **_LLAMA32),
    "Llama-3.3-70B": _llama3(80, 64, 8192, 28672, **_LLAMA31),
    "Mistral-7B": dict(block_size=32768, n_layer=32, n_head=32, dim=4096, n_local_heads=8, intermediate_size=14336),
    "TinyLlama-1.1B": dict(block_size=2048, n_layer=22, n_head=32, dim=2048, n_local_heads=4, intermediate_size=5632),
    "SmolLM2-135M": _smollm2(30, 9, 3, 576, 1536),
    "SmolLM2-360M": _smollm2(32, 15, 5, 960, 2560),
    "SmolLM2-1.7B": _smollm2(24, 32, 32, 2048, 8192, rope_base=130000.0),
    # for tests: T is small, ODD divides by nothing
    "tiny": dict(
        block_size=256, vocab_size=512, n_layer=2, n_head=4, dim=64, n_local_heads=2, intermediate_size=128
    ),
    "tiny-odd": dict(
        block_size=256, vocab_size=509, n_layer=2, n_head=4, dim=96, n_local_heads=2, intermediate_size=288,
        rope_scaling=RopeScaling(factor=8.0, original_max_position=64), tie_word_embeddings=True,
    ),
}  # fmt: skip


# --- positions ---


def rope_table(args: ModelArgs, length: int) -> Tensor:
    """(cos, sin) of every position: [length, D/2, 2] float32, built in float64 (a bfloat16 table is off by 1e-3)."""
    freqs = args.rope_base ** -(torch.arange(0, args.head_dim, 2, dtype=torch.float64) / args.head_dim)
    if (s := args.rope_scaling) is not None:
        # long wavelengths are stretched by `factor`, short ones kept, those between blended
        turns = s.original_max_position * freqs / (2 * math.pi)  # turns within the original context
        blend = ((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)).clamp(0, 1)
        freqs = freqs / s.factor * (1 - blend) + freqs * blend
    angles = torch.outer(torch.arange(length, dtype=torch.float64), freqs)
    return torch.stack([angles.cos(), angles.sin()], -1).to(torch.float32)


def prefill_plan(prompt_length: int, chunk: int) -> Iterator[list[tuple[int, int, int, int]]]:
    """How a prompt is computed: for each chunk a list of tile parts (base, height, first, stop).

    The prompt's length alone decides the tiles: full ones of PREFILL_ROWS from position 0, then one shorter tile where the
    rest fits it. A token is always computed at its own row of its own tile; a chunk only decides which rows are valid at
    that turn. So no result depends on the chunk size, to the bit. Worked example, 300 tokens in chunks of 200:
    [(0, 256, 0, 200)], then [(0, 256, 200, 256), (256, 64, 0, 44)].
    """
    for begin in range(0, prompt_length, chunk):
        end, parts = min(begin + chunk, prompt_length), []
        for base in range(begin - begin % PREFILL_ROWS, end, PREFILL_ROWS):
            height = next(h for h in TILE_HEIGHTS if h >= min(prompt_length - base, PREFILL_ROWS))
            parts.append((base, height, max(begin - base, 0), min(end - base, PREFILL_ROWS)))
        yield parts


def causal_triangle() -> Tensor:
    """What a tile's last block adds to its scores, [BLOCK, BLOCK] float32: 0 where slot <= row, else -inf."""
    return torch.full((BLOCK, BLOCK), -math.inf).triu_(1)


# --- the model ---
# Every step of a layer takes a list of tiles [B, R, ...] and loops over it: a weight is fetched once per chunk, while each
# tile keeps its own shape. Decode is a list of one tile of one row.


class Linear(nn.Module):
    """x @ weight.T for each tile; weight [out, in]. A weight scheme puts another module with the same `forward` in its
    place; `buffer_sizes` says how many values of `shared.weight_buffer` and bytes of `shared.weight_scratch` that needs."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)

    def buffer_sizes(self, dtype: torch.dtype) -> tuple[int, int]:
        return 0, 0

    def forward(self, xs: list[Tensor], call: "Call") -> list[Tensor]:
        return [F.linear(x, self.weight) for x in xs]


class Embedding(Linear):
    """A row of weight [V, dim] for each token; `forward` makes it the head of a model with tied embeddings."""

    def lookup(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        return F.embedding(tokens, self.weight)


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim), requires_grad=False)

    def forward(self, xs: list[Tensor]) -> list[Tensor]:
        return [self.norm(x.float()).to(x.dtype).mul_(self.weight) for x in xs]

    def norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class KVCache(nn.Module):
    """The tensors that a cache kind stores for one layer, allocated once, never in another form first. Slots hold whatever
    was in memory until they are written; nothing reads an unwritten slot."""

    def __init__(self, kind: str, B: int, K: int, L: int, D: int, dtype: torch.dtype, device: torch.device):
        super().__init__()
        stores = KV_CACHES[kind].stores(B, K, round_up(L, BLOCK), D, dtype)
        self.names = [f"stored{i}" for i in range(len(stores))]
        for name, (shape, stored_dtype) in zip(self.names, stores, strict=True):
            self.register_buffer(name, torch.empty(shape, dtype=stored_dtype, device=device), persistent=False)

    @property
    def stored(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.names]


@dataclass
class Call:
    """What all layers share in one call: the buffers, the phase, and for each tile its position (int64 [3] on the device:
    position of row 0, first valid row, one past the last valid row) and its rows of the square mask, or None."""

    shared: "Shared"
    decode: bool
    positions: list[Tensor]
    masks: list[Tensor | None]


class Attention(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        width = args.n_head * args.head_dim
        self.wqkv = Linear(args.dim, width + 2 * args.n_local_heads * args.head_dim)
        self.wo = Linear(width, args.dim)
        self.kv_cache: KVCache | None = None

    def forward(self, xs: list[Tensor], call: Call) -> list[Tensor]:
        shared, stored = call.shared, self.kv_cache.stored
        attended = [
            torch.ops.llama.attend(
                qkv, shared.freqs_cis, shared.constants, stored, shared.scratch, pos, mask, shared.kind, call.decode
            )
            for qkv, pos, mask in zip(self.wqkv(xs, call), call.positions, call.masks, strict=True)
        ]
        return self.wo(attended, call)


class FeedForward(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.w1 = Linear(args.dim, args.intermediate_size)
        self.w3 = Linear(args.dim, args.intermediate_size)
        self.w2 = Linear(args.intermediate_size, args.dim)

    def forward(self, xs: list[Tensor], call: Call) -> list[Tensor]:
        gates = [F.silu(x, inplace=True) for x in self.w1(xs, call)]
        return self.w2([gate.mul_(up) for gate, up in zip(gates, self.w3(xs, call), strict=True)], call)


class TransformerBlock(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.attention = Attention(args)
        self.feed_forward = FeedForward(args)
        self.attention_norm = RMSNorm(args.dim, args.norm_eps)
        self.ffn_norm = RMSNorm(args.dim, args.norm_eps)

    def forward(self, xs: list[Tensor], call: Call) -> list[Tensor]:
        xs = [x.add_(y) for x, y in zip(xs, self.attention(self.attention_norm(xs), call), strict=True)]
        return [x.add_(y) for x, y in zip(xs, self.feed_forward(self.ffn_norm(xs), call), strict=True)]


class Shared(nn.Module):
    """Buffers that all layers use: the RoPE table, the operator's constants and scratch, scratch for weights that are kept
    in another form, and the square mask if wanted."""

    def __init__(self, args: ModelArgs, B: int, cache_size: int, kind: str, linear: bool, sizes, dtype, device):
        super().__init__()
        self.kind, self.cache_size = kind, cache_size
        mask = None
        if not linear:  # the ancestor's mask, L x L, built first and in place: it is the largest thing there is
            mask = torch.ones(cache_size, cache_size, dtype=torch.bool, device=device).tril_()
        self.register_buffer("mask", mask, persistent=False)
        self.register_buffer("freqs_cis", rope_table(args, round_up(cache_size, BLOCK)).to(device), persistent=False)
        constants = [causal_triangle(), *KV_CACHES[kind].constants(args.head_dim)]
        self.names = [f"constant{i}" for i in range(len(constants))]
        for name, constant in zip(self.names, constants, strict=True):
            self.register_buffer(name, constant.to(device), persistent=False)
        needed = {
            "scratch": (scratch_bytes(B, args.n_head, args.n_local_heads, args.head_dim, dtype), torch.uint8),
            "weight_buffer": (sizes[0], dtype),
            "weight_scratch": (sizes[1], torch.uint8),
        }
        for name, (size, kind_of) in needed.items():
            self.register_buffer(name, torch.empty(size, dtype=kind_of, device=device), persistent=False)

    @property
    def constants(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.names]

    def mask_rows(self, pos: Tensor, height: int) -> Tensor | None:
        """Rows of the square mask, bool [R, cache_size]; padding rows beyond its end take its last row."""
        if self.mask is None:
            return None
        index = pos.narrow(0, 0, 1) + torch.arange(height, device=pos.device)
        return self.mask.index_select(0, index.clamp_(max=self.cache_size - 1))


class Transformer(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args = args
        self.tok_embeddings = Embedding(args.dim, args.vocab_size)
        self.layers = nn.ModuleList(TransformerBlock(args) for _ in range(args.n_layer))
        self.norm = RMSNorm(args.dim, args.norm_eps)
        self.output = None if args.tie_word_embeddings else Linear(args.dim, args.vocab_size)
        self.shared: Shared | None = None

    def setup_caches(self, batch_size: int, cache_size: int, kind: str = "plain", linear_causal_mask: bool = True) -> None:
        """Allocate mask, RoPE table, scratch and one cache per layer, on the weights' device. Always rebuilds; what an
        earlier call made is freed first. ValueError for an unknown kind."""
        if kind not in KV_CACHES:
            raise ValueError(f"unknown cache kind {kind!r}; known: {', '.join(KV_CACHES)}")
        self.shared = None
        for layer in self.layers:
            layer.attention.kv_cache = None
        a, dtype, device = self.args, self.norm.weight.dtype, self.norm.weight.device
        sizes = [max(s) for s in zip(*(m.buffer_sizes(dtype) for m in self.modules() if hasattr(m, "buffer_sizes")))]
        self.shared = Shared(a, batch_size, cache_size, kind, linear_causal_mask, sizes, dtype, device)
        for layer in self.layers:
            layer.attention.kv_cache = KVCache(kind, batch_size, a.n_local_heads, cache_size, a.head_dim, dtype, device)

    def kv_cache_bytes(self) -> int:
        return sum(t.nbytes for layer in self.layers for t in layer.attention.kv_cache.stored)

    def weights(self) -> list[Tensor]:
        """All that is kept of the weights, a second copy in a kernel's own layout included."""
        modules = [m for m in self.modules() if not isinstance(m, Shared | KVCache)]
        return [t for m in modules for t in (*m.parameters(recurse=False), *m.buffers(recurse=False))]

    def weight_bytes(self) -> int:
        return sum(t.nbytes for t in self.weights())

    def forward(self, tokens: list[Tensor], positions: list[Tensor], decode: bool) -> list[Tensor]:
        """Run tiles of token ids [B, R] through all layers; positions: int64 [3] each (see Call). Writes the caches.
        Returns the last layer's output [B, R, dim] of each tile, before the final norm (`logits` applies it)."""
        masks = [self.shared.mask_rows(p, t.shape[1]) for p, t in zip(positions, tokens, strict=True)]
        call = Call(self.shared, decode, positions, masks)
        xs = [self.tok_embeddings.lookup(t, self.norm.weight.dtype) for t in tokens]
        for layer in self.layers:
            xs = layer(xs, call)
        return xs

    def logits(self, x: Tensor) -> Tensor:
        """[B, S, dim] -> [B, S, V]. Callers pass the last position alone (S = 1) unless they evaluate."""
        head = self.tok_embeddings if self.output is None else self.output
        return head(self.norm([x]), Call(self.shared, x.shape[1] == 1, [], []))[0]
