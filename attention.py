"""What a KV cache stores, and the one attention operator that writes it and reads it back.

Shape letters: B batch, R rows of this call (a prefill tile; 1 in decode), L cache slots, N slots of a block,
H query heads, K kv heads, G = H/K query heads per kv head, D head dim.

A layer calls `torch.ops.llama.attend` once per tile. It applies RoPE, writes the new keys and values into the cache, then
attends to *what the cache stores*, also for the tokens it has just written: so a prompt cut into chunks sees exactly what
the uncut prompt sees. Three rules make the results equal to the bit for every chunk size (`model.prefill_plan` has the
fourth: a token is always computed at its own row of its own tile):

- slots are read in whole blocks of `BLOCK`, counted from slot 0; the tail of the last block is zeroed, never cut off;
- all R rows are rotated and quantized, only rows first..stop-1 are written;
- scratch is carved at 64 bytes, so vector instructions split every buffer alike.

Nothing is allocated but the result: everything else lives in `scratch`, sized by `scratch_bytes`.
"""

import math

import torch
from torch import Tensor

PREFILL_ROWS = 256  # rows of a full prefill tile
TILE_HEIGHTS = (32, 64, 128, PREFILL_ROWS)  # a prompt's last tile takes the smallest that fits
BLOCK = PREFILL_ROWS  # slots per block in prefill: equal to a tile, so only the last block needs the causal triangle
DECODE_BLOCK = 1024  # slots per block for a single query: fewer, larger operators
LOG2E = math.log2(math.e)  # softmax in base 2: exp2 is several times faster than exp on a CPU


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is >= n."""
    return -(-n // multiple) * multiple


def hadamard(n: int) -> Tensor:
    """Orthonormal symmetric rotation [n, n], float32: Sylvester's Hadamard matrix, of block-diagonal form when n is no
    power of two (96 = 64 + 32, the largest powers that fit). Being symmetric it is its own inverse."""
    blocks = []
    while n:
        size = 1 << (n.bit_length() - 1)
        h = torch.ones(1, 1)
        while len(h) < size:
            h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
        blocks.append(h / math.sqrt(size))
        n -= size
    return torch.block_diag(*blocks)


# --- cache kinds ---
# A kind is stateless: it says what is stored and how to write and read it. `heads` is the float32 scratch of one call,
# q [B, K, G, R, D] and then kv [2, B, K, R, D] (0 is K, 1 is V) in one flat buffer: so RoPE (q and K) and a rotation
# (q, K and V) are one operator each.


class PlainCache:
    """K after RoPE and V in the model's dtype, as every program keeps them."""

    bits = 16

    def stores(self, B: int, K: int, L: int, D: int, dtype: torch.dtype) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every tensor kept per layer. The first one always starts [2, B, K, L]."""
        return [((2, B, K, L, D), dtype)]

    def constants(self, D: int) -> list[Tensor]:
        """Tensors that the kind needs at run time (arguments of the operator, kept on the device by the model)."""
        return []

    def prepare(self, heads: Tensor, spare: Tensor, n_rope: int, freqs_cis: Tensor, constants: list[Tensor]) -> Tensor:
        """RoPE for the first n_rope of heads [n, R, D]; returns the buffer that holds the result (heads or spare)."""
        apply_rope(heads[:n_rope], freqs_cis)
        return heads

    def write(self, stored: list[Tensor], start: int, rows: slice, kv: Tensor, spare: Tensor, scales: Tensor) -> None:
        """Store the given rows of kv [2, B, K, R, D] at slot start and after."""
        kv = kv[:, :, :, rows]
        stored[0][:, :, :, start : start + kv.shape[3]].copy_(kv)

    def load(self, stored: list[Tensor], side: int, start: int, out: Tensor) -> Tensor | None:
        """Slots start.. of K (side 0) or V (side 1) into out [B, K, n, D]; returns what is left to multiply with, the
        scale of each slot [B, K, n], or None."""
        out.copy_(stored[0][side, :, :, start : start + out.shape[2]])
        return None

    def finish(self, out: Tensor, spare: Tensor, constants: list[Tensor]) -> Tensor:
        """Undo a rotation of V in the attention output [n, D]; returns the buffer that holds the result."""
        return out


class Int8Cache(PlainCache):
    """Symmetric int8, one bfloat16 scale per token and head, after a Hadamard rotation of the head dimension of K and V.

    The rotation spreads an outlier channel over all of them (perplexity +0.01 % instead of +0.12 % on the default model);
    q gets the same one, so scores are unchanged, and the output the inverse. Values are divided by the scale *as stored*:
    rounded to bfloat16 it is off by at most 2^-9, so codes stay within 127 * (1 + 2^-8) < 127.5 and need no clamping.
    bfloat16, since float16 underflows for the small values that some layers hold.
    """

    bits = 8

    def stores(self, B, K, L, D, dtype):
        return [((2, B, K, L, D), torch.int8), ((2, B, K, L), torch.bfloat16)]

    def constants(self, D):
        return [hadamard(D)]

    def prepare(self, heads, spare, n_rope, freqs_cis, constants):
        apply_rope(heads[:n_rope], freqs_cis)
        D = heads.shape[-1]
        torch.mm(heads.view(-1, D), constants[0], out=spare.view(-1, D))
        return spare

    def write(self, stored, start, rows, kv, spare, scales):
        codes, scale = stored
        half, full = scales
        torch.abs(kv, out=spare)
        torch.amax(spare, -1, out=full)
        half.copy_(full.mul_(1 / 127))
        full.copy_(half).clamp_(min=torch.finfo(torch.float32).tiny)  # an all-zero token: 0 / tiny = 0, not 0 / 0
        torch.div(kv, full.unsqueeze(-1), out=spare).round_()
        stop = start + rows.stop - rows.start
        codes[:, :, :, start:stop].copy_(spare[:, :, :, rows])
        scale[:, :, :, start:stop].copy_(half[:, :, :, rows])

    def load(self, stored, side, start, out):
        super().load(stored, side, start, out)
        return stored[1][side, :, :, start : start + out.shape[2]]

    def finish(self, out, spare, constants):
        return torch.mm(out, constants[0], out=spare)


KV_CACHES = {"plain": PlainCache(), "int8": Int8Cache()}


def apply_rope(x: Tensor, freqs_cis: Tensor) -> None:
    """Rotate pairs (x[2i], x[2i+1]) in place; x [n, R, D] float32, freqs_cis [R, D/2, 2] (cos, sin) float32."""
    torch.view_as_complex(x.view(*x.shape[:-1], -1, 2)).mul_(torch.view_as_complex(freqs_cis))


# --- scratch ---


def scratch_layout(decode: bool, B: int, R: int, H: int, K: int, D: int, dtype: torch.dtype) -> dict:
    """Buffers of one operator call: name -> (shape, dtype)."""
    f32, N, n_heads = torch.float32, DECODE_BLOCK if decode else BLOCK, B * (H + 2 * K)
    # dtype of probabilities and V in the second product; not float16, where probability times scale underflows
    P = dtype if dtype == torch.bfloat16 and not decode else f32
    GR = (H // K) * R
    layout = {
        "heads": ((n_heads, R, D), f32),
        "spare": ((n_heads, R, D), f32),
        "scale16": ((2, B, K, R), torch.bfloat16),
        "scale32": ((2, B, K, R), f32),
        "k": ((B * K * N * D,), f32),
        "v": ((B * K * N * D,), P),
        "slot_scale": ((B * K * N,), f32),
        "scores": ((B * K * GR * max(N, D),), f32),
        "bias": ((R * N,), f32),
        "acc": ((B * K, GR, D), f32),
    } | {name: ((B * K, GR, 1), f32) for name in ("top", "new_top", "total", "fade", "part")}
    if P is not f32:
        layout |= {"probs": ((B * K * GR * N,), P), "pv": ((B * K, GR, D), P)}
    return layout


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return round_up(math.prod(shape) * dtype.itemsize, 64)


def scratch_bytes(B: int, H: int, K: int, D: int, dtype: torch.dtype) -> int:
    """Bytes of scratch that every call on this cache needs, prefill tiles and decode."""
    sizes = [(False, rows) for rows in TILE_HEIGHTS] + [(True, 1)]
    return max(sum(_bytes(*b) for b in scratch_layout(dec, B, R, H, K, D, dtype).values()) for dec, R in sizes)


def carve(scratch: Tensor, layout: dict) -> dict[str, Tensor]:
    """Views into the flat uint8 scratch, each at a multiple of 64 bytes."""
    views, at = {}, 0
    for name, (shape, dtype) in layout.items():
        size = math.prod(shape) * dtype.itemsize
        views[name] = scratch[at : at + size].view(dtype).view(shape)
        at += round_up(size, 64)
    return views


# --- the operator ---


def attend_rows(qkv, freqs_cis, constants, stored, scratch, base: int, first: int, stop: int, mask, kind: str, decode: bool):
    """The operator's body once the positions are known; see `attend` for the arguments."""
    cache, (causal, *constants) = KV_CACHES[kind], constants
    (B, R, _), (_, _, K, _) = qkv.shape, stored[0].shape[:4]
    D = freqs_cis.shape[1] * 2
    H = qkv.shape[2] // D - 2 * K
    G = H // K
    buf = carve(scratch, scratch_layout(decode, B, R, H, K, D, qkv.dtype))

    # RoPE, rotation, write: all rows are computed, the valid ones are stored
    heads, spare, n_q = buf["heads"], buf["spare"], B * H
    x = qkv.view(B, R, H + 2 * K, D)
    heads[:n_q].view(B, H, R, D).copy_(x[:, :, :H].transpose(1, 2))
    heads[n_q:].view(2, B, K, R, D).copy_(x[:, :, H:].view(B, R, 2, K, D).permute(2, 0, 3, 1, 4))
    ready = cache.prepare(heads, spare, n_q + B * K, freqs_cis[base : base + R], constants)
    free = heads if ready is spare else spare
    kv, kv_free = (t[n_q:].view(2, B, K, R, D) for t in (ready, free))
    cache.write(stored, base + first, slice(first, stop), kv, kv_free, (buf["scale16"], buf["scale32"]))

    q = ready[:n_q].view(B * K, G * R, D)
    q.mul_(LOG2E / math.sqrt(D))
    out = walk(cache, stored, q, buf, base + stop, mask, causal, R, decode)

    out = cache.finish(out.view(-1, D), free[:n_q].view(-1, D), constants)
    result = qkv.new_empty(B, R, H * D)
    result.view(B, R, H, D).copy_(out.view(B, H, R, D).transpose(1, 2))
    return result


def walk(cache, stored, q, buf, n: int, mask, causal, R: int, decode: bool) -> Tensor:
    """Softmax over slots 0..n-1, block by block with running maximum and sums (online softmax: Milakov and Gimelshein,
    2018); q [B*K, G*R, D] holds log2(e)/sqrt(D) already. Returns [B*K, G*R, D] float32.

    Worked example: tile at base 512, rows 0..72 valid: n = 585, blocks 0-255, 256-511, 512-767. The last one is read up
    to slot 584, zeros after it, and row r of the tile sees its slots 0..r.
    """
    (BK, GR, D), B, K = q.shape, *stored[0].shape[1:3]
    step = DECODE_BLOCK if decode else BLOCK
    top, new_top, total, fade, part, acc = (buf[x] for x in ("top", "new_top", "total", "fade", "part", "acc"))
    for start in range(0, n, step):
        used = min(step, n - start)
        N = used if decode else step  # a single query may stop short: its block never depends on a chunk
        k, v = (buf[x][: BK * N * D].view(B, K, N, D) for x in ("k", "v"))
        scores = buf["scores"][: BK * GR * N].view(BK, GR, N)

        scale = load(cache, stored, 0, start, used, k, buf)
        if scale is not None and not decode:  # many rows: cheaper on K than on the scores
            k.mul_(scale.view(B, K, N, 1))
        torch.bmm(q, k.view(BK, N, D).transpose(1, 2), out=scores)
        if scale is not None and decode:
            scores.mul_(scale)
        if mask is not None:
            bias = buf["bias"][: R * N].view(R, N).zero_()
            seen = mask[:, start : start + N]
            bias[:, : seen.shape[1]].copy_(seen)
            scores.view(BK, -1, R, N).add_(bias.log_())  # log: 1 becomes 0, 0 becomes -inf
        elif not decode and start + N >= n:
            scores.view(BK, -1, R, N).add_(causal[:R])

        if start == 0:
            torch.amax(scores, -1, keepdim=True, out=top)
        else:
            torch.amax(scores, -1, keepdim=True, out=part)
            torch.maximum(top, part, out=new_top)
            torch.sub(top, new_top, out=fade).exp2_()
            top.copy_(new_top)
        scores.sub_(top).exp2_()
        torch.sum(scores, -1, keepdim=True, out=total if start == 0 else part)
        if start:
            total.mul_(fade).add_(part)
            acc.mul_(fade)

        scale = load(cache, stored, 1, start, used, v, buf)
        if scale is not None:
            scores.mul_(scale)
        v = v.view(BK, N, D)
        if v.dtype == torch.float32:
            torch.bmm(scores, v, out=acc) if start == 0 else torch.baddbmm(acc, scores, v, out=acc)
        else:
            probs = buf["probs"][: BK * GR * N].view(BK, GR, N).copy_(scores)
            torch.bmm(probs, v, out=buf["pv"])
            # by way of the scores' memory, which is free by now: adding bfloat16 to float32 makes a float32 copy first
            pv = acc if start == 0 else buf["scores"][: acc.numel()].view(acc.shape)
            pv.copy_(buf["pv"])
            if start:
                acc.add_(pv)
    return acc.div_(total)


def load(cache, stored, side: int, start: int, used: int, out: Tensor, buf) -> Tensor | None:
    """Read `used` slots into out [B, K, N, D] and zero the rest: an unused slot may hold anything, and 0 * NaN is NaN.
    Returns the slots' scales [B*K, 1, N] float32, zeroed alike, or None."""
    B, K, N, _ = out.shape
    if used < N:
        out[:, :, used:].zero_()
        out = out[:, :, :used]
    scale = cache.load(stored, side, start, out)
    if scale is None:
        return None
    padded = buf["slot_scale"][: B * K * N].view(B, K, N)
    if used < N:
        padded[:, :, used:].zero_()
    padded[:, :, :used].copy_(scale)
    return padded.view(B * K, 1, N)


def attend(qkv, freqs_cis, constants, stored, scratch, pos, mask, kind, decode):
    """Write this call's keys and values, then attend. The body for every device.

    qkv [B, R, (H + 2K) * D] of the model's dtype, before RoPE; freqs_cis [slots, D/2, 2] float32; constants: the causal
    triangle [BLOCK, BLOCK] float32 (0 and -inf), then the kind's own; stored: the layer's tensors (written); scratch: flat
    uint8 (written); pos int64 [3]: position of row 0, first valid row, one past the last valid row; mask: None, or the rows
    of a square mask, bool [R, cache_size]. Returns [B, R, H * D]; rows that are not valid hold finite leftovers.
    """
    # reading the position waits for the device: legal in an operator's body, but not while a CUDA graph is captured
    base, first, stop = pos.tolist()
    return attend_rows(qkv, freqs_cis, constants, stored, scratch, base, first, stop, mask, kind, decode)


def attend_fake(qkv, freqs_cis, constants, stored, scratch, pos, mask, kind, decode):
    B, R, width = qkv.shape
    return qkv.new_empty(B, R, width - 2 * stored[0].shape[2] * freqs_cis.shape[1] * 2)


_library = torch.library.Library("llama", "DEF")
_library.define(
    "attend(Tensor qkv, Tensor freqs_cis, Tensor[] constants, Tensor(a!)[] stored, Tensor(b!) scratch, Tensor pos,"
    " Tensor? mask, str kind, bool decode) -> Tensor",
    # torch.compile leaves it outside of CUDA graphs: the body reads the position on the host
    tags=(torch.Tag.cudagraph_unsafe, torch.Tag.needs_fixed_stride_order),
)
_library.impl("attend", attend, "CompositeExplicitAutograd")
torch.library.register_fake("llama::attend", attend_fake, lib=_library)
