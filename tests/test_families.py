"""Small random models of many families are scored like transformers' eager forward, or refused.

The first families differ in kind and run in every test; the others are further cases.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import full
from tiny import StrictEntry
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rlt_lightning.models.packed import compute_log_probs, disable_dropout, verify_layout
from rlt_lightning.modules.phases import count_flops
from rlt_lightning.numerics import PackedSequences, ScoredSequence
from rlt_lightning.pretrained import load_model
from rlt_lightning.types import InputError

REACH = 24  # tokens that a layer sees at a time, where a family has such a length: the texts are longer
BASE: dict[str, Any] = {
    "vocab_size": 500, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    "initializer_range": 0.15, "bos_token_id": 3, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
DEEPSEEK = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "num_key_value_heads": 4, "kv_lora_rank": 16,
    "q_lora_rank": 24, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 24, "head_dim": 16,
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_expand": 2,
    "mamba_chunk_size": 16,
}  # fmt: skip
WINDOW = {"sliding_window": REACH}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
SPARSE = {
    "head_dim": 16, "rotary_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
    "dense_intermediate_size": 96, "shared_intermediate_size": 32, "intermediate_size": 32,
    "index_n_heads": 2, "index_head_dim": 16,
    "index_block_size": 8, "index_topk_blocks": 3, "index_local_blocks": 1,
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
}  # fmt: skip
# Model type, what differs from BASE, and the layout in which it must run.
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "an indexer's keys": (
        "deepseek_v32",
        DEEPSEEK | {"index_topk": REACH, "index_n_heads": 4, "index_head_dim": 32},
        "single",
    ),
    "an indexer's blocks": ("minimax_m3_vl_text", SPARSE, "single"),
    "values narrower than keys": ("deepseek_v3", DEEPSEEK, "packed"),
    "functional dropout": ("seed_oss", {"head_dim": 16, "attention_bias": True}, "auto"),
    "a multiplier of the head": (
        "falcon_h1",
        MAMBA | {"mamba_d_ssm": 128, "lm_head_multiplier": 0.5},
        "single",
    ),
    "sliding windows": (
        "gemma3_text",
        {"head_dim": 16, "sliding_window": REACH, "query_pre_attn_scalar": 24},
        "packed",
    ),
    "layers with other heads": (
        "gemma4_text",
        {
            "head_dim": 16, "global_head_dim": 32, "sliding_window": REACH, "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"], "vocab_size_per_layer_input": 500,
            "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 0,
        },
        "packed",
    ),
    "a fixed factor called dynamic": (
        "hunyuan_v1_dense",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1,
                "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            },
        },
        "auto",
    ),
}  # fmt: skip
FURTHER: dict[str, tuple[str, dict[str, Any], str]] = {
    "qwen2": ("qwen2", WINDOW | {"use_sliding_window": True, "max_window_layers": 1}, "packed"),
    "starcoder2": ("starcoder2", {"sliding_window": None, "residual_dropout": 0.1}, "auto"),
    "opt": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.1}, "auto"),
    "doge": ("doge", {"keep_window_size": REACH}, "single"),
    "cohere2": ("cohere2", {"logit_scale": 0.25, "sliding_window": REACH, "head_dim": 16}, "packed"),
    "granite": ("granite", {"embedding_multiplier": 4.0, "logits_scaling": 2.0}, "auto"),
    "gpt_oss": ("gpt_oss", EXPERTS | {"head_dim": 16, "sliding_window": REACH}, "single"),
    "mixtral": ("mixtral", EXPERTS | {"sliding_window": None}, "auto"),
    "llama4": (
        "llama4_text",
        {
            "head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 4, "num_experts_per_tok": 1,
            "attention_chunk_size": REACH, "interleave_moe_layer_step": 2, "num_hidden_layers": 4,
        },
        "packed",
    ),
}  # fmt: skip


@pytest.mark.full
def test_noise_in_training_is_named(tmp_path: Any) -> None:
    # In training its router draws which experts a token goes through.
    build("phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.1}, tmp_path)
    model = load_model(str(tmp_path)).train()
    disable_dropout(model)
    with pytest.raises(InputError, match="it draws random numbers in training"):
        verify_layout(StrictEntry(model), "phimoe", "auto")


def build(kind: str, options: dict[str, Any], folder: Any) -> None:
    """Write a random model whose norms and biases are no constants."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **BASE | options), dtype=torch.float32
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and not name.endswith(("A_log", ".D", "dt_bias")):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)


def log_probs_by_eager(model: Any, token_ids: list[int], start: int) -> Tensor:
    ids = torch.tensor([token_ids])
    logits = model(input_ids=ids, use_cache=False).logits[0, start - 1 : -1].log_softmax(-1)
    return logits.gather(1, ids[0, start:, None]).squeeze(1)


@pytest.mark.parametrize("family", [*FAMILIES, *map(full, FURTHER)])
@pytest.mark.filterwarnings("ignore::UserWarning")
@torch.no_grad()
def test_a_family_is_scored_as_its_eager_forward(family: str, tmp_path: Any) -> None:
    kind, options, layout = (FAMILIES | FURTHER)[family]
    build(kind, options, tmp_path)
    model = load_model(str(tmp_path)).train()  # as in a run: what is random in training must be off
    disable_dropout(model)
    assert verify_layout(StrictEntry(model), family, "auto") == layout
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(3)
    prefix, *rests = (torch.randint(4, 500, (n,), generator=generator).tolist() for n in (40, 90, 20, 33))
    sequences = [ScoredSequence(prefix, rest, [False] * 40 + [True] * len(rest)) for rest in rests]
    together = ((0, 1, 2),) if layout == "auto" else ((0,), (1,), (2,))
    rows = [((i,),) for i in range(3)] if layout == "single" else [together]
    packed = [PackedSequences.from_sequences(sequences, row, torch.device("cpu")) for row in rows]
    found = torch.cat([compute_log_probs(model, row)[0] for row in packed])
    wanted = torch.cat([log_probs_by_eager(plain, prefix + rest, 40) for rest in rests])
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=0)
    assert count_flops(model, 10, 10, 10) > 0
