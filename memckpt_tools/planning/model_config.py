"""Number of parameters of a transformer, from the model configuration that Hugging Face keeps as ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from memckpt.errors import ConfigurationError
from memckpt_tools.planning.checks import require_count

#: Names of the same quantity in different families.
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_INNER = ("intermediate_size", "n_inner", "ffn_dim")
_POSITIONS = ("n_positions", "max_position_embeddings")
_EXPERTS = ("num_local_experts", "num_experts")
#: Keys of architectures whose parameters are not counted here.
_OTHERS = {
    "is_encoder_decoder": "an encoder and a decoder",
    "text_config": "several models in one",
    "vision_config": "several models in one",
    "kv_lora_rank": "latent attention",
    "state_size": "a state-space model",
}
_HINT = "give the number of parameters instead (--parameters)"


class ModelSize(NamedTuple):
    """Number of parameters of a model, and how it was counted, in words."""

    parameters: int
    how: str


def count_parameters(config: Mapping[str, Any]) -> ModelSize:
    """Count the parameters of a decoder or an encoder.

    With ``rms_norm_eps`` it is taken for Llama's family: norms without biases, a gated MLP of three matrices, grouped
    attention, biases where ``attention_bias`` says so (and of q, k, v in Qwen2). Without, for that of GPT-2 and BERT:
    biases everywhere, an MLP of two matrices, positions that are learned; in BERT token types and a pooler, too.
    Experts multiply the MLP and add a router. Embeddings count twice unless ``tie_word_embeddings`` (the default).

    Raises:
        ConfigurationError: a size is missing or impossible, or the architecture is another one.
    """
    for key, what in _OTHERS.items():
        if config.get(key):
            raise ConfigurationError(f"model: expected a decoder or an encoder alone, found {key} ({what}); {_HINT}")
    hidden, layers, vocabulary = _size(config, _HIDDEN), _size(config, _LAYERS), _size(config, ("vocab_size",))
    tied = config.get("tie_word_embeddings", True) is not False
    like_llama = "rms_norm_eps" in config
    if like_llama:
        layer, rest = _llama_layer(config, hidden), hidden
        family = "like Llama: RMS norms, gated MLP"
    else:
        layer, rest = _gpt_layer(config, hidden), 2 * hidden
        family = "like GPT-2: layer norms, biases"
        rest += hidden * _size(config, _POSITIONS, 0)
        if types := _size(config, ("type_vocab_size",), 0):
            rest += types * hidden + hidden * hidden + hidden
            family = "like BERT: layer norms, biases, token types, pooler"
    embeddings = (1 if tied else 2) * vocabulary * hidden
    how = (
        f"{family}; {embeddings:,} in {'tied' if tied else 'two'} embeddings of {vocabulary:,} x {hidden:,}, "
        f"{layer:,} in each of {layers} layers, {rest:,} beside them"
    )
    return ModelSize(embeddings + layers * layer + rest, how)


def _llama_layer(config: Mapping[str, Any], hidden: int) -> int:
    heads = _size(config, _HEADS)
    width = _size(config, ("head_dim",), hidden // heads)
    keys = _size(config, ("num_key_value_heads",), heads) * width
    queries = heads * width
    attention = 2 * hidden * queries + 2 * hidden * keys
    if config.get("attention_bias") or config.get("model_type") == "qwen2":
        attention += queries + 2 * keys + (hidden if config.get("attention_bias") else 0)
    experts = _size(config, _EXPERTS, 1)
    inner = _size(config, ("moe_intermediate_size",), 0) or _size(config, _INNER)
    router = hidden * experts if experts > 1 else 0
    return attention + experts * 3 * hidden * inner + router + 2 * hidden


def _gpt_layer(config: Mapping[str, Any], hidden: int) -> int:
    inner = _size(config, _INNER, 4 * hidden)
    attention = 4 * (hidden * hidden + hidden)
    return attention + 2 * hidden * inner + inner + hidden + 4 * hidden


def _size(config: Mapping[str, Any], names: tuple[str, ...], default: int | None = None) -> int:
    """A size under one of its names."""
    for name in names:
        if config.get(name) is not None:
            value: int = config[name]
            require_count(f"model: {name}", value, 1 if default is None else 0, 10**9)
            return value
    if default is None:
        raise ConfigurationError(f"model: expected {' or '.join(names)}, found none of them; {_HINT}")
    return default
