"""The options of `inferencex bench serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

_SERVER, _LOAD, _PROMPTS, _RESULTS = "Server", "Load", "Prompts and answers", "Results"


def _option(panel: str, *names: str, help: str, metavar: str | None = None, **more: Any) -> Any:
    return typer.Option(*names, help=help, metavar=metavar, rich_help_panel=panel, **more)


Url = Annotated[str, _option(_SERVER, "--url", help="Address of a server with OpenAI's API.", metavar="URL")]
ModelName = Annotated[str | None, _option(_SERVER, "--model", help="Its name at the server. Default: the only one.")]
ApiKey = Annotated[
    str | None,
    _option(_SERVER, "--api-key", help="Key to send along.", envvar="INFERENCEX_API_KEY", show_envvar=True),
]
EndpointName = Annotated[
    Literal["completions", "chat"], _option(_SERVER, "--endpoint", help="Which of the API's two ways to ask.")
]
Stream = Annotated[
    bool, _option(_SERVER, "--stream/--no-stream", help="Ask for tokens one by one, which shows when each came.")
]
Extra = Annotated[
    str | None,
    _option(_SERVER, "--extra", metavar="JSON", help="Further fields of each request, such as '{\"top_k\": 40}'."),
]
Timeout = Annotated[float, _option(_SERVER, "--timeout", help="Seconds after which an answer counts as failed.")]

Rate = Annotated[
    str,
    _option(
        _LOAD,
        "--rate",
        metavar="R",
        help="Requests a second, at random times (a Poisson process); several, as in 1,2,4: a sweep. inf: as many as "
        "--concurrency allows.",
    ),
]
FixedRate = Annotated[bool, _option(_LOAD, "--fixed-rate", help="Equal times between requests instead of random ones.")]
Concurrency = Annotated[
    str | None,
    _option(
        _LOAD,
        "--concurrency",
        metavar="N",
        help="Requests at a time; several, as in 1,8,32: a sweep. Default: 1, and with a --rate any number.",
    ),
]
Requests = Annotated[
    int | None, _option(_LOAD, "--requests", help="Requests of each measurement. Default: 100, or those of a file.")
]
Duration = Annotated[
    float | None, _option(_LOAD, "--duration", help="Send for this many seconds instead of a number of requests.")
]
WarmUp = Annotated[int, _option(_LOAD, "--warm-up", help="Requests before each measurement that do not count.")]
Seed = Annotated[
    int | None,
    _option(_LOAD, "--seed", help="Makes prompts, lengths and times repeatable. Default: a new one each time."),
]

PromptLength = Annotated[
    str,
    _option(
        _PROMPTS,
        "--prompt-length",
        metavar="TOKENS",
        help="128, uniform:64:256, normal:128:32 or lognormal:128:0.5.",
    ),
]
OutputLength = Annotated[
    str, _option(_PROMPTS, "--output-length", metavar="TOKENS", help="Most tokens of an answer, in the same forms.")
]
SharedPrefix = Annotated[
    int, _option(_PROMPTS, "--shared-prefix", help="Tokens in front of every prompt that are the same for all.")
]
Prompts = Annotated[
    Path | None,
    _option(
        _PROMPTS,
        "--prompts",
        metavar="FILE",
        help="JSON Lines or a JSON list with prompts, messages or ShareGPT's conversations; or a text to cut up.",
    ),
]
Text = Annotated[bool, _option(_PROMPTS, "--text", help="Send prompts as text, to a server that takes no token ids.")]
TokenizerPath = Annotated[
    Path | None,
    _option(_PROMPTS, "--tokenizer", metavar="PATH", help="The model's tokenizer.json. Default: ask the server."),
]
IgnoreEos = Annotated[bool, _option(_PROMPTS, "--ignore-eos/--respect-eos", help="Ask for answers of the full length.")]
Temperature = Annotated[float, _option(_PROMPTS, "--temperature", help="0 always takes the likeliest token.")]

Objectives = Annotated[
    str | None,
    _option(
        _RESULTS,
        "--slo",
        metavar="LIMITS",
        help="What a request must keep to, to count as goodput: ttft:500ms,itl:50ms; also tpot and e2e.",
    ),
]
Output = Annotated[
    Path | None, _option(_RESULTS, "--output", metavar="FILE", help="Write everything measured to results.json, say.")
]
Plot = Annotated[
    Path | None, _option(_RESULTS, "--plot", metavar="FILE", help="Write latency against throughput to plot.svg, say.")
]
