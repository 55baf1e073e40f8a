"""Configurations, and the forward pass against Hugging Face transformers as an independent oracle."""

import dataclasses
import json

import pytest
import torch
import transformers
from conftest import equal, greedy, make_model, random_prompt, stored

from attention import KV_CACHES
from generate import prefill
from model import ModelArgs, RopeScaling, Transformer, prefill_plan, rope_table, transformer_configs

SCALED = RopeScaling(factor=8.0, original_max_position=64)


def small(**more) -> ModelArgs:
    shape = dict(block_size=512, vocab_size=512, n_layer=3, n_head=4, dim=64, n_local_heads=2, intermediate_size=128)
    return ModelArgs(**shape | more)


def hf_config(a: ModelArgs) -> dict:
    """The same model in Hugging Face's words."""
    rope = {"rope_type": "default", "rope_theta": a.rope_base}
    if (s := a.rope_scaling) is not None:
        rope |= {"rope_type": "llama3", "factor": s.factor, "low_freq_factor": s.low_freq_factor}
        rope |= {"high_freq_factor": s.high_freq_factor, "original_max_position_embeddings": s.original_max_position}
    return dict(
        vocab_size=a.vocab_size, hidden_size=a.dim, intermediate_size=a.intermediate_size, num_hidden_layers=a.n_layer,
        num_attention_heads=a.n_head, num_key_value_heads=a.n_local_heads, head_dim=a.head_dim, rms_norm_eps=a.norm_eps,
        max_position_embeddings=a.block_size, rope_parameters=rope, tie_word_embeddings=a.tie_word_embeddings,
        attn_implementation="eager", hidden_act="silu",
    )  # fmt: skip


def to_hf_rows(w: torch.Tensor, heads: int) -> torch.Tensor:
    """Meta pairs rows (2i, 2i+1) of a head, Hugging Face rows (i, i + D/2)."""
    out, cols = w.shape
    return w.view(heads, out // heads // 2, 2, cols).transpose(1, 2).reshape(out, cols)


def hf_twin(model: Transformer) -> transformers.LlamaForCausalLM:
    """Our weights in a transformers model."""
    a = model.args
    twin = transformers.LlamaForCausalLM(transformers.LlamaConfig(**hf_config(a))).eval()
    ours, q, kv = model.state_dict(), a.n_head * a.head_dim, a.n_local_heads * a.head_dim
    theirs = {"model.embed_tokens.weight": ours["tok_embeddings.weight"], "model.norm.weight": ours["norm.weight"]}
    theirs["lm_head.weight"] = ours["tok_embeddings.weight" if a.tie_word_embeddings else "output.weight"]
    for i in range(a.n_layer):
        o, t = f"layers.{i}.", f"model.layers.{i}."
        wq, wk, wv = ours[o + "attention.wqkv.weight"].split([q, kv, kv])
        theirs |= {
            t + "self_attn.q_proj.weight": to_hf_rows(wq, a.n_head),
            t + "self_attn.k_proj.weight": to_hf_rows(wk, a.n_local_heads),
            t + "self_attn.v_proj.weight": wv,
            t + "self_attn.o_proj.weight": ours[o + "attention.wo.weight"],
            t + "mlp.gate_proj.weight": ours[o + "feed_forward.w1.weight"],
            t + "mlp.up_proj.weight": ours[o + "feed_forward.w3.weight"],
            t + "mlp.down_proj.weight": ours[o + "feed_forward.w2.weight"],
            t + "input_layernorm.weight": ours[o + "attention_norm.weight"],
            t + "post_attention_layernorm.weight": ours[o + "ffn_norm.weight"],
        }
    twin.load_state_dict(theirs)
    return twin


def all_logits(model: Transformer, prompt: torch.Tensor) -> torch.Tensor:
    """Logits of every position, in one shot."""
    rows = []
    for parts in prefill_plan(prompt.shape[1], prompt.shape[1]):
        for base, height, first, stop in parts:
            tile = torch.zeros(len(prompt), height, dtype=torch.long)
            tile[:, first:stop] = prompt[:, base + first : base + stop]
            (x,) = model([tile], [torch.tensor([base, first, stop])], decode=False)
            rows.append(x[:, first:stop])
    return model.logits(torch.cat(rows, 1))


@pytest.mark.parametrize("linear", (True, False))
@pytest.mark.parametrize(
    "args",
    [
        small(),
        small(rope_scaling=SCALED, rope_base=500000.0),
        small(n_head=8, n_local_heads=2, rope_scaling=SCALED),
        small(n_head=9, n_local_heads=3, dim=144, intermediate_size=288, tie_word_embeddings=True, rope_scaling=SCALED),
        small(n_local_heads=4, head_dim=24, tie_word_embeddings=True),
        small(norm_eps=0.1),
    ],
    ids=("plain", "rope-scaling", "gqa-4-1", "gqa-3-1-tied", "head-dim", "norm-eps"),
)
def test_logits_equal_transformers_at_every_position(args, linear):
    """llama2.c#286: a forgotten permutation of q and k shows only after ~20 tokens; so 300 positions, scaled RoPE beyond
    its original context among them."""
    model, prompt = make_model(args), random_prompt(300, batch=2)
    model.setup_caches(2, 320, "plain", linear)
    want = hf_twin(model)(prompt).logits
    assert want.std() > 0.5
    assert (all_logits(model, prompt) - want).abs().max() < 1e-4
    # and decode, from the caches: 10 greedy tokens
    ours = greedy(model, prompt, 10)
    theirs = hf_twin(model).generate(prompt, max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert ours == theirs[:, 300:].tolist()


@pytest.mark.parametrize("size", (30, 40, 256))
def test_the_square_mask_shows_the_last_slot_of_a_full_cache(size):
    """Clamped one row early, it hid the newest token once the cache was full: logits, not tokens, show it."""
    model, prompt = make_model("tiny"), random_prompt(size - 1)
    results = []
    for linear in (True, False):
        model.setup_caches(1, size, "plain", linear)
        prefill(model, prompt, 512)
        (x,) = model([prompt[:, :1]], [torch.tensor([size - 1, 0, 1])], decode=True)
        model.setup_caches(1, size, "plain", linear)
        results.append((model.logits(x), prefill(model, torch.cat([prompt, prompt[:, :1]], 1), 512)))
    assert equal(*results) and (results[0][0][0] - results[0][1]).abs().max() < 1e-4


def test_twenty_tokens_with_the_cache_equal_twenty_full_forwards():
    """torchtune#959, and LLMs-from-scratch#1048: full, cached, full again; first and third are equal."""
    model, prompt = make_model(small(rope_scaling=SCALED)), random_prompt(30)
    model.setup_caches(1, 64)
    first, kept = all_logits(model, prompt), stored(model, 30)
    cached, text = greedy(model, prompt, 20)[0], prompt
    for _ in range(20):
        text = torch.cat([text, all_logits(model, text)[:, -1:].argmax(-1)], 1)
    assert text[0, 30:].tolist() == cached
    assert equal((all_logits(model, prompt), stored(model, 30)), (first, kept))


@pytest.mark.parametrize("kind", KV_CACHES)
def test_quantized_caches_stay_close(kind):
    """llama.cpp#23717: an error shows after 200 tokens, not after 20: decode 200 along the plain cache's text."""
    model, prompt = make_model(small()), random_prompt(20)
    model.setup_caches(1, 256)
    text = torch.tensor(greedy(model, prompt, 200))
    want = all_logits(model, torch.cat([prompt, text], 1))[:, 19:-1]
    model.setup_caches(1, 256, kind)
    logits = [prefill(model, prompt, 7)]
    for i in range(199):
        (x,) = model([text[:, i : i + 1]], [torch.tensor([20 + i, 0, 1])], decode=True)
        logits.append(model.logits(x)[:, 0])
    got = torch.stack(logits, 1)
    errors = ((got - want).norm(dim=-1) / want.norm(dim=-1))[0]
    assert errors.max() < (1e-4 if kind == "plain" else 0.1), errors
    assert kind == "plain" or errors[150:].mean() < 1.5 * errors[:50].mean() < 0.05, errors


def test_rope_scaling_comes_from_the_configuration():
    """llama-models#241: factor 8 was built in, Llama 3.2 has 32. Positions beyond 8192, against transformers' own."""
    for name, factor in (("Llama-3.1-8B", 8), ("Llama-3.2-1B", 32)):
        a = ModelArgs.from_name(name)
        assert a.rope_scaling.factor == factor
        config = transformers.LlamaConfig(**hf_config(a))
        rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
        positions = torch.tensor([1, 100, 8191, 8192, 20000, 131071])
        table = rope_table(a, 131072)[positions]
        angles = positions[:, None].double() * rotary.inv_freq.double()
        assert (table[..., 0] - angles.cos()).abs().max() < 0.02  # transformers' float32 frequencies: 1e-7 x 131071
        assert (table[:4, :, 0] - angles[:4].cos()).abs().max() < 1e-3
        other = rope_table(dataclasses.replace(a, rope_scaling=RopeScaling(factor=40 - factor)), 20001)[20000]
        assert (table[4] - other).abs().max() > 0.1
        assert table.dtype == torch.float32


def test_configurations_have_the_published_sizes():
    """Parameters in billions, as published or as counted in the released weights."""
    published = {
        "Llama-2-7B": 6.738, "Llama-2-13B": 13.016, "Llama-2-70B": 68.977, "Llama-3-8B": 8.030, "Llama-3.1-8B": 8.030,
        "Llama-3.1-70B": 70.554, "Llama-3.1-405B": 405.853, "Llama-3.2-1B": 1.236, "Llama-3.2-3B": 3.213,
        "Mistral-7B": 7.242, "TinyLlama-1.1B": 1.100, "SmolLM2-135M": 0.1345, "SmolLM2-360M": 0.3618,
        "SmolLM2-1.7B": 1.7114,
    }  # fmt: skip
    for name, billions in published.items():
        with torch.device("meta"):
            model = Transformer(ModelArgs.from_name(name))
        assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=6e-4 * max(billions, 1)), name


@pytest.mark.parametrize("name", transformer_configs)
def test_configuration_survives_hugging_face_and_our_json(name):
    a = ModelArgs.from_name(name)
    assert ModelArgs.from_hf(hf_config(a) | {"model_type": "llama"}, name) == a
    ours = json.loads(json.dumps(dataclasses.asdict(a)))
    assert ModelArgs.from_dict(ours) == a


def test_hugging_face_config_of_transformers_4():
    """rope_theta and rope_scaling at the top level, as the released Llama 3.1 has them."""
    a = ModelArgs.from_name("Llama-3.1-8B")
    config = hf_config(a) | {"model_type": "llama", "rope_theta": 500000.0, "torch_dtype": "bfloat16"}
    config["rope_scaling"] = {k: v for k, v in config.pop("rope_parameters").items() if k != "rope_theta"}
    assert ModelArgs.from_hf(config, "Llama-3.1-8B") == a


META = {
    "Llama-2-7B": dict(dim=4096, multiple_of=256, n_heads=32, n_layers=32, norm_eps=1e-5, vocab_size=-1),
    "Llama-2-70B": dict(dim=8192, multiple_of=4096, ffn_dim_multiplier=1.3, n_heads=64, n_kv_heads=8, n_layers=80,
                        norm_eps=1e-5, vocab_size=-1),
    "Llama-3-8B": dict(dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, vocab_size=128256, multiple_of=1024,
                       ffn_dim_multiplier=1.3, norm_eps=1e-5, rope_theta=500000.0),
    "Llama-3.1-8B": dict(dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, vocab_size=128256, multiple_of=1024,
                         ffn_dim_multiplier=1.3, norm_eps=1e-5, rope_theta=500000.0, use_scaled_rope=True),
    "Llama-3.1-70B": dict(dim=8192, ffn_dim_multiplier=1.3, multiple_of=4096, n_heads=64, n_kv_heads=8, n_layers=80,
                          norm_eps=1e-5, rope_theta=500000.0, use_scaled_rope=True, vocab_size=128256),
    "Llama-3.2-1B": dict(dim=2048, ffn_dim_multiplier=1.5, multiple_of=256, n_heads=32, n_kv_heads=8, n_layers=16,
                         norm_eps=1e-5, rope_theta=500000.0, use_scaled_rope=True, vocab_size=128256),
}  # fmt: skip


@pytest.mark.parametrize("name", META)
def test_meta_params(name):
    assert ModelArgs.from_meta(META[name], name) == ModelArgs.from_name(name)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "gemma2"}, {"model_type": "qwen2"}, {"hidden_act": "gelu"}, {"attention_bias": True},
        {"mlp_bias": True},
        {"sliding_window": 4096}, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, {"vocab_size": 0},
        {"num_key_value_heads": 3}, {"quantization_config": {"bits": 4}}, {"hidden_size": "64"},
    ],
    ids=lambda c: next(iter(c)),
)  # fmt: skip
def test_what_would_change_the_function_is_refused(change):
    config = hf_config(small()) | {"model_type": "llama"}
    ModelArgs.from_hf(config)
    with pytest.raises(ValueError) as e:
        ModelArgs.from_hf(config | change)
    assert "\n" not in str(e.value) and len(str(e.value)) > 20


@pytest.mark.parametrize("field", ("hidden_size", "vocab_size", "rms_norm_eps"))
def test_a_missing_field_is_named(field):
    config = hf_config(small()) | {"model_type": "llama"}
    del config[field]
    with pytest.raises(ValueError, match=field):
        ModelArgs.from_hf(config)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"Llama-3\.1-8B"):
        ModelArgs.from_name("llama-3.1-8b")


def test_an_unknown_cache_kind_lists_the_known_ones():
    with pytest.raises(ValueError, match="plain, int8"):
        make_model().setup_caches(1, 8, "int9")
