"""The job that is planned: model, cluster, failures, rates; and the parameters of a published model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from msgspec import Meta

from memckpt.config.checks import Checked, Count, Positive, Share, require
from memckpt.errors import ConfigurationError

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
    """Count the parameters of a decoder or an encoder. Raises ConfigurationError, also for another architecture.

    ``rms_norm_eps`` stands for Llama's family: norms without biases, a gated MLP of three matrices, grouped attention,
    biases by ``attention_bias`` (and of q, k, v in Qwen2). Else it is that of GPT-2 and BERT: biases everywhere, an MLP
    of two matrices, learned positions; in BERT token types and a pooler, too. Experts multiply the MLP and add a
    router. Embeddings count twice unless ``tie_word_embeddings`` (the default).
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
            value, least = config[name], 1 if default is None else 0
            fits = type(value) is int and least <= value <= 10**9
            require(fits, f"model: {name}", f"a whole number from {least} to {10**9}", value)
            return int(value)
    if default is None:
        raise ConfigurationError(f"model: expected {' or '.join(names)}, found none of them; {_HINT}")
    return default


#: A step of more seconds is more likely a time in milliseconds.
LONGEST_STEP_SECONDS = 300.0

_Rate = Annotated[float, Meta(ge=1e3, le=1e15)]
_BytesEach = Annotated[float, Meta(gt=0, le=256)]
_ZeroToOne = Annotated[float, Meta(ge=0, le=1)]
#: Up to a hundred years.
_Seconds = Annotated[float, Meta(ge=0, le=3.2e9)]


@dataclass(frozen=True, kw_only=True)
class Job(Checked):
    """Description of a training. Raises ConfigurationError."""

    parameters: Annotated[float, Meta(ge=1, le=1e15)]
    nodes: Annotated[int, Meta(ge=1, le=1_000_000)]
    step_seconds: Positive  #: without protection
    mtbf_seconds: Annotated[float, Meta(ge=1, le=3.2e9)]  #: mean time between two failures of the job, of any kind
    gpus_per_node: Annotated[int, Meta(ge=0, le=1024)] = 8  #: 0: it trains on CPUs
    replicas: Count = 1  #: nodes that hold the same parameters: 1 where all hold other shards (FSDP), all of them (DDP)
    gradient_bytes: _BytesEach = 4.0  #: of each parameter
    state_bytes: _BytesEach = 12.0  #: of a parameter and its optimizer state
    software_share: _ZeroToOne = 0.5  #: of failures that end processes only, so that the memory of nodes stays
    cluster_share: _ZeroToOne = 0.0  #: of failures that take all nodes
    domains: Annotated[int, Meta(ge=0)] = 0  #: failure domains (racks) over which nodes are spread; 0: each node is one
    domain_share: _ZeroToOne = 0.0  #: of failures that take a whole domain
    network_bytes_per_second: _Rate = 1e9  #: of a node: what the replicator and the network carry, whichever is less
    network_idle_share: Share = 0.5  #: share of a step in which peers may send without making training wait
    disk_bytes_per_second: _Rate = 2e9  #: of all nodes together
    copy_bytes_per_second: _Rate = 20e9  #: into a node's host memory, from all its accelerators
    copy_overlap: _ZeroToOne = 0.9  #: share of that copying for which training does not wait
    encode_bytes_per_second: _Rate = 2e9
    redo_parameters_per_second: _Rate = 2e10  #: that a node advances by one record at a restore
    agent_redo_parameters_per_second: _Rate = 1e8  #: the same of the agent's CPU threads (eager redo)
    restart_seconds: _Seconds = 120.0  #: from a failure until processes have started and are ready to restore
    replacement_seconds: _Seconds = 300.0  #: more, until a lost node has been replaced
    run_seconds: _Seconds = 30 * 86400.0  #: length of the job, without failures
    overhead_budget: Share = 0.03
    memory_budget_bytes: Annotated[float, Meta(ge=1, le=1e16)] | None = None  #: of a node; None: no limit
    loss_budget: Share = 0.001  #: probability a month with which more may be lost than memory holds

    def __post_init__(self) -> None:
        super().__post_init__()
        longest = f"at most {LONGEST_STEP_SECONDS:g} s (a time in ms divided by 1000)"
        require(self.step_seconds <= LONGEST_STEP_SECONDS, "step_seconds", longest, self.step_seconds)
        require(self.nodes % self.replicas == 0, "replicas", f"a divisor of nodes={self.nodes}", self.replicas)
        shares = self.software_share + self.cluster_share + self.domain_share
        require(shares <= 1 + 1e-9, "software_share + cluster_share + domain_share", "0 to 1 in sum", shares)
        require(self.domains <= self.nodes, "domains", f"0 to {self.nodes} (nodes)", self.domains)
        require(self.run_seconds >= self.step_seconds, "run_seconds", "a step or more", self.run_seconds)

    @property
    def node_parameters(self) -> float:
        """Parameters that one node holds, each once."""
        return self.parameters * self.replicas / self.nodes

    @property
    def state_total_bytes(self) -> float:
        """Bytes of the whole state, each shard once: what a checkpoint takes."""
        return self.parameters * self.state_bytes

    @property
    def failures(self) -> Failures:
        """The rates of its failures."""
        per_second = 1 / self.mtbf_seconds
        domain = self.domain_share if self.domains else 0.0
        single = 1 - self.software_share - self.cluster_share - domain
        return Failures(
            process=self.software_share * per_second,
            node=max(0.0, single) * per_second,
            domain=domain * per_second,
            cluster=self.cluster_share * per_second,
        )


@dataclass(frozen=True, kw_only=True)
class Failures:
    """Failures of a whole job per second: of processes only, of single nodes, of whole domains, of all nodes."""

    process: float = 0.0
    node: float = 0.0
    domain: float = 0.0
    cluster: float = 0.0

    @property
    def total(self) -> float:
        return self.process + self.node + self.domain + self.cluster
