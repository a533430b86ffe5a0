"""Small random models of the families that transformers has, and how each is run.

tests/unit/models/test_families.py checks the table, scripts/models_page.py makes docs/models.md from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM

REACH = 24  # tokens that a layer sees at a time, where a family has such a length: the texts are longer
BASE: dict[str, Any] = {
    "vocab_size": 500, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    "initializer_range": 0.15, "bos_token_id": 3, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
WINDOW = {"sliding_window": REACH}
HEAD = {"head_dim": 16}
CAPS = {"query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}
SCALES = {
    "embedding_multiplier": 4.0, "logits_scaling": 2.0, "residual_multiplier": 0.5,
    "attention_multiplier": 0.1,
}  # fmt: skip
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED_EXPERT = EXPERTS | {"shared_expert_intermediate_size": 32}
ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16, "v_head_dim": 24, "head_dim": 16,
}  # fmt: skip
DEEPSEEK = ROUTED | LATENT | {"n_routed_experts": 8, "n_group": 2}
MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_expand": 2,
    "mamba_chunk_size": 16,
}  # fmt: skip
DELTA = {
    "head_dim": 32, "num_hidden_layers": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 64,
    "llama_4_scaling_beta": 0.1,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": REACH,
    "short_factor": [1.0] * 8, "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0],
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
# Hunyuan calls a fixed factor, alpha, dynamic.
FIXED = {
    "rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1,
    "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip


class Family(NamedTuple):
    """What is expected of a family.

    Args:
        layout: How it is scored, or "refused".
        decoder: How it is sampled in process, a name of `engines.slots.DECODERS`, or "refused".
        options: What differs from `BASE`.
        tolerance: By how much its sampled log-probs may differ from its forward's, nats.
        reference: transformers' plainest attention that is right.
        note: For docs/models.md.
    """

    layout: str
    decoder: str
    options: Mapping[str, Any] = MappingProxyType({})
    tolerance: float = 1e-4
    reference: str = "eager"
    note: str = ""


UNCLAMPED = (
    "transformers clamps the time step in a forward, but not in a step with a cache: sampled log-probs "
    "differ by up to 0.005 nats"
)
# By model type; what follows a comma tells apart families of one type.
FAMILIES = {
    "afmoe": Family("auto", "padded", EXPERTS | HEAD | WINDOW | {"num_dense_layers": 1}),
    "apertus": Family("auto", "slots"),
    "arcee": Family("auto", "slots"),
    "bamba": Family("single", "padded", MAMBA | {"attn_layer_indices": [1]}),
    "bitnet": Family("auto", "slots"),
    "bloom": Family("single", "padded"),
    "codegen": Family("single", "padded", {"rotary_dim": 8}),
    "cohere": Family("auto", "slots", {"logit_scale": 0.25, "use_qk_norm": True}),
    "cohere2": Family("auto", "padded", HEAD | WINDOW | {"logit_scale": 0.25, "num_hidden_layers": 4}),
    "cwm": Family("auto", "padded", HEAD | WINDOW),
    "deepseek_v2": Family("single", "padded", DEEPSEEK | {"topk_method": "greedy"}),
    "deepseek_v3": Family("single", "padded", DEEPSEEK),
    "deepseek_v32": Family(
        "single", "uncached", DEEPSEEK | {"index_topk": REACH, "index_n_heads": 16, "index_head_dim": 32}
    ),
    "deepseek_v4": Family(
        "single", "uncached",
        HEAD | WINDOW | {
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "q_lora_rank": 24,
            "num_key_value_heads": 1, "index_topk": REACH, "index_n_heads": 16, "index_head_dim": 32,
            "o_groups": 2, "o_lora_rank": 16, "hc_mult": 2, "hc_sinkhorn_iters": 4,
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
            "mlp_layer_types": ["hash_moe", "moe", "moe"],
            "layer_types": ["heavily_compressed_attention"] + 2 * ["compressed_sparse_attention"],
        },
        note="padding on the left would move the borders of what its layers compress",
    ),
    "diffllama": Family("auto", "padded"),
    "doge": Family(
        "single", "padded", {"keep_window_size": REACH},
        note="a text longer than `keep_window_size` (2,048 in the released models): a layer keeps the tokens "
        "with the largest scores, and rounding decides among equal ones",
    ),
    "dots1": Family("auto", "slots", ROUTED | HEAD | {"sliding_window": None}),
    "ernie4_5": Family("auto", "slots", HEAD),
    "ernie4_5_moe": Family(
        "auto", "slots",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1},
    ),
    "exaone4": Family(
        "auto", "padded",
        WINDOW | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    ),
    "exaone_moe": Family("auto", "padded", EXPERTS | HEAD | WINDOW),
    "falcon": Family("single", "padded", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon, alibi": Family(
        "single", "padded", {"alibi": True, "multi_query": False}, reference="sdpa",
        note="do not set `attn_implementation` to eager, where transformers adds the bias of positions twice",
    ),
    "falcon_h1": Family(
        "single", "padded",
        MAMBA | {"mamba_d_ssm": 128, "lm_head_multiplier": 0.5, "embedding_multiplier": 2.0},
    ),
    "falcon_mamba": Family("single", "padded", {"state_size": 16}),
    "gemma": Family("auto", "slots", HEAD),
    "gemma2": Family("auto", "padded", HEAD | WINDOW | CAPS),
    "gemma3": Family(
        "auto", "padded",
        {
            "text_config": BASE | HEAD | WINDOW | {"query_pre_attn_scalar": 24}, "mm_tokens_per_image": 4,
            "vision_config": {
                "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
                "image_size": 28, "patch_size": 14,
            },
        },
    ),
    "gemma3_text": Family("auto", "padded", HEAD | WINDOW | {"query_pre_attn_scalar": 24}),
    "gemma4_text": Family(
        "auto", "padded",
        HEAD | WINDOW | {
            "global_head_dim": 32, "num_hidden_layers": 2, "vocab_size_per_layer_input": 500,
            "layer_types": ["sliding_attention", "full_attention"], "hidden_size_per_layer_input": 16,
            "num_kv_shared_layers": 0,
        },
    ),
    "glm4": Family("auto", "slots", HEAD | {"partial_rotary_factor": 0.5, "attention_bias": True}),
    "glm4_moe": Family("auto", "slots", ROUTED | HEAD | {"partial_rotary_factor": 0.5, "use_qk_norm": True}),
    "glm_moe_dsa": Family(
        "single", "uncached", DEEPSEEK | {"index_topk": REACH, "index_n_heads": 16, "index_head_dim": 32}
    ),
    "gpt2": Family("auto", "slots"),
    "gpt_bigcode": Family("auto", "slots"),
    "gpt_neo": Family(
        "single", "padded",
        {"num_hidden_layers": 2, "window_size": REACH, "attention_types": [[["global", "local"], 1]]},
    ),
    "gpt_neox": Family("auto", "slots", {"rotary_pct": 0.25}),
    "gpt_oss": Family("single", "padded", LOCAL_EXPERTS | HEAD | WINDOW),
    "gptj": Family("single", "padded", {"rotary_dim": 8}),
    "granite": Family("auto", "slots", SCALES),
    "granite_swa": Family("single", "padded", WINDOW),
    "granitemoehybrid": Family(
        "single", "padded",
        LOCAL_EXPERTS | MAMBA | SCALES
        | {"shared_intermediate_size": 32, "layer_types": ["mamba", "attention", "mamba"]},
    ),
    "helium": Family("auto", "slots", HEAD),
    "hunyuan_v1_dense": Family("auto", "slots", HEAD | {"rope_parameters": FIXED}),
    "hunyuan_v1_moe": Family("auto", "slots", HEAD | {"num_experts": 4, "moe_topk": 2}),
    "hy_v3": Family("auto", "slots", EXPERTS | HEAD),
    "jais2": Family("auto", "slots", HEAD),
    "jamba": Family(
        "single", "padded",
        {
            "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "num_experts": 4,
            "mamba_d_state": 8, "use_mamba_kernels": False,
        },
    ),
    "kimi_linear": Family(
        "single", "padded",
        LATENT | LOCAL_EXPERTS | {
            "n_routed_experts": 4, "moe_intermediate_size": 32, "v_head_dim": 16, "num_hidden_layers": 4,
            "linear_head_dim": 16, "linear_num_heads": 4,
        },
    ),
    "laguna": Family("auto", "slots", EXPERTS | HEAD | WINDOW),
    "lfm2": Family(
        "single", "padded", {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 32}
    ),
    "lfm2_moe": Family(
        "single", "padded",
        EXPERTS | {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 32},
    ),
    "llama": Family("auto", "slots"),
    "llama, dynamic": Family(
        "refused", "refused", {"max_position_embeddings": REACH, "rope_parameters": DYNAMIC},
        note="transformers turns positions by the longest text so far",
    ),
    "llama4_text": Family(
        "single", "unpadded",
        HEAD | LOCAL_EXPERTS | {
            "num_hidden_layers": 4, "intermediate_size_mlp": 96, "num_experts_per_tok": 1,
            "attention_chunk_size": REACH, "interleave_moe_layer_step": 2, "floor_scale": 16,
            "attn_scale": 0.5,
        },
        note="the temperature of its attention depends on a token's place in the row",
    ),
    "longcat_flash": Family(
        "single", "padded",
        LATENT | {
            "num_hidden_layers": 4, "num_layers": 2, "n_routed_experts": 4, "moe_topk": 2,
            "expert_ffn_hidden_size": 32, "ffn_hidden_size": 96, "zero_expert_num": 1,
        },
    ),
    "mamba": Family("single", "padded", {"state_size": 16}),
    "mamba2": Family(
        "single", "padded",
        {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "expand": 2, "chunk_size": 16},
    ),
    "mellum": Family("auto", "slots", EXPERTS | HEAD | WINDOW),
    "mimo_v2_flash": Family("single", "padded", EXPERTS | HEAD | WINDOW | {"n_routed_experts": 4}),
    "minicpm3": Family("single", "padded", LATENT),
    "minimax": Family(
        "single", "uncached",
        LOCAL_EXPERTS | HEAD | {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"], "block_size": 16
        },
        note="its linear layers have a cache whose rows cannot be exchanged",
    ),
    "minimax_m2": Family("auto", "slots", LOCAL_EXPERTS | HEAD | {"rotary_dim": 8}),
    "minimax_m3_vl_text": Family(
        "single", "unpadded",
        LOCAL_EXPERTS | HEAD | {
            "rotary_dim": 8, "dense_intermediate_size": 96, "shared_intermediate_size": 32,
            "intermediate_size": 32, "index_n_heads": 2, "index_head_dim": 16, "index_block_size": 8,
            "index_topk_blocks": 3, "index_local_blocks": 1,
            "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        },
        note="padding on the left would move the borders of its blocks",
    ),
    "ministral": Family(
        "auto", "padded",
        HEAD | WINDOW | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "ministral3": Family("auto", "slots", HEAD | {"rope_parameters": YARN}),
    "mistral": Family("auto", "slots", HEAD | {"sliding_window": None}),
    "mistral, windows": Family("auto", "padded", HEAD | WINDOW),
    "mixtral": Family("auto", "slots", LOCAL_EXPERTS | {"sliding_window": None}),
    "modernbert-decoder": Family(
        "single", "padded",
        {"local_attention": REACH, "global_attn_every_n_layers": 2, "num_hidden_layers": 4},
    ),
    "mpt": Family("single", "padded"),
    "nanochat": Family("auto", "slots", {"final_logit_softcapping": 3.0}),
    "nemotron": Family("single", "padded", HEAD | {"partial_rotary_factor": 0.5}),
    "nemotron_h": Family(
        "single", "padded",
        HEAD | {
            "layers_block_type": ["mamba", "attention", "mlp", "mamba"], "mamba_num_heads": 8,
            "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1, "chunk_size": 16,
            "use_mamba_kernels": False,
        },
        tolerance=5e-3, note=UNCLAMPED,
    ),
    "olmo": Family("auto", "slots", {"clip_qkv": 8.0}),
    "olmo2": Family("auto", "slots"),
    "olmo3": Family("auto", "padded", WINDOW | {"num_hidden_layers": 4}),
    "olmoe": Family("auto", "slots", {"num_experts": 4, "num_experts_per_tok": 2}),
    "opt": Family("auto", "slots", {"ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.1}),
    "phi": Family("auto", "slots", {"partial_rotary_factor": 0.5}),
    "phi3": Family("auto", "slots", {"sliding_window": None, "partial_rotary_factor": 0.5}),
    "phi3, longrope": Family(
        "single", "uncached",
        {
            "sliding_window": None, "original_max_position_embeddings": REACH, "rope_parameters": LONGROPE
        },
        note="a text longer than `original_max_position_embeddings` (4,096 tokens) turns all positions by "
        "other factors: its first tokens are sampled with the short factors and scored with the long ones",
    ),
    "phimoe": Family(
        "refused", "slots", LOCAL_EXPERTS | {"router_jitter_noise": 0.1},
        note="in training its router draws the experts at random",
    ),
    "qwen2": Family("auto", "slots"),
    "qwen2, windows": Family(
        "auto", "padded", WINDOW | {"use_sliding_window": True, "max_window_layers": 1}
    ),
    "qwen2_moe": Family("auto", "slots", SHARED_EXPERT),
    "qwen3": Family("auto", "slots", {"head_dim": 32}),
    "qwen3_5_moe_text": Family("single", "padded", SHARED_EXPERT | DELTA),
    "qwen3_5_text": Family("single", "padded", DELTA),
    "qwen3_moe": Family("auto", "slots", EXPERTS | {"head_dim": 32}),
    "qwen3_next": Family("single", "padded", SHARED_EXPERT | DELTA),
    "recurrent_gemma": Family(
        "single", "uncached", HEAD | {"attention_window_size": REACH, "lru_width": 64},
        note="it keeps states outside transformers' cache, so its rows cannot be exchanged",
    ),
    "seed_oss": Family("auto", "slots", HEAD | {"attention_bias": True}),
    "smollm3": Family(
        "auto", "slots",
        {"num_hidden_layers": 4, "no_rope_layer_interval": 2, "use_sliding_window": False},
    ),
    "solar_open": Family("auto", "slots", ROUTED | HEAD),
    "stablelm": Family("single", "padded", {"partial_rotary_factor": 0.25, "use_qkv_bias": True}),
    "starcoder2": Family("auto", "slots", {"sliding_window": None, "residual_dropout": 0.1}),
    "vaultgemma": Family("auto", "padded", HEAD | WINDOW | CAPS),
    "xlstm": Family("single", "uncached", {"num_heads": 4, "num_blocks": 2}),
    "youtu": Family("single", "padded", LATENT),
    "zamba2": Family(
        "single", "padded",
        {
            "num_hidden_layers": 4, "hybrid_layer_ids": [1, 3], "n_mamba_heads": 8, "mamba_headdim": 16,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "mamba_d_state": 16,
            "mamba_ngroups": 1, "chunk_size": 16, "num_mem_blocks": 1, "adapter_rank": 8,
            "attention_head_dim": 32, "num_key_value_heads": 4,
        },
        tolerance=5e-3, note=UNCLAMPED,
    ),
    "zaya": Family("single", "padded", EXPERTS | {"num_experts_per_tok": 1, "router_hidden_size": 32}),
}  # fmt: skip


def build(name: str, folder: Path, **options: Any) -> None:
    """Write a random model whose norms and biases are no constants, and whose layers are not near zero."""
    torch.manual_seed(0)
    settings = BASE | dict(FAMILIES[name].options) | options
    settings |= {"text_config": settings["text_config"] | options} if "text_config" in settings else {}
    config = AutoConfig.for_model(name.split(",")[0], **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            flat = parameter.ndim == 1 and not name.endswith(("A_log", ".D", "dt_bias"))
            if flat or (parameter.ndim > 1 and parameter.std() < 0.05):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
