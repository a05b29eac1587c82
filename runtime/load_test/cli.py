"""`inferencex bench serve`: measure a running server."""

from __future__ import annotations

import asyncio

import typer

from inferencex.cli.console import DebugOption
from inferencex.runtime.load_test import options

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", help="Measure how fast things are.")


@app.callback()
def _group() -> None:
    """Measure how fast things are."""


@app.command()
def serve(
    url: options.Url,
    model: options.ModelName = None,
    api_key: options.ApiKey = None,
    endpoint: options.EndpointName = "completions",
    stream: options.Stream = True,
    extra: options.Extra = None,
    timeout: options.Timeout = 600.0,
    rate: options.Rate = "inf",
    fixed_rate: options.FixedRate = False,
    concurrency: options.Concurrency = None,
    requests: options.Requests = None,
    duration: options.Duration = None,
    warm_up: options.WarmUp = 1,
    seed: options.Seed = None,
    prompt_length: options.PromptLength = "128",
    output_length: options.OutputLength = "128",
    shared_prefix: options.SharedPrefix = 0,
    prompts: options.Prompts = None,
    text: options.Text = False,
    tokenizer: options.TokenizerPath = None,
    ignore_eos: options.IgnoreEos = False,
    temperature: options.Temperature = 0.0,
    slo: options.Objectives = None,
    output: options.Output = None,
    plot: options.Plot = None,
    debug: DebugOption = False,
) -> None:
    """Put load on a running server, print latencies and throughput, and draw one against the other.

    Prompts are of random tokens, each its own, so that a prefix cache does not flatter; their lengths are exact.
    Any server with OpenAI's API will do. Exit status 1: not a single request completed.
    """
    from inferencex.runtime.load_test.plan import make_plan
    from inferencex.runtime.load_test.session import measure

    plan = make_plan(
        url=url,
        model=model,
        api_key=api_key,
        endpoint=endpoint,
        stream=stream,
        extra=extra,
        timeout=timeout,
        rate=rate,
        fixed_rate=fixed_rate,
        concurrency=concurrency,
        requests=requests,
        duration=duration,
        warm_up=warm_up,
        seed=seed,
        prompt_length=prompt_length,
        output_length=output_length,
        shared_prefix=shared_prefix,
        prompts=prompts,
        text=text,
        tokenizer=tokenizer,
        ignore_eos=ignore_eos,
        temperature=temperature,
        slo=slo,
        output=output,
        plot=plot,
    )
    if not asyncio.run(measure(plan)):
        raise typer.Exit(1)
