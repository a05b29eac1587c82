"""Every setting of a server, with its default and what it means.

Flags, variables, the table in docs/serving.md and the messages of errors are all made from these classes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from inferencex.runtime.server.config.flags import Flag
from inferencex.runtime.server.config.keys_setting import KeySetting
from inferencex.runtime.server.config.sizes import Size

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Protected = Literal["docs", "health", "metrics", "page"]


def _as_list(value: Any) -> Any:
    return (value,) if isinstance(value, str | dict) else value


ListOf = BeforeValidator(_as_list)  # one value stands for a list of it


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


class ModelSettings(_Section):
    """What is served."""

    path: Annotated[tuple[Path, ...], ListOf, Flag("--model-path")] = ()
    """Folder of a bundle to load at the start; several are served side by side, the first is the default."""
    served_model_name: Annotated[tuple[str, ...], ListOf] = ()
    """Name that requests use: with one bundle each is another name of it, with several there is one for each. By
    default the name of the folder."""
    root: Annotated[tuple[Path, ...], ListOf, Flag("--model-root")] = ()
    """Folder of bundles that may be loaded while the server runs; nothing outside of these roots can be."""
    max_model_len: Count | None = None
    """Longest prompt and answer together, in tokens; by default what the model was made for."""
    replicas: Count = 1
    """Copies of each bundle to load, each with an engine and a KV cache of its own."""
    warm_up: bool = True
    """Run a short request through each engine before the server says that it is ready."""


class ServerSettings(_Section):
    """Where it listens, who may ask, and how much."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to listen on; 0.0.0.0 is all of them."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port of HTTP and WebSocket; 0 picks a free one."""
    uds: Path | None = None
    """Listen on this Unix socket in place of host and port."""
    grpc_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port of gRPC; without it there is no gRPC."""
    tls_certificate: Path | None = None
    """Certificate chain in PEM; with tls_key, everything is served over TLS."""
    tls_key: Path | None = None
    """Private key of the certificate in PEM."""
    tls_client_ca: Path | None = None
    """Certificates in PEM that clients' certificates have to be signed with."""
    trusted_proxies: Annotated[tuple[str, ...], ListOf, Flag("--trusted-proxy")] = ()
    """Address or network of a proxy whose X-Forwarded-For and X-Forwarded-Proto are believed; * is any."""
    api_keys: Annotated[tuple[KeySetting, ...], ListOf, Flag("--api-key")] = ()
    """Key that a request needs, plain or hashed, in the file also with a name and limits; without any, none is
    needed."""
    admin_keys: Annotated[tuple[KeySetting, ...], ListOf, Flag("--admin-key")] = ()
    """Key that may load and remove models; without any, nobody may."""
    protect: Annotated[tuple[Protected, ...], ListOf] = ()
    """What needs a key beside the API: docs, health, metrics, page."""
    concurrent_per_key: Count | None = None
    """Most requests at once of a key that has no limit of its own, and of all callers without a key together."""
    requests_per_minute: Count | None = None
    """Most requests a minute, likewise."""
    tokens_per_minute: Count | None = None
    """Most tokens a minute of prompts and answers together, likewise."""
    cors_origins: Annotated[tuple[str, ...], ListOf, Flag("--cors-origin")] = ()
    """Origin such as https://example.org whose pages may call the API from a browser; * is any."""
    filters: Annotated[tuple[str, ...], ListOf, Flag("--filter")] = ()
    """Filter of texts to use: the name of an installed one, or module:object."""
    max_queue: Count = 256
    """Most requests waiting for their first step in each model; more are told to come back later (429)."""
    stream_interval: Count = 1
    """Tokens in a piece of a stream at least, but for the first and the last; more cost less and come less often."""
    max_body_bytes: Size = 8 << 20
    """Largest body of a request."""
    max_json_depth: Count = 64
    """Deepest nesting of a JSON body."""
    max_prompt_tokens: Count | None = None
    """Longest prompt, in tokens; by default what the model takes."""
    max_n: Count = 16
    """Most answers to one prompt (n and best_of)."""
    max_prompts: Count = 256
    """Most prompts of one request, and most answers to all of them together."""
    request_timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 600.0
    """Seconds that a request may take, unless it asks for fewer."""
    body_timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 30.0
    """Seconds that a client may take to send its headers, and again its body."""
    send_timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 30.0
    """Seconds that a client may take to read a piece of its answer; after that it counts as gone."""
    keep_alive_timeout: Annotated[int, Field(ge=1)] = 75
    """Seconds that an idle connection is kept."""
    drain_timeout: Seconds = 30.0
    """Seconds that running requests are given when the server is told to stop."""
    backlog: Count = 2048
    """Connections that the system keeps waiting to be accepted."""
    page: bool = True
    """Serve the chat page at /."""
    docs: bool = True
    """Serve the API's description at /docs and /openapi.json."""
    otlp_endpoint: str | None = None
    """Send traces to this OpenTelemetry collector, such as http://localhost:4318 (extra `tracing`)."""
    access_log: bool = True
    """Log a line for each HTTP request."""
    log_prompts: bool = False
    """Write prompts and answers into the log."""
    log_format: Literal["text", "json"] = "text"
    """How log lines are written."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least important line that is logged."""

    @model_validator(mode="after")
    def _consistent(self) -> ServerSettings:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key go together; give both, or neither")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise ValueError("tls_client_ca needs tls_certificate and tls_key")
        if self.protect and not (self.api_keys or self.admin_keys):
            raise ValueError("protect names what needs a key, and there are no keys; add api_keys")
        return self


class EngineSettings(_Section):
    """How it computes; each model that is loaded starts with these."""

    backend: str = Field(default="auto", min_length=1)
    """What computes: auto, or a backend's name."""
    device: str = Field(default="auto", min_length=1)
    """Where it computes: auto, cpu, cuda, rocm, or a GPU by its number such as cuda:1."""
    max_num_seqs: Count = 64
    """Most sequences in progress at once in each engine."""
    max_num_batched_tokens: Count = 1024
    """Most tokens computed in one step; long prompts are cut into pieces of this size."""
    kv_cache_memory: Size | None = None
    """Memory of each engine's KV cache; by default what max_num_seqs sequences can use, at most 4GiB."""
    num_kv_blocks: Count | None = None
    """Size of the KV cache in blocks, in place of kv_cache_memory."""
    block_size: Count = 16
    """Tokens of a KV block."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Part of a GPU's memory to use, where the size of the KV cache is not given; on a CPU it means nothing."""
    enable_prefix_caching: bool = True
    """Reuse what equal beginnings of prompts have computed."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """Which request goes first: the one that came first, or the one with the lowest priority."""
    tensor_parallel_size: Count = 1
    """Processes that divide each model among them, each on a device of its own or with its share of the threads."""
    threads: Count | None = None
    """Threads of each engine; by default one for each physical core."""
    pin: bool = False
    """Keep each thread on a core of its own."""
    activation_dtype: Literal["auto", "int8", "float32", "bfloat16", "float16"] = "auto"
    """On a CPU, how linears with INT4 and INT8 weights read activations; on a GPU, what activations are."""
    kv_cache_dtype: Literal["auto", "float32", "float16", "bfloat16", "int8", "fp8"] = "auto"
    """How keys and values are kept; auto is what the bundle was calibrated for."""

    @model_validator(mode="after")
    def _consistent(self) -> EngineSettings:
        if self.kv_cache_memory is not None and self.num_kv_blocks is not None:
            raise ValueError("kv_cache_memory and num_kv_blocks both set the size of the KV cache; give one of them")
        return self


class Settings(_Section):
    """All settings of a server, as its three sections."""

    model: ModelSettings = ModelSettings()
    server: ServerSettings = ServerSettings()
    engine: EngineSettings = EngineSettings()

    @model_validator(mode="after")
    def _names_fit(self) -> Settings:
        paths, names = self.model.path, self.model.served_model_name
        if len(paths) > 1 and names and len(names) != len(paths):
            raise ValueError(
                f"model.served_model_name has {len(names)} names for {len(paths)} bundles; give one for each, or none"
            )
        if len(set(names)) != len(names):
            raise ValueError("model.served_model_name has the same name twice")
        return self
