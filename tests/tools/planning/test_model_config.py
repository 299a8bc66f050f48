"""Numbers of parameters, against those that the models' authors and transformers name."""

from __future__ import annotations

from typing import Any

import pytest

from memckpt.errors import ConfigurationError
from memckpt_tools.planning.job import count_parameters

LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
LLAMA_8B = {
    **LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
LLAMA_405B = {
    **LLAMA, "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128,
    "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
QWEN2_7B = {
    **LLAMA, "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
}  # fmt: skip
MIXTRAL = {**LLAMA_8B, "model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8}
GEMMA_7B = {
    "model_type": "gemma", "rms_norm_eps": 1e-6, "hidden_size": 3072, "intermediate_size": 24576, "head_dim": 256,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 256000,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
BERT = {
    "model_type": "bert", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "max_position_embeddings": 512, "type_vocab_size": 2, "vocab_size": 30522,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (LLAMA_8B, 8_030_261_248),
        (LLAMA_405B, 405_853_388_800),
        (QWEN2_7B, 7_615_616_512),
        (MIXTRAL, 46_702_792_704),
        (GEMMA_7B, 8_537_680_896),
        (GPT2, 124_439_808),
        (BERT, 109_482_240),
    ],
    ids=["Llama-3-8B", "Llama-3.1-405B", "Qwen2-7B", "Mixtral-8x7B", "Gemma-7B", "GPT-2", "BERT"],
)
def test_parameters_are_those_of_the_model(config: dict[str, Any], parameters: int) -> None:
    found = count_parameters(config)
    assert found.parameters == parameters
    assert "embeddings of" in found.how


@pytest.mark.parametrize(("hidden", "layers", "billions"), [(1600, 48, 1.6), (2560, 64, 5.3), (5120, 64, 20)])
def test_eccheck_models(hidden: int, layers: int, billions: float) -> None:
    """ECCheck, table I, with 50,257 tokens."""
    config = {**GPT2, "n_embd": hidden, "n_layer": layers, "tie_word_embeddings": False}
    assert count_parameters(config).parameters / 1e9 == pytest.approx(billions, rel=0.04)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({}, "model: expected hidden_size or n_embd or d_model, found none of them; .*--parameters"),
        ({**GPT2, "n_layer": 0}, "model: n_layer: expected a whole number from 1 to 1000000000, found 0"),
        ({**GPT2, "n_embd": "768"}, "model: n_embd: expected .* found '768'"),
        ({**LLAMA_8B, "num_attention_heads": None}, "num_attention_heads .*found none"),
        ({**BERT, "is_encoder_decoder": True}, "found is_encoder_decoder .an encoder and a decoder."),
        ({"text_config": LLAMA_8B}, "found text_config"),
        ({**LLAMA_8B, "kv_lora_rank": 512}, "latent attention"),
    ],
)
def test_what_cannot_be_counted_is_named(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        count_parameters(config)
